//! What devices a machine has. The caller finds out; this crate only compares.

/// The devices of one machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceInventory {
    /// Devices by name.
    pub devices: Vec<DeviceSpec>,
    /// Who says so.
    pub origin: Origin,
}

/// Where an inventory is from: what to do about a device that is missing depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Origin {
    /// The machine was asked.
    #[default]
    Machine,
    /// The deployment's own `devices`.
    Stated,
    /// Whoever validates supposes it.
    Assumed,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSpec {
    /// `cpu`, `cuda:0`.
    pub name: String,
    /// Bytes that may be allocated in all.
    pub memory_bytes: u64,
    /// Streaming multiprocessors; 0 on a CPU.
    pub sms: u32,
    /// A partition is a multiple of this many SMs; 0 where partitions are not supported.
    pub partition_granularity: u32,
}

impl DeviceInventory {
    /// A machine with no GPU and this much memory.
    pub fn cpu(memory_bytes: u64) -> Self {
        Self {
            devices: vec![DeviceSpec {
                name: "cpu".to_owned(),
                memory_bytes,
                sms: 0,
                partition_granularity: 0,
            }],
            ..Self::default()
        }
    }

    /// `count` H200 GPUs: 141 GB, 132 SMs, partitions of 8 SMs each.
    pub fn h200(count: u32) -> Self {
        let devices = (0..count)
            .map(|index| DeviceSpec {
                name: format!("cuda:{index}"),
                memory_bytes: 141_000_000_000,
                sms: 132,
                partition_granularity: 8,
            })
            .collect();
        Self {
            devices,
            ..Self::default()
        }
    }

    /// The same devices, of no machine that was asked.
    #[must_use]
    pub fn assumed(self) -> Self {
        Self {
            origin: Origin::Assumed,
            ..self
        }
    }

    /// The device of that name.
    pub fn find(&self, name: &str) -> Option<&DeviceSpec> {
        self.devices.iter().find(|device| device.name == name)
    }
}
