use super::*;
use crate::qwen3_tts::test_support::golden_dir;

fn run(set: &str, cases: &[&str]) -> Vec<CaseReport> {
    let (device, sanitizer) = laneway_device::testing::cpu();
    let options = VerifyOptions {
        golden: golden_dir().join(set),
        weights: None,
        cases: cases.iter().map(|case| (*case).to_owned()).collect(),
        device,
        device_kind: DeviceKind::Cpu,
        precision: Precision::F32,
    };
    let mut seen = 0;
    let reports = verify(&options, &mut |_| seen += 1).unwrap();
    assert_eq!(seen, reports.len());
    sanitizer.assert_clean();
    reports
}

#[track_caller]
fn all_pass(reports: &[CaseReport], cases: usize) {
    assert_eq!(reports.len(), cases);
    for report in reports {
        assert!(report.passed(), "{report:#?}");
        for what in ["prompt", "logits", "predictor logits", "waveform"] {
            assert!(report.difference(what).is_some(), "{report:#?}");
        }
    }
}

#[test]
fn every_tiny_case_passes() {
    let reports = run("tiny", &[]);
    all_pass(&reports, 11);
    let sampled = reports.iter().find(|report| report.case == "cv_sample").unwrap();
    assert!(sampled.difference("scores").is_some() && sampled.difference("predictor scores").is_some());
    let clones = reports
        .iter()
        .filter(|report| report.difference("speaker vector").is_some());
    assert_eq!(clones.count(), 4);
}

#[test]
fn the_case_without_projection_passes() {
    all_pass(&run("tiny/noproj", &[]), 1);
}

/// True sizes need gigabytes and minutes, and the released vocabulary.
#[test]
fn true_size_cases_pass() {
    if std::env::var_os("LANEWAY_TRUE_SIZE").is_none() {
        eprintln!("skipped: set LANEWAY_TRUE_SIZE=1 to run the 0.6B and 1.7B golden cases");
        return;
    }
    all_pass(&run("0.6b", &[]), 2);
    all_pass(&run("1.7b", &["cv_stream_en"]), 1);
}

#[test]
fn wrong_weights_are_a_report_that_fails() {
    let dir = tempfile::tempdir().unwrap();
    let set = golden_dir().join("tiny");
    for name in ["cv_eos.safetensors", "model-custom_voice"] {
        std::os::unix::fs::symlink(set.join(name), dir.path().join(name)).unwrap();
    }
    let manifest = std::fs::read_to_string(set.join("manifest.json")).unwrap();
    assert!(manifest.contains("\"seed\": 7,"));
    let manifest = manifest.replace("\"seed\": 7,", "\"seed\": 8,");
    std::fs::write(dir.path().join("manifest.json"), manifest).unwrap();
    let reports = run(dir.path().to_str().unwrap(), &[]);
    assert_eq!(reports.len(), 1);
    assert!(!reports[0].passed());
    assert_eq!(reports[0].codes, CodesReport::WrongFrom(0));
    assert!(reports[0].difference("logits").unwrap().value > TOLERANCE);
}

#[test]
fn a_directory_that_is_no_golden_set_is_named() {
    let options = VerifyOptions {
        golden: golden_dir().join("tensors"),
        weights: None,
        cases: Vec::new(),
        device: laneway_device::testing::cpu().0,
        device_kind: DeviceKind::Cpu,
        precision: Precision::F32,
    };
    let error = verify(&options, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("manifest.json"), "{error}");
}

#[test]
fn a_case_that_is_not_there_is_named() {
    let options = VerifyOptions {
        golden: golden_dir().join("tiny"),
        weights: None,
        cases: vec!["cv_nothing".into()],
        device: laneway_device::testing::cpu().0,
        device_kind: DeviceKind::Cpu,
        precision: Precision::F32,
    };
    let error = verify(&options, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("cv_nothing"), "{error}");
}
