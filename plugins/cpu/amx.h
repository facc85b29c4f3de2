// SPDX-License-Identifier: Apache-2.0
// Products of up to 16 rows with one panel of bfloat16 weights by AMX, the matrix unit of Intel's server CPUs since
// Sapphire Rapids: as many rows as a tile register has cost hardly more than one.
//
// A float32 activation is the sum of three bfloat16 numbers, its mantissa cut into three times eight bits, and products of
// bfloat16 numbers are exact in float32. So the results are float32's up to the order of summation: 16 pairs of k in two
// sums, and these to the rest, for each of the three parts. The unit does that for every row by itself, so a row's numbers
// depend on nothing but that row and the weights. It takes numbers below 2^-126 as 0: an activation below 2^-110 loses its
// last bits.
#pragma once

#include <algorithm>

#include "tiles.h"

#if defined(__AVX512F__) && defined(__x86_64__) && defined(__linux__) && !defined(SPECCOMPILE_NO_AMX) && \
    (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#define SPECCOMPILE_AMX __attribute__((target("amx-tile,amx-bf16")))
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace speccompile::cpu {

constexpr int kAmxRows = 16;
constexpr int kAmxParts = 3;                         // bfloat16 numbers of an activation
constexpr int kAmxStep = 32;                         // k of a tile
constexpr int kPartWords = kAmxStep / 2;             // words of 32 bits of a row, step and part
constexpr int kStepWords = kAmxParts * kPartWords;   // of a row and step

#ifdef SPECCOMPILE_AMX

// Whether this CPU has the unit and Linux (5.16 and later) lets this process, all of its threads, use it.
inline bool ask_for_amx() {
    constexpr unsigned kBf16AndTiles = 1u << 22 | 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16AndTiles) != kBf16AndTiles) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
inline const bool kHasAmx = ask_for_amx();

// The rows that this thread has shaped the registers for; 0: it does not use the unit.
inline thread_local int shaped_rows = 0;

// Completes the stores before it, for the tile instructions after it: compilers do not know what those read.
inline void complete_stores(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// Registers 0 and 1: the sums of the panel's halves; 4 and 5: their weights for 32 k, which stand in memory as a tile wants
// them; 6: one part of the activations. Shaping takes as long as two steps, so a task keeps its shapes.
SPECCOMPILE_AMX inline void shape_tiles(int rows) {
    if (rows == shaped_rows) return;
    shaped_rows = rows;
    alignas(64) std::uint8_t config[64] = {1};
    for (int tile : {0, 1, 4, 5, 6}) {
        config[16 + 2 * tile] = 64;  // bytes a row
        config[48 + tile] = static_cast<std::uint8_t>(tile == 4 || tile == 5 ? kPartWords : rows);
    }
    complete_stores(config);
    _tile_loadconfig(config);
}

// A task that may use the unit; at its end the thread gives the unit up, so that its state is not saved any more.
struct AmxScope {
    SPECCOMPILE_AMX ~AmxScope() {
        if (shaped_rows != 0) _tile_release();
        shaped_rows = 0;
    }
};

constexpr int kAmxRowBytes = kColumns * 4;  // of the sums, and of the weights of a pair of k

// Adds a step's products to registers 0 and 1. `x`: [3, rows, 16] words.
SPECCOMPILE_AMX inline void add_step(const char* weights, const std::int32_t* x, int rows, const Fetch<true>& fetch) {
    constexpr int kFetched = 6;  // pairs whose weights are fetched beside each part, of 16
    _tile_loadd(4, weights, kAmxRowBytes);
    _tile_loadd(5, weights + kAmxRowBytes / 2, kAmxRowBytes);
#pragma GCC unroll 3
    for (int part = 0; part < kAmxParts; part++) {
        _tile_loadd(6, x + part * kPartWords * rows, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
#pragma GCC unroll 6
        for (int pair = part * kFetched; pair < std::min(kPartWords, (part + 1) * kFetched); pair++) {
            fetch.at(pair * kAmxRowBytes, 0);
            fetch.at(pair * kAmxRowBytes, kColumns / 2);
        }
    }
}

// Adds the products of the pairs s.begin ... s.end to `s.sums`; a stretch begins at a multiple of a step.
// `s.rows.parts`: [steps, 3, rows, 16] words, zeros after the last pair.
SPECCOMPILE_AMX inline void add_by_amx(const Stretch& s, int rows) {
    constexpr int kStepBytes = kPartWords * kAmxRowBytes;
    shape_tiles(rows);
    const char* w = static_cast<const char*>(s.panel.values) + static_cast<std::ptrdiff_t>(s.begin) * kAmxRowBytes;
    const std::int32_t* x = s.rows.parts + static_cast<std::ptrdiff_t>(s.begin / kPartWords) * kStepWords * rows;
    Fetch<true> fetch(w, s.ahead);
    complete_stores(s.sums);
    _tile_loadd(0, s.sums, kAmxRowBytes);
    _tile_loadd(1, s.sums + kColumns / 2, kAmxRowBytes);
    int left = s.end - s.begin;
    for (; left >= kPartWords; left -= kPartWords) {
        add_step(w, x, rows, fetch);
        w += kStepBytes, x += kStepWords * rows;
        fetch.advance(kStepBytes);
    }
    if (left > 0) {  // what follows the panel's last pair is not read
        alignas(64) char padded[kStepBytes] = {};
        std::memcpy(padded, w, static_cast<std::size_t>(left) * kAmxRowBytes);
        complete_stores(padded);
        add_step(padded, x, rows, fetch);
    }
    _tile_stored(0, s.sums, kAmxRowBytes);
    _tile_stored(1, s.sums + kColumns / 2, kAmxRowBytes);
}

// Writes numbers 32 * begin ... 32 * end - 1 of a row of `count` numbers, which zeros follow, as parts: the first eight bits
// of each, the next and the last. `parts` are those of the row in step 0, `apart` words before those of the next part.
inline void split_row(const float* x, std::int64_t count, std::int64_t begin, std::int64_t end, std::int32_t* parts, std::int64_t apart) {
    const Int first_bits = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    for (std::int64_t step = begin; step < end; step++) {
        alignas(64) float numbers[kAmxStep] = {};
        const std::int64_t left = std::min<std::int64_t>(kAmxStep, count - step * kAmxStep);
        std::memcpy(numbers, x + step * kAmxStep, static_cast<std::size_t>(left) * sizeof(float));
        for (int half = 0; half < kAmxStep / kLanes; half++) {
            Float rest = load(numbers + half * kLanes);
            for (int part = 0; part < kAmxParts; part++) {
                const Int bits = _mm512_and_si512(_mm512_castps_si512(rest), first_bits);
                std::int32_t* to = parts + (step * kAmxParts + part) * apart + half * kLanes / 2;
                _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
                rest = sub(rest, _mm512_castsi512_ps(bits));
            }
        }
    }
}

#else
constexpr bool kHasAmx = false;
struct AmxScope {};
inline void add_by_amx(const Stretch&, int) {}
inline void split_row(const float*, std::int64_t, std::int64_t, std::int64_t, std::int32_t*, std::int64_t) {}
#endif

}  // namespace speccompile::cpu
