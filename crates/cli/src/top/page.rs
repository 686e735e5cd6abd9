//! Prometheus' text format, as much of it as Laneway's exporters write.

use std::collections::{BTreeMap, BTreeSet};

/// One value of a metric.
#[derive(Debug, Clone, PartialEq)]
struct Sample {
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Sample {
    fn is(&self, wanted: &[(&str, &str)]) -> bool {
        wanted
            .iter()
            .all(|(name, value)| self.labels.get(*name).is_some_and(|own| own == value))
    }
}

/// What was scraped, by name.
#[derive(Debug, Default)]
pub(super) struct Page {
    samples: BTreeMap<String, Vec<Sample>>,
}

impl Page {
    /// Add a page. Lines that are none of ours are passed over.
    pub(super) fn read(&mut self, text: &str) {
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, sample)) = sample(line) {
                self.samples.entry(name.to_owned()).or_default().push(sample);
            }
        }
    }

    fn of<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a Sample> {
        self.samples.get(name).into_iter().flatten()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.samples.contains_key(name)
    }

    /// The sum over all samples with these labels; 0 for a metric that nothing has moved yet.
    pub(super) fn sum(&self, name: &str, wanted: &[(&str, &str)]) -> f64 {
        let matching = self.of(name).filter(|sample| sample.is(wanted));
        matching.map(|sample| sample.value).sum()
    }

    /// Each combination of these labels' values, in order.
    pub(super) fn labels<const N: usize>(&self, name: &str, labels: [&str; N]) -> BTreeSet<[String; N]> {
        self.of(name)
            .map(|sample| labels.map(|label| sample.labels.get(label).cloned().unwrap_or_default()))
            .collect()
    }

    /// Bounds and cumulative counts of a histogram, summed over all with these labels.
    fn buckets(&self, name: &str, wanted: &[(&str, &str)]) -> Vec<(f64, f64)> {
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for sample in self
            .of(&format!("{name}_bucket"))
            .filter(|sample| sample.is(wanted))
        {
            let Some(bound) = sample.labels.get("le").and_then(|bound| number(bound)) else {
                continue;
            };
            match buckets.iter_mut().find(|(known, _)| *known == bound) {
                Some((_, count)) => *count += sample.value,
                None => buckets.push((bound, sample.value)),
            }
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        buckets
    }
}

/// What was added to a histogram between two pages.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Added {
    pub(super) count: f64,
    pub(super) sum: f64,
    /// Bound, and how many of the added lie at or under it.
    buckets: Vec<(f64, f64)>,
}

impl Added {
    pub(super) fn between(before: &Page, now: &Page, name: &str, wanted: &[(&str, &str)]) -> Self {
        let earlier = before.buckets(name, wanted);
        let buckets = now.buckets(name, wanted).into_iter().map(|(bound, count)| {
            let then = earlier.iter().find(|(known, _)| *known == bound);
            (bound, grown(then.map_or(0.0, |(_, count)| *count), count))
        });
        Self {
            count: rise(before, now, &format!("{name}_count"), wanted),
            sum: rise(before, now, &format!("{name}_sum"), wanted),
            buckets: buckets.collect(),
        }
    }

    pub(super) fn mean(&self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }

    /// Linear inside its bucket, as Prometheus has it; the last bound for what lies beyond.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        if self.count <= 0.0 {
            return None;
        }
        let wanted = share * self.count;
        let (mut lower, mut under) = (0.0, 0.0);
        for &(bound, count) in &self.buckets {
            if count >= wanted {
                if bound.is_infinite() {
                    return Some(lower);
                }
                let inside = count - under;
                let part = if inside > 0.0 {
                    (wanted - under) / inside
                } else {
                    1.0
                };
                return Some(lower + (bound - lower) * part);
            }
            (lower, under) = (bound, count);
        }
        Some(lower)
    }

    /// The share of what was added that lies above a bound of the histogram.
    pub(super) fn share_above(&self, bound: f64) -> Option<f64> {
        let under = self.buckets.iter().find(|(known, _)| *known >= bound)?.1;
        (self.count > 0.0).then(|| 1.0 - under / self.count)
    }
}

/// How much a counter rose.
pub(super) fn rise(before: &Page, now: &Page, name: &str, wanted: &[(&str, &str)]) -> f64 {
    grown(before.sum(name, wanted), now.sum(name, wanted))
}

/// A process that was started again counts from 0.
fn grown(before: f64, now: f64) -> f64 {
    if now >= before { now - before } else { now }
}

/// `name{label="value",…} number`.
fn sample(line: &str) -> Option<(&str, Sample)> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            rest = rest.trim_start_matches(',');
            if let Some(behind) = rest.strip_prefix('}') {
                rest = behind;
                break;
            }
            let (label, behind) = rest.split_once("=\"")?;
            let (value, behind) = quoted(behind)?;
            labels.insert(label.to_owned(), value);
            rest = behind;
        }
    }
    let value = number(rest.split_whitespace().next()?)?;
    Some((name, Sample { labels, value }))
}

/// The text up to the closing quote, and what is behind it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((index, char)) = chars.next() {
        match char {
            '"' => return Some((value, &text[index + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            other => value.push(other),
        }
    }
    None
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        text => text.parse().ok(),
    }
}

/// A page of this text alone.
#[cfg(test)]
pub(super) fn page(text: &str) -> Page {
    let mut page = Page::default();
    page.read(text);
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_with_their_labels() {
        let page = page(concat!(
            "# HELP a_total Help.\n# TYPE a_total counter\n",
            "a_total{lane=\"0\",walk=\"x\"} 3\na_total{lane=\"1\",walk=\"q\\\"u,o}te\"} 4\n\nb 0.5 1700000000\nnonsense\n",
        ));
        assert_eq!(page.sum("a_total", &[]), 7.0);
        assert_eq!(page.sum("a_total", &[("lane", "1")]), 4.0);
        assert_eq!(page.sum("b", &[]), 0.5);
        assert!(!page.has("nonsense"));
        let walks = page.labels("a_total", ["walk"]);
        assert_eq!(walks, [["q\"u,o}te".to_owned()], ["x".to_owned()]].into());
    }

    #[test]
    fn quantiles_are_of_what_was_added() {
        let histogram = |counts: [u32; 3]| {
            let [a, b, all] = counts;
            page(&format!(
                "h_bucket{{le=\"0.1\"}} {a}\nh_bucket{{le=\"0.2\"}} {b}\nh_bucket{{le=\"+Inf\"}} {all}\nh_sum 9\nh_count {all}\n",
            ))
        };
        let added = Added::between(&histogram([100, 100, 100]), &histogram([110, 120, 120]), "h", &[]);
        assert_eq!(added.count, 20.0);
        assert_eq!(added.quantile(0.5), Some(0.1));
        assert!((added.quantile(0.75).unwrap() - 0.15).abs() < 1e-9);
        assert_eq!(added.share_above(0.1), Some(0.5));
        let nothing = Added::between(&histogram([1, 1, 1]), &histogram([1, 1, 1]), "h", &[]);
        assert_eq!((nothing.quantile(0.5), nothing.mean()), (None, None));
    }

    #[test]
    fn a_process_that_was_started_again_counts_from_nothing() {
        assert_eq!(rise(&page("a_total 90"), &page("a_total 5"), "a_total", &[]), 5.0);
    }
}
