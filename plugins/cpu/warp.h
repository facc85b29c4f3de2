// SPDX-License-Identifier: Apache-2.0
// From logits to the distribution that tokens are drawn from: temperature, top-k, top-p.
//
// Top-k keeps ties with the k-th logit. Top-p keeps the shortest run, by falling weight and rising index, whose mass
// reaches it. Both look for candidates in few chunks and select among them without sorting.
#pragma once

#include <cmath>
#include <functional>

#include "vocab_rows.h"

namespace speccompile::cpu {

constexpr float kColdest = 5.421010862427522e-20f;  // 2^-64; below it a slot is greedy

// How a slot's tokens are drawn.
struct Warp {
    float temperature;
    i64 top_k;    // 0: off
    float top_p;  // 1: off

    bool is_hot() const { return temperature >= kColdest; }
};

// Memory of one row: weights and as much again for selections and residuals.
struct RowMemory {
    float *values, *sums, *spare, *spare_sums;
};

inline std::size_t row_memory_size(i64 vocab) {
    return static_cast<std::size_t>(2 * (round_up(vocab, kPartials) + round_up(num_chunks(vocab), kPartials)));
}

// Places the row's memory in `floats` of row_memory_size; the weights go to `values` where it is given.
inline RowMemory row_memory(float* floats, i64 vocab, float* values = nullptr) {
    const i64 entries = round_up(vocab, kPartials), chunks = round_up(num_chunks(vocab), kPartials);
    float* own = floats + 2 * chunks;
    return {values == nullptr ? own : values, floats, own + entries, floats + chunks};
}

// The k-th greatest logit, 1 <= k <= vocab. The k-th greatest of the chunks' tops is a lower bound of it, so few chunks
// are read again. `tops` [chunks] holds the greatest of each chunk; `spare` [vocab] is overwritten.
inline float kth_greatest(const float* logits, i64 vocab, i64 k, const float* tops, float* spare) {
    const i64 chunks = num_chunks(vocab);
    float bound = kNothing;
    if (k <= chunks) {
        std::copy(tops, tops + chunks, spare);
        std::nth_element(spare, spare + k - 1, spare + chunks, std::greater<float>());
        bound = spare[k - 1];
    }
    i64 found = 0;
    for (i64 chunk = 0; chunk < chunks; chunk++) {
        if (tops[chunk] < bound) continue;
        const i64 start = chunk * kChunk, end = start + chunk_size(vocab, chunk);
        for (i64 i = start; i < end; i++) {
            spare[found] = logits[i];
            found += logits[i] >= bound;
        }
    }
    if (found < k) return kNothing;  // NaN
    std::nth_element(spare, spare + k - 1, spare + found, std::greater<float>());
    return spare[k - 1];
}

// The edge of a nucleus: entries above `weight` are kept, and the first `num_ties` of those equal to it.
struct Edge {
    float weight;
    i64 num_ties;
    bool keeps_all_ties;
};

// Selects the edge among `count` > 0 candidates, which are reordered: where the mass, by falling weight, reaches `goal`.
inline Edge find_edge(float* candidates, i64 count, double goal) {
    float *begin = candidates, *end = candidates + count;
    double above = 0;
    while (true) {
        const float a = *begin, b = begin[(end - begin) / 2], c = end[-1];
        const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        float* equal = std::partition(begin, end, [pivot](float x) { return x > pivot; });
        float* less = std::partition(equal, end, [pivot](float x) { return x == pivot; });
        double mass = 0;
        for (const float* at = begin; at < equal; at++) mass += static_cast<double>(*at);
        const double one = static_cast<double>(pivot);
        const i64 ties = less - equal;
        if (above + mass >= goal) {
            end = equal;
        } else if (above + mass + one * static_cast<double>(ties) >= goal || less == end) {
            i64 kept = 1;
            if (above + mass + one * static_cast<double>(ties - 1) < goal) {
                kept = ties;
            } else {  // the least count that reaches the goal; division may be off by one
                kept = std::max<i64>(1, static_cast<i64>((goal - above - mass) / one));
                while (kept > 1 && above + mass + one * static_cast<double>(kept - 1) >= goal) kept--;
                while (kept < ties && above + mass + one * static_cast<double>(kept) < goal) kept++;
            }
            return {pivot, kept, kept == ties};
        } else {
            above += mass + one * static_cast<double>(ties);
            begin = less;
        }
    }
}

constexpr int kBounds = 4;  // of weights, that one pass adds up

// The mass of the weights from each bound on. Chunks whose sum is below the least bound have none.
inline void masses_from(const RowWeights& weights, const float (&bounds)[kBounds], double (&masses)[kBounds]) {
    constexpr i64 kAdded = 16;  // chunks that float32 sums run over
    const i64 chunks = num_chunks(weights.vocab);
    std::fill(masses, masses + kBounds, 0.0);
    for (i64 first = 0; first < chunks; first += kAdded) {
        Float sums[kBounds][kParts];
        for (auto& parts : sums) {
            for (Float& part : parts) part = zero();
        }
        for (i64 chunk = first; chunk < std::min(chunks, first + kAdded); chunk++) {
            if (weights.sums[chunk] < bounds[0]) continue;
            const float* values = weights.values + chunk * kChunk;
            const i64 count = chunk_size(weights.vocab, chunk);
            alignas(64) float memory[kPartials];
            for (i64 i = 0; i < count; i += kPartials) {
                const float* from = group_of(values + i, count - i, 0.f, memory);
                for (int part = 0; part < kParts; part++) {
                    const Float value = load(from + part * kLanes);
                    for (int k = 0; k < kBounds; k++) {
                        sums[k][part] = add(sums[k][part], select_less(value, broadcast(bounds[k]), zero(), value));
                    }
                }
            }
        }
        for (int k = 0; k < kBounds; k++) masses[k] += static_cast<double>(sum_partials(sums[k]));
    }
}

// Weights between which the edge of a nucleus is: those from `high` on have a mass of `above`, less than the goal.
struct Bracket {
    float low, high;
    double above;
};

// Narrows the bracket to a few percent: entries within it are few, and only these are selected among.
inline Bracket find_bracket(const RowWeights& weights, float top_p, double goal) {
    // Entries below `low` have less than half of what the nucleus leaves.
    const double rest = (1.0 - std::max(0.0, static_cast<double>(top_p))) * weights.total / static_cast<double>(weights.vocab) / 2;
    Bracket found{std::max(static_cast<float>(rest), std::numeric_limits<float>::denorm_min()), 2.f, 0};
    for (int pass = 0; pass < 6 && found.high > found.low * 1.03f; pass++) {
        float bounds[kBounds];
        double masses[kBounds];
        const double step = std::pow(static_cast<double>(found.high) / static_cast<double>(found.low), 1.0 / (kBounds + 1));
        double bound = static_cast<double>(found.low);
        for (float& next : bounds) next = static_cast<float>(bound *= step);
        masses_from(weights, bounds, masses);
        for (int k = kBounds - 1; k >= 0; k--) {
            if (masses[k] >= goal) {
                found.low = std::max(found.low, bounds[k]);
                break;
            }
            found.high = bounds[k], found.above = masses[k];
        }
    }
    return found;
}

// The edge of the nucleus of a row with mass; `spare` [vocab] is overwritten.
inline Edge nucleus_edge(const RowWeights& weights, float top_p, float* spare) {
    const double goal = std::max(static_cast<double>(top_p) * weights.total, std::numeric_limits<double>::min());
    const Bracket bracket = find_bracket(weights, top_p, goal);
    i64 found = 0;
    for (i64 chunk = 0; chunk < num_chunks(weights.vocab); chunk++) {
        if (weights.sums[chunk] < bracket.low) continue;
        const i64 start = chunk * kChunk, end = start + chunk_size(weights.vocab, chunk);
        for (i64 i = start; i < end; i++) {
            const float weight = weights.values[i];
            spare[found] = weight;
            found += static_cast<int>(weight >= bracket.low) & static_cast<int>(weight < bracket.high);
        }
    }
    if (found == 0) return {bracket.low, 0, true};  // top_p is 1 but for rounding
    return find_edge(spare, found, goal - bracket.above);
}

// Sets the weights outside the nucleus to 0.
inline void cut_nucleus(RowWeights& weights, float top_p, float* spare) {
    if (!(weights.total > 0)) return;  // NaN
    const i64 chunks = num_chunks(weights.vocab);
    const Edge edge = nucleus_edge(weights, top_p, spare);
    const Float least = broadcast(edge.weight);
    i64 ties = 0;
    for (i64 chunk = 0; chunk < chunks; chunk++) {
        const i64 count = chunk_size(weights.vocab, chunk);
        float* values = weights.values + chunk * kChunk;
        alignas(64) float memory[kPartials];
        for (i64 i = 0; i < count; i += kPartials) {
            const float* from = group_of(values + i, count - i, 0.f, memory);
            float* to = from == memory ? memory : values + i;
            for (int part = 0; part < kParts; part++) {
                const Float value = load(from + part * kLanes);
                store(to + part * kLanes, select_less(value, least, zero(), value));
            }
            if (to == memory) std::memcpy(values + i, memory, static_cast<std::size_t>(count - i) * sizeof(float));
        }
        if (!edge.keeps_all_ties && weights.sums[chunk] >= edge.weight) {
            for (i64 i = 0; i < count; i++) {
                if (values[i] == edge.weight && ++ties > edge.num_ties) values[i] = 0;
            }
        }
        weights.sums[chunk] = sum_of(values, count);
    }
    weights.add_up();
}

// The weights of a row of a slot that is not greedy.
inline RowWeights warp_row(const Context* context, const float* logits, i64 vocab, const Warp& warp, const RowMemory& memory) {
    RowWeights weights{memory.values, memory.sums, vocab, 0};
    // Quotients fall and rise with logits, so tops and thresholds are those of the logits, divided.
    float top = kNothing;
    for_chunks(context, vocab, [&](i64 begin, i64 end) {
        for (i64 chunk = begin; chunk < end; chunk++) {
            memory.sums[chunk] = greatest_of(logits + chunk * kChunk, chunk_size(vocab, chunk));
        }
    });
    for (i64 chunk = 0; chunk < num_chunks(vocab); chunk++) top = std::max(top, memory.sums[chunk]);
    Scale scale{warp.temperature, top / warp.temperature, kNothing};
    if (warp.top_k > 0 && warp.top_k < vocab) {
        scale.least = kth_greatest(logits, vocab, warp.top_k, memory.sums, memory.spare) / warp.temperature;
    }
    weigh(context, logits, scale, weights);
    if (warp.top_p < 1) cut_nucleus(weights, warp.top_p, memory.spare);
    return weights;
}

}  // namespace speccompile::cpu
