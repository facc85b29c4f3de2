// SPDX-License-Identifier: Apache-2.0
// Runs the kernels on a CPU: the device words as C++, the threads of a block as fibers of one thread.
// Barriers and shuffles switch fibers, blocks run one after the other, both in an order drawn from a seed; memory
// that CUDA leaves undefined is filled with garbage. It shows what a kernel computes, not how fast, and no data race
// that needs two blocks at once. Include it once per program (it holds the state of the machine that it plays).
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
};

struct Fiber {
    dim3 place;
    Barrier* waits_for = nullptr;
    unsigned waits_since = 0;
    bool is_done = true;
    unsigned num_shuffles = 0;
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
// Saves the registers that a call keeps, on the old stack, and takes them from the new one.
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
    fiber.num_shuffles = 0;
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
            enter(fiber);
        }
        if (is_left && !is_moving) {
            std::fputs("simulate.h: threads wait at different barriers\n", stderr);
            std::abort();
        }
    }
}

}  // namespace host

inline dim3 blockIdx, gridDim, blockDim;
#define threadIdx (host::machine.now->place)

inline float __uint_as_float(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline unsigned __float_as_uint(float value) { unsigned u; std::memcpy(&u, &value, 4); return u; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float x) { return std::exp(x); }
inline void __threadfence() {}
inline void __syncthreads() { host::wait(host::machine.block); }
inline host::Warp& host_warp() { return host::machine.warps[threadIdx.x / 32]; }
inline void __syncwarp() { host::wait(host_warp().barrier); }

template <typename V>
inline V host_exchange(V value, int source) {
    static_assert(sizeof(V) <= 8);
    host::Warp& warp = host_warp();
    std::uint64_t* values = warp.values[host::machine.now->num_shuffles++ % 2];
    std::memcpy(&values[threadIdx.x % 32], &value, sizeof(V));
    host::wait(warp.barrier);
    std::memcpy(&value, &values[source], sizeof(V));
    return value;
}
template <typename V>
inline V __shfl_sync(unsigned, V value, int source) { return host_exchange(value, source % 32); }
template <typename V>
inline V __shfl_xor_sync(unsigned, V value, int mask) { return host_exchange(value, (threadIdx.x % 32) ^ mask); }
template <typename V>
inline V __shfl_up_sync(unsigned, V value, int delta) {
    const int lane = threadIdx.x % 32;
    return host_exchange(value, lane >= delta ? lane - delta : lane);
}
inline unsigned __ballot_sync(unsigned, bool is_set) {
    host::Warp& warp = host_warp();
    std::uint64_t* values = warp.values[host::machine.now->num_shuffles++ % 2];
    values[threadIdx.x % 32] = is_set;
    host::wait(warp.barrier);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= static_cast<unsigned>(values[lane] != 0) << lane;
    return bits;
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }

template <typename V>
inline V atomicAdd(V* place, V value) { V old = *place; *place += value; return old; }
template <typename V>
inline V atomicMin(V* place, V value) { V old = *place; *place = std::min(old, value); return old; }
template <typename V>
inline V atomicMax(V* place, V value) { V old = *place; *place = std::max(old, value); return old; }

inline float host_float_from_half(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        const float small = std::ldexp(static_cast<float>(fraction), -24);
        return sign ? -small : small;
    }
    return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

// Runs `kernel` as a grid. Shared memory of the static kind is not cleared between blocks, as on a GPU.
inline void host_launch(dim3 grid, unsigned threads, std::size_t shared_bytes, unsigned seed, std::function<void()> kernel) {
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
        machine.block = {int(threads), 0, 0};
        for (auto& warp : machine.warps) warp.barrier = {32, 0, 0};
        std::shuffle(order.begin(), order.end(), random);
        for (unsigned i = 0; i < threads; ++i) {
            machine.fibers[i].place = {i, 0, 0};
            host::start(machine.fibers[i]);
        }
        host::run_block(order);
    }
}
