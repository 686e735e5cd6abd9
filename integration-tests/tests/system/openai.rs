//! The official client of OpenAI's API against the real binaries.

use std::path::Path;

use anyhow::Context as _;
use laneway_integration_tests::client::request;
use laneway_integration_tests::deployment::{Deployment, Placement, checkout};
use laneway_integration_tests::system::System;
use laneway_integration_tests::tools::python_with;
use laneway_proto::v1;
use serde_json::Value;

const TEXT: &str = "The ferry leaves the harbor at six.";

/// Run the script against this gateway, with `directory` for its audio.
async fn run(python: &Path, url: &str, directory: &Path) -> anyhow::Result<Value> {
    let script = checkout().join("integration-tests/clients/openai_speech.py");
    let output = tokio::process::Command::new(python)
        .arg(script)
        .arg(url)
        .arg(directory)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(4 * laneway_integration_tests::PATIENCE, output)
        .await
        .context("the client takes too long")??;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "the client failed: {said}");
    serde_json::from_slice(&output.stdout).context("read what the client says")
}

#[tokio::test]
async fn the_official_client_speaks_streams_and_understands_refusals() -> anyhow::Result<()> {
    let Some(python) = python_with("openai") else {
        return Ok(());
    };
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let directory = tempfile::tempdir()?;
    let url = format!("http://{}", system.gateway.address()?);
    let said = run(&python, &url, directory.path()).await?;
    let file = |name: &str| std::fs::read(directory.path().join(name)).context(name.to_string());

    // The same seed gives the same bytes over gRPC, in one piece, streamed, and as events.
    let over_grpc = v1::SynthesizeRequest {
        format: v1::AudioFormat::PcmF32le.into(),
        ..request(TEXT, 7)
    };
    let spoken = system.speaker()?.speak(over_grpc).await?;
    let samples = laneway_proto::samples_from_bytes(&spoken.audio)?;
    let want: Vec<u8> = samples
        .iter()
        .flat_map(|sample| ((sample.clamp(-1.0, 1.0) * 32767.0).round() as i16).to_le_bytes())
        .collect();
    for name in ["whole.pcm", "streamed.pcm", "events.pcm"] {
        assert!(file(name)? == want, "{name} is not what gRPC gives");
    }
    let wav = file("whole.wav")?;
    assert_eq!(wav[..8], *b"RIFF\xff\xff\xff\xff");
    assert_eq!(wav[24..28], 24_000u32.to_le_bytes());
    assert_eq!(wav[36..44], *b"data\xff\xff\xff\xff");
    assert!(wav[44..] == want[..], "the wav holds other samples");
    assert!(file("whole.flac")?.starts_with(b"fLaC"));
    assert!(file("whole.opus")?.starts_with(b"OggS"));
    assert!(file("whole.mp3")?.starts_with(b"\xff"));
    let n_fast = file("fast.pcm")?.len() / 2;
    assert_eq!(n_fast, samples.len().div_ceil(2), "twice as fast");

    let arrivals: Vec<f64> = serde_json::from_value(said["arrivals"].clone())?;
    assert!(arrivals.len() > 2, "it came in one piece: {arrivals:?}");
    assert!(arrivals[0] < arrivals[arrivals.len() - 1] / 2.0, "{arrivals:?}");
    assert!(said["n_deltas"].as_u64() > Some(2));
    let frames = u64::from(spoken.finished.frames);
    assert_eq!(said["done"]["type"], "speech.audio.done");
    assert_eq!(said["done"]["usage"]["output_tokens"], frames);
    assert_eq!(said["done"]["finish_reason"], "stop");
    for (field, code, words) in [
        ("voice", "unknown_voice", "there are: nano"),
        ("model", "unknown_model", "there are:"),
        ("input", "invalid_text", "no letter"),
        (
            "response_format",
            "unsupported_format",
            "mp3, opus, flac, wav, pcm",
        ),
        ("instructions", "unsupported_field", "does not take it"),
        ("speed", "invalid_argument", "[0.25, 4]"),
    ] {
        let refused = &said["refused"][field];
        assert_eq!(refused[0], code);
        assert_eq!(refused[1], "invalid_request_error");
        assert!(
            refused[2].as_str().is_some_and(|message| message.contains(words)),
            "{refused}"
        );
    }
    system.idle().await
}
