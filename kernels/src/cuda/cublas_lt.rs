//! A safe wrapper of cuBLASLt: products by a weight matrix with its bias and Relu, one launch each.
//! The library is loaded if the machine has it, as cuBLAS is. After an error the caller uses
//! cuBLAS, and a separate launch for bias and Relu. A matrix with a scale is refused by an
//! assertion.

#![allow(unsafe_code)]

use crate::cuda::cublas_library::{CublasError, Factors, check, load_any};
use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::matrix::DeviceMatrix;
use crate::cuda::memory::{Buffer, View};
use libloading::Library;
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::{Arc, OnceLock};

/// File names of the library: the development link, and those of CUDA 13 to 11.
const LIBRARY_NAMES: [&str; 4] =
    ["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11"];

type Opaque = *mut c_void;
type Destroy = unsafe extern "C" fn(Opaque) -> i32;

/// `cublasLtMatmulHeuristicResult_t`: an algorithm, then its needs.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Algorithm {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    status: i32,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = assert!(size_of::<Algorithm>() == 96);

/// Declares the table `Calls` of the functions of a library that the file calls. It takes the name
/// of the library, its file names, and for each function a name, its symbol and its arguments.
macro_rules! functions {
    ($library:literal $names:ident {$($name:ident = $symbol:literal ($($argument:ty),*);)*}) => {
        /// The library's functions that this file calls.
        #[derive(Clone, Copy)]
        struct Calls {
            $($name: unsafe extern "C" fn($($argument),*) -> i32,)*
        }

        impl Calls {
            /// Loads the library for as long as the process lives.
            fn load() -> Result<Self, CublasError> {
                static LOADED: OnceLock<Calls> = OnceLock::new();
                if let Some(calls) = LOADED.get() {
                    return Ok(*calls);
                }
                // SAFETY: loads a library by its usual name, whose initializers are meant to run.
                // Its functions have these types in its header, in releases 11 to 13. They stay
                // valid because the library is never unloaded.
                let load_as = |name: &str| unsafe {
                    let library = Library::new(name)?;
                    let calls = Self { $($name: *library.get($symbol.as_bytes())?,)* };
                    std::mem::forget(library);
                    Ok(calls)
                };
                let calls = load_any($library, &$names, load_as)?;
                Ok(*LOADED.get_or_init(|| calls))
            }
        }
    };
}

pub(super) use functions;

functions! { "cuBLASLt" LIBRARY_NAMES {
    create = "cublasLtCreate" (*mut Opaque);
    destroy = "cublasLtDestroy" (Opaque);
    make_product = "cublasLtMatmulDescCreate" (*mut Opaque, i32, i32);
    set_product = "cublasLtMatmulDescSetAttribute" (Opaque, i32, *const c_void, usize);
    drop_product = "cublasLtMatmulDescDestroy" (Opaque);
    make_layout = "cublasLtMatrixLayoutCreate" (*mut Opaque, i32, u64, u64, i64);
    drop_layout = "cublasLtMatrixLayoutDestroy" (Opaque);
    make_preference = "cublasLtMatmulPreferenceCreate" (*mut Opaque);
    set_preference = "cublasLtMatmulPreferenceSetAttribute" (Opaque, i32, *const c_void, usize);
    drop_preference = "cublasLtMatmulPreferenceDestroy" (Opaque);
    choose = "cublasLtMatmulAlgoGetHeuristic" (
        Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, i32, *mut Algorithm, *mut i32
    );
    multiply = "cublasLtMatmul" (
        Opaque, Opaque, *const f32, *const c_void, Opaque, *const c_void, Opaque, *const f32,
        *const c_void, Opaque, *mut c_void, Opaque, *const Algorithm, *mut c_void, usize,
        *mut c_void
    );
}}

/// An object of the library, which is destroyed when it is dropped.
struct Owned {
    object: Opaque,
    destroy: Destroy,
}

impl Owned {
    /// Makes an object with `create`, which writes it.
    fn new(
        call: &'static str,
        destroy: Destroy,
        create: impl FnOnce(*mut Opaque) -> i32,
    ) -> Result<Self, CublasError> {
        let mut object = null_mut();
        check(call, create(&mut object))?;
        Ok(Self { object, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the library made the object, and its only owner is being dropped.
        if let Err(e) = check("destroy", unsafe { (self.destroy)(self.object) }) {
            log::error!("failed to destroy an object of cuBLASLt: {e}");
        }
    }
}

/// One worker's handle of cuBLASLt.
pub(super) struct CublasLt {
    calls: Calls,
    handle: Owned,
    gpu: Arc<Gpu>,
    factors: Factors,
}

// SAFETY: a handle may move between threads; `&mut self` admits one thread at a time.
unsafe impl Send for CublasLt {}

/// `CUDA_R_32F`
const F32: i32 = 0;

impl CublasLt {
    /// Loads the library and creates a handle for `gpu`, for products with `factors`.
    pub fn open(gpu: &Arc<Gpu>, factors: Factors) -> Result<Self, CublasError> {
        let calls = Calls::load()?;
        gpu.bind()?;
        // SAFETY: the call writes one handle, for the context that was bound.
        let create = |to| unsafe { (calls.create)(to) };
        let handle = Owned::new("Lt create", calls.destroy, create)?;
        Ok(Self { calls, handle, gpu: Arc::clone(gpu), factors })
    }

    /// Puts `out[m, n] = finish(a[m, k] x by[k, n])` onto `stream`, where `by` has no scale.
    /// `finish` adds the bias, then applies Relu if the matrix has it. After an error, nothing was
    /// put onto the stream.
    pub fn multiply(
        &mut self,
        stream: &Stream,
        m: usize,
        a: View<f32>,
        by: &DeviceMatrix,
        out: View<f32>,
        workspace: &Buffer<u8>,
    ) -> Result<(), CublasError> {
        let (k, n) = (by.k, by.n);
        assert!(a.len() >= m * k && out.len() >= m * n && by.weights.len() >= k * n);
        assert!(by.bias.len() >= n && !by.is_scaled && m < 1 << 31 && k < 1 << 31 && n < 1 << 31);
        let Self { calls, handle, gpu, .. } = self;
        let (calls, handle) = (*calls, handle.object);
        gpu.bind()?;

        // cuBLASLt is column-major: there a row-major product is the product of the operands in
        // swapped order, and the bias is one value a row.
        let product = self.product(by)?;
        let [w_layout, a_layout, out_layout] =
            [self.layout(n, k)?, self.layout(k, m)?, self.layout(n, m)?];
        let layouts = [&w_layout, &a_layout, &out_layout].map(|layout| layout.object);
        let algorithm = self.algorithm(&product, layouts, workspace.len())?;
        let [w_layout, a_layout, out_layout] = layouts;
        let (one, zero) = (1.0f32, 0.0f32);
        let [w, a, out] = [by.weights.address(), a.address(), out.address()];

        // SAFETY: all objects are alive, and the sizes of the matrices were checked. The algorithm
        // takes at most the workspace.
        let status = unsafe {
            (calls.multiply)(
                handle,
                product.object,
                &one,
                w as *const c_void,
                w_layout,
                a as *const c_void,
                a_layout,
                &zero,
                out as *const c_void,
                out_layout,
                out as *mut c_void,
                out_layout,
                &algorithm,
                workspace.address() as *mut c_void,
                workspace.len(),
                stream.raw().cast(),
            )
        };
        check("Lt product", status)?;
        stream.count_launch();
        Ok(())
    }

    /// Returns the description of a product by `by`, with its bias and Relu.
    fn product(&self, by: &DeviceMatrix) -> Result<Owned, CublasError> {
        /// `CUBLASLT_MATMUL_DESC_EPILOGUE` and `CUBLASLT_MATMUL_DESC_BIAS_POINTER`
        const EPILOGUE: i32 = 7;
        const BIAS_POINTER: i32 = 8;
        /// `CUBLASLT_EPILOGUE_BIAS` and `CUBLASLT_EPILOGUE_RELU_BIAS`
        const BIAS: i32 = 4;
        const RELU_BIAS: i32 = 6;
        let (calls, compute) = (self.calls, self.factors.compute_type());
        // SAFETY: the call writes one object.
        let create = |to| unsafe { (calls.make_product)(to, compute, F32) };
        let product = Owned::new("Lt description", calls.drop_product, create)?;

        let (epilogue, bias) = (if by.relu { RELU_BIAS } else { BIAS }, by.bias.address());
        // SAFETY: the object is alive; the values have the sizes of these attributes.
        unsafe {
            let of = product.object;
            let status = (calls.set_product)(of, EPILOGUE, from_ref(&epilogue).cast(), 4);
            check("Lt epilogue", status)?;
            let status = (calls.set_product)(of, BIAS_POINTER, from_ref(&bias).cast(), 8);
            check("Lt bias", status)?;
        }
        Ok(product)
    }

    /// Returns the layout of a column-major matrix.
    fn layout(&self, rows: usize, columns: usize) -> Result<Owned, CublasError> {
        let calls = self.calls;
        let (rows, columns, stride) = (rows as u64, columns as u64, rows as i64);
        // SAFETY: the call writes one object.
        let create = |to| unsafe { (calls.make_layout)(to, F32, rows, columns, stride) };
        Owned::new("Lt layout", calls.drop_layout, create)
    }

    /// Returns the algorithm that the library chooses for `product` of matrices of `layouts`.
    fn algorithm(
        &self,
        product: &Owned,
        [w, a, out]: [Opaque; 3],
        workspace_bytes: usize,
    ) -> Result<Algorithm, CublasError> {
        /// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`
        const WORKSPACE_BYTES: i32 = 1;
        /// `CUBLAS_STATUS_NOT_SUPPORTED`
        const NOT_SUPPORTED: i32 = 15;
        let calls = self.calls;
        // SAFETY: the call writes one object.
        let create = |to| unsafe { (calls.make_preference)(to) };
        let preference = Owned::new("Lt preference", calls.drop_preference, create)?;
        let (mut found, mut count) = (Algorithm::default(), 0);
        // SAFETY: all objects are alive; the value has the attribute's size; there is room for one
        // algorithm and its count.
        unsafe {
            let bytes = from_ref(&workspace_bytes).cast();
            let status = (calls.set_preference)(preference.object, WORKSPACE_BYTES, bytes, 8);
            check("Lt workspace", status)?;
            let (handle, product, wanted) = (self.handle.object, product.object, preference.object);
            let status =
                (calls.choose)(handle, product, w, a, out, out, wanted, 1, &mut found, &mut count);
            check("Lt algorithm", status)?;
        }
        let status = if count == 0 { NOT_SUPPORTED } else { found.status };
        check("Lt algorithm", status)?;
        Ok(found)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // The handle is destroyed after this, in the context that it was created in.
        if let Err(e) = self.gpu.bind() {
            log::error!("failed to bind the context of a cuBLASLt handle: {e}");
        }
    }
}
