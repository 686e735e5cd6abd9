//! Metrics of running processes, as Prometheus reads them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use laneway_integration_tests::PATIENCE;
use laneway_integration_tests::client::request;
use laneway_integration_tests::deployment::{Deployment, Placement, checkout};
use laneway_integration_tests::system::{Extra, System};
use laneway_integration_tests::tools::program;
use laneway_proto::v1;
use laneway_telemetry::metric::{self, METRICS};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const TEXT: &str = "The ferry leaves the harbor at six, and it is late.";

/// The metrics page.
async fn scrape(address: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        .await?;
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer))
        .await
        .context("read the metrics")??;
    let (head, body) = answer.split_once("\r\n\r\n").context("an answer has a body")?;
    anyhow::ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    Ok(body.to_owned())
}

/// Pages of every process.
async fn scrape_all(system: &System) -> anyhow::Result<Vec<String>> {
    let mut pages = vec![
        scrape(system.manager.metrics_address()?).await?,
        scrape(system.gateway.metrics_address()?).await?,
    ];
    for worker in &system.workers {
        pages.push(scrape(worker.metrics_address()?).await?);
    }
    Ok(pages)
}

/// Every series and its value.
fn series(page: &str) -> BTreeMap<String, f64> {
    let lines = page.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect()
}

/// Metrics of which some series was other than nothing, or changed.
#[derive(Default)]
struct Moved {
    before: Vec<BTreeMap<String, f64>>,
    names: BTreeSet<&'static str>,
}

impl Moved {
    fn take(&mut self, pages: &[String]) {
        let now: Vec<_> = pages.iter().map(|page| series(page)).collect();
        for (index, page) in now.iter().enumerate() {
            let before = self.before.get(index);
            let moved = page.iter().filter(|(name, value)| {
                **value != 0.0
                    || before
                        .and_then(|page| page.get(*name))
                        .is_some_and(|then| then != *value)
            });
            for (name, _) in moved {
                let name = name.split('{').next().unwrap_or_default();
                let of = |metric: &&metric::Metric| {
                    name == metric.name
                        || name
                            .strip_prefix(metric.name)
                            .is_some_and(|rest| ["_count", "_sum", "_bucket"].contains(&rest))
                };
                self.names
                    .extend(METRICS.iter().filter(of).map(|metric| metric.name));
            }
        }
        self.before = now;
    }
}

/// Those that only a worker's failure moves, or certificates: the gateway's own tests, which have workers that fail, and
/// those of TLS see them move.
const OF_FAILURES: [&str; 5] = [
    metric::GATEWAY_RETRIES,
    metric::GATEWAY_EJECTIONS,
    metric::TLS_RELOADS,
    metric::TLS_REFUSALS,
    metric::TLS_CERTIFICATE_EXPIRY,
];

const LISTEN: [(&str, &str); 1] = [("LANEWAY_METRICS_LISTEN", "127.0.0.1:0")];

/// Three streams where one runs at a time, one that is killed, and one that is refused.
async fn call(system: &System) -> anyhow::Result<()> {
    let speaker = system.speaker()?;
    let spoken = (0..3).map(|seed| {
        let speaker = speaker.clone();
        tokio::spawn(async move { speaker.speak(request(TEXT, seed)).await })
    });
    let spoken: Vec<_> = spoken.collect();
    let nothing = v1::SynthesizeRequest {
        text: "…".into(),
        ..request(TEXT, 7)
    };
    assert!(speaker.speak(nothing).await.is_err());
    let mut left = speaker.start(request(TEXT, 7)).await?;
    left.next().await?;
    drop(left);
    for spoken in spoken {
        spoken.await??;
    }
    Ok(())
}

#[tokio::test]
async fn every_advertised_metric_moves_and_prometheus_reads_them_all() -> anyhow::Result<()> {
    let mut moved = BTreeSet::from(OF_FAILURES);
    let mut pages = Vec::new();
    let mut deployment = Deployment::new(Placement::Auto);
    deployment.max_rows = 1;
    let extra = Extra {
        variables: &LISTEN,
        ..Extra::default()
    };
    let system = System::serving_with(&deployment, extra).await?;
    let wanted = |moved: &BTreeSet<&str>, names: &[&str]| -> Vec<&str> {
        let all = METRICS.iter().map(|metric| metric.name);
        all.filter(|name| !moved.contains(name) && !names.contains(name))
            .collect()
    };
    // What a voice that is cloned moves is seen below.
    let of_voices = [metric::GATEWAY_VOICES, metric::WORKER_REFERENCES];
    let mut seen = Moved::default();
    let deadline = tokio::time::Instant::now() + 2 * PATIENCE;
    while !wanted(&(&moved | &seen.names), &of_voices).is_empty() {
        let missing = wanted(&(&moved | &seen.names), &of_voices);
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "{missing:?} never moved");
        let calls = call(&system);
        tokio::pin!(calls);
        loop {
            tokio::select! {
                called = &mut calls => break called?,
                () = tokio::time::sleep(Duration::from_millis(100)) => seen.take(&scrape_all(&system).await?),
            }
        }
        pages = scrape_all(&system).await?;
        seen.take(&pages);
    }
    moved.extend(seen.names);
    system.idle().await?;
    drop(system);

    let directory = tempfile::tempdir()?;
    let path = directory
        .path()
        .to_str()
        .expect("temporary directories have plain names");
    let keeps = ["--voices-dir", path];
    let extra = Extra {
        variables: &LISTEN,
        gateway: &keeps,
    };
    let system = System::serving_with(&Deployment::new(Placement::Cloning), extra).await?;
    let tone = (0..48_000).map(|index| 0.3 * (index as f32 * 0.06).sin());
    let registration = v1::RegisterVoiceRequest {
        name: "ada".into(),
        clip: Some(v1::ReferenceClip {
            audio: tone.flat_map(f32::to_le_bytes).collect(),
            sample_rate: 24_000,
            text: String::new(),
        }),
        consent: "it is a tone, and nobody's".into(),
        model: String::new(),
    };
    let channel = laneway_integration_tests::client::channel(system.gateway.address()?);
    v1::speech_client::SpeechClient::new(channel)
        .register_voice(registration)
        .await?;
    let spoken = v1::SynthesizeRequest {
        voice: "ada".into(),
        max_frames: Some(4),
        ..request(TEXT, 7)
    };
    system.speaker()?.speak(spoken).await?;
    let mut seen = Moved::default();
    let last = scrape_all(&system).await?;
    seen.take(&last);
    moved.extend(seen.names);
    assert_eq!(wanted(&moved, &[]), Vec::<&str>::new(), "these never moved");

    let Some(promtool) = program(&["promtool"]) else {
        return Ok(());
    };
    for page in pages.iter().chain(&last) {
        let mut check = tokio::process::Command::new(&promtool)
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut stdin = check.stdin.take().context("it is piped")?;
        stdin.write_all(page.as_bytes()).await?;
        drop(stdin);
        let output = tokio::time::timeout(PATIENCE, check.wait_with_output())
            .await
            .context("promtool takes too long")??;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(
            output.status.success() && said.is_empty(),
            "promtool: {said}\n{page}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn alerts_are_valid_and_fire_where_they_should() -> anyhow::Result<()> {
    let Some(promtool) = program(&["promtool"]) else {
        return Ok(());
    };
    let directory = checkout().join("deploy/observability");
    for arguments in [
        ["check", "rules", "alerts.yaml"],
        ["test", "rules", "alerts_test.yaml"],
    ] {
        let output = tokio::process::Command::new(&promtool)
            .args(arguments)
            .current_dir(&directory)
            .kill_on_drop(true)
            .output();
        let output = tokio::time::timeout(PATIENCE, output)
            .await
            .context("promtool takes too long")??;
        let said = [output.stdout, output.stderr].concat();
        anyhow::ensure!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&said)
        );
    }
    Ok(())
}
