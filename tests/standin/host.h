// CUDA C++ for a host compiler, and the machine that runs it. Every CUDA thread is a fiber. Several
// blocks, of several kernels, are resident at the same time, and a seed decides which lanes of which
// warp run next. Fibers switch at every warp operation, barrier and fence. While two kernels run, they
// also switch before racing reads and writes: for a moment, or until the other kernel has done much.
//
// The machine finds lanes that disagree on a mask, divergence around barriers (as a deadlock) and,
// built with AddressSanitizer, accesses out of bounds. It shows no timing.
//
// Of the memory model it shows missing fences between two kernels. A lane may keep reading an old
// value of a word until it passes a fence, or meets (`__syncwarp`) a lane that passed one. The writes
// of a warp become visible to others in any order until one of its lanes passes a fence. Atomics, and
// words that a lane reads for the first time, use the value in memory.
//
// It also finds accesses to shared memory that no `__syncwarp` and no barrier orders (shared.cpp), but
// not in a build with AddressSanitizer: the compiler instruments for one sanitizer only.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };

namespace sim {

[[noreturn]] void fail(const char* what, unsigned a = 0, unsigned b = 0);

// A meeting of the lanes of a mask. It has two sets of slots, because a fast lane may already be in the
// next meeting.
struct Meeting {
    uint32_t mask = 0, arrived[2] = {}, met = 0;
    uint64_t slots[2][32] = {};
    uint32_t who[2] = {};
    uint32_t turns[32] = {};
};

struct Warp {
    uint32_t alive = 0;
    std::vector<std::unique_ptr<Meeting>> meetings;
    std::vector<std::pair<uint32_t*, uint32_t>> written;  // not yet visible to others
};

struct Context {
#if defined(__x86_64__)
    void* sp = nullptr;
#else
    ucontext_t context;
#endif
};

// The last accesses of one kind to a word of shared memory, with no `__syncwarp` between them.
struct Access {
    uint32_t lanes = 0;
    unsigned warp = 0, syncs = 0, barriers = 0;
};

struct Word { Access write, read; };

// A write that is not ordered after another lane's access. It is an error if it changes the word.
struct Unordered {
    Word* word;
    const uint32_t* at;
    uint32_t before;
};

struct Fiber {
    Context context;
    dim3 thread;
    unsigned lane = 0, warp = 0;
    bool done = false;
    // The times that it passed a `__syncwarp` or a barrier, and a barrier.
    unsigned syncs = 0, barriers = 0;
    std::vector<Unordered> unordered;
    char* stack = nullptr;
    uint64_t wakes = 0;  // step number before which the fiber does not run
    // Words as the lane read them since its last fence, and whether it passed a fence since it last
    // met its warp.
    std::vector<std::pair<const uint32_t*, uint32_t>> seen;
    bool fenced = false;
};

struct Grid;

struct Block {
    Grid* grid = nullptr;
    dim3 index;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    unsigned alive = 0, at_barrier = 0, barriers = 0, votes = 0;
    Fiber* current = nullptr;
    uint64_t number = 0;
    // What SHARED of prelude.cuh declares: one object, and the record of each of its words.
    std::vector<uint64_t> shared;
    char* shared_at = nullptr;
    size_t shared_bytes = 0;
    std::vector<Word> words;
};

// A launch that is running.
struct Grid {
    std::function<void()> body;
    dim3 blocks, threads;
    std::vector<uint32_t> order;  // blocks that have not started; the next one is last
    std::vector<std::unique_ptr<Block>> resident;
    bool exclusive = false;       // has __shared__ memory: one block at a time
    bool done() const { return order.empty() && resident.empty(); }
};

extern Block* block;       // the block whose fiber runs
extern uint64_t blocks;    // begun
extern uint64_t progress;  // increases with every event that may let another fiber continue
extern bool racing;        // two kernels run
// Bytes that kernels and copies read from pinned memory, and wrote to it, while `counts_bus`: those of
// each sector of 32 bytes that a warp reads or writes, once for the warp.
extern bool counts_bus;
extern uint64_t bus_bytes[2];
void forget_sectors();
void count_bus(const void* at, size_t bytes, bool writes);
bool is_pinned(const void* at);

void yield();
std::unique_ptr<Grid> begin(std::function<void()> body, dim3 blocks, dim3 threads, bool exclusive);
// Runs lanes of one warp of the grid until each has yielded once.
void step(Grid& grid);
uint64_t random();
void seed(uint64_t seed);

Meeting& meet(uint32_t mask, uint64_t value, unsigned& turn);

template <class T>
inline void exchange(uint32_t mask, T value, const uint64_t*& slots, uint32_t& who) {
    static_assert(sizeof(T) <= 8);
    uint64_t raw = 0;
    memcpy(&raw, &value, sizeof value);
    unsigned turn;
    Meeting& m = meet(mask, raw, turn);
    slots = m.slots[turn];
    who = m.who[turn];
}

template <class T>
inline T from(const uint64_t* slots, unsigned lane) {
    T value;
    memcpy(&value, &slots[lane & 31], sizeof value);
    return value;
}

void barrier();
// Returns the block's one shared object.
void* shared(size_t bytes);
// Notes that all lanes of the warp passed a `__syncwarp`.
void synced(uint32_t mask);
// Ends the run if one of the lane's last writes changed a word that another lane accesses at the time.
void end_writes();
uint32_t load(const uint32_t* at);
void store(uint32_t* at, uint32_t value);
void fence();
// Makes the word at `at` current in memory, for an atomic.
void settle(const void* at);
// Called by lanes that met: if one of them passed a fence, its effect holds for all.
void met(bool fenced);

template <auto F> struct Entry;
template <class... A, void (*F)(A...)>
struct Entry<F> {
    template <size_t... I>
    static std::function<void()> take(void** p, std::index_sequence<I...>) {
        std::tuple<std::decay_t<A>...> copy{*(std::decay_t<A>*)p[I]...};
        return [copy] { std::apply(F, copy); };
    }
    // Returns the call with a copy of its arguments.
    static std::function<void()> bind(void** p) { return take(p, std::index_sequence_for<A...>{}); }
};

struct Named { const char* name; std::function<void()> (*bind)(void**); unsigned threads; bool exclusive; };
void add(Named kernel);
struct Add { Add(Named kernel) { add(kernel); } };

}  // namespace sim

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("gpu_shared")))
#define __restrict__ __restrict
#define threadIdx (sim::block->current->thread)
#define blockIdx (sim::block->index)
#define blockDim (sim::block->grid->threads)
#define gridDim (sim::block->grid->blocks)

static inline void __syncthreads() { sim::barrier(); }
static inline int __syncthreads_or(int yes) {
    sim::block->votes += yes != 0;
    sim::barrier();
    int any = sim::block->votes != 0;
    sim::barrier();
    if (!sim::block->current->lane && !sim::block->current->warp) sim::block->votes = 0;
    sim::barrier();
    return any;
}
static inline void __threadfence() { sim::fence(); }
static inline void __threadfence_system() { sim::fence(); }
static inline unsigned __ballot_sync(unsigned mask, int yes) {
    const uint64_t* slots; uint32_t who, all = 0;
    sim::exchange(mask, (uint32_t)(yes != 0), slots, who);
    for (int i = 0; i < 32; i++) all |= (who >> i & 1 && slots[i] ? 1u : 0u) << i;
    return all;
}
static inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
static inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, !yes) == 0; }
static inline void __syncwarp(unsigned mask = ~0u) {
    sim::met(__ballot_sync(mask, sim::block->current->fenced));
    sim::synced(mask);
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int lane) {
    const uint64_t* slots; uint32_t who;
    sim::exchange(mask, v, slots, who);
    if (!(who >> (lane & 31) & 1)) sim::fail("a shuffle reads lane %u, which does not take part", lane & 31);
    return sim::from<T>(slots, lane);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, unsigned d) {
    const uint64_t* slots; uint32_t who;
    unsigned lane = sim::block->current->lane;
    sim::exchange(mask, v, slots, who);
    return sim::from<T>(slots, lane ^ d);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned d) {
    const uint64_t* slots; uint32_t who;
    unsigned lane = sim::block->current->lane;
    sim::exchange(mask, v, slots, who);
    return lane + d < 32 && (who >> (lane + d) & 1) ? sim::from<T>(slots, lane + d) : v;
}
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return ((uint64_t)high << 32 | low) >> (shift & 31);
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
static inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T atomicAdd(T* p, T v) { sim::settle(p); T old = *p; *p = old + v; return old; }
template <class T> static inline T atomicCAS(T* p, T expected, T v) { sim::settle(p); T old = *p; if (old == expected) *p = v; return old; }
using std::max;
using std::min;
