// SPDX-License-Identifier: Apache-2.0
// Linears of which each row chooses one of several weights: the experts of a mixture.
//
// Rows are put in the order of their experts, so that an expert's weights are read once, by all of its rows together; no
// other expert's are read. A row's numbers are those of a linear with the weights of its expert (tiles.h), so they do not
// depend on the rows beside it, on how many chose the same expert, or on threads.
#pragma once

#include <algorithm>
#include <array>
#include <string>

#include "kernel.h"
#include "panels.h"

namespace speccompile::cpu {

// The blocks of rows, which are in the order of experts, of one expert.
struct ExpertRows {
    std::int64_t expert;
    const RowBlock *begin, *end;
};

// The rows of each expert that has some.
struct Routes {
    std::int64_t* order = nullptr;     // [ids]: the number of the id that stands there
    ExpertRows* segments = nullptr;    // in rising order of experts
    std::int64_t num_segments = 0;
    RowBlock *blocks = nullptr, *end = nullptr;  // of all experts, one after another

    // Every id is compared before it is an index.
    template <class Form>
    void fill(const std::int64_t* ids, std::int64_t num_ids, std::int64_t num_experts, Scratch& memory) {
        const std::int64_t most = std::min(num_ids, num_experts);
        auto* space = memory.get<std::int64_t>(static_cast<std::size_t>(num_ids + num_experts + 1 + 3 * most + 4 * num_ids));
        order = space;
        std::int64_t* next = space + num_ids;  // [experts + 1]: counts, then where the next row of an expert goes
        segments = reinterpret_cast<ExpertRows*>(next + num_experts + 1);
        blocks = end = reinterpret_cast<RowBlock*>(segments + most);
        std::fill(next, next + num_experts + 1, 0);
        for (std::int64_t i = 0; i < num_ids; i++) {
            if (ids[i] < 0 || ids[i] >= num_experts) {
                throw Error("expert " + std::to_string(ids[i]) + " at " + std::to_string(i) + ", expected 0 to " +
                            std::to_string(num_experts - 1));
            }
            next[ids[i] + 1]++;
        }
        for (std::int64_t expert = 0; expert < num_experts; expert++) {
            const std::int64_t count = next[expert + 1], begin = next[expert];
            next[expert + 1] += begin;
            if (count == 0) continue;
            const RowBlock* first = end;
            end = cut_rows<Form>(begin, count, end == blocks ? 0 : end[-1].at + end[-1].height, end);
            segments[num_segments++] = {expert, first, end};
        }
        for (std::int64_t i = 0; i < num_ids; i++) order[next[ids[i]]++] = i;
    }
};

// x [rows, num_in], ids [...] of rows * per_row experts in the order of rows, weights and bias with a first dim of experts
// -> y [ids, width].
template <class Form, bool kHasGate>
class ExpertLinear : private Panels<Form, kHasGate> {
    using Base = Panels<Form, kHasGate>;
    using Base::num_in_, Base::num_out_, Base::stride_, Base::num_panels_;

  public:
    static constexpr const char* kName = Form::kExpertNames[kHasGate];
    static constexpr std::size_t kNumOptional = 0;
    static constexpr std::size_t kIds = 1, kWeights = 2, kBias = kWeights + Base::kNumPacked;
    static constexpr auto kInputs = [] {
        std::array<abi::ElementType, kBias + 1> types{};
        for (auto& type : types) type = abi::kFloat;
        types[kIds] = abi::kInt64;
        for (std::size_t i = 0; i < Base::kNumPacked; i++) types[kWeights + i] = Base::kPackedTypes[i];
        return types;
    }();
    static constexpr abi::ElementType kOutputs[] = {abi::kFloat};

    explicit ExpertLinear(const Info& info) : Base(info), num_experts_(info.integer("num_experts")) {
        if (num_experts_ < 1 || num_experts_ > 1 << 20) {
            throw Error("num_experts " + std::to_string(num_experts_) + ", expected 1 to 2^20");
        }
        for (std::size_t input = kWeights; input <= kBias; input++) {
            const abi::Value* value = info.constant(input);
            is_checked_[input] = value != nullptr;
            if (value != nullptr) check_constant(input, Tensor(value));
        }
    }

    void run(const Context& context) const {
        const Tensor x = context.input(0), ids = context.input(kIds);
        const std::int64_t num_ids = ids.dims.size();
        if (x.dims.rank != 2 || x.dims.last() != num_in_) {
            throw Error("x has dims " + x.dims.text() + ", expected [rows, " + std::to_string(num_in_) + "]");
        }
        const std::int64_t num_rows = x.dims[0];
        if (num_rows == 0 ? num_ids != 0 : num_ids % num_rows != 0) {
            throw Error("ids have dims " + ids.dims.text() + ", expected as many for each of the " + std::to_string(num_rows) +
                        " rows of x");
        }
        float* y = context.output<float>(0, {num_ids, Base::width()});
        const Weights weights = Base::weights_in([&](std::size_t i) { return checked_input(context, kWeights + i); });
        const float* bias = checked_input(context, kBias).template data<float>();
        if (num_ids == 0) return;
        thread_local Scratch memory;
        Routes routes;
        routes.fill<Form>(ids.data<std::int64_t>(), num_ids, num_experts_, memory);
        const float* values = x.data<float>();
        const std::int64_t per_row = num_ids / num_rows;
        const Activations prepared = Base::prepare(
            context, routes.blocks, routes.end, [&](std::int64_t at) { return values + routes.order[at] / per_row * num_in_; });
        multiply(context, routes, prepared, weights, bias, y);
    }

  private:
    void multiply(const Context& context, const Routes& routes, const Activations& x, const Weights& weights, const float* bias,
                  float* y) const {
        const std::int64_t panels_a_task = Base::panels_a_task();
        const std::int64_t tasks_an_expert = (num_panels_ + panels_a_task - 1) / panels_a_task;
        const auto place = [&routes, y, width = Base::width()](std::int64_t at) { return y + routes.order[at] * width; };
        context.parallel(static_cast<std::size_t>(routes.num_segments * tasks_an_expert), [&](std::size_t task) {
            const ExpertRows& rows = routes.segments[static_cast<std::int64_t>(task) / tasks_an_expert];
            const std::int64_t first = static_cast<std::int64_t>(task) % tasks_an_expert * panels_a_task;
            const std::int64_t last = std::min(num_panels_, first + panels_a_task);
            const Weights own = Base::from_panel(weights, rows.expert * num_panels_);
            const AmxScope scope{};
            Base::run_panels(x, rows.begin, rows.end, own, bias + rows.expert * num_out_, first, last, place);
        });
    }

    void check_constant(std::size_t input, const Tensor& tensor) const {
        if (input < kBias) return Base::check_packed(kName, input - kWeights, tensor, num_experts_);
        expect_dims(kName, "bias", tensor.dims, {num_experts_, num_out_});
    }

    // Constants were checked when the kernel was made.
    Tensor checked_input(const Context& context, std::size_t input) const {
        Tensor tensor = context.input(input);
        if (!is_checked_[input]) check_constant(input, tensor);
        return tensor;
    }

    std::int64_t num_experts_;
    bool is_checked_[kBias + 1] = {};
};

template <class Form>
void add_forms_of_experts(OpTable& table) {
    table.push_back(custom_op<ExpertLinear<Form, false>>());
    table.push_back(custom_op<ExpertLinear<Form, true>>());
}

void add_expert_ops(OpTable& table);  // experts.cpp, compiled by itself

}  // namespace speccompile::cpu
