// SPDX-License-Identifier: Apache-2.0
// SpecVerify, second part: from the cells of a row's chunks to its distribution.
// top_k and top_p are found among the few chunks whose tops reach the threshold; only these are read again.
#pragma once

#include "spec_verify/layout.cuh"

namespace speccompile {

constexpr int FIRST_TIER = 32;        // chunks that are read again first where top_p alone cuts
constexpr int TIER_GROWTH = 8;
constexpr int NUM_CLASSES = 5;  // of target / draft, see `ratio_class`
constexpr float MASS_UNIT = 0x1p44f;  // masses as integers: sums do not depend on their order; 2^19 * 2^44 fits

struct Shared {
    union {
        struct {
            u32 keys[MAX_CANDIDATES];
            u32 indices[MAX_CANDIDATES];
        } list;
        Outcome outcomes[MAX_NODES];  // of a slot, for its walk
    };
    u32 bins_low[256], bins_high[256];
    u64 sums[WARP];
    double reals[WARP];
    u32 keys[WARP], firsts[WARP];
    int parents[MAX_NODES];
    int tokens[MAX_NODES];  // -1 where it is none of the vocabulary
    int path[MAX_NODES];        // chosen among drawn drafts
    float weights[MAX_NODES];   // of its prefixes
    float factors[NUM_CLASSES]; // of the draft's probabilities, where siblings were chosen among
    Outcome outcome;
    u64 above;
    u32 digit;
    int count, chunk, child, num_children, is_last_block;
};

// A function, not a reference passed on, so that the compiler knows that this is shared memory.
__device__ inline Shared& shared_state() {
    __shared__ Shared state;
    return state;
}

__device__ inline double* dynamic_shared() {
#if defined(SPECCOMPILE_HOST)
    return reinterpret_cast<double*>(host::machine.dynamic_shared.data());
#else
    extern __shared__ double dynamic_bytes[];
    return dynamic_bytes;
#endif
}

// What the threads of a block work on together. It is passed by value to functions that are not inlined, so that it
// stays in registers elsewhere.
struct Work {
    const SpecVerifyParams& params;
    int slot, node;
    AnyRow row;
    Divider divide;
    Dist dist = {};
    float weight = 1;  // of the distribution before the draft's is subtracted from it
    int child = -1;    // whose distribution is subtracted; -1: none
    int num_children = 0;

    __device__ Work(const SpecVerifyParams& params, int slot, int node, float temperature)
        : params(params), slot(slot), node(node), row(params, static_cast<i64>(slot) * params.nodes + node),
          divide(is_hot(temperature) ? temperature : 1.0f) {}

    __device__ int chunks() const { return num_chunks(params.vocab); }
    __device__ double* masses() const { return dynamic_shared(); }
    __device__ float* tops() const { return reinterpret_cast<float*>(dynamic_shared() + chunks()); }

    // The chunks of a thread: a run of them, as a draw goes through them in order.
    __device__ int run() const { return (chunks() + RESOLVE_THREADS - 1) / RESOLVE_THREADS; }
    __device__ int run_start() const { return static_cast<int>(threadIdx.x) * run(); }
    __device__ int run_end() const { return min(run_start() + run(), chunks()); }
};

// A set of entries that contains all with key >= low: a list, or (when that is full) the chunks that contain them.
struct Candidates {
    u32 low;
    int count;
    bool is_list;
};

// visit(key, index) for every candidate, each by one thread.
template <typename Visit>
__device__ inline void each_candidate(const Work& work, const Candidates& set, Visit visit) {
    if (set.is_list) {
        const Shared& shared = shared_state();
        for (int i = threadIdx.x; i < set.count; i += RESOLVE_THREADS) visit(shared.list.keys[i], shared.list.indices[i]);
        return;
    }
    for (int chunk = threadIdx.x / WARP; chunk < work.chunks(); chunk += RESOLVE_WARPS) {
        if (key_from(work.tops()[chunk]) < set.low) continue;
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

__device__ inline u64 weight_of(u32 key, float top) {
    return static_cast<u64>(expf(float_from_key(key) - top) * MASS_UNIT);
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
        for (int chunk = threadIdx.x; chunk < work.chunks(); chunk += RESOLVE_THREADS) add(key_from(work.tops()[chunk]), 1);
        return;
    }
    each_candidate(work, set, [&](u32 key, u32 index) {
        if (order == Order::TIES) {
            if (key == key_min) add(~index, 1);
        } else if (key >= key_min) {
            add(key, order == Order::MASSES ? weight_of(key, work.dist.top) : 1);
        }
    });
}

// Shared memory has 32-bit atomic adds in hardware, 64-bit ones are a compare-and-swap loop: hence two halves.
__device__ inline void add_to_bin(u32 bin, u64 weight) {
    Shared& shared = shared_state();
    const u32 low = static_cast<u32>(weight), before = atomicAdd(&shared.bins_low[bin], low);
    const u32 high = static_cast<u32>(weight >> 32) + (before + low < low ? 1u : 0u);
    if (high > 0) atomicAdd(&shared.bins_high[bin], high);
}

// The greatest key such that the weight of all keys >= it reaches `goal` (1 <= goal <= total weight): radix descent by
// 8 bits from the first one in which `least` and `most`, the bounds of all keys, differ.
__device__ __noinline__ Selected select(
    const Work& work, const Candidates& set, Order order, u32 key_min, u64 goal, u32 least, u32 most) {
    Shared& shared = shared_state();
    int left = 0;  // bits that are not determined yet
    while (left < 32 && (least ^ most) >> left != 0) ++left;
    u32 mask = left < 32 ? ~0u << left : 0u, prefix = most & mask;
    u64 above = 0;
#pragma unroll 1
    while (left > 0) {
        const int shift = left > 8 ? left - 8 : 0;
        const u32 digits = (1u << (left - shift)) - 1u;
        for (int bin = threadIdx.x; bin < 256; bin += RESOLVE_THREADS) {
            shared.bins_low[bin] = 0;
            shared.bins_high[bin] = 0;
        }
        if (threadIdx.x == 0) {
            shared.digit = 0;
            shared.above = 0;
        }
        __syncthreads();
        enumerate(work, set, order, key_min, [&](u32 key, u64 weight) {
            if ((key & mask) == prefix) add_to_bin(key >> shift & digits, weight);
        });
        __syncthreads();
        u64 before = 0;  // of the bins above this thread's
        for (int first = 0; first < 256; first += RESOLVE_THREADS) {
            const int bin = 255 - first - static_cast<int>(threadIdx.x);
            const u64 weight = bin >= 0 ? static_cast<u64>(shared.bins_high[bin]) << 32 | shared.bins_low[bin] : 0;
            u64 total;
            const u64 over = above + before + block_scan<RESOLVE_THREADS>(weight, shared.sums, total);
            if (weight > 0 && over < goal && over + weight >= goal) {
                shared.digit = static_cast<u32>(bin);
                shared.above = over;
            }
            before += total;
        }
        __syncthreads();
        prefix |= shared.digit << shift;
        mask |= digits << shift;
        above = shared.above;
        left = shift;
        __syncthreads();
    }
    return {prefix, above};
}

__device__ __noinline__ Candidates collect(const Work& work, u32 low) {
    const Candidates chunks = {low, 0, false};
    if (low == 0 && work.params.vocab > MAX_CANDIDATES) return chunks;
    Shared& shared = shared_state();
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    each_candidate(work, chunks, [&](u32 key, u32 index) {
        const int end = atomicAdd(&shared.count, 1);
        if (end < MAX_CANDIDATES) {
            shared.list.keys[end] = key;
            shared.list.indices[end] = index;
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
        if (key >= key_min) sum += weight_of(key, work.dist.top);
    });
    return block_sum<RESOLVE_THREADS>(sum, shared_state().sums);
}

// Key of the chunk top of that rank (1 = greatest): at least `rank` entries have it or a greater one.
__device__ inline u32 key_of_top(const Work& work, int rank) {
    if (rank >= work.chunks()) return 0;
    return select(work, {0, 0, false}, Order::TOPS, 0, static_cast<u64>(rank), 0, key_from(work.dist.top)).key;
}

// Candidates that contain all that top_k (if it cuts) or top_p keeps, and the total weight that top_p refers to.
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

// top_k, then top_p: the distribution of the entries kept. `work.dist` is that of the whole row; every thread gets the
// same result.
__device__ __noinline__ Dist cut(const Work work, i64 top_k, bool cuts_k, float top_p, bool cuts_p) {
    Dist dist = work.dist;
    Shared& shared = shared_state();
    u64 total = static_cast<u64>(dist.total * static_cast<double>(MASS_UNIT));
    const Candidates set = gather(work, top_k, cuts_k, top_p, total);
    const u32 most = key_from(dist.top);
    if (cuts_k) {
        dist.key_min = select(work, set, Order::ENTRIES, 0, static_cast<u64>(top_k), set.low, most).key;
        total = weight_from(work, set, dist.key_min);
    }
    if (cuts_p) {
        // An entry is kept when those before it in falling order have less than top_p of the mass.
        u64 goal = static_cast<u64>(ceil(static_cast<double>(top_p) * static_cast<double>(total)));
        goal = goal < 1 ? 1 : goal > total ? total : goal;
        const u32 least = dist.key_min > set.low ? dist.key_min : set.low;
        const Selected edge = select(work, set, Order::MASSES, dist.key_min, goal, least, most);
        dist.key_min = edge.key;
        u64 ties = 0;
        each_candidate(work, set, [&](u32 key, u32) { ties += key == edge.key; });
        ties = block_sum<RESOLVE_THREADS>(ties, shared.sums);
        const u64 one = weight_of(edge.key, dist.top);
        u64 kept = one > 0 ? (goal - edge.above + one - 1) / one : ties;
        if (kept < ties) {  // the first of them by index
            const u32 last = static_cast<u32>(work.params.vocab - 1);
            dist.last_tie = ~select(work, set, Order::TIES, edge.key, kept, ~last, ~0u).key;
        } else {
            kept = ties;
        }
        total = edge.above + kept * one;
    }
    dist.total = static_cast<double>(total) / static_cast<double>(MASS_UNIT);
    dist.scale = static_cast<float>(1.0 / dist.total);
    return dist;
}

// Weighs the thread's run of chunks: their tops and masses relative to the row's top go to shared memory. Returns that
// top to all threads, and in `own` the mass of the run. It does not end with a barrier.
template <typename Load>
__device__ inline float weigh(const Work& work, Load load, double& own) {
    Shared& shared = shared_state();
    u32 key = 0;
    for (int chunk = work.run_start(); chunk < work.run_end(); ++chunk) key = max(key, key_from(load(chunk).top));
    key = warp_max(key);
    if (threadIdx.x % WARP == 0) shared.keys[threadIdx.x / WARP] = key;
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % WARP;
    const float top = float_from_key(warp_max(lane < RESOLVE_WARPS ? shared.keys[lane] : 0u));
    own = 0;
    for (int chunk = work.run_start(); chunk < work.run_end(); ++chunk) {
        const Cell cell = load(chunk);
        const double mass = cell.mass > 0 ? static_cast<double>(cell.mass * expf(cell.top - top)) : 0.0;
        work.tops()[chunk] = cell.top;
        work.masses()[chunk] = mass;
        own += mass;
    }
    return top;
}

// The distribution of a row, from its top and the threads' masses.
__device__ inline Dist dist_from(Work& work, float top, double own, const Cuts& cuts) {
    const double sum = block_sum<RESOLVE_THREADS>(own, shared_state().reals);  // its barriers also publish the tops
    work.dist = {top, 0, 0xffffffffu, static_cast<float>(1.0 / sum), sum};
    if (cuts.any()) work.dist = cut(work, cuts.top_k, cuts.cuts_k, cuts.top_p, cuts.cuts_p);
    return work.dist;
}

}  // namespace speccompile
