//! The parameters of a database URL that the driver does not support: TLS as in libpq, and a password file.
//!
//! `sslmode` has the meaning of libpq: `require` encrypts; `verify-ca` and `verify-full` also check the certificate and
//! the host.

use std::path::PathBuf;

use tokio_postgres::config::SslMode;

use super::tls::{ClientFiles, Trust, Verification};
use crate::types::{Error, Result};

/// The parameters removed from a URL.
pub(super) struct Parameters {
    /// Whether TLS is used. The verification is in `trust`, because the driver does not know it.
    pub(super) mode: Option<SslMode>,
    pub(super) trust: Trust,
    pub(super) passfile: Option<PathBuf>,
}

/// Removes the parameters that the driver does not support: `verify-ca` and `verify-full`, `sslrootcert`, `sslcert`,
/// `sslkey`, `passfile`.
pub(super) fn split(url: &str) -> Result<(String, Parameters)> {
    let (mut mode, mut root, mut certificate, mut key, mut passfile) = (None, None, None, None, None);
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let mut kept: Vec<&str> = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("sslmode", value)) => mode = Some(value.to_owned()),
            Some(("sslrootcert", value)) => root = Some(path(value)),
            Some(("sslcert", value)) => certificate = Some(path(value)),
            Some(("sslkey", value)) => key = Some(path(value)),
            Some(("passfile", value)) => passfile = Some(path(value)),
            Some(_) | None => kept.push(pair),
        }
    }
    let client = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(ClientFiles { certificate, key }),
        // One file may hold both.
        (Some(certificate), None) => Some(ClientFiles { key: certificate.clone(), certificate }),
        (None, Some(_)) => return Err(Error::configuration("the database URL has sslkey but no sslcert")),
        (None, None) => None,
    };
    let verification = match (mode.as_deref(), root) {
        (Some("verify-full"), root) => Verification::Full { root },
        (Some("verify-ca"), root) => Verification::Chain { root },
        // As in libpq: with a root certificate, `require` verifies the chain.
        (Some("require"), Some(root)) => Verification::Chain { root: Some(root) },
        (Some("require" | "prefer" | "disable") | None, _) => Verification::None,
        (Some(other), _) => {
            return Err(Error::configuration(format!(
                "cannot use sslmode={other}: expected disable, prefer, require, verify-ca or verify-full"
            )));
        }
    };
    let mode = match mode.as_deref() {
        None => None,
        Some("disable") => Some(SslMode::Disable),
        Some("prefer") => Some(SslMode::Prefer),
        Some(_) => Some(SslMode::Require),
    };
    let url = if kept.is_empty() { base.to_owned() } else { format!("{base}?{}", kept.join("&")) };
    Ok((url, Parameters { mode, trust: Trust { verification, client }, passfile }))
}

/// Decodes a path in a URL, in which bytes may be written as `%2F`.
fn path(value: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        let escaped = std::str::from_utf8(after.get(..2).unwrap_or_default()).ok();
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(|_| *first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_that_the_driver_does_not_know_are_removed() {
        let url = "postgres://u:p@h/d?sslmode=verify-full&application_name=x&sslrootcert=%2Fca.pem&sslcert=/a%20b.pem&passfile=/p";
        let (url, parameters) = split(url).unwrap();
        assert_eq!(url, "postgres://u:p@h/d?application_name=x");
        assert_eq!(parameters.mode, Some(SslMode::Require));
        assert_eq!(parameters.trust.verification, Verification::Full { root: Some("/ca.pem".into()) });
        let files = ClientFiles { certificate: "/a b.pem".into(), key: "/a b.pem".into() };
        assert_eq!(parameters.trust.client, Some(files));
        assert_eq!(parameters.passfile, Some("/p".into()));
    }

    #[test]
    fn an_unknown_sslmode_is_refused_not_ignored() {
        let Err(error) = split("postgres://h/d?sslmode=verify_full") else { panic!("accepted") };
        assert!(error.to_string().contains("verify_full"));
    }

    #[test]
    fn hostile_paths_never_panic() {
        for value in ["", "%", "%2", "%zz", "a%2", "%%2F", "é%C3%A9"] {
            path(value);
        }
        assert_eq!(path("%%2Fa"), PathBuf::from("%/a"));
    }
}
