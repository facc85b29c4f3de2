// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

namespace speccompile::cpu {

void add_float_linears(OpTable& table) {
    add_forms_of_linear<FormF32>(table);
    add_forms_of_linear<FormBf16>(table);
}

}  // namespace speccompile::cpu
