# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, for rooflines: fused multiply-adds and bytes read a second, by threads.

    python bench/peak.py [--threads 1,2] [--repeats 5] [--compiler g++]

A loop of independent multiply-adds in registers, and sums over an array much larger than the caches; medians. Two
virtual CPUs may be threads of one core, or neighbours may use the other half of it: then two threads together multiply
no faster than one.
"""

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int width = 16;
#elif defined(__AVX2__)
constexpr int width = 8;
#else
constexpr int width = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * width)));
constexpr long turns = 40000000, floats = 64L << 20;
constexpr int chains = 12;  // more than latency times units
volatile float sink;

void multiply(const float* from) {
  Lanes sums[chains];
  for (int chain = 0; chain < chains; ++chain) sums[chain] = Lanes{} + from[chain];  // none equals another
  const Lanes factor = Lanes{} + 1.0001f, add = Lanes{} + 0.5f;
  for (long turn = 0; turn < turns; ++turn)
    for (int chain = 0; chain < chains; ++chain) sums[chain] = sums[chain] * factor + add;
  float total = 0;
  for (const Lanes& sum : sums) total += sum[0];
  sink = total;
}

void read(const float* from) {
  Lanes sums[8] = {};
  const Lanes* lanes = reinterpret_cast<const Lanes*>(from);
  for (long at = 0; at < floats / width; at += 8)
    for (int chain = 0; chain < 8; ++chain) sums[chain] += lanes[at + chain];
  float total = 0;
  for (const Lanes& sum : sums) total += sum[0];
  sink = total;
}

double seconds(void (*work)(const float*), const std::vector<float*>& arrays) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (const float* array : arrays) threads.emplace_back(work, array);
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int main(int, char** argv) {
  const int num_threads = std::atoi(argv[1]);
  std::vector<float*> arrays;
  for (int thread = 0; thread < num_threads; ++thread) {
    arrays.push_back(static_cast<float*>(std::aligned_alloc(64, floats * 4)));
    for (long at = 0; at < floats; ++at) arrays.back()[at] = at % 64;
  }
  const double multiply_s = seconds(multiply, arrays), read_s = seconds(read, arrays);
  std::printf("%d %g %g\n", width, 1e-9 * num_threads * turns * chains / multiply_s,
              1e-9 * num_threads * floats * 4 / read_s);
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="numbers of threads, comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compiler", default="g++")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "peak.cpp", Path(folder) / "peak"
        source.write_text(SOURCE)
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-pthread"]
        subprocess.run([args.compiler, *flags, str(source), "-o", str(program)], check=True)
        print("threads   vector multiply-adds (10^9/s)   GFLOP/s   read GB/s")
        for threads in args.threads.split(","):
            call = [str(program), threads]
            done = [subprocess.check_output(call, text=True).split() for _ in range(args.repeats)]
            width = int(done[0][0])
            rate, read = (statistics.median(float(row[at]) for row in done) for at in (1, 2))
            print(f"{threads:>7}   {rate:29.2f}   {2 * width * rate:7.0f}   {read:9.1f}")


if __name__ == "__main__":
    main()
