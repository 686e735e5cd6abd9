//! Which deployment a command means.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use laneway_engine_manager::Served;
use laneway_plan::{Sources, Violation};

/// The deployment that is meant when none is named, from the top of a checkout.
const DEMO: &str = "configs/demo.yaml";

/// Variables that are read and are no keys of a deployment.
const VARIABLES: &[&str] = &[
    "LANEWAY_ADVERTISE",
    "LANEWAY_API_KEY",
    "LANEWAY_CA",
    "LANEWAY_CERT",
    "LANEWAY_COMMIT",
    "LANEWAY_CONFIG",
    "LANEWAY_CUDA_PDL",
    "LANEWAY_CUDA_SERIALIZE",
    "LANEWAY_ENGINE_MANAGER",
    "LANEWAY_GATEWAY",
    "LANEWAY_INTERNAL_TLS_CA",
    "LANEWAY_INTERNAL_TLS_CERT",
    "LANEWAY_INTERNAL_TLS_KEY",
    "LANEWAY_INTERNAL_TLS_NAME",
    "LANEWAY_KEY",
    "LANEWAY_LISTEN",
    "LANEWAY_LOG",
    "LANEWAY_LOG_FORMAT",
    "LANEWAY_METRICS_LISTEN",
    "LANEWAY_NVRTC_DIR",
    "LANEWAY_OTLP_ENDPOINT",
    "LANEWAY_QWEN_TOKENIZER_DIR",
    "LANEWAY_RANK",
    "LANEWAY_SANITIZE",
    "LANEWAY_TLS_NAME",
    "LANEWAY_TRUE_SIZE",
];

/// The gateway's own program has its variables under this prefix.
const GATEWAY_VARIABLES: &str = "LANEWAY_GATEWAY_";

/// Say which variables of the environment look like ours and set nothing. No reason to stop: a container's
/// environment also has names that its platform made.
pub(crate) fn warn_of_stray_variables() {
    let names: Vec<String> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| !name.starts_with(GATEWAY_VARIABLES))
        .collect();
    for (name, nearest) in laneway_plan::stray_variables(names.iter().map(String::as_str), VARIABLES) {
        tracing::warn!("the environment variable {name} sets nothing; the nearest that does is {nearest}");
    }
}

/// Flags that name a deployment.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ConfigArguments {
    /// The deployment's configuration file; the demo without one.
    #[arg(long, visible_alias = "deployment", env = "LANEWAY_CONFIG")]
    config: Option<PathBuf>,
    /// Override a key of the file: section.key=value. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// A configuration that cannot be used, with every reason.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) Vec<Violation>);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&laneway_plan::render(&self.0))
    }
}

impl std::error::Error for Refused {}

impl ConfigArguments {
    /// Read and check the deployment.
    ///
    /// # Errors
    /// [`Refused`]; there is no demo to fall back on.
    pub(crate) fn load(self) -> anyhow::Result<Served> {
        Ok(Served::load(self.sources()?).map_err(Refused)?)
    }

    /// Where its values come from.
    ///
    /// # Errors
    /// No file is named and there is no demo.
    pub(crate) fn sources(self) -> anyhow::Result<Sources> {
        let ConfigArguments { config, set } = self.resolved()?;
        warn_of_stray_variables();
        Ok(Sources::read(&config.context("name a configuration")?, set))
    }

    /// The same deployment with its file named.
    ///
    /// # Errors
    /// No file is named and there is no demo.
    pub(crate) fn resolved(self) -> anyhow::Result<Self> {
        let config = match self.config {
            Some(file) => file,
            None => demo()?,
        };
        Ok(ConfigArguments {
            config: Some(config),
            ..self
        })
    }

    /// The flags that name this deployment to another process of this program.
    pub(crate) fn flags(&self) -> Vec<OsString> {
        let file = self
            .config
            .iter()
            .flat_map(|file| ["--config".into(), file.into()]);
        let set = self.set.iter().flat_map(|set| ["--set".into(), set.into()]);
        file.chain(set).collect()
    }

    /// As if the flags were given.
    #[cfg(test)]
    pub(crate) fn of_file(file: PathBuf, set: Vec<String>) -> Self {
        ConfigArguments {
            config: Some(file),
            set,
        }
    }
}

/// The demo of the checkout that this program was built in or is run in.
fn demo() -> anyhow::Result<PathBuf> {
    let here = std::env::current_dir()?;
    let program = std::env::current_exe()?;
    let starts = [here.as_path(), program.as_path()];
    let above = starts
        .into_iter()
        .flat_map(Path::ancestors)
        .map(|directory| directory.join(DEMO));
    above.into_iter().find(|file| file.is_file()).ok_or_else(|| {
        anyhow::anyhow!(
            "no --config is given, and there is no {DEMO} above {} or the program",
            here.display()
        )
    })
}
