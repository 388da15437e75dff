//! The ONNX operators that this version knows by name, and those of a file. A car compares both
//! before it fetches a release. A known operator may still be in a form that the engine refuses.

use crate::dense::error::DenseError;
use crate::dense::graph::onnx::{GraphProto, read};
use prost::bytes::Bytes;
use std::collections::BTreeSet;

const OPERATORS: &str = "
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
    BatchNormalization Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv Cos
    Cosh CumSum DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand Flatten Floor GRU
    Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater
    GreaterOrEqual GroupNormalization HardSigmoid HardSwish Identity If InstanceNormalization
    IsInf IsNaN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax MatMul Max
    MaxPool Mean Min Mish Mod Mul Neg NonZero Not OneHot Or PRelu Pad Pow RMSNormalization RNN
    Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean
    ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round Scatter ScatterElements
    ScatterND Selu Shape Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign Split Sqrt
    Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Where Xor";

/// Returns the operators that this version knows.
pub fn operators() -> impl Iterator<Item = &'static str> {
    OPERATORS.split_whitespace()
}

/// Returns the known operators that the ONNX file `onnx` has, those of branches too. A file that
/// loads has an unknown one in a branch only that is never taken.
///
/// # Errors
/// [`DenseError`] if the file is malformed.
pub fn operators_of(onnx: Vec<u8>) -> Result<BTreeSet<String>, DenseError> {
    let model = read(Bytes::from(onnx))?;
    let mut graphs: Vec<&GraphProto> = model.graph.iter().collect();
    let mut names = BTreeSet::new();
    while let Some(graph) = graphs.pop() {
        names.extend(graph.node.iter().map(|node| node.op_type().to_owned()));
        let attributes = graph.node.iter().flat_map(|node| &node.attribute);
        graphs.extend(attributes.filter_map(|attribute| attribute.g.as_deref()));
    }
    names.retain(|name| operators().any(|known| known == name));
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator that a file of this folder translates, but that is not listed, would
    /// keep cars from releases that they can serve.
    #[test]
    fn every_operator_of_the_engine_is_known() {
        let files = [
            include_str!("operators.rs"),
            include_str!("shape_operators.rs"),
            include_str!("reductions.rs"),
            include_str!("selections.rs"),
            include_str!("indices.rs"),
            include_str!("windows.rs"),
            include_str!("products.rs"),
            include_str!("recurrent.rs"),
            include_str!("onnx_graph.rs"),
            include_str!("stored.rs"),
        ];
        let is_name = |word: &&str| {
            word.starts_with(|c: char| c.is_ascii_uppercase())
                && word.chars().all(|c| c.is_ascii_alphanumeric())
        };
        let mut named = BTreeSet::new();
        for file in files {
            let code = file.split("#[cfg(test)]").next().unwrap_or_default();
            named.extend(code.split('"').skip(1).step_by(2).filter(is_name));
        }
        let known: BTreeSet<&str> = operators().collect();
        let unknown: Vec<_> = named.difference(&known).collect();
        // The others are beginnings of names, and values of an attribute.
        let parts = ["NOTSET", "Reduce", "VALID"];
        assert!(unknown == parts.each_ref() && named.len() > 80, "{unknown:?}");
    }
}
