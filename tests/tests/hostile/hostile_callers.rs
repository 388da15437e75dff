//! Hostile callers of the front door: texts of megabytes, names of other hosts, changes without the
//! right, connections that hold what they can, and floods of frames. The frames of HTTP/2 are
//! written by hand, because no client sends such ones. A good caller is answered beside them.

use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::model::budget::Budget;
use hatchback::schema::KeySpace;
use hatchback_server::Listener;
use hatchback_server::proto::reflection::server_reflection_request::MessageRequest;
use hatchback_server::proto::reflection::server_reflection_response::MessageResponse;
use hatchback_server::proto::reflection::{ServerReflectionRequest, ServerReflectionResponse};
use hatchback_server::proto::{
    HEALTH_CHECK, HealthCheckRequest, HealthCheckResponse, InferInputTensor, InferParameter,
    InferRequestedOutputTensor, ModelInferRequest, ModelRequest, NOT_SERVING, ParameterValue,
    REFLECTION, RepositoryIndexRequest, RepositoryModelRequest, SERVING,
};
use hatchback_tests::client::{Client, request_of};
use hatchback_tests::front_door::{FrontDoor, RULES, TOKEN, serving};
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tools::pack::spec::CodecChoice;
use prost::Message;
use serde_json::{Value, json};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const SAMPLE: &str = r#"{"dense": [0.5], "sparse": {"f0": [3]}}"#;
const SERVICE: &str = "/inference.GRPCInferenceService/";

/// A front door with the model `m`, on a Unix socket and on a port of the loopback device.
struct Open {
    door: FrontDoor,
    address: SocketAddr,
}

impl Open {
    fn new() -> Self {
        Self::with_token(TOKEN)
    }

    fn with_token(token: &str) -> Self {
        let plan = ModelPlan {
            name: "callers".to_owned(),
            sequence: 3,
            seed: 7,
            dense: 1,
            tables: vec![TablePlan::cached(KeySpace::Index, 5000, 16, CodecChoice::F32)],
            features: vec![FeaturePlan::one_hot(0)],
        };
        let (packed, disk) = (plan.pack(), SimDisk::default().shared());
        let mut bundle = BundleReader::open(&packed.bundle).unwrap();
        let flash = Flash::install(&disk, Path::new("/flash"), &mut bundle, |_| ()).unwrap();
        let budget = Budget { workers: 1, ..Budget::default() };
        let serving = serving(budget);
        serving.load("m", &flash, budget).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let listener = Some(Listener::Tcp(listener));
        let door = FrontDoor::open_with_token(serving, listener, token).unwrap();
        Self { door, address }
    }

    fn client(&self) -> Client {
        Client::connect(&self.door.socket()).unwrap()
    }

    fn unix(&self) -> UnixStream {
        UnixStream::connect(self.door.socket()).unwrap()
    }

    /// Sends the only request of a connection on the port. Returns the bytes of its answer.
    fn exchange(&self, head: &str, body: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let end = format!("connection: close\r\ncontent-length: {}\r\n\r\n", body.len());
        // A front door that refuses the head need not read the body.
        let _ = stream.write_all(&[head.as_bytes(), end.as_bytes(), body].concat());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    /// Calls `method` of gRPC over HTTP/1.1, with further lines of the head.
    fn call(&self, method: &str, lines: &str, message: &impl Message) -> Vec<u8> {
        let start =
            format!("POST {SERVICE}{method} HTTP/1.1\r\ncontent-type: application/grpc\r\n");
        self.exchange(&(start + lines), &framed(message))
    }

    /// Returns the bytes that requests and answers hold, as the status said in its last second.
    fn bytes(&self) -> u64 {
        let status = self.client().get("/status").unwrap().body;
        let status: Value = serde_json::from_slice(&status).unwrap();
        status["server_bytes"].as_u64().unwrap()
    }
}

const LOCAL: &str = "host: localhost\r\n";

fn framed(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    [&[0], &(bytes.len() as u32).to_be_bytes()[..], &bytes].concat()
}

/// A request for scores of the model `m` over gRPC.
fn infer() -> ModelInferRequest {
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

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_health_check_knows_the_server_and_its_service_and_no_other() {
    let open = Open::new();
    let check = |service: &str| {
        let head =
            format!("POST {HEALTH_CHECK} HTTP/1.1\r\ncontent-type: application/grpc\r\n{LOCAL}");
        let service = service.to_owned();
        open.exchange(&head, &framed(&HealthCheckRequest { service }))
    };
    let holds = |answer: &[u8], message: &HealthCheckResponse| {
        let message = framed(message);
        answer.windows(message.len()).any(|bytes| bytes == message)
    };
    for service in ["", "inference.GRPCInferenceService"] {
        let answer = check(service);
        assert!(holds(&answer, &HealthCheckResponse { status: SERVING }), "{}", text(&answer));
    }
    assert!(text(&check("other")).contains("grpc-status: 5\r\n"));
    let watch = HEALTH_CHECK.replace("Check", "Watch");
    let head = format!("POST {watch} HTTP/1.1\r\ncontent-type: application/grpc\r\n{LOCAL}");
    assert!(text(&open.exchange(&head, &framed(&infer()))).contains("grpc-status: 12\r\n"));
    open.door.serving.unload("m").unwrap();
    assert!(holds(&check(""), &HealthCheckResponse { status: NOT_SERVING }));
}

/// The caller keeps its stream open, as clients of reflection do.
#[test]
fn a_caller_reads_the_services_and_their_messages_from_the_server() {
    let open = Open::new();
    let ask_at = |path: &str, request: MessageRequest| {
        let mut stream = TcpStream::connect(open.address).unwrap();
        Frames::begin(&stream, 1 << 20);
        let headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ];
        let message_request = Some(request);
        let message = ServerReflectionRequest { message_request, ..Default::default() };
        let head = frame(HEADERS, END_HEADERS, 1, &block(&headers, &[]));
        stream.write_all(&[head, frame(DATA, 0, 1, &framed(&message))].concat()).unwrap();
        let answer = answer_of(&stream).unwrap();
        ServerReflectionResponse::decode(&answer[5..]).unwrap().message_response.unwrap()
    };
    let ask = |request| ask_at(REFLECTION[0], request);
    let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices("*".into()))
    else {
        panic!("no list")
    };
    let names: Vec<&str> = list.service.iter().map(|service| service.name.as_str()).collect();
    let reflection = REFLECTION[0].trim_matches('/').split('/').next().unwrap();
    let expected = ["inference.GRPCInferenceService", "grpc.health.v1.Health", reflection];
    assert_eq!(names, expected);
    let older = ask_at(REFLECTION[1], MessageRequest::ListServices("*".into()));
    assert_eq!(older, MessageResponse::ListServicesResponse(list.clone()));

    let file = |request| match ask(request) {
        MessageResponse::FileDescriptorResponse(file) => Ok(file.file_descriptor_proto),
        other => Err(other),
    };
    let by_name = file(MessageRequest::FileByFilename("open_inference.proto".into())).unwrap();
    for symbol in [names[0], "inference.GRPCInferenceService.ModelInfer", "inference.DataType"] {
        let found = file(MessageRequest::FileContainingSymbol(symbol.into())).unwrap();
        assert_eq!(found, by_name, "{symbol}");
    }
    assert_eq!(by_name[0], fs::read("../server/proto/open_inference.bin").unwrap());
    for symbol in ["inference", "inference.None", "other.Service", ""] {
        let refused = file(MessageRequest::FileContainingSymbol(symbol.into())).unwrap_err();
        let MessageResponse::ErrorResponse(refused) = refused else { panic!("{symbol}") };
        assert_eq!(refused.error_code, 5, "{symbol}");
    }
}

#[test]
fn long_paths_and_compressed_bodies_are_refused_by_name() {
    let open = Open::new();
    let ask = |line: &str, more: &str| {
        let answer = open.exchange(&format!("{line} HTTP/1.1\r\n{LOCAL}{more}"), b"{}");
        String::from_utf8_lossy(&answer).into_owned()
    };
    let answer = ask(&format!("GET /{}", "a/".repeat(4000)), "");
    assert!(answer.contains("a path has at most"), "{answer}");
    let answer = ask("POST /v2/models/m/infer", "content-encoding: gzip\r\n");
    assert!(answer.contains("send the body uncompressed"), "{answer}");
}

#[test]
fn a_time_limit_is_a_number_with_a_unit_or_a_parameter_that_is_an_integer() {
    let open = Open::new();
    let status = |lines: &str, value: Option<ParameterValue>| {
        let mut request = infer();
        let parameter = InferParameter { parameter_choice: value.clone() };
        request.parameters.extend(value.map(|_| ("timeout".to_owned(), parameter)));
        let answer = text(&open.call("ModelInfer", &format!("{LOCAL}{lines}"), &request));
        let status = answer.split_once("grpc-status: ").and_then(|(_, rest)| rest.split_once('\r'));
        status.map(|(status, _)| status.to_owned())
    };
    for time in ["10S", "60000m", "99999999u", "99999999H"] {
        assert_eq!(status(&format!("grpc-timeout: {time}\r\n"), None), None, "{time}");
    }
    for time in ["", "S", "1", "123456789S", "-1S", "1.5S", "1x", "\u{e9}"] {
        let found = status(&format!("grpc-timeout: {time}\r\n"), None);
        assert_eq!(found.as_deref(), Some("3"), "{time}");
    }
    assert_eq!(status("grpc-timeout: 0n\r\n", None).as_deref(), Some("4"));

    let with = |value| status("", Some(value));
    for value in [ParameterValue::Int64Param(0), ParameterValue::Uint64Param(u64::MAX)] {
        assert_eq!(with(value), None);
    }
    assert_eq!(with(ParameterValue::Int64Param(1)).as_deref(), Some("4"));
    for value in [ParameterValue::Int64Param(-1), ParameterValue::StringParam("1".to_owned())] {
        assert_eq!(with(value).as_deref(), Some("3"));
    }
}

#[test]
fn a_body_is_exactly_one_message() {
    let open = Open::new();
    let head =
        format!("POST {SERVICE}ServerLive HTTP/1.1\r\ncontent-type: application/grpc\r\n{LOCAL}");
    let ask = |body: &[u8]| text(&open.exchange(&head, body));
    assert!(!ask(b"\0\0\0\0\0").contains("grpc-status"));
    for body in [&b""[..], b"\0\0\0\0", b"\0\0\0\0\x03ab", b"\0\0\0\0\x01ab"] {
        assert!(ask(body).contains("grpc-status: 3\r\n"), "{body:?}");
    }
    assert!(ask(b"\x01\0\0\0\0").contains("grpc-status: 12\r\n"), "compressed");
}

#[test]
fn no_answer_shows_more_than_a_short_part_of_a_callers_text() {
    let open = Open::new();
    let (long, head) = ("\u{1}".repeat(1 << 20), "a".repeat(8000));
    let with = |change: &dyn Fn(&mut ModelInferRequest)| {
        let mut request = infer();
        change(&mut request);
        open.call("ModelInfer", LOCAL, &request)
    };
    let model = ModelRequest { name: long.clone(), version: String::new() };
    let version = ModelRequest { name: "m".to_owned(), version: long.clone() };
    let output = InferRequestedOutputTensor { name: long.clone(), ..Default::default() };
    let load = RepositoryModelRequest { model_name: long[..9000].to_owned(), ..Default::default() };
    let owner = format!("{LOCAL}authorization: Bearer {TOKEN}\r\n");
    let http = |start: &str, lines: &str, body: &Value| {
        open.exchange(&format!("{start} HTTP/1.1\r\n{LOCAL}{lines}"), body.to_string().as_bytes())
    };
    let to_model = |body: Value| http("POST /v2/models/m/infer", "", &body);
    let input = |name: &str, datatype: &str, data: Value| {
        json!({"inputs": [{"name": name,
        "datatype": datatype, "shape": [1, 1], "data": data}]})
    };
    let sides = vec![1; 1 << 18];

    let answers = [
        with(&|request| request.model_name.clone_from(&long)),
        with(&|request| request.model_version.clone_from(&long)),
        with(&|request| request.id.clone_from(&long)),
        with(&|request| request.inputs[0].name.clone_from(&long)),
        with(&|request| request.inputs[0].datatype.clone_from(&long)),
        with(&|request| request.outputs = vec![output.clone()]),
        open.call("ModelMetadata", LOCAL, &model),
        open.call("ModelStatistics", LOCAL, &version),
        open.call("RepositoryModelUnload", &owner, &load),
        open.call(&head, LOCAL, &model),
        open.call("ModelInfer", &format!("host: {head}\r\n"), &infer()),
        open.call("ModelInfer", &format!("{LOCAL}grpc-timeout: {head}\r\n"), &infer()),
        http(&format!("GET /{head}"), "", &Value::Null),
        http(&format!("GET /v2/models/{}", &head[..300]), "", &Value::Null),
        http(&format!("{} /", &head[..900]), "", &Value::Null),
        http(&format!("GET /v2/models/m/versions/{}", &head[..250]), "", &Value::Null),
        http(&format!("POST /actions/{}/m", &head[..250]), &owner[LOCAL.len()..], &Value::Null),
        http("POST /v2/models/m/infer", &format!("content-encoding: {head}\r\n"), &Value::Null),
        http("GET /v2", &format!("inference-header-content-length: {head}\r\n"), &Value::Null),
        http("GET /v2", &format!("traceparent: {head}\r\n"), &Value::Null),
        to_model(json!({"inputs": long.clone()})),
        to_model(json!({"id": long.clone(), "inputs": []})),
        to_model(json!({"inputs": [], "outputs": [{"name": long.clone()}]})),
        to_model(input(&long, "FP32", json!([1]))),
        to_model(input("dense", &long, json!([1]))),
        to_model(input("f0", "BYTES", json!([long.clone()]))),
        to_model(json!({"inputs": [{"name": "dense", "datatype": "FP32", "shape": sides,
            "data": [1]}]})),
    ];
    for (number, answer) in answers.iter().enumerate() {
        let start = text(&answer[..answer.len().min(2000)]);
        assert!((20..2000).contains(&answer.len()), "{number}: {} bytes: {start}", answer.len());
    }
}

/// Frames of HTTP/2, written and read by hand.
struct Frames {
    stream: UnixStream,
    next: u32,
}

/// The kinds of frames that the tests use.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = &(payload.len() as u32).to_be_bytes()[1..];
    [length, &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Appends a text of HPACK, whose prefix has seven bits.
fn push_text(block: &mut Vec<u8>, text: &str) {
    match text.len() {
        short @ 0..127 => block.push(short as u8),
        long => {
            let rest = long - 127;
            assert!(rest < 1 << 14);
            block.extend([127, (rest & 127) as u8 | 128, (rest >> 7) as u8]);
        }
    }
    block.extend(text.as_bytes());
}

/// Returns a block of headers as literals, those after `indexed` with an entry in the table.
fn block(headers: &[(&str, &str)], indexed: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (kind, (name, value)) in
        headers.iter().map(|h| (0, h)).chain(indexed.iter().map(|h| (0x40, h)))
    {
        block.push(kind);
        push_text(&mut block, name);
        push_text(&mut block, value);
    }
    block
}

impl Frames {
    /// Begins a connection whose caller takes `window` bytes of each answer.
    fn begin(mut stream: impl Write, window: u32) {
        let window = [&[0, 4][..], &window.to_be_bytes()].concat();
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
        stream.write_all(&frame(SETTINGS, 0, 0, &window)).unwrap();
    }

    fn new(stream: UnixStream, window: u32) -> Self {
        Self::begin(&stream, window);
        Self { stream, next: 1 }
    }

    /// Begins a request with this block of headers. Returns the number of its stream.
    fn request(&mut self, block: &[u8], flags: u8) -> u32 {
        let number = self.next;
        self.next += 2;
        let headers = frame(HEADERS, flags | END_HEADERS, number, block);
        self.stream.write_all(&headers).unwrap();
        number
    }
}

impl Frames {
    /// Reads a frame. Returns its kind, its stream and its payload.
    fn read(&mut self) -> io::Result<(u8, u32, Vec<u8>)> {
        let mut head = [0; 9];
        self.stream.read_exact(&mut head)?;
        let [a, b, c, kind, _, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok((kind, u32::from_be_bytes(stream), payload))
    }

    /// Sends `bytes` of the body of each of `streams`, as the windows allow it.
    fn send_bodies(&mut self, streams: [u32; 2], bytes: usize) -> io::Result<()> {
        // The windows that each connection begins with: the connection's, and both streams'.
        let (mut windows, mut left) = ([65_535; 3], [bytes; 2]);
        while left != [0; 2] {
            let mut is_waiting = true;
            for (number, stream) in streams.into_iter().enumerate() {
                let part = left[number].min(windows[0]).min(windows[1 + number]).min(16_384);
                if part > 0 {
                    self.stream.write_all(&frame(DATA, 0, stream, &vec![b' '; part]))?;
                    windows[0] -= part;
                    windows[1 + number] -= part;
                    left[number] -= part;
                    is_waiting = false;
                }
            }
            if is_waiting {
                let (kind, stream, payload) = self.read()?;
                let window = [0, streams[0], streams[1]].iter().position(|own| *own == stream);
                match (kind, window) {
                    (WINDOW_UPDATE, Some(window)) => {
                        let more = u32::from_be_bytes(payload.try_into().unwrap());
                        windows[window] += more as usize;
                    }
                    (HEADERS, _) => return Err(io::Error::other("refused")),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// Reads frames until a stream ends. Returns the data before its end; `None` if the connection
/// ends.
fn answer_of(mut stream: impl Read) -> Option<Vec<u8>> {
    let mut data = Vec::new();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).ok()?;
        if head[3] == DATA {
            data.extend(payload);
        }
        if matches!(head[3], DATA | HEADERS) && head[4] & END_STREAM != 0 {
            return Some(data);
        }
    }
}

#[test]
fn a_foreign_host_is_refused_in_every_protocol_and_spelling() {
    let open = Open::new();
    let port = open.address.port();
    let (body, message) = (request_of(SAMPLE).unwrap(), framed(&infer()));
    let json = "POST /v2/models/m/infer HTTP/1.1\r\n".to_owned();
    let grpc = format!("POST {SERVICE}ModelInfer HTTP/1.1\r\n");
    let is_denied = |answer: &[u8]| {
        let answer = text(answer);
        assert!(answer.starts_with("HTTP/1."), "{answer}");
        answer.contains(" 403 Forbidden\r\n") || answer.contains("grpc-status: 7\r\n")
    };

    let foreign = [
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "localhost:x",
        "127.0.0.1.evil.example",
        "evil@localhost",
        "localhost, evil.example",
        "[::1]x",
        "",
    ];
    let own = ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8000"].map(str::to_owned);
    let types = ["application/grpc", "Application/GRPC", "application/grpc+proto"];
    for host in foreign {
        let line = format!("host: {host}\r\n");
        assert!(is_denied(&open.exchange(&format!("{json}{line}"), &body)), "{host}");
        for kind in types {
            let head = format!("{grpc}{line}content-type: {kind}\r\n");
            assert!(is_denied(&open.exchange(&head, &message)), "{host}, {kind}");
        }
        for path in ["GET /", "GET /status", "GET /metrics", "POST /v2/repository/index"] {
            assert!(is_denied(&open.exchange(&format!("{path} HTTP/1.1\r\n{line}"), b"")));
        }
        let two = format!("{json}{LOCAL}{line}");
        assert!(is_denied(&open.exchange(&two, &body)), "{host} beside a host of this machine");
    }
    for host in own.into_iter().chain([format!("localhost:{port}")]) {
        let line = format!("host: {host}\r\n");
        assert!(!is_denied(&open.exchange(&format!("{json}{line}"), &body)), "{host}");
        let head = format!("{grpc}{line}content-type: application/grpc\r\n");
        assert!(!is_denied(&open.exchange(&head, &message)), "{host}");
    }
    // No host, and an address that names one.
    assert!(is_denied(&open.exchange("GET /v2 HTTP/1.0\r\n", b"")));
    let absolute = "GET http://evil.example/v2 HTTP/1.1\r\n".to_owned();
    assert!(is_denied(&open.exchange(&(absolute + LOCAL), b"")));

    // HTTP/2: an answer with scores has data, and the refusal of a call has none.
    let call = |authority: &str, content_type: &str| {
        let mut stream = TcpStream::connect(open.address).unwrap();
        Frames::begin(&stream, 1 << 20);
        let path = format!("{SERVICE}ModelInfer");
        let headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path.as_str()),
            (":authority", authority),
            ("content-type", content_type),
            ("te", "trailers"),
        ];
        let head = frame(HEADERS, END_HEADERS, 1, &block(&headers, &[]));
        stream.write_all(&[head, frame(DATA, END_STREAM, 1, &message)].concat()).unwrap();
        answer_of(&stream).unwrap()
    };
    assert!(call("localhost", "application/grpc").len() > 20);
    for host in foreign.into_iter().filter(|host| !host.is_empty() && !host.contains(',')) {
        assert!(call(host, "application/grpc").is_empty(), "{host}");
        let refused = text(&call(host, "application/json"));
        assert!(refused.contains("is not this machine"), "{host}: {refused}");
    }
}

#[test]
fn nobody_loads_unloads_or_acts_without_the_right() {
    let open = Open::new();
    let model =
        |name: &str| RepositoryModelRequest { model_name: name.to_owned(), ..Default::default() };
    let ask = |right: &str| {
        let lines = format!("{LOCAL}{right}");
        let post =
            |path: &str| text(&open.exchange(&format!("POST {path} HTTP/1.1\r\n{lines}"), b""));
        let call = |method: &str, name: &str| text(&open.call(method, &lines, &model(name)));
        [
            post("/v2/repository/models/closed/load"),
            call("RepositoryModelLoad", "closed"),
            post("/actions/load/closed"),
            post("/actions/consent/m"),
            post("/v2/models/m/explain"),
            post("/v2/repository/models/m/unload"),
            call("RepositoryModelUnload", "m"),
        ]
    };
    let is_denied =
        |answer: &String| answer.contains(" 403 ") || answer.contains("grpc-status: 7\r\n");
    let (start, less) = (&TOKEN[..9], TOKEN.to_uppercase());
    for wrong in ["", " ", start, &less, &format!("{TOKEN}0"), &format!("{TOKEN} {TOKEN}")] {
        let answers = ask(&format!("authorization: Bearer {wrong}\r\n"));
        assert!(answers.iter().all(is_denied), "`{wrong}`: {answers:?}");
    }
    for right in ["", &format!("authorization: {TOKEN}\r\n"), &format!("cookie: {TOKEN}\r\n")] {
        let answers = ask(right);
        assert!(answers.iter().all(is_denied), "`{right}`: {answers:?}");
    }
    assert_eq!(open.door.serving.names(), ["m"]);

    let answers = ask(&format!("authorization: Bearer {TOKEN}\r\n"));
    assert!(!answers.iter().any(is_denied), "{answers:?}");
    assert!(open.door.serving.names().is_empty());
}

/// An empty text would equal the token that does not exist.
#[test]
fn nobody_has_the_right_where_there_is_no_token() {
    let open = Open::with_token("");
    for right in ["", "authorization: Bearer \r\n", "authorization: Bearer\r\n"] {
        let head = format!("POST /v2/repository/models/m/unload HTTP/1.1\r\n{LOCAL}{right}");
        let answer = text(&open.exchange(&head, b""));
        assert!(answer.contains(" 403 "), "`{right}`: {answer}");
    }
    assert_eq!(open.door.serving.names(), ["m"]);
}

/// The folders would be listed on the thread that serves all callers.
#[test]
fn the_index_of_models_is_read_by_no_serving_thread() {
    let open = Open::new();
    let index = || {
        let mut client = open.client();
        client.send("/v2/repository/index", Some(b"")).unwrap();
        text(&client.receive().unwrap().body)
    };
    assert!(index().contains("closed") && index().contains("READY"), "{}", index());
    for ready in [false, true] {
        let answer = open.call("RepositoryIndex", LOCAL, &RepositoryIndexRequest { ready });
        assert_eq!(text(&answer).contains("closed"), !ready, "{}", text(&answer));
    }
    // A caller that has unloaded a model finds that in its next answer.
    let mut client = open.client();
    client.send("/v2/repository/models/m/unload", Some(b"")).unwrap();
    assert_eq!(client.receive().unwrap().code, 200);
    assert!(!index().contains("READY"), "{}", index());
}

/// Asks until `is_over`. Every answer must have scores.
fn ask_until(open: &Open, is_over: &dyn Fn() -> bool) {
    let mut good = open.client();
    let mut answers = 0;
    while !is_over() || answers < 100 {
        let answer = good.ask("m", SAMPLE).unwrap();
        assert!(answer["score"].is_array(), "{answers} answers, then {answer}");
        answers += 1;
    }
}

/// Ten connections begin 128 requests each, with 12 KB of headers that the table of HPACK makes
/// short, and never send a body.
#[test]
fn headers_without_bodies_keep_no_caller_out() {
    let open = Open::new();
    let long = "h".repeat(3900);
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v2/models/m/infer"),
        (":authority", "localhost"),
    ];
    let mut held = Vec::new();
    for _ in 0..10 {
        let mut frames = Frames::new(open.unix(), 0);
        let first = [block(&headers, &[("x", &long)]), vec![0x80 | 62; 2]].concat();
        let next = [block(&headers, &[]), vec![0x80 | 62; 3]].concat();
        frames.request(&first, 0);
        (1..128).for_each(|_| {
            frames.request(&next, 0);
        });
        ask_until(&open, &|| true);
        held.push(frames);
    }
    ask_until(&open, &|| true);
}

/// Callers that send all but the end of the largest requests, and then a byte from time to time.
#[test]
fn callers_that_never_end_their_large_requests_keep_no_caller_out() {
    let open = Open::new();
    let length = RULES.request_bytes_max as usize;
    let head =
        format!("POST /v2/models/m/infer HTTP/1.1\r\n{LOCAL}content-length: {length}\r\n\r\n");
    let (part, is_over) = (vec![b' '; length - 1000], AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let mut stream = open.unix();
                    let mut sent = stream.write_all(&[head.as_bytes(), &part].concat());
                    while sent.is_ok() && !is_over.load(Ordering::Relaxed) {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                        sent = stream.write_all(b" ");
                    }
                }
            });
        }
        let start = std::time::Instant::now();
        ask_until(&open, &|| start.elapsed().as_secs() >= 2);
        is_over.store(true, Ordering::Relaxed);
    });
}

/// One connection holds all but the end of two requests of nearly the largest size, which is half
/// of the budget. It sends PINGs, so it is never silent.
fn hold_half(open: &Open, is_held: &AtomicBool, is_over: &AtomicBool) -> io::Result<()> {
    // Less than the most, so that the heads of both requests have room in the share.
    let length = RULES.request_bytes_max as usize - 8192;
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v2/models/m/infer"),
        (":authority", "localhost"),
        ("content-length", &length.to_string()),
    ];
    let mut frames = Frames::new(open.unix(), 1 << 20);
    let streams = [0; 2].map(|_| frames.request(&block(&headers, &[]), 0));
    frames.send_bodies(streams, length - 1)?;
    while !is_over.load(Ordering::Relaxed) {
        frames.stream.write_all(&frame(PING, 0, 0, &[7; 8]))?;
        loop {
            match frames.read()?.0 {
                PING => break,
                HEADERS => return Err(io::Error::other("refused")),
                _ => {}
            }
        }
        is_held.store(true, Ordering::Relaxed);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Ok(())
}

#[test]
fn one_connection_that_holds_half_of_the_budget_keeps_no_larger_caller_out() {
    let open = Open::new();
    // A field that the server skips. With it, the request is larger than a small one.
    let mut message = infer().encode_to_vec();
    message.extend([0xfa, 0x3f, 0x80, 0xe0, 0x12]);
    message.extend(vec![0; 300 << 10]);
    let body = [&[0], &(message.len() as u32).to_be_bytes()[..], &message].concat();
    let grpc = format!("POST {SERVICE}ModelInfer HTTP/1.1\r\n{LOCAL}");
    let head = grpc + "content-type: application/grpc\r\n";

    let (is_held, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let answers = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let _ = hold_half(&open, &is_held, &is_over);
                is_held.store(false, Ordering::Relaxed);
            }
        });
        let ask = || {
            while !is_held.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let answers = [0; 2].map(|_| text(&open.exchange(&head, &body)));
            answers.into_iter().find(|answer| answer.contains("score")).ok_or("refused twice")
        };
        let answers: Vec<_> = (0..10).map(|_| ask()).collect();
        // Before anything is asserted: the other thread must end first.
        is_over.store(true, Ordering::Relaxed);
        answers
    });
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
}

/// The bodies of refused requests are not read, and yet belong to requests.
#[test]
fn refused_requests_with_bodies_are_no_flood() {
    let open = Open::new();
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v2/models/m/infer"),
        (":authority", "localhost"),
        ("content-encoding", "gzip"),
    ];
    let (mut frames, mut window) = (Frames::new(open.unix(), 1 << 20), 65_535);
    let (body, mut sent) = ([0; 8 << 10], 0);
    for _ in 0..400 {
        let stream = frames.request(&block(&headers, &[]), 0);
        // Otherwise the answers were faster than the updates of the window.
        if window >= body.len() {
            frames.stream.write_all(&frame(DATA, END_STREAM, stream, &body)).unwrap();
            window -= body.len();
            sent += body.len();
        }
        loop {
            let (kind, other, payload) = frames.read().expect("the connection stays open");
            if kind == WINDOW_UPDATE && other == 0 {
                window += u32::from_be_bytes(payload.try_into().unwrap()) as usize;
            } else if kind == HEADERS && other == stream {
                break;
            }
        }
    }
    assert!(sent > 2 << 20, "{sent} bytes are no flood anyway");
}

/// Refusals and scores that a caller asks for and never takes: the window of HTTP/2 is 0. Their
/// bytes are counted until the connection ends, and the front door ends it.
#[test]
fn a_caller_that_takes_no_answer_is_counted_and_closed() {
    let open = Open::new();
    let head = |path| {
        let headers =
            [(":method", "GET"), (":scheme", "http"), (":path", path), (":authority", "localhost")];
        block(&headers, &[])
    };
    let mut frames = Frames::new(open.unix(), 0);
    (0..50).for_each(|_| {
        frames.request(&head("/nowhere"), END_STREAM);
    });
    (0..50).for_each(|_| {
        frames.request(&head("/v2/models/m"), END_STREAM);
    });
    while open.bytes() < 100 * 2048 {
        std::thread::yield_now();
    }
    let end = io::copy(&mut frames.stream, &mut io::sink());
    println!("{end:?}");
    while open.bytes() > 3 * 4096 {
        std::thread::yield_now();
    }
    ask_until(&open, &|| true);
}

/// A caller that sends requests and reads no answer. The system buffers the answers, in memory that
/// belongs to the front door. Its own bound would be 208 KiB for each connection.
#[test]
fn the_system_keeps_few_answers_of_a_caller_that_does_not_read() {
    let open = Open::new();
    let (mut stream, mut good) = (open.unix(), open.client());
    stream.set_nonblocking(true).unwrap();
    let request = b"GET /v2/models/m HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let (mut sent, mut waits) = (0, 0);
    // The good caller's answers show that the front door's only thread had many turns meanwhile.
    while waits < 100 {
        match stream.write(&request[sent % request.len()..]) {
            Ok(bytes) => (sent, waits) = (sent + bytes, 0),
            Err(e) => {
                assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
                assert!(good.ask("m", SAMPLE).unwrap()["score"].is_array());
                waits += 1;
            }
        }
    }
    let kept = rustix::io::ioctl_fionread(&stream).unwrap();
    println!("{sent} bytes were sent, {kept} bytes of answers are kept");
    assert!((1..32 << 10).contains(&kept), "{kept}");
}

/// The table of HPACK would keep a refusal, and then the connection would seem not to take it.
#[test]
fn a_refusal_that_was_taken_is_counted_no_more() {
    let open = Open::new();
    let mut frames = Frames::new(open.unix(), 1 << 20);
    let call = |path: &str| {
        let headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
        ];
        block(&headers, &[])
    };
    for number in 0..50 {
        frames.request(&call(&format!("{SERVICE}None{number}")), END_STREAM);
        assert!(answer_of(&frames.stream).unwrap().is_empty());
    }
    while open.bytes() > 3 * 4096 {
        std::thread::yield_now();
    }
    frames.request(&call(&format!("{SERVICE}None")), END_STREAM);
    assert!(answer_of(&frames.stream).unwrap().is_empty(), "the connection is open");
}

/// Frames without requests end their connection. A request is never far from the next turn, which
/// the unit test of a turn proves.
#[test]
fn a_flood_of_frames_without_requests_is_ended() {
    let open = Open::new();
    let headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v2/models/m/infer"),
        (":authority", "localhost"),
    ];
    let priority = [0, 0, 0, 0, 9];
    let floods = [
        ("PRIORITY", frame(PRIORITY, 0, 1, &priority)),
        ("WINDOW_UPDATE", frame(WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1])),
        ("PING", frame(PING, 0, 0, &[7; 8])),
        ("acknowledged PING", frame(PING, 1, 0, &[7; 8])),
        ("SETTINGS", frame(SETTINGS, 0, 0, &[])),
        ("empty DATA", frame(DATA, 0, 1, &[])),
        ("padded DATA", frame(DATA, 8, 1, &[1, 0])),
        ("unknown", frame(200, 0, 0, &[7; 100])),
    ];
    for (name, flood) in floods {
        let mut frames = Frames::new(open.unix(), 1 << 20);
        frames.request(&block(&headers, &[]), 0);
        let mut reading = frames.stream.try_clone().unwrap();
        let reader = std::thread::spawn(move || io::copy(&mut reading, &mut io::sink()));
        let (flood, mut sent) = (flood.repeat((64 << 10) / flood.len()), 0);
        let mut good = open.client();
        while frames.stream.write_all(&flood).is_ok() {
            sent += flood.len();
            assert!(sent < 64 << 20, "{name}: {sent} bytes");
            assert!(good.ask("m", SAMPLE).unwrap()["score"].is_array(), "{name}");
        }
        println!("{name}: ended after {sent} bytes");
        let _ = reader.join().unwrap();
    }
}
