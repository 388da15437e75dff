//! The topic of a table, as HugeCTR's producer names it.

use hatchback::limits::NAME_BYTES_MAX;

/// Prefix of every topic of rows.
const PREFIX: &str = "hps_et";

/// Why a name cannot be part of a topic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("topic: {part} is `{name}`, not 1 to {NAME_BYTES_MAX} of [A-Za-z0-9_-]")]
pub struct TopicError {
    /// `model` or `table`.
    pub part: &'static str,
    /// The name.
    pub name: String,
}

/// Returns the topic of `table` of `model`.
///
/// # Errors
/// [`TopicError`] if HugeCTR would refuse a name.
pub fn topic_name(model: &str, table: &str) -> Result<String, TopicError> {
    for (part, name) in [("model", model), ("table", table)] {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(allowed) {
            return Err(TopicError { part, name: name.escape_debug().to_string() });
        }
    }
    Ok(format!("{PREFIX}.{model}.{table}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_hugectr_accepts() {
        assert_eq!(topic_name("dlrm", "item_1-a").unwrap(), "hps_et.dlrm.item_1-a");
        for name in ["", "a.b", "ü", &"x".repeat(121)] {
            assert_eq!(topic_name("m", name).unwrap_err().part, "table");
            assert_eq!(topic_name(name, "t").unwrap_err().part, "model");
        }
    }
}
