//! A registered voice, from a file to speech, through a restart of the gateway.

use laneway_integration_tests::SAMPLES_PER_FRAME;
use laneway_integration_tests::client::{self, request};
use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::process::Process;
use laneway_integration_tests::system::{Extra, System};
use laneway_proto::v1;
use laneway_proto::v1::speech_client::SpeechClient;
use tonic_health::pb::health_check_response::ServingStatus;

const TEXT: &str = "The ferry leaves the harbor at six.";

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

    let tone = (0..48_000).map(|index| 0.3 * (index as f32 * 0.06).sin());
    let clip = v1::ReferenceClip {
        audio: tone.flat_map(f32::to_le_bytes).collect(),
        sample_rate: 24_000,
        text: String::new(),
    };
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
    let registration = v1::RegisterVoiceRequest {
        name: "ada".into(),
        clip: Some(clip),
        consent: "it is a tone, and nobody's".into(),
        model: String::new(),
    };
    speech.register_voice(registration).await?;
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
