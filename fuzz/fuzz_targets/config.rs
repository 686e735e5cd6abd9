//! A deployment file: read, checked against what its model declares, and cut into plans.
#![no_main]

use std::path::Path;

use laneway_models_decl::{Validated, load_deployment};
use laneway_plan::{Sources, WorkerPlan, render};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    // Paths in it start from here.
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/fuzzed.yaml");
    match load_deployment(&Sources::text(file, text), None) {
        Err(violations) => assert!(!violations.is_empty() && !render(&violations).is_empty()),
        Ok(Validated {
            deployment,
            declaration,
            ..
        }) => {
            for placed in &deployment.nodes {
                for rank in &placed.ranks {
                    assert!(
                        WorkerPlan::for_rank(&deployment, &declaration, *rank).is_some(),
                        "rank {rank} has no plan"
                    );
                }
            }
        }
    }
});
