//! Certificates for tests: an authority and the certificates that it signs, in memory and as PEM
//! files.

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::path::{Path, PathBuf};

/// A certificate authority with its PEM file.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate.
    pub certificate: CertificateDer<'static>,
    /// The file of its certificate.
    pub pem: PathBuf,
}

/// A certificate that an authority signed, with its key.
pub struct Signed {
    /// The certificate.
    pub der: CertificateDer<'static>,
    /// Its private key.
    pub private: PrivateKeyDer<'static>,
    /// The file of the certificate.
    pub certificate: PathBuf,
    /// The file of the key.
    pub key: PathBuf,
    /// A file with both.
    pub both: PathBuf,
}

impl Authority {
    /// Makes an authority whose files are in `folder`.
    pub fn new(folder: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let pem = folder.join(format!("{name}.pem"));
        std::fs::write(&pem, certificate.pem()).unwrap();
        Self { certificate: certificate.der().clone(), issuer: Issuer::new(params, key), pem }
    }

    /// Signs a certificate for `name`, whose files are in `folder`.
    pub fn signs(&self, folder: &Path, name: &str) -> Signed {
        let pair = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&pair, &self.issuer).unwrap();
        let [path, key, both] =
            ["pem", "key", "key.pem"].map(|end| folder.join(format!("{name}.{end}")));
        std::fs::write(&path, certificate.pem()).unwrap();
        std::fs::write(&key, pair.serialize_pem()).unwrap();
        std::fs::write(&both, certificate.pem() + &pair.serialize_pem()).unwrap();
        Signed {
            der: certificate.der().clone(),
            private: PrivatePkcs8KeyDer::from(pair.serialize_der()).into(),
            certificate: path,
            key,
            both,
        }
    }
}
