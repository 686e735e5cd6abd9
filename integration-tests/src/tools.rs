//! Programs that `make tools` installs and that some tests need.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::deployment::checkout;

/// The project's own Python, if `module` can be imported there. Without it the test is to be skipped: the reason is
/// printed.
///
/// # Panics
/// It is missing, and `CI` is set: there, nothing is skipped.
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
    missing(&format!("the Python package `{module}` is not in .tools/venv"));
    None
}

/// The first program of these names on the path. Without one the test is to be skipped: the reason is printed.
///
/// # Panics
/// There is none, and `CI` is set: there, nothing is skipped.
pub fn program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = names.iter().find_map(|name| {
        let mut files = std::env::split_paths(&path).map(|directory| directory.join(name));
        files.find(|file| file.is_file())
    });
    if found.is_none() {
        missing(&format!("there is no program `{}`", names.join("` or `")));
    }
    found
}

/// Say why a test is skipped, or fail it where nothing may be.
fn missing(what: &str) {
    let reason = format!("{what}: run `make tools`");
    let on_ci = std::env::var("CI").is_ok_and(|ci| !ci.is_empty() && ci != "false");
    assert!(!on_ci, "{reason}");
    eprintln!("skipped: {reason}");
}
