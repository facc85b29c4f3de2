// SPDX-License-Identifier: Apache-2.0
// Grids of KVRollback, for C++: the same arithmetic as backends/tensorrt/launches.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv_rollback/kernel.cuh"

namespace speccompile {

// Widest unit in bytes that divides a row and every cache's address; 0 where there is none.
inline int rollback_vector_bytes(std::int64_t row_bytes, void* const* caches, int count) {
    std::uintptr_t bits = static_cast<std::uintptr_t>(row_bytes);
    for (int i = 0; i < count; ++i) bits |= reinterpret_cast<std::uintptr_t>(caches[i]);
    for (int unit : {16, 4, 2})
        if (bits % unit == 0) return unit;
    return 0;
}

}  // namespace speccompile
