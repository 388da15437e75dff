// The dense network's operators: what `../src/dense/device.rs` launches, in the order of its plan.
// Each is the CPU's operator (`../src/dense/plan.rs`, `gemm.rs`, `math.rs`) to the bit: a sum is
// one chain of fused multiply-adds in the order of its inputs, whatever the tiles. So nothing here
// splits a sum over threads. All matrices are row-major.

#include "prelude.cuh"

typedef long long i64;

// ---- matrix products: out[m, n] = finish(a[m, k] x w[k, n]), finish(x) = relu?(x * scale + bias)

// A block makes ROWS x COLUMNS results, a thread EACH_ROWS x EACH_COLUMNS of them, strided by the
// block's threads so that neighbours in a warp read and write neighbours in memory. DEPTH rows of w
// pass through shared memory at a time.
template <int ROWS, int COLUMNS, int EACH_ROWS, int EACH_COLUMNS>
static __device__ __forceinline__ void multiply(const float* __restrict__ a, const float* __restrict__ w,
                                                const float* __restrict__ scale, const float* __restrict__ bias,
                                                float* __restrict__ out, int m, int k, int n, int relu) {
    constexpr int DEPTH = 16;
    constexpr int THREADS_X = COLUMNS / EACH_COLUMNS;
    constexpr int THREADS_Y = ROWS / EACH_ROWS;
    constexpr int THREADS = THREADS_X * THREADS_Y;
    __shared__ float a_tile[DEPTH][ROWS + 1];
    __shared__ float w_tile[DEPTH][COLUMNS];
    const int thread = threadIdx.x;
    const int x = thread % THREADS_X, y = thread / THREADS_X;
    const int across = (n + COLUMNS - 1) / COLUMNS;
    const int first_row = blockIdx.x / across * ROWS, first_column = blockIdx.x % across * COLUMNS;
    float sum[EACH_ROWS][EACH_COLUMNS] = {};
    for (int depth = 0; depth < k; depth += DEPTH) {
        for (int i = thread; i < ROWS * DEPTH; i += THREADS) {
            const int row = first_row + i / DEPTH, at = depth + i % DEPTH;
            a_tile[i % DEPTH][i / DEPTH] = row < m && at < k ? a[(size_t)row * k + at] : 0.0f;
        }
        for (int i = thread; i < COLUMNS * DEPTH; i += THREADS) {
            const int column = first_column + i % COLUMNS, at = depth + i / COLUMNS;
            w_tile[i / COLUMNS][i % COLUMNS] = column < n && at < k ? w[(size_t)at * n + column] : 0.0f;
        }
        __syncthreads();
        // Not into the padding: a product with it could turn a sum of -0 into +0.
        const int end = k - depth < DEPTH ? k - depth : DEPTH;
#pragma unroll 4
        for (int at = 0; at < end; at++) {
            for (int r = 0; r < EACH_ROWS; r++) {
                const float left = a_tile[at][y + r * THREADS_Y];
                for (int c = 0; c < EACH_COLUMNS; c++) sum[r][c] = fmaf(left, w_tile[at][x + c * THREADS_X], sum[r][c]);
            }
        }
        __syncthreads();
    }
    for (int r = 0; r < EACH_ROWS; r++) {
        for (int c = 0; c < EACH_COLUMNS; c++) {
            const int row = first_row + y + r * THREADS_Y, column = first_column + x + c * THREADS_X;
            if (row >= m || column >= n) continue;
            const float value = fmaf(sum[r][c], scale[column], bias[column]);
            out[(size_t)row * n + column] = relu && 0.0f > value ? 0.0f : value;
        }
    }
}

// For many rows: 64 x 64 results a block of 256 threads; a block for each tile, row after row of
// tiles.
extern "C" __global__ void __launch_bounds__(256) dense_matrix(const float* a, const float* w, const float* scale, const float* bias,
                                                                 float* out, int m, int k, int n, int relu) {
    multiply<64, 64, 4, 4>(a, w, scale, bias, out, m, k, n, relu);
}

// For few rows: 8 x 32 results a block of 256 threads, so that more of the machine reads the
// weights at once.
extern "C" __global__ void __launch_bounds__(256) dense_matrix_few(const float* a, const float* w, const float* scale, const float* bias,
                                                                     float* out, int m, int k, int n, int relu) {
    multiply<8, 32, 1, 1>(a, w, scale, bias, out, m, k, n, relu);
}

// What follows a product that a library made: [values / n, n] in place.
extern "C" __global__ void __launch_bounds__(256) dense_finish(float* out, const float* scale, const float* bias, i64 values, int n, int relu) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < values; i += gridDim.x * 256LL) {
        const int column = (int)(i % n);
        const float value = fmaf(out[i], scale[column], bias[column]);
        out[i] = relu && 0.0f > value ? 0.0f : value;
    }
}

// Small products of two computed operands, `products` times [m, k] x [k, n]; the second is [n, k]
// if turned. A block each: they are the dot products between a sample's vectors, tens by tens.
extern "C" __global__ void __launch_bounds__(256) dense_products(const float* a, const float* b, float* out, i64 products, int m, int k, int n, int turned) {
    for (i64 product = blockIdx.x; product < products; product += gridDim.x) {
        const float* left = a + product * m * k;
        const float* right = b + product * k * n;
        for (int i = threadIdx.x; i < m * n; i += 256) {
            const int row = i / n, column = i % n;
            float sum = 0.0f;
            for (int at = 0; at < k; at++)
                sum = fmaf(left[row * k + at], turned ? right[column * k + at] : right[at * n + column], sum);
            out[product * m * n + i] = sum;
        }
    }
}

// ---- functions of each value: the arithmetic of `math.rs`, line by line

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
    // Exact, since it is by a power of two: fused into what follows or not, the bits are the same.
    // No other product here meets a sum that is not written as fmaf.
    return e * __uint_as_float(power);
}

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// 0 relu, 1 sigmoid, 2 hyperbolic tangent. `to` may be `from`.
extern "C" __global__ void __launch_bounds__(256) dense_map(const float* from, float* to, i64 values, int what) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < values; i += gridDim.x * 256LL) {
        const float x = from[i];
        to[i] = what == 0 ? (0.0f > x ? 0.0f : x) : what == 1 ? sigmoid(x) : fmaf(2.0f, sigmoid(x + x), -1.0f);
    }
}

// ---- functions of two values

// One side: `picks` null and `from_width` that of the result: values in order; `picks`: value
// picks[i] of the sample; `from_width` 0: the same values for every sample.
static __device__ __forceinline__ float side(const float* from, const u32* picks, int from_width, i64 sample, int i) {
    return from[sample * from_width + (picks ? (int)picks[i] : i)];
}

// 0 add, 1 subtract, 2 multiply, 3 divide.
extern "C" __global__ void __launch_bounds__(256) dense_zip(const float* left, const u32* left_picks, int left_width, const float* right, const u32* right_picks,
          int right_width, float* out, i64 values, int width, int what) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < values; i += gridDim.x * 256LL) {
        const i64 sample = i / width;
        const int at = (int)(i - sample * width);
        const float a = side(left, left_picks, left_width, sample, at);
        const float b = side(right, right_picks, right_width, sample, at);
        out[i] = what == 0 ? a + b : what == 1 ? a - b : what == 2 ? a * b : a / b;
    }
}

// ---- sums and places

// [.., inner] from [.., n, inner], added in the order of n; `values` results.
extern "C" __global__ void __launch_bounds__(256) dense_sum(const float* from, float* out, i64 values, int n, int inner, float divisor) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < values; i += gridDim.x * 256LL) {
        const float* column = from + i / inner * n * inner + i % inner;
        float sum = column[0];
        for (int at = 1; at < n; at++) sum += column[(i64)at * inner];
        out[i] = divisor != 1.0f ? sum / divisor : sum;
    }
}

// Part of a concatenation: [values / part, part] into columns `first..` of [.., stride].
extern "C" __global__ void __launch_bounds__(256) dense_concat(const float* from, float* out, i64 values, int part, int stride, int first) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < values; i += gridDim.x * 256LL) {
        out[i / part * stride + first + i % part] = from[i];
    }
}

// Value picks[i] of each sample of `from_width` as value i of `width`.
extern "C" __global__ void __launch_bounds__(256) dense_pick(const float* from, const u32* picks, float* out, i64 values, int width, int from_width) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < values; i += gridDim.x * 256LL) {
        out[i] = from[i / width * from_width + picks[i % width]];
    }
}
