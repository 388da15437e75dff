//! What a generation may change of the one before it. Callers name sparse features and outputs, and
//! know the order of dense features, features and outputs: the lists only grow, at their ends. An
//! input that the model no longer needs stays in its list as retired. Compares schemas only.

use crate::schema::{DenseFeature, Feature, Schema};

/// A change with which requests of callers of the older generation would fail or mean something
/// else.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} `{name}`: {problem}")]
pub struct ChangeError {
    /// The list of the schema, such as `feature`.
    pub field: &'static str,
    /// The name of the entry.
    pub name: String,
    /// Why it is refused.
    pub problem: String,
}

fn refuse<T>(
    field: &'static str,
    name: &str,
    problem: impl Into<String>,
) -> Result<T, ChangeError> {
    Err(ChangeError { field, name: name.to_owned(), problem: problem.into() })
}

/// Checks that every request that fits `old` fits `new` and means the same.
///
/// # Errors
/// [`ChangeError`] with the first change that callers would notice.
pub fn check_change(old: &Schema, new: &Schema) -> Result<(), ChangeError> {
    check_order("dense feature", &names(old.dense_names()), &names(new.dense_names()))?;
    for (a, b) in old.dense_features.iter().zip(&new.dense_features) {
        check_dense(a, b)?;
    }
    let added = new.dense_features.iter().skip(old.dense_features.len());
    if let Some(DenseFeature { name, .. }) = added.into_iter().find(|d| !d.may_be_absent()) {
        let problem = "is new, so it needs `missing`, the value for callers that do not send it";
        return refuse("dense feature", name, problem);
    }

    let features = |schema: &Schema| names(schema.features.iter().map(|f| &f.name));
    check_order("feature", &features(old), &features(new))?;
    let added = new.features.iter().skip(old.features.len()).map(|feature| &feature.name);
    if let Some(name) = added.into_iter().find(|name| is_of_tensor(name)) {
        return refuse("feature", name, "is the name of a tensor that callers may send already");
    }
    let mut both = old.features.iter().zip(&new.features);
    both.try_for_each(|(a, b)| check_feature(a, b))?;

    // Callers of a model with one output never see its name, so it may change.
    let outputs = |schema: &Schema| names(schema.network.outputs.iter().map(|o| &o.name));
    match (outputs(old).as_slice(), outputs(new).as_slice()) {
        ([_], [_]) => Ok(()),
        ([_], several) => {
            let problem = "is new, and callers take `score` for the scores of one output";
            refuse("output", &several[several.len() - 1], problem)
        }
        (old, new) => check_order("output", old, new),
    }
}

/// Returns whether the front door derives `name` from another feature, or uses it for dense ones.
fn is_of_tensor(name: &str) -> bool {
    let parts = [".keys", ".offsets", ".weights", ".values"];
    let dense = ["dense", "dense.shared", "dense_features", "shared_dense"];
    dense.contains(&name) || parts.iter().any(|part| name.ends_with(part))
}

fn names<'a>(names: impl Iterator<Item = &'a String>) -> Vec<String> {
    names.cloned().collect()
}

/// Checks that `new` begins with the names in `old`.
fn check_order(field: &'static str, old: &[String], new: &[String]) -> Result<(), ChangeError> {
    let Some((at, name)) = old.iter().enumerate().find(|(at, name)| new.get(*at) != Some(name))
    else {
        return Ok(());
    };
    if new.contains(name) {
        let problem = format!("stood at place {at}, which callers rely on; add others at the end");
        return refuse(field, name, problem);
    }
    match field {
        "output" => refuse(field, name, "is gone, and callers read it"),
        _ => refuse(field, name, "is gone; keep its entry with `retired = true`"),
    }
}

fn check_dense(a: &DenseFeature, b: &DenseFeature) -> Result<(), ChangeError> {
    check_retired("dense feature", &a.name, a.retired && !b.retired)?;
    if a.shared != b.shared {
        return refuse("dense feature", &a.name, "shared: only one generation shares it");
    }
    // The fill of a missing value may change as the weights do, but not disappear: callers that
    // leave values out would then be refused.
    if a.missing.is_some() && !b.may_be_absent() {
        return refuse("dense feature", &a.name, "may no longer be missing");
    }
    Ok(())
}

fn check_feature(a: &Feature, b: &Feature) -> Result<(), ChangeError> {
    check_retired("feature", &a.name, a.retired && !b.retired)?;
    let problem = match () {
        () if b.retired => return Ok(()),
        () if a.hotness_max > b.hotness_max => {
            format!("hotness_max: {} instead of {}", b.hotness_max, a.hotness_max)
        }
        () if a.shared != b.shared => "shared: only one generation shares it".to_owned(),
        () if a.weighted != b.weighted => "weights: only one generation has them".to_owned(),
        () if !a.key.is_extended_by(&b.key) || a.null != b.null => {
            "key: makes other keys of the same values".to_owned()
        }
        () => return Ok(()),
    };
    refuse("feature", &a.name, problem)
}

/// Refuses the return of a retired name: nothing was checked of what callers have sent since.
fn check_retired(field: &'static str, name: &str, returns: bool) -> Result<(), ChangeError> {
    if returns { refuse(field, name, "was retired; give it another name") } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schema::key_function::KeyFunction;
    use crate::schema::{Network, NetworkOutput};
    use hatchback_kernels::dense::Activation;

    fn schema(dense: &[&str], features: &[&str], outputs: &[&str]) -> Schema {
        let activation = Activation::Sigmoid;
        let output = |name: &&str| NetworkOutput { name: (*name).to_owned(), activation };
        Schema {
            dense_features: dense.iter().map(|name| DenseFeature::plain(name)).collect(),
            tables: vec![],
            features: features.iter().map(|name| Feature::plain(name, 2)).collect(),
            lookups: vec![],
            network: Network { inputs: vec![], outputs: outputs.iter().map(output).collect() },
        }
    }

    #[test]
    fn lists_grow_at_their_ends_and_entries_retire() {
        let old = schema(&["a", "b"], &["f", "g"], &["x", "y"]);
        let mut new = schema(&["a", "b", "c"], &["f", "g", "h"], &["x", "y", "z"]);
        new.dense_features[2].missing = Some(0.0);
        assert_eq!(check_change(&old, &new), Ok(()));
        new.dense_features[0].retired = true;
        new.features[1] = Feature { retired: true, ..Feature::plain("g", 1) };
        assert_eq!(check_change(&old, &new), Ok(()));
        let one = |name| schema(&[], &[], &[name]);
        assert_eq!(check_change(&one("x"), &one("y")), Ok(()), "callers see `score`");
    }

    #[test]
    fn each_change_that_callers_would_notice_is_refused_by_name() {
        type Change = fn(&mut Schema);
        let cases: [(Change, &str); 17] = [
            (|s| drop(s.dense_features.remove(0)), "dense feature `a`: is gone; keep"),
            (|s| s.dense_features.swap(0, 1), "dense feature `a`: stood at place 0"),
            (|s| s.dense_features.push(DenseFeature::plain("n")), "dense feature `n`: is new"),
            (|s| s.dense_features[1].missing = None, "dense feature `b`: may no longer be"),
            (|s| s.dense_features[0].shared = true, "dense feature `a`: shared: only one"),
            (|s| s.dense_features[2].retired = false, "dense feature `c`: was retired"),
            (|s| s.features.push(Feature::plain("f.values", 1)), "feature `f.values`: is the name"),
            (|s| s.features.push(Feature::plain("dense", 1)), "feature `dense`: is the name"),
            (|s| s.features.truncate(2), "feature `h`: is gone; keep"),
            (|s| s.features.insert(0, Feature::plain("n", 1)), "feature `f`: stood at place 0"),
            (|s| s.features[0].hotness_max = 1, "feature `f`: hotness_max: 1 instead of 2"),
            (|s| s.features[0].weighted = true, "feature `f`: weights: only one"),
            (|s| s.features[0].shared = true, "feature `f`: shared: only one"),
            (|s| s.features[0].null = Some(3), "feature `f`: key: makes other keys"),
            (
                |s| s.features[0].key = KeyFunction::Modulo { divisor: 2, first: 0 },
                "feature `f`: key: makes other keys",
            ),
            (|s| s.features[2].retired = false, "feature `h`: was retired"),
            (|s| drop(s.network.outputs.pop()), "output `y`: is gone, and callers read it"),
        ];
        let mut old = schema(&["a", "b", "c"], &["f", "g", "h"], &["x", "y"]);
        old.dense_features[1].missing = Some(1.0);
        old.dense_features[2].retired = true;
        old.features[2].retired = true;
        for (change, expected) in cases {
            let mut new = old.clone();
            change(&mut new);
            let refused = check_change(&old, &new).unwrap_err().to_string();
            assert!(refused.starts_with(expected), "{refused}");
        }
        let more = schema(&[], &[], &["x", "y"]);
        let refused = check_change(&schema(&[], &[], &["x"]), &more).unwrap_err();
        assert_eq!((refused.field, refused.name.as_str()), ("output", "y"));
    }
}
