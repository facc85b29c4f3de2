// SPDX-License-Identifier: Apache-2.0
// A stand-in for libcuda.so.1: the public driver API as far as the plugins call it. A launch runs the simulator.
#include <cstring>

#include "host/simulate.h"

#include "kv_rollback/launches.h"
#include "spec_verify/launches.h"

using namespace speccompile;

namespace {
enum Status { OK = 0, INVALID_VALUE = 1, INVALID_HANDLE = 400, NOT_FOUND = 500 };
constexpr int MAJOR = 75, MINOR = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
const char* const NAMES[] = {"spec_verify_scan_f32", "spec_verify_scan_f16", "spec_verify_scan_bf16", "spec_verify_resolve",
                             "kv_rollback_16",       "kv_rollback_4",        "kv_rollback_2"};
int library, num_launches;

void run(int index, void* argument) {
    const auto& verify = *static_cast<SpecVerifyParams*>(argument);
    const auto& rollback = *static_cast<KVRollbackParams*>(argument);
    switch (index) {
        case 0: return scan<float>(verify);
        case 1: return scan<Float16>(verify);
        case 2: return scan<BFloat16>(verify);
        case 3: return spec_verify_resolve(verify);
        case 4: return kv_rollback_16(rollback);
        case 5: return kv_rollback_4(rollback);
        case 6: return kv_rollback_2(rollback);
    }
}
}  // namespace

extern "C" {
int fake_num_launches() { return num_launches; }
int cuInit(unsigned) { return OK; }
int cuDriverGetVersion(int* version) { return *version = 13000, OK; }
int cuCtxGetDevice(int* device) { return *device = 0, OK; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    if (attribute != MAJOR && attribute != MINOR) return INVALID_VALUE;
    return *value = attribute == MAJOR ? 9 : 0, OK;
}
int cuGetErrorName(int status, const char** name) {
    return *name = status == OK ? "CUDA_SUCCESS" : status == NOT_FOUND ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_OTHER", OK;
}
int cuLibraryLoadData(void** out, const void* code, void*, void**, unsigned, void*, void**, unsigned) {
    if (code == nullptr || std::memcmp(code, "code", 4) != 0) return INVALID_VALUE;
    return *out = &library, OK;
}
int cuLibraryGetKernel(void** out, void* from, const char* name) {
    if (from != &library) return INVALID_HANDLE;
    for (const char* const& known : NAMES)
        if (std::strcmp(known, name) == 0) return *out = const_cast<char*>(known), OK;
    return NOT_FOUND;
}
int cuLaunchKernel(void* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned by, unsigned bz,
                   unsigned shared_bytes, void* stream, void** parameters, void** extra) {
    int index = 0;
    while (index < 7 && NAMES[index] != kernel) ++index;
    if (index == 7 || by != 1 || bz != 1 || extra != nullptr || stream != reinterpret_cast<void*>(30)) return INVALID_VALUE;
    void* fixed = index == 3 ? &shared_state() : nullptr;
    // Arguments are read before the call returns: a kernel here runs at once.
    host_launch({x, y, z}, threads, shared_bytes, ++num_launches, [=] { run(index, parameters[0]); }, fixed,
                fixed == nullptr ? 0 : sizeof(Shared));
    return OK;
}
int cuGetProcAddress_v2(const char* name, void** out, int, unsigned long long, int* status) {
    const struct { const char* name; void* at; } known[] = {
        {"cuInit", (void*)cuInit}, {"cuDriverGetVersion", (void*)cuDriverGetVersion},
        {"cuCtxGetDevice", (void*)cuCtxGetDevice}, {"cuDeviceGetAttribute", (void*)cuDeviceGetAttribute},
        {"cuGetErrorName", (void*)cuGetErrorName}, {"cuLibraryLoadData", (void*)cuLibraryLoadData},
        {"cuLibraryGetKernel", (void*)cuLibraryGetKernel}, {"cuLaunchKernel", (void*)cuLaunchKernel}};
    for (const auto& each : known)
        if (std::strcmp(each.name, name) == 0) {
            if (status != nullptr) *status = 0;
            return *out = each.at, OK;
        }
    if (status != nullptr) *status = 1;
    return *out = nullptr, NOT_FOUND;
}
}
