//! TLS for callers on other machines: the daemon shows its certificate, and a caller must show one
//! of the authorities that the target names. Without such a certificate no byte of a caller reaches
//! HTTP. Keeps no sessions.

use crate::limits::TLS_BUFFER_BYTES_MAX;
use hatchback::TlsRules;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{RootCertStore, ServerConfig};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Why the daemon cannot offer TLS.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TlsError {
    /// A file is missing, or holds no PEM of its kind.
    #[error("server.tls.{key} = {}: {source}", path.display())]
    File { key: &'static str, path: PathBuf, source: pem::Error },
    /// A file has no certificate.
    #[error("server.tls.{key} = {}: has no certificate", path.display())]
    Empty { key: &'static str, path: PathBuf },
    /// The library refuses a certificate, or the key to it.
    #[error("server.tls.{key} = {}: {source}", path.display())]
    Refused { key: &'static str, path: PathBuf, source: rustls::Error },
    /// The library refuses the authorities of the callers.
    #[error("server.tls.client_ca: {0}")]
    Authorities(#[from] VerifierBuilderError),
}

/// The daemon's side of TLS: its certificate, and the authorities of its callers.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Reads the files of `rules`.
    ///
    /// # Errors
    /// [`TlsError`] with the file that is missing or wrong.
    pub fn open(rules: &TlsRules) -> Result<Self, TlsError> {
        let TlsRules { certificate, key, client_ca } = rules;
        let chain = certificates("certificate", certificate)?;
        let of_key = |source| TlsError::File { key: "key", path: key.clone(), source };
        let private = PrivateKeyDer::from_pem_file(key).map_err(of_key)?;
        let mut roots = RootCertStore::empty();
        let refused = |key, path: &Path| {
            let path = path.to_owned();
            move |source| TlsError::Refused { key, path, source }
        };
        let mut authorities = certificates("client_ca", client_ca)?.into_iter();
        authorities.try_for_each(|ca| roots.add(ca)).map_err(refused("client_ca", client_ca))?;

        let provider = Arc::new(default_provider());
        let callers =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(refused("certificate", certificate))?
            .with_client_cert_verifier(callers.build()?)
            .with_single_cert(chain, private)
            .map_err(refused("key", key))?;
        // gRPC clients choose HTTP/2 in the handshake.
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    /// Completes the handshake of `stream`, in which its caller shows a certificate.
    ///
    /// # Errors
    /// The caller's certificate is not signed by an authority, it does not speak TLS 1.3, or it
    /// ends the connection.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let bound = |connection: &mut rustls::ServerConnection| {
            connection.set_buffer_limit(Some(TLS_BUFFER_BYTES_MAX));
        };
        self.0.accept_with(stream, bound).await
    }
}

/// Returns the certificates in the file at `path`, the value of `server.tls.{key}`.
fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let of_file = |source| TlsError::File { key, path: path.to_owned(), source };
    let found: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).map_err(of_file)?.collect();
    let found = found.map_err(of_file)?;
    if found.is_empty() {
        return Err(TlsError::Empty { key, path: path.to_owned() });
    }
    Ok(found)
}
