// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

namespace speccompile::cpu {

void add_int8_linears(OpTable& table) {
    add_forms_of_linear<FormInt8>(table);
    add_forms_of_linear<FormInt8Min>(table);
}

}  // namespace speccompile::cpu
