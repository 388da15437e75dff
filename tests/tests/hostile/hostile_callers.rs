//! Hostile callers of the front door: texts of megabytes, names of other hosts, and changes without
//! the right. A good caller is answered beside them.

use crate::frames::{DATA, END_HEADERS, END_STREAM, Frames, HEADERS, answer_of, block, frame};
use crate::open::{LOCAL, Open, SAMPLE, SERVICE, framed, infer, text};
use hatchback_server::proto::reflection::server_reflection_request::MessageRequest;
use hatchback_server::proto::reflection::server_reflection_response::MessageResponse;
use hatchback_server::proto::reflection::{ServerReflectionRequest, ServerReflectionResponse};
use hatchback_server::proto::{
    HEALTH_CHECK, HealthCheckRequest, HealthCheckResponse, InferParameter,
    InferRequestedOutputTensor, ModelInferRequest, ModelRequest, NOT_SERVING, ParameterValue,
    REFLECTION, RepositoryIndexRequest, RepositoryModelRequest, SERVING,
};
use hatchback_tests::client::request_of;
use hatchback_tests::front_door::TOKEN;
use prost::Message;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::net::TcpStream;

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

/// Many clients send the headers and the body in two writes.
#[test]
fn an_answer_that_needs_no_body_leaves_the_connection_open_for_the_body() {
    let open = Open::new();
    let mut client = open.client();
    for (path, more, code) in [
        ("/v2/nothing", "", 404),
        ("/v2/models/m/ready", "", 405),
        ("/v2/models/m/infer", "content-encoding: gzip\r\n", 501),
        ("/v2/repository/index", "", 200),
    ] {
        let body = br#"{"ready": true}"#;
        let length = body.len();
        let head = format!("POST {path} HTTP/1.1\r\n{LOCAL}{more}content-length: {length}\r\n\r\n");
        client.stream().write_all(head.as_bytes()).unwrap();
        // The only thread of the front door has read the headers before it answers this.
        assert_eq!(open.client().get("/v2").unwrap().code, 200);
        client.stream().write_all(body).unwrap();
        assert_eq!(client.receive().unwrap().code, code, "{path}");
    }
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
    let index_of = |body: &str| {
        let mut client = open.client();
        client.send("/v2/repository/index", Some(body.as_bytes())).unwrap();
        text(&client.receive().unwrap().body)
    };
    let index = || index_of("");
    assert!(index().contains("closed") && index().contains("READY"), "{}", index());
    assert!(index_of("{\"ready\": 1}").contains("error"), "{}", index_of("{\"ready\": 1}"));
    for ready in [false, true] {
        let listed = index_of(&json!({ "ready": ready }).to_string());
        assert!(listed.contains("READY") && listed.contains("closed") != ready, "{listed}");
        let answer = open.call("RepositoryIndex", LOCAL, &RepositoryIndexRequest { ready });
        assert_eq!(text(&answer).contains("closed"), !ready, "{}", text(&answer));
    }
    // A caller that has unloaded a model finds that in its next answer.
    let mut client = open.client();
    client.send("/v2/repository/models/m/unload", Some(b"")).unwrap();
    assert_eq!(client.receive().unwrap().code, 200);
    assert!(!index().contains("READY"), "{}", index());
}
