// SPDX-License-Identifier: Apache-2.0
// The acceptance rule on the logits of a slot: one walk from the root, which reads only the rows that it reaches.
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
    float accept_draw(i64 node) const { return uniforms[2 * node]; }
    float node_draw(i64 node) const { return uniforms[2 * node + 1]; }
};

// Where a slot's verdict is written.
struct Verdict {
    i64 *path, *num_accepted, *next_token;
};

// Subtracts a draft distribution from `share` of the target's; the target's own stays where nothing is left. Returns the
// mass that is left.
inline double subtract(RowWeights& weights, const float* draft, RowMemory& memory, float share = 1.f) {
    const Float total = broadcast(static_cast<float>(weights.total)), part_of = broadcast(share);
    RowWeights left{memory.spare, memory.spare_sums, weights.vocab, 0};
    for (i64 chunk = 0; chunk < num_chunks(weights.vocab); chunk++) {
        const i64 at = chunk * kChunk, count = chunk_size(weights.vocab, chunk);
        alignas(64) float own[kPartials], drafted[kPartials];
        Float sums[kParts];
        for (Float& sum : sums) sum = zero();
        for (i64 i = 0; i < count; i += kPartials) {
            const float* from = group_of(weights.values + at + i, count - i, 0.f, own);
            const float* by = group_of(draft + at + i, count - i, 0.f, drafted);
            float* to = from == own ? own : left.values + at + i;
            for (int part = 0; part < kParts; part++) {
                const Float prob = mul(part_of, div(load(from + part * kLanes), total));
                const Float rest = max(sub(prob, load(by + part * kLanes)), zero());
                store(to + part * kLanes, rest);
                sums[part] = add(sums[part], rest);
            }
            if (to == own) std::memcpy(left.values + at + i, own, static_cast<std::size_t>(count - i) * sizeof(float));
        }
        left.sums[chunk] = sum_partials(sums);
    }
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

// Drafts are a tree that was drawn from distributions: a child is kept with probability target / draft.
inline void walk_probs(const Slot& slot, const Verdict& verdict, const Context* context, RowMemory memory) {
    i64 last = 0, length = 1;
    RowWeights weights = warp_row(context, slot.row(0), slot.vocab, slot.warp, memory);
    for (i64 node = 1; node < slot.nodes; node++) {
        if (slot.parents[node] != last) continue;
        const float* draft = slot.draft_probs + node * slot.vocab;
        const i64 token = slot.tokens[node];
        if (slot.accept_draw(node) * draft[token] < weights.prob(token)) {
            verdict.path[length++] = last = node;
            weights = warp_row(context, slot.row(node), slot.vocab, slot.warp, memory);
        } else {
            subtract(weights, draft, memory);
        }
    }
    *verdict.num_accepted = length - 1;
    *verdict.next_token = draw(weights, slot.node_draw(last));
}

// Whether drafts are a tree: some node's parent is not the node before it, or the root is marked, as a drawn tree may happen
// to be a chain.
inline bool is_branched(const Slot& slot) {
    if (slot.accept_draw(0) < 0) return true;
    for (i64 node = 2; node < slot.nodes; node++) {
        if (slot.parents[node] >= 0 && slot.parents[node] < node - 1) return true;
    }
    return false;
}

// Whether any node has a parent.
inline bool has_drafts(const Slot& slot) {
    for (i64 node = 1; node < slot.nodes; node++) {
        if (slot.parents[node] >= 0 && slot.parents[node] < node) return true;
    }
    return false;
}

// Drafts are a chain that was drawn from distributions (`core.acceptance.keep_block`): the longest prefix that passes is
// kept. Weights are found from the root on, passes from the end; most rows are read once.
inline void walk_block(const Slot& slot, const Verdict& verdict, const Context* context, RowMemory memory) {
    thread_local Scratch scratch;
    double* weights = scratch.get<double>(static_cast<std::size_t>(slot.nodes));
    const auto row_of = [&](i64 node) { return warp_row(context, slot.row(node), slot.vocab, slot.warp, memory); };
    i64 end = 0, last = 0;  // `last`: of the prefixes with a weight, and those before it
    while (end + 1 < slot.nodes && slot.parents[end + 1] == end) end++;
    weights[0] = 1;
    RowWeights row = row_of(0);
    for (i64 node = 1; node <= end; node++) {
        const i64 token = slot.tokens[node];
        const double mass = weights[node - 1] * static_cast<double>(row.prob(token));
        const double drafted = static_cast<double>(slot.draft_probs[node * slot.vocab + token]);
        weights[node] = mass < drafted ? mass / drafted : mass > 0 ? 1 : 0;
        last = node;
        if (!(weights[node] > 0) || node == end) break;
        row = row_of(node);
    }
    i64 kept = last;
    const bool is_whole = last == end && (end == 0 || static_cast<double>(slot.accept_draw(end)) < weights[end]);
    if (is_whole) {
        if (end > 0) row = row_of(end);
    } else {
        while (kept-- > 0) {
            if (kept != last - 1) row = row_of(kept);
            const double weight = weights[kept];
            const double rest = subtract(row, slot.draft_probs + (kept + 1) * slot.vocab, memory, static_cast<float>(weight));
            if (kept == 0 || weight >= 1) break;
            if (static_cast<double>(slot.accept_draw(kept)) < rest / (rest + 1 - weight)) break;
        }
    }
    for (i64 node = 1; node <= kept; node++) verdict.path[node] = node;
    *verdict.num_accepted = kept;
    *verdict.next_token = draw(row, slot.node_draw(kept));
}

// As above where the target's distribution is one-hot, and stays so after a refusal.
inline void walk_greedy_probs(const Slot& slot, const Verdict& verdict) {
    i64 last = 0, length = 1, best = first_greatest(slot.row(0), slot.vocab).index;
    for (i64 node = 1; node < slot.nodes; node++) {
        if (slot.parents[node] != last) continue;
        const i64 token = slot.tokens[node];
        const float target = token == best ? 1.f : 0.f;
        if (!(slot.accept_draw(node) * slot.draft_probs[node * slot.vocab + token] < target)) continue;
        verdict.path[length++] = last = node;
        best = first_greatest(slot.row(node), slot.vocab).index;
    }
    *verdict.num_accepted = length - 1;
    *verdict.next_token = best;
}

// Decides a slot; `floats` is memory of row_memory_size. Where `context` is given, long rows are read by several threads.
inline void verify_slot(const Slot& slot, const Verdict& verdict, const Context* context, float* floats) {
    for (i64 node = 0; node < slot.nodes; node++) verdict.path[node] = node == 0 ? 0 : -1;
    if (!slot.warp.is_hot()) {
        if (slot.draft_probs != nullptr) return walk_greedy_probs(slot, verdict);
        return walk_tokens(slot, verdict, [&](i64 node) { return first_greatest(slot.row(node), slot.vocab).index; });
    }
    const RowMemory memory = row_memory(floats, slot.vocab);
    if (slot.draft_probs != nullptr && has_drafts(slot)) {  // without drafts the text is as beside none that draft
        if (is_branched(slot)) return walk_probs(slot, verdict, context, memory);
        return walk_block(slot, verdict, context, memory);
    }
    walk_tokens(slot, verdict, [&](i64 node) {
        const RowWeights row = warp_row(context, slot.row(node), slot.vocab, slot.warp, memory);
        return race(context, row, slot.uniforms + 2 * node);
    });
}

}  // namespace speccompile::cpu
