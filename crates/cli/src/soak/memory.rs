//! Memory over the time of a soak: of every process, and of the devices.
//!
//! A series is flat when the median of its last quarter is at most the allowed growth above that of its first.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;

const MIB: f64 = (1 << 20) as f64;

/// Fewer samples say nothing of a quarter.
const LEAST_SAMPLES: usize = 8;

/// Growth that is allowed beside the absolute one, of the first quarter: allocators keep what bursts needed.
const GROWTH_SHARE: f64 = 0.05;

/// How long `nvidia-smi` may take.
const QUERY_DEADLINE: Duration = Duration::from_secs(10);

/// Readings of everything that is watched, by name.
#[derive(Debug)]
pub(super) struct Memory {
    allowed_growth_mib: f64,
    processes: BTreeMap<(String, u32), Series>,
    devices: BTreeMap<u32, Series>,
    /// Why devices could not be read, for the first time that they could not.
    unread: Option<String>,
}

/// (seconds since the begin, MiB).
type Series = Vec<(f64, f64)>;

/// What became of one series.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Growth {
    what: String,
    process: Option<u32>,
    samples: usize,
    /// Medians.
    first_quarter_mib: f64,
    last_quarter_mib: f64,
    peak_mib: f64,
    allowed_growth_mib: f64,
    /// `None`: too short to say, as of a process that was killed.
    flat: Option<bool>,
    /// Seconds and MiB, about twenty of them.
    curve: Series,
}

/// All series.
#[derive(Debug, Serialize)]
pub(super) struct Summary {
    tolerance: String,
    pub(super) processes: Vec<Growth>,
    pub(super) devices: Vec<Growth>,
    pub(super) devices_unread: Option<String>,
}

impl Memory {
    pub(super) fn new(allowed_growth_mib: f64) -> Self {
        Memory {
            allowed_growth_mib,
            processes: BTreeMap::new(),
            devices: BTreeMap::new(),
            unread: None,
        }
    }

    /// Read resident memory of processes. One that has just ended is left out.
    pub(super) fn read_processes(&mut self, at_s: f64, processes: &[(String, u32)]) {
        for (name, process) in processes {
            if let Some(mib) = resident_mib(*process) {
                let series = self.processes.entry((name.clone(), *process)).or_default();
                series.push((at_s, mib));
            }
        }
    }

    /// Ask the driver for used memory of each GPU.
    pub(super) async fn read_devices(&mut self, at_s: f64) {
        match used_by_device().await {
            Ok(used) => {
                for (device, mib) in used {
                    self.devices.entry(device).or_default().push((at_s, mib));
                }
            }
            Err(error) => {
                self.unread.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }

    pub(super) fn summary(&self) -> Summary {
        let growth = |what: String, process, series: &Series| {
            Growth::of(what, process, series, self.allowed_growth_mib)
        };
        Summary {
            tolerance: format!(
                "the median of the last quarter may be {} MiB and {}% above that of the first",
                self.allowed_growth_mib,
                100.0 * GROWTH_SHARE
            ),
            processes: self
                .processes
                .iter()
                .map(|((name, process), series)| growth(name.clone(), Some(*process), series))
                .collect(),
            devices: self
                .devices
                .iter()
                .map(|(device, series)| growth(format!("cuda:{device}"), None, series))
                .collect(),
            devices_unread: self.unread.clone(),
        }
    }
}

impl Growth {
    fn of(what: String, process: Option<u32>, series: &Series, allowed_growth_mib: f64) -> Self {
        let quarter = (series.len() / 4).max(1).min(series.len());
        let first_quarter_mib = median(&series[..quarter]);
        let last_quarter_mib = median(&series[series.len() - quarter..]);
        let allowed = allowed_growth_mib + GROWTH_SHARE * first_quarter_mib;
        Growth {
            what,
            process,
            samples: series.len(),
            first_quarter_mib,
            last_quarter_mib,
            peak_mib: series.iter().map(|(_, mib)| *mib).fold(0.0, f64::max),
            allowed_growth_mib: allowed,
            flat: (series.len() >= LEAST_SAMPLES).then_some(last_quarter_mib <= first_quarter_mib + allowed),
            curve: series
                .iter()
                .step_by(series.len().div_ceil(20).max(1))
                .copied()
                .collect(),
        }
    }

    /// Why it is not flat.
    pub(super) fn problem(&self) -> Option<String> {
        (self.flat == Some(false)).then(|| {
            format!(
                "memory of {} grew from {:.0} to {:.0} MiB (first and last quarter); {:.0} MiB are allowed",
                self.what, self.first_quarter_mib, self.last_quarter_mib, self.allowed_growth_mib
            )
        })
    }
}

fn median(series: &[(f64, f64)]) -> f64 {
    let mut values: Vec<f64> = series.iter().map(|(_, mib)| *mib).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn resident_mib(process: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib * 1024.0 / MIB)
}

async fn used_by_device() -> anyhow::Result<Vec<(u32, f64)>> {
    let query = tokio::process::Command::new("nvidia-smi")
        .args(["--query-gpu=index,memory.used", "--format=csv,noheader,nounits"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(QUERY_DEADLINE, query)
        .await
        .with_context(|| format!("wait {QUERY_DEADLINE:?} for nvidia-smi"))?
        .context("run nvidia-smi")?;
    anyhow::ensure!(output.status.success(), "nvidia-smi ended with {}", output.status);
    parse(&String::from_utf8_lossy(&output.stdout))
}

/// Lines of `index, MiB`.
fn parse(listing: &str) -> anyhow::Result<Vec<(u32, f64)>> {
    let line = |line: &str| {
        let (index, used) = line.split_once(',')?;
        Some((index.trim().parse().ok()?, used.trim().parse().ok()?))
    };
    listing
        .lines()
        .map(|each| line(each).with_context(|| format!("read `{each}` of nvidia-smi")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(values: &[f64], allowed: f64, flat: Option<bool>) {
        let series: Series = values
            .iter()
            .enumerate()
            .map(|(i, mib)| (i as f64, *mib))
            .collect();
        let growth = Growth::of("worker 0".into(), Some(7), &series, allowed);
        assert_eq!(growth.flat, flat, "{growth:?}");
        assert_eq!(growth.problem().is_some(), flat == Some(false));
    }

    #[test]
    fn the_last_quarter_is_held_to_the_first() {
        check(&[100.0; 16], 0.0, Some(true));
        // 5% of 100 and what is allowed.
        let steps = |last: f64| [[100.0; 8], [last; 8]].concat();
        check(&steps(114.0), 10.0, Some(true));
        check(&steps(116.0), 10.0, Some(false));
        // A peak in between, or a single reading at the end, is no growth.
        check(
            &[[100.0; 6], [900.0, 900.0, 100.0, 100.0, 100.0, 900.0]].concat(),
            10.0,
            Some(true),
        );
        check(&[100.0, 900.0], 10.0, None);
        check(&[], 10.0, None);
    }

    #[test]
    fn a_leak_of_every_request_is_found() {
        let leak: Vec<f64> = (0..240).map(|sample| 1000.0 + f64::from(sample)).collect();
        check(&leak, 64.0, Some(false));
    }

    #[test]
    fn this_process_and_what_nvidia_smi_prints_can_be_read() {
        assert!(resident_mib(std::process::id()).unwrap() > 1.0);
        assert_eq!(resident_mib(u32::MAX), None);
        assert_eq!(parse("0, 1024\n1, 3\n").unwrap(), [(0, 1024.0), (1, 3.0)]);
        assert!(format!("{:#}", parse("0, [N/A]").unwrap_err()).contains("[N/A]"));
    }
}
