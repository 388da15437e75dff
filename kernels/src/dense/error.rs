//! The errors of the dense network on the CPU.

/// Why a dense network cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages say what each field is.
pub enum DenseError {
    /// The ONNX file does not parse, or contradicts itself.
    #[error("dense network: {}", short(.0))]
    Load(String),
    /// This version does not run an operator, a form or a type, or the network is over a limit.
    #[error("dense network: this version does not run {}", short(.0))]
    Unsupported(String),
    /// The schema names an input that the network does not have.
    #[error("dense network: no input named `{0}`")]
    NoInput(String),
    /// The network has an input that no feature of the schema feeds.
    #[error(
        "dense network: input `{}` is not fed by the schema; give it a [[network.input]]",
        short(.0)
    )]
    NotFed(String),
    /// The network does not have the output that the schema names.
    #[error("dense network: no output named `{0}`")]
    NoOutput(String),
    /// The width of an input is not the sum of the widths of the features that feed it.
    #[error(
        "dense network: input `{name}` takes {network} values a sample, the schema feeds {schema}"
    )]
    Width { name: String, network: usize, schema: usize },
    /// Several outputs do not have one value a sample each.
    #[error(
        "dense network: outputs `{names}` have {values} values a sample together; each of the \
         {outputs} outputs must have one"
    )]
    Outputs { names: String, outputs: usize, values: usize },
    /// The network takes an input of another type than f32.
    #[error("dense network: input `{}` is {of}, only FLOAT inputs are fed{hint}", short(name))]
    InputType { name: String, of: &'static str, hint: &'static str },
    /// The caller passed more samples than the memory of the run holds.
    #[error("dense network: {batch} samples, the memory is for {max}")]
    Batch { batch: usize, max: usize },
    /// The network failed during a run.
    #[error("dense network: {0}")]
    Run(String),
}

/// Returns the beginning of `text`. A file may have names of any length, and a message goes into
/// logs and records.
fn short(text: &str) -> String {
    const CHARS_MAX: usize = 2_000;
    text.chars().take(CHARS_MAX).collect()
}
