// SPDX-License-Identifier: Apache-2.0
// vector.h in the vector extensions of GCC and Clang, for every CPU: 4 lanes, at least 16 registers.
#pragma once

#include <cmath>
#include <cstdint>

namespace speccompile::cpu {

constexpr const char* kIsaName = "portable";
constexpr int kLanes = 4;
typedef float Float __attribute__((vector_size(16)));
typedef std::int32_t Int __attribute__((vector_size(16)));
typedef std::uint32_t UInt __attribute__((vector_size(16)));
typedef std::int16_t Words __attribute__((vector_size(16)));

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}
template <class Vector>
inline Vector load_as(const void* p) {
    Vector value;
    __builtin_memcpy(&value, p, sizeof(value));
    return value;
}

inline Float broadcast(float a) { return Float{a, a, a, a}; }
inline Int broadcast_int(std::int32_t a) { return Int{a, a, a, a}; }
inline Float zero() { return broadcast(0.f); }
inline Float load(const float* p) { return load_as<Float>(p); }
inline void store(float* p, Float a) { __builtin_memcpy(p, &a, sizeof(a)); }
inline Float add(Float a, Float b) { return a + b; }
inline Float sub(Float a, Float b) { return a - b; }
inline Float mul(Float a, Float b) { return a * b; }
inline Float div(Float a, Float b) { return a / b; }
inline Float fma(Float a, Float b, Float c) {
#ifdef __FP_FAST_FMAF
    return Float{std::fma(a[0], b[0], c[0]), std::fma(a[1], b[1], c[1]), std::fma(a[2], b[2], c[2]), std::fma(a[3], b[3], c[3])};
#else
    return a * b + c;  // rounded twice
#endif
}
inline Float select(Int mask, Float yes, Float no) { return bits_as<Float>((mask & bits_as<Int>(yes)) | (~mask & bits_as<Int>(no))); }
// The larger or the smaller of both; b where either is NaN.
inline Float max(Float a, Float b) { return select(a > b, a, b); }
inline Float min(Float a, Float b) { return select(a < b, a, b); }
inline Float abs(Float a) { return bits_as<Float>(bits_as<Int>(a) & broadcast_int(INT32_MAX)); }
inline Float copy_sign(Float magnitude, Float sign) {
    const Int top = broadcast_int(INT32_MIN);
    return select(top, sign, magnitude);
}
// a < b ? yes : no
inline Float select_less(Float a, Float b, Float yes, Float no) { return select(a < b, yes, no); }
inline Int int_from_whole(Float a) { return __builtin_convertvector(a, Int); }
// To the nearest, ties to even: adding 1.5 * 2^23 leaves no bits for a fraction.
inline Float round_even(Float a) {
    const Float magic = broadcast(12582912.f);
    return select(abs(a) < broadcast(4194304.f), (a + magic) - magic, a);
}
// a * 2^n for whole n in -126 ... 127
inline Float scale_by_power(Float a, Float n) { return a * bits_as<Float>((int_from_whole(n) + 127) << 23); }

inline Int load_bits(const void* p) { return load_as<Int>(p); }
// Pairs of bfloat16 in 32-bit lanes to float32: the first and the second of each pair.
inline Float first_of_pair(Int pairs) { return bits_as<Float>(bits_as<UInt>(pairs) << 16); }
inline Float second_of_pair(Int pairs) { return bits_as<Float>(pairs & broadcast_int(static_cast<std::int32_t>(0xffff0000u))); }
// Denormal halves are converted as integers, so that they count also where denormal float32 numbers are zeros.
inline Float load_half(const std::uint16_t* p) {
    const Int bits = {p[0], p[1], p[2], p[3]};
    const Int magnitude = bits & 0x7fff, exponent = magnitude >> 10;
    const Float denormal = __builtin_convertvector(magnitude, Float) * 5.9604644775390625e-8f;
    Int normal = (magnitude << 13) + (112 << 23);
    normal = normal + ((exponent == 31) & (112 << 23));
    const Float value = select(exponent == 0, denormal, bits_as<Float>(normal));
    return bits_as<Float>(bits_as<Int>(value) | ((bits & 0x8000) << 16));
}

inline Float load(const std::int8_t* p) { return __builtin_convertvector(Int{p[0], p[1], p[2], p[3]}, Float); }

// Sums of u8 * s8 in quads of k. A Quad holds the weights of a quad for kLanes columns, as 16-bit numbers: k 0 and 2, and
// k 1 and 3. A product of 255 * 127 fits in 16 bits.
struct Quad {
    Words even, odd;
};
using QuadSum = Int;
struct QuadLevels {
    Words even, odd;
};
inline QuadSum start_sum(std::int32_t offset) { return broadcast_int(offset); }
inline Quad quad_from_bytes(Int bytes) {
    const UInt raw = bits_as<UInt>(bytes);
    return {bits_as<Words>(raw & 0x00ff00ffu), bits_as<Words>((raw >> 8) & 0x00ff00ffu)};
}
inline Quad low_nibbles(Int bytes) { return quad_from_bytes(bytes & 0x0f0f0f0f); }
inline Quad high_nibbles(Int bytes) { return quad_from_bytes((bytes >> 4) & 0x0f0f0f0f); }
inline QuadLevels broadcast_quad(std::int32_t bits) {
    const Words both = bits_as<Words>(broadcast_int(bits));
    return {(both << 8) >> 8, both >> 8};
}
inline Int add_halves(Words products) {
    const Int both = bits_as<Int>(products);
    return ((both << 16) >> 16) + (both >> 16);
}
inline void add_bytes(QuadSum& sum, Quad weights, QuadLevels levels) {
    sum = sum + add_halves(weights.even * levels.even) + add_halves(weights.odd * levels.odd);
}
// Four products of 15 * 127 fit in 16 bits.
inline void add_nibbles(QuadSum& sum, Quad weights, QuadLevels levels) {
    sum = sum + add_halves(weights.even * levels.even + weights.odd * levels.odd);
}
inline Float end_bytes(QuadSum sum, std::int32_t) { return __builtin_convertvector(sum, Float); }
inline Float end_nibbles(QuadSum sum, std::int32_t) { return __builtin_convertvector(sum, Float); }

// Integers for quantisation.
inline Int abs_bits(Float a) { return bits_as<Int>(a) & broadcast_int(INT32_MAX); }
inline Int max_bits(Int a, Int b) {
    const Int mask = a > b;  // both have no sign bit
    return (mask & a) | (~mask & b);
}
inline std::uint32_t reduce_max_bits(Int a) {
    const std::int32_t left = a[0] > a[1] ? a[0] : a[1], right = a[2] > a[3] ? a[2] : a[3];
    return static_cast<std::uint32_t>(left > right ? left : right);
}
inline Int int_zero() { return broadcast_int(0); }
inline Int int_add(Int a, Int b) { return a + b; }
inline std::int32_t reduce_add_int(Int a) { return (a[0] + a[1]) + (a[2] + a[3]); }
inline Int int_from_float(Float a) { return int_from_whole(round_even(a)); }
inline void store_int8(std::int8_t* p, Int a) {
    for (int lane = 0; lane < kLanes; lane++) p[lane] = static_cast<std::int8_t>(a[lane]);
}

// Rows and vectors of columns of one tile.
constexpr int kFloatRows = 2, kFloatVectors = 4;
constexpr int kPairRows = 2, kPairVectors = 2;
constexpr int kIntRows = 2, kIntVectors = 2;

}  // namespace speccompile::cpu
