//! A wrong configuration starts nothing and says everything that is wrong with it.

use std::process::Command;

use laneway_integration_tests::process::binary;

const WRONG: &str = "model: qwen3_tts
weights: random:7
model_config: 0.6b-custom_voice
device: cpu
max_seq_length: 2048
node_groups:
  - nodes: [Talker]
    ranks: [0]
    lane: 1
  - nodes: [Codek]
    ranks: [0]
    side_stream: true
";

#[test]
fn every_violation_is_printed_and_the_exit_code_is_2() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("wrong.yaml");
    std::fs::write(&path, WRONG)?;
    let path = path.to_str().expect("temporary directories have plain names");
    for (name, arguments) in [
        ("laneway", vec!["validate", path]),
        ("laneway", vec!["up", "--config", path]),
        (
            "laneway-engine-manager",
            vec!["--config", path, "--listen", "127.0.0.1:0"],
        ),
    ] {
        let output = Command::new(binary(name)?).args(&arguments).output()?;
        let said = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(2), "{name} {arguments:?}: {said}");
        for wanted in [
            "wrong.yaml:5:",
            "UNKNOWN_KEY",
            "max_seq_len",
            "Codek",
            "SIDE_STREAM_REMOVED",
            "lane:",
        ] {
            assert!(said.contains(wanted), "{name} does not say {wanted}:\n{said}");
        }
        assert!(!said.contains("listening"), "something started: {said}");
    }
    Ok(())
}

#[test]
fn shipped_configurations_that_need_no_download_are_valid() -> anyhow::Result<()> {
    let demo = laneway_integration_tests::deployment::checkout().join("configs/demo.yaml");
    let output = Command::new(binary("laneway")?)
        .arg("validate")
        .arg(demo)
        .args(["--assume", "local"])
        .output()?;
    let (said, errors) = (
        String::from_utf8(output.stdout)?,
        String::from_utf8(output.stderr)?,
    );
    assert!(output.status.success(), "{errors}");
    assert!(said.contains("Codec on rank 0 (lane 1)"), "{said}");
    Ok(())
}
