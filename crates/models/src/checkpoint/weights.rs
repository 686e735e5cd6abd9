//! A set of named tensors, from files or from a seed.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use laneway_device::{DType, MatrixSpec};
use safetensors::Dtype;
use serde::Deserialize;

use super::config::read_json;
use super::safetensors_file::SafetensorsFile;
use super::{CheckpointError, Result, TensorShape, random};

/// One tensor, row-major little-endian.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// `F32` or `Bf16`.
    pub dtype: DType,
    /// `shape` elements of `dtype`.
    pub data: Vec<u8>,
}

impl Tensor {
    /// Elements widened to f32 (exact).
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            DType::Bf16 => self
                .data
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            _ => self
                .data
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        }
    }

    /// The tensor as a weight matrix: the first dimension is the output, all others together the input.
    pub fn matrix(&self) -> MatrixSpec<'_> {
        let n = self.shape.first().copied().unwrap_or(1);
        MatrixSpec {
            name: &self.name,
            n,
            k: self.shape.iter().skip(1).product(),
            dtype: self.dtype,
            data: &self.data,
        }
    }
}

/// Stack tensors of equal width one under the other: fused projections.
///
/// # Panics
/// When element types or inner dimensions differ: the caller checked the shapes.
pub fn concat_rows(name: &str, parts: &[Tensor]) -> Tensor {
    let first = &parts[0];
    let mut shape = first.shape.clone();
    shape[0] = 0;
    let mut data = Vec::with_capacity(parts.iter().map(|part| part.data.len()).sum());
    for part in parts {
        assert!(
            part.dtype == first.dtype && part.shape[1..] == first.shape[1..],
            "{name}: cannot stack {} under {}",
            part.name,
            first.name
        );
        shape[0] += part.shape[0];
        data.extend_from_slice(&part.data);
    }
    Tensor {
        name: name.to_owned(),
        shape,
        dtype: first.dtype,
        data,
    }
}

/// A set of named tensors.
#[derive(Debug)]
pub struct Weights(Source);

#[derive(Debug)]
enum Source {
    Files {
        files: Vec<SafetensorsFile>,
        /// Tensor name to file.
        index: BTreeMap<String, usize>,
        dir: String,
    },
    Random {
        seed: u64,
        shapes: BTreeMap<String, Vec<usize>>,
        dtype: DType,
    },
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// File names that a shard index lists, each once.
pub(crate) fn shards(index: &Path) -> Result<Vec<String>> {
    let index: ShardIndex = read_json(index)?;
    let names: std::collections::BTreeSet<_> = index.weight_map.into_values().collect();
    Ok(names.into_iter().collect())
}

impl Weights {
    /// Open `model.safetensors` of a directory, or the shards that `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// Neither is there, or one is malformed.
    pub fn open(dir: &Path) -> Result<Self> {
        let index_path = dir.join("model.safetensors.index.json");
        let names = if index_path.is_file() {
            shards(&index_path)?
        } else {
            vec!["model.safetensors".to_owned()]
        };
        let mut files = Vec::with_capacity(names.len());
        let mut index = BTreeMap::new();
        for name in names {
            let file = SafetensorsFile::open(&dir.join(&name))?;
            for tensor in file.header.tensors().into_keys() {
                index.insert(tensor, files.len());
            }
            files.push(file);
        }
        Ok(Self(Source::Files {
            files,
            index,
            dir: dir.display().to_string(),
        }))
    }

    /// Generated tensors of these names and shapes (see `random`).
    pub fn random(seed: u64, shapes: Vec<TensorShape>, dtype: DType) -> Self {
        Self(Source::Random {
            seed,
            shapes: shapes
                .into_iter()
                .map(|tensor| (tensor.name, tensor.shape))
                .collect(),
            dtype,
        })
    }

    /// Whether a tensor is there.
    pub fn contains(&self, name: &str) -> bool {
        match &self.0 {
            Source::Files { index, .. } => index.contains_key(name),
            Source::Random { shapes, .. } => shapes.contains_key(name),
        }
    }

    /// Names of all tensors.
    pub fn names(&self) -> Vec<&str> {
        match &self.0 {
            Source::Files { index, .. } => index.keys().map(String::as_str).collect(),
            Source::Random { shapes, .. } => shapes.keys().map(String::as_str).collect(),
        }
    }

    fn describe(&self) -> Cow<'_, str> {
        match &self.0 {
            Source::Files { dir, .. } => Cow::Borrowed(dir),
            Source::Random { seed, .. } => Cow::Owned(format!("random:{seed}")),
        }
    }

    /// A tensor of exactly this shape.
    ///
    /// # Errors
    /// It is missing, or has another shape or an unsupported element type.
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.load(name, Some(shape))
    }

    /// A tensor of whatever shape it has.
    ///
    /// # Errors
    /// It is missing or has an unsupported element type.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        self.load(name, None)
    }

    fn load(&self, name: &str, expected: Option<&[usize]>) -> Result<Tensor> {
        let missing = || CheckpointError::MissingTensor {
            name: name.to_owned(),
            from: self.describe().into_owned(),
        };
        let check = |found: &[usize], from: &dyn Fn() -> String| match expected {
            Some(expected) if expected != found => Err(CheckpointError::Shape {
                name: name.to_owned(),
                from: from(),
                expected: expected.to_vec(),
                found: found.to_vec(),
            }),
            _ => Ok(()),
        };
        match &self.0 {
            Source::Files { files, index, .. } => {
                let file = &files[*index.get(name).ok_or_else(missing)?];
                let info = file.header.info(name).ok_or_else(missing)?;
                let from = || file.path.display().to_string();
                check(&info.shape, &from)?;
                let dtype = match info.dtype {
                    Dtype::BF16 => DType::Bf16,
                    Dtype::F32 => DType::F32,
                    other => {
                        return Err(CheckpointError::Dtype {
                            name: name.to_owned(),
                            from: from(),
                            found: other.to_string(),
                        });
                    }
                };
                Ok(Tensor {
                    name: name.to_owned(),
                    shape: info.shape.clone(),
                    dtype,
                    data: file.read(info.data_offsets)?,
                })
            }
            Source::Random { seed, shapes, dtype } => {
                let shape = shapes.get(name).ok_or_else(missing)?;
                check(shape, &|| self.describe().into_owned())?;
                Ok(Tensor {
                    name: name.to_owned(),
                    shape: shape.clone(),
                    dtype: *dtype,
                    data: random::tensor(*seed, name, shape, *dtype),
                })
            }
        }
    }
}
