//! Links to a repository: a directory, or a web server over HTTP(S) with ranges. Follows no redirect to another
//! scheme and keeps no cookies; what arrives is proved by whoever asked for it.

use anyhow::{Context, Result};
use hatchback::sync::link::{Link, LinkError, Take};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Bytes handed over at a time.
const PIECE_BYTES: usize = 64 << 10;

fn pump(mut from: impl Read, mut skip: u64, take: Take<'_>) -> Result<(), LinkError> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let n = match from.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(n) => n as u64,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(LinkError::Broken(e.to_string())),
        };
        let begin = skip.min(n);
        skip -= begin;
        if begin < n && take(&piece[begin as usize..n as usize]).is_break() {
            return Ok(());
        }
    }
}

/// A repository in a directory: a disk, a stick, a mount.
pub struct DirectoryLink(pub PathBuf);

impl Link for DirectoryLink {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        let mut file = std::fs::File::open(self.0.join(path)).map_err(|e| match e.kind() {
            ErrorKind::NotFound => LinkError::NotFound,
            _ => LinkError::Broken(e.to_string()),
        })?;
        file.seek(SeekFrom::Start(from)).map_err(|e| LinkError::Broken(e.to_string()))?;
        pump(file, 0, take)
    }
}

/// How to reach a web server.
#[derive(Clone, Debug, Default)]
pub struct HttpOptions {
    /// Certificates to trust, a PEM file [default: the system's].
    pub ca: Option<PathBuf>,
    /// This client's certificate chain and key, a PEM file.
    pub client: Option<PathBuf>,
    /// The proxy's address.
    pub proxy: Option<String>,
}

/// A repository on a web server.
pub struct HttpLink {
    agent: Agent,
    base: String,
}

/// Where Debian and its kin keep the certificates that they trust.
const SYSTEM_CA: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Without a byte for so long the link is broken.
const SILENCE_MAX: Duration = Duration::from_secs(30);

fn pem(path: &Path) -> Result<(Vec<Certificate<'static>>, Option<PrivateKey<'static>>)> {
    let text = std::fs::read(path).with_context(|| path.display().to_string())?;
    let (mut certificates, mut key) = (Vec::new(), None);
    for item in parse_pem(&text) {
        match item.with_context(|| path.display().to_string())? {
            PemItem::Certificate(certificate) => certificates.push(certificate),
            PemItem::PrivateKey(found) => key = Some(found),
            _ => {}
        }
    }
    Ok((certificates, key))
}

impl HttpLink {
    /// The repository at the address `base`.
    ///
    /// # Errors
    /// A PEM file or the proxy's address is wrong.
    pub fn new(base: &str, options: &HttpOptions) -> Result<Self> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut tls = TlsConfig::builder().unversioned_rustls_crypto_provider(provider);
        if base.starts_with("https://") || options.ca.is_some() {
            let ca = options.ca.as_deref().unwrap_or(Path::new(SYSTEM_CA));
            tls = tls.root_certs(RootCerts::from(pem(ca)?.0));
        }
        if let Some(path) = &options.client {
            let (chain, key) = pem(path)?;
            let key = key.with_context(|| format!("{}: holds no private key", path.display()))?;
            tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
        }
        let proxy = options.proxy.as_deref().map(ureq::Proxy::new).transpose()?;
        let config = Agent::config_builder()
            .tls_config(tls.build())
            .proxy(proxy)
            .http_status_as_error(false)
            .timeout_connect(Some(SILENCE_MAX))
            .timeout_recv_response(Some(SILENCE_MAX))
            .timeout_per_read(Some(SILENCE_MAX))
            .build();
        Ok(Self { agent: config.new_agent(), base: base.trim_end_matches('/').to_owned() })
    }
}

impl Link for HttpLink {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        let mut request =
            self.agent.get(format!("{}/{path}", self.base)).header("Accept-Encoding", "identity");
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        let response = request.call().map_err(|e| LinkError::Broken(e.to_string()))?;
        let skip = match response.status().as_u16() {
            // A server that knows no ranges begins anew.
            200 => from,
            206 if from > 0 => 0,
            // What was there is all there is.
            416 if from > 0 => return Ok(()),
            404 | 410 => return Err(LinkError::NotFound),
            status => return Err(LinkError::Broken(format!("status {status}"))),
        };
        pump(response.into_body().into_reader(), skip, take)
    }
}
