//! The schema in manifests of format 1: its dense features are names, and its features have no key
//! of null, are not shared and not retired. Only reads.

use crate::schema::key_function::KeyFunction;
use crate::schema::lookup::Lookup;
use crate::schema::{DenseFeature, Feature, Network, Schema, Table};
use serde::Deserialize;

#[derive(Deserialize)]
pub(super) struct Schema1 {
    dense_features: Vec<String>,
    tables: Vec<Table>,
    features: Vec<Feature1>,
    lookups: Vec<Lookup>,
    network: Network,
}

#[derive(Deserialize)]
struct Feature1 {
    name: String,
    hotness_max: u32,
    weighted: bool,
    key: KeyFunction,
    padding: Option<u64>,
}

impl From<Schema1> for Schema {
    fn from(old: Schema1) -> Self {
        let Schema1 { dense_features, tables, features, lookups, network } = old;
        let dense_features = dense_features.iter().map(|name| DenseFeature::plain(name)).collect();
        let features = features.into_iter().map(Feature::from).collect();
        Self { dense_features, tables, features, lookups, network }
    }
}

impl From<Feature1> for Feature {
    fn from(old: Feature1) -> Self {
        let Feature1 { name, hotness_max, weighted, key, padding } = old;
        let (null, shared, retired) = (None, false, false);
        Self { name, hotness_max, weighted, key, padding, null, shared, retired }
    }
}
