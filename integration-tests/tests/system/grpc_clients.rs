//! NVIDIA's Riva client, and gRPC's clients for health and reflection, against the real binaries.

use anyhow::Context as _;
use laneway_integration_tests::client::request;
use laneway_integration_tests::deployment::{Deployment, Placement, checkout};
use laneway_integration_tests::system::System;
use laneway_integration_tests::tools::python_with;
use laneway_proto::v1;
use serde_json::Value;

const TEXT: &str = "The ferry leaves the harbor at six.";

#[tokio::test]
async fn clients_that_people_have_work_unchanged() -> anyhow::Result<()> {
    let modules = [
        "riva.client",
        "grpc_health.v1.health_pb2",
        "grpc_reflection.v1alpha.reflection_pb2",
    ];
    let pythons: Option<Vec<_>> = modules.into_iter().map(python_with).collect();
    let Some(python) = pythons.and_then(|mut pythons| pythons.pop()) else {
        return Ok(());
    };
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let directory = tempfile::tempdir()?;
    let output = tokio::process::Command::new(python)
        .arg(checkout().join("integration-tests/clients/grpc_clients.py"))
        .arg(system.gateway.address()?.to_string())
        .arg(directory.path())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(4 * laneway_integration_tests::PATIENCE, output)
        .await
        .context("the clients take too long")??;
    let words = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "the clients failed: {words}");
    let said: Value = serde_json::from_slice(&output.stdout).context("read what the clients say")?;
    let file = |name: &str| std::fs::read(directory.path().join(name)).context(name.to_string());

    // The same seed gives the same bytes as in laneway.v1, in one piece and streamed.
    let spoken = async |text: &str, seed: u64| {
        let asked = v1::SynthesizeRequest {
            format: v1::AudioFormat::PcmS16le.into(),
            language: "english".into(),
            ..request(text, seed)
        };
        anyhow::Ok(raw(&system, asked).await?)
    };
    let want = spoken(TEXT, 7).await?;
    assert!(
        file("whole.pcm")? == want,
        "a whole answer is not what gRPC gives"
    );
    assert!(
        file("online.pcm")? == want,
        "a streamed answer is not what gRPC gives"
    );
    let both = [want.clone(), spoken("It is late.", 8).await?].concat();
    assert!(
        file("texts.pcm")? == both,
        "two texts are not what gRPC gives one by one"
    );
    let n_samples = want.len() / 2;
    assert_eq!(
        file("default.pcm")?.len() / 2,
        (n_samples * 22_050).div_ceil(24_000)
    );

    let arrivals: Vec<f64> = serde_json::from_value(said["arrivals"].clone())?;
    assert!(arrivals.len() > 2, "it came in one piece: {arrivals:?}");
    assert!(arrivals[0] < arrivals[arrivals.len() - 1] / 2.0, "{arrivals:?}");
    assert_eq!(said["parameters"]["language_code"], "en-US");
    for (field, code, words) in [
        ("voice_name", "NOT_FOUND", ".nano"),
        ("language_code", "INVALID_ARGUMENT", "en-US"),
        ("sample_rate_hz", "INVALID_ARGUMENT", "22050"),
        ("encoding", "INVALID_ARGUMENT", "LINEAR_PCM"),
        ("custom_dictionary", "INVALID_ARGUMENT", "phonemes"),
        ("enable_word_time_offsets", "INVALID_ARGUMENT", "leave it out"),
    ] {
        for call in 0..2 {
            let refused = &said["refused"][field][call];
            assert_eq!(refused[0], code, "{field}");
            let details = refused[1].as_str().unwrap_or_default();
            assert!(details.starts_with(field) && details.contains(words), "{refused}");
        }
    }
    let services: Vec<String> = serde_json::from_value(said["services"].clone())?;
    for wanted in [
        "laneway.v1.Speech",
        "nvidia.riva.tts.RivaSpeechSynthesis",
        "grpc.health.v1.Health",
    ] {
        assert!(
            services.iter().any(|service| service == wanted),
            "{wanted} is not in {services:?}"
        );
    }
    assert!(
        !services.iter().any(|service| service == "laneway.v1.Worker"),
        "{services:?}"
    );
    system.idle().await
}

/// The audio of a request in whatever format it asks for.
async fn raw(system: &System, asked: v1::SynthesizeRequest) -> anyhow::Result<Vec<u8>> {
    let mut stream = system.speaker()?.start(asked).await?;
    let mut audio = Vec::new();
    while let Some(event) = stream.next().await? {
        if let v1::synthesize_response::Event::Chunk(chunk) = event {
            audio.extend_from_slice(&chunk.audio);
        }
    }
    Ok(audio)
}
