// What every kernel source starts from: fixed-width names, reads and writes that race by design,
// f16. Includes nothing on the device, so that the compiler alone builds it. On the host `host.h`
// of the stand-in (tests/standin) defines CUDA's own names.
//
// Floor: compute capability 8.0, PTX ISA 7.4 (CUDA 11.4).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// Mask of a warp's 32 lanes.
#define ALL_LANES 0xffffffffu

#if defined(__CUDA_ARCH__)

// Reads one word that another thread may be writing. The value is never torn and comes from where
// all threads of the device see it. The read orders nothing: the compiler may keep what it knows of
// other memory.
__device__ __forceinline__ u32 load_racing(const u32* at) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

// Writes one word that another thread may be reading.
__device__ __forceinline__ void store_racing(u32* at, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// Orders the calling lane's racing reads and writes before the fence against those after it, as all
// threads of the device see them. It says nothing about other lanes: a `__syncwarp` after the fence
// orders one lane's reads before another's, and a `__syncwarp` before the fence orders one lane's
// writes before another's.
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

inline u32 load_racing(const u32* at) { return sim::load(at); }
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
