// SPDX-License-Identifier: Apache-2.0
// Grids, shared memory and workspace of SpecVerify, for C++: the same arithmetic as backends/tensorrt/launches.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spec_verify/kernel.cuh"

namespace speccompile {

inline bool fits_verify(std::int64_t nodes, std::int64_t vocab) {
    return nodes >= 1 && nodes <= MAX_NODES && vocab >= 1 && vocab <= std::int64_t(MAX_CHUNKS) * CHUNK;
}

inline std::size_t verify_workspace_bytes(std::int64_t batch, std::int64_t nodes, std::int64_t vocab, bool has_map) {
    const std::int64_t rows = batch * nodes, cells = rows * divide_up(vocab, CHUNK);
    return cells * sizeof(Cell) + rows * (sizeof(Dist) + sizeof(Outcome)) + batch * sizeof(u32) +
           (has_map ? vocab * sizeof(u32) : 0);
}

inline unsigned scan_blocks(std::int64_t batch, std::int64_t nodes, std::int64_t vocab) {
    const std::int64_t tasks = batch * nodes * divide_up(divide_up(vocab, CHUNK), CHUNKS_IN_FLIGHT);
    const std::int64_t blocks = divide_up(tasks * WARP, SCAN_THREADS), clearing = divide_up(batch, SCAN_THREADS);
    return static_cast<unsigned>(blocks > clearing ? blocks : clearing);
}

inline std::size_t resolve_shared_bytes(std::int64_t vocab) {
    return divide_up(vocab, CHUNK) * (sizeof(double) + sizeof(float));
}

}  // namespace speccompile
