//! `laneway validate`: every violation of a configuration, and nothing started.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use laneway_models_decl::load_deployment_here;
use laneway_plan::deployment::Placement;
use laneway_plan::{Deployment, DeviceInventory, Sources};

use crate::config::{Refused, warn_of_stray_variables};

/// Flags of `validate`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The configuration file.
    file: PathBuf,
    /// Check devices and memory too, as if they were these: this machine's (`local`), `cpu:<GiB>` or `h200:<count>`.
    #[arg(long)]
    assume: Option<String>,
    /// Override a key of the file: section.key=value. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let inventory = arguments.assume.as_deref().map(assumed).transpose()?;
    let sources = Sources::read(&arguments.file, arguments.set.clone());
    warn_of_stray_variables();
    let validated = load_deployment_here(&sources, inventory.as_ref()).map_err(Refused)?;
    println!("{}: {}", arguments.file.display(), summary(&validated.deployment));
    if inventory.is_none() {
        println!("devices and memory were not checked: name them with --assume");
    }
    Ok(ExitCode::SUCCESS)
}

fn assumed(text: &str) -> anyhow::Result<DeviceInventory> {
    let number = |text: &str| {
        text.parse()
            .with_context(|| format!("read --assume: `{text}` is not a whole number"))
    };
    match text.split_once(':') {
        None if text == "local" => laneway_worker::device::local_devices(),
        Some(("cpu", gib)) => Ok(DeviceInventory::cpu(u64::from(number(gib)?) << 30).assumed()),
        Some(("h200", count)) => Ok(DeviceInventory::h200(number(count)?).assumed()),
        _ => anyhow::bail!("read --assume: `{text}` is none of local, cpu:<GiB>, h200:<count>"),
    }
}

/// What the deployment comes to, in one line.
fn summary(deployment: &Deployment) -> String {
    let place = |node: &laneway_plan::deployment::NodePlacement| {
        let placement = match node.placement {
            Placement::Chain => "chain".to_owned(),
            Placement::Lane(lane) => format!("lane {lane}"),
            Placement::Auto(lane) => format!("lane {lane} by measurement"),
        };
        let ranks: Vec<String> = node.ranks.iter().map(u32::to_string).collect();
        format!("{} on rank {} ({placement})", node.node, ranks.join("+"))
    };
    let nodes: Vec<String> = deployment.nodes.iter().map(place).collect();
    let copies = match deployment.replicas {
        1 => String::new(),
        replicas => format!(", {replicas} times"),
    };
    format!(
        "{} from {} is valid: {}{copies}",
        deployment.model,
        deployment.weights,
        nodes.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inventory_is_named_or_refused() {
        assert_eq!(assumed("h200:2").unwrap(), DeviceInventory::h200(2).assumed());
        assert_eq!(assumed("cpu:4").unwrap(), DeviceInventory::cpu(4 << 30).assumed());
        for wrong in ["h200", "h200:two", "tpu:1", ""] {
            let error = format!("{:#}", assumed(wrong).unwrap_err());
            assert!(error.contains("--assume"), "{error}");
        }
    }
}
