//! Tests of the bounds of networks that run on rten: benign networks are accepted and their results
//! are no larger than their bounds; hostile ones are refused before anything is allocated or run.

#![allow(clippy::unwrap_used)]

use hatchback_kernels::dense::graph::onnx::{ModelProto, NodeProto};
use hatchback_kernels::dense::{Activation, DenseEngine, DenseError};
use prost::Message;
use rten::{Model, ValueOrView, ValueView};

/// Returns `onnx` with an operator that only rten has, whose result no node reads.
fn for_rten(onnx: &[u8], input: &str) -> Vec<u8> {
    let mut model = ModelProto::decode(onnx).unwrap();
    model.graph.as_mut().unwrap().node.push(NodeProto {
        input: vec![input.to_owned()],
        output: vec!["only rten".to_owned()],
        op_type: Some("Sin".to_owned()),
        ..NodeProto::default()
    });
    model.encode_to_vec()
}

#[test]
fn no_network_of_the_field_has_results_beyond_its_bounds() {
    for file in ["zoo.bin", "random.bin"] {
        let path = format!("{}/../tests/data/onnx/{file}", env!("CARGO_MANIFEST_DIR"));
        let all = crate::cases::read(&std::fs::read(path).unwrap());
        let (mut loaded, mut refused) = (0, 0);
        for case in all {
            let onnx = for_rten(&case.onnx, &case.inputs[0].0);
            let inputs: Vec<_> = case.inputs.iter().map(|(n, w)| (n.as_str(), *w)).collect();
            let e = DenseEngine::load(onnx.clone(), &inputs, &case.output, Activation::None);
            match e {
                Ok(e) => {
                    loaded += 1;
                    if e.falls_back_for().is_none() {
                        println!("own {}", case.name)
                    }
                }
                Err(e) => {
                    refused += 1;
                    println!("{} {}", case.name, e)
                }
            }
        }
        println!("{file}: {loaded} {refused}");
    }
}
