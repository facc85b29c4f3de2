// SPDX-License-Identifier: Apache-2.0
// Runs the kernels on a CPU: CUDA's keywords and builtins in C++, the threads of a block as fibers of one thread.
// Barriers and shuffles switch fibers, blocks run one after the other, both in an order drawn from a seed; memory
// that CUDA leaves undefined is filled with garbage. Lanes that meet in calls of different kinds or arguments abort
// the program. It shows what a kernel computes, not how fast, and no data race between blocks; races.h detects those
// within one. Include it once per program (it holds the state of the simulated machine).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(SPECCOMPILE_RACES)
#include "host/races.h"
#endif

#define __device__
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)
#define __noinline__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct uint4 {
    unsigned x, y, z, w;
};

namespace host {

constexpr std::size_t STACK_BYTES = 96 * 1024;

struct Barrier {
    int size = 0, arrived = 0;
    unsigned round = 0;
    int call = 0;  // in which the lanes of a warp meet
};

struct Fiber {
    dim3 thread_index;
    Barrier* waits_for = nullptr;
    unsigned waits_since = 0;
    bool is_done = true;
    unsigned num_shuffles = 0, block_epoch = 0, warp_epoch = 0;
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    std::vector<char> stack;
};

struct Warp {
    Barrier barrier;
    std::uint64_t values[2][32];
};

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<char> dynamic_shared;
    Barrier block;
    Fiber* now = nullptr;
    std::function<void()> kernel;
#if defined(__x86_64__)
    void* scheduler = nullptr;
#else
    ucontext_t scheduler;
#endif
};

inline Machine machine;

#if defined(__x86_64__)
// Saves the callee-saved registers on the old stack and restores those of the new one.
extern "C" void speccompile_switch(void** from, void* to);
asm(R"(
.text
.type speccompile_switch, @function
speccompile_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size speccompile_switch, .-speccompile_switch
)");
inline void leave(Fiber& fiber) { speccompile_switch(&fiber.stack_pointer, machine.scheduler); }
inline void enter(Fiber& fiber) { speccompile_switch(&machine.scheduler, fiber.stack_pointer); }
#else
inline void leave(Fiber& fiber) { swapcontext(&fiber.context, &machine.scheduler); }
inline void enter(Fiber& fiber) { swapcontext(&machine.scheduler, &fiber.context); }
#endif

inline void run_fiber() {
    machine.kernel();
    machine.now->is_done = true;
    leave(*machine.now);
    std::abort();  // a fiber that is done is not entered again
}

inline void start(Fiber& fiber) {
    fiber.is_done = false;
    fiber.waits_for = nullptr;
    fiber.num_shuffles = fiber.block_epoch = fiber.warp_epoch = 0;
    fiber.stack.resize(STACK_BYTES);
#if defined(__x86_64__)
    auto top = reinterpret_cast<std::uintptr_t>(fiber.stack.data() + STACK_BYTES) & ~std::uintptr_t(15);
    auto* words = reinterpret_cast<void**>(top) - 2;  // at the entry of a function the stack is 8 off a multiple of 16
    words[0] = reinterpret_cast<void*>(&run_fiber);
    std::fill(words - 6, words, nullptr);
    fiber.stack_pointer = words - 6;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, run_fiber, 0);
#endif
}

inline void wait(Barrier& barrier) {
    if (++barrier.arrived == barrier.size) {
        barrier.arrived = 0;
        ++barrier.round;
        return;
    }
    machine.now->waits_for = &barrier;
    machine.now->waits_since = barrier.round;
    leave(*machine.now);
}

// Reports the running thread to the race detector, where it is compiled in.
inline void announce([[maybe_unused]] const Fiber& fiber, [[maybe_unused]] bool is_atomic) {
#if defined(SPECCOMPILE_RACES)
    races::now = {static_cast<int>(fiber.thread_index.x), fiber.block_epoch, fiber.warp_epoch, is_atomic};
#endif
}

inline void run_block(std::vector<int>& order) {
    for (bool is_left = true; is_left;) {
        is_left = false;
        bool is_moving = false;
        for (int i : order) {
            Fiber& fiber = machine.fibers[i];
            if (fiber.is_done) continue;
            is_left = true;
            if (fiber.waits_for != nullptr && fiber.waits_for->round == fiber.waits_since) continue;
            fiber.waits_for = nullptr;
            is_moving = true;
            machine.now = &fiber;
            announce(fiber, false);
            enter(fiber);
        }
        if (is_left && !is_moving) {
            std::fputs("simulate.h: threads wait at different barriers\n", stderr);
            std::abort();
        }
    }
}

}  // namespace host

using std::max;
using std::min;
inline dim3 blockIdx, gridDim, blockDim;
#define threadIdx (host::machine.now->thread_index)

inline float __uint_as_float(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline unsigned __float_as_uint(float value) { unsigned u; std::memcpy(&u, &value, 4); return u; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline void __threadfence() {}
inline void __syncthreads() {
    host::wait(host::machine.block);
    ++host::machine.now->block_epoch;
    host::announce(*host::machine.now, false);
}
inline host::Warp& host_warp() { return host::machine.warps[threadIdx.x / 32]; }

// Waits for the lanes of the warp, which all make the same call: a letter, and 256 times its argument.
inline void host_meet(host::Warp& warp, int call) {
    if (warp.barrier.arrived == 0) warp.barrier.call = call;
    if (warp.barrier.call != call) {
        std::fputs("simulate.h: lanes of a warp meet in different calls\n", stderr);
        std::abort();
    }
    host::wait(warp.barrier);
}
inline void __syncwarp() {
    host_meet(host_warp(), 'w');
    ++host::machine.now->warp_epoch;
    host::announce(*host::machine.now, false);
}

template <typename V>
inline V host_exchange(V value, int source, int call) {
    static_assert(sizeof(V) <= 8);
    host::Warp& warp = host_warp();
    std::uint64_t* values = warp.values[host::machine.now->num_shuffles++ % 2];
    std::memcpy(&values[threadIdx.x % 32], &value, sizeof(V));
    host_meet(warp, call);
    std::memcpy(&value, &values[source], sizeof(V));
    return value;
}
template <typename V>
inline V __shfl_sync(unsigned, V value, int source) {
    return host_exchange(value, source % 32, 's');
}
template <typename V>
inline V __shfl_xor_sync(unsigned, V value, int mask) {
    return host_exchange(value, (threadIdx.x % 32) ^ mask, 'x' + 256 * mask);
}
template <typename V>
inline V __shfl_up_sync(unsigned, V value, int delta) {
    const int lane = threadIdx.x % 32;
    return host_exchange(value, lane >= delta ? lane - delta : lane, 'u' + 256 * delta);
}
inline unsigned __ballot_sync(unsigned, bool is_set) {
    host::Warp& warp = host_warp();
    std::uint64_t* values = warp.values[host::machine.now->num_shuffles++ % 2];
    values[threadIdx.x % 32] = is_set;
    host_meet(warp, 'b');
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(values[lane] != 0) << lane;
    return bits;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    host::Warp& warp = host_warp();
    std::uint64_t* values = warp.values[host::machine.now->num_shuffles++ % 2];
    values[threadIdx.x % 32] = value;
    host_meet(warp, 'm');
    return static_cast<unsigned>(*std::max_element(values, values + 32));
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <typename V>
inline V host_exchange_at(V* target, V (*combine)(V, V), V value) {
    host::announce(*host::machine.now, true);
    const V old = *const_cast<volatile V*>(target);
    *const_cast<volatile V*>(target) = combine(old, value);
    host::announce(*host::machine.now, false);
    return old;
}
template <typename V>
inline V atomicAdd(V* target, V value) { return host_exchange_at<V>(target, [](V a, V b) -> V { return a + b; }, value); }
template <typename V>
inline V atomicMin(V* target, V value) { return host_exchange_at<V>(target, [](V a, V b) { return min(a, b); }, value); }
template <typename V>
inline V atomicMax(V* target, V value) { return host_exchange_at<V>(target, [](V a, V b) { return max(a, b); }, value); }

inline float host_float_from_half(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        const float small = std::ldexp(static_cast<float>(fraction), -24);
        return sign ? -small : small;
    }
    return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

// Runs `kernel` as a grid; `fixed` is its shared memory of the static kind.
inline void host_launch(
    dim3 grid, unsigned threads, std::size_t shared_bytes, unsigned seed, std::function<void()> kernel,
    void* fixed = nullptr, std::size_t fixed_bytes = 0) {
    host::Machine& machine = host::machine;
    machine.kernel = std::move(kernel);
    if (machine.fibers.size() < threads) machine.fibers.resize(threads);
    machine.warps.assign((threads + 31) / 32, {});
    gridDim = grid;
    blockDim = {threads, 1, 1};
    std::mt19937 random(seed);
    std::vector<unsigned> blocks(std::size_t(grid.x) * grid.y * grid.z);
    std::iota(blocks.begin(), blocks.end(), 0u);
    std::shuffle(blocks.begin(), blocks.end(), random);
    std::vector<int> order(threads);
    std::iota(order.begin(), order.end(), 0);
    for (unsigned block : blocks) {
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        machine.dynamic_shared.assign(shared_bytes, char(0xa5));
        if (fixed != nullptr) std::memset(fixed, 0xa5, fixed_bytes);
        machine.block = {int(threads), 0, 0};
        for (auto& warp : machine.warps) warp.barrier = {32, 0, 0};
        std::shuffle(order.begin(), order.end(), random);
        for (unsigned i = 0; i < threads; ++i) {
            machine.fibers[i].thread_index = {i, 0, 0};
            host::start(machine.fibers[i]);
        }
#if defined(SPECCOMPILE_RACES)
        host::races::begin_block();
        host::races::watch(fixed, fixed_bytes);
        host::races::watch(machine.dynamic_shared.data(), shared_bytes);
#endif
        host::run_block(order);
    }
}
