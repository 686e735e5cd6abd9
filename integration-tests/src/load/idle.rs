//! Callers who have said something once, hold their connection, and ask for nothing.

use std::net::SocketAddr;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::PATIENCE;

/// Connections that are opened at once.
const AT_ONCE: usize = 32;

/// Bytes of an answer that are read at once.
const PART: usize = 4096;

/// Connections that are held: one half of HTTP/1.1, the other of HTTP/2.
#[derive(Debug)]
pub struct IdleCallers {
    plain: Vec<TcpStream>,
    grpc: Vec<HealthClient<Channel>>,
}

impl IdleCallers {
    /// Open so many connections. Each asks one question and has it answered, so that it is as any caller's between
    /// two questions.
    ///
    /// # Errors
    /// One was not taken or not answered.
    pub async fn open(address: SocketAddr, n_connections: usize) -> anyhow::Result<Self> {
        let mut callers = IdleCallers {
            plain: Vec::new(),
            grpc: Vec::new(),
        };
        let n_grpc = n_connections / 2;
        while callers.plain.len() < n_connections - n_grpc {
            let n = AT_ONCE.min(n_connections - n_grpc - callers.plain.len());
            let opened = (0..n).map(async |_| {
                let mut stream = TcpStream::connect(address).await.context("connect")?;
                ask(&mut stream).await?;
                anyhow::Ok(stream)
            });
            callers.plain.extend(futures::future::try_join_all(opened).await?);
        }
        while callers.grpc.len() < n_grpc {
            let n = AT_ONCE.min(n_grpc - callers.grpc.len());
            let opened = (0..n).map(async |_| {
                let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
                let mut health = HealthClient::new(endpoint.connect().await.context("connect")?);
                check(&mut health).await?;
                anyhow::Ok(health)
            });
            callers.grpc.extend(futures::future::try_join_all(opened).await?);
        }
        Ok(callers)
    }

    /// Ask one more question on each: how many connections still answer.
    pub async fn answered(&mut self) -> usize {
        let mut n_answered = 0;
        for stream in &mut self.plain {
            n_answered += usize::from(ask(stream).await.is_ok());
        }
        for health in &mut self.grpc {
            n_answered += usize::from(check(health).await.is_ok());
        }
        n_answered
    }
}

/// One question over HTTP/1.1, on a connection that stays open.
async fn ask(stream: &mut TcpStream) -> anyhow::Result<()> {
    let question = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\n\r\n";
    timeout(PATIENCE, stream.write_all(question)).await??;
    let mut answer = Vec::new();
    let mut part = [0; PART];
    loop {
        let n_bytes = timeout(PATIENCE, stream.read(&mut part)).await??;
        anyhow::ensure!(n_bytes > 0, "the connection was closed");
        answer.extend_from_slice(&part[..n_bytes]);
        if whole(&answer)? {
            return Ok(());
        }
    }
}

/// Whether an answer is there to its last byte.
fn whole(answer: &[u8]) -> anyhow::Result<bool> {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return Ok(false);
    };
    anyhow::ensure!(head.starts_with("HTTP/1.1 200 "), "answered with {head}");
    let head = head.to_lowercase();
    let (_, after) = head.split_once("content-length: ").context("no length")?;
    let n_bytes: usize = after.split("\r\n").next().unwrap_or("").parse()?;
    Ok(body.len() >= n_bytes)
}

async fn check(health: &mut HealthClient<Channel>) -> anyhow::Result<()> {
    let question = HealthCheckRequest::default();
    timeout(PATIENCE, health.check(question)).await??;
    Ok(())
}
