//! Registered voices: what every command that starts a gateway takes.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;

use super::{ConfigViolation, DEFAULT_MAX_VOICES, DEFAULT_MAX_VOICES_MIB, environment};
use crate::voices::{Voices, VoicesConfig};

/// Flags that say where voices are kept, and how many.
#[derive(Debug, Clone, Args)]
pub struct VoicesArgs {
    /// Directory in which registered voices are kept, for this gateway alone. Without it none can be registered.
    #[arg(long, env = environment::VOICES_DIR)]
    pub voices_dir: Option<PathBuf>,
    /// Most registered voices.
    #[arg(long, env = environment::MAX_VOICES, default_value_t = DEFAULT_MAX_VOICES)]
    pub max_voices: usize,
    /// Most MiB of registered voices, on disk and in memory; a second of one takes about 0.1.
    #[arg(long, env = environment::MAX_VOICES_MIB, default_value_t = DEFAULT_MAX_VOICES_MIB)]
    pub max_voices_mib: u64,
}

impl VoicesArgs {
    /// Read the voices of the directory, where one is named.
    ///
    /// # Errors
    /// It cannot be used, another gateway uses it, it holds more than it may, or nothing may be in it.
    pub fn read(self) -> Result<Option<Voices>, ConfigViolation> {
        let Some(max_voices) = NonZeroUsize::new(self.max_voices) else {
            return Err(ConfigViolation {
                flag: "--max-voices",
                value: "0".into(),
                problem: "none could be registered; write 1 or more, or leave out --voices-dir".into(),
            });
        };
        let Some(directory) = self.voices_dir else {
            return Ok(None);
        };
        let value = directory.display().to_string();
        let opened = Voices::open(VoicesConfig {
            directory,
            max_voices,
            max_bytes: self.max_voices_mib.saturating_mul(1 << 20),
        });
        opened.map(Some).map_err(|error| ConfigViolation {
            flag: "--voices-dir",
            value,
            problem: error.to_string(),
        })
    }
}
