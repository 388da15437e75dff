// The dense network's operators, which kernels/src/gpu/dense_plan.rs launches in the order of its
// plan. Each gives the bits of the CPU's operator (kernels/src/dense/{plan,gemm,math}.rs): a sum is
// one chain of fused multiply-adds in the order of its inputs, whatever the tiles. So no kernel
// here splits a sum over threads. All matrices are row-major.
//
// Each kernel takes one structure, which kernels/src/gpu/dense_kernels.rs has too.
#include "prelude.cuh"

// ---- Matrix products: out[m, n] = finish(a[m, k] x w[k, n]), finish(x) = relu?(x * scale + bias)

struct MatrixProduct {
    const float* a;
    const float* w;
    const float* scale;  // `[n]`
    const float* bias;   // `[n]`
    float* out;
    int m;
    int k;
    int n;
    int relu;
};

struct MatrixFinish {
    float* out;
    const float* scale;
    const float* bias;
    i64 values;
    int n;
    int relu;
};

struct SmallProducts {
    const float* a;
    const float* b;
    float* out;
    i64 products;
    int m;
    int k;
    int n;
    int transposed;  // whether `b` is `[n, k]`
};

static_assert(sizeof(MatrixProduct) == 56 && sizeof(MatrixFinish) == 40,
              "kernels/src/gpu/dense_kernels.rs has the same structures");
static_assert(sizeof(SmallProducts) == 48,
              "kernels/src/gpu/dense_kernels.rs has the same structures");

__device__ __forceinline__ float rectify(float value, int relu) {
    return relu && 0.0f > value ? 0.0f : value;
}

// A block computes ROWS x COLUMNS results, a thread EACH_ROWS x EACH_COLUMNS of them, strided by
// the block's threads so that neighbours in a warp read and write neighbours in memory. DEPTH rows
// of w pass through shared memory at a time.
template <int ROWS, int COLUMNS, int EACH_ROWS, int EACH_COLUMNS>
static __device__ __forceinline__ void multiply(const MatrixProduct& p) {
    constexpr int DEPTH = 16;
    constexpr int THREADS_X = COLUMNS / EACH_COLUMNS;
    constexpr int THREADS_Y = ROWS / EACH_ROWS;
    constexpr int THREADS = THREADS_X * THREADS_Y;
    __shared__ float a_tile[DEPTH][ROWS + 1];
    __shared__ float w_tile[DEPTH][COLUMNS];

    const float* __restrict__ a = p.a;
    const float* __restrict__ w = p.w;
    const float* __restrict__ scale = p.scale;
    const float* __restrict__ bias = p.bias;
    float* __restrict__ out = p.out;
    const int m = p.m;
    const int k = p.k;
    const int n = p.n;
    const int thread = threadIdx.x;
    const int x = thread % THREADS_X;
    const int y = thread / THREADS_X;
    const int across = (n + COLUMNS - 1) / COLUMNS;
    const int first_row = blockIdx.x / across * ROWS;
    const int first_column = blockIdx.x % across * COLUMNS;

    float sum[EACH_ROWS][EACH_COLUMNS] = {};
    for (int depth = 0; depth < k; depth += DEPTH) {
        for (int i = thread; i < ROWS * DEPTH; i += THREADS) {
            const int row = first_row + i / DEPTH;
            const int at = depth + i % DEPTH;
            const bool inside = row < m && at < k;
            a_tile[i % DEPTH][i / DEPTH] = inside ? a[(size_t)row * k + at] : 0.0f;
        }
        for (int i = thread; i < COLUMNS * DEPTH; i += THREADS) {
            const int column = first_column + i % COLUMNS;
            const int at = depth + i / COLUMNS;
            const bool inside = column < n && at < k;
            w_tile[i / COLUMNS][i % COLUMNS] = inside ? w[(size_t)at * n + column] : 0.0f;
        }
        __syncthreads();

        // Not into the padding: a product with it could turn a sum of -0 into +0.
        const int end = k - depth < DEPTH ? k - depth : DEPTH;
#pragma unroll 4
        for (int at = 0; at < end; at++) {
            for (int r = 0; r < EACH_ROWS; r++) {
                const float left = a_tile[at][y + r * THREADS_Y];
                for (int c = 0; c < EACH_COLUMNS; c++) {
                    sum[r][c] = fmaf(left, w_tile[at][x + c * THREADS_X], sum[r][c]);
                }
            }
        }
        __syncthreads();
    }

    for (int r = 0; r < EACH_ROWS; r++) {
        for (int c = 0; c < EACH_COLUMNS; c++) {
            const int row = first_row + y + r * THREADS_Y;
            const int column = first_column + x + c * THREADS_X;
            if (row >= m || column >= n) {
                continue;
            }
            const float value = fmaf(sum[r][c], scale[column], bias[column]);
            out[(size_t)row * n + column] = rectify(value, p.relu);
        }
    }
}

// For many rows: 64 x 64 results a block of 256 threads. One block for each tile, one row of tiles
// after the other.
extern "C" __global__ void __launch_bounds__(256) dense_matrix(MatrixProduct p) {
    multiply<64, 64, 4, 4>(p);
}

// For few rows: 8 x 32 results a block of 256 threads, so that more multiprocessors read the
// weights at the same time.
extern "C" __global__ void __launch_bounds__(256) dense_matrix_few(MatrixProduct p) {
    multiply<8, 32, 1, 1>(p);
}

// Finishes a product that a library computed: `[values / n, n]` in place.
extern "C" __global__ void __launch_bounds__(256) dense_finish(MatrixFinish p) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < p.values; i += gridDim.x * 256LL) {
        const int column = (int)(i % p.n);
        const float value = fmaf(p.out[i], p.scale[column], p.bias[column]);
        p.out[i] = rectify(value, p.relu);
    }
}

// `products` small products `[m, k] x [k, n]` of two computed operands. Each takes one block: they
// are the dot products between a sample's vectors, tens by tens.
extern "C" __global__ void __launch_bounds__(256) dense_products(SmallProducts p) {
    const int m = p.m;
    const int k = p.k;
    const int n = p.n;
    for (i64 product = blockIdx.x; product < p.products; product += gridDim.x) {
        const float* left = p.a + product * m * k;
        const float* right = p.b + product * k * n;
        for (int i = threadIdx.x; i < m * n; i += 256) {
            const int row = i / n;
            const int column = i % n;
            float sum = 0.0f;
            for (int at = 0; at < k; at++) {
                const float factor = p.transposed ? right[column * k + at] : right[at * n + column];
                sum = fmaf(left[row * k + at], factor, sum);
            }
            p.out[product * m * n + i] = sum;
        }
    }
}

// ---- Functions of each value: the arithmetic of `math.rs`, line by line

// kernels/src/gpu/numbers.rs has the same numbers.
enum MapFunction { RELU, SIGMOID, TANH };

struct MapValues {
    const float* from;
    float* to;  // may be `from`
    i64 values;
    int function;
};

static_assert(sizeof(MapValues) == 32, "kernels/src/gpu/dense_kernels.rs has the same structure");

static __device__ __forceinline__ float exponential(float x) {
    const float ROUND = 12582912.0f;
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;

    const float rounded = fmaf(x, 1.44269504088896340736f, ROUND);
    const float n = rounded - ROUND;
    float r = fmaf(n, -0.6933594f, x);
    r = fmaf(n, 2.1219444e-4f, r);

    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 0.16666665f);
    p = fmaf(p, r, 0.5f);

    const float e = fmaf(p, r * r, r) + 1.0f;
    const u32 power = (__float_as_uint(rounded) - __float_as_uint(ROUND) + 127u) << 23;
    // This product is exact because the second factor is a power of two. Fused into the next
    // addition or not, the bits are the same. No other product here meets a sum that is not written
    // as fmaf.
    return e * __uint_as_float(power);
}

static __device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + exponential(-x));
}

extern "C" __global__ void __launch_bounds__(256) dense_map(MapValues p) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < p.values; i += gridDim.x * 256LL) {
        const float x = p.from[i];
        p.to[i] = p.function == RELU ? rectify(x, 1)
            : p.function == SIGMOID  ? sigmoid(x)
                                     : fmaf(2.0f, sigmoid(x + x), -1.0f);
    }
}

// ---- Functions of two values

// kernels/src/gpu/numbers.rs has the same numbers.
enum ZipFunction { ADD, SUBTRACT, MULTIPLY, DIVIDE };

// One side of a zip. With `picks`, value picks[i] of the sample. Without, value i of the sample; a
// `width` of 0 then gives the same values for every sample.
struct ZipSide {
    const float* values;
    const u32* picks;
    int width;

    __device__ __forceinline__ float value(i64 sample, int i) const {
        return values[sample * width + (picks ? (int)picks[i] : i)];
    }
};

struct ZipValues {
    ZipSide left;
    ZipSide right;
    float* out;
    i64 values;
    int width;
    int function;
};

static_assert(sizeof(ZipSide) == 24 && sizeof(ZipValues) == 72,
              "kernels/src/gpu/dense_kernels.rs has the same structures");

extern "C" __global__ void __launch_bounds__(256) dense_zip(ZipValues p) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < p.values; i += gridDim.x * 256LL) {
        const i64 sample = i / p.width;
        const int at = (int)(i - sample * p.width);
        const float a = p.left.value(sample, at);
        const float b = p.right.value(sample, at);
        p.out[i] = p.function == ADD ? a + b
            : p.function == SUBTRACT ? a - b
            : p.function == MULTIPLY ? a * b
                                     : a / b;
    }
}

// ---- Sums, concatenations, selections

struct SumValues {
    const float* from;  // `[.., n, inner]`
    float* out;         // `[.., inner]`
    i64 values;         // of `out`
    int n;
    int inner;
    float divisor;
};

struct ConcatPart {
    const float* from;  // `[values / part, part]`
    float* out;         // `[values / part, stride]`
    i64 values;         // of `from`
    int part;
    int stride;
    int first;  // column of `out` where the part begins
};

struct PickValues {
    const float* from;  // `[values / width, from_width]`
    const u32* picks;   // `[width]`
    float* out;         // `[values / width, width]`
    i64 values;         // of `out`
    int width;
    int from_width;
};

static_assert(sizeof(SumValues) == 40 && sizeof(ConcatPart) == 40 && sizeof(PickValues) == 40,
              "kernels/src/gpu/dense_kernels.rs has the same structures");

// Adds in the order of n.
extern "C" __global__ void __launch_bounds__(256) dense_sum(SumValues p) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < p.values; i += gridDim.x * 256LL) {
        const float* column = p.from + i / p.inner * p.n * p.inner + i % p.inner;
        float sum = column[0];
        for (int at = 1; at < p.n; at++) {
            sum += column[(i64)at * p.inner];
        }
        p.out[i] = p.divisor != 1.0f ? sum / p.divisor : sum;
    }
}

extern "C" __global__ void __launch_bounds__(256) dense_concat(ConcatPart p) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < p.values; i += gridDim.x * 256LL) {
        p.out[i / p.part * p.stride + p.first + i % p.part] = p.from[i];
    }
}

// Value picks[i] of each sample becomes value i of the result.
extern "C" __global__ void __launch_bounds__(256) dense_pick(PickValues p) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < p.values; i += gridDim.x * 256LL) {
        p.out[i] = p.from[i / p.width * p.from_width + p.picks[i % p.width]];
    }
}
