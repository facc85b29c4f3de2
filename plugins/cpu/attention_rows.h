// SPDX-License-Identifier: Apache-2.0
// The two products of attention: queries times rows of K, and weights times rows of V, for up to 4 queries at once.
//
// A number never depends on how many queries or rows are computed together: a score is 16 partial sums over head_dim,
// added in one order, and a column of the output adds its rows one after the other. Rows are floats, or levels of 8 bits
// with a scale for 32 columns: their products are made in registers, for all queries of a tile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vector.h"

namespace speccompile::cpu {

using i64 = std::int64_t;

constexpr int kQueries = 4;  // queries of a block: each row of K and V is read once for all of them
// Tiles in registers: rows times queries of scores, and column vectors times queries of outputs.
constexpr int kScoreRows = 4;
constexpr int kScoreQueries = kLanes == 16 ? 4 : 1;
constexpr int kColumnVectors = kLanes == 16 ? 4 : 2;

constexpr i64 kCacheGroup = 32;  // columns of an int8 row with one scale; the last may be fewer

inline i64 num_groups(i64 width) { return (width + kCacheGroup - 1) / kCacheGroup; }
inline i64 round_up(i64 value, i64 multiple) { return (value + multiple - 1) / multiple * multiple; }

// Rows of K or V of one head; `floats`, or `levels` and `scales`.
struct CacheRows {
    float* floats;
    std::int8_t* levels;
    float* scales;
    i64 width;
    CacheRows from(i64 row) const {
        if (levels == nullptr) return {floats + row * width, nullptr, nullptr, width};
        return {nullptr, levels + row * width, scales + row * num_groups(width), width};
    }
};

constexpr float kLeastGroupPeak = 1e-30f;  // a group whose largest magnitude is smaller has levels of 0

// Writes a group of `count` numbers: levels -127 ... 127 with the scale peak / 127, ties to even. NaN or infinity give
// the scale NaN. The same numbers as QuantizeRows's twin, in bits.
inline void quantize_group(const float* x, i64 count, std::int8_t* levels, float* scale) {
    alignas(64) float padded[kPartials];
    alignas(64) std::int8_t whole[kPartials];
    const auto chunk = [&](i64 at) {
        if (at + kPartials <= count) return x + at;
        std::memset(padded, 0, sizeof(padded));
        std::memcpy(padded, x + at, static_cast<std::size_t>(count - at) * sizeof(float));
        return static_cast<const float*>(padded);
    };
    Int bits = int_zero();
    for (i64 at = 0; at < count; at += kPartials) {
        const float* from = chunk(at);
        for (int part = 0; part < kParts; part++) bits = max_bits(bits, abs_bits(load(from + part * kLanes)));
    }
    const std::uint32_t peak_bits = reduce_max_bits(bits);  // as integers, so that NaN is the largest
    float peak;
    std::memcpy(&peak, &peak_bits, sizeof(peak));
    const bool is_finite = peak_bits < 0x7f800000u, is_small = is_finite && peak < kLeastGroupPeak;
    *scale = is_small ? 0.f : is_finite ? peak / 127.f : __builtin_nanf("");
    const Float divisor = broadcast(is_small || !is_finite ? 1.f : *scale);
    for (i64 at = 0; at < count; at += kPartials) {
        const float* from = chunk(at);
        for (int part = 0; part < kParts; part++) {
            const Int level = is_finite ? int_from_float(div(load(from + part * kLanes), divisor)) : int_zero();
            store_int8(whole + part * kLanes, level);
        }
        std::memcpy(levels + at, whole, static_cast<std::size_t>(at + kPartials <= count ? kPartials : count - at));
    }
}

inline void quantize_head(const float* x, i64 count, std::int8_t* levels, float* scales) {
    for (i64 at = 0; at < count; at += kCacheGroup) {
        quantize_group(x + at, std::min(kCacheGroup, count - at), levels + at, scales + at / kCacheGroup);
    }
}

// Returns numbers of a row as floats, `scale` being that of their group.
template <class Cell>
inline Float row_floats(const Cell* from, [[maybe_unused]] const float* scale) {
    if constexpr (std::is_same_v<Cell, float>) return load(from);
    else return mul(load(from), broadcast(*scale));
}

// Returns `count` < kPartials numbers followed by zeros, in `padded`.
template <class Cell>
inline const Cell* pad_chunk(const Cell* from, i64 count, Cell* padded) {
    std::memset(padded, 0, kPartials * sizeof(Cell));
    std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(Cell));
    return padded;
}

// Stores the sums of four times 16 partial sums; lanes are added as in `sum_partials`.
inline void store_four_sums(float* to, const Float (&a)[kParts], const Float (&b)[kParts], const Float (&c)[kParts],
                            const Float (&d)[kParts]) {
#if defined(__AVX512F__)
    if constexpr (kLanes == 16) {
        const auto fold = [](Float left, Float right, int) {
            return add(_mm512_shuffle_f32x4(left, right, 0x44), _mm512_shuffle_f32x4(left, right, 0xee));
        };
        const Float ab = fold(a[0], b[0], 8), cd = fold(c[0], d[0], 8);  // lanes i + (i + 8)
        Float v = add(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
        v = add(v, _mm512_permute_ps(v, 0x4e));
        v = add(v, _mm512_permute_ps(v, 0xb1));
        const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, v)));
        return;
    }
#endif
    to[0] = sum_partials(a);
    to[1] = sum_partials(b);
    to[2] = sum_partials(c);
    to[3] = sum_partials(d);
}

// Scores of Q queries and 4 rows of K. The last, incomplete chunk of a row is given padded.
template <int Q, class Cell>
inline void score_tile(const Cell* const (&rows)[kScoreRows], const float* const (&scales)[kScoreRows], i64 head_dim,
                       const float* const* queries, float* const (&to)[Q]) {
    Float sums[Q][kScoreRows][kParts];
    for (int q = 0; q < Q; q++) {
        for (int r = 0; r < kScoreRows; r++) {
            for (int part = 0; part < kParts; part++) sums[q][r][part] = zero();
        }
    }
    const auto add_chunk = [&](const Cell* const (&from)[kScoreRows], i64 column) {
        for (int part = 0; part < kParts; part++) {
            Float query[Q];
            for (int q = 0; q < Q; q++) query[q] = load(queries[q] + column + part * kLanes);
            for (int r = 0; r < kScoreRows; r++) {
                const Float row = row_floats(from[r] + part * kLanes, scales[r] + column / kCacheGroup);
                for (int q = 0; q < Q; q++) sums[q][r][part] = fma(row, query[q], sums[q][r][part]);
            }
        }
    };
    i64 column = 0;
    for (; column + kPartials <= head_dim; column += kPartials) {
        const Cell* from[kScoreRows];
        for (int r = 0; r < kScoreRows; r++) from[r] = rows[r] + column;
        add_chunk(from, column);
    }
    if (column < head_dim) {
        alignas(64) Cell padded[kScoreRows][kPartials];
        const Cell* from[kScoreRows];
        for (int r = 0; r < kScoreRows; r++) from[r] = pad_chunk(rows[r] + column, head_dim - column, padded[r]);
        add_chunk(from, column);
    }
    for (int q = 0; q < Q; q++) store_four_sums(to[q], sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
}

// scores[q][r] = queries[q] . row r for `count` rows of K; up to 3 floats after the last score are overwritten.
template <int Q, class Cell>
inline void score_rows(const Cell* k, const float* scales, i64 count, i64 head_dim, const float* const* queries,
                       float* const* scores) {
    for (i64 first = 0; first < count; first += kScoreRows) {
        const Cell* rows[kScoreRows];
        const float* own[kScoreRows];
        for (int r = 0; r < kScoreRows; r++) {
            const i64 index = first + r < count ? first + r : count - 1;
            rows[r] = k + index * head_dim;
            own[r] = scales + index * num_groups(head_dim);
        }
        for (int q = 0; q < Q; q += kScoreQueries) {
            constexpr int kTile = Q < kScoreQueries ? Q : kScoreQueries;
            float* to[kTile];
            for (int i = 0; i < kTile; i++) to[i] = scores[q + i] + first;
            score_tile<kTile>(rows, own, head_dim, queries + q, to);
        }
    }
}

// outputs[q][columns] += sum over rows of weights[q][r] * V[r][columns], for `C` vectors of columns from `column` on.
template <int Q, int C, class Cell>
inline void mix_columns(const Cell* v, const float* scales, i64 column, i64 count, i64 head_dim,
                        const float* const* weights, float* const* outputs) {
    Float sums[Q][C];
    for (int q = 0; q < Q; q++) {
        for (int c = 0; c < C; c++) sums[q][c] = load(outputs[q] + c * kLanes);
    }
    for (i64 r = 0; r < count; r++, v += head_dim, scales += num_groups(head_dim)) {
        Float row[C];
        for (int c = 0; c < C; c++) {
            row[c] = in_register(row_floats(v + c * kLanes, scales + (column + c * kLanes) / kCacheGroup));
        }
        for (int q = 0; q < Q; q++) {
            const Float weight = broadcast(weights[q][r]);
            for (int c = 0; c < C; c++) sums[q][c] = fma(weight, row[c], sums[q][c]);
        }
    }
    for (int q = 0; q < Q; q++) {
        for (int c = 0; c < C; c++) store(outputs[q] + c * kLanes, sums[q][c]);
    }
}

// outputs[q] += sum over `count` rows of V of weights[q][r] * row r; outputs have room for a multiple of 16 columns.
template <int Q, class Cell>
inline void mix_rows(const Cell* v, const float* scales, i64 count, i64 head_dim, const float* const* weights,
                     float* const* outputs) {
    float* to[Q];
    i64 column = 0;
    const auto advance = [&] {
        for (int q = 0; q < Q; q++) to[q] = outputs[q] + column;
    };
    for (; column + kColumnVectors * kLanes <= head_dim; column += kColumnVectors * kLanes) {
        advance();
        mix_columns<Q, kColumnVectors>(v + column, scales, column, count, head_dim, weights, to);
    }
    for (; column + kLanes <= head_dim; column += kLanes) {
        advance();
        mix_columns<Q, 1>(v + column, scales, column, count, head_dim, weights, to);
    }
    for (i64 r = 0; column < head_dim && r < count; r++) {
        alignas(64) Cell padded[kPartials];
        pad_chunk(v + r * head_dim + column, head_dim - column, padded);
        advance();
        const float* weight[Q];
        for (int q = 0; q < Q; q++) weight[q] = weights[q] + r;
        mix_columns<Q, 1>(padded, scales + r * num_groups(head_dim), column, 1, 0, weight, to);
    }
}

// Calls `score_rows` or `mix_rows` for a number of queries and a kind of rows that are known at run time. Floats have no
// scales: any pointer is passed, and nothing read there.
template <class Cell>
inline void score_rows(int q, const Cell* k, const float* scales, i64 count, i64 head_dim, const float* const* queries,
                       float* const* to) {
    if (q == 4) return score_rows<4>(k, scales, count, head_dim, queries, to);
    if (q == 3) return score_rows<3>(k, scales, count, head_dim, queries, to);
    if (q == 2) return score_rows<2>(k, scales, count, head_dim, queries, to);
    score_rows<1>(k, scales, count, head_dim, queries, to);
}

template <class Cell>
inline void mix_rows(int q, const Cell* v, const float* scales, i64 count, i64 head_dim, const float* const* weights,
                     float* const* to) {
    if (q == 4) return mix_rows<4>(v, scales, count, head_dim, weights, to);
    if (q == 3) return mix_rows<3>(v, scales, count, head_dim, weights, to);
    if (q == 2) return mix_rows<2>(v, scales, count, head_dim, weights, to);
    mix_rows<1>(v, scales, count, head_dim, weights, to);
}

inline void score_rows(int q, const CacheRows& k, i64 count, const float* const* queries, float* const* to) {
    if (k.levels == nullptr) return score_rows(q, k.floats, k.floats, count, k.width, queries, to);
    score_rows(q, k.levels, k.scales, count, k.width, queries, to);
}

inline void mix_rows(int q, const CacheRows& v, i64 count, const float* const* weights, float* const* to) {
    if (v.levels == nullptr) return mix_rows(q, v.floats, v.floats, count, v.width, weights, to);
    mix_rows(q, v.levels, v.scales, count, v.width, weights, to);
}

}  // namespace speccompile::cpu
