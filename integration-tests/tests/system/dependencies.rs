//! The direction of dependencies, read from cargo itself.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, MetadataCommand};

/// Crates of the workspace and what each names as a normal dependency.
fn named() -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
    let manifest = laneway_integration_tests::deployment::checkout().join("Cargo.toml");
    let metadata = MetadataCommand::new().manifest_path(manifest).no_deps().exec()?;
    let normal = |package: &cargo_metadata::Package| {
        let all = package
            .dependencies
            .iter()
            .filter(|dependency| dependency.kind != DependencyKind::Development);
        all.map(|dependency| dependency.name.clone()).collect()
    };
    Ok(metadata
        .packages
        .iter()
        .map(|package| (package.name.to_string(), normal(package)))
        .collect())
}

/// Everything that a crate reaches inside the workspace, itself included, and all names on the way.
fn reached(named: &BTreeMap<String, BTreeSet<String>>, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::from([from.to_owned()]);
    let mut open = vec![from.to_owned()];
    while let Some(next) = open.pop() {
        for name in named.get(&next).into_iter().flatten() {
            if reached.insert(name.clone()) {
                open.push(name.clone());
            }
        }
    }
    reached
}

const WIRE: [&str; 4] = ["tonic", "prost", "axum", "laneway-proto"];

#[test]
fn crates_know_only_what_their_place_allows() -> anyhow::Result<()> {
    let named = named()?;
    let forbidden: &[(&str, &[&str])] = &[
        (
            "laneway-plan",
            &[
                "tonic",
                "prost",
                "tokio",
                "laneway-device",
                "laneway-proto",
                "laneway-models-decl",
            ],
        ),
        (
            "laneway-models-decl",
            &["tonic", "prost", "tokio", "laneway-device", "laneway-engine"],
        ),
        (
            "laneway-device",
            &[
                "tonic",
                "prost",
                "laneway-engine",
                "laneway-models",
                "laneway-plan",
            ],
        ),
        (
            "laneway-cuda",
            &[
                "tonic",
                "prost",
                "laneway-engine",
                "laneway-models",
                "laneway-plan",
            ],
        ),
        (
            "laneway-engine",
            &[
                "tonic",
                "prost",
                "cudarc",
                "laneway-models",
                "laneway-models-decl",
                "laneway-proto",
            ],
        ),
        ("laneway-models", &["tonic", "prost", "cudarc", "laneway-proto"]),
        (
            "laneway-gateway",
            &[
                "laneway-device",
                "laneway-engine",
                "laneway-models",
                "laneway-worker",
                "cudarc",
            ],
        ),
        (
            "laneway-engine-manager",
            &["laneway-device", "laneway-engine", "laneway-models", "cudarc"],
        ),
        (
            "laneway-tls",
            &[
                "laneway-proto",
                "laneway-plan",
                "laneway-device",
                "laneway-engine",
            ],
        ),
        (
            "laneway-audio",
            &["tonic", "prost", "laneway-device", "laneway-engine"],
        ),
    ];
    for (name, forbidden) in forbidden {
        let reached = reached(&named, name);
        assert!(named.contains_key(*name), "there is no crate {name}");
        for other in *forbidden {
            assert!(!reached.contains(*other), "{name} must not know {other}");
        }
    }
    Ok(())
}

#[test]
fn the_wire_and_the_driver_have_their_crates() -> anyhow::Result<()> {
    // The integration tests are callers, telemetry carries traces in the metadata of calls, and tls their connections.
    let wire = [
        "laneway-proto",
        "laneway-engine-manager",
        "laneway-worker",
        "laneway-gateway",
        "laneway-cli",
        "laneway-telemetry",
        "laneway-tls",
        "laneway-integration-tests",
    ];
    for (name, dependencies) in named()? {
        let speaks = WIRE.iter().find(|dependency| dependencies.contains(**dependency));
        assert!(
            speaks.is_none() || wire.contains(&name.as_str()),
            "{name} must not know the wire: {speaks:?}"
        );
        let drives = dependencies.contains("cudarc");
        assert!(!drives || name == "laneway-cuda", "{name} must not name cudarc");
    }
    Ok(())
}
