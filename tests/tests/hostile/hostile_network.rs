//! Networks from an attacker in a bundle that is valid otherwise. The install refuses each with an
//! error that names the operator, takes little memory, and ends.

use hatchback::flash::FlashError;
use hatchback_kernels::dense::DenseError;
use hatchback_kernels::dense::graph::onnx::{
    AttributeProto, GraphProto, INT64, ModelProto, NodeProto, TensorProto, ValueInfoProto,
};
use hatchback_tests::victim::Victim;
use prost::Message;

/// A size that no machine has.
const HUGE: i64 = 1 << 40;
/// Peak memory of this test program, in KiB. One attack alone would take far more.
const PEAK_KIB_MAX: u64 = 1 << 20;

fn ints(name: &str, dims: &[i64], values: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        dims: dims.to_vec(),
        data_type: Some(INT64),
        int64_data: values.to_vec(),
        ..TensorProto::default()
    }
}

fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.to_owned()],
        name: Some(output.to_owned()),
        op_type: Some(op.to_owned()),
        ..NodeProto::default()
    }
}

/// Returns the network `onnx`, whose output is added to the sum of `big`, which `nodes` make.
fn with(onnx: &[u8], nodes: &[NodeProto], tensors: &[TensorProto]) -> Vec<u8> {
    let mut model = ModelProto::decode(onnx).unwrap();
    let graph = model.graph.as_mut().unwrap();
    let output = graph.output[0].name().to_owned();
    for name in graph.node.iter_mut().flat_map(|node| &mut node.output) {
        if *name == output {
            *name = "true output".to_owned();
        }
    }
    graph.initializer.extend_from_slice(tensors);
    graph.node.extend_from_slice(nodes);
    graph.node.push(node("ReduceSum", &["big"], "sum"));
    graph.node.push(node("Add", &["true output", "sum"], &output));
    model.encode_to_vec()
}

fn with_body(node: NodeProto, body: Vec<NodeProto>) -> NodeProto {
    let output = body.last().unwrap().output.clone();
    let output = output.into_iter().map(|n| ValueInfoProto { name: Some(n), r#type: None });
    let graph = GraphProto { node: body, output: output.collect(), ..GraphProto::default() };
    let attribute = AttributeProto {
        name: Some("body".to_owned()),
        g: Some(Box::new(graph)),
        r#type: Some(5),
        ..AttributeProto::default()
    };
    NodeProto { attribute: vec![attribute], ..node }
}

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

#[test]
fn networks_that_take_all_memory_or_never_end_are_refused() {
    let victim = Victim::default();
    let dense = victim.next.manifest.dense;
    let onnx = victim.next.content(dense);
    let refused = |op: &str, nodes: &[NodeProto], tensors: &[TensorProto]| {
        let attack = with(&onnx, nodes, tensors);
        let bundle = victim.attacked(|parts| parts.set_content(dense, &attack));
        victim.refuses(&bundle, &["attack.bundle: ", "dense network", op]);
        match victim.install(&bundle) {
            Err(FlashError::Dense { source: DenseError::Unsupported(_), .. }) => {}
            other => panic!("{op}: {:?}", other.err()),
        }
    };

    let to = [ints("to", &[2], &[1, HUGE])];
    let one = |op: &str, inputs: &[&str]| [node(op, inputs, "big")];
    refused("Tile", &one("Tile", &["dense", "to"]), &to);
    refused("ConstantOfShape", &one("ConstantOfShape", &["to"]), &to);
    refused("Expand", &one("Expand", &["dense", "to"]), &[ints("to", &[3], &[HUGE, 1, 2])]);
    refused("Pad", &one("Pad", &["dense", "to"]), &[ints("to", &[4], &[0, 0, 0, HUGE])]);
    let range = [ints("zero", &[], &[0]), ints("to", &[], &[HUGE]), ints("one", &[], &[1])];
    refused("Range", &one("Range", &["zero", "to", "one"]), &range);
    refused("tensor `to`", &one("Transpose", &["to"]), &[ints("to", &[0, 1 << 62], &[])]);
    refused("Resize", &one("Resize", &["dense", "", "", "to"]), &to);
    let trips = [ints("trips", &[], &[1 << 62]), ints("yes", &[], &[1])];
    for op in ["Loop", "Scan"] {
        let endless = node(op, &["trips", "yes", "dense"], "big");
        let body = vec![node("Identity", &["dense"], "again")];
        refused(op, &[with_body(endless, body)], &trips);
    }
    let gather = |i: u32| node("Gather", &[&format!("d{i}"), "again"], &format!("d{}", i + 1));
    let mut nodes = vec![node("Identity", &["again"], "d0")];
    nodes.extend((0..9).map(gather));
    nodes.push(node("Cast", &["d9"], "big"));
    refused("", &nodes, &[ints("again", &[8, 8], &[0; 64])]);

    let long: Vec<_> = (0..1_000_000).map(|_| NodeProto::default()).collect();
    refused("bytes of memory", &long, &[]);
    refused("nodes, over", &long[..40_000], &[]);
    let nested = (0..200).fold(node("Cos", &["dense"], "big"), |inner, _| {
        with_body(node("Loop", &[], "big"), vec![inner])
    });
    let attack = with(&onnx, &[nested], &[]);
    let bundle = victim.attacked(|parts| parts.set_content(dense, &attack));
    victim.refuses(&bundle, &["attack.bundle: dense network: not an ONNX file"]);

    // Two bytes of the file for each node.
    let empty = [0x0a, 0x00].repeat(16 << 20);
    let mut file = vec![0x3a];
    prost::encoding::encode_varint(empty.len() as u64, &mut file);
    file.extend(empty);
    let bundle = victim.attacked(|parts| parts.set_content(dense, &file));
    victim.refuses(&bundle, &["attack.bundle: dense network", "bytes of memory"]);

    let peak = peak_kib();
    assert!(peak < PEAK_KIB_MAX, "peak {peak} KiB");
}
