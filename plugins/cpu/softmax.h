// SPDX-License-Identifier: Apache-2.0
// Softmax over the scores of one query, in place, with scale and softcap.
#pragma once

#include <cmath>

#include "attention_rows.h"

namespace speccompile::cpu {

// Relative error at most 3e-7: a polynomial (Cephes) below 0.625, otherwise by e^x. NaN stays NaN.
inline Float tanh(Float x) {
    const Float size = abs(x), z = mul(x, x);
    Float p = broadcast(-5.70498872745e-3f);
    p = fma(p, z, broadcast(2.06390887954e-2f));
    p = fma(p, z, broadcast(-5.37397155531e-2f));
    p = fma(p, z, broadcast(1.33314422036e-1f));
    p = fma(p, z, broadcast(-3.33332819422e-1f));
    const Float small = fma(mul(p, z), x, x), one = broadcast(1.f);
    const Float limited = min(broadcast(10.f), size);  // tanh(10) is 1 in float32
    const Float large = sub(one, div(broadcast(2.f), add(exp(add(limited, limited)), one)));
    return select_less(size, broadcast(0.625f), small, copy_sign(large, x));
}

inline float largest_of(const Float (&parts)[kParts]) {
    alignas(64) float lanes[kPartials];
    for (int part = 0; part < kParts; part++) store(lanes + part * kLanes, parts[part]);
    float result = lanes[0];
    for (int lane = 1; lane < kPartials; lane++) result = lanes[lane] > result ? lanes[lane] : result;
    return result;
}

// Turns `count` > 0 scores into e^(score - largest) and returns their sum: 16 partial sums, by index modulo 16. There is
// room for a multiple of 16 floats; those after the scores become 0. The sum has e^(sink - largest) too: 0 for -infinity.
inline float weigh_scores(float* scores, i64 count, float scale, float softcap, float sink) {
    const i64 padded = round_up(count, kPartials);
    for (i64 i = count; i < padded; i++) scores[i] = scores[0];
    Float largest[kParts], sums[kParts];
    for (int part = 0; part < kParts; part++) {
        largest[part] = broadcast(-__builtin_inff());
        sums[part] = zero();
    }
    const Float factor = broadcast(scale), cap = broadcast(softcap);
    for (i64 i = 0; i < padded; i += kPartials) {
        for (int part = 0; part < kParts; part++) {
            float* at = scores + i + part * kLanes;
            Float score = mul(load(at), factor);
            if (softcap > 0) score = mul(cap, tanh(div(score, cap)));
            store(at, score);
            largest[part] = max(score, largest[part]);
        }
    }
    for (i64 i = count; i < padded; i++) scores[i] = -__builtin_inff();
    const float highest = largest_of(largest);
    const Float top = broadcast(highest), least = broadcast(-87.f);
    for (i64 i = 0; i < padded; i += kPartials) {
        for (int part = 0; part < kParts; part++) {
            float* at = scores + i + part * kLanes;
            const Float difference = sub(load(at), top);
            const Float weight = select_less(difference, least, zero(), exp(difference));
            store(at, weight);
            sums[part] = add(sums[part], weight);
        }
    }
    return sum_partials(sums) + std::exp(sink - highest);
}

}  // namespace speccompile::cpu
