// SPDX-License-Identifier: Apache-2.0
// KVRollback: one path of a scored tree is kept in a cache, in place where input and output are bound to one address.
#pragma once

#include <string>

#include "attention_ops.h"
#include "kernel.h"

namespace speccompile::cpu {

constexpr i64 kInlineMoved = 256 << 10;  // bytes that are moved before another thread has woken up

// cache [batch, kv_heads, max_seq, head_dim], lengths [batch], path [batch, depth] -> the updated cache: row length + i
// of a slot becomes row length + path[i]; -1 keeps the row.
struct KVRollback {
    static constexpr const char* kName = "KVRollback";
    static constexpr abi::ElementType kInputs[] = {abi::kAnyType, abi::kInt64, abi::kInt64};
    static constexpr abi::ElementType kOutputs[] = {abi::kAnyType};
    static constexpr std::size_t kNumOptional = 0;

    explicit KVRollback(const Info&) {}

    void run(const Context& context) const {
        const Tensor cache = context.input(0), lengths = context.input(1), path = context.input(2);
        if (cache.dims.rank != 4 || path.dims.rank != 2) throw Error("cache must have 4 dims and path 2");
        const i64 batch = cache.dims[0], heads = cache.dims[1], rows = cache.dims[2], depth = path.dims[1];
        if (cache.type != abi::kFloat && cache.type != abi::kInt8) throw Error("cache must be float32 or int8");
        const i64 width = cache.dims[3] * (cache.type == abi::kFloat ? static_cast<i64>(sizeof(float)) : 1);  // bytes
        expect_dims(kName, "lengths", lengths.dims, Dims{batch});
        expect_dims(kName, "path", path.dims, Dims{batch, depth});
        const i64 *length = lengths.data<i64>(), *nodes = path.data<i64>();
        for (i64 slot = 0; slot < batch; slot++) check_path(slot, length[slot], nodes + slot * depth, depth, rows);
        auto* updated = context.output<char>(0, cache.dims);
        if (updated != cache.data<char>()) std::memcpy(updated, cache.data<char>(), static_cast<std::size_t>(batch * heads * rows * width));
        const auto task = [&](std::size_t pair) {
            const i64 slot = static_cast<i64>(pair) / heads;
            move(updated + (static_cast<i64>(pair) * rows + length[slot]) * width, nodes + slot * depth, depth, width);
        };
        if (batch * heads * depth * width > kInlineMoved) {
            context.parallel(static_cast<std::size_t>(batch * heads), task);
        } else {
            for (i64 pair = 0; pair < batch * heads; pair++) task(static_cast<std::size_t>(pair));
        }
    }

    // A path rises, and a node's row stands at least as far as the node's depth: no row is overwritten before it is read.
    static void check_path(i64 slot, i64 length, const i64* path, i64 depth, i64 rows) {
        i64 previous = -1;
        for (i64 i = 0; i < depth; i++) {
            if (path[i] < 0) continue;
            const bool is_inside = length >= 0 && path[i] < rows && length < rows - path[i];
            if (is_inside && path[i] >= i && path[i] > previous) {
                previous = path[i];
                continue;
            }
            throw Error("path[" + std::to_string(slot) + ", " + std::to_string(i) + "] is " + std::to_string(path[i]) +
                        " after " + std::to_string(previous) + " at length " + std::to_string(length) +
                        ", expected rising nodes within the " + std::to_string(rows) + " rows; correct what accepts them");
        }
    }

    static void move(char* rows, const i64* path, i64 depth, i64 width) {
        for (i64 i = 0; i < depth; i++) {
            if (path[i] > i) std::memcpy(rows + i * width, rows + path[i] * width, static_cast<std::size_t>(width));
        }
    }
};

inline void add_rollback_op(OpTable& table) { table.push_back(custom_op<KVRollback>()); }

}  // namespace speccompile::cpu
