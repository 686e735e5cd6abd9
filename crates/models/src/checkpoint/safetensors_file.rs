//! One `.safetensors` file: the header in memory, tensor bytes read on demand.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::{CheckpointError, Result};

/// A real header is a few hundred KB; a larger claim is a broken file.
const MAX_HEADER_BYTES: u64 = 100 << 20;

#[derive(Debug)]
pub(crate) struct SafetensorsFile {
    pub(crate) path: PathBuf,
    file: File,
    pub(crate) header: Metadata,
    data_start: u64,
}

impl SafetensorsFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let io = |source| CheckpointError::Io {
            path: path.to_owned(),
            source,
        };
        let malformed = |problem: String| CheckpointError::Malformed {
            path: path.to_owned(),
            problem,
        };
        let file = File::open(path).map_err(io)?;
        let file_bytes = file.metadata().map_err(io)?.len();
        if file_bytes < 8 {
            let problem = format!("has {file_bytes} bytes: not a safetensors file, or cut short");
            return Err(malformed(problem));
        }
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0).map_err(io)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES || header_bytes + 8 > file_bytes {
            return Err(malformed(format!(
                "claims a header of {header_bytes} bytes in a file of {file_bytes}: not a safetensors file, or cut short"
            )));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(io)?;
        let header: Metadata =
            serde_json::from_slice(&header).map_err(|error| malformed(format!("header: {error}")))?;
        for (name, info) in header.tensors() {
            let bytes = info.shape.iter().product::<usize>() * info.dtype.bitsize() / 8;
            let (start, end) = info.data_offsets;
            if end.checked_sub(start) != Some(bytes) || end > header.data_len() {
                return Err(malformed(format!(
                    "tensor {name} of shape {:?} needs {bytes} bytes and claims {start}..{end}",
                    info.shape
                )));
            }
        }
        let data_start = header_bytes + 8;
        let expected = data_start + header.data_len() as u64;
        if expected != file_bytes {
            return Err(malformed(format!(
                "has {file_bytes} bytes where its header needs {expected}: cut short?"
            )));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            header,
            data_start,
        })
    }

    /// Bytes of the tensor at `offsets` of the data section.
    pub(crate) fn read(&self, offsets: (usize, usize)) -> Result<Vec<u8>> {
        let mut data = vec![0; offsets.1 - offsets.0];
        self.file
            .read_exact_at(&mut data, self.data_start + offsets.0 as u64)
            .map_err(|source| CheckpointError::Io {
                path: self.path.clone(),
                source,
            })?;
        Ok(data)
    }
}
