// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with one panel of 32 columns, by form of the weights.
//
// A form's tile adds units u0 ... u1 of K to the accumulators [rows, 32] of `Rows` rows. Every row has accumulators of its
// own and one order of summation, rising k, wherever a row stands, however many there are and however K is cut into
// stretches: a row's numbers depend on nothing but that row and the weights.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernel.h"
#include "vector.h"

namespace speccompile::cpu {

constexpr int kColumns = 32;
constexpr int kGroup = 32;        // k with one scale
constexpr int kPrefetch = 3072;   // bytes ahead of the weights being read
constexpr int kFar = 8192;        // the same where the second-level cache is the aim

// Which of the two cache lines of a step of K holds a column: every form has 4 bytes a column and step.
constexpr int line_of(int column) { return column / 16; }

// Quantised rows stand in blocks of those that a tile multiplies, [groups, kRecord, rows of the block] words of 32 bits, so
// that a tile reads them in order and at constant distances: the quads of levels of a group, the offset (-zero point * sum
// of the levels) and the scale (float32).
constexpr int kQuads = kGroup / 4, kOffset = kQuads, kScale = kQuads + 1, kRecord = kQuads + 2;

// The left side of a product.
struct Activations {
    const float* values = nullptr;          // [rows, stride]; float forms
    const std::int32_t* records = nullptr;  // integer forms
    const std::int32_t* parts = nullptr;    // bfloat16 weights by AMX (amx.h)
    std::int64_t stride = 0;                // of a row, in numbers
    std::int64_t words = 0;                 // of a row, of `records` or `parts`

    // The same from a row on, which is the first of a block.
    Activations from(std::int64_t row) const {
        Activations later = *this;
        if (values != nullptr) later.values += row * stride;
        if (records != nullptr) later.records += row * words;
        if (parts != nullptr) later.parts += row * words;
        return later;
    }
};

struct Weights {
    const void* values = nullptr;
    const std::uint16_t* scales = nullptr;  // float16 [panels, groups, 32]; integer forms
};

// Where the weights are prefetched from: pointers of their own, so that the compiler addresses every line by a constant
// distance and spends no registers on sums. Far: into the second-level cache, which takes more misses at a time than the
// first. float32 weights need that (16 rows: 2.5 ms in place of 3.3 for 69 MB), and int8 weights that several blocks of rows
// read (8 rows: 3.6 ms in place of 5.3 for 117 MB); the others are faster without.
template <bool IsFar>
struct Fetch {
    const char* lines[2];
    Fetch(const char* weights, const std::ptrdiff_t (&ahead)[2]) : lines{weights + ahead[0], weights + ahead[1]} {
        __asm__("" : "+r"(lines[0]), "+r"(lines[1]));
    }
    // `bytes` after the weights that it was made for; `column` is the first of the vector.
    void at(std::ptrdiff_t bytes, int column) const {
        const char* line = lines[line_of(column)] + bytes + column * 4;
        IsFar ? prefetch_far(line) : prefetch(line);
    }
    void advance(std::ptrdiff_t bytes) {
        lines[0] += bytes;
        lines[1] += bytes;
    }
};

// What one call of a tile works on: activations from its first row on, the weights of its panel.
struct Stretch {
    Activations rows;
    Weights panel;
    int begin, end;   // units of K
    // Bytes to prefetch ahead of the even and of the odd cache lines; each step of K has two. 0: nothing new.
    std::ptrdiff_t ahead[2];
    int pace;         // bytes that what is prefetched advances by in a unit; integer forms: where it is fetched far
    float* sums;      // [Rows, 32]
};

using Tile = void (*)(const Stretch&);

// Of every form: kIsFar and kSharesFar say whether one block of rows, or several, fetch far (Fetch).
struct FormF32 {
    static constexpr const char* kNames[4] = {"PackedLinearF32", "GatedPackedLinearF32", "NormPackedLinearF32", "NormGatedPackedLinearF32"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearF32", "GatedExpertLinearF32"};
    static constexpr abi::ElementType kWeightType = abi::kFloat;
    static constexpr std::int64_t kBitsPerWeight = 32;
    static Dims dims(std::int64_t panels, std::int64_t stride) { return {panels, stride, kColumns}; }
    static constexpr int kUnit = 1, kMaxRows = kFloatRows, kStretch = 64;
    static constexpr int kWidth = kFloatVectors * kLanes;  // columns of one pass over the weights
    static constexpr bool kIsInteger = false, kIsFar = true, kSharesFar = true, kTakesAmx = false;

    template <int Rows, bool IsFar>
    static void tile(const Stretch& s) {
        constexpr int kVectors = kFloatVectors;
        for (int column = 0; column < kColumns; column += kVectors * kLanes) {
            const float* w = static_cast<const float*>(s.panel.values) + static_cast<std::ptrdiff_t>(s.begin) * kColumns + column;
            const float* x = s.rows.values;
            Fetch<IsFar> fetch(reinterpret_cast<const char*>(w - column), s.ahead);
            Float sum[Rows][kVectors];
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kVectors; v++) sum[r][v] = load(s.sums + r * kColumns + column + v * kLanes);
            }
            for (std::ptrdiff_t k = s.begin; k < s.end; k++, w += kColumns, fetch.advance(s.pace)) {
                Float b[kVectors];
                for (int v = 0; v < kVectors; v++) {
                    fetch.at(0, column + v * kLanes);
                    b[v] = load(w + v * kLanes);
                }
                for (int r = 0; r < Rows; r++) {
                    const Float a = broadcast(x[r * s.rows.stride + k]);
                    for (int v = 0; v < kVectors; v++) sum[r][v] = fma(a, b[v], sum[r][v]);
                }
            }
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kVectors; v++) store(s.sums + r * kColumns + column + v * kLanes, sum[r][v]);
            }
        }
    }
};

// bfloat16 weights are widened to float32, which is exact; a unit is a pair of k.
struct FormBf16 {
    static constexpr const char* kNames[4] = {"PackedLinearBf16", "GatedPackedLinearBf16", "NormPackedLinearBf16", "NormGatedPackedLinearBf16"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearBf16", "GatedExpertLinearBf16"};
    static constexpr abi::ElementType kWeightType = abi::kBfloat16;
    static constexpr std::int64_t kBitsPerWeight = 16;
    static Dims dims(std::int64_t panels, std::int64_t stride) { return {panels, stride / 2, kColumns, 2}; }
    static constexpr int kUnit = 2, kMaxRows = kPairRows, kStretch = 64;
    static constexpr int kWidth = kPairVectors * kLanes;
    static constexpr bool kIsInteger = false, kIsFar = false, kSharesFar = false, kTakesAmx = true;

    template <int Rows, bool IsFar>
    static void tile(const Stretch& s) {
        constexpr int kVectors = kPairVectors;
        for (int column = 0; column < kColumns; column += kVectors * kLanes) {
            const char* w = static_cast<const char*>(s.panel.values) + (static_cast<std::ptrdiff_t>(s.begin) * kColumns + column) * 4;
            const float* x = s.rows.values;
            Fetch<IsFar> fetch(w - column * 4, s.ahead);
            Float sum[Rows][kVectors];
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kVectors; v++) sum[r][v] = load(s.sums + r * kColumns + column + v * kLanes);
            }
            for (std::ptrdiff_t pair = s.begin; pair < s.end; pair++, w += kColumns * 4, fetch.advance(s.pace)) {
                Float first[kVectors], second[kVectors];
                for (int v = 0; v < kVectors; v++) {
                    fetch.at(0, column + v * kLanes);
                    const Int both = load_bits(w + v * kLanes * 4);
                    first[v] = first_of_pair(both);
                    second[v] = second_of_pair(both);
                }
                for (int r = 0; r < Rows; r++) {
                    const float* at = x + r * s.rows.stride + 2 * pair;
                    const Float a = broadcast(at[0]), b = broadcast(at[1]);
                    for (int v = 0; v < kVectors; v++) sum[r][v] = fma(a, first[v], sum[r][v]);
                    for (int v = 0; v < kVectors; v++) sum[r][v] = fma(b, second[v], sum[r][v]);
                }
            }
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kVectors; v++) store(s.sums + r * kColumns + column + v * kLanes, sum[r][v]);
            }
        }
    }
};

// Unsigned weights times signed levels, exact in int32 over a group of 32; then one multiplication of scales and one fused
// multiply-add. A unit is a group.
template <bool IsInt4>
struct FormInteger {
    static constexpr int kUnit = kGroup, kMaxRows = kIntRows, kStretch = 16;  // 8 or 16 KB
    static constexpr int kWidth = kColumns;
    static constexpr bool kIsInteger = true, kIsFar = false, kSharesFar = !IsInt4, kTakesAmx = false;
    static constexpr int kZero = IsInt4 ? 8 : 128;
    static constexpr int kSteps = IsInt4 ? 4 : 8;                     // of 128 bytes a group
    static constexpr std::ptrdiff_t kGroupBytes = kSteps * kColumns * 4;

    // `record` and `w` are those of the group; sums without the scales.
    template <int Rows, bool IsFar>
    static void add_group(const std::int32_t* record, const char* w, const Fetch<IsFar>& fetch, int column, QuadSum (&sum)[Rows][kIntVectors]) {
        for (int r = 0; r < Rows; r++) {
            for (int v = 0; v < kIntVectors; v++) sum[r][v] = start_sum(record[kOffset * Rows + r]);
        }
#pragma GCC unroll 8
        for (int step = 0; step < kSteps; step++) {
            Int bytes[kIntVectors];
            for (int v = 0; v < kIntVectors; v++) {
                fetch.at(step * kColumns * 4, column + v * kLanes);
                bytes[v] = load_bits(w + step * kColumns * 4 + v * kLanes * 4);
            }
            const std::int32_t* quads = record + step * (kQuads / kSteps) * Rows;
            if constexpr (IsInt4) {
                Quad low[kIntVectors], high[kIntVectors];
                for (int v = 0; v < kIntVectors; v++) low[v] = low_nibbles(bytes[v]), high[v] = high_nibbles(bytes[v]);
                for (int r = 0; r < Rows; r++) {
                    const QuadLevels a = broadcast_quad(quads[r]);
                    for (int v = 0; v < kIntVectors; v++) add_nibbles(sum[r][v], low[v], a);
                }
                for (int r = 0; r < Rows; r++) {
                    const QuadLevels a = broadcast_quad(quads[Rows + r]);
                    for (int v = 0; v < kIntVectors; v++) add_nibbles(sum[r][v], high[v], a);
                }
            } else {
                Quad quad[kIntVectors];
                for (int v = 0; v < kIntVectors; v++) quad[v] = quad_from_bytes(bytes[v]);
                for (int r = 0; r < Rows; r++) {
                    const QuadLevels a = broadcast_quad(quads[r]);
                    for (int v = 0; v < kIntVectors; v++) add_bytes(sum[r][v], quad[v], a);
                }
            }
        }
    }

    template <int Rows, bool IsFar>
    static void tile(const Stretch& s) {
        constexpr int kTileWidth = kIntVectors * kLanes;
        constexpr bool kKeeps = kTileWidth == kColumns;  // the float sums stay in registers
        Float kept[Rows][kIntVectors];
        if (kKeeps) {
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kIntVectors; v++) kept[r][v] = load(s.sums + r * kColumns + v * kLanes);
            }
        }
        float* sums = s.sums;
        const char* w = static_cast<const char*>(s.panel.values) + s.begin * kGroupBytes;
        const std::uint16_t* half = s.panel.scales + static_cast<std::ptrdiff_t>(s.begin) * kColumns;
        const std::int32_t* record = s.rows.records + static_cast<std::ptrdiff_t>(s.begin) * kRecord * Rows;
        Fetch<IsFar> fetch(w, s.ahead);
        const std::ptrdiff_t ahead_of_scales = IsFar ? kStretch * 64 : s.ahead[0] / (kGroupBytes / 64);
        for (int left = s.end - s.begin; left > 0; left--) {
            prefetch(reinterpret_cast<const char*>(half) + ahead_of_scales);
            for (int column = 0; column < kColumns; column += kTileWidth) {
                QuadSum sum[Rows][kIntVectors];
                add_group<Rows, IsFar>(record, w + column * 4, fetch, column, sum);
                Float scale[kIntVectors];
                for (int v = 0; v < kIntVectors; v++) scale[v] = load_half(half + column + v * kLanes);
                for (int r = 0; r < Rows; r++) {
                    const std::int32_t offset = record[kOffset * Rows + r];
                    float row_scale;
                    std::memcpy(&row_scale, record + kScale * Rows + r, sizeof(row_scale));
                    for (int v = 0; v < kIntVectors; v++) {
                        const Float both = mul(broadcast(row_scale), scale[v]);
                        const Float whole = IsInt4 ? end_nibbles(sum[r][v], offset) : end_bytes(sum[r][v], offset);
                        float* place = sums + r * kColumns + column + v * kLanes;
                        if (kKeeps) {
                            kept[r][v] = fma(whole, both, kept[r][v]);
                        } else {
                            store(place, fma(whole, both, load(place)));
                        }
                    }
                }
            }
            w += kGroupBytes, half += kColumns, record += kRecord * Rows;
            fetch.advance(IsFar ? s.pace : kGroupBytes);
        }
        if (kKeeps) {
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kIntVectors; v++) store(sums + r * kColumns + v * kLanes, kept[r][v]);
            }
        }
    }
};

struct FormInt8 : FormInteger<false> {
    static constexpr const char* kNames[4] = {"PackedLinearInt8", "GatedPackedLinearInt8", "NormPackedLinearInt8", "NormGatedPackedLinearInt8"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearInt8", "GatedExpertLinearInt8"};
    static constexpr abi::ElementType kWeightType = abi::kUint8;
    static constexpr std::int64_t kBitsPerWeight = 8;
    static Dims dims(std::int64_t panels, std::int64_t stride) { return {panels, stride / kGroup, 8, kColumns, 4}; }
};
struct FormInt4 : FormInteger<true> {
    static constexpr const char* kNames[4] = {"PackedLinearInt4", "GatedPackedLinearInt4", "NormPackedLinearInt4", "NormGatedPackedLinearInt4"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearInt4", "GatedExpertLinearInt4"};
    static constexpr abi::ElementType kWeightType = abi::kUint8;
    static constexpr std::int64_t kBitsPerWeight = 4;
    static Dims dims(std::int64_t panels, std::int64_t stride) { return {panels, stride / kGroup, 4, kColumns, 4}; }
};

template <class Form, bool IsFar, std::size_t... Index>
constexpr std::array<Tile, sizeof...(Index)> tiles_from(std::index_sequence<Index...>) {
    return {&Form::template tile<static_cast<int>(Index) + 1, IsFar>...};
}

// The tiles of a form for 1 ... kMaxRows rows, by whether they fetch into the second-level cache.
template <class Form, bool IsFar>
constexpr auto kTiles = tiles_from<Form, IsFar>(std::make_index_sequence<Form::kMaxRows>());

}  // namespace speccompile::cpu
