//! The references in `docs/` against the code: every key of model.toml and every command, with
//! examples that parse. A key or a command that is missing or stale in a document fails.

use clap::{CommandFactory, Parser};
use hatchback::schema::{MissPolicy, Placement};
use hatchback_tools::cli::Cli;
use hatchback_tools::pack::spec::{CodecChoice, DefaultRow, ModelSpec};
use std::collections::BTreeSet;
use std::path::Path;

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    std::fs::read_to_string(path).unwrap()
}

/// The text of the section under a heading, without its subsections.
fn section<'a>(document: &'a str, heading: &str) -> &'a str {
    let start = document.find(&format!("\n{heading}\n")).expect(heading) + heading.len() + 2;
    let rest = &document[start..];
    let end = rest.find("\n#").unwrap_or(rest.len());
    &rest[..end]
}

/// The cells of each row of a section's table, without its head.
fn rows(section: &str) -> Vec<Vec<&str>> {
    let lines = section.lines().filter(|line| line.starts_with('|')).skip(2);
    lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

/// What is between backticks.
fn quoted(text: &str) -> BTreeSet<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

fn parse_error(toml: &str) -> String {
    ModelSpec::parse(toml, Path::new("model.toml")).unwrap_err().to_string()
}

/// The names that the code would have accepted in place of `zz`.
fn accepted(toml: &str) -> BTreeSet<String> {
    let error = parse_error(toml);
    let (_, names) = error.split_once("`zz`, expected").expect(&error);
    quoted(names).into_iter().map(str::to_owned).collect()
}

fn first_column(document: &str, heading: &str) -> BTreeSet<String> {
    let rows = rows(section(document, heading));
    assert!(rows.iter().all(|cells| cells.iter().all(|cell| !cell.is_empty())), "{heading}");
    rows.iter().flat_map(|cells| quoted(cells[0])).map(str::to_owned).collect()
}

#[test]
fn every_key_of_model_toml_is_documented_and_no_other() {
    let document = document("model.md");
    for (heading, toml) in [
        ("## Top level", "zz = 1".to_owned()),
        ("## `[network]`", "[network]\nzz = 1".to_owned()),
        ("## `[[network.input]]`", "[[network.input]]\nzz = 1".to_owned()),
        ("## `[[table]]`", "[[table]]\nzz = 1".to_owned()),
        ("## `[[feature]]`", "[[feature]]\nzz = 1".to_owned()),
        ("## `[probe]`", "[probe]\nzz = 1".to_owned()),
        ("## Sources", "[[table]]\nsource = { format = \"zz\" }".to_owned()),
        ("## Key functions", "[[feature]]\nkey = { function = \"zz\" }".to_owned()),
    ] {
        assert_eq!(first_column(&document, heading), accepted(&toml), "{heading}");
    }
    for format in first_column(&document, "## Sources") {
        let toml = format!("[[table]]\nsource = {{ format = \"{format}\", zz = 1 }}");
        let heading = format!("### `{format}`");
        assert_eq!(first_column(&document, &heading), accepted(&toml), "{heading}");
    }
    for function in first_column(&document, "## Key functions") {
        let toml = format!("[[feature]]\nkey = {{ function = \"{function}\", zz = 1 }}");
        let heading = format!("### `{function}`");
        assert_eq!(first_column(&document, &heading), accepted(&toml), "{heading}");
    }
}

#[test]
fn every_value_of_a_choice_is_documented_and_no_other() {
    let document = document("model.md");
    for (heading, table, key) in [
        ("## `[network]`", "[network]", "activation"),
        ("## `[[table]]`", "[[table]]", "keys"),
        ("## `[[table]]`", "[[table]]", "codec"),
        ("## `[[table]]`", "[[table]]", "placement"),
        ("## `[[table]]`", "[[table]]", "miss"),
        ("## `[[feature]]`", "[[feature]]", "pooling"),
    ] {
        let rows = rows(section(&document, heading));
        let row = rows.iter().find(|cells| cells[0] == format!("`{key}`")).expect(key);
        let values: BTreeSet<String> =
            quoted(row[1]).into_iter().map(|value| value.trim_matches('"').to_owned()).collect();
        assert_eq!(values, accepted(&format!("{table}\n{key} = \"zz\"")), "{key}");
    }
}

#[test]
fn the_example_of_model_toml_parses_and_defaults_are_as_documented() {
    let document = document("model.md");
    let example = document.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let spec = ModelSpec::parse(example, Path::new("model.md")).unwrap();
    let table = &spec.tables[0];
    assert_eq!(
        (table.codec, table.placement, table.miss, &table.default),
        (CodecChoice::Auto, Placement::Auto, MissPolicy::Wait, &DefaultRow::Zeros)
    );
    let rows = rows(section(&document, "## `[[table]]`"));
    let default = |key: &str| {
        rows.iter().find(|cells| cells[0] == format!("`{key}`")).expect(key)[2].to_owned()
    };
    assert_eq!(
        ["codec", "placement", "miss", "default"].map(default),
        ["`\"auto\"`", "`\"auto\"`", "`\"wait\"`", "`\"zeros\"`"]
    );
}

#[test]
fn errors_of_model_toml_name_the_line() {
    for (text, expected) in [
        ("format = 1\nzz = 2\n", "model.toml:2: unknown field `zz`"),
        ("format = 1\nname = \n", "model.toml:2: "),
        ("[[table]]\nname = \"a\"\ndim = 4\nkeys = \"zz\"\n", "model.toml:4: unknown variant"),
    ] {
        let error = parse_error(text);
        assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
    }
}

/// Options of `hatchback` at most, beside those that every command has. A new one pays with an old
/// one; only a record in `docs/decisions.md` raises this.
const OPTIONS_MAX: usize = 103;

#[test]
fn the_options_stay_within_their_cap() {
    fn options(command: &clap::Command) -> usize {
        let own = command
            .get_opts()
            .filter(|option| !matches!(option.get_long(), Some("help" | "version" | "json")))
            .count();
        own + command.get_subcommands().map(options).sum::<usize>()
    }
    let count = options(&Cli::command());
    println!("{count} options, at most {OPTIONS_MAX}");
    assert!(count <= OPTIONS_MAX, "{count} options, over {OPTIONS_MAX}");
}

#[test]
fn every_command_is_documented_and_every_example_parses() {
    let document = document("commands.md");
    let command = Cli::command();
    let visible = command.get_subcommands().filter(|command| !command.is_hide_set());
    let commands: BTreeSet<String> =
        visible.map(|command| format!("hatchback {}", command.get_name())).collect();
    let headings: BTreeSet<String> = document
        .lines()
        .filter_map(|line| line.strip_prefix("## `"))
        .map(|line| line.trim_end_matches('`').to_owned())
        .collect();
    assert_eq!(headings, commands);

    let joined = document.replace("\\\n", " ");
    let examples: Vec<&str> =
        joined.lines().filter(|line| line.starts_with("hatchback ")).collect();
    assert!(examples.len() > commands.len());
    for example in examples {
        let words = example.split_whitespace().take_while(|word| *word != "|");
        if let Err(error) = Cli::try_parse_from(words) {
            panic!("{example}: {error}");
        }
    }
}
