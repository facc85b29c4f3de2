// SPDX-License-Identifier: Apache-2.0
// SpecVerify, first part: one pass over the logits. A warp reduces chunks by itself, so that no warp waits for another.
#pragma once

#include "spec_verify/layout.cuh"

namespace speccompile {

// Top of a chunk, and the index of the first entry that has it.
template <typename T, bool IS_VECTOR>
__device__ inline Cell reduce_greedy(int chunk, const float (&entries)[LANE_ENTRIES]) {
    float top = entries[0];
#pragma unroll
    for (int j = 1; j < LANE_ENTRIES; ++j) top = fmaxf(top, entries[j]);
    Cell cell;
    cell.top = warp_max(top);
    u32 at = 0xffffffffu;
#pragma unroll
    for (int j = LANE_ENTRIES - 1; j >= 0; --j)
        if (entries[j] == cell.top) at = static_cast<u32>(chunk * CHUNK + Row<T>::template offset_of<IS_VECTOR>(j));
    cell.index = warp_min(at);
    return cell;
}

// Top of a chunk, not scaled yet, and the sum of exp(scaled - scaled top).
__device__ inline Cell reduce_sampled(const float (&entries)[LANE_ENTRIES], const Quotient& scaled) {
    float top = entries[0];
#pragma unroll
    for (int j = 1; j < LANE_ENTRIES; ++j) top = fmaxf(top, entries[j]);
    Cell cell;
    cell.top = warp_max(top);
    const float scaled_top = scaled(cell.top);
    float mass = 0;
#pragma unroll
    for (int j = 0; j < LANE_ENTRIES; ++j) mass += exp_fast(scaled(entries[j]) - scaled_top);
    mass = warp_sum(mass);
    cell.mass = cell.top > minus_infinity() ? mass : 0;
    return cell;
}

// CHUNKS_IN_FLIGHT chunks of a row from `first` on: all reads, then the reductions. Lane k keeps the k-th cell; division
// keeps the order, so only the tops are divided exactly.
template <bool IS_VECTOR, typename T>
__device__ inline void scan_chunks(const Row<T>& row, int first, int stride, int count, float temperature, Cell* cells) {
    typename Row<T>::Raw raw[CHUNKS_IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < CHUNKS_IN_FLIGHT; ++k) raw[k] = row.template fetch<IS_VECTOR>(first + k * stride);
    const bool is_sampled = is_hot(temperature);
    const Divider divide(is_sampled ? temperature : 1.0f);
    const Quotient scaled(divide);
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    Cell own = {};
#pragma unroll
    for (int k = 0; k < CHUNKS_IN_FLIGHT; ++k) {
        const int chunk = first + k * stride;
        if (chunk >= count) break;
        float entries[LANE_ENTRIES];
#pragma unroll
        for (int j = 0; j < LANE_ENTRIES; ++j) entries[j] = float_from(raw[k].values[j]);
        const Cell cell =
            is_sampled ? reduce_sampled(entries, scaled) : reduce_greedy<T, IS_VECTOR>(chunk, entries);
        if (lane == k) own = cell;
    }
    const int cell_index = first + lane * stride;
    if (lane >= CHUNKS_IN_FLIGHT || cell_index >= count) return;
    own.top = divide(own.top);
    cells[cell_index] = own;
}

template <typename T>
__device__ inline void scan_row(const Row<T>& row, int first, int stride, int count, float temperature, Cell* cells) {
    if (row.is_vector) {
        scan_chunks<true>(row, first, stride, count, temperature, cells);
    } else {
        scan_chunks<false>(row, first, stride, count, temperature, cells);
    }
}

// Grid: one warp per CHUNKS_IN_FLIGHT chunks of each row.
template <typename T>
__device__ inline void scan(const SpecVerifyParams& params) {
    const Workspace space(params);
    const i64 thread = static_cast<i64>(blockIdx.x) * SCAN_THREADS + threadIdx.x;
    // The second launch counts its blocks, so its counters start at zero, whatever the workspace held.
    if (thread < params.batch) space.counters[thread] = 0;
    if (params.d2t != nullptr && has_draft_probs(params)) {
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
    scan_row(Row<T>(params, row), first, 1, count, params.temperature[slot], space.cells + row * count);
}

}  // namespace speccompile
