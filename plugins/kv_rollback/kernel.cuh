// SPDX-License-Identifier: Apache-2.0
// KVRollback: keep one path of a scored tree in n caches [slots, kv_heads, max_seq, head_dim], in place.
// Row lengths[b] + i of slot b becomes row lengths[b] + path[b, i]; -1 keeps the row. See README.md in this folder.

#include "common.cuh"

namespace speccompile {

// Kernel parameters are limited to 4096 bytes on every supported CUDA, and the rest of the struct needs some of them.
constexpr int MAX_CACHES = 480;
constexpr int ROLLBACK_THREADS = 128;
constexpr int ROWS_IN_FLIGHT = 8;  // loads that a thread has in flight

struct KVRollbackParams {
    void* caches[MAX_CACHES];
    const i64* lengths;
    const i64* path;
    int depth;
    int kv_heads;
    int max_seq;
    int row_vectors;  // head_dim in units of V
};

// One thread owns one column of a head: it reads a group of rows, then writes it, groups in rising order. A row that is
// read later comes after every row written before (path[i] >= i and rising), so nothing is lost without a barrier.
template <typename V, typename Params>
__device__ inline void move_rows(void* cache, const Params& params) {
    const int slot = blockIdx.y;
    const i64* path = params.path + static_cast<i64>(slot) * params.depth;
    const i64 start = params.lengths[slot];
    const int lane = threadIdx.x % WARP;
    bool is_moving = false;
    for (int first = 0; first < params.depth; first += WARP) {
        const int i = first + lane;
        const i64 node = i < params.depth ? path[i] : -1;
        is_moving |= __ballot_sync(ALL_LANES, node > i) != 0;
    }
    if (!is_moving) return;  // a chain: its rows are in place already

    const int column = blockIdx.x * ROLLBACK_THREADS + threadIdx.x;
    if (column >= params.kv_heads * params.row_vectors) return;
    const int head = column / params.row_vectors;
    V* rows = static_cast<V*>(cache) + column % params.row_vectors +
              ((static_cast<i64>(slot) * params.kv_heads + head) * params.max_seq + start) * params.row_vectors;
    const i64 room = start < 0 ? 0 : params.max_seq - start;
    for (int first = 0; first < params.depth; first += ROWS_IN_FLIGHT) {
        int nodes[ROWS_IN_FLIGHT];  // -1: the row stays
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; ++k) {
            const int i = first + k;
            const i64 node = i < params.depth ? path[i] : -1;
            nodes[k] = node > i && node < room ? static_cast<int>(node) : -1;
        }
        V moved[ROWS_IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; ++k)
            if (nodes[k] >= 0) moved[k] = rows[static_cast<i64>(nodes[k]) * params.row_vectors];
#pragma unroll
        for (int k = 0; k < ROWS_IN_FLIGHT; ++k)
            if (nodes[k] >= 0) rows[static_cast<i64>(first + k) * params.row_vectors] = moved[k];
    }
}

}  // namespace speccompile

// Eight blocks per multiprocessor: at most 64 registers a thread.
#define SPECCOMPILE_ROLLBACK(NAME, VECTOR)                                         \
    extern "C" __global__ void __launch_bounds__(speccompile::ROLLBACK_THREADS, 8) \
        NAME(const __grid_constant__ speccompile::KVRollbackParams params) {       \
        speccompile::move_rows<VECTOR>(params.caches[blockIdx.z], params);         \
    }

SPECCOMPILE_ROLLBACK(kv_rollback_16, uint4)
SPECCOMPILE_ROLLBACK(kv_rollback_4, unsigned int)
SPECCOMPILE_ROLLBACK(kv_rollback_2, unsigned short)
