//! From two pages to lines of text.

use std::time::Duration;

use laneway_telemetry::metric;

use super::page::{Added, Page, rise};

/// Samples of a second of audio at the model's own rate.
const SAMPLE_RATE: f64 = 24_000.0;
/// In the order in which a step goes through them.
const PHASES: [&str; 6] = ["admit", "plan", "launch", "wait", "postprocess", "settle"];

/// What happened between two pages.
pub(super) fn lines(before: &Page, now: &Page, between: Duration) -> Vec<String> {
    let view = View {
        before,
        now,
        seconds: between.as_secs_f64(),
    };
    let mut lines = vec![format!("laneway top, over {:.1} s", view.seconds)];
    view.gateway(&mut lines);
    view.worker(&mut lines);
    view.steps(&mut lines);
    view.phases(&mut lines);
    lines
}

struct View<'a> {
    before: &'a Page,
    now: &'a Page,
    seconds: f64,
}

impl View<'_> {
    fn rate(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        rise(self.before, self.now, name, labels) / self.seconds
    }

    fn added(&self, name: &str, labels: &[(&str, &str)]) -> Added {
        Added::between(self.before, self.now, name, labels)
    }

    fn gateway(&self, lines: &mut Vec<String>) {
        if !self.now.has(metric::GATEWAY_RUNNING) && !self.now.has(metric::GATEWAY_WORKERS_SERVING) {
            return;
        }
        let gauge = |name| self.now.sum(name, &[]);
        lines.push(format!(
            "gateway   running {:.0}  without audio {:.0}  ended/s {:.1}  refused/s {:.1}  cancelled/s {:.1}  audio-s/s {:.1}  workers {:.0}",
            gauge(metric::GATEWAY_RUNNING),
            gauge(metric::GATEWAY_WAITING),
            self.rate(metric::GATEWAY_REQUESTS, &[]),
            self.rate(metric::GATEWAY_REFUSALS, &[]),
            self.rate(metric::GATEWAY_CANCELS, &[]),
            self.rate(metric::GATEWAY_AUDIO_SAMPLES, &[]) / SAMPLE_RATE,
            gauge(metric::GATEWAY_WORKERS_SERVING),
        ));
        let ttfa = self.added(metric::GATEWAY_TTFA, &[]);
        let underrun = self.added(metric::GATEWAY_UNDERRUN, &[]);
        lines.push(format!(
            "listeners first audio ms p50 {} p95 {}  underruns {} of {:.0} streams, ms p95 {}",
            ms(ttfa.quantile(0.5)),
            ms(ttfa.quantile(0.95)),
            number(
                underrun
                    .share_above(metric::UNDERRUN_SECONDS[0])
                    .map(|share| share * underrun.count),
                0
            ),
            underrun.count,
            ms(underrun.quantile(0.95)),
        ));
    }

    fn worker(&self, lines: &mut Vec<String>) {
        if !self.now.has(metric::WORKER_RUNNING) {
            return;
        }
        let wait = self.added(metric::WORKER_QUEUE_WAIT, &[]);
        lines.push(format!(
            "worker    running {:.0}  queued {:.0}  queue wait ms p95 {}  codec steps per talker step {:.2}",
            self.now.sum(metric::WORKER_RUNNING, &[]),
            self.now.sum(metric::WORKER_QUEUED, &[]),
            ms(wait.quantile(0.95)),
            self.now.sum(metric::WORKER_CODEC_STEPS_PER_TALKER_STEP, &[]),
        ));
        let mut slots = "slots    ".to_owned();
        for [resource] in self.now.labels(metric::WORKER_RESOURCE_CAPACITY, ["resource"]) {
            let of = [("resource", resource.as_str())];
            slots += &format!(
                " {resource} {:.0}/{:.0} ",
                self.now.sum(metric::WORKER_RESOURCE_USED, &of),
                self.now.sum(metric::WORKER_RESOURCE_CAPACITY, &of),
            );
        }
        lines.push(slots.trim_end().to_owned());
        for [node, arm] in self.now.labels(metric::WORKER_ARM, ["node", "arm"]) {
            if self
                .now
                .sum(metric::WORKER_ARM, &[("node", &node), ("arm", &arm)])
                < 1.0
            {
                continue;
            }
            let flips = self.now.sum(metric::WORKER_LANE_FLIPS, &[("node", &node)]);
            lines.push(format!("placement {node} on {arm}, {flips:.0} flips so far"));
        }
    }

    fn steps(&self, lines: &mut Vec<String>) {
        let walks = self
            .now
            .labels(&format!("{}_count", metric::WORKER_STEP), ["lane", "walk"]);
        if walks.is_empty() {
            return;
        }
        lines.push(String::new());
        lines.push(format!(
            "{:<6}{:<18}{:>9}{:>11}{:>13}{:>10}{:>10}",
            "lane", "walk", "steps/s", "rows/step", "frames/step", "ms mean", "ms p95"
        ));
        for [lane, walk] in walks {
            let of = [("lane", lane.as_str()), ("walk", walk.as_str())];
            let device = self.added(metric::WORKER_STEP_DEVICE, &of);
            lines.push(format!(
                "{lane:<6}{walk:<18}{:>9.1}{:>11}{:>13}{:>10}{:>10}",
                device.count / self.seconds,
                number(self.added(metric::WORKER_STEP_ROWS, &of).mean(), 1),
                number(self.added(metric::WORKER_STEP_ITEMS, &of).mean(), 1),
                ms(device.mean()),
                ms(device.quantile(0.95)),
            ));
        }
    }

    fn phases(&self, lines: &mut Vec<String>) {
        let lanes = self
            .now
            .labels(&format!("{}_count", metric::WORKER_PHASE), ["lane"]);
        if lanes.is_empty() {
            return;
        }
        lines.push(String::new());
        let mut head = format!("{:<24}", "phases of a step, µs");
        head.extend(PHASES.map(|phase| format!("{phase:>13}")));
        lines.push(head);
        for [lane] in lanes {
            for (what, share) in [("mean", None), ("p95", Some(0.95))] {
                let mut line = format!("lane {lane:<10}{what:<9}");
                for phase in PHASES {
                    let added = self.added(metric::WORKER_PHASE, &[("lane", &lane), ("phase", phase)]);
                    let value = share.map_or_else(|| added.mean(), |share| added.quantile(share));
                    line += &format!("{:>13}", number(value.map(|seconds| seconds * 1e6), 0));
                }
                lines.push(line);
            }
        }
    }
}

fn ms(seconds: Option<f64>) -> String {
    number(seconds.map(|seconds| seconds * 1e3), 1)
}

/// A dash for what nothing was measured of.
fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::super::page::page;
    use super::*;

    #[test]
    fn a_view_tells_what_happened_in_between() {
        let scrape = |steps: u32, sum: f64| {
            page(&format!(
                concat!(
                    "laneway_gateway_running 3\nlaneway_gateway_audio_samples_total {samples}\n",
                    "laneway_worker_running 3\nlaneway_worker_queued 1\nlaneway_worker_codec_steps_per_talker_step 0.48\n",
                    "laneway_worker_arm{{node=\"Codec\",arm=\"chain\"}} 0\nlaneway_worker_arm{{node=\"Codec\",arm=\"lane1\"}} 1\n",
                    "laneway_worker_lane_flips_total{{node=\"Codec\",to=\"lane1\",reason=\"return\"}} 7\n",
                    "laneway_worker_resource_capacity{{resource=\"codec_state\"}} 8\n",
                    "laneway_worker_resource_used{{resource=\"codec_state\"}} 3\n",
                    "laneway_worker_step_seconds_count{{lane=\"1\",walk=\"codec_chunk\"}} {steps}\n",
                    "laneway_worker_step_device_seconds_count{{lane=\"1\",walk=\"codec_chunk\"}} {steps}\n",
                    "laneway_worker_step_device_seconds_sum{{lane=\"1\",walk=\"codec_chunk\"}} {sum}\n",
                    "laneway_worker_phase_seconds_count{{lane=\"1\",phase=\"plan\"}} {steps}\n",
                    "laneway_worker_phase_seconds_sum{{lane=\"1\",phase=\"plan\"}} {sum}\n",
                ),
                samples = steps * 1000,
                steps = steps,
                sum = sum,
            ))
        };
        let text = lines(&scrape(10, 1.0), &scrape(58, 1.48), Duration::from_secs(2)).join("\n");
        for part in [
            "running 3",
            "audio-s/s 1.0",
            "queued 1",
            "codec steps per talker step 0.48",
            "codec_state 3/8",
            "Codec on lane1, 7 flips",
        ] {
            assert!(text.contains(part), "{part} is missing from\n{text}");
        }
        let step = text.lines().find(|line| line.contains("codec_chunk")).unwrap();
        assert_eq!(
            step.split_whitespace().collect::<Vec<_>>()[..3],
            ["1", "codec_chunk", "24.0"]
        );
        assert!(step.contains("10.0"), "10 ms a step: {step}");
        assert!(
            text.lines()
                .any(|line| line.contains("lane 1") && line.contains("10000")),
            "{text}"
        );
    }

    #[test]
    fn a_page_of_a_gateway_alone_has_no_steps() {
        let gateway = page("laneway_gateway_running 0\n");
        assert_eq!(lines(&gateway, &gateway, Duration::from_secs(1)).len(), 3);
    }
}
