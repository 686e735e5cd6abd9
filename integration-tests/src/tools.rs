//! Programs that `make tools` installs and that some tests need.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::deployment::checkout;

/// The project's own Python, if `module` can be imported there. Without it the test is to be skipped: the reason is
/// printed.
///
/// # Panics
/// It is missing, and `CI` is `true`: there, nothing is skipped.
pub fn python_with(module: &str) -> Option<PathBuf> {
    let python = checkout().join(".tools/venv/bin/python");
    let imported = Command::new(&python)
        .args(["-c", &format!("import {module}")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if imported {
        return Some(python);
    }
    let reason = format!("the Python package `{module}` is not in .tools/venv: run `make tools`");
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{reason}");
    eprintln!("skipped: {reason}");
    None
}
