// SPDX-License-Identifier: Apache-2.0
// The two products of attention: queries times rows of K, and weights times rows of V, for up to 4 queries at once.
//
// A number never depends on how many queries or rows are computed together: a score is 16 partial sums over head_dim,
// added in one order, and a column of the output adds its rows one after the other.
#pragma once

#include <cstdint>
#include <cstring>

#include "vector.h"

namespace speccompile::cpu {

using i64 = std::int64_t;

constexpr int kQueries = 4;  // queries of a block: each row of K and V is read once for all of them
// Tiles in registers: rows times queries of scores, and column vectors times queries of outputs.
constexpr int kScoreRows = 4;
constexpr int kScoreQueries = kLanes == 16 ? 4 : 1;
constexpr int kColumnVectors = kLanes == 16 ? 4 : 2;

inline i64 round_up(i64 value, i64 multiple) { return (value + multiple - 1) / multiple * multiple; }

// Returns `count` < kPartials floats followed by zeros, in `padded`.
inline const float* pad_chunk(const float* from, i64 count, float* padded) {
    std::memset(padded, 0, kPartials * sizeof(float));
    std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(float));
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
template <int Q>
inline void score_tile(const float* const (&rows)[kScoreRows], i64 head_dim, const float* const* queries,
                       float* const (&to)[Q]) {
    Float sums[Q][kScoreRows][kParts];
    for (int q = 0; q < Q; q++) {
        for (int r = 0; r < kScoreRows; r++) {
            for (int part = 0; part < kParts; part++) sums[q][r][part] = zero();
        }
    }
    const auto add_chunk = [&](const float* const (&from)[kScoreRows], i64 column) {
        for (int part = 0; part < kParts; part++) {
            Float query[Q];
            for (int q = 0; q < Q; q++) query[q] = load(queries[q] + column + part * kLanes);
            for (int r = 0; r < kScoreRows; r++) {
                const Float row = load(from[r] + part * kLanes);
                for (int q = 0; q < Q; q++) sums[q][r][part] = fma(row, query[q], sums[q][r][part]);
            }
        }
    };
    i64 column = 0;
    for (; column + kPartials <= head_dim; column += kPartials) {
        const float* from[kScoreRows];
        for (int r = 0; r < kScoreRows; r++) from[r] = rows[r] + column;
        add_chunk(from, column);
    }
    if (column < head_dim) {
        alignas(64) float padded[kScoreRows][kPartials];
        const float* from[kScoreRows];
        for (int r = 0; r < kScoreRows; r++) from[r] = pad_chunk(rows[r] + column, head_dim - column, padded[r]);
        add_chunk(from, column);
    }
    for (int q = 0; q < Q; q++) store_four_sums(to[q], sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
}

// scores[q][r] = queries[q] . row r for `count` rows of K; up to 3 floats after the last score are overwritten.
template <int Q>
inline void score_rows(const float* k, i64 count, i64 head_dim, const float* const* queries, float* const* scores) {
    for (i64 first = 0; first < count; first += kScoreRows) {
        const float* rows[kScoreRows];
        for (int r = 0; r < kScoreRows; r++) rows[r] = k + (first + r < count ? first + r : count - 1) * head_dim;
        for (int q = 0; q < Q; q += kScoreQueries) {
            constexpr int kTile = Q < kScoreQueries ? Q : kScoreQueries;
            float* to[kTile];
            for (int i = 0; i < kTile; i++) to[i] = scores[q + i] + first;
            score_tile<kTile>(rows, head_dim, queries + q, to);
        }
    }
}

// outputs[q][columns] += sum over rows of weights[q][r] * V[r][columns], for `C` vectors of columns.
template <int Q, int C>
inline void mix_columns(const float* v, i64 count, i64 head_dim, const float* const* weights, float* const* outputs) {
    Float sums[Q][C];
    for (int q = 0; q < Q; q++) {
        for (int c = 0; c < C; c++) sums[q][c] = load(outputs[q] + c * kLanes);
    }
    for (i64 r = 0; r < count; r++, v += head_dim) {
        Float row[C];
        for (int c = 0; c < C; c++) row[c] = load(v + c * kLanes);
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
template <int Q>
inline void mix_rows(const float* v, i64 count, i64 head_dim, const float* const* weights, float* const* outputs) {
    float* to[Q];
    i64 column = 0;
    const auto advance = [&] {
        for (int q = 0; q < Q; q++) to[q] = outputs[q] + column;
    };
    for (; column + kColumnVectors * kLanes <= head_dim; column += kColumnVectors * kLanes) {
        advance();
        mix_columns<Q, kColumnVectors>(v + column, count, head_dim, weights, to);
    }
    for (; column + kLanes <= head_dim; column += kLanes) {
        advance();
        mix_columns<Q, 1>(v + column, count, head_dim, weights, to);
    }
    for (i64 r = 0; column < head_dim && r < count; r++) {
        alignas(64) float padded[kPartials];
        pad_chunk(v + r * head_dim + column, head_dim - column, padded);
        advance();
        const float* weight[Q];
        for (int q = 0; q < Q; q++) weight[q] = weights[q] + r;
        mix_columns<Q, 1>(padded, 1, 0, weight, to);
    }
}

// Calls `score_rows` or `mix_rows` for a number of queries that is known at run time.
inline void score_rows(int q, const float* k, i64 count, i64 head_dim, const float* const* queries, float* const* to) {
    if (q == 4) return score_rows<4>(k, count, head_dim, queries, to);
    if (q == 3) return score_rows<3>(k, count, head_dim, queries, to);
    if (q == 2) return score_rows<2>(k, count, head_dim, queries, to);
    score_rows<1>(k, count, head_dim, queries, to);
}

inline void mix_rows(int q, const float* v, i64 count, i64 head_dim, const float* const* weights, float* const* to) {
    if (q == 4) return mix_rows<4>(v, count, head_dim, weights, to);
    if (q == 3) return mix_rows<3>(v, count, head_dim, weights, to);
    if (q == 2) return mix_rows<2>(v, count, head_dim, weights, to);
    mix_rows<1>(v, count, head_dim, weights, to);
}

}  // namespace speccompile::cpu
