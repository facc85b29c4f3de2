// SPDX-License-Identifier: Apache-2.0
// The instruction set that the library is compiled for, as vectors of kLanes float32 or int32 numbers.
//
// Every instruction set gives the same integers, and the same floats up to the fused multiply-add, which plain x86-64
// lacks. Sums over a row are kept in 16 partial sums whatever kLanes is.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#else
#include "vector_portable.h"
#endif

namespace speccompile::cpu {

constexpr int kPartials = 16;
constexpr int kParts = kPartials / kLanes;  // vectors that hold them

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }  // into the second-level cache
// What a step reads once: AMD's CPUs keep it out of their larger caches, which then hold K, V and all else. Others might
// lose weights that lie in a large third-level cache.
inline void prefetch_once(const void* p) {
#if defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
    __builtin_prefetch(p, 0, 0);
#else
    prefetch(p);
#endif
}

// A number that several operations read, in a register: compilers would load it for each of them.
inline Float in_register(Float a) {
#if defined(__AVX2__)
    __asm__("" : "+v"(a));
#endif
    return a;
}

// The sum of 16 partial sums: lanes i and i + 8 first, then 4, 2 and 1 apart.
inline float sum_partials(const Float (&parts)[kParts]) {
    alignas(64) float lanes[kPartials];
    for (int i = 0; i < kParts; i++) store(lanes + i * kLanes, parts[i]);
    for (int distance = kPartials / 2; distance > 0; distance /= 2) {
        for (int i = 0; i < distance; i++) lanes[i] += lanes[i + distance];
    }
    return lanes[0];
}

// e^x for x limited to -87 ... 88: relative error at most 1.2e-7; NaN stays NaN. Polynomial of Cephes' expf.
inline Float exp(Float x) {
    x = min(broadcast(88.f), max(broadcast(-87.f), x));
    const Float n = round_even(mul(x, broadcast(1.44269504f)));
    Float f = fma(n, broadcast(-0.693359375f), x);
    f = fma(n, broadcast(2.12194440e-4f), f);
    Float p = broadcast(1.9875691500e-4f);
    p = fma(p, f, broadcast(1.3981999507e-3f));
    p = fma(p, f, broadcast(8.3334519073e-3f));
    p = fma(p, f, broadcast(4.1665795894e-2f));
    p = fma(p, f, broadcast(1.6666665459e-1f));
    p = fma(p, f, broadcast(5.0000001201e-1f));
    p = add(fma(mul(p, f), f, f), broadcast(1.f));
    return scale_by_power(p, n);
}

}  // namespace speccompile::cpu
