// SPDX-License-Identifier: Apache-2.0
#include "linear.h"

namespace speccompile::cpu {

void add_int4_linears(OpTable& table) {
    add_forms_of_linear<FormInt4>(table);
    add_forms_of_linear<FormInt4Min>(table);
}

}  // namespace speccompile::cpu
