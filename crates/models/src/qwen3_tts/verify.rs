//! Verification of a build on a device: every case of a golden directory through an engine, against the
//! reference's tensors.
//!
//! A golden directory holds `manifest.json`, a safetensors file a case and, for small models, `model-*`
//! directories; true sizes use the presets. Weights that are not stored are generated from the manifest's
//! seed. Talker, Codec and RefEncoder run each on its own lane, so lanes and edges are verified too. A case runs
//! free; if its codes differ it runs again along the reference's codes, so that what it computes can still be
//! compared.
//!
//! In f32 codes must be equal and each value within a tolerance. In bf16 the reference would not repeat its own
//! codes, so every case runs along them (and, for a clone, along what the reference made of the clip), and the
//! root mean square error of its logits is held against the reference's own in bf16.

mod case;
mod compare;
mod golden;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use laneway_device::{Device, Priority};
use laneway_engine::node::EdgeResult;
use laneway_engine::{
    Engine, EngineConfig, EngineHandle, LaneConfig, Limits, NodeConfig, OutputEvent, ResourceConfig,
    StartError, Submission, SubmitError,
};
use laneway_models_decl::Sizing;
use laneway_models_decl::qwen3_tts::{REFERENCE, presets};
use laneway_plan::deployment::{DeviceKind, ModelConfig, Precision, Weights};

use super::model::{OpenError, Qwen3Tts};
use super::reference::{CODES_PER_FRAME, Reference};
use super::request::{Probe, ProbeRecord};
use case::Case;
use compare::Criterion;
pub use compare::{BF16_RELATIVE_TOLERANCE, Difference, Measure, SCORE_TOLERANCE, TOLERANCE};
use golden::{KINDS, Manifest};

const PAGE_SIZE: u32 = 16;
const PREFILL_TOKENS: usize = 512;
const SEQ_LEN: usize = 1024;
/// A case of a true-size model takes minutes on a small processor.
const DEADLINE: Duration = Duration::from_secs(3600);

/// What to verify.
#[derive(Debug, Clone)]
pub struct VerifyOptions {
    /// Golden directory.
    pub golden: PathBuf,
    /// Directory with `model-*` checkpoints, in place of generated weights.
    pub weights: Option<PathBuf>,
    /// Run these cases only; empty: all.
    pub cases: Vec<String>,
    /// Where to run.
    pub device: Arc<dyn Device>,
    /// Decides the declared sizes.
    pub device_kind: DeviceKind,
    /// What the device computes in: decides what is compared, and how closely.
    pub precision: Precision,
}

impl VerifyOptions {
    /// Whether there is a golden directory with these cases. Reads little, so that nothing need be said before.
    ///
    /// # Errors
    /// The directory or a case is not there; the cases that are there are named.
    pub fn check(&self) -> Result<(), VerifyError> {
        self.manifest().map(drop)
    }

    fn manifest(&self) -> Result<Manifest, VerifyError> {
        let manifest = Manifest::read(&self.golden)?;
        let known: Vec<String> = KINDS.iter().flat_map(|kind| manifest.cases_of(kind)).collect();
        match self.cases.iter().find(|case| !known.contains(case)) {
            None => Ok(manifest),
            Some(case) => Err(VerifyError::Case {
                case: case.clone(),
                problem: format!(
                    "is not in {}; its cases are {}",
                    self.golden.display(),
                    known.join(", ")
                ),
            }),
        }
    }
}

/// Why verification could not run.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// A golden file is missing or malformed.
    #[error("{}: {problem}", path.display())]
    Golden {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The model cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The engine does not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A case could not be submitted or failed.
    #[error("case {case}: {problem}")]
    Case {
        /// Its name.
        case: String,
        /// What happened.
        problem: String,
    },
}

/// How the codes of a free run compare with the reference's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CodesReport {
    /// All are the same.
    Equal,
    /// The first frame that differs.
    WrongFrom(usize),
    /// A sampled case: its codes were drawn by another generator, and are forced.
    Forced,
    /// In bf16 a near tie may go either way, so this share of equal codes decides nothing.
    Agreement(f32),
}

/// The result of one case.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseReport {
    /// Its name.
    pub case: String,
    /// Frames of the reference.
    pub frames: usize,
    /// Codes, running free.
    pub codes: CodesReport,
    /// A clone's reference codes equal those that the reference made of its clip. Decides nothing in bf16.
    pub reference_codes_equal: bool,
    /// Everything else that was compared.
    pub differences: Vec<Difference>,
    /// Wall time of the case.
    pub took: Duration,
}

impl CaseReport {
    /// Every difference is within its tolerance and, but for bf16, all codes are equal.
    pub fn passed(&self) -> bool {
        let codes_pass = match self.codes {
            CodesReport::Equal | CodesReport::Forced => self.reference_codes_equal,
            CodesReport::WrongFrom(_) => false,
            CodesReport::Agreement(_) => true,
        };
        codes_pass && self.differences.iter().all(Difference::passed)
    }

    /// The difference of one quantity, if it was compared.
    pub fn difference(&self, what: &str) -> Option<&Difference> {
        self.differences.iter().find(|difference| difference.what == what)
    }
}

/// Run every case of a golden directory, one after the other, and hand each report to `each` as it comes.
///
/// # Errors
/// Something keeps the cases from running; a case that runs and differs is a report, not an error.
pub fn verify(
    options: &VerifyOptions,
    each: &mut dyn FnMut(&CaseReport),
) -> Result<Vec<CaseReport>, VerifyError> {
    let manifest = options.manifest()?;
    let mut reports = Vec::new();
    for kind in KINDS {
        let cases: Vec<_> = manifest
            .cases_of(kind)
            .filter(|name| options.cases.is_empty() || options.cases.contains(name))
            .collect();
        if cases.is_empty() {
            continue;
        }
        let bench = Bench::start(options, &manifest, kind)?;
        for name in cases {
            let case = Case::open(&options.golden, &manifest, &name)?;
            let report = bench.run(&case)?;
            each(&report);
            reports.push(report);
        }
    }
    Ok(reports)
}

/// An engine with one model of a golden set.
struct Bench {
    model: Arc<Qwen3Tts>,
    handle: EngineHandle,
    criterion: Criterion,
    _engine: Engine,
}

/// What came out of a run.
struct Outcome {
    record: ProbeRecord,
    samples: Vec<f32>,
    reference: Option<Reference>,
}

impl Outcome {
    /// Speaker vector of a clone, as this build made it.
    fn speaker(&self) -> &[f32] {
        self.reference
            .as_ref()
            .map_or(&[][..], |reference| &reference.speaker)
    }
}

impl Bench {
    fn start(options: &VerifyOptions, manifest: &Manifest, kind: &str) -> Result<Self, VerifyError> {
        let sizing = Sizing {
            device: options.device_kind,
            precision: options.precision,
            page_size: PAGE_SIZE,
            max_prefill_tokens: PREFILL_TOKENS as u32,
        };
        let (weights, config) = sources(options, manifest, kind)?;
        let model = Arc::new(Qwen3Tts::open(&weights, config.as_ref(), &sizing)?);
        let declaration = laneway_engine::node::Model::declaration(&*model);
        let lane = || LaneConfig {
            priority: Priority::default(),
            partition_sms: None,
            max_rows: 1,
        };
        let nodes = declaration
            .nodes
            .iter()
            .enumerate()
            .map(|(lane, node)| NodeConfig {
                node: node.name.clone(),
                lane,
                auto: None,
            });
        let resources = declaration.resources.iter().map(|resource| ResourceConfig {
            key: resource.key.clone(),
            slots: match resource.page_size {
                0 => 1,
                page_size => SEQ_LEN as u32 / page_size,
            },
            page_size: resource.page_size,
        });
        let (engine, handle) = Engine::start(EngineConfig {
            device: options.device.clone(),
            model: model.clone(),
            lanes: declaration.nodes.iter().map(|_| lane()).collect(),
            nodes: nodes.collect(),
            resources: resources.collect(),
            chunks: Default::default(),
            max_prefill_tokens: PREFILL_TOKENS,
            max_seq_len: SEQ_LEN,
            capture_buckets: vec![1],
            playback_hz: 0,
            limits: Limits {
                step_deadline: DEADLINE,
                start_deadline: DEADLINE,
                ..Limits::default()
            },
        })?;
        Ok(Self {
            model,
            handle,
            criterion: Criterion::new(options.precision, manifest),
            _engine: engine,
        })
    }

    fn run(&self, case: &Case) -> Result<CaseReport, VerifyError> {
        let started = Instant::now();
        let codes = case.codes()?;
        let (outcome, verdict) = match self.criterion {
            Criterion::Exact if case.sampled() => {
                (self.speak(case, codes.clone(), None)?, CodesReport::Forced)
            }
            Criterion::Exact => {
                let free = self.speak(case, Vec::new(), None)?;
                match case.first_wrong_frame(&free.record, &codes) {
                    None => (free, CodesReport::Equal),
                    Some(frame) => (
                        self.speak(case, codes.clone(), None)?,
                        CodesReport::WrongFrom(frame),
                    ),
                }
            }
            Criterion::Rounded(_) => {
                let free = self.speak(case, Vec::new(), None)?;
                let mut forced = self.speak(case, codes.clone(), case.reference())?;
                forced.reference = free.reference;
                let verdict = match case.sampled() {
                    true => CodesReport::Forced,
                    false => CodesReport::Agreement(case.agreement(&free.record, &codes)),
                };
                (forced, verdict)
            }
        };
        Ok(CaseReport {
            case: case.name.clone(),
            frames: codes.len(),
            codes: verdict,
            reference_codes_equal: case.reference_codes_equal(outcome.reference.as_ref())?,
            differences: case.compare(&outcome, codes.len(), self.criterion)?,
            took: started.elapsed(),
        })
    }

    /// Run a case, along `forced` as far as it goes, and with `given` in place of what it makes of its clip.
    fn speak(
        &self,
        case: &Case,
        forced: Vec<[i32; CODES_PER_FRAME]>,
        given: Option<Reference>,
    ) -> Result<Outcome, VerifyError> {
        let failed = |problem: String| VerifyError::Case {
            case: case.name.clone(),
            problem,
        };
        let mut request = case.request(&self.model)?;
        let probe = Arc::new(Probe {
            forced,
            ..Probe::default()
        });
        request.probe = Some(probe.clone());
        let mut stream = self
            .handle
            .submit(Submission {
                id: case.name.clone(),
                payload: Arc::new(request),
                chunk: None,
                deadline: None,
                results: given.map(delivered).into_iter().collect(),
            })
            .map_err(|error: SubmitError| failed(error.to_string()))?;
        let (mut samples, mut reference) = (Vec::new(), None);
        while let Some(event) = stream.blocking_recv() {
            match event {
                OutputEvent::Samples { samples: window, .. } => samples.extend_from_slice(&window),
                OutputEvent::Result { result, .. } => reference = result.downcast_ref().cloned(),
                OutputEvent::Failed(failure) => return Err(failed(format!("{failure:?}"))),
                OutputEvent::Finished { .. } => {
                    let record = std::mem::take(&mut *probe.record.lock());
                    return Ok(Outcome {
                        record,
                        samples,
                        reference,
                    });
                }
                OutputEvent::Started { .. } | OutputEvent::Items { .. } => {}
            }
        }
        Err(failed("the stream ended without an end".into()))
    }
}

/// An encoded reference as its edge delivers it.
fn delivered(reference: Reference) -> (String, EdgeResult) {
    (REFERENCE.to_owned(), Arc::new(reference))
}

/// Where weights and configuration of one kind of model come from.
fn sources(
    options: &VerifyOptions,
    manifest: &Manifest,
    kind: &str,
) -> Result<(Weights, Option<ModelConfig>), VerifyError> {
    let name = format!("model-{kind}");
    if let Some(dir) = &options.weights {
        return Ok((Weights::Path(dir.join(name)), None));
    }
    let weights = Weights::Random { seed: manifest.seed };
    let dir = options.golden.join(&name);
    if dir.join("model.safetensors").is_file() {
        return Ok((Weights::Path(dir), None));
    }
    if dir.is_dir() {
        return Ok((weights, Some(ModelConfig::Directory(dir))));
    }
    let preset = format!("{}-{kind}", manifest.size);
    match presets::named(&preset) {
        Some(_) => Ok((weights, Some(ModelConfig::Preset(preset)))),
        None => Err(VerifyError::Golden {
            path: Path::new(&dir).to_owned(),
            problem: format!("is not there, and there is no preset {preset}"),
        }),
    }
}

#[cfg(test)]
mod tests;
