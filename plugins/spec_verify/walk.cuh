// SPDX-License-Identifier: Apache-2.0
// SpecVerify, second part: draws, and which drafts are kept.
#pragma once

#include "spec_verify/dist.cuh"
#include "spec_verify/race.cuh"

namespace speccompile {

// The draft's probability of a target token at a node.
__device__ inline float draft_at(const SpecVerifyParams& params, int slot, int node, i64 token) {
    i64 draft_token = token;
    if (params.d2t != nullptr) {
        // The workspace is not cleared: an entry is valid if its draft token maps back.
        draft_token = Workspace(params).inverse[token];
        if (draft_token >= params.draft_vocab || params.d2t[draft_token] != token) return 0;
    }
    if (draft_token < 0 || draft_token >= params.draft_vocab) return 0;
    return params.draft_probs[(static_cast<i64>(slot) * params.nodes + node) * params.draft_vocab + draft_token];
}

// Whether the cuts keep an entry in the distribution.
__device__ inline bool is_held(const Dist& dist, float scaled, int index) {
    const u32 key = key_from(scaled);
    return key > dist.key_min || (key == dist.key_min && static_cast<u32>(index) <= dist.last_tie);
}

// The edges of target / draft between classes (`core.multi_path.RATIO_EDGES`).
__device__ inline float ratio_edge(int number) {
    const float edges[] = {0.35355339059327376f, 0.70710678118654752f, 1.4142135623730951f, 2.8284271247461903f};
    return edges[number];
}

__device__ inline int ratio_class(float target, float drafted) {
    int number = 0;
#pragma unroll
    for (int edge = 0; edge < NUM_CLASSES - 1; ++edge) number += target > __fmul_rn(ratio_edge(edge), drafted) ? 1 : 0;
    return number;
}

// The probability of a token in what the child of `work` was chosen from (`core.multi_path.chosen_probs`).
__device__ inline float chosen_at(const Work& work, float target, int index) {
    const float drafted = draft_at(work.params, work.slot, work.child, index);
    return work.num_children > 1 ? drafted * shared_state().factors[ratio_class(target, drafted)] : drafted;
}

// The weighted probability of an entry less that of the child, if there is one.
__device__ inline float residual_of(const Work& work, float target, int index) {
    const float own = target * work.weight;
    return work.child < 0 ? own : fmaxf(own - chosen_at(work, target, index), 0.0f);
}

// Calls visit(target, index) for the entries that the cuts keep, and end(chunk) after each chunk of a warp.
template <typename Visit, typename End>
__device__ inline void each_held(const Work& work, Visit visit, End end) {
    for (int chunk = threadIdx.x / WARP; chunk < work.chunks(); chunk += RESOLVE_WARPS) {
        if (key_from(work.tops()[chunk]) >= work.dist.key_min) {
            float entries[LANE_ENTRIES];
            work.row.load(chunk, entries);
#pragma unroll
            for (int j = 0; j < LANE_ENTRIES; ++j) {
                const int index = chunk * CHUNK + work.row.offset_of(j);
                const float scaled = work.divide(entries[j]);
                if (index < work.params.vocab && is_held(work.dist, scaled, index))
                    visit(exp_fast(scaled - work.dist.top) * work.dist.scale, index);
            }
        }
        end(chunk);
    }
}

// Shares of the chunks in the distribution of `work`, and their sum. Chunks whose top is cut have none.
__device__ __noinline__ double measure(const Work work) {
    double sum = 0;
    float part = 0;
    each_held(work, [&](float target, int index) { part += residual_of(work, target, index); }, [&](int chunk) {
        const double share = warp_sum(static_cast<double>(part));
        part = 0;
        if (threadIdx.x % WARP == 0) {
            work.masses()[chunk] = share;
            sum += share;
        }
    });
    return block_sum<RESOLVE_THREADS>(sum, shared_state().reals);  // its barriers also publish the shares
}

// Offset of the first greatest entry of a chunk that the cuts keep. Called by one warp.
__device__ __noinline__ int likeliest_of(const Work work, int chunk) {
    float entries[LANE_ENTRIES];
    work.row.load_run(chunk, entries);
    u32 key = 0, at = CHUNK;
    for (int j = LANE_ENTRIES - 1; j >= 0; --j) {
        const int offset = work.row.run_of(j), index = chunk * CHUNK + offset;
        const float scaled = work.divide(entries[j]);
        if (index >= work.params.vocab || !is_held(work.dist, scaled, index) || key_from(scaled) < key) continue;
        key = key_from(scaled);
        at = static_cast<u32>(offset);
    }
    const u32 best = warp_max(key);
    at = warp_min(key == best ? at : CHUNK);
    return at < CHUNK ? static_cast<int>(at) : 0;
}

// First entry of the chunk whose running sum exceeds `rest`; the last one with mass when rounding leaves none,
// and the likeliest where the chunk's residual was rounding error alone. Called by one warp.
__device__ __noinline__ int draw_in_chunk(const Work work, int chunk, double rest) {
    float entries[LANE_ENTRIES];
    work.row.load_run(chunk, entries);
    const int base = chunk * CHUNK + work.row.run_of(0);
    double own = 0;
#pragma unroll
    for (int j = 0; j < LANE_ENTRIES; ++j) {
        const float scaled = work.divide(entries[j]);
        const bool is_inside = base + j < work.params.vocab && is_held(work.dist, scaled, base + j);
        entries[j] = is_inside ? residual_of(work, expf(scaled - work.dist.top) * work.dist.scale, base + j) : 0;
        own += entries[j];
    }
    double upto = warp_scan(own) - own;
    u32 first = CHUNK, last = 0;  // `last`: one past the last with mass
#pragma unroll
    for (int j = 0; j < LANE_ENTRIES; ++j) {
        const u32 offset = static_cast<u32>(work.row.run_of(j));
        const double before = upto;
        upto += entries[j];
        if (upto > before) last = offset + 1;
        // Sums of other lanes may exceed `rest` already, so entries without mass are excluded explicitly.
        if (entries[j] > 0 && upto > rest && first == CHUNK) first = offset;
    }
    first = warp_min(first);
    last = warp_max(last);
    if (first == CHUNK && last == 0) return chunk * CHUNK + likeliest_of(work, chunk);
    return chunk * CHUNK + static_cast<int>(first < CHUNK ? first : last - 1);
}

struct Drawn {
    bool is_mine;  // whether this warp has the token; exactly one warp of the block does
    int token;
};

// First entry whose cumulative share exceeds uniform * total (`core.sampling.draw`).
__device__ inline Drawn draw(const Work& work, const double* shares, float uniform) {
    Shared& shared = shared_state();
    const int chunks = work.chunks(), lane = static_cast<int>(threadIdx.x) % WARP;
    if (threadIdx.x == 0) {
        shared.chunk = chunks;
        shared.count = 0;
    }
    double own = 0, total;
    for (int chunk = work.run_start(); chunk < work.run_end(); ++chunk) own += shares[chunk];
    double upto = block_scan<RESOLVE_THREADS>(own, shared.reals, total);
    const double bound = static_cast<double>(uniform) * total;
    double before = 0;
    int mine = chunks, last = 0;  // `last`: one past the last chunk with mass
    for (int chunk = work.run_start(); chunk < work.run_end(); ++chunk) {
        const double share = shares[chunk];
        if (share > 0) {
            last = chunk + 1;
            if (mine == chunks && upto + share > bound) {
                mine = chunk;
                before = upto;
            }
        }
        upto += share;
    }
    const int first = static_cast<int>(warp_min(static_cast<u32>(mine)));
    if (lane == 0 && first < chunks) atomicMin(&shared.chunk, first);
    __syncthreads();
    const int found = shared.chunk;
    if (found < chunks) {
        if (first != found) return {false, 0};
        const int owner = __ffs(static_cast<int>(__ballot_sync(ALL_LANES, mine == found))) - 1;
        return {true, draw_in_chunk(work, found, bound - __shfl_sync(ALL_LANES, before, owner))};
    }
    // Rounding has left none: the last entry with mass.
    last = static_cast<int>(warp_max(static_cast<u32>(last)));
    if (lane == 0) atomicMax(&shared.count, last);
    __syncthreads();
    if (threadIdx.x >= WARP) return {false, 0};
    return {true, draw_in_chunk(work, shared.count > 0 ? shared.count - 1 : 0, bound)};
}

// The first child that has the token drawn, for drafts without a distribution. Called by one warp.
__device__ inline int child_with(const SpecVerifyParams& params, int node, int token) {
    const Shared& shared = shared_state();
    u32 first = MAX_NODES;
    for (int child = static_cast<int>(threadIdx.x) % WARP; child < params.nodes; child += WARP) {
        const bool is_it = child > node && shared.parents[child] == node && shared.tokens[child] == token;
        if (is_it && first == MAX_NODES) first = static_cast<u32>(child);
    }
    first = warp_min(first);
    return first < MAX_NODES ? static_cast<int>(first) : -1;
}

// The target's probability of a token at a node, in double precision as the twin.
__device__ inline float target_at(const Work& work, int token) {
    const float scaled = work.divide(work.row.at(token));
    if (!is_held(work.dist, scaled, token)) return 0;
    const double mass = exp(static_cast<double>(scaled) - static_cast<double>(work.dist.top));
    return static_cast<float>(mass / work.dist.total);
}

// Draws from the distribution of `work`; all threads get the token. `has_shares`: `masses` are its shares.
__device__ __noinline__ Outcome draw_last(const Work work, bool has_shares) {
    Shared& shared = shared_state();
    if (!has_shares) measure(work);
    const i64 row = static_cast<i64>(work.slot) * work.params.nodes + work.node;
    const Drawn drawn = draw(work, work.masses(), work.params.uniforms[2 * row + 1]);
    if (drawn.is_mine && threadIdx.x % WARP == 0) shared.outcome = {-1, drawn.token};
    __syncthreads();
    return shared.outcome;
}

__device__ inline bool has_child(const SpecVerifyParams& params, int parent) {
    for (int node = parent + 1; node < params.nodes; ++node)
        if (shared_state().parents[node] == parent) return true;
    return false;
}

// Chooses the first child of the highest class of target / draft (`core.multi_path`); the node has one.
__device__ __noinline__ void choose_child(Work& work) {
    const SpecVerifyParams& params = work.params;
    Shared& shared = shared_state();
    if (threadIdx.x == 0) {
        int highest = -1;
        shared.num_children = 0;
        for (int child = work.node + 1; child < params.nodes; ++child) {
            if (shared.parents[child] != work.node) continue;
            const int token = shared.tokens[child];
            const float drafted = token >= 0 ? draft_at(params, work.slot, child, token) : 0.0f;
            const int own = ratio_class(token >= 0 ? target_at(work, token) : 0.0f, drafted);
            if (own > highest) shared.child = child;
            highest = max(highest, own);
            ++shared.num_children;
        }
    }
    __syncthreads();
    work.child = shared.child;
    work.num_children = shared.num_children;
    if (work.num_children == 1) return;
    float parts[NUM_CLASSES - 1] = {};
    double sums[NUM_CLASSES - 1] = {};
    const auto visit = [&](float target, int index) {
        const float drafted = draft_at(params, work.slot, work.child, index);
        const int own = ratio_class(target, drafted);
        for (int edge = 0; edge < own; ++edge) parts[edge] += drafted;
    };
    each_held(work, visit, [&](int) {
        for (int edge = 0; edge < NUM_CLASSES - 1; ++edge) {
            sums[edge] += static_cast<double>(parts[edge]);
            parts[edge] = 0;
        }
    });
    double below = 0;  // (upto^num - below^num) / (upto - below), of the draft's mass in lower classes
    for (int number = 0; number < NUM_CLASSES; ++number) {
        double upto = 1, factor = 0, power = 1;
        if (number < NUM_CLASSES - 1) upto = fmax(1 - block_sum<RESOLVE_THREADS>(sums[number], shared.reals), 0.0);
        for (int i = 0; i < work.num_children; ++i, power *= upto) factor = factor * below + power;
        if (threadIdx.x == 0) shared.factors[number] = static_cast<float>(factor);
        below = upto;
    }
    __syncthreads();
}

// Chooses a path of drawn drafts, and verifies it as a block (`core.acceptance.keep_block`): the longest prefix that
// passes is kept. `open(work)` makes the distribution of the node of `work` and its tops, and returns whether `masses` are
// its shares. All threads get how many drafts of `path` are kept, and the token after them.
template <typename Open>
__device__ inline Outcome verify_block(const SpecVerifyParams& params, int slot, Open open) {
    Shared& shared = shared_state();
    const float temperature = params.temperature[slot];
    const float* draws = params.uniforms + 2 * static_cast<i64>(slot) * params.nodes;
    if (threadIdx.x == 0) {
        shared.path[0] = 0;
        shared.weights[0] = 1;
    }
    __syncthreads();
    int last = 0;
    for (; shared.weights[last] > 0 && has_child(params, shared.path[last]); ++last) {
        Work work(params, slot, shared.path[last], temperature);
        open(work);
        choose_child(work);
        if (threadIdx.x == 0) {
            const int token = shared.tokens[work.child];
            double mass = 0, drafted = 0;
            if (token >= 0) {
                const float target = target_at(work, token);
                mass = static_cast<double>(shared.weights[last]) * static_cast<double>(target);
                drafted = static_cast<double>(chosen_at(work, target, token));
            }
            shared.path[last + 1] = work.child;
            shared.weights[last + 1] = mass < drafted ? static_cast<float>(mass / drafted) : mass > 0 ? 1.0f : 0.0f;
        }
        __syncthreads();
    }
    for (int at = last;; --at) {
        const int node = shared.path[at];
        Work work(params, slot, node, temperature);
        const double weight = static_cast<double>(shared.weights[at]), uniform = static_cast<double>(draws[2 * node]);
        if (at == last && at > 0 && !(uniform < weight)) continue;
        bool has_shares = open(work);
        if (at < last) {
            choose_child(work);
            work.weight = shared.weights[at];
            const double rest = measure(work);
            if (at > 0 && weight < 1 && !(uniform < rest / (rest + 1 - weight))) continue;
            has_shares = rest > 0;
            if (!has_shares) {
                work.weight = 1;
                work.child = -1;
            }
        }
        return {at, draw_last(work, has_shares).token};
    }
}

// The first top of the row, from the cells of a greedy slot or of a race.
template <typename Load>
__device__ inline Drawn first_top(const Work& work, Load load) {
    Shared& shared = shared_state();
    u32 key = 0, first = 0xffffffffu;
    for (int chunk = work.run_start(); chunk < work.run_end(); ++chunk) {
        const Cell cell = load(chunk);
        if (key_from(cell.top) > key) {
            key = key_from(cell.top);
            first = cell.index;
        }
    }
    const u32 best = warp_max(key);
    first = warp_min(key == best ? first : 0xffffffffu);
    const int lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP;
    if (lane == 0) {
        shared.keys[warp] = best;
        shared.firsts[warp] = first;
    }
    __syncthreads();
    if (warp > 0) return {false, 0};
    key = lane < RESOLVE_WARPS ? shared.keys[lane] : 0;
    const u32 top = warp_max(key);
    first = warp_min(lane < RESOLVE_WARPS && key == top ? shared.firsts[lane] : 0xffffffffu);
    return {true, first < static_cast<u32>(work.params.vocab) ? static_cast<int>(first) : 0};
}

// The winner of the race among the entries that the cuts keep.
__device__ __noinline__ Drawn race_held(const Work work, const float* draws) {
    Shared& shared = shared_state();
    const Race race(draws);
    u32 least = 0xffffffffu, at = 0xffffffffu;
    for (int chunk = threadIdx.x / WARP; chunk < work.chunks(); chunk += RESOLVE_WARPS) {
        if (key_from(work.tops()[chunk]) < work.dist.key_min) continue;
        float entries[LANE_ENTRIES];
        work.row.load(chunk, entries);
#pragma unroll
        for (int j = 0; j < LANE_ENTRIES; ++j) {
            const int index = chunk * CHUNK + work.row.offset_of(j);
            const float scaled = work.divide(entries[j]);
            if (index >= work.params.vocab || !is_held(work.dist, scaled, index)) continue;
            const u32 ratio = __float_as_uint(race.time(static_cast<u32>(index)) * expf(work.dist.top - scaled));
            if (ratio > least || (ratio == least && static_cast<u32>(index) > at)) continue;
            least = ratio;
            at = static_cast<u32>(index);
        }
    }
    const u32 best = warp_min(least);
    at = warp_min(least == best ? at : 0xffffffffu);
    const int lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP;
    __syncthreads();
    if (lane == 0) {
        shared.keys[warp] = best;
        shared.firsts[warp] = at;
    }
    __syncthreads();
    if (warp > 0) return {false, 0};
    least = lane < RESOLVE_WARPS ? shared.keys[lane] : 0xffffffffu;
    const u32 winner = warp_min(least);
    at = warp_min(lane < RESOLVE_WARPS && least == winner ? shared.firsts[lane] : 0xffffffffu);
    return {true, at < static_cast<u32>(work.params.vocab) ? static_cast<int>(at) : 0};
}

// The token of a slot without drafts beside others whose drafts were drawn: as where no slot has drafts. All threads get it.
__device__ inline int race_root(const Work& work) {
    Shared& shared = shared_state();
    const i64 row = static_cast<i64>(work.slot) * work.params.nodes;
    const Drawn drawn = race_held(work, work.params.uniforms + 2 * row);
    if (drawn.is_mine && threadIdx.x % WARP == 0) shared.outcome = {-1, drawn.token};
    __syncthreads();
    return shared.outcome.token;
}

// The token that a node draws, where drafts have no distribution or the slot is greedy.
template <typename Load>
__device__ inline Drawn draw_at_node(Work& work, Load load, bool is_sampled, const Cuts& cuts, const float* draws) {
    if (!is_sampled || !cuts.any()) return first_top(work, load);
    double own;
    const float top = weigh(work, load, own);
    dist_from(work, top, own, cuts);
    return race_held(work, draws);
}

}  // namespace speccompile
