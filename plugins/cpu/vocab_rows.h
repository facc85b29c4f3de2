// SPDX-License-Identifier: Apache-2.0
// Passes over a row of a vocabulary: its greatest entry, weights e^(logit / temperature) with their sums, draws.
//
// A row is cut into chunks of 256 entries, each with its own sum of 16 partial sums; everything over chunks is double
// and runs in their order. So numbers do not depend on threads, which get whole chunks.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernel.h"
#include "softmax.h"

namespace speccompile::cpu {

constexpr i64 kChunk = 256;
constexpr i64 kTaskChunks = 64;  // of a parallel task: 16384 entries, some microseconds
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline i64 num_chunks(i64 vocab) { return (vocab + kChunk - 1) / kChunk; }
inline i64 chunk_size(i64 vocab, i64 chunk) { return std::min(kChunk, vocab - chunk * kChunk); }

// Calls task(begin, end) for ranges of chunks, on several threads where `context` is given and the row is long.
template <class Task>
void for_chunks(const Context* context, i64 vocab, const Task& task) {
    const i64 chunks = num_chunks(vocab);
    if (context == nullptr || chunks < 2 * kTaskChunks) return task(i64{0}, chunks);
    context->parallel(static_cast<std::size_t>((chunks + kTaskChunks - 1) / kTaskChunks), [&](std::size_t number) {
        const i64 begin = static_cast<i64>(number) * kTaskChunks;
        task(begin, std::min(chunks, begin + kTaskChunks));
    });
}

// 16 entries from `from`; those after `count` are `filler`, in `memory`.
inline const float* group_of(const float* from, i64 count, float filler, float (&memory)[kPartials]) {
    if (count >= kPartials) return from;
    for (float& entry : memory) entry = filler;
    std::memcpy(memory, from, static_cast<std::size_t>(count) * sizeof(float));
    return memory;
}

// The greatest of `count` entries; NaN is passed over, -infinity where nothing else is left.
inline float greatest_of(const float* entries, i64 count) {
    Float parts[kParts];
    for (Float& part : parts) part = broadcast(kNothing);
    alignas(64) float memory[kPartials];
    for (i64 i = 0; i < count; i += kPartials) {
        const float* from = group_of(entries + i, count - i, kNothing, memory);
        for (int part = 0; part < kParts; part++) parts[part] = max(load(from + part * kLanes), parts[part]);
    }
    return largest_of(parts);
}

// The sum of `count` entries in 16 partial sums.
inline float sum_of(const float* entries, i64 count) {
    Float parts[kParts];
    for (Float& part : parts) part = zero();
    alignas(64) float memory[kPartials];
    for (i64 i = 0; i < count; i += kPartials) {
        const float* from = group_of(entries + i, count - i, 0.f, memory);
        for (int part = 0; part < kParts; part++) parts[part] = add(parts[part], load(from + part * kLanes));
    }
    return sum_partials(parts);
}

struct Best {
    float top = kNothing;
    i64 index = 0;
};

// The first of the greatest entries; 0 where all are NaN or -infinity.
inline Best first_greatest(const float* row, i64 vocab) {
    constexpr i64 kBlock = 2048;
    Best best;
    i64 start = -1;
    for (i64 begin = 0; begin < vocab; begin += kBlock) {
        const float top = greatest_of(row + begin, std::min(kBlock, vocab - begin));
        if (top > best.top) best.top = top, start = begin;
    }
    if (start < 0) return best;
    best.index = start;
    while (row[best.index] != best.top) best.index++;  // it is there
    return best;
}

// The weights of a row's entries. They need not sum to 1.
struct RowWeights {
    float* values;  // [vocab]
    float* sums;    // [chunks]
    i64 vocab;
    double total;

    void add_up() {
        total = 0;
        for (i64 chunk = 0; chunk < num_chunks(vocab); chunk++) total += static_cast<double>(sums[chunk]);
    }
    // The probability of an entry.
    float prob(i64 index) const { return values[index] / static_cast<float>(total); }
};

// How logits become weights: e^(logit / divisor - top), and 0 where logit / divisor is below `least`.
struct Scale {
    float divisor, top, least;
};

// Writes the weights of `count` logits where IsKept; returns their sum.
template <bool IsKept>
inline float weigh_chunk(const float* logits, i64 count, const Scale& scale, float* weights) {
    Float sums[kParts];
    for (Float& sum : sums) sum = zero();
    const Float divisor = broadcast(scale.divisor), top = broadcast(scale.top), least = broadcast(scale.least);
    const Float lowest = broadcast(-87.f);
    alignas(64) float memory[kPartials];
    for (i64 i = 0; i < count; i += kPartials) {
        const float* from = group_of(logits + i, count - i, kNothing, memory);
        float* to = from == memory ? memory : weights + i;
        for (int part = 0; part < kParts; part++) {
            const Float scaled = div(load(from + part * kLanes), divisor), below = sub(scaled, top);
            Float weight = select_less(below, lowest, zero(), exp(below));
            weight = select_less(scaled, least, zero(), weight);
            if constexpr (IsKept) store(to + part * kLanes, weight);
            sums[part] = add(sums[part], weight);
        }
        if (IsKept && to == memory) std::memcpy(weights + i, memory, static_cast<std::size_t>(count - i) * sizeof(float));
    }
    return sum_partials(sums);
}

inline void weigh(const Context* context, const float* logits, const Scale& scale, RowWeights& weights) {
    for_chunks(context, weights.vocab, [&](i64 begin, i64 end) {
        for (i64 chunk = begin; chunk < end; chunk++) {
            const i64 at = chunk * kChunk;
            weights.sums[chunk] = weigh_chunk<true>(logits + at, chunk_size(weights.vocab, chunk), scale, weights.values + at);
        }
    });
    weights.add_up();
}

// The sum of the weights at temperature 1 without any cut; `sums` [chunks] is overwritten.
inline double sum_weights(const Context* context, const float* logits, i64 vocab, float top, float* sums) {
    for_chunks(context, vocab, [&](i64 begin, i64 end) {
        for (i64 chunk = begin; chunk < end; chunk++) {
            const i64 count = chunk_size(vocab, chunk);
            sums[chunk] = weigh_chunk<false>(logits + chunk * kChunk, count, {1.f, top, kNothing}, nullptr);
        }
    });
    RowWeights weights{nullptr, sums, vocab, 0};
    weights.add_up();
    return weights.total;
}

// The first entry whose cumulative weight exceeds uniform * total. Rounding never yields an entry without weight; 0
// where no entry has any, which NaN alone does.
inline i64 draw(const RowWeights& weights, float uniform) {
    const double bound = static_cast<double>(uniform) * weights.total;
    double upto = 0;
    i64 chunk = -1;
    for (i64 next = 0; next < num_chunks(weights.vocab); next++) {
        const double sum = static_cast<double>(weights.sums[next]);
        if (!(sum > 0)) continue;
        chunk = next;
        if (upto + sum > bound) break;
        upto += sum;
    }
    if (chunk < 0) return 0;
    i64 drawn = 0;
    for (i64 i = chunk * kChunk, end = i + chunk_size(weights.vocab, chunk); i < end; i++) {
        if (!(weights.values[i] > 0)) continue;
        drawn = i;
        upto += static_cast<double>(weights.values[i]);
        if (upto > bound) break;
    }
    return drawn;
}

}  // namespace speccompile::cpu
