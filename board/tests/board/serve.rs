//! The daemon as a car runs it: the check of the probe set, scores over the socket, `busy` when all
//! request slots are taken, several models, and answers to the received requests after SIGTERM.

use hatchback_tests::client::{Client, request_of};
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::serve::install;
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The name of the only model: its lineage.
const MODEL: &str = "coupon-dlrm";

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

struct Car {
    folder: tempfile::TempDir,
}

impl Car {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bundle = folder.path().join("b");
        let spec = repository("tools/demo/coupon/model.toml");
        let job = PackJob::read(&spec, Overrides::default()).unwrap();
        job.pack(None, &bundle, &mut |_, _| {}).unwrap();
        install(&bundle, &folder.path().join("flash")).unwrap();
        Self { folder }
    }

    fn daemon(&self, args: &[&str]) -> Command {
        self.daemon_on(&repository("targets/cpu.toml"), &[self.flash()], args)
    }

    fn daemon_on(&self, target: &Path, flash: &[String], args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hatchbackd"));
        command.arg("--target").arg(target);
        flash.iter().for_each(|flash| {
            command.arg("--flash").arg(flash);
        });
        command.args(args);
        command
    }

    fn flash(&self) -> String {
        self.folder.path().join("flash").to_str().unwrap().to_owned()
    }

    /// Writes a target that inherits from cpu.toml and has this budget.
    fn target(&self, budget: &str) -> PathBuf {
        for name in ["base", "cpu"] {
            let file = format!("{name}.toml");
            std::fs::copy(repository("targets").join(&file), self.folder.path().join(&file))
                .unwrap();
        }
        let path = self.folder.path().join("own.toml");
        std::fs::write(&path, format!("inherits = \"cpu\"\n[budget]\n{budget}\n")).unwrap();
        path
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Returns the command that serves on the CPU's target.
    fn serving(&self) -> Command {
        self.daemon(&["serve", "--socket", self.socket().to_str().unwrap()])
    }

    /// Starts the daemon and waits for its socket.
    fn serve(&self, target: &Path, flash: &[String]) -> Child {
        let socket = self.socket();
        let args = ["serve", "--socket", socket.to_str().unwrap()];
        self.start(self.daemon_on(target, flash, &args))
    }

    /// Runs `command`, which serves, and waits for its socket.
    fn start(&self, mut command: Command) -> Child {
        crate::serve(&mut command, &self.socket())
    }

    fn connect(&self) -> Client {
        Client::connect(&self.socket()).unwrap()
    }
}

fn stop(daemon: &Child) {
    Command::new("kill").args(["-TERM", &daemon.id().to_string()]).status().unwrap();
}

fn probe() -> Vec<String> {
    let text = std::fs::read_to_string(repository("tools/demo/coupon/probe.jsonl")).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn ask(client: &mut Client, line: &str) -> Value {
    client.ask(MODEL, line).unwrap()
}

/// Returns the metrics once they contain `text`: they are made once a second.
fn metrics_with(car: &Car, text: &str) -> String {
    loop {
        let metrics = String::from_utf8(car.connect().get("/metrics").unwrap().body).unwrap();
        if metrics.contains(text) {
            return metrics;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Checks that `answer` is the line's recorded score, within the error of its tables' codec.
fn check(line: &str, answer: &Value) {
    let expected: Value = serde_json::from_str(line).unwrap();
    let difference = expected["score"].as_f64().unwrap() - answer["score"][0].as_f64().unwrap();
    assert!(difference.abs() < 0.01 && answer["status"]["fresh"].as_u64().unwrap() > 0, "{answer}");
}

#[test]
fn the_probe_set_is_checked() {
    let car = Car::new();
    assert!(car.daemon(&["check"]).status().unwrap().success());
    assert!(
        !car.daemon(&["check", "--tolerance", "0"]).status().unwrap().success(),
        "u8 rows are not exact"
    );
}

/// A sample of the probe set has values near the largest f32.
#[test]
fn a_probe_score_that_is_not_a_number_is_named() {
    let car = Car::new();
    let (model, flash) = (car.folder.path().join("coupon"), car.folder.path().join("without"));
    hatchback_tests::versions::copy(&repository("tools/demo/coupon"), &model);
    let mut lines = probe();
    let mut sample: Value = serde_json::from_str(&lines[3]).unwrap();
    sample["dense"].as_array_mut().unwrap().fill(3.4e38.into());
    lines[3] = sample.to_string();
    std::fs::write(model.join("probe.jsonl"), lines.join("\n")).unwrap();
    let bundle = car.folder.path().join("without.hatch");
    let job = PackJob::read(&model.join("model.toml"), Overrides::default()).unwrap();
    job.pack(None, &bundle, &mut |_, _| {}).unwrap();
    install(&bundle, &flash).unwrap();

    let flash = [flash.to_str().unwrap().to_owned()];
    let refused =
        car.daemon_on(&repository("targets/cpu.toml"), &flash, &["check"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("probe sample 3"), "{said}");
    assert!(said.contains("score[0] is NaN"), "{said}");
}

#[test]
fn many_connections_are_served_and_drained() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let lines = probe();
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                let mut connection = car.connect();
                lines.iter().for_each(|line| check(line, &ask(&mut connection, line)));
                let refused = ask(&mut connection, "{}");
                assert!(refused["error"].as_str().unwrap().contains("is missing"), "{refused}");
            });
        }
    });
    // After SIGTERM the socket is removed and the daemon ends, although callers are connected.
    let (_idle, mut asking) = (car.connect(), car.connect());
    check(&lines[0], &ask(&mut asking, &lines[0]));
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
    assert!(!car.socket().exists());
}

#[test]
fn a_daemon_whose_socket_was_removed_ends() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    std::fs::remove_file(car.socket()).unwrap();
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// A request to the model with this body, without an end.
fn head(content_length: usize) -> String {
    let start = format!("POST /v2/models/{MODEL}/infer HTTP/1.1\r\nhost: a\r\n");
    format!("{start}content-length: {content_length}\r\n\r\n")
}

#[test]
fn a_caller_that_does_not_read_cannot_keep_the_daemon_from_ending() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let client = car.connect();
    client.stream().set_write_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
    // Until first the answers, and then the requests, fill the socket's buffers.
    while client.stream().write_all(b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n").is_ok() {}
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn a_request_larger_than_its_limit_is_refused() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let mut client = car.connect();
    client.stream().write_all(head((4 << 20) + 1).as_bytes()).unwrap();
    let refused = client.receive().unwrap();
    assert_eq!(refused.code, 413, "{}", String::from_utf8_lossy(&refused.body));

    // Without a length the bytes are counted as they arrive.
    let mut client = car.connect();
    let head = head(0).replace("content-length: 0", "transfer-encoding: chunked");
    client.stream().write_all(head.as_bytes()).unwrap();
    let chunk = format!("{:x}\r\n{}\r\n", 1 << 20, " ".repeat(1 << 20));
    client.stream().set_write_timeout(Some(std::time::Duration::from_secs(9))).unwrap();
    let _ = (0..5).try_for_each(|_| client.stream().write_all(chunk.as_bytes()));
    assert_eq!(client.receive().unwrap().code, 413);

    // Headers have a limit of their own.
    let mut client = car.connect();
    let _ = client
        .stream()
        .write_all(format!("GET / HTTP/1.1\r\nx: {}", "a".repeat(70_000)).as_bytes());
    assert_eq!(client.receive().unwrap().code, 431);
    check(&probe()[0], &ask(&mut car.connect(), &probe()[0]));
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// The daemon accepts 256 connections. Connections that send nothing, send half a request or take
/// no answer make room for new ones, the longest silent first.
#[test]
fn silent_connections_make_room_for_new_ones() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let (line, mut good) = (&probe()[0], car.connect());
    check(line, &ask(&mut good, line));
    // A caller that sends requests until the socket's buffers are full and reads no answer.
    let greedy = car.connect();
    greedy.stream().set_write_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
    while greedy.stream().write_all(b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n").is_ok() {}

    let mut silent: Vec<Client> = Vec::new();
    for number in 0..600 {
        // An answer proves that the daemon has accepted the connection: a client that runs ahead
        // of the daemon would make `good` the one that was silent longest.
        let mut connection = car.connect();
        check(line, &ask(&mut connection, line));
        if number % 2 == 0 {
            connection.stream().write_all(&head(1000).as_bytes()[..40 + number / 20]).unwrap();
        }
        silent.push(connection);
        if number % 20 == 0 {
            check(line, &ask(&mut good, line));
        }
    }
    let mut new = car.connect();
    check(line, &ask(&mut new, line));
    check(line, &ask(&mut good, line));

    let is_closed = |client: &mut Client| {
        client.stream().set_nonblocking(true).unwrap();
        client.stream().read(&mut [0; 9]).is_ok_and(|bytes| bytes == 0)
    };
    assert!(silent[..300].iter_mut().all(is_closed), "the oldest are closed");
    assert!(!silent[500..].iter_mut().any(is_closed), "the newest are open");
    let broken = greedy.stream().write_all(b"GET").unwrap_err();
    assert_eq!(broken.kind(), std::io::ErrorKind::BrokenPipe, "the greedy caller is closed");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// Returns the most memory that the process had, bytes.
fn memory_bytes_max(daemon: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// All connections send most of a large request and never the rest. A good caller beside them gets
/// its scores, or is told when to retry.
#[test]
fn what_callers_make_the_daemon_keep_is_within_its_lines_of_the_budget() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let (line, mut good) = (&probe()[0], car.connect());
    check(line, &ask(&mut good, line));
    let before = memory_bytes_max(&daemon);

    let part = vec![b' '; 1 << 20];
    let mut refused = 0;
    let mut hostile: Vec<Client> = Vec::new();
    for _ in 0..300 {
        let client = car.connect();
        client.stream().set_write_timeout(Some(std::time::Duration::from_millis(20))).unwrap();
        let sent = client.stream().write_all(head(4 << 20).as_bytes());
        let _ = sent.and_then(|()| client.stream().write_all(&part));
        hostile.push(client);
        let answer = ask(&mut good, line);
        if answer["code"] == 503 {
            refused += 1;
            assert!(answer["error"].as_str().unwrap().contains("server.bytes_max"), "{answer}");
        } else {
            check(line, &answer);
        }
    }
    let grown = memory_bytes_max(&daemon).saturating_sub(before);
    let lines = ((256 * 128) << 10) + (16 << 20);
    println!("{grown} bytes more, of {lines}; {refused} of 300 good requests were refused");
    assert!(grown < lines, "{grown} bytes, and the lines of the budget have {lines}");

    drop(hostile);
    while ask(&mut good, line)["code"] == 503 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn callers_that_fail_in_a_loop_do_not_fill_the_log() {
    let car = Car::new();
    let log = car.folder.path().join("log");
    let mut command = car.serving();
    command.stderr(std::fs::File::create(&log).unwrap());
    let mut daemon = car.start(command);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                (0..1000).for_each(|_| {
                    let client = car.connect();
                    let _ = client.stream().write_all(b"{ HTTP\r\n\r\n");
                    // Until the daemon has read it: a daemon that stops accepts no connection.
                    let _ = client.stream().read_to_end(&mut Vec::new());
                })
            });
        }
    });
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
    let log = std::fs::read_to_string(log).unwrap();
    let lines = log.lines().filter(|line| line.contains("a connection ended early")).count();
    assert!((1..100).contains(&lines), "{lines} lines:\n{log}");
    assert!(log.contains(" more since the last such line"), "{log}");
}

/// The caller sends a byte from time to time and never ends its request.
#[test]
fn a_caller_that_never_ends_its_request_cannot_keep_the_daemon_from_ending() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let client = car.connect();
    client.stream().write_all(head(1 << 20).as_bytes()).unwrap();
    std::thread::scope(|scope| {
        let mut sending = client.stream();
        scope.spawn(move || {
            while sending.write_all(b" ").is_ok() {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        stop(&daemon);
        assert!(daemon.wait().unwrap().success());
    });
}

#[test]
fn the_socket_of_a_killed_daemon_is_taken_over() {
    let car = Car::new();
    let mut daemon = car.start(car.serving());
    // While the first daemon answers, a second one is refused, and the first continues.
    let refused = car.serving().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("another process answers on it"), "{said}");
    let (line, mut connection) = (&probe()[0], car.connect());
    check(line, &ask(&mut connection, line));

    daemon.kill().unwrap();
    daemon.wait().unwrap();
    assert!(car.socket().exists());
    let mut daemon = car.start(car.serving());
    let mut connection = car.connect();
    check(line, &ask(&mut connection, line));
    stop(&daemon);
    assert!(daemon.wait().unwrap().success() && !car.socket().exists());

    // A file of another kind at the socket's path stays.
    std::fs::write(car.socket(), "a letter").unwrap();
    let refused = car.serving().output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("of another kind"), "{said}");
    assert_eq!(std::fs::read(car.socket()).unwrap(), b"a letter");
}

#[test]
fn a_daemon_that_ends_leaves_the_socket_of_its_successor() {
    let car = Car::new();
    let mut first = car.start(car.serving());
    std::fs::remove_file(car.socket()).unwrap();
    let mut second = car.start(car.serving());
    stop(&first);
    assert!(first.wait().unwrap().success());
    let (line, mut connection) = (&probe()[0], car.connect());
    check(line, &ask(&mut connection, line));
    stop(&second);
    assert!(second.wait().unwrap().success());
}

/// Values near the largest f32 make the model's score NaN.
#[test]
fn a_score_that_is_not_a_number_is_an_error() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let (line, mut connection) = (&probe()[0], car.connect());
    let mut sample: Value = serde_json::from_str(line).unwrap();
    sample["dense"].as_array_mut().unwrap().fill(3.4e38.into());
    let answer = ask(&mut connection, &sample.to_string());
    let error = answer["error"].as_str().unwrap();
    assert!(
        error.starts_with(
            "sample 0: score[0] is NaN, as it is after an infinite value or an index out"
        ),
        "{answer}"
    );
    assert_eq!((answer["code"].as_u64(), answer.as_object().unwrap().len()), (Some(500), 2));
    // No caller can prevent such a score, so an alert must see it.
    let metrics = metrics_with(&car, "outcome=\"not_finite\"");
    assert!(metrics.contains("not_finite\"} 1"), "{metrics}");
    check(line, &ask(&mut connection, line));
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// What a newcomer's curl and Prometheus meet first.
#[test]
fn a_wrong_path_or_method_says_what_to_do_and_metrics_have_both_formats() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let ask = |method: &str, path: &str, header: &str| {
        let mut stream = UnixStream::connect(car.socket()).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n{header}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let close = "connection: close";
    for (method, path, status, said) in [
        ("GET", "/v2/models", "404", "POST /v2/repository/index lists the models"),
        ("GET", "/favicon.ico", "404", "no such path"),
        ("GET", "/v2/models/coupon-dlrm/infer", "405", "use the method POST"),
        ("POST", "/v2/models/coupon-dlrm/ready", "405", "use the method GET"),
        ("POST", "/metrics", "405", "use the method GET"),
        ("GET", "/v2/repository/index", "405", "use the method POST"),
    ] {
        let answer = ask(method, path, close);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        assert!(answer.contains(said) && answer.contains(path), "{answer}");
        let allow =
            said.rsplit_once("method ").map(|(_, method)| format!("\r\nallow: {method}\r\n"));
        assert!(allow.is_none_or(|allow| answer.contains(&allow)), "{answer}");
    }

    let metrics = metrics_with(&car, "hatchback_generation");
    for part in
        ["# TYPE hatchback_lookups_total counter\n", "hatchback_build_info{version=", "\nprocess_"]
    {
        assert!(metrics.contains(part), "{part}: {metrics}");
    }
    assert!(!metrics.contains("# EOF") && !metrics.contains("{}"), "{metrics}");
    let newer = ask("GET", "/metrics", &format!("accept: application/openmetrics-text\r\n{close}"));
    assert!(
        newer.contains("application/openmetrics-text") && newer.ends_with("# EOF\n"),
        "{newer}"
    );
    let mut promtool = Command::new("promtool");
    match promtool.args(["check", "metrics"]).stdin(Stdio::piped()).spawn() {
        Ok(mut checked) => {
            checked.stdin.take().unwrap().write_all(metrics.as_bytes()).unwrap();
            assert!(checked.wait().unwrap().success());
        }
        Err(_) => println!("SKIPPED: the form of the metrics: promtool is not installed"),
    }
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// Two of three models are wrong: both are named, and the right one is checked.
#[test]
fn a_check_names_every_model_that_fails() {
    let car = Car::new();
    let model = car.folder.path().join("bare");
    hatchback_tests::versions::copy(&repository("tools/demo/coupon"), &model);
    let spec = model.join("model.toml");
    let text = std::fs::read_to_string(&spec).unwrap();
    std::fs::write(&spec, text.split("[probe]").next().unwrap()).unwrap();
    let (bundle, flash) = (car.folder.path().join("bare.hatch"), car.folder.path().join("f"));
    let job = PackJob::read(&spec, Overrides::default()).unwrap();
    job.pack(None, &bundle, &mut |_, _| {}).unwrap();
    install(&bundle, &flash).unwrap();

    let bare = flash.display();
    let flash = [format!("a={bare}"), format!("b={}", car.flash()), format!("c={bare}")];
    let checked = car.daemon_on(&repository("targets/cpu.toml"), &flash, &["check"]).output();
    let checked = checked.unwrap();
    let said = String::from_utf8_lossy(&checked.stderr);
    assert_eq!(checked.status.code(), Some(1));
    for line in ["model `a`: the bundle has no probe set", "model `c`: the bundle", "`b`: 64 probe"]
    {
        assert!(said.contains(line), "{line}: {said}");
    }

    let arguments = ["check", "--json"];
    let checked = car.daemon_on(&repository("targets/cpu.toml"), &flash, &arguments).output();
    let checked = checked.unwrap();
    assert_eq!(checked.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&checked.stdout).unwrap();
    let of = |model: usize, field: &str| report["models"][model][field].clone();
    assert_eq!([0, 1, 2].map(|model| of(model, "name")), ["a", "b", "c"]);
    assert!(of(0, "error").as_str().unwrap().contains("no probe set"), "{report}");
    assert_eq!((of(1, "error"), of(1, "probe_samples")), (Value::Null, 64.into()));
    assert!(of(1, "probe_difference").as_f64().unwrap() < 0.01, "{report}");
    let sum = |model| {
        let memory = of(model, "memory");
        memory.as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum::<u64>()
    };
    assert_eq!((0..3).map(sum).sum::<u64>(), report["memory_bytes"].as_u64().unwrap());
}

#[test]
fn an_input_that_a_request_names_twice_is_refused() {
    let car = Car::new();
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &[car.flash()]);
    let (line, mut client) = (&probe()[0], car.connect());
    let body = String::from_utf8(request_of(line).unwrap()).unwrap();
    let weather = r#"{"name":"weather","datatype":"INT64","shape":[1,1],"data":[1]},"#;
    let twice = body.replacen("\"inputs\":[", &format!("\"inputs\":[{weather}"), 1);
    assert_ne!(body, twice);
    client.send(&format!("/v2/models/{MODEL}/infer"), Some(twice.as_bytes())).unwrap();
    let error = client.receive_score().unwrap()["error"].as_str().unwrap().to_owned();
    assert!(error.starts_with("input `weather`: occurs twice"), "{error}");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// One bit of both copies of a model's live record is flipped: its callers receive an error, others
/// are served.
#[test]
fn a_damaged_model_does_not_keep_others_from_being_served() {
    let car = Car::new();
    let damaged = car.folder.path().join("damaged");
    hatchback_tests::versions::copy(&car.folder.path().join("flash"), &damaged);
    for name in ["live.a", "live.b"] {
        let mut record = std::fs::read(damaged.join(name)).unwrap();
        let middle = record.len() / 2;
        record[middle] ^= 1;
        std::fs::write(damaged.join(name), record).unwrap();
    }
    let flash = [format!("damaged={}", damaged.display()), format!("whole={}", car.flash())];
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &flash);
    let (line, mut connection) = (&probe()[0], car.connect());
    check(line, &connection.ask("whole", line).unwrap());
    let refused = connection.ask("damaged", line).unwrap();
    assert_eq!(refused["error"], "no model `damaged` is served");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());

    // Alone, and without updates that could replace it, the damaged model keeps the daemon from
    // starting.
    let alone = car.daemon_on(
        &repository("targets/cpu.toml"),
        &flash[..1],
        &["serve", "--socket", "/nowhere"],
    );

    let said = { alone }.output().unwrap();
    assert!(
        !said.status.success() && String::from_utf8_lossy(&said.stderr).contains("damaged/live")
    );
}

/// Each segment is an open file, so the daemon raises its limit of open files to the allowed
/// maximum.
#[test]
fn the_limit_of_open_files_is_raised() {
    let car = Car::new();
    let daemon = car.daemon(&["serve", "--socket", car.socket().to_str().unwrap()]);
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "ulimit -Sn 64 && exec \"$0\" \"$@\""])
        .arg(daemon.get_program())
        .args(daemon.get_args());
    let mut daemon = crate::serve(&mut shell, &car.socket());
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.id())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let files: Vec<&str> = files.split_whitespace().collect();
    assert!(files[0] == files[1] && files[0] != "64", "{limits}");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
}

/// There is one slot, and its request waits for others to join its batch. The next request receives
/// `busy` immediately. Requests that were received before SIGTERM are answered.
#[test]
fn a_request_without_a_slot_is_busy_and_received_requests_are_answered() {
    let car = Car::new();
    let target = car.target("slots = 1\nworkers = 1\nbatch_delay_us_max = 300_000");
    let mut daemon = car.serve(&target, &[car.flash()]);
    let (line, mut first, mut second) = (&probe()[0], car.connect(), car.connect());
    loop {
        first.send_sample(MODEL, line).unwrap();
        let answer = ask(&mut second, line);
        if answer["code"] == 503 {
            break;
        }
        // The second request came before the first, or after its answer.
        check(line, &answer);
        first.receive_score().unwrap();
    }
    // The daemon has received the first request: it has the slot.
    stop(&daemon);
    check(line, &first.receive_score().unwrap());
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn several_models_are_served_by_name_within_one_budget() {
    let car = Car::new();
    let flash = ["left", "right"].map(|name| format!("{name}={}", car.flash()));
    let mut daemon = car.serve(&repository("targets/cpu.toml"), &flash);
    let (line, mut connection) = (&probe()[0], car.connect());
    for name in ["left", "right"] {
        check(line, &connection.ask(name, line).unwrap());
    }
    let refused = connection.ask("middle", line).unwrap();
    assert_eq!(refused["error"], "no model `middle` is served");
    stop(&daemon);
    assert!(daemon.wait().unwrap().success());
    // A budget for one model does not hold two.
    let target = car.target("memory_bytes_max = 20_000_000\nresident_bytes_max = 0");
    let check = |flash: &[String]| car.daemon_on(&target, flash, &["check"]).output().unwrap();
    assert!(check(&flash[..1]).status.success());
    let refused = String::from_utf8(check(&flash).stderr).unwrap();
    assert!(refused.contains("model `right`: memory_bytes_max = 20000000"), "{refused}");
}
