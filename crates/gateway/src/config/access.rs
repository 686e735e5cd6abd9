//! Who may call a gateway, and how: what every command that starts one takes.

use std::path::PathBuf;

use clap::Args;
use laneway_tls::ServerTls;
use laneway_tls::flags::PublicTlsArgs;

use super::{ConfigViolation, environment};
use crate::http::origin::Origins;
use crate::keys::ApiKeys;

/// Flags that say who may call, and how.
#[derive(Debug, Clone, Default, Args)]
pub struct AccessArgs {
    /// File of the API keys that calls have to name, one `name key [requests_per_minute=N] [concurrent=N]` a line. It is
    /// read again when it changes. Without it nobody is asked for one.
    #[arg(long, env = environment::API_KEYS)]
    pub api_keys: Option<PathBuf>,
    /// Origins whose pages may call from a browser, https://host or http://host:port, comma separated; * for all. The
    /// gateway's own page always may.
    #[arg(long = "cors-origin", env = environment::CORS_ORIGINS, value_delimiter = ',')]
    pub cors_origins: Vec<String>,
    #[command(flatten)]
    tls: PublicTlsArgs,
}

/// Who may call, and how.
#[derive(Debug, Clone, Default)]
pub struct Access {
    pub(super) api_keys: Option<ApiKeys>,
    pub(super) origins: Origins,
    pub(super) tls: Option<ServerTls>,
}

impl AccessArgs {
    /// Read the files. All violations are returned at once.
    ///
    /// # Errors
    /// A file that cannot be read or used, or what is no origin.
    pub fn read(self) -> Result<Access, Vec<ConfigViolation>> {
        let (mut access, mut violations) = (Access::default(), Vec::new());
        if let Some(path) = self.api_keys {
            let value = path.display().to_string();
            match ApiKeys::read(path) {
                Ok(keys) => access.api_keys = Some(keys),
                Err(error) => violations.push(ConfigViolation {
                    flag: "--api-keys",
                    value,
                    problem: error.to_string(),
                }),
            }
        }
        match Origins::parse(&self.cors_origins) {
            Ok(origins) => access.origins = origins,
            Err((value, problem)) => violations.push(ConfigViolation {
                flag: "--cors-origin",
                value,
                problem,
            }),
        }
        match self.tls.read() {
            Ok(tls) => access.tls = tls,
            Err(more) => violations.extend(more),
        }
        if violations.is_empty() {
            Ok(access)
        } else {
            Err(violations)
        }
    }
}
