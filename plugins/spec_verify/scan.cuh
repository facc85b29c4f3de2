// SPDX-License-Identifier: Apache-2.0
// SpecVerify, first part: one pass over the logits. A warp reduces chunks by itself, so that no warp waits for another.
#pragma once

#include "spec_verify/race.cuh"

namespace speccompile {

// Top of a chunk, and the index of the first entry that has it. `offset(j)` is that of the lane's entry j in the chunk.
template <typename Offset>
__device__ inline Cell reduce_greedy(int chunk, const float (&entries)[LANE_ENTRIES], Offset offset) {
    float top = entries[0];
#pragma unroll
    for (int j = 1; j < LANE_ENTRIES; ++j) top = fmaxf(top, entries[j]);
    Cell cell;
    cell.top = warp_max(top);
    u32 at = 0xffffffffu;
#pragma unroll
    for (int j = LANE_ENTRIES - 1; j >= 0; --j)
        if (entries[j] == cell.top) at = static_cast<u32>(chunk * CHUNK + offset(j));
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

// The winner of a chunk's race: top of the chunk, not scaled yet, index of the winner, and in `lag` the logarithm of its time
// over its weight exp(scaled - scaled top).
template <typename Offset>
__device__ inline Cell reduce_race(
    int chunk, const float (&entries)[LANE_ENTRIES], Offset offset, const Quotient& scaled, const Race& race, float& lag) {
    float top = entries[0];
#pragma unroll
    for (int j = 1; j < LANE_ENTRIES; ++j) top = fmaxf(top, entries[j]);
    Cell cell;
    cell.top = warp_max(top);
    const float scaled_top = scaled(cell.top);
    u32 least = 0xffffffffu, at = 0xffffffffu;  // bits of positive floats have their order
#pragma unroll
    for (int j = 0; j < LANE_ENTRIES; ++j) {
        const u32 index = static_cast<u32>(chunk * CHUNK + offset(j));
        const u32 ratio = __float_as_uint(race.time(index) * exp_fast(scaled_top - scaled(entries[j])));
        if (entries[j] > minus_infinity() && ratio < least) {
            least = ratio;
            at = index;
        }
    }
    const u32 best = warp_min(least);
    cell.index = warp_min(least == best ? at : 0xffffffffu);
    lag = logf(__uint_as_float(best));
    return cell;
}

// Reduces CHUNKS_IN_FLIGHT chunks of a row from `first` on, of which `entries_of(k, entries)` gives the lane's entries of the
// k-th. Lane k keeps the k-th cell; division keeps the order, so only the tops are divided exactly.
template <typename EntriesOf, typename Offset>
__device__ inline void reduce_chunks(
    EntriesOf entries_of, Offset offset, int first, int stride, int count, const Scanning& scanning, Cell* cells) {
    const bool is_sampled = is_hot(scanning.temperature);
    const Divider divide(is_sampled ? scanning.temperature : 1.0f);
    const Quotient scaled(divide);
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    Cell own = {};
    float own_lag = 0;
#pragma unroll
    for (int k = 0; k < CHUNKS_IN_FLIGHT; ++k) {
        const int chunk = first + k * stride;
        if (chunk >= count) break;
        float entries[LANE_ENTRIES];
        entries_of(k, entries);
        float lag = 0;
        const Cell cell = scanning.is_race ? reduce_race(chunk, entries, offset, scaled, scanning.race, lag)
                          : is_sampled     ? reduce_sampled(entries, scaled)
                                           : reduce_greedy(chunk, entries, offset);
        if (lane != k) continue;
        own = cell;
        own_lag = lag;
    }
    const int cell_index = first + lane * stride;
    if (lane >= CHUNKS_IN_FLIGHT || cell_index >= count) return;
    own.top = divide(own.top);
    if (scanning.is_race && own.top > minus_infinity()) own.top -= own_lag;
    cells[cell_index] = own;
}

// Chunks from `first` on, as in memory: all reads are issued before the first result is needed.
template <bool IS_VECTOR, typename T>
__device__ inline void fetch_chunks(
    const Row<T>& row, int first, int stride, typename Row<T>::Raw (&raw)[CHUNKS_IN_FLIGHT]) {
#pragma unroll
    for (int k = 0; k < CHUNKS_IN_FLIGHT; ++k) raw[k] = row.template fetch<IS_VECTOR>(first + k * stride);
}

template <typename Raw>
__device__ inline void widen(const Raw& raw, float (&entries)[LANE_ENTRIES]) {
#pragma unroll
    for (int j = 0; j < LANE_ENTRIES; ++j) entries[j] = float_from(raw.values[j]);
}

template <bool IS_VECTOR, typename T>
__device__ inline void scan_chunks(
    const Row<T>& row, int first, int stride, int count, const Scanning& scanning, Cell* cells) {
    typename Row<T>::Raw raw[CHUNKS_IN_FLIGHT];
    fetch_chunks<IS_VECTOR>(row, first, stride, raw);
    reduce_chunks([&](int k, float (&entries)[LANE_ENTRIES]) { widen(raw[k], entries); },
                  [](int j) { return Row<T>::template offset_of<IS_VECTOR>(j); }, first, stride, count, scanning, cells);
}

template <typename T>
__device__ inline void scan_row(
    const Row<T>& row, int first, int stride, int count, const Scanning& scanning, Cell* cells) {
    if (row.is_vector) {
        scan_chunks<true>(row, first, stride, count, scanning, cells);
    } else {
        scan_chunks<false>(row, first, stride, count, scanning, cells);
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
    scan_row(Row<T>(params, row), first, 1, count, Scanning(params, slot, row), space.cells + row * count);
}

}  // namespace speccompile
