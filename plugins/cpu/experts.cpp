// SPDX-License-Identifier: Apache-2.0
#include "experts.h"

namespace speccompile::cpu {

void add_expert_ops(OpTable& table) {
    add_forms_of_experts<FormF32>(table);
    add_forms_of_experts<FormBf16>(table);
    add_forms_of_experts<FormInt8>(table);
    add_forms_of_experts<FormInt4>(table);
    add_forms_of_experts<FormInt8Min>(table);
    add_forms_of_experts<FormInt4Min>(table);
}

}  // namespace speccompile::cpu
