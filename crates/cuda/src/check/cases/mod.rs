//! The table of cases, by family of operations.

mod cache;
mod clip;
mod codec;
mod gemm;
mod layer;
mod rows;
mod sample;
mod sequence;

use super::experiment::Experiment;
use super::random::Random;
use super::streams::StreamCase;
use super::{Context, Sizes};

/// What a case does beside comparing one run with the reference.
pub(crate) enum Work {
    /// Nothing: its rows depend on each other.
    Whole(Experiment),
    /// Runs parts of its rows, of these sizes.
    Rows(Experiment, Vec<usize>),
    /// Cuts its streams in other ways. The experiment is the launch of whole windows.
    Streams(StreamCase, Experiment),
}

impl Work {
    pub(crate) fn whole(&self) -> &Experiment {
        match self {
            Work::Whole(experiment) | Work::Rows(experiment, _) | Work::Streams(_, experiment) => experiment,
        }
    }

    fn streams(case: StreamCase) -> Work {
        let (experiment, _) = (case.launch)(&case.whole(), None);
        Work::Streams(case, experiment)
    }
}

/// One line of the report. Operands are made only when it is its turn.
pub(crate) struct Case {
    pub(crate) op: &'static str,
    pub(crate) shape: String,
    pub(crate) dtype: &'static str,
    #[allow(clippy::type_complexity)] // Naming the type would not say more.
    pub(crate) build: Box<dyn Fn(&mut Random) -> Work + Send + Sync>,
}

impl Case {
    fn new(
        op: &'static str,
        shape: impl Into<String>,
        dtype: &'static str,
        build: impl Fn(&mut Random) -> Work + Send + Sync + 'static,
    ) -> Self {
        Self {
            op,
            shape: shape.into(),
            dtype,
            build: Box::new(build),
        }
    }

    pub(crate) fn label(&self) -> String {
        format!("{} {} {}", self.op, self.shape, self.dtype)
    }
}

/// Sizes of parts that row-wise operations run in.
const PARTS: &[usize] = &[2, 5, 8, 17, 64];

/// Every case.
pub(crate) fn all(context: &Context) -> Vec<Case> {
    let mut cases = Vec::new();
    rows::cases(context, &mut cases);
    gemm::cases(context, &mut cases);
    sequence::cases(context, &mut cases);
    sample::cases(context, &mut cases);
    layer::cases(context, &mut cases);
    codec::cases(context, &mut cases);
    clip::cases(context, &mut cases);
    cases
}

fn small(context: &Context) -> bool {
    context.sizes == Sizes::Small
}
