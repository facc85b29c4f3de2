// SPDX-License-Identifier: Apache-2.0
// The kernels as a library of the CPU, for tests: the same sources, launched by host_launch.
#include "host/simulate.h"

#include "kv_rollback/kernel.cuh"
#include "spec_verify/kernel.cuh"

using namespace speccompile;

extern "C" {

int host_settle_threads() { return SETTLE_THREADS; }
unsigned long host_params_bytes(int is_rollback) { return is_rollback ? sizeof(KVRollbackParams) : sizeof(SpecVerifyParams); }

// Bytes from the start of the workspace to behind its last part.
unsigned long long host_workspace_bytes(const SpecVerifyParams* params) {
    const Workspace space(*params);
    return reinterpret_cast<u64>(space.inverse + params->vocab) - reinterpret_cast<u64>(params->workspace);
}

void host_divide(const float* x, float divisor, float* quotients, long long count) {
    const Divider divide(divisor);
    for (long long i = 0; i < count; ++i) quotients[i] = divide(x[i]);
}

void host_spec_verify(const SpecVerifyParams* params, unsigned scan_blocks, unsigned long shared_bytes, unsigned seed) {
    host_launch({scan_blocks}, SCAN_THREADS, 0, seed, [=] {
        if (params->dtype == Dtype::F32) scan<float>(*params);
        if (params->dtype == Dtype::F16) scan<Float16>(*params);
        if (params->dtype == Dtype::BF16) scan<BFloat16>(*params);
    });
    host_launch({unsigned(params->batch) * params->nodes}, SETTLE_THREADS, shared_bytes, seed + 1,
                [=] { spec_verify_settle(*params); });
}

void host_spec_verify_single(const SpecVerifyParams* params, unsigned long shared_bytes, unsigned seed) {
    const auto run = [=](auto kernel) {
        host_launch({unsigned(params->batch)}, SETTLE_THREADS, shared_bytes, seed, [=] {
            kernel(params->logits, params->tokens, params->parents, params->draft_probs, params->uniforms,
                   params->temperature, params->top_k, params->top_p, params->batch, params->nodes, params->vocab,
                   params->draft_vocab, params->path, params->num_accepted, params->next_token);
        });
    };
    if (params->dtype == Dtype::F32) run(spec_verify_single_f32);
    if (params->dtype == Dtype::F16) run(spec_verify_single_f16);
    if (params->dtype == Dtype::BF16) run(spec_verify_single_bf16);
}

void host_kv_rollback(const KVRollbackParams* params, int vector_bytes, unsigned x, unsigned y, unsigned z, unsigned seed) {
    host_launch({x, y, z}, ROLLBACK_THREADS, 0, seed, [=] {
        if (vector_bytes == 16) kv_rollback_16(*params);
        if (vector_bytes == 4) kv_rollback_4(*params);
        if (vector_bytes == 2) kv_rollback_2(*params);
    });
}
}
