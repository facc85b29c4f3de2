// SPDX-License-Identifier: Apache-2.0
// Notices data races in shared memory: two threads of a block access a byte, one of them writes, and no barrier is
// between them. The kernels are compiled with -fsanitize=thread, whose calls at every access go to races.cpp instead of the
// sanitizer's own library; shuffles order nothing, barriers of a warp only its lanes.
#pragma once

#include <cstddef>

namespace host::races {

// An access by a thread. Epochs count the barriers that the thread has passed.
struct Access {
    int thread = -1;
    unsigned block_epoch = 0, warp_epoch = 0;
    bool is_atomic = false;
};

extern Access now;

void begin_block();
void watch(const void* start, std::size_t bytes);  // until the next block begins

}  // namespace host::races
