// SPDX-License-Identifier: Apache-2.0
// Threads that stay together for many small parallel loops, one after the other: one leads, the others help.
//
// A loop costs a fraction of a microsecond to share, where waking threads for each costs several. Nobody waits for a
// thread that has not come, or that is not running: the leader does what nobody else has begun, and waits only for tasks
// that a helper is in the middle of.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace speccompile::cpu {

inline void pause_thread() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    using Task = void (*)(void* data, std::size_t index);

    // Calls task(data, 0) ... task(data, count - 1) on the threads that are here; for the leader alone.
    void run(std::size_t count, Task task, void* data) {
        const std::size_t shares = 1 + num_helpers_.load(std::memory_order_relaxed);
        if (shares == 1 || count > kMask) {
            for (std::size_t index = 0; index < count; index++) task(data, index);
            return;
        }
        task_.store(task, std::memory_order_relaxed);
        data_.store(data, std::memory_order_relaxed);
        pending_.store(count, std::memory_order_relaxed);
        epoch_++;
        for (std::size_t share = shares; share-- > 0;) {
            const std::uint64_t first = count * share / shares, end = count * (share + 1) / shares;
            shares_[share].ticket.store(epoch_ << (2 * kBits) | end << kBits | first, std::memory_order_release);
        }
        while (take(0)) {
        }
        while (pending_.load(std::memory_order_acquire) != 0) pause_thread();
    }

    // Lets the helpers go.
    void end() { is_over_.store(true, std::memory_order_release); }

    // Takes tasks of the leader's loops until it lets go.
    void help() {
        std::size_t own = num_helpers_.load(std::memory_order_relaxed);
        do {
            if (own + 1 >= kMostShares) return;
        } while (!num_helpers_.compare_exchange_weak(own, own + 1, std::memory_order_relaxed));
        while (!is_over_.load(std::memory_order_acquire)) {
            if (!take(own + 1)) pause_thread();
        }
    }

  private:
    // A ticket is the number of the loop, the end of a share of its tasks and the next one. Who changes it from task i to
    // i + 1 has task i; as the number of the loop is a part of it, a late thread cannot take a task of a loop that it has
    // not seen.
    static constexpr int kBits = 24;
    static constexpr std::uint64_t kMask = (std::uint64_t{1} << kBits) - 1;
    static constexpr std::size_t kMostShares = 64;

    struct alignas(64) Share {
        std::atomic<std::uint64_t> ticket{0};
    };

    // Runs the next task of a share, or of another where that is done; returns whether there was one.
    bool take(std::size_t own) {
        const std::size_t shares = 1 + num_helpers_.load(std::memory_order_relaxed);
        for (std::size_t i = 0; i < shares; i++) {
            if (take_from(shares_[(own + i) % shares].ticket)) return true;
        }
        return false;
    }

    bool take_from(std::atomic<std::uint64_t>& share) {
        std::uint64_t ticket = share.load(std::memory_order_acquire);
        while ((ticket & kMask) < (ticket >> kBits & kMask)) {
            const Task task = task_.load(std::memory_order_relaxed);
            void* data = data_.load(std::memory_order_relaxed);
            if (share.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
                task(data, static_cast<std::size_t>(ticket & kMask));
                pending_.fetch_sub(1, std::memory_order_release);
                return true;
            }
        }
        return false;
    }

    Share shares_[kMostShares];
    alignas(64) std::atomic<Task> task_{nullptr};
    std::atomic<void*> data_{nullptr};
    alignas(64) std::atomic<std::size_t> pending_{0};
    alignas(64) std::atomic<std::size_t> num_helpers_{0};
    std::atomic<bool> is_over_{false};
    std::uint64_t epoch_ = 0;  // the leader's
};

}  // namespace speccompile::cpu
