//! How long the operations of one frame take, with the sizes of the released models and random weights.
//!
//! Everything is timed inside captured graphs, many replays at a time, by the wall clock round them. Each kind
//! of operation runs over as many copies of its weights as the stage has, so that no cache serves what memory has to
//! serve in the model. A stage is also timed whole.

mod codec;
mod cost;
mod language;
mod operands;

use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_device::{DType, Device, Op, Priority, Result, Stream, StreamConfig, Touches};

pub use cost::Cost;
use operands::Operands;

/// No measurement takes longer.
const DEADLINE: Duration = Duration::from_secs(60);

/// Copies of the predictor's weights while its operations are timed one kind at a time.
const PREDICTOR_COPIES: usize = 4;

/// Which Talker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// 0.6B.
    Small,
    /// 1.7B.
    Large,
}

/// What to time.
pub struct BenchConfig {
    /// On this device.
    pub device: Arc<dyn Device>,
    /// With this Talker.
    pub model: Model,
    /// Requests in the batch.
    pub rows: usize,
    /// Positions in the Talker's cache.
    pub context: usize,
    /// Frames of the Codec's windows.
    pub window: usize,
    /// Also every kind of operation alone.
    pub detail: bool,
    /// At least this long for each measurement.
    pub budget: Duration,
    /// Element type of the language models' caches.
    pub cache_dtype: Option<DType>,
}

/// Operations of one kind in a stage.
#[derive(Debug, Clone)]
pub struct KindTime {
    /// What they are for.
    pub label: String,
    /// Operation.
    pub op: &'static str,
    /// How many.
    pub count: usize,
    /// All of them.
    pub seconds: f64,
    /// All of them.
    pub cost: Cost,
}

/// One stage.
#[derive(Debug, Clone)]
pub struct StageTime {
    /// `talker`, `predictor`, `codec`.
    pub name: &'static str,
    /// Operations.
    pub operations: usize,
    /// The whole stage in one graph, median.
    pub seconds: f64,
    /// The fastest measurement.
    pub best_seconds: f64,
    /// Of all operations.
    pub cost: Cost,
    /// Sum of the kinds timed alone; empty without detail.
    pub kinds: Vec<KindTime>,
}

struct Timed {
    label: String,
    op: Op,
    cost: Cost,
}

/// Operations of a stage in order.
pub(crate) struct Stage {
    name: &'static str,
    ops: Vec<Timed>,
}

impl Stage {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            ops: Vec::new(),
        }
    }

    fn add(&mut self, label: &str, op: impl Into<Op>) {
        self.add_attention(label, op, 0);
    }

    /// `positions`: keys that each row sees.
    fn add_attention(&mut self, label: &str, op: impl Into<Op>, positions: usize) {
        let op = op.into();
        self.ops.push(Timed {
            label: label.to_owned(),
            cost: cost::cost(&op, positions),
            op,
        });
    }

    /// Labels in the order of first use.
    fn kinds(&self) -> Vec<&str> {
        let mut kinds: Vec<&str> = Vec::new();
        for timed in &self.ops {
            if !kinds.contains(&timed.label.as_str()) {
                kinds.push(&timed.label);
            }
        }
        kinds
    }
}

/// Time the three stages of a frame.
///
/// # Errors
/// The device refuses an operation, or has no memory.
pub fn bench(config: &BenchConfig) -> Result<Vec<StageTime>> {
    let stream = config.device.create_stream(StreamConfig {
        name: "bench".to_owned(),
        priority: Priority::Normal,
        partition_sms: None,
    })?;
    let widths = match config.model {
        Model::Small => language::TALKER_SMALL,
        Model::Large => language::TALKER_LARGE,
    };
    let cache_dtype = config.cache_dtype.unwrap_or(language::CACHE_DTYPE);
    let (rows, context) = (config.rows, config.context);
    let operands = |given| Operands::new(config.device.clone(), cache_dtype, given);
    let mut times = Vec::new();
    // One stage's memory at a time.
    {
        let o = operands(DType::Bf16);
        let talker = language::talker(&o, widths, rows, context)?;
        times.push(time_stage(&talker, &talker, &*stream, config)?);
    }
    {
        let o = operands(DType::Bf16);
        let predictor = language::predictor(&o, widths.hidden, rows, 1)?;
        let apart = match config.detail {
            true => language::predictor(&o, widths.hidden, rows, PREDICTOR_COPIES)?,
            false => Stage::new("predictor"),
        };
        times.push(time_stage(&predictor, &apart, &*stream, config)?);
    }
    // The speech tokenizer's checkpoint is in f32.
    let o = operands(DType::F32);
    let codec = codec::codec(&o, rows, config.window)?;
    times.push(time_stage(&codec, &codec, &*stream, config)?);
    Ok(times)
}

fn time_stage(stage: &Stage, apart: &Stage, stream: &dyn Stream, config: &BenchConfig) -> Result<StageTime> {
    let all: Vec<&Op> = stage.ops.iter().map(|timed| &timed.op).collect();
    let (seconds, best_seconds) = time(&all, stream, config.budget)?;
    let mut kinds = Vec::new();
    for label in apart.kinds().into_iter().filter(|_| config.detail) {
        let ops: Vec<&Timed> = apart.ops.iter().filter(|timed| timed.label == label).collect();
        // Few operations would be drowned by the launch of their graph.
        let repeat = 20usize.div_ceil(ops.len());
        let repeated: Vec<&Op> = std::iter::repeat_n(ops.iter().map(|timed| &timed.op), repeat)
            .flatten()
            .collect();
        let (seconds, _) = time(&repeated, stream, config.budget / 4)?;
        kinds.push(KindTime {
            label: label.to_owned(),
            op: ops[0].op.name(),
            count: ops.len(),
            seconds: seconds / repeat as f64,
            cost: ops.iter().fold(Cost::default(), |sum, timed| sum + timed.cost),
        });
    }
    Ok(StageTime {
        name: stage.name,
        operations: stage.ops.len(),
        seconds,
        best_seconds,
        cost: stage
            .ops
            .iter()
            .fold(Cost::default(), |sum, timed| sum + timed.cost),
        kinds,
    })
}

/// Median and fastest seconds of one run of `ops`, captured on `stream`.
///
/// # Errors
/// The stream refuses an operation, or fails.
pub fn time_operations(ops: &[Op], stream: &dyn Stream, budget: Duration) -> Result<(f64, f64)> {
    time(&ops.iter().collect::<Vec<_>>(), stream, budget)
}

/// What operations must at least move and compute, where attention sees `positions` keys.
pub fn cost_of(ops: &[Op], positions: usize) -> Cost {
    ops.iter()
        .fold(Cost::default(), |sum, op| sum + cost::cost(op, positions))
}

fn time(ops: &[&Op], stream: &dyn Stream, budget: Duration) -> Result<(f64, f64)> {
    let graph = stream.capture(&mut |stream| {
        for op in ops {
            stream.launch(op, &Touches::none())?;
        }
        Ok(())
    })?;
    let touches = pools(ops.iter().copied());
    let replay = |times: usize| -> Result<f64> {
        let began = Instant::now();
        for _ in 0..times {
            stream.replay(&graph, &touches)?;
        }
        stream.record()?.synchronize(DEADLINE)?;
        Ok(began.elapsed().as_secs_f64())
    };
    replay(2)?;
    let once = replay(1)?;
    // A measurement is long enough that its start and end do not count.
    let measurements = 5;
    let each = budget.as_secs_f64() / f64::from(measurements);
    let times = ((each / once.max(1e-7)) as usize).clamp(1, 2000);
    let mut seconds = (0..measurements)
        .map(|_| Ok(replay(times)? / times as f64))
        .collect::<Result<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    Ok((seconds[seconds.len() / 2], seconds[0]))
}

/// Every pool that `ops` reach by index, as a replay of a graph of them declares it.
pub fn touches_of(ops: &[Op]) -> Touches {
    pools(ops.iter())
}

fn pools<'a>(ops: impl Iterator<Item = &'a Op>) -> Touches {
    let mut known: Vec<u64> = Vec::new();
    let mut touches = Touches::none();
    for op in ops {
        for pool in op.access().indirect {
            if !known.contains(&pool.buffer.id()) {
                known.push(pool.buffer.id());
                touches.write(pool.buffer.view());
            }
        }
    }
    touches
}

#[cfg(test)]
mod tests;
