// SPDX-License-Identifier: Apache-2.0
// Linears with packed weights: product and bias, with or without residual + RMS normalisation before and gate after.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "kernel.h"
#include "panels.h"

namespace speccompile::cpu {

template <class Form, bool kHasNorm, bool kHasGate>
class PackedLinear : private Panels<Form, kHasGate> {
    using Base = Panels<Form, kHasGate>;
    using Base::num_in_, Base::num_out_, Base::stride_, Base::num_panels_;

  public:
    static constexpr const char* kName = Form::kNames[2 * kHasNorm + kHasGate];
    static constexpr std::size_t kNumOptional = 0;
    static constexpr std::size_t kWeights = kHasNorm ? 3 : 1;
    static constexpr std::size_t kBias = kWeights + Base::kNumPacked;
    static constexpr auto kInputs = [] {
        std::array<abi::ElementType, kBias + 1> types{};
        for (auto& type : types) type = abi::kFloat;
        for (std::size_t i = 0; i < Base::kNumPacked; i++) types[kWeights + i] = Base::kPackedTypes[i];
        return types;
    }();
    static constexpr auto kOutputs = [] {
        std::array<abi::ElementType, 1 + kHasNorm> types{};
        for (auto& type : types) type = abi::kFloat;
        return types;
    }();

    explicit PackedLinear(const Info& info) : Base(info) {
        if constexpr (kHasNorm) epsilon_ = info.real("epsilon");
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
        float* y = context.output<float>(0, x.dims.with_last(Base::width()));
        const float* values = x.data<float>();
        thread_local Scratch normal;
        if constexpr (kHasNorm) {
            const Tensor residual = context.input(1), gamma = checked_input(context, 2);
            expect_dims(kName, "residual", residual.dims, x.dims);
            float* sum = context.output<float>(1, x.dims);
            float* to = normal.get<float>(static_cast<std::size_t>(num_rows * num_in_));
            Base::for_rows(context, num_rows, [&](std::int64_t row) {
                const std::int64_t at = row * num_in_;
                normalize_row(values + at, residual.data<float>() + at, gamma.data<float>(), num_in_, epsilon_, sum + at, to + at);
            });
            values = to;
        }
        if (num_rows == 0) return;
        const Weights weights = Base::weights_in([&](std::size_t i) { return checked_input(context, kWeights + i); });
        const float* bias = checked_input(context, kBias).template data<float>();
        thread_local Scratch memory;
        RowBlock* blocks = memory.get<RowBlock>(static_cast<std::size_t>(ceil_div(num_rows, most_rows<Form>())));
        const RowBlock* end = cut_rows<Form>(0, num_rows, 0, blocks);
        const Activations prepared = prepare(context, values, blocks, end);
        const std::int64_t num_tasks = Base::num_tasks(num_rows);
        const auto place = [y, width = Base::width()](std::int64_t row) { return y + row * width; };
        context.parallel(static_cast<std::size_t>(num_tasks), [&](std::size_t index) {
            const AmxScope scope{};
            const auto task = static_cast<std::int64_t>(index);
            const std::int64_t last = num_panels_ * (task + 1) / num_tasks;
            Base::run_panels(prepared, blocks, end, weights, bias, num_panels_ * task / num_tasks, last, place);
        });
    }

  private:
    void check_constant(std::size_t input, const Tensor& tensor) const {
        if (input >= kWeights && input < kBias) return Base::check_packed(kName, input - kWeights, tensor);
        expect_dims(kName, input == kBias ? "bias" : "gamma", tensor.dims, {input == kBias ? num_out_ : num_in_});
    }

    // Constants were checked when the kernel was made.
    Tensor checked_input(const Context& context, std::size_t input) const {
        Tensor tensor = context.input(input);
        if (!is_checked_[input]) check_constant(input, tensor);
        return tensor;
    }

    // The left side in the numbers of the form: the values themselves where they are in rows of the right length.
    Activations prepare(const Context& context, const float* values, const RowBlock* blocks, const RowBlock* end) const {
        if (Form::kIsInteger || takes_amx<Form>() || stride_ != num_in_) {
            return Base::prepare(context, blocks, end, [&](std::int64_t row) { return values + row * num_in_; });
        }
        Activations made;
        made.stride = stride_;
        made.values = values;
        return made;
    }

    float epsilon_ = 0;
    bool is_checked_[kBias + 1] = {};
};

template <class Form>
void add_forms_of_linear(OpTable& table) {
    table.push_back(custom_op<PackedLinear<Form, false, false>>());
    table.push_back(custom_op<PackedLinear<Form, false, true>>());
    table.push_back(custom_op<PackedLinear<Form, true, false>>());
    table.push_back(custom_op<PackedLinear<Form, true, true>>());
}

// Compiled by themselves, beside each other: linear_floats.cpp, linear_int8.cpp, linear_int4.cpp.
void add_float_linears(OpTable& table);
void add_int8_linears(OpTable& table);
void add_int4_linears(OpTable& table);

inline void add_linear_ops(OpTable& table) {
    add_float_linears(table);
    add_int8_linears(table);
    add_int4_linears(table);
}

}  // namespace speccompile::cpu
