//! Golden files: the manifest and each case's tensors.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Deserialize;

/// `manifest.json`, as far as it is used here.
#[derive(Debug, Deserialize)]
pub(super) struct Manifest {
    /// Size name, which is also the first part of its presets' names.
    pub(super) size: String,
    /// Seed of the weights.
    pub(super) seed: u64,
    cases: BTreeMap<String, serde_json::Value>,
}

/// What a case was made from.
#[derive(Debug, Deserialize)]
pub(super) struct Facts {
    pub(super) text: String,
    pub(super) speaker: Option<String>,
    pub(super) language: Option<String>,
    pub(super) instruct: Option<String>,
    pub(super) ref_text: Option<String>,
    /// An end token in place of the checkpoint's.
    pub(super) eos_token_id: Option<u32>,
}

impl Manifest {
    pub(super) fn read(directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join("manifest.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))
    }

    pub(super) fn has(&self, case: &str) -> bool {
        self.cases.contains_key(case)
    }

    pub(super) fn facts(&self, case: &str) -> anyhow::Result<Facts> {
        let value = self.cases.get(case).context("it is not in the manifest")?;
        serde_json::from_value(value.clone()).context("read its entry of the manifest")
    }
}

/// The tensors of one file.
pub(super) struct Tensors {
    bytes: Vec<u8>,
    prefix: String,
}

impl Tensors {
    /// Of a case: names are below its own.
    pub(super) fn of_case(directory: &Path, case: &str) -> anyhow::Result<Self> {
        Self::open(directory, case, &format!("{case}/"))
    }

    /// Of the file `<name>.safetensors`, below `prefix`.
    pub(super) fn open(directory: &Path, name: &str, prefix: &str) -> anyhow::Result<Self> {
        let path = directory.join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(Tensors {
            bytes,
            prefix: prefix.to_owned(),
        })
    }

    fn with<T>(
        &self,
        name: &str,
        read: impl FnOnce(TensorView<'_>) -> anyhow::Result<T>,
    ) -> anyhow::Result<Option<T>> {
        let file = SafeTensors::deserialize(&self.bytes).context("read a safetensors file")?;
        let name = format!("{}{name}", self.prefix);
        match file.tensor(&name) {
            Ok(tensor) => read(tensor)
                .with_context(|| format!("read tensor {name}"))
                .map(Some),
            Err(_) => Ok(None),
        }
    }

    /// A float tensor, row after row; `None` when the file has no such.
    pub(super) fn floats(&self, name: &str) -> anyhow::Result<Option<Vec<f32>>> {
        self.with(name, |tensor| {
            anyhow::ensure!(
                tensor.dtype() == Dtype::F32,
                "it is {:?}, not F32",
                tensor.dtype()
            );
            let values = tensor.data().as_chunks::<4>().0;
            Ok(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
        })
    }

    /// Frames of codes.
    pub(super) fn frames<const N: usize>(&self, name: &str) -> anyhow::Result<Vec<[i32; N]>> {
        let frames = self.with(name, |tensor| {
            anyhow::ensure!(
                tensor.dtype() == Dtype::I64,
                "it is {:?}, not I64",
                tensor.dtype()
            );
            let values = tensor.data().as_chunks::<8>().0;
            let codes: Vec<i32> = values
                .iter()
                .map(|bytes| i32::try_from(i64::from_le_bytes(*bytes)))
                .collect::<Result<_, _>>()?;
            let (frames, rest) = codes.as_chunks::<N>();
            anyhow::ensure!(rest.is_empty(), "it holds no whole number of frames");
            Ok(frames.to_vec())
        })?;
        frames.with_context(|| format!("there is no tensor {}{name}", self.prefix))
    }
}
