// SPDX-License-Identifier: Apache-2.0
// Low-rank changes of a linear's rows, of which each slot chooses one (LoRA): y = base + (x A^T) B.
//
// Rows of one slot are taken together, so that A and B are read once for some of them. A row's numbers do not depend on the
// others: sums over x as in vector.h, sums over the ranks in rising order. Ranks that an adapter lacks are not read, and of
// the others only the columns of B that are not zeros: of merged linears each rank has those of one linear.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernel.h"
#include "vector.h"

namespace speccompile::cpu {

class LowRank {
  public:
    static constexpr const char* kName = "LowRank";
    static constexpr std::size_t kNumOptional = 0;
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kFloat, abi::kInt64, abi::kFloat, abi::kFloat};
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat};

    explicit LowRank(const Info& info) {
        if (const abi::Value* b = info.constant(4)) spans_ = find_spans(Tensor(b));
    }

    void run(const Context& context) const {
        const Tensor base = context.input(0), x = context.input(1), adapter = context.input(2);
        const Tensor a = context.input(3), b = context.input(4);
        check_dims(base.dims, x.dims, adapter.dims, a.dims, b.dims);
        const std::int64_t batch = x.dims[0], nodes = x.dims[1], num_in = x.dims[2], num_out = base.dims[2];
        const auto* numbers = adapter.data<std::int64_t>();
        for (std::int64_t slot = 0; slot < batch; slot++) {
            if (numbers[slot] < 0 || numbers[slot] >= a.dims[0]) {
                throw Error("adapter " + std::to_string(numbers[slot]) + " of slot " + std::to_string(slot) + ", expected 0 to " +
                            std::to_string(a.dims[0] - 1));
            }
        }
        const Problem problem{x.data<float>(), base.data<float>(), a.data<float>(), b.data<float>(), context.output<float>(0, base.dims),
                              num_in, num_out, a.dims[1]};
        std::vector<Span> made;
        if (spans_.empty()) made = find_spans(b);
        const std::vector<Span>& spans = spans_.empty() ? made : spans_;
        const std::int64_t blocks = (nodes + kRows - 1) / kRows;
        context.parallel(static_cast<std::size_t>(batch * blocks), [&](std::size_t task) {
            const auto slot = static_cast<std::int64_t>(task) / blocks, block = static_cast<std::int64_t>(task) % blocks;
            const std::int64_t first = slot * nodes + block * kRows, last = std::min((slot + 1) * nodes, first + kRows);
            if (numbers[slot] == 0) {
                std::memcpy(problem.y + first * num_out, problem.base + first * num_out, sizeof(float) * static_cast<std::size_t>((last - first) * num_out));
            } else if (last - first == kRows) {
                change<kRows>(problem, spans, numbers[slot], first);
            } else {
                for (std::int64_t row = first; row < last; row++) change<1>(problem, spans, numbers[slot], row);
            }
        });
    }

  private:
    static constexpr int kRows = 4;                    // rows of a slot that are taken together
    static constexpr std::int64_t kBlock = 2 * kLanes;  // columns of y that are summed at once

    struct Problem {
        const float *x, *base, *a, *b;
        float* y;
        std::int64_t num_in, num_out, rank;
    };

    // Columns of one row of B that are not zeros, and whether there are any.
    struct Span {
        std::int32_t first, last;
    };

    static std::vector<Span> find_spans(const Tensor& b) {
        const std::int64_t rows = b.dims.rank == 3 ? b.dims[0] * b.dims[1] : 0, width = rows > 0 ? b.dims[2] : 0;
        std::vector<Span> spans;
        for (std::int64_t row = 0; row < rows; row++) {
            const float* values = b.data<float>() + row * width;
            std::int64_t first = 0, last = width;
            while (first < width && values[first] == 0.f) first++;
            while (last > first && values[last - 1] == 0.f) last--;
            spans.push_back({static_cast<std::int32_t>(first), static_cast<std::int32_t>(last)});
        }
        return spans;
    }

    static void check_dims(const Dims& base, const Dims& x, const Dims& adapter, const Dims& a, const Dims& b) {
        const bool fits = base.rank == 3 && x.rank == 3 && adapter.rank == 1 && a.rank == 3 && b.rank == 3 && base[0] == x[0] &&
                          base[1] == x[1] && adapter[0] == x[0] && a[0] == b[0] && a[1] == b[1] && a[2] == x[2] && b[2] == base[2];
        if (fits) return;
        throw Error("base " + base.text() + ", x " + x.text() + ", adapter " + adapter.text() + ", a " + a.text() + ", b " + b.text() +
                    ", expected [batch, nodes, out], [batch, nodes, in], [batch], [adapters, rank, in], [adapters, rank, out]");
    }

    // The next lanes of a row that ends before them, with zeros after its end.
    static Float load_end(const float* from, std::int64_t count) {
        alignas(64) float lanes[kLanes] = {};
        std::memcpy(lanes, from, sizeof(float) * static_cast<std::size_t>(count));
        return load(lanes);
    }

    template <int kNum>
    static void change(const Problem& p, const std::vector<Span>& spans, std::int64_t adapter, std::int64_t row) {
        thread_local Scratch memory;
        float* low = memory.get<float>(static_cast<std::size_t>(p.rank * kNum));
        const Span* span = spans.data() + adapter * p.rank;
        for (std::int64_t r = 0; r < p.rank; r++) {
            if (span[r].first < span[r].last) project<kNum>(p, p.a + (adapter * p.rank + r) * p.num_in, row, low + r * kNum);
        }
        for (std::int64_t column = 0; column < p.num_out; column += kBlock) spread<kNum>(p, span, adapter, row, column, low);
    }

    template <int kNum>
    static void project(const Problem& p, const float* a, std::int64_t row, float* low) {
        Float sums[kNum][kParts];
        for (auto& parts : sums) std::fill(parts, parts + kParts, zero());
        std::int64_t k = 0;
        for (; k + kPartials <= p.num_in; k += kPartials) {
            for (int part = 0; part < kParts; part++) {
                const Float weight = load(a + k + part * kLanes);
                for (int i = 0; i < kNum; i++) sums[i][part] = fma(load(p.x + (row + i) * p.num_in + k + part * kLanes), weight, sums[i][part]);
            }
        }
        for (int part = 0; part < kParts && k < p.num_in; part++, k += kLanes) {
            const std::int64_t count = std::min<std::int64_t>(kLanes, p.num_in - k);
            const Float weight = load_end(a + k, count);
            for (int i = 0; i < kNum; i++) sums[i][part] = fma(load_end(p.x + (row + i) * p.num_in + k, count), weight, sums[i][part]);
        }
        for (int i = 0; i < kNum; i++) low[i] = sum_partials(sums[i]);
    }

    template <int kNum>
    static void spread(const Problem& p, const Span* span, std::int64_t adapter, std::int64_t row, std::int64_t column, const float* low) {
        const std::int64_t end = std::min(p.num_out, column + kBlock);
        constexpr int kVectors = static_cast<int>(kBlock / kLanes);
        Float sums[kNum][kVectors];
        const auto at = [&](const float* from, int vector) {
            const std::int64_t count = end - column - vector * kLanes;
            if (count >= kLanes) return load(from + vector * kLanes);
            return count > 0 ? load_end(from + vector * kLanes, count) : zero();
        };
        for (int i = 0; i < kNum; i++) {
            for (int v = 0; v < kVectors; v++) sums[i][v] = at(p.base + (row + i) * p.num_out + column, v);
        }
        for (std::int64_t r = 0; r < p.rank; r++) {
            if (span[r].last <= column || span[r].first >= end) continue;
            const float* b = p.b + (adapter * p.rank + r) * p.num_out + column;
            for (int v = 0; v < kVectors; v++) {
                const Float weight = at(b, v);
                for (int i = 0; i < kNum; i++) sums[i][v] = fma(broadcast(low[r * kNum + i]), weight, sums[i][v]);
            }
        }
        for (int i = 0; i < kNum; i++) {
            float* y = p.y + (row + i) * p.num_out + column;
            for (int v = 0; v < kVectors; v++) {
                const std::int64_t count = end - column - v * kLanes;
                if (count >= kLanes) {
                    store(y + v * kLanes, sums[i][v]);
                } else if (count > 0) {
                    alignas(64) float lanes[kLanes];
                    store(lanes, sums[i][v]);
                    std::memcpy(y + v * kLanes, lanes, sizeof(float) * static_cast<std::size_t>(count));
                }
            }
        }
    }

    std::vector<Span> spans_;  // by adapter and rank, where B is a constant
};

inline void add_low_rank_op(OpTable& table) { table.push_back(custom_op<LowRank>()); }

}  // namespace speccompile::cpu
