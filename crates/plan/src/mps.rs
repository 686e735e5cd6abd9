//! What a worker process is started with so that it is the client of the Multi-Process Service that its plan means.

use crate::deployment::RankSpec;
use crate::worker_plan::WorkerPlan;

/// Where clients and commands find a daemon's sockets.
pub const PIPE_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// A client's share of the device's threads, in percent.
pub const THREADS_VARIABLE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// Most device memory that a client may allocate, by device.
pub const MEMORY_VARIABLE: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";

/// Bytes of the unit that memory limits are written in.
const MIB: u64 = 1 << 20;

/// Variables of a process and their values. The driver reads them once, when the process starts.
pub type Variables = Vec<(&'static str, String)>;

impl RankSpec {
    /// The environment that this rank's process needs besides [`PIPE_VARIABLE`].
    pub fn mps_variables(&self) -> Variables {
        variables(
            self.device,
            self.active_thread_percentage,
            self.pinned_device_memory_bytes,
        )
    }
}

impl WorkerPlan {
    /// As [`RankSpec::mps_variables`].
    pub fn mps_variables(&self) -> Variables {
        variables(
            self.device_index,
            self.active_thread_percentage,
            self.pinned_device_memory_bytes,
        )
    }
}

fn variables(device: u32, threads: Option<u32>, memory_bytes: Option<u64>) -> Variables {
    let threads = threads.map(|percent| (THREADS_VARIABLE, percent.to_string()));
    // Whole units: a worker must not get more than it was given.
    let memory = memory_bytes.map(|bytes| (MEMORY_VARIABLE, format!("{device}={}M", bytes / MIB)));
    threads.into_iter().chain(memory).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_written_as_the_driver_reads_it() {
        let check = |threads, memory, expected: &[(&'static str, &str)]| {
            let rank = RankSpec {
                rank: 3,
                device: 1,
                active_thread_percentage: threads,
                pinned_device_memory_bytes: memory,
            };
            let variables = rank.mps_variables();
            let shown: Vec<_> = variables
                .iter()
                .map(|(name, value)| (*name, value.as_str()))
                .collect();
            assert_eq!(shown, expected);
        };
        check(None, None, &[]);
        check(Some(30), None, &[(THREADS_VARIABLE, "30")]);
        check(
            Some(100),
            Some((20 << 30) + 5),
            &[(THREADS_VARIABLE, "100"), (MEMORY_VARIABLE, "1=20480M")],
        );
    }
}
