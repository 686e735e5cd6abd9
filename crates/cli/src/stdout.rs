//! Output whose reader may leave before its end, `laneway say … | head`.

use std::fmt;
use std::io::{ErrorKind, Write as _};

use anyhow::Context as _;

/// Exit code of a program that the signal for a pipe without a reader ends, as a shell shows it.
pub(crate) const EXIT_READER_LEFT: u8 = 128 + 13;

/// Nobody reads what is written any more: nothing to report, and nothing more to do.
#[derive(Debug)]
pub(crate) struct ReaderLeft;

impl fmt::Display for ReaderLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads the output any more")
    }
}

impl std::error::Error for ReaderLeft {}

/// What became of a write to `what`: [`ReaderLeft`] apart from other errors.
pub(crate) fn written(result: std::io::Result<()>, what: impl fmt::Display) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ReaderLeft.into()),
        other => other.with_context(|| format!("write {what}")),
    }
}

/// Write a line to standard output, by [`outln!`].
pub(crate) fn line(text: fmt::Arguments<'_>) -> anyhow::Result<()> {
    written(writeln!(std::io::stdout(), "{text}"), "to standard output")
}

/// `println!` that returns an error where that one panics.
macro_rules! outln {
    ($($argument:tt)*) => { $crate::stdout::line(format_args!($($argument)*)) };
}
pub(crate) use outln;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_who_left_is_told_from_a_full_disk() {
        let error = |kind: ErrorKind| written(Err(kind.into()), "out.wav").unwrap_err();
        assert!(error(ErrorKind::BrokenPipe).is::<ReaderLeft>());
        let full = error(ErrorKind::StorageFull);
        assert!(!full.is::<ReaderLeft>());
        assert_eq!(full.to_string(), "write out.wav");
    }
}
