//! Holds one device against another, operation by operation.
//!
//! The reference is the CPU device; the subject is whatever is to be trusted. Every case has fresh random operands,
//! poisoned outputs, and asks for more than the right numbers: that a row has the same bits in any company
//! (batch invariance), that a fused operation is its parts, that nothing outside the operands was touched,
//! and that a second device of the same kind which runs its blocks in another order agrees to the bit.
//!
//! Error is ‖out − ref‖ / ‖ref‖. Where the subject rounds the inputs of a product to bfloat16, the reference gets
//! inputs that were rounded so: what remains is the order of sums, and the bounds are those of f32.

mod cases;
pub(crate) mod data;
mod experiment;
pub(crate) mod random;
mod rig;
mod runtime;
mod streams;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use laneway_device::{DType, Device, Result};
use parking_lot::{Condvar, Mutex};

pub use runtime::{RuntimeReport, check_runtime};

use cases::{Case, Work};
use experiment::{Experiment, Outcome, Placed};
use random::Random;
use rig::Rig;

/// Cases whose reference may be computed ahead of the subject: bounds the memory.
const AHEAD: usize = 12;

/// Which shapes are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sizes {
    /// Those of the released models, beside small and odd ones.
    True,
    /// Small and odd ones: seconds on a CPU.
    Small,
}

/// What to check.
pub struct CheckConfig {
    /// Computes what is right.
    pub reference: Arc<dyn Device>,
    /// Is held against it.
    pub subject: Arc<dyn Device>,
    /// The subject's kind of device with its blocks in another order; must give the subject's bits.
    pub shuffled: Option<Arc<dyn Device>>,
    /// Compute capability of the subject, e.g. 90: it decides how what goes into products lies in its memory. 0: by rows,
    /// as on the CPU device.
    pub arch: u32,
    /// Called behind every case: whether something outside the buffers was written.
    #[allow(clippy::type_complexity)] // Naming the type would not say more.
    pub guards: Option<Box<dyn Fn() -> std::result::Result<(), String>>>,
    /// What the subject takes products of.
    pub products: Products,
    /// Element types of key/value caches that the subject supports.
    pub caches: Vec<DType>,
    /// Element types of carried state that the subject supports.
    pub states: Vec<DType>,
    /// Only cases whose line contains this; an operation's whole name picks that operation.
    pub filter: Option<String>,
    /// Of all random operands.
    pub seed: u64,
    /// Which shapes.
    pub sizes: Sizes,
    /// Threads that compute references ahead.
    pub threads: usize,
}

/// What a device makes of weights and the inputs of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Products {
    /// Weights as they are given, inputs as they are (the CPU device).
    AsGiven,
    /// Both rounded to bfloat16.
    Bf16,
    /// Weights widened, inputs as they are.
    F32,
}

/// What a case builder has to know.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) products: Products,
    pub(crate) caches: Vec<DType>,
    pub(crate) states: Vec<DType>,
    pub(crate) sizes: Sizes,
    /// See [`CheckConfig::arch`].
    pub(crate) arch: u32,
}

impl Context {
    /// Whether products have inputs and weights that were rounded.
    pub(crate) fn rounds(&self) -> bool {
        self.products == Products::Bf16
    }

    /// What a device of reduced precision makes of weights that are given as `dtype`, and of their inputs.
    pub(crate) fn narrow(&self, dtype: DType) -> DType {
        match (self.products, dtype) {
            (Products::Bf16, DType::F32) => crate::device::F32_WEIGHTS,
            (Products::Bf16, _) => DType::Bf16,
            _ => DType::F32,
        }
    }

    /// Types that the weights of the released models' shapes are given in: another only costs time.
    pub(crate) fn given(&self) -> &'static [DType] {
        match self.products {
            Products::AsGiven => &[DType::F32, DType::Bf16],
            Products::Bf16 => &[DType::Bf16, DType::F32],
            Products::F32 => &[DType::F32],
        }
    }
}

/// One case.
#[derive(Debug, Clone)]
pub struct CaseReport {
    /// Operation.
    pub op: &'static str,
    /// Sizes and variant.
    pub shape: String,
    /// Of the weights as they were given, or of the cache.
    pub dtype: &'static str,
    /// Worst ‖out − ref‖ / ‖ref‖ against its bound.
    pub error: f64,
    /// That bound; 0: the bits must be equal.
    pub bound: f64,
    /// Runs of parts of the batch that were compared with the whole.
    pub parts: usize,
    /// Tokens that differ where two scores are nearer than 1e-5.
    pub ties: usize,
    /// What is wrong; empty: passed.
    pub problems: Vec<String>,
    /// On the subject.
    pub took: Duration,
}

impl CaseReport {
    /// Nothing is wrong.
    pub fn passed(&self) -> bool {
        self.problems.is_empty()
    }

    /// One line.
    pub fn line(&self) -> String {
        let ties = if self.ties > 0 {
            format!(" ties {}", self.ties)
        } else {
            String::new()
        };
        format!(
            "{:<15} {:<38} {:<4} {:>7.1e} <{:>6.0e} inv {:<3}{} {}",
            self.op,
            self.shape,
            self.dtype,
            self.error,
            self.bound,
            self.parts,
            ties,
            if self.passed() { "pass" } else { "FAIL" }
        )
    }
}

/// How a check went.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Cases that ran.
    pub cases: usize,
    /// Of these, without a problem.
    pub passed: usize,
    /// Why the cases behind the last one did not run: the device answers no more.
    pub lost: Option<String>,
}

/// A case with its reference.
type Ready = std::result::Result<(Work, Outcome), String>;

/// References that were computed ahead, by case.
#[derive(Default)]
struct Ahead {
    ready: Mutex<BTreeMap<usize, Ready>>,
    changed: Condvar,
    next: AtomicUsize,
    taken: AtomicUsize,
}

/// Run every case and report each as it ends.
///
/// # Errors
/// A device refuses to make a stream.
pub fn check(config: &CheckConfig, report: &mut dyn FnMut(&CaseReport)) -> Result<Summary> {
    let context = Context {
        products: config.products,
        caches: config.caches.clone(),
        states: config.states.clone(),
        sizes: config.sizes,
        arch: config.arch,
    };
    let chosen = |case: &Case| match config.filter.as_deref() {
        None => true,
        Some(filter) if laneway_device::Op::NAMES.contains(&filter) => case.op == filter,
        Some(filter) => case.label().contains(filter),
    };
    let cases: Vec<Case> = cases::all(&context).into_iter().filter(chosen).collect();
    let threads = config.threads.clamp(1, AHEAD);
    let rigs = (0..threads)
        .map(|_| Rig::new(config.reference.clone(), 0))
        .collect::<Result<Vec<_>>>()?;
    let mut subject = Subject {
        rig: Rig::new(config.subject.clone(), config.arch)?,
        shuffled: config
            .shuffled
            .clone()
            .map(|device| Rig::new(device, config.arch))
            .transpose()?,
        config,
    };
    let ahead = Ahead::default();
    let mut summary = Summary::default();
    std::thread::scope(|scope| {
        for rig in &rigs {
            let (cases, ahead, seed) = (&cases, &ahead, config.seed);
            scope.spawn(move || compute_references(cases, seed, rig, ahead));
        }
        for (i, case) in cases.iter().enumerate() {
            let ready = take(&ahead, i);
            let done = subject.check(case, ready, config.seed.wrapping_add(i as u64));
            summary.cases += 1;
            summary.passed += usize::from(done.passed());
            report(&done);
            if !done.passed()
                && let Err(error) = subject.revive()
            {
                summary.lost = Some(error);
                break;
            }
        }
        // Threads that wait for room must see that nobody will take anything any more.
        ahead.taken.store(cases.len(), Ordering::SeqCst);
        ahead.next.store(cases.len(), Ordering::SeqCst);
        drop(ahead.ready.lock());
        ahead.changed.notify_all();
    });
    Ok(summary)
}

fn compute_references(cases: &[Case], seed: u64, rig: &Rig, ahead: &Ahead) {
    loop {
        let i = ahead.next.fetch_add(1, Ordering::SeqCst);
        let Some(case) = cases.get(i) else { return };
        let mut ready = ahead.ready.lock();
        while i >= ahead.taken.load(Ordering::SeqCst) + AHEAD {
            ahead.changed.wait(&mut ready);
        }
        drop(ready);
        let prepared = caught(|| {
            let work = (case.build)(&mut Random::new(seed.wrapping_add(i as u64)));
            let outcome = work
                .whole()
                .run_reference(rig)
                .map_err(|e| format!("reference: {e}"))?;
            Ok((work, outcome))
        });
        ahead.ready.lock().insert(i, prepared);
        ahead.changed.notify_all();
    }
}

fn take(ahead: &Ahead, i: usize) -> Ready {
    let mut ready = ahead.ready.lock();
    let taken = loop {
        match ready.remove(&i) {
            Some(taken) => break taken,
            None => ahead.changed.wait(&mut ready),
        }
    };
    ahead.taken.store(i + 1, Ordering::SeqCst);
    ahead.changed.notify_all();
    taken
}

/// A device under test may not even be able to build an operation: that is a failed case, not the end.
fn caught<T>(run: impl FnOnce() -> std::result::Result<T, String>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result,
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(format!("panicked: {}", text.unwrap_or_else(|| "?".to_owned())))
        }
    }
}

struct Subject<'a> {
    rig: Rig,
    shuffled: Option<Rig>,
    config: &'a CheckConfig,
}

impl Subject<'_> {
    fn check(&self, case: &Case, ready: Ready, seed: u64) -> CaseReport {
        let began = Instant::now();
        let mut report = CaseReport {
            op: case.op,
            shape: case.shape.clone(),
            dtype: case.dtype,
            error: f64::NAN,
            bound: 0.0,
            parts: 0,
            ties: 0,
            problems: Vec::new(),
            took: Duration::ZERO,
        };
        let run = caught(|| {
            let (work, reference) = ready?;
            self.examine(&work, &reference, &mut Random::new(seed), &mut report)
                .map_err(|error| error.to_string())
        });
        if let Err(problem) = run {
            report.problems.push(problem);
        }
        if let Some(guards) = &self.config.guards
            && let Err(problem) = guards()
        {
            report.problems.push(format!("guards: {problem}"));
        }
        report.took = began.elapsed();
        report
    }

    fn examine(
        &self,
        work: &Work,
        reference: &Outcome,
        random: &mut Random,
        report: &mut CaseReport,
    ) -> Result<()> {
        let whole = work.whole();
        let (outcome, placed) = whole.run(&self.rig, None)?;
        let compared = whole.compare(&outcome, reference);
        (report.error, report.bound, report.ties) = (compared.error, compared.bound, compared.ties);
        report.problems.extend(compared.problems);
        let captured = whole.run_captured(&self.rig, Some(&placed))?;
        if let Some(place) = whole.differs(&captured, &outcome, 0.0) {
            report.problems.push(format!("captured: {place}"));
        }
        if let Some(shuffled) = &self.shuffled {
            let (other, other_placed) = whole.run(shuffled, None)?;
            if let Some(place) = whole.differs(&other, &outcome, 0.0) {
                report.problems.push(format!("shuffled blocks: {place}"));
            }
            let captured = whole.run_captured(shuffled, Some(&other_placed))?;
            if let Some(place) = whole.differs(&captured, &outcome, 0.0) {
                report
                    .problems
                    .push(format!("captured, shuffled blocks: {place}"));
            }
        }
        for alternate in &whole.alternates {
            let other = whole.run_alternate(&self.rig, alternate, &placed)?;
            if let Some(place) = whole.differs(&other, &outcome, alternate.bound) {
                report.problems.push(format!("{}: {place}", alternate.name));
            }
        }
        match work {
            Work::Whole(_) => Ok(()),
            Work::Rows(_, sizes) => self.parts(whole, &outcome, &placed, sizes, random, report),
            Work::Streams(case, _) => {
                let (runs, problem) = case.cut_otherwise(&self.rig, &outcome, &placed, random)?;
                report.parts = runs;
                report.problems.extend(problem);
                Ok(())
            }
        }
    }

    /// Run parts of the batch, each row somewhere else than in the whole one.
    fn parts(
        &self,
        whole: &Experiment,
        outcome: &Outcome,
        placed: &Placed,
        sizes: &[usize],
        random: &mut Random,
        report: &mut CaseReport,
    ) -> Result<()> {
        let mut selections: Vec<Vec<usize>> = vec![vec![0], vec![whole.rows - 1]];
        let sizes = sizes.iter().filter(|size| **size <= whole.rows);
        selections.extend(sizes.map(|size| random.choose(*size, whole.rows)));
        selections.push(random.choose(whole.rows, whole.rows));
        for rows in &selections {
            let part = whole.select(rows);
            let (got, _) = part.run(&self.rig, Some(placed))?;
            report.parts += 1;
            if let Some(place) = part.depends_on_batch(&got, outcome, rows) {
                report
                    .problems
                    .push(format!("in a batch of {}: {place} has other bits", rows.len()));
                break;
            }
        }
        Ok(())
    }

    /// A failed stream refuses everything behind the failure: take a new one, if the device still answers.
    fn revive(&mut self) -> std::result::Result<(), String> {
        let fresh = |device: &Arc<dyn Device>| {
            let rig = Rig::new(device.clone(), self.config.arch)?;
            let data = data::Data::ints(&[1, 2, 3]);
            let view = rig.upload("probe", &data)?;
            rig.download(&view)?;
            Ok::<_, laneway_device::DeviceError>(rig)
        };
        self.rig = fresh(&self.config.subject).map_err(|error| error.to_string())?;
        self.shuffled = match &self.config.shuffled {
            Some(device) => Some(fresh(device).map_err(|error| error.to_string())?),
            None => None,
        };
        Ok(())
    }
}
