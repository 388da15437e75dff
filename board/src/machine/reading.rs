//! A reading: one fact about the machine, or the reason why it is not known.

use serde::Serialize;
use serde_json::Value;

/// One fact about the machine. Either `value` or `missing` is set.
#[derive(Clone, Debug, Serialize)]
pub struct Reading {
    /// The section of the report.
    pub section: &'static str,
    /// The name, with its unit last.
    pub name: String,
    /// The value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<Value>,
    /// Why there is no value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

/// Returns a reading from the value `found`, or from the reason why there is none.
pub fn reading<T: Into<Value>>(
    section: &'static str,
    name: &str,
    found: Result<T, String>,
) -> Reading {
    let (value, missing) = match found {
        Ok(value) => (Some(value.into()), None),
        Err(why) => (None, Some(why)),
    };
    Reading { section, name: name.to_owned(), value, missing }
}

impl Reading {
    /// Returns the name and the reason if there is no value. For a setting, the reason is that the
    /// system refuses it.
    pub fn refusal(&self) -> Option<String> {
        self.missing.as_ref().map(|why| format!("{}: {why}", self.name))
    }
}
