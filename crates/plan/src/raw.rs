//! The configuration as written: one field for each key, units in the types, nothing checked across keys.
//!
//! [`crate::Loaded::check`] turns it into a [`crate::Deployment`]. Keys with a fixed default have it in
//! [`defaults`], the lowest layer, so that a default is merged and reported like any other value; `Option`
//! is for keys that are required, or whose default depends on others.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::deployment::{DeviceKind, MpsMode, Precision, Priority, Weights};

/// Values of the keys that a file may leave out.
pub mod defaults {
    /// `max_seq_len`, positions.
    pub const MAX_SEQ_LEN: u32 = 8192;
    /// `replicas`.
    pub const REPLICAS: u32 = 1;
    /// `limits.max_rows`: where decode steps of the 1.7B model are still far inside the frame time.
    pub const MAX_ROWS: u32 = 64;
    /// `limits.max_prefill_tokens`.
    pub const MAX_PREFILL_TOKENS: u32 = 4096;
    /// `limits.max_queue`.
    pub const MAX_QUEUE: u32 = 256;
    /// `limits.max_text_chars`: about two minutes of speech.
    pub const MAX_TEXT_CHARS: u32 = 2000;
    /// `limits.max_frames`: 2048 frames are 164 seconds.
    pub const MAX_FRAMES: u32 = 2048;
    /// `page_size` of a paged cache, positions.
    pub const PAGE_SIZE: u32 = 16;
    /// `services.engine_manager.listen`.
    pub const ENGINE_MANAGER_LISTEN: &str = "127.0.0.1:7070";
    /// `services.gateway.listen`.
    pub const GATEWAY_LISTEN: &str = "127.0.0.1:8080";
    /// `services.worker.listen`: any free port.
    pub const WORKER_LISTEN: &str = "127.0.0.1:0";
    /// `services.drain_timeout`: a capped request at real time would take longer; most end well inside.
    pub const DRAIN_TIMEOUT: &str = "30s";
    /// `services.stall_timeout`: a hundred frame times.
    pub const STALL_TIMEOUT: &str = "8s";
}

/// The root of the file.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawDeployment {
    /// Registry name of the model.
    pub model: Option<String>,
    /// `hf://organisation/name[@revision]`, `random:<seed>` or a directory.
    pub weights: Option<Weights>,
    /// A preset, or a directory (with a `/`) that holds the model's configuration files.
    pub model_config: Option<String>,
    /// `cpu` or `cuda`.
    pub device: Option<DeviceKind>,
    /// `bf16` or `f32`; the device's own where it is left out.
    pub precision: Option<Precision>,
    /// Longest sequence in positions.
    pub max_seq_len: NonZeroU32,
    /// Which nodes run where.
    pub node_groups: Option<Vec<RawNodeGroup>>,
    /// Whole copies of the node groups, each on ranks of its own: with n ranks in the groups, rank r of copy k is rank
    /// k * n + r of the deployment.
    pub replicas: NonZeroU32,
    /// Device index of each rank; rank 0 on device 0, 1 on 1 and so on where it is left out.
    #[serde(default)]
    pub rank_devices: BTreeMap<u32, u32>,
    /// How workers share a device.
    pub mps: Option<RawMps>,
    /// Sizes by resource key.
    #[serde(default)]
    pub resources: BTreeMap<String, RawResource>,
    /// Bounds of admission and of a step.
    pub limits: RawLimits,
    /// Row counts that captures are made for; powers of two up to `limits.max_rows` where it is left out.
    pub capture_buckets: Option<Vec<NonZeroU32>>,
    /// Chunk policies by stream edge.
    #[serde(default)]
    pub chunks: BTreeMap<String, RawChunkPolicy>,
    /// Addresses and time bounds.
    pub services: RawServices,
    /// What the machine has, where whoever validates cannot ask it.
    pub devices: Option<Vec<RawDevice>>,
}

/// One entry of `node_groups`.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawNodeGroup {
    /// Nodes of the group.
    pub nodes: Vec<String>,
    /// Ranks that they run on; `[0]` where it is left out.
    pub ranks: Option<Vec<u32>>,
    /// Walks of the nodes, for the reader: they must be all of them.
    pub walks: Option<Vec<String>>,
    /// Lane number, or `auto`; the chain where it is left out.
    pub lane: Option<RawLane>,
    /// The lane that `lane: auto` moves the nodes to.
    pub lane_id: Option<NonZeroU32>,
    /// Stream priority of the lane.
    pub priority: Option<Priority>,
    /// SM partition of the lane.
    pub sms: Option<NonZeroU32>,
    /// What `lane: auto` may choose among.
    pub auto: Option<RawAuto>,
    /// Memory budget of the lane.
    pub memory: Option<ByteSize>,
    /// Most rows of one step of the lane; `limits.max_rows` where it is left out.
    pub max_rows: Option<NonZeroU32>,
}

/// `lane`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RawLane {
    /// A fixed lane; 0 is the chain.
    Id(u32),
    /// The worker chooses between the chain and `lane_id`.
    Auto,
}

/// `auto`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawAuto {
    /// SM partitions; 0 is no partition.
    pub sms: Vec<u32>,
}

/// `mps`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawMps {
    /// `required`, `unmanaged` or `disabled`.
    pub mode: RawMpsMode,
    /// Settings by rank.
    #[serde(default)]
    pub ranks: BTreeMap<u32, RawMpsRank>,
}

/// `mps.mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RawMpsMode {
    /// A daemon must answer.
    Required,
    /// A daemon that someone else runs must answer.
    Unmanaged,
    /// Workers time-slice the device, on purpose.
    Disabled,
}

impl From<RawMpsMode> for MpsMode {
    fn from(mode: RawMpsMode) -> Self {
        match mode {
            RawMpsMode::Required => MpsMode::Required,
            RawMpsMode::Unmanaged => MpsMode::Unmanaged,
            RawMpsMode::Disabled => MpsMode::Disabled,
        }
    }
}

/// One entry of `mps.ranks`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawMpsRank {
    /// Share of the device's threads, 1 to 100.
    pub active_thread_percentage: NonZeroU32,
    /// Most device memory that the rank may allocate; without a bound where it is left out.
    pub pinned_device_memory: Option<ByteSize>,
}

/// One entry of `resources`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RawResource {
    /// Slots of a pool; `limits.max_rows` where it is left out.
    pub slots: Option<NonZeroU32>,
    /// Pages of a paged cache; enough for `limits.max_rows` of `max_seq_len` where it is left out.
    pub pages: Option<NonZeroU32>,
    /// Positions of a page.
    pub page_size: Option<NonZeroU32>,
}

/// `limits`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawLimits {
    /// Requests that run at once.
    pub max_rows: NonZeroU32,
    /// Packed tokens of a prefill step.
    pub max_prefill_tokens: NonZeroU32,
    /// Requests that wait; 0 refuses at once what cannot run.
    pub max_queue: u32,
    /// Characters of a text.
    pub max_text_chars: NonZeroU32,
    /// Frames of a request.
    pub max_frames: NonZeroU32,
}

/// One entry of `chunks`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawChunkPolicy {
    /// Items of the first window.
    pub first: NonZeroU32,
    /// Items of the windows after it.
    #[serde(default)]
    pub ramp: Vec<NonZeroU32>,
    /// Items of every window after those.
    pub steady: NonZeroU32,
}

/// `services`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawServices {
    /// The engine-manager.
    pub engine_manager: RawEngineManager,
    /// The gateway.
    pub gateway: RawGateway,
    /// Every worker.
    pub worker: RawWorker,
    /// How long running streams may take to finish after SIGTERM.
    pub drain_timeout: Span,
    /// A worker that has work and lands no step for this long is stuck.
    pub stall_timeout: Span,
}

/// `services.engine_manager`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawEngineManager {
    /// Where it listens.
    pub listen: Address,
    /// Where others reach it; where it listens when left out.
    pub address: Option<Address>,
}

/// `services.gateway`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawGateway {
    /// Where it listens.
    pub listen: Address,
}

/// `services.worker`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawWorker {
    /// Where each listens; port 0 takes a free one.
    pub listen: Address,
    /// Host that it registers; the one it listens on when left out.
    pub advertise: Option<String>,
}

/// One entry of `devices`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawDevice {
    /// `cpu`, `cuda:0`.
    pub name: String,
    /// Memory that may be allocated in all.
    pub memory: ByteSize,
    /// Streaming multiprocessors.
    #[serde(default)]
    pub sms: u32,
    /// A partition is a multiple of this many; 0 where there are none.
    #[serde(default)]
    pub partition_granularity: u32,
}

/// Bytes: a number, or a number and a unit (`500MB`, `4GiB`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

/// A length of time: a number and a unit (`500ms`, `30s`, `2m`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

/// `host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address(pub String);

const BYTE_UNITS: &[(&str, u64)] = &[
    ("B", 1),
    ("kB", 1000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
];

const TIME_UNITS_MS: &[(&str, u64)] = &[("ms", 1), ("s", 1000), ("m", 60_000)];

/// A decimal number and one of the units, as a whole number of the smallest.
fn with_unit(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit.trim())?;
    let value = number.parse::<f64>().ok()? * *factor as f64;
    (value < 9e15).then_some(value as u64)
}

impl ByteSize {
    fn parse(text: &str) -> Option<Self> {
        with_unit(text, BYTE_UNITS).map(ByteSize)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1_000_000_000 => write!(f, "{:.2} GB", bytes as f64 / 1e9),
            bytes if bytes >= 1_000_000 => write!(f, "{:.2} MB", bytes as f64 / 1e6),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

impl Span {
    fn parse(text: &str) -> Option<Self> {
        with_unit(text, TIME_UNITS_MS).map(|ms| Span(Duration::from_millis(ms)))
    }
}

impl Address {
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let bare_ipv6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
        let valid =
            !host.is_empty() && !bare_ipv6 && !host.contains(['/', ' ']) && port.parse::<u16>().is_ok();
        valid.then(|| Address(text.to_owned()))
    }
}

/// A scalar that is read from its text form, or from a whole number.
struct Scalar<T> {
    expected: &'static str,
    from_text: fn(&str) -> Option<T>,
    from_number: fn(u64) -> Option<T>,
}

impl<T> Visitor<'_> for Scalar<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.from_text)(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(text), &self))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        (self.from_number)(number).ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::invalid_value(de::Unexpected::Signed(number), &self)),
        }
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Scalar {
            expected: "a size in bytes, such as 4GiB or 500MB",
            from_text: ByteSize::parse,
            from_number: |bytes| Some(ByteSize(bytes)),
        })
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Scalar {
            expected: "a length of time with its unit, such as 500ms or 30s",
            from_text: Span::parse,
            from_number: |_| None,
        })
    }
}

impl<'de> Deserialize<'de> for Address {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Scalar {
            expected: "an address, such as 127.0.0.1:8080",
            from_text: Address::parse,
            from_number: |_| None,
        })
    }
}

impl<'de> Deserialize<'de> for RawLane {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Scalar {
            expected: "a lane: its number (0 is the chain), or `auto`",
            from_text: |text| (text == "auto").then_some(RawLane::Auto),
            from_number: |id| u32::try_from(id).ok().map(RawLane::Id),
        })
    }
}

impl<'de> Deserialize<'de> for Weights {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}
