//! What a browser needs: a key without a header, and a say in which pages may call.

use laneway_gateway::{ApiKeys, Origins};
use serde_json::json;

use super::{bare, config, refusal, text};
use crate::fake::{FakeWorker, speaks};
use crate::harness::{TestGateway, gateway};

const ALICE: &str = "alice-0123456789abc";

async fn asking(worker: &FakeWorker, lines: &str) -> TestGateway {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines).unwrap();
    let keys = ApiKeys::read(file.path().to_owned()).unwrap();
    let gateway = gateway(&[worker], |config| config.api_keys = Some(keys)).await;
    gateway.serving().await;
    gateway
}

async fn listing(origins: &[&str]) -> (FakeWorker, TestGateway) {
    let worker = FakeWorker::start("a", speaks());
    let origins: Vec<_> = origins.iter().map(|origin| (*origin).to_owned()).collect();
    let gateway = gateway(&[&worker], |config| {
        config.origins = Origins::parse(&origins).unwrap();
    })
    .await;
    gateway.serving().await;
    (worker, gateway)
}

#[tokio::test]
async fn a_key_is_said_in_a_header_a_protocol_or_the_first_message() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = asking(&worker, &format!("alice {ALICE}")).await;
    let header = format!("Bearer {ALICE}");
    let protocol = format!("laneway.v1, laneway-api-key.{ALICE}");
    for (headers, said) in [
        (vec![("authorization", header.as_str())], json!({})),
        (vec![("sec-websocket-protocol", protocol.as_str())], json!({})),
        (vec![], json!({ "api_key": ALICE })),
    ] {
        let (mut socket, answer) = gateway.open_answered(&headers).await.unwrap();
        let chosen = answer.headers().get("sec-websocket-protocol");
        let chosen = chosen.map(|value| value.to_str().unwrap());
        assert!(
            [None, Some("laneway.v1")].contains(&chosen),
            "the key is not said back"
        );
        socket.say(config(said)).await;
        assert_eq!(socket.told().await["type"], "session.started", "{headers:?}");
        socket.say(text("Hello there.")).await;
        socket.say(bare("input.done")).await;
        socket.utterance().await;
    }
    assert_eq!(worker.n_requests(), 3);
}

#[tokio::test]
async fn who_says_no_key_or_a_wrong_one_gets_no_audio() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = asking(&worker, &format!("alice {ALICE}")).await;
    for headers in [
        [("authorization", "Bearer alice-0123456789abd")],
        [("authorization", "Basic x")],
        [("sec-websocket-protocol", "laneway.v1, laneway-api-key.no")],
    ] {
        let error = gateway.open(&headers).await.map(|_| ()).unwrap_err();
        let (status, error) = refusal(*error);
        assert_eq!(
            (status, &error["code"]),
            (401, &json!("unauthenticated")),
            "{headers:?}"
        );
    }
    for said in [json!({}), json!({ "api_key": "alice-0123456789abd" })] {
        let mut socket = gateway.open(&[]).await.unwrap();
        socket.say(config(said)).await;
        let (error, code) = socket.failure().await;
        assert_eq!((&error["code"], code), (&json!("unauthenticated"), 1008));
    }
    assert_eq!(worker.n_requests(), 0);
}

#[tokio::test]
async fn each_utterance_counts_against_the_limits_of_its_key() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = asking(
        &worker,
        &format!("alice {ALICE} requests_per_minute=2 concurrent=1"),
    )
    .await;
    let header = format!("Bearer {ALICE}");
    let headers = [("authorization", header.as_str())];
    let mut socket = gateway.open(&headers).await.unwrap();
    socket.say(config(json!({}))).await;
    assert_eq!(socket.told().await["type"], "session.started");
    let mut other = gateway.open(&headers).await.unwrap();
    other.say(config(json!({}))).await;
    let (error, code) = other.failure().await;
    assert_eq!(
        (&error["code"], code),
        (&json!("rate_limited"), 1013),
        "one at once"
    );
    for piece in ["One.", "Two."] {
        socket.say(text(piece)).await;
        socket.say(bare("input.done")).await;
        socket.utterance().await;
    }
    socket.say(text("Three.")).await;
    let (error, code) = socket.failure().await;
    assert_eq!(
        (&error["code"], code),
        (&json!("rate_limited"), 1013),
        "two a minute"
    );
}

#[tokio::test]
async fn a_socket_opens_for_the_gateways_own_page_and_for_those_that_are_listed() {
    let (_worker, gateway) = listing(&["https://app.example"]).await;
    let own = format!("http://{}", gateway.address);
    for allowed in [own.as_str(), "https://app.example"] {
        gateway.open(&[("origin", allowed)]).await.unwrap();
    }
    for foreign in ["https://evil.example", "http://app.example", "null"] {
        let error = gateway
            .open(&[("origin", foreign)])
            .await
            .map(|_| ())
            .unwrap_err();
        let (status, error) = refusal(*error);
        assert_eq!(
            (status, &error["code"]),
            (403, &json!("origin_not_allowed")),
            "{foreign}"
        );
    }
}

/// The headers of CORS in the answer to a request with these, and its status.
async fn cors(gateway: &TestGateway, line: &str, headers: &[(&str, &str)]) -> (u16, Vec<(String, String)>) {
    let mut connection = gateway.connection().await;
    connection.request(line, headers, b"").await;
    let head = connection.head().await;
    let cors = |(name, _): &(String, String)| name.starts_with("access-control-");
    (head.status, head.headers.into_iter().filter(cors).collect())
}

#[tokio::test]
async fn pages_of_listed_origins_may_call_and_read_over_http_and_grpc_web() {
    let (_worker, gateway) = listing(&["https://app.example", "http://localhost:3000"]).await;
    for path in ["/v1/audio/speech", "/laneway.v1.Speech/Synthesize", "/v1/models"] {
        for (origin, allowed) in [
            ("https://app.example", true),
            ("http://localhost:3000", true),
            ("https://evil.example", false),
        ] {
            let asks = [
                ("origin", origin),
                ("access-control-request-method", "POST"),
                (
                    "access-control-request-headers",
                    "authorization,content-type,x-grpc-web",
                ),
            ];
            let (status, headers) = cors(&gateway, &format!("OPTIONS {path}"), &asks).await;
            assert_eq!(status, 200);
            let named = headers.iter().find(|(name, _)| name.ends_with("allow-origin"));
            assert_eq!(
                named.map(|(_, value)| value.as_str()),
                allowed.then_some(origin),
                "{path} {origin}"
            );
            let takes = headers.iter().find(|(name, _)| name.ends_with("allow-headers"));
            assert!(takes.unwrap().1.contains("x-grpc-web") && takes.unwrap().1.contains("authorization"));
        }
    }
    let (status, headers) = cors(&gateway, "GET /v1/models", &[("origin", "https://app.example")]).await;
    assert_eq!(status, 200);
    let exposed = headers.iter().find(|(name, _)| name.ends_with("expose-headers"));
    assert!(exposed.unwrap().1.contains("grpc-status") && exposed.unwrap().1.contains("x-request-id"));
}

#[tokio::test]
async fn by_default_no_other_page_may_call_and_with_a_star_every_one() {
    let (_worker, gateway) = listing(&[]).await;
    let foreign = [("origin", "https://app.example")];
    assert_eq!(
        cors(&gateway, "GET /v1/models", &foreign).await,
        (200, Vec::new())
    );
    let error = gateway
        .open(&[("origin", "https://app.example")])
        .await
        .map(|_| ());
    assert_eq!(refusal(*error.unwrap_err()).0, 403);
    let (_worker, gateway) = listing(&["*"]).await;
    let (_, headers) = cors(&gateway, "GET /v1/models", &foreign).await;
    let any = ("access-control-allow-origin".to_owned(), "*".to_owned());
    assert!(headers.contains(&any), "{headers:?}");
    gateway.open(&[("origin", "https://app.example")]).await.unwrap();
}

/// A refusal that a script may not read tells its author nothing.
#[tokio::test]
async fn a_refusal_for_want_of_a_key_can_be_read_by_a_listed_page() {
    let worker = FakeWorker::start("a", speaks());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("alice {ALICE}")).unwrap();
    let keys = ApiKeys::read(file.path().to_owned()).unwrap();
    let gateway = gateway(&[&worker], |config| {
        config.api_keys = Some(keys);
        config.origins = Origins::parse(&["https://app.example".to_owned()]).unwrap();
    })
    .await;
    let (status, headers) = cors(&gateway, "GET /v1/models", &[("origin", "https://app.example")]).await;
    assert_eq!(status, 401);
    assert!(headers.iter().any(|(_, value)| value == "https://app.example"));
}
