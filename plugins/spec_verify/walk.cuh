// SPDX-License-Identifier: Apache-2.0
// SpecVerify, second part: draws, residuals, and which child of a node is kept.
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

// An entry's probability in the residual that the refused children leave.
__device__ inline float residual_of(const Work& work, float mass, int index) {
    for (int i = 0; i < work.num_refused; ++i) {
        const float left = mass - draft_at(work.params, work.slot, shared_state().refused[i], index);
        mass = left > 0 ? left * shared_state().unscale[i] : 0;
    }
    return mass;
}

// Shares of the chunks in the distribution of `work`, and their sum. Chunks whose top is cut have none.
__device__ __noinline__ double measure(const Work work, double* shares) {
    double sum = 0;
    for (int chunk = threadIdx.x / WARP; chunk < work.chunks(); chunk += RESOLVE_WARPS) {
        double share = 0;
        if (key_from(work.tops()[chunk]) >= work.dist.key_min) {
            float entries[LANE_ENTRIES];
            work.row.load(chunk, entries);
            float part = 0;
#pragma unroll
            for (int j = 0; j < LANE_ENTRIES; ++j) {
                const int index = chunk * CHUNK + work.row.offset_of(j);
                const float scaled = work.divide(entries[j]);
                if (index < work.params.vocab && is_held(work.dist, scaled, index))
                    part += residual_of(work, exp_fast(scaled - work.dist.top) * work.dist.scale * work.weight, index);
            }
            share = warp_sum(static_cast<double>(part));
        }
        if (threadIdx.x % WARP == 0) {
            shares[chunk] = share;
            sum += share;
        }
    }
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
        entries[j] = is_inside ? residual_of(work, expf(scaled - work.dist.top) * work.dist.scale * work.weight, base + j) : 0;
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

// Subtracts the draft distribution of a refused child from that of `work` (`core.acceptance.residual`), or does nothing
// where no mass would be left. Returns the mass; above 0, `masses` now hold the shares.
__device__ inline double refuse(Work& work, int child) {
    Shared& shared = shared_state();
    if (threadIdx.x == 0) {
        shared.refused[work.num_refused] = child;
        shared.unscale[work.num_refused] = 1;
    }
    __syncthreads();
    ++work.num_refused;
    const double left = measure(work, shared.residual);
    if (!(left > 0)) {
        --work.num_refused;
        return 0;
    }
    if (threadIdx.x == 0) shared.unscale[work.num_refused - 1] = static_cast<float>(1.0 / left);
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += RESOLVE_THREADS)
        work.masses()[chunk] = shared.residual[chunk] / left;
    __syncthreads();
    return left;
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
    if (!has_shares) measure(work, work.masses());
    const i64 row = static_cast<i64>(work.slot) * work.params.nodes + work.node;
    const Drawn drawn = draw(work, work.masses(), work.params.uniforms[2 * row + 1]);
    if (drawn.is_mine && threadIdx.x % WARP == 0) shared.outcome = {-1, drawn.token};
    __syncthreads();
    return shared.outcome;
}

// Children are tried in order, each against the residual that its refused siblings leave. All threads get the outcome.
// `has_shares`: `masses` are the shares of the distribution.
__device__ __noinline__ Outcome decide_by_draft_probs(Work work, bool has_shares) {
    const SpecVerifyParams& params = work.params;
    Shared& shared = shared_state();
    const i64 base = static_cast<i64>(work.slot) * params.nodes;
    for (int child = work.node + 1; child < params.nodes; ++child) {
        if (shared.parents[child] != work.node) continue;
        if (threadIdx.x == 0) {
            const int token = shared.tokens[child];
            float own = 0, drafted = 0;
            if (token >= 0) {
                own = residual_of(work, target_at(work, token), token);
                drafted = draft_at(params, work.slot, child, token);
            }
            shared.is_kept = __fmul_rn(params.uniforms[2 * (base + child)], drafted) < own;
        }
        __syncthreads();
        const bool is_kept = shared.is_kept != 0;
        __syncthreads();
        if (is_kept) return {child, 0};
        has_shares |= refuse(work, child) > 0;
    }
    return draw_last(work, has_shares);
}

// The last node of a slot's chain; -1 where its nodes branch, or its root is marked, as a drawn tree may happen to be a
// chain. Every thread finds it alone.
__device__ inline int chain_end(const SpecVerifyParams& params, int slot) {
    const Shared& shared = shared_state();
    const int nodes = params.nodes;
    int end = 0;
    while (end + 1 < nodes && shared.parents[end + 1] == end) ++end;
    if (end > 0 && params.uniforms[2 * static_cast<i64>(slot) * nodes] < 0) return -1;
    for (int node = 2; node < nodes; ++node)
        if (shared.parents[node] >= 0 && shared.parents[node] < node - 1) return -1;
    return end;
}

// Verifies a drawn chain as a block (`core.acceptance.keep_block`): the longest prefix that passes is kept. `find(work)`
// makes the distribution of the node of `work`, `open(work)` its tops as well and returns whether `masses` are its shares.
// All threads get the last node that is kept, and the token after it.
template <typename Find, typename Open>
__device__ inline Outcome verify_block(const SpecVerifyParams& params, int slot, int end, Find find, Open open) {
    Shared& shared = shared_state();
    const float temperature = params.temperature[slot];
    const float* draws = params.uniforms + 2 * static_cast<i64>(slot) * params.nodes;
    if (threadIdx.x == 0) shared.weights[0] = 1;
    __syncthreads();
    for (int node = 0; node < end; ++node) {
        Work work(params, slot, node, temperature);
        find(work);
        if (threadIdx.x == 0) {
            const int token = shared.tokens[node + 1];
            double mass = 0, drafted = 0;
            if (token >= 0) {
                mass = static_cast<double>(shared.weights[node]) * static_cast<double>(target_at(work, token));
                drafted = static_cast<double>(draft_at(params, slot, node + 1, token));
            }
            shared.weights[node + 1] = mass < drafted ? static_cast<float>(mass / drafted) : mass > 0 ? 1.0f : 0.0f;
        }
        __syncthreads();
    }
    for (int node = end;; --node) {
        Work work(params, slot, node, temperature);
        const double weight = static_cast<double>(shared.weights[node]), uniform = static_cast<double>(draws[2 * node]);
        if (node == end && node > 0 && !(uniform < weight)) continue;
        bool has_shares = open(work);
        if (node < end) {
            work.weight = shared.weights[node];
            const double rest = refuse(work, node + 1);
            if (node > 0 && weight < 1 && !(uniform < rest / (rest + 1 - weight))) continue;
            has_shares |= rest > 0;
        }
        const Outcome outcome = draw_last(work, has_shares);
        return {node, outcome.token};
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
