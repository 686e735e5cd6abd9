//! `laneway up` with workers as processes of their own: what it does when one of them, or it itself, dies.

use std::os::unix::fs::PermissionsExt as _;

use anyhow::Context as _;
use laneway_integration_tests::PATIENCE;
use laneway_integration_tests::client::{self, Speaker, request};
use laneway_integration_tests::deployment::{ConfigFile, Deployment, Placement};
use laneway_integration_tests::process::{Process, runs, signal};
use laneway_proto::v1;
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use laneway_proto::v1::worker_client::WorkerClient;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_health::pb::health_check_response::ServingStatus;

/// Long enough to be killed in the middle.
fn long(seed: u64) -> v1::SynthesizeRequest {
    let text =
        "The lighthouse keeper counted the boats as they came home, one by one, until the last light was in.";
    v1::SynthesizeRequest {
        max_frames: Some(200),
        ..request(text, seed)
    }
}

/// A split deployment of one command, which runs one request at a time.
struct Up {
    process: Process,
    speaker: Speaker,
    gateway: std::net::SocketAddr,
    _config: ConfigFile,
}

impl Up {
    async fn serving() -> anyhow::Result<Self> {
        let config = Deployment {
            max_rows: 1,
            ..Deployment::new(Placement::Split)
        }
        .write()?;
        let arguments = [
            "up",
            "--config",
            config.path(),
            "--listen",
            "127.0.0.1:0",
            "--log",
            "info",
        ];
        let process = Process::start("laneway", &arguments)?;
        let gateway = process.wait_for_line("the gateway's address", |line| {
            let (_, after) = line.split_once("\"gateway\":\"")?;
            after.split_once('"')?.0.parse().ok()
        })?;
        client::until(gateway, ServingStatus::Serving).await?;
        Ok(Up {
            process,
            speaker: Speaker::new(gateway),
            gateway,
            _config: config,
        })
    }

    /// The process that serves a rank now.
    fn worker(&self, rank: u32) -> anyhow::Result<Option<u32>> {
        let flag = format!("--rank {rank} ");
        let children = self.process.children()?;
        Ok(children
            .into_iter()
            .find(|(_, command)| command.contains(&flag))
            .map(|(id, _)| id))
    }

    /// Wait until a rank's worker has so many requests, waiting and running.
    async fn until_held(&self, rank: u32, n_requests: u32) -> anyhow::Result<()> {
        let children = self.process.children()?;
        let manager = children
            .iter()
            .find_map(|(_, command)| command.split_once("--engine-manager "))
            .and_then(|(_, after)| after.split(' ').next())
            .context("find the engine-manager's address")?;
        let manager = Endpoint::from_shared(manager.to_owned())?.connect_lazy();
        let mut topology = EngineManagerClient::new(manager)
            .watch_topology(v1::WatchTopologyRequest {})
            .await?
            .into_inner();
        let workers = topology.message().await?.context("a topology")?.workers;
        let worker = workers.into_iter().find(|worker| worker.rank == rank);
        let address = worker.context("find the worker")?.address;
        let mut worker = WorkerClient::new(Endpoint::from_shared(address)?.connect_lazy());
        let held = async {
            loop {
                let status = worker.status(v1::WorkerStatusRequest {}).await?.into_inner();
                let load = status.load.unwrap_or_default();
                if load.queued + load.running >= n_requests {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, held).await?
    }

    /// The process that serves a rank, once it is another than this.
    async fn another_worker(&self, rank: u32, than: Option<u32>) -> anyhow::Result<u32> {
        let found = async {
            loop {
                match self.worker(rank)? {
                    Some(id) if Some(id) != than => return anyhow::Ok(id),
                    _ => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, found).await?
    }
}

async fn gone(processes: &[u32]) -> anyhow::Result<()> {
    let all = async {
        while processes.iter().any(|&process| runs(process)) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    Ok(tokio::time::timeout(PATIENCE, all).await?)
}

#[tokio::test]
async fn a_killed_codec_worker_is_started_again_and_only_streams_with_audio_are_lost() -> anyhow::Result<()> {
    let mut up = Up::serving().await?;
    let undisturbed = up.speaker.speak(request("Good morning.", 9)).await?;
    let (talker, codec) = (
        up.another_worker(0, None).await?,
        up.another_worker(1, None).await?,
    );

    let mut with_audio = up.speaker.start(long(1)).await?;
    with_audio.first_audio().await?;
    // It waits behind the other: one runs at a time.
    let without = tokio::spawn({
        let speaker = up.speaker.clone();
        let mut request = tonic::Request::new(request("Good morning.", 9));
        request.set_timeout(PATIENCE);
        async move { speaker.speak(request).await }
    });
    // Both workers have taken it: its call to the codec worker is open.
    up.until_held(1, 2).await?;
    signal(codec, "KILL")?;
    let end = with_audio.rest().await.unwrap_err();
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    assert_eq!(
        without.await??.audio,
        undisturbed.audio,
        "it was tried again, and no byte is another"
    );

    assert_eq!(up.worker(0)?, Some(talker), "the Talker's worker lives on");
    let again = up.another_worker(1, Some(codec)).await?;
    client::until(up.gateway, ServingStatus::Serving).await?;
    let after = up.speaker.speak(request("Good morning.", 9)).await?;
    assert_eq!(after.audio, undisturbed.audio);

    up.process.signal("TERM")?;
    let ended = up.process.ended().await?;
    assert_eq!(ended.code(), Some(0), "{}", up.process.log());
    assert!(!runs(talker) && !runs(again));
    Ok(())
}

#[tokio::test]
async fn workers_end_with_the_process_that_started_them() -> anyhow::Result<()> {
    let mut up = Up::serving().await?;
    let workers = [
        up.another_worker(0, None).await?,
        up.another_worker(1, None).await?,
    ];
    up.process.signal("KILL")?;
    up.process.ended().await?;
    gone(&workers).await
}

#[tokio::test]
async fn a_worker_that_dies_again_and_again_ends_the_deployment_with_the_reason() -> anyhow::Result<()> {
    let mut up = Up::serving().await?;
    let talker = up.another_worker(0, None).await?;
    let mut last = None;
    for _ in 0..5 {
        let codec = up.another_worker(1, last).await?;
        signal(codec, "KILL")?;
        last = Some(codec);
    }
    let ended = up.process.ended().await?;
    let log = up.process.log();
    assert_eq!(ended.code(), Some(1), "{log}");
    assert!(
        log.contains("the worker of rank 1 died 5 times") && log.contains("signal: 9"),
        "{log}"
    );
    gone(&[talker]).await
}

/// No machine has a tenth GPU, so the workers refuse: the daemon that was started for them must be gone all the same.
#[tokio::test]
async fn an_mps_daemon_of_our_own_is_started_and_ended_with_a_deployment_that_is_refused()
-> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let at = |name: &str| directory.path().join(name);
    let (bin, temporary, log) = (at("bin"), at("tmp"), at("log"));
    std::fs::create_dir(&bin)?;
    std::fs::create_dir(&temporary)?;
    let control = bin.join("nvidia-cuda-mps-control");
    std::fs::write(
        &control,
        include_str!("../../../crates/engine-manager/src/mps/fake.sh"),
    )?;
    std::fs::set_permissions(&control, std::fs::Permissions::from_mode(0o700))?;
    let config = at("split-mps.yaml");
    std::fs::write(
        &config,
        "model: qwen3_tts
weights: random:7
model_config: 0.6b-custom_voice
device: cuda
node_groups:
  - nodes: [Talker]
    ranks: [0]
  - nodes: [Codec]
    ranks: [1]
rank_devices: { 0: 9, 1: 9 }
mps:
  mode: required
  ranks:
    0: { active_thread_percentage: 100 }
    1: { active_thread_percentage: 30 }
devices: [{ name: 'cuda:8', memory: 100GB, sms: 132, partition_granularity: 8 }]
",
    )?;
    let text = |path: &std::path::Path| path.display().to_string();
    let path = format!("{}:{}", text(&bin), std::env::var("PATH")?);
    let config = text(&config);
    let arguments = ["up", "--config", &config, "--listen", "127.0.0.1:0"];
    let start = |mode: &str, temporary: &str| {
        let variables = [
            ("PATH", path.as_str()),
            ("TMPDIR", temporary),
            ("FAKE_LOG", &text(&log)),
            ("FAKE_MODE", mode),
            ("CUDA_MPS_PIPE_DIRECTORY", ""),
        ];
        Process::start_with("laneway", &arguments, &variables)
    };
    // The file says what the machine has, and it is not what the ranks are on.
    let mut refused = start("", &text(&temporary))?;
    assert_eq!(refused.ended().await?.code(), Some(2), "{}", refused.log());
    assert!(!log.exists(), "nothing starts with a wrong configuration");

    let whole = std::fs::read_to_string(&config)?;
    let (before, _) = whole.split_once("devices: [").expect("the file names devices");
    std::fs::write(&config, before)?;
    let mut started = start("", &text(&temporary))?;
    assert_eq!(started.ended().await?.code(), Some(2), "{}", started.log());
    assert!(
        started.log().contains("cuda:9, which is not there"),
        "{}",
        started.log()
    );
    let asked = std::fs::read_to_string(&log)?;
    assert!(
        asked.contains("start threads=unset") && asked.contains("quit -t"),
        "{asked}"
    );
    assert_eq!(std::fs::read_dir(&temporary)?.count(), 0, "its directory is left");

    let mut deaf = start("dead", &text(&temporary))?;
    assert_eq!(deaf.ended().await?.code(), Some(1), "{}", deaf.log());
    assert!(deaf.log().contains("no MPS daemon answers in"), "{}", deaf.log());
    assert_eq!(std::fs::read_dir(&temporary)?.count(), 0, "its directory is left");
    Ok(())
}
