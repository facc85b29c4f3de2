// SPDX-License-Identifier: Apache-2.0
// What every kernel is written with: tensors, attributes, the thread pool, errors, and the registration of an op.
//
// A kernel is a struct with
//     static constexpr const char* kName;                 the op type
//     static constexpr abi::ElementType kInputs[], kOutputs[];
//     static constexpr std::size_t kNumOptional;          the last inputs that may be absent
//     explicit Kernel(const Info& info);                  reads attributes, checks constants; throws Error
//     void run(const Context& context) const;             throws Error
// Errors become ONNX Runtime's statuses, so that a wrong graph is refused when it is loaded and nothing is read
// outside a tensor. A kernel does not know whether ONNX Runtime runs it or a sequence of kernels (sequence.h).
#pragma once

#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "flush.h"
#include "ort_abi.h"

namespace speccompile::cpu {

using Error = std::runtime_error;

inline const void* const* g_api = nullptr;  // set by RegisterCustomOps, before any kernel is made

template <class... Args>
abi::Status* call(abi::Function function, Args... args) {
    return reinterpret_cast<abi::Status* (*)(Args...)>(const_cast<void*>(g_api[function]))(args...);
}

inline void release(abi::Status* status) {
    reinterpret_cast<void (*)(abi::Status*)>(const_cast<void*>(g_api[abi::kReleaseStatus]))(status);
}

inline void check(abi::Status* status) {
    if (status == nullptr) return;
    auto get_message = reinterpret_cast<const char* (*)(const abi::Status*)>(const_cast<void*>(g_api[abi::kGetErrorMessage]));
    std::string message = get_message(status);
    release(status);
    throw Error(message);
}

inline abi::Status* status_from(const std::string& message) { return call(abi::kCreateStatus, abi::kFail, message.c_str()); }

inline const auto kNumCores = static_cast<std::int64_t>(std::thread::hardware_concurrency());

constexpr std::int64_t ceil_div(std::int64_t count, std::int64_t most) { return (count + most - 1) / most; }

constexpr std::size_t kMaxRank = 8;

struct Dims {
    std::int64_t sizes[kMaxRank] = {};
    std::size_t rank = 0;

    Dims() = default;
    Dims(std::initializer_list<std::int64_t> values) {
        for (std::int64_t value : values) sizes[rank++] = value;
    }
    std::int64_t operator[](std::size_t axis) const { return sizes[axis]; }
    std::int64_t last() const { return sizes[rank - 1]; }
    // The product of the first `count` dims.
    std::int64_t product(std::size_t count) const {
        std::int64_t result = 1;
        for (std::size_t axis = 0; axis < count; axis++) result *= sizes[axis];
        return result;
    }
    std::int64_t size() const { return product(rank); }
    Dims with_last(std::int64_t value) const {
        Dims result = *this;
        result.sizes[rank - 1] = value;
        return result;
    }
    bool operator==(const Dims& other) const {
        if (rank != other.rank) return false;
        for (std::size_t axis = 0; axis < rank; axis++) {
            if (sizes[axis] != other.sizes[axis]) return false;
        }
        return true;
    }
    std::string text() const {
        std::string result = "[";
        for (std::size_t axis = 0; axis < rank; axis++) result += (axis ? ", " : "") + std::to_string(sizes[axis]);
        return result + "]";
    }
};

// A tensor of the graph; ONNX Runtime or a sequence owns it. Its element type was checked when the graph was loaded.
class Tensor {
  public:
    Tensor() = default;
    Tensor(void* data, const Dims& dims) : dims(dims), data_(data) {}
    explicit Tensor(const abi::Value* value) {
        check(call(abi::kGetTensorMutableData, const_cast<abi::Value*>(value), &data_));
        abi::ShapeInfo* shape = nullptr;
        check(call(abi::kGetTensorTypeAndShape, value, &shape));
        const abi::ShapeInfo* known = shape;
        check(call(abi::kGetTensorElementType, known, &type));
        check(call(abi::kGetDimensionsCount, known, &dims.rank));
        const bool fits = dims.rank <= kMaxRank;
        if (fits) check(call(abi::kGetDimensions, known, dims.sizes, dims.rank));
        reinterpret_cast<void (*)(abi::ShapeInfo*)>(const_cast<void*>(g_api[abi::kReleaseTensorTypeAndShapeInfo]))(shape);
        if (!fits) throw Error("a tensor of rank " + std::to_string(dims.rank) + ", expected at most 8");
    }
    template <class T>
    T* data() const {
        return static_cast<T*>(data_);
    }
    Dims dims;
    int type = abi::kFloat;

  private:
    void* data_ = nullptr;
};

inline void expect_dims(const std::string& op, const char* name, const Dims& got, const Dims& expected) {
    if (got == expected) return;
    throw Error(op + ": " + name + " has dims " + got.text() + ", expected " + expected.text() +
                " from the attributes; build the bundle again");
}

// What a kernel within a sequence has in the place of ONNX Runtime's KernelInfo.
struct Line {
    virtual ~Line() = default;
    virtual bool has(const char* name) const = 0;
    virtual std::int64_t integer(const char* name) const = 0;
    virtual float real(const char* name) const = 0;
    virtual const abi::Value* constant(std::size_t input) const = 0;
};

class Info {
  public:
    Info(const char* op, const abi::KernelInfo* info) : op(op), info_(info) {}
    Info(const char* op, const Line& line) : op(op), line_(&line) {}
    std::int64_t integer(const char* name) const {
        if (line_ != nullptr) return line_->integer(name);
        std::int64_t value = 0;
        check(call(abi::kKernelInfoGetAttributeInt64, info_, name, &value));
        return value;
    }
    // The same of an attribute that may be absent.
    std::int64_t integer(const char* name, std::int64_t absent) const {
        if (line_ != nullptr) return line_->has(name) ? line_->integer(name) : absent;
        std::int64_t value = absent;
        abi::Status* status = call(abi::kKernelInfoGetAttributeInt64, info_, name, &value);
        if (status == nullptr) return value;
        release(status);
        return absent;
    }
    float real(const char* name) const {
        if (line_ != nullptr) return line_->real(name);
        float value = 0;
        check(call(abi::kKernelInfoGetAttributeFloat, info_, name, &value));
        return value;
    }
    std::string text(const char* name) const {
        std::size_t size = 0;  // with the 0 at its end
        check(call(abi::kKernelInfoGetAttributeString, info_, name, static_cast<char*>(nullptr), &size));
        std::string value(size, ' ');
        check(call(abi::kKernelInfoGetAttributeString, info_, name, value.data(), &size));
        value.resize(size - 1);
        return value;
    }
    // The value of an input that is a constant of the graph; nullptr where it is computed.
    const abi::Value* constant(std::size_t input) const {
        if (line_ != nullptr) return line_->constant(input);
        int is_constant = 0;
        const abi::Value* value = nullptr;
        check(call(abi::kKernelInfoGetConstantInputTensor, info_, input, &is_constant, &value));
        return is_constant ? value : nullptr;
    }
    const std::string op;

  private:
    const abi::KernelInfo* info_ = nullptr;
    const Line* line_ = nullptr;
};

// What a kernel within a sequence has in the place of ONNX Runtime's KernelContext.
struct Frame {
    using Task = void (*)(void* data, std::size_t index);
    virtual ~Frame() = default;
    virtual Tensor input(std::size_t index) const = 0;
    virtual void* output(std::size_t index, const Dims& dims) const = 0;
    virtual void parallel(std::size_t count, Task task, void* data) const = 0;
};

class Context {
  public:
    explicit Context(abi::KernelContext* context) : context_(context) {}
    explicit Context(const Frame& frame) : frame_(&frame) {}
    // Whether an optional input is there; a sequence has no kernels without one.
    bool has_input(std::size_t index) const { return frame_ != nullptr || input_value(index) != nullptr; }
    Tensor input(std::size_t index) const { return frame_ != nullptr ? frame_->input(index) : Tensor(input_value(index)); }
    template <class T>
    T* output(std::size_t index, const Dims& dims) const {
        if (frame_ != nullptr) return static_cast<T*>(frame_->output(index, dims));
        abi::Value* value = nullptr;
        check(call(abi::kKernelContextGetOutput, context_, index, static_cast<const std::int64_t*>(dims.sizes), dims.rank, &value));
        void* data = nullptr;
        if (value != nullptr) check(call(abi::kGetTensorMutableData, value, &data));
        return static_cast<T*>(data);
    }
    // How many times less work is worth a loop: the threads of a sequence are together already (team.h).
    std::int64_t cheapness() const { return frame_ != nullptr ? 8 : 1; }
    // Calls task(0) ... task(count - 1) on the session's threads and returns when all are done. Tasks do not throw.
    template <class Task>
    void parallel(std::size_t count, const Task& task) const {
        if (count <= 1) {
            if (count == 1) task(0);
            return;
        }
        Frame::Task invoke = [](void* data, std::size_t index) {
            const FlushSubnormals flush;
            (*static_cast<const Task*>(data))(index);
        };
        void* data = const_cast<void*>(static_cast<const void*>(&task));
        if (frame_ != nullptr) return frame_->parallel(count, invoke, data);
        check(call(abi::kKernelContextParallelFor, static_cast<const abi::KernelContext*>(context_), invoke, count,
                   std::size_t{0}, data));
    }

  private:
    const abi::Value* input_value(std::size_t index) const {
        const abi::Value* value = nullptr;
        check(call(abi::kKernelContextGetInput, static_cast<const abi::KernelContext*>(context_), index, &value));
        return value;
    }

    abi::KernelContext* context_ = nullptr;
    const Frame* frame_ = nullptr;
};

// Memory of a thread that is kept between calls, aligned to 64 bytes.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data_); }
    template <class T>
    T* get(std::size_t count) {
        const std::size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        if (bytes > bytes_) {
            std::free(data_);
            bytes_ = bytes + bytes / 2 / 64 * 64;
            data_ = std::aligned_alloc(64, bytes_);
            if (data_ == nullptr) {
                bytes_ = 0;
                throw Error("out of memory");
            }
        }
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

template <class Body>
abi::Status* guarded(const char* op, const Body& body) {
    try {
        body();
        return nullptr;
    } catch (const std::exception& fault) {
        return status_from(std::string(op) + ": " + fault.what());
    }
}

// A kernel of any kind.
struct AnyKernel {
    virtual ~AnyKernel() = default;
    virtual void run(const Context& context) const = 0;
};

template <class Kernel>
struct KernelOf final : AnyKernel {
    explicit KernelOf(const Info& info) : kernel(info) {}
    void run(const Context& context) const override { kernel.run(context); }
    const Kernel kernel;
};

// An op: its description for ONNX Runtime, which lives as long as the library, and how a sequence makes its kernel.
struct Op {
    const abi::CustomOp* custom;
    const char* name;
    std::unique_ptr<AnyKernel> (*make)(const Info& info);
    bool is_in_sequences = false;  // whether a sequence may have it
};

// Returns the description of an op but for its inputs and outputs.
template <class Kernel>
abi::CustomOp op_without_types() {
    abi::CustomOp made{};
    made.version = abi::kApiVersion;
    made.get_name = [](const abi::CustomOp*) { return Kernel::kName; };
    made.get_execution_provider = [](const abi::CustomOp*) -> const char* { return nullptr; };
    made.get_input_memory = [](const abi::CustomOp*, std::size_t) { return 0; };
    made.get_variadic_input_min = [](const abi::CustomOp*) { return 1; };
    made.get_variadic_input_same = [](const abi::CustomOp*) { return 1; };
    made.get_variadic_output_min = [](const abi::CustomOp*) { return 1; };
    made.get_variadic_output_same = [](const abi::CustomOp*) { return 1; };
    made.create_kernel_v2 = [](const abi::CustomOp*, const void*, const abi::KernelInfo* info, void** kernel) {
        return guarded(Kernel::kName, [&] { *kernel = new Kernel(Info(Kernel::kName, info)); });
    };
    made.compute_v2 = [](void* kernel, abi::KernelContext* context) {
        const FlushSubnormals flush;
        return guarded(Kernel::kName, [&] { static_cast<const Kernel*>(kernel)->run(Context(context)); });
    };
    made.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    made.get_start_version = [](const abi::CustomOp*) { return 1; };
    made.get_end_version = [](const abi::CustomOp*) { return 2147483647; };
    return made;
}

// Returns the op of a kernel.
template <class Kernel>
Op custom_op() {
    static const abi::CustomOp op = [] {
        abi::CustomOp made = op_without_types<Kernel>();
        made.get_input_count = [](const abi::CustomOp*) { return std::size(Kernel::kInputs); };
        made.get_output_count = [](const abi::CustomOp*) { return std::size(Kernel::kOutputs); };
        made.get_input_type = [](const abi::CustomOp*, std::size_t i) -> int { return Kernel::kInputs[i]; };
        made.get_output_type = [](const abi::CustomOp*, std::size_t i) -> int { return Kernel::kOutputs[i]; };
        made.get_input_characteristic = [](const abi::CustomOp*, std::size_t i) -> int {
            return i + Kernel::kNumOptional < std::size(Kernel::kInputs) ? abi::kRequired : abi::kOptional;
        };
        made.get_output_characteristic = [](const abi::CustomOp*, std::size_t) -> int { return abi::kRequired; };
        return made;
    }();
    return {&op, Kernel::kName,
            [](const Info& info) -> std::unique_ptr<AnyKernel> { return std::make_unique<KernelOf<Kernel>>(info); }};
}

using OpTable = std::vector<Op>;

}  // namespace speccompile::cpu
