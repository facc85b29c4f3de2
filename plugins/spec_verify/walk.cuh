// SPDX-License-Identifier: Apache-2.0
// SpecVerify, second part: draws, residuals, and which child of a node is kept.
#pragma once

#include "spec_verify/law.cuh"

namespace speccompile {

// The draft's probability of a target token at a node.
__device__ inline float draft_at(const SpecVerifyParams& params, int slot, int node, i64 token) {
    i64 place = token;
    if (params.d2t != nullptr) {
        // The workspace is not cleared: an entry counts if its draft token points back.
        place = Workspace(params).inverse[token];
        if (place >= params.draft_vocab || params.d2t[place] != token) return 0;
    }
    if (place < 0 || place >= params.draft_vocab) return 0;
    return params.draft_probs[(static_cast<i64>(slot) * params.nodes + node) * params.draft_vocab + place];
}

// The law's probability of an entry, less what the refused children took. IS_EXACT: in double, as the twin.
template <bool IS_EXACT>
__device__ inline float probability(const Work& work, float scaled, int index) {
    const Law& law = work.law;
    const u32 key = key_from(scaled);
    if (key < law.key_min || (key == law.key_min && static_cast<u32>(index) > law.last_tie)) return 0;
    float mass = IS_EXACT
        ? static_cast<float>(exp(static_cast<double>(scaled) - static_cast<double>(law.top)) / law.total)
        : __expf(scaled - law.top) * law.scale;
    for (int i = 0; i < work.num_refused; ++i) {
        const float left = mass - draft_at(work.params, work.slot, work.shared.refused[i], index);
        mass = left > 0 ? left * work.shared.unscale[i] : 0;
    }
    return mass;
}

// Shares of the chunks under the law of `work`, and their sum. Chunks whose top is cut hold nothing.
__device__ __noinline__ double measure(const Work& work, double* shares) {
    double sum = 0;
    for (int chunk = threadIdx.x / WARP; chunk < work.chunks(); chunk += SETTLE_WARPS) {
        double share = 0;
        if (key_from(work.tops[chunk]) >= work.law.key_min) {
            float entries[LANE_ENTRIES];
            work.row.load(chunk, entries);
            float part = 0;
#pragma unroll
            for (int j = 0; j < LANE_ENTRIES; ++j) {
                const int index = chunk * CHUNK + work.row.offset_of(j);
                if (index < work.params.vocab) part += probability<false>(work, work.divide(entries[j]), index);
            }
            share = warp_sum(static_cast<double>(part));
        }
        if (threadIdx.x % WARP == 0) {
            shares[chunk] = share;
            sum += share;
        }
    }
    return block_sum<SETTLE_THREADS>(sum, work.shared.reals);  // its barriers also publish the shares
}

// First entry of the chunk whose running sum exceeds `rest`; the last one with mass when rounding leaves none.
// Called by one warp.
__device__ inline void draw_in_chunk(const Work& work, int chunk, double rest) {
    Shared& shared = work.shared;
    float entries[LANE_ENTRIES];
    work.row.load(chunk, entries);
#pragma unroll
    for (int j = 0; j < LANE_ENTRIES; ++j) {
        const int offset = work.row.offset_of(j), index = chunk * CHUNK + offset;
        shared.entries[offset] =
            index < work.params.vocab ? probability<true>(work, work.divide(entries[j]), index) : 0;
    }
    __syncwarp();
    const int lane = threadIdx.x % WARP;
    double own = 0;
    for (int j = 0; j < LANE_ENTRIES; ++j) own += shared.entries[lane * LANE_ENTRIES + j];
    double upto = warp_scan(own) - own;
    int first = CHUNK, last = -1;
    for (int j = 0; j < LANE_ENTRIES; ++j) {
        const int offset = lane * LANE_ENTRIES + j;
        const double before = upto;
        upto += shared.entries[offset];
        if (upto > before) last = offset;
        if (upto > rest && first == CHUNK) first = offset;
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const int other_first = __shfl_xor_sync(ALL_LANES, first, step);
        const int other_last = __shfl_xor_sync(ALL_LANES, last, step);
        first = other_first < first ? other_first : first;
        last = other_last > last ? other_last : last;
    }
    const int offset = first < CHUNK ? first : last > 0 ? last : 0;
    if (lane == 0) shared.drawn = chunk * CHUNK + offset;
}

// First entry whose cumulative share exceeds uniform * total (`core.sampling.draw`).
__device__ __noinline__ int draw(const Work& work, const double* shares, float uniform) {
    Shared& shared = work.shared;
    const int chunks = work.chunks(), run = (chunks + SETTLE_THREADS - 1) / SETTLE_THREADS;
    const int start = threadIdx.x * run, end = start + run < chunks ? start + run : chunks;
    if (threadIdx.x == 0) {
        shared.chunk = chunks;
        shared.last_chunk = 0;
    }
    double own = 0, total;
    for (int chunk = start; chunk < end; ++chunk) own += shares[chunk];
    double upto = block_scan<SETTLE_THREADS>(own, shared.reals, total);
    const double bound = static_cast<double>(uniform) * total;
    double before = 0;
    int mine = chunks;
    for (int chunk = start; chunk < end; ++chunk) {
        if (shares[chunk] > 0) {
            atomicMax(&shared.last_chunk, chunk);
            if (mine == chunks && upto + shares[chunk] > bound) {
                mine = chunk;
                before = upto;
            }
        }
        upto += shares[chunk];
    }
    if (mine < chunks) atomicMin(&shared.chunk, mine);
    __syncthreads();
    if (mine < chunks && mine == shared.chunk) shared.before = before;
    __syncthreads();
    if (threadIdx.x < WARP) {
        const bool is_found = shared.chunk < chunks;
        draw_in_chunk(work, is_found ? shared.chunk : shared.last_chunk, is_found ? bound - shared.before : bound);
    }
    __syncthreads();
    const int drawn = shared.drawn;
    __syncthreads();
    return drawn;
}

// The first child that has the token drawn, for drafts that were not drawn from a law.
__device__ inline int child_with(const SpecVerifyParams& params, int slot, int node, int token) {
    const i64 base = static_cast<i64>(slot) * params.nodes;
    for (int child = node + 1; child < params.nodes; ++child)
        if (params.parents[base + child] == node && params.tokens[base + child] == token) return child;
    return -1;
}

// Takes the law of a refused child out of that of `work` (`core.acceptance.residual`), or leaves it where nothing is
// left. Returns whether `trial` now holds the shares.
__device__ inline bool refuse(Work& work, int child) {
    Shared& shared = work.shared;
    if (threadIdx.x == 0) {
        shared.refused[work.num_refused] = child;
        shared.unscale[work.num_refused] = 1;
    }
    __syncthreads();
    ++work.num_refused;
    const double left = measure(work, shared.trial);
    if (!(left > 0)) {
        --work.num_refused;
        return false;
    }
    if (threadIdx.x == 0) shared.unscale[work.num_refused - 1] = static_cast<float>(1.0 / left);
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += SETTLE_THREADS) {
        work.masses[chunk] = shared.trial[chunk] / left;
    }
    __syncthreads();
    return true;
}

// Children are tried in their order, each against the law that its refused siblings left.
// `has_shares`: `work.masses` are the shares of the law.
__device__ __noinline__ Outcome decide_by_laws(Work& work, bool has_shares) {
    const SpecVerifyParams& params = work.params;
    Shared& shared = work.shared;
    const i64 base = static_cast<i64>(work.slot) * params.nodes;
    for (int child = work.node + 1; child < params.nodes; ++child) {
        if (params.parents[base + child] != work.node) continue;
        if (threadIdx.x == 0) {
            const i64 token = params.tokens[base + child];
            float own = 0, drafted = 0;
            if (token >= 0 && token < params.vocab) {
                own = probability<true>(work, work.divide(work.row.at(static_cast<int>(token))), static_cast<int>(token));
                drafted = draft_at(params, work.slot, child, token);
            }
            shared.is_kept = __fmul_rn(params.uniforms[2 * (base + child)], drafted) < own;
        }
        __syncthreads();
        const bool is_kept = shared.is_kept != 0;
        __syncthreads();
        if (is_kept) return {child, 0};
        has_shares |= refuse(work, child);
    }
    if (!has_shares) measure(work, work.masses);
    return {-1, draw(work, work.masses, params.uniforms[2 * (base + work.node) + 1])};
}

// Index of the first top of the row, from the chunks' (greedy).
__device__ inline int first_top(const Work& work) {
    float top = minus_infinity();
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += SETTLE_THREADS) top = fmaxf(top, work.tops[chunk]);
    top = block_max<SETTLE_THREADS>(top, work.shared.floats);
    if (threadIdx.x == 0) work.shared.chunk = 0x7fffffff;
    __syncthreads();
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += SETTLE_THREADS)
        if (work.tops[chunk] == top) atomicMin(&work.shared.chunk, static_cast<int>(work.masses[chunk]));
    __syncthreads();
    const int index = work.shared.chunk;
    __syncthreads();
    return index < work.params.vocab ? index : 0;
}

// What becomes of a node, from the tops and masses of its row. Draft laws do not matter to a greedy slot: its law is
// one-hot, so a child is kept exactly if it has that token.
__device__ __noinline__ Outcome settle(Work& work) {
    const SpecVerifyParams& params = work.params;
    int token;
    if (params.temperature[work.slot] > 0) {
        bool has_shares = !settle_law(work);
        if (has_laws(params)) return decide_by_laws(work, has_shares);
        if (!has_shares) measure(work, work.masses);
        const i64 place = static_cast<i64>(work.slot) * params.nodes + work.node;
        token = draw(work, work.masses, params.uniforms[2 * place + 1]);
    } else {
        token = first_top(work);
    }
    return {child_with(params, work.slot, work.node, token), token};
}

}  // namespace speccompile
