//! Start, overload, cancel, deadline, loss and drain.

use std::time::{Duration, Instant};

use laneway_integration_tests::client::{self, Speaker, failure, request};
use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::process::Process;
use laneway_integration_tests::system::System;
use laneway_proto::v1::requests_client::RequestsClient;
use laneway_proto::v1::synthesize_response::Event;
use laneway_proto::v1::worker_client::WorkerClient;
use laneway_proto::{ErrorCode, v1};
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;

/// Long enough that nothing which waits for its end can pass by accident.
fn long(seed: u64) -> v1::SynthesizeRequest {
    let text = "She kept the old map folded inside a book about birds. ".repeat(12);
    v1::SynthesizeRequest {
        request_id: format!("long-{seed}"),
        max_frames: Some(1000),
        ..request(text.trim(), seed)
    }
}

fn one_at_a_time(placement: Placement) -> Deployment {
    Deployment {
        max_rows: 1,
        max_queue: 1,
        ..Deployment::new(placement)
    }
}

#[tokio::test]
async fn nothing_serves_before_a_worker_is_ready() -> anyhow::Result<()> {
    let config = Deployment::new(Placement::Lane).write()?;
    let manager = Process::start(
        "laneway-engine-manager",
        &["--config", config.path(), "--listen", "127.0.0.1:0"],
    )?;
    let address = format!("http://{}", manager.address()?);
    let gateway = Process::start(
        "laneway-gateway",
        &["--listen", "127.0.0.1:0", "--engine-manager", &address],
    )?;
    let at = gateway.address()?;
    client::until(at, ServingStatus::NotServing).await?;
    let refused = Speaker::new(at).speak(request("Hello.", 1)).await.unwrap_err();
    assert_eq!(
        (refused.code(), failure(&refused).code),
        (Code::Unavailable, ErrorCode::NoWorker)
    );

    let worker = Process::start(
        "laneway-worker",
        &["--listen", "127.0.0.1:0", "--engine-manager", &address],
    )?;
    client::until(at, ServingStatus::Serving).await?;
    assert_eq!(client::health(worker.address()?).await?, ServingStatus::Serving);
    Speaker::new(at).speak(request("Hello.", 1)).await?;
    Ok(())
}

#[tokio::test]
async fn one_more_than_running_and_waiting_is_refused_at_once() -> anyhow::Result<()> {
    let system = System::serving(&one_at_a_time(Placement::Lane)).await?;
    let speaker = system.speaker()?;
    let mut running = speaker.start(long(1)).await?;
    running.first_audio().await?;
    let mut waiting = speaker.start(long(2)).await?;
    assert!(matches!(waiting.next().await?, Some(Event::Accepted(_))));
    // The worker has it in its queue once its status says so.
    while system.worker_status(0).await?.load.unwrap_or_default().queued == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let began = Instant::now();
    let refused = speaker.speak(long(3)).await.unwrap_err();
    let took = began.elapsed();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(failure(&refused).retry_after.is_some(), "{refused}");
    // 100 ms are promised on a machine that has them; this one may share its cores with other tests.
    assert!(took < Duration::from_secs(2), "refused after {took:?}");
    running.first_audio().await?;
    drop((running, waiting));
    system.idle().await
}

/// However long the queue is: a worker says when a request's turn came, so that nobody takes waiting for a stall.
#[tokio::test]
async fn a_waiting_request_is_told_when_its_turn_comes() -> anyhow::Result<()> {
    use v1::worker_synthesize_response::Event;
    let system = System::serving(&one_at_a_time(Placement::Lane)).await?;
    let mut running = system.speaker()?.start(long(1)).await?;
    running.first_audio().await?;
    let mut worker = WorkerClient::new(client::channel(system.worker_address(0)?));
    let request = v1::WorkerSynthesizeRequest {
        request_id: "waits".into(),
        text: "Hello.".into(),
        voice: "nano".into(),
        max_frames: Some(4),
        ..Default::default()
    };
    let mut waiting = worker.synthesize(request).await?.into_inner();
    let waits = tokio::time::timeout(Duration::from_millis(500), waiting.message()).await;
    assert!(waits.is_err(), "its turn has not come: {waits:?}");
    drop(running);
    let mut events = Vec::new();
    while let Some(message) = waiting.message().await? {
        events.extend(message.event);
    }
    assert!(matches!(events[0], Event::Started(_)), "{events:?}");
    assert!(matches!(events.last(), Some(Event::Finished(_))), "{events:?}");
    system.idle().await
}

#[tokio::test]
async fn a_listener_who_leaves_a_deadline_and_a_kill_free_the_slot() -> anyhow::Result<()> {
    let system = System::serving(&one_at_a_time(Placement::Lane)).await?;
    let speaker = system.speaker()?;

    let mut left = speaker.start(long(1)).await?;
    left.first_audio().await?;
    drop(left);
    system.idle().await?;

    let mut timed = tonic::Request::new(long(2));
    timed.set_timeout(Duration::from_millis(700));
    let late = speaker.speak(timed).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    system.idle().await?;

    let mut requests = RequestsClient::new(client::channel(system.gateway.address()?));
    let mut cancel = async |seed: u64, strength: v1::CancelStrength| {
        let request_id = format!("long-{seed}");
        requests
            .cancel(v1::CancelRequest {
                request_id,
                strength: strength.into(),
            })
            .await
    };
    let mut killed = speaker.start(long(3)).await?;
    killed.first_audio().await?;
    cancel(3, v1::CancelStrength::Kill).await?;
    let end = killed.rest().await.unwrap_err();
    assert_eq!(end.code(), Code::Cancelled, "{end}");
    system.idle().await?;

    let mut stopped = speaker.start(long(4)).await?;
    stopped.first_audio().await?;
    cancel(4, v1::CancelStrength::Stop).await?;
    let spoken = stopped.rest().await?;
    assert_eq!(spoken.finished.reason(), v1::FinishReason::Stopped);
    assert_eq!(
        cancel(5, v1::CancelStrength::Kill).await.unwrap_err().code(),
        Code::NotFound
    );
    system.idle().await
}

#[tokio::test]
async fn a_killed_worker_ends_its_streams_unavailable_and_health_tells() -> anyhow::Result<()> {
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let mut stream = system.speaker()?.start(long(1)).await?;
    stream.first_audio().await?;
    system.workers[0].signal("KILL")?;
    let end = stream.rest().await.unwrap_err();
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    client::until(system.gateway.address()?, ServingStatus::NotServing).await
}

#[tokio::test]
async fn a_killed_codec_worker_ends_its_streams_unavailable_and_frees_the_talker() -> anyhow::Result<()> {
    let mut system = System::serving(&Deployment::new(Placement::Split)).await?;
    let mut stream = system.speaker()?.start(long(1)).await?;
    stream.first_audio().await?;
    system.workers[1].signal("KILL")?;
    let end = stream.rest().await.unwrap_err();
    assert_eq!(end.code(), Code::Unavailable, "{end}");
    system.workers.truncate(1);
    system.idle().await?;
    // The engine-manager gives the dead worker up, so the Talker alone serves nothing.
    client::until(system.worker_address(0)?, ServingStatus::NotServing).await
}

#[tokio::test]
async fn sigterm_refuses_the_new_finishes_the_old_and_exits_0() -> anyhow::Result<()> {
    for role in ["worker", "gateway"] {
        let mut system = System::serving(&Deployment::new(Placement::Lane)).await?;
        let speaker = system.speaker()?;
        let mut stream = speaker
            .start(request(
                "The baker opened the door and the smell of bread filled the street.",
                3,
            ))
            .await?;
        stream.first_audio().await?;
        let process = if role == "worker" {
            &mut system.workers[0]
        } else {
            &mut system.gateway
        };
        let address = process.address()?;
        process.signal("TERM")?;
        client::until(address, ServingStatus::NotServing).await?;
        let refused = speaker.speak(request("Hello.", 1)).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{role}: {refused}");
        let spoken = stream.rest().await?;
        assert_eq!(spoken.finished.reason(), v1::FinishReason::Stop, "{role}");
        assert_eq!(
            process.ended().await?.code(),
            Some(0),
            "{role}:\n{}",
            process.log()
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_second_signal_exits_now() -> anyhow::Result<()> {
    let mut system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let mut stream = system.speaker()?.start(long(1)).await?;
    stream.first_audio().await?;
    let worker = &mut system.workers[0];
    worker.signal("TERM")?;
    worker.wait_for_line("that it drains", |line| line.contains("draining").then_some(()))?;
    worker.signal("TERM")?;
    assert_ne!(worker.ended().await?.code(), Some(0));
    assert_eq!(stream.rest().await.unwrap_err().code(), Code::Unavailable);
    Ok(())
}

#[tokio::test]
async fn one_process_can_be_the_whole_system() -> anyhow::Result<()> {
    let config = Deployment::new(Placement::Lane).write()?;
    let mut all = Process::start(
        "laneway",
        &[
            "up",
            "--config",
            config.path(),
            "--listen",
            "127.0.0.1:0",
            "--log",
            "info",
        ],
    )?;
    let gateway = all.wait_for_line("the gateway's address", |line| {
        let (_, after) = line.split_once("\"gateway\":\"")?;
        after.split_once('"')?.0.parse().ok()
    })?;
    client::until(gateway, ServingStatus::Serving).await?;
    let spoken = Speaker::new(gateway).speak(request("Good morning.", 1)).await?;
    assert!(spoken.finished.frames > 0);
    all.signal("TERM")?;
    assert_eq!(all.ended().await?.code(), Some(0), "{}", all.log());
    Ok(())
}

/// The rows of the behaviour table that a caller's input decides.
#[tokio::test]
async fn bad_input_is_named() -> anyhow::Result<()> {
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let speaker = system.speaker()?;
    type Edit = fn(&mut v1::SynthesizeRequest);
    let table: [(&str, Code, Edit); 11] = [
        ("text", Code::InvalidArgument, |r| r.text = String::new()),
        ("text", Code::InvalidArgument, |r| r.text = "…".into()),
        ("text", Code::InvalidArgument, |r| r.text = "—".into()),
        ("text", Code::InvalidArgument, |r| r.text = "🎉".into()),
        ("text", Code::InvalidArgument, |r| r.text = "a ".repeat(20_000)),
        ("voice", Code::NotFound, |r| r.voice = "nobody".into()),
        ("model", Code::NotFound, |r| r.model = "nothing".into()),
        ("language", Code::InvalidArgument, |r| {
            r.language = "klingon".into()
        }),
        // A number that no format has.
        ("format", Code::InvalidArgument, |r| r.format = 99),
        ("max_frames", Code::InvalidArgument, |r| {
            r.max_frames = Some(100_000)
        }),
        ("instruct", Code::InvalidArgument, |r| {
            r.instruct = "Whisper.".into()
        }),
    ];
    for (field, code, edit) in table {
        let mut request = request("Hello.", 1);
        edit(&mut request);
        let refused = speaker.speak(request).await.expect_err(field);
        assert_eq!(refused.code(), code, "{field}: {refused}");
        let failure = failure(&refused);
        assert_eq!(
            failure.violations.first().map(|v| v.field.as_str()),
            Some(field),
            "{failure}"
        );
    }
    let mut running = speaker.start(long(1)).await?;
    running.first_audio().await?;
    let twice = speaker.speak(long(1)).await.unwrap_err();
    assert_eq!(twice.code(), Code::AlreadyExists, "{twice}");
    drop(running);
    let spoken = speaker
        .speak(v1::SynthesizeRequest {
            max_frames: Some(3),
            ..request("8...", 1)
        })
        .await?;
    assert_eq!(
        (spoken.finished.frames, spoken.finished.reason()),
        (3, v1::FinishReason::Length)
    );
    Ok(())
}
