//! `laneway soak`, seconds of it: it passes what should pass, and tells what should not.

use std::process::{Command, Output};

use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::process::binary;

/// Exit code, report and complaints of a soak.
struct Soaked {
    code: Option<i32>,
    report: String,
    log: String,
}

fn soak(placement: Placement, cancels_per_minute: &str, flags: &[&str]) -> anyhow::Result<Soaked> {
    let config = Deployment::new(placement).write()?;
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(binary("laneway")?)
        .args(["soak", "--deployment", config.path(), "--concurrency", "4"])
        .args([
            "--sentences",
            "3",
            "--seed",
            "5",
            "--cancels-per-minute",
            cancels_per_minute,
        ])
        .args(flags)
        .env("LANEWAY_SANITIZE", "1")
        .output()?;
    Ok(Soaked {
        code: status.code(),
        report: String::from_utf8(stdout)?,
        log: String::from_utf8(stderr)?,
    })
}

impl Soaked {
    /// The number of a key of the report that is there once.
    #[track_caller]
    fn number(&self, key: &str) -> f64 {
        let (_, after) = self
            .report
            .split_once(&format!("\"{key}\": "))
            .unwrap_or_else(|| panic!("no {key} in {}\n{}", self.report, self.log));
        let end = after.find([',', '\n']).unwrap_or(after.len());
        after[..end]
            .parse()
            .unwrap_or_else(|_| panic!("{key} is no number: {}", &after[..end]))
    }
}

#[test]
fn a_soak_passes_with_streams_left_in_the_middle() -> anyhow::Result<()> {
    let soaked = soak(Placement::Lane, "100", &["--seconds", "15"])?;
    assert_eq!(soaked.code, Some(0), "{}\n{}", soaked.report, soaked.log);
    assert!(soaked.report.contains("\"passed\": true"), "{}", soaked.report);
    assert!(soaked.number("completed") >= 4.0, "{}", soaked.report);
    assert!(soaked.number("cancelled") >= 8.0, "{}", soaked.report);
    assert!(soaked.number("repeated") >= 1.0, "{}", soaked.report);
    assert_eq!(soaked.number("differing"), 0.0);
    Ok(())
}

#[test]
fn a_soak_that_kills_the_codec_worker_passes_and_counts_what_was_lost() -> anyhow::Result<()> {
    let soaked = soak(Placement::Split, "100", &["--seconds", "24", "--kill", "codec=1"])?;
    assert_eq!(soaked.code, Some(0), "{}\n{}", soaked.report, soaked.log);
    assert!(soaked.number("recovered_after_s") > 0.0, "{}", soaked.report);
    assert!(soaked.number("lost_streams") >= 1.0, "{}", soaked.report);
    // The Talker's worker was started once, the Codec's twice.
    let starts: String = soaked.report.split_whitespace().collect();
    assert!(starts.contains("\"worker_starts\":[1,2]"), "{}", soaked.report);
    Ok(())
}

#[test]
fn a_soak_that_should_not_pass_says_why() -> anyhow::Result<()> {
    // So few frames that every stream of the trained model runs into its cap.
    let soaked = soak(Placement::Chain, "0", &["--seconds", "3", "--max-frames", "2"])?;
    assert_eq!(soaked.code, Some(1), "{}", soaked.report);
    assert!(soaked.log.contains("ran into their frame cap"), "{}", soaked.log);
    assert!(soaked.report.contains("\"passed\": false"), "{}", soaked.report);

    let inside = soak(Placement::Lane, "0", &["--seconds", "3", "--kill", "codec=1"])?;
    assert_eq!(inside.code, Some(1), "{}", inside.report);
    assert!(inside.log.contains("several workers"), "{}", inside.log);
    Ok(())
}

/// One clip of each voice, whoever asks and however often.
#[test]
fn a_soak_of_clones_encodes_each_clip_once() -> anyhow::Result<()> {
    let soaked = soak(Placement::Cloning, "20", &["--seconds", "12", "--clips", "2"])?;
    assert_eq!(soaked.code, Some(0), "{}\n{}", soaked.report, soaked.log);
    let clones: String = soaked.report.split_whitespace().collect();
    assert!(
        clones.contains("\"clones\":{\"clips\":2,\"encoded\":2}"),
        "{}",
        soaked.report
    );
    Ok(())
}
