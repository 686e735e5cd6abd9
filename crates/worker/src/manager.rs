//! The engine-manager as this worker sees it: it gives the plan, and hears heartbeats.

use std::time::Duration;

use laneway_plan::{DeviceInventory, WorkerPlan};
use laneway_proto::v1::engine_manager_client::EngineManagerClient;
use laneway_proto::{ErrorCode, Failure, Violation, v1};
use tonic::transport::Channel;

/// First pause before another attempt; it doubles up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(50);

/// Longest pause.
const RETRY_MAX: Duration = Duration::from_secs(1);

/// How long one call may take.
const CALL_DEADLINE: Duration = Duration::from_secs(2);

/// Who registers.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) worker_id: String,
    pub(crate) rank: u32,
    pub(crate) address: String,
    pub(crate) devices: DeviceInventory,
}

/// What a registration gives.
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) plan: WorkerPlan,
    pub(crate) generation: u64,
    pub(crate) heartbeat_interval: Duration,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The deployment cannot run on this machine, or has no such rank. Trying again does not help.
    #[error("the engine-manager refuses this worker: {message}")]
    Refused {
        /// In one line.
        message: String,
        /// Each reason.
        violations: Vec<Violation>,
    },
    /// Nobody answered in time, or the rank stayed taken.
    #[error("no plan for rank {rank} within {waited:?}: {last}")]
    TimedOut {
        /// The rank asked for.
        rank: u32,
        /// How long it was tried.
        waited: Duration,
        /// The last answer.
        last: String,
    },
    /// It speaks another version.
    #[error("read the plan from the engine-manager: {0}")]
    Malformed(String),
}

/// Register, trying again while the engine-manager is not there yet or another worker still holds the rank.
pub(crate) async fn register(
    client: &mut EngineManagerClient<Channel>,
    identity: &Identity,
    patience: Duration,
) -> Result<Registered, RegisterError> {
    let until = tokio::time::Instant::now() + patience;
    let mut pause = RETRY_MIN;
    let mut told = String::new();
    loop {
        let mut request = tonic::Request::new(v1::RegisterRequest {
            worker_id: identity.worker_id.clone(),
            address: identity.address.clone(),
            rank: identity.rank,
            version: env!("CARGO_PKG_VERSION").into(),
            devices: identity.devices.devices.iter().map(Into::into).collect(),
        });
        request.set_timeout(CALL_DEADLINE);
        let last = match client.register(request).await {
            Ok(response) => return registered(response.into_inner()),
            Err(status) => match Failure::from_status(&status) {
                Some(failure) if failure.code != ErrorCode::RankTaken => {
                    return Err(RegisterError::Refused {
                        message: failure.message,
                        violations: failure.violations,
                    });
                }
                _ => laneway_telemetry::causes_of_status(&status),
            },
        };
        if tokio::time::Instant::now() + pause > until {
            return Err(RegisterError::TimedOut {
                rank: identity.rank,
                waited: patience,
                last,
            });
        }
        // Once for each reason: whoever starts a worker sees at once what it waits for.
        if last != told {
            tracing::warn!(reason = last, patience = ?patience, "no plan yet from the engine-manager: asking again");
            told = last;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(RETRY_MAX);
    }
}

fn registered(response: v1::RegisterResponse) -> Result<Registered, RegisterError> {
    let plan = response
        .plan
        .ok_or_else(|| RegisterError::Malformed("it is missing".into()))?;
    Ok(Registered {
        plan: plan
            .try_into()
            .map_err(|error| RegisterError::Malformed(format!("{error}")))?,
        generation: response.generation,
        heartbeat_interval: Duration::from_millis(u64::from(response.heartbeat_interval_ms.max(1))),
    })
}

/// What one heartbeat came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Beat {
    Heard,
    /// The engine-manager wants this worker to drain.
    Drain,
    /// It does not know this worker: register again.
    Unknown,
    /// It did not answer.
    Unheard,
}

/// Tell the engine-manager that this worker lives.
pub(crate) async fn beat(client: &mut EngineManagerClient<Channel>, heartbeat: v1::HeartbeatRequest) -> Beat {
    let mut request = tonic::Request::new(heartbeat);
    request.set_timeout(CALL_DEADLINE);
    match client.heartbeat(request).await {
        Ok(response) if response.get_ref().drain => Beat::Drain,
        Ok(_) => Beat::Heard,
        Err(status) if Failure::from_status(&status).is_some_and(|f| f.code == ErrorCode::NotRegistered) => {
            Beat::Unknown
        }
        Err(status) => {
            tracing::warn!(%status, "the engine-manager did not hear a heartbeat");
            Beat::Unheard
        }
    }
}

/// Leave, so that nobody waits for the lease to end.
pub(crate) async fn deregister(
    client: &mut EngineManagerClient<Channel>,
    identity: &Identity,
    generation: u64,
) -> Result<(), tonic::Status> {
    let worker_id = identity.worker_id.clone();
    let mut request = tonic::Request::new(v1::DeregisterRequest {
        worker_id,
        generation,
    });
    request.set_timeout(CALL_DEADLINE);
    client.deregister(request).await.map(drop)
}
