//! Compiles `proto/laneway/v1` with protox, so that no `protoc` has to be installed.

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    println!("cargo::rerun-if-changed={}", root.display());
    let files = ["types", "speech", "worker", "engine_manager"]
        .map(|name| root.join(format!("laneway/v1/{name}.proto")));
    let descriptors = protox::compile(files, [&root])?;

    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(
        out.join("laneway.v1.bin"),
        prost::Message::encode_to_vec(&descriptors),
    )?;
    // Audio is handed on as `Bytes`, so a chunk is never copied on its way through.
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(descriptors)?;
    Ok(())
}
