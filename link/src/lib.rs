//! Links to a repository: a directory, or a web server over HTTP(S) with ranges. Follows redirects
//! from HTTPS to HTTPS only and keeps no cookies. Never verifies what arrives; the caller does.

#![forbid(unsafe_code)]

pub mod args;
pub mod daemon;
#[cfg(feature = "generate")]
pub mod generate;
pub mod program;

use hatchback::update::link::{Link, LinkError, Take};
use rustix::fs::OFlags;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::PrivateKeyDer;
use rustls::sign::CertifiedKey;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

/// Bytes that a link passes to its caller in one piece.
const PIECE_BYTES: usize = 64 << 10;
/// The file in which Debian-based systems keep trusted certificates.
const SYSTEM_CA: &str = "/etc/ssl/certs/ca-certificates.crt";
/// Time without a byte after which the link counts as broken.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a link cannot be opened.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "`{address}`: is neither a directory nor an address of the form http[s]://HOST[:PORT][/PATH]"
    )]
    Address { address: String },
    #[error("certificate file {path}: {problem}", path = path.display())]
    Pem { path: PathBuf, problem: String },
    #[error("proxy {address}: is not an address of the form [http://][USER:PASSWORD@]HOST[:PORT]")]
    Proxy { address: ProxyAddress },
}

/// The address of a proxy. Prints without the user name and the password that it may hold.
#[derive(Clone)]
pub struct ProxyAddress(String);

impl<T: Into<String>> From<T> for ProxyAddress {
    fn from(address: T) -> Self {
        Self(address.into())
    }
}

impl fmt::Display for ProxyAddress {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A password may contain any character, even those that end a host.
        let (scheme, rest) = self.0.split_once("://").filter(|s| is_scheme(s.0)).unzip();
        let rest = rest.unwrap_or(&self.0);
        let host = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        match scheme {
            Some(scheme) => write!(to, "{scheme}://{host}"),
            None => to.write_str(host),
        }
    }
}

impl fmt::Debug for ProxyAddress {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, to)
    }
}

fn is_scheme(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

/// How to reach a repository.
#[derive(Clone, Debug, Default)]
pub struct LinkOptions {
    /// Certificates to trust, a PEM file [default: the system's].
    pub ca: Option<PathBuf>,
    /// This client's certificate chain and private key, a PEM file.
    pub client: Option<PathBuf>,
    /// The proxy's address.
    pub proxy: Option<ProxyAddress>,
    /// Bytes a second; 0 for no limit.
    pub bytes_per_s_max: u64,
}

/// Opens the link to the repository at `from`: the address of a web server, or a directory.
///
/// # Errors
/// An address or a certificate file in the options cannot be used.
pub fn open(from: &str, options: &LinkOptions) -> Result<Box<dyn Link>, OpenError> {
    let link: Box<dyn Link> = match from.split_once("://") {
        Some(("http" | "https", _)) => Box::new(HttpLink::new(from, options)?),
        Some(("file", directory)) => Box::new(DirectoryLink(directory.into())),
        None if !from.is_empty() => Box::new(DirectoryLink(from.into())),
        _ => return Err(OpenError::Address { address: without_credentials(from) }),
    };
    Ok(match options.bytes_per_s_max {
        0 => link,
        rate => Box::new(Throttled { link, rate, since: Instant::now(), bytes: 0 }),
    })
}

/// Returns `address` without user name, password and query, for messages.
fn without_credentials(address: &str) -> String {
    let Some((scheme, rest)) = address.split_once("://") else { return address.to_owned() };
    let (host, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let is_port = |port: &str| port.bytes().all(|b| b.is_ascii_digit());
    let (host, path) = match (host.rsplit_once('@'), host.rsplit_once(':'), rest.rsplit_once('@')) {
        (Some((_, host)), _, _) => (host, path),
        // If the port is not a number, the text before `@` is a password with a character that ends
        // the host.
        (None, Some((_, port)), Some((_, host))) if !is_port(port) => (host, ""),
        (None, _, _) => (host, path),
    };
    format!("{scheme}://{host}{}", path.split(['?', '#']).next().unwrap_or_default())
}

fn broken(e: impl std::fmt::Display) -> LinkError {
    LinkError::Broken(e.to_string())
}

/// A header `Content-Range`: `bytes 7-9/10`, or `bytes */10` if nothing is sent.
#[derive(Debug, PartialEq, Eq)]
struct ContentRange {
    start: Option<u64>,
    /// The byte behind the last one that is sent, more than `start`.
    end: Option<u64>,
    /// The bytes of the whole object, at least `end`; `None` if the server does not say.
    total: Option<u64>,
}

impl ContentRange {
    fn parse(value: &str) -> Option<Self> {
        let (range, total) = value.trim().strip_prefix("bytes")?.trim().split_once('/')?;
        let total = if total == "*" { None } else { Some(total.parse().ok()?) };
        if range == "*" {
            return Some(Self { start: None, end: None, total });
        }
        let (start, last) = range.split_once('-')?;
        let (start, last) = (start.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
        let end = last.checked_add(1)?;
        let is_whole = start < end && total.is_none_or(|total| end <= total);
        is_whole.then_some(Self { start: Some(start), end: Some(end), total })
    }

    /// Returns the bytes from the start to the end of the object, as far as the server says.
    fn rest(&self) -> u64 {
        let end = self.total.or(self.end).unwrap_or(0);
        end.saturating_sub(self.start.unwrap_or(0))
    }
}

/// Passes the rest of an object, of `rest` bytes, to `take`. A server may send a part of the range
/// that the request has.
fn pump_part(from: impl Read, rest: u64, take: Take<'_>) -> Result<(), LinkError> {
    let (mut passed, mut is_over) = (0, false);
    pump(from, &mut |piece| {
        passed += piece.len() as u64;
        let next = take(piece);
        is_over = next.is_break();
        next
    })?;
    if is_over || passed >= rest {
        return Ok(());
    }
    Err(broken("the server sent a part of the range"))
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

/// A repository in a directory.
pub struct DirectoryLink(pub PathBuf);

impl Link for DirectoryLink {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        // Opening a FIFO would block until a writer opens it.
        let mut options = File::options();
        options.read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
        let mut file = options.open(self.0.join(path)).map_err(|e| match e.kind() {
            ErrorKind::NotFound => LinkError::NotFound,
            _ => broken(e),
        })?;
        if !file.metadata().map_err(broken)?.is_file() {
            return Err(broken("is not a regular file"));
        }
        file.seek(SeekFrom::Start(from)).map_err(broken)?;
        pump(file, take)
    }

    fn address(&self, path: &str) -> String {
        self.0.join(path).display().to_string()
    }
}

/// A repository on a web server.
pub struct HttpLink {
    agent: Agent,
    base: String,
    /// The proxy's address for messages.
    proxy: Option<ProxyAddress>,
}

/// The content of a PEM file.
#[derive(Default)]
struct Pem {
    certificates: Vec<Certificate<'static>>,
    key: Option<PrivateKey<'static>>,
}

impl Pem {
    /// Reads the file at `path`, which has at least one certificate.
    fn read(path: &Path) -> Result<Self, OpenError> {
        let wrong = |problem: String| OpenError::Pem { path: path.to_owned(), problem };
        let text = std::fs::read(path).map_err(|e| wrong(e.to_string()))?;

        let mut pem = Self::default();
        for item in parse_pem(&text) {
            match item.map_err(|e| wrong(e.to_string()))? {
                PemItem::Certificate(certificate) => pem.certificates.push(certificate),
                PemItem::PrivateKey(key) => pem.key = Some(key),
                _ => {}
            }
        }
        if pem.certificates.is_empty() {
            return Err(wrong("holds no certificate".to_owned()));
        }
        Ok(pem)
    }

    /// Returns what shows who the client is. The key must be that of the first certificate: `ureq`
    /// panics at the first request with any other.
    fn into_client(self, provider: &CryptoProvider) -> Result<ClientCert, String> {
        let Some(key) = self.key else { return Err("holds no private key".to_owned()) };
        let chain = self.certificates.iter().map(|c| c.der().to_vec().into()).collect();
        let der = PrivateKeyDer::try_from(key.der().to_vec())?;
        CertifiedKey::from_der(chain, der, provider).map_err(|e| e.to_string())?;
        Ok(ClientCert::new_with_certs(&self.certificates, key))
    }
}

fn tls_config(is_https: bool, options: &LinkOptions) -> Result<TlsConfig, OpenError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = TlsConfig::builder().unversioned_rustls_crypto_provider(Arc::clone(&provider));

    if is_https || options.ca.is_some() {
        let ca = options.ca.as_deref().unwrap_or(Path::new(SYSTEM_CA));
        tls = tls.root_certs(RootCerts::from(Pem::read(ca)?.certificates));
    }
    if let Some(path) = &options.client {
        let refused = |problem| OpenError::Pem { path: path.clone(), problem };
        let client = Pem::read(path)?.into_client(&provider).map_err(refused)?;
        tls = tls.client_cert(Some(client));
    }
    Ok(tls.build())
}

/// Returns whether `base` names a host, and a port of 16 bits or none.
fn is_address(base: &str) -> bool {
    let Ok(address) = base.parse::<ureq::http::Uri>() else { return false };
    let Some(authority) = address.authority() else { return false };
    let host = authority.as_str().rsplit('@').next().unwrap_or_default();
    let port = host.rsplit_once(':').map(|(_, port)| port).filter(|_| !host.ends_with(']'));
    !authority.host().is_empty() && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

impl HttpLink {
    /// Opens the repository at the address `base`. No connection is made yet.
    ///
    /// # Errors
    /// `OpenError::{Address, Pem, Proxy}` if `base`, a PEM file or the proxy's address cannot be
    /// used.
    pub fn new(base: &str, options: &LinkOptions) -> Result<Self, OpenError> {
        if !is_address(base) {
            return Err(OpenError::Address { address: without_credentials(base) });
        }
        let is_https = base.starts_with("https://");
        let tls = tls_config(is_https, options)?;
        let proxy = options.proxy.as_ref().map(|address| {
            let refused = |_| OpenError::Proxy { address: address.clone() };
            ureq::Proxy::new(&address.0).map_err(refused)
        });

        let builder = Agent::config_builder().https_only(is_https);
        // A redirect from plain HTTP usually comes from a captive portal, so none is followed.
        let builder = if is_https { builder } else { builder.max_redirects(0) };
        let config = builder
            .tls_config(tls)
            .proxy(proxy.transpose()?)
            .http_status_as_error(false)
            .timeout_connect(Some(SILENCE_TIMEOUT))
            .timeout_recv_response(Some(SILENCE_TIMEOUT))
            .timeout_per_read(Some(SILENCE_TIMEOUT))
            .build();
        let base = base.trim_end_matches('/').to_owned();
        Ok(Self { agent: config.new_agent(), base, proxy: options.proxy.clone() })
    }

    fn no_answer(&self, error: &ureq::Error) -> LinkError {
        // The crate's own text of these two errors has the whole address, with the password.
        let error = match error {
            ureq::Error::BadUri(_) => "the address cannot be used".to_owned(),
            ureq::Error::RequireHttpsOnly(to) => {
                format!("{} is not an https address", without_credentials(to))
            }
            e => e.to_string(),
        };
        LinkError::Broken(match &self.proxy {
            None => format!("the request failed: {error}"),
            Some(proxy) => format!("the request through the proxy {proxy} failed: {error}"),
        })
    }
}

impl Link for HttpLink {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        let mut request =
            self.agent.get(format!("{}/{path}", self.base)).header("Accept-Encoding", "identity");
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }

        let response = request.call().map_err(|e| self.no_answer(&e))?;
        let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
        let range = range.and_then(ContentRange::parse);
        match response.status().as_u16() {
            200 if from == 0 => pump(response.into_body().into_reader(), take),
            200 => Err(LinkError::NoRanges),
            206 if from > 0 => match range {
                Some(range) if range.start == Some(from) => {
                    pump_part(response.into_body().into_reader(), range.rest(), take)
                }
                // The answer has other bytes than the request, or does not say where they begin.
                _ => Err(LinkError::NoRanges),
            },
            // `from` is the object's length: nothing is left to fetch.
            416 if from > 0 => match range.and_then(|range| range.total) {
                Some(total) if total != from => Err(LinkError::NoRanges),
                _ => Ok(()),
            },
            404 | 410 => Err(LinkError::NotFound),
            // A car asks for the root after its newest one at each poll. A bucket that it may not
            // list, and many CDNs, answer so for an object that does not exist. Every other object
            // is known to exist, so its refusal is an error.
            403 if path.ends_with(".root.json") => Err(LinkError::NotFound),
            status => Err(LinkError::Broken(format!("the server answered with status {status}"))),
        }
    }

    fn address(&self, path: &str) -> String {
        without_credentials(&format!("{}/{path}", self.base))
    }
}

/// A link with a limited rate: it pauses between pieces.
struct Throttled {
    link: Box<dyn Link>,
    /// Bytes a second.
    rate: u64,
    since: Instant,
    /// Bytes passed on after `since`.
    bytes: u64,
}

impl Link for Throttled {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        let Self { link, rate, since, bytes } = self;
        link.get(path, from, &mut |piece| {
            *bytes += piece.len() as u64;
            let due = Duration::from_secs_f64(*bytes as f64 / *rate as f64);
            let pause = due.saturating_sub(since.elapsed());
            // After a gap of over a second the count starts anew: idle time must not allow a faster
            // transfer.
            if pause < Duration::from_millis(1) && since.elapsed() > due + Duration::from_secs(1) {
                (*since, *bytes) = (Instant::now(), 0);
            }
            std::thread::sleep(pause);
            take(piece)
        })
    }

    fn address(&self, path: &str) -> String {
        self.link.address(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::ops::ControlFlow;

    fn opened(from: &str) -> Result<String, String> {
        let link = open(from, &LinkOptions { bytes_per_s_max: 9, ..LinkOptions::default() });
        link.map(|link| link.address("chunks/ab")).map_err(|e| e.to_string())
    }

    #[test]
    fn a_link_says_where_its_objects_are_and_no_password() {
        for (from, address) in [
            ("http://user:secret@host:81/fleet/", "http://host:81/fleet/chunks/ab"),
            ("http://host", "http://host/chunks/ab"),
            ("http://user:sec@ret@host/@fleet", "http://host/@fleet/chunks/ab"),
            ("https://[::1]:8443/fleet", "https://[::1]:8443/fleet/chunks/ab"),
            ("http://host/fleet?token=secret", "http://host/fleet"),
            ("file:///mnt/stick", "/mnt/stick/chunks/ab"),
            ("relative/folder", "relative/folder/chunks/ab"),
        ] {
            assert_eq!(opened(from).as_deref(), Ok(address), "{from}");
        }
    }

    #[test]
    fn an_address_that_no_link_has_is_refused() {
        for from in [
            "s3://bucket/fleet",
            "ftp://user:secret@host",
            "HTTP://host",
            "http://user:secret/@host/fleet",
            "http://host:99999",
            "http://host:",
            "http://[::1",
            "http://a b",
            "http://",
            "",
        ] {
            let refused = opened(from).expect_err(from);
            assert!(refused.contains("neither a directory"), "{refused}");
            assert!(!refused.contains("secret"), "{refused}");
        }
    }

    #[test]
    fn a_range_says_where_it_begins_and_how_long_the_object_is() {
        let range = |start, end, total| Some(ContentRange { start, end, total });
        for (value, parsed) in [
            ("bytes 7-9/10", range(Some(7), Some(10), Some(10))),
            (" bytes 0-0/* ", range(Some(0), Some(1), None)),
            ("bytes */10", range(None, None, Some(10))),
            ("bytes 10-9/10", None),
            ("bytes 7-10/10", None),
            ("bytes 0-18446744073709551615/*", None),
            ("bytes -9/10", None),
            ("bytes 7-9", None),
            ("items 7-9/10", None),
            ("bytes 7-9/-1", None),
            ("", None),
        ] {
            assert_eq!(ContentRange::parse(value), parsed, "{value}");
        }
    }

    #[test]
    fn a_proxy_prints_without_its_password() {
        for (given, shown) in [
            ("ftp://user:SECRET@h:1", "ftp://h:1"),
            ("user:SECRET@h:1", "h:1"),
            ("ftp://user:SEC/RET@h:1", "ftp://h:1"),
            ("user:SEC://RET@h:1", "h:1"),
            ("http://user:SEC@RET?#@h", "http://h"),
            ("h:1", "h:1"),
        ] {
            let options = LinkOptions { proxy: Some(given.into()), ..Default::default() };
            assert_eq!(ProxyAddress::from(given).to_string(), shown);
            assert!(!format!("{options:?}").contains("SEC"), "{options:?}");
        }

        let proxy = Some("ftp://user:SECRET@h:1".into());
        let options = LinkOptions { proxy, ..Default::default() };
        let error = HttpLink::new("http://host", &options).err().unwrap().to_string();
        assert!(error.starts_with("proxy ftp://h:1: is not an address"), "{error}");
    }

    #[test]
    fn a_directory_with_a_fifo_for_a_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (mode, fifo) = (Mode::RWXU, directory.path().join("timestamp.json"));
        mknodat(CWD, &fifo, FileType::Fifo, mode, 0).unwrap();
        let mut link = DirectoryLink(directory.path().to_owned());
        for path in ["timestamp.json", "."] {
            let error = link.get(path, 0, &mut |_| ControlFlow::Continue(())).unwrap_err();
            assert!(error.to_string().contains("is not a regular file"), "{path}: {error}");
        }
    }

    #[test]
    fn a_proxy_that_fails_is_in_the_error_without_its_password() {
        let options = LinkOptions {
            proxy: Some("http://me:secret@127.0.0.1:1".into()),
            ..Default::default()
        };
        let mut link = HttpLink::new("http://host.invalid/fleet", &options).unwrap();
        let error = link.get("chunks/ab", 0, &mut |_| ControlFlow::Continue(())).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("through the proxy http://127.0.0.1:1"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}
