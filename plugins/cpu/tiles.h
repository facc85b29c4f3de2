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
constexpr int kGroup = 32;        // k of a step of the layout: K is padded to a multiple
constexpr int kPrefetch = 3072;   // bytes ahead of the weights being read
constexpr int kFar = 8192;        // the same where the second-level cache is the aim

// Which of the two cache lines of a step of K holds a column: every form has 4 bytes a column and step.
constexpr int line_of(int column) { return column / 16; }

// Rows are quantised in units of 32 or 16 neighbours, and stand in blocks of those that a tile multiplies: [units, kWords,
// rows of the block] words of 32 bits, so that a tile reads them in order and at constant distances. A unit has its quads of
// levels, its offset (-zero point * sum of the levels; of a form with minimums the sum of the levels times the scale, in
// float32) and its scale (float32).
template <int Unit>
struct Record {
    static constexpr int kQuads = Unit / 4, kOffset = kQuads, kScale = kQuads + 1, kWords = kQuads + 2;
};

inline float float_of(std::int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// The left side of a product.
struct Activations {
    const float* values = nullptr;          // [rows, stride]; float forms
    const std::int32_t* records = nullptr;  // integer forms
    const std::int32_t* parts = nullptr;    // bfloat16 weights by AMX (amx.h)
    std::int64_t stride = 0;                // of a row, in numbers; of integer forms to the end of its last unit
    std::int64_t words = 0;                 // of a row, of `records` or `parts`
    int unit = 1;                           // k of one that a tile counts

    // The same from a row on, which is the first of a block.
    Activations from(std::int64_t row) const {
        Activations later = *this;
        if (values != nullptr) later.values += row * stride;
        if (records != nullptr) later.records += row * words;
        if (parts != nullptr) later.parts += row * words;
        return later;
    }
};

// Integer forms have scales, some have minimums: [panels, groups, 32] float16 or float32, a group for one unit or several.
struct Weights {
    const void* values = nullptr;
    const char *scales = nullptr, *minimums = nullptr;
    int scale_bytes = 2;    // of one: 2 or 4
    int unit = kGroup, units_a_group = 1;
};

// Where the weights are prefetched from: pointers of their own, so that the compiler addresses every line by a constant
// distance and spends no registers on sums. Far: into the second-level cache, which takes more misses at a time than the
// first. float32 weights need that (16 rows: 2.5 ms in place of 3.3 for 69 MB), and int8 weights that several blocks of rows
// read (8 rows: 3.6 ms in place of 5.3 for 117 MB); the others are faster without.
template <bool IsFar, bool IsOnce = false>
struct Fetch {
    const char* lines[2];
    Fetch(const char* weights, const std::ptrdiff_t (&ahead)[2]) : lines{weights + ahead[0], weights + ahead[1]} {
        __asm__("" : "+r"(lines[0]), "+r"(lines[1]));
    }
    // `bytes` after the weights that it was made for; `column` is the first of the vector.
    void at(std::ptrdiff_t bytes, int column) const {
        const char* line = lines[line_of(column)] + bytes + column * 4;
        IsFar ? prefetch_far(line) : IsOnce ? prefetch_once(line) : prefetch(line);
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
    std::ptrdiff_t ahead_of_scales;
    float* sums;      // [Rows, 32]
};

using Tile = void (*)(const Stretch&);

// Of every form: kIsFar and kSharesFar say whether one block of rows, or several, fetch far (Fetch).
struct FormF32 {
    static constexpr const char* kNames[4] = {"PackedLinearF32", "GatedPackedLinearF32", "NormPackedLinearF32", "NormGatedPackedLinearF32"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearF32", "GatedExpertLinearF32"};
    static constexpr const char* kRowsName = "PackedRowsF32";
    static constexpr abi::ElementType kWeightType = abi::kFloat;
    static constexpr std::int64_t kBitsPerWeight = 32;
    static Dims dims(std::int64_t panels, std::int64_t stride) { return {panels, stride, kColumns}; }
    static constexpr int kUnit = 1, kMaxRows = kFloatRows, kStretch = 64;
    static constexpr int kWidth = kFloatVectors * kLanes;  // columns of one pass over the weights
    static constexpr bool kIsInteger = false, kHasMinimums = false, kIsFar = true, kSharesFar = true, kTakesAmx = false;

    template <int Rows, bool IsFar, int Unit>
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
    static constexpr const char* kRowsName = "PackedRowsBf16";
    static constexpr abi::ElementType kWeightType = abi::kBfloat16;
    static constexpr std::int64_t kBitsPerWeight = 16;
    static Dims dims(std::int64_t panels, std::int64_t stride) { return {panels, stride / 2, kColumns, 2}; }
    static constexpr int kUnit = 2, kMaxRows = kPairRows, kStretch = 64;
    static constexpr int kWidth = kPairVectors * kLanes;
    static constexpr bool kIsInteger = false, kHasMinimums = false, kIsFar = false, kSharesFar = false, kTakesAmx = true;

    template <int Rows, bool IsFar, int Unit>
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

// Unsigned weights times signed levels, exact in int32 over a unit of k; then one multiplication of scales and one fused
// multiply-add, and with minimums another: minimum times the unit's sum.
template <bool IsInt4, bool HasMinimums>
struct FormInteger {
    static constexpr int kUnit = kGroup, kMaxRows = kIntRows, kStretch = 16;  // 8 or 16 KB
    static constexpr int kWidth = kColumns;
    static constexpr bool kIsInteger = true, kHasMinimums = HasMinimums, kIsFar = false, kSharesFar = !IsInt4, kTakesAmx = false;
    static constexpr int kZero = HasMinimums ? 0 : IsInt4 ? 8 : 128;
    static constexpr int kStepRows = IsInt4 ? 8 : 4;  // k of 128 bytes
    static constexpr abi::ElementType kWeightType = abi::kUint8;
    static constexpr std::int64_t kBitsPerWeight = IsInt4 ? 4 : 8;
    static Dims dims(std::int64_t panels, std::int64_t stride) { return {panels, stride / kGroup, kGroup / kStepRows, kColumns, 4}; }

    // `record` and `w` are those of the unit; sums without the scales.
    template <int Rows, bool IsFar, int Unit>
    static void add_unit(const std::int32_t* record, const char* w, const Fetch<IsFar, IsInt4>& fetch, int column, QuadSum (&sum)[Rows][kIntVectors]) {
        using Words = Record<Unit>;
        for (int r = 0; r < Rows; r++) {
            for (int v = 0; v < kIntVectors; v++) sum[r][v] = start_sum(HasMinimums ? 0 : record[Words::kOffset * Rows + r]);
        }
#pragma GCC unroll 8
        for (int step = 0; step < Unit / kStepRows; step++) {
            Int bytes[kIntVectors];
            for (int v = 0; v < kIntVectors; v++) {
                fetch.at(step * kColumns * 4, column + v * kLanes);
                bytes[v] = load_bits(w + step * kColumns * 4 + v * kLanes * 4);
            }
            const std::int32_t* quads = record + step * (kStepRows / 4) * Rows;
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

    template <int Rows, bool IsFar, int Unit>
    static void tile(const Stretch& s) {
        using Words = Record<Unit>;
        constexpr int kTileWidth = kIntVectors * kLanes;
        constexpr bool kKeeps = kTileWidth == kColumns;  // the float sums stay in registers
        constexpr std::ptrdiff_t kUnitBytes = Unit / kStepRows * kColumns * 4;
        Float kept[Rows][kIntVectors];
        if (kKeeps) {
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kIntVectors; v++) kept[r][v] = load(s.sums + r * kColumns + v * kLanes);
            }
        }
        float* sums = s.sums;
        const Weights& panel = s.panel;
        const char* w = static_cast<const char*>(panel.values) + s.begin * kUnitBytes;
        const std::ptrdiff_t group_bytes = static_cast<std::ptrdiff_t>(panel.scale_bytes) * kColumns, first = s.begin / panel.units_a_group * group_bytes;
        const char *scales = panel.scales + first, *minimums = HasMinimums ? panel.minimums + first : nullptr;
        int units_left = panel.units_a_group - s.begin % panel.units_a_group;
        const std::int32_t* record = s.rows.records + static_cast<std::ptrdiff_t>(s.begin) * Words::kWords * Rows;
        Fetch<IsFar, IsInt4> fetch(w, s.ahead);
        for (int left = s.end - s.begin; left > 0; left--) {
            prefetch(scales + s.ahead_of_scales);
            if constexpr (HasMinimums) prefetch(minimums + s.ahead_of_scales);
            for (int column = 0; column < kColumns; column += kTileWidth) {
                QuadSum sum[Rows][kIntVectors];
                add_unit<Rows, IsFar, Unit>(record, w + column * 4, fetch, column, sum);
                Float scale[kIntVectors], minimum[kIntVectors];
                for (int v = 0; v < kIntVectors; v++) {
                    scale[v] = load_number(scales, panel.scale_bytes, column + v * kLanes);
                    if constexpr (HasMinimums) minimum[v] = load_number(minimums, panel.scale_bytes, column + v * kLanes);
                }
                for (int r = 0; r < Rows; r++) {
                    const std::int32_t offset = record[Words::kOffset * Rows + r];
                    const float row_scale = float_of(record[Words::kScale * Rows + r]);
                    for (int v = 0; v < kIntVectors; v++) {
                        const Float both = mul(broadcast(row_scale), scale[v]);
                        const Float whole = IsInt4 ? end_nibbles(sum[r][v], HasMinimums ? 0 : offset) : end_bytes(sum[r][v], HasMinimums ? 0 : offset);
                        float* place = sums + r * kColumns + column + v * kLanes;
                        Float total = fma(whole, both, kKeeps ? kept[r][v] : load(place));
                        if constexpr (HasMinimums) total = fma(broadcast(float_of(offset)), minimum[v], total);
                        if (kKeeps) {
                            kept[r][v] = total;
                        } else {
                            store(place, total);
                        }
                    }
                }
            }
            w += kUnitBytes, record += Words::kWords * Rows;
            if (--units_left == 0) {
                scales += group_bytes, units_left = panel.units_a_group;
                if constexpr (HasMinimums) minimums += group_bytes;
            }
            fetch.advance(IsFar ? s.pace : kUnitBytes);
        }
        if (kKeeps) {
            for (int r = 0; r < Rows; r++) {
                for (int v = 0; v < kIntVectors; v++) store(s.sums + r * kColumns + v * kLanes, kept[r][v]);
            }
        }
    }

    // Numbers of a scale's or minimum's type, from one on.
    static Float load_number(const char* numbers, int bytes, int first) {
        if (bytes == 4) return load(reinterpret_cast<const float*>(numbers) + first);
        return load_half(reinterpret_cast<const std::uint16_t*>(numbers) + first);
    }
};

struct FormInt8 : FormInteger<false, false> {
    static constexpr const char* kNames[4] = {"PackedLinearInt8", "GatedPackedLinearInt8", "NormPackedLinearInt8", "NormGatedPackedLinearInt8"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearInt8", "GatedExpertLinearInt8"};
    static constexpr const char* kRowsName = "PackedRowsInt8";
};
struct FormInt4 : FormInteger<true, false> {
    static constexpr const char* kNames[4] = {"PackedLinearInt4", "GatedPackedLinearInt4", "NormPackedLinearInt4", "NormGatedPackedLinearInt4"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearInt4", "GatedExpertLinearInt4"};
    static constexpr const char* kRowsName = "PackedRowsInt4";
};
struct FormInt8Min : FormInteger<false, true> {
    static constexpr const char* kNames[4] = {"PackedLinearInt8Min", "GatedPackedLinearInt8Min", "NormPackedLinearInt8Min", "NormGatedPackedLinearInt8Min"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearInt8Min", "GatedExpertLinearInt8Min"};
    static constexpr const char* kRowsName = "PackedRowsInt8Min";
};
struct FormInt4Min : FormInteger<true, true> {
    static constexpr const char* kNames[4] = {"PackedLinearInt4Min", "GatedPackedLinearInt4Min", "NormPackedLinearInt4Min", "NormGatedPackedLinearInt4Min"};
    static constexpr const char* kExpertNames[2] = {"ExpertLinearInt4Min", "GatedExpertLinearInt4Min"};
    static constexpr const char* kRowsName = "PackedRowsInt4Min";
};

template <class Form, bool IsFar, int Unit, std::size_t... Index>
constexpr std::array<Tile, sizeof...(Index)> tiles_from(std::index_sequence<Index...>) {
    return {&Form::template tile<static_cast<int>(Index) + 1, IsFar, Unit>...};
}

// The tiles of a form for 1 ... kMaxRows rows, by whether they fetch into the second-level cache, and by their unit.
template <class Form, bool IsFar, int Unit = Form::kUnit>
constexpr auto kTiles = tiles_from<Form, IsFar, Unit>(std::make_index_sequence<Form::kMaxRows>());

template <class Form, bool IsFar>
Tile tile_of(int rows, [[maybe_unused]] int unit) {
    if constexpr (Form::kIsInteger) {
        if (unit != kGroup) return kTiles<Form, IsFar, kGroup / 2>[static_cast<std::size_t>(rows - 1)];
    }
    return kTiles<Form, IsFar>[static_cast<std::size_t>(rows - 1)];
}

}  // namespace speccompile::cpu
