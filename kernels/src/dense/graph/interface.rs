//! The check that an ONNX file has the inputs and the output that the schema names.

use crate::dense::error::DenseError;
use crate::dense::graph::onnx::{
    Dimension, FLOAT, GraphProto, INT32, INT64, ModelProto, TensorProto, ValueInfoProto, type_name,
};
use std::collections::HashSet;

/// Returns the shape of one sample of each input, in the order of `inputs`.
///
/// # Errors
/// [`DenseError`] unless `inputs` feed every input of the file at its width and `output` is one of
/// its outputs.
pub(crate) fn match_interface(
    model: &ModelProto,
    inputs: &[(&str, usize)],
    output: &str,
) -> Result<Vec<Vec<usize>>, DenseError> {
    let graph = model.graph.as_ref().ok_or_else(|| DenseError::Load("no graph".to_owned()))?;

    // Older files list their initializers among the inputs.
    let stored: HashSet<&str> = graph.initializer.iter().map(TensorProto::name).collect();
    let fed = |name: &str| inputs.iter().any(|(n, _)| *n == name);
    let input_type = |value: &ValueInfoProto| {
        let number = value.element_type().filter(|&number| number != FLOAT)?;
        let hint = match number {
            INT32 | INT64 => {
                ". If it takes ids, cut the embedding lookups out of the network, as \
                 `hatchback_trainer.export` does"
            }
            _ => "; let the network cast it",
        };
        let (name, of) = (value.name().to_owned(), type_name(i64::from(number)));
        Some(DenseError::InputType { name, of, hint })
    };
    if let Some(value) = graph.input.iter().find(|v| !fed(v.name()) && !stored.contains(v.name())) {
        let not_fed = || DenseError::NotFed(value.name().to_owned());
        return Err(input_type(value).unwrap_or_else(not_fed));
    }
    if !graph.output.iter().any(|v| v.name() == output) {
        return Err(DenseError::NoOutput(output.to_owned()));
    }

    let shape = |(name, width): &(&str, usize)| {
        let value = graph.input.iter().find(|v| v.name() == *name);
        let value = value.ok_or_else(|| DenseError::NoInput((*name).to_owned()))?;
        if let Some(refused) = input_type(value) {
            return Err(refused);
        }
        let shape = sample_shape(graph, value, output, *width)?;
        match shape.iter().try_fold(1usize, |product, s| product.checked_mul(*s)) {
            Some(network) if network == *width => Ok(shape),
            network => {
                let network = network.unwrap_or(usize::MAX);
                Err(DenseError::Width { name: (*name).to_owned(), network, schema: *width })
            }
        }
    };
    inputs.iter().map(shape).collect()
}

/// Returns the shape of a sample of the input `value`, for which the schema feeds `width` values.
fn sample_shape(
    graph: &GraphProto,
    value: &ValueInfoProto,
    output: &str,
    width: usize,
) -> Result<Vec<usize>, DenseError> {
    let Some((first, axes)) = value.axes().split_first() else { return Ok(vec![width]) };
    let name = value.name();
    let refuse = |form: String| Err(DenseError::Unsupported(format!("input `{name}` {form}")));

    // A time-major input has the batch on an inner axis, by the name that other first axes have.
    let outputs = graph.output.iter().filter(|value| value.name() == output);
    let firsts = graph.input.iter().chain(outputs).filter_map(|value| value.axes().first());
    // Some exporters name all open axes alike, and then the first one is the batch.
    let is_other = |batch: &&str| !batch.is_empty() && *batch != first.dim_param();
    let mut batches = firsts.map(Dimension::dim_param).filter(is_other);
    if let Some(batch) = batches.find(|batch| axes.iter().any(|a| a.dim_param() == *batch)) {
        return refuse(format!("with the batch, `{batch}`, on another axis than the first"));
    }

    let sizes: Vec<Option<usize>> =
        axes.iter().map(|axis| usize::try_from(axis.dim_value?).ok()).collect();
    let open = sizes.iter().filter(|size| size.is_none()).count();
    if open > 1 {
        return refuse(format!("with {open} open axes after the batch; fix all but one of them"));
    }
    // The width gives the one open size. A remainder is the caller's error.
    let fixed = sizes.iter().flatten().try_fold(1usize, |product, s| product.checked_mul(*s));
    let rest = fixed.and_then(|fixed| width.checked_div(fixed)).unwrap_or(0);
    Ok(sizes.into_iter().map(|size| size.unwrap_or(rest)).collect())
}
