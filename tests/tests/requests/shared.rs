//! Requests whose samples share features: one driver and many candidates. However a caller sends
//! the shared bags, the scores have the bits of samples that each have a copy, and a request looks
//! the bags up once.

use crate::request_path::{BATCH_MAX, model};
use hatchback::LookupStatus;
use hatchback::clock::SystemClock;
use hatchback::request::worker::{Worker, top_k};
use hatchback::schema::Schema;
use hatchback::schema::batch::{Bags, Batch, BatchError, DenseColumns};
use hatchback::schema::sample::Sample;
use hatchback_tests::models::{ModelPlan, batch_of, open_with_least_cache, tiny_budget};
use hatchback_tests::onnx;
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tools::pack::spec::{DenseSpec, ModelSpec};
use proptest::prelude::*;
use std::sync::Arc;

/// The bags of one feature in some samples.
struct Column {
    keys: Vec<u64>,
    offsets: Vec<u32>,
    weights: Vec<f32>,
}

impl Column {
    fn new(f: usize, samples: &[Sample]) -> Self {
        let mut column = Self { keys: vec![], offsets: vec![0], weights: vec![] };
        for sample in samples {
            column.keys.extend(&sample.sparse[f]);
            column.offsets.push(column.keys.len() as u32);
            column.weights.extend(sample.weights.get(f).into_iter().flatten());
        }
        column
    }

    fn bags(&self) -> Bags<'_> {
        Bags { keys: &self.keys, offsets: &self.offsets, weights: &self.weights }
    }
}

/// How a caller sends shared bags.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// One bag of each request, in columns.
    Once,
    /// One equal bag of each sample, in columns.
    Repeated,
    /// The bag with the first sample, sample by sample.
    FirstSample,
    /// One equal bag of each sample, sample by sample.
    EachSample,
}

/// Adds `samples`, which have equal shared bags, to `batch` as one request.
fn push(form: Form, schema: &Schema, batch: &mut Batch, samples: &[Sample]) {
    let dense = |shared: bool, samples: &[Sample]| -> Vec<f32> {
        let of = |sample: &Sample| {
            let dense = schema.dense_features.iter().zip(&sample.dense);
            dense.filter(|(f, _)| f.shared == shared).map(|(_, v)| *v).collect::<Vec<_>>()
        };
        samples.iter().flat_map(of).collect()
    };
    let mut columns = Vec::new();
    for (f, feature) in schema.features.iter().enumerate() {
        let is_once = feature.shared && matches!(form, Form::Once);
        columns
            .push(Column::new(f, if is_once { &samples[..samples.len().min(1)] } else { samples }));
    }
    if let Form::Once | Form::Repeated = form {
        let bags = |f: usize| Ok::<_, BatchError>(Some(columns[f].bags()));
        let shared_rows = if matches!(form, Form::Once) { 1 } else { samples.len() };
        let own = dense(false, samples);
        let shared = dense(true, &samples[..shared_rows.min(samples.len())]);
        let dense = DenseColumns { own: &own, shared: &shared, shared_rows };
        return batch.push_columns(schema, samples.len(), dense, bags).unwrap();
    }
    let dense = |at: usize| samples[at].dense.iter().copied();
    let bag = |at: usize, f: usize, keys: &mut Vec<u64>, weights: &mut Vec<f32>| {
        keys.extend(&samples[at].sparse[f]);
        weights.extend(samples[at].weights.get(f).into_iter().flatten());
        Ok::<(), BatchError>(())
    };
    let repeats = |_| matches!(form, Form::EachSample);
    batch.push_with(schema, samples.len(), dense, repeats, bag).unwrap();
}

/// Returns `sample` without its bags of shared features, or with these only.
fn part(schema: &Schema, sample: &Sample, shared: bool) -> Sample {
    let mut part = sample.clone();
    for (f, feature) in schema.features.iter().enumerate().filter(|(_, f)| f.shared != shared) {
        part.sparse[f].clear();
        if feature.weighted {
            part.weights[f].clear();
        }
    }
    part
}

/// Marks dense features of `spec` as shared.
fn share_dense(spec: &mut ModelSpec, shared: &[bool]) {
    for (dense, &shared) in spec.dense_features.iter_mut().zip(shared) {
        let name = dense.feature().name;
        *dense = DenseSpec::Table { name, missing: None, shared, retired: false };
    }
}

/// Returns the samples of a request: candidates with the shared bags and values of sample `driver`.
fn request(plan: &ModelPlan, dense_shared: &[bool], driver: u8, candidates: &[u8]) -> Vec<Sample> {
    let driver = plan.sample(u64::from(driver));
    let candidate = |id: &u8| {
        let mut sample = plan.sample(u64::from(*id));
        let dense = sample.dense.iter_mut().zip(&driver.dense).zip(dense_shared);
        dense.filter(|(_, shared)| **shared).for_each(|((own, driver), _)| *own = *driver);
        for (f, _) in plan.features.iter().enumerate().filter(|(_, f)| f.shared) {
            sample.sparse[f].clone_from(&driver.sparse[f]);
            if let Some(weights) = driver.weights.get(f) {
                sample.weights[f].clone_from(weights);
            }
        }
        sample
    };
    candidates.iter().map(candidate).collect()
}

/// Scores the requests of one batch in every form and compares them with the reference.
fn check(
    worker: &mut Worker,
    reference: &Reference,
    requests: &[Vec<Sample>],
) -> Result<(), TestCaseError> {
    let schema = Arc::clone(worker.model().schema());
    let samples = requests.concat();
    for form in [Form::Once, Form::Repeated, Form::FirstSample, Form::EachSample] {
        let mut batch = worker.model().batch();
        requests.iter().for_each(|samples| push(form, &schema, &mut batch, samples));
        let before = worker.counters();
        let scores = worker.score(&batch, None).unwrap();
        let outputs = scores.values.len() / samples.len().max(1);
        let mut all = scores.values.chunks(outputs.max(1)).zip(scores.statuses);
        let mut lookups = 0;
        for (first, sample) in requests.iter().flat_map(|r| r.iter().enumerate()) {
            let (score, status) = all.next().unwrap();
            prop_assert!(same_bits(score, &reference.output(sample)), "{form:?}");
            let mut expected = reference.status(&part(&schema, sample, false));
            if first == 0 {
                expected.add(&reference.status(&part(&schema, sample, true)));
            }
            prop_assert_eq!(*status, expected, "{:?}", form);
            lookups += expected.lookups();
        }
        prop_assert_eq!(worker.counters().since(&before).lookups, lookups);
    }
    // Sample by sample, each is a request of its own.
    let batch = batch_of(&Arc::clone(worker.model()), &samples);
    let scores = worker.score(&batch, None).unwrap();
    let mut sum = LookupStatus::default();
    samples.iter().for_each(|sample| sum.add(&reference.status(sample)));
    prop_assert_eq!(scores.status(), sum);
    let expected: Vec<f32> = samples.iter().flat_map(|s| reference.output(s)).collect();
    prop_assert!(same_bits(scores.values, &expected));
    Ok(())
}

/// Requests as the numbers of a driver and of candidates, batch by batch.
fn batches() -> impl Strategy<Value = Vec<Vec<(u8, Vec<u8>)>>> {
    let candidates = prop::collection::vec(0..40u8, 0..=BATCH_MAX as usize / 3);
    let requests = prop::collection::vec((0..40u8, candidates), 1..=3);
    prop::collection::vec(requests, 8)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 250,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// 250 models with 8 batches each.
    #[test]
    fn shared_bags_have_the_bits_of_their_copies_and_are_looked_up_once(
        plan in model(),
        shared in prop::collection::vec(any::<bool>(), 8),
        dense_shared in prop::collection::vec(any::<bool>(), 8),
        batches in batches(),
        more_inputs in any::<bool>(),
    ) {
        let mut plan = plan;
        plan.features.iter_mut().zip(shared).for_each(|(feature, is)| feature.shared = is);
        let mut spec = if more_inputs { plan.spec_with_bag_inputs() } else { plan.spec() };
        share_dense(&mut spec, &dense_shared);
        let packed = plan.pack_spec(&spec, onnx::concat);
        let reference = Reference::new(&packed.schema, &packed.rows);
        let budget = tiny_budget(&packed.schema, BATCH_MAX);
        let model = open_with_least_cache(&packed.install(), budget);
        let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
        for batch in &batches {
            let each = |(driver, ids): &(u8, Vec<u8>)| request(&plan, &dense_shared, *driver, ids);
            let requests: Vec<Vec<Sample>> = batch.iter().map(each).collect();
            check(&mut worker, &reference, &requests)?;
        }
    }
}

#[test]
fn a_line_of_candidates_is_a_request_with_the_values_that_they_share() {
    use hatchback::schema::{DenseFeature, Feature, Network};
    let schema = Schema {
        dense_features: vec![DenseFeature::plain("hour"), DenseFeature::plain("price")],
        tables: vec![],
        features: vec![
            Feature { shared: true, weighted: true, ..Feature::plain("user", 3) },
            Feature::plain("item", 2),
        ],
        lookups: vec![],
        network: Network { inputs: vec![], outputs: vec![] },
    };
    let of = |line: &str| Sample::request_from_json(line, &schema).map_err(|e| e.to_string());
    let user = r#""dense": {"hour": 9}, "sparse": {"user": [7, 8]}, "weights": {"user": [1, 2]}"#;
    let items = r#"{"dense": {"price": 2}, "sparse": {"item": [4]}}, {"dense": {"price": 3}}"#;
    let samples = of(&format!(r#"{{{user}, "candidates": [{items}]}}"#)).unwrap();
    let sample = |price: f32, item: &[u64]| Sample {
        dense: vec![9.0, price],
        sparse: vec![vec![7, 8], item.to_vec()],
        weights: vec![vec![1.0, 2.0], vec![]],
        ..Sample::default()
    };
    assert_eq!(samples, [sample(2.0, &[4]), sample(3.0, &[])]);
    let mut batch = Batch::new(&schema, 3);
    batch.push_request(&schema, &samples).unwrap();
    assert_eq!((batch.ends(), batch.bags(0).keys), ([2].as_slice(), [7, 8].as_slice()));
    let before = format!("{batch:?}");
    assert_eq!(batch.push_request(&schema, &samples), Err(BatchError::Full(3)));
    assert_eq!(format!("{batch:?}"), before);
    let mut other = samples.clone();
    other[1].weights[0][1] = 3.0;
    batch.clear();
    let error = batch.push_request(&schema, &other).unwrap_err().to_string();
    assert!(error.contains("feature `user` is shared: sample 1 differs"), "{error}");
    assert!(batch.is_empty());

    for (line, said) in [
        (
            r#"{"sparse": {"item": [1]}, "candidates": [{"sparse": {"item": [2]}}]}"#,
            "candidates[0].sparse.item: is also in the request of the candidate",
        ),
        (
            r#"{"dense": [1, 2], "candidates": [{"dense": {"price": 2}}]}"#,
            "candidates[0].dense: is also in the request",
        ),
        (
            r#"{"dense": [1, 2], "candidates": [{}, {"candidates": []}]}"#,
            "candidates[1].candidates: a line of several samples is not taken here",
        ),
        (
            r#"{"dense": [1, 2], "candidates": [{"sparse": {"item": [1, 2, 3]}}]}"#,
            "candidates[0].sparse.item: 3 keys, at most 2 fit",
        ),
        (r#"{"dense": [1, 2], "label": 1, "candidates": []}"#, "candidates: the label"),
    ] {
        let refused = of(line).unwrap_err();
        assert!(refused.contains(said), "{refused}");
    }
    assert_eq!(of(r#"{"dense": [1, 2], "candidates": []}"#), Ok(vec![]));
    let error = Sample::from_json(r#"{"candidates": []}"#, &schema).unwrap_err().to_string();
    assert!(error.contains("is not taken here"), "{error}");
}

proptest! {
    #[test]
    fn the_best_samples_are_those_of_a_stable_sort(
        scores in prop::collection::vec((0..6u8).prop_map(|n| f32::from(n) - 2.5), 0..60),
        outputs in 1..4usize,
        column in 0..3usize,
        k in 0..40usize,
    ) {
        let (column, rows) = (column.min(outputs - 1), scores.len() / outputs);
        let mut order: Vec<u32> = (0..rows as u32).collect();
        let score = |row: &u32| scores[*row as usize * outputs + column];
        order.sort_by(|a, b| score(b).total_cmp(&score(a)));
        order.truncate(k);
        let mut best = vec![7; k];
        prop_assert_eq!(top_k(&scores[..rows * outputs], outputs, column, &mut best), order);
    }
}

#[test]
fn a_shared_bag_that_differs_in_a_request_is_refused_by_its_feature_and_changes_nothing() {
    use hatchback::schema::{Feature, Network};
    let schema = Schema {
        dense_features: vec![],
        tables: vec![],
        features: vec![
            Feature { shared: true, ..Feature::plain("user", 3) },
            Feature::plain("item", 2),
        ],
        lookups: vec![],
        network: Network { inputs: vec![], outputs: vec![] },
    };
    let mut batch = Batch::new(&schema, 4);
    let items = Bags::new(&[1, 2], &[0, 1, 2]);
    let users = Bags::new(&[7, 8], &[0, 1, 2]);
    let before = format!("{batch:?}");
    let bags = |f: usize| Ok::<_, BatchError>(Some([users, items][f]));
    let error = batch.push_columns(&schema, 2, &[0.0; 0], bags).unwrap_err();
    let said = "feature `user` is shared: sample 1 differs from the request's first";
    assert_eq!(error.to_string(), said);
    assert_eq!(format!("{batch:?}"), before);

    let push = |batch: &mut Batch, users: [u64; 2]| {
        let bag = |at: usize, f: usize, keys: &mut Vec<u64>, _: &mut Vec<f32>| {
            keys.push([users[at], 1][f]);
            Ok::<(), BatchError>(())
        };
        batch.push_with(&schema, 2, |_| [].into_iter(), |_| true, bag)
    };
    push(&mut batch, [7, 7]).unwrap();
    let before = format!("{batch:?}");
    assert_eq!(push(&mut batch, [7, 8]).unwrap_err().to_string(), said);
    assert_eq!(format!("{batch:?}"), before);
    assert_eq!((batch.ends(), batch.bags(0).keys), ([2].as_slice(), [7].as_slice()));
}
