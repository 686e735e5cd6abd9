//! The caller's deadline, read from metadata.

use std::time::Duration;

use tonic::metadata::MetadataMap;

/// Between the pings that a role sends to those who call it: one that is gone without a word would hold what it asked for.
pub const CALLER_PING: Duration = Duration::from_secs(2);
/// Until such a ping counts as lost: a gateway at its limit answers late.
pub const CALLER_PATIENCE: Duration = Duration::from_secs(5);

/// How long the caller will wait, from the `grpc-timeout` header. `None` without one, or with one that is not
/// as the gRPC protocol has it (which the protocol says to treat as absent).
///
/// Tonic applies the header to the time until a response starts; a stream has to keep it for itself.
pub fn grpc_timeout(metadata: &MetadataMap) -> Option<Duration> {
    let value = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(value: &str) -> Option<Duration> {
        let mut metadata = MetadataMap::new();
        metadata.insert("grpc-timeout", value.parse().unwrap());
        grpc_timeout(&metadata)
    }

    #[test]
    fn every_unit_is_read() {
        assert_eq!(parse("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(parse("3M"), Some(Duration::from_secs(180)));
        assert_eq!(parse("15S"), Some(Duration::from_secs(15)));
        assert_eq!(parse("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse("99999999u"), Some(Duration::from_micros(99_999_999)));
        assert_eq!(parse("0n"), Some(Duration::ZERO));
    }

    #[test]
    fn what_tonic_sends_is_read() {
        let mut request = tonic::Request::new(());
        request.set_timeout(Duration::from_millis(1500));
        assert_eq!(
            grpc_timeout(request.metadata()),
            Some(Duration::from_millis(1500))
        );
    }

    #[test]
    fn malformed_headers_count_as_absent() {
        for value in ["", "S", "5", "5s", "-5S", "123456789S", "1.5S", "S5"] {
            assert_eq!(parse(value), None, "{value:?}");
        }
        assert_eq!(grpc_timeout(&MetadataMap::new()), None);
    }
}
