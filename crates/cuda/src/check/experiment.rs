//! One operation (or a few) over host operands, to be run on any device.

use std::sync::Arc;

use laneway_device::{DType, Matrix, Op, Result, Touches, View};

use super::data::{Data, Measure};
use super::rig::Rig;
use crate::lower::kept::Kept;

/// Names an operand of an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot(usize);

#[derive(Clone)]
enum Role {
    /// A weight or table: read only, the same in every run of a case.
    Shared,
    /// A packed weight.
    Matrix { n: usize, k: usize },
    /// Read only.
    Input,
    /// Written, perhaps read too, and compared.
    Output(Measure),
    /// Of no use afterwards.
    Scratch,
}

#[derive(Clone)]
struct Operand {
    name: &'static str,
    role: Role,
    /// What it holds before.
    data: Data,
    /// Elements that belong to one row of the operation, when its rows are independent. Of 16 bits they go into a
    /// product and nowhere else.
    row: Option<usize>,
    /// Reached through an index buffer.
    pool: bool,
}

impl Operand {
    /// The width of rows that lie in blocks on `rig`.
    fn in_blocks(&self, rows: usize, rig: &Rig) -> Option<usize> {
        let kept = |width: &usize| Kept::of(self.data.dtype, rows, *width, rig.arch);
        self.row.filter(|width| kept(width) == Kept::Blocked)
    }
}

/// Operations over placed operands and a number of rows.
pub(crate) type Build = Arc<dyn Fn(&Placed, usize) -> Vec<Op> + Send + Sync>;

/// Another way to the same result.
#[derive(Clone)]
pub(crate) struct Alternate {
    pub(crate) name: &'static str,
    pub(crate) ops: Build,
    /// 0: bit for bit.
    pub(crate) bound: f64,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct Experiment {
    operands: Vec<Operand>,
    pub(crate) rows: usize,
    ops: Build,
    /// The reference runs these over operands of which some hold something else.
    reference: Option<(Vec<(Slot, Data)>, Build)>,
    pub(crate) alternates: Vec<Alternate>,
}

/// Operands on a device.
#[derive(Clone, Default)]
pub(crate) struct Placed {
    views: Vec<Option<View>>,
    matrices: Vec<Option<Matrix>>,
}

impl Placed {
    pub(crate) fn view(&self, slot: Slot) -> View {
        self.views[slot.0].clone().expect("a matrix is no view")
    }

    pub(crate) fn matrix(&self, slot: Slot) -> Matrix {
        self.matrices[slot.0].clone().expect("a view is no matrix")
    }

    /// View of an operand that a case may lack.
    pub(crate) fn optional(&self, slot: Option<Slot>) -> Option<View> {
        slot.map(|slot| self.view(slot))
    }
}

/// What the operands hold after a run; `None` for weights and scratch.
pub(crate) type Outcome = Vec<Option<Data>>;

/// See [`Experiment::compare`].
#[derive(Debug, Default)]
pub(crate) struct Compared {
    pub(crate) error: f64,
    pub(crate) bound: f64,
    pub(crate) ties: usize,
    pub(crate) problems: Vec<String>,
}

impl Experiment {
    pub(crate) fn new(rows: usize) -> Self {
        Self {
            operands: Vec::new(),
            rows,
            ops: Arc::new(|_, _| Vec::new()),
            reference: None,
            alternates: Vec::new(),
        }
    }

    fn add(&mut self, name: &'static str, role: Role, data: Data, row: Option<usize>) -> Slot {
        self.operands.push(Operand {
            name,
            role,
            data,
            row,
            pool: false,
        });
        Slot(self.operands.len() - 1)
    }

    pub(crate) fn shared(&mut self, name: &'static str, data: Data) -> Slot {
        self.add(name, Role::Shared, data, None)
    }

    pub(crate) fn weights(&mut self, n: usize, k: usize, data: Data) -> Slot {
        self.add("w", Role::Matrix { n, k }, data, None)
    }

    /// Read only, but not the same in every run.
    pub(crate) fn input(&mut self, name: &'static str, data: Data) -> Slot {
        self.add(name, Role::Input, data, None)
    }

    pub(crate) fn input_rows(&mut self, name: &'static str, width: usize, data: Data) -> Slot {
        debug_assert_eq!(data.len(), self.rows * width, "{name}");
        self.add(name, Role::Input, data, Some(width))
    }

    /// Poisoned before.
    pub(crate) fn output(&mut self, name: &'static str, dtype: DType, len: usize, measure: Measure) -> Slot {
        self.add(name, Role::Output(measure), Data::poison(dtype, len), None)
    }

    /// Poisoned before.
    pub(crate) fn output_rows(
        &mut self,
        name: &'static str,
        dtype: DType,
        width: usize,
        measure: Measure,
    ) -> Slot {
        let data = Data::poison(dtype, self.rows * width);
        self.add(name, Role::Output(measure), data, Some(width))
    }

    pub(crate) fn in_out(&mut self, name: &'static str, data: Data, measure: Measure) -> Slot {
        self.add(name, Role::Output(measure), data, None)
    }

    pub(crate) fn in_out_rows(
        &mut self,
        name: &'static str,
        width: usize,
        data: Data,
        measure: Measure,
    ) -> Slot {
        debug_assert_eq!(data.len(), self.rows * width, "{name}");
        self.add(name, Role::Output(measure), data, Some(width))
    }

    /// Written through an index buffer.
    pub(crate) fn pool(&mut self, name: &'static str, data: Data, measure: Measure) -> Slot {
        let slot = self.add(name, Role::Output(measure), data, None);
        self.operands[slot.0].pool = true;
        slot
    }

    /// Read through an index buffer.
    pub(crate) fn input_pool(&mut self, name: &'static str, data: Data) -> Slot {
        let slot = self.add(name, Role::Input, data, None);
        self.operands[slot.0].pool = true;
        slot
    }

    /// Poisoned before, of no use afterwards.
    pub(crate) fn scratch(&mut self, name: &'static str, dtype: DType, len: usize) -> Slot {
        self.add(name, Role::Scratch, Data::poison(dtype, len), None)
    }

    pub(crate) fn scratch_rows(&mut self, name: &'static str, dtype: DType, width: usize) -> Slot {
        let data = Data::poison(dtype, self.rows * width);
        self.add(name, Role::Scratch, data, Some(width))
    }

    pub(crate) fn ops(mut self, ops: impl Fn(&Placed, usize) -> Vec<Op> + Send + Sync + 'static) -> Self {
        self.ops = Arc::new(ops);
        self
    }

    /// What the reference does in place of [`Experiment::ops`].
    pub(crate) fn reference(
        mut self,
        replace: Vec<(Slot, Data)>,
        ops: impl Fn(&Placed, usize) -> Vec<Op> + Send + Sync + 'static,
    ) -> Self {
        self.reference = Some((replace, Arc::new(ops)));
        self
    }

    /// As [`Experiment::reference`], with the same operations over other contents.
    pub(crate) fn reference_data(mut self, replace: Vec<(Slot, Data)>) -> Self {
        self.reference = Some((replace, self.ops.clone()));
        self
    }

    pub(crate) fn alternate(
        mut self,
        name: &'static str,
        bound: f64,
        ops: impl Fn(&Placed, usize) -> Vec<Op> + Send + Sync + 'static,
    ) -> Self {
        self.alternates.push(Alternate {
            name,
            ops: Arc::new(ops),
            bound,
        });
        self
    }

    /// The experiment over some of its rows only, in this order.
    pub(crate) fn select(&self, rows: &[usize]) -> Experiment {
        let mut selected = self.clone();
        selected.rows = rows.len();
        for operand in &mut selected.operands {
            if let Some(width) = operand.row {
                operand.data = operand.data.pick_rows(width, rows);
            }
        }
        selected
    }

    /// Put the operands on a device; weights and tables are taken from an earlier placing on the same device.
    pub(crate) fn place(&self, rig: &Rig, earlier: Option<&Placed>) -> Result<Placed> {
        let mut placed = Placed::default();
        for (i, operand) in self.operands.iter().enumerate() {
            let (mut view, mut matrix) = (None, None);
            match (&operand.role, earlier) {
                (Role::Shared, Some(earlier)) => view = earlier.views[i].clone(),
                (Role::Matrix { .. }, Some(earlier)) => matrix = earlier.matrices[i].clone(),
                (Role::Matrix { n, k }, None) => {
                    matrix = Some(rig.matrix(operand.name, *n, *k, &operand.data)?);
                }
                _ => {
                    let data = match operand.in_blocks(self.rows, rig) {
                        Some(width) => &operand.data.to_blocks(width),
                        None => &operand.data,
                    };
                    view = Some(rig.upload(operand.name, data)?);
                }
            }
            placed.views.push(view);
            placed.matrices.push(matrix);
        }
        Ok(placed)
    }

    /// Run on placed operands and fetch what they hold then.
    pub(crate) fn run_placed(&self, rig: &Rig, placed: &Placed, ops: &Build) -> Result<Outcome> {
        self.run_as(rig, placed, |touches| rig.run(&ops(placed, self.rows), touches))
    }

    /// Place, run as a captured graph, fetch; weights are taken from an earlier placing.
    pub(crate) fn run_captured(&self, rig: &Rig, earlier: Option<&Placed>) -> Result<Outcome> {
        let placed = self.place(rig, earlier)?;
        self.run_as(rig, &placed, |touches| {
            rig.run_captured(&(self.ops)(&placed, self.rows), touches)
        })
    }

    fn run_as(
        &self,
        rig: &Rig,
        placed: &Placed,
        run: impl FnOnce(&Touches) -> Result<()>,
    ) -> Result<Outcome> {
        let mut touches = Touches::none();
        for (operand, view) in self.operands.iter().zip(&placed.views) {
            if let (true, Some(view)) = (operand.pool, view) {
                touches.write(view.clone());
            }
        }
        run(&touches)?;
        let fetch = |(operand, view): (&Operand, &Option<View>)| match (&operand.role, view) {
            (Role::Scratch | Role::Matrix { .. }, _) | (_, None) => Ok(None),
            (_, Some(view)) => {
                let data = rig.download(view)?;
                Ok(Some(match operand.in_blocks(self.rows, rig) {
                    Some(width) => data.out_of_blocks(width),
                    None => data,
                }))
            }
        };
        self.operands.iter().zip(&placed.views).map(fetch).collect()
    }

    /// Place, run, fetch.
    pub(crate) fn run(&self, rig: &Rig, earlier: Option<&Placed>) -> Result<(Outcome, Placed)> {
        let placed = self.place(rig, earlier)?;
        let outcome = self.run_placed(rig, &placed, &self.ops)?;
        Ok((outcome, placed))
    }

    /// Run an alternate; weights are taken from an earlier placing.
    pub(crate) fn run_alternate(
        &self,
        rig: &Rig,
        alternate: &Alternate,
        earlier: &Placed,
    ) -> Result<Outcome> {
        let placed = self.place(rig, Some(earlier))?;
        self.run_placed(rig, &placed, &alternate.ops)
    }

    /// What the reference device makes of it.
    pub(crate) fn run_reference(&self, rig: &Rig) -> Result<Outcome> {
        let Some((replace, ops)) = &self.reference else {
            return Ok(self.run(rig, None)?.0);
        };
        let mut experiment = self.clone();
        for (slot, data) in replace {
            experiment.operands[slot.0].data = data.clone();
        }
        experiment.ops = ops.clone();
        Ok(experiment.run(rig, None)?.0)
    }

    /// Error and bound of the output that comes nearest to its bound (or passes it), and all problems. An input
    /// that was written is one.
    pub(crate) fn compare(&self, subject: &Outcome, reference: &Outcome) -> Compared {
        let mut compared = Compared::default();
        let ratio = |error: f64, bound: f64| error / bound.max(f64::MIN_POSITIVE);
        for (i, operand) in self.operands.iter().enumerate() {
            let Some(got) = &subject[i] else { continue };
            let (found, bound) = match (&operand.role, &reference[i]) {
                (Role::Output(measure), Some(want)) => (measure.compare(got, want), measure.bound()),
                _ => (Measure::Exact.compare(got, &operand.data), 0.0),
            };
            // An error that is no number is the worst.
            let order = ratio(found.error, bound).partial_cmp(&ratio(compared.error, compared.bound));
            if order != Some(std::cmp::Ordering::Less) {
                (compared.error, compared.bound) = (found.error, bound);
            }
            compared.ties += found.ties;
            let named = |problem| format!("{}{problem}", operand.name);
            compared.problems.extend(found.problem.map(named));
        }
        compared
    }

    /// Where the outputs of two runs of the same operands differ in a bit (or by more than `bound`).
    pub(crate) fn differs(&self, got: &Outcome, want: &Outcome, bound: f64) -> Option<String> {
        self.operands.iter().enumerate().find_map(|(i, operand)| {
            let (Role::Output(own), Some(got), Some(want)) = (&operand.role, &got[i], &want[i]) else {
                return None;
            };
            let (got, want) = match own {
                Measure::Prefix { len, .. } => (&got.first(*len), &want.first(*len)),
                _ => (got, want),
            };
            let measure = match own {
                Measure::Relative(_) if bound > 0.0 => Measure::Relative(bound),
                _ => Measure::Exact,
            };
            let problem = measure.compare(got, want).problem?;
            Some(format!("{}{problem}", operand.name))
        })
    }

    /// Where a run over `rows` alone differs from the run over all of them. What belongs to no row (a pool) must
    /// hold what the whole run left there, or what was there before.
    pub(crate) fn depends_on_batch(&self, part: &Outcome, whole: &Outcome, rows: &[usize]) -> Option<String> {
        self.operands.iter().enumerate().find_map(|(i, operand)| {
            let (Role::Output(_), Some(part), Some(whole)) = (&operand.role, &part[i], &whole[i]) else {
                return None;
            };
            let Some(width) = operand.row else {
                let strange =
                    |e: &usize| part.bits(*e) != whole.bits(*e) && part.bits(*e) != operand.data.bits(*e);
                let at = (0..part.len()).find(strange)?;
                return Some(format!("{}[{at}]", operand.name));
            };
            let (at, ..) = part.first_difference(&whole.pick_rows(width, rows))?;
            let (row, column) = (at / width, at % width);
            Some(format!(
                "{} row {} (as {row} of {}) column {column}",
                operand.name,
                rows.get(row).copied().unwrap_or(usize::MAX),
                rows.len()
            ))
        })
    }
}

impl Slot {
    pub(crate) fn get(self, outcome: &Outcome) -> Option<&Data> {
        outcome.get(self.0)?.as_ref()
    }
}
