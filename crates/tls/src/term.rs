//! When a certificate counts, and for whom: what is told before somebody is refused for it.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use laneway_telemetry::metric;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;
use x509_parser::error::X509Error;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::time::ASN1Time;

use crate::files::{TlsError, name_of, shown};

/// Before its end a certificate is warned of.
pub(crate) const WARN_BEFORE: Duration = Duration::from_secs(14 * 24 * 3600);

/// What a listener shows to those who dial it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Term {
    certificate: PathBuf,
    /// Who it is shown to, as the metric has it.
    shown_to: &'static str,
    /// From when to when it counts, and those that lead to its authority; or why that cannot be read.
    counts: Result<(ASN1Time, ASN1Time), String>,
    /// The certificate itself, without those that lead to its authority.
    own: CertificateDer<'static>,
    /// What callers ask for.
    asked_for: Option<ServerName<'static>>,
}

impl Term {
    /// Of the certificate of a file.
    pub(crate) fn of(
        path: &Path,
        chain: &[CertificateDer<'static>],
        shown_to: &'static str,
        name: Option<&ServerName<'static>>,
    ) -> Result<Self, TlsError> {
        let own = chain.first().ok_or_else(|| TlsError::Empty {
            path: path.to_owned(),
            wanted: "certificate",
        })?;
        Ok(Self {
            certificate: path.to_owned(),
            shown_to,
            counts: counts(own, chain).map_err(|error| error.to_string()),
            own: own.clone(),
            asked_for: name.cloned(),
        })
    }

    /// Whether it is for this name.
    fn is_for(&self, name: &ServerName<'_>) -> bool {
        let parsed = ParsedCertificate::try_from(&self.own);
        parsed.is_ok_and(|own| verify_server_name(&own, name).is_ok())
    }

    /// Say that others will refuse it who ask for this host or name, when they will.
    pub(crate) fn tell_unless_for(&self, name: &str) {
        if let Ok(asked) = name_of(name)
            && !self.is_for(&asked)
        {
            let problem = not_for(name);
            tracing::warn!(certificate = shown(&self.certificate), "{problem}");
        }
    }

    /// Say what is wrong with it, or will be soon, and when it ends.
    pub(crate) fn tell(&self) {
        if let Ok((_, ends)) = &self.counts {
            let ends = ends.timestamp() as f64;
            metrics::gauge!(metric::TLS_CERTIFICATE_EXPIRY, "certificate" => self.shown_to).set(ends);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        for problem in self.problems(now) {
            tracing::warn!(certificate = shown(&self.certificate), "{problem}");
        }
    }

    /// What whoever runs this should hear, at a time since 1970.
    fn problems(&self, now: Duration) -> Vec<String> {
        let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let mut problems = match &self.counts {
            Ok((begins, ends)) => untimely(begins, ends, now),
            Err(problem) => vec![format!("when the certificate expires cannot be read: {problem}")],
        };
        if let Some(name) = &self.asked_for
            && !self.is_for(name)
        {
            problems.push(not_for(&name.to_str()));
        }
        problems
    }
}

/// The time in which all of a chain count.
fn counts(
    own: &CertificateDer<'_>,
    chain: &[CertificateDer<'_>],
) -> Result<(ASN1Time, ASN1Time), x509_parser::nom::Err<X509Error>> {
    let of = |certificate: &[u8]| -> Result<_, x509_parser::nom::Err<X509Error>> {
        let (_, parsed) = X509Certificate::from_der(certificate)?;
        let validity = parsed.validity();
        Ok((validity.not_before, validity.not_after))
    };
    let mut all = of(own)?;
    for certificate in chain {
        let (begins, ends) = of(certificate)?;
        all = (all.0.max(begins), all.1.min(ends));
    }
    Ok(all)
}

fn untimely(begins: &ASN1Time, ends: &ASN1Time, now: i64) -> Vec<String> {
    let left = ends.timestamp().saturating_sub(now);
    let mut problems = Vec::new();
    if left < 0 {
        problems.push(format!(
            "the certificate expired on {ends}: callers refuse it; put a new one in its place"
        ));
    } else if left < WARN_BEFORE.as_secs().cast_signed() {
        let days = left / (24 * 3600);
        problems.push(format!(
            "the certificate expires on {ends}, in {days} days; put a new one in its place before"
        ));
    }
    if begins.timestamp() > now {
        problems.push(format!(
            "the certificate counts from {begins} on: callers refuse it until then, unless the clock here is wrong"
        ));
    }
    problems
}

fn not_for(name: &str) -> String {
    format!(
        "the certificate is not for \"{name}\", which other roles ask for: they refuse it; issue one that is, or give all \
         roles the name of theirs with --internal-tls-name"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Authority, Valid};

    /// What is told of a certificate for `name`, `after` so long since 1970, to a part of each of `wanted`.
    #[track_caller]
    fn check(names: &[&str], valid: Valid, asked: Option<&str>, at: u64, wanted: &[&str]) {
        let ours = Authority::new();
        let identity = ours.issue("a", names, valid);
        let (chain, _) = identity.read().expect("it was just issued");
        let asked = asked.map(|name| crate::files::name_of(name).expect("a name"));
        let term = Term::of(&identity.certificate, &chain, "internal", asked.as_ref()).expect("it is one");
        let told = term.problems(Duration::from_secs(at));
        assert_eq!(told.len(), wanted.len(), "{told:?}");
        for (told, words) in told.iter().zip(wanted) {
            assert!(told.contains(words), "{told}");
        }
    }

    /// 2001-01-01 to 2001-02-01, as [`Valid::Expired`] is.
    const BEGINS: u64 = 978_307_200;
    const ENDS: u64 = 980_985_600;
    const DAY: u64 = 24 * 3600;

    #[test]
    fn what_will_be_refused_is_told_with_its_date() {
        let all = &["laneway.internal"];
        let old = |asked, at, wanted: &[&str]| check(all, Valid::Expired, asked, at, wanted);
        old(None, BEGINS + DAY, &[]);
        old(Some("laneway.internal"), BEGINS + DAY, &[]);
        old(None, BEGINS - DAY, &["counts from Jan  1 00:00:00 2001"]);
        old(
            None,
            ENDS - 3 * DAY,
            &["expires on Feb  1 00:00:00 2001 +00:00, in 3 days"],
        );
        old(None, ENDS + DAY, &["expired on Feb  1 00:00:00 2001"]);
        old(
            Some("worker-0"),
            ENDS + DAY,
            &["expired on Feb  1", "is not for \"worker-0\""],
        );
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("it is later than 1970");
        check(&["10.0.0.7"], Valid::Now, Some("10.0.0.7"), now.as_secs(), &[]);
    }
}
