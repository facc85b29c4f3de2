// SPDX-License-Identifier: Apache-2.0
// Low-rank changes of a linear's rows, of which each slot chooses one (LoRA): y = base + (x A^T) B, with or without a gate
// after it; and the residual and norm before a linear that has them.
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
#include "rows.h"
#include "vector.h"

namespace speccompile::cpu {

template <bool kHasGate>
class LowRank {
  public:
    static constexpr const char* kName = kHasGate ? "GatedLowRank" : "LowRank";
    static constexpr std::size_t kNumOptional = 0;
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kFloat, abi::kInt64, abi::kFloat, abi::kFloat};
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat};

    explicit LowRank(const Info& info) {
        if (const abi::Value* b = info.constant(4)) spans_ = find_spans(Tensor(b));
        if constexpr (kHasGate) {
            const std::int64_t kind = info.integer("activation", 0);
            if (kind < 0 || kind > 2) throw Error("activation " + std::to_string(kind) + ", expected 0, 1 or 2");
            activation_ = static_cast<Activation>(kind);
        }
    }

    void run(const Context& context) const {
        const Tensor base = context.input(0), x = context.input(1), adapter = context.input(2);
        const Tensor a = context.input(3), b = context.input(4);
        check_dims(base.dims, x.dims, adapter.dims, a.dims, b.dims);
        const std::int64_t batch = x.dims[0], nodes = x.dims[1], width = kHasGate ? base.dims[2] / 2 : base.dims[2];
        const auto* numbers = adapter.data<std::int64_t>();
        for (std::int64_t slot = 0; slot < batch; slot++) {
            if (numbers[slot] < 0 || numbers[slot] >= a.dims[0]) {
                throw Error("adapter " + std::to_string(numbers[slot]) + " of slot " + std::to_string(slot) + ", expected 0 to " +
                            std::to_string(a.dims[0] - 1));
            }
        }
        const Problem problem{x.data<float>(), base.data<float>(), a.data<float>(), b.data<float>(),
                              context.output<float>(0, base.dims.with_last(width)), x.dims[2], base.dims[2], width, a.dims[1]};
        std::vector<Span> made;
        if (spans_.empty()) made = find_spans(b);
        const Span* spans = (spans_.empty() ? made : spans_).data();
        const std::int64_t blocks = (nodes + kRows - 1) / kRows;
        context.parallel(static_cast<std::size_t>(batch * blocks), [&](std::size_t task) {
            const auto slot = static_cast<std::int64_t>(task) / blocks, block = static_cast<std::int64_t>(task) % blocks;
            const std::int64_t first = slot * nodes + block * kRows, last = std::min((slot + 1) * nodes, first + kRows);
            const Adapter own{numbers[slot], spans + numbers[slot] * problem.rank, numbers[slot] == 0 ? 0 : problem.rank};
            if (last - first == kRows) return change<kRows>(problem, own, first);
            for (std::int64_t row = first; row < last; row++) change<1>(problem, own, row);
        });
    }

  private:
    static constexpr int kRows = 4;                   // rows of a slot that are taken together
    static constexpr int kSums = 8;                   // vectors that are summed at once
    static constexpr std::int64_t kStretch = kSums * kLanes;  // columns that a rank of B has together or not at all

    // Columns of one row of B that are not zeros.
    struct Span {
        std::int32_t first, last;
    };

    struct Problem {
        const float *x, *base, *a, *b;
        float* y;
        std::int64_t num_in, num_out, width, rank;
    };

    struct Adapter {
        std::int64_t number;
        const Span* spans;
        std::int64_t rank;  // 0: no adapter
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
        if (fits && (!kHasGate || base[2] % 2 == 0)) return;
        throw Error("base " + base.text() + ", x " + x.text() + ", adapter " + adapter.text() + ", a " + a.text() + ", b " + b.text() +
                    ", expected [batch, nodes, out], [batch, nodes, in], [batch], [adapters, rank, in], [adapters, rank, out]" +
                    (kHasGate ? ", out even" : ""));
    }

    // The next lanes of a row of which so many are left, with zeros after its end.
    static Float load_some(const float* from, std::int64_t left) {
        if (left >= kLanes) return load(from);
        alignas(64) float lanes[kLanes] = {};
        if (left > 0) std::memcpy(lanes, from, sizeof(float) * static_cast<std::size_t>(left));
        return load(lanes);
    }

    static void store_some(float* to, Float value, std::int64_t left) {
        if (left >= kLanes) return store(to, value);
        alignas(64) float lanes[kLanes];
        store(lanes, value);
        if (left > 0) std::memcpy(to, lanes, sizeof(float) * static_cast<std::size_t>(left));
    }

    template <int kNum>
    void change(const Problem& p, const Adapter& own, std::int64_t row) const {
        constexpr int kRanks = kSums / kNum, kVectors = kSums / kNum;
        thread_local Scratch memory;
        float* low = memory.get<float>(static_cast<std::size_t>(p.rank * kNum));
        std::int64_t chosen[kRanks], num = 0;
        for (std::int64_t r = 0; r < own.rank; r++) {
            if (own.spans[r].first < own.spans[r].last) chosen[num++] = r;
            if (num == kRanks) {
                project<kNum, kRanks>(p, own, row, chosen, low);
                num = 0;
            }
        }
        for (std::int64_t i = 0; i < num; i++) project<kNum, 1>(p, own, row, chosen + i, low);
        for (std::int64_t column = 0; column < p.width; column += kVectors * kLanes) {
            Float sums[kNum][kVectors];
            spread<kNum, kVectors>(p, own, row, 0, column, low, sums);
            if constexpr (kHasGate) {
                Float ups[kNum][kVectors];
                spread<kNum, kVectors>(p, own, row, p.width, column, low, ups);
                for (int i = 0; i < kNum; i++) {
                    for (int v = 0; v < kVectors; v++) sums[i][v] = mul(activate(activation_, sums[i][v]), ups[i][v]);
                }
            }
            for (int i = 0; i < kNum; i++) {
                float* y = p.y + (row + i) * p.width + column;
                for (int v = 0; v < kVectors; v++) store_some(y + v * kLanes, sums[i][v], p.width - column - v * kLanes);
            }
        }
    }

    // low[rank, row] of some ranks, which are independent of each other.
    template <int kNum, int kRanks>
    static void project(const Problem& p, const Adapter& own, std::int64_t row, const std::int64_t* ranks, float* low) {
        Float sums[kRanks][kNum][kParts];
        const float* weights[kRanks];
        for (int r = 0; r < kRanks; r++) {
            weights[r] = p.a + (own.number * p.rank + ranks[r]) * p.num_in;
            for (auto& parts : sums[r]) std::fill(parts, parts + kParts, zero());
        }
        for (std::int64_t k = 0; k < p.num_in; k += kPartials) {
            for (int part = 0; part < kParts; part++) {
                const std::int64_t at = k + part * kLanes, left = p.num_in - at;
                if (left <= 0) break;
                Float values[kNum];
                for (int i = 0; i < kNum; i++) values[i] = load_some(p.x + (row + i) * p.num_in + at, left);
                for (int r = 0; r < kRanks; r++) {
                    const Float weight = load_some(weights[r] + at, left);
                    for (int i = 0; i < kNum; i++) sums[r][i][part] = fma(values[i], weight, sums[r][i][part]);
                }
            }
        }
        for (int r = 0; r < kRanks; r++) {
            for (int i = 0; i < kNum; i++) low[ranks[r] * kNum + i] = sum_partials(sums[r][i]);
        }
    }

    // Columns from `origin` + `column` on of base + low B, those of one stretch.
    template <int kNum, int kVectors>
    static void spread(const Problem& p, const Adapter& own, std::int64_t row, std::int64_t origin, std::int64_t column, const float* low,
                       Float (&sums)[kNum][kVectors]) {
        const std::int64_t begin = origin + column / kStretch * kStretch, left = p.width - column;
        for (int i = 0; i < kNum; i++) {
            const float* base = p.base + (row + i) * p.num_out + origin + column;
            for (int v = 0; v < kVectors; v++) sums[i][v] = load_some(base + v * kLanes, left - v * kLanes);
        }
        for (std::int64_t r = 0; r < own.rank; r++) {
            if (own.spans[r].first >= own.spans[r].last || own.spans[r].last <= begin || own.spans[r].first >= begin + kStretch) continue;
            const float* b = p.b + (own.number * p.rank + r) * p.num_out + origin + column;
            Float factors[kNum];
            for (int i = 0; i < kNum; i++) factors[i] = broadcast(low[r * kNum + i]);
            for (int v = 0; v < kVectors; v++) {
                const Float weight = load_some(b + v * kLanes, left - v * kLanes);
                for (int i = 0; i < kNum; i++) sums[i][v] = fma(factors[i], weight, sums[i][v]);
            }
        }
    }

    std::vector<Span> spans_;  // by adapter and rank, where B is a constant
    Activation activation_ = Activation::kSilu;
};

// x and residual [..., num_in], gamma [num_in] -> RMSNorm(x + residual) * gamma, and the sum.
class AddNorm {
  public:
    static constexpr const char* kName = "AddNorm";
    static constexpr std::size_t kNumOptional = 0;
    static constexpr abi::ElementType kInputs[] = {abi::kFloat, abi::kFloat, abi::kFloat};
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat, abi::kFloat};

    explicit AddNorm(const Info& info) : epsilon_(info.real("epsilon")) {}

    void run(const Context& context) const {
        const Tensor x = context.input(0), residual = context.input(1), gamma = context.input(2);
        if (x.dims.rank == 0 || !(residual.dims == x.dims) || !(gamma.dims == Dims{x.dims.last()})) {
            throw Error("x " + x.dims.text() + ", residual " + residual.dims.text() + ", gamma " + gamma.dims.text() +
                        ", expected [..., in] twice and [in]");
        }
        float *y = context.output<float>(0, x.dims), *sum = context.output<float>(1, x.dims);
        const std::int64_t size = x.dims.last(), rows = size == 0 ? 0 : x.dims.size() / size;
        const std::int64_t blocks = (rows + kRowsATask - 1) / kRowsATask;
        context.parallel(static_cast<std::size_t>(blocks), [&](std::size_t task) {
            const std::int64_t first = static_cast<std::int64_t>(task) * kRowsATask, last = std::min(rows, first + kRowsATask);
            for (std::int64_t at = first * size; at < last * size; at += size) {
                normalize_row(x.data<float>() + at, residual.data<float>() + at, gamma.data<float>(), size, epsilon_, sum + at, y + at);
            }
        });
    }

  private:
    static constexpr std::int64_t kRowsATask = 16;

    float epsilon_;
};

inline void add_low_rank_ops(OpTable& table) {
    table.push_back(custom_op<LowRank<false>>());
    table.push_back(custom_op<LowRank<true>>());
    table.push_back(custom_op<AddNorm>());
}

}  // namespace speccompile::cpu
