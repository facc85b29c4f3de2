// SPDX-License-Identifier: Apache-2.0
// The ops of layers with recurrent states: GatedDelta and ConvRows. States are updated in place where input and output
// are bound to one address.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "attention_ops.h"
#include "kernel.h"
#include "recurrence.h"

namespace speccompile::cpu {

constexpr i64 kConvColumns = 256;  // channels of a task

// Lengths and sure nodes of a call, and the forms of its slots' trees.
struct StateStep {
    const i64 *lengths, *state_lengths, *sure;
    i64 nodes;
    std::vector<i64> parents;  // [batch, nodes]; empty where all slots have chains

    // The parents of a slot's nodes, -1 where one follows the tokens before the step; nullptr: a chain.
    const i64* parents_of(i64 slot) const { return parents.empty() ? nullptr : parents.data() + slot * nodes; }
    bool is_new(i64 slot) const { return lengths[slot] == 0; }
    // Pending rows that were accepted.
    i64 num_owed(i64 slot) const { return lengths[slot] - state_lengths[slot]; }
    i64 num_applied(i64 slot) const { return num_owed(slot) + sure[slot]; }
};

// The latest node before a node that its row of the mask shows; -1: none.
inline i64 parent_of(const std::uint8_t* row, i64 node) {
    i64 parent = node - 1;
    while (parent >= 0 && row[parent] == 0) parent--;
    return parent;
}

// Reads the trees of a call, where some slot's nodes are no chain; refuses sure nodes that do not follow one another.
inline void read_trees(StateStep& step, const std::uint8_t* mask, i64 batch) {
    const i64 nodes = step.nodes;
    const auto row = [&](i64 at) { return mask + at * nodes; };
    bool is_chain = true;
    for (i64 at = 0; at < batch * nodes && is_chain; at++) is_chain = at % nodes == 0 || row(at)[at % nodes - 1] != 0;
    if (is_chain) return;
    step.parents.resize(static_cast<std::size_t>(batch * nodes));
    for (i64 at = 0; at < batch * nodes; at++) {
        const i64 slot = at / nodes, node = at % nodes, parent = parent_of(row(at), node);
        step.parents[static_cast<std::size_t>(at)] = parent;
        if (node < step.sure[slot] && parent != node - 1) {
            throw Error("sure_nodes[" + std::to_string(slot) + "] is " + std::to_string(step.sure[slot]) + " and node " +
                        std::to_string(node) + " follows node " + std::to_string(parent) +
                        ", expected a chain of sure nodes; correct what counts them");
        }
    }
}

// Reads the last inputs from `first` on, of which graphs of earlier versions have no tree mask; refuses counts by which
// something outside a tensor would be read.
inline StateStep read_step(const Context& context, std::size_t first, i64 batch, i64 nodes, i64 num_pending, const std::string& op) {
    const char* names[] = {"lengths", "state_lengths", "sure_nodes"};
    const i64* counts[3];
    for (std::size_t i = 0; i < 3; i++) {
        const Tensor tensor = context.input(first + i);
        expect_dims(op, names[i], tensor.dims, Dims{batch});
        counts[i] = tensor.data<i64>();
    }
    StateStep step{counts[0], counts[1], counts[2], nodes, {}};
    for (i64 slot = 0; slot < batch; slot++) {
        const i64 length = step.lengths[slot], held = step.state_lengths[slot];
        if (held < 0 || held > length || length - held > num_pending) {
            throw Error("state_lengths[" + std::to_string(slot) + "] is " + std::to_string(held) + " and the length is " +
                        std::to_string(length) + ", expected at most as many and at least " + std::to_string(num_pending) +
                        " fewer, which are pending; start the sequence again");
        }
        if (step.sure[slot] < 0 || step.sure[slot] > nodes) {
            throw Error("sure_nodes[" + std::to_string(slot) + "] is " + std::to_string(step.sure[slot]) + ", expected 0 to " +
                        std::to_string(nodes) + ", the nodes of the step; correct what counts them");
        }
    }
    if (context.has_input(first + 3)) {
        const Tensor mask = context.input(first + 3);
        expect_dims(op, "tree_mask", mask.dims, Dims{batch, nodes, nodes});
        read_trees(step, mask.data<std::uint8_t>(), batch);
    }
    return step;
}

// q, k [batch, nodes, key_heads * key_dim], v [batch, nodes, value_heads * value_dim], g, beta [batch, nodes,
// value_heads], state, pending, lengths, state_lengths, sure_nodes, tree_mask [batch, nodes, nodes] -> out as v, the updated
// state and pending rows.
struct GatedDelta {
    static constexpr const char* kName = "GatedDelta";
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kFloat, abi::kFloat, abi::kFloat, abi::kFloat,
                                                   abi::kFloat, abi::kFloat, abi::kInt64, abi::kInt64, abi::kInt64,
                                                   abi::kBool};
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat, abi::kFloat, abi::kFloat};
    static constexpr std::size_t kNumOptional = 1;

    explicit GatedDelta(const Info& info)
        : key_heads(info.integer("num_key_heads")),
          value_heads(info.integer("num_value_heads")),
          scale(info.real("scale")),
          has_delta_rule(info.integer("delta") != 0) {
        if (key_heads < 1 || value_heads < 1 || value_heads % key_heads != 0) {
            throw Error(std::to_string(value_heads) + " value heads, expected a multiple of the " + std::to_string(key_heads) +
                        " key heads; build the bundle again");
        }
    }

    // One call.
    struct Call {
        StateStep step;
        i64 batch, nodes, num_pending, key_dim, value_dim, key_width, value_width, width;
        const float *q, *k, *v, *g, *beta, *state, *pending;
        float *out, *state_updated, *pending_updated;
        std::vector<TreeOrder> trees;  // by slot; empty where all slots have chains
    };

    void run(const Context& context) const {
        Call call = read(context);
        call.out = context.output<float>(0, Dims{call.batch, call.nodes, call.value_width});
        call.state_updated = context.output<float>(1, Dims{call.batch, value_heads, call.key_dim, call.value_dim});
        call.pending_updated = context.output<float>(2, Dims{call.batch, call.num_pending, call.width});
        if (!call.step.parents.empty()) call.trees.resize(static_cast<std::size_t>(call.batch));
        for (std::size_t slot = 0; slot < call.trees.size(); slot++) {
            const i64 at = static_cast<i64>(slot);
            call.trees[slot].plan(call.step.parents_of(at), call.nodes, call.step.num_owed(at), call.step.sure[at]);
        }
        std::atomic<bool> has_memory{true};
        const auto task = [&](std::size_t number) {
            const i64 pair = static_cast<i64>(number);
            try {
                walk(call, pair / value_heads, pair % value_heads);
            } catch (const Error&) {
                has_memory = false;
            }
        };
        const i64 pairs = call.batch * value_heads;
        if (pairs * call.nodes * call.key_dim * call.value_dim > kInlineWork) {
            context.parallel(static_cast<std::size_t>(pairs), task);
        } else {
            for (i64 pair = 0; pair < pairs; pair++) task(static_cast<std::size_t>(pair));
        }
        if (!has_memory) throw Error("out of memory");
        // All heads have read the pending rows before any is overwritten.
        for (i64 slot = 0; slot < call.batch; slot++) keep_pending(call, slot);
    }

    Call read(const Context& context) const {
        const Tensor q = context.input(0), k = context.input(1), v = context.input(2), g = context.input(3),
                     beta = context.input(4), state = context.input(5), pending = context.input(6);
        if (q.dims.rank != 3 || state.dims.rank != 4 || pending.dims.rank != 3) {
            throw Error("q and pending must have 3 dims and state 4; build the bundle again");
        }
        Call call{};
        call.batch = q.dims[0], call.nodes = q.dims[1], call.num_pending = pending.dims[1];
        call.key_dim = state.dims[2], call.value_dim = state.dims[3];
        call.key_width = key_heads * call.key_dim, call.value_width = value_heads * call.value_dim;
        call.width = call.key_width + call.value_width + 2 * value_heads;
        const Dims keys{call.batch, call.nodes, call.key_width}, gates{call.batch, call.nodes, value_heads};
        expect_dims(kName, "q", q.dims, keys);
        expect_dims(kName, "k", k.dims, keys);
        expect_dims(kName, "v", v.dims, Dims{call.batch, call.nodes, call.value_width});
        expect_dims(kName, "g", g.dims, gates);
        expect_dims(kName, "beta", beta.dims, gates);
        expect_dims(kName, "state", state.dims, Dims{call.batch, value_heads, call.key_dim, call.value_dim});
        expect_dims(kName, "pending", pending.dims, Dims{call.batch, call.num_pending, call.width});
        call.step = read_step(context, 7, call.batch, call.nodes, call.num_pending, kName);
        call.q = q.data<float>(), call.k = k.data<float>(), call.v = v.data<float>(), call.g = g.data<float>();
        call.beta = beta.data<float>(), call.state = state.data<float>(), call.pending = pending.data<float>();
        return call;
    }

    // The state and the outputs of one value head.
    void walk(const Call& call, i64 slot, i64 head) const {
        const i64 num_owed = call.step.num_owed(slot), num_rows = num_owed + call.nodes;
        const i64 num_applied = call.step.num_applied(slot), size = call.key_dim * call.value_dim;
        thread_local Scratch row_scratch, state_scratch;
        HeadRow* rows = row_scratch.get<HeadRow>(static_cast<std::size_t>(num_rows));
        const i64 key_column = head / (value_heads / key_heads) * call.key_dim, value_column = head * call.value_dim;
        // Of a chain: the state after each row is where the one before it was, but for the last row and the one that stays.
        const auto place_after = [&](i64 row) {
            return row + 1 == num_applied ? kKept : row + 1 == num_rows ? kNowhere : Place{0};
        };
        i64 place = kGiven;
        for (i64 r = 0; r < num_owed; r++) {
            const float *k = call.pending + (slot * call.num_pending + r) * call.width, *v = k + call.key_width;
            const float *g = v + call.value_width, *beta = g + value_heads;
            const i64 to = place_after(r);
            rows[r] = {nullptr, k + key_column, v + value_column, std::exp(g[head]), beta[head], nullptr, place, to, r > 0};
            place = to;
        }
        const TreeOrder* tree = call.trees.empty() ? nullptr : &call.trees[static_cast<std::size_t>(slot)];
        for (i64 r = num_owed; r < num_rows; r++) {
            const Visit visit = tree != nullptr ? tree->visits[static_cast<std::size_t>(r - num_owed)]
                                                : Visit{r - num_owed, place, place_after(r), r > 0};
            const i64 at = slot * call.nodes + visit.node;
            rows[r] = {call.q + at * call.key_width + key_column,
                       call.k + at * call.key_width + key_column,
                       call.v + at * call.value_width + value_column,
                       std::exp(call.g[at * value_heads + head]),
                       call.beta[at * value_heads + head],
                       call.out + at * call.value_width + value_column,
                       visit.from,
                       visit.to,
                       visit.follows};
            place = visit.to;
        }
        const float* from = call.state + (slot * value_heads + head) * size;
        float* to = call.state_updated + (slot * value_heads + head) * size;
        if (call.step.is_new(slot)) {
            std::memset(to, 0, static_cast<std::size_t>(size) * sizeof(float));
            from = to;
        } else if (num_applied == 0 && from != to) {
            std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float));
        }
        if (num_rows == 0) return;
        const i64 num_places = tree != nullptr ? tree->num_places : 1;
        float* memory = state_scratch.get<float>(static_cast<std::size_t>(walk_floats(call.key_dim, num_places)));
        const HeadStep head_step{rows, num_rows, call.key_dim, call.value_dim, scale, has_delta_rule, from, to};
        tree != nullptr ? walk_head<true>(head_step, memory) : walk_head<false>(head_step, memory);
    }

    // The nodes that are not sure become the first pending rows; further ones are padding. Where the rows are not updated
    // in place, zeros follow.
    void keep_pending(const Call& call, i64 slot) const {
        const i64 sure = call.step.sure[slot], left = call.nodes - sure;
        const i64 count = left < call.num_pending ? left : call.num_pending;
        float* to = call.pending_updated + slot * call.num_pending * call.width;
        const auto put = [&](const float* from, i64 floats) {
            std::memcpy(to, from, static_cast<std::size_t>(floats) * sizeof(float));
            to += floats;
        };
        for (i64 at = slot * call.nodes + sure; at < slot * call.nodes + sure + count; at++) {
            put(call.k + at * call.key_width, call.key_width);
            put(call.v + at * call.value_width, call.value_width);
            put(call.g + at * value_heads, value_heads);
            put(call.beta + at * value_heads, value_heads);
        }
        if (call.pending_updated == call.pending) return;
        std::memset(to, 0, static_cast<std::size_t>((call.num_pending - count) * call.width) * sizeof(float));
    }

    const i64 key_heads, value_heads;
    const float scale;
    const bool has_delta_rule;
};

// x [batch, nodes, channels], weight [channels, kernel], bias [channels], rows [batch, kernel - 1 + pending, channels],
// lengths, state_lengths, sure_nodes, tree_mask [batch, nodes, nodes] -> out as x, the updated rows.
struct ConvRows {
    static constexpr const char* kName = "ConvRows";
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kFloat, abi::kFloat, abi::kFloat,
                                                   abi::kInt64, abi::kInt64, abi::kInt64, abi::kBool};
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat, abi::kFloat};
    static constexpr std::size_t kNumOptional = 1;

    explicit ConvRows(const Info& info) : has_silu(info.integer("activation") != 0) {
        if (const abi::Value* weight = info.constant(1)) constant_taps = taps_of(Tensor(weight));
    }

    // The weights as [kernel, channels].
    static std::vector<float> taps_of(const Tensor& weight) {
        if (weight.dims.rank != 2 || weight.dims[1] < 1) {
            throw Error("weight has dims " + weight.dims.text() + ", expected [channels, kernel]; build the bundle again");
        }
        const i64 channels = weight.dims[0], kernel = weight.dims[1];
        std::vector<float> taps(static_cast<std::size_t>(channels * kernel));
        for (i64 channel = 0; channel < channels; channel++) {
            for (i64 tap = 0; tap < kernel; tap++) {
                taps[static_cast<std::size_t>(tap * channels + channel)] = weight.data<float>()[channel * kernel + tap];
            }
        }
        return taps;
    }

    void run(const Context& context) const {
        const Tensor x = context.input(0), weight = context.input(1), bias = context.input(2), rows = context.input(3);
        if (x.dims.rank != 3 || rows.dims.rank != 3) throw Error("x and rows must have 3 dims; build the bundle again");
        const std::vector<float> taps = constant_taps.empty() ? taps_of(weight) : std::vector<float>();
        const i64 batch = x.dims[0], nodes = x.dims[1], channels = x.dims[2], kernel = weight.dims[1];
        const i64 num_rows = rows.dims[1], num_past = kernel - 1;
        expect_dims(kName, "weight", weight.dims, Dims{channels, kernel});
        expect_dims(kName, "bias", bias.dims, Dims{channels});
        expect_dims(kName, "rows", rows.dims, Dims{batch, num_rows < num_past ? num_past : num_rows, channels});
        const StateStep step = read_step(context, 4, batch, nodes, num_rows - num_past, kName);
        ConvStep conv{};
        conv.taps = (taps.empty() ? constant_taps : taps).data();
        conv.bias = bias.data<float>();
        conv.kernel = kernel, conv.channels = channels, conv.nodes = nodes, conv.has_silu = has_silu;
        float *out = context.output<float>(0, x.dims), *updated = context.output<float>(1, rows.dims);
        const i64 blocks = (channels + kConvColumns - 1) / kConvColumns;
        std::vector<const float*> windows(static_cast<std::size_t>(batch * blocks * kernel));
        const auto task = [&](std::size_t number) {
            const i64 slot = static_cast<i64>(number) / blocks, first = static_cast<i64>(number) % blocks * kConvColumns;
            const i64 end = first + kConvColumns < channels ? first + kConvColumns : channels;
            ConvStep here = conv;
            here.window = windows.data() + static_cast<i64>(number) * kernel;
            here.parents = step.parents_of(slot);
            here.num_held = num_past + step.num_owed(slot);
            here.held = rows.data<float>() + slot * num_rows * channels;
            here.x = x.data<float>() + slot * nodes * channels;
            here.out = out + slot * nodes * channels;
            float* to = updated + slot * num_rows * channels;
            if (step.is_new(slot)) {
                for (i64 row = 0; row < num_past; row++) set(to + row * channels, nullptr, first, end);
                here.held = to;
            }
            convolve(here, first, end);
            // A row comes from the same or a later one, so none is overwritten before it is moved.
            const i64 applied = step.num_applied(slot), left = here.num_held + nodes - applied;
            for (i64 row = 0; row < num_rows; row++) {
                if (row < left) {
                    set(to + row * channels, here.row(applied + row), first, end);
                } else if (updated != rows.data<float>()) {
                    set(to + row * channels, nullptr, first, end);
                }
            }
        };
        if (batch * nodes * channels * kernel > kInlineWork) {
            context.parallel(static_cast<std::size_t>(batch * blocks), task);
        } else {
            for (i64 number = 0; number < batch * blocks; number++) task(static_cast<std::size_t>(number));
        }
    }

    // Copies columns of a row; nullptr: zeros.
    static void set(float* to, const float* from, i64 first, i64 end) {
        const std::size_t bytes = static_cast<std::size_t>(end - first) * sizeof(float);
        if (from == nullptr) {
            std::memset(to + first, 0, bytes);
        } else if (from != to) {
            std::memcpy(to + first, from + first, bytes);
        }
    }

    const bool has_silu;
    std::vector<float> constant_taps;  // empty where the weight is computed
};

inline void add_state_ops(OpTable& table) {
    table.push_back(custom_op<GatedDelta>());
    table.push_back(custom_op<ConvRows>());
}

}  // namespace speccompile::cpu
