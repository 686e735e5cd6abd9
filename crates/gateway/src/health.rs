//! `grpc.health.v1`: SERVING exactly while a worker serves and no drain began.
//!
//! The task is started by `Gateway::serve` and ends with it.

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::admission::Admission;
use crate::routing::Roster;

/// Names whose health is told: the whole server, and the services that need workers.
const NAMES: [&str; 3] = ["", "laneway.v1.Speech", "nvidia.riva.tts.RivaSpeechSynthesis"];

/// Tell everybody.
pub(crate) async fn set(reporter: &HealthReporter, serving: bool) {
    let status = if serving {
        ServingStatus::Serving
    } else {
        ServingStatus::NotServing
    };
    for name in NAMES {
        reporter.set_service_status(name, status).await;
    }
}

/// Keep the health in step with the roster until the drain begins; once it is done, end every watch, which would
/// hold its connection open for ever.
pub(crate) async fn run(
    mut reporter: HealthReporter,
    mut roster: watch::Receiver<Roster>,
    admission: Arc<Admission>,
    drain: CancellationToken,
    drained: CancellationToken,
    readiness: watch::Sender<bool>,
) {
    let mut serving = false;
    loop {
        let serves = roster.borrow_and_update().serves();
        if serves != serving {
            serving = serves;
            tracing::info!(serving, "health changed");
            set(&reporter, serving).await;
            readiness.send_replace(serving);
        }
        tokio::select! {
            biased;
            () = drain.cancelled() => {
                // Before anybody can read NOT_SERVING: who did is not let in any more.
                admission.close();
                break;
            }
            changed = roster.changed() => if changed.is_err() { break },
        }
    }
    set(&reporter, false).await;
    readiness.send_replace(false);
    drained.cancelled().await;
    for name in NAMES {
        reporter.clear_service_status(name).await;
    }
}
