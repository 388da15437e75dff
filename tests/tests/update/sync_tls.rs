//! Updates over HTTPS: trusted certificates, a client certificate if the server requires one, and a
//! proxy.

use hatchback::update::error::UpdateError;
use hatchback_link::{HttpLink, LinkOptions};
use hatchback_tests::certificates::{Authority, Signed};
use hatchback_tests::fleet::{Car, Fleet, T0};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Serves `folder` over HTTPS and returns the address. Requires certificates of `clients`, if
/// given.
fn serve(folder: PathBuf, own: &Authority, clients: Option<&Authority>, work: &Path) -> String {
    let provider = Arc::new(default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().unwrap();
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(authority) => {
            let mut roots = RootCertStore::empty();
            roots.add(authority.certificate.clone()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
    };

    let Signed { der, private, .. } = own.signs(work, "127.0.0.1");
    let config = Arc::new(builder.with_single_cert(vec![der], private).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("https://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (folder, config) = (folder.clone(), Arc::clone(&config));
            std::thread::spawn(move || {
                let connection = ServerConnection::new(config).unwrap();
                // The client may close the connection early.
                let _ = answer(StreamOwned::new(connection, stream.unwrap()), &folder);
            });
        }
    });

    address
}

/// Starts a server that redirects every request. Returns its address and its count of requests.
fn redirect(to: String) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, came) = (format!("http://{}", listener.local_addr().unwrap()), Arc::default());
    let count: Arc<AtomicUsize> = Arc::clone(&came);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            count.fetch_add(1, Ordering::Relaxed);
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            lines.map_while(Result::ok).find(String::is_empty);
            let _ = write!(
                stream,
                "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\
                 Connection: close\r\n\r\n"
            );
        }
    });
    (address, came)
}

fn answer(
    mut stream: StreamOwned<ServerConnection, TcpStream>,
    folder: &Path,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }

    let head = String::from_utf8_lossy(&head);
    let path =
        head.strip_prefix("GET /").and_then(|rest| rest.split(' ').next()).unwrap_or_default();
    let (status, content) =
        match (std::fs::read(folder.join(path)), std::fs::read_to_string(folder.join("elsewhere")))
        {
            (_, Ok(to)) => (format!("302 Found\r\nLocation: {to}/{path}"), Vec::new()),
            (Ok(content), _) => ("200 OK".to_owned(), content),
            _ => ("404 Not Found".to_owned(), Vec::new()),
        };
    let bytes = content.len();

    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n")?;
    stream.write_all(&content)?;
    stream.conn.send_close_notify();
    stream.flush()
}

/// Starts a proxy that supports CONNECT. Returns its address and its count of connections.
fn proxy() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, passed) = (format!("http://{}", listener.local_addr().unwrap()), Arc::default());
    let count: Arc<AtomicUsize> = Arc::clone(&passed);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, count) = (client.unwrap(), Arc::clone(&count));
            std::thread::spawn(move || {
                let mut reader = BufReader::new(client.try_clone().unwrap());
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                let to =
                    line.strip_prefix("CONNECT ").unwrap().split(' ').next().unwrap().to_owned();
                while line.trim() != "" {
                    line.clear();
                    reader.read_line(&mut line).unwrap();
                }

                let mut server = TcpStream::connect(to).unwrap();
                client.write_all(b"HTTP/1.1 200 Connected\r\n\r\n").unwrap();
                count.fetch_add(1, Ordering::Relaxed);
                let (mut back, mut out) =
                    (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || drop(std::io::copy(&mut back, &mut out)));
                let _ = std::io::copy(&mut reader, &mut server);
                let _ = server.shutdown(std::net::Shutdown::Write);
            });
        }
    });

    (address, passed)
}

#[test]
fn a_server_needs_a_certificate_that_the_car_trusts() {
    let (fleet, work) = (Fleet::new(), tempfile::tempdir().unwrap());
    let [ours, other] = ["ours", "other"].map(|name| Authority::new(work.path(), name));
    let address = serve(fleet.repository(), &ours, None, work.path());
    let car = Car::new(&fleet);
    let options = |ca: &Path| LinkOptions { ca: Some(ca.to_owned()), ..LinkOptions::default() };
    let mut link = HttpLink::new(&address, &options(&other.pem)).unwrap();
    let refused = car.run(&mut link, T0 + 1).unwrap_err();
    assert!(matches!(refused, UpdateError::LinkBroken { .. }), "{refused:?}");
    assert_eq!(car.live(), 0);
    let mut link = HttpLink::new(&address, &options(&ours.pem)).unwrap();
    car.run(&mut link, T0 + 2).unwrap();
    assert_eq!(car.live(), 1);
    assert!(HttpLink::new(&address, &options(Path::new("/nowhere.pem"))).is_err());
}

#[test]
fn a_server_that_requires_a_certificate_gets_the_cars_own() {
    let (fleet, work) = (Fleet::new(), tempfile::tempdir().unwrap());
    let [server, cars] = ["server", "cars"].map(|name| Authority::new(work.path(), name));
    let address = serve(fleet.repository(), &server, Some(&cars), work.path());
    let car = Car::new(&fleet);
    let ca = Some(server.pem.clone());
    let mut link =
        HttpLink::new(&address, &LinkOptions { ca: ca.clone(), ..LinkOptions::default() }).unwrap();
    let refused = car.run(&mut link, T0 + 1).unwrap_err();
    assert!(matches!(refused, UpdateError::LinkBroken { .. }), "{refused:?}");
    let stranger = server.signs(work.path(), "stranger").both;
    let options = LinkOptions { ca: ca.clone(), client: Some(stranger), ..LinkOptions::default() };
    assert!(car.run(&mut HttpLink::new(&address, &options).unwrap(), T0 + 2).is_err());
    assert_eq!(car.live(), 0);
    let client = cars.signs(work.path(), "car-7").both;
    // A renewed certificate beside the old key, and a key alone: refused before any request.
    let text = |path: &Path| std::fs::read_to_string(path).unwrap();
    let both = text(&client);
    let (_, key) = both.split_at(both.find("-----BEGIN PRIVATE KEY").unwrap());
    let mixed = text(&cars.pem) + key;
    for (wrong, problem) in [(mixed.as_str(), "keys"), (key, "holds no certificate")] {
        let path = work.path().join("wrong.pem");
        std::fs::write(&path, wrong).unwrap();
        let client = Some(path);
        let refused = HttpLink::new(&address, &LinkOptions { client, ..LinkOptions::default() });
        let refused = refused.err().unwrap().to_string();
        assert!(refused.contains("wrong.pem") && refused.contains(problem), "{refused}");
    }
    let options = LinkOptions { ca, client: Some(client), ..LinkOptions::default() };
    car.run(&mut HttpLink::new(&address, &options).unwrap(), T0 + 3).unwrap();
    assert_eq!(car.live(), 1);
}

/// HTTPS may redirect to HTTPS. Plain HTTP may not redirect: a captive portal's redirect is a
/// broken link.
#[test]
fn redirects_stay_within_https() {
    let (fleet, work) = (Fleet::new(), tempfile::tempdir().unwrap());
    let ours = Authority::new(work.path(), "ours");
    let repository = serve(fleet.repository(), &ours, None, work.path());
    let refused = |from: &str, ca: Option<&Path>| {
        let options = LinkOptions { ca: ca.map(Path::to_owned), ..LinkOptions::default() };
        let car = Car::new(&fleet);
        let ran = car.run(&mut HttpLink::new(from, &options).unwrap(), T0 + 1);
        ran.err()
            .inspect(|e| assert!(matches!(e, UpdateError::LinkBroken { .. }), "{e:?}"))
            .is_some()
    };
    let sends = tempfile::tempdir().unwrap();
    let sender = serve(sends.path().to_owned(), &ours, None, work.path());
    let send_to = |to: &str| std::fs::write(sends.path().join("elsewhere"), to).unwrap();
    send_to(&repository);
    assert!(!refused(&sender, Some(&ours.pem)), "from HTTPS to HTTPS");
    let (plain, came) = redirect(format!("{repository}/metadata/timestamp.json"));
    send_to(&plain);
    assert!(refused(&sender, Some(&ours.pem)), "from HTTPS to HTTP");
    assert_eq!(came.load(Ordering::Relaxed), 0, "the car sent a request over plain HTTP");
    assert!(refused(&plain, None), "from HTTP to HTTPS");
    assert!(came.load(Ordering::Relaxed) > 0);
}

#[test]
fn an_update_passes_a_proxy() {
    let (fleet, work) = (Fleet::new(), tempfile::tempdir().unwrap());
    let ours = Authority::new(work.path(), "ours");
    let address = serve(fleet.repository(), &ours, None, work.path());
    let (through, passed) = proxy();
    let car = Car::new(&fleet);
    let options = LinkOptions {
        ca: Some(ours.pem.clone()),
        proxy: Some(through.into()),
        ..LinkOptions::default()
    };
    car.run(&mut HttpLink::new(&address, &options).unwrap(), T0 + 1).unwrap();
    assert_eq!(car.live(), 1);
    assert!(passed.load(Ordering::Relaxed) > 0, "no connection passed the proxy");
    assert!(
        HttpLink::new(
            &address,
            &LinkOptions { proxy: Some("no address".into()), ..LinkOptions::default() }
        )
        .is_err()
    );
}
