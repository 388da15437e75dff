//! Callers on other machines connect over TLS, with a certificate of the target's authority, and in
//! no other way.

use hatchback::TlsRules;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::budget::Budget;
use hatchback_server::{Listener, Tls};
use hatchback_tests::certificates::{Authority, Signed};
use hatchback_tests::front_door::{FrontDoor, serving};
use hatchback_tests::models::install_spec;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A front door with certificates of `cars`, for callers with certificates of `callers`.
struct Remote {
    address: SocketAddr,
    _door: FrontDoor,
}

fn open(folder: &Path, cars: &Authority, callers: &Authority) -> Remote {
    let Signed { certificate, key, .. } = cars.signs(folder, "car.example");
    let client_ca = callers.pem.clone();
    let tls = Tls::open(&TlsRules { certificate, key, client_ca }).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();

    let installed = install_spec("tools/demo/coupon/model.toml", None, None);
    let flash = Flash::open(&disk::system(), &installed.flash).unwrap();
    let serving = serving("coupon", &flash, Budget { workers: 1, ..Budget::default() });
    let door = FrontDoor::open(serving, Some(Listener::Tls(listener, tls))).unwrap();
    Remote { address, _door: door }
}

/// Asks for the metadata over TLS 1.3 as a caller that trusts `cars` and shows `own`.
fn ask(remote: &Remote, cars: &Authority, own: Option<&Signed>) -> io::Result<String> {
    ask_over(&rustls::version::TLS13, remote, cars, own)
}

fn ask_over(
    version: &'static rustls::SupportedProtocolVersion,
    remote: &Remote,
    cars: &Authority,
    own: Option<&Signed>,
) -> io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(cars.certificate.clone()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => {
            let (chain, key) = (vec![own.der.clone()], own.private.clone_key());
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    let name = ServerName::try_from("car.example").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(connection, TcpStream::connect(remote.address)?);
    let head = "GET /v2/models/coupon HTTP/1.1\r\nhost: car.example\r\nconnection: close\r\n\r\n";
    stream.write_all(head.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn a_caller_beyond_the_machine_needs_a_certificate_of_the_authority() {
    let folder = tempfile::tempdir().unwrap();
    let [cars, callers, others] =
        ["cars", "callers", "others"].map(|name| Authority::new(folder.path(), name));
    let remote = open(folder.path(), &cars, &callers);

    let good = callers.signs(folder.path(), "phone.example");
    let answer = ask(&remote, &cars, Some(&good)).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"coupon\""), "{answer}");

    let older = ask_over(&rustls::version::TLS12, &remote, &cars, Some(&good));
    assert!(older.is_err(), "TLS 1.2");
    assert!(ask(&remote, &cars, None).is_err(), "no certificate");
    let wrong = others.signs(folder.path(), "phone.example");
    assert!(ask(&remote, &cars, Some(&wrong)).is_err(), "the certificate of another authority");
    assert!(ask(&remote, &others, Some(&good)).is_err(), "the car has another authority");

    let mut plain = TcpStream::connect(remote.address).unwrap();
    plain.write_all(b"GET /v2 HTTP/1.1\r\nhost: car.example\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // The connection's end may be reported as an error.
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
    assert!(ask(&remote, &cars, Some(&good)).is_ok(), "the good caller is still served");
}

#[test]
fn a_file_that_is_missing_or_has_no_certificate_is_named() {
    let missing = PathBuf::from("/nowhere/car.pem");
    let own = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    let open = |certificate: &PathBuf| {
        let (certificate, key) = (certificate.clone(), missing.clone());
        let rules = TlsRules { certificate, key, client_ca: missing.clone() };
        Tls::open(&rules).unwrap_err().to_string()
    };
    let found = open(&missing);
    assert!(found.contains("server.tls.certificate = /nowhere/car.pem: "), "{found}");
    assert!(open(&own).contains("Cargo.toml: has no certificate"), "{}", open(&own));
}
