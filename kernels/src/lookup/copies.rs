//! Copies of vectors between the inputs of a dense network. A lookup pools into one input; its
//! vectors are copied to the other inputs that it feeds. Plain data; each device copies in its way.

/// The first column of a lookup's vectors in the inputs of the dense network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InputColumn {
    /// Number of the network input.
    pub input: usize,
    /// First column in the input.
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
    /// The rows.
    pub rows: CopiedRows,
}

/// The rows that a copy reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopiedRows {
    /// That of each sample.
    Samples,
    /// That of each request.
    Requests,
    /// Reads that of each request, and writes it for each of the request's samples.
    Spread,
}
