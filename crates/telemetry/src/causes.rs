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
