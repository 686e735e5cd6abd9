//! `GET /v1/lanes`: how busy the lanes of the workers are, for the page.
//!
//! Workers are asked when somebody asks, and at most once in [`FRESH`]: who asks meanwhile is told the same.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use futures::future::join_all;
use laneway_proto::v1;
use serde_json::{Value, json};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::api::Api;
use crate::routing::Link;

/// How long an answer is good for: as long as a worker measures.
const FRESH: Duration = Duration::from_secs(1);

/// The last answer. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lanes(Arc<Mutex<Option<(Instant, Value)>>>);

/// Every worker that answers, without its name or address: those are nobody's business here.
pub(crate) async fn lanes(State(api): State<Api>) -> Json<Value> {
    let mut last = api.lanes.0.lock().await;
    if let Some((asked, answer)) = &*last
        && asked.elapsed() < FRESH
    {
        return Json(answer.clone());
    }
    let links = api.router.links();
    let statuses = join_all(links.iter().map(|link| status(link))).await;
    let data: Vec<_> = (0..)
        .zip(statuses.iter().flatten())
        .map(|(index, status)| object(index, status))
        .collect();
    let answer = json!({ "object": "list", "data": data });
    *last = Some((Instant::now(), answer.clone()));
    Json(answer)
}

async fn status(link: &Link) -> Option<v1::WorkerStatusResponse> {
    let mut request = tonic::Request::new(v1::WorkerStatusRequest {});
    request.set_timeout(FRESH);
    let answered = link.client.clone().status(request).await;
    answered.ok().map(tonic::Response::into_inner)
}

fn object(index: u32, status: &v1::WorkerStatusResponse) -> Value {
    let load = status.load.unwrap_or_default();
    let lanes = status.lanes.iter().map(|lane| {
        json!({
            "lane": lane.lane,
            "nodes": lane.nodes,
            "busy": lane.busy,
        })
    });
    json!({
        "object": "worker",
        "index": index,
        "running": load.running,
        "queued": load.queued,
        "capacity": load.capacity,
        "lanes": lanes.collect::<Vec<_>>(),
    })
}
