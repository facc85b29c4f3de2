// SPDX-License-Identifier: Apache-2.0
// The names of TensorRT's runtime interface that plugins/ uses, with the signatures that its documentation gives, so that
// the plugins are compiled where TensorRT's headers are not installed. A library made with them cannot be loaded by it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace nvinfer1 {

enum class DataType : std::int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64 };
enum class TensorFormat : std::int32_t { kLINEAR };
enum class PluginFieldType : std::int32_t { kINT32, kINT64 };
enum class PluginCapabilityType : std::int32_t { kCORE, kBUILD, kRUNTIME };
enum class TensorRTPhase : std::int32_t { kBUILD, kRUNTIME };

struct Dims {
    std::int32_t nbDims;
    std::int64_t d[8];
};

class IDimensionExpr;
class IExprBuilder;
class IPluginResourceContext;

struct DimsExprs {
    std::int32_t nbDims;
    IDimensionExpr const* d[8];
};

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct DynamicPluginTensorDesc {
    PluginTensorDesc desc;
    Dims min, max, opt;
};

struct PluginField {
    PluginField(char const* name = nullptr, void const* data = nullptr, PluginFieldType type = PluginFieldType::kINT32,
                std::int32_t length = 0)
        : name(name), data(data), type(type), length(length) {}
    char const* name;
    void const* data;
    PluginFieldType type;
    std::int32_t length;
};

struct PluginFieldCollection {
    std::int32_t nbFields;
    PluginField const* fields;
};

class ILogger {
public:
    enum class Severity : std::int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
    virtual void log(Severity severity, char const* text) noexcept = 0;
    virtual ~ILogger() = default;
};

class ILoggerFinder {
public:
    virtual ILogger* findLogger() = 0;
};

class IPluginCapability {
public:
    virtual ~IPluginCapability() = default;
};

class IPluginV3 {
public:
    virtual ~IPluginV3() = default;
    virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
    virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
public:
    virtual char const* getPluginName() const noexcept = 0;
    virtual char const* getPluginVersion() const noexcept = 0;
    virtual char const* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuildV2 : public IPluginCapability {
public:
    virtual std::int32_t configurePlugin(DynamicPluginTensorDesc const* in, std::int32_t num_inputs,
                                         DynamicPluginTensorDesc const* out, std::int32_t num_outputs) noexcept = 0;
    virtual std::int32_t getOutputDataTypes(DataType* outputs, std::int32_t num_outputs, DataType const* inputs,
                                            std::int32_t num_inputs) const noexcept = 0;
    virtual std::int32_t getOutputShapes(DimsExprs const* inputs, std::int32_t num_inputs, DimsExprs const* shape_inputs,
                                         std::int32_t num_shape_inputs, DimsExprs* outputs, std::int32_t num_outputs,
                                         IExprBuilder& builder) noexcept = 0;
    virtual bool supportsFormatCombination(std::int32_t pos, DynamicPluginTensorDesc const* in_out,
                                           std::int32_t num_inputs, std::int32_t num_outputs) noexcept = 0;
    virtual std::int32_t getNbOutputs() const noexcept = 0;
    virtual std::size_t getWorkspaceSize(DynamicPluginTensorDesc const*, std::int32_t, DynamicPluginTensorDesc const*,
                                         std::int32_t) const noexcept {
        return 0;
    }
    virtual std::int32_t getAliasedInput(std::int32_t) noexcept { return -1; }
};

class IPluginV3OneRuntime : public IPluginCapability {
public:
    virtual std::int32_t onShapeChange(PluginTensorDesc const* in, std::int32_t num_inputs, PluginTensorDesc const* out,
                                       std::int32_t num_outputs) noexcept = 0;
    virtual std::int32_t enqueue(PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
                                 void* const* outputs, void* workspace, cudaStream_t stream) noexcept = 0;
    virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
    virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorInterface {
public:
    virtual ~IPluginCreatorInterface() = default;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
public:
    virtual IPluginV3* createPlugin(char const* name, PluginFieldCollection const* fields,
                                    TensorRTPhase phase) noexcept = 0;
    virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
    virtual char const* getPluginName() const noexcept = 0;
    virtual char const* getPluginVersion() const noexcept = 0;
    virtual char const* getPluginNamespace() const noexcept = 0;
};

}  // namespace nvinfer1
