// SPDX-License-Identifier: Apache-2.0
// What layers with recurrent states compute: the gated delta rule for one value head, and a causal depthwise convolution.
// Raw pointers, no framework.
//
// A number never depends on how many rows share a step: a column of the state sees only its own row of v, k and q are
// summed over the rows of the state in one order, and the rows of a path follow one another. So a step of k nodes gives
// the bits of k single steps, a path of a tree those of a chain, and rows that are applied later those of rows applied
// at once.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "attention_rows.h"
#include "rows.h"
#include "vector.h"

namespace speccompile::cpu {

constexpr int kStateVectors = kLanes == 16 ? 4 : 2;  // vectors of columns of the state that are walked together

// Where the state before or after a row is: in a block of the thread's memory from 0 on, or
enum Place : i64 { kGiven = -1, kKept = -2, kNowhere = -3 };  // as the step found it, as it leaves it, not needed

// A node or a pending row, as one value head sees it.
struct HeadRow {
    const float *q, *k, *v;  // q and out: nullptr for a row whose output nobody reads
    float decay, beta;
    float* out;
    i64 from, to;  // places of the state before it and after it
    bool follows;  // the row before it is its parent
};

// A node of a tree and the places of its states; parents come first.
struct Visit {
    i64 node, from, to;
    bool follows;
};

// The order in which the nodes of a tree are walked: a path to its end, then back to the last branch. The smallest child
// of a node comes last, so the nodes that stay are the last path.
struct TreeOrder {
    std::vector<Visit> visits;
    i64 num_places = 0;  // blocks of memory

    // parents: of each node, -1 where it follows the `num_owed` rows before the nodes; the first `sure` are a chain.
    void plan(const i64* parents, i64 nodes, i64 num_owed, i64 sure) {
        visits.clear();
        // One entry more, for the state before the nodes.
        std::vector<i64> open(static_cast<std::size_t>(nodes) + 1), place(static_cast<std::size_t>(nodes) + 1), free, stack;
        for (i64 node = 0; node < nodes; node++) open[static_cast<std::size_t>(parents[node] + 1)]++;
        num_places = 1;  // owed rows leave their states in the first one
        place[0] = num_owed == 0 ? kGiven : sure == 0 ? kKept : 0;
        if (place[0] != 0) free.push_back(0);
        const auto push = [&](i64 parent) {
            for (i64 node = parent + 1; node < nodes; node++) {
                if (parents[node] == parent) stack.push_back(node);
            }
        };
        push(-1);
        i64 before = num_owed > 0 ? -1 : -2;
        while (!stack.empty()) {
            const i64 node = stack.back(), parent = parents[node];
            stack.pop_back();
            const std::size_t above = static_cast<std::size_t>(parent + 1), here = static_cast<std::size_t>(node + 1);
            const i64 from = place[above];
            const bool is_over = --open[above] == 0 && from >= 0;  // nobody else needs the state before it
            const bool is_kept = node + 1 == sure, is_leaf = open[here] == 0;
            if (is_over && (is_kept || is_leaf)) free.push_back(from);
            if (is_kept || is_leaf) {
                place[here] = is_kept ? kKept : kNowhere;
            } else if (is_over) {
                place[here] = from;
            } else if (!free.empty()) {
                place[here] = free.back();
                free.pop_back();
            } else {
                place[here] = num_places++;
            }
            visits.push_back({node, from, place[here], parent == before});
            before = node;
            push(node);
        }
    }
};

// The rows of a slot over the state of one value head.
struct HeadStep {
    const HeadRow* rows;
    i64 num_rows;
    i64 key_dim, value_dim;
    float scale;
    bool has_delta_rule;
    const float* from;  // [key_dim, value_dim]
    float* to;          // the same where the state is updated in place
};

// The first `count` lanes; zeros after them.
inline Float load_some(const float* p, i64 count) {
    alignas(64) float lanes[kLanes] = {};
    std::memcpy(lanes, p, static_cast<std::size_t>(count) * sizeof(float));
    return load(lanes);
}

inline void store_some(float* p, Float value, i64 count) {
    alignas(64) float lanes[kLanes];
    store(lanes, value);
    std::memcpy(p, lanes, static_cast<std::size_t>(count) * sizeof(float));
}

// V vectors of columns of a head; of a partial vector only the first `count` lanes are in memory.
template <int V, bool IsPartial>
struct Columns {
    i64 count;

    Float read(const float* p, int vector) const {
        if constexpr (IsPartial) return load_some(p, count);
        return load(p + vector * kLanes);
    }
    void write(float* p, int vector, Float value) const {
        if constexpr (IsPartial) {
            store_some(p, value, count);
        } else {
            store(p + vector * kLanes, value);
        }
    }
};

// What a state gives for a key: the sums over the even and over the odd rows of the state.
template <int V>
struct Given {
    Float even[V], odd[V];

    void clear() {
        for (int c = 0; c < V; c++) even[c] = odd[c] = zero();
    }
    Float sum(int c) const { return add(even[c], odd[c]); }
};

template <int V, bool IsPartial>
inline Given<V> ask(const Columns<V, IsPartial>& columns, const float* state, i64 stride, const float* k, i64 key_dim) {
    Given<V> given;
    given.clear();
    i64 i = 0;
    for (; i + 2 <= key_dim; i += 2) {
        const Float first = broadcast(k[i]), second = broadcast(k[i + 1]);
        for (int c = 0; c < V; c++) {
            given.even[c] = fma(columns.read(state + i * stride, c), first, given.even[c]);
            given.odd[c] = fma(columns.read(state + (i + 1) * stride, c), second, given.odd[c]);
        }
    }
    if (i < key_dim) {
        const Float first = broadcast(k[i]);
        for (int c = 0; c < V; c++) given.even[c] = fma(columns.read(state + i * stride, c), first, given.even[c]);
    }
    return given;
}

// One pass over the columns: the state after a row is written to `to`, is multiplied with q for the row's output, and
// with the next row's k. What is not wanted is left out.
template <int V, bool IsPartial, bool IsWritten, bool HasAnswer, bool HasNext>
inline void advance(const Columns<V, IsPartial>& columns, const float* from, i64 from_stride, float* to, i64 to_stride,
                    i64 key_dim, const HeadRow& row, const Float (&added)[V], Float (&answer)[V], const float* next_k,
                    Given<V>& given) {
    const Float decay = broadcast(row.decay);
    Float sums[V], even[V], odd[V];
    for (int c = 0; c < V; c++) sums[c] = even[c] = odd[c] = zero();
    const auto line = [&](i64 i, Float(&parts)[V]) {
        const Float key = broadcast(row.k[i]);
        for (int c = 0; c < V; c++) {
            const Float value = fma(key, added[c], mul(columns.read(from + i * from_stride, c), decay));
            if constexpr (IsWritten) columns.write(to + i * to_stride, c, value);
            if constexpr (HasAnswer) sums[c] = fma(broadcast(row.q[i]), value, sums[c]);
            if constexpr (HasNext) parts[c] = fma(value, broadcast(next_k[i]), parts[c]);
        }
    };
    i64 i = 0;
    for (; i + 2 <= key_dim; i += 2) {
        line(i, even);
        line(i + 1, odd);
    }
    if (i < key_dim) line(i, even);
    for (int c = 0; c < V; c++) answer[c] = sums[c], given.even[c] = even[c], given.odd[c] = odd[c];
}

// All rows over some columns of the state. A place in `memory` has [key_dim, V * kLanes] floats. A row asks the state for
// the next one where that follows it; in a chain only the first row has to ask itself.
template <int V, bool IsPartial, bool IsTree>
inline void walk_columns(const HeadStep& step, i64 column, i64 count, float* memory) {
    const Columns<V, IsPartial> columns{count};
    const i64 block = step.key_dim * V * kLanes;
    const auto stride_of = [&](i64 place) { return place >= 0 ? V * kLanes : step.value_dim; };
    const auto state_before = [&](const HeadRow& row) {
        return row.from >= 0 ? memory + row.from * block : (row.from == kKept ? step.to : step.from) + column;
    };
    Given<V> given;
    given.clear();
    const auto ask_for = [&](const HeadRow& row) {
        if (step.has_delta_rule) given = ask(columns, state_before(row), stride_of(row.from), row.k, step.key_dim);
    };
    if constexpr (!IsTree) ask_for(step.rows[0]);
    for (i64 r = 0; r < step.num_rows; r++) {
        const HeadRow& row = step.rows[r];
        if constexpr (IsTree) {
            if (!row.follows) ask_for(row);
        }
        const float* from = state_before(row);
        float* to = row.to >= 0 ? memory + row.to * block : step.to + column;
        const i64 from_stride = stride_of(row.from), to_stride = stride_of(row.to);
        const bool is_written = row.to != kNowhere;
        const bool has_next = step.has_delta_rule && r + 1 < step.num_rows && (!IsTree || step.rows[r + 1].follows);
        Float added[V], answer[V];
        for (int c = 0; c < V; c++) {
            const Float held = mul(given.sum(c), broadcast(row.decay)), value = columns.read(row.v + column, c);
            added[c] = mul(broadcast(row.beta), step.has_delta_rule ? sub(value, held) : value);
        }
        const auto pass = [&](auto written, auto answered, auto next) {
            advance<V, IsPartial, decltype(written)::value, decltype(answered)::value, decltype(next)::value>(
                columns, from, from_stride, to, to_stride, step.key_dim, row, added, answer,
                has_next ? step.rows[r + 1].k : nullptr, given);
        };
        constexpr std::true_type yes{};
        constexpr std::false_type no{};
        if (row.q == nullptr) {
            has_next ? pass(yes, no, yes) : pass(yes, no, no);
        } else if (is_written) {
            has_next ? pass(yes, yes, yes) : pass(yes, yes, no);
        } else {
            pass(no, yes, no);
        }
        if (row.q != nullptr) {
            for (int c = 0; c < V; c++) columns.write(row.out + column, c, mul(broadcast(step.scale), answer[c]));
        }
    }
}

// Floats of memory that `walk_head` needs.
inline i64 walk_floats(i64 key_dim, i64 num_places) { return num_places * key_dim * kStateVectors * kLanes; }

template <bool IsTree>
inline void walk_head(const HeadStep& step, float* memory) {
    i64 column = 0;
    for (; column + kStateVectors * kLanes <= step.value_dim; column += kStateVectors * kLanes) {
        walk_columns<kStateVectors, false, IsTree>(step, column, 0, memory);
    }
    for (; column + kLanes <= step.value_dim; column += kLanes) walk_columns<1, false, IsTree>(step, column, 0, memory);
    if (column < step.value_dim) walk_columns<1, true, IsTree>(step, column, step.value_dim - column, memory);
}

// Some channels of a causal depthwise convolution over the rows of one slot.
struct ConvStep {
    const float* taps;  // [kernel, channels]
    const float* bias;  // [channels]
    i64 kernel, channels, nodes;
    i64 num_held;       // rows before the nodes: kernel - 1 of the state, and the pending ones that were accepted
    const float* held;  // [num_held, channels]
    const float* x;     // [nodes, channels]
    float* out;         // [nodes, channels]
    bool has_silu;
    const i64* parents;  // of each node, -1 where it follows the held rows; nullptr: a chain
    const float** window;  // memory for the [kernel] rows that a node sees, its own last

    void look_back(i64 node) const {
        for (i64 tap = kernel - 1, at = node; tap >= 0; tap--) {
            window[tap] = row(num_held + at);
            at = parents != nullptr && at >= 0 ? parents[at] : at - 1;
        }
    }
    const float* row(i64 index) const {
        return index < num_held ? held + index * channels : x + (index - num_held) * channels;
    }
};

// Channels first ... end - 1 of all nodes.
inline void convolve(const ConvStep& step, i64 first, i64 end) {
    for (i64 node = 0; node < step.nodes; node++) {
        step.look_back(node);
        const auto columns = [&](i64 column, auto read, auto write) {
            Float sum = read(step.bias + column);
            for (i64 tap = 0; tap < step.kernel; tap++) {
                sum = fma(read(step.window[tap] + column), read(step.taps + tap * step.channels + column), sum);
            }
            write(step.out + node * step.channels + column, step.has_silu ? silu(sum) : sum);
        };
        i64 column = first;
        for (; column + kLanes <= end; column += kLanes) {
            columns(column, [](const float* p) { return load(p); }, [](float* p, Float value) { store(p, value); });
        }
        if (column < end) {
            const i64 count = end - column;
            columns(column, [&](const float* p) { return load_some(p, count); },
                    [&](float* p, Float value) { store_some(p, value, count); });
        }
    }
}

}  // namespace speccompile::cpu
