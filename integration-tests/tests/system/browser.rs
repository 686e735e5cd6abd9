//! The gateway's page in a real browser.

use anyhow::Context as _;
use laneway_integration_tests::deployment::{Deployment, Placement, checkout};
use laneway_integration_tests::system::System;
use laneway_integration_tests::tools::{program, python_with};
use serde_json::{Value, json};

#[tokio::test]
async fn the_page_plays_a_stream_as_it_comes_and_survives_a_reload() -> anyhow::Result<()> {
    let tools = (
        python_with("selenium"),
        program(&["chromium", "chromium-browser", "google-chrome"]),
        program(&["chromedriver"]),
    );
    let (Some(python), Some(chromium), Some(chromedriver)) = tools else {
        return Ok(());
    };
    let system = System::serving(&Deployment::new(Placement::Lane)).await?;
    let output = tokio::process::Command::new(python)
        .arg(checkout().join("integration-tests/clients/page.py"))
        .arg(format!("http://{}/", system.gateway.address()?))
        .arg(chromium)
        .arg(chromedriver)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(5 * laneway_integration_tests::PATIENCE, output)
        .await
        .context("the browser takes too long")??;
    let words = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "the page failed: {words}");
    let said: Value = serde_json::from_slice(&output.stdout).context("read what the browser saw")?;
    assert_eq!(said["voices"], json!(["nano"]));
    assert_eq!(said["lanes"], json!(["Lane 0: Talker", "Lane 1: Codec"]));
    assert!(said["chunks"].as_u64() > Some(2), "{said}");
    assert!(said["seconds"].as_f64() > Some(5.0), "{said}");
    let refused = said["refused"].as_str().unwrap_or_default();
    assert!(refused.contains("no letter and no digit"), "{said}");
    assert_eq!(said["noted"], json!([]), "the browser noted errors");
    // Also what was cut off by the reload has let go of everything.
    system.idle().await
}
