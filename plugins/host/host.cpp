// SPDX-License-Identifier: Apache-2.0
// The kernels as a CPU library, for tests: the same sources, launched by host_launch.
#include "host/simulate.h"

#include "kv_rollback/launches.h"
#include "spec_verify/launches.h"

using namespace speccompile;

extern "C" {

int host_resolve_threads() { return RESOLVE_THREADS; }
unsigned long host_params_bytes(int is_rollback) { return is_rollback ? sizeof(KVRollbackParams) : sizeof(SpecVerifyParams); }

// Bytes from the start of the workspace to the end of its last part.
unsigned long long host_workspace_bytes(const SpecVerifyParams* params) {
    const Workspace space(*params);
    return reinterpret_cast<u64>(space.inverse + params->vocab) - reinterpret_cast<u64>(params->workspace);
}

// Sizes that the C++ plugin requests: workspace with and without a map, blocks of the scan, shared bytes of the second launch.
void host_verify_launches(long long batch, long long nodes, long long vocab, unsigned long long* sizes) {
    sizes[0] = verify_workspace_bytes(batch, nodes, vocab, true);
    sizes[1] = verify_workspace_bytes(batch, nodes, vocab, false);
    sizes[2] = scan_blocks(batch, nodes, vocab);
    sizes[3] = resolve_shared_bytes(vocab);
}
int host_rollback_unit(long long row_bytes, void* const* caches, int count) {
    return rollback_vector_bytes(row_bytes, caches, count);
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
    host_launch({unsigned(params->batch) * params->nodes}, RESOLVE_THREADS, shared_bytes, seed + 1,
                [=] { spec_verify_resolve(*params); }, &shared_state(), sizeof(Shared));
}

void host_kv_rollback(const KVRollbackParams* params, int vector_bytes, unsigned x, unsigned y, unsigned z, unsigned seed) {
    host_launch({x, y, z}, ROLLBACK_THREADS, 0, seed, [=] {
        if (vector_bytes == 16) kv_rollback_16(*params);
        if (vector_bytes == 4) kv_rollback_4(*params);
        if (vector_bytes == 2) kv_rollback_2(*params);
    });
}
}
