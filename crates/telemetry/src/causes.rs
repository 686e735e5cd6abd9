//! An error and its causes in one line.

use std::error::Error;

/// The error and each of its causes once: many errors name their cause in their own text as well as beside it.
pub fn causes(error: &anyhow::Error) -> String {
    line(error.chain())
}

/// The same of an error of a library.
pub fn causes_of(error: &(dyn Error + 'static)) -> String {
    line(std::iter::successors(Some(error), |error| (*error).source()))
}

/// Why a call failed: what broke the connection under it, or else what the other end said.
pub fn causes_of_status(status: &tonic::Status) -> String {
    match status.source() {
        Some(broken) => causes_of(broken),
        None => status.message().to_owned(),
    }
}

fn line<'a>(chain: impl Iterator<Item = &'a (dyn Error + 'static)>) -> String {
    let mut line = String::new();
    for cause in chain {
        let text = cause.to_string();
        if !line.is_empty() {
            if line.ends_with(&text) {
                continue;
            }
            line.push_str(": ");
        }
        line.push_str(&text);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(chain: &[&str], expected: &str) {
        let (first, rest) = chain.split_first().unwrap();
        let error = rest
            .iter()
            .fold(anyhow::anyhow!((*first).to_owned()), |error, text| {
                error.context((*text).to_owned())
            });
        assert_eq!(causes(&error), expected);
        assert_eq!(causes_of(&*error), expected);
    }

    #[test]
    fn a_call_failed_for_what_broke_under_it_or_for_what_was_said() {
        let said = tonic::Status::unavailable("come back later");
        assert_eq!(causes_of_status(&said), "come back later");
        let broken = std::io::Error::other("certificate expired");
        let broken = tonic::Status::from_error(Box::new(broken));
        assert_eq!(causes_of_status(&broken), "certificate expired");
    }

    #[test]
    fn each_cause_is_said_once() {
        check(&["refused"], "refused");
        check(&["refused", "connect"], "connect: refused");
        check(
            &["refused", "connect: refused", "speak"],
            "speak: connect: refused",
        );
        check(
            &["refused", "transport error", "transport error"],
            "transport error: refused",
        );
    }
}
