// The common part of every kernel source: fixed-width names, reads and writes that race by design,
// f16. Device code includes no header of CUDA, so the compiler alone builds it. On the host
// `host.h` of the stand-in (tests/standin) defines CUDA's own names.
//
// Minimum: compute capability 8.0, PTX ISA 7.4 (CUDA 11.4).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// Mask of a warp's 32 lanes.
#define ALL_LANES 0xffffffffu

// Returns `value`, which is the same in all lanes of the warp, and tells the compiler so. Code that
// depends on it then needs no handling of lanes that disagree.
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(ALL_LANES, value, 0); }

#if defined(__CUDA_ARCH__)

// Declares `name`, a TYPE that the threads of a block share.
#define SHARED(TYPE, name) __shared__ TYPE name;

// Returns the thread's number in its warp. The compiler treats each call as a new value. Otherwise
// it would keep derived values in registers, which rows in flight need.
__device__ __forceinline__ u32 lane_number() {
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Reads one word that another thread may be writing. The value is never torn and is read from
// memory that all threads of the device see. The read orders no other access: the compiler may keep
// values of other memory in registers.
__device__ __forceinline__ u32 load_racing(const u32* at) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

// Reads four words, each as `load_racing` does; zeros if `!wanted`, without a branch. `at` is a
// multiple of 16 bytes.
__device__ __forceinline__ uint4 load_racing_4(const u32* at, bool wanted) {
    uint4 v = {0, 0, 0, 0};
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; "
        "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(at), "r"((u32)wanted));
    return v;
}

// The next functions read memory that no thread writes while the kernel runs. No branch guards a
// load, so the loads of several rows can be in flight together.

// Reads `WORDS` words (1, 2 or 4) of a row; `at` is a multiple of their size.
template <u32 WORDS>
__device__ __forceinline__ void load_constant(u32 (&v)[WORDS], const void* at) {
    if constexpr (WORDS == 4) {
        asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(at));
    } else if constexpr (WORDS == 2) {
        asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "l"(at));
    } else {
        asm("ld.global.nc.u32 %0, [%1];" : "=r"(v[0]) : "l"(at));
    }
}

// Reads half a word of a row; `at` is even.
__device__ __forceinline__ u32 load_constant_half(const void* at) {
    u16 v;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

// Reads a key, which one lane needs once.
__device__ __forceinline__ u64 load_key(const u64* at, bool wanted) {
    u64 v = 0;
    asm("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.L1::no_allocate.u64 %0, [%1]; }"
        : "+l"(v) : "l"(at), "r"((u32)wanted));
    return v;
}

// Returns byte `byte`, a constant, of a word as an f32, with one instruction.
__device__ __forceinline__ float byte_as_float(u32 word, u32 byte) {
    float v;
    asm("{ .reg .u32 t; shr.u32 t, %1, %2; cvt.rn.f32.u8 %0, t; }"
        : "=f"(v) : "r"(word), "r"(8 * byte));
    return v;
}

// Returns the address of element `index` of an array with elements of `bytes` bytes.
__device__ __forceinline__ const u8* element(const u8* first, u32 index, u32 bytes) {
    const u8* at;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(index), "r"(bytes), "l"(first));
    return at;
}

// Returns `address` as a value whose origin is hidden from the compiler. The compiler then adds an
// index to it with one instruction, and does not add the parts of the address one by one.
template <class T>
__device__ __forceinline__ T* base_address(T* address) {
    asm("" : "+l"(address));
    return address;
}

// Returns two values rounded to f16, to the nearest and then to the even one. The first is the low
// half.
__device__ __forceinline__ u32 narrow_2(float low, float high) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}

// Writes two words if `wanted`; `at` is a multiple of 8 bytes.
__device__ __forceinline__ void store_words_2(u8* at, u32 first, u32 second, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.u32 [%0], {%1, %2}; }"
                 ::"l"(at), "r"(first), "r"(second), "r"((u32)wanted));
}

// Writes four values if `wanted`; `at` is a multiple of 16 bytes.
__device__ __forceinline__ void store_4(u8* at, const float (&v)[4], bool wanted) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.f32 [%0], {%1, %2, %3, %4}; }"
        ::"l"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"((u32)wanted));
}

// Writes one value if `wanted`.
__device__ __forceinline__ void store_1(u8* at, float v, bool wanted) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.f32 [%0], %1; }"
                 ::"l"(at), "f"(v), "r"((u32)wanted));
}

// Writes one word that another thread may be reading.
__device__ __forceinline__ void store_racing(u32* at, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// Orders the calling lane's racing reads and writes before the fence against those after it, for
// all threads of the device. It does not order other lanes. A `__syncwarp` after the fence orders
// one lane's reads before another's. A `__syncwarp` before the fence orders one lane's writes
// before another's.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// `fence_device`, for the host too.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Converts an f16 to f32, exactly.
__device__ __forceinline__ float widen(u16 half) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
    return v;
}

#else

#define SHARED(TYPE, name) TYPE& name = *(TYPE*)sim::shared(sizeof(TYPE));

inline u32 lane_number() { return threadIdx.x % 32; }
inline u32 load_racing(const u32* at) { return sim::load(at); }
inline uint4 load_racing_4(const u32* at, bool wanted) {
    if (!wanted) return {0, 0, 0, 0};
    return {sim::load(at), sim::load(at + 1), sim::load(at + 2), sim::load(at + 3)};
}
// Uses the machine's own loads, so that a test can detect a row that changes during a read.
template <u32 WORDS>
inline void load_constant(u32 (&v)[WORDS], const void* at) {
    if ((size_t)at % (4 * WORDS)) sim::fail("a load of %u words is not aligned to them", WORDS);
    for (u32 i = 0; i < WORDS; i++) v[i] = sim::load((const u32*)at + i);
}
inline u32 load_constant_half(const void* at) {
    u32 shift = (size_t)at % 4 * 8;
    return sim::load((const u32*)((size_t)at & ~(size_t)3)) >> shift & 0xffff;
}
inline float byte_as_float(u32 word, u32 byte) { return (float)(u8)(word >> 8 * byte); }
inline const u8* element(const u8* first, u32 index, u32 bytes) {
    return first + (u64)index * bytes;
}
template <class T> inline T* base_address(T* address) { return address; }
inline u64 load_key(const u64* at, bool wanted) { return wanted ? *at : 0; }
// Rounds to f16. The exponent of the last bit that f16 keeps is that of the value less 10, and at
// least -24.
inline u32 narrow(float value) {
    u32 bits = __float_as_uint(value);
    u32 sign = bits >> 16 & 0x8000;
    float size = __uint_as_float(bits & 0x7fffffff);
    if (size != size) return sign | 0x7fff;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent = (int)(bits >> 23 & 255) - 127;
    if (exponent < -14) return sign | (u32)nearbyintf(ldexpf(size, 24));
    return sign | (((u32)(exponent + 14) << 10) + (u32)nearbyintf(ldexpf(size, 10 - exponent)));
}
inline u32 narrow_2(float low, float high) { return narrow(low) | narrow(high) << 16; }
inline void store_words_2(u8* at, u32 first, u32 second, bool wanted) {
    if (wanted && (size_t)at % 8) sim::fail("a store of 2 words is not aligned to them");
    if (wanted) ((u32*)at)[0] = first, ((u32*)at)[1] = second;
}
inline void store_4(u8* at, const float (&v)[4], bool wanted) {
    if (wanted && (size_t)at % 16) sim::fail("a store of 4 words is not aligned to them");
    for (u32 i = 0; wanted && i < 4; i++) ((float*)at)[i] = v[i];
}
inline void store_1(u8* at, float v, bool wanted) {
    if (wanted) *(float*)at = v;
}
inline void store_racing(u32* at, u32 v) { sim::store(at, v); }
inline void fence_device() { __threadfence(); }
inline void fence_system() { __threadfence_system(); }
inline float widen(u16 half) {
    u32 exponent = half >> 10 & 31;
    u32 mantissa = half & 1023;
    u32 sign = (u32)(half & 0x8000) << 16;

    if (exponent == 0) {
        float v = ldexpf((float)mantissa, -24);
        return sign ? -v : v;
    }

    // A NaN becomes quiet, as on the device.
    u32 quiet = exponent == 31 && mantissa ? 1u << 22 : 0;
    u32 biased = exponent == 31 ? 255 : exponent + 112;
    return __uint_as_float(sign | biased << 23 | mantissa << 13 | quiet);
}

#endif
