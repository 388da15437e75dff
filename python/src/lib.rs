//! The native part of the Python package: models that score numpy arrays, and the program
//! `hatchback`. Built on the calls of `libhatchback`. The package's stub lists each call.

#![allow(missing_docs)] // `hatchback/__init__.pyi` is the public interface.

mod buffers;
mod errors;
mod model;

use clap::Parser;
use hatchback_tools::cli::{self, Cli};
use pyo3::prelude::*;

/// Runs the program `hatchback` with `arguments`. Prints its error, if there is one, and returns
/// its exit status.
#[pyfunction]
fn run_program(py: Python<'_>, arguments: Vec<String>) -> PyResult<i32> {
    let program = std::iter::once("hatchback".to_owned());
    match Cli::try_parse_from(program.chain(arguments)) {
        Ok(cli) => Ok(py.detach(|| hatchback_tools::report::status_of(cli::run(cli))).into()),
        // Also `--help` and `--version`, which are texts and no errors.
        Err(e) => e.print().map(|()| e.exit_code()).map_err(PyErr::from),
    }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<model::Model>()?;
    module.add_class::<model::Answer>()?;
    errors::add_to(module)?;
    module.add_function(wrap_pyfunction!(run_program, module)?)
}
