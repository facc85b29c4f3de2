// SPDX-License-Identifier: Apache-2.0
// The ops of a target's tail: SpecVerify, FiniteToken.
#pragma once

#include <atomic>
#include <string>

#include "kernel.h"
#include "verify.h"

namespace speccompile::cpu {

constexpr i64 kInlineEntries = 64 << 10;     // logits that are weighed before another thread has woken up
constexpr i64 kInlineSummed = 256 << 10;     // logits that are only read, alike
constexpr float kLargest = 9.223372036854775808e18f;  // 2^63: sums of rows from here on are not finite

// Temperature, top_k and top_p of each slot, the inputs from `first` on.
class Warps {
  public:
    Warps(const Context& context, std::size_t first, i64 batch, const std::string& op)
        : temperature_(context.input(first)), top_k_(context.input(first + 1)), top_p_(context.input(first + 2)) {
        expect_dims(op, "temperature", temperature_.dims, Dims{batch});
        expect_dims(op, "top_k", top_k_.dims, Dims{batch});
        expect_dims(op, "top_p", top_p_.dims, Dims{batch});
        for (i64 slot = 0; slot < batch; slot++) any_hot |= temperature_.data<float>()[slot] > 0;
    }
    Warp operator[](i64 slot) const {
        return {temperature_.data<float>()[slot], top_k_.data<i64>()[slot], top_p_.data<float>()[slot]};
    }
    bool any_hot = false;  // drafts give distributions

  private:
    Tensor temperature_, top_k_, top_p_;
};

// The dims of logits [batch, nodes, vocab], which must not be empty.
inline Dims rows_of(const Tensor& logits) {
    if (logits.dims.rank != 3 || logits.dims[1] < 1 || logits.dims[2] < 1) {
        throw Error("logits has dims " + logits.dims.text() + ", expected [batch, nodes, vocab]; build the bundle again");
    }
    return logits.dims;
}

// Calls task(index, floats, inner) for each row or slot, with memory for a row; `inner` is the context where the task may
// use several threads itself. Small work is done at once.
template <class Task>
void for_rows(const Context& context, i64 count, i64 vocab, const Task& task) {
    std::atomic<bool> has_memory{true};
    const auto run = [&](std::size_t index, const Context* inner) {
        try {
            thread_local Scratch scratch;
            task(static_cast<i64>(index), scratch.get<float>(row_memory_size(vocab)), inner);
        } catch (const Error&) {
            has_memory = false;
        }
    };
    if (count > 1 && count * vocab > kInlineEntries) {
        context.parallel(static_cast<std::size_t>(count), [&](std::size_t index) { run(index, nullptr); });
    } else {
        for (i64 index = 0; index < count; index++) run(static_cast<std::size_t>(index), count == 1 ? &context : nullptr);
    }
    if (!has_memory) throw Error("out of memory");
}

// logits [batch, nodes, vocab], tokens, parents [batch, nodes], draft_probs [batch, nodes, vocab or 1], uniforms
// [batch, nodes, 2], temperature, top_k, top_p -> path [batch, nodes], num_accepted, next_token [batch].
struct SpecVerify {
    static constexpr const char* kName = "SpecVerify";
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kInt64, abi::kInt64, abi::kFloat,
                                                   abi::kFloat, abi::kFloat, abi::kInt64, abi::kFloat};
    static constexpr abi::ElementType kOutputs[] = {abi::kInt64, abi::kInt64, abi::kInt64};
    static constexpr std::size_t kNumOptional = 0;

    explicit SpecVerify(const Info&) {}

    void run(const Context& context) const {
        const Tensor logits = context.input(0), tokens = context.input(1), parents = context.input(2),
                     draft_probs = context.input(3), uniforms = context.input(4);
        const Dims rows = rows_of(logits);
        const i64 batch = rows[0], nodes = rows[1], vocab = rows[2];
        const Warps warps(context, 5, batch, kName);
        expect_dims(kName, "tokens", tokens.dims, Dims{batch, nodes});
        expect_dims(kName, "parents", parents.dims, Dims{batch, nodes});
        expect_dims(kName, "uniforms", uniforms.dims, Dims{batch, nodes, 2});
        const bool has_probs = draft_probs.dims.rank == 3 && draft_probs.dims[2] != 1;
        expect_dims(kName, "draft_probs", draft_probs.dims, Dims{batch, nodes, has_probs ? vocab : 1});
        const i64 *token = tokens.data<i64>(), *parent = parents.data<i64>();
        if (has_probs) check_tokens(token, parent, batch, nodes, vocab);
        i64* path = context.output<i64>(0, Dims{batch, nodes});
        i64* num_accepted = context.output<i64>(1, Dims{batch});
        i64* next_token = context.output<i64>(2, Dims{batch});
        for_rows(context, batch, vocab, [&](i64 slot, float* floats, const Context* inner) {
            const i64 first = slot * nodes;
            const Slot tree{nodes,
                            vocab,
                            logits.data<float>() + first * vocab,
                            token + first,
                            parent + first,
                            has_probs ? draft_probs.data<float>() + first * vocab : nullptr,
                            uniforms.data<float>() + 2 * first,
                            warps[slot]};
            verify_slot(tree, {path + first, num_accepted + slot, next_token + slot}, inner, floats);
        });
    }

    // Tokens of nodes that have a parent are indices into the distributions.
    static void check_tokens(const i64* tokens, const i64* parents, i64 batch, i64 nodes, i64 vocab) {
        for (i64 at = 0; at < batch * nodes; at++) {
            const bool is_linked = parents[at] >= 0 && parents[at] < at % nodes;
            if (!is_linked || (tokens[at] >= 0 && tokens[at] < vocab)) continue;
            throw Error("token " + std::to_string(tokens[at]) + " of slot " + std::to_string(at / nodes) + ", node " +
                        std::to_string(at % nodes) + ", expected 0 to " + std::to_string(vocab - 1) +
                        "; correct what proposes it");
        }
    }
};

// logits [batch, nodes, vocab], next_token [batch] -> next_token, or -1 where a row of the slot is not finite.
struct FiniteToken {
    static constexpr const char* kName = "FiniteToken";
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kInt64};
    static constexpr abi::ElementType kOutputs[] = {abi::kInt64};
    static constexpr std::size_t kNumOptional = 0;

    explicit FiniteToken(const Info&) {}

    void run(const Context& context) const {
        const Tensor logits = context.input(0), tokens = context.input(1);
        const Dims rows = rows_of(logits);
        const i64 batch = rows[0], nodes = rows[1], vocab = rows[2];
        expect_dims(kName, "next_token", tokens.dims, Dims{batch});
        i64* finite = context.output<i64>(0, Dims{batch});
        // NaN and infinity persist in a sum; minus infinity masks a token.
        const auto is_finite = [&](i64 row) {
            const float sum = sum_of(logits.data<float>() + row * vocab, vocab);
            return sum < kLargest;
        };
        thread_local Scratch scratch;
        std::uint8_t* held = scratch.get<std::uint8_t>(static_cast<std::size_t>(batch * nodes));
        const auto task = [&](std::size_t row) { held[row] = is_finite(static_cast<i64>(row)); };
        if (batch * nodes * vocab > kInlineSummed) {
            context.parallel(static_cast<std::size_t>(batch * nodes), task);
        } else {
            for (i64 row = 0; row < batch * nodes; row++) task(static_cast<std::size_t>(row));
        }
        for (i64 slot = 0; slot < batch; slot++) {
            const std::uint8_t *first = held + slot * nodes, *end = first + nodes;
            finite[slot] = std::find(first, end, 0) == end ? tokens.data<i64>()[slot] : -1;
        }
    }
};

inline void add_verify_ops(OpTable& table) {
    table.push_back(custom_op<SpecVerify>());
    table.push_back(custom_op<FiniteToken>());
}

}  // namespace speccompile::cpu
