// SPDX-License-Identifier: Apache-2.0
// SpecVerify: the acceptance rule behind a target's logits. See README.md beside this file.
// Two launches: `scan` reads the logits, `settle` resolves every node by its own block, and the last block of a slot
// walks the tree. `single` does all in one launch without workspace, one block a slot.

#include "spec_verify/scan.cuh"
#include "spec_verify/walk.cuh"

namespace speccompile {

__device__ inline void* dynamic_shared() {
#if defined(SPECCOMPILE_HOST)
    return host::machine.dynamic_shared.data();
#else
    extern __shared__ double dynamic_bytes[];
    return dynamic_bytes;
#endif
}

// One thread writes the verdict of a slot node by node.
struct Verdict {
    i64* path;
    int length = 0;

    __device__ void add(int node) {
        if (threadIdx.x == 0) path[length] = node;
        ++length;
    }
    __device__ void finish(const SpecVerifyParams& params, int slot, int token) const {
        if (threadIdx.x != 0) return;
        for (int i = length; i < params.nodes; ++i) path[i] = -1;
        params.num_accepted[slot] = length - 1;
        params.next_token[slot] = token;
    }
};

__device__ inline void load_chunks(const Work& work, const Workspace& space, i64 row) {
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += SETTLE_THREADS) {
        work.tops[chunk] = space.tops[row * work.chunks() + chunk];
        work.masses[chunk] = space.masses[row * work.chunks() + chunk];
    }
    __syncthreads();
}

// The walk where drafts were drawn from laws: residuals are made at the nodes that are reached, nowhere else.
__device__ inline void walk_laws(const SpecVerifyParams& params, Shared& shared, float* tops, double* masses, int slot) {
    const Workspace space(params);
    Verdict verdict{params.path + static_cast<i64>(slot) * params.nodes};
    for (int node = 0; node >= 0;) {
        const i64 row = static_cast<i64>(slot) * params.nodes + node;
        Work work(params, shared, tops, masses, slot, node);
        load_chunks(work, space, row);
        work.law = *const_cast<const Law*>(space.laws + row);
        verdict.add(node);
        const Outcome outcome = decide_by_laws(work, false);
        node = outcome.child;
        if (node < 0) verdict.finish(params, slot, outcome.token);
        __syncthreads();
    }
}

__device__ inline void walk_outcomes(const SpecVerifyParams& params, int slot) {
    const Workspace space(params);
    Verdict verdict{params.path + static_cast<i64>(slot) * params.nodes};
    for (int node = 0; node >= 0;) {
        const Outcome outcome = space.outcomes[static_cast<i64>(slot) * params.nodes + node];
        verdict.add(node);
        node = outcome.child;
        if (node < 0) verdict.finish(params, slot, outcome.token);
    }
}

// Grid: one block a row.
__device__ inline void settle_rows(const SpecVerifyParams& params, Shared& shared) {
    const int chunks = num_chunks(params.vocab);
    double* masses = static_cast<double*>(dynamic_shared());
    float* tops = reinterpret_cast<float*>(masses + chunks);
    const i64 row = blockIdx.x;
    const int slot = static_cast<int>(row / params.nodes), node = static_cast<int>(row % params.nodes);
    const bool is_by_laws = has_laws(params) && params.temperature[slot] > 0;
    const Workspace space(params);
    if (is_reachable(params, slot, node)) {
        Work work(params, shared, tops, masses, slot, node);
        load_chunks(work, space, row);
        if (is_by_laws) {
            settle_law(work);
            if (threadIdx.x == 0) space.laws[row] = work.law;
        } else {
            const Outcome outcome = settle(work);
            if (threadIdx.x == 0) space.outcomes[row] = outcome;
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) shared.is_last_block = atomicAdd(&space.counters[slot], 1u) == static_cast<u32>(params.nodes - 1);
    __syncthreads();
    if (!shared.is_last_block) return;
    __threadfence();
    if (is_by_laws) {
        walk_laws(params, shared, tops, masses, slot);
    } else {
        walk_outcomes(params, slot);
    }
}

__device__ inline void scan_any(const Work& work, int first) {
    const SpecVerifyParams& params = work.params;
    const auto scan_as = [&](const auto& row) {
        scan_row(row, first, SETTLE_WARPS, work.chunks(), params.temperature[work.slot], work.tops, work.masses);
    };
    if (params.dtype == Dtype::F16) return scan_as(Row<Float16>(params, work.row.row));
    if (params.dtype == Dtype::BF16) return scan_as(Row<BFloat16>(params, work.row.row));
    scan_as(Row<float>(params, work.row.row));
}

// Grid: one block a slot, which reads the rows that it reaches. No d2t, no workspace.
__device__ inline void verify_slot(const SpecVerifyParams& params, Shared& shared) {
    const int chunks = num_chunks(params.vocab), slot = blockIdx.x;
    double* masses = static_cast<double*>(dynamic_shared());
    float* tops = reinterpret_cast<float*>(masses + chunks);
    Verdict verdict{params.path + static_cast<i64>(slot) * params.nodes};
    for (int node = 0; node >= 0;) {
        Work work(params, shared, tops, masses, slot, node);
        for (int first = threadIdx.x / WARP; first < chunks; first += SETTLE_WARPS * CHUNKS_IN_FLIGHT)
            scan_any(work, first);
        __syncthreads();
        verdict.add(node);
        const Outcome outcome = settle(work);
        node = outcome.child;
        if (node < 0) verdict.finish(params, slot, outcome.token);
        __syncthreads();
    }
}

}  // namespace speccompile

extern "C" __global__ void __launch_bounds__(speccompile::SETTLE_THREADS, 1)
    spec_verify_settle(const __grid_constant__ speccompile::SpecVerifyParams params) {
    __shared__ speccompile::Shared shared;
    speccompile::settle_rows(params, shared);
}

// Arguments one by one, inputs, sizes, outputs: the order in which TensorRT's ahead-of-time Python plugins give them.
extern "C" __global__ void __launch_bounds__(speccompile::SETTLE_THREADS, 1) spec_verify_single(
    const void* logits, const long long* tokens, const long long* parents, const float* draft_probs,
    const float* uniforms, const float* temperature, const long long* top_k, const float* top_p, int batch, int nodes,
    int vocab, int draft_vocab, int dtype, long long* path, long long* num_accepted, long long* next_token) {
    __shared__ speccompile::Shared shared;
    const speccompile::SpecVerifyParams params = {
        logits, tokens, parents, draft_probs, uniforms, temperature, top_k, top_p, nullptr, path, num_accepted,
        next_token, nullptr, batch, nodes, vocab, draft_vocab, static_cast<speccompile::Dtype>(dtype)};
    speccompile::verify_slot(params, shared);
}

#define SPECCOMPILE_SCAN(SUFFIX, TYPE)                                                            \
    extern "C" __global__ void __launch_bounds__(speccompile::SCAN_THREADS)                       \
        spec_verify_scan_##SUFFIX(const __grid_constant__ speccompile::SpecVerifyParams params) { \
        speccompile::scan<TYPE>(params);                                                          \
    }

SPECCOMPILE_SCAN(f32, float)
SPECCOMPILE_SCAN(f16, speccompile::Float16)
SPECCOMPILE_SCAN(bf16, speccompile::BFloat16)
