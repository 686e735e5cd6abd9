//! `laneway top`: what a running system does, from the metrics that its processes serve.
//!
//! Each view is made of two scrapes of every address, so that all of it is of the time between them.

mod page;
mod scrape;
mod view;

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use tokio::time::{Instant, MissedTickBehavior};

use crate::stdout::outln;
use page::Page;

/// Where OpenTelemetry's Prometheus exporters answer, and the addresses in this project's examples.
const DEFAULT_URL: &str = "http://127.0.0.1:9464/metrics";
/// Cursor home, and erase to the end of the screen: with less flicker than clearing first.
const HOME: &str = "\x1b[H";
const ERASE_LINE: &str = "\x1b[K\n";
const ERASE_BELOW: &str = "\x1b[J";

/// Flags of `top`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// A metrics address (`--metrics-listen` of a process); once for each process of the system.
    #[arg(long = "url", env = "LANEWAY_METRICS_URLS", value_delimiter = ',', default_value = DEFAULT_URL)]
    urls: Vec<String>,
    /// Seconds between two looks.
    #[arg(long, default_value_t = 1.0)]
    interval_s: f64,
    /// Print one view, without control characters, and end.
    #[arg(long)]
    once: bool,
}

pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let interval = Duration::try_from_secs_f64(arguments.interval_s)
        .ok()
        .filter(|interval| *interval >= Duration::from_millis(50))
        .context("--interval-s takes at least 0.05 seconds")?;
    let urls = arguments
        .urls
        .iter()
        .map(|url| url.parse())
        .collect::<anyhow::Result<Vec<scrape::Url>>>()?;
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    // An address that never answered is a mistake; one that stops answering is something to show.
    let (mut at, mut before) = (Instant::now(), look(&urls).await?);
    loop {
        ticks.tick().await;
        let now = Instant::now();
        let looked = look(&urls).await;
        if arguments.once {
            for line in view::lines(&before, &looked?, now - at) {
                outln!("{line}")?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        match looked {
            Ok(page) => {
                draw(&view::lines(&before, &page, now - at))?;
                (at, before) = (now, page);
            }
            Err(error) => draw(&[format!("laneway top: {error:#}")])?,
        }
    }
}

/// One page of all that the addresses serve. A system in one process serves all of it at each of them, so an
/// address is listed once.
async fn look(urls: &[scrape::Url]) -> anyhow::Result<Page> {
    let texts = futures::future::try_join_all(urls.iter().map(scrape::Url::get)).await?;
    let mut page = Page::default();
    for text in &texts {
        page.read(text);
    }
    Ok(page)
}

fn draw(lines: &[String]) -> anyhow::Result<()> {
    let mut screen = HOME.to_owned();
    for line in lines {
        screen.push_str(line);
        screen.push_str(ERASE_LINE);
    }
    screen.push_str(ERASE_BELOW);
    let mut out = std::io::stdout().lock();
    out.write_all(screen.as_bytes())
        .and_then(|()| out.flush())
        .context("write to the terminal")
}
