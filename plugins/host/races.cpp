// SPDX-License-Identifier: Apache-2.0
#include "host/races.h"

#include <vector>

namespace host::races {

Access now;

namespace {

struct Byte {
    Access write, reads[2];  // the last write; up to two readers of this epoch
};

struct Range {
    const char* start;
    std::vector<Byte> bytes;
};

// Allocated once and never freed, so that it outlives every static object that calls into it.
std::vector<Range>& ranges() {
    static std::vector<Range>* const held = new std::vector<Range>;
    return *held;
}

long num_accesses = 0, num_races = 0;

bool is_at_once(const Access& other) {
    if (other.thread < 0 || other.thread == now.thread || other.block_epoch != now.block_epoch) return false;
    return other.thread / 32 != now.thread / 32 || other.warp_epoch == now.warp_epoch;
}

bool is_race(const Byte& byte, bool is_write) {
    if (is_at_once(byte.write) && !(byte.write.is_atomic && now.is_atomic)) return true;
    for (const Access& read : byte.reads)
        if (is_write && is_at_once(read) && !(read.is_atomic && now.is_atomic)) return true;
    return false;
}

void note_read(Byte& byte) {
    Access& first = byte.reads[0];
    Access& second = byte.reads[1];
    const bool is_first = first.block_epoch != now.block_epoch || first.thread < 0 || first.thread == now.thread;
    const bool is_second = second.block_epoch != now.block_epoch || second.thread / 32 == first.thread / 32;
    if (is_first) {
        first = now;
    } else if (is_second) {
        second = now;
    }
}

void access(const void* at, std::size_t size, bool is_write) {
    const char* address = static_cast<const char*>(at);
    for (Range& range : ranges()) {
        if (address < range.start || address >= range.start + range.bytes.size()) continue;
        ++num_accesses;
        bool is_wrong = false;
        for (std::size_t i = address - range.start; i < address - range.start + size; ++i) {
            is_wrong |= is_race(range.bytes[i], is_write);
            if (is_write) {
                range.bytes[i].write = now;
            } else {
                note_read(range.bytes[i]);
            }
        }
        num_races += is_wrong;
    }
}

}  // namespace

void begin_block() { ranges().clear(); }
void watch(const void* start, std::size_t bytes) {
    ranges().push_back({static_cast<const char*>(start), std::vector<Byte>(bytes)});
}

}  // namespace host::races

extern "C" {

// Since the last call: accesses to shared memory, and how many of them were part of a race.
void host_races(long* counts) {
    counts[0] = host::races::num_accesses;
    counts[1] = host::races::num_races;
    host::races::num_accesses = host::races::num_races = 0;
}

#define RACES_OF_SIZE(BYTES)                                                                              \
    void __tsan_read##BYTES(void* at) { host::races::access(at, BYTES, false); }                          \
    void __tsan_write##BYTES(void* at) { host::races::access(at, BYTES, true); }                          \
    void __tsan_unaligned_read##BYTES(void* at) { host::races::access(at, BYTES, false); }                \
    void __tsan_unaligned_write##BYTES(void* at) { host::races::access(at, BYTES, true); }
RACES_OF_SIZE(1)
RACES_OF_SIZE(2)
RACES_OF_SIZE(4)
RACES_OF_SIZE(8)
RACES_OF_SIZE(16)
void __tsan_read_range(void* at, std::size_t bytes) { host::races::access(at, bytes, false); }
void __tsan_write_range(void* at, std::size_t bytes) { host::races::access(at, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
}
