//! Whether this process was started with the share of the device that its plan gives it.

use laneway_plan::WorkerPlan;

/// Hold the environment to what the plan says of the Multi-Process Service. The driver reads these variables when a
/// process starts and says nothing of one that is missing, so that a share would be lost without a word.
///
/// # Errors
/// A variable is missing or has another value.
pub(crate) fn check(plan: &WorkerPlan, read: impl Fn(&str) -> Option<String>) -> anyhow::Result<()> {
    for (name, value) in plan.mps_variables() {
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
        let check = |threads: Option<u32>, set: Option<&str>, says: Option<&str>| {
            let plan = WorkerPlan {
                active_thread_percentage: threads,
                ..fake::plan(0, None)
            };
            let outcome = super::check(&plan, |_| set.map(str::to_owned));
            match (outcome, says) {
                (Ok(()), None) => {}
                (Err(error), Some(says)) => assert!(error.to_string().contains(says), "{error}"),
                (outcome, says) => panic!("{outcome:?}, {says:?}"),
            }
        };
        check(None, None, None);
        check(None, Some("30"), None);
        check(Some(30), Some("30"), None);
        check(
            Some(30),
            None,
            Some("ACTIVE_THREAD_PERCENTAGE=30, and it is not set"),
        );
        check(Some(30), Some("100"), Some("it is 100"));
    }
}
