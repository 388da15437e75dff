//! Manifests whose schema, network or probe set contradicts itself or the rows.

use hatchback::Pooling;
use hatchback::bundle::manifest::Manifest;
use hatchback::limits::{FEATURES_MAX, HOTNESS_MAX, LOOKUPS_MAX};
use hatchback::schema::lookup::Lookup;
use hatchback::schema::{DenseFeature, Feature, InputSource, KeySpace};
use hatchback_tests::rewrite::Parts;
use hatchback_tests::victim::{HASHED, HOT, INDEXED, Victim};

#[test]
fn lookups_that_contradict_the_schema() {
    let victim = Victim::default();
    let refused = |change: &dyn Fn(&mut Manifest), text: &str| {
        victim.refuses_manifest(change, &["attack.bundle: manifest: schema: ", text]);
    };
    refused(&|m| m.schema.lookups[1].table = 3, "lookup[1].table: 3 of 3 tables");
    refused(&|m| m.schema.lookups[1].table = u16::MAX, "lookup[1].table: 65535 of 3 tables");
    refused(&|m| m.schema.lookups[2].feature = 3, "lookup[2].feature: 3 of 3 features");
    refused(&|m| m.schema.lookups[2].feature = u16::MAX, "lookup[2].feature: 65535 of 3 features");
    refused(&|m| m.schema.lookups.truncate(2), "feature[2].table: is empty");
    let retire = |m: &mut Manifest| m.schema.features[2].retired = true;
    refused(&retire, "feature[2].retired: is set, and the feature has a table");
    let both = |m: &mut Manifest| (retire(m), m.schema.features[2].shared = true).1;
    refused(&both, "feature[2].shared: is set, and the feature is retired");
    refused(
        &|m| {
            let all = (0..3).flat_map(|feature| (0..3).map(move |table| (feature, table)));
            let lookup = |(feature, table)| Lookup { feature, table, pooling: Pooling::Sum };
            m.schema.lookups = all.cycle().take(LOOKUPS_MAX + 1).map(lookup).collect();
        },
        "lookup: has more than 4096 entries",
    );
    let again = |m: &mut Manifest| m.schema.lookups.push(m.schema.lookups[0]);
    refused(&again, "feature[0].table: `t0` occurs twice");
    let other = |m: &mut Manifest| {
        let table = (m.schema.lookups[0].table + 1) % 3;
        m.schema.lookups.push(Lookup { table, ..m.schema.lookups[0] });
    };
    refused(&other, "feature[0]: `f0@t1` feeds no input with its vectors");
    refused(
        &|m| (m.schema.features[0].weighted, m.schema.lookups[0].pooling) = (true, Pooling::Max),
        "feature[0].weights: weights with Max pooling",
    );
    let at = |m: &mut Manifest| m.schema.features[1].name = "f0@t0".to_owned();
    refused(&at, "feature[1].name: makes `f0@t0` ambiguous");
}

#[test]
fn schemas_that_contradict_themselves() {
    let victim = Victim::default();
    let refused = |change: &dyn Fn(&mut Manifest), text: &str| {
        victim.refuses_manifest(change, &["attack.bundle: manifest: schema: ", text]);
    };
    refused(&|m| m.schema.features[2].hotness_max = 0, "feature[2].hotness_max: 0 is not in");
    refused(
        &|m| m.schema.features[2].hotness_max = HOTNESS_MAX as u32 + 1,
        "feature[2].hotness_max: 4097",
    );
    refused(&|m| m.schema.features[2].hotness_max = u32::MAX, "feature[2].hotness_max");
    refused(&|m| m.schema.tables[0].dim = 0, "table[0].dim: 0 is not in");
    refused(&|m| m.schema.tables[0].dim = u32::MAX, "table[0].dim");
    refused(
        &|m| m.schema.tables[1].dim = 1017,
        "table[1].dim: 1017 takes 4068 bytes a row, over 4064",
    );
    refused(&|m| m.schema.tables[0].dim = 19, "table[0].default_row: is not 19 finite values");
    refused(&|m| m.schema.tables[0].default_row[1] = f32::NAN, "table[0].default_row: is not");
    refused(&|m| m.schema.tables[0].unit_exp = 65, "table[0].unit_exp: 65 does not fit u8");
    refused(&|m| m.schema.tables[0].unit_exp = i8::MIN, "table[0].unit_exp: -128 does not fit u8");
    refused(&|m| m.schema.tables[1].unit_exp = 1, "table[1].unit_exp: 1 does not fit f32");
    refused(&|m| m.schema.tables[1].name = "t0".to_owned(), "table[1].name: `t0` occurs twice");
    refused(&|m| m.schema.features[1].name = String::new(), "feature[1].name");
    refused(&|m| m.schema.features[1].name = "a\nb".to_owned(), "feature[1].name: `a\\nb`");
    refused(&|m| m.schema.dense_features[1].name = "x".repeat(121), "dense_features[1].name");
    refused(
        &|m| drop(m.schema.network.inputs.remove(0)),
        "network.input: 0 inputs take the 2 dense features",
    );
    refused(&|m| drop(m.schema.network.inputs.pop()), "feature[0]: `f0` feeds no input");

    let feed = |lookups: Vec<u16>| {
        move |m: &mut Manifest| {
            m.schema.network.inputs[1].source = InputSource::Vectors(lookups.clone())
        }
    };

    refused(&feed(vec![0, 1, 2, 9]), "network.input[1].features: no lookup 9");
    refused(&feed(vec![0, 1, 1]), "feature[2]: `f2` feeds no input");
    refused(&feed(vec![]), "network.input[1].features: is empty");

    // Every feature is within its limits, but a sample would take gigabytes.
    let wide = |m: &mut Manifest| {
        let more = |i| Feature::plain(&format!("wide{i}"), HOTNESS_MAX as u32);
        m.schema.features.extend((3..FEATURES_MAX).map(more));
        let all = 0..FEATURES_MAX as u16;
        let lookup = |feature| Lookup { feature, table: 0, pooling: Pooling::None };
        m.schema.lookups.extend(all.clone().skip(3).map(lookup));
        m.schema.network.inputs[1].source = InputSource::Vectors(all.collect());
    };

    refused(&wide, "network.input[1]: is wider than");
}

/// A consistent manifest that does not match the rows of its bundle.
#[test]
fn a_schema_that_does_not_fit_the_rows() {
    let victim = Victim::default();
    let refused = |table: usize, change: &dyn Fn(&mut hatchback::schema::Table)| {
        let file = format!("t{table:04}-0000.seg: ");
        victim.refuses_manifest(|m| change(&mut m.schema.tables[table]), &[&file]);
    };
    refused(INDEXED, &|t| t.keys = KeySpace::Sparse);
    refused(HASHED, &|t| t.keys = KeySpace::Index);
    refused(HASHED, &|t| t.codec = hatchback::Codec::U4);
    refused(HASHED, &|t| t.unit_exp = 1);
    refused(HOT, &|t| t.codec = hatchback::Codec::F32);
    refused(INDEXED, &|t| (t.dim, t.default_row) = (7, vec![0.0; 7]));
    refused(INDEXED, &|t| (t.dim, t.default_row) = (1000, vec![0.0; 1000]));
    victim.refuses_manifest(
        |m| m.generation.sequence = 7,
        &["t0000-0000.seg: page 0: belongs to segment"],
    );
}

#[test]
fn a_network_that_does_not_fit_the_schema() {
    let victim = Victim::default();
    let refused = |change: &dyn Fn(&mut Parts), text: &str| {
        victim.refuses(&victim.attacked(change), &["attack.bundle: ", text]);
    };
    let dense = victim.next.manifest.dense;
    refused(&|p| p.set_content(dense, b"no network"), "dense network");
    refused(&|p| p.set_content(dense, b""), "dense network");
    refused(
        &|p| p.manifest.schema.network.outputs[0].name = "logit".to_owned(),
        "no output named `logit`",
    );
    refused(
        &|p| p.manifest.schema.network.inputs[0].name = "x".to_owned(),
        "dense network: input `dense`",
    );
    let more = DenseFeature::plain("more");
    refused(&|p| p.manifest.schema.dense_features.push(more.clone()), "the schema feeds 3");
}

#[test]
fn a_probe_set_that_does_not_decode() {
    let victim = Victim::default();
    let probe = victim.next.manifest.probe.unwrap();
    for (set, text) in [
        (&[9, 0, 0, 0, 0][..], "format 9 is not 1"),
        (&[1, 0, 0], "3 bytes are too few"),
        (&[1, 0, 0, 0], "does not decode"),
        (&[1, 0, 0, 0, 0, 0], "1 bytes follow the set"),
        (&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0x7f], "does not decode"),
    ] {
        victim.refuses(
            &victim.attacked(|p| p.set_content(probe, set)),
            &["attack.bundle: probe set: ", text],
        );
    }
}
