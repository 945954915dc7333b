//! Certificates for a test run: valid ones, and each kind of invalid one that a client must refuse.

use std::path::PathBuf;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    date_time_ymd,
};

use crate::folder::ServiceFolder;
use crate::postgres::ServerTls;

/// The names that clients use for the tests' servers.
const SERVER_NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

/// All certificates for the TLS tests. The servers' certificates are for [`crate::postgres::ClusterOptions::tls`] and
/// [`crate::kafka::KafkaTls`].
#[derive(Debug)]
pub struct Certificates {
    /// The authority that clients trust, as a file and as text.
    pub authority_path: PathBuf,
    pub authority_pem: String,
    /// An authority that issued only `foreign` and `foreign_client`.
    pub other_authority_path: PathBuf,
    /// Valid: for `localhost` and 127.0.0.1, issued by the authority.
    pub server: ServerTls,
    /// Issued by the authority, but for another host.
    pub wrong_host: ServerTls,
    /// Issued by the authority for the right host, but expired.
    pub expired: ServerTls,
    /// For the right host, but issued by the other authority.
    pub foreign: ServerTls,
    /// A client certificate, issued by the authority.
    pub client: ServerTls,
    /// A client certificate that a server must refuse: issued by the other authority.
    pub foreign_client: ServerTls,
    /// Holds the files; removed at drop.
    _folder: ServiceFolder,
}

impl Certificates {
    pub fn generate() -> Certificates {
        let folder = ServiceFolder::create("tls");
        let authority = Authority::create("Wharf test authority");
        let other = Authority::create("Another authority");
        Certificates {
            authority_path: folder.write("authority.pem", &authority.pem),
            other_authority_path: folder.write("other-authority.pem", &other.pem),
            server: authority.issue(&server_params(&SERVER_NAMES)),
            wrong_host: authority.issue(&server_params(&["elsewhere.invalid"])),
            expired: authority.issue(&expired(server_params(&SERVER_NAMES))),
            foreign: other.issue(&server_params(&SERVER_NAMES)),
            client: authority.issue(&client_params()),
            foreign_client: other.issue(&client_params()),
            authority_pem: authority.pem,
            _folder: folder,
        }
    }
}

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn create(name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("an authority").pem();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    fn issue(&self, params: &CertificateParams) -> ServerTls {
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        ServerTls { certificate_pem: certificate.pem(), key_pem: key.serialize_pem() }
    }
}

fn server_params(names: &[&str]) -> CertificateParams {
    let names = names.iter().map(|name| (*name).to_owned());
    let mut params = CertificateParams::new(names.collect::<Vec<_>>()).expect("names a certificate can hold");
    params.distinguished_name.push(DnType::CommonName, "wharf test server");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params
}

fn client_params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "wharf test client");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params
}

fn expired(mut params: CertificateParams) -> CertificateParams {
    params.not_before = date_time_ymd(2020, 1, 1);
    params.not_after = date_time_ymd(2020, 1, 2);
    params
}
