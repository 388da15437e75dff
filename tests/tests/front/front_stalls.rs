//! The front door while flash stalls: every read of the simulated disk waits until the stall ends.
//! Requests with a deadline are answered before that. Connections with a request in work stay open
//! while other callers take every place.

use hatchback::model::budget::Budget;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Schema};
use hatchback_bench::daemon::caller::{Caller, Outcome, infer_request, on_event_loop};
use hatchback_server::proto::ModelInferResponse;
use hatchback_tests::client::Client;
use hatchback_tests::front_door::{FrontDoor, RULES, serving};
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan, install_on};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::stall::Stall;
use hatchback_tools::pack::spec::CodecChoice;
use hyper::body::Bytes;
use prost::Message;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

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

#[test]
fn a_connection_with_a_request_or_an_unload_in_work_makes_no_room() {
    let model = Stalling::new(MissPolicy::Wait);
    let (socket, serving) = (model.door.socket(), &model.door.serving);
    let wait_until = |is_so: &dyn Fn() -> bool| {
        while !is_so() {
            std::thread::yield_now();
        }
    };
    model.stall.begin();
    let mut asking = Client::connect(&socket).unwrap();
    asking.send_sample("m", r#"{"dense": [0.5], "sparse": {"f0": [3]}}"#).unwrap();
    wait_until(&|| serving.get("m").unwrap().stats().unwrap().requests == 1);
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
