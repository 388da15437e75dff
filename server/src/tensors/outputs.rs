//! The outputs of a model: their names, which of them a request wants, and the numbers of each in
//! an answer. Knows no protocol.
//!
//! A model with several outputs has its scores twice: side by side in `score`, and one by one under
//! the names that its network gives them. A request for its best samples has the scores of these
//! only, and the sum of all statuses.

use crate::problem::{Code, Problem};
use hatchback::request::pipeline::Answer;
use hatchback::{LookupStatus, Schema, Scores, Shortened};
use serde::{Serialize, Serializer};
use std::borrow::Cow;
use std::collections::HashMap;

/// The output with the scores, FP32 `[batch, n]`.
pub const SCORE: &str = "score";
/// The output with the statuses, INT32 `[batch, 5]`: fresh, defaulted, absent, damaged, late.
const STATUS: &str = "status";
/// The output with the sequence of the generation that scored the request, INT64 `[1]`.
const GENERATION: &str = "generation";
/// The output with the position in the request of each sample of the answer, INT32 `[batch]`.
const POSITION: &str = "position";
/// Parameters of an output that ask for an answer which the front door does not give. The second
/// one of an input says where its values are.
pub const CLASSIFICATION: &str = "classification";
pub const SHARED_MEMORY: &str = "shared_memory_region";
/// Numbers of a sample's status.
pub const STATUS_FIELDS: usize = 5;

/// Checks that the `parameter` of `tensor`, an input or output of this `name`, leaves the answer as
/// it is: a caller that asks for classes, or for values in shared memory, would read other numbers.
///
/// # Errors
/// `Code::Unimplemented` with the parameter.
pub fn check_parameter(tensor: &str, name: &str, parameter: &str) -> Result<(), Problem> {
    if ![CLASSIFICATION, SHARED_MEMORY].contains(&parameter) {
        return Ok(());
    }
    let name = Shortened(name);
    let problem = format!("{tensor} `{name}`: the parameter `{parameter}` is not implemented");
    Err(Problem::new(Code::Unimplemented, problem))
}

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

    /// Returns the numbers in a row of its tensor, for a model with `width` scores a sample.
    fn columns(&self, width: usize) -> usize {
        match self.content {
            Content::Scores => width,
            Content::Statuses => STATUS_FIELDS,
            Content::Column(_) | Content::Generation | Content::Positions => 1,
        }
    }

    /// Returns the shape of its tensor with `rows` rows, of which -1 is any number, for a model
    /// with `width` scores a sample.
    pub fn shape(&self, rows: i64, width: usize) -> Vec<i64> {
        match self.content {
            Content::Generation => vec![1],
            Content::Positions => vec![rows],
            _ => vec![rows, self.columns(width) as i64],
        }
    }
}

/// The outputs of a model, in the order of an answer.
#[derive(Debug)]
pub struct Outputs {
    pub list: Vec<Output>,
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
}

/// How an answer encodes an output, if the request wants it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Want {
    No,
    #[default]
    Text,
    Binary,
}

/// An output that a request asks for.
#[derive(Debug)]
pub struct Asked<'a> {
    pub name: Cow<'a, str>,
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
            let Some(&at) = outputs.numbers.get(&**name) else {
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
    status: LookupStatus,
}

impl Best {
    /// Returns the `k` best samples of `answer`; all of them if it has fewer.
    pub fn new(answer: &Answer<'_>, k: usize) -> Self {
        let scores = answer.scores();
        let mut positions = vec![0; k.min(scores.statuses.len())];
        scores.top_k(0, &mut positions);
        Self { positions, status: scores.status() }
    }
}

/// A number of an output.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
enum Number {
    Score(f32),
    Count(i32),
    Sequence(u64),
}

/// The numbers of an output in an answer: of its best samples, or of all.
#[derive(Clone, Copy, Debug)]
pub struct Numbers<'a> {
    pub output: &'a Output,
    pub scores: Scores<'a>,
    /// The sequence of the generation.
    pub sequence: u64,
    pub best: Option<&'a Best>,
}

impl Numbers<'_> {
    /// Returns the scores of a sample.
    fn width(&self) -> usize {
        self.scores.values.len() / self.scores.statuses.len().max(1)
    }

    fn rows(&self) -> usize {
        match (self.output.content, self.best) {
            (Content::Generation, _) | (Content::Statuses, Some(_)) => 1,
            (_, None) => self.scores.statuses.len(),
            (_, Some(best)) => best.positions.len(),
        }
    }

    /// Returns the shape.
    pub fn shape(&self) -> Vec<i64> {
        self.output.shape(self.rows() as i64, self.width())
    }

    /// Returns how many numbers there are.
    pub fn count(&self) -> usize {
        self.rows() * self.output.columns(self.width())
    }

    /// Returns the numbers, row by row.
    fn iter(&self) -> impl Iterator<Item = Number> {
        let columns = self.output.columns(self.width());
        (0..self.count()).map(move |at| self.number(at / columns, at % columns))
    }

    fn number(&self, row: usize, column: usize) -> Number {
        let sample = || self.best.map_or(row, |best| best.positions[row] as usize);
        let score = |column| Number::Score(self.scores.values[sample() * self.width() + column]);
        match self.output.content {
            Content::Scores => score(column),
            Content::Column(own) => score(own),
            Content::Statuses => {
                let status = self.best.map_or(&self.scores.statuses[row], |best| &best.status);
                Number::Count(status_numbers(status)[column])
            }
            Content::Generation => Number::Sequence(self.sequence),
            Content::Positions => Number::Count(sample() as i32),
        }
    }

    /// Appends the numbers as little-endian bytes.
    pub fn write(&self, to: &mut Vec<u8>) {
        self.iter().for_each(|number| match number {
            Number::Score(score) => to.extend(score.to_le_bytes()),
            Number::Count(count) => to.extend(count.to_le_bytes()),
            Number::Sequence(sequence) => to.extend(sequence.to_le_bytes()),
        });
    }
}

impl Serialize for Numbers<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.iter())
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
            outputs.list.iter().map(|output| output.name.clone()).collect()
        };
        assert_eq!(names(&outputs(&["ctr"])), ["score", "status", "generation", "position"]);
        let both = outputs(&["ctr", "status", "cvr"]);
        assert_eq!(names(&both), ["score", "ctr", "cvr", "status", "generation", "position"]);

        let ask = |names: &[&'static str]| {
            let asked = |name: &&'static str| Asked { name: (*name).into(), want: Want::Binary };
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
        let (values, statuses) = ([0.0, 0.1, 0.2, 1.0, 1.1, 1.2], [LookupStatus::default(); 2]);
        let scores = Scores { values: &values, statuses: &statuses };
        let [all, one, two, positions] =
            [Content::Scores, Content::Column(1), Content::Column(2), Content::Positions]
                .map(|content| Output { name: String::new(), content });
        let of = |output, best| Numbers { output, scores, sequence: 1, best };
        let json = |numbers| serde_json::to_string(&numbers).unwrap();
        assert_eq!(
            (json(of(&one, None)), of(&one, None).shape()),
            ("[0.1,1.1]".to_owned(), vec![2, 1])
        );
        assert_eq!(of(&all, None).shape(), [2, 3]);
        let best = Best { positions: vec![1], status: statuses[0] };
        let best = of(&two, Some(&best));
        assert_eq!((json(best), best.shape()), ("[1.2]".to_owned(), vec![1, 1]));
        assert_eq!(json(of(&positions, None)), "[0,1]");
        let mut bytes = Vec::new();
        of(&two, None).write(&mut bytes);
        assert_eq!(bytes, [0.2f32.to_le_bytes(), 1.2f32.to_le_bytes()].concat());
    }
}
