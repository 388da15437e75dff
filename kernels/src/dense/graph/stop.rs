//! Why a graph cannot be built: the engine lacks something, or the file is wrong.

use crate::dense::error::DenseError;
use crate::dense::graph::onnx::NodeProto;

/// Why a graph cannot be built.
pub(crate) enum Stop {
    /// The graph has this operator, or form of an operator, which has no node.
    Unsupported(String),
    /// The file is invalid, or beyond a limit.
    Refused(DenseError),
}

impl From<DenseError> for Stop {
    fn from(e: DenseError) -> Self {
        Self::Refused(e)
    }
}

/// Returns the error of a file that contradicts itself.
pub(crate) fn malformed(problem: &str) -> Stop {
    Stop::Refused(DenseError::Load(problem.to_owned()))
}

/// Returns the error of a file beyond a limit of this version.
pub(crate) fn limit(problem: String) -> Stop {
    Stop::Refused(DenseError::Unsupported(problem))
}

/// Returns the stop of an operator in a form that has no node.
pub(crate) fn unsupported(node: &NodeProto, form: &str) -> Stop {
    Stop::Unsupported(format!("{} {form}", node.op_type()).trim_end().to_owned())
}
