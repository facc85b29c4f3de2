// SPDX-License-Identifier: Apache-2.0
// SpecVerify: arguments, workspace, and the chunks in which a row of logits is read.
#pragma once

#include "common.cuh"

namespace speccompile {

constexpr int CHUNK = 256;  // entries that one warp reduces at once: 16 bytes a lane in half precision
constexpr int LANE_ENTRIES = CHUNK / WARP;
constexpr int CHUNKS_IN_FLIGHT = 4;  // chunks that a warp loads at once: 64 bytes a lane in half precision
constexpr int SCAN_THREADS = 256;
#if defined(SPECCOMPILE_RESOLVE_THREADS)
constexpr int RESOLVE_THREADS = SPECCOMPILE_RESOLVE_THREADS;
#else
constexpr int RESOLVE_THREADS = 512;
#endif
constexpr int RESOLVE_WARPS = RESOLVE_THREADS / WARP;
constexpr int MAX_CHUNKS = 2048;  // vocab <= 524288: what fits into 48 KiB of shared memory
constexpr int MAX_NODES = 256;
constexpr int MAX_CANDIDATES = 2048;

enum class Dtype : int { F32, F16, BF16 };

struct SpecVerifyParams {
    const void* logits;
    const i64* tokens;
    const i64* parents;
    const float* draft_probs;
    const float* uniforms;
    const float* temperature;
    const i64* top_k;
    const float* top_p;
    const i64* d2t;  // may be null
    i64* path;
    i64* num_accepted;
    i64* next_token;
    void* workspace;
    int batch;
    int nodes;
    int vocab;
    int draft_vocab;
    Dtype dtype;
};

// The distribution of a row: entries with key > key_min, and those with key == key_min up to index last_tie.
struct Dist {
    float top;  // greatest scaled logit
    u32 key_min;
    u32 last_tie;
    float scale;   // 1 / total
    double total;  // sum of exp(scaled - top) over the entries kept
};

struct Outcome {
    int child;  // child of this node that is kept, -1 = none
    int token;  // next token when no child is kept
};

__device__ inline int num_chunks(int vocab) { return (vocab + CHUNK - 1) / CHUNK; }

// What the first pass records of a chunk: its greatest scaled logit and the sum of exp(scaled - top); for greedy slots the
// index of the first entry that has the top; for races over whole rows the winner's scaled logit less the logarithm of its
// time, and its index.
struct alignas(8) Cell {
    float top;
    union {
        float mass;
        u32 index;
    };
};

// Workspace, in this order: per row and chunk its cell, per row distribution and outcome, per slot a counter, per
// target token its draft token. Nothing in it needs to be cleared.
struct Workspace {
    Cell* cells;
    Dist* dists;
    Outcome* outcomes;
    u32* counters;
    u32* inverse;

    __device__ explicit Workspace(const SpecVerifyParams& params) {
        const i64 rows = static_cast<i64>(params.batch) * params.nodes;
        cells = static_cast<Cell*>(params.workspace);
        dists = reinterpret_cast<Dist*>(cells + rows * num_chunks(params.vocab));
        outcomes = reinterpret_cast<Outcome*>(dists + rows);
        counters = reinterpret_cast<u32*>(outcomes + rows);
        inverse = counters + params.batch;
    }
};

// Reads what another block of this launch has written, bypassing this multiprocessor's own cache.
template <typename T>
__device__ inline T fresh(const T* source) {
    union {
        u32 words[sizeof(T) / 4];
        T value;
    };
    for (unsigned i = 0; i < sizeof(T) / 4; ++i) words[i] = reinterpret_cast<const volatile u32*>(source)[i];
    return value;
}

// False for a node that no path leads to: padding, or a parent that is not before it (node 0's parent is not read).
__device__ inline bool is_reachable(const SpecVerifyParams& params, int slot, int node) {
    const i64 parent = params.parents[static_cast<i64>(slot) * params.nodes + node];
    return node == 0 || (parent >= 0 && parent < node);
}

__device__ inline bool has_draft_probs(const SpecVerifyParams& params) { return params.draft_vocab > 1; }

// Slots at lower temperatures are greedy: the division would overflow (`core.sampling.COLDEST`).
__device__ inline bool is_hot(float temperature) { return temperature >= 0x1p-64f; }

struct Cuts {
    i64 top_k;
    float top_p;
    bool cuts_k, cuts_p;

    __device__ Cuts(const SpecVerifyParams& params, int slot)
        : top_k(params.top_k[slot]), top_p(params.top_p[slot]), cuts_k(top_k > 0 && top_k < params.vocab),
          cuts_p(top_p < 1.0f) {}
    __device__ bool any() const { return cuts_k || cuts_p; }
};

// Correctly rounded x / temperature, as the twin divides in float32: a correctly rounded reciprocal and two
// corrections (Markstein 1990), 5 instructions instead of about 10. Outside of the safe range it divides.
struct Divider {
    float divisor, reciprocal;
    bool is_usual;

    __device__ explicit Divider(float temperature)
        : divisor(temperature), reciprocal(1.0f / temperature), is_usual(divisor > 0x1p-40f && divisor < 0x1p40f) {}

    __device__ float operator()(float x) const {
        if (divisor == 1.0f) return x;
        const float first = x * reciprocal;
        const float second = fmaf(fmaf(-first, divisor, x), reciprocal, first);
        const float third = fmaf(fmaf(-second, divisor, x), reciprocal, second);
        const float size = fabsf(x);
        if (is_usual && size > 0x1p-60f && size < 0x1p60f) return third;
        if (size == 0 || size > 0x1.fffffep127f) return x;  // masked entries are minus infinity
        return x / divisor;
    }
};

// x / temperature for the sums of the first pass: correctly rounded except for about one in several million (off by
// one ulp), since the reciprocal is in two parts. Both are positive, so minus infinity is kept.
struct Quotient {
    float high, low;

    __device__ explicit Quotient(const Divider& divide) {
        const float near = fminf(divide.reciprocal, 0x1.fffffep127f);  // temperatures below 2^-128 have an infinite one
        high = __uint_as_float(__float_as_uint(near) - 1);
        low = fmaxf(fmaf(-divide.divisor, high, 1.0f) * near, 0x1p-149f);
    }

    __device__ float operator()(float x) const { return fmaf(x, high, x * low); }
};

template <typename T>
__device__ constexpr u32 lowest_pair();  // minus infinity, as often as it fits into a word
template <>
__device__ constexpr u32 lowest_pair<float>() { return 0xff800000u; }
template <>
__device__ constexpr u32 lowest_pair<Float16>() { return 0xfc00fc00u; }
template <>
__device__ constexpr u32 lowest_pair<BFloat16>() { return 0xff80ff80u; }

// One row, read by chunks. Entry j of a lane is at offset_of(j) in the chunk; offsets rise with j.
template <typename T>
struct Row {
    static constexpr int VECTOR_ENTRIES = 16 / sizeof(T);
    const T* values;
    int vocab;
    bool is_vector;  // rows start at multiples of 16 bytes

    __device__ Row(const SpecVerifyParams& params, i64 row)
        : values(static_cast<const T*>(params.logits) + row * params.vocab),
          vocab(params.vocab),
          is_vector(params.vocab % VECTOR_ENTRIES == 0 && reinterpret_cast<u64>(params.logits) % 16 == 0) {}

    // Entries of one chunk that a lane holds, as in memory.
    union Raw {
        uint4 vectors[LANE_ENTRIES / VECTOR_ENTRIES];
        T values[LANE_ENTRIES];
    };

    template <bool IS_VECTOR>
    __device__ static int offset_of(int j) {
        constexpr int PACK = IS_VECTOR ? VECTOR_ENTRIES : 1;
        return j / PACK * (WARP * PACK) + static_cast<int>(threadIdx.x) % WARP * PACK + j % PACK;
    }

    // Only reads, so that a warp can request several chunks before it waits for the first. Entries past the end of
    // the row are minus infinity.
    template <bool IS_VECTOR>
    __device__ Raw fetch(int chunk) const {
        constexpr int PACK = IS_VECTOR ? VECTOR_ENTRIES : 1;
        constexpr u32 LOWEST = lowest_pair<T>();
        Raw raw;
#pragma unroll
        for (int i = 0; i < LANE_ENTRIES / VECTOR_ENTRIES; ++i) raw.vectors[i] = {LOWEST, LOWEST, LOWEST, LOWEST};
#pragma unroll
        for (int pack = 0; pack < LANE_ENTRIES / PACK; ++pack) {
            const int index = chunk * CHUNK + offset_of<IS_VECTOR>(pack * PACK);
            if (index >= vocab) continue;
            if (IS_VECTOR) {
                raw.vectors[pack] = *reinterpret_cast<const uint4*>(values + index);
            } else {
                raw.values[pack] = values[index];
            }
        }
        return raw;
    }
};

// A row of any type, for the second part, which reads little and is compiled once for all types.
struct AnyRow {
    const void* logits;
    Dtype dtype;
    int vocab;
    i64 start;  // of the row, in entries

    __device__ AnyRow(const SpecVerifyParams& params, i64 row)
        : logits(params.logits), dtype(params.dtype), vocab(params.vocab), start(row * params.vocab) {}

    // Lanes hold neighbouring entries, so that draft probabilities too are read in whole cache lines.
    __device__ static int offset_of(int j) { return j * WARP + static_cast<int>(threadIdx.x) % WARP; }
    // Each lane holds consecutive entries of the chunk.
    __device__ static int run_of(int j) { return static_cast<int>(threadIdx.x) % WARP * LANE_ENTRIES + j; }

    __device__ float at(int index) const {
        const i64 entry = start + index;
        if (dtype == Dtype::F16) return float_from(static_cast<const Float16*>(logits)[entry]);
        if (dtype == Dtype::BF16) return float_from(static_cast<const BFloat16*>(logits)[entry]);
        return static_cast<const float*>(logits)[entry];
    }

    template <typename T>
    __device__ void load_as(int first, int stride, float (&entries)[LANE_ENTRIES]) const {
        const T* values = static_cast<const T*>(logits) + start;
#pragma unroll
        for (int j = 0; j < LANE_ENTRIES; ++j) {
            const int index = first + j * stride;
            entries[j] = index < vocab ? float_from(values[index]) : minus_infinity();
        }
    }

    __device__ void load_from(int first, int stride, float (&entries)[LANE_ENTRIES]) const {
        if (dtype == Dtype::F16) return load_as<Float16>(first, stride, entries);
        if (dtype == Dtype::BF16) return load_as<BFloat16>(first, stride, entries);
        load_as<float>(first, stride, entries);
    }

    __device__ void load(int chunk, float (&entries)[LANE_ENTRIES]) const {
        load_from(chunk * CHUNK + offset_of(0), WARP, entries);
    }
    __device__ void load_run(int chunk, float (&entries)[LANE_ENTRIES]) const {
        load_from(chunk * CHUNK + run_of(0), 1, entries);
    }
};

}  // namespace speccompile
