//! Links to a repository: a directory, or a web server over HTTP(S) with ranges. Follows redirects
//! from HTTPS to HTTPS only and keeps no cookies; what arrives is proved by whoever asked for it.

#![forbid(unsafe_code)]

pub mod args;
pub mod daemon;

use hatchback::update::link::{Link, LinkError, Take};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Bytes handed over at a time.
const PIECE_BYTES: usize = 64 << 10;
/// Where Debian and its kin keep the certificates that they trust.
const SYSTEM_CA: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Without a byte for so long the link is broken.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Why there is no link.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A file of certificates cannot be used.
    #[error("{path}: {problem}", path = path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The proxy's address cannot be used.
    #[error("proxy = {value}: {problem}")]
    Proxy {
        /// The address.
        value: String,
        /// What is wrong.
        problem: String,
    },
}

/// How to reach a repository.
#[derive(Clone, Debug, Default)]
pub struct LinkOptions {
    /// Certificates to trust, a PEM file [default: the system's].
    pub ca: Option<PathBuf>,
    /// This client's certificate chain and key, a PEM file.
    pub client: Option<PathBuf>,
    /// The proxy's address.
    pub proxy: Option<String>,
    /// Bytes a second; 0 for no limit.
    pub bytes_per_s_max: u64,
}

/// The link to the repository at `from`: an address of a web server, or a directory.
///
/// # Errors
/// Its options are wrong.
pub fn open(from: &str, options: &LinkOptions) -> Result<Box<dyn Link>, OpenError> {
    let link: Box<dyn Link> = if from.starts_with("http://") || from.starts_with("https://") {
        Box::new(HttpLink::new(from, options)?)
    } else {
        Box::new(DirectoryLink(from.strip_prefix("file://").unwrap_or(from).into()))
    };
    Ok(match options.bytes_per_s_max {
        0 => link,
        rate => Box::new(Paced { link, rate, since: Instant::now(), bytes: 0 }),
    })
}

fn broken(e: impl std::fmt::Display) -> LinkError {
    LinkError::Broken(e.to_string())
}

fn pump(mut from: impl Read, take: Take<'_>) -> Result<(), LinkError> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let n = match from.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(n) => n,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(broken(e)),
        };
        if take(&piece[..n]).is_break() {
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
            _ => broken(e),
        })?;
        file.seek(SeekFrom::Start(from)).map_err(broken)?;
        pump(file, take)
    }
}

/// A repository on a web server.
pub struct HttpLink {
    agent: Agent,
    base: String,
}

fn pem(path: &Path) -> Result<(Vec<Certificate<'static>>, Option<PrivateKey<'static>>), OpenError> {
    let wrong = |problem: String| OpenError::Pem { path: path.to_owned(), problem };
    let text = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;
    let (mut certificates, mut key) = (Vec::new(), None);
    for item in parse_pem(&text) {
        match item.map_err(|e| wrong(e.to_string()))? {
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
    pub fn new(base: &str, options: &LinkOptions) -> Result<Self, OpenError> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut tls = TlsConfig::builder().unversioned_rustls_crypto_provider(provider);
        let is_https = base.starts_with("https://");
        if is_https || options.ca.is_some() {
            let ca = options.ca.as_deref().unwrap_or(Path::new(SYSTEM_CA));
            tls = tls.root_certs(RootCerts::from(pem(ca)?.0));
        }
        if let Some(path) = &options.client {
            let (chain, key) = pem(path)?;
            let problem = || "holds no private key".to_owned();
            let key =
                key.ok_or_else(|| OpenError::Pem { path: path.clone(), problem: problem() })?;
            tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
        }
        let proxy = options.proxy.as_deref().map(|value| {
            ureq::Proxy::new(value)
                .map_err(|e| OpenError::Proxy { value: value.to_owned(), problem: e.to_string() })
        });
        let builder = Agent::config_builder().https_only(is_https);
        // One from plain HTTP is a captive portal's.
        let builder = if is_https { builder } else { builder.max_redirects(0) };
        let config = builder
            .tls_config(tls.build())
            .proxy(proxy.transpose()?)
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
        let response = request.call().map_err(broken)?;
        match response.status().as_u16() {
            200 if from == 0 => pump(response.into_body().into_reader(), take),
            206 if from > 0 => pump(response.into_body().into_reader(), take),
            200 => Err(LinkError::NoRanges),
            // What was there is all there is.
            416 if from > 0 => Ok(()),
            404 | 410 => Err(LinkError::NotFound),
            status => Err(LinkError::Broken(format!("status {status}"))),
        }
    }
}

/// A link that is held to a rate: it pauses between pieces.
struct Paced {
    link: Box<dyn Link>,
    rate: u64,
    since: Instant,
    bytes: u64,
}

impl Link for Paced {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        let Self { link, rate, since, bytes } = self;
        link.get(path, from, &mut |piece| {
            *bytes += piece.len() as u64;
            let due = Duration::from_secs_f64(*bytes as f64 / *rate as f64);
            let ahead = due.saturating_sub(since.elapsed());
            // A pause longer than this was idle time, not speed.
            if ahead < Duration::from_millis(1) && since.elapsed() > due + Duration::from_secs(1) {
                (*since, *bytes) = (Instant::now(), 0);
            }
            std::thread::sleep(ahead);
            take(piece)
        })
    }
}
