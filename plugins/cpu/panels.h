// SPDX-License-Identifier: Apache-2.0
// What linears and experts share: sizes from the attributes, all rows times one panel, bias and gate.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#include "amx.h"
#include "kernel.h"
#include "rows.h"
#include "tiles.h"

namespace speccompile::cpu {

constexpr int kHalf = kColumns / 2;               // columns of gate and of up in a panel
constexpr std::int64_t kChunkRows = 96;           // rows whose sums are kept at once, 12 KB; at most
constexpr int kLonger = 2;                        // stretches at once of more than three blocks of rows
constexpr int kAmxStretch = 256;                  // pairs of k, 32 KB
constexpr std::ptrdiff_t kAmxFar = 12288;         // bytes ahead of the weights that AMX reads, into the second-level cache
constexpr std::int64_t kTogether = 4;              // panels that share a stretch of activations by AMX
constexpr std::int64_t kTaskBytes = 96 * 1024;    // of weights, at least
constexpr std::int64_t kParallelValues = 16384;   // activations from which rows are prepared in parallel

inline std::int64_t padded_to(std::int64_t count, std::int64_t unit) { return (count + unit - 1) / unit * unit; }

// Rows that one tile multiplies.
struct RowBlock {
    std::int64_t begin;
    int count;
};

constexpr std::int64_t num_blocks(std::int64_t count, std::int64_t most) { return (count + most - 1) / most; }

// Whether AMX multiplies the blocks of a form: all of them, as its sums have other bits than those of kTiles.
template <class Form>
bool takes_amx() {
    return Form::kTakesAmx && kHasAmx;
}

// The most rows of a block.
template <class Form>
int most_rows() {
    return takes_amx<Form>() ? kAmxRows : Form::kMaxRows;
}

// Cuts rows into blocks of at most `most`, nearly equal; returns what follows the last block.
inline RowBlock* cut_rows(std::int64_t first_row, std::int64_t num_rows, int most, RowBlock* blocks) {
    const std::int64_t count = num_blocks(num_rows, most);
    for (std::int64_t block = 0; block < count; block++) {
        const std::int64_t begin = num_rows * block / count, end = num_rows * (block + 1) / count;
        *blocks++ = {first_row + begin, static_cast<int>(end - begin)};
    }
    return blocks;
}

// Adds the products of the blocks' rows with some panels to `sums` [panels, rows, 32].
template <class Form>
void multiply_panels(const Activations& x, const RowBlock* blocks, int num_blocks, const Weights* panels, int num_panels, float* sums) {
    const int units = static_cast<int>(x.stride / Form::kUnit);
    const std::int64_t first_row = blocks->begin, num_rows = blocks[num_blocks - 1].begin + blocks[num_blocks - 1].count - first_row;
    // The next block of rows finds a stretch of the weights in the first-level cache.
    // Many blocks amortise a longer one, whose sums are written back less often.
    // So does the next pass over the columns, where registers do not hold them all.
    const bool is_amx = takes_amx<Form>();
    const bool is_one_pass = num_blocks == 1 && (is_amx || Form::kWidth == kColumns);
    const int some = is_amx ? kAmxStretch : Form::kStretch;
    const int step = is_one_pass ? units : num_blocks <= 3 || is_amx ? some : kLonger * some;
    const bool is_far = Form::kIsFar || is_amx;
    const std::ptrdiff_t distance = is_amx ? kAmxFar : Form::kIsFar ? kFar : kPrefetch;
    const auto multiply = [&](int unit, int panel, int block) {
        const std::int64_t row = blocks[block].begin;
        Stretch stretch{x.from(row), panels[panel], unit, std::min(units, unit + step), {distance, distance},
                        sums + (panel * num_rows + row - first_row) * kColumns};
        if (num_blocks > 1 && is_far) {
            if (block > 0) stretch.ahead[0] = stretch.ahead[1] = 0;
        } else if (num_blocks > 1) {
            // The first two blocks fetch half of the next stretch each, so that memory is busy during both.
            const std::ptrdiff_t next = step * Form::kUnit * kColumns * Form::kBitsPerWeight / 8;
            stretch.ahead[0] = block == 0 ? next : 0;
            stretch.ahead[1] = block == 1 ? next : 0;
        }
        if (is_amx) {
            add_by_amx(stretch, blocks[block].count);
        } else {
            kTiles<Form>[static_cast<std::size_t>(blocks[block].count - 1)](stretch);
        }
    };
    for (int unit = 0; unit < units; unit += step) {
        for (int panel = 0; panel < num_panels; panel++) {
            for (int block = 0; block < num_blocks; block++) multiply(unit, panel, block);
        }
    }
}

// Weights [num_in, num_out] in panels; with a gate, gate and up are interleaved and half as many columns come out.
template <class Form, bool kHasGate>
class Panels {
  public:
    explicit Panels(const Info& info) : num_in_(info.integer("num_in")), num_out_(info.integer("num_out")) {
        constexpr std::int64_t kMost = 1 << 24;
        if (num_in_ < 1 || num_out_ < 1 || num_in_ > kMost || num_out_ > kMost || (kHasGate && num_out_ % 2 != 0)) {
            throw Error("num_in " + std::to_string(num_in_) + " and num_out " + std::to_string(num_out_) +
                        ", expected 1 to 2^24" + (kHasGate ? " and an even num_out" : ""));
        }
        if constexpr (kHasGate) {
            const std::int64_t kind = info.integer("activation");
            if (kind < 0 || kind > 2) throw Error("activation " + std::to_string(kind) + ", expected 0, 1 or 2");
            activation_ = static_cast<Activation>(kind);
        }
        stride_ = padded_to(num_in_, Form::kUnit);
        num_panels_ = kHasGate ? padded_to(num_out_ / 2, kHalf) / kHalf : padded_to(num_out_, kColumns) / kColumns;
    }

  protected:
    Dims weight_dims() const { return Form::dims(num_panels_, stride_); }
    Dims scale_dims() const { return {num_panels_, stride_ / kGroup, kColumns}; }
    std::int64_t width() const { return kHasGate ? num_out_ / 2 : num_out_; }
    std::int64_t panel_bytes() const { return stride_ * kColumns * Form::kBitsPerWeight / 8; }
    std::int64_t panels_a_task() const { return std::max<std::int64_t>(1, kTaskBytes / panel_bytes()); }

    // Tasks of nearly one size, whose number is even so that two threads end together. Rows make a small product worth
    // more of them.
    std::int64_t num_tasks(std::int64_t num_rows) const {
        const std::int64_t bytes = num_panels_ * panel_bytes(), most = bytes * std::min<std::int64_t>(num_rows, 8) / kTaskBytes;
        std::int64_t count = std::max(num_blocks(bytes, kTaskBytes), std::min<std::int64_t>(most, 10));
        if (is_shared(num_blocks(num_rows, most_rows<Form>()))) count = std::min(count, num_blocks(num_panels_, kTogether));
        return std::min(num_panels_, count == 1 ? 1 : (count + 1) / 2 * 2);
    }

    template <class Body>
    void for_rows(const Context& context, std::int64_t num_rows, const Body& body) const {
        const std::int64_t rows_a_task = std::max<std::int64_t>(1, kParallelValues / num_in_);
        const std::int64_t num_tasks = (num_rows + rows_a_task - 1) / rows_a_task;
        context.parallel(static_cast<std::size_t>(num_tasks), [&](std::size_t task) {
            const std::int64_t first = static_cast<std::int64_t>(task) * rows_a_task;
            for (std::int64_t row = first; row < std::min(num_rows, first + rows_a_task); row++) body(row);
        });
    }

    // The rows of the blocks, source(0), source(1), ... [num_in], in the numbers of the form; valid until this thread's
    // next call.
    template <class Source>
    Activations prepare(const Context& context, const RowBlock* begin, const RowBlock* end, const Source& source) const {
        Activations made;
        made.stride = stride_;
        const std::int64_t num_rows = end[-1].begin + end[-1].count;
        thread_local Scratch memory;
        if constexpr (Form::kIsInteger) {
            const std::int64_t groups = stride_ / kGroup;
            made.words = groups * kRecord;
            std::int32_t* records = memory.get<std::int32_t>(static_cast<std::size_t>(num_rows * made.words));
            made.records = records;
            for_units(context, begin, end, groups, [&](const RowBlock& block, int r, std::int64_t first, std::int64_t last) {
                quantize_row(source(block.begin + r), num_in_, first, last, Form::kZero, records + block.begin * made.words + r, block.count);
            });
        } else if (takes_amx<Form>()) {
            const std::int64_t steps = num_blocks(stride_, kAmxStep);
            made.words = steps * kStepWords;
            std::int32_t* parts = memory.get<std::int32_t>(static_cast<std::size_t>(num_rows * made.words));
            made.parts = parts;
            for_units(context, begin, end, steps, [&](const RowBlock& block, int r, std::int64_t first, std::int64_t last) {
                std::int32_t* own = parts + block.begin * made.words + r * kPartWords;
                split_row(source(block.begin + r), num_in_, first, last, own, block.count * kPartWords);
            });
        } else {
            float* to = memory.get<float>(static_cast<std::size_t>(num_rows * stride_));
            for_rows(context, num_rows, [&](std::int64_t row) {
                std::memcpy(to + row * stride_, source(row), static_cast<std::size_t>(num_in_) * sizeof(float));
                std::fill(to + row * stride_ + num_in_, to + (row + 1) * stride_, 0.f);
            });
            made.values = to;
        }
        return made;
    }

    // The rows of the blocks times panels first ... last - 1; `place` says where the results [width] of a row begin.
    template <class Place>
    void run_panels(const Activations& x, const RowBlock* begin, const RowBlock* end, const Weights& weights, const float* bias,
                    std::int64_t first_panel, std::int64_t last_panel, const Place& place) const {
        constexpr std::int64_t kMost = Form::kTakesAmx ? kTogether : 1;
        const std::int64_t together = is_shared(end - begin) ? kTogether : 1;
        const std::ptrdiff_t chunk = kChunkRows / most_rows<Form>();
        alignas(64) float sums[kMost * kChunkRows * kColumns];
        for (std::int64_t panel = first_panel; panel < last_panel; panel += together) {
            const std::int64_t num_panels = std::min(together, last_panel - panel);
            Weights own[kMost];
            for (std::int64_t p = 0; p < num_panels; p++) {
                own[p].values = static_cast<const char*>(weights.values) + (panel + p) * panel_bytes();
                if (Form::kIsInteger) own[p].scales = weights.scales + (panel + p) * (stride_ / kGroup) * kColumns;
            }
            for (const RowBlock* first = begin; first < end; first += chunk) {
                const std::ptrdiff_t count = std::min(chunk, end - first);
                const RowBlock& last = first[count - 1];
                const std::int64_t num_rows = last.begin + last.count - first->begin;
                std::memset(sums, 0, static_cast<std::size_t>(num_panels * num_rows) * kColumns * sizeof(float));
                multiply_panels<Form>(x, first, static_cast<int>(count), own, static_cast<int>(num_panels), sums);
                for (std::int64_t p = 0; p < num_panels; p++) {
                    emit_panel(panel + p, num_rows, sums + p * num_rows * kColumns, bias, [&](std::int64_t r) { return place(first->begin + r); });
                }
            }
        }
    }

    std::int64_t num_in_, num_out_, stride_ = 0, num_panels_ = 0;

  private:
    // body(block, row of the block, first, last) for all rows and units of 32 numbers, in parallel where it pays: a task has
    // some units of all rows of a block, as tasks by rows would write to the same cache lines.
    template <class Body>
    void for_units(const Context& context, const RowBlock* begin, const RowBlock* end, std::int64_t units, const Body& body) const {
        const bool is_small = (end[-1].begin + end[-1].count) * num_in_ <= kParallelValues;
        const std::int64_t units_a_task = std::max<std::int64_t>(1, kParallelValues / (most_rows<Form>() * kGroup));
        const std::int64_t parts = is_small ? 1 : num_blocks(units, units_a_task);
        const auto run = [&](std::size_t task) {
            const RowBlock& block = begin[static_cast<std::int64_t>(task) / parts];
            const std::int64_t part = static_cast<std::int64_t>(task) % parts;
            for (int r = 0; r < block.count; r++) body(block, r, units * part / parts, units * (part + 1) / parts);
        };
        const auto num_tasks = static_cast<std::size_t>((end - begin) * parts);
        if (is_small) {
            for (std::size_t task = 0; task < num_tasks; task++) run(task);
        } else {
            context.parallel(num_tasks, run);
        }
    }

    // Whether several panels share a stretch of the activations: AMX multiplies faster than more than one block of them comes
    // from the caches.
    static bool is_shared(std::ptrdiff_t num_blocks) { return takes_amx<Form>() && num_blocks > 1; }

    template <class Place>
    void emit_panel(std::int64_t panel, std::int64_t num_rows, const float* sums, const float* bias, const Place& place) const {
        alignas(64) float added[kColumns] = {};
        copy_columns(panel, bias, added);
        for (std::int64_t r = 0; r < num_rows; r++) {
            if constexpr (kHasGate) {
                emit_gated(panel, sums + r * kColumns, added, place(r));
            } else {
                emit(panel, sums + r * kColumns, added, place(r));
            }
        }
    }

    // The bias of a panel's columns; zeros at padding.
    void copy_columns(std::int64_t panel, const float* bias, float* to) const {
        if constexpr (kHasGate) {
            const std::int64_t half = num_out_ / 2, first = panel * kHalf, count = std::min<std::int64_t>(kHalf, half - first);
            std::memcpy(to, bias + first, static_cast<std::size_t>(count) * sizeof(float));
            std::memcpy(to + kHalf, bias + half + first, static_cast<std::size_t>(count) * sizeof(float));
        } else {
            const std::int64_t first = panel * kColumns, count = std::min<std::int64_t>(kColumns, num_out_ - first);
            std::memcpy(to, bias + first, static_cast<std::size_t>(count) * sizeof(float));
        }
    }

    void emit(std::int64_t panel, const float* sums, const float* added, float* y) const {
        const std::int64_t first = panel * kColumns, count = std::min<std::int64_t>(kColumns, num_out_ - first);
        alignas(64) float tail[kColumns];
        float* to = count == kColumns ? y + first : tail;
        for (int c = 0; c < kColumns; c += kLanes) store(to + c, add(load(sums + c), load(added + c)));
        if (to == tail) std::memcpy(y + first, tail, static_cast<std::size_t>(count) * sizeof(float));
    }

    void emit_gated(std::int64_t panel, const float* sums, const float* added, float* y) const {
        const std::int64_t first = panel * kHalf, count = std::min<std::int64_t>(kHalf, num_out_ / 2 - first);
        alignas(64) float tail[kHalf];
        float* to = count == kHalf ? y + first : tail;
        for (int c = 0; c < kHalf; c += kLanes) {
            const Float gate = add(load(sums + c), load(added + c));
            const Float up = add(load(sums + kHalf + c), load(added + kHalf + c));
            store(to + c, mul(activate(activation_, gate), up));
        }
        if (to == tail) std::memcpy(y + first, tail, static_cast<std::size_t>(count) * sizeof(float));
    }

    Activation activation_ = Activation::kSilu;
};

}  // namespace speccompile::cpu
