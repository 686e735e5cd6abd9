//! How many files this process may have open, of which every connection is one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raise the limit as far as the machine allows: what most machines begin with is for a program that opens files.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => tracing::debug!(limit = ?limit.maximum, "limit of open files raised"),
        Err(error) => tracing::warn!(limit = ?limit.current, %error, "limit of open files not raised"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_as_the_machine_allows() {
        raise_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
    }
}
