// SPDX-License-Identifier: Apache-2.0
// What ONNX Runtime looks for in a custom-op library: it takes all ops of the table below.
#include <cstdlib>

#include "amx.h"
#include "attention_ops.h"
#include "draft_ops.h"
#include "embedding.h"
#include "experts.h"
#include "kernel.h"
#include "linear.h"
#include "low_rank.h"
#include "rollback.h"
#include "sequence.h"
#include "state_ops.h"
#include "verify_ops.h"

namespace speccompile::cpu {
namespace {

constexpr const char* kDomain = "speccompile";
constexpr int kLeastMajor = 1, kLeastMinor = 17;

// Every op of the library. A new family of kernels adds its ops here by a function of its own header.
OpTable all_ops() {
    OpTable table;
    add_linear_ops(table);
    add_expert_ops(table);
    add_embedding_ops(table);
    add_attention_ops(table);
    add_low_rank_ops(table);
    for (Op& op : table) op.is_in_sequences = true;
    sequence_ops() = table;
    table.push_back(sequence_op<KernelSequence, abi::kFloat>());
    table.push_back(sequence_op<MixedSequence, abi::kAnyType>());
    add_verify_ops(table);
    add_draft_ops(table);
    add_rollback_op(table);
    add_state_ops(table);
    return table;
}

abi::Domain* make_domain() {
    abi::Domain* domain = nullptr;
    check(call(abi::kCreateCustomOpDomain, kDomain, &domain));
    for (const Op& op : all_ops()) check(call(abi::kCustomOpDomainAdd, domain, op.custom));
    return domain;
}

bool is_supported(const char* version) {
    char* end = nullptr;
    const long major = std::strtol(version, &end, 10);
    const long minor = *end == '.' ? std::strtol(end + 1, nullptr, 10) : 0;
    return major > kLeastMajor || (major == kLeastMajor && minor >= kLeastMinor);
}

}  // namespace
}  // namespace speccompile::cpu

#define SPECCOMPILE_EXPORT extern "C" __attribute__((visibility("default")))

// Returns the name of the instruction set that the library was compiled for, with "+amx" where this process uses AMX.
SPECCOMPILE_EXPORT const char* speccompile_kernel_isa() {
    static const std::string name = std::string(speccompile::cpu::kIsaName) + (speccompile::cpu::kHasAmx ? "+amx" : "");
    return name.c_str();
}

// Returns the names of the ops that a `KernelSequence` may have, with spaces between them.
SPECCOMPILE_EXPORT const char* speccompile_sequence_ops() {
    static const std::string names = [] {
        std::string joined;
        for (const speccompile::cpu::Op& op : speccompile::cpu::all_ops()) {
            if (op.is_in_sequences) joined += (joined.empty() ? "" : " ") + std::string(op.name);
        }
        return joined;
    }();
    return names.c_str();
}

SPECCOMPILE_EXPORT speccompile::cpu::abi::Status* RegisterCustomOps(
    speccompile::cpu::abi::SessionOptions* options, const speccompile::cpu::abi::ApiBase* base) {
    namespace cpu = speccompile::cpu;
    namespace abi = speccompile::cpu::abi;
    if (!cpu::is_supported(base->version())) {
        // CreateStatus is the first function of every version of the table.
        cpu::g_api = base->get_api(1);
        if (cpu::g_api == nullptr) return nullptr;
        return cpu::status_from(std::string("speccompile's kernels: ONNX Runtime ") + base->version() +
                                ", expected 1.17 or later; upgrade onnxruntime");
    }
    cpu::g_api = base->get_api(abi::kApiVersion);
    return cpu::guarded("speccompile's kernels", [options] {
        static abi::Domain* const domain = cpu::make_domain();  // shared by all sessions, as long as the process runs
        cpu::check(cpu::call(abi::kAddCustomOpDomain, options, domain));
    });
}
