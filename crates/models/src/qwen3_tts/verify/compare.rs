//! How far two tensors are apart, and how far they may be.

use laneway_plan::deployment::Precision;

use super::golden::Manifest;

/// Largest difference of any value that passes in f32, scores aside.
pub const TOLERANCE: f32 = 1e-3;
/// Largest difference of processed scores that passes in f32.
pub const SCORE_TOLERANCE: f32 = 1e-4;
/// Largest relative error of a waveform or a speaker vector that passes in bf16.
pub const BF16_RELATIVE_TOLERANCE: f32 = 2e-2;
/// How many times the reference's own error in bf16 passes.
const BF16_MARGIN: f32 = 1.25;
/// Root mean square errors of logits and predictor logits that pass in bf16 where the golden set does not say
/// what the reference's own are (1.7B).
const BF16_LOGIT_TOLERANCE: LogitTolerance = LogitTolerance {
    first: 0.07,
    predictor: 0.07,
};

/// What a difference is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Largest absolute difference.
    Largest,
    /// Root of the mean squared difference.
    Rms,
    /// Norm of the difference over the norm of the reference.
    Relative,
}

/// One compared quantity.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// `logits`, `waveform`, …
    pub what: &'static str,
    /// How it was measured.
    pub measure: Measure,
    /// How much; infinite when the sizes differ or a value is not a number.
    pub value: f32,
    /// The most that passes.
    pub tolerance: f32,
}

impl Difference {
    pub(super) fn of(
        what: &'static str,
        measure: Measure,
        got: &[f32],
        want: &[f32],
        tolerance: f32,
    ) -> Self {
        let value = match measure {
            _ if got.len() != want.len() => f32::INFINITY,
            Measure::Largest => largest(got, want),
            Measure::Rms => root_mean_square(got, want),
            Measure::Relative => relative(got, want),
        };
        Self {
            what,
            measure,
            value,
            tolerance,
        }
    }

    /// Within its tolerance.
    pub fn passed(&self) -> bool {
        self.value <= self.tolerance
    }
}

/// Root mean square errors of logits that pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct LogitTolerance {
    /// Of the first code.
    pub(super) first: f32,
    /// Of the other codes.
    pub(super) predictor: f32,
}

/// What a case is held to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Criterion {
    /// The same codes, and every value within [`TOLERANCE`].
    Exact,
    /// Along the reference's codes: errors of logits, and relative errors of what else comes out.
    Rounded(LogitTolerance),
}

impl Criterion {
    pub(super) fn new(precision: Precision, manifest: &Manifest) -> Self {
        match precision {
            Precision::F32 => Self::Exact,
            Precision::Bf16 => Self::Rounded(manifest.bf16_errors().map_or(
                BF16_LOGIT_TOLERANCE,
                |(first, predictor)| LogitTolerance {
                    first: BF16_MARGIN * first,
                    predictor: BF16_MARGIN * predictor,
                },
            )),
        }
    }
}

/// Largest absolute difference; banned scores (-inf) must be banned in both.
fn largest(got: &[f32], want: &[f32]) -> f32 {
    let difference = |(got, want): (&f32, &f32)| match got == want {
        true => 0.0,
        // A value that is not a number is the largest difference there is.
        false => finite((got - want).abs()),
    };
    got.iter().zip(want).map(difference).fold(0.0, f32::max)
}

fn root_mean_square(got: &[f32], want: &[f32]) -> f32 {
    match got.len() {
        0 => 0.0,
        len => finite((squared_error(got, want) / len as f64).sqrt() as f32),
    }
}

fn relative(got: &[f32], want: &[f32]) -> f32 {
    let norm: f64 = want.iter().map(|value| f64::from(*value).powi(2)).sum();
    let error = squared_error(got, want);
    match error == 0.0 {
        true => 0.0,
        false => finite((error / norm).sqrt() as f32),
    }
}

fn squared_error(got: &[f32], want: &[f32]) -> f64 {
    let pairs = got.iter().zip(want);
    pairs
        .map(|(got, want)| (f64::from(*got) - f64::from(*want)).powi(2))
        .sum()
}

/// Infinity for what is not a number.
fn finite(value: f32) -> f32 {
    if value.is_nan() { f32::INFINITY } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(measure: Measure, got: &[f32], want: &[f32]) -> f32 {
        Difference::of("test", measure, got, want, 1.0).value
    }

    #[test]
    fn each_measure_by_hand() {
        let (got, want) = ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 0.0, 8.0]);
        assert_eq!(value(Measure::Largest, &got, &want), 4.0);
        assert_eq!(value(Measure::Rms, &got, &want), 2.5);
        let relative = value(Measure::Relative, &got, &want);
        assert!((relative - 5.0 / 69f32.sqrt()).abs() < 1e-6, "{relative}");
        for measure in [Measure::Largest, Measure::Rms, Measure::Relative] {
            assert_eq!(value(measure, &want, &want), 0.0);
            assert_eq!(value(measure, &[], &[]), 0.0);
            assert_eq!(value(measure, &[0.0; 2], &[0.0; 2]), 0.0);
            assert_eq!(value(measure, &got[..3], &want), f32::INFINITY);
            assert_eq!(value(measure, &[f32::NAN], &[1.0]), f32::INFINITY);
            assert_eq!(value(measure, &[f32::INFINITY], &[1.0]), f32::INFINITY);
            assert_eq!(value(measure, &[1.0], &[f32::NAN]), f32::INFINITY);
        }
        assert_eq!(value(Measure::Relative, &[1.0], &[0.0]), f32::INFINITY);
    }

    #[test]
    fn banned_scores_are_equal_only_to_banned_ones() {
        let banned = f32::NEG_INFINITY;
        assert_eq!(value(Measure::Largest, &[banned, 1.0], &[banned, 1.0]), 0.0);
        assert_eq!(
            value(Measure::Largest, &[banned, 1.0], &[0.5, 1.0]),
            f32::INFINITY
        );
    }

    #[test]
    fn an_infinite_difference_never_passes() {
        let difference = Difference::of("test", Measure::Rms, &[f32::NAN], &[0.0], f32::MAX);
        assert!(!difference.passed());
    }
}
