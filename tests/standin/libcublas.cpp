// A stand-in for the parts of cuBLAS and cuBLASLt that Hatchback calls, in one library under the names of
// both: products that run in the stream's order, on
// the stand-in for the driver. It adds in an order of its own, from the last product to the first. It
// requires that the calling thread has the context, and that the caller set a workspace after the last
// change of the stream. Without one, cuBLAS would allocate its own workspace, and a recording does not
// allow that.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>

#define API extern "C" __attribute__((visibility("default")))
enum { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13 };

struct Handle {
    void *stream = nullptr, *workspace = nullptr;
    size_t bytes = 0;
};

// Rounds a factor as a tensor core does: to the 11 bits of TF32, or to f16 with its smaller range.
enum Compute { F32 = 68, F16 = 74, TF32 = 77 };
static float rounded(float v, int compute) {
    if (compute == F32 || v == 0 || !std::isfinite(v)) return v;
    int exponent;
    std::frexp(v, &exponent);
    int bits = compute == F16 && exponent < -13 ? 11 - (-13 - exponent) : 11;
    float unit = std::ldexp(1.0f, exponent - bits);
    float near = std::nearbyint(v / unit) * unit;
    return compute == F16 && std::fabs(near) > 65504 ? std::copysign(INFINITY, v) : near;
}

struct Product {
    int m, n, k, lda, ldb, ldc, compute;
    const float *a, *b;
    float* c;
    const float* bias = nullptr; // `[m]`; null: none
    bool relu = false;
    bool adds = false; // to what c has
    // Column-major: c[m, n] = a[m, k] x b[k, n], then bias and Relu.
    static void run(void* p) {
        // Not freed: a graph runs the product again.
        auto g = (const Product*)p;
        for (int i = 0; i < g->m; i++)
            for (int j = 0; j < g->n; j++) {
                float sum = g->adds ? g->c[i + (size_t)j * g->ldc] : 0;
                for (int at = g->k; at-- > 0;) sum += rounded(g->a[i + (size_t)at * g->lda], g->compute) * rounded(g->b[at + (size_t)j * g->ldb], g->compute);
                if (g->bias) sum += g->bias[i];
                g->c[i + (size_t)j * g->ldc] = g->relu && sum < 0 ? 0 : sum;
            }
    }
};

static void* of_driver(const char* name) {
    void* driver = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    return driver ? dlsym(driver, name) : nullptr;
}
static bool bound() {
    auto current = (int (*)(void**))of_driver("cuCtxGetCurrent");
    void* context = nullptr;
    return current && !current(&context) && context;
}

API int cublasCreate_v2(Handle** h) { return bound() ? (*h = new Handle, SUCCESS) : NOT_INITIALIZED; }
API int cublasDestroy_v2(Handle* h) {
    if (!bound()) fprintf(stderr, "stand-in cuBLAS: destroyed by a thread without a context\n"), abort();
    // Waits for the whole device, which spoils every recording.
    ((int (*)())of_driver("standin_wait_for_all"))();
    delete h;
    return SUCCESS;
}
API int cublasSetStream_v2(Handle* h, void* stream) { *h = {stream, nullptr, 0}; return SUCCESS; }
API int cublasSetWorkspace_v2(Handle* h, void* workspace, size_t bytes) { h->workspace = workspace, h->bytes = bytes; return SUCCESS; }
API int cublasGemmEx(Handle* h, int turn_a, int turn_b, int m, int n, int k, const float* alpha, const float* a, int a_type, int lda, const float* b, int b_type, int ldb,
                     const float* beta, float* c, int c_type, int ldc, int compute, int algorithm) {
    if (turn_a || turn_b || *alpha != 1 || (*beta != 0 && *beta != 1) || m < 0 || n < 0 || k < 0 || lda < m || ldb < k || ldc < m) return INVALID_VALUE;
    if (a_type || b_type || c_type || algorithm != -1 || (compute != F32 && compute != F16 && compute != TF32)) return INVALID_VALUE;
    if (!h->workspace || h->bytes < 1 << 20 || (size_t)h->workspace % 256) {
        fprintf(stderr, "stand-in cuBLAS: a product without a workspace from the caller\n");
        abort();
    }
    auto launch = (int (*)(void*, void (*)(void*), void*))of_driver("cuLaunchHostFunc");
    if (!launch || !bound()) return NOT_INITIALIZED;
    return launch(h->stream, Product::run, new Product{m, n, k, lda, ldb, ldc, compute, a, b, c, nullptr, false, *beta == 1}) ? EXECUTION_FAILED : SUCCESS;
}

// cuBLASLt. `standin_lt_refuse(1)` makes it know no algorithm.
enum { NOT_SUPPORTED = 15 };
enum Attribute { EPILOGUE = 7, BIAS_POINTER = 8, MAX_WORKSPACE_BYTES = 1 };
enum Epilogue { NONE = 1, BIAS = 4, RELU_BIAS = 6 };
struct Description { int compute, epilogue; const float* bias; };
struct Layout { unsigned long long rows, columns; long long stride; };
struct Algorithm { unsigned long long data[8]; size_t workspace_bytes; int status; float waves; int reserved[4]; };
static bool refuses;
static int objects;

template <class T> static int make(T** to, T value) { return objects++, *to = new T(value), SUCCESS; }
template <class T> static int drop(T* object) { return objects--, delete object, SUCCESS; }

API void standin_lt_refuse(int refuse) { refuses = refuse; }
// Returns the objects that were made and not destroyed.
API int standin_lt_objects() { return objects; }
API int cublasLtCreate(int** h) { return bound() ? make(h, 0) : NOT_INITIALIZED; }
API int cublasLtDestroy(int* h) {
    if (!bound()) fprintf(stderr, "stand-in cuBLASLt: destroyed by a thread without a context\n"), abort();
    return drop(h);
}
API int cublasLtMatmulDescCreate(Description** to, int compute, int scale_type) { return scale_type ? INVALID_VALUE : make(to, {compute, NONE, nullptr}); }
API int cublasLtMatmulDescDestroy(Description* d) { return drop(d); }
API int cublasLtMatmulDescSetAttribute(Description* d, int attribute, const void* value, size_t bytes) {
    if (attribute == EPILOGUE && bytes == 4) return d->epilogue = *(const int*)value, SUCCESS;
    if (attribute == BIAS_POINTER && bytes == 8) return d->bias = *(const float* const*)value, SUCCESS;
    return INVALID_VALUE;
}
API int cublasLtMatrixLayoutCreate(Layout** to, int type, unsigned long long rows, unsigned long long columns, long long stride) {
    return type || stride < (long long)rows ? INVALID_VALUE : make(to, {rows, columns, stride});
}
API int cublasLtMatrixLayoutDestroy(Layout* l) { return drop(l); }
API int cublasLtMatmulPreferenceCreate(size_t** to) { return make(to, (size_t)0); }
API int cublasLtMatmulPreferenceDestroy(size_t* p) { return drop(p); }
API int cublasLtMatmulPreferenceSetAttribute(size_t* p, int attribute, const void* value, size_t bytes) {
    return attribute == MAX_WORKSPACE_BYTES && bytes == 8 ? *p = *(const size_t*)value, SUCCESS : INVALID_VALUE;
}
API int cublasLtMatmulAlgoGetHeuristic(int*, Description* d, Layout* a, Layout* b, Layout* c, Layout* out, size_t* workspace, int wanted, Algorithm* found, int* count) {
    *count = 0;
    if (c != out || a->columns != b->rows || a->rows != c->rows || b->columns != c->columns || wanted != 1) return INVALID_VALUE;
    if (refuses) return NOT_SUPPORTED;
    *found = {{42, (unsigned long long)d->compute}, *workspace, SUCCESS, 1, {}};
    return *count = 1, SUCCESS;
}
API int cublasLtMatmul(int*, Description* d, const float* alpha, const float* a, Layout* la, const float* b, Layout* lb, const float* beta, const float* c, Layout* lc, float* out, Layout*,
                       const Algorithm* algorithm, void* workspace, size_t bytes, void* stream) {
    if (*alpha != 1 || *beta != 0 || c != out || algorithm->data[0] != 42 || algorithm->data[1] != (unsigned long long)d->compute) return INVALID_VALUE;
    if (algorithm->workspace_bytes > bytes || (size_t)workspace % 256 || (d->epilogue != BIAS && d->epilogue != RELU_BIAS) || !d->bias) return INVALID_VALUE;
    auto launch = (int (*)(void*, void (*)(void*), void*))of_driver("cuLaunchHostFunc");
    if (!launch || !bound()) return NOT_INITIALIZED;
    auto product = new Product{(int)la->rows, (int)lb->columns, (int)la->columns, (int)la->stride, (int)lb->stride, (int)lc->stride, d->compute, a, b, out, d->bias, d->epilogue == RELU_BIAS};
    return launch(stream, Product::run, product) ? EXECUTION_FAILED : SUCCESS;
}
