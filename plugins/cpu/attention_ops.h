// SPDX-License-Identifier: Apache-2.0
// The attention ops: CachedAttention, SinkAttention, LatentAttention, SharedAttention, QkvAttention with and without norm
// and rotary embedding, RotaryCrossAttention; and these with int8 caches, each of which its scales follow.
#pragma once

#include <algorithm>
#include <atomic>
#include <string>

#include "attention.h"
#include "kernel.h"

namespace speccompile::cpu {

constexpr i64 kInlineWork = 64 << 10;  // multiply-adds that are done before another thread has woken up
constexpr i64 kInlineRows = 32 << 10;  // floats of new rows, alike

// Returns the output that is an updated cache. It has the input's address where both are bound to one buffer; otherwise
// all rows are copied, as the output then is a tensor of its own.
template <class Cell>
Cell* updated_cache(const Context& context, std::size_t output, const Tensor& cache) {
    Cell* updated = context.output<Cell>(output, cache.dims);
    if (updated != cache.data<Cell>()) {
        std::memcpy(updated, cache.data<Cell>(), static_cast<std::size_t>(cache.dims.size()) * sizeof(Cell));
    }
    return updated;
}

// "Int8CachedAttention" or "CachedAttention".
constexpr const char* op_name(const char* int8_name, bool is_int8) { return is_int8 ? int8_name : int8_name + 4; }

// `Num` caches in a row among the inputs or outputs of an op, from `First` on; of int8 caches each has its scales after it.
template <bool IsInt8, std::size_t First, std::size_t Num>
struct CachePlaces {
    static constexpr std::size_t kEach = IsInt8 ? 2 : 1, kEnd = First + Num * kEach;
    static constexpr abi::ElementType type(std::size_t i) {
        return IsInt8 && i >= First && i < kEnd && (i - First) % 2 == 0 ? abi::kInt8 : abi::kFloat;
    }
};

// A cache of a call, with its scales where it is int8.
template <bool IsInt8>
struct Cache {
    Cache(const Context& context, std::size_t input) : rows(context.input(input)) {
        if constexpr (IsInt8) scales = context.input(input + 1);
    }
    void check(const std::string& op) const {
        if constexpr (IsInt8) expect_dims(op, "scales", scales.dims, rows.dims.with_last(num_groups(rows.dims.last())));
    }
    CacheRows read() const {
        const i64 width = rows.dims.last();
        if constexpr (IsInt8) return {nullptr, rows.data<std::int8_t>(), scales.data<float>(), width};
        return {rows.data<float>(), nullptr, nullptr, width};
    }
    // The rows of output `output`.
    CacheRows update(const Context& context, std::size_t output) const {
        const i64 width = rows.dims.last();
        if constexpr (IsInt8) {
            std::int8_t* levels = updated_cache<std::int8_t>(context, output, rows);
            return {nullptr, levels, updated_cache<float>(context, output + 1, scales), width};
        } else {
            return {updated_cache<float>(context, output, rows), nullptr, nullptr, width};
        }
    }
    Tensor rows, scales;
};

// Refuses dims and lengths by which something outside a tensor would be read or written.
template <bool IsInt8>
void check_step(const AttentionStep& step, const Cache<IsInt8>& k_cache, const Cache<IsInt8>& v_cache,
                const Tensor& lengths, const Tensor& tree_mask, const std::string& op) {
    const Dims cache{step.batch, step.kv_heads, step.rows, step.head_dim};
    expect_dims(op, "k_cache", k_cache.rows.dims, cache);
    expect_dims(op, "v_cache", v_cache.rows.dims, cache);
    k_cache.check(op);
    v_cache.check(op);
    expect_dims(op, "lengths", lengths.dims, Dims{step.batch});
    expect_dims(op, "tree_mask", tree_mask.dims, Dims{step.batch, step.nodes, step.nodes});
    if (step.heads < 1 || step.kv_heads < 1 || step.head_dim < 1 || step.heads % step.kv_heads != 0) {
        throw Error(std::to_string(step.heads) + " heads of Q, expected a multiple of the " +
                    std::to_string(step.kv_heads) + " of K; build the bundle again");
    }
    for (i64 slot = 0; slot < step.batch; slot++) {
        const i64 length = step.lengths[slot];
        if (length < 0 || length > step.rows - step.nodes) {
            throw Error("lengths[" + std::to_string(slot) + "] is " + std::to_string(length) + " and there are " +
                        std::to_string(step.nodes) + " nodes, expected at least 0 and all nodes within the " +
                        std::to_string(step.rows) + " rows of the caches; shorten the prompt");
        }
    }
}

inline void check_positions(const AttentionStep& step, const Visibility& seen, i64 num_positions) {
    for (i64 i = 0; i < step.batch * step.nodes; i++) {
        const i64 position = seen.nodes[i].position;
        if (position < 0 || position >= num_positions) {
            throw Error("a node at position " + std::to_string(position) + ", expected one below the " +
                        std::to_string(num_positions) + " of the rotary embedding; shorten the prompt");
        }
    }
}

inline float* block_memory(const AttentionStep& step) {
    thread_local Scratch scratch;
    return scratch.get<float>(static_cast<std::size_t>(task_floats(step)));
}

// Attends from all queries; the rows of the nodes are in the caches.
inline void attend_all(const Context& context, const AttentionStep& step, const Visibility& seen) {
    const i64 pairs = step.batch * step.kv_heads, queries = step.nodes * step.group();
    // Tasks of whole blocks of queries, nearly equal, at least two for each core where there are so many blocks.
    const i64 blocks = ceil_div(queries, kQueries);
    const i64 parts = std::min(blocks, std::max(ceil_div(queries, kTaskQueries), ceil_div(2 * kNumCores, std::max<i64>(pairs, 1))));
    std::atomic<bool> has_memory{true};
    const auto task = [&](std::size_t number) {
        const i64 pair = static_cast<i64>(number) / parts, part = static_cast<i64>(number) % parts;
        const i64 first = blocks * part / parts * kQueries, end = std::min(queries, blocks * (part + 1) / parts * kQueries);
        try {
            attend(step, seen, pair / step.kv_heads, pair % step.kv_heads, first, end, block_memory(step));
        } catch (const Error&) {
            has_memory = false;
        }
    };
    i64 work = 0;
    for (i64 slot = 0; slot < step.batch; slot++) {
        work += (step.lengths[slot] + step.nodes) * step.heads * step.nodes * step.head_dim;
    }
    if (work > kInlineWork / context.cheapness()) {
        context.parallel(static_cast<std::size_t>(pairs * parts), task);
    } else {
        for (i64 number = 0; number < pairs * parts; number++) task(static_cast<std::size_t>(number));
    }
    if (!has_memory) throw Error("out of memory");
}

// Writes the rows of the nodes where the step has K and V, and attends.
inline void run_attention(const Context& context, const AttentionStep& step, i64 num_positions) {
    thread_local Scratch scratch;
    i64* memory = scratch.get<i64>(static_cast<std::size_t>(visibility_size(step.batch, step.nodes)));
    const Visibility seen = see(step, memory);
    if (step.preparation.cos != nullptr) check_positions(step, seen, num_positions);
    const i64 pairs = step.batch * step.kv_heads;
    std::atomic<bool> has_memory{true};
    const auto write = [&](std::size_t pair) {
        const i64 index = static_cast<i64>(pair);
        try {
            write_rows(step, seen, index / step.kv_heads, index % step.kv_heads, block_memory(step));
        } catch (const Error&) {
            has_memory = false;
        }
    };
    // Every row is written before any is read, as a node's queries may be another task's than its row.
    if (step.k.data != nullptr) {
        if (pairs * step.nodes * step.head_dim > kInlineRows / context.cheapness()) {
            context.parallel(static_cast<std::size_t>(pairs), write);
        } else {
            for (i64 pair = 0; pair < pairs; pair++) write(static_cast<std::size_t>(pair));
        }
    }
    if (!has_memory) throw Error("out of memory");
    attend_all(context, step, seen);
}

// Fills what is rotated by tables [positions, columns / 2]; returns for how many positions there are rotations.
inline i64 set_rotation(Preparation& how, const std::string& op, const Tensor& cos, const Tensor& sin, i64 columns,
                        bool is_interleaved) {
    if (cos.dims.rank != 2) throw Error("cos must have 2 dims");
    expect_dims(op, "cos", cos.dims, Dims{cos.dims[0], columns / 2});
    expect_dims(op, "sin", sin.dims, cos.dims);
    how.cos = cos.data<float>();
    how.sin = sin.data<float>();
    how.rotary_dim = columns;
    how.is_interleaved = is_interleaved;
    return cos.dims[0];
}

// The columns of a head that are rotated; 0 stands for all.
inline i64 rotary_columns_of(const Info& info, i64 head_dim) {
    const i64 rotary_dim = info.integer("rotary_dim"), columns = rotary_dim == 0 ? head_dim : rotary_dim;
    if (columns < 0 || columns > head_dim || columns % 2 != 0) {
        throw Error("rotary_dim " + std::to_string(rotary_dim) +
                    ", expected an even number up to head_dim; build the bundle again");
    }
    return columns;
}

struct AttentionAttributes {
    explicit AttentionAttributes(const Info& info, bool has_softcap = true)
        : op(info.op),
          scale(info.real("scale")),
          softcap(has_softcap ? info.real("softcap") : 0),
          window(info.integer("window")) {
        if (softcap < 0 || window < 0) throw Error("a negative softcap or window; build the bundle again");
    }
    void set(AttentionStep& step) const {
        step.scale = scale;
        step.softcap = softcap;
        step.window = window;
    }
    std::string op;
    float scale, softcap;
    i64 window;
};

enum class AttentionKind { kPlain, kSinks, kLatent };

// q [batch, heads, nodes, head_dim], k, v, k_cache, v_cache, lengths, tree_mask [, sinks [heads]]
// -> out [batch, nodes, heads, head_dim]. Latent: K is V too, in one cache, and v and v_cache are no inputs.
template <AttentionKind Kind, bool IsInt8>
struct CachedAttention {
    static constexpr bool kHasSinks = Kind == AttentionKind::kSinks, kIsLatent = Kind == AttentionKind::kLatent;
    static constexpr const char* kName = op_name(kHasSinks   ? "Int8SinkAttention"
                                                 : kIsLatent ? "Int8LatentAttention"
                                                             : "Int8CachedAttention",
                                                 IsInt8);
    using Places = CachePlaces<IsInt8, kIsLatent ? 2 : 3, kIsLatent ? 1 : 2>;
    using Updates = CachePlaces<IsInt8, 1, kIsLatent ? 1 : 2>;
    static constexpr std::size_t kCaches = kIsLatent ? 2 : 3, kLengths = Places::kEnd;  // indices of inputs
    struct InputTypes {
        constexpr abi::ElementType operator[](std::size_t i) const {
            return i == kLengths ? abi::kInt64 : i == kLengths + 1 ? abi::kBool : Places::type(i);
        }
        constexpr std::size_t size() const { return kLengths + 2 + kHasSinks; }
    };
    static constexpr InputTypes kInputs{};
    struct OutputTypes {
        constexpr abi::ElementType operator[](std::size_t i) const { return Updates::type(i); }
        constexpr std::size_t size() const { return Updates::kEnd; }
    };
    static constexpr OutputTypes kOutputs{};
    static constexpr std::size_t kNumOptional = 0;

    explicit CachedAttention(const Info& info) : attributes(info, !kHasSinks) {}

    void run(const Context& context) const {
        const Tensor q = context.input(0), k = context.input(1), v = context.input(kIsLatent ? 1 : 2),
                     lengths = context.input(kLengths), tree_mask = context.input(kLengths + 1);
        const Cache<IsInt8> k_cache(context, kCaches), v_cache(context, kLengths - Places::kEach);
        AttentionStep step{};
        if (q.dims.rank != 4 || k_cache.rows.dims.rank != 4) throw Error("q and k_cache must have 4 dims");
        step.batch = q.dims[0], step.heads = q.dims[1], step.nodes = q.dims[2], step.head_dim = q.dims[3];
        step.kv_heads = k_cache.rows.dims[1], step.rows = k_cache.rows.dims[2];
        const Dims rows{step.batch, step.kv_heads, step.nodes, step.head_dim};
        expect_dims(attributes.op, "k", k.dims, rows);
        expect_dims(attributes.op, "v", v.dims, rows);
        step.lengths = lengths.data<i64>();
        step.tree = tree_mask.data<std::uint8_t>();
        check_step(step, k_cache, v_cache, lengths, tree_mask, attributes.op);
        const auto heads = [&](const Tensor& tensor, i64 num) {
            const i64 head = step.nodes * step.head_dim;
            return HeadRows{tensor.data<float>(), num * head, head, step.head_dim};
        };
        step.q = heads(q, step.heads), step.k = heads(k, step.kv_heads), step.v = heads(v, step.kv_heads);
        attributes.set(step);
        if constexpr (kHasSinks) {
            const Tensor sinks = context.input(kLengths + 2);
            expect_dims(attributes.op, "sinks", sinks.dims, Dims{step.heads});
            step.sinks = sinks.data<float>();
        }
        step.out = context.output<float>(0, Dims{step.batch, step.nodes, step.heads, step.head_dim});
        step.k_cache = k_cache.update(context, 1);
        step.v_cache = kIsLatent ? step.k_cache : v_cache.update(context, 1 + Updates::kEach);
        run_attention(context, step, 0);
    }

    const AttentionAttributes attributes;
};

// q [batch, heads, nodes, head_dim], k_cache, v_cache, lengths, tree_mask -> out [batch, nodes, heads, head_dim]. The
// caches are those that another layer has updated in this step: nothing is written.
template <bool IsInt8>
struct SharedAttention {
    static constexpr const char* kName = op_name("Int8SharedAttention", IsInt8);
    using Places = CachePlaces<IsInt8, 1, 2>;
    struct InputTypes {
        constexpr abi::ElementType operator[](std::size_t i) const {
            return i == Places::kEnd ? abi::kInt64 : i == Places::kEnd + 1 ? abi::kBool : Places::type(i);
        }
        constexpr std::size_t size() const { return Places::kEnd + 2; }
    };
    static constexpr InputTypes kInputs{};
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat};
    static constexpr std::size_t kNumOptional = 0;

    explicit SharedAttention(const Info& info) : attributes(info) {}

    void run(const Context& context) const {
        const Tensor q = context.input(0), lengths = context.input(Places::kEnd),
                     tree_mask = context.input(Places::kEnd + 1);
        const Cache<IsInt8> k_cache(context, 1), v_cache(context, 1 + Places::kEach);
        AttentionStep step{};
        if (q.dims.rank != 4 || k_cache.rows.dims.rank != 4) throw Error("q and k_cache must have 4 dims");
        step.batch = q.dims[0], step.heads = q.dims[1], step.nodes = q.dims[2], step.head_dim = q.dims[3];
        step.kv_heads = k_cache.rows.dims[1], step.rows = k_cache.rows.dims[2];
        step.lengths = lengths.data<i64>();
        step.tree = tree_mask.data<std::uint8_t>();
        check_step(step, k_cache, v_cache, lengths, tree_mask, attributes.op);
        const i64 head = step.nodes * step.head_dim;
        step.q = {q.data<float>(), step.heads * head, head, step.head_dim};
        attributes.set(step);
        step.out = context.output<float>(0, Dims{step.batch, step.nodes, step.heads, step.head_dim});
        step.k_cache = k_cache.read();
        step.v_cache = v_cache.read();
        run_attention(context, step, 0);
    }

    const AttentionAttributes attributes;
};

// qkv [batch, nodes, (heads + 2 kv_heads) * head_dim], [q_gamma, k_gamma,] [cos, sin,] k_cache, v_cache, lengths,
// tree_mask, num_rows -> out [batch, nodes, heads * head_dim]. The last input is for the function body alone.
template <bool HasNorm, bool IsRotary, bool IsInt8>
struct QkvAttention {
    static constexpr const char* kName =
        op_name(HasNorm ? (IsRotary ? "Int8NormRotaryQkvAttention" : "Int8NormQkvAttention")
                        : (IsRotary ? "Int8RotaryQkvAttention" : "Int8QkvAttention"),
                IsInt8);
    static constexpr std::size_t kCaches = 1 + 2 * HasNorm + 2 * IsRotary;  // index of the first cache
    using Places = CachePlaces<IsInt8, kCaches, 2>;
    using Updates = CachePlaces<IsInt8, 1, 2>;
    static constexpr std::size_t kLengths = Places::kEnd;  // tree_mask and num_rows follow
    struct InputTypes {
        constexpr abi::ElementType operator[](std::size_t i) const {
            if (i == kLengths + 1) return abi::kBool;
            return i == kLengths || i == kLengths + 2 ? abi::kInt64 : Places::type(i);
        }
        constexpr std::size_t size() const { return kLengths + 3; }
    };
    static constexpr InputTypes kInputs{};
    struct OutputTypes {
        constexpr abi::ElementType operator[](std::size_t i) const { return Updates::type(i); }
        constexpr std::size_t size() const { return Updates::kEnd; }
    };
    static constexpr OutputTypes kOutputs{};
    static constexpr std::size_t kNumOptional = 0;

    explicit QkvAttention(const Info& info)
        : attributes(info),
          heads(info.integer("num_heads")),
          kv_heads(info.integer("num_kv_heads")),
          head_dim(info.integer("head_dim")) {
        if constexpr (HasNorm) epsilon = info.real("epsilon");
        if constexpr (IsRotary) {
            rotary_columns = rotary_columns_of(info, head_dim);
            is_interleaved = info.integer("interleaved") != 0;
        }
    }

    void run(const Context& context) const {
        const Tensor qkv = context.input(0), lengths = context.input(kLengths), tree_mask = context.input(kLengths + 1);
        const Cache<IsInt8> k_cache(context, kCaches), v_cache(context, kCaches + Places::kEach);
        AttentionStep step{};
        if (qkv.dims.rank != 3 || k_cache.rows.dims.rank != 4) throw Error("qkv must have 3 dims and k_cache 4");
        step.batch = qkv.dims[0], step.nodes = qkv.dims[1], step.rows = k_cache.rows.dims[2];
        step.heads = heads, step.kv_heads = kv_heads, step.head_dim = head_dim;
        const i64 width = (heads + 2 * kv_heads) * head_dim;
        expect_dims(attributes.op, "qkv", qkv.dims, Dims{step.batch, step.nodes, width});
        step.lengths = lengths.data<i64>();
        step.tree = tree_mask.data<std::uint8_t>();
        check_step(step, k_cache, v_cache, lengths, tree_mask, attributes.op);
        const float* data = qkv.data<float>();
        const i64 slot = step.nodes * width;
        step.q = {data, slot, head_dim, width};
        step.k = {data + heads * head_dim, slot, head_dim, width};
        step.v = {data + (heads + kv_heads) * head_dim, slot, head_dim, width};
        const i64 num_positions = prepare(context, step.preparation);
        attributes.set(step);
        step.out = context.output<float>(0, Dims{step.batch, step.nodes, heads * head_dim});
        step.k_cache = k_cache.update(context, 1);
        step.v_cache = v_cache.update(context, 1 + Updates::kEach);
        run_attention(context, step, num_positions);
    }

    // Fills what is done to Q and K; returns for how many positions there are rotations.
    i64 prepare(const Context& context, Preparation& how) const {
        if constexpr (HasNorm) {
            const Tensor q_gamma = context.input(1), k_gamma = context.input(2);
            expect_dims(attributes.op, "q_gamma", q_gamma.dims, Dims{head_dim});
            expect_dims(attributes.op, "k_gamma", k_gamma.dims, Dims{head_dim});
            how.q_gamma = q_gamma.data<float>();
            how.k_gamma = k_gamma.data<float>();
            how.epsilon = epsilon;
        }
        if constexpr (IsRotary) {
            const Tensor cos = context.input(kCaches - 2), sin = context.input(kCaches - 1);
            return set_rotation(how, attributes.op, cos, sin, rotary_columns, is_interleaved);
        }
        return 0;
    }

    const AttentionAttributes attributes;
    const i64 heads, kv_heads, head_dim;
    float epsilon = 0;
    i64 rotary_columns = 0;
    bool is_interleaved = false;
};

// q [batch, nodes, heads * head_dim], cos, sin, k_cache, v_cache, positions, limits [batch, nodes] -> out as q. Nothing
// is written to the caches. A node sees the rows below its limit, so each is a slot of its own, of the slot's caches.
template <bool IsInt8>
struct RotaryCrossAttention {
    static constexpr const char* kName = op_name("Int8RotaryCrossAttention", IsInt8);
    using Places = CachePlaces<IsInt8, 3, 2>;
    struct InputTypes {
        constexpr abi::ElementType operator[](std::size_t i) const {
            return i < Places::kEnd ? Places::type(i) : abi::kInt64;
        }
        constexpr std::size_t size() const { return Places::kEnd + 2; }
    };
    static constexpr InputTypes kInputs{};
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat};
    static constexpr std::size_t kNumOptional = 0;

    explicit RotaryCrossAttention(const Info& info)
        : heads(info.integer("num_heads")),
          head_dim(info.integer("head_dim")),
          rotary_columns(rotary_columns_of(info, head_dim)),
          scale(info.real("scale")),
          is_interleaved(info.integer("interleaved") != 0) {}

    void run(const Context& context) const {
        const Tensor q = context.input(0), cos = context.input(1), sin = context.input(2),
                     positions = context.input(Places::kEnd), limits = context.input(Places::kEnd + 1);
        const Cache<IsInt8> k_cache(context, 3), v_cache(context, 3 + Places::kEach);
        if (q.dims.rank != 3 || k_cache.rows.dims.rank != 4) throw Error("q must have 3 dims and k_cache 4");
        const i64 batch = q.dims[0], nodes = q.dims[1], width = heads * head_dim;
        AttentionStep step{};
        step.batch = batch * nodes, step.nodes = 1, step.heads = heads, step.head_dim = head_dim;
        step.kv_heads = k_cache.rows.dims[1], step.rows = k_cache.rows.dims[2], step.slots_per_cache = nodes;
        expect_dims(kName, "q", q.dims, Dims{batch, nodes, width});
        expect_dims(kName, "k_cache", k_cache.rows.dims, Dims{batch, step.kv_heads, step.rows, head_dim});
        expect_dims(kName, "v_cache", v_cache.rows.dims, k_cache.rows.dims);
        k_cache.check(kName);
        v_cache.check(kName);
        expect_dims(kName, "positions", positions.dims, Dims{batch, nodes});
        expect_dims(kName, "limits", limits.dims, Dims{batch, nodes});
        if (heads < 1 || step.kv_heads < 1 || heads % step.kv_heads != 0) {
            throw Error(std::to_string(heads) + " heads of Q, expected a multiple of the " +
                        std::to_string(step.kv_heads) + " of K; build the bundle again");
        }
        step.q = {q.data<float>(), width, head_dim, width};
        step.scale = scale;
        step.k_cache = k_cache.read();
        step.v_cache = v_cache.read();
        const i64 num_positions = set_rotation(step.preparation, kName, cos, sin, rotary_columns, is_interleaved);
        thread_local Scratch scratch;
        i64* memory = scratch.get<i64>(static_cast<std::size_t>(visibility_size(step.batch, 1) + step.batch));
        i64* lengths = memory + visibility_size(step.batch, 1);
        step.lengths = lengths;
        auto* seen = reinterpret_cast<Visibility::Node*>(memory);
        for (i64 node = 0; node < step.batch; node++) {
            const i64 limit = limits.data<i64>()[node];
            if (limit < 1) {
                throw Error("a node that sees " + std::to_string(limit) + " rows, expected at least 1; report this");
            }
            lengths[node] = limit < step.rows ? limit : step.rows;
            seen[node] = {positions.data<i64>()[node], 0, 0, 0, nullptr};
        }
        check_positions(step, {seen}, num_positions);
        step.out = context.output<float>(0, q.dims);
        attend_all(context, step, {seen});
    }

    const i64 heads, head_dim, rotary_columns;
    const float scale;
    const bool is_interleaved;
};

template <bool IsInt8>
void add_attention_ops_over(OpTable& table) {
    table.push_back(custom_op<CachedAttention<AttentionKind::kPlain, IsInt8>>());
    table.push_back(custom_op<CachedAttention<AttentionKind::kSinks, IsInt8>>());
    table.push_back(custom_op<CachedAttention<AttentionKind::kLatent, IsInt8>>());
    table.push_back(custom_op<SharedAttention<IsInt8>>());
    table.push_back(custom_op<QkvAttention<false, false, IsInt8>>());
    table.push_back(custom_op<QkvAttention<false, true, IsInt8>>());
    table.push_back(custom_op<QkvAttention<true, false, IsInt8>>());
    table.push_back(custom_op<QkvAttention<true, true, IsInt8>>());
    table.push_back(custom_op<RotaryCrossAttention<IsInt8>>());
}

inline void add_attention_ops(OpTable& table) {
    add_attention_ops_over<false>(table);
    add_attention_ops_over<true>(table);
}

}  // namespace speccompile::cpu
