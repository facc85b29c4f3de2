// SPDX-License-Identifier: Apache-2.0
// What is computed per row: quantisation in units of 32 or 16, RMS normalisation, activation functions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tiles.h"
#include "vector.h"

namespace speccompile::cpu {

constexpr float kLeastPeak = 1e-30f;  // a unit whose largest magnitude is smaller has levels of 0

// One unit: numbers to levels -127 ... 127, ties to even; scale = peak / 127. NaN or infinity give a scale that is not
// finite, so the product is not finite either. Words of the row in the record are `apart`.
template <class Form, int Unit>
void quantize_unit(const float* x, std::int32_t* record, int apart) {
    constexpr int kVectors = Unit / kLanes;
    Float values[kVectors];
    Int bits = int_zero();
    for (int v = 0; v < kVectors; v++) {
        values[v] = load(x + v * kLanes);
        bits = max_bits(bits, abs_bits(values[v]));
    }
    const std::uint32_t peak_bits = reduce_max_bits(bits);  // as integers, so that NaN is the largest
    float peak;
    std::memcpy(&peak, &peak_bits, 4);
    const float scale = peak / 127.f;
    const Float inverse = broadcast(peak < kLeastPeak ? 0.f : 127.f / peak);
    Int sum = int_zero();
    alignas(Unit) std::int8_t levels[Unit];
    for (int v = 0; v < kVectors; v++) {
        const Int level = int_from_float(mul(values[v], inverse));
        sum = int_add(sum, level);
        store_int8(levels + v * kLanes, level);
    }
    using Words = Record<Unit>;
    for (int quad = 0; quad < Words::kQuads; quad++) std::memcpy(record + quad * apart, levels + 4 * quad, 4);
    std::memcpy(record + Words::kScale * apart, &scale, 4);
    if constexpr (Form::kHasMinimums) {
        const float share = static_cast<float>(reduce_add_int(sum)) * scale;
        std::memcpy(record + Words::kOffset * apart, &share, 4);
    } else {
        record[Words::kOffset * apart] = -Form::kZero * reduce_add_int(sum);
    }
}

// Units begin ... end - 1 of a row of `count` numbers, which zeros follow; `record` is that of the row and unit 0.
template <class Form, int Unit>
void quantize_row(const float* x, std::int64_t count, std::int64_t begin, std::int64_t end, std::int32_t* record, int apart) {
    const std::int64_t words = std::int64_t{Record<Unit>::kWords} * apart, whole = std::min(end, count / Unit);
    for (std::int64_t unit = begin; unit < whole; unit++) quantize_unit<Form, Unit>(x + unit * Unit, record + unit * words, apart);
    for (std::int64_t unit = std::max(begin, whole); unit < end; unit++) {
        alignas(64) float tail[Unit] = {};
        const std::int64_t left = count - unit * Unit;
        if (left > 0) std::memcpy(tail, x + unit * Unit, static_cast<std::size_t>(left) * sizeof(float));
        quantize_unit<Form, Unit>(tail, record + unit * words, apart);
    }
}

// sum = x + residual, normal = sum / sqrt(mean(sum^2) + epsilon) * gamma. The squares are added in 16 partial sums: number
// i holds those of k = i, i + 16, ...; the numbers after the last multiple of 16 follow one by one.
inline void normalize_row(const float* x, const float* residual, const float* gamma, std::int64_t count, float epsilon,
                          float* sum, float* normal) {
    Float squares[kParts];
    for (Float& part : squares) part = zero();
    const std::int64_t whole = count / kPartials * kPartials;
    for (std::int64_t k = 0; k < whole; k += kPartials) {
        for (int i = 0; i < kParts; i++) {
            const std::int64_t at = k + i * kLanes;
            const Float value = add(load(x + at), load(residual + at));
            store(sum + at, value);
            squares[i] = fma(value, value, squares[i]);
        }
    }
    float total = sum_partials(squares);
    for (std::int64_t k = whole; k < count; k++) {
        sum[k] = x[k] + residual[k];
        total += sum[k] * sum[k];
    }
    const float inverse = 1.f / std::sqrt(total / static_cast<float>(count) + epsilon);
    const Float factor = broadcast(inverse);
    for (std::int64_t k = 0; k < whole; k += kLanes) {
        store(normal + k, mul(mul(load(sum + k), factor), load(gamma + k)));
    }
    for (std::int64_t k = whole; k < count; k++) normal[k] = sum[k] * inverse * gamma[k];
}

enum class Activation : std::int64_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2 };

// x / (1 + e^(-factor * x)), with the exponent given.
inline Float times_sigmoid(Float x, Float exponent) {
    return div(x, add(broadcast(1.f), exp(sub(zero(), exponent))));
}

inline Float silu(Float x) { return times_sigmoid(x, x); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Float gelu_tanh(Float x) {
    const Float cubic = fma(mul(mul(x, x), x), broadcast(0.044715f), x);
    return times_sigmoid(x, mul(cubic, broadcast(1.5957691216f)));
}

// x Phi(x) with Phi(-|x|) = erfc(z) / 2, z = |x| / sqrt(2), and erfc(z) = e^(-z^2) g(1 / (1 + 0.42 z)): g is a polynomial of
// degree 8 fitted for 0 <= z <= 10, relative error at most 5e-8.
inline Float gelu_erf(Float x) {
    constexpr float kTerms[] = {7.8390570e-2f,  -3.5695609e-1f, 5.1033831e-1f, -2.0321519e-1f, 3.1421464e-1f,
                                1.7730306e-1f, 2.4357208e-1f,  2.3632673e-1f, 2.5940388e-5f};
    const Float z = mul(abs(x), broadcast(0.70710678f));
    const Float t = div(broadcast(1.f), fma(z, broadcast(0.42f), broadcast(1.f)));
    Float g = broadcast(kTerms[0]);
    for (int i = 1; i < 9; i++) g = fma(g, t, broadcast(kTerms[i]));
    const Float tail = mul(mul(g, broadcast(0.5f)), exp(sub(zero(), mul(z, z))));
    const Float small = mul(x, tail);
    return select_less(x, zero(), small, sub(x, small));
}

inline Float activate(Activation kind, Float x) {
    switch (kind) {
        case Activation::kGeluTanh: return gelu_tanh(x);
        case Activation::kGeluErf: return gelu_erf(x);
        default: return silu(x);
    }
}

}  // namespace speccompile::cpu
