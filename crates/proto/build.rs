//! Compiles `proto` with protox, so that no `protoc` has to be installed.

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto");
    println!("cargo::rerun-if-changed={}", root.display());
    let ours = ["types", "speech", "worker", "engine_manager"].map(|name| format!("laneway/v1/{name}.proto"));
    let files = ours.into_iter().chain(["riva/proto/riva_tts.proto".to_owned()]);
    let files: Vec<_> = files.map(|name| root.join(name)).collect();
    let descriptors = protox::compile(files, [&root])?;

    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(
        out.join("descriptors.bin"),
        prost::Message::encode_to_vec(&descriptors),
    )?;
    // Audio is handed on as `Bytes`, so a chunk is never copied on its way through.
    tonic_prost_build::configure()
        .bytes(".")
        // What is answered does not depend on the order of a hash.
        .btree_map(".")
        .compile_fds(descriptors)?;
    Ok(())
}
