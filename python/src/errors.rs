//! The exceptions of the package: one for each result of `libhatchback`.

use hatchback_capi::outcome::{Outcome, Refusal};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

create_exception!(hatchback, Error, PyException, "A call failed.");
create_exception!(hatchback, Busy, Error, "Every request slot is taken; try later.");
create_exception!(hatchback, OpenError, Error, "The target or the flash directory is refused.");
create_exception!(hatchback, Failed, Error, "The request could not be computed.");
create_exception!(hatchback, NotFinite, Error, "A score is not a number.");
create_exception!(hatchback, DeadlineExceeded, Error, "The request had no scores in time.");
create_exception!(hatchback, Closed, Error, "The model is closed.");

/// Returns the type `RequestError`. It is an `Error` and a `ValueError`, and `create_exception` has
/// one base only.
fn request_error(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static TYPE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let made = TYPE.get_or_try_init(py, || {
        let fields = PyDict::new(py);
        fields.set_item("__module__", "hatchback")?;
        fields.set_item("__doc__", "An argument does not fit the model.")?;
        let bases = (py.get_type::<Error>(), py.get_type::<PyValueError>());
        let made = py.get_type::<PyType>().call1(("RequestError", bases, fields))?;
        Ok::<_, PyErr>(made.cast_into::<PyType>()?.unbind())
    });
    made.map(|made| made.bind(py))
}

/// Adds the exceptions to `module`.
pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("Error", py.get_type::<Error>())?;
    module.add("Busy", py.get_type::<Busy>())?;
    module.add("RequestError", request_error(py)?)?;
    module.add("OpenError", py.get_type::<OpenError>())?;
    module.add("Failed", py.get_type::<Failed>())?;
    module.add("NotFinite", py.get_type::<NotFinite>())?;
    module.add("DeadlineExceeded", py.get_type::<DeadlineExceeded>())?;
    module.add("Closed", py.get_type::<Closed>())
}

/// Returns the exception of a refusal.
pub fn of(refusal: Refusal) -> PyErr {
    let Refusal(outcome, text) = refusal;
    match outcome {
        Outcome::Busy => Busy::new_err(text),
        Outcome::Request => Python::attach(|py| match request_error(py) {
            Ok(made) => PyErr::from_type(made.clone(), text),
            Err(e) => e,
        }),
        Outcome::Open => OpenError::new_err(text),
        Outcome::NotFinite => NotFinite::new_err(text),
        Outcome::DeadlineExceeded => DeadlineExceeded::new_err(text),
        Outcome::Closed => Closed::new_err(text),
        Outcome::Ok | Outcome::Failed => Failed::new_err(text),
    }
}
