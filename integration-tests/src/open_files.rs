//! How many files and connections this process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Make room for so many, for this process and those that it starts from now on.
///
/// # Errors
/// The machine does not allow so many, or does not let the limit be raised.
pub fn make_room(n_files: u64) -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= n_files) {
        return Ok(());
    }
    anyhow::ensure!(
        limit.maximum.is_none_or(|maximum| maximum >= n_files),
        "{n_files} open files are needed and this machine allows {} (`ulimit -Hn`)",
        limit.maximum.unwrap_or_default()
    );
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).map_err(|error| {
        anyhow::anyhow!("{n_files} open files are needed and the limit cannot be raised: {error}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_machine_does_not_allow_is_said() {
        make_room(16).unwrap();
        if getrlimit(Resource::Nofile).maximum.is_some() {
            let said = make_room(u64::MAX).unwrap_err().to_string();
            assert!(said.contains("ulimit -Hn"), "{said}");
        }
    }
}
