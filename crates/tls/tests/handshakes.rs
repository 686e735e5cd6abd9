//! Who gets through to whom, over real connections.

#![allow(
    clippy::unwrap_used,
    reason = "what fails a test may panic, also in its helpers"
)]

use std::net::SocketAddr;
use std::time::Duration;

use laneway_tls::testing::{Authority, Valid};
use laneway_tls::{
    ClientFiles, ClientTls, Dial, Identity, Incoming, InternalTls, Protocols, ServerFiles, ServerTls, Watch,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

const HERE: &[&str] = &["127.0.0.1", "localhost"];

/// A server that says that it serves.
struct Service {
    address: SocketAddr,
    _watch: Option<Watch>,
    serving: JoinHandle<()>,
}

impl Drop for Service {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(tls: Option<ServerTls>) -> Service {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let watch = tls.as_ref().map(ServerTls::watch);
    let (_, health) = tonic_health::server::health_reporter();
    let serving = tokio::spawn(async move {
        let incoming = Incoming::new(listener, tls).stream();
        Server::builder()
            .add_service(health)
            .serve_with_incoming(incoming)
            .await
            .unwrap();
    });
    Service {
        address,
        _watch: watch,
        serving,
    }
}

fn server(identity: &Identity, clients: Option<&Authority>) -> Option<ServerTls> {
    let files = ServerFiles {
        identity: identity.clone(),
        client_authority: clients.map(Authority::file),
        client_name: None,
        protocols: Protocols::Http2,
    };
    Some(ServerTls::read(files).unwrap())
}

fn client(authority: &Authority, identity: Option<&Identity>) -> ClientFiles {
    ClientFiles {
        identity: identity.cloned(),
        authority: Some(authority.file()),
        name: None,
    }
}

async fn ask(channel: Channel) -> Result<(), tonic::Status> {
    let mut health = HealthClient::new(channel);
    let asked = health.check(HealthCheckRequest::default());
    let asked = tokio::time::timeout(Duration::from_secs(10), asked).await;
    asked.expect("an answer, whatever it is").map(drop)
}

/// What a caller hears who dials so.
async fn call_by(dial: Dial, service: &Service) -> Result<(), String> {
    let uri = dial.uri(&service.address.to_string()).unwrap();
    let channel = dial.connect(Endpoint::from(uri)).await;
    let channel = channel.map_err(|error| laneway_telemetry::causes_of(&error))?;
    ask(channel).await.map_err(|status| dial.why(&status))
}

async fn call(service: &Service, files: ClientFiles) -> Result<(), String> {
    call_by(Some(ClientTls::read(files).unwrap()).into(), service).await
}

#[track_caller]
fn refused(outcome: Result<(), String>, words: &str) {
    let said = outcome.unwrap_err();
    assert!(said.contains(words), "{said}");
}

#[tokio::test]
async fn only_a_certificate_of_the_right_authority_for_the_right_name_is_trusted() {
    let (ours, other) = (Authority::new(), Authority::new());
    for (identity, outcome) in [
        (ours.issue("good", HERE, Valid::Now), Ok(())),
        (
            other.issue("foreign", HERE, Valid::Now),
            Err("UnknownIssuer; give the authority that signed it with --ca"),
        ),
        (
            ours.issue("late", HERE, Valid::Expired),
            Err("unless the clock here is wrong"),
        ),
        (
            ours.issue("elsewhere", &["gateway.example"], Valid::Now),
            Err("dial a name that it is for, or give one with --tls-name"),
        ),
    ] {
        let service = serve(server(&identity, None)).await;
        let heard = call(&service, client(&ours, None)).await;
        match outcome {
            Ok(()) => assert_eq!(heard, Ok(()), "{identity:?}"),
            Err(words) => refused(heard, words),
        }
    }
    // All roles may have one name, whatever host they are on.
    let service = serve(server(
        &ours.issue("named", &["laneway.internal"], Valid::Now),
        None,
    ))
    .await;
    let named = ClientFiles {
        name: Some("laneway.internal".into()),
        ..client(&ours, None)
    };
    assert_eq!(call(&service, named).await, Ok(()));
    // Who trusts the authorities of the web does not trust this one.
    refused(call(&service, ClientFiles::default()).await, "UnknownIssuer");
}

#[tokio::test]
async fn a_server_that_asks_lets_nobody_in_without_a_certificate_of_its_authority() {
    let (ours, other) = (Authority::new(), Authority::new());
    let service = serve(server(&ours.issue("server", HERE, Valid::Now), Some(&ours))).await;
    let caller = |identity: &Identity| client(&ours, Some(identity));
    let good = ours.issue("caller", &["caller"], Valid::Now);
    assert_eq!(call(&service, caller(&good)).await, Ok(()));
    refused(
        call(&service, client(&ours, None)).await,
        "CertificateRequired; it asks for a certificate; show one with --cert and --key",
    );
    let foreign = other.issue("foreign", &["caller"], Valid::Now);
    refused(
        call(&service, caller(&foreign)).await,
        "foreign.pem; show one of its own authority",
    );
    let late = ours.issue("late", &["caller"], Valid::Expired);
    refused(call(&service, caller(&late)).await, "late.pem has expired");
    // Whoever failed has cost nobody else anything.
    assert_eq!(call(&service, caller(&good)).await, Ok(()));
}

#[tokio::test]
async fn roles_of_one_name_let_in_nobody_else_whom_their_authority_knows() {
    const ALL: &str = "laneway.internal";
    let ours = Authority::new();
    let role = |stem: &str, names: &[&str]| {
        let identity = ours.issue(stem, names, Valid::Now);
        InternalTls::read(identity, ours.file(), Some(ALL.into())).unwrap()
    };
    let service = serve(Some(role("a", &[ALL]).server)).await;
    let call = |from: InternalTls| call_by(Some(from.client).into(), &service);
    assert_eq!(call(role("b", &[ALL])).await, Ok(()));
    refused(
        call(role("other", &["mail.internal"])).await,
        "other.pem has to be for the name that all roles give as --internal-tls-name",
    );
}

#[tokio::test]
async fn who_speaks_without_tls_is_told_and_so_is_who_speaks_it_in_vain() {
    let ours = Authority::new();
    let identity = ours.issue("server", HERE, Valid::Now);
    let service = serve(server(&identity, None)).await;
    refused(
        call_by(Dial::default(), &service).await,
        "This address is served over TLS; write https://",
    );
    let mut http1 = TcpStream::connect(service.address).await.unwrap();
    // More than anybody reads before it is refused, which may not cost the answer.
    let request = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "a".repeat(64 << 10));
    http1.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = http1.read_to_string(&mut answer);
    tokio::time::timeout(Duration::from_secs(10), read)
        .await
        .unwrap()
        .unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 400 ") && answer.ends_with("write https://\n"),
        "{answer}"
    );
    let open = serve(None).await;
    let files = client(&ours, None);
    refused(
        call(&open, files.clone()).await,
        "it is served without TLS; write http://",
    );
    assert_eq!(call(&service, files).await, Ok(()));
}

#[tokio::test]
async fn whoever_was_refused_has_cost_nobody_else_anything() {
    const MANY: u64 = 16;
    let (recorder, page) = own_metrics();
    let _counted = metrics::set_default_local_recorder(&recorder);
    let ours = Authority::new();
    let service = serve(server(&ours.issue("server", HERE, Valid::Now), Some(&ours))).await;
    let good = ours.issue("caller", &["caller"], Valid::Now);
    let caller = client(&ours, Some(&good));
    let (many, one) = tokio::join!(
        futures::future::join_all((0..MANY).map(|_| call(&service, client(&ours, None)))),
        call(&service, caller)
    );
    assert!(many.iter().all(Result::is_err), "{many:?}");
    assert_eq!(one, Ok(()));
    // A caller hears of it a moment before it is counted.
    until(async || counted(&page.render(), "laneway_tls_refusals_total ") >= MANY).await;
    assert_eq!(counted(&page.render(), "laneway_tls_refusals_total "), MANY);
}

#[tokio::test]
async fn a_caller_who_says_nothing_holds_nobody_up() {
    let ours = Authority::new();
    let service = serve(server(&ours.issue("server", HERE, Valid::Now), None)).await;
    let mut silent = Vec::new();
    for _ in 0..32 {
        silent.push(TcpStream::connect(service.address).await.unwrap());
    }
    assert_eq!(call(&service, client(&ours, None)).await, Ok(()));
}

/// Metrics of one test alone: everything that it counts runs on its own thread.
fn own_metrics() -> (
    impl metrics::Recorder,
    metrics_exporter_prometheus::PrometheusHandle,
) {
    let recorder = laneway_telemetry::recorder().unwrap();
    let page = recorder.handle();
    (recorder, page)
}

/// What a page of metrics has for a series.
fn counted(page: &str, series: &str) -> u64 {
    let line = page.lines().find_map(|line| line.strip_prefix(series));
    line.map_or(0, |count| count.parse().unwrap())
}

async fn until(mut condition: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "it never came to be");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn changed_files_count_for_new_connections_and_broken_ones_change_nothing() {
    let (recorder, page) = own_metrics();
    let _counted = metrics::set_default_local_recorder(&recorder);
    // Files that are found wrong are counted, which is how this test knows that they were looked at.
    let reloads = |outcome: &str| {
        let series = format!("laneway_tls_reloads_total{{outcome=\"{outcome}\"}} ");
        counted(&page.render(), &series)
    };
    let kept = || reloads("kept");
    let (old, new) = (Authority::new(), Authority::new());
    let identity = old.issue("server", HERE, Valid::Now);
    let service = serve(server(&identity, None)).await;
    let of = |authority: &Authority| {
        let dial = Dial::from(Some(ClientTls::read(client(authority, None)).unwrap()));
        let uri = dial.uri(&service.address.to_string()).unwrap();
        dial.lazy(Endpoint::from(uri))
    };
    let standing = of(&old);
    ask(standing.clone()).await.unwrap();
    let taken = reloads("taken");
    new.reissue(&identity, HERE, Valid::Now);
    until(async || ask(of(&new)).await.is_ok()).await;
    until(async || reloads("taken") > taken).await;
    assert!(
        ask(of(&old)).await.is_err(),
        "what is new is not of the old authority"
    );
    let kept_on = ask(standing).await;
    kept_on.expect("a connection keeps what it began with");
    // A key of another certificate, and then nothing at all.
    let other = new.issue("other", HERE, Valid::Now);
    let seen = kept();
    std::fs::copy(&other.key, &identity.key).unwrap();
    until(async || kept() > seen).await;
    ask(of(&new)).await.unwrap();
    let seen = kept();
    std::fs::write(&identity.certificate, "no certificate").unwrap();
    until(async || kept() > seen).await;
    ask(of(&new)).await.unwrap();
    old.reissue(&identity, HERE, Valid::Now);
    until(async || ask(of(&old)).await.is_ok()).await;
}

#[tokio::test]
async fn when_a_certificate_expires_is_told_and_follows_the_file() {
    let (recorder, page) = own_metrics();
    let _counted = metrics::set_default_local_recorder(&recorder);
    let expires = || {
        let page = page.render();
        let series = "laneway_tls_certificate_expiry_timestamp_seconds{certificate=\"internal\"} ";
        let line = page.lines().find_map(|line| line.strip_prefix(series));
        line.map(|seconds| seconds.parse::<f64>().unwrap())
    };
    let ours = Authority::new();
    let identity = ours.issue("server", HERE, Valid::Expired);
    // It is used all the same: whoever dials says that it has expired.
    let service = serve(server(&identity, None)).await;
    refused(
        call(&service, client(&ours, None)).await,
        "unless the clock here is wrong",
    );
    // 2001-02-01.
    until(async || expires() == Some(980_985_600.0)).await;
    ours.reissue(&identity, HERE, Valid::Now);
    until(async || expires() > Some(4e9)).await;
    assert_eq!(call(&service, client(&ours, None)).await, Ok(()));
}

#[tokio::test]
async fn an_authority_that_changes_counts_on_both_sides() {
    let (old, new) = (Authority::new(), Authority::new());
    let service = serve(server(&old.issue("server", HERE, Valid::Now), Some(&old))).await;
    let caller = new.issue("caller", &["caller"], Valid::Now);
    let tls = ClientTls::read(ClientFiles {
        identity: Some(caller.clone()),
        authority: Some(old.file()),
        name: None,
    })
    .unwrap();
    let _watch = tls.watch();
    let dial = Dial::from(Some(tls));
    let uri = dial.uri(&service.address.to_string()).unwrap();
    let anew = || dial.lazy(Endpoint::from(uri.clone()));
    assert!(
        ask(anew()).await.is_err(),
        "a certificate that the server does not know"
    );
    old.reissue(&caller, &["caller"], Valid::Now);
    until(async || ask(anew()).await.is_ok()).await;
    std::fs::copy(new.file(), old.file()).unwrap();
    until(async || ask(anew()).await.is_err()).await;
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let ours = Authority::new();
    let (a, b) = (
        ours.issue("a", HERE, Valid::Now),
        ours.issue("b", HERE, Valid::Now),
    );
    let check = |certificate: &std::path::Path, key: &std::path::Path, words: &str| {
        let files = ServerFiles {
            identity: Identity {
                certificate: certificate.to_owned(),
                key: key.to_owned(),
            },
            client_authority: None,
            client_name: None,
            protocols: Protocols::Http2,
        };
        let said = laneway_telemetry::causes_of(&ServerTls::read(files).unwrap_err());
        assert!(said.contains(words), "{said}");
    };
    check(&a.certificate, &b.key, "it is not the key of");
    check(&a.key, &a.key, "holds no certificate in PEM");
    check(&a.certificate, &a.certificate, "holds no private key in PEM");
    check(std::path::Path::new("/nowhere"), &a.key, "read /nowhere");
    let empty = ClientFiles {
        authority: Some(a.key.clone()),
        ..ClientFiles::default()
    };
    assert!(ClientTls::read(empty).is_err());
}
