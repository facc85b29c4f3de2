// SPDX-License-Identifier: Apache-2.0
// SpecVerify as a TensorRT plugin. Compile as CUDA (nvcc -x cu).
#include "plugin_base.h"
#include "spec_verify/launches.h"

namespace speccompile {
namespace {

enum Input { LOGITS, TOKENS, PARENTS, DRAFT_PROBS, UNIFORMS, TEMPERATURE, TOP_K, TOP_P, D2T };
constexpr std::int32_t NUM_INPUTS = D2T;  // without the map
constexpr std::int32_t NUM_OUTPUTS = 3;

class SpecVerify : public Plugin<SpecVerify> {
public:
    static constexpr char const* NAME = "SpecVerify";

    SpecVerify() = default;
    SpecVerify(SpecVerify const& other) : Plugin<SpecVerify>(), has_map_(other.has_map_) {}
    static trt::IPluginV3* create(trt::PluginFieldCollection const*) { return new (std::nothrow) SpecVerify; }

    std::int32_t getNbOutputs() const noexcept override { return NUM_OUTPUTS; }

    std::int32_t getOutputDataTypes(trt::DataType* outputs, std::int32_t num_outputs, trt::DataType const*,
                                    std::int32_t num_inputs) const noexcept override {
        if (num_outputs != NUM_OUTPUTS || (num_inputs != NUM_INPUTS && num_inputs != NUM_INPUTS + 1)) {
            log_error("SpecVerify: got " + std::to_string(num_inputs) + " inputs; expected 8, or 9 with d2t.");
            return -1;
        }
        for (std::int32_t i = 0; i < num_outputs; ++i) outputs[i] = trt::DataType::kINT64;
        return 0;
    }

    std::int32_t getOutputShapes(trt::DimsExprs const* inputs, std::int32_t, trt::DimsExprs const*, std::int32_t,
                                 trt::DimsExprs* outputs, std::int32_t, trt::IExprBuilder&) noexcept override {
        outputs[0] = inputs[TOKENS];
        for (int i = 1; i < NUM_OUTPUTS; ++i) {
            outputs[i].nbDims = 1;
            outputs[i].d[0] = inputs[TOKENS].d[0];
        }
        return 0;
    }

    std::int32_t getAliasedInput(std::int32_t) noexcept override { return -1; }

    std::size_t getWorkspaceSize(trt::DynamicPluginTensorDesc const* inputs, std::int32_t num_inputs,
                                 trt::DynamicPluginTensorDesc const*, std::int32_t) const noexcept override {
        trt::Dims const& most = inputs[LOGITS].max;
        return verify_workspace_bytes(most.d[0], most.d[1], most.d[2], num_inputs > NUM_INPUTS);
    }

    trt::PluginFieldCollection const* getFieldsToSerialize() noexcept override { return fields_.collection(); }

    std::int32_t enqueue(trt::PluginTensorDesc const* descs, trt::PluginTensorDesc const*, void const* const* inputs,
                         void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
        trt::Dims const& dims = descs[LOGITS].dims;
        if (!fits_verify(dims.d[1], dims.d[2])) {
            log_error("SpecVerify: got " + std::to_string(dims.d[1]) + " nodes and a vocabulary of " +
                      std::to_string(dims.d[2]) + "; expected at most 256 and 524288. Build without plugins.");
            return -1;
        }
        SpecVerifyParams params{};
        params.logits = inputs[LOGITS];
        params.tokens = static_cast<i64 const*>(inputs[TOKENS]);
        params.parents = static_cast<i64 const*>(inputs[PARENTS]);
        params.draft_probs = static_cast<float const*>(inputs[DRAFT_PROBS]);
        params.uniforms = static_cast<float const*>(inputs[UNIFORMS]);
        params.temperature = static_cast<float const*>(inputs[TEMPERATURE]);
        params.top_k = static_cast<i64 const*>(inputs[TOP_K]);
        params.top_p = static_cast<float const*>(inputs[TOP_P]);
        params.d2t = has_map_ ? static_cast<i64 const*>(inputs[D2T]) : nullptr;
        params.path = static_cast<i64*>(outputs[0]);
        params.num_accepted = static_cast<i64*>(outputs[1]);
        params.next_token = static_cast<i64*>(outputs[2]);
        params.workspace = workspace;
        params.batch = static_cast<int>(dims.d[0]);
        params.nodes = static_cast<int>(dims.d[1]);
        params.vocab = static_cast<int>(dims.d[2]);
        params.draft_vocab = static_cast<int>(descs[DRAFT_PROBS].dims.d[2]);
        const dim3 scan_grid(scan_blocks(params.batch, params.nodes, params.vocab));
        switch (descs[LOGITS].type) {
            case trt::DataType::kHALF:
                params.dtype = Dtype::F16;
                spec_verify_scan_f16<<<scan_grid, SCAN_THREADS, 0, stream>>>(params);
                break;
            case trt::DataType::kBF16:
                params.dtype = Dtype::BF16;
                spec_verify_scan_bf16<<<scan_grid, SCAN_THREADS, 0, stream>>>(params);
                break;
            default:
                params.dtype = Dtype::F32;
                spec_verify_scan_f32<<<scan_grid, SCAN_THREADS, 0, stream>>>(params);
        }
        const dim3 resolve_grid(params.batch * params.nodes);
        spec_verify_resolve<<<resolve_grid, RESOLVE_THREADS, resolve_shared_bytes(params.vocab), stream>>>(params);
        return status_from_launches();
    }

    std::int32_t onShapeChange(
        trt::PluginTensorDesc const*, std::int32_t num_inputs, trt::PluginTensorDesc const*, std::int32_t) noexcept override {
        has_map_ = num_inputs > NUM_INPUTS;  // enqueue does not get the number of inputs
        return 0;
    }

protected:
    bool takes(std::int32_t pos, trt::DynamicPluginTensorDesc const* in_out, std::int32_t num_inputs) const noexcept override {
        const trt::DataType type = in_out[pos].desc.type;
        if (pos == LOGITS) return is_logits_type(type);
        const bool is_real =
            pos < num_inputs && (pos == DRAFT_PROBS || pos == UNIFORMS || pos == TEMPERATURE || pos == TOP_P);
        return type == (is_real ? trt::DataType::kFLOAT : trt::DataType::kINT64);
    }

private:
    bool has_map_ = false;
    Fields fields_{{ABI_FIELD, PLUGIN_ABI}};
};

}  // namespace

trt::IPluginCreatorInterface* spec_verify_creator() {
    static Creator<SpecVerify> creator;
    return &creator;
}

}  // namespace speccompile
