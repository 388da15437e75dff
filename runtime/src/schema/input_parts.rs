//! The parts of the dense network's inputs. All samples of a request share the columns of a part,
//! or each has its own: so the network computes once a request what only shared columns reach.
//! Never reads rows.

use crate::schema::{Feature, InputSource, NetworkInput, Schema};
use hatchback_kernels::dense::InputPart;
use hatchback_kernels::lookup::InputColumn;

/// What fills columns of an input: the source of an input is a list of these.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Item {
    /// A dense feature: its number among those that are shared, or among those that are not.
    Dense { first: usize, shared: bool },
    /// The vector of a lookup.
    Vector(usize),
    /// The length of the bag of a feature.
    Length(usize),
    /// The mask of the bag of a feature.
    Mask(usize),
}

impl Schema {
    /// Returns the parts of all network inputs: columns that follow each other and are all shared
    /// or all not.
    pub fn input_parts(&self) -> Vec<InputPart> {
        self.placed_inputs().0
    }

    /// Returns the parts, and each item with its first column, in the order of the inputs.
    pub(crate) fn placed_inputs(&self) -> (Vec<InputPart>, Vec<(Item, InputColumn)>) {
        let (mut parts, mut placed) = (Vec::<InputPart>::new(), Vec::new());
        for (input, declared) in self.network.inputs.iter().enumerate() {
            let vectors = matches!(declared.source, InputSource::Vectors(_));
            for (item, width, shared) in self.items(declared) {
                match parts.last_mut().filter(|p| p.input == input && p.shared == shared) {
                    Some(part) => part.width += width,
                    None => parts.push(InputPart { input, width, shared, vectors }),
                }
                let part = parts.len() - 1;
                placed.push((item, InputColumn { part, column: parts[part].width - width }));
            }
        }
        (parts, placed)
    }

    /// Returns the items of an input, with their widths and whether they are shared.
    fn items(&self, input: &NetworkInput) -> Vec<(Item, usize, bool)> {
        let feature = |f: &u16| (usize::from(*f), &self.features[usize::from(*f)]);
        match &input.source {
            InputSource::Dense => {
                let mut numbers = [0.., 0..];
                let taken = self.dense_features.iter().filter(|feature| !feature.retired);
                let item = |shared| {
                    let first = numbers[usize::from(shared)].next().unwrap_or(0);
                    (Item::Dense { first, shared }, 1, shared)
                };
                taken.map(|feature| feature.shared).map(item).collect()
            }
            InputSource::Vectors(lookups) => {
                let vector =
                    |l: usize| (Item::Vector(l), self.vector_width(l), self.feature_of(l).shared);
                lookups.iter().map(|l| vector(usize::from(*l))).collect()
            }
            InputSource::Lengths(features) => {
                let length = |(f, feature): (usize, &Feature)| (Item::Length(f), 1, feature.shared);
                features.iter().map(feature).map(length).collect()
            }
            InputSource::Masks(features) => {
                let mask = |(f, feature): (usize, &Feature)| {
                    (Item::Mask(f), feature.hotness_max as usize, feature.shared)
                };
                features.iter().map(feature).map(mask).collect()
            }
        }
    }
}
