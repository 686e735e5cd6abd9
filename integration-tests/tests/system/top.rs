//! `laneway top` beside a running system.

use std::process::Command;

use laneway_integration_tests::client::{self, Speaker, request};
use laneway_integration_tests::process::{Process, binary};
use tonic_health::pb::health_check_response::ServingStatus;

/// What the metrics endpoint of a whole system in one process shows after a sentence.
#[tokio::test]
async fn top_shows_what_a_system_does() -> anyhow::Result<()> {
    let system = Process::start(
        "laneway",
        &["up", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"],
    )?;
    let pick = |key: &'static str| {
        move |line: &str| {
            let (_, after) = line.split_once(&format!("\"{key}\":\""))?;
            Some(after.split_once('"')?.0.to_owned())
        }
    };
    let metrics = system.wait_for_line("where its metrics are", pick("metrics"))?;
    let gateway = system.wait_for_line("its address", pick("gateway"))?.parse()?;
    client::until(gateway, ServingStatus::Serving).await?;

    let top = tokio::task::spawn_blocking(move || {
        Command::new(binary("laneway")?)
            .args(["top", "--url", &metrics, "--once", "--interval-s", "8"])
            .output()
            .map_err(anyhow::Error::from)
    });
    let speaker = Speaker::new(gateway);
    let text = "The ferry leaves the harbor at six.";
    for seed in 0..3 {
        speaker.speak(request(text, seed)).await?;
    }
    let output = top.await??;
    let text = String::from_utf8(output.stdout)?;
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for part in [
        "gateway",
        "of 3 streams",
        "codec steps per talker step",
        "talker_kv 0/",
        "talker_decode",
    ] {
        assert!(text.contains(part), "{part} is missing from\n{text}");
    }
    let codec = text.lines().find(|line| line.contains("codec_chunk"));
    let numbers = codec.unwrap_or_default().split_whitespace().skip(2);
    let numbers: Vec<f64> = numbers.map_while(|number| number.parse().ok()).collect();
    assert!(
        numbers.len() == 5 && numbers.iter().all(|&number| number > 0.0),
        "steps, rows, frames and times of the codec were counted:\n{text}"
    );
    assert!(!text.contains('\x1b'), "a script gets no control characters");
    Ok(())
}

#[test]
fn top_says_which_address_does_not_answer() -> anyhow::Result<()> {
    // Port 9 is the discard service's; nothing of ours answers there.
    let output = Command::new(binary("laneway")?)
        .args(["top", "--url", "127.0.0.1:9", "--once"])
        .output()?;
    let said = String::from_utf8(output.stderr)?;
    assert!(!output.status.success());
    assert!(
        said.contains("http://127.0.0.1:9/metrics") && said.contains("--metrics-listen"),
        "{said}"
    );
    Ok(())
}
