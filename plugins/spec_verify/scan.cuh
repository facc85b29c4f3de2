// SPDX-License-Identifier: Apache-2.0
// SpecVerify, first part: one pass over the logits. A warp reduces chunks by itself, so nothing waits for another warp.
#pragma once

#include "spec_verify/layout.cuh"

namespace speccompile {

// Top of a chunk, and beside it the offset of the first entry that has it.
template <typename T, bool IS_VECTOR>
__device__ inline void reduce_greedy(int chunk, const float (&entries)[LANE_ENTRIES], float& top, double& mass) {
    int at = Row<T>::template place_of<IS_VECTOR>(0);
    top = entries[0];
#pragma unroll
    for (int j = 1; j < LANE_ENTRIES; ++j) {
        if (entries[j] > top) {
            top = entries[j];
            at = Row<T>::template place_of<IS_VECTOR>(j);
        }
    }
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, top, step);
        const int other_at = __shfl_xor_sync(ALL_LANES, at, step);
        if (other > top || (other == top && other_at < at)) {
            top = other;
            at = other_at;
        }
    }
    mass = chunk * CHUNK + at;
}

// Top of a chunk of scaled logits, and the sum of exp(scaled - top). float32 within a lane, double across lanes.
__device__ inline void reduce_sampled(float (&entries)[LANE_ENTRIES], const Divider& divide, float& top, double& mass) {
    top = minus_infinity();
#pragma unroll
    for (int j = 0; j < LANE_ENTRIES; ++j) {
        entries[j] = divide(entries[j]);
        top = fmaxf(top, entries[j]);
    }
    top = warp_max(top);
    float sum = 0;
    if (top > minus_infinity()) {
#pragma unroll
        for (int j = 0; j < LANE_ENTRIES; ++j) sum += __expf(entries[j] - top);
    }
    mass = warp_sum(static_cast<double>(sum));
}

// CHUNKS_IN_FLIGHT chunks of a row from `first` on: all reads, then the reductions.
template <bool IS_VECTOR, typename T>
__device__ inline void scan_chunks(
    const Row<T>& row, int first, int stride, int count, float temperature, float* tops, double* masses) {
    typename Row<T>::Raw raw[CHUNKS_IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < CHUNKS_IN_FLIGHT; ++k) raw[k] = row.template fetch<IS_VECTOR>(first + k * stride);
    const bool is_sampled = temperature > 0;
    const Divider divide(is_sampled ? temperature : 1.0f);
#pragma unroll
    for (int k = 0; k < CHUNKS_IN_FLIGHT; ++k) {
        const int chunk = first + k * stride;
        if (chunk >= count) break;
        float entries[LANE_ENTRIES];
        row.template widen<IS_VECTOR>(raw[k], chunk, entries);
        float top;
        double mass;
        if (is_sampled) {
            reduce_sampled(entries, divide, top, mass);
        } else {
            reduce_greedy<T, IS_VECTOR>(chunk, entries, top, mass);
        }
        if (threadIdx.x % WARP == 0) {
            tops[chunk] = top;
            masses[chunk] = mass;
        }
    }
}

template <typename T>
__device__ inline void scan_row(
    const Row<T>& row, int first, int stride, int count, float temperature, float* tops, double* masses) {
    if (row.is_vector) {
        scan_chunks<true>(row, first, stride, count, temperature, tops, masses);
    } else {
        scan_chunks<false>(row, first, stride, count, temperature, tops, masses);
    }
}

// Grid: one warp for every CHUNKS_IN_FLIGHT chunks of every row.
template <typename T>
__device__ inline void scan(const SpecVerifyParams& params) {
    const Workspace space(params);
    const i64 thread = static_cast<i64>(blockIdx.x) * SCAN_THREADS + threadIdx.x;
    // The second launch counts its blocks: it finds the counters at zero, whatever the workspace held.
    if (thread < params.batch) space.counters[thread] = 0;
    if (params.d2t != nullptr && has_laws(params)) {
        for (i64 j = thread; j < params.draft_vocab; j += static_cast<i64>(gridDim.x) * SCAN_THREADS) {
            const i64 token = params.d2t[j];
            if (token >= 0 && token < params.vocab) space.inverse[token] = static_cast<u32>(j);
        }
    }
    const int count = num_chunks(params.vocab);
    const int tasks = (count + CHUNKS_IN_FLIGHT - 1) / CHUNKS_IN_FLIGHT;
    const i64 task = thread / WARP, row = task / tasks;
    if (row >= static_cast<i64>(params.batch) * params.nodes) return;
    const int slot = static_cast<int>(row / params.nodes);
    if (!is_reachable(params, slot, static_cast<int>(row % params.nodes))) return;
    const int first = static_cast<int>(task % tasks) * CHUNKS_IN_FLIGHT;
    scan_row(Row<T>(params, row), first, 1, count, params.temperature[slot], space.tops + row * count,
             space.masses + row * count);
}

}  // namespace speccompile
