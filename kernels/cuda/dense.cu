// The dense network's operators, which kernels/src/gpu/dense_plan.rs launches in the order of its
// plan. Each gives the same bits as the CPU's operator (kernels/src/dense/{plan,gemm,math}.rs). A
// sum is one chain of fused multiply-adds in the order of its inputs, for any tiles, so no kernel
// splits a sum over threads. All matrices are row-major.
//
// Each kernel takes one structure, which kernels/src/gpu/dense_kernels.rs has too.
#include "prelude.cuh"

// ---- Matrix products: out[m, n] = finish(a[m, k] x w[k, n]),
// finish(x) = score?(relu?(x * scale + bias)), or relu?(x * scale + bias) * factor + addend?

struct MatrixProduct {
    const float* a;      // `[m, split]`, the first columns of the left operand
    const float* rest;   // `[m, k - split]`, its other columns
    const float* w;
    const float* scale;  // `[n]`
    const float* bias;   // `[n]`
    const float* factor;  // `[m, n]`, of the results; may be null
    const float* addend;  // the same
    float* out;
    int m;
    int k;
    int n;
    int relu;
    int split;
    int continues;       // whether `out` has sums, to which the product adds
    int is_score;

    // Returns the operand that has column `at`, and sets `from` to the value's index in it. A value
    // that is not wanted may be the first.
    __device__ __forceinline__ const float* left(int row, int at, bool wanted, size_t& from) const {
        const bool is_rest = wanted && at >= split;
        const int before = is_rest ? split : 0;
        const int width = is_rest ? k - split : split;
        from = wanted ? (size_t)row * width + at - before : 0;
        return is_rest ? rest : a;
    }
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

static_assert(sizeof(MatrixProduct) == 96 && sizeof(MatrixFinish) == 40,
              "kernels/src/gpu/dense_kernels.rs has the same structures");
static_assert(sizeof(SmallProducts) == 48,
              "kernels/src/gpu/dense_kernels.rs has the same structures");

__device__ __forceinline__ float rectify(float value, int relu) {
    return relu && 0.0f > value ? 0.0f : value;
}

// The arithmetic of `math.rs`, line by line.
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
    // This product is exact because the second factor is a power of two. The bits are the same
    // whether or not it is fused into the next addition. Every other sum of a product here is
    // written as fmaf.
    return e * __uint_as_float(power);
}

static __device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + exponential(-x));
}

// A score is NaN if its logit is infinite, so the sigmoid hides no error.
static __device__ __forceinline__ float score(float logit) {
    return sigmoid(logit) + (logit - logit);
}

// Loads `N` neighbouring values of shared memory; `from` is a multiple of their bytes.
template <int N>
static __device__ __forceinline__ void load_shared(float (&to)[N], const float* from) {
    if constexpr (N % 4 == 0) {
        for (int i = 0; i < N; i += 4) {
            const float4 four = *(const float4*)(from + i);
            to[i] = four.x;
            to[i + 1] = four.y;
            to[i + 2] = four.z;
            to[i + 3] = four.w;
        }
    } else {
        for (int i = 0; i < N; i++) {
            to[i] = from[i];
        }
    }
}

#if defined(__CUDA_ARCH__)

// Begins a copy of `from[at]` to shared memory, past the registers; of 0 if `!wanted`.
static __device__ __forceinline__ void copy_async(
    float* to, const float* from, size_t at, bool wanted) {
    const u32 shared = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(shared), "l"(from + at), "r"(wanted ? 4 : 0) : "memory");
}

// Begins a copy of the four values from `from[at]` on; both sides are multiples of 16 bytes.
static __device__ __forceinline__ void copy_async_4(
    float* to, const float* from, size_t at, bool wanted) {
    const u32 shared = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared), "l"(from + at), "r"(wanted ? 16 : 0) : "memory");
}

static __device__ __forceinline__ void end_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until the thread's copies are done, except those of the last `LEFT` groups. Other threads
// see them after the next barrier.
template <int LEFT>
static __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#else

static inline void copy_async(float* to, const float* from, size_t at, bool wanted) {
    *to = wanted ? from[at] : 0.0f;
}
static inline void copy_async_4(float* to, const float* from, size_t at, bool wanted) {
    for (int i = 0; i < 4; i++) {
        copy_async(to + i, from, at + i, wanted);
    }
}
static inline void end_copies() {}
template <int LEFT>
static inline void wait_for_copies() {}

#endif

// Starts the sums of the rows from `row` on and of the columns from `column` on.
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void start_sums(
    const MatrixProduct& p, float (&sum)[ROWS][COLUMNS], int row, int column) {
    if (!p.continues) {
        return;
    }
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < COLUMNS; c++) {
            if (row + r < p.m && column + c < p.n) {
                sum[r][c] = p.out[(size_t)(row + r) * p.n + column + c];
            }
        }
    }
}

// Multiplies the thread's results by the factors and adds the addends. It reads the results again:
// with the sums in registers, these pointers would take more than there are.
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void cross_results(const MatrixProduct& p, int row, int column) {
#pragma unroll 1
    for (int i = 0; i < ROWS * COLUMNS; i++) {
        const int to = row + i / COLUMNS;
        const int at = column + i % COLUMNS;
        if (to < p.m && at < p.n) {
            const size_t result = (size_t)to * p.n + at;
            // The CPU rounds the product before it adds.
            const float value = __fmul_rn(p.out[result], p.factor[result]);
            p.out[result] = p.addend ? __fadd_rn(value, p.addend[result]) : value;
        }
    }
}

// Writes the results of the sums. Without the pragmas the sigmoid makes the loops too long to
// unroll, and sums that a variable indexes are in local memory.
template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void write_results(
    const MatrixProduct& p, const float (&sum)[ROWS][COLUMNS], int row, int column) {
    const int m = p.m;
    const int n = p.n;
    const float* __restrict__ scale = p.scale;
    const float* __restrict__ bias = p.bias;
    float* __restrict__ out = p.out;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const int to = row + r;
            const int at = column + c;
            if (to >= m || at >= n) {
                continue;
            }
            const float value = rectify(fmaf(sum[r][c], scale[at], bias[at]), p.relu);
            out[(size_t)to * n + at] = p.is_score ? score(value) : value;
        }
    }
}

template <int ROWS, int COLUMNS>
static __device__ __forceinline__ void finish_sums(
    const MatrixProduct& p, const float (&sum)[ROWS][COLUMNS], int row, int column) {
    write_results<ROWS, COLUMNS>(p, sum, row, column);
    if (p.factor) {
        cross_results<ROWS, COLUMNS>(p, row, column);
    }
}

// A block of 256 threads computes ROWS x COLUMNS results, a thread EACH_ROWS x EACH_COLUMNS
// neighbours of them. DEPTH columns of a and rows of w pass through shared memory at a time. While
// the block multiplies one part, the loads of the next are in flight.
template <int ROWS, int COLUMNS, int EACH_ROWS, int EACH_COLUMNS, int DEPTH>
static __device__ __forceinline__ void multiply(const MatrixProduct& p) {
    constexpr int THREADS_X = COLUMNS / EACH_COLUMNS;
    constexpr int THREADS = 256;
    static_assert(THREADS_X * (ROWS / EACH_ROWS) == THREADS, "a thread for each part");
    constexpr int A_EACH = ROWS * DEPTH / THREADS;
    constexpr int W_EACH = COLUMNS * DEPTH / THREADS;
    alignas(16) __shared__ float a_tiles[2][DEPTH][ROWS + 4];
    alignas(16) __shared__ float w_tiles[2][DEPTH][COLUMNS];

    const float* __restrict__ w = p.w;
    const int m = p.m;
    const int k = p.k;
    const int n = p.n;
    const int thread = threadIdx.x;
    const int x = thread % THREADS_X * EACH_COLUMNS;
    const int y = thread / THREADS_X * EACH_ROWS;
    const int across = (n + COLUMNS - 1) / COLUMNS;
    const int first_row = blockIdx.x / across * ROWS;
    const int first_column = blockIdx.x % across * COLUMNS;

    // The padding of a tile is 0.
    const auto load = [&](int side, int depth) {
#pragma unroll 2
        for (int i = 0; i < A_EACH; i++) {
            const int number = thread + i * THREADS;
            const int row = first_row + number / DEPTH;
            const int at = depth + number % DEPTH;
            const bool wanted = row < m && at < k;
            size_t from;
            const float* left = p.left(row, at, wanted, from);
            copy_async(&a_tiles[side][number % DEPTH][number / DEPTH], left, from, wanted);
        }
#pragma unroll 2
        for (int i = 0; i < W_EACH; i++) {
            const int number = thread + i * THREADS;
            const int column = first_column + number % COLUMNS;
            const int at = depth + number / COLUMNS;
            const bool wanted = column < n && at < k;
            copy_async(&w_tiles[side][number / COLUMNS][number % COLUMNS], w,
                       wanted ? (size_t)at * n + column : 0, wanted);
        }
        end_copies();
    };

    float sum[EACH_ROWS][EACH_COLUMNS] = {};
    load(0, 0);
    start_sums<EACH_ROWS, EACH_COLUMNS>(p, sum, first_row + y, first_column + x);
    for (int depth = 0; depth < k; depth += DEPTH) {
        const int side = depth / DEPTH % 2;
        wait_for_copies<0>();
        // All threads have finished with the other half.
        __syncthreads();
        if (depth + DEPTH < k) {
            load(side ^ 1, depth + DEPTH);
        }
        // Stops before the padding: a product with it could turn a sum of -0 into +0.
        const int end = k - depth < DEPTH ? k - depth : DEPTH;
#pragma unroll 4
        for (int at = 0; at < end; at++) {
            float left[EACH_ROWS];
            float right[EACH_COLUMNS];
            load_shared(left, &a_tiles[side][at][y]);
            load_shared(right, &w_tiles[side][at][x]);
            for (int r = 0; r < EACH_ROWS; r++) {
                for (int c = 0; c < EACH_COLUMNS; c++) {
                    sum[r][c] = fmaf(left[r], right[c], sum[r][c]);
                }
            }
        }
    }

    finish_sums<EACH_ROWS, EACH_COLUMNS>(p, sum, first_row + y, first_column + x);
}

// For many rows: 64 x 64 results a block. Each tile has one block; the tiles are in row-major
// order.
extern "C" __global__ void __launch_bounds__(256, 4) dense_matrix(MatrixProduct p) {
    multiply<64, 64, 4, 4, 16>(p);
}

// The tile of `dense_matrix_few`, whose steps are FEW_DEPTH columns of a and rows of w. The copies
// of FEW_STAGES - 1 steps are in flight, because a step computes for less time than a copy takes.
#define FEW_ROWS 16
#define FEW_COLUMNS 32
#define FEW_DEPTH 16
#define FEW_STAGES 4
#define FEW_THREADS 128

struct FewTiles {
    // Padded, so that rows begin in different banks.
    float a[FEW_ROWS][FEW_DEPTH + 4];
    float w[FEW_DEPTH][FEW_COLUMNS];
};

// Begins the copies of FEW_DEPTH columns of a from column `depth` on, which become the columns of
// `tile` from `column` on. The padding of a tile is 0. Four values go together where the rows of a
// allow it.
template <int STRIDE>
static __device__ __forceinline__ void load_few_a(
    const MatrixProduct& p, float (&tile)[FEW_ROWS][STRIDE], int column, int first_row, int depth) {
    const int thread = threadIdx.x;
    if ((p.k | p.split) % 4 == 0) {
        const int row = thread / (FEW_DEPTH / 4);
        const int at = thread % (FEW_DEPTH / 4) * 4;
        if (row < FEW_ROWS) {
            const bool wanted = first_row + row < p.m && depth + at < p.k;
            size_t from;
            const float* left = p.left(first_row + row, depth + at, wanted, from);
            copy_async_4(&tile[row][column + at], left, from, wanted);
        }
        return;
    }
#pragma unroll 1
    for (int i = thread; i < FEW_ROWS * FEW_DEPTH; i += FEW_THREADS) {
        const int row = i / FEW_DEPTH;
        const int at = i % FEW_DEPTH;
        const bool wanted = first_row + row < p.m && depth + at < p.k;
        size_t from;
        const float* left = p.left(first_row + row, depth + at, wanted, from);
        copy_async(&tile[row][column + at], left, from, wanted);
    }
}

// Begins the copies of FEW_DEPTH rows of w from row `depth` on, as `load_few_a` does.
static __device__ __forceinline__ void load_few_w(
    const MatrixProduct& p, float (&tile)[FEW_DEPTH][FEW_COLUMNS], int first_column, int depth) {
    const int thread = threadIdx.x;
    if (p.n % 4 == 0) {
        const int at = thread / (FEW_COLUMNS / 4);
        const int column = thread % (FEW_COLUMNS / 4) * 4;
        const bool wanted = depth + at < p.k && first_column + column < p.n;
        const size_t from = wanted ? (size_t)(depth + at) * p.n + first_column + column : 0;
        copy_async_4(&tile[at][column], p.w, from, wanted);
        return;
    }
#pragma unroll 1
    for (int i = thread; i < FEW_DEPTH * FEW_COLUMNS; i += FEW_THREADS) {
        const int at = i / FEW_COLUMNS;
        const int column = i % FEW_COLUMNS;
        const bool wanted = depth + at < p.k && first_column + column < p.n;
        const size_t from = wanted ? (size_t)(depth + at) * p.n + first_column + column : 0;
        copy_async(&tile[at][column], p.w, from, wanted);
    }
}

// Adds the products of four rows of a, from column `from` on, and of column `x` of w. Stops before
// the padding: a product with it could turn a sum of -0 into +0.
template <int STRIDE>
static __device__ __forceinline__ void multiply_few(
    const float (*a)[STRIDE], int from, const float (&w)[FEW_DEPTH][FEW_COLUMNS], int x, int end,
    float (&sum)[4][1]) {
    int at = 0;
#pragma unroll 2
    for (; at + 4 <= end; at += 4) {
        float left[4][4];
        float right[4];
        for (int r = 0; r < 4; r++) {
            load_shared(left[r], &a[r][from + at]);
        }
        for (int i = 0; i < 4; i++) {
            right[i] = w[at + i][x];
        }
        for (int i = 0; i < 4; i++) {
            for (int r = 0; r < 4; r++) {
                sum[r][0] = fmaf(left[r][i], right[i], sum[r][0]);
            }
        }
    }
#pragma unroll 1
    for (; at < end; at++) {
        for (int r = 0; r < 4; r++) {
            sum[r][0] = fmaf(a[r][from + at], w[at][x], sum[r][0]);
        }
    }
}

// For few rows: 16 x 32 results a block, so that more multiprocessors read the weights at the same
// time. A thread has four rows of one column, and reads four values of each row at once.
extern "C" __global__ void __launch_bounds__(128, 8) dense_matrix_few(MatrixProduct p) {
    static_assert(FEW_THREADS == FEW_COLUMNS * FEW_ROWS / 4, "a thread for each part");
    static_assert(FEW_THREADS == FEW_DEPTH * FEW_COLUMNS / 4, "one copy of w a thread");
    alignas(16) __shared__ FewTiles tiles[FEW_STAGES];
    const int across = (p.n + FEW_COLUMNS - 1) / FEW_COLUMNS;
    const int first_row = blockIdx.x / across * FEW_ROWS;
    const int first_column = blockIdx.x % across * FEW_COLUMNS;
    const int x = threadIdx.x % FEW_COLUMNS;
    const int y = threadIdx.x / FEW_COLUMNS * 4;
    // The four rows of a warp are padding in a batch that ends before them.
    const bool is_wanted = first_row + y < p.m;

    const auto load = [&](FewTiles& tile, int depth) {
        // Steps after the last one are empty: the groups of copies are counted.
        if (depth < p.k) {
            load_few_a(p, tile.a, 0, first_row, depth);
            load_few_w(p, tile.w, first_column, depth);
        }
        end_copies();
    };

    float sum[4][1] = {};
#pragma unroll 1
    for (int stage = 0; stage < FEW_STAGES - 1; stage++) {
        load(tiles[stage], stage * FEW_DEPTH);
    }
    start_sums<4, 1>(p, sum, first_row + y, first_column + x);
    int stage = 0;
#pragma unroll 1
    for (int depth = 0; depth < p.k; depth += FEW_DEPTH) {
        wait_for_copies<FEW_STAGES - 2>();
        // All threads have finished with the stage before this one, which is loaded next.
        __syncthreads();
        const int before = stage == 0 ? FEW_STAGES - 1 : stage - 1;
        load(tiles[before], depth + (FEW_STAGES - 1) * FEW_DEPTH);
        const FewTiles& tile = tiles[stage];
        stage = stage + 1 == FEW_STAGES ? 0 : stage + 1;
        if (is_wanted) {
            multiply_few(&tile.a[y], 0, tile.w, x, min(p.k - depth, FEW_DEPTH), sum);
        }
    }
    finish_sums<4, 1>(p, sum, first_row + y, first_column + x);
}

// Columns of a that `dense_matrix_once` keeps in shared memory. kernels/src/gpu/dense_kernels.rs
// has the same number.
#define ONCE_DEPTH 64

// For few rows of at most ONCE_DEPTH columns in the host's memory. A block computes all columns of
// 16 rows, one tile of `dense_matrix_few` after the other, so that the rows cross the bus once. The
// copies of w run FEW_STAGES - 1 steps ahead, across the ends of tiles too.
extern "C" __global__ void __launch_bounds__(128, 8) dense_matrix_once(MatrixProduct p) {
    alignas(16) __shared__ float a[FEW_ROWS][ONCE_DEPTH + 4];
    alignas(16) __shared__ float w[FEW_STAGES][FEW_DEPTH][FEW_COLUMNS];
    const int first_row = blockIdx.x * FEW_ROWS;
    const int x = threadIdx.x % FEW_COLUMNS;
    const int y = threadIdx.x / FEW_COLUMNS * 4;
    const bool is_wanted = first_row + y < p.m;

    int next_column = 0;
    int next_depth = 0;
    const auto load_next = [&](int stage) {
        if (next_column < p.n) {
            load_few_w(p, w[stage], next_column, next_depth);
        }
        end_copies();
        next_depth += FEW_DEPTH;
        if (next_depth >= p.k) {
            next_depth = 0;
            next_column += FEW_COLUMNS;
        }
    };

    // In the group of the first copies of w.
#pragma unroll 1
    for (int depth = 0; depth < p.k; depth += FEW_DEPTH) {
        load_few_a(p, a, depth, first_row, depth);
    }
#pragma unroll 1
    for (int stage = 0; stage < FEW_STAGES - 1; stage++) {
        load_next(stage);
    }
    int stage = 0;
#pragma unroll 1
    for (int column = 0; column < p.n; column += FEW_COLUMNS) {
        float sum[4][1] = {};
        start_sums<4, 1>(p, sum, first_row + y, column + x);
#pragma unroll 1
        for (int depth = 0; depth < p.k; depth += FEW_DEPTH) {
            wait_for_copies<FEW_STAGES - 2>();
            // As in `dense_matrix_few`.
            __syncthreads();
            load_next(stage == 0 ? FEW_STAGES - 1 : stage - 1);
            if (is_wanted) {
                multiply_few(&a[y], depth, w[stage], x, min(p.k - depth, FEW_DEPTH), sum);
            }
            stage = stage + 1 == FEW_STAGES ? 0 : stage + 1;
        }
        finish_sums<4, 1>(p, sum, first_row + y, column + x);
    }
}

// Finishes a product that a library computed: `[values / n, n]` in place.
extern "C" __global__ void __launch_bounds__(256) dense_finish(MatrixFinish p) {
    for (i64 i = blockIdx.x * 256LL + threadIdx.x; i < p.values; i += gridDim.x * 256LL) {
        const int column = (int)(i % p.n);
        const float value = fmaf(p.out[i], p.scale[column], p.bias[column]);
        p.out[i] = rectify(value, p.relu);
    }
}

// Values of both operands of a small product that a block keeps in shared memory.
#define SMALL_VALUES 8192

// Rows of the first operand that a thread multiplies by one column of the second.
#define SMALL_ROWS 4

// Multiplies operands in shared memory: `left` is `[m, k]`, `right` `[n, k]`, both `stride` apart.
static __device__ __forceinline__ void multiply_small(
    const SmallProducts& p, const float* left, const float* right, int stride, float* out) {
    const int blocks = (p.m + SMALL_ROWS - 1) / SMALL_ROWS;
    for (int i = threadIdx.x; i < blocks * p.n; i += 256) {
        const int row = i / p.n * SMALL_ROWS;
        const int column = i % p.n;
        const float* rows[SMALL_ROWS];
        for (int r = 0; r < SMALL_ROWS; r++) {
            rows[r] = left + min(row + r, p.m - 1) * stride;
        }
        float sums[SMALL_ROWS] = {};
        for (int at = 0; at < p.k; at++) {
            const float factor = right[column * stride + at];
            for (int r = 0; r < SMALL_ROWS; r++) {
                sums[r] = fmaf(rows[r][at], factor, sums[r]);
            }
        }
        for (int r = 0; r < SMALL_ROWS && row + r < p.m; r++) {
            out[(row + r) * p.n + column] = sums[r];
        }
    }
}

// Computes `products` small products `[m, k] x [k, n]` of two computed operands. Each takes one
// block. They are the dot products between a sample's vectors, some tens by some tens. The operands
// pass through shared memory if they fit.
extern "C" __global__ void __launch_bounds__(256, 4) dense_products(SmallProducts p) {
    __shared__ float operands[SMALL_VALUES];
    const int m = p.m;
    const int k = p.k;
    const int n = p.n;
    // One more than k, so that neighbouring rows are in different banks.
    const int stride = k + 1;
    const bool fits = (i64)(m + n) * stride <= SMALL_VALUES;
    for (i64 product = blockIdx.x; product < p.products; product += gridDim.x) {
        const float* left = p.a + product * m * k;
        const float* right = p.b + product * k * n;
        float* out = p.out + product * m * n;
        if (fits) {
            float* to = operands + m * stride;
            for (int i = threadIdx.x; i < m * k; i += 256) {
                operands[i / k * stride + i % k] = left[i];
            }
            for (int i = threadIdx.x; i < k * n; i += 256) {
                const int row = p.transposed ? i % k : i / n;
                const int column = p.transposed ? i / k : i % n;
                to[column * stride + row] = right[i];
            }
            __syncthreads();
            multiply_small(p, operands, to, stride, out);
            __syncthreads();
            continue;
        }
        for (int i = threadIdx.x; i < m * n; i += 256) {
            const int row = i / n;
            const int column = i % n;
            float sum = 0.0f;
            for (int at = 0; at < k; at++) {
                const float factor = p.transposed ? right[column * k + at] : right[at * n + column];
                sum = fmaf(left[row * k + at], factor, sum);
            }
            out[i] = sum;
        }
    }
}

// ---- Products of every two of a sample's vectors

// kernels/src/gpu/dense_kernels.rs has the same number: operands of one launch.
#define PARTS 8

struct PairPart {
    const float* from;  // `[samples, rows, k]`
    int rows;
    int before;         // rows of the parts before it
};

// A pick of this bit copies a value of the vectors. The bits 16 to 30 are its row, the others its
// column. Without the bit these are the two rows of a product.
#define VALUE_PICK 0x80000000u

struct Pairs {
    PairPart parts[PARTS];
    const u32* picks;  // `[width]`
    float* out;        // `[samples, width]`
    i64 samples;
    int count;         // of the parts
    int k;
    int width;
    int unused;
};

static_assert(sizeof(Pairs) == 168, "kernels/src/gpu/dense_kernels.rs has the same structure");

// Each sample takes one block. Its vectors pass through shared memory, from wherever they are, so
// nobody concatenates them. A result is one chain over the columns of two rows.
extern "C" __global__ void __launch_bounds__(256, 4) dense_pairs(Pairs p) {
    alignas(16) __shared__ float vectors[SMALL_VALUES];
    const int k = p.k;
    // Rows begin at multiples of 16 bytes if they can be read by four values. In both cases
    // neighbouring rows begin in different banks.
    const bool by_four = k % 4 == 0;
    const int stride = by_four ? k + 4 : k | 1;
    for (i64 sample = blockIdx.x; sample < p.samples; sample += gridDim.x) {
        // Unrolled, because a parameter that is indexed by a variable would go to local memory.
#pragma unroll
        for (int number = 0; number < PARTS; number++) {
            const PairPart part = p.parts[number];
            const int values = number < p.count ? part.rows * k : 0;
            const float* from = part.from + sample * values;
            for (int i = threadIdx.x; i < values; i += 256) {
                const int row = i / k;
                vectors[(part.before + row) * stride + i - row * k] = from[i];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < p.width; i += 256) {
            const u32 pick = p.picks[i];
            const float* left = vectors + (int)(pick >> 16 & 0x7fff) * stride;
            float result = 0.0f;
            if (pick & VALUE_PICK) {
                result = left[pick & 0xffff];
            } else {
                const float* right = vectors + (int)(pick & 0xffff) * stride;
                if (by_four) {
                    for (int at = 0; at < k; at += 4) {
                        float a[4];
                        float b[4];
                        load_shared(a, left + at);
                        load_shared(b, right + at);
                        for (int c = 0; c < 4; c++) {
                            result = fmaf(a[c], b[c], result);
                        }
                    }
                } else {
                    for (int at = 0; at < k; at++) {
                        result = fmaf(left[at], right[at], result);
                    }
                }
            }
            p.out[sample * p.width + i] = result;
        }
        __syncthreads();
    }
}

// ---- Functions of values, sums, concatenations, selections

// kernels/src/gpu/numbers.rs has the same numbers.
enum StepFunction { RELU, SIGMOID, TANH, SCORE, ADD, SUBTRACT, MULTIPLY, DIVIDE, SUM, COPY };

// kernels/src/gpu/dense_kernels.rs has the same number: steps of one launch.
#define STEPS 16

// One operand of a step. With `picks` it has value picks[i] of the sample, otherwise value i.
struct StepSide {
    const float* values;
    const u32* picks;
    int pitch;   // from sample to sample; 0 if all samples have the same values
    int unused;

    __device__ __forceinline__ float value(i64 sample, int i) const {
        return values[sample * pitch + (picks ? (int)picks[i] : i)];
    }
};

// Computes `width` values of each sample. A sum reads groups of `inner` columns, and a copy writes
// them, which begin `stride` apart. A sum adds `n` columns that are `inner` apart.
struct Step {
    StepSide left;
    StepSide right;
    float* out;
    int pitch;  // of `out`, from sample to sample
    int function;
    int width;
    int inner;
    int stride;
    int n;
    float divisor;
    int unused;
};

struct Steps {
    Step steps[STEPS];
    i64 samples;
    int count;  // of the steps
    int each;   // samples of a block; 0 if each value depends on the values at its own place only
};

static_assert(sizeof(StepSide) == 24 && sizeof(Step) == 88 && sizeof(Steps) == 1424,
              "kernels/src/gpu/dense_kernels.rs has the same structures");

// Returns value `at` of a sample.
static __device__ __forceinline__ float compute_step(const Step& p, i64 sample, int at) {
    if (p.function == SUM) {
        // Adds in the order of n.
        const float* column =
            p.left.values + sample * p.left.pitch + at / p.inner * p.stride + at % p.inner;
        float sum = column[0];
        for (int next = 1; next < p.n; next++) {
            sum += column[(i64)next * p.inner];
        }
        return p.divisor != 1.0f ? sum / p.divisor : sum;
    }
    const float a = p.left.value(sample, at);
    switch (p.function) {
    case RELU: return rectify(a, 1);
    case SIGMOID: return sigmoid(a);
    case TANH: return fmaf(2.0f, sigmoid(a + a), -1.0f);
    case SCORE: return score(a);
    case COPY: return a;
    }
    const float b = p.right.value(sample, at);
    return p.function == ADD ? a + b
        : p.function == SUBTRACT ? a - b
        : p.function == MULTIPLY ? a * b
                                 : a / b;
}

// Computes the values from `first` on of all samples, one for each of `threads`.
static __device__ __forceinline__ void run_step(const Step& p, i64 first, i64 end, i64 threads) {
    for (i64 i = first; i < end; i += threads) {
        const i64 sample = i / p.width;
        const int at = (int)(i - sample * p.width);
        const int to = p.function == COPY ? at / p.inner * p.stride + at % p.inner : at;
        p.out[sample * p.pitch + to] = compute_step(p, sample, at);
    }
}

// Runs the steps in their order. A block has all values of its samples, so it waits for no other
// block between two steps.
extern "C" __global__ void __launch_bounds__(256) dense_steps(Steps p) {
    __shared__ Step steps[STEPS];
    // Unrolled for the same reason as in dense_pairs.
#pragma unroll
    for (int number = 0; number < STEPS; number++) {
        if ((int)threadIdx.x == number && number < p.count) {
            steps[number] = p.steps[number];
        }
    }
    __syncthreads();
    const i64 first = (i64)blockIdx.x * p.each;
    const i64 end = min(first + p.each, p.samples);
    for (int number = 0; number < p.count; number++) {
        const Step step = steps[number];
        if (p.each == 0) {
            const i64 thread = blockIdx.x * 256LL + threadIdx.x;
            run_step(step, thread, p.samples * step.width, gridDim.x * 256LL);
        } else {
            run_step(step, first * step.width + threadIdx.x, end * step.width, 256);
            __syncthreads();
        }
    }
}

// ---- Copies of rows

struct GatherRows {
    const float* from;   // `[.., from_stride]`
    const u32* numbers;  // `[rows]`; null for all rows in order
    float* to;           // `[rows, to_stride]`
    int width;           // columns that are copied
    int from_stride;
    int to_stride;
    int unused;
};

static_assert(sizeof(GatherRows) == 40, "kernels/src/gpu/dense_kernels.rs has the same structure");

// The first columns of row numbers[i] become those of row i of the result. Each row has a block,
// of which one thread reads the number: the host's memory may have it.
extern "C" __global__ void __launch_bounds__(256) dense_gather(GatherRows p) {
    __shared__ u32 number;
    i64 row = blockIdx.x;
    if (p.numbers) {
        if (threadIdx.x == 0) {
            number = p.numbers[row];
        }
        __syncthreads();
        row = number;
    }
    const float* from = p.from + row * p.from_stride;
    float* to = p.to + (i64)blockIdx.x * p.to_stride;
    for (int at = threadIdx.x; at < p.width; at += 256) {
        to[at] = from[at];
    }
}
