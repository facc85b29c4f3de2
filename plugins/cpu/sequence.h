// SPDX-License-Identifier: Apache-2.0
// Kernels one after the other as one op: ONNX Runtime dispatches once and its threads meet once, where a step of a small
// model would otherwise wait longer for both than for its weights. The kernels are those of the ops, unchanged, so the
// numbers have the same bits.
//
// Attribute `program`: a line for each kernel, `OP in=1,2,3 out=9,10 name=value ...`, where values are numbered: first the
// op's inputs, then what kernels make. A last line `outputs 10,12` names the op's outputs.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "kernel.h"
#include "team.h"

namespace speccompile::cpu {

// The ops that a sequence may have.
inline OpTable& sequence_ops() {
    static OpTable ops;
    return ops;
}

class SequenceLine final : public Line {
  public:
    SequenceLine(const std::string& text, const std::vector<const abi::Value*>& constants) {
        std::istringstream words(text);
        words >> op;
        for (std::string word; words >> word;) {
            const std::size_t equals = word.find('=');
            if (equals == std::string::npos) throw Error("program: got '" + word + "', expected NAME=VALUE; build the bundle again");
            const std::string name = word.substr(0, equals), value = word.substr(equals + 1);
            if (name == "in") {
                inputs = numbers(value);
            } else if (name == "out") {
                outputs = numbers(value);
            } else {
                attributes_[name] = value;
            }
        }
        for (std::size_t input : inputs) constants_.push_back(input < constants.size() ? constants[input] : nullptr);
    }
    static std::vector<std::size_t> numbers(const std::string& text) {
        std::vector<std::size_t> found;
        std::istringstream parts(text);
        for (std::string part; std::getline(parts, part, ',');) {
            if (part.empty() || part.find_first_not_of("0123456789") != std::string::npos || part.size() > 6) {
                throw Error("program: got '" + part + "', expected the number of a value; build the bundle again");
            }
            found.push_back(static_cast<std::size_t>(std::atoi(part.c_str())));
        }
        return found;
    }
    bool has(const char* name) const override { return attributes_.count(name) != 0; }
    std::int64_t integer(const char* name) const override { return std::strtoll(attribute(name).c_str(), nullptr, 10); }
    float real(const char* name) const override { return std::strtof(attribute(name).c_str(), nullptr); }
    const abi::Value* constant(std::size_t input) const override {
        return input < constants_.size() ? constants_[input] : nullptr;
    }

    std::string op;
    std::vector<std::size_t> inputs, outputs;

  private:
    const std::string& attribute(const char* name) const {
        const auto found = attributes_.find(name);
        if (found == attributes_.end()) throw Error("program: " + op + " without " + name + "; build the bundle again");
        return found->second;
    }
    std::map<std::string, std::string> attributes_;
    std::vector<const abi::Value*> constants_;  // by input; nullptr where it is computed
};

class KernelSequence {
  public:
    static constexpr const char* kName = "KernelSequence";

    explicit KernelSequence(const Info& info) {
        std::istringstream program(info.text("program"));
        std::size_t num_inputs = static_cast<std::size_t>(info.integer("num_inputs"));
        std::vector<const abi::Value*> constants;
        for (std::size_t input = 0; input < num_inputs; input++) constants.push_back(info.constant(input));
        num_inputs_ = num_values_ = num_inputs;
        std::vector<std::size_t> outputs;
        for (std::string text; std::getline(program, text);) {
            if (text.rfind("outputs ", 0) == 0) {
                outputs = SequenceLine::numbers(text.substr(8));
            } else if (!text.empty()) {
                add(SequenceLine(text, constants));
            }
        }
        for (const abi::Value* constant : constants) constants_.push_back(constant ? Tensor(constant) : Tensor());
        for (const abi::Value* constant : constants) is_constant_.push_back(constant != nullptr);
        assign(outputs);
    }

    void run(const Context& context) const {
        std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        std::unique_ptr<Memory> own;  // of a second run at the same time
        if (!lock.owns_lock()) own = std::make_unique<Memory>();
        Memory& memory = own ? *own : memory_;
        memory.resize(num_values_, num_places_);
        Team team;
        std::atomic<bool> is_led{false};
        std::exception_ptr fault;
        context.parallel(kMostThreads, [&](std::size_t) {
            if (is_led.load(std::memory_order_relaxed) || is_led.exchange(true, std::memory_order_relaxed)) return team.help();
            try {
                lead(context, team, memory);
            } catch (...) {
                fault = std::current_exception();
            }
            team.end();
        });
        if (fault != nullptr) std::rethrow_exception(fault);
    }

  private:
    static constexpr std::size_t kMostThreads = 256;  // that help; a thread's later calls return at once
    static constexpr std::size_t kNowhere = ~std::size_t{0};

    struct Step {
        std::string op;
        std::unique_ptr<AnyKernel> kernel;
        std::vector<std::size_t> inputs, outputs;
    };

    // Where values are while a sequence runs: those that nothing outside reads share places.
    struct Memory {
        std::vector<Tensor> values;
        std::vector<std::unique_ptr<Scratch>> places;
        void resize(std::size_t num_values, std::size_t num_places) {
            values.resize(num_values);
            while (places.size() < num_places) places.push_back(std::make_unique<Scratch>());
        }
    };

    class StepFrame final : public Frame {
      public:
        StepFrame(const KernelSequence& sequence, const Step& step, const Context& context, Team& team, Memory& memory)
            : sequence_(sequence), step_(step), context_(context), team_(team), memory_(memory) {}
        Tensor input(std::size_t index) const override { return memory_.values[step_.inputs.at(index)]; }
        void* output(std::size_t index, const Dims& dims) const override {
            const std::size_t value = step_.outputs.at(index), place = sequence_.places_[value];
            const auto count = static_cast<std::size_t>(dims.size());
            void* data = place == kNowhere ? static_cast<void*>(context_.output<float>(sequence_.output_of_[value], dims))
                                           : memory_.places[place]->get<float>(count);
            memory_.values[value] = Tensor(data, dims);
            return data;
        }
        void parallel(std::size_t count, Task task, void* data) const override { team_.run(count, task, data); }

      private:
        const KernelSequence& sequence_;
        const Step& step_;
        const Context& context_;
        Team& team_;
        Memory& memory_;
    };

    void add(const SequenceLine& line) {
        const auto op = std::find_if(sequence_ops().begin(), sequence_ops().end(), [&](const Op& known) { return line.op == known.name; });
        if (op == sequence_ops().end()) throw Error("program: got the op " + line.op + ", which no sequence has; build the bundle again");
        for (std::size_t input : line.inputs) {
            if (input >= num_values_) throw Error("program: " + line.op + " reads value " + std::to_string(input) + " before it is made");
        }
        for (std::size_t output : line.outputs) {
            if (output != num_values_++) throw Error("program: " + line.op + " makes value " + std::to_string(output) + " out of order");
        }
        const std::size_t num_inputs = op->custom->get_input_count(op->custom), num_outputs = op->custom->get_output_count(op->custom);
        if (line.inputs.size() != num_inputs || line.outputs.size() != num_outputs) {
            throw Error("program: " + line.op + " has other inputs or outputs than the op; build the bundle again");
        }
        steps_.push_back({line.op, op->make(Info(op->name, line)), line.inputs, line.outputs});
    }

    // Gives every value that is no output a place until its last use.
    void assign(const std::vector<std::size_t>& outputs) {
        places_.assign(num_values_, kNowhere);
        output_of_.assign(num_values_, 0);
        std::vector<bool> is_output(num_values_, false);
        for (std::size_t index = 0; index < outputs.size(); index++) {
            const std::size_t value = outputs[index];
            if (value < num_inputs_ || value >= num_values_) throw Error("program: the outputs have a value that no kernel makes");
            is_output[value] = true;
            output_of_[value] = index;
        }
        std::vector<std::size_t> last_use(num_values_, 0), free;
        for (std::size_t step = 0; step < steps_.size(); step++) {
            for (std::size_t value : steps_[step].inputs) last_use[value] = step;
            for (std::size_t value : steps_[step].outputs) last_use[value] = step;
        }
        for (std::size_t step = 0; step < steps_.size(); step++) {
            for (std::size_t value : steps_[step].outputs) {
                if (is_output[value]) continue;
                if (free.empty()) free.push_back(num_places_++);
                places_[value] = free.back();
                free.pop_back();
            }
            for (std::size_t value = num_inputs_; value < num_values_; value++) {
                if (last_use[value] == step && places_[value] != kNowhere) free.push_back(places_[value]);
            }
        }
    }

    void lead(const Context& context, Team& team, Memory& memory) const {
        for (std::size_t input = 0; input < num_inputs_; input++) {
            memory.values[input] = is_constant_[input] ? constants_[input] : context.input(input);
        }
        for (const Step& step : steps_) {
            try {
                step.kernel->run(Context(StepFrame(*this, step, context, team, memory)));
            } catch (const Error& fault) {
                throw Error(step.op + ": " + fault.what());
            }
        }
    }

    std::size_t num_inputs_ = 0, num_values_ = 0, num_places_ = 0;
    std::vector<Step> steps_;
    std::vector<Tensor> constants_;
    std::vector<bool> is_constant_;
    std::vector<std::size_t> places_;     // by value; kNowhere: an input or an output of the op
    std::vector<std::size_t> output_of_;  // by value, where it is an output
    mutable std::mutex mutex_;
    mutable Memory memory_;
};

// The same with outputs of any types, which ONNX Runtime takes from the graph.
struct MixedSequence : KernelSequence {
    static constexpr const char* kName = "MixedSequence";
    using KernelSequence::KernelSequence;
};

// Any number of inputs of any types, any number of outputs.
template <class Sequence, int OutputType>
Op sequence_op() {
    static const abi::CustomOp op = [] {
        abi::CustomOp made = op_without_types<Sequence>();
        made.get_input_count = [](const abi::CustomOp*) -> std::size_t { return 1; };
        made.get_output_count = [](const abi::CustomOp*) -> std::size_t { return 1; };
        made.get_input_type = [](const abi::CustomOp*, std::size_t) -> int { return abi::kAnyType; };
        made.get_output_type = [](const abi::CustomOp*, std::size_t) -> int { return OutputType; };
        made.get_input_characteristic = [](const abi::CustomOp*, std::size_t) -> int { return abi::kVariadic; };
        made.get_output_characteristic = [](const abi::CustomOp*, std::size_t) -> int { return abi::kVariadic; };
        made.get_variadic_input_same = [](const abi::CustomOp*) { return 0; };
        made.get_variadic_output_same = [](const abi::CustomOp*) { return OutputType == abi::kAnyType ? 0 : 1; };
        return made;
    }();
    return {&op, Sequence::kName, nullptr};
}

}  // namespace speccompile::cpu
