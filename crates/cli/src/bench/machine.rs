//! What a figure was measured on.

use serde::Serialize;

/// Facts that a figure means nothing without.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    cpu: Option<String>,
    cores: Option<usize>,
    memory_gib: Option<f64>,
    kernel: Option<String>,
    /// Processes that wanted a core during the last minute: above the cores, others took part of the machine.
    load_average: Option<f64>,
    /// Product names of the GPUs that this process sees.
    pub(super) gpus: Vec<String>,
    /// The NVIDIA driver's own line.
    driver: Option<String>,
}

/// What was measured, as git names it.
#[derive(Debug, Serialize)]
pub(crate) struct Source {
    commit: Option<String>,
    /// Files differ from the commit.
    changed: Option<bool>,
}

impl Machine {
    pub(crate) fn read() -> Self {
        let file = |path: &str| std::fs::read_to_string(path).ok();
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory_kb = |text: String| {
            field(&text, "MemTotal")?
                .trim_end_matches("kB")
                .trim()
                .parse::<f64>()
                .ok()
        };
        Machine {
            cpu: file("/proc/cpuinfo").and_then(|text| field(&text, "model name")),
            cores: std::thread::available_parallelism().ok().map(Into::into),
            memory_gib: file("/proc/meminfo")
                .and_then(memory_kb)
                .map(|kb| kb / f64::from(1 << 20)),
            kernel: file("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
            gpus: gpus(),
            driver: file("/proc/driver/nvidia/version")
                .and_then(|text| Some(text.lines().next()?.split_once(':')?.1.trim().to_owned())),
            load_average: file("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse().ok()),
        }
    }
}

fn gpus() -> Vec<String> {
    match laneway_cuda::gpus() {
        Ok(gpus) => gpus.into_iter().map(|gpu| gpu.name).collect(),
        Err(error) => {
            tracing::warn!(%error, "the GPUs are not known");
            Vec::new()
        }
    }
}

impl Source {
    /// Of the working directory; a tree that was copied without its history has none, and `commit` says it.
    pub(crate) fn read(commit: Option<String>) -> Self {
        let git = |arguments: &[&str]| {
            let output = std::process::Command::new("git").args(arguments).output().ok()?;
            let text = output
                .status
                .success()
                .then(|| String::from_utf8(output.stdout).ok());
            Some(text??.trim().to_owned())
        };
        match commit {
            Some(commit) => Source {
                commit: Some(commit),
                changed: None,
            },
            None => Source {
                commit: git(&["rev-parse", "HEAD"]),
                changed: git(&["status", "--porcelain"]).map(|files| !files.is_empty()),
            },
        }
    }
}
