// SPDX-License-Identifier: Apache-2.0
// The part of ONNX Runtime's stable C ABI that this library calls: functions by their index in the OrtApi table, which
// only ever grows at its end, and the members of OrtCustomOp as of version 17. Facts of an ABI; no header is copied.
#pragma once

#include <cstddef>
#include <cstdint>

namespace speccompile::cpu::abi {

struct Value;
struct Status;
struct KernelInfo;
struct KernelContext;
struct ShapeInfo;
struct Domain;
struct SessionOptions;

struct ApiBase {
    const void* const* (*get_api)(std::uint32_t version);
    const char* (*version)();
};

constexpr std::uint32_t kApiVersion = 17;  // the first with KernelContext_ParallelFor
constexpr int kFail = 1;                   // OrtErrorCode

enum Function : std::size_t {
    kCreateStatus = 0,
    kGetErrorMessage = 2,
    kCreateCustomOpDomain = 26,
    kCustomOpDomainAdd = 27,
    kAddCustomOpDomain = 28,
    kGetTensorMutableData = 51,
    kGetTensorElementType = 60,
    kGetDimensionsCount = 61,
    kGetDimensions = 62,
    kGetTensorTypeAndShape = 65,
    kKernelInfoGetAttributeFloat = 85,
    kKernelInfoGetAttributeInt64 = 86,
    kKernelInfoGetAttributeString = 87,
    kKernelContextGetInput = 90,
    kKernelContextGetOutput = 91,
    kReleaseStatus = 93,
    kReleaseTensorTypeAndShapeInfo = 99,
    kKernelInfoGetConstantInputTensor = 249,
    kKernelContextParallelFor = 274,
};

enum ElementType : int { kAnyType = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt64 = 7, kBool = 9, kFloat16 = 10, kBfloat16 = 16 };
enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

// The order of the members is that of OrtCustomOp in version 17.
struct CustomOp {
    std::uint32_t version;
    void* (*create_kernel)(const CustomOp*, const void*, const KernelInfo*);
    const char* (*get_name)(const CustomOp*);
    const char* (*get_execution_provider)(const CustomOp*);
    int (*get_input_type)(const CustomOp*, std::size_t);
    std::size_t (*get_input_count)(const CustomOp*);
    int (*get_output_type)(const CustomOp*, std::size_t);
    std::size_t (*get_output_count)(const CustomOp*);
    void (*compute)(void*, KernelContext*);
    void (*destroy)(void*);
    int (*get_input_characteristic)(const CustomOp*, std::size_t);
    int (*get_output_characteristic)(const CustomOp*, std::size_t);
    int (*get_input_memory)(const CustomOp*, std::size_t);
    int (*get_variadic_input_min)(const CustomOp*);
    int (*get_variadic_input_same)(const CustomOp*);
    int (*get_variadic_output_min)(const CustomOp*);
    int (*get_variadic_output_same)(const CustomOp*);
    Status* (*create_kernel_v2)(const CustomOp*, const void*, const KernelInfo*, void**);
    Status* (*compute_v2)(void*, KernelContext*);
    Status* (*infer_shape)(const CustomOp*, void*);
    int (*get_start_version)(const CustomOp*);
    int (*get_end_version)(const CustomOp*);
};

}  // namespace speccompile::cpu::abi
