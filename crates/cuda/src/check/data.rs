//! Host tensors and how two of them are compared.

use std::sync::Arc;

use laneway_device::DType;

use crate::lower::kept::blocked_at;

/// A poisoned float: no operation may leave it where it writes, or take it from where it must not read.
const POISON_F32: u32 = 0x7fc0_dead;
const POISON_BF16: u16 = 0x7fc1;
const POISON_WORD: u32 = 0x7fad_beef;

/// Elements of a buffer, on the host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Data {
    pub(crate) dtype: DType,
    pub(crate) bytes: Arc<Vec<u8>>,
}

/// Round to bfloat16, to nearest even.
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let odd = (bits >> 16) & 1;
    (bits.wrapping_add(0x7fff + odd) >> 16) as u16
}

/// The bfloat16 nearest to `x`, as a float.
pub(crate) fn rounded(x: f32) -> f32 {
    f32::from_bits(u32::from(to_bf16(x)) << 16)
}

/// `x` as a 16-bit type holds it; F32 as it is.
pub(crate) fn narrowed(x: f32, to: DType) -> f32 {
    match to {
        DType::Bf16 => rounded(x),
        DType::F16 => half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32(),
        _ => x,
    }
}

impl Data {
    pub(crate) fn new(dtype: DType, bytes: Vec<u8>) -> Self {
        Self {
            dtype,
            bytes: Arc::new(bytes),
        }
    }

    pub(crate) fn floats(values: &[f32]) -> Self {
        Self::new(DType::F32, bytemuck::cast_slice(values).to_vec())
    }

    pub(crate) fn ints(values: &[i32]) -> Self {
        Self::new(DType::I32, bytemuck::cast_slice(values).to_vec())
    }

    pub(crate) fn words(values: &[u32]) -> Self {
        Self::new(DType::U32, bytemuck::cast_slice(values).to_vec())
    }

    /// `values` as `dtype`: `F32`, or rounded.
    pub(crate) fn real(values: &[f32], dtype: DType) -> Self {
        match dtype {
            DType::Bf16 => {
                let halves: Vec<u16> = values.iter().map(|x| to_bf16(*x)).collect();
                Self::new(dtype, bytemuck::cast_slice(&halves).to_vec())
            }
            DType::F16 => {
                let halves: Vec<u16> = values.iter().map(|x| half::f16::from_f32(*x).to_bits()).collect();
                Self::new(dtype, bytemuck::cast_slice(&halves).to_vec())
            }
            _ => Self::floats(values),
        }
    }

    pub(crate) fn poison(dtype: DType, len: usize) -> Self {
        let bytes = match dtype {
            // A NaN as f16 too.
            DType::Bf16 | DType::F16 => bytemuck::cast_slice(&vec![POISON_BF16; len]).to_vec(),
            DType::F32 => bytemuck::cast_slice(&vec![POISON_F32; len]).to_vec(),
            DType::I32 | DType::U32 => bytemuck::cast_slice(&vec![POISON_WORD; len]).to_vec(),
        };
        Self::new(dtype, bytes)
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Bits of element `i`.
    pub(crate) fn bits(&self, i: usize) -> u32 {
        let size = self.dtype.size();
        let bytes = &self.bytes[i * size..][..size];
        match *bytes {
            [a, b] => u32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            _ => 0,
        }
    }

    /// Element `i` of a float tensor.
    pub(crate) fn float(&self, i: usize) -> f32 {
        match self.dtype {
            DType::Bf16 => f32::from_bits(self.bits(i) << 16),
            DType::F16 => half::f16::from_bits(self.bits(i) as u16).to_f32(),
            _ => f32::from_bits(self.bits(i)),
        }
    }

    /// Rows of `width` elements, picked and put in order.
    pub(crate) fn pick_rows(&self, width: usize, rows: &[usize]) -> Data {
        let bytes = width * self.dtype.size();
        let mut out = Vec::with_capacity(rows.len() * bytes);
        for row in rows {
            out.extend_from_slice(&self.bytes[row * bytes..][..bytes]);
        }
        Data::new(self.dtype, out)
    }

    /// Rows of `width` elements as products that want them in blocks of rows keep them.
    pub(crate) fn to_blocks(&self, width: usize) -> Data {
        self.moved(
            |row, rows, column| (row * width + column, blocked_at(row, rows, column, width)),
            width,
        )
    }

    /// What [`Data::to_blocks`] was made of.
    pub(crate) fn out_of_blocks(&self, width: usize) -> Data {
        self.moved(
            |row, rows, column| (blocked_at(row, rows, column, width), row * width + column),
            width,
        )
    }

    /// Every element of rows of `width`, from one place to another.
    fn moved(&self, places: impl Fn(usize, usize, usize) -> (usize, usize), width: usize) -> Data {
        let (size, rows) = (self.dtype.size(), self.len() / width);
        let mut bytes = vec![0; self.bytes.len()];
        for i in 0..rows * width {
            let (from, to) = places(i / width, rows, i % width);
            bytes[to * size..][..size].copy_from_slice(&self.bytes[from * size..][..size]);
        }
        Data::new(self.dtype, bytes)
    }

    /// The first `len` elements.
    pub(crate) fn first(&self, len: usize) -> Data {
        Data::new(self.dtype, self.bytes[..len * self.dtype.size()].to_vec())
    }

    /// First element whose bits differ, and both.
    pub(crate) fn first_difference(&self, other: &Data) -> Option<(usize, u32, u32)> {
        if self.bytes == other.bytes && self.dtype == other.dtype {
            return None;
        }
        if self.len() != other.len() || self.dtype != other.dtype {
            return Some((self.len().min(other.len()), 0, 0));
        }
        (0..self.len())
            .map(|i| (i, self.bits(i), other.bits(i)))
            .find(|(_, a, b)| a != b)
    }
}

/// How an output is held against the reference.
#[derive(Clone)]
pub(crate) enum Measure {
    /// Bit for bit.
    Exact,
    /// ‖out − ref‖ / ‖ref‖ at most this. Where the reference holds poison (or an infinity), so must the subject.
    Relative(f64),
    /// As `Relative` for the first `len` elements; what lies behind them is nobody's.
    Prefix { bound: f64, len: usize },
    /// Tokens: other ones only where `margin(row, reference's, subject's)` is below [`TOKEN_MARGIN`].
    Tokens {
        stride: usize,
        margin: Arc<dyn Fn(usize, i32, i32) -> f64 + Send + Sync>,
    },
}

/// Two tokens whose scores are nearer than this may change places.
pub(crate) const TOKEN_MARGIN: f64 = 1e-5;

/// What a comparison found.
#[derive(Debug, Clone, Default)]
pub(crate) struct Difference {
    pub(crate) error: f64,
    pub(crate) problem: Option<String>,
    /// Tokens that differ at a near tie.
    pub(crate) ties: usize,
}

impl Measure {
    pub(crate) fn bound(&self) -> f64 {
        match self {
            Measure::Relative(bound) | Measure::Prefix { bound, .. } => *bound,
            Measure::Exact | Measure::Tokens { .. } => 0.0,
        }
    }

    pub(crate) fn compare(&self, subject: &Data, reference: &Data) -> Difference {
        if subject.len() != reference.len() {
            return problem(format!("{} elements for {}", subject.len(), reference.len()));
        }
        match self {
            Measure::Exact => match subject.first_difference(reference) {
                None => Difference::default(),
                Some((i, got, want)) => problem(format!("[{i}] is {got:#x}, not {want:#x}")),
            },
            Measure::Relative(bound) => relative(subject, reference, *bound),
            Measure::Prefix { bound, len } => relative(&subject.first(*len), &reference.first(*len), *bound),
            Measure::Tokens { stride, margin } => tokens(subject, reference, *stride, &**margin),
        }
    }
}

fn problem(what: String) -> Difference {
    Difference {
        problem: Some(what),
        ..Difference::default()
    }
}

fn relative(subject: &Data, reference: &Data, bound: f64) -> Difference {
    // What the subject hands on in 16 bits the reference has in 32.
    let narrow;
    let reference = match (reference.dtype, subject.dtype) {
        (DType::F32, to @ (DType::Bf16 | DType::F16)) => {
            let values: Vec<f32> = (0..reference.len())
                .map(|i| narrowed(reference.float(i), to))
                .collect();
            narrow = Data::floats(&values);
            &narrow
        }
        _ => reference,
    };
    let (mut difference, mut norm) = (0f64, 0f64);
    for i in 0..reference.len() {
        let (got, want) = (subject.float(i), reference.float(i));
        if want.is_nan() && got.is_nan() || want == got {
            norm += if want.is_finite() {
                f64::from(want).powi(2)
            } else {
                0.0
            };
            continue;
        }
        if !want.is_finite() || !got.is_finite() {
            return Difference {
                error: f64::NAN,
                ..problem(format!("[{i}] is {got}, not {want}"))
            };
        }
        difference += (f64::from(got) - f64::from(want)).powi(2);
        norm += f64::from(want).powi(2);
    }
    let error = if norm > 0.0 {
        (difference / norm).sqrt()
    } else {
        difference.sqrt()
    };
    let problem = (error > bound).then(|| {
        let (mut worst, mut at) = (0f32, 0);
        for i in 0..reference.len() {
            let off = (subject.float(i) - reference.float(i)).abs();
            if off > worst {
                (worst, at) = (off, i);
            }
        }
        format!(
            "worst [{at}] is {:.4e}, not {:.4e}",
            subject.float(at),
            reference.float(at)
        )
    });
    Difference {
        error,
        problem,
        ties: 0,
    }
}

fn tokens(
    subject: &Data,
    reference: &Data,
    stride: usize,
    margin: &dyn Fn(usize, i32, i32) -> f64,
) -> Difference {
    let mut found = Difference::default();
    for i in 0..reference.len() {
        let (got, want) = (subject.bits(i) as i32, reference.bits(i) as i32);
        if got == want {
            continue;
        }
        let margin = margin(i / stride, want, got);
        if margin.abs() < TOKEN_MARGIN {
            found.ties += 1;
        } else {
            found.problem = Some(format!("[{i}] is token {got}, not {want}; {margin:.2e} worse"));
            return found;
        }
    }
    found
}
