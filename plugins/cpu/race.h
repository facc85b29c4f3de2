// SPDX-License-Identifier: Apache-2.0
// Draws by an exponential race (`core.race`): the entry with the least time / weight, of equal ones the first.
#pragma once

#include <cmath>
#include <cstdint>

#include "vocab_rows.h"

namespace speccompile::cpu {

constexpr std::uint64_t kPrime = (std::uint64_t{1} << 31) - 1;
constexpr int kSquares = 4;

// The remainder of a number below 2^63.
inline std::uint32_t mod_prime(std::uint64_t number) {
    const std::uint32_t folded = static_cast<std::uint32_t>(number & kPrime) + static_cast<std::uint32_t>(number >> 31);
    return std::min(folded, folded - static_cast<std::uint32_t>(kPrime));  // what is below the prime wraps around
}

// The integers of a node's race: from the two draws [0, 1) of the node.
struct Race {
    std::uint64_t first, second;

    explicit Race(const float* draws) : first(key_from(draws[0])), second(key_from(draws[1])) {}
    static std::uint64_t key_from(float draw) { return static_cast<std::uint64_t>(draw * 0x1p24f) * 128 + 1; }

    std::uint32_t state(i64 token) const {
        std::uint32_t state = mod_prime(first * (static_cast<std::uint64_t>(token) + 1) + second);
        for (int number = 0; number < kSquares; number++) {
            state = mod_prime(std::uint64_t{state} * state + (number % 2 ? second : first));
        }
        return state;
    }
    static double time(std::uint32_t state) { return -std::log1p(-(static_cast<double>(state) + 0.5) * 0x1p-31); }
};

struct Winner {
    double rate = 0;  // weight / time
    i64 index = 0;

    void meet(const Winner& other) {
        if (other.rate > rate) *this = other;
    }
};

// The winner of a chunk. A time is at least its uniform number, so most entries lose without a logarithm.
inline Winner race_chunk(const Race& race, const float* weights, i64 first, i64 count, double best) {
    constexpr double kUnit = 0x1p-31 * 0.999999;  // on the safe side of rounding
    std::uint32_t states[kChunk];
    for (i64 i = 0; i < count; i++) states[i] = race.state(first + i);
    Winner winner;
    for (i64 i = 0; i < count; i++) {
        const double weight = static_cast<double>(weights[i]);
        const double least = (static_cast<double>(states[i]) + 0.5) * kUnit * std::max(best, winner.rate);
        if (!(weight > 0) || weight < least) continue;
        winner.meet({weight / Race::time(states[i]), first + i});
    }
    return winner;
}

// The winner of a row; 0 where no entry has weight, which NaN alone does. Every chunk is decided alone, so threads do not
// change it.
inline i64 race(const Context* context, const RowWeights& weights, const float* draws) {
    const Race race(draws);
    const i64 chunks = num_chunks(weights.vocab);
    const auto run = [&](i64 begin, i64 end) {
        Winner winner;
        for (i64 chunk = begin; chunk < end; chunk++) {
            if (!(weights.sums[chunk] > 0)) continue;
            const i64 at = chunk * kChunk;
            winner.meet(race_chunk(race, weights.values + at, at, chunk_size(weights.vocab, chunk), winner.rate));
        }
        return winner;
    };
    if (context == nullptr || chunks < 2 * kTaskChunks) return run(0, chunks).index;
    thread_local Scratch scratch;
    Winner* winners = scratch.get<Winner>(static_cast<std::size_t>((chunks + kTaskChunks - 1) / kTaskChunks));
    for_chunks(context, weights.vocab, [&](i64 begin, i64 end) { winners[begin / kTaskChunks] = run(begin, end); });
    Winner winner;
    for (i64 task = 0; task * kTaskChunks < chunks; task++) winner.meet(winners[task]);
    return winner.index;
}

}  // namespace speccompile::cpu
