// SPDX-License-Identifier: Apache-2.0
// Subnormal numbers are zeros in every kernel, on whatever thread it runs.
//
// Without this a row's bits depend on which thread has its task: a caller may flush them, the threads of a session do not.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace speccompile::cpu {

#if defined(__x86_64__)
inline std::uint64_t float_control() { return _mm_getcsr(); }
inline void set_float_control(std::uint64_t control) { _mm_setcsr(static_cast<unsigned>(control)); }
constexpr std::uint64_t kFlushBits = 0x8040;  // MXCSR: results (bit 15) and operands (bit 6)
#elif defined(__aarch64__)
inline std::uint64_t float_control() {
    std::uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
}
inline void set_float_control(std::uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }
constexpr std::uint64_t kFlushBits = std::uint64_t{1} << 24;  // FPCR: operands and results
#else
inline std::uint64_t float_control() { return 0; }
inline void set_float_control(std::uint64_t) {}
constexpr std::uint64_t kFlushBits = 0;
#endif

// Flushes subnormal numbers while it lives, and leaves the thread as it was.
class FlushSubnormals {
  public:
    FlushSubnormals() : before_(float_control()) {
        if ((before_ & kFlushBits) != kFlushBits) set_float_control(before_ | kFlushBits);
    }
    ~FlushSubnormals() {
        if ((before_ & kFlushBits) != kFlushBits) set_float_control(before_);
    }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

  private:
    const std::uint64_t before_;
};

}  // namespace speccompile::cpu
