//! Parses TOML, and finds the line to which an error belongs. Never checks a value.

use anyhow::{Result, anyhow};
use serde::de::DeserializeOwned;
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// Returns `path:line`, the form that editors open; only `path` if the line is unknown.
pub(crate) fn at_line(path: &Path, line: Option<usize>) -> String {
    match line {
        Some(line) => format!("{}:{line}", path.display()),
        None => path.display().to_string(),
    }
}

/// Parses `text`, the TOML of the file at `path`.
///
/// # Errors
/// The text does not fit. The error names the line.
pub(crate) fn parse_toml<T: DeserializeOwned>(text: &str, path: &Path) -> Result<T> {
    toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| line_at(text, span.start));
        anyhow!("{}: {}", at_line(path, line), error.message())
    })
}

/// Returns the line, counted from 1, of `offset` bytes into `text`.
fn line_at(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|byte| *byte == b'\n').count()
}

/// Returns the line of a field such as `table[3].dim` in `text`, counted from 1. If the file lacks
/// a part of the field's path, returns the line of the part before it.
pub(crate) fn line_of(text: &str, field: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let mut table = document.get_ref();
    let mut offset = None;

    for part in field.split('.') {
        let (name, index) = match part.split_once('[') {
            Some((name, index)) => (name, index.trim_end_matches(']').parse::<usize>().ok()),
            None => (part, None),
        };
        let Some((key, value)) = table.iter().find(|(key, _)| key.get_ref() == name) else { break };
        let mut value = value;
        offset = Some(key.span().start);
        if let (Some(index), DeValue::Array(values)) = (index, value.get_ref()) {
            let Some(element) = values.get(index) else { break };
            value = element;
            offset = Some(element.span().start);
        }
        let DeValue::Table(inner) = value.get_ref() else { break };
        table = inner;
    }

    offset.map(|offset| line_at(text, offset))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_the_field_or_of_what_holds_it() {
        let text = "name = \"m\"\nsequence = 2\n[network]\nonnx = \"n\"\n[[network.input]]\n\
                    name = \"x\"\n[[table]]\nname = \"a\"\n[[table]]\nname = \"b\"\ndim = 0\n";
        let line = |field| line_of(text, field);
        assert_eq!(
            (line("name"), line("sequence"), line("network.onnx")),
            (Some(1), Some(2), Some(4))
        );
        assert_eq!((line("network.input[0].name"), line("table[1].dim")), (Some(6), Some(11)));
        assert_eq!((line("table[1].source"), line("table[1]")), (Some(9), Some(9)));
        assert_eq!((line("feature[0].name"), line_of("= [", "name")), (None, None));
        assert_eq!(at_line(Path::new("model.toml"), line("table[0].name")), "model.toml:8");
    }
}
