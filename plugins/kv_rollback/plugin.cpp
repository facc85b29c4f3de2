// SPDX-License-Identifier: Apache-2.0
// KVRollback as a TensorRT plugin. Compile as CUDA (nvcc -x cu).
#include "kv_rollback/launches.h"
#include "plugin_base.h"

namespace speccompile {
namespace {

class KVRollback : public Plugin<KVRollback> {
public:
    static constexpr char const* NAME = "KVRollback";

    explicit KVRollback(std::int32_t num_caches) : num_caches_(num_caches) {}
    KVRollback(KVRollback const& other) : Plugin<KVRollback>(), num_caches_(other.num_caches_) {}
    static trt::IPluginV3* create(trt::PluginFieldCollection const* fields) {
        return new (std::nothrow) KVRollback(read_field(fields, NUM_CACHES, 1));
    }

    std::int32_t getNbOutputs() const noexcept override { return num_caches_; }

    std::int32_t getOutputDataTypes(trt::DataType* outputs, std::int32_t num_outputs, trt::DataType const* inputs,
                                    std::int32_t num_inputs) const noexcept override {
        if (num_outputs != num_caches_ || num_inputs != num_caches_ + 2) {
            log_error("KVRollback: got " + std::to_string(num_inputs) + " inputs; expected " +
                      std::to_string(num_caches_) + " caches (num_caches), lengths and path.");
            return -1;
        }
        for (std::int32_t i = 0; i < num_outputs; ++i) outputs[i] = inputs[i];
        return 0;
    }

    std::int32_t getOutputShapes(trt::DimsExprs const* inputs, std::int32_t, trt::DimsExprs const*, std::int32_t,
                                 trt::DimsExprs* outputs, std::int32_t num_outputs, trt::IExprBuilder&) noexcept override {
        for (std::int32_t i = 0; i < num_outputs; ++i) outputs[i] = inputs[i];
        return 0;
    }

    std::int32_t getAliasedInput(std::int32_t output) noexcept override { return output; }

    trt::PluginFieldCollection const* getFieldsToSerialize() noexcept override { return fields_.collection(); }

    std::int32_t enqueue(trt::PluginTensorDesc const* descs, trt::PluginTensorDesc const*, void const* const* inputs,
                         void* const* outputs, void*, cudaStream_t stream) noexcept override {
        trt::Dims const &dims = descs[0].dims, &path = descs[num_caches_ + 1].dims;
        const std::int64_t entry_bytes = descs[0].type == trt::DataType::kFLOAT ? 4 : 2;
        const std::size_t cache_bytes = dims.d[0] * dims.d[1] * dims.d[2] * dims.d[3] * entry_bytes;
        for (std::int32_t i = 0; i < num_caches_; ++i) {
            // TensorRT may put a copy in between, and its builder times plugins on buffers of its own.
            if (inputs[i] != outputs[i] && cudaMemcpyAsync(outputs[i], inputs[i], cache_bytes, cudaMemcpyDeviceToDevice,
                                                           stream) != cudaSuccess) {
                return status_from_launches();
            }
        }
        const int unit = rollback_vector_bytes(dims.d[3] * entry_bytes, outputs, num_caches_);
        if (unit == 0) return -1;
        KVRollbackParams params{};
        params.lengths = static_cast<i64 const*>(inputs[num_caches_]);
        params.path = static_cast<i64 const*>(inputs[num_caches_ + 1]);
        params.depth = static_cast<int>(path.d[1]);
        params.kv_heads = static_cast<int>(dims.d[1]);
        params.max_seq = static_cast<int>(dims.d[2]);
        params.row_vectors = static_cast<int>(dims.d[3] * entry_bytes / unit);
        const auto blocks = static_cast<unsigned>(divide_up(std::int64_t(params.kv_heads) * params.row_vectors, ROLLBACK_THREADS));
        for (std::int32_t first = 0; first < num_caches_; first += MAX_CACHES) {
            const int count = num_caches_ - first < MAX_CACHES ? num_caches_ - first : MAX_CACHES;
            for (int i = 0; i < count; ++i) params.caches[i] = outputs[first + i];
            const dim3 grid(blocks, static_cast<unsigned>(path.d[0]), static_cast<unsigned>(count));
            if (unit == 16) kv_rollback_16<<<grid, ROLLBACK_THREADS, 0, stream>>>(params);
            if (unit == 4) kv_rollback_4<<<grid, ROLLBACK_THREADS, 0, stream>>>(params);
            if (unit == 2) kv_rollback_2<<<grid, ROLLBACK_THREADS, 0, stream>>>(params);
        }
        return status_from_launches();
    }

protected:
    bool takes(std::int32_t pos, trt::DynamicPluginTensorDesc const* in_out, std::int32_t num_inputs) const noexcept override {
        const trt::DataType type = in_out[pos].desc.type;
        if (pos >= num_inputs - 2 && pos < num_inputs) return type == trt::DataType::kINT64;
        return is_logits_type(type) && type == in_out[0].desc.type;
    }

private:
    std::int32_t num_caches_;
    Fields fields_{{ABI_FIELD, PLUGIN_ABI}, {NUM_CACHES, num_caches_}};
};

}  // namespace

trt::IPluginCreatorInterface* kv_rollback_creator() {
    static Creator<KVRollback> creator;
    return &creator;
}

}  // namespace speccompile
