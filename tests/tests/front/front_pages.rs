//! What every caller may read: the status page, and the metrics that dashboard and alerts use.

use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::share::Urgency;
use hatchback::model::budget::Budget;
use hatchback::request::explain::explain;
use hatchback::{Program, Serving};
use hatchback_bench::daemon::caller::{Caller, Outcome, on_event_loop};
use hatchback_server::ModelFolder;
use hatchback_server::proto::{ModelInferRequest, ModelInferResponse};
use hatchback_tests::client::Client;
use hatchback_tests::front_door::{FrontDoor, TOKEN, serving};
use hatchback_tests::models::{install, install_spec};
use hatchback_tests::versions::{Kind, Versions};
use hyper::body::Bytes;
use prost::Message;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::Write;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

const ALERTS: &str = include_str!("../../../server/monitoring/alerts.yml");
const DASHBOARD: &str = include_str!("../../../server/monitoring/dashboard.json");

pub fn open() -> FrontDoor {
    open_with(Budget { workers: 1, ..Budget::default() })
}

/// Opens a front door whose model has this budget.
pub fn open_with(budget: Budget) -> FrontDoor {
    let installed = install_spec("tools/demo/coupon/model.toml", None, None);
    let flash = Flash::open(&disk::system(), &installed.flash).unwrap();
    FrontDoor::open(serving("coupon", &flash, budget), None).unwrap()
}

pub fn get(door: &FrontDoor, path: &str) -> String {
    let mut client = Client::connect(&door.socket()).unwrap();
    String::from_utf8(client.get(path).unwrap().body).unwrap()
}

/// Posts `body`. Returns the code and the JSON of the answer.
pub fn post(door: &FrontDoor, path: &str, body: &str) -> (u16, Value) {
    let mut client = Client::connect(&door.socket()).unwrap();
    client.send(path, Some(body.as_bytes())).unwrap();
    let answer = client.receive().unwrap();
    (answer.code, serde_json::from_slice(&answer.body).unwrap())
}

/// Asks over gRPC. Returns the answer, or the text of the refusal.
pub fn infer(door: &FrontDoor, request: &ModelInferRequest) -> Result<ModelInferResponse, String> {
    let message = request.encode_to_vec();
    let framed = [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat();
    let outcome = on_event_loop(async {
        Caller::connect(&door.socket()).await?.infer(Bytes::from(framed), None).await
    });
    match outcome.unwrap() {
        Outcome::Answered(bytes) => Ok(ModelInferResponse::decode(bytes.slice(5..)).unwrap()),
        Outcome::Refused(refusal) => Err(refusal.message),
    }
}

/// A caller asks for version 1 while version 2 replaces it. No answer has scores of version 2.
#[test]
fn a_version_that_the_caller_names_answers_or_nothing_does() {
    let versions = Versions::of(Kind::default(), &[12], 100, 3);
    let (folder, budget) = (tempfile::tempdir().unwrap(), Budget::default());
    let flash = install(folder.path(), &versions.snapshots[0]);
    let serving = Serving::new(1 << 30, 64, Arc::new(SystemClock::default())).stepped();
    let served = serving.load("m", &flash, budget).unwrap();
    let door = FrontDoor::open(serving, None).unwrap();

    let input =
        |name: &str| json!({"name": name, "datatype": "INT64", "shape": [1, 1], "data": [0]});
    let body = json!({"inputs": [input("f0"), input("f1")]}).to_string();
    let is_waiting = || served.stats().is_some_and(|stats| stats.waiting > 0);
    let answers = std::thread::scope(|scope| {
        let asking = RefCell::new(Vec::new());
        let ask = |urgency| {
            if urgency == Urgency::Awaited && !is_waiting() {
                asking
                    .borrow_mut()
                    .push(scope.spawn(|| post(&door, "/v2/models/m/versions/1/infer", &body)));
                while !is_waiting() {
                    std::thread::yield_now();
                }
            }
        };
        // The request that finds its rows, so that the swap has cached rows to remove.
        ask(Urgency::Awaited);
        while served.step() {}
        door.serving.swap("m", &install(folder.path(), &versions.deltas[1]), budget, &ask).unwrap();
        while served.step() {}
        asking.into_inner().into_iter().map(|asked| asked.join().unwrap()).collect::<Vec<_>>()
    });
    for (code, answer) in &answers {
        match code {
            200 => assert_eq!(answer["model_version"], "1"),
            _ => assert_eq!(
                (*code, &answer["error"]),
                (404, &json!("model `m` serves version 2, not `1`"))
            ),
        }
    }
    let codes = answers.iter().map(|(code, _)| *code).collect::<BTreeSet<_>>();
    assert_eq!(codes, BTreeSet::from([200, 404]));
}

#[test]
fn the_page_is_small_and_needs_nothing_from_elsewhere() {
    let page = get(&open(), "/");
    assert!(page.contains("<script>") && page.len() < 100_000, "{} bytes", page.len());
    for outside in ["http://", "https://", "//cdn", "@import", "src="] {
        assert!(!page.contains(outside), "{outside}");
    }
}

/// Returns the names of metrics in `text`, without what a query adds to them.
fn names(text: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '_';
    let ends = ["_total", "_bucket", "_count", "_sum"];
    let name = |rest: &str| {
        let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        let name = &rest[..end];
        ends.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name).to_owned()
    };
    text.split("hatchback_").skip(1).map(name).collect()
}

#[test]
fn every_metric_of_the_dashboard_and_the_alerts_exists() {
    let text = get(&open(), "/metrics");
    let known: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# HELP hatchback_")?.split(' ').next())
        // The text format 0.0.4 describes a counter by its whole name.
        .map(|name| name.strip_suffix("_total").unwrap_or(name).to_owned())
        .collect();
    for (file, text) in [("alerts.yml", ALERTS), ("dashboard.json", DASHBOARD)] {
        let used = names(text);
        assert!(used.len() > 5, "{file}: {used:?}");
        let missing: Vec<_> = used.difference(&known).collect();
        assert!(missing.is_empty(), "{file}: {missing:?} are not in {known:?}");
    }
    serde_json::from_str::<serde_json::Value>(DASHBOARD).unwrap();
}

/// Cars share one Prometheus. `promtool test rules alerts_test.yml` runs the rules with two.
#[test]
fn every_rule_and_panel_compares_the_series_of_one_instance() {
    for line in ALERTS.lines() {
        assert!(!line.contains("absent("), "another car's series would silence it: {line}");
        let is_grouped = ["by (", "on ("].iter().any(|word| line.contains(word));
        assert!(!is_grouped || line.contains("(instance"), "{line}");
    }
    let summaries: Vec<&str> = ALERTS.lines().filter(|line| line.contains("summary:")).collect();
    assert!(summaries.iter().all(|line| line.contains("$labels.instance")), "{summaries:?}");
    let expressions: Vec<&str> =
        DASHBOARD.lines().filter(|line| line.contains("\"expr\"")).collect();
    assert!(expressions.len() > 20);
    for line in expressions {
        let series = line.matches("hatchback_").count();
        assert_eq!(line.matches("instance=~").count(), series, "{line}");
    }

    match std::process::Command::new("promtool")
        .args(["test", "rules", "alerts_test.yml"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../server/monitoring"))
        .output()
    {
        Ok(tested) => assert!(tested.status.success(), "{tested:?}"),
        Err(_) => println!("SKIPPED: the alert rules with two cars: promtool is not installed"),
    }
}

/// Asks for OpenMetrics, as Prometheus does.
fn open_metrics(door: &FrontDoor) -> String {
    let mut client = Client::connect(&door.socket()).unwrap();
    let accept = "accept: application/openmetrics-text; version=1.0.0";
    let head = format!("GET /metrics HTTP/1.1\r\nhost: localhost\r\n{accept}\r\n\r\n");
    client.stream().write_all(head.as_bytes()).unwrap();
    String::from_utf8(client.receive().unwrap().body).unwrap()
}

#[test]
fn the_process_describes_itself_in_both_formats() {
    let door = open();
    let version = &Program::this().version;
    let (text, openmetrics) = (get(&door, "/metrics"), open_metrics(&door));
    assert!(text.contains(&format!("hatchback_build_info{{version=\"{version}\"}} 1")), "{text}");
    for name in ["process_cpu_seconds_total", "process_max_fds", "process_open_fds"] {
        assert!(text.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}: {text}");
    }
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse::<f64>().unwrap()
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((0.0..86_400.0).contains(&(now - value("process_start_time_seconds"))));
    assert!(value("process_resident_memory_bytes") > 1e5);

    // In the older format a counter has the name of its sample, and nothing marks the end.
    assert!(openmetrics.ends_with("# EOF\n") && !text.contains("# EOF"), "{text}");
    let kinds = openmetrics.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let mut counters = 0;
    for kind in kinds {
        let older = match kind.strip_suffix(" counter") {
            Some(name) => format!("# TYPE {name}_total counter"),
            None => format!("# TYPE {kind}"),
        };
        counters += usize::from(kind.ends_with(" counter"));
        assert!(text.lines().any(|line| line == older), "{older}: {text}");
    }
    assert!(counters > 10, "{counters}");
    let samples = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(samples(&openmetrics), samples(&text));
}

#[test]
fn what_callers_send_adds_no_label() {
    let door = open();
    let mut client = Client::connect(&door.socket()).unwrap();
    client.send("/v2/models/evil/infer", Some(br#"{"inputs": []}"#)).unwrap();
    assert_eq!(client.receive().unwrap().code, 404);
    let line = "hatchback_requests_total{model=\"\",protocol=\"http\",outcome=\"not_found\"} 1";
    // The metrics are made once a second.
    let text = loop {
        let text = get(&door, "/metrics");
        if text.contains(line) {
            break text;
        }
        std::thread::yield_now();
    };
    assert!(!text.contains("evil"), "{text}");
}

/// The folders of models are listed first, and [`FrontDoor`] lets no serving thread do that.
#[test]
fn the_owner_gets_an_explanation_from_no_serving_thread_and_the_model_does_nothing() {
    let installed = install_spec("tools/demo/coupon/model.toml", None, None);
    let flash = Flash::open(&disk::system(), &installed.flash).unwrap();
    let serving = serving("coupon", &flash, Budget { workers: 1, ..Budget::default() });
    let folder = ModelFolder { name: "coupon".to_owned(), directory: installed.flash.clone() };
    let door = FrontDoor::start(serving, None, TOKEN, vec![folder]).unwrap();

    let samples = include_str!("../../../tools/demo/coupon/heldout.jsonl");
    for line in samples.lines().take(5) {
        let (code, answer) = post(&door, "/v2/models/coupon/versions/1/explain", line);
        let expected = serde_json::to_string(&explain(&flash, line).unwrap()).unwrap();
        assert_eq!((code, answer), (200, serde_json::from_str(&expected).unwrap()));
    }
    for (path, line, code, said) in [
        ("/v2/models/coupon/explain", "{", 400, "EOF"),
        ("/v2/models/coupon/explain", "{\"dense\":[1]}", 400, "dense: 1 values"),
        ("/v2/models/coupon/versions/2/explain", "{}", 404, "serves version 1"),
        ("/v2/models/closed/explain", "{}", 404, "closed"),
    ] {
        let (got, answer) = post(&door, path, line);
        let error = answer["error"].as_str().unwrap();
        assert!(got == code && error.contains(said), "{path}: {got} {error}");
    }
    assert_eq!(door.serving.get("coupon").unwrap().stats().unwrap().counters.lookups, 0);
}
