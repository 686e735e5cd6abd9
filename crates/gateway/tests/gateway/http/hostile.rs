//! Callers who send what they should not, or read nothing.

use std::time::Duration;

use serde_json::json;

use super::client::{Answer, body};
use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{TestGateway, gateway, is_established, soon};

const SPEECH: &str = "POST /v1/audio/speech";
const JSON: (&str, &str) = ("content-type", "application/json");

async fn sent(gateway: &TestGateway, headers: &[(&str, &str)], bytes: &[u8]) -> Answer {
    let mut connection = gateway.connection().await;
    connection.request(SPEECH, headers, bytes).await;
    connection.answer().await
}

#[tokio::test]
async fn bodies_that_cannot_be_read_are_told_why() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let json_type = "application/json; charset=utf-8";
    for (content_type, bytes, status, code, words) in [
        (
            json_type,
            &b"{\"input\": "[..],
            400,
            "invalid_argument",
            "line 1 column 10",
        ),
        (json_type, b"[]", 400, "invalid_argument", "an object"),
        (
            json_type,
            b"{\"input\": \"\xc3\x28\"}",
            400,
            "invalid_argument",
            "not UTF-8",
        ),
        (
            json_type,
            b"\x00\x01\x02\x03",
            400,
            "invalid_argument",
            "not a JSON object",
        ),
        (
            "text/plain",
            b"{}",
            415,
            "unsupported_media_type",
            "application/json",
        ),
        (
            "multipart/form-data; boundary=x",
            b"--x--",
            415,
            "unsupported_media_type",
            "application/json",
        ),
    ] {
        let answer = sent(&gateway, &[("content-type", content_type)], bytes).await;
        let (got_status, got_code, _, message) = answer.error();
        assert_eq!((got_status, got_code.as_str()), (status, code));
        assert!(message.contains(words), "{message}");
    }
    let (status, ..) = sent(&gateway, &[], b"{}").await.error();
    assert_eq!(status, 415);
    assert_eq!(worker.n_requests(), 0);
}

#[tokio::test]
async fn bodies_over_the_limit_are_refused_before_they_are_read() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    // Only promised: nothing of it is sent.
    let mut connection = gateway.connection().await;
    let promised = [JSON, ("content-length", "2000000000")];
    connection.request(SPEECH, &promised, b"").await;
    let (status, code, ..) = connection.answer().await.error();
    assert_eq!((status, code.as_str()), (413, "request_too_large"));

    // And where nothing is promised, what is sent is counted.
    let mut connection = gateway.connection().await;
    let chunked = [JSON, ("transfer-encoding", "chunked")];
    connection.request(SPEECH, &chunked, b"").await;
    let chunk = [&b"10000\r\n"[..], &[b' '; 0x10000], b"\r\n"].concat();
    // 20,000 characters of twelve bytes, and 64 KiB.
    for _ in 0..4 {
        connection.send(&chunk).await;
    }
    connection.send(b"a980\r\n").await;
    connection.send(&[b' '; 0xa980]).await;
    connection.send(b"\r\n1\r\n{\r\n").await;
    let (status, code, ..) = connection.answer().await.error();
    assert_eq!((status, code.as_str()), (413, "request_too_large"));
}

#[tokio::test]
async fn headers_over_the_limit_are_refused() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let large = "x".repeat(20_000);
    let (status, code, ..) = sent(&gateway, &[JSON, ("x-large", &large)], b"{}").await.error();
    assert_eq!((status, code.as_str()), (431, "headers_too_large"));
    // Far more than is ever buffered: answered by the transport itself, and closed.
    let mut connection = gateway.connection().await;
    let huge = "x".repeat(600_000);
    connection.request(SPEECH, &[JSON, ("x-huge", &huge)], b"").await;
    assert_eq!(connection.head().await.status, 431);
    connection.closed().await;
    assert_eq!(gateway.http(&body(json!({}))).await.head.status, 200);
}

#[tokio::test]
async fn malformed_requests_end_their_connection_and_nothing_else() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello"[..],
        b"POST /v1/audio/speech HTTP/9.9\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"POST /v1/audio/speech HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ] {
        let mut connection = gateway.connection().await;
        connection.send(bytes).await;
        connection.closed().await;
    }
    // The body is promised and does not come.
    let mut connection = gateway.connection().await;
    let promised = [JSON, ("content-length", "100")];
    connection.request(SPEECH, &promised, b"").await;
    drop(connection);
    assert_eq!(gateway.http(&body(json!({}))).await.head.status, 200);
    assert_eq!(worker.n_requests(), 1);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    let mut connection = gateway.connection().await;
    let promised = [JSON, ("content-length", "100")];
    connection.request(SPEECH, &promised, b"").await;
    connection.send(b"{\"input\": ").await;
    let (status, code, _, message) = connection.answer().await.error();
    assert_eq!((status, code.as_str()), (408, "request_timeout"));
    assert!(message.contains("10 seconds"), "{message}");
    connection.closed().await;
}

/// Bytes of one chunk of the script below, as 16-bit samples.
const CHUNK_BYTES: usize = 25 * 1920 * 2;

#[tokio::test]
async fn a_listener_who_reads_nothing_is_bounded_in_memory_and_then_ended() {
    const CHUNKS: usize = 400;
    let mut script = vec![Step::Started];
    script.extend(std::iter::repeat_n(Step::Audio(25, 0.5), CHUNKS));
    script.push(Step::Hang);
    let worker = FakeWorker::start("a", script);
    let gateway = gateway(&[&worker], |config| {
        config.stream.caller = Duration::from_millis(500);
    })
    .await;
    gateway.serving().await;
    let mut connection = gateway.post(&body(json!({})), &[]).await;
    worker.until_open(1).await;
    // It is the reader's doing that its stream ends, and all of what was made for it is held nowhere.
    worker.until_ended(1).await;
    // Its connection ends too, a while after the last byte that the kernel took for it. Reading would put that off.
    soon(async {
        while is_established(gateway.address, connection.stream.local_addr().unwrap()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let answer = connection.answer().await;
    assert!(!answer.whole);
    let n_bytes = answer.bytes().len();
    assert!(
        n_bytes < CHUNKS * CHUNK_BYTES / 2,
        "{n_bytes} bytes were made for nobody"
    );
    worker.plays(speaks());
    assert_eq!(gateway.http(&body(json!({}))).await.head.status, 200);
}
