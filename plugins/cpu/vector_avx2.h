// SPDX-License-Identifier: Apache-2.0
// vector.h for AVX2 with FMA and F16C, and with AVX-VNNI where it is compiled in: 8 lanes, 16 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define SPECCOMPILE_DOT_BYTES 1
#endif

namespace speccompile::cpu {

#ifdef SPECCOMPILE_DOT_BYTES
constexpr const char* kIsaName = "avx2-vnni";
#else
constexpr const char* kIsaName = "avx2";
#endif
constexpr int kLanes = 8;
using Float = __m256;
using Int = __m256i;

inline Float zero() { return _mm256_setzero_ps(); }
inline Float load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Float a) { _mm256_storeu_ps(p, a); }
inline Float broadcast(float a) { return _mm256_set1_ps(a); }
inline Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
inline Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
inline Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
inline Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
inline Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
// The larger or the smaller of both; b where either is NaN.
inline Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
inline Float min(Float a, Float b) { return _mm256_min_ps(a, b); }
inline Float abs(Float a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), a); }
inline Float copy_sign(Float magnitude, Float sign) {
    const Float top = _mm256_set1_ps(-0.f);
    return _mm256_or_ps(_mm256_andnot_ps(top, magnitude), _mm256_and_ps(top, sign));
}
// a < b ? yes : no
inline Float select_less(Float a, Float b, Float yes, Float no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline Float round_even(Float a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for whole n in -126 ... 127
inline Float scale_by_power(Float a, Float n) {
    const Int bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}

inline Int load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
// Pairs of bfloat16 in 32-bit lanes to float32: the first and the second of each pair.
inline Float first_of_pair(Int pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Float second_of_pair(Int pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Float load_half(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline Float load(const std::int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

inline Int nibbles_of(Int bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
struct QuadLevels {
    Int value;
};
inline QuadLevels broadcast_quad(std::int32_t bits) { return {_mm256_set1_epi32(bits)}; }
inline Float float_from_sum(Int sum, std::int32_t offset) {
    return _mm256_cvtepi32_ps(_mm256_add_epi32(sum, _mm256_set1_epi32(offset)));
}

// Sums of u8 * s8 in quads of k. A Quad holds the weights of a quad for kLanes columns.
#ifdef SPECCOMPILE_DOT_BYTES
using Quad = Int;
using QuadSum = Int;
inline QuadSum start_sum(std::int32_t offset) { return _mm256_set1_epi32(offset); }
inline Quad quad_from_bytes(Int bytes) { return bytes; }
inline Quad low_nibbles(Int bytes) { return nibbles_of(bytes); }
inline Quad high_nibbles(Int bytes) { return nibbles_of(_mm256_srli_epi16(bytes, 4)); }
inline void add_bytes(QuadSum& sum, Quad weights, QuadLevels levels) {
#if defined(__AVXVNNI__)
    sum = _mm256_dpbusd_avx_epi32(sum, weights, levels.value);
#else
    sum = _mm256_dpbusd_epi32(sum, weights, levels.value);
#endif
}
inline void add_nibbles(QuadSum& sum, Quad weights, QuadLevels levels) { add_bytes(sum, weights, levels); }
inline Float end_bytes(QuadSum sum, std::int32_t) { return _mm256_cvtepi32_ps(sum); }
inline Float end_nibbles(QuadSum sum, std::int32_t) { return _mm256_cvtepi32_ps(sum); }
#else
// vpmaddubsw saturates at 16 bits, so a byte is split into nibbles: a sum of two products of 15 * 127 in 8 quads is at
// most 30480, which fits. The halves are added with weights 1 and 16 when the group ends.
struct Quad {
    Int low, high;
};
struct QuadSum {
    Int low, high;
};
inline QuadSum start_sum(std::int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Quad quad_from_bytes(Int bytes) { return {nibbles_of(bytes), nibbles_of(_mm256_srli_epi16(bytes, 4))}; }
inline Quad low_nibbles(Int bytes) { return {nibbles_of(bytes), Int{}}; }
inline Quad high_nibbles(Int bytes) { return {nibbles_of(_mm256_srli_epi16(bytes, 4)), Int{}}; }
inline void add_nibbles(QuadSum& sum, Quad weights, QuadLevels levels) {
    sum.low = _mm256_add_epi16(sum.low, _mm256_maddubs_epi16(weights.low, levels.value));
}
inline void add_bytes(QuadSum& sum, Quad weights, QuadLevels levels) {
    add_nibbles(sum, weights, levels);
    sum.high = _mm256_add_epi16(sum.high, _mm256_maddubs_epi16(weights.high, levels.value));
}
inline Float end_bytes(QuadSum sum, std::int32_t offset) {
    const Int low = _mm256_madd_epi16(sum.low, _mm256_set1_epi16(1));
    const Int high = _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16));
    return float_from_sum(_mm256_add_epi32(low, high), offset);
}
inline Float end_nibbles(QuadSum sum, std::int32_t offset) {
    return float_from_sum(_mm256_madd_epi16(sum.low, _mm256_set1_epi16(1)), offset);
}
#endif

// Integers for quantisation.
inline Int abs_bits(Float a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(INT32_MAX)); }
inline Int max_bits(Int a, Int b) { return _mm256_max_epu32(a, b); }
inline std::uint32_t reduce_max_bits(Int a) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(m));
}
inline Int int_zero() { return _mm256_setzero_si256(); }
inline Int int_add(Int a, Int b) { return _mm256_add_epi32(a, b); }
inline std::int32_t reduce_add_int(Int a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
inline Int int_from_float(Float a) { return _mm256_cvtps_epi32(a); }
inline void store_int8(std::int8_t* p, Int a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

// Rows and vectors of columns of one tile.
constexpr int kFloatRows = 6, kFloatVectors = 2;
constexpr int kPairRows = 4, kPairVectors = 2;
constexpr int kIntRows = 4, kIntVectors = 1;

}  // namespace speccompile::cpu
