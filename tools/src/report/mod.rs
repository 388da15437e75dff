//! How results reach people and programs: aligned tables, units of bytes and time, JSON documents,
//! plots. Never measures and never computes what it shows.

pub mod args;
pub mod input;
pub mod metrics;
pub mod output;
pub mod plot;
pub mod temporary;

use crate::limits::{COLUMNS_MAX, MESSAGE_CHARS_MAX};
use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, LineStyle, Table, TableStyle,
};

pub use hatchback_link::program::{OutputClosed, explain, note, status_of};
pub use output::Json;

const RULE: LineStyle = LineStyle::none().fill('─').junction('─');
/// Horizontal rules above the heads, below the heads and below the last row.
const STYLE: TableStyle =
    TableStyle::new().top_border(RULE).header_separator(RULE).bottom_border(RULE);

/// Returns an empty table with these column heads: the first column is aligned left, the others
/// right. A table of figures may be wider than a terminal: a broken number could not be read.
pub fn table(heads: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(heads);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// As [`table`], with texts in the last column, such as reasons of failures. They are broken over
/// several lines.
pub fn table_with_texts(heads: &[&str]) -> Table {
    let mut table = table(heads);
    table.set_content_arrangement(ContentArrangement::Dynamic).set_width(COLUMNS_MAX);
    for column in table.column_iter_mut().take(heads.len() - 1) {
        column.set_constraint(ColumnConstraint::ContentWidth);
    }
    table
}

/// Formats an AUC or a logloss.
pub fn quality(value: Option<f64>) -> String {
    or_dash(value, |value| format!("{value:.5}"))
}

/// Formats a number of bytes: `1536` as `1.5 KiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Formats a count: `1234567` as `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let first = digits.len() % 3;
    let groups =
        digits.as_bytes()[first..].chunks(3).map(|g| String::from_utf8_lossy(g).into_owned());
    let head = (first > 0).then(|| digits[..first].to_owned());
    head.into_iter().chain(groups).collect::<Vec<_>>().join(",")
}

/// Formats a figure: thousands grouped, smaller values with three significant digits.
pub fn digits(value: f64) -> String {
    match value {
        v if v >= 1000.0 => count(v.round() as u64),
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

/// Formats a time of `us` microseconds, with one decimal below 100 µs.
pub fn micros(us: f64) -> String {
    if us < 100.0 { format!("{us:.1} µs") } else { format!("{us:.0} µs") }
}

/// Formats a figure with `format`; `-` if there is none.
pub fn or_dash<T>(figure: Option<T>, format: impl FnOnce(T) -> String) -> String {
    figure.map_or_else(|| "-".to_owned(), format)
}

/// Formats a share: `0.98765` as `98.77 %`.
pub fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}

/// Makes text from a damaged or hostile file safe for a terminal: replaces control characters and
/// cuts the text at `MESSAGE_CHARS_MAX` characters.
pub fn printable(text: &str) -> String {
    let safe = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    text.chars().take(MESSAGE_CHARS_MAX).map(safe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_breaks_texts_and_no_figures() {
        let mut figures = table(&["a long head"; 12]);
        figures.add_row(["1,234,567"; 12]);
        assert_eq!(figures.to_string().matches("1,234,567").count(), 12);

        let mut texts = table_with_texts(&["release", "reason"]);
        texts.add_row(["ranker/12345678".to_owned(), "a reason ".repeat(30)]);
        let printed = texts.to_string();
        assert!(printed.lines().all(|line| line.chars().count() <= COLUMNS_MAX.into()));
        assert!(printed.contains("ranker/12345678"), "{printed}");
    }

    #[test]
    fn units() {
        assert_eq!(
            (bytes(900), bytes(1536), bytes(3 << 30)),
            ("900 B".into(), "1.5 KiB".into(), "3.0 GiB".into())
        );
        assert_eq!(
            (count(7), count(1000), count(1234567)),
            ("7".into(), "1,000".into(), "1,234,567".into())
        );
        assert_eq!(micros(12.34), "12.3 µs");
        assert_eq!(percent(0.98765), "98.77 %");
    }
}
