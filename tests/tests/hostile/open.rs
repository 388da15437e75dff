//! The front door that hostile callers attack, and what each of them sends.

use hatchback::model::budget::Budget;
use hatchback::schema::KeySpace;
use hatchback_server::Listener;
use hatchback_server::proto::{InferInputTensor, ModelInferRequest};
use hatchback_tests::client::Client;
use hatchback_tests::front_door::{FrontDoor, TOKEN, serving};
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan, install_on};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tools::pack::spec::CodecChoice;
use prost::Message;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub const SAMPLE: &str = r#"{"dense": [0.5], "sparse": {"f0": [3]}}"#;
pub const SERVICE: &str = "/inference.GRPCInferenceService/";

/// A front door with the model `m`, on a Unix socket and on a port of the loopback device.
pub struct Open {
    pub door: FrontDoor,
    pub address: SocketAddr,
}

impl Open {
    pub fn new() -> Self {
        Self::with_token(TOKEN)
    }

    pub fn with_token(token: &str) -> Self {
        let plan = ModelPlan {
            name: "callers".to_owned(),
            sequence: 3,
            seed: 7,
            dense: 1,
            tables: vec![TablePlan::cached(KeySpace::Index, 5000, 16, CodecChoice::F32)],
            features: vec![FeaturePlan::one_hot(0)],
        };
        let disk = SimDisk::default().shared();
        let flash = install_on(&disk, Path::new("/flash"), &plan.pack().bundle);
        let serving = serving("m", &flash, Budget { workers: 1, ..Budget::default() });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let listener = Some(Listener::Tcp(listener));
        let door = FrontDoor::start(serving, listener, token, Vec::new()).unwrap();
        Self { door, address }
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.door.socket()).unwrap()
    }

    pub fn unix(&self) -> UnixStream {
        UnixStream::connect(self.door.socket()).unwrap()
    }

    /// Sends the only request of a connection on the port. Returns the bytes of its answer.
    pub fn exchange(&self, head: &str, body: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let end = format!("connection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        // A front door that refuses the head need not read the body.
        let _ = stream.write_all(&[head.as_bytes(), end.as_bytes(), body].concat());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    /// Calls `method` of gRPC over HTTP/1.1, with further lines of the head.
    pub fn call(&self, method: &str, lines: &str, message: &impl Message) -> Vec<u8> {
        let start =
            format!("POST {SERVICE}{method} HTTP/1.1\r\ncontent-type: application/grpc\r\n");
        self.exchange(&(start + lines), &framed(message))
    }

    /// Returns the bytes that requests and answers hold, as the status said in its last second.
    pub fn bytes(&self) -> u64 {
        let status = self.client().get("/status").unwrap().body;
        let status: Value = serde_json::from_slice(&status).unwrap();
        status["server_bytes"].as_u64().unwrap()
    }
}

pub const LOCAL: &str = "host: localhost\r\n";

pub fn framed(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    [&[0], &(bytes.len() as u32).to_be_bytes()[..], &bytes].concat()
}

/// A request for scores of the model `m` over gRPC.
pub fn infer() -> ModelInferRequest {
    let input = |name: &str, datatype: &str| InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: vec![1, 1],
        ..Default::default()
    };
    ModelInferRequest {
        model_name: "m".to_owned(),
        inputs: vec![input("dense", "FP32"), input("f0", "INT64")],
        raw_input_contents: vec![vec![0; 4].into(), vec![0; 8].into()],
        ..Default::default()
    }
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
