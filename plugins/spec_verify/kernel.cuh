// SPDX-License-Identifier: Apache-2.0
// SpecVerify: the acceptance rule on a target's logits. See README.md in this folder.
// Two launches: `scan` reads the logits, `resolve` decides every node by its own block, and the last block of a slot
// walks the tree.

#include "spec_verify/scan.cuh"
#include "spec_verify/walk.cuh"

namespace speccompile {

// One thread writes the verdict of a slot node by node.
struct Verdict {
    i64* path;
    int length = 0;

    __device__ void add(int node) {
        if (threadIdx.x == 0) path[length] = node;
        ++length;
    }
    // The chosen path up to its node `last`.
    __device__ void keep(int last) {
        while (length <= last) add(shared_state().path[length]);
    }
    __device__ void finish(const SpecVerifyParams& params, int slot, int token) const {
        if (threadIdx.x != 0) return;
        for (int i = length; i < params.nodes; ++i) path[i] = -1;
        params.num_accepted[slot] = length - 1;
        params.next_token[slot] = token;
    }
};

// The tree of a slot, in shared memory; a barrier publishes it.
__device__ inline void load_tree(const SpecVerifyParams& params, int slot) {
    Shared& shared = shared_state();
    for (int node = threadIdx.x; node < params.nodes; node += RESOLVE_THREADS) {
        const i64 row = static_cast<i64>(slot) * params.nodes + node;
        const i64 parent = params.parents[row], token = params.tokens[row];
        shared.parents[node] = parent >= 0 && parent < node ? static_cast<int>(parent) : -1;
        shared.tokens[node] = token >= 0 && token < params.vocab ? static_cast<int>(token) : -1;
    }
}

// Reads the distribution of a row and its tops; `masses` become the shares where nothing is cut, and it returns whether.
__device__ inline bool open_row(Work& work) {
    const Workspace space(work.params);
    const i64 row = static_cast<i64>(work.slot) * work.params.nodes + work.node;
    work.dist = fresh(space.dists + row);
    const bool is_whole = work.dist.key_min == 0;
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += RESOLVE_THREADS) {
        const Cell cell = space.cells[row * work.chunks() + chunk];
        work.tops()[chunk] = cell.top;
        if (is_whole)
            work.masses()[chunk] = cell.mass > 0 ? cell.mass * expf(cell.top - work.dist.top) / work.dist.total : 0.0;
    }
    __syncthreads();
    return is_whole;
}

// Whether any node of a slot is a draft, reached or not.
__device__ inline bool has_drafts(const SpecVerifyParams& params) {
    for (int node = 1; node < params.nodes; ++node)
        if (shared_state().parents[node] >= 0) return true;
    return false;
}

// The verdict where drafts were drawn from distributions, or would be: then there are none, and the root is raced.
template <typename Open>
__device__ inline void verify_drawn(const SpecVerifyParams& params, int slot, Open open) {
    Verdict verdict{params.path + static_cast<i64>(slot) * params.nodes};
    if (has_drafts(params)) {
        const Outcome outcome = verify_block(params, slot, open);
        verdict.keep(outcome.child);
        verdict.finish(params, slot, outcome.token);
    } else {
        Work work(params, slot, 0, params.temperature[slot]);
        open(work);
        verdict.add(0);
        verdict.finish(params, slot, race_root(work));
    }
}

// The walk where every row has its outcome already, by one warp.
__device__ inline void walk_outcomes(const SpecVerifyParams& params, int slot) {
    const Workspace space(params);
    Shared& shared = shared_state();
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    for (int node = lane; node < params.nodes; node += WARP)
        shared.outcomes[node] = fresh(space.outcomes + static_cast<i64>(slot) * params.nodes + node);
    __syncwarp();
    i64* path = params.path + static_cast<i64>(slot) * params.nodes;
    int length = 0;
    Outcome outcome;
    for (int node = 0; node >= 0; node = outcome.child) {  // every lane does the same
        outcome = shared.outcomes[node];
        if (lane == 0) path[length] = node;
        ++length;
    }
    for (int i = length + lane; i < params.nodes; i += WARP) path[i] = -1;
    if (lane == 0) {
        params.num_accepted[slot] = length - 1;
        params.next_token[slot] = outcome.token;
    }
}

// Counts the finished blocks of a slot; the last one sees what the calling thread wrote before.
__device__ inline bool is_last_of(const SpecVerifyParams& params, int slot) {
    __threadfence();
    return atomicAdd(&Workspace(params).counters[slot], 1u) == static_cast<u32>(params.nodes - 1);
}

// Grid: one block per row.
__device__ inline void resolve_rows(const SpecVerifyParams& params) {
    Shared& shared = shared_state();
    const i64 row = blockIdx.x;
    const int slot = static_cast<int>(row / params.nodes), node = static_cast<int>(row % params.nodes);
    // All reads of the slot are issued at once: each takes as long as the arithmetic of a step below.
    const float temperature = params.temperature[slot];
    const Cuts cuts(params, slot);
    const bool is_reached = is_reachable(params, slot, node);
    load_tree(params, slot);
    const Workspace space(params);
    const Cell* cells = space.cells + row * num_chunks(params.vocab);
    const auto load = [&](int chunk) { return cells[chunk]; };
    Work work(params, slot, node, temperature);
    if (has_draft_probs(params) && is_hot(temperature)) {
        if (is_reached) {
            double own;
            const float top = weigh(work, load, own);
            const Dist dist = dist_from(work, top, own, cuts);
            if (threadIdx.x == 0) space.dists[row] = dist;
        }
        if (threadIdx.x == 0) shared.is_last_block = is_last_of(params, slot);
        __syncthreads();
        if (!shared.is_last_block) return;
        __threadfence();
        verify_drawn(params, slot, open_row);
        return;
    }
    bool is_mine = threadIdx.x < WARP;
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    if (is_reached) {
        const Drawn drawn = draw_at_node(work, load, is_hot(temperature), cuts, params.uniforms + 2 * row);
        is_mine = drawn.is_mine;
        if (is_mine) {
            const int child = child_with(params, node, drawn.token);
            if (lane == 0) space.outcomes[row] = {child, drawn.token};
        }
    }
    if (!is_mine) return;
    const int is_last = __shfl_sync(ALL_LANES, lane == 0 ? static_cast<int>(is_last_of(params, slot)) : 0, 0);
    if (is_last == 0) return;
    __threadfence();
    walk_outcomes(params, slot);
}

}  // namespace speccompile

extern "C" __global__ void __launch_bounds__(speccompile::RESOLVE_THREADS, 1)
    spec_verify_resolve(const __grid_constant__ speccompile::SpecVerifyParams params) {
    speccompile::resolve_rows(params);
}

#define SPECCOMPILE_SCAN(SUFFIX, TYPE)                                                            \
    extern "C" __global__ void __launch_bounds__(speccompile::SCAN_THREADS)                       \
        spec_verify_scan_##SUFFIX(const __grid_constant__ speccompile::SpecVerifyParams params) { \
        speccompile::scan<TYPE>(params);                                                          \
    }

SPECCOMPILE_SCAN(f32, float)
SPECCOMPILE_SCAN(f16, speccompile::Float16)
SPECCOMPILE_SCAN(bf16, speccompile::BFloat16)
