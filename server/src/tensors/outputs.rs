//! The outputs of a model: their names, which of them a request wants, and the numbers of each in
//! an answer. Knows no protocol.
//!
//! A model with several outputs has its scores twice: side by side in `score`, and one by one under
//! the names that its network gives them. A request for its best samples has the scores of these
//! only, and the sum of all statuses.

use crate::problem::Problem;
use hatchback::request::pipeline::Answer;
use hatchback::{LookupStatus, Schema, Shortened};
use serde::{Serialize, Serializer};
use std::collections::HashMap;

/// The output with the scores, FP32 `[batch, n]`.
pub const SCORE: &str = "score";
/// The output with the statuses, INT32 `[batch, 5]`: fresh, defaulted, absent, damaged, late.
const STATUS: &str = "status";
/// The output with the sequence of the generation that scored the request, INT64 `[1]`.
const GENERATION: &str = "generation";
/// The output with the position in the request of each sample of the answer, INT32 `[batch]`.
const POSITION: &str = "position";
/// Numbers of a sample's status.
pub const STATUS_FIELDS: usize = 5;

/// The content of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// All scores.
    Scores,
    /// The scores of one of several outputs.
    Column(usize),
    Statuses,
    Generation,
    Positions,
}

/// An output of a model.
#[derive(Debug)]
pub struct Output {
    pub name: String,
    pub content: Content,
}

impl Output {
    /// Returns the type of its tensor.
    pub fn datatype(&self) -> &'static str {
        match self.content {
            Content::Scores | Content::Column(_) => "FP32",
            Content::Statuses | Content::Positions => "INT32",
            Content::Generation => "INT64",
        }
    }

    /// Returns the bytes of a number.
    pub fn number_bytes(&self) -> usize {
        if self.content == Content::Generation { 8 } else { 4 }
    }

    /// Returns the shape of its tensor for a model with `width` scores a sample; -1 is any size.
    pub fn shape(&self, width: usize) -> Vec<i64> {
        match self.content {
            Content::Scores => vec![-1, width as i64],
            Content::Column(_) => vec![-1, 1],
            Content::Statuses => vec![-1, STATUS_FIELDS as i64],
            Content::Generation => vec![1],
            Content::Positions => vec![-1],
        }
    }
}

/// The outputs of a model, in the order of an answer.
#[derive(Debug)]
pub struct Outputs {
    list: Vec<Output>,
    numbers: HashMap<String, usize>,
}

impl Outputs {
    /// Returns the outputs of a model with `schema`. If an output of its network has one of the
    /// four names above, its scores are in `score` only.
    pub fn new(schema: &Schema) -> Self {
        let output = |name: &str, content| Output { name: name.to_owned(), content };
        let mut list = vec![output(SCORE, Content::Scores)];
        if let several @ [_, _, ..] = schema.network.outputs.as_slice() {
            let own = several.iter().enumerate();
            let own =
                own.filter(|(_, own)| ![SCORE, STATUS, GENERATION, POSITION].contains(&&*own.name));
            list.extend(own.map(|(at, own)| output(&own.name, Content::Column(at))));
        }
        list.push(output(STATUS, Content::Statuses));
        list.push(output(GENERATION, Content::Generation));
        list.push(output(POSITION, Content::Positions));
        let numbers = list.iter().enumerate().map(|(at, output)| (output.name.clone(), at));
        Self { numbers: numbers.collect(), list }
    }

    /// Returns the outputs.
    pub fn list(&self) -> &[Output] {
        &self.list
    }
}

/// How an answer encodes an output, if the request wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    No,
    Text,
    Binary,
}

/// An output that a request asks for.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub name: &'a str,
    pub want: Want,
}

/// The encoding of each output of a model in one answer.
#[derive(Debug)]
pub struct Wants(Vec<Want>);

impl Wants {
    /// Returns the encodings for a request that names the outputs `asked`. If it names none, every
    /// output has the encoding `every`; the positions only if the request `is_ranked`.
    ///
    /// # Errors
    /// The model has no such output.
    pub fn new(
        outputs: &Outputs,
        asked: &[Asked<'_>],
        every: Want,
        is_ranked: bool,
    ) -> Result<Self, Problem> {
        let unasked = |output: &Output| match output.content {
            Content::Positions if !is_ranked => Want::No,
            _ if asked.is_empty() => every,
            _ => Want::No,
        };
        let mut wants: Vec<Want> = outputs.list.iter().map(unasked).collect();
        for Asked { name, want } in asked {
            let Some(&at) = outputs.numbers.get(*name) else {
                let name = Shortened(name);
                return Err(Problem::invalid(format!("the model has no output `{name}`")));
            };
            wants[at] = *want;
        }
        Ok(Self(wants))
    }

    /// Returns the wanted ones of `outputs`, each with its encoding.
    pub fn of<'a>(&self, outputs: &'a Outputs) -> impl Iterator<Item = (&'a Output, Want)> {
        outputs.list.iter().zip(self.0.iter().copied()).filter(|(_, want)| *want != Want::No)
    }
}

/// The best samples of an answer, of which a request has asked for a number.
#[derive(Debug)]
pub struct Best {
    positions: Vec<u32>,
    /// The sum of the statuses of all samples, of which most are not in the answer.
    status: [LookupStatus; 1],
}

impl Best {
    /// Returns the `k` best samples of `answer`; all of them if it has fewer.
    pub fn new(answer: &Answer<'_>, k: usize) -> Self {
        let scores = answer.scores();
        let mut positions = vec![0; k.min(scores.statuses.len())];
        scores.top_k(0, &mut positions);
        Self { positions, status: [scores.status()] }
    }
}

/// The samples of an answer, in its order.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    samples: usize,
    best: Option<&'a [u32]>,
}

impl<'a> Rows<'a> {
    fn count(self) -> usize {
        self.best.map_or(self.samples, <[u32]>::len)
    }

    fn positions(self) -> impl Iterator<Item = usize> + 'a {
        (0..self.count()).map(move |row| self.best.map_or(row, |best| best[row] as usize))
    }
}

/// The numbers of an output in an answer.
#[derive(Clone, Copy, Debug)]
pub enum Numbers<'a> {
    /// `[samples, width]`, or the one column of it that is given.
    Scores {
        values: &'a [f32],
        rows: Rows<'a>,
        column: Option<usize>,
    },
    Statuses(&'a [LookupStatus]),
    Generation(u64),
    Positions(Rows<'a>),
}

impl<'a> Numbers<'a> {
    /// Returns the numbers of `output` in `answer`: of its `best` samples, or of all.
    pub fn of(output: &Output, answer: &'a Answer<'_>, best: Option<&'a Best>) -> Self {
        let (scores, positions) = (answer.scores(), best.map(|best| &*best.positions));
        let rows = Rows { samples: scores.statuses.len(), best: positions };
        let values = scores.values;
        match output.content {
            Content::Scores => Self::Scores { values, rows, column: None },
            Content::Column(at) => Self::Scores { values, rows, column: Some(at) },
            Content::Statuses => Self::Statuses(best.map_or(scores.statuses, |best| &best.status)),
            Content::Generation => Self::Generation(answer.generation().sequence),
            Content::Positions => Self::Positions(rows),
        }
    }

    /// Returns the shape.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Scores { values, rows, column: None } => {
                vec![rows.count(), values.len() / rows.samples.max(1)]
            }
            Self::Scores { rows, .. } => vec![rows.count(), 1],
            Self::Statuses(statuses) => vec![statuses.len(), STATUS_FIELDS],
            Self::Generation(_) => vec![1],
            Self::Positions(rows) => vec![rows.count()],
        }
    }

    /// Returns how many numbers there are.
    pub fn count(&self) -> usize {
        self.shape().iter().product()
    }

    /// Returns the scores of one column, or all.
    fn scores(
        values: &'a [f32],
        rows: Rows<'a>,
        column: Option<usize>,
    ) -> impl Iterator<Item = f32> {
        let width = values.len() / rows.samples.max(1);
        let columns = column.map_or(0..width, |column| column..column + 1);
        rows.positions().flat_map(move |row| &values[row * width..][columns.clone()]).copied()
    }

    /// Appends the numbers as little-endian bytes.
    pub fn write(&self, to: &mut Vec<u8>) {
        match *self {
            Self::Scores { values, rows, column } => {
                to.extend(Self::scores(values, rows, column).flat_map(f32::to_le_bytes));
            }
            Self::Statuses(statuses) => {
                to.extend(statuses.iter().flat_map(status_numbers).flat_map(i32::to_le_bytes));
            }
            Self::Generation(sequence) => to.extend(sequence.to_le_bytes()),
            Self::Positions(rows) => {
                to.extend(rows.positions().flat_map(|row| (row as i32).to_le_bytes()));
            }
        }
    }
}

impl Serialize for Numbers<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Scores { values, rows, column } => {
                to.collect_seq(Self::scores(values, rows, column))
            }
            Self::Statuses(statuses) => to.collect_seq(statuses.iter().flat_map(status_numbers)),
            Self::Generation(sequence) => to.collect_seq([sequence]),
            Self::Positions(rows) => to.collect_seq(rows.positions()),
        }
    }
}

/// Returns the numbers of a status, in the order of the output.
fn status_numbers(status: &LookupStatus) -> [i32; STATUS_FIELDS] {
    let LookupStatus { fresh, defaulted, absent, damaged, late } = *status;
    [fresh as i32, defaulted as i32, absent as i32, damaged as i32, i32::from(late)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback::Activation;
    use hatchback::schema::{Network, NetworkOutput};

    fn outputs(names: &[&str]) -> Outputs {
        let output = |name: &&str| NetworkOutput {
            name: (*name).to_owned(),
            activation: Activation::Sigmoid,
        };
        let network =
            Network { inputs: vec![], outputs: names.iter().map(output).collect::<Vec<_>>() };
        let (dense_features, tables, features) = (vec![], vec![], vec![]);
        Outputs::new(&Schema { dense_features, tables, features, lookups: vec![], network })
    }

    #[test]
    fn several_outputs_have_their_names_beside_score() {
        let names = |outputs: &Outputs| -> Vec<String> {
            outputs.list().iter().map(|output| output.name.clone()).collect()
        };
        assert_eq!(names(&outputs(&["ctr"])), ["score", "status", "generation", "position"]);
        let both = outputs(&["ctr", "status", "cvr"]);
        assert_eq!(names(&both), ["score", "ctr", "cvr", "status", "generation", "position"]);

        let ask = |names: &[&'static str]| {
            let asked = |name: &&'static str| Asked { name, want: Want::Binary };
            Wants::new(&both, &names.iter().map(asked).collect::<Vec<_>>(), Want::Text, false)
        };
        assert!(ask(&["other"]).unwrap_err().message.contains("no output `other`"));
        assert_eq!(ask(&[]).unwrap().of(&both).count(), 5);
        assert_eq!(Wants::new(&both, &[], Want::Text, true).unwrap().of(&both).count(), 6);
        let wants = ask(&["cvr", "status", "cvr"]).unwrap();
        let wanted: Vec<Content> = wants.of(&both).map(|(output, _)| output.content).collect();
        assert_eq!(wanted, [Content::Column(2), Content::Statuses]);
    }

    #[test]
    fn a_column_has_the_scores_of_its_output() {
        let values = [0.0, 0.1, 0.2, 1.0, 1.1, 1.2];
        let rows = |best| Rows { samples: 2, best };
        let of = |column| Numbers::Scores { values: &values, rows: rows(None), column };
        let json = |numbers| serde_json::to_string(&numbers).unwrap();
        assert_eq!((json(of(Some(1))), of(Some(1)).shape()), ("[0.1,1.1]".to_owned(), vec![2, 1]));
        assert_eq!(of(None).shape(), [2, 3]);
        let best = Numbers::Scores { values: &values, rows: rows(Some(&[1])), column: Some(2) };
        assert_eq!((json(best), best.shape()), ("[1.2]".to_owned(), vec![1, 1]));
        assert_eq!(json(Numbers::Positions(rows(None))), "[0,1]");
        let mut bytes = Vec::new();
        of(Some(2)).write(&mut bytes);
        assert_eq!(bytes, [0.2f32.to_le_bytes(), 1.2f32.to_le_bytes()].concat());
    }
}
