//! The pages: width of their lines, length of their sentences, and what they refer to.

use crate::{assert_none, files_below, root, shown};
use std::fs;

/// Columns of a line of prose or code.
const COLUMNS_MAX: usize = 100;
/// Words of a sentence in README and ARCHITECTURE: median, 90th percentile, and longest.
const SENTENCE_WORDS: [usize; 3] = [15, 25, 30];

#[test]
fn no_line_is_wider_than_a_hundred_columns() {
    let mut found = Vec::new();
    for path in files_below(&root(), &[".md", ".rs", ".cu", ".cuh", ".py"]) {
        let prose = path.extension().is_some_and(|e| e == "md");
        let mut printed = false;
        for (number, line) in fs::read_to_string(&path).unwrap().lines().enumerate() {
            if line.starts_with("```") {
                printed = prose && line == "```text";
            }
            let table = printed || prose && line.trim_start().starts_with('|');
            let excepted = table || line.contains("://");
            if line.chars().count() > COLUMNS_MAX && !excepted {
                found.push(format!("{}:{}", shown(&path), number + 1));
            }
        }
    }
    assert_none("lines over 100 columns", &found);
}

/// The sentences of a Markdown page: code, tables, drawings and headings are left out.
fn sentences(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut paragraph = String::new();
    let mut fenced = false;

    for line in text.lines().chain([""]) {
        let line = line.trim();
        let fence = line.starts_with("```");
        fenced ^= fence;
        let skip = fence || fenced || line.starts_with(['|', '#', '!', '<']);
        let item = line.starts_with("* ")
            || line.starts_with("- ")
            || line.split_once(". ").is_some_and(|(n, _)| n.parse::<u32>().is_ok());
        if line.is_empty() || skip || item {
            let ends = |part: &str| part.ends_with(['.', '!', '?']);
            let mut sentence: Vec<&str> = Vec::new();

            for word in paragraph.split_whitespace() {
                sentence.push(word);
                if ends(word.trim_end_matches(['*', '_', ')', '`', '"'])) {
                    found.push(sentence.join(" "));
                    sentence.clear();
                }
            }

            if !sentence.is_empty() {
                found.push(sentence.join(" "));
            }

            paragraph.clear();
        }

        if !skip {
            let text = line.trim_start_matches("* ").trim_start_matches("- ");
            paragraph.push_str(text);
            paragraph.push(' ');
        }
    }

    found.retain(|s| s.split_whitespace().count() > 2);
    found
}

#[test]
fn readme_and_architecture_speak_in_short_sentences() {
    for page in ["README.md", "ARCHITECTURE.md"] {
        let text = fs::read_to_string(root().join(page)).unwrap();
        let sentences = sentences(&text);
        let mut words: Vec<usize> =
            sentences.iter().map(|s| s.split_whitespace().count()).collect();
        words.sort_unstable();
        let quantile = |percent: usize| words[words.len() * percent / 100];
        let measured = [quantile(50), quantile(90), *words.last().unwrap()];
        println!("{page}: {} sentences, words p50/p90/longest {measured:?}", words.len());

        let longest = sentences.iter().max_by_key(|s| s.split_whitespace().count()).unwrap();
        let within = measured.iter().zip(SENTENCE_WORDS).all(|(m, max)| *m <= max);
        assert!(within, "{page}: {measured:?}, at most {SENTENCE_WORDS:?}; longest: {longest}");
    }
}

/// What a page refers to: targets of links, and code spans that look like paths of this tree.
pub fn references(text: &str) -> Vec<String> {
    let links = text.split("](").skip(1).filter_map(|part| part.split(')').next());
    let spans = text.split('`').skip(1).step_by(2).filter(|span| {
        let path = span.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
        let folder = span.split('/').next().is_some_and(|first| root().join(first).is_dir());
        path && folder && span.contains('/') && span.contains('.') && !span.starts_with('/')
    });
    let local = |target: &&str| !target.contains("://") && !target.starts_with('#');
    links.chain(spans).filter(local).map(String::from).collect()
}

#[test]
fn every_file_that_a_page_refers_to_exists() {
    let mut found = Vec::new();
    for page in files_below(&root(), &[".md"]) {
        let text = fs::read_to_string(&page).unwrap();
        for target in references(&text) {
            let path = target.split('#').next().unwrap();
            let places = [page.parent().unwrap().join(path), root().join(path)];
            if !places.iter().any(|place| place.exists()) {
                found.push(format!("{}: {target}", shown(&page)));
            }
        }
    }
    assert_none("references to files that do not exist", &found);
}

#[test]
fn architecture_fits_on_two_hundred_lines() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    assert!(text.lines().count() <= 200, "{} lines", text.lines().count());
}
