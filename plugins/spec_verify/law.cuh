// SPDX-License-Identifier: Apache-2.0
// SpecVerify, second part: from the tops and masses of a row's chunks to its law, and from a law to a token.
// top_k and top_p are found among the few chunks whose tops reach the threshold; only these are read again.
#pragma once

#include "spec_verify/layout.cuh"

namespace speccompile {

constexpr int FIRST_TIER = 32;        // chunks that are read again first where top_p alone cuts
constexpr int TIER_GROWTH = 8;
constexpr float MASS_UNIT = 0x1p44f;  // masses as integers: sums do not depend on their order; 2^19 * 2^44 fits

struct Shared {
    union {
        struct {
            u32 keys[MAX_CANDIDATES];
            u32 indices[MAX_CANDIDATES];
        } list;
        double trial[MAX_CHUNKS];  // masses of a residual; by then the list has served
    };
    u64 bins[256];
    u64 sums[WARP];
    double reals[WARP];
    float floats[WARP];
    float entries[CHUNK];
    int refused[MAX_NODES];
    float unscale[MAX_NODES];  // 1 / mass of the residual
    u64 above;
    double before;
    u32 digit;
    int count, chunk, last_chunk, drawn, is_kept, is_last_block;
};

// What the threads of a block work on together.
struct Work {
    const SpecVerifyParams& params;
    Shared& shared;
    float* tops;
    double* masses;
    int slot, node;
    AnyRow row;
    Divider divide;
    Law law;
    int num_refused = 0;

    __device__ Work(const SpecVerifyParams& params, Shared& shared, float* tops, double* masses, int slot, int node)
        : params(params), shared(shared), tops(tops), masses(masses), slot(slot), node(node),
          row{params, static_cast<i64>(slot) * params.nodes + node},
          divide(params.temperature[slot] > 0 ? params.temperature[slot] : 1.0f) {}

    __device__ int chunks() const { return num_chunks(params.vocab); }
};

// A set of entries that holds all with key >= low: a list, or (when that is full) the chunks they stand in.
struct Candidates {
    u32 low;
    int count;
    bool is_list;
};

// visit(key, index) for every candidate, each by one thread.
template <typename Visit>
__device__ inline void each_candidate(const Work& work, const Candidates& set, Visit visit) {
    if (set.is_list) {
        for (int i = threadIdx.x; i < set.count; i += SETTLE_THREADS)
            visit(work.shared.list.keys[i], work.shared.list.indices[i]);
        return;
    }
    for (int chunk = threadIdx.x / WARP; chunk < work.chunks(); chunk += SETTLE_WARPS) {
        if (key_from(work.tops[chunk]) < set.low) continue;
        float entries[LANE_ENTRIES];
        work.row.load(chunk, entries);
#pragma unroll
        for (int j = 0; j < LANE_ENTRIES; ++j) {
            const int index = chunk * CHUNK + work.row.offset_of(j);
            const u32 key = key_from(work.divide(entries[j]));
            if (index < work.params.vocab && key >= set.low) visit(key, static_cast<u32>(index));
        }
    }
}

__device__ inline u64 weight_of(u32 key, float top, bool is_exact) {
    const float scaled = float_from_key(key);
    // In double for a list; whole rows in float32, since many GPUs do 64 times less in double.
    if (is_exact) return static_cast<u64>(exp(static_cast<double>(scaled) - static_cast<double>(top)) * MASS_UNIT);
    return static_cast<u64>(__expf(scaled - top) * MASS_UNIT);
}

enum class Order {
    TOPS,     // the chunks' tops, each counts one
    ENTRIES,  // candidates with key >= key_min, each counts one
    MASSES,   // the same, by mass
    TIES,     // candidates with key == key_min, each counts one, rising index before falling
};

struct Selected {
    u32 key;
    u64 above;  // weight of all keys greater than `key`
};

template <typename Add>
__device__ inline void enumerate(const Work& work, const Candidates& set, Order order, u32 key_min, Add add) {
    if (order == Order::TOPS) {
        for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += SETTLE_THREADS) add(key_from(work.tops[chunk]), 1);
        return;
    }
    each_candidate(work, set, [&](u32 key, u32 index) {
        if (order == Order::TIES) {
            if (key == key_min) add(~index, 1);
        } else if (key >= key_min) {
            add(key, order == Order::MASSES ? weight_of(key, work.law.top, set.is_list) : 1);
        }
    });
}

// The greatest key such that the weight of all keys >= it reaches `goal` (1 <= goal <= total weight): radix descent by
// 8 bits.
__device__ __noinline__ Selected select(const Work& work, const Candidates& set, Order order, u32 key_min, u64 goal) {
    Shared& shared = work.shared;
    u32 prefix = 0, mask = 0;
    u64 above = 0;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < 256; bin += SETTLE_THREADS) shared.bins[bin] = 0;
        if (threadIdx.x == 0) {
            shared.digit = 0;
            shared.above = 0;
        }
        __syncthreads();
        enumerate(work, set, order, key_min, [&](u32 key, u64 weight) {
            if ((key & mask) == prefix) atomicAdd(&shared.bins[key >> shift & 255u], weight);
        });
        __syncthreads();
        u64 before = 0;  // of the bins above this thread's
        for (int first = 0; first < 256; first += SETTLE_THREADS) {
            const int place = first + static_cast<int>(threadIdx.x);
            const u64 weight = place < 256 ? shared.bins[255 - place] : 0;
            u64 total;
            const u64 over = above + before + block_scan<SETTLE_THREADS>(weight, shared.sums, total);
            if (weight > 0 && over < goal && over + weight >= goal) {
                shared.digit = static_cast<u32>(255 - place);
                shared.above = over;
            }
            before += total;
        }
        __syncthreads();
        prefix |= shared.digit << shift;
        mask |= 255u << shift;
        above = shared.above;
        __syncthreads();
    }
    return {prefix, above};
}

__device__ __noinline__ Candidates collect(const Work& work, u32 low) {
    const Candidates chunks = {low, 0, false};
    if (low == 0 && work.params.vocab > MAX_CANDIDATES) return chunks;
    Shared& shared = work.shared;
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    each_candidate(work, chunks, [&](u32 key, u32 index) {
        const int place = atomicAdd(&shared.count, 1);
        if (place < MAX_CANDIDATES) {
            shared.list.keys[place] = key;
            shared.list.indices[place] = index;
        }
    });
    __syncthreads();
    const int count = shared.count;
    __syncthreads();
    return {low, count, count <= MAX_CANDIDATES};
}

__device__ __noinline__ u64 weight_from(const Work& work, const Candidates& set, u32 key_min) {
    u64 sum = 0;
    each_candidate(work, set, [&](u32 key, u32) {
        if (key >= key_min) sum += weight_of(key, work.law.top, set.is_list);
    });
    return block_sum<SETTLE_THREADS>(sum, work.shared.sums);
}

// Key of the chunk top of that rank (1 = greatest): at least `rank` entries have it or a greater one.
__device__ inline u32 key_of_top(const Work& work, int rank) {
    if (rank >= work.chunks()) return 0;
    return select(work, {0, 0, false}, Order::TOPS, 0, static_cast<u64>(rank)).key;
}

// Candidates that hold all that top_k (if it cuts) or top_p keeps, and the weight that top_p is measured by.
__device__ inline Candidates gather(const Work& work, i64 top_k, bool cuts_k, float top_p, u64& total) {
    i64 tier = cuts_k ? top_k : FIRST_TIER;
    while (true) {
        const int chunks = work.chunks();
        const u32 low = key_of_top(work, static_cast<int>(tier < chunks ? tier : chunks));
        const Candidates set = collect(work, low);
        if (cuts_k) return set;
        const u64 held = weight_from(work, set, 0);
        if (low == 0) total = held;
        if (low == 0 || static_cast<double>(held) >= static_cast<double>(top_p) * static_cast<double>(total)) return set;
        tier *= TIER_GROWTH;
    }
}

// top_k, then top_p: `work.law` becomes that of the entries kept. Every thread holds the same law.
__device__ __noinline__ void cut(Work& work, i64 top_k, bool cuts_k, float top_p, bool cuts_p) {
    Law& law = work.law;
    Shared& shared = work.shared;
    u64 total = static_cast<u64>(law.total * static_cast<double>(MASS_UNIT));
    const Candidates set = gather(work, top_k, cuts_k, top_p, total);
    if (cuts_k) {
        law.key_min = select(work, set, Order::ENTRIES, 0, static_cast<u64>(top_k)).key;
        total = weight_from(work, set, law.key_min);
    }
    if (cuts_p) {
        // Kept is what has less than top_p of the mass before it, in falling order.
        u64 goal = static_cast<u64>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
        goal = goal < 1 ? 1 : goal > total ? total : goal;
        const Selected edge = select(work, set, Order::MASSES, law.key_min, goal);
        law.key_min = edge.key;
        u64 ties = 0;
        each_candidate(work, set, [&](u32 key, u32) { ties += key == edge.key; });
        ties = block_sum<SETTLE_THREADS>(ties, shared.sums);
        const u64 one = weight_of(edge.key, law.top, set.is_list);
        u64 kept = one > 0 ? (goal - edge.above + one - 1) / one : ties;
        if (kept < ties) {  // the first of them by index
            law.last_tie = ~select(work, set, Order::TIES, edge.key, kept).key;
        } else {
            kept = ties;
        }
        total = edge.above + kept * one;
    }
    law.total = static_cast<double>(total) / static_cast<double>(MASS_UNIT);
    law.scale = static_cast<float>(1.0 / law.total);
}

// From tops and masses of the chunks (in shared memory) to the law. Masses become shares of the whole row, which are
// those of the law unless top_k or top_p cut it; returns whether they did.
__device__ __noinline__ bool settle_law(Work& work) {
    float top = minus_infinity();
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += SETTLE_THREADS) top = fmaxf(top, work.tops[chunk]);
    top = block_max<SETTLE_THREADS>(top, work.shared.floats);
    double sum = 0;
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += SETTLE_THREADS) {
        const double mass = work.masses[chunk] * exp(static_cast<double>(work.tops[chunk]) - static_cast<double>(top));
        work.masses[chunk] = mass;
        sum += mass;
    }
    sum = block_sum<SETTLE_THREADS>(sum, work.shared.reals);
    for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += SETTLE_THREADS) work.masses[chunk] /= sum;
    work.law = {top, 0, 0xffffffffu, static_cast<float>(1.0 / sum), sum};
    const i64 top_k = work.params.top_k[work.slot];
    const float top_p = work.params.top_p[work.slot];
    const bool cuts_k = top_k > 0 && top_k < work.params.vocab, cuts_p = top_p < 1.0f;
    __syncthreads();
    if (cuts_k || cuts_p) cut(work, top_k, cuts_k, top_p, cuts_p);
    return cuts_k || cuts_p;
}

}  // namespace speccompile
