// A stand-in for the part of cuBLAS that Hatchback calls: products that run in the stream's order, on
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
    // Column-major: c[m, n] = a[m, k] x b[k, n].
    static void run(void* p) {
        // Not freed: a graph runs the product again.
        auto g = (const Product*)p;
        for (int i = 0; i < g->m; i++)
            for (int j = 0; j < g->n; j++) {
                float sum = 0;
                for (int at = g->k; at-- > 0;) sum += rounded(g->a[i + (size_t)at * g->lda], g->compute) * rounded(g->b[at + (size_t)j * g->ldb], g->compute);
                g->c[i + (size_t)j * g->ldc] = sum;
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
    delete h;
    return SUCCESS;
}
API int cublasSetStream_v2(Handle* h, void* stream) { *h = {stream, nullptr, 0}; return SUCCESS; }
API int cublasSetWorkspace_v2(Handle* h, void* workspace, size_t bytes) { h->workspace = workspace, h->bytes = bytes; return SUCCESS; }
API int cublasGemmEx(Handle* h, int turn_a, int turn_b, int m, int n, int k, const float* alpha, const float* a, int a_type, int lda, const float* b, int b_type, int ldb,
                     const float* beta, float* c, int c_type, int ldc, int compute, int algorithm) {
    if (turn_a || turn_b || *alpha != 1 || *beta != 0 || m < 0 || n < 0 || k < 0 || lda < m || ldb < k || ldc < m) return INVALID_VALUE;
    if (a_type || b_type || c_type || algorithm != -1 || (compute != F32 && compute != F16 && compute != TF32)) return INVALID_VALUE;
    if (!h->workspace || h->bytes < 1 << 20 || (size_t)h->workspace % 256) {
        fprintf(stderr, "stand-in cuBLAS: a product without a workspace from the caller\n");
        abort();
    }
    auto launch = (int (*)(void*, void (*)(void*), void*))of_driver("cuLaunchHostFunc");
    if (!launch || !bound()) return NOT_INITIALIZED;
    return launch(h->stream, Product::run, new Product{m, n, k, lda, ldb, ldc, compute, a, b, c}) ? EXECUTION_FAILED : SUCCESS;
}
