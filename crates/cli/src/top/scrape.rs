//! One HTTP request for one page of text: not worth a client library.

use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longest that an answer may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// Longest page that is read.
const MAX_PAGE_BYTES: u64 = 16 << 20;

/// `http://host:port/path`; the scheme and the path may be left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    host: String,
    path: String,
}

impl FromStr for Url {
    type Err = anyhow::Error;

    fn from_str(url: &str) -> anyhow::Result<Self> {
        let rest = url.strip_prefix("http://").unwrap_or(url);
        anyhow::ensure!(
            !rest.contains("://"),
            "{url}: metrics are read over plain http; write http://host:port/metrics"
        );
        let (host, path) = match rest.split_once('/') {
            Some((host, path)) => (host, format!("/{path}")),
            None => (rest, "/metrics".to_owned()),
        };
        let port = host
            .rsplit_once(':')
            .and_then(|(_, port)| port.parse::<u16>().ok());
        anyhow::ensure!(
            port.is_some() && !host.starts_with(':'),
            "{url}: write host:port, as in 127.0.0.1:9464"
        );
        Ok(Self {
            host: host.to_owned(),
            path,
        })
    }
}

impl Url {
    /// The page.
    pub(super) async fn get(&self) -> anyhow::Result<String> {
        let fetched = tokio::time::timeout(DEADLINE, self.fetch()).await;
        fetched
            .unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {DEADLINE:?}")))
            .with_context(|| {
                format!(
                    "read metrics from http://{}{} (is the process up, with --metrics-listen?)",
                    self.host, self.path
                )
            })
    }

    async fn fetch(&self) -> anyhow::Result<String> {
        let mut socket = TcpStream::connect(&self.host).await.context("connect")?;
        // HTTP/1.0: the page as it is, and its end is the end of the connection.
        let request = format!("GET {} HTTP/1.0\r\nHost: {}\r\n\r\n", self.path, self.host);
        socket.write_all(request.as_bytes()).await.context("ask")?;
        let mut answer = Vec::new();
        socket
            .take(MAX_PAGE_BYTES)
            .read_to_end(&mut answer)
            .await
            .context("read")?;
        let answer = String::from_utf8(answer).context("read as text")?;
        body(&answer).map(str::to_owned)
    }
}

/// What follows the head of an answer that says 200.
fn body(answer: &str) -> anyhow::Result<&str> {
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("the answer ended within its head")?;
    let status = head.lines().next().unwrap_or_default();
    anyhow::ensure!(status.split(' ').nth(1) == Some("200"), "it answered {status}");
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_enough_and_anything_but_http_is_refused() {
        let full: Url = "http://127.0.0.1:9464/metrics".parse().unwrap();
        assert_eq!("127.0.0.1:9464".parse::<Url>().unwrap(), full);
        for wrong in [
            "https://127.0.0.1:9464/metrics",
            "localhost",
            ":9464",
            "localhost:port",
        ] {
            let error = wrong.parse::<Url>().unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn only_a_page_that_is_there_is_read() {
        assert_eq!(body("HTTP/1.0 200 OK\r\na: b\r\n\r\nx 1\n").unwrap(), "x 1\n");
        let error = body("HTTP/1.1 404 Not Found\r\n\r\n").unwrap_err();
        assert!(error.to_string().contains("404"));
        assert!(body("HTTP/1.1 200 OK\r\n").is_err());
    }
}
