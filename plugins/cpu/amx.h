// SPDX-License-Identifier: Apache-2.0
// Products of up to 32 rows with one panel of bfloat16 weights by AMX, the matrix unit of Intel's server CPUs since
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

// What this thread has shaped the registers for; 0: it does not use the unit.
inline thread_local int shaped_rows = 0;

// Completes the stores before it, for the tile instructions after it: compilers do not know what those read.
inline void complete_stores(const void* memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

// Registers 0 to 3: the sums of the panel's halves for one block of rows and for a second; 4 and 5: the halves' weights for
// 32 k, which stand in memory as a tile wants them; 6 and 7: one part of the activations of the two blocks. Shaping takes as
// long as two steps, so a task keeps its shapes.
SPECCOMPILE_AMX inline void shape_tiles(int rows, int second_rows) {
    const int shape = rows * (kAmxRows + 1) + second_rows;
    if (shape == shaped_rows) return;
    shaped_rows = shape;
    alignas(64) std::uint8_t config[64] = {1};
    const int counts[8] = {rows, rows, second_rows, second_rows, kPartWords, kPartWords, rows, second_rows};
    for (int tile = 0; tile < 8; tile++) {
        config[16 + 2 * tile] = counts[tile] > 0 ? 64 : 0;  // bytes a row
        config[48 + tile] = static_cast<std::uint8_t>(counts[tile]);
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

constexpr int kAmxRowBytes = kColumns * 4;               // of the sums, and of the weights of a pair of k
constexpr int kAmxStepBytes = kPartWords * kAmxRowBytes;  // of the weights of a step

// What one call multiplies: one block of rows or two, some pairs of k of a panel.
struct AmxStretch {
    const char* weights;           // of the first pair, the first of a step
    int num_pairs;
    const std::int32_t* parts[2];  // of the blocks from that step on, [steps, 3, 16 or rows, 16] words, zeros after the last k
    int rows[2];                   // of the blocks in `parts`; 0: there is no second
    float* sums;                   // [rows of both, 32]
    bool is_new;                   // the sums are zeros, whatever stands there
    const char* next;              // weights that are wanted later, to be fetched into the second-level cache
    int lines;                     // of these beside each part of a step
};

// Adds a step's products to the registers of the sums. `x`: [3, rows, 16] words.
template <bool kIsPair>
SPECCOMPILE_AMX inline const char* add_step(const char* weights, const std::int32_t* const (&x)[2], const int (&rows)[2], const char* next, int lines) {
    _tile_loadd(4, weights, kAmxRowBytes);
    _tile_loadd(5, weights + kAmxRowBytes / 2, kAmxRowBytes);
#pragma GCC unroll 3
    for (int part = 0; part < kAmxParts; part++) {
        _tile_loadd(6, x[0] + part * kPartWords * rows[0], 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if constexpr (kIsPair) {
            _tile_loadd(7, x[1] + part * kPartWords * rows[1], 64);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
        for (int line = 0; line < lines; line++, next += 64) prefetch_far(next);
    }
    return next;
}

template <bool kIsPair>
SPECCOMPILE_AMX inline void add_stretch(const AmxStretch& s) {
    shape_tiles(s.rows[0], s.rows[1]);
    float* second = s.sums + s.rows[0] * kColumns;
    if (s.is_new) {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (kIsPair) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        complete_stores(s.sums);
        _tile_loadd(0, s.sums, kAmxRowBytes);
        _tile_loadd(1, s.sums + kColumns / 2, kAmxRowBytes);
        if constexpr (kIsPair) {
            _tile_loadd(2, second, kAmxRowBytes);
            _tile_loadd(3, second + kColumns / 2, kAmxRowBytes);
        }
    }
    const char *w = s.weights, *next = s.next;
    const std::int32_t* x[2] = {s.parts[0], s.parts[1]};
    int left = s.num_pairs;
    for (; left >= kPartWords; left -= kPartWords) {
        next = add_step<kIsPair>(w, x, s.rows, next, s.lines);
        w += kAmxStepBytes;
        x[0] += kStepWords * s.rows[0];
        x[1] += kStepWords * s.rows[1];
    }
    if (left > 0) {  // what follows the panel's last pair is not read
        alignas(64) char padded[kAmxStepBytes] = {};
        std::memcpy(padded, w, static_cast<std::size_t>(left) * kAmxRowBytes);
        complete_stores(padded);
        add_step<kIsPair>(padded, x, s.rows, next, s.lines);
    }
    _tile_stored(0, s.sums, kAmxRowBytes);
    _tile_stored(1, s.sums + kColumns / 2, kAmxRowBytes);
    if constexpr (kIsPair) {
        _tile_stored(2, second, kAmxRowBytes);
        _tile_stored(3, second + kColumns / 2, kAmxRowBytes);
    }
    complete_stores(s.sums);
}

inline void add_by_amx(const AmxStretch& stretch) {
    stretch.rows[1] > 0 ? add_stretch<true>(stretch) : add_stretch<false>(stretch);
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
inline void split_row(const float*, std::int64_t, std::int64_t, std::int64_t, std::int32_t*, std::int64_t) {}
#endif

}  // namespace speccompile::cpu
