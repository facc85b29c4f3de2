// SPDX-License-Identifier: Apache-2.0
// What the kernels share: element types, ordered keys, reductions over warps and blocks.
// No header of CUDA or of C++ is included, so nvcc and NVRTC compile the same text; host builds add host/simulate.h.
#pragma once

#if defined(SPECCOMPILE_HOST)
#include "host/simulate.h"
#endif

namespace speccompile {

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

inline constexpr i64 divide_up(i64 value, i64 by) { return (value + by - 1) / by; }

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;

struct Float16 {
    unsigned short bits;
};
struct BFloat16 {
    unsigned short bits;
};

__device__ inline float float_from(float value) { return value; }
__device__ inline float float_from(BFloat16 value) { return __uint_as_float(static_cast<u32>(value.bits) << 16); }
__device__ inline float float_from(Float16 value) {
#if defined(SPECCOMPILE_HOST)
    return host_float_from_half(value.bits);
#else
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#endif
}

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

// exp(x) for x <= 0 in two instructions, error about 2^-22 near 0 and |x| * 2^-24 beyond; below exp(-87) it is 0.
__device__ inline float exp_fast(float x) {
    const float power = x * 1.4426950408889634f;
#if defined(SPECCOMPILE_HOST)
    return std::exp2(power);
#else
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(power));
    return value;
#endif
}

// Keys have the order of the numbers; -0 and +0 have one key.
__device__ inline u32 key_from(float value) {
#if defined(SPECCOMPILE_HOST)
    if (value != value) return 0xffffffffu;  // a GPU's arithmetic has one NaN, and this is its key
#endif
    const u32 bits = __float_as_uint(value + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float float_from_key(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

template <typename V>
__device__ inline V warp_sum(V value) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

// Greatest and least of the lanes: one instruction from sm_80 on.
__device__ inline u32 warp_max(u32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    for (int step = WARP / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
#else
    return __reduce_max_sync(ALL_LANES, value);
#endif
}

__device__ inline u32 warp_min(u32 value) { return ~warp_max(~value); }

__device__ inline float warp_max(float value) { return float_from_key(warp_max(key_from(value))); }

// Inclusive scan: sum of the lanes up to and including this one.
template <typename V>
__device__ inline V warp_scan(V value) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const V other = __shfl_up_sync(ALL_LANES, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Block-wide forms: every thread gets the result; `scratch` has one entry per warp and is free again on return.
template <int THREADS, typename V>
__device__ inline V block_sum(V value, V* scratch) {
    const int lane = threadIdx.x % WARP;
    value = warp_sum(value);
    if (lane == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    value = warp_sum(lane < THREADS / WARP ? scratch[lane] : V(0));
    __syncthreads();
    return value;
}

// Exclusive scan: sum of the threads before this one; `total` is that of all.
template <int THREADS, typename V>
__device__ inline V block_scan(V value, V* scratch, V& total) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const V upto = warp_scan(value);
    if (lane == WARP - 1) scratch[warp] = upto;
    __syncthreads();
    const V warps = warp_scan(lane < THREADS / WARP ? scratch[lane] : V(0));
    const V before = __shfl_sync(ALL_LANES, warps, warp > 0 ? warp - 1 : 0);
    total = __shfl_sync(ALL_LANES, warps, WARP - 1);
    __syncthreads();
    return (warp > 0 ? before : V(0)) + upto - value;
}

}  // namespace speccompile
