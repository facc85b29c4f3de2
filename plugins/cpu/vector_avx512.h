// SPDX-License-Identifier: Apache-2.0
// vector.h for AVX-512 with VNNI: 16 lanes, 32 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace speccompile::cpu {

constexpr const char* kIsaName = "avx512-vnni";
constexpr int kLanes = 16;
using Float = __m512;
using Int = __m512i;

inline Float zero() { return _mm512_setzero_ps(); }
inline Float load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Float a) { _mm512_storeu_ps(p, a); }
inline Float broadcast(float a) { return _mm512_set1_ps(a); }
inline Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
inline Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
inline Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
inline Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
inline Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
// The larger or the smaller of both; b where either is NaN.
inline Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
inline Float min(Float a, Float b) { return _mm512_min_ps(a, b); }
inline Float abs(Float a) { return _mm512_abs_ps(a); }
inline Float copy_sign(Float magnitude, Float sign) {
    const __m512i top = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(top, _mm512_castps_si512(sign), _mm512_castps_si512(magnitude), 0xca));
}
// a < b ? yes : no
inline Float select_less(Float a, Float b, Float yes, Float no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
inline Float round_even(Float a) { return _mm512_roundscale_ps(a, 0); }
// a * 2^n for whole n in -126 ... 127
inline Float scale_by_power(Float a, Float n) { return _mm512_scalef_ps(a, n); }

inline Int load_bits(const void* p) { return _mm512_loadu_si512(p); }
// Pairs of bfloat16 in 32-bit lanes to float32: the first and the second of each pair.
inline Float first_of_pair(Int pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Float second_of_pair(Int pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Float load_half(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline Float load(const std::int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Sums of u8 * s8 in quads of k. A Quad holds the weights of a quad for kLanes columns.
using Quad = Int;
using QuadSum = Int;
inline QuadSum start_sum(std::int32_t offset) { return _mm512_set1_epi32(offset); }
inline Quad quad_from_bytes(Int bytes) { return bytes; }
inline Quad low_nibbles(Int bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline Quad high_nibbles(Int bytes) { return _mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15)); }
struct QuadLevels {
    Int value;
};
inline QuadLevels broadcast_quad(std::int32_t bits) { return {_mm512_set1_epi32(bits)}; }
inline void add_bytes(QuadSum& sum, Quad weights, QuadLevels levels) { sum = _mm512_dpbusd_epi32(sum, weights, levels.value); }
inline void add_nibbles(QuadSum& sum, Quad weights, QuadLevels levels) { add_bytes(sum, weights, levels); }
inline Float end_bytes(QuadSum sum, std::int32_t) { return _mm512_cvtepi32_ps(sum); }
inline Float end_nibbles(QuadSum sum, std::int32_t) { return _mm512_cvtepi32_ps(sum); }

// Integers for quantisation.
inline Int abs_bits(Float a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(INT32_MAX)); }
inline Int max_bits(Int a, Int b) { return _mm512_max_epu32(a, b); }
inline std::uint32_t reduce_max_bits(Int a) { return _mm512_reduce_max_epu32(a); }
inline Int int_zero() { return _mm512_setzero_si512(); }
inline Int int_add(Int a, Int b) { return _mm512_add_epi32(a, b); }
inline std::int32_t reduce_add_int(Int a) { return _mm512_reduce_add_epi32(a); }
inline Int int_from_float(Float a) { return _mm512_cvtps_epi32(a); }
inline void store_int8(std::int8_t* p, Int a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}

// Rows and vectors of columns of one tile.
constexpr int kFloatRows = 12, kFloatVectors = 2;
constexpr int kPairRows = 10, kPairVectors = 2;
constexpr int kIntRows = 6, kIntVectors = 2;

}  // namespace speccompile::cpu
