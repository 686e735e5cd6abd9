//! Every shipped configuration loads and passes the validator on the machine that it is for.

use std::path::{Path, PathBuf};

use laneway_models_decl::load_deployment;
use laneway_plan::{DeviceInventory, Sources, render};

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs")
}

#[test]
fn demo() {
    let sources = Sources {
        environment: Vec::new(),
        ..Sources::read(&configs().join("demo.yaml"), Vec::new())
    };
    let validated = load_deployment(&sources, Some(&DeviceInventory::cpu(4 << 30)));
    validated.unwrap_or_else(|violations| panic!("{}", render(&violations)));
}
