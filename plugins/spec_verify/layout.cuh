// SPDX-License-Identifier: Apache-2.0
// SpecVerify: arguments, workspace, and the chunks that a row of logits is read in.
#pragma once

#include "common.cuh"

namespace speccompile {

constexpr int CHUNK = 256;  // entries that one warp reduces at once: 16 bytes a lane in half precision
constexpr int LANE_ENTRIES = CHUNK / WARP;
constexpr int CHUNKS_IN_FLIGHT = 4;  // chunks that a warp has open at once: 64 bytes a lane in half precision
constexpr int SCAN_THREADS = 256;
#if defined(SPECCOMPILE_SETTLE_THREADS)
constexpr int SETTLE_THREADS = SPECCOMPILE_SETTLE_THREADS;
#else
constexpr int SETTLE_THREADS = 512;
#endif
constexpr int SETTLE_WARPS = SETTLE_THREADS / WARP;
constexpr int MAX_CHUNKS = 2048;  // vocab <= 524288: what shared memory of 48 KiB holds
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

// The law of a row: entries with key > key_min, and of those with key == key_min the ones up to index last_tie.
struct Law {
    float top;  // greatest scaled logit
    u32 key_min;
    u32 last_tie;
    float scale;   // 1 / total
    double total;  // sum of exp(scaled - top) over the entries kept
};

struct Outcome {
    int child;  // node that is kept behind this one, -1 = none
    int token;  // what follows when none is kept
};

__device__ inline int num_chunks(int vocab) { return (vocab + CHUNK - 1) / CHUNK; }

// Workspace, in this order: per row and chunk mass (double) and top (float), per row law and outcome, per slot a
// counter, per target token its draft token. Nothing in it needs to be cleared.
struct Workspace {
    double* masses;
    float* tops;
    Law* laws;
    Outcome* outcomes;
    u32* counters;
    u32* inverse;

    __device__ explicit Workspace(const SpecVerifyParams& params) {
        const i64 rows = static_cast<i64>(params.batch) * params.nodes, cells = rows * num_chunks(params.vocab);
        masses = static_cast<double*>(params.workspace);
        laws = reinterpret_cast<Law*>(masses + cells);
        outcomes = reinterpret_cast<Outcome*>(laws + rows);
        tops = reinterpret_cast<float*>(outcomes + rows);
        counters = reinterpret_cast<u32*>(tops + cells);
        inverse = counters + params.batch;
    }
};

// A node that nothing leads to: padding, or (node 0 excepted, whose parent is not read) a parent that is no ancestor.
__device__ inline bool is_reachable(const SpecVerifyParams& params, int slot, int node) {
    const i64 parent = params.parents[static_cast<i64>(slot) * params.nodes + node];
    return node == 0 || (parent >= 0 && parent < node);
}

__device__ inline bool has_laws(const SpecVerifyParams& params) { return params.draft_vocab > 1; }

// Correctly rounded x / temperature, as the twin divides in float32, by a correctly rounded reciprocal and two
// corrections (Markstein 1990): 5 instructions for some 10. Outside of the safe range the division itself.
struct Divider {
    float divisor, reciprocal;

    __device__ explicit Divider(float temperature) : divisor(temperature), reciprocal(1.0f / temperature) {}

    __device__ float operator()(float x) const {
        if (divisor == 1.0f) return x;
        const float first = x * reciprocal;
        const float second = fmaf(fmaf(-first, divisor, x), reciprocal, first);
        const float third = fmaf(fmaf(-second, divisor, x), reciprocal, second);
        const float size = fabsf(third), size_x = fabsf(x), unit = fabsf(reciprocal);
        const bool is_safe = size > 0x1p-60f && size < 0x1p60f && size_x > 0x1p-60f && unit > 0x1p-60f && unit < 0x1p60f;
        return is_safe ? third : x / divisor;
    }
};

// One row, read by chunks. Entry j of a lane stands at offset_of(j) of the chunk; offsets rise with j.
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

    __device__ int offset_of(int j) const {
        const int pack = is_vector ? VECTOR_ENTRIES : 1, lane = threadIdx.x % WARP;
        return j / pack * (WARP * pack) + lane * pack + j % pack;
    }

    // Entries behind the end of the row are minus infinity.
    __device__ void load(int chunk, float (&entries)[LANE_ENTRIES]) const {
        const int start = chunk * CHUNK, lane = threadIdx.x % WARP;
        if (is_vector) {
#pragma unroll
            for (int group = 0; group < LANE_ENTRIES / VECTOR_ENTRIES; ++group) {
                const int index = start + (group * WARP + lane) * VECTOR_ENTRIES;
                union {
                    uint4 vector;
                    T parts[VECTOR_ENTRIES];
                } loaded;
                if (index < vocab) loaded.vector = *reinterpret_cast<const uint4*>(values + index);
#pragma unroll
                for (int k = 0; k < VECTOR_ENTRIES; ++k)
                    entries[group * VECTOR_ENTRIES + k] = index < vocab ? float_from(loaded.parts[k]) : minus_infinity();
            }
        } else {
#pragma unroll
            for (int j = 0; j < LANE_ENTRIES; ++j) {
                const int index = start + j * WARP + lane;
                entries[j] = index < vocab ? float_from(values[index]) : minus_infinity();
            }
        }
    }
};

// A row of whatever type, for the parts that read little: they are compiled once for all types.
struct AnyRow {
    const SpecVerifyParams& params;
    i64 row;

    template <typename Use>
    __device__ auto with(Use use) const {
        if (params.dtype == Dtype::F16) return use(Row<Float16>(params, row));
        if (params.dtype == Dtype::BF16) return use(Row<BFloat16>(params, row));
        return use(Row<float>(params, row));
    }
    __device__ int offset_of(int j) const {
        return with([j](const auto& typed) { return typed.offset_of(j); });
    }
    __device__ void load(int chunk, float (&entries)[LANE_ENTRIES]) const {
        with([&](const auto& typed) { typed.load(chunk, entries); });
    }
    __device__ float at(int index) const {
        return with([index](const auto& typed) { return float_from(typed.values[index]); });
    }
};

}  // namespace speccompile
