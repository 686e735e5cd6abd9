//! Which deployment a command means.

use std::fmt;
use std::path::{Path, PathBuf};

use clap::Args;
use laneway_engine_manager::Served;
use laneway_plan::{Sources, Violation};

/// The deployment that is meant when none is named, from the top of a checkout.
const DEMO: &str = "configs/demo.yaml";

/// Flags that name a deployment.
#[derive(Debug, Clone, Args)]
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
        let file = match self.config {
            Some(file) => file,
            None => demo()?,
        };
        Ok(Sources::read(&file, self.set))
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
