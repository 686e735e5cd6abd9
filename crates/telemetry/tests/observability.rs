//! The dashboard and the alerts ask for metrics that there are.

use std::collections::BTreeSet;
use std::path::Path;

use laneway_telemetry::metric::{Kind, METRICS};

fn file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../deploy/observability")
        .join(name);
    std::fs::read_to_string(path).expect("the file is there")
}

/// Every word of `text` that looks like a metric of ours.
fn named(text: &str) -> BTreeSet<&str> {
    let of_a_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !of_a_name(c))
        .filter(|word| word.starts_with("laneway_"))
        .collect()
}

/// The series of every metric.
fn advertised() -> BTreeSet<String> {
    let series = |metric: &laneway_telemetry::metric::Metric| match metric.kind {
        Kind::Histogram(_) => ["_bucket", "_sum", "_count"]
            .map(|end| format!("{}{end}", metric.name))
            .to_vec(),
        Kind::Counter | Kind::Gauge => vec![metric.name.to_owned()],
    };
    METRICS.iter().flat_map(series).collect()
}

#[test]
fn dashboard_and_alerts_name_only_series_that_are_exported() {
    let advertised = advertised();
    for name in ["dashboard.json", "alerts.yaml", "alerts_test.yaml"] {
        let text = file(name);
        let named = named(&text);
        assert!(named.len() > 5, "{name} asks for {named:?}");
        let unknown: Vec<_> = named
            .iter()
            .filter(|series| !advertised.contains(**series))
            .collect();
        assert!(
            unknown.is_empty(),
            "{name} asks for {unknown:?}, which nothing exports"
        );
    }
}

#[test]
fn every_metric_is_on_the_dashboard() {
    let text = file("dashboard.json");
    let missing: Vec<_> = METRICS
        .iter()
        .filter(|metric| !text.contains(metric.name))
        .map(|metric| metric.name)
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn bounds_that_are_asked_for_are_bounds_of_buckets() {
    for name in ["dashboard.json", "alerts.yaml"] {
        let text = file(name).replace('\\', "");
        let asked: Vec<_> = text
            .split("_bucket{")
            .skip(1)
            .filter_map(|rest| {
                let labels = rest.split('}').next()?;
                let bound = labels.split("le=\"").nth(1)?.split('"').next()?;
                Some(bound.parse::<f64>().expect("a bound is a number"))
            })
            .collect();
        assert!(!asked.is_empty(), "{name}");
        for bound in asked {
            assert!(
                laneway_telemetry::metric::UNDERRUN_SECONDS.contains(&bound),
                "{name}: {bound}"
            );
        }
    }
}
