//! TLS through rustls: which certificates are trusted, by `sslmode`.
//!
//! `verify-full` checks the chain and the host name, `verify-ca` only the chain; lower modes encrypt without checking
//! the server's identity, as in libpq. Roots come from `sslrootcert`, or from the system if none is given.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
};

use crate::types::{Error, Result};

/// How the server must prove its identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verification {
    /// Any certificate is accepted.
    None,
    /// The chain must lead to a trusted root; any host name is accepted.
    Chain { root: Option<PathBuf> },
    /// The chain must lead to a trusted root, and the host name must match.
    Full { root: Option<PathBuf> },
}

/// Which certificates are trusted, and which client certificate is presented.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trust {
    pub(super) verification: Verification,
    /// `None`: the client presents no certificate.
    pub(super) client: Option<ClientFiles>,
}

/// A client's certificate with its chain, and its key, as PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClientFiles {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// The configuration of rustls. The crypto provider is named explicitly: the process may have installed another one.
pub(super) fn client_config(trust: &Trust) -> Result<ClientConfig> {
    let Trust { verification, client } = trust;
    let provider = Arc::new(ring::default_provider());
    let cannot = |error: TlsError| Error::configuration("cannot set up TLS").with_source(error);
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(cannot)?;
    let config = match verification {
        Verification::Full { root } => builder.with_root_certificates(roots(root.as_ref())?),
        Verification::Chain { root } => {
            let webpki = WebPkiServerVerifier::builder_with_provider(Arc::new(roots(root.as_ref())?), provider)
                .build()
                .map_err(|error| Error::configuration("cannot set up TLS").with_source(error))?;
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyHost(webpki)))
        }
        Verification::None => builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate(provider))),
    };
    match client {
        None => Ok(config.with_no_client_auth()),
        Some(files) => {
            let (certificates, key) = client_certificate(files)?;
            let unusable = |error: TlsError| {
                let files = (files.certificate.display(), files.key.display());
                Error::configuration(format!(
                    "cannot use the client certificate of {} with the key of {}",
                    files.0, files.1
                ))
                .with_source(error)
            };
            config.with_client_auth_cert(certificates, key).map_err(unusable)
        }
    }
}

/// Reads the client's certificate and key. Called for each connection, so renewed files are used without a restart.
fn client_certificate(files: &ClientFiles) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)> {
    let cannot = |what: &str, file: &PathBuf| {
        let context = format!("cannot read {what} from {}", file.display());
        move |error: rustls::pki_types::pem::Error| Error::configuration(context).with_source(error)
    };
    let ClientFiles { certificate, key } = files;
    let certificates =
        CertificateDer::pem_file_iter(certificate).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    let certificates = certificates.map_err(cannot("a client certificate", certificate))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(cannot("the key of a client certificate", key))?;
    Ok((certificates, key))
}

/// The trusted roots. Unreadable certificates of the system are ignored; those of a named file are an error.
fn roots(file: Option<&PathBuf>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match file {
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        Some(file) => {
            let cannot = |error: rustls::pki_types::pem::Error| {
                Error::configuration(format!("cannot read certificates from {}", file.display())).with_source(error)
            };
            for certificate in CertificateDer::pem_file_iter(file).map_err(cannot)? {
                let certificate = certificate.map_err(cannot)?;
                roots.add(certificate).map_err(|error| {
                    Error::configuration(format!("cannot use a certificate of {}", file.display())).with_source(error)
                })?;
            }
        }
    }
    if roots.is_empty() {
        return Err(Error::configuration("no root certificates found to verify the server; set sslrootcert=FILE"));
    }
    Ok(roots)
}

/// `verify-ca`: the chain must be valid; any host name is accepted.
#[derive(Debug)]
struct AnyHost(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyHost {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        match self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// `require` and `prefer`: encrypted, any server certificate is accepted.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> std::result::Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
