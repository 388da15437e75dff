//! Copies of vectors between the inputs of a dense network. A lookup pools into one input; its
//! vectors are copied to the other inputs that it feeds. Plain data; each device copies in its way.

/// A column of an input of the dense network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InputColumn {
    /// Number of the part, of those of all inputs.
    pub part: usize,
    /// Column in the part.
    pub column: usize,
}

/// A copy of a lookup's vectors from one input of the dense network to another. The vectors of a
/// lookup that feeds several inputs are pooled into the first and copied to the others.
#[derive(Clone, Copy, Debug)]
pub struct ColumnCopy {
    /// The columns that are read.
    pub from: InputColumn,
    /// The columns that are written.
    pub to: InputColumn,
    /// The number of columns.
    pub width: usize,
    /// Whether the rows are those of requests, and not of samples.
    pub shared: bool,
}
