//! The native part of the Python package: models that score numpy arrays, and the program
//! `hatchback`. Built on the calls of `libhatchback`. The package's stub lists each call.

#![allow(missing_docs)] // `hatchback/__init__.pyi` is the public interface.

mod buffers;
mod errors;
mod model;

use clap::Parser;
use hatchback_tools::cli::{self, Cli};
use pyo3::prelude::*;

/// Runs the program `hatchback` with `arguments`.
#[pyfunction]
fn run_command(py: Python<'_>, arguments: Vec<String>) -> PyResult<()> {
    let program = std::iter::once("hatchback".to_owned());
    let parsed = Cli::try_parse_from(program.chain(arguments));
    let cli = match parsed {
        Ok(cli) => cli,
        // `--help` and `--version` are texts, not errors.
        Err(e) if !e.use_stderr() => return e.print().map_err(PyErr::from),
        Err(e) => return Err(errors::RequestError::new_err(e.to_string())),
    };
    py.detach(|| cli::run(cli))
        .map_err(|e| errors::Error::new_err(hatchback_tools::report::explain(&e)))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<model::Model>()?;
    module.add_class::<model::Answer>()?;
    errors::add_to(module)?;
    module.add_function(wrap_pyfunction!(run_command, module)?)
}
