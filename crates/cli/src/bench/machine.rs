//! What a figure was measured on.

use serde::Serialize;

/// Facts that a figure means nothing without.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    cpu: Option<String>,
    cores: Option<usize>,
    memory_gib: Option<f64>,
    kernel: Option<String>,
    /// Processes that wanted a core during the last minute: above the cores, others took part of the machine.
    load_average: Option<f64>,
}

impl Machine {
    pub(super) fn read() -> Self {
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
            load_average: file("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse().ok()),
        }
    }
}
