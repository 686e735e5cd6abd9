//! Real text in, real speech out.

use laneway_integration_tests::SAMPLES_PER_FRAME;
use laneway_integration_tests::client::{Spoken, request};
use laneway_integration_tests::deployment::{Deployment, Placement};
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

/// The same seed gives the same bytes wherever the codec runs, alone and in company, whatever the windows.
#[tokio::test]
async fn the_same_seed_gives_the_same_bytes_on_chain_lane_and_split() -> anyhow::Result<()> {
    let mut all: Vec<(String, Spoken)> = Vec::new();
    for placement in [Placement::Chain, Placement::Lane, Placement::Split] {
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
