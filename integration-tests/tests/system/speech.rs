//! Real text in, real speech out.

use std::io::Read as _;
use std::process::{Command, Stdio};

use laneway_integration_tests::SAMPLES_PER_FRAME;
use laneway_integration_tests::client::{Spoken, request};
use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::process::binary;
use laneway_integration_tests::system::System;
use laneway_proto::v1;

const TEXT: &str = "The ferry leaves the harbor at six.";

#[tokio::test]
async fn text_becomes_speech_through_three_processes() -> anyhow::Result<()> {
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let spoken = system.speaker()?.speak(request(TEXT, 7)).await?;
    let Spoken { audio, finished } = &spoken;
    assert_eq!(finished.reason(), v1::FinishReason::Stop, "{finished:?}");
    let n_samples = audio.len() / 4;
    assert_eq!(n_samples, finished.frames as usize * SAMPLES_PER_FRAME);
    assert_eq!(n_samples as u64, finished.samples);
    // A sentence of 35 characters is about two and a half seconds of speech, and speech is not silence.
    assert!((1.0..6.0).contains(&finished.seconds), "{finished:?}");
    let samples = laneway_proto::samples_from_bytes(audio)?;
    let rms = (samples
        .iter()
        .map(|sample| f64::from(*sample).powi(2))
        .sum::<f64>()
        / n_samples as f64)
        .sqrt();
    assert!((0.005..0.5).contains(&rms), "rms {rms}");
    system.idle().await
}

/// A deployment of a cloning model comes up, which takes a warm-up of its own, and speaks with a given voice.
#[tokio::test]
async fn a_cloning_model_starts_and_clones() -> anyhow::Result<()> {
    let system = System::serving(&Deployment::new(Placement::Cloning)).await?;
    let tone = (0..48_000).map(|index| 0.3 * (index as f32 * 0.06).sin());
    let reference = v1::ReferenceClip {
        audio: tone.flat_map(f32::to_le_bytes).collect(),
        sample_rate: 24_000,
        text: String::new(),
    };
    let clone = v1::SynthesizeRequest {
        voice: String::new(),
        reference: Some(reference),
        max_frames: Some(6),
        ..request(TEXT, 7)
    };
    let spoken = system.speaker()?.speak(clone).await?;
    let n_frames = spoken.finished.frames as usize;
    assert!((1..=6).contains(&n_frames), "{:?}", spoken.finished);
    assert_eq!(spoken.audio.len() / 4, n_frames * SAMPLES_PER_FRAME);
    system.idle().await
}

/// `laneway say … | head`: neither a panic nor a message, and the exit code that a shell shows for other tools.
#[tokio::test]
async fn a_command_whose_reader_leaves_ends_quietly() -> anyhow::Result<()> {
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let gateway = system.gateway.address()?.to_string();
    let directory = tempfile::tempdir()?;
    let wav = directory.path().join("hello.wav");
    let wav = wav.to_str().expect("temporary directories have plain names");
    let printed = ["say", "Hello.", "-o", wav, "--gateway", &gateway];
    let streamed = [
        "say",
        "Hello.",
        "--stream",
        "-o",
        "/dev/stdout",
        "--gateway",
        &gateway,
    ];
    let voices = ["voices", "--gateway", &gateway];
    for (arguments, n_read) in [(&printed[..], 0), (&streamed, 44), (&voices, 0)] {
        let mut command = Command::new(binary("laneway")?);
        command
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let ended = tokio::task::spawn_blocking(move || {
            let mut child = command.spawn()?;
            let mut reader = child.stdout.take().expect("it is piped");
            reader.read_exact(&mut vec![0; n_read])?;
            drop(reader);
            child.wait_with_output()
        });
        let output = ended.await??;
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(141), ""), "{arguments:?}");
    }
    Ok(())
}

/// The same seed gives the same bytes wherever the codec runs, alone and in company, whatever the windows.
#[tokio::test]
async fn the_same_seed_gives_the_same_bytes_wherever_the_codec_runs() -> anyhow::Result<()> {
    let mut all: Vec<(String, Spoken)> = Vec::new();
    for placement in [
        Placement::Chain,
        Placement::Lane,
        Placement::Auto,
        Placement::Split,
    ] {
        let system = System::serving(&Deployment::new(placement)).await?;
        let speaker = system.speaker()?;
        all.push((
            format!("{placement:?} alone"),
            speaker.speak(request(TEXT, 7)).await?,
        ));
        let company = ["Good morning.", "She kept the old map folded.", "It is late."];
        let others = company.iter().enumerate().map(|(seed, text)| {
            let (speaker, request) = (speaker.clone(), request(text, seed as u64));
            tokio::spawn(async move { speaker.speak(request).await })
        });
        let others: Vec<_> = others.collect();
        let mut windows = request(TEXT, 7);
        windows.chunk = Some(v1::ChunkPolicy {
            first: 2,
            ramp: vec![3],
            steady: 5,
        });
        all.push((
            format!("{placement:?} in company, other windows"),
            speaker.speak(windows).await?,
        ));
        for other in others {
            other.await??;
        }
        system.idle().await?;
    }
    let (first, wanted) = &all[0];
    for (name, spoken) in &all {
        assert_eq!(
            spoken.finished.frames, wanted.finished.frames,
            "{name} against {first}"
        );
        assert!(
            spoken.audio == wanted.audio,
            "the audio of {name} differs from {first}"
        );
    }
    Ok(())
}
