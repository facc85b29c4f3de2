// SPDX-License-Identifier: Apache-2.0
// The ops of a draft's tail: SampleToken, TopTokens, NodeProbs.
#pragma once

#include <cmath>

#include "verify_ops.h"

namespace speccompile::cpu {

// Divides the weights by their sum, in place.
inline void normalise(RowWeights& weights) {
    const Float total = broadcast(static_cast<float>(weights.total));
    alignas(64) float memory[kPartials];
    for (i64 i = 0; i < weights.vocab; i += kPartials) {
        const i64 count = weights.vocab - i;
        const float* from = group_of(weights.values + i, count, 0.f, memory);
        float* to = from == memory ? memory : weights.values + i;
        for (int part = 0; part < kParts; part++) store(to + part * kLanes, div(load(from + part * kLanes), total));
        if (to == memory) std::memcpy(weights.values + i, memory, static_cast<std::size_t>(count) * sizeof(float));
    }
}

// logits [batch, 1, vocab], uniforms, temperature, top_k, top_p [batch] -> sampled_token, confidence [batch],
// sampled_probs [batch, vocab], or zeros [batch, 1] where every slot is greedy.
struct SampleToken {
    static constexpr const char* kName = "SampleToken";
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kFloat, abi::kFloat, abi::kInt64, abi::kFloat};
    static constexpr abi::ElementType kOutputs[] = {abi::kInt64, abi::kFloat, abi::kFloat};
    static constexpr std::size_t kNumOptional = 0;

    explicit SampleToken(const Info&) {}

    void run(const Context& context) const {
        const Tensor logits = context.input(0), uniforms = context.input(1);
        const Dims rows = rows_of(logits);
        const i64 batch = rows[0], vocab = rows[2];
        expect_dims(kName, "logits", rows, Dims{batch, 1, vocab});
        expect_dims(kName, "uniforms", uniforms.dims, Dims{batch});
        const Warps warps(context, 2, batch, kName);
        const i64 width = warps.any_hot ? vocab : 1;
        i64* tokens = context.output<i64>(0, Dims{batch});
        float* confidence = context.output<float>(1, Dims{batch});
        float* probs = context.output<float>(2, Dims{batch, width});
        for_rows(context, batch, vocab, [&](i64 slot, float* floats, const Context* inner) {
            const float* row = logits.data<float>() + slot * vocab;
            float* out = probs + slot * width;
            const Warp warp = warps[slot];
            const RowMemory memory = row_memory(floats, vocab, warps.any_hot ? out : nullptr);
            const Best best = first_greatest(row, vocab);
            i64 token = best.index;
            if (warp.is_hot()) {
                RowWeights weights = warp_row(inner, row, vocab, warp, memory);
                token = draw(weights, uniforms.data<float>()[slot]);
                normalise(weights);
            } else {
                std::memset(out, 0, static_cast<std::size_t>(width) * sizeof(float));
                if (warps.any_hot) out[token] = 1;
            }
            const double total = sum_weights(inner, row, vocab, best.top, memory.spare_sums);
            tokens[slot] = token;
            confidence[slot] = static_cast<float>(std::exp(static_cast<double>(row[token]) - static_cast<double>(best.top)) / total);
        });
    }
};

// logits [batch, nodes, vocab], temperature, top_k, top_p [batch] -> node_probs [batch, nodes, vocab], or zeros
// [batch, nodes, 1] where every slot is greedy.
struct NodeProbs {
    static constexpr const char* kName = "NodeProbs";
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kFloat, abi::kInt64, abi::kFloat};
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat};
    static constexpr std::size_t kNumOptional = 0;

    explicit NodeProbs(const Info&) {}

    void run(const Context& context) const {
        const Tensor logits = context.input(0);
        const Dims rows = rows_of(logits);
        const i64 batch = rows[0], nodes = rows[1], vocab = rows[2];
        const Warps warps(context, 1, batch, kName);
        float* probs = context.output<float>(0, rows.with_last(warps.any_hot ? vocab : 1));
        if (!warps.any_hot) {
            std::memset(probs, 0, static_cast<std::size_t>(batch * nodes) * sizeof(float));
            return;
        }
        for_rows(context, batch * nodes, vocab, [&](i64 row, float* floats, const Context* inner) {
            const float* from = logits.data<float>() + row * vocab;
            float* to = probs + row * vocab;
            const Warp warp = warps[row / nodes];
            if (warp.is_hot()) {
                RowWeights weights = warp_row(inner, from, vocab, warp, row_memory(floats, vocab, to));
                normalise(weights);
            } else {
                std::memset(to, 0, static_cast<std::size_t>(vocab) * sizeof(float));
                to[first_greatest(from, vocab).index] = 1;
            }
        });
    }
};

// logits [batch, nodes, vocab] -> candidates, candidate_probs [batch, nodes, num_candidates], the likeliest first, ties
// by index; probabilities at temperature 1.
struct TopTokens {
    static constexpr const char* kName = "TopTokens";
    static constexpr abi::ElementType kInputs[] = {abi::kFloat};
    static constexpr abi::ElementType kOutputs[] = {abi::kInt64, abi::kFloat};
    static constexpr std::size_t kNumOptional = 0;

    explicit TopTokens(const Info& info) : num(info.integer("num_candidates")) {
        if (num < 1) throw Error("num_candidates " + std::to_string(num) + ", expected at least 1; build the bundle again");
    }

    void run(const Context& context) const {
        const Tensor logits = context.input(0);
        const Dims rows = rows_of(logits);
        const i64 vocab = rows[2];
        if (num > vocab) {
            throw Error("num_candidates " + std::to_string(num) + ", expected at most the " + std::to_string(vocab) +
                        " tokens of the vocabulary; build the bundle again");
        }
        i64* candidates = context.output<i64>(0, rows.with_last(num));
        float* probs = context.output<float>(1, rows.with_last(num));
        for_rows(context, rows[0] * rows[1], vocab, [&](i64 row, float* floats, const Context* inner) {
            choose(inner, logits.data<float>() + row * vocab, vocab, row_memory(floats, vocab), candidates + row * num,
                   probs + row * num);
        });
    }

    void choose(const Context* context, const float* row, i64 vocab, const RowMemory& memory, i64* chosen, float* probs) const {
        const i64 chunks = num_chunks(vocab);
        for_chunks(context, vocab, [&](i64 begin, i64 end) {
            for (i64 chunk = begin; chunk < end; chunk++) {
                memory.sums[chunk] = greatest_of(row + chunk * kChunk, chunk_size(vocab, chunk));
            }
        });
        const float top = *std::max_element(memory.sums, memory.sums + chunks);
        const float least = kth_greatest(row, vocab, num, memory.sums, memory.spare);
        // Fewer than `num` are above the least; the first of those that equal it complete them.
        i64 found = 0;
        for (const bool is_above : {true, false}) {
            for (i64 chunk = 0; chunk < chunks && found < num; chunk++) {
                if (memory.sums[chunk] < least) continue;
                const i64 start = chunk * kChunk, end = start + chunk_size(vocab, chunk);
                for (i64 i = start; i < end && found < num; i++) {
                    if (is_above ? row[i] > least : row[i] == least) chosen[found++] = i;
                }
            }
            if (is_above) {
                std::sort(chosen, chosen + found, [row](i64 a, i64 b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
            }
        }
        std::fill(chosen + found, chosen + num, i64{0});  // a row of NaN
        const double total = sum_weights(context, row, vocab, top, memory.spare_sums);
        for (i64 i = 0; i < num; i++) {
            probs[i] = static_cast<float>(std::exp(static_cast<double>(row[chosen[i]]) - static_cast<double>(top)) / total);
        }
    }

    const i64 num;
};

inline void add_draft_ops(OpTable& table) {
    table.push_back(custom_op<SampleToken>());
    table.push_back(custom_op<TopTokens>());
    table.push_back(custom_op<NodeProbs>());
}

}  // namespace speccompile::cpu
