//! One request is one trace through every process that it goes through, as an OTLP collector receives it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use anyhow::Context as _;
use laneway_integration_tests::PATIENCE;
use laneway_integration_tests::client::{self, request};
use laneway_integration_tests::deployment::{Deployment, Placement};
use laneway_integration_tests::system::{Extra, System};
use laneway_proto::v1;
use laneway_proto::v1::speech_client::SpeechClient;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// A span with the service that it is of.
#[derive(Debug, Clone)]
struct Span {
    service: String,
    name: String,
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    began: u64,
    ended: u64,
}

/// Keeps every span that it is sent.
#[derive(Debug, Clone)]
struct Collector(watch::Sender<Vec<Span>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of_resource in request.into_inner().resource_spans {
            let attributes = of_resource
                .resource
                .map(|resource| resource.attributes)
                .unwrap_or_default();
            let service = attributes
                .into_iter()
                .find(|attribute| attribute.key == "service.name");
            let service = match service.and_then(|attribute| attribute.value?.value) {
                Some(Value::StringValue(name)) => name,
                other => return Err(Status::invalid_argument(format!("service.name is {other:?}"))),
            };
            let spans = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.0.send_modify(|all| {
                all.extend(spans.map(|span| Span {
                    service: service.clone(),
                    name: span.name,
                    trace: span.trace_id,
                    id: span.span_id,
                    parent: span.parent_span_id,
                    began: span.start_time_unix_nano,
                    ended: span.end_time_unix_nano,
                }));
            });
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

async fn collector() -> anyhow::Result<(SocketAddr, watch::Receiver<Vec<Span>>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let spans = watch::Sender::new(Vec::new());
    let received = spans.subscribe();
    let server = tonic::transport::Server::builder()
        .add_service(TraceServiceServer::new(Collector(spans)))
        .serve_with_incoming(TcpListenerStream::new(listener));
    tokio::spawn(server);
    Ok((address, received))
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What of a request each process has to tell.
const WANTED: [(&str, &str, &[&str]); 3] = [
    ("laneway-gateway", "synthesize", &["encode"]),
    (
        "laneway-worker",
        "worker_synthesize",
        &["queue", "prefill", "first_step"],
    ),
    ("laneway-worker", "worker_decode", &["queue", "codec"]),
];

#[tokio::test]
async fn a_request_is_one_trace_from_the_caller_through_gateway_talker_and_codec() -> anyhow::Result<()> {
    let (address, mut received) = collector().await?;
    let endpoint = format!("http://{address}");
    let variables = [
        ("LANEWAY_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
    ];
    let extra = Extra {
        variables: &variables,
        ..Extra::default()
    };
    let system = System::serving_with(&Deployment::new(Placement::Split), extra).await?;

    let mut asked = Request::new(v1::SynthesizeRequest {
        format: v1::AudioFormat::Flac.into(),
        ..request("The ferry leaves the harbor at six.", 7)
    });
    let traceparent = format!("00-{TRACE}-{PARENT}-01");
    asked.metadata_mut().insert("traceparent", traceparent.parse()?);
    let mut speech = SpeechClient::new(client::channel(system.gateway.address()?));
    let mut stream = speech.synthesize(asked).await?.into_inner();
    while stream.message().await?.is_some() {}

    let of_trace = |all: &Vec<Span>| -> Vec<Span> {
        all.iter()
            .filter(|span| hex(&span.trace) == TRACE)
            .cloned()
            .collect()
    };
    let complete = |all: &Vec<Span>| {
        let spans = of_trace(all);
        let names: BTreeSet<_> = spans.iter().map(|span| span.name.as_str()).collect();
        WANTED
            .iter()
            .all(|(_, name, stages)| names.contains(name) && stages.iter().all(|stage| names.contains(stage)))
    };
    let came = tokio::time::timeout(PATIENCE, received.wait_for(complete))
        .await
        .is_ok();
    let spans = of_trace(&received.borrow());
    anyhow::ensure!(came, "the trace is not complete: {spans:#?}");

    let by_id: BTreeMap<String, &Span> = spans.iter().map(|span| (hex(&span.id), span)).collect();
    assert_eq!(by_id.len(), spans.len(), "an id is there twice");
    let mut parents = BTreeSet::from([PARENT.to_owned()]);
    for (service, name, stages) in WANTED {
        let span = spans.iter().find(|span| span.name == name).context(name)?;
        assert_eq!(span.service, service);
        // Each is called by the one before.
        assert!(parents.contains(&hex(&span.parent)), "{name} has another parent");
        parents = BTreeSet::from([hex(&span.id)]);
        for stage in stages {
            let of_span = |each: &&Span| each.name == *stage && each.parent == span.id;
            let stage = spans
                .iter()
                .find(of_span)
                .with_context(|| format!("{stage} of {name}"))?;
            assert!(
                stage.began <= stage.ended && stage.ended <= span.ended,
                "{stage:?} outside {span:?}"
            );
        }
    }
    for span in &spans {
        let parent = hex(&span.parent);
        assert!(
            parent == PARENT || by_id.contains_key(&parent),
            "{span:?} hangs on nothing"
        );
    }
    let of = |name: &str| {
        spans
            .iter()
            .find(|span| span.name == name)
            .map(|span| (span.began, span.ended))
    };
    let (prefill, first_step) = (
        of("prefill").context("prefill")?,
        of("first_step").context("first_step")?,
    );
    assert!(prefill.1 <= first_step.0, "the first step follows the prompt");

    let line = system.gateway.wait_for_line("an access line", |line| {
        line.contains("laneway_gateway::access").then(|| line.to_owned())
    })?;
    let line: serde_json::Value = serde_json::from_str(&line)?;
    assert_eq!(line["fields"]["outcome"], "ok");
    assert_eq!(line["fields"]["trace_id"], TRACE);
    assert!(line["fields"]["samples"].as_u64() > Some(24_000), "{line}");
    assert!(
        line["fields"]["first_audio_seconds"].as_f64() > Some(0.0),
        "{line}"
    );
    assert_eq!(line["span"]["name"], "synthesize");
    assert!(line["span"]["request_id"].is_string(), "{line}");
    let n_lines = system
        .gateway
        .log()
        .lines()
        .filter(|line| line.contains("laneway_gateway::access"))
        .count();
    assert_eq!(n_lines, 1, "a line a request");
    system.idle().await
}
