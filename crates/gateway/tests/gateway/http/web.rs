//! The page, paths that are not there, and gRPC from browsers.

use laneway_proto::v1;
use prost::Message as _;
use serde_json::json;

use super::client::body;
use crate::fake::{FakeWorker, speaks};
use crate::harness::{gateway, request, soon};

#[tokio::test]
async fn the_page_is_whole_and_loads_nothing_from_elsewhere() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    let answer = gateway.get("/").await;
    assert_eq!(answer.head.status, 200);
    let header = |name: &str| answer.head.header(name).unwrap();
    assert_eq!(header("content-type"), "text/html; charset=utf-8");
    assert!(header("content-security-policy").contains("default-src 'none'"));
    let page = String::from_utf8(answer.bytes()).unwrap();
    assert!(page.ends_with("</html>\n"));
    for foreign in ["http://", "https://", "src=\"//", "@import"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
}

#[tokio::test]
async fn the_page_is_told_how_busy_each_lane_is_and_nothing_else_of_a_worker() {
    let worker = FakeWorker::start("secret-name", speaks());
    worker.set_status(|status| {
        status.load.as_mut().unwrap().running = 3;
        status.lanes = vec![v1::LaneStatus {
            lane: 1,
            nodes: vec!["Codec".into()],
            busy: 0.25,
            ..Default::default()
        }];
    });
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let n_asked = || worker.n_asked();
    let before = n_asked();
    let bytes = gateway.get("/v1/lanes").await.bytes();
    let told: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(
        told["data"],
        serde_json::json!([{
            "object": "worker", "index": 0, "running": 3, "queued": 0, "capacity": 8,
            "lanes": [{ "lane": 1, "nodes": ["Codec"], "busy": 0.25 }],
        }])
    );
    assert!(n_asked() > before);
}

#[tokio::test]
async fn what_is_not_there_is_told_in_the_callers_protocol() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    let (status, code, _, message) = gateway.get("/v1/completions").await.error();
    assert_eq!((status, code.as_str()), (404, "unknown_route"));
    assert!(message.contains("/v1/completions"));
    let answer = gateway.get("/v1/audio/speech").await;
    let (status, code, ..) = answer.error();
    assert_eq!((status, code.as_str()), (405, "method_not_allowed"));
    assert_eq!(answer.head.header("allow"), Some("POST"));

    let mut client = tonic::client::Grpc::new(gateway.channel.clone());
    client.ready().await.unwrap();
    let path = "/laneway.v1.Speech2/Synthesize".parse().unwrap();
    let codec = tonic_prost::ProstCodec::<v1::SynthesizeRequest, v1::SynthesizeResponse>::default();
    let status = client
        .unary(tonic::Request::new(request()), path, codec)
        .await
        .unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unimplemented);
}

/// A message of gRPC-Web, as gRPC has it: a flag and the length in front.
fn framed(message: &[u8]) -> Vec<u8> {
    [&[0][..], &(message.len() as u32).to_be_bytes(), message].concat()
}

#[tokio::test]
async fn browsers_call_the_same_services() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let mut connection = gateway.connection().await;
    let headers = [
        ("content-type", "application/grpc-web+proto"),
        ("x-grpc-web", "1"),
    ];
    let sent = framed(&request().encode_to_vec());
    connection
        .request("POST /laneway.v1.Speech/Synthesize", &headers, &sent)
        .await;
    let answer = connection.answer().await;
    assert_eq!(answer.head.status, 200);
    let mut bytes = &answer.bytes()[..];
    let (mut n_chunks, mut finished, mut trailers) = (0, None, None);
    while let [flag, a, b, c, d, rest @ ..] = bytes {
        let (message, rest) = rest.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        bytes = rest;
        if *flag & 0x80 != 0 {
            trailers = Some(String::from_utf8(message.to_vec()).unwrap());
            continue;
        }
        match v1::SynthesizeResponse::decode(message).unwrap().event.unwrap() {
            v1::synthesize_response::Event::Accepted(_) => {}
            v1::synthesize_response::Event::Chunk(_) => n_chunks += 1,
            v1::synthesize_response::Event::Finished(event) => finished = Some(event),
        }
    }
    assert_eq!(n_chunks, 2);
    assert_eq!(finished.unwrap().frames, 3);
    assert!(trailers.unwrap().contains("grpc-status:0"));
}

/// The transport's own deadline would be of no use here: a stream of messages has begun when its first one has not come.
#[tokio::test]
async fn the_deadline_of_a_call_counts_while_its_first_message_is_waited_for() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    for method in [
        "laneway.v1.Speech/StreamSynthesize",
        "nvidia.riva.tts.RivaSpeechSynthesis/SynthesizeOnline",
    ] {
        let mut connection = gateway.connection().await;
        let head = format!(
            "POST /{method} HTTP/1.1\r\nhost: a\r\ncontent-type: application/grpc-web+proto\r\n\
             grpc-timeout: 300m\r\ntransfer-encoding: chunked\r\n\r\n"
        );
        connection.send(head.as_bytes()).await;
        let answer = connection.head().await;
        assert_eq!(answer.header("grpc-status"), Some("4"), "{answer:?}");
    }
}

/// Audio is packed already, and what a compressor gathers would come late.
#[tokio::test]
async fn nobody_compresses_audio_on_its_way() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = gateway(&[&worker], |_| ()).await;
    gateway.serving().await;
    let asks = [("accept-encoding", "gzip, br, zstd, deflate")];
    for format in ["pcm", "wav", "mp3"] {
        let mut connection = gateway
            .post(&body(json!({ "response_format": format })), &asks)
            .await;
        let answer = connection.answer().await;
        assert_eq!((answer.head.status, answer.whole), (200, true));
        assert_eq!(answer.head.header("content-encoding"), None);
    }
    let mut call = tonic::Request::new(request());
    let gzip = "identity,deflate,gzip".parse().unwrap();
    call.metadata_mut().insert("grpc-accept-encoding", gzip);
    let answer = soon(gateway.speech().synthesize(call)).await.unwrap();
    assert!(!answer.metadata().contains_key("grpc-encoding"));
}
