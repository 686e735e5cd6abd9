//! Callers who are gone without a word: nobody closes their connection, and nothing comes on it any more.

use std::net::SocketAddr;
use std::time::Duration;

use laneway_gateway::CallerConfig;
use laneway_proto::ErrorCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use v1::speech_client::SpeechClient;

use crate::fake::{FakeWorker, Step, speaks};
use crate::harness::{Call, TestGateway, gateway, is_established, request, soon};
use laneway_proto::v1;

const INTERVAL: Duration = Duration::from_millis(100);

/// A gateway with one place that notices soon who is gone. Its other waits are a minute.
async fn attentive(worker: &FakeWorker) -> TestGateway {
    let gateway = gateway(&[worker], |config| {
        config.max_in_flight = std::num::NonZeroUsize::MIN;
        config.caller = CallerConfig {
            greeting: Duration::from_millis(300),
            keep_alive_interval: INTERVAL,
            // As long as a loaded machine may take for an answer.
            keep_alive_timeout: Duration::from_secs(2),
        };
    })
    .await;
    gateway.serving().await;
    gateway
}

/// A way to a gateway that a test cuts, as a cable is: neither end hears of it.
struct Line {
    channel: Channel,
    cut: CancellationToken,
    /// The gateway has closed its end.
    ended: JoinHandle<()>,
}

/// What still goes through to a caller who is gone: nothing at all, or all that the kernel takes for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Takes,
    Full,
}

async fn line(gateway: SocketAddr, kernel: Kernel) -> Line {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let cut = CancellationToken::new();
    let is_cut = cut.clone();
    let ended = tokio::spawn(async move {
        let (mut caller, _) = listener.accept().await.unwrap();
        let mut there = TcpStream::connect(gateway).await.unwrap();
        let goes = tokio::io::copy_bidirectional(&mut caller, &mut there);
        assert!(is_cut.run_until_cancelled(goes).await.is_none(), "nobody hung up");
        match kernel {
            Kernel::Takes => {
                let mut lost = Vec::new();
                // Closed or reset: it is over.
                let _ = there.read_to_end(&mut lost).await;
            }
            Kernel::Full => {
                let here = there.local_addr().unwrap();
                while is_established(gateway, here) {
                    tokio::time::sleep(INTERVAL).await;
                }
            }
        }
        drop(caller);
    });
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    Line {
        channel: endpoint.connect_lazy(),
        cut,
        ended,
    }
}

#[tokio::test]
async fn a_listener_who_is_gone_without_a_word_is_noticed_and_what_it_held_is_free() {
    for (kernel, n_chunks) in [(Kernel::Takes, 1), (Kernel::Full, 400)] {
        let mut script = vec![Step::Started];
        script.extend(std::iter::repeat_n(Step::Audio(25, 0.5), n_chunks));
        script.push(Step::Hang);
        let worker = FakeWorker::start("a", script);
        let gateway = attentive(&worker).await;
        let line = line(gateway.address, kernel).await;
        let begun = soon(SpeechClient::new(line.channel.clone()).synthesize(request())).await;
        let mut call = Call::of(begun.unwrap());
        call.accepted().await;
        call.chunk().await;
        worker.until_open(1).await;
        let failure = gateway.fails(request()).await;
        assert_eq!(failure.code, ErrorCode::Overloaded, "it holds the only place");
        line.cut.cancel();
        worker.until_ended(1).await;
        soon(line.ended).await.unwrap();
        worker.plays(speaks());
        // The place is given back a moment behind the stream at the worker.
        soon(async { while gateway.speak(request()).await.is_err() {} }).await;
        assert_eq!(worker.n_requests(), 2, "{kernel:?}");
    }
}

/// A frame of HTTP/2: its kind, its flags, the stream it is of.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags, 0, 0, 0, stream][..], payload].concat()
}

const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

fn greeting() -> Vec<u8> {
    [
        &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
        &frame(SETTINGS, 0, 0, b""),
    ]
    .concat()
}

/// Headers of a call of gRPC, as HPACK has them without a table.
fn call() -> Vec<u8> {
    let path = b"/laneway.v1.Speech/Synthesize";
    let mut block = vec![0x83, 0x86, 0x04, path.len() as u8];
    block.extend(path);
    block.extend(b"\x0f\x10\x10application/grpc\x01\x01a");
    block
}

/// The next frame: its kind, its flags and what it holds. None at the end of the connection.
async fn next(stream: &mut TcpStream) -> Option<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    soon(stream.read_exact(&mut head)).await.ok()?;
    let mut payload = vec![0; (usize::from(head[1]) << 8) | usize::from(head[2])];
    soon(stream.read_exact(&mut payload)).await.ok()?;
    Some((head[3], head[4], payload))
}

#[tokio::test]
async fn who_begins_something_and_says_no_more_is_ended() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = attentive(&worker).await;
    let preface = &greeting()[..24];
    for (what, said, is_pinged) in [
        ("nothing", vec![], false),
        ("half a greeting", preface[..10].to_vec(), false),
        ("a greeting without settings", preface.to_vec(), true),
        ("a greeting and no call", greeting(), true),
        (
            "half of a call's headers",
            [greeting(), frame(HEADERS, 0, 1, &call())].concat(),
            true,
        ),
        (
            "a call without its message",
            [greeting(), frame(HEADERS, END_HEADERS, 1, &call())].concat(),
            true,
        ),
    ] {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        stream.write_all(&said).await.unwrap();
        let mut n_pings = 0;
        while let Some((kind, flags, _)) = next(&mut stream).await {
            n_pings += u32::from(kind == PING && flags & ACK == 0);
        }
        assert_eq!(n_pings > 0, is_pinged, "{what}: {n_pings} pings");
    }
    assert_eq!(worker.n_requests(), 0);
    gateway.speak(request()).await.unwrap();
}

#[tokio::test]
async fn who_answers_pings_may_say_nothing_else() {
    let worker = FakeWorker::start("a", speaks());
    let gateway = attentive(&worker).await;
    let mut stream = TcpStream::connect(gateway.address).await.unwrap();
    stream.write_all(&greeting()).await.unwrap();
    let mut n_answered = 0;
    while n_answered < 10 {
        let (kind, flags, payload) = next(&mut stream).await.expect("an idle caller is let be");
        match kind {
            PING if flags & ACK == 0 => {
                stream.write_all(&frame(PING, ACK, 0, &payload)).await.unwrap();
                n_answered += 1;
            }
            SETTINGS if flags & ACK == 0 => stream.write_all(&frame(SETTINGS, ACK, 0, b"")).await.unwrap(),
            _ => {}
        }
    }
}
