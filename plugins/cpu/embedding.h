// SPDX-License-Identifier: Apache-2.0
// Rows of an embedding from packed weights: columns of the panels that the LM head multiplies with, so that tied weights
// are in memory once.
#pragma once

#include <array>
#include <string>

#include "kernel.h"
#include "panels.h"

namespace speccompile::cpu {

// A number of a scale's or minimum's type; the row that it is in has 32 of them.
inline float number_at(const char* numbers, int bytes, int column) {
    if (bytes == 4) return reinterpret_cast<const float*>(numbers)[column];
    alignas(64) float lanes[kLanes];
    store(lanes, load_half(reinterpret_cast<const std::uint16_t*>(numbers) + column / kLanes * kLanes));
    return lanes[column % kLanes];
}

// The numbers that a column of a panel stands for, in rows 0 ... count - 1; a weight of a grid is rounded after the product
// and again after the sum.
inline void copy_column(FormF32, const Weights& panel, int column, std::int64_t count, float* to) {
    const auto* from = static_cast<const float*>(panel.values) + column;
    for (std::int64_t k = 0; k < count; k++) to[k] = from[k * kColumns];
}

inline void copy_column(FormBf16, const Weights& panel, int column, std::int64_t count, float* to) {
    const auto* from = static_cast<const std::uint16_t*>(panel.values) + column * 2;
    for (std::int64_t k = 0; k < count; k++) {
        to[k] = float_of(static_cast<std::int32_t>(static_cast<std::uint32_t>(from[k / 2 * kColumns * 2 + k % 2]) << 16));
    }
}

template <bool IsInt4, bool HasMinimums>
void copy_column(FormInteger<IsInt4, HasMinimums>, const Weights& panel, int column, std::int64_t count, float* to) {
    using Form = FormInteger<IsInt4, HasMinimums>;
    const auto* from = static_cast<const std::uint8_t*>(panel.values) + column * 4;
    const std::int64_t group = std::int64_t{panel.units_a_group} * panel.unit;
    for (std::int64_t first = 0; first < count; first += group) {
        const std::int64_t at = first / group * kColumns * panel.scale_bytes;
        const float scale = number_at(panel.scales + at, panel.scale_bytes, column);
        const float minimum = HasMinimums ? number_at(panel.minimums + at, panel.scale_bytes, column) : 0.f;
        for (std::int64_t k = first; k < std::min(count, first + group); k++) {
            const std::uint8_t byte = from[k / Form::kStepRows * kColumns * 4 + k % 4];
            const int level = (!IsInt4 ? byte : k % 8 < 4 ? byte & 15 : byte >> 4) - Form::kZero;
            to[k] = static_cast<float>(level) * scale;
            if (HasMinimums) to[k] += minimum;
        }
    }
}

// tokens [...] int64 and packed weights [num_in, num_out] -> rows [..., num_in]: the columns of the tokens. Negative tokens
// count from the end.
template <class Form>
class PackedRows : private Panels<Form, false> {
    using Base = Panels<Form, false>;
    using Base::num_in_, Base::num_out_;

  public:
    static constexpr const char* kName = Form::kRowsName;
    static constexpr std::size_t kNumOptional = 0;
    static constexpr auto kInputs = [] {
        std::array<abi::ElementType, 1 + Base::kNumPacked> types{};
        types[0] = abi::kInt64;
        for (std::size_t i = 0; i < Base::kNumPacked; i++) types[1 + i] = Base::kPackedTypes[i];
        return types;
    }();
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat};

    explicit PackedRows(const Info& info) : Base(info, false) {
        for (std::size_t i = 0; i < Base::kNumPacked; i++) {
            const abi::Value* value = info.constant(1 + i);
            is_checked_[i] = value != nullptr;
            if (value != nullptr) Base::check_packed(kName, i, Tensor(value));
        }
    }

    void run(const Context& context) const {
        const Tensor given = context.input(0);
        Dims dims = given.dims;
        if (dims.rank == kMaxRank) throw Error("tokens have dims " + dims.text() + ", expected at most 7 of them");
        dims.sizes[dims.rank++] = num_in_;
        float* rows = context.output<float>(0, dims);
        const auto* tokens = given.data<std::int64_t>();
        const std::int64_t num_tokens = given.dims.size();
        for (std::int64_t i = 0; i < num_tokens; i++) {
            if (tokens[i] < -num_out_ || tokens[i] >= num_out_) {
                throw Error("token " + std::to_string(tokens[i]) + " at " + std::to_string(i) + ", expected one below " + std::to_string(num_out_));
            }
        }
        if (num_tokens == 0) return;
        const Weights weights = Base::weights_in([&](std::size_t i) {
            Tensor tensor = context.input(1 + i);
            if (!is_checked_[i]) Base::check_packed(kName, i, tensor);
            return tensor;
        });
        Base::for_rows(context, num_tokens, [&](std::int64_t row) {
            const std::int64_t token = tokens[row] < 0 ? tokens[row] + num_out_ : tokens[row];
            copy_column(Form{}, Base::from_panel(weights, token / kColumns), static_cast<int>(token % kColumns), num_in_, rows + row * num_in_);
        });
    }

  private:
    bool is_checked_[Base::kNumPacked] = {};
};

inline void add_embedding_ops(OpTable& table) {
    table.push_back(custom_op<PackedRows<FormF32>>());
    table.push_back(custom_op<PackedRows<FormBf16>>());
    table.push_back(custom_op<PackedRows<FormInt8>>());
    table.push_back(custom_op<PackedRows<FormInt4>>());
    table.push_back(custom_op<PackedRows<FormInt8Min>>());
    table.push_back(custom_op<PackedRows<FormInt4Min>>());
}

}  // namespace speccompile::cpu
