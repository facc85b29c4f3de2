// SPDX-License-Identifier: Apache-2.0
// Draws by an exponential race (`core.race`): the entry with the least time / probability, of equal ones the first.
#pragma once

#include "spec_verify/layout.cuh"

namespace speccompile {

constexpr u32 PRIME = 0x7fffffffu;
constexpr int NUM_SQUARES = 4;

// The remainder of a number below 2^63.
__device__ inline u32 mod_prime(u64 number) {
    const u32 folded = (static_cast<u32>(number) & PRIME) + static_cast<u32>(number >> 31);
    return min(folded, folded - PRIME);  // what is below the prime wraps around
}

struct Race {
    u32 first, second;

    __device__ explicit Race(const float* draws) : first(key_from_draw(draws[0])), second(key_from_draw(draws[1])) {}
    __device__ static u32 key_from_draw(float draw) { return static_cast<u32>(draw * 0x1p24f) * 128u + 1u; }

    // The exponential variate of a token: fine where it is small, which decides.
    __device__ float time(u32 token) const {
        u32 state = mod_prime(static_cast<u64>(first) * (token + 1u) + second);
#pragma unroll
        for (int number = 0; number < NUM_SQUARES; ++number)
            state = mod_prime(static_cast<u64>(state) * state + (number % 2 != 0 ? second : first));
        const float uniform = (static_cast<float>(state) + 0.5f) * 0x1p-31f;
        return -log1pf(-fminf(uniform, 0x1.fffffep-1f));
    }
};

// How a slot's rows are read first: a race over whole rows needs no sums.
struct Scanning {
    float temperature;
    bool is_race;
    Race race;

    __device__ Scanning(const SpecVerifyParams& params, int slot, i64 row)
        : temperature(params.temperature[slot]),
          is_race(is_hot(temperature) && !has_draft_probs(params) && !Cuts(params, slot).any()),
          race(params.uniforms + 2 * row) {}
};

}  // namespace speccompile
