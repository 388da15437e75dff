// What every kernel source starts from: fixed-width names, reads and writes that race by design,
// f16. Includes nothing on the device, so that the compiler alone builds it; on the host `host.h`
// stands for CUDA's own names.
//
// Floor: compute capability 8.0, PTX ISA 7.4 (CUDA 11.4).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

#define FULL 0xffffffffu

#if defined(__CUDA_ARCH__)

// One word that another thread may change meanwhile: whole, and from where all threads of the
// device see it. It orders nothing, so what the compiler knows of other memory it may keep.
__device__ __forceinline__ u32 load_racing(const u32* at) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ void store_racing(u32* at, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// Racing reads and writes before it come before those behind it, for all threads of the device. It
// speaks for the calling lane alone: where one lane's reads come before another's, `__syncwarp`
// follows, where one's writes do, it precedes.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// The same for the host.
__device__ __forceinline__ void fence_host() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// f16 as f32; exact.
__device__ __forceinline__ float widen(u16 half) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
    return v;
}

#else

inline u32 load_racing(const u32* at) { return sim::load(at); }
inline void store_racing(u32* at, u32 v) { sim::store(at, v); }
inline void fence() { __threadfence(); }
inline void fence_host() { __threadfence_system(); }
inline float widen(u16 half) {
    u32 exponent = half >> 10 & 31, mantissa = half & 1023, sign = (u32)(half & 0x8000) << 16;
    if (exponent == 0) {
        float v = ldexpf((float)mantissa, -24);
        return sign ? -v : v;
    }
    // A NaN comes out quiet, as the device makes it.
    u32 quiet = exponent == 31 && mantissa ? 1u << 22 : 0;
    return __uint_as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13 | quiet);
}

#endif
