//! The vectors that the lookups of a schema make: their names and widths, and the check of the
//! lookups. Never reads rows.

use crate::limits::LOOKUPS_MAX;
use crate::schema::lookup::Lookup;
use crate::schema::{Feature, KeySpace, Schema, SchemaError, Table, fault};
use hatchback_kernels::lookup::Pooling;
use std::collections::HashSet;

impl Schema {
    /// Returns the feature of lookup `l`.
    pub fn feature_of(&self, l: usize) -> &Feature {
        &self.features[usize::from(self.lookups[l].feature)]
    }

    /// Returns the table of lookup `l`.
    pub fn table_of(&self, l: usize) -> &Table {
        &self.tables[usize::from(self.lookups[l].table)]
    }

    /// Returns the lookups of feature `f`.
    pub fn lookups_of(&self, f: usize) -> impl Iterator<Item = &Lookup> {
        self.lookups.iter().filter(move |lookup| usize::from(lookup.feature) == f)
    }

    /// Returns the values per sample of the vector of lookup `l`: those of `hotness_max` rows for
    /// the pooling `none`, else those of one row.
    pub fn vector_width(&self, l: usize) -> usize {
        let rows = match self.lookups[l].pooling {
            Pooling::None => self.feature_of(l).hotness_max as usize,
            _ => 1,
        };
        rows * self.table_of(l).dim as usize
    }

    /// Returns the name of the vector of lookup `l`: that of its feature, or `feature@table` if the
    /// feature has several tables.
    pub fn vector_name(&self, l: usize) -> String {
        let (feature, table) = (self.feature_of(l), self.table_of(l));
        match self.lookups_of(self.lookups[l].feature.into()).nth(1) {
            None => feature.name.clone(),
            Some(_) => format!("{}@{}", feature.name, table.name),
        }
    }

    /// Returns whether both look up the same features in the same tables, and pool alike. The key
    /// functions may differ.
    pub(crate) fn has_lookups_of(&self, other: &Self) -> bool {
        let same = |(a, b): (&Feature, &Feature)| *a == Feature { key: a.key.clone(), ..b.clone() };
        self.features.len() == other.features.len()
            && self.features.iter().zip(&other.features).all(same)
            && self.lookups == other.lookups
    }

    /// Returns whether both fill missing values and make keys alike.
    pub(crate) fn fills_as(&self, other: &Self) -> bool {
        let [missing, of_other] = [self, other].map(|s| s.dense_features.iter().map(|d| d.missing));
        let [keys, keys_of_other] = [self, other].map(|s| s.features.iter().map(|f| &f.key));
        missing.eq(of_other) && keys.eq(keys_of_other)
    }

    /// Returns the largest number of keys of one sample.
    pub fn keys_max(&self) -> usize {
        self.features.iter().filter(|f| !f.retired).map(|f| f.hotness_max as usize).sum()
    }

    /// Returns the largest number of rows that one sample looks up.
    pub fn lookups_max(&self) -> usize {
        (0..self.lookups.len()).map(|l| self.feature_of(l).hotness_max as usize).sum()
    }

    /// Returns the largest number of weights that multiply the rows of one sample.
    pub fn weights_max(&self) -> usize {
        let features = (0..self.lookups.len()).map(|l| self.feature_of(l));
        features.filter(|f| f.weighted).map(|f| f.hotness_max as usize).sum()
    }

    /// Checks the lookups against the features and the tables.
    pub(super) fn check_lookups(&self) -> Result<(), SchemaError> {
        if self.lookups.len() > LOOKUPS_MAX {
            return fault("lookup", format!("has more than {LOOKUPS_MAX} entries"));
        }
        let (features, tables) = (self.features.len(), self.tables.len());
        let mut seen = HashSet::new();
        // One search of a vocabulary for each feature, however many tables it has.
        let keys_max: Vec<Option<u64>> = self.features.iter().map(|f| f.key.key_max()).collect();
        for (l, &Lookup { feature, table, pooling }) in self.lookups.iter().enumerate() {
            let (f, t) = (usize::from(feature), usize::from(table));
            if f >= features {
                return fault(
                    format!("lookup[{l}].feature"),
                    format!("{f} of {features} features"),
                );
            }
            if t >= tables {
                return fault(format!("lookup[{l}].table"), format!("{t} of {tables} tables"));
            }
            if !seen.insert((feature, table)) {
                let problem = format!("`{}` occurs twice", self.tables[t].name);
                return fault(format!("feature[{f}].table"), problem);
            }
            if self.features[f].weighted && matches!(pooling, Pooling::None | Pooling::Max) {
                let problem =
                    format!("weights with {pooling:?} pooling, only sum, mean and sqrtn take them");
                return fault(format!("feature[{f}].weights"), problem);
            }
            self.check_key(f, keys_max[f], &self.tables[t])?;
        }

        if let Some(f) = self.features.iter().position(|f| f.retired && f.shared) {
            return fault(format!("feature[{f}].shared"), "is set, and the feature is retired");
        }
        let mut is_looked_up = vec![false; features];
        self.lookups.iter().for_each(|l| is_looked_up[usize::from(l.feature)] = true);
        let is_wrong = |(f, is_looked_up): (&Feature, &bool)| f.retired == *is_looked_up;
        match self.features.iter().zip(&is_looked_up).position(is_wrong) {
            Some(f) if self.features[f].retired => {
                fault(format!("feature[{f}].retired"), "is set, and the feature has a table")
            }
            Some(f) => fault(format!("feature[{f}].table"), "is empty"),
            None => self.check_vector_names(),
        }
    }

    /// Checks the key function of feature `f`, with keys up to `key_max`, against a table of it.
    fn check_key(&self, f: usize, key_max: Option<u64>, table: &Table) -> Result<(), SchemaError> {
        let refuse = |problem: String| fault(format!("feature[{f}].key"), problem);
        match (table.keys, key_max) {
            (KeySpace::Index, Some(last)) if last >= table.rows => refuse(format!(
                "makes keys up to {last}, the table `{}` has {} rows",
                table.name, table.rows
            )),
            (KeySpace::Sparse, _) if self.features[f].key.may_be_unknown() => refuse(format!(
                "a sparse table such as `{}` may have any key; say what an unknown word becomes",
                table.name
            )),
            (KeySpace::Index, _) => match self.features[f].null {
                Some(key) if key >= table.rows => fault(
                    format!("feature[{f}].null"),
                    format!("{key}, the table `{}` has {} rows", table.name, table.rows),
                ),
                _ => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Checks that no `feature@table` is the name of a feature or of another vector.
    fn check_vector_names(&self) -> Result<(), SchemaError> {
        let mut seen: HashSet<String> = self.features.iter().map(|f| f.name.clone()).collect();
        for l in 0..self.lookups.len() {
            let vector = format!("{}@{}", self.feature_of(l).name, self.table_of(l).name);
            if seen.contains(&vector) {
                // Two vectors have one name only if the name of one of the features has an `@`.
                let culprit = |f: &Feature| f.name.contains('@') && vector.starts_with(&f.name);
                let f = self.features.iter().position(culprit).unwrap_or_default();
                let problem = format!("makes `{vector}` ambiguous; name the feature without `@`");
                return fault(format!("feature[{f}].name"), problem);
            }
            seen.insert(vector);
        }
        Ok(())
    }
}
