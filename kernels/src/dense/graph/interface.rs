//! The check that an ONNX file has the inputs and the output that the schema names.

use crate::dense::error::DenseError;
use crate::dense::graph::onnx::{FLOAT, INT32, INT64, ModelProto, ValueInfoProto, type_name};

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
    let stored = |name: &str| graph.initializer.iter().any(|t| t.name() == name);
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
    if let Some(value) = graph.input.iter().find(|v| !fed(v.name()) && !stored(v.name())) {
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
        // An input without fixed sizes takes `[batch, width]`.
        let shape = value.sizes().unwrap_or_else(|| vec![*width]);
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
