//! The error type of checkpoint reading.

use std::path::PathBuf;

/// Result of checkpoint reading.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The source string means nothing.
    #[error("weights `{text}`: {problem}")]
    Source {
        /// As given.
        text: String,
        /// What to write instead.
        problem: String,
    },
    /// A file cannot be read.
    #[error("read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A configuration file misses a key, or holds a value of the wrong kind.
    #[error("{}: key `{key}`: {problem}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Path of the key, `talker_config.hidden_size`.
        key: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor file is malformed.
    #[error("{}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A tensor is not there.
    #[error("tensor {name} is missing from {from}")]
    MissingTensor {
        /// Tensor name.
        name: String,
        /// File, or seed.
        from: String,
    },
    /// A tensor's shape does not follow from the configuration.
    #[error("tensor {name} of {from} has shape {found:?}; the configuration needs {expected:?}")]
    Shape {
        /// Tensor name.
        name: String,
        /// File, or seed.
        from: String,
        /// From the configuration.
        expected: Vec<usize>,
        /// In the file.
        found: Vec<usize>,
    },
    /// A tensor's element type is not supported.
    #[error("tensor {name} of {from} has element type {found}; BF16 and F32 are supported")]
    Dtype {
        /// Tensor name.
        name: String,
        /// File.
        from: String,
        /// In the file.
        found: String,
    },
    /// The hub did not deliver.
    #[error("download {file} of {repo} at {revision} from the Hugging Face hub: {problem}")]
    Hub {
        /// `org/name`
        repo: String,
        /// Branch, tag or commit.
        revision: String,
        /// File asked for.
        file: String,
        /// Why.
        problem: String,
    },
}
