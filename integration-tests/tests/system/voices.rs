//! A registered voice, from a file to speech, through a restart of the gateway.

use laneway_integration_tests::SAMPLES_PER_FRAME;
use laneway_integration_tests::client::{self, Speaker, request};
use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::process::{Process, binary};
use laneway_integration_tests::system::{Extra, System};
use laneway_proto::v1;
use laneway_proto::v1::speech_client::SpeechClient;
use tonic_health::pb::health_check_response::ServingStatus;

const TEXT: &str = "The ferry leaves the harbor at six.";

fn clip() -> v1::ReferenceClip {
    let tone = (0..48_000).map(|index| 0.3 * (index as f32 * 0.06).sin());
    v1::ReferenceClip {
        audio: tone.flat_map(f32::to_le_bytes).collect(),
        sample_rate: 24_000,
        text: String::new(),
    }
}

fn registration(clip: v1::ReferenceClip) -> v1::RegisterVoiceRequest {
    v1::RegisterVoiceRequest {
        name: "ada".into(),
        clip: Some(clip),
        consent: "it is a tone, and nobody's".into(),
        model: String::new(),
    }
}

#[tokio::test]
async fn a_registered_voice_speaks_as_its_clip_does_also_after_a_restart() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory
        .path()
        .to_str()
        .expect("temporary directories have plain names");
    let keeps = ["--voices-dir", path];
    let extra = Extra {
        gateway: &keeps,
        ..Extra::default()
    };
    let mut system = System::serving_with(&Deployment::new(Placement::Cloning), extra).await?;

    let clip = clip();
    let by_clip = v1::SynthesizeRequest {
        voice: String::new(),
        reference: Some(clip.clone()),
        max_frames: Some(6),
        ..request(TEXT, 7)
    };
    let by_name = v1::SynthesizeRequest {
        voice: "ada".into(),
        reference: None,
        ..by_clip.clone()
    };
    let wanted = system.speaker()?.speak(by_clip).await?;
    assert_eq!(
        wanted.audio.len() / 4,
        wanted.finished.frames as usize * SAMPLES_PER_FRAME
    );
    let mut speech = SpeechClient::new(client::channel(system.gateway.address()?));
    speech.register_voice(registration(clip)).await?;
    let spoken = system.speaker()?.speak(by_name.clone()).await?;
    assert!(
        spoken.audio == wanted.audio,
        "the voice is not what its clip gives"
    );

    system.gateway.signal("TERM")?;
    assert!(system.gateway.ended().await?.success());
    let manager = format!("http://{}", system.manager.address()?);
    let arguments = ["--listen", "127.0.0.1:0", "--engine-manager", &manager];
    system.gateway = Process::start("laneway-gateway", &[&arguments[..], &keeps].concat())?;
    client::until(system.gateway.address()?, ServingStatus::Serving).await?;
    let spoken = system.speaker()?.speak(by_name).await?;
    assert!(spoken.audio == wanted.audio, "the voice changed over a restart");
    system.idle().await
}

#[tokio::test]
async fn one_process_keeps_voices_too() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory
        .path()
        .to_str()
        .expect("temporary directories have plain names");
    let config = Deployment::new(Placement::Cloning).write()?;
    let arguments = ["up", "--config", config.path(), "--listen", "127.0.0.1:0"];
    let arguments = [&arguments[..], &["--log", "info", "--voices-dir", path]].concat();
    let up = Process::start("laneway", &arguments)?;
    let gateway = up.wait_for_line("the gateway's address", |line| {
        let (_, after) = line.split_once("\"gateway\":\"")?;
        after.split_once('"')?.0.parse().ok()
    })?;
    client::until(gateway, ServingStatus::Serving).await?;
    let mut speech = SpeechClient::new(client::channel(gateway));
    speech.register_voice(registration(clip())).await?;
    let by_name = v1::SynthesizeRequest {
        voice: "ada".into(),
        max_frames: Some(4),
        ..request(TEXT, 7)
    };
    let spoken = Speaker::new(gateway).speak(by_name).await?;
    assert_eq!(spoken.finished.frames, 4);

    // A role that serves other roles keeps none, and says so.
    let worker = [
        "up",
        "--config",
        config.path(),
        "--role",
        "worker",
        "--voices-dir",
        path,
    ];
    let output = std::process::Command::new(binary("laneway")?)
        .args(worker)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--voices-dir is of the gateway"), "{said}");
    Ok(())
}
