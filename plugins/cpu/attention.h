// SPDX-License-Identifier: Apache-2.0
// Attention of the nodes of a tree over caches [batch, kv_heads, rows, head_dim]: norm and rotation of Q and K, the
// write of the new rows, and the softmax over past rows and ancestors. Raw pointers, no framework.
//
// A node's numbers depend on its own row, its position, the past rows and its ancestors, never on the other nodes,
// slots or threads: its keys are numbered by position (past rows, then ancestors in order), and every sum runs in that
// order. So a chain of k nodes gives the bits of k single steps, and a path of a tree those of a chain.
#pragma once

#include <cmath>
#include <optional>

#include "softmax.h"

namespace speccompile::cpu {

// Heads of Q, K or V: where the row of (slot, head, node) starts, in floats.
struct HeadRows {
    const float* data;
    i64 slot_stride, head_stride, node_stride;
    const float* row(i64 slot, i64 head, i64 node) const {
        return data + slot * slot_stride + head * head_stride + node * node_stride;
    }
};

// What is done to Q and K before the scores.
struct Preparation {
    const float* q_gamma = nullptr;  // [head_dim]: weights of an RMS norm over each head; nullptr: no norm
    const float* k_gamma = nullptr;
    float epsilon = 0;
    const float* cos = nullptr;  // [positions, rotary_dim / 2]; nullptr: no rotation
    const float* sin = nullptr;
    i64 rotary_dim = 0;  // the first columns of a head, which are rotated
    bool is_interleaved = false;  // pairs are neighbours, not halves apart
};

struct AttentionStep {
    i64 batch, nodes, heads, kv_heads, rows, head_dim;
    HeadRows q, k, v;
    Preparation preparation;
    CacheRows k_cache;  // hold the past rows; the rows of the nodes are written
    CacheRows v_cache;
    const i64* lengths;        // [batch], with lengths[b] + nodes <= rows
    const std::uint8_t* tree;  // [batch, nodes, nodes]
    float* out;                // [batch, nodes, heads, head_dim]
    float scale, softcap;
    const float* sinks = nullptr;  // [heads]: a score of each head that has no value; nullptr: none
    i64 window;  // a key is seen where position(query) - position(key) < window; 0 = no limit
    i64 slots_per_cache = 1;  // neighbouring slots that read one slot of the caches
    i64 group() const { return heads / kv_heads; }
    CacheRows cache_rows(const CacheRows& cache, i64 slot, i64 kv_head) const {
        return cache.from((slot / slots_per_cache * kv_heads + kv_head) * rows);
    }
};

// Which keys each node sees.
struct Visibility {
    struct Node {
        i64 position;
        i64 first;         // past rows first ... length - 1 are seen
        i64 num_visible;   // nodes that are seen
        i64 num_leading;   // of those, how many are nodes 0, 1, 2, ... without a gap
        const i64* nodes;  // the nodes that are seen, in order
    };
    const Node* nodes;  // [batch, nodes]
};

inline i64 visibility_size(i64 batch, i64 nodes) {
    return batch * nodes * (nodes + static_cast<i64>(sizeof(Visibility::Node) / sizeof(i64)));
}

// Fills `memory` of `visibility_size` numbers.
inline Visibility see(const AttentionStep& step, i64* memory) {
    auto* all = reinterpret_cast<Visibility::Node*>(memory);
    i64* next = memory + step.batch * step.nodes * static_cast<i64>(sizeof(Visibility::Node) / sizeof(i64));
    for (i64 slot = 0; slot < step.batch; slot++) {
        const i64 length = step.lengths[slot];
        Visibility::Node* nodes = all + slot * step.nodes;
        const std::uint8_t* mask = step.tree + slot * step.nodes * step.nodes;
        for (i64 node = 0; node < step.nodes; node++) {
            i64 num_before = 0;  // in an image, later nodes are seen too: they do not count
            for (i64 i = 0; i < node; i++) num_before += mask[node * step.nodes + i] != 0;
            nodes[node].position = length + num_before;
        }
        for (i64 node = 0; node < step.nodes; node++) {
            Visibility::Node& here = nodes[node];
            const i64 oldest = step.window > 0 ? here.position - step.window + 1 : 0;  // visible positions
            here.first = oldest < 0 ? 0 : oldest < length ? oldest : length;
            here.nodes = next;
            for (i64 i = 0; i < step.nodes; i++) {
                const bool is_near = step.window == 0 || nodes[i].position >= oldest;
                if (mask[node * step.nodes + i] != 0 && is_near) *next++ = i;
            }
            here.num_visible = next - here.nodes;
            here.num_leading = 0;
            while (here.num_leading < here.num_visible && here.nodes[here.num_leading] == here.num_leading) {
                here.num_leading++;
            }
        }
    }
    return {all};
}

// Rotates `count` pairs (x, y), each `Step` floats after the last.
template <int Step>
inline void rotate(float* x, float* y, const float* cos, const float* sin, i64 count) {
    for (i64 i = 0; i < count; i++) {
        const float first = x[i * Step], second = y[i * Step];
        x[i * Step] = first * cos[i] - second * sin[i];
        y[i * Step] = second * cos[i] + first * sin[i];
    }
}

// Writes a head of Q or K, normalised and rotated, to `to`.
inline void prepare_row(const Preparation& how, const float* gamma, const float* from, i64 head_dim, i64 position,
                        float* to) {
    float factor = 1;
    if (gamma != nullptr) {
        alignas(64) float squares[kPartials] = {};
        for (i64 i = 0; i < head_dim; i++) squares[i % kPartials] += from[i] * from[i];
        Float parts[kParts];
        for (int part = 0; part < kParts; part++) parts[part] = load(squares + part * kLanes);
        factor = 1 / std::sqrt(sum_partials(parts) / static_cast<float>(head_dim) + how.epsilon);
        for (i64 i = 0; i < head_dim; i++) to[i] = from[i] * factor * gamma[i];
    } else {
        std::memcpy(to, from, static_cast<std::size_t>(head_dim) * sizeof(float));
    }
    if (how.cos == nullptr) return;
    const i64 half = how.rotary_dim / 2;
    const float *cos = how.cos + position * half, *sin = how.sin + position * half;
    if (how.is_interleaved) return rotate<2>(to, to + 1, cos, sin, half);
    rotate<1>(to, to + half, cos, sin, half);
}

// Writes the nodes' rows of one kv head to the caches; `memory` holds a row.
inline void write_rows(const AttentionStep& step, const Visibility& seen, i64 slot, i64 kv_head, float* memory) {
    const CacheRows k_rows = step.cache_rows(step.k_cache, slot, kv_head).from(step.lengths[slot]);
    const CacheRows v_rows = step.cache_rows(step.v_cache, slot, kv_head).from(step.lengths[slot]);
    for (i64 node = 0; node < step.nodes; node++) {
        const CacheRows k = k_rows.from(node), v = v_rows.from(node);
        const i64 position = seen.nodes[slot * step.nodes + node].position;
        const float* value = step.v.row(slot, kv_head, node);
        prepare_row(step.preparation, step.preparation.k_gamma, step.k.row(slot, kv_head, node), step.head_dim,
                    position, k.levels == nullptr ? k.floats : memory);
        if (k.levels != nullptr) {
            quantize_head(memory, step.head_dim, k.levels, k.scales);
            quantize_head(value, step.head_dim, v.levels, v.scales);
        } else {
            std::memcpy(v.floats, value, static_cast<std::size_t>(step.head_dim) * sizeof(float));
        }
    }
}

// A block of up to 4 queries of one kv head: nodes in order, the heads of a group beside each other.
class QueryBlock {
  public:
    // Floats of scratch memory for a block.
    static i64 num_floats(const AttentionStep& step) {
        return kQueries * (2 * round_up(step.head_dim, kPartials) + num_scores(step) + num_tree_scores(step));
    }

    QueryBlock(const AttentionStep& step, const Visibility& seen, i64 slot, i64 kv_head, i64 first, i64 end,
               float* memory)
        : step_(step), slot_(slot), length_(step.lengths[slot]), count_(static_cast<int>(end - first)) {
        k_ = step.cache_rows(step.k_cache, slot, kv_head);
        v_ = step.cache_rows(step.v_cache, slot, kv_head);
        const i64 width = round_up(step.head_dim, kPartials);
        for (int q = 0; q < count_; q++) {
            const i64 node = (first + q) / step.group(), head = kv_head * step.group() + (first + q) % step.group();
            nodes_[q] = &seen.nodes[slot * step.nodes + node];
            sinks_[q] = step.sinks == nullptr ? -__builtin_inff() : step.sinks[head];
            out_[q] = step.out + ((slot * step.nodes + node) * step.heads + head) * step.head_dim;
            queries_[q] = memory + q * width;
            sums_[q] = memory + (kQueries + q) * width;
            scores_[q] = memory + 2 * kQueries * width + q * num_scores(step);
            tree_scores_[q] = memory + 2 * kQueries * width + kQueries * num_scores(step) + q * num_tree_scores(step);
            std::memset(queries_[q], 0, static_cast<std::size_t>(width) * sizeof(float));
            std::memset(sums_[q], 0, static_cast<std::size_t>(width) * sizeof(float));
            prepare_row(step.preparation, step.preparation.q_gamma, step.q.row(slot, head, node), step.head_dim,
                        nodes_[q]->position, queries_[q]);
            first_ = nodes_[q]->first > first_ ? nodes_[q]->first : first_;
            num_leading_ = nodes_[q]->num_leading < num_leading_ || q == 0 ? nodes_[q]->num_leading : num_leading_;
        }
    }

    // The steps, in this order. Past rows come in tiles, which all blocks of a task read while they are in the cache.
    void start_scores() {
        for (int q = 0; q < count_; q++) {  // rows that only some windows reach
            score_rows(1, k_.from(nodes_[q]->first), own(q), &queries_[q], &scores_[q]);
        }
    }

    void score_tile(i64 first, i64 end) {
        if (!cut(first, end, length_)) return;
        float* to[kQueries];
        for (int q = 0; q < count_; q++) to[q] = scores_[q] + (first - nodes_[q]->first);
        score_rows(count_, k_.from(first), end - first, queries_, to);
    }

    // Key i of a query is its i-th past row, and after those its i-th visible node.
    void finish_scores() {
        i64 num_nodes = 0;
        for (int q = 0; q < count_; q++) {
            const i64 num = nodes_[q]->num_visible, last = num > 0 ? nodes_[q]->nodes[num - 1] + 1 : 0;
            num_nodes = last > num_nodes ? last : num_nodes;
        }
        score_rows(count_, k_.from(length_), num_nodes, queries_, tree_scores_);
        for (int q = 0; q < count_; q++) {
            float* at = scores_[q] + (length_ - nodes_[q]->first);
            for (i64 i = 0; i < nodes_[q]->num_visible; i++) at[i] = tree_scores_[q][nodes_[q]->nodes[i]];
            const i64 num_keys = length_ - nodes_[q]->first + nodes_[q]->num_visible;
            factors_[q] = num_keys == 0 ? 0 : 1 / weigh_scores(scores_[q], num_keys, step_.scale, step_.softcap, sinks_[q]);
        }
    }

    void start_values() {
        for (int q = 0; q < count_; q++) {
            const float* weights = scores_[q];
            mix_rows(1, v_.from(nodes_[q]->first), own(q), &weights, &sums_[q]);
        }
    }

    void mix_tile(i64 first, i64 end) {
        if (!cut(first, end, length_ + num_leading_)) return;  // the first nodes follow the past rows in the cache
        const float* weights[kQueries];
        for (int q = 0; q < count_; q++) weights[q] = scores_[q] + (first - nodes_[q]->first);
        mix_rows(count_, v_.from(first), end - first, weights, sums_);
    }

    void finish_values() {
        for (int q = 0; q < count_; q++) {
            const float* weights = scores_[q] + (length_ - nodes_[q]->first + num_leading_);
            const i64 *node = nodes_[q]->nodes + num_leading_, *end = nodes_[q]->nodes + nodes_[q]->num_visible;
            while (node < end) {
                i64 run = 1;
                while (node + run < end && node[run] == node[0] + run) run++;
                mix_rows(1, v_.from(length_ + node[0]), run, &weights, &sums_[q]);
                weights += run;
                node += run;
            }
            for (i64 i = 0; i < step_.head_dim; i++) out_[q][i] = sums_[q][i] * factors_[q];
        }
    }

  private:
    static i64 num_scores(const AttentionStep& step) { return round_up(step.rows + 3, kPartials); }
    static i64 num_tree_scores(const AttentionStep& step) { return round_up(step.nodes + 3, kPartials); }

    // Past rows that this query sees and another of the block does not.
    i64 own(int q) const { return first_ - nodes_[q]->first; }
    // Limits a tile to the rows that all queries of the block see; returns whether there are any.
    bool cut(i64& first, i64& end, i64 limit) const {
        first = first > first_ ? first : first_;
        end = end < limit ? end : limit;
        return first < end;
    }

    const AttentionStep& step_;
    const i64 slot_, length_;
    const int count_;
    CacheRows k_, v_;
    i64 first_ = 0, num_leading_ = 0;  // past rows from `first_` on and the first nodes are seen by all queries
    const Visibility::Node* nodes_[kQueries];
    float *queries_[kQueries], *sums_[kQueries], *scores_[kQueries], *tree_scores_[kQueries], *out_[kQueries];
    float sinks_[kQueries], factors_[kQueries];
};

constexpr int kTaskBlocks = 4;
constexpr i64 kTaskQueries = kTaskBlocks * kQueries;  // queries of a task, where there are so many
constexpr i64 kTileBytes = 16 << 10;                  // of K or V in a tile: half of a first-level cache

// Floats of scratch memory for a task.
inline i64 task_floats(const AttentionStep& step) { return kTaskBlocks * QueryBlock::num_floats(step); }

// Attends from queries first ... end - 1, at most `kTaskQueries`, of one kv head, whose rows are in the caches.
inline void attend(const AttentionStep& step, const Visibility& seen, i64 slot, i64 kv_head, i64 first, i64 end,
                   float* memory) {
    std::optional<QueryBlock> blocks[kTaskBlocks];
    int count = 0;
    for (i64 q = first; q < end; q += kQueries, count++) {
        const i64 block_end = q + kQueries < end ? q + kQueries : end;
        float* own = memory + count * QueryBlock::num_floats(step);
        blocks[count].emplace(step, seen, slot, kv_head, q, block_end, own);
    }
    const i64 cell = step.k_cache.levels == nullptr ? static_cast<i64>(sizeof(float)) : 1;
    const i64 length = step.lengths[slot], rows = kTileBytes / (step.head_dim * cell) + 1;
    const i64 tile = round_up(rows < kScoreRows ? kScoreRows : rows, kScoreRows);
    for (int i = 0; i < count; i++) blocks[i]->start_scores();
    for (i64 row = 0; row < length; row += tile) {
        for (int i = 0; i < count; i++) blocks[i]->score_tile(row, row + tile);
    }
    for (int i = 0; i < count; i++) {
        blocks[i]->finish_scores();
        blocks[i]->start_values();
    }
    for (i64 row = 0; row < length + step.nodes; row += tile) {
        for (int i = 0; i < count; i++) blocks[i]->mix_tile(row, row + tile);
    }
    for (int i = 0; i < count; i++) blocks[i]->finish_values();
}

}  // namespace speccompile::cpu
