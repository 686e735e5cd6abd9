use super::golden::GoldenFile;
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
    all_pass_with(
        reports,
        cases,
        &["prompt", "logits", "predictor logits", "waveform"],
    );
}

#[track_caller]
fn all_pass_with(reports: &[CaseReport], cases: usize, compared: &[&str]) {
    assert_eq!(reports.len(), cases);
    for report in reports {
        assert!(report.passed(), "{report:#?}");
        for what in compared {
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

fn tiny_in_bf16(cases: &[&str]) -> Vec<CaseReport> {
    let (device, _) = laneway_device::testing::cpu();
    let options = VerifyOptions {
        golden: golden_dir().join("tiny"),
        weights: None,
        cases: cases.iter().map(|case| (*case).to_owned()).collect(),
        device,
        device_kind: DeviceKind::Cpu,
        precision: Precision::Bf16,
    };
    verify(&options, &mut |_| {}).unwrap()
}

/// The CPU computes in f32: what a device in bf16 is held to must pass there with room to spare.
#[test]
fn the_criterion_of_bf16_holds_for_f32() {
    let reports = tiny_in_bf16(&["cv_stream_en", "cv_eos", "cv_sample", "xvec", "icl_full"]);
    all_pass_with(&reports, 5, &["logits", "predictor logits", "waveform"]);
    for report in &reports {
        match report.case.as_str() {
            "cv_sample" => assert_eq!(report.codes, CodesReport::Forced),
            _ => assert_eq!(report.codes, CodesReport::Agreement(1.0)),
        }
        assert_eq!(
            report.difference("speaker vector").is_some(),
            ["xvec", "icl_full"].contains(&&*report.case)
        );
        // 1.25 times the manifest's own figures, as in the table of the design.
        let logits = report.difference("logits").unwrap();
        assert_eq!(logits.measure, Measure::Rms);
        assert!((logits.tolerance - 1.25 * 0.022741).abs() < 1e-5 && logits.value < 1e-3);
        let predictor = report.difference("predictor logits").unwrap();
        assert!((predictor.tolerance - 1.25 * 0.033407).abs() < 1e-5 && predictor.value < 1e-3);
        let waveform = report.difference("waveform").unwrap();
        assert_eq!((waveform.measure, waveform.tolerance), (Measure::Relative, 2e-2));
    }
}

/// Alternating errors of this size: their root mean square is the size.
fn perturb(values: &mut [f32], by: f32) {
    for (i, value) in values.iter_mut().enumerate() {
        *value += if i % 2 == 0 { by } else { -by };
    }
}

/// What a case's golden file holds, as if this build had computed it.
fn golden_outcome(case: &Case, golden: &GoldenFile) -> Outcome {
    let floats = |tensor: &str| golden.floats(&format!("{}/{tensor}", case.name)).unwrap();
    let frames = case.codes().unwrap().len();
    let rows = |values: Vec<f32>, rows: usize| -> Vec<Vec<f32>> {
        values
            .chunks_exact(values.len() / rows)
            .map(<[f32]>::to_vec)
            .collect()
    };
    let record = ProbeRecord {
        logits: rows(floats("logits"), frames + 1),
        predictor_logits: rows(floats("cp_logits"), frames),
        ..ProbeRecord::default()
    };
    Outcome {
        record,
        samples: floats("wav"),
        reference: None,
    }
}

#[test]
fn in_bf16_a_case_passes_up_to_its_limits_and_fails_beyond_each() {
    let dir = golden_dir().join("tiny");
    let manifest = Manifest::read(&dir).unwrap();
    let case = Case::open(&dir, &manifest, "cv_stream_en").unwrap();
    let golden = GoldenFile::open(dir.join("cv_stream_en.safetensors")).unwrap();
    let criterion = Criterion::new(Precision::Bf16, &manifest);
    let Criterion::Rounded(limit) = criterion else {
        panic!("{criterion:?}")
    };
    let frames = case.codes().unwrap().len();
    let failing = |times: [f32; 3]| -> Vec<&'static str> {
        let mut outcome = golden_outcome(&case, &golden);
        for row in &mut outcome.record.logits {
            perturb(row, times[0] * limit.first);
        }
        for row in &mut outcome.record.predictor_logits {
            perturb(row, times[1] * limit.predictor);
        }
        let power: f32 = outcome.samples.iter().map(|sample| sample * sample).sum();
        let rms = (power / outcome.samples.len() as f32).sqrt();
        perturb(&mut outcome.samples, times[2] * BF16_RELATIVE_TOLERANCE * rms);
        let differences = case.compare(&outcome, frames, criterion).unwrap();
        let failing = differences.iter().filter(|difference| !difference.passed());
        failing.map(|difference| difference.what).collect()
    };
    assert_eq!(failing([0.99; 3]), [""; 0]);
    assert_eq!(failing([1.01, 0.99, 0.99]), ["logits"]);
    assert_eq!(failing([0.99, 1.01, 0.99]), ["predictor logits"]);
    assert_eq!(failing([0.99, 0.99, 1.01]), ["waveform"]);
    assert_eq!(failing([f32::NAN; 3]), ["logits", "predictor logits", "waveform"]);
}

#[test]
fn agreement_is_the_share_of_equal_codes_and_decides_nothing_in_bf16() {
    let dir = golden_dir().join("tiny");
    let manifest = Manifest::read(&dir).unwrap();
    let case = Case::open(&dir, &manifest, "cv_stream_en").unwrap();
    let codes = case.codes().unwrap();
    let mut record = ProbeRecord {
        codes: codes.clone(),
        ..ProbeRecord::default()
    };
    assert_eq!(case.agreement(&record, &codes), 1.0);
    record.codes[0][3] += 1;
    let one_less = 1.0 - 1.0 / (codes.len() * CODES_PER_FRAME) as f32;
    assert!((case.agreement(&record, &codes) - one_less).abs() < 1e-6);
    record.codes.clear();
    assert_eq!(case.agreement(&record, &codes), 0.0);

    let report = |codes| CaseReport {
        case: String::new(),
        frames: 1,
        codes,
        reference_codes_equal: false,
        differences: Vec::new(),
        took: Duration::ZERO,
    };
    assert!(report(CodesReport::Agreement(0.1)).passed());
    assert!(!report(CodesReport::Equal).passed(), "the clip's codes differ");
}

#[test]
fn a_set_without_figures_of_its_own_has_fixed_limits() {
    let manifest = Manifest::read(&golden_dir().join("1.7b")).unwrap();
    let criterion = Criterion::new(Precision::Bf16, &manifest);
    assert!(
        matches!(criterion, Criterion::Rounded(limit) if limit.first == 0.07 && limit.predictor == 0.07),
        "{criterion:?}"
    );
    assert_eq!(Criterion::new(Precision::F32, &manifest), Criterion::Exact);
}
