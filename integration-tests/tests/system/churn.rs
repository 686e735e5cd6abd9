//! Many requests, half of them cancelled wherever they happen to be: nothing may be left over.

use std::sync::Arc;

use laneway_integration_tests::client::{Speaker, request};
use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::process::Holdings;
use laneway_integration_tests::system::System;
use laneway_proto::v1;
use tokio::sync::Semaphore;
use tonic::Code;

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
        // The client's own timer may be first; it calls that cancelled.
        (Err(status), Fate::Times(_))
            if matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled) =>
        {
            Ok(())
        }
        (Err(status), fate) => Err(format!("request {number}, which {fate:?}: {status}")),
    }
}

async fn round(system: &System) -> anyhow::Result<Vec<Holdings>> {
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
    system.idle().await?;
    let processes = system.workers.iter().chain([&system.gateway, &system.manager]);
    processes.map(|process| process.holds()).collect()
}

#[tokio::test]
async fn after_two_hundred_requests_half_of_them_cancelled_everything_is_as_before() -> anyhow::Result<()> {
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let first = round(&system).await?;
    let second = round(&system).await?;
    for (name, (before, after)) in ["worker", "gateway", "engine-manager"]
        .iter()
        .zip(first.iter().zip(&second))
    {
        assert_eq!(before.files, after.files, "open files of the {name}");
        assert!(
            after.threads <= before.threads,
            "threads of the {name}: {before:?} {after:?}"
        );
        let slack = MEMORY_SLACK_BYTES.max(before.resident_bytes / 20);
        assert!(
            after.resident_bytes <= before.resident_bytes + slack,
            "memory of the {name}: {before:?} {after:?}"
        );
    }
    let log = system.workers[0].log();
    assert!(!log.contains("\"level\":\"ERROR\""), "{log}");
    Ok(())
}
