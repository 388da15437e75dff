//! The nine model families, as the trainer's package exported them, through the whole runtime.
//! Their scores equal those of PyTorch.

use hatchback::clock::SystemClock;
use hatchback::limits::SCORE_DIFFERENCE_MAX;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Placement};
use hatchback::{DenseEngine, Weights};
use hatchback_kernels::dense::graph::onnx::{FLOAT16, INT8, ModelProto, ValueInfoProto};
use hatchback_kernels::dense::{forms, narrow_all, widen};
use hatchback_tests::models::{
    Installed, install_spec, install_unprobed, open_with_least_cache, repository, score_all,
    tiny_budget,
};
use hatchback_tests::reference::same_bits;
use hatchback_tools::pack::read_samples;
use hatchback_tools::pack::spec::CodecChoice;
use hatchback_tools::report::metrics::largest_difference;
use prost::Message;
use std::collections::BTreeMap;
use std::sync::Arc;

const FAMILIES: [&str; 9] =
    ["dlrm", "dcnv2", "deepfm", "wide_deep", "mmoe", "din", "dien", "bst", "hstu"];
const BATCHES: [usize; 3] = [1, 7, 32];

fn installed(family: &str, codec: CodecChoice, placement: Option<Placement>) -> Installed {
    install_spec(&format!("tests/data/families/{family}/model.toml"), Some(codec), placement)
}

fn probe(family: &str, installed: &Installed) -> Vec<Sample> {
    let path = repository(&format!("tests/data/families/{family}/probe.jsonl"));
    read_samples(&path, &installed.schema).unwrap()
}

/// Makes a worker with a cache of a few sets and the shortest miss list.
fn worker(installed: &Installed) -> Worker {
    let mut budget = tiny_budget(&installed.schema, 32);
    budget.resident_bytes_max = 1 << 20;
    let model = open_with_least_cache(&installed.flash, budget);
    Worker::new(model, Arc::new(SystemClock::default()))
}

/// Returns the largest difference; NaN, which fails every bound, if a score is NaN.
fn furthest(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    largest_difference(a, b)
}

/// Returns PyTorch's scores of all outputs, sample after sample.
fn recorded(samples: &[Sample]) -> Vec<f32> {
    samples.iter().flat_map(|s| s.scores.iter().copied().map(Option::unwrap)).collect()
}

/// Returns the least number of lookups of `samples` that must count as absent: those of index keys
/// beyond their table.
fn absent_at_least(installed: &Installed, samples: &[Sample]) -> u32 {
    let schema = &installed.schema;
    let beyond = |sample: &Sample, l: usize| {
        let (table, bag) = (schema.table_of(l), &sample.sparse[schema.lookups[l].feature as usize]);
        bag.iter().filter(|&&key| table.keys == KeySpace::Index && key >= table.rows).count() as u32
    };
    samples.iter().flat_map(|s| (0..schema.lookups.len()).map(move |l| beyond(s, l))).sum()
}

#[test]
fn scores_are_pytorchs_under_every_placement_and_batch_size() {
    for family in FAMILIES {
        let (mut statuses, mut all): (Vec<_>, Vec<Vec<f32>>) = (Vec::new(), Vec::new());
        for placement in [None, Some(Placement::Resident), Some(Placement::Cached)] {
            let installed = installed(family, CodecChoice::F32, placement);
            let samples = probe(family, &installed);
            let outputs = installed.schema.network.outputs.len();
            assert_eq!(outputs, if family == "mmoe" { 2 } else { 1 });
            assert!(samples.len() >= 32 && samples.iter().all(|s| s.scores.len() == outputs));

            let expected = recorded(&samples);
            for size in BATCHES {
                let mut worker = worker(&installed);
                let (scores, status) = score_all(&mut worker, &samples, size);
                let off = furthest(&scores, &expected);
                println!("{family}, {placement:?}, batch {size}: at most {off:.1e} from PyTorch");
                assert!(off <= 1e-4);
                assert_eq!((status.defaulted, status.damaged, status.late), (0, 0, false));
                assert!(status.absent >= absent_at_least(&installed, &samples) && status.fresh > 0);
                let cached = worker.counters().cached_lookups > 0;
                assert!(placement.is_none_or(|p| cached == (p == Placement::Cached)));
                statuses.push(status);
                all.push(scores);
            }
        }

        assert!(statuses.iter().all(|s| *s == statuses[0]), "{family}: {statuses:?}");
        for scores in &all {
            assert!(
                same_bits(scores, &all[0]),
                "{family}: placement or batch size change the bits"
            );
        }
    }
}

/// Rows in fewer bits change a score by no more than the bound of their codec, beside that of the
/// narrow weights.
#[test]
fn coarser_codecs_stay_within_their_bounds() {
    for (codec, bound) in
        [(CodecChoice::F16, 5e-4), (CodecChoice::U8, 5e-3), (CodecChoice::U4, 5e-2)]
    {
        for family in FAMILIES {
            let mut scores: Vec<Vec<f32>> = Vec::new();
            for placement in [Placement::Resident, Placement::Cached] {
                let installed = installed(family, codec, Some(placement));
                let samples = probe(family, &installed);
                let expected = recorded(&samples);
                let (all, status) = score_all(&mut worker(&installed), &samples, 32);
                let off = furthest(&all, &expected);
                println!("{family}, {codec:?}, {placement:?}: at most {off:.1e} from PyTorch");
                let bound = bound + f64::from(SCORE_DIFFERENCE_MAX);
                assert!(off <= bound, "{family}, {codec:?}: {off}");
                assert_eq!((status.defaulted, status.damaged), (0, 0));
                scores.push(all);
            }
            assert!(
                same_bits(&scores[0], &scores[1]),
                "{family}, {codec:?}: placement changes the bits"
            );
        }
    }
}

/// The probe set in the bundle is the one that flash returns.
#[test]
fn the_probe_set_comes_back_from_flash() {
    for family in FAMILIES {
        let installed = installed(family, CodecChoice::F32, None);
        let flash = hatchback::flash::Flash::open(&hatchback::io::disk::system(), &installed.flash)
            .unwrap();
        assert_eq!(flash.probe().unwrap(), probe(family, &installed));
    }
}

/// The network of a bundle, its bytes in memory, and the scores of the probe set.
struct Served {
    onnx: Vec<u8>,
    bytes: u64,
    scores: Vec<f32>,
}

fn serve(family: &str, installed: &Installed) -> Served {
    let system = hatchback::io::disk::system();
    let flash = hatchback::flash::Flash::open(&system, &installed.flash).unwrap();
    let onnx = flash.dense().unwrap();
    let budget = Budget { cache_bytes_max: 1 << 20, ..tiny_budget(&installed.schema, 32) };
    let model = Model::from_flash(&flash, budget).unwrap();
    let weights = |line: &&(&str, u64)| line.0 == "dense network weights";
    let bytes = model.memory().lines().iter().find(weights).unwrap().1;
    let mut worker = Worker::new(Arc::new(model), Arc::new(SystemClock::default()));
    let scores = score_all(&mut worker, &probe(family, installed), 1).0;
    Served { onnx, bytes, scores }
}

/// `pack` keeps every probe score within the bound, even if int8 for all matrices does not. The
/// network then takes less of the bundle and of memory.
#[test]
fn the_weights_of_each_matrix_are_as_narrow_as_the_probe_set_bears() {
    for family in FAMILIES {
        let trained = serve(family, &install_unprobed(family, CodecChoice::F16, None));
        let chosen = serve(family, &installed(family, CodecChoice::F16, None));
        let off = furthest(&chosen.scores, &trained.scores);
        println!(
            "{family}: {} of {} bytes in memory, {} of {} in the bundle; scores move by {off:.1e}",
            chosen.bytes,
            trained.bytes,
            chosen.onnx.len(),
            trained.onnx.len()
        );
        assert!(off <= f64::from(SCORE_DIFFERENCE_MAX), "{family}");
        assert!(off > 0.0 && chosen.bytes < trained.bytes, "{family}");
        assert!(chosen.onnx.len() < trained.onnx.len(), "{family}");
        let again = serve(family, &installed(family, CodecChoice::F16, None));
        assert!(again.onnx == chosen.onnx, "{family}: the choice is not repeated");

        let own = std::fs::read(repository(&format!("tests/data/families/{family}/dense.onnx")));
        let all_bits = serve(family, &installed(family, CodecChoice::F32, None));
        assert!(trained.onnx == all_bits.onnx && all_bits.onnx == own.unwrap(), "{family}");
    }
}

/// Weights that were narrowed and widened again are narrowed to the same bits, and a file without
/// narrow weights is widened to itself.
#[test]
fn narrow_weights_are_a_form_of_the_file() {
    for family in FAMILIES {
        let path = repository(&format!("tests/data/families/{family}/dense.onnx"));
        let trained = std::fs::read(path).unwrap();
        assert_eq!(widen(trained.clone()).unwrap(), trained, "{family}");
        assert!(forms(&trained).unwrap().values().all(|form| *form == Weights::F32), "{family}");
        for weights in [Weights::F16, Weights::Int8] {
            let narrowed = narrow_all(&trained, weights).unwrap();
            let all = forms(&narrowed).unwrap();
            assert!(all.values().all(|form| *form == weights) && all.len() > 1, "{family}");
            let widened = widen(narrowed.clone()).unwrap();
            assert_eq!(forms(&widened).unwrap().len(), all.len(), "{family}");
            let again = narrow_all(&widened, weights).unwrap();
            let bits = |onnx: &[u8]| stored(onnx, weights);
            assert_eq!(bits(&again), bits(&narrowed), "{family}, {weights}");
            assert!(!bits(&again).is_empty(), "{family}, {weights}");
        }
    }
}

/// Returns the bytes of the weights of this form, by name.
fn stored(onnx: &[u8], weights: Weights) -> BTreeMap<String, Vec<u8>> {
    let of_form = match weights {
        Weights::F16 => FLOAT16,
        _ => INT8,
    };
    let graph = ModelProto::decode(onnx).unwrap().graph.unwrap();
    let narrow = graph.initializer.into_iter().filter(|t| t.data_type() == of_form);
    narrow.map(|t| (t.name().to_owned(), t.raw_data.unwrap_or_default().to_vec())).collect()
}

/// A trainer's own `DequantizeLinear` stands for its values: the network runs in f32, with the bits
/// of the widened file. Only `pack`'s own names ask for products in int8.
#[test]
fn the_dequantized_weights_of_a_trainer_are_values() {
    let inputs: &[(&str, usize)] = &[("dense", 3), ("emb", 48)];
    let load = |onnx: Vec<u8>| {
        DenseEngine::load(onnx, inputs, "logit", hatchback::Activation::Sigmoid).unwrap()
    };
    let path = repository("tests/data/families/dlrm/dense.onnx");
    let narrowed = narrow_all(&std::fs::read(path).unwrap(), Weights::Int8).unwrap();
    let has = |engine: &DenseEngine, form| engine.layers().iter().any(|l| l.weights == form);
    assert!(has(&load(narrowed.clone()), Weights::Int8));

    let mut model = ModelProto::decode(narrowed.as_slice()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    let other = |name: &mut String| {
        for ending in [".narrow", ".scale"] {
            if let Some(stem) = name.strip_suffix(ending) {
                *name = format!("{ending}{stem}");
            }
        }
    };
    graph.node.iter_mut().flat_map(|node| &mut node.input).for_each(other);
    graph.initializer.iter_mut().filter_map(|t| t.name.as_mut()).for_each(other);
    let theirs = model.encode_to_vec();
    let (engine, wide) = (load(theirs.clone()), load(widen(theirs).unwrap()));
    assert_eq!(engine.weights(), Some(Weights::F32));

    let data: Vec<Vec<f32>> =
        inputs.iter().map(|(_, n)| (0..8 * n).map(|i| (i as f32 * 0.37).sin()).collect()).collect();
    let scores = |engine: &DenseEngine| {
        let mut scores = vec![0.0; 8];
        engine.run(8, &data, &mut scores, &mut engine.scratch(8)).unwrap();
        scores
    };
    assert!(same_bits(&scores(&engine), &scores(&wide)));
}

/// A file that lists its weights as inputs too, as older exporters do, can be narrowed.
#[test]
fn weights_that_are_inputs_too_are_narrowed() {
    let trained = std::fs::read(repository("tests/data/families/dlrm/dense.onnx")).unwrap();
    let mut model = ModelProto::decode(trained.as_slice()).unwrap();
    let graph = model.graph.as_mut().unwrap();
    for tensor in &graph.initializer {
        let name = tensor.name.clone();
        graph.input.push(ValueInfoProto { name, r#type: None });
    }
    let narrowed = narrow_all(&model.encode_to_vec(), Weights::F16).unwrap();
    let inputs: &[(&str, usize)] = &[("dense", 3), ("emb", 48)];
    let activation = hatchback::Activation::Sigmoid;
    let engine = DenseEngine::load(narrowed, inputs, "logit", activation).unwrap();
    assert!(engine.layers().iter().any(|layer| layer.weights == Weights::F16));
}
