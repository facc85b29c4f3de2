// SPDX-License-Identifier: Apache-2.0
// Notices data races in shared memory: two threads of a block reach a byte, one of them writes, and no barrier lies
// between. The kernels are compiled with -fsanitize=thread, whose calls at every access end in races.cpp in the place of
// the sanitizer's own library; shuffles order nothing, barriers of a warp only its lanes.
#pragma once

#include <cstddef>

namespace host::races {

// Who is running. Epochs count the barriers that the thread has passed.
struct Place {
    int thread = -1;
    unsigned block_epoch = 0, warp_epoch = 0;
    bool is_atomic = false;
};

extern Place now;

void begin_block();
void watch(const void* start, std::size_t bytes);  // until the next block begins

}  // namespace host::races
