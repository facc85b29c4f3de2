// SPDX-License-Identifier: Apache-2.0
// Linears with packed weights: product and bias, with or without residual + RMS normalisation before and gate after.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "kernel.h"
#include "rows.h"
#include "tiles.h"

namespace speccompile::cpu {

constexpr int kHalf = kColumns / 2;               // columns of gate and of up in a panel
constexpr std::int64_t kChunkRows = 96;           // rows whose sums are kept at once, 12 KB
constexpr int kLonger = 2;                        // stretches at once of more than two blocks of rows
constexpr std::int64_t kTaskBytes = 96 * 1024;    // of weights, at least
constexpr std::int64_t kParallelValues = 16384;   // activations from which rows are prepared in parallel

inline std::int64_t padded_to(std::int64_t count, std::int64_t unit) { return (count + unit - 1) / unit * unit; }

// The sums [rows, 32] of one panel, added to the zeros in `sums`.
template <class Form>
void multiply_panel(const Activations& x, std::int64_t first_row, int num_rows, const Weights& panel, float* sums) {
    const int units = static_cast<int>(x.stride / Form::kUnit);
    const int num_blocks = (num_rows + Form::kMaxRows - 1) / Form::kMaxRows;
    // The next block of rows finds a stretch of the weights in the first-level cache.
    // Many blocks amortise a longer one, whose sums are written back less often.
    // So does the next pass over the columns, where registers do not hold them all.
    const bool is_one_pass = num_blocks == 1 && Form::kWidth == kColumns;
    const int step = is_one_pass ? units : num_blocks <= 2 ? Form::kStretch : kLonger * Form::kStretch;
    for (int unit = 0; unit < units; unit += step) {
        for (int block = 0; block < num_blocks; block++) {
            const int begin = num_rows * block / num_blocks, end = num_rows * (block + 1) / num_blocks;
            const std::int64_t row = first_row + begin;
            Stretch stretch{x, panel, unit, std::min(units, unit + step), {kPrefetch, kPrefetch}, sums + begin * kColumns};
            if (num_blocks > 1) {
                // The first two blocks fetch half of the next stretch each, so that memory is busy during both.
                const std::ptrdiff_t next = step * Form::kUnit * kColumns * Form::kBitsPerWeight / 8;
                stretch.ahead[0] = block == 0 ? next : 0;
                stretch.ahead[1] = block == 1 ? next : 0;
            }
            if constexpr (Form::kIsInteger) {
                stretch.rows.levels += row * x.stride;
                stretch.rows.scales += row * (x.stride / kGroup);
                stretch.rows.offsets += row * (x.stride / kGroup);
            } else {
                stretch.rows.values += row * x.stride;
            }
            kTiles<Form>[static_cast<std::size_t>(end - begin - 1)](stretch);
        }
    }
}

template <class Form, bool kHasNorm, bool kHasGate>
class PackedLinear {
  public:
    static constexpr const char* kName = Form::kNames[2 * kHasNorm + kHasGate];
    static constexpr std::size_t kNumOptional = 0;
    static constexpr std::size_t kWeights = kHasNorm ? 3 : 1;
    static constexpr std::size_t kScales = kWeights + 1;
    static constexpr std::size_t kBias = kWeights + 1 + Form::kIsInteger;
    static constexpr auto kInputs = [] {
        std::array<abi::ElementType, kBias + 1> types{};
        for (auto& type : types) type = abi::kFloat;
        types[kWeights] = Form::kWeightType;
        if (Form::kIsInteger) types[kScales] = abi::kFloat16;
        return types;
    }();
    static constexpr auto kOutputs = [] {
        std::array<abi::ElementType, 1 + kHasNorm> types{};
        for (auto& type : types) type = abi::kFloat;
        return types;
    }();

    explicit PackedLinear(const Info& info)
        : num_in_(info.integer("num_in")), num_out_(info.integer("num_out")) {
        constexpr std::int64_t kMost = 1 << 24;
        if (num_in_ < 1 || num_out_ < 1 || num_in_ > kMost || num_out_ > kMost || (kHasGate && num_out_ % 2 != 0)) {
            throw Error("num_in " + std::to_string(num_in_) + " and num_out " + std::to_string(num_out_) +
                        ", expected 1 to 2^24" + (kHasGate ? " and an even num_out" : ""));
        }
        if constexpr (kHasNorm) epsilon_ = info.real("epsilon");
        if constexpr (kHasGate) {
            const std::int64_t kind = info.integer("activation");
            if (kind < 0 || kind > 2) throw Error("activation " + std::to_string(kind) + ", expected 0, 1 or 2");
            activation_ = static_cast<Activation>(kind);
        }
        stride_ = padded_to(num_in_, Form::kUnit);
        num_panels_ = kHasGate ? padded_to(num_out_ / 2, kHalf) / kHalf : padded_to(num_out_, kColumns) / kColumns;
        for (std::size_t input = 0; input < std::size(kInputs); input++) {
            const abi::Value* value = info.constant(input);
            is_checked_[input] = value != nullptr;
            if (value != nullptr && input >= kWeights - (kHasNorm ? 1 : 0)) check_constant(input, Tensor(value));
        }
    }

    void run(const Context& context) const {
        const Tensor x = context.input(0);
        if (x.dims.rank == 0 || x.dims.last() != num_in_) {
            throw Error("x has dims " + x.dims.text() + ", expected [..., " + std::to_string(num_in_) + "]");
        }
        const std::int64_t num_rows = x.dims.product(x.dims.rank - 1);
        float* y = context.output<float>(0, x.dims.with_last(kHasGate ? num_out_ / 2 : num_out_));
        const float* values = x.data<float>();
        thread_local Scratch normal;
        if constexpr (kHasNorm) {
            const Tensor residual = context.input(1), gamma = checked_input(context, 2);
            expect_dims(kName, "residual", residual.dims, x.dims);
            float* sum = context.output<float>(1, x.dims);
            float* to = normal.get<float>(static_cast<std::size_t>(num_rows * num_in_));
            for_rows(context, num_rows, [&](std::int64_t row) {
                const std::int64_t at = row * num_in_;
                normalize_row(values + at, residual.data<float>() + at, gamma.data<float>(), num_in_, epsilon_, sum + at, to + at);
            });
            values = to;
        }
        if (num_rows == 0) return;
        Weights weights;
        weights.values = checked_input(context, kWeights).template data<void>();
        if constexpr (Form::kIsInteger) weights.scales = checked_input(context, kScales).template data<std::uint16_t>();
        const float* bias = checked_input(context, kBias).template data<float>();
        const Activations prepared = prepare(context, values, num_rows);
        const std::int64_t panel_bytes = stride_ * kColumns * Form::kBitsPerWeight / 8;
        const std::int64_t panels_a_task = std::max<std::int64_t>(1, kTaskBytes / panel_bytes);
        const std::int64_t num_tasks = (num_panels_ + panels_a_task - 1) / panels_a_task;
        context.parallel(static_cast<std::size_t>(num_tasks), [&](std::size_t task) {
            const std::int64_t first = static_cast<std::int64_t>(task) * panels_a_task;
            const std::int64_t last = std::min(num_panels_, first + panels_a_task);
            for (std::int64_t panel = first; panel < last; panel++) run_panel(prepared, num_rows, weights, bias, panel, y);
        });
    }

  private:
    Dims expected_dims(std::size_t input) const {
        if (input == kWeights) return Form::dims(num_panels_, stride_);
        if (Form::kIsInteger && input == kScales) return {num_panels_, stride_ / kGroup, kColumns};
        return {input == kBias ? num_out_ : num_in_};
    }

    void check_constant(std::size_t input, const Tensor& tensor) const {
        const char* name = input == kWeights ? "weights" : input == kBias ? "bias" : input < kWeights ? "gamma" : "scales";
        expect_dims(kName, name, tensor.dims, expected_dims(input));
    }

    // Constants were checked when the kernel was made.
    Tensor checked_input(const Context& context, std::size_t input) const {
        Tensor tensor = context.input(input);
        if (!is_checked_[input]) check_constant(input, tensor);
        return tensor;
    }

    template <class Body>
    void for_rows(const Context& context, std::int64_t num_rows, const Body& body) const {
        const std::int64_t rows_a_task = std::max<std::int64_t>(1, kParallelValues / num_in_);
        const std::int64_t num_tasks = (num_rows + rows_a_task - 1) / rows_a_task;
        context.parallel(static_cast<std::size_t>(num_tasks), [&](std::size_t task) {
            const std::int64_t first = static_cast<std::int64_t>(task) * rows_a_task;
            for (std::int64_t row = first; row < std::min(num_rows, first + rows_a_task); row++) body(row);
        });
    }

    // The left side in the numbers of the form; it is valid until this thread's next call.
    Activations prepare(const Context& context, const float* values, std::int64_t num_rows) const {
        Activations made;
        made.stride = stride_;
        if constexpr (Form::kIsInteger) {
            thread_local Scratch levels, scales, offsets;
            const std::int64_t groups = stride_ / kGroup;
            std::int8_t* level = levels.get<std::int8_t>(static_cast<std::size_t>(num_rows * stride_));
            float* scale = scales.get<float>(static_cast<std::size_t>(num_rows * groups));
            std::int32_t* offset = offsets.get<std::int32_t>(static_cast<std::size_t>(num_rows * groups));
            for_rows(context, num_rows, [&](std::int64_t row) {
                quantize_row(values + row * num_in_, num_in_, stride_, Form::kZero, level + row * stride_, scale + row * groups,
                             offset + row * groups);
            });
            made.levels = level;
            made.scales = scale;
            made.offsets = offset;
        } else if (stride_ == num_in_) {
            made.values = values;
        } else {
            thread_local Scratch padded;
            float* to = padded.get<float>(static_cast<std::size_t>(num_rows * stride_));
            for (std::int64_t row = 0; row < num_rows; row++) {
                std::memcpy(to + row * stride_, values + row * num_in_, static_cast<std::size_t>(num_in_) * sizeof(float));
                std::fill(to + row * stride_ + num_in_, to + (row + 1) * stride_, 0.f);
            }
            made.values = to;
        }
        return made;
    }

    void run_panel(const Activations& x, std::int64_t num_rows, const Weights& weights, const float* bias, std::int64_t panel,
                   float* y) const {
        alignas(64) float sums[kChunkRows * kColumns];
        alignas(64) float added[kColumns] = {};
        copy_columns(panel, bias, added);
        Weights own;
        own.values = static_cast<const char*>(weights.values) + panel * (stride_ * kColumns * Form::kBitsPerWeight / 8);
        if (Form::kIsInteger) own.scales = weights.scales + panel * (stride_ / kGroup) * kColumns;
        for (std::int64_t row = 0; row < num_rows; row += kChunkRows) {
            const int count = static_cast<int>(std::min(kChunkRows, num_rows - row));
            std::memset(sums, 0, static_cast<std::size_t>(count) * kColumns * sizeof(float));
            multiply_panel<Form>(x, row, count, own, sums);
            for (int r = 0; r < count; r++) {
                if constexpr (kHasGate) {
                    emit_gated(panel, sums + r * kColumns, added, y + (row + r) * (num_out_ / 2));
                } else {
                    emit(panel, sums + r * kColumns, added, y + (row + r) * num_out_);
                }
            }
        }
    }

    // The bias of a panel's columns; zeros at padding.
    void copy_columns(std::int64_t panel, const float* bias, float* to) const {
        if constexpr (kHasGate) {
            const std::int64_t half = num_out_ / 2, first = panel * kHalf, count = std::min<std::int64_t>(kHalf, half - first);
            std::memcpy(to, bias + first, static_cast<std::size_t>(count) * sizeof(float));
            std::memcpy(to + kHalf, bias + half + first, static_cast<std::size_t>(count) * sizeof(float));
        } else {
            const std::int64_t first = panel * kColumns, count = std::min<std::int64_t>(kColumns, num_out_ - first);
            std::memcpy(to, bias + first, static_cast<std::size_t>(count) * sizeof(float));
        }
    }

    void emit(std::int64_t panel, const float* sums, const float* added, float* y) const {
        const std::int64_t first = panel * kColumns, count = std::min<std::int64_t>(kColumns, num_out_ - first);
        alignas(64) float tail[kColumns];
        float* to = count == kColumns ? y + first : tail;
        for (int c = 0; c < kColumns; c += kLanes) store(to + c, add(load(sums + c), load(added + c)));
        if (to == tail) std::memcpy(y + first, tail, static_cast<std::size_t>(count) * sizeof(float));
    }

    void emit_gated(std::int64_t panel, const float* sums, const float* added, float* y) const {
        const std::int64_t first = panel * kHalf, count = std::min<std::int64_t>(kHalf, num_out_ / 2 - first);
        alignas(64) float tail[kHalf];
        float* to = count == kHalf ? y + first : tail;
        for (int c = 0; c < kHalf; c += kLanes) {
            const Float gate = add(load(sums + c), load(added + c));
            const Float up = add(load(sums + kHalf + c), load(added + kHalf + c));
            store(to + c, mul(activate(activation_, gate), up));
        }
        if (to == tail) std::memcpy(y + first, tail, static_cast<std::size_t>(count) * sizeof(float));
    }

    std::int64_t num_in_, num_out_, stride_ = 0, num_panels_ = 0;
    float epsilon_ = 0;
    Activation activation_ = Activation::kSilu;
    bool is_checked_[kBias + 1] = {};
};

template <class Form>
void add_forms_of_linear(OpTable& table) {
    table.push_back(custom_op<PackedLinear<Form, false, false>>());
    table.push_back(custom_op<PackedLinear<Form, false, true>>());
    table.push_back(custom_op<PackedLinear<Form, true, false>>());
    table.push_back(custom_op<PackedLinear<Form, true, true>>());
}

inline void add_linear_ops(OpTable& table) {
    add_forms_of_linear<FormF32>(table);
    add_forms_of_linear<FormBf16>(table);
    add_forms_of_linear<FormInt8>(table);
    add_forms_of_linear<FormInt4>(table);
}

}  // namespace speccompile::cpu
