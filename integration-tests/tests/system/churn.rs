//! Many requests, half of them cancelled wherever they happen to be: nothing may be left over.

use std::sync::Arc;

use laneway_integration_tests::PATIENCE;
use laneway_integration_tests::client::{Speaker, request};
use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::process::Holdings;
use laneway_integration_tests::system::System;
use laneway_proto::v1;
use tokio::sync::Semaphore;
use tonic::Code;

/// How the client library words the end of its own timer.
const CLIENT_TIMER: &str = "Timeout expired";
const N_REQUESTS: u64 = 200;

/// Twice as many as run at once.
const N_AT_ONCE: usize = 16;

/// Resident memory may grow by the larger of 5 % and this.
const MEMORY_SLACK_BYTES: u64 = 16 << 20;

/// What a caller does with its stream, by request number.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// Listens to the end.
    Listens,
    /// Leaves after so many events.
    Leaves(u64),
    /// Has a deadline of so many milliseconds.
    Times(u64),
}

fn fate(number: u64) -> Fate {
    // A fixed scramble: the same fates every run, with no pattern in the order.
    let scrambled = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
    match scrambled % 4 {
        0 => Fate::Leaves(scrambled / 4 % 6),
        1 => Fate::Times(1 + scrambled / 4 % 200),
        _ => Fate::Listens,
    }
}

async fn one(speaker: Speaker, number: u64) -> Result<(), String> {
    let text = ["Good morning.", "It is late.", "Eight bells.", "Come in."][number as usize % 4];
    let mut request = tonic::Request::new(v1::SynthesizeRequest {
        max_frames: Some(8),
        ..request(text, number)
    });
    let fate = fate(number);
    if let Fate::Times(ms) = fate {
        request.set_timeout(std::time::Duration::from_millis(ms));
    }
    let end = async {
        let mut stream = speaker.start(request).await?;
        if let Fate::Leaves(after) = fate {
            for _ in 0..after {
                if stream.next().await?.is_none() {
                    break;
                }
            }
            return Ok(());
        }
        let spoken = stream.rest().await?;
        match spoken.audio.len() as u64 / 4 == u64::from(spoken.finished.frames) * 1920 {
            true => Ok(()),
            false => Err(tonic::Status::internal("frames and samples disagree")),
        }
    };
    match (end.await, fate) {
        (Ok(()), _) => Ok(()),
        (Err(status), Fate::Times(_)) if status.code() == Code::DeadlineExceeded => Ok(()),
        // The client library's own timer was first: no answer of the gateway's, which would never say cancelled.
        (Err(status), Fate::Times(_))
            if status.code() == Code::Cancelled && status.message() == CLIENT_TIMER =>
        {
            Ok(())
        }
        (Err(status), fate) => Err(format!("request {number}, which {fate:?}: {status}")),
    }
}

async fn round(system: &System) -> anyhow::Result<()> {
    let speaker = system.speaker()?;
    let places = Arc::new(Semaphore::new(N_AT_ONCE));
    let mut callers = Vec::new();
    for number in 0..N_REQUESTS {
        let place = places.clone().acquire_owned().await?;
        let speaker = speaker.clone();
        callers.push(tokio::spawn(async move {
            let outcome = one(speaker, number).await;
            drop(place);
            outcome
        }));
    }
    let mut failures = Vec::new();
    for caller in callers {
        failures.extend(caller.await?.err());
    }
    assert!(failures.is_empty(), "{failures:#?}");
    drop(speaker);
    system.idle().await
}

fn holdings(system: &System) -> anyhow::Result<Vec<Holdings>> {
    let processes = system.workers.iter().chain([&system.gateway, &system.manager]);
    processes.map(|process| process.holds()).collect()
}

/// What is held once threads and open files have stayed the same for a fifth of a second.
async fn quiet(system: &System) -> anyhow::Result<Vec<Holdings>> {
    let counts = |all: &[Holdings]| {
        all.iter()
            .map(|held| (held.threads, held.files))
            .collect::<Vec<_>>()
    };
    let deadline = tokio::time::Instant::now() + PATIENCE;
    let mut last = holdings(system)?;
    let mut n_same = 0;
    while n_same < 10 {
        anyhow::ensure!(tokio::time::Instant::now() < deadline, "never quiet: {last:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        let now = holdings(system)?;
        n_same = if counts(&now) == counts(&last) {
            n_same + 1
        } else {
            0
        };
        last = now;
    }
    Ok(last)
}

/// Wait until threads and open files are no more than before: the connections of callers who left close by and by.
async fn settled(system: &System, before: &[Holdings]) -> anyhow::Result<Vec<Holdings>> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let after = holdings(system)?;
        let mut pairs = before.iter().zip(&after);
        if pairs.all(|(before, after)| after.threads <= before.threads && after.files <= before.files) {
            return Ok(after);
        }
        let late = tokio::time::Instant::now() > deadline;
        anyhow::ensure!(!late, "something is left over: {before:?} became {after:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn after_two_hundred_requests_half_of_them_cancelled_everything_is_as_before() -> anyhow::Result<()> {
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    // The gateway opens its connection for streams with the first of them.
    system.speaker()?.speak(request("Good morning.", 0)).await?;
    system.idle().await?;
    let before = quiet(&system).await?;
    round(&system).await?;
    let first = settled(&system, &before).await?;
    round(&system).await?;
    let second = settled(&system, &before).await?;
    for (name, (first, second)) in ["worker", "gateway", "engine-manager"]
        .iter()
        .zip(first.iter().zip(&second))
    {
        let slack = MEMORY_SLACK_BYTES.max(first.resident_bytes / 20);
        assert!(
            second.resident_bytes <= first.resident_bytes + slack,
            "memory of the {name}: {first:?} {second:?}"
        );
    }
    let log = system.workers[0].log();
    assert!(!log.contains("\"level\":\"ERROR\""), "{log}");
    Ok(())
}
