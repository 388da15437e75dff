//! The front door while flash stalls: every read of the simulated disk waits until the stall ends.
//! Requests with a deadline are answered before that. Connections with a request in work stay open
//! while other callers take every place.

use hatchback::model::budget::Budget;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Schema};
use hatchback_bench::daemon::caller::{Caller, Outcome, infer_request, on_event_loop};
use hatchback_server::proto::ModelInferResponse;
use hatchback_tests::client::{Client, request_of};
use hatchback_tests::front_door::{FrontDoor, RULES, serving};
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan, install_on};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::stall::Stall;
use hatchback_tools::pack::spec::CodecChoice;
use hyper::body::Bytes;
use prost::Message;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const LINE: &str = r#"{"dense": [0.5], "sparse": {"f0": [3]}}"#;
const DEADLINE: Duration = Duration::from_millis(30);
/// gRPC's status of a request without scores in time.
const DEADLINE_EXCEEDED: u32 = 4;

/// A model on flash that can stall, behind a front door.
struct Stalling {
    door: FrontDoor,
    stall: Arc<Stall>,
    schema: Schema,
}

impl Stalling {
    /// Serves a model whose only table has the policy `miss`.
    fn new(miss: MissPolicy) -> Self {
        let table = TablePlan::cached(KeySpace::Index, 5000, 64, CodecChoice::F32);
        let plan = ModelPlan {
            name: "stalls".to_owned(),
            sequence: 3,
            seed: 7,
            dense: 1,
            tables: vec![TablePlan { miss, ..table }],
            features: vec![FeaturePlan::one_hot(0)],
        };
        let packed = plan.pack();
        let stall = Arc::new(Stall::default());
        let disk = SimDisk::default().stalling(&stall).shared();
        let flash = install_on(&disk, Path::new("/flash"), &packed.bundle);
        let budget = Budget { cache_bytes_max: 64 << 10, workers: 1, ..Budget::default() };
        let door = FrontDoor::open(serving("m", &flash, budget), None).unwrap();
        Self { door, stall, schema: packed.schema }
    }

    fn message(&self, key: u64) -> Bytes {
        let sample = Sample { dense: vec![0.5], sparse: vec![vec![key]], ..Sample::default() };
        infer_request("m", &self.schema, &[sample]).unwrap()
    }

    /// Stalls flash, and sends `body` for scores. Returns once a worker has the request.
    fn stalled(&self, body: &[u8]) -> Client {
        self.stall.begin();
        let mut asking = Client::connect(&self.door.socket()).unwrap();
        asking.send("/v2/models/m/infer", Some(body)).unwrap();
        while self.door.serving.get("m").unwrap().stats().unwrap().requests == 0 {
            std::thread::yield_now();
        }
        asking
    }

    /// Asks for the score of `key` over gRPC. Returns its status, or the status of the refusal.
    fn ask(&self, key: u64, timeout: Option<Duration>) -> Result<[i32; 5], u32> {
        let outcome = on_event_loop(async {
            let mut caller = Caller::connect(&self.door.socket()).await?;
            caller.infer(self.message(key), timeout).await
        });
        match outcome.unwrap() {
            Outcome::Answered(message) => Ok(status_of(&message)),
            Outcome::Refused(refusal) => Err(refusal.status),
        }
    }
}

impl Drop for Stalling {
    fn drop(&mut self) {
        self.stall.end();
    }
}

/// Returns the numbers of the only sample's status.
fn status_of(message: &Bytes) -> [i32; 5] {
    let response = ModelInferResponse::decode(message.slice(5..)).unwrap();
    let at = response.outputs.iter().position(|output| output.name == "status").unwrap();
    let bytes = &response.raw_output_contents[at];
    std::array::from_fn(|n| i32::from_le_bytes(bytes[4 * n..4 * n + 4].try_into().unwrap()))
}

#[test]
fn a_table_that_waits_has_no_scores_by_the_deadline() {
    let model = Stalling::new(MissPolicy::Wait);
    assert_eq!(model.ask(1, None), Ok([1, 0, 0, 0, 0]));
    model.stall.begin();
    assert_eq!(model.ask(2, Some(DEADLINE)), Err(DEADLINE_EXCEEDED));

    let mut client = Client::connect(&model.door.socket()).unwrap();
    let us = DEADLINE.as_micros() as u64;
    let line = json!({"dense": [0.5], "sparse": {"f0": [3]}, "timeout_us": us}).to_string();
    let refused = client.ask("m", &line).unwrap();
    assert_eq!(refused["code"], 504, "{refused}");

    model.stall.end();
    assert_eq!(model.ask(2, None), Ok([1, 0, 0, 0, 0]));
}

#[test]
fn a_table_with_a_deadline_answers_with_default_rows_that_it_counts_as_late() {
    let model = Stalling::new(MissPolicy::Deadline);
    assert_eq!(model.ask(1, Some(Duration::from_secs(3600))), Ok([1, 0, 0, 0, 0]));
    // A worker may wake too late and leave the caller without scores.
    let late = (100..5000).find_map(|key| {
        model.stall.begin();
        let answer = model.ask(key, Some(DEADLINE));
        model.stall.end();
        assert!(answer.is_ok() || answer == Err(DEADLINE_EXCEEDED), "{answer:?}");
        answer.ok()
    });
    assert_eq!(late, Some([0, 1, 0, 0, 1]));
    assert_eq!(model.ask(2, None), Ok([1, 0, 0, 0, 0]));
}

/// A hot car serves one request at a time. Keys to prefetch make reads as a request does.
#[test]
fn a_car_that_sheds_load_takes_no_keys_beside_its_one_request() {
    let model = Stalling::new(MissPolicy::Wait);
    let mut client = Client::connect(&model.door.socket()).unwrap();
    let mut prefetch = || {
        client.send("/v2/models/m/prefetch", Some(&request_of(LINE).unwrap())).unwrap();
        client.receive().unwrap().code
    };
    model.door.gate.limit(true);
    let mut asking = model.stalled(&request_of(LINE).unwrap());
    assert_eq!(prefetch(), 503);
    model.stall.end();
    assert!(asking.receive_score().unwrap()["score"].is_array());
    assert_eq!(prefetch(), 200);
}

/// The answer names them, so they stay in memory until it is sent.
#[test]
fn the_names_of_ignored_inputs_are_counted_while_their_request_waits() {
    let model = Stalling::new(MissPolicy::Wait);
    let mut body: Value = serde_json::from_slice(&request_of(LINE).unwrap()).unwrap();
    let names: Vec<String> = (0..1000).map(|number| format!("{number:0240}")).collect();
    let others = names.iter().map(|name| {
        json!({"name": name, "datatype": "", "shape": [], "data": [],
            "parameters": {"optional": true}})
    });
    body["inputs"].as_array_mut().unwrap().extend(others);
    let mut asking = model.stalled(body.to_string().as_bytes());

    let mut client = Client::connect(&model.door.socket()).unwrap();
    // A load makes a new status, also if there is no such model.
    client.send("/v2/repository/models/none/load", Some(b"")).unwrap();
    assert_eq!(client.receive().unwrap().code, 404);
    let status = client.get("/status").unwrap().body;
    let status: Value = serde_json::from_slice(&status).unwrap();
    assert!(status["server_bytes"].as_u64().unwrap() > 240_000, "{status}");
    model.stall.end();
    let answer: Value = serde_json::from_slice(&asking.receive().unwrap().body).unwrap();
    assert_eq!(answer["parameters"]["ignored_inputs"], names.join(","));
}

#[test]
fn a_connection_with_a_request_or_an_unload_in_work_makes_no_room() {
    let model = Stalling::new(MissPolicy::Wait);
    let (socket, serving) = (model.door.socket(), &model.door.serving);
    let wait_until = |is_so: &dyn Fn() -> bool| {
        while !is_so() {
            std::thread::yield_now();
        }
    };
    let mut asking = model.stalled(&request_of(LINE).unwrap());
    let mut unloading = Client::connect(&socket).unwrap();
    unloading.send("/v2/repository/models/m/unload", Some(b"{}")).unwrap();
    wait_until(&|| serving.names().is_empty());

    // Each new caller is answered, so that it had a place.
    let mut crowd = Vec::new();
    for _ in 0..3 * RULES.connections_max {
        let mut client = Client::connect(&socket).unwrap();
        assert_eq!(client.get("/v2/health/live").unwrap().code, 200);
        crowd.push(client);
    }
    model.stall.end();
    assert!(asking.receive_score().unwrap()["score"].is_array());
    assert_eq!(unloading.receive().unwrap().code, 200);
}
