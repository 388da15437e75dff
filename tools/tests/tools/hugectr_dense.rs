//! Dense networks as HugeCTR saves them: a graph of JSON and a file of f32. The scores of the
//! converted network are compared with a plain computation of the layers, which reads the same file
//! in the order that HugeCTR documents.

use hatchback_kernels::dense::{Activation, DenseEngine};
use hatchback_tools::pack::hugectr_network::HugectrNetwork;
use proptest::prelude::*;
use serde_json::{Value, json};

/// The bytes of a dense file, read layer by layer.
struct File<'a>(&'a [f32]);

impl File<'_> {
    fn take(&mut self, n: usize) -> Vec<f32> {
        let (taken, rest) = self.0.split_at(n);
        self.0 = rest;
        taken.to_vec()
    }

    /// `W[in][out]` row by row, then `b[out]`.
    fn product(&mut self, x: &[f32], outputs: usize, relu: bool) -> Vec<f32> {
        let (w, b) = (self.take(x.len() * outputs), self.take(outputs));
        let column = |o: usize| {
            let sum: f32 = x.iter().enumerate().map(|(i, x)| x * w[i * outputs + o]).sum();
            let y = sum + b[o];
            if relu { y.max(0.0) } else { y }
        };
        (0..outputs).map(column).collect()
    }

    /// For each layer `w[in]`, then `b[in]`.
    fn cross(&mut self, first: &[f32], layers: usize) -> Vec<f32> {
        let mut x = first.to_vec();
        for _ in 0..layers {
            let (w, b) = (self.take(x.len()), self.take(x.len()));
            let scalar: f32 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
            x = (0..x.len()).map(|i| first[i] * scalar + b[i] + x[i]).collect();
        }
        x
    }
}

fn graph(layers: Vec<Value>, slots: usize, dim: usize) -> Value {
    let data = json!({
        "name": "data", "type": "Data", "source": "./file_list.txt", "check": "Sum",
        "label": {"top": "label", "label_dim": 1}, "dense": {"top": "dense", "dense_dim": 3},
        "sparse": [{"top": "data1", "type": "DistributedSlot", "slot_num": slots,
                    "nnz_per_slot": vec![1; slots], "is_fixed_length": false}]
    });
    let embedding = json!({
        "name": "sparse_embedding1", "type": "DistributedSlotSparseEmbeddingHash",
        "bottom": "data1", "top": "emb",
        "sparse_embedding_hparam": {"embedding_vec_size": dim, "combiner": "sum"}
    });
    let mut all = vec![data, embedding];
    all.extend(layers);
    all.push(json!({"type": "BinaryCrossEntropyLoss", "bottom": ["out", "label"], "top": "loss"}));
    json!({"solver": {"lr_policy": "fixed"}, "layers": all})
}

fn layer(kind: &str, bottom: Value, top: Value, rest: Value) -> Value {
    let mut layer = rest;
    layer["type"] = kind.into();
    (layer["bottom"], layer["top"]) = (bottom, top);
    layer
}

fn fc(kind: &str, bottom: &str, top: &str, outputs: usize) -> Value {
    layer(kind, bottom.into(), top.into(), json!({"fc_param": {"num_output": outputs}}))
}

fn convert(graph: &Value, weights: &[f32]) -> anyhow::Result<Vec<u8>> {
    let folder = tempfile::tempdir()?;
    let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    std::fs::write(folder.path().join("m.json"), serde_json::to_vec(graph)?)?;
    std::fs::write(folder.path().join("m_dense_9.model"), bytes)?;
    HugectrNetwork { graph: "m.json".into(), dense: "m_dense_9.model".into() }.read(folder.path())
}

fn weights(seed: u32, count: usize) -> Vec<f32> {
    let bits = |i: usize| (i as u32 + 1).wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8;
    (0..count).map(|i| bits(i) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Compares the converted graph with `expected`, which gets the file, the dense features and the
/// embedding's vectors.
fn compare(
    graph: &Value,
    seed: u32,
    sizes: [usize; 3],
    expected: impl Fn(&mut File<'_>, &[f32], &[f32]) -> Vec<f32>,
) {
    let [slots, dim, count] = sizes;
    let weights = weights(seed, count);
    let onnx = convert(graph, &weights).unwrap();
    let inputs = [("dense", 3), ("emb", slots * dim)];
    let engine = DenseEngine::load(onnx, &inputs, "out", Activation::None).unwrap();
    let (dense, emb) = (self::weights(seed ^ 77, 3), self::weights(seed ^ 99, slots * dim));
    let mut scores = vec![0.0; engine.outputs()];
    let values = [dense.clone(), emb.clone()];
    engine.run(1, &values, &mut scores, &mut engine.scratch(1)).unwrap();

    let mut file = File(&weights);
    let expected = expected(&mut file, &dense, &emb);
    assert!(file.0.is_empty(), "the file has {} more weights", file.0.len());
    for (score, expected) in scores.iter().zip(&expected) {
        assert!((score - expected).abs() <= 1e-4 * expected.abs().max(1.0), "{score} {expected}");
    }
    assert_eq!(scores.len(), expected.len());
}

/// DCN: crosses beside fully connected layers.
fn dcn(slots: usize, dim: usize) -> Value {
    let width = 3 + slots * dim;
    graph(
        vec![
            layer("Reshape", "emb".into(), "flat".into(), json!({"leading_dim": slots * dim})),
            layer("Concat", json!(["flat", "dense"]), "all".into(), json!({})),
            layer(
                "Slice",
                "all".into(),
                json!(["left", "right"]),
                json!({"ranges": [[0, width], [0, width]]}),
            ),
            layer(
                "MultiCross",
                "left".into(),
                "crossed".into(),
                json!({"mc_param": {"num_layers": 3}}),
            ),
            fc("InnerProduct", "right", "fc1", 5),
            layer("ReLU", "fc1".into(), "relu1".into(), json!({})),
            layer("Dropout", "relu1".into(), "dropout1".into(), json!({"rate": 0.5})),
            fc("FusedInnerProduct", "dropout1", "fc2", 4),
            layer("Concat", json!(["crossed", "fc2"]), "both".into(), json!({"axis": 1})),
            fc("InnerProduct", "both", "out", 1),
        ],
        slots,
        dim,
    )
}

fn dcn_weights(slots: usize, dim: usize) -> usize {
    let width = 3 + slots * dim;
    6 * width + (5 * width + 5) + (5 * 4 + 4) + (width + 4) + 1
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_dcn_scores_as_its_layers(seed: u32, slots in 1usize..5, dim in 1usize..5) {
        let count = dcn_weights(slots, dim);
        compare(&dcn(slots, dim), seed, [slots, dim, count], |file, dense, emb| {
            let all = [emb, dense].concat();
            let crossed = file.cross(&all, 3);
            let hidden = file.product(&all, 5, true);
            let hidden = file.product(&hidden, 4, true);
            file.product(&[crossed, hidden].concat(), 1, false)
        });
    }

    #[test]
    fn a_dlrm_scores_as_its_layers(seed: u32, slots in 1usize..6, dim in 1usize..5) {
        let mlp = |bottom: &str, top: &str, widths: &[usize], last: &str| {
            let mut activations = vec!["Relu"; widths.len()];
            activations[widths.len() - 1] = last;
            let parameters = json!({"num_outputs": widths, "activations": activations});
            layer("MLP", bottom.into(), top.into(), json!({"mlp_param": parameters}))
        };
        let graph = graph(
            vec![
                mlp("dense", "bottom", &[6, dim], "Relu"),
                layer("Interaction", json!(["bottom", "emb"]), "pairs".into(), json!({})),
                mlp("pairs", "out", &[7, 1], "None"),
            ],
            slots,
            dim,
        );
        let pairs = dim + (slots + 1) * slots / 2 + 1;
        let count = 3 * 6 + 6 + 6 * dim + dim + pairs * 7 + 7 + 7 + 1;
        compare(&graph, seed, [slots, dim, count], |file, dense, emb| {
            let hidden = file.product(dense, 6, true);
            let bottom = file.product(&hidden, dim, true);
            let rows: Vec<&[f32]> = std::iter::once(&bottom[..]).chain(emb.chunks(dim)).collect();
            let mut joined = bottom.clone();
            for i in 0..rows.len() {
                for j in 0..i {
                    joined.push(rows[i].iter().zip(rows[j]).map(|(a, b)| a * b).sum());
                }
            }
            joined.push(0.0);
            let hidden = file.product(&joined, 7, true);
            file.product(&hidden, 1, false)
        });
    }

    #[test]
    fn a_deepfm_scores_as_its_layers(seed: u32, slots in 1usize..5, dim in 1usize..5) {
        // The last column of each vector is the weight of the first order.
        let rows = dim + 1;
        let graph = graph(
            vec![
                layer(
                    "Slice",
                    "emb".into(),
                    json!(["second", "first"]),
                    json!({"ranges": [[0, dim], [dim, rows]]}),
                ),
                layer(
                    "Reshape",
                    "second".into(),
                    "flat".into(),
                    json!({"leading_dim": slots * dim}),
                ),
                layer("Reshape", "first".into(), "ones".into(), json!({"leading_dim": slots})),
                layer(
                    "WeightMultiply",
                    "dense".into(),
                    "dense_rows".into(),
                    json!({"weight_dims": [3, dim]}),
                ),
                layer("Concat", json!(["dense_rows", "flat"]), "all".into(), json!({})),
                layer("FmOrder2", "all".into(), "fm".into(), json!({"out_dim": dim})),
                layer("ReduceSum", "fm".into(), "fm_sum".into(), json!({"axis": 1})),
                layer("ReduceSum", "ones".into(), "first_sum".into(), json!({"axis": 1})),
                fc("InnerProduct", "all", "deep", 1),
                layer("Add", json!(["fm_sum", "first_sum", "deep"]), "out".into(), json!({})),
            ],
            slots,
            rows,
        );
        let count = 3 * dim + (3 + slots) * dim + 1;
        compare(&graph, seed, [slots, rows, count], |file, dense, emb| {
            let w = file.take(3 * dim);
            let mut all: Vec<f32> = (0..3 * dim).map(|i| dense[i / dim] * w[i]).collect();
            emb.chunks(rows).for_each(|row| all.extend_from_slice(&row[..dim]));
            let deep = file.product(&all, 1, false)[0];
            let column = |c: usize| all.iter().skip(c).step_by(dim);
            let fm = |c: usize| {
                let (sum, squares): (f32, f32) =
                    (column(c).sum(), column(c).map(|v| v * v).sum());
                0.5 * (sum * sum - squares)
            };
            let fm: f32 = (0..dim).map(fm).sum();
            let first: f32 = emb.chunks(rows).map(|row| row[dim]).sum();
            vec![fm + first + deep]
        });
    }
}

#[test]
fn a_file_that_does_not_fit_its_graph_is_refused() {
    let count = dcn_weights(2, 3);
    let refused = |graph: &Value, count, problem: &str| {
        let error = format!("{:#}", convert(graph, &weights(1, count)).unwrap_err());
        assert!(error.contains(problem), "{error}");
    };
    let whole = dcn(2, 3);
    refused(&whole, count + 1, "m_dense_9.model: ");
    refused(&whole, count - 1, "layers[11], a InnerProduct: needs");
    let with = |at: usize, change: &dyn Fn(&mut Value)| {
        let mut graph = whole.clone();
        change(&mut graph["layers"][at]);
        graph
    };
    refused(&with(7, &|l| l["type"] = "GRU".into()), count, "layers[7], a GRU: this layer is not");
    refused(&with(7, &|l| l["bottom"] = "absent".into()), count, "no layer makes `absent`");
    refused(&with(2, &|l| l["leading_dim"] = 5.into()), count, "6 values a sample, not 5");
    refused(&with(4, &|l| l["ranges"][1] = json!([0, 10])), count, "ranges[1]: 0 to 10 of 9");
    let low_rank = with(5, &|l| l["mc_param"]["projection_dim"] = 4.into());
    refused(&low_rank, count, "low-rank crosses");
    refused(&with(1, &|l| l["bottom"] = "data9".into()), count, "no sparse input `data9`");
    refused(&json!({"layers": 3}), 0, "m.json");
}
