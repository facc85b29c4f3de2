// SPDX-License-Identifier: Apache-2.0
// What both C++ plugins have in common. Only TensorRT's headers are needed; none of its libraries is linked.
#pragma once

#include <NvInferRuntime.h>
#include <NvInferRuntimePlugin.h>

#include <cstring>
#include <initializer_list>
#include <new>
#include <string>
#include <vector>

namespace speccompile {

namespace trt = nvinfer1;

// As in backends/tensorrt/plugin_names.py.
constexpr char const* PLUGIN_NAMESPACE = "";
constexpr char const* PLUGIN_VERSION = "1";
constexpr char const* NUM_CACHES = "num_caches";
constexpr char const* ABI_FIELD = "abi";
constexpr std::int32_t PLUGIN_ABI = 1;

void log_error(std::string const& text) noexcept;

// -1 where a launch has failed, which is forgotten: the next step must not fail as well.
inline std::int32_t status_from_launches() { return cudaGetLastError() == cudaSuccess ? 0 : -1; }

inline bool is_logits_type(trt::DataType type) {
    return type == trt::DataType::kFLOAT || type == trt::DataType::kHALF || type == trt::DataType::kBF16;
}

// int32 fields, as a creator declares them and as a plan stores them.
class Fields {
public:
    explicit Fields(std::initializer_list<std::pair<char const*, std::int32_t>> values) {
        for (auto const& [name, value] : values) values_.push_back(value), names_.push_back(name);
        for (std::size_t i = 0; i < values_.size(); ++i)
            fields_.emplace_back(names_[i], &values_[i], trt::PluginFieldType::kINT32, 1);
        collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
    }
    Fields(Fields const&) = delete;
    trt::PluginFieldCollection const* collection() const { return &collection_; }

private:
    std::vector<char const*> names_;
    std::vector<std::int32_t> values_;
    std::vector<trt::PluginField> fields_;
    trt::PluginFieldCollection collection_{};
};

inline std::int32_t read_field(trt::PluginFieldCollection const* fields, char const* name, std::int32_t otherwise) {
    for (std::int32_t i = 0; fields != nullptr && i < fields->nbFields; ++i) {
        trt::PluginField const& field = fields->fields[i];
        if (std::strcmp(field.name, name) != 0 || field.data == nullptr || field.length < 1) continue;
        if (field.type == trt::PluginFieldType::kINT32) return *static_cast<std::int32_t const*>(field.data);
        if (field.type == trt::PluginFieldType::kINT64)
            return static_cast<std::int32_t>(*static_cast<std::int64_t const*>(field.data));
    }
    return otherwise;
}

// A plugin in one object: it is its own core, build and runtime capability. SELF has a copy constructor.
template <typename SELF>
class Plugin : public trt::IPluginV3,
               public trt::IPluginV3OneCore,
               public trt::IPluginV3OneBuildV2,
               public trt::IPluginV3OneRuntime {
public:
    trt::IPluginCapability* getCapabilityInterface(trt::PluginCapabilityType type) noexcept override {
        switch (type) {
            case trt::PluginCapabilityType::kCORE: return static_cast<trt::IPluginV3OneCore*>(this);
            case trt::PluginCapabilityType::kBUILD: return static_cast<trt::IPluginV3OneBuildV2*>(this);
            case trt::PluginCapabilityType::kRUNTIME: return static_cast<trt::IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    trt::IPluginV3* clone() noexcept override { return new (std::nothrow) SELF(static_cast<SELF const&>(*this)); }
    trt::IPluginV3* attachToContext(trt::IPluginResourceContext*) noexcept override { return clone(); }

    char const* getPluginName() const noexcept override { return SELF::NAME; }
    char const* getPluginVersion() const noexcept override { return PLUGIN_VERSION; }
    char const* getPluginNamespace() const noexcept override { return PLUGIN_NAMESPACE; }

    std::int32_t configurePlugin(
        trt::DynamicPluginTensorDesc const*, std::int32_t, trt::DynamicPluginTensorDesc const*, std::int32_t) noexcept override {
        return 0;
    }
    std::int32_t onShapeChange(
        trt::PluginTensorDesc const*, std::int32_t, trt::PluginTensorDesc const*, std::int32_t) noexcept override {
        return 0;
    }
    bool supportsFormatCombination(std::int32_t pos, trt::DynamicPluginTensorDesc const* in_out, std::int32_t num_inputs,
                                   std::int32_t) noexcept override {
        return in_out[pos].desc.format == trt::TensorFormat::kLINEAR && takes(pos, in_out, num_inputs);
    }

protected:
    virtual bool takes(
        std::int32_t pos, trt::DynamicPluginTensorDesc const* in_out, std::int32_t num_inputs) const noexcept = 0;
};

template <typename PLUGIN>
class Creator : public trt::IPluginCreatorV3One {
public:
    char const* getPluginName() const noexcept override { return PLUGIN::NAME; }
    char const* getPluginVersion() const noexcept override { return PLUGIN_VERSION; }
    char const* getPluginNamespace() const noexcept override { return PLUGIN_NAMESPACE; }
    trt::PluginFieldCollection const* getFieldNames() noexcept override { return fields_.collection(); }
    trt::IPluginV3* createPlugin(
        char const*, trt::PluginFieldCollection const* fields, trt::TensorRTPhase) noexcept override {
        const std::int32_t abi = read_field(fields, ABI_FIELD, PLUGIN_ABI);
        if (abi != PLUGIN_ABI) {
            log_error(std::string(PLUGIN::NAME) + ": got a plan for plugin ABI " + std::to_string(abi) + "; expected ABI " +
                      std::to_string(PLUGIN_ABI) + ". Build the bundle with this version.");
            return nullptr;
        }
        return PLUGIN::create(fields);
    }

private:
    Fields fields_{{ABI_FIELD, PLUGIN_ABI}, {NUM_CACHES, 1}};
};

trt::IPluginCreatorInterface* spec_verify_creator();
trt::IPluginCreatorInterface* kv_rollback_creator();

}  // namespace speccompile
