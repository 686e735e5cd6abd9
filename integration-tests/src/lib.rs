//! Harness that starts the real binaries on port 0.
