//! Whether this process was started with the share of the device that its plan gives it.

use std::path::Path;

use laneway_plan::WorkerPlan;
use laneway_plan::mps::PIPE_VARIABLE;

/// Where the driver looks for a daemon that nobody names.
const DEFAULT_PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";

/// Hold the environment to what the plan says of the Multi-Process Service. The driver reads these variables when a
/// process starts and says nothing of one that is missing, nor of a daemon that is, so that a share would be lost
/// without a word. The engine-manager may be in another container and cannot look.
///
/// # Errors
/// A variable is missing or has another value; no daemon has its pipes where the driver looks for them.
pub(crate) fn check(
    plan: &WorkerPlan,
    read: impl Fn(&str) -> Option<String>,
    exists: impl Fn(&Path) -> bool,
) -> anyhow::Result<()> {
    let variables = plan.mps_variables();
    if variables.is_empty() {
        return Ok(());
    }
    let directory = read(PIPE_VARIABLE).unwrap_or_else(|| DEFAULT_PIPE_DIRECTORY.to_owned());
    anyhow::ensure!(
        exists(&Path::new(&directory).join("control")),
        "rank {} is to run under MPS, and no daemon has its pipes in {directory}: start nvidia-cuda-mps-control there, or \
         name its directory in {PIPE_VARIABLE} (in a container: mount it)",
        plan.rank
    );
    for (name, value) in variables {
        let found = read(name);
        anyhow::ensure!(
            found.as_ref() == Some(&value),
            "rank {} is to run with {name}={value}, and it is {}: start this worker with it, or all roles with \
             `laneway up`, which does",
            plan.rank,
            found.as_deref().unwrap_or("not set")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake;

    #[test]
    fn a_share_that_would_be_lost_is_refused() {
        let check_with = |threads: Option<u32>, set: Option<&str>, daemon: &str, says: Option<&str>| {
            let plan = WorkerPlan {
                active_thread_percentage: threads,
                ..fake::plan(0, None)
            };
            let read = |name: &str| match name {
                PIPE_VARIABLE => Some("/mps".to_owned()),
                _ => set.map(str::to_owned),
            };
            let outcome = super::check(&plan, read, |path| path == Path::new(daemon));
            match (outcome, says) {
                (Ok(()), None) => {}
                (Err(error), Some(says)) => assert!(error.to_string().contains(says), "{error}"),
                (outcome, says) => panic!("{outcome:?}, {says:?}"),
            }
        };
        let check = |threads, set, says| check_with(threads, set, "/mps/control", says);
        check(None, None, None);
        check(None, Some("30"), None);
        check(Some(30), Some("30"), None);
        check(
            Some(30),
            None,
            Some("ACTIVE_THREAD_PERCENTAGE=30, and it is not set"),
        );
        check(Some(30), Some("100"), Some("it is 100"));
        check_with(
            Some(30),
            Some("30"),
            "/elsewhere/control",
            Some("no daemon has its pipes in /mps"),
        );
        check_with(None, None, "/elsewhere/control", None);
    }
}
