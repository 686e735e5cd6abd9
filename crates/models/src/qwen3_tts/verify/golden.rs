//! Reading a golden directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::VerifyError;

/// Kinds of models.
pub(super) const KINDS: [&str; 3] = ["custom_voice", "voice_design", "base"];

/// `manifest.json`; of each case only what a request is made of.
#[derive(Debug, Deserialize)]
pub(super) struct Manifest {
    pub(super) size: String,
    pub(super) seed: u64,
    pub(super) cases: BTreeMap<String, serde_json::Value>,
    /// Cases whose file is there.
    #[serde(skip)]
    present: Vec<String>,
}

impl Manifest {
    pub(super) fn read(dir: &Path) -> Result<Self, VerifyError> {
        let path = dir.join("manifest.json");
        let bad = |problem: String| VerifyError::Golden {
            path: path.clone(),
            problem,
        };
        let text = std::fs::read(&path).map_err(|error| bad(error.to_string()))?;
        let mut manifest: Self = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
        let present = |name: &&String| dir.join(format!("{name}.safetensors")).is_file();
        manifest.present = manifest.cases.keys().filter(present).cloned().collect();
        Ok(manifest)
    }

    /// Root mean square errors of the reference's own logits and predictor logits in bf16, when it measured them.
    pub(super) fn bf16_errors(&self) -> Option<(f32, f32)> {
        let measured = self.cases.get("teacher_forced_bf16_error")?;
        let error = |key: &str| measured[key].as_f64().map(|error| error as f32);
        Some((error("logits_rms_err")?, error("cp_logits_rms_err")?))
    }

    /// Cases that a kind of model runs; files of single stages are no cases.
    pub(super) fn cases_of(&self, kind: &str) -> impl Iterator<Item = String> {
        let prefixes: &[&str] = match kind {
            "custom_voice" => &["cv_"],
            "voice_design" => &["vd_"],
            _ => &["xvec", "icl_"],
        };
        let belongs = |name: &&String| prefixes.iter().any(|prefix| name.starts_with(prefix));
        self.present.iter().filter(belongs).cloned()
    }
}

/// One safetensors file of a golden directory.
#[derive(Debug)]
pub(super) struct GoldenFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl GoldenFile {
    pub(super) fn open(path: PathBuf) -> Result<Self, VerifyError> {
        match std::fs::read(&path) {
            Ok(bytes) => Ok(Self { path, bytes }),
            Err(error) => Err(VerifyError::Golden {
                path,
                problem: error.to_string(),
            }),
        }
    }

    fn with<T>(
        &self,
        name: &str,
        dtype: Dtype,
        read: impl FnOnce(&[usize], &[u8]) -> T,
    ) -> Result<T, VerifyError> {
        let bad = |problem: String| VerifyError::Golden {
            path: self.path.clone(),
            problem: format!("tensor {name}: {problem}"),
        };
        let file = SafeTensors::deserialize(&self.bytes).map_err(|error| bad(error.to_string()))?;
        let tensor = file.tensor(name).map_err(|error| bad(error.to_string()))?;
        if tensor.dtype() != dtype {
            return Err(bad(format!("has type {}, not {dtype}", tensor.dtype())));
        }
        Ok(read(tensor.shape(), tensor.data()))
    }

    /// A float tensor, flat.
    pub(super) fn floats(&self, name: &str) -> Result<Vec<f32>, VerifyError> {
        self.with(name, Dtype::F32, |_, data| {
            data.as_chunks::<4>()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b))
                .collect()
        })
    }

    /// Frames of codes `[frames, groups]`.
    pub(super) fn codes<const GROUPS: usize>(&self, name: &str) -> Result<Arc<[[i32; GROUPS]]>, VerifyError> {
        self.with(name, Dtype::I64, |_, data| {
            let codes: Vec<i32> = data
                .as_chunks::<8>()
                .0
                .iter()
                .map(|b| i64::from_le_bytes(*b) as i32)
                .collect();
            codes.as_chunks::<GROUPS>().0.into()
        })
    }
}
