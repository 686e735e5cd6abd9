//! Ranks and the devices that they run on.

use std::collections::{BTreeMap, BTreeSet};

use super::groups::Group;
use crate::deployment::{DeviceKind, RankSpec};
use crate::inventory::{DeviceInventory, DeviceSpec, Origin};
use crate::load::Loaded;
use crate::raw::{RawDeployment, RawMps, RawMpsMode};
use crate::violation::{Reason, Violation};

/// Threads of a device that ranks share: a percentage.
const WHOLE_DEVICE_PERCENT: u32 = 100;

/// Most copies of a deployment: more than any machine has room for, so a slip of the pen is found.
const MAX_REPLICAS: u32 = 64;

impl Loaded {
    /// What the file says that the machine has.
    pub(super) fn inventory(&mut self, raw: &RawDeployment) -> Option<DeviceInventory> {
        let devices = raw.devices.as_ref()?;
        let mut inventory = DeviceInventory {
            origin: Origin::Stated,
            ..DeviceInventory::default()
        };
        for (i, device) in devices.iter().enumerate() {
            let index = device.name.strip_prefix("cuda:").map(str::parse::<u32>);
            let well_formed = device.name == "cpu" || matches!(index, Some(Ok(_)));
            if !well_formed || inventory.find(&device.name).is_some() {
                let message = format!("`{}` is not the name of one more device", device.name);
                let remedy = "write each device once: `cpu`, `cuda:0`, `cuda:1`";
                self.add(Violation::new(
                    Reason::InvalidValue,
                    format!("devices[{i}].name"),
                    message,
                    remedy,
                ));
            }
            inventory.devices.push(DeviceSpec {
                name: device.name.clone(),
                memory_bytes: device.memory.0,
                sms: device.sms,
                partition_granularity: device.partition_granularity,
            });
        }
        Some(inventory)
    }

    /// Whether the device computes in the precision asked for.
    pub(super) fn check_precision(&mut self, raw: &RawDeployment) {
        let (Some(device), Some(precision)) = (raw.device, raw.precision) else {
            return;
        };
        let offered = device.precisions();
        if !offered.contains(&precision) {
            let names: Vec<&str> = offered.iter().map(|precision| precision.name()).collect();
            let message = format!(
                "the {} device computes in {} only",
                device.name(0),
                names.join(" and ")
            );
            let remedy = format!("write `precision: {}`, or leave it out", names.join("` or `"));
            self.add(Violation::new(
                Reason::PrecisionUnsupported,
                "precision",
                message,
                remedy,
            ));
        }
    }

    pub(super) fn ranks(
        &mut self,
        raw: &RawDeployment,
        groups: &[Group],
        inventory: Option<&DeviceInventory>,
    ) -> Vec<RankSpec> {
        let mut first_group: BTreeMap<u32, &Group> = BTreeMap::new();
        for group in groups {
            for &rank in &group.ranks {
                first_group.entry(rank).or_insert(group);
            }
        }
        let mut expected = 0;
        for (&rank, group) in &first_group {
            if rank != expected {
                let message = format!("rank {rank} skips rank {expected}");
                let remedy = format!("write `{expected}`: ranks are numbered from 0 without gaps");
                self.add(Violation::new(
                    Reason::RankSkips,
                    format!("{}.ranks", group.key),
                    message,
                    remedy,
                ));
            }
            expected = rank.saturating_add(1);
        }
        // Copies follow the ranks that the groups name.
        let n_layout = first_group.len() as u32;
        let replicas = self.replicas(raw);
        let known = 0..n_layout.saturating_mul(replicas);
        let in_mps = raw
            .mps
            .iter()
            .flat_map(|mps| mps.ranks.keys().map(|rank| ("mps.ranks", rank)));
        let in_devices = raw.rank_devices.keys().map(|rank| ("rank_devices", rank));
        let unknown: Vec<_> = in_devices
            .chain(in_mps)
            .filter(|(_, rank)| !first_group.contains_key(rank) && !known.contains(rank))
            .collect();
        for (section, rank) in unknown {
            let message = format!("no node group runs on rank {rank}");
            let remedy = "take it out, or give a group this rank";
            self.add(Violation::new(
                Reason::UnknownRank,
                format!("{section}.{rank}"),
                message,
                remedy,
            ));
        }

        let copies = (0..replicas).flat_map(|copy| {
            let copied = first_group.iter();
            copied.map(move |(&rank, &group)| (copy * n_layout + rank, group))
        });
        let ranks = copies.map(|(rank, group)| {
            let default = if raw.device == Some(DeviceKind::Cuda) {
                rank
            } else {
                0
            };
            let device = raw.rank_devices.get(&rank).copied().unwrap_or(default);
            self.check_device(raw, rank, device, group, inventory);
            let share = raw.mps.as_ref().and_then(|mps| mps.ranks.get(&rank));
            RankSpec {
                rank,
                device,
                active_thread_percentage: share.map(|share| share.active_thread_percentage.get()),
                pinned_device_memory_bytes: share
                    .and_then(|share| share.pinned_device_memory)
                    .map(|bytes| bytes.0),
            }
        });
        ranks.collect()
    }

    fn replicas(&mut self, raw: &RawDeployment) -> u32 {
        let replicas = raw.replicas.get();
        if replicas <= MAX_REPLICAS {
            return replicas;
        }
        let message = format!("{replicas} copies of the deployment on one machine");
        let remedy = format!("write a number from 1 to {MAX_REPLICAS}");
        self.add(Violation::new(Reason::InvalidValue, "replicas", message, remedy));
        // What so many would be refused for besides says nothing more.
        1
    }

    fn check_device(
        &mut self,
        raw: &RawDeployment,
        rank: u32,
        device: u32,
        group: &Group,
        inventory: Option<&DeviceInventory>,
    ) {
        let Some(kind) = raw.device else { return };
        let key = match raw.rank_devices.contains_key(&rank) {
            true => format!("rank_devices.{rank}"),
            false => format!("{}.ranks", group.key),
        };
        let name = kind.name(device);
        if kind == DeviceKind::Cpu && device > 0 {
            let message = format!("rank {rank} is on CPU device {device}; there is one");
            self.add(Violation::new(
                Reason::DeviceMissing,
                key,
                message,
                "write 0, or leave it out",
            ));
        } else if let Some(inventory) = inventory
            && inventory.find(&name).is_none()
        {
            let have: Vec<&str> = inventory
                .devices
                .iter()
                .map(|device| device.name.as_str())
                .collect();
            let message = format!("rank {rank} is on {name}, which is not there");
            let has_gpu = have.iter().any(|name| name.starts_with("cuda:"));
            let remedy = match have.as_slice() {
                // Said of a whole kind: another index would be no better.
                have if kind == DeviceKind::Cuda && have.contains(&"cpu") && !has_gpu => match inventory.origin {
                    Origin::Machine => {
                        "no NVIDIA GPU was found (`nvidia-smi` lists those that there are): write `device: cpu`, or \
                         run the worker where a GPU and its driver are"
                    }
                    Origin::Stated => "there is no GPU in `devices`: write `device: cpu`, or add one, `cuda:0`",
                    Origin::Assumed => {
                        "the machine that --assume names has no GPU: write `device: cpu`, or assume one that has, \
                         `--assume h200:1`"
                    }
                }
                .to_owned(),
                [] => match inventory.origin {
                    Origin::Machine => "this machine has no devices",
                    Origin::Stated => "`devices` is empty: name what the machine has, or leave it out",
                    Origin::Assumed => "the machine that --assume names has no devices: assume one or more",
                }
                .to_owned(),
                have if kind == DeviceKind::Cpu && !have.contains(&"cpu") => {
                    "write `device: cuda`, or have a CPU there: `--assume cpu:<GiB>` of `validate`, `cpu` in `devices`"
                        .to_owned()
                }
                have => format!("map the rank to a device that is: {}", have.join(", ")),
            };
            self.add(Violation::new(Reason::DeviceMissing, key, message, remedy));
        }
    }

    pub(super) fn mps(&mut self, raw: &RawDeployment, ranks: &[RankSpec]) {
        let mut seen = BTreeSet::new();
        let shared = ranks.iter().find(|rank| !seen.insert(rank.device));
        let Some(mps) = &raw.mps else {
            if let (Some(DeviceKind::Cuda), Some(rank), false) = (raw.device, shared, self.was_lost("mps")) {
                let message = format!(
                    "rank {} shares cuda:{} with another rank, and nothing is said about MPS",
                    rank.rank, rank.device
                );
                let remedy = "write `mps: { mode: required }`, or `mode: disabled` to time-slice the device on purpose";
                self.add(Violation::new(
                    Reason::MpsNotStated,
                    format!("rank_devices.{}", rank.rank),
                    message,
                    remedy,
                ));
            }
            return;
        };
        if raw.device == Some(DeviceKind::Cpu) {
            let message = "MPS has no effect on the CPU device";
            self.add(Violation::new(
                Reason::MpsUnused,
                "mps",
                message,
                "take `mps` out",
            ));
        }
        if mps.mode == RawMpsMode::Disabled && !mps.ranks.is_empty() {
            let message = "shares of the device's threads have no effect while MPS is disabled";
            self.add(Violation::new(
                Reason::MpsUnused,
                "mps.ranks",
                message,
                "take `ranks` out, or write `mode: required`",
            ));
        }
        for (rank, share) in &mps.ranks {
            if share.active_thread_percentage.get() > WHOLE_DEVICE_PERCENT {
                let key = format!("mps.ranks.{rank}.active_thread_percentage");
                let message = format!(
                    "`{}` is more than the whole device",
                    share.active_thread_percentage
                );
                self.add(Violation::new(
                    Reason::InvalidValue,
                    key,
                    message,
                    "write a percentage from 1 to 100",
                ));
            }
        }
        if mps.mode == RawMpsMode::Required {
            self.mps_sums(mps, ranks);
        }
    }

    /// Shares may overlap: the sum of a device may be more than 100, as MPS allows. Where the daemon is for this
    /// deployment alone, less than 100 is a part of the device that nobody may use.
    fn mps_sums(&mut self, mps: &RawMps, ranks: &[RankSpec]) {
        let mut by_device: BTreeMap<u32, Vec<&RankSpec>> = BTreeMap::new();
        for rank in ranks {
            by_device.entry(rank.device).or_default().push(rank);
        }
        for (device, on_device) in by_device {
            let shares = on_device.iter().map(|rank| rank.active_thread_percentage);
            // A rank without a share may use the whole device.
            let Some(sum) = shares.sum::<Option<u32>>() else {
                continue;
            };
            let Some(last) = on_device.last().filter(|rank| mps.ranks.contains_key(&rank.rank)) else {
                continue;
            };
            if sum < WHOLE_DEVICE_PERCENT {
                let message = format!(
                    "the workers of cuda:{device} may use {sum}% of it together; {}% would be nobody's",
                    WHOLE_DEVICE_PERCENT - sum
                );
                self.add(Violation::new(
                    Reason::MpsUnused,
                    format!("mps.ranks.{}.active_thread_percentage", last.rank),
                    message,
                    "raise the shares to 100 or more together (they may overlap), or write `mode: unmanaged` when others \
                     share the daemon",
                ));
            }
        }
    }

    /// SM partitions of a group against what its device can make.
    pub(super) fn partitions(
        &mut self,
        raw: &RawDeployment,
        group: &Group,
        ranks: &[RankSpec],
        inventory: Option<&DeviceInventory>,
    ) {
        let partitions = group.partitions();
        for (at, (key, sms)) in partitions.iter().enumerate() {
            // A fixed one beside these is refused for being there at all.
            let among = |key: &str| key.contains(".auto.");
            let before = &partitions[..at];
            if before.iter().any(|(other, same)| among(other) && same == sms) {
                let message = format!("a partition of {sms} SMs is named twice");
                let remedy = "name each once";
                self.add(Violation::new(Reason::SmPartition, key, message, remedy));
            }
        }
        let wanted: u32 = partitions.iter().map(|(_, sms)| sms).sum();
        for (at, (key, sms)) in partitions.iter().enumerate() {
            let last = at + 1 == partitions.len();
            let violation = match raw.device {
                None => None,
                Some(DeviceKind::Cpu) => Some((
                    "the CPU device has no SM partitions".to_owned(),
                    "take it out".to_owned(),
                )),
                Some(DeviceKind::Cuda) => {
                    let n_layout = ranks.len() as u32 / raw.replicas.get().min(MAX_REPLICAS);
                    let layout = |rank: &RankSpec| rank.rank % n_layout.max(1);
                    let on = ranks.iter().filter(|rank| group.ranks.contains(&layout(rank)));
                    let mut devices =
                        on.filter_map(|rank| inventory?.find(&DeviceKind::Cuda.name(rank.device)));
                    devices.find_map(|device| {
                        partition_problem(device, *sms)
                            .or_else(|| partitions_problem(device, wanted).filter(|_| last))
                    })
                }
            };
            if let Some((message, remedy)) = violation {
                self.add(Violation::new(Reason::SmPartition, key, message, remedy));
            }
        }
    }
}

/// Why the device cannot make all partitions of a lane, which are there at once, side by side.
fn partitions_problem(device: &DeviceSpec, wanted: u32) -> Option<(String, String)> {
    let step = device.partition_granularity.max(1);
    let all = device.sms / step * step;
    (wanted > all).then(|| {
        (
            format!(
                "the partitions of the lane are {wanted} SMs together; {} has {all} for them",
                device.name
            ),
            "choose among fewer or smaller ones".to_owned(),
        )
    })
}

/// Why the device cannot make a partition of `sms`, and what it can.
fn partition_problem(device: &DeviceSpec, sms: u32) -> Option<(String, String)> {
    let step = device.partition_granularity;
    if step == 0 {
        return Some((
            format!("{} makes no SM partitions", device.name),
            "take it out".to_owned(),
        ));
    }
    let largest = device.sms / step * step;
    if sms.is_multiple_of(step) && sms <= largest {
        return None;
    }
    let below = (sms / step * step).min(largest);
    let above = below + step;
    let message = format!(
        "{} makes partitions of a multiple of {step} SMs, up to {largest}; {sms} is none",
        device.name
    );
    let remedy = match (below, above) {
        (0, above) => format!("write {above}"),
        (below, above) if above > largest => format!("write {below}, or take it out for the whole device"),
        (below, above) => format!("write {below} or {above}"),
    };
    Some((message, remedy))
}
