//! The schema in manifests of format 1 and 2. It has a network with one output and features that
//! take keys, and each feature feeds one input. A schema that fits this form is still written in
//! it, so that older versions can read it.

use crate::schema::key_function::KeyFunction;
use crate::schema::{Feature, InputSource, Network, NetworkInput, NetworkOutput, Schema, Table};
use hatchback_kernels::dense::Activation;
use hatchback_kernels::lookup::Pooling;
use serde::{Deserialize, Serialize};

/// A schema of format 1 and 2.
#[derive(Serialize, Deserialize)]
pub(super) struct PlainSchema {
    dense_features: Vec<String>,
    tables: Vec<Table>,
    features: Vec<PlainFeature>,
    network: PlainNetwork,
}

#[derive(Serialize, Deserialize)]
struct PlainFeature {
    name: String,
    table: u16,
    pooling: PlainPooling,
    hotness_max: u32,
}

#[derive(Serialize, Deserialize)]
enum PlainPooling {
    Sum,
    Mean,
    None,
}

#[derive(Serialize, Deserialize)]
struct PlainNetwork {
    inputs: Vec<PlainInput>,
    output: String,
    activation: Activation,
}

#[derive(Serialize, Deserialize)]
struct PlainInput {
    name: String,
    source: PlainSource,
}

#[derive(Serialize, Deserialize)]
enum PlainSource {
    Dense,
    Features(Vec<u16>),
}

impl PlainSchema {
    /// Returns `schema` in this form; `None` if it needs more than the form has.
    pub fn of(schema: &Schema) -> Option<Self> {
        let [output] = schema.network.outputs.as_slice() else { return None };
        let mut is_fed = vec![false; schema.features.len()];
        let mut input = |input: &NetworkInput| {
            let source = match &input.source {
                InputSource::Dense => PlainSource::Dense,
                InputSource::Features(features) => {
                    for &f in features {
                        let fed = is_fed.get_mut(usize::from(f))?;
                        if std::mem::replace(fed, true) {
                            return None;
                        }
                    }
                    PlainSource::Features(features.clone())
                }
                InputSource::Lengths(_) | InputSource::Masks(_) => return None,
            };
            Some(PlainInput { name: input.name.clone(), source })
        };

        Some(Self {
            dense_features: schema.dense_features.clone(),
            tables: schema.tables.clone(),
            features: schema.features.iter().map(plain_feature).collect::<Option<_>>()?,
            network: PlainNetwork {
                inputs: schema.network.inputs.iter().map(&mut input).collect::<Option<_>>()?,
                output: output.name.clone(),
                activation: output.activation,
            },
        })
    }
}

fn plain_feature(feature: &Feature) -> Option<PlainFeature> {
    if feature.weighted || feature.key != KeyFunction::Key {
        return None;
    }
    let pooling = match feature.pooling {
        Pooling::Sum => PlainPooling::Sum,
        Pooling::Mean => PlainPooling::Mean,
        Pooling::None => PlainPooling::None,
        Pooling::Sqrtn | Pooling::Max => return None,
    };
    let (name, table, hotness_max) = (feature.name.clone(), feature.table, feature.hotness_max);
    Some(PlainFeature { name, table, pooling, hotness_max })
}

impl From<PlainSchema> for Schema {
    fn from(from: PlainSchema) -> Self {
        let PlainSchema { dense_features, tables, features, network } = from;
        let pooling = |pooling| match pooling {
            PlainPooling::Sum => Pooling::Sum,
            PlainPooling::Mean => Pooling::Mean,
            PlainPooling::None => Pooling::None,
        };
        let feature =
            |f: PlainFeature| Feature::plain(&f.name, f.table, pooling(f.pooling), f.hotness_max);
        let input = |input: PlainInput| {
            let source = match input.source {
                PlainSource::Dense => InputSource::Dense,
                PlainSource::Features(features) => InputSource::Features(features),
            };
            NetworkInput { name: input.name, source }
        };
        let PlainNetwork { inputs, output: name, activation } = network;
        Self {
            dense_features,
            tables,
            features: features.into_iter().map(feature).collect(),
            network: Network {
                inputs: inputs.into_iter().map(input).collect(),
                outputs: vec![NetworkOutput { name, activation }],
            },
        }
    }
}
