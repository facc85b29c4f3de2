// SPDX-License-Identifier: Apache-2.0
// The acceptance rule on the logits of a slot, which reads only the rows that it reaches.
#pragma once

#include "race.h"
#include "warp.h"

namespace speccompile::cpu {

// The scored tree of a slot; logits, tokens and uniforms by node.
struct Slot {
    i64 nodes, vocab;
    const float* logits;       // [nodes, vocab]
    const i64* tokens;         // [nodes]
    const i64* parents;        // [nodes]; that of the root is not read, and none is used as an index
    const float* draft_probs;  // [nodes, vocab]; nullptr: deterministic drafts
    const float* uniforms;     // [nodes, 2]: accept draw, draw at the node; draws of the race where drafts have none
    Warp warp;

    const float* row(i64 node) const { return logits + node * vocab; }
    const float* draft(i64 node) const { return draft_probs + node * vocab; }
    float accept_draw(i64 node) const { return uniforms[2 * node]; }
    float node_draw(i64 node) const { return uniforms[2 * node + 1]; }
};

// Where a slot's verdict is written.
struct Verdict {
    i64 *path, *num_accepted, *next_token;
};

// Edges of target / draft between classes (`core.multi_path.RATIO_EDGES`).
constexpr float kRatioEdges[] = {0.35355339059327376f, 0.70710678118654752f, 1.4142135623730951f, 2.8284271247461903f};
constexpr int kEdges = 4;

// A node of the path that is verified: the child that was chosen among `num`.
struct Chosen {
    i64 node = -1, num = 0;
    int ratio_class = -1;           // of target / draft
    double weight = 1;              // of the prefix that ends here
    float factors[kEdges + 1] = {}; // of the draft's probabilities, by class; not used where num is 1

    float drafted(float draft) const { return num > 1 ? draft * factors[ratio_class] : draft; }
    Float drafted(Float target, Float draft) const {
        if (num == 1) return draft;
        Float factor = broadcast(factors[0]);
        for (int i = 0; i < kEdges; i++) {
            factor = select_less(mul(broadcast(kRatioEdges[i]), draft), target, broadcast(factors[i + 1]), factor);
        }
        return mul(draft, factor);
    }
};

// Calls visit(at, part, target, draft, sums) for vectors of probabilities, and end(chunk, sums) after each chunk.
template <int kSums, class Visit, class End>
void each_pair(const RowWeights& row, const float* draft, const Visit& visit, const End& end) {
    const Float total = broadcast(static_cast<float>(row.total));
    for (i64 chunk = 0; chunk < num_chunks(row.vocab); chunk++) {
        const i64 start = chunk * kChunk, count = chunk_size(row.vocab, chunk);
        alignas(64) float own[kPartials], drafted[kPartials];
        Float sums[kSums][kParts];
        for (auto& parts : sums)
            for (Float& sum : parts) sum = zero();
        for (i64 i = 0; i < count; i += kPartials) {
            const float* from = group_of(row.values + start + i, count - i, 0.f, own);
            const float* by = group_of(draft + start + i, count - i, 0.f, drafted);
            for (int part = 0; part < kParts; part++) {
                const int lane = part * kLanes;
                visit(start + i + lane, part, div(load(from + lane), total), load(by + lane), sums);
            }
        }
        end(chunk, sums);
    }
}

// Subtracts what a node was chosen from from `share` of the target's; the target's own stays where nothing is left.
// Returns the mass that is left.
inline double subtract(RowWeights& weights, const float* draft, const Chosen& chosen, RowMemory& memory, float share) {
    RowWeights left{memory.spare, memory.spare_sums, weights.vocab, 0};
    const auto visit = [&](i64 at, int part, Float target, Float drafted, auto& sums) {
        const Float rest = max(sub(mul(broadcast(share), target), chosen.drafted(target, drafted)), zero());
        store(left.values + at, rest);
        sums[0][part] = add(sums[0][part], rest);
    };
    each_pair<1>(weights, draft, visit, [&](i64 chunk, auto& sums) { left.sums[chunk] = sum_partials(sums[0]); });
    left.add_up();
    if (!(left.total > 0)) return 0;
    std::swap(memory.values, memory.spare);
    std::swap(memory.sums, memory.spare_sums);
    weights = left;
    return left.total;
}

// The token is drawn first, and the child that has it is kept. `choose` returns a node's token.
template <class Choose>
void walk_tokens(const Slot& slot, const Verdict& verdict, const Choose& choose) {
    i64 last = 0, length = 1, drawn = choose(0);
    for (i64 node = 1; node < slot.nodes; node++) {
        if (slot.parents[node] != last || slot.tokens[node] != drawn) continue;
        verdict.path[length++] = last = node;
        drawn = choose(node);
    }
    *verdict.num_accepted = length - 1;
    *verdict.next_token = drawn;
}

inline bool has_child(const Slot& slot, i64 parent) {
    for (i64 node = parent + 1; node < slot.nodes; node++) {
        if (slot.parents[node] == parent) return true;
    }
    return false;
}

// Chooses the first child of the highest class (`core.multi_path`); `row` is the target's distribution after `last`.
inline Chosen choose_child(const Slot& slot, i64 last, const RowWeights& row) {
    Chosen chosen;
    for (i64 node = last + 1; node < slot.nodes; node++) {
        if (slot.parents[node] != last) continue;
        const float target = row.prob(slot.tokens[node]), drafted = slot.draft(node)[slot.tokens[node]];
        int ratio_class = 0;
        for (const float edge : kRatioEdges) ratio_class += target > edge * drafted;
        if (ratio_class > chosen.ratio_class) chosen.node = node;
        chosen.ratio_class = std::max(chosen.ratio_class, ratio_class);
        chosen.num++;
    }
    if (chosen.num < 2) return chosen;
    double above[kEdges] = {}, below = 0;
    const auto visit = [&](i64, int part, Float target, Float drafted, auto& sums) {
        for (int i = 0; i < kEdges; i++) {
            const Float share = select_less(mul(broadcast(kRatioEdges[i]), drafted), target, drafted, zero());
            sums[i][part] = add(sums[i][part], share);
        }
    };
    each_pair<kEdges>(row, slot.draft(chosen.node), visit, [&](i64, auto& sums) {
        for (int i = 0; i < kEdges; i++) above[i] += static_cast<double>(sum_partials(sums[i]));
    });
    for (int i = 0; i <= kEdges; i++) {  // (upto^num - below^num) / (upto - below), of the draft's mass in lower classes
        const double upto = i < kEdges ? std::max(1 - above[i], 0.0) : 1;
        double factor = 0, power = 1;
        for (i64 number = 0; number < chosen.num; number++, power *= upto) factor = factor * below + power;
        chosen.factors[i] = static_cast<float>(factor);
        below = upto;
    }
    return chosen;
}

// Drafts were drawn from distributions: one path is chosen, and verified as a block (`core.acceptance.keep_block`): the
// longest prefix that passes is kept. Weights are found from the root on, passes from the end; most rows are read once.
inline void walk_block(const Slot& slot, const Verdict& verdict, const Context* context, RowMemory memory) {
    thread_local Scratch scratch;
    Chosen* path = scratch.get<Chosen>(static_cast<std::size_t>(slot.nodes));
    const auto row_of = [&](i64 node) { return warp_row(context, slot.row(node), slot.vocab, slot.warp, memory); };
    i64 last = 0;
    path[0] = {};
    path[0].node = 0;
    RowWeights row = row_of(0);  // until the end, of the node before the last one
    while (path[last].weight > 0 && has_child(slot, path[last].node)) {
        if (last > 0) row = row_of(path[last].node);
        Chosen chosen = choose_child(slot, path[last].node, row);
        const i64 token = slot.tokens[chosen.node];
        const double mass = path[last].weight * static_cast<double>(row.prob(token));
        const double drafted = static_cast<double>(chosen.drafted(slot.draft(chosen.node)[token]));
        chosen.weight = mass < drafted ? mass / drafted : mass > 0 ? 1 : 0;
        path[++last] = chosen;
    }
    i64 kept = last;
    if (static_cast<double>(slot.accept_draw(path[last].node)) < path[last].weight) {
        row = row_of(path[last].node);
    } else {
        while (kept-- > 0) {
            if (kept != last - 1) row = row_of(path[kept].node);
            const double weight = path[kept].weight;
            const Chosen& next = path[kept + 1];
            const double rest = subtract(row, slot.draft(next.node), next, memory, static_cast<float>(weight));
            if (kept == 0 || weight >= 1) break;
            if (static_cast<double>(slot.accept_draw(path[kept].node)) < rest / (rest + 1 - weight)) break;
        }
    }
    for (i64 i = 1; i <= kept; i++) verdict.path[i] = path[i].node;
    *verdict.num_accepted = kept;
    *verdict.next_token = draw(row, slot.node_draw(path[kept].node));
}

// Decides a slot; `floats` is memory of row_memory_size. Where `context` is given, long rows are read by several threads.
inline void verify_slot(const Slot& slot, const Verdict& verdict, const Context* context, float* floats) {
    for (i64 node = 0; node < slot.nodes; node++) verdict.path[node] = node == 0 ? 0 : -1;
    if (!slot.warp.is_hot()) {
        return walk_tokens(slot, verdict, [&](i64 node) { return first_greatest(slot.row(node), slot.vocab).index; });
    }
    const RowMemory memory = row_memory(floats, slot.vocab);
    if (slot.draft_probs != nullptr && has_child(slot, 0)) {  // without drafts the text is as beside none that draft
        return walk_block(slot, verdict, context, memory);
    }
    walk_tokens(slot, verdict, [&](i64 node) {
        const RowWeights row = warp_row(context, slot.row(node), slot.vocab, slot.warp, memory);
        return race(context, row, slot.uniforms + 2 * node);
    });
}

}  // namespace speccompile::cpu
