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
constexpr std::int64_t kChunkRows = 144;          // rows whose sums are kept at once, 18 KB a panel; at most
constexpr int kLonger = 2;                        // stretches at once of more than three blocks of rows
constexpr std::ptrdiff_t kAmxBlocks = 8;          // of AMX, whose sums are kept at once; at most
constexpr int kAmxSteps = 16;                     // of AMX in a stretch, 32 KB
constexpr std::ptrdiff_t kAmxFar = 12288;         // bytes ahead of the weights that AMX reads, into the second-level cache
constexpr int kTogether = 8;                      // panels that share a stretch of the activations, at most
constexpr std::int64_t kSharedBytes = 1 << 20;    // of activations from which they do: more than the second-level cache keeps
constexpr std::int64_t kTaskBytes = 96 * 1024;    // of weights, at least
constexpr std::int64_t kParallelValues = 16384;   // activations from which rows are prepared in parallel

inline std::int64_t padded_to(std::int64_t count, std::int64_t unit) { return (count + unit - 1) / unit * unit; }

// Rows that one tile multiplies.
struct RowBlock {
    std::int64_t begin;
    int count;
    std::int64_t at;  // the first of its rows in memory
    int height;       // how many it has there; those after `count` are not used
};

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

// Cuts rows into blocks of at most `most`, nearly equal; returns what follows the last. Several blocks for AMX have 16 rows in
// memory, so that its registers keep their shapes.
template <class Form>
RowBlock* cut_rows(std::int64_t first_row, std::int64_t num_rows, std::int64_t first_at, RowBlock* blocks) {
    const int most = most_rows<Form>();
    const std::int64_t count = ceil_div(num_rows, most);
    for (std::int64_t block = 0; block < count; block++) {
        const std::int64_t begin = num_rows * block / count, end = num_rows * (block + 1) / count;
        const int size = static_cast<int>(end - begin);
        const bool is_whole = takes_amx<Form>() && count > 1;
        *blocks++ = {first_row + begin, size, first_at + (is_whole ? block * most : begin), is_whole ? most : size};
    }
    return blocks;
}

// Adds the products of the blocks' rows with some panels to `sums` [panels, rows, 32].
template <class Form>
void multiply_panels(const Activations& x, const RowBlock* blocks, int num_blocks, const Weights* panels, int num_panels, float* sums) {
    if (Form::kIsInteger) num_panels = 1;
    const int unit_rows = Form::kIsInteger ? x.unit : Form::kUnit;
    const int units = static_cast<int>(x.stride / unit_rows), least = Form::kStretch * Form::kUnit / unit_rows;
    const std::int64_t first_row = blocks->at, num_rows = blocks[num_blocks - 1].at + blocks[num_blocks - 1].height - first_row;
    // The next block of rows finds a stretch of the weights in the first-level cache.
    // Many blocks amortise a longer one, whose sums are written back less often.
    // So does the next pass over the columns, where registers do not hold them all.
    const bool is_one_pass = num_blocks == 1 && Form::kWidth == kColumns;
    const int step = is_one_pass ? units : std::min(units, num_blocks <= 3 ? least : kLonger * least);
    const std::ptrdiff_t distance = Form::kIsFar ? kFar : kPrefetch;
    const std::ptrdiff_t unit_bytes = unit_rows * kColumns * Form::kBitsPerWeight / 8, bytes = step * unit_bytes;
    const auto multiply = [&](int unit, int panel, int block) {
        const std::int64_t row = blocks[block].at;
        Stretch stretch{x.from(row), panels[panel], unit, std::min(units, unit + step), {distance, distance}, kColumns * 4, 0,
                        sums + (panel * num_rows + row - first_row) * kColumns};
        // Each block fetches its part of the next stretch, so that memory is never idle.
        if (num_blocks > 1 && Form::kSharesFar && Form::kIsInteger) {
            stretch.ahead[0] = stretch.ahead[1] = bytes + bytes * block / num_blocks;
            stretch.pace = static_cast<int>(bytes / step / num_blocks);
        } else if (num_blocks > 1 && Form::kSharesFar) {
            // The two vectors of columns fetch half of it each.
            const bool is_next_panel = panel + 1 < num_panels;
            const std::ptrdiff_t apart = static_cast<const char*>(panels[is_next_panel ? panel + 1 : 0].values) - static_cast<const char*>(panels[panel].values);
            const std::ptrdiff_t next = apart + (is_next_panel ? 0 : bytes);
            stretch.ahead[0] = next + bytes * block / num_blocks;
            stretch.ahead[1] = stretch.ahead[0] + bytes / num_blocks / 2 - kColumns * 2;
            stretch.pace = kColumns * 2 / num_blocks;
        } else if (num_blocks > 1) {
            // The first two blocks fetch half of the next stretch each, so that memory is busy during both.
            stretch.ahead[0] = block == 0 ? bytes : 0;
            stretch.ahead[1] = block == 1 ? bytes : 0;
        }
        if constexpr (Form::kIsInteger) {
            const std::ptrdiff_t ahead = num_blocks > 1 && Form::kSharesFar ? least : stretch.ahead[0] / unit_bytes;
            stretch.ahead_of_scales = ahead * panels[panel].scale_bytes * kColumns / panels[panel].units_a_group;
        }
        const int count = blocks[block].count;
        (num_blocks > 1 ? tile_of<Form, Form::kSharesFar>(count, unit_rows) : tile_of<Form, Form::kIsFar>(count, unit_rows))(stretch);
    };
    std::memset(sums, 0, static_cast<std::size_t>(num_panels * num_rows * kColumns) * sizeof(float));
    for (int unit = 0; unit < units; unit += step) {
        for (int panel = 0; panel < num_panels; panel++) {
            for (int block = 0; block < num_blocks; block++) multiply(unit, panel, block);
        }
    }
}

#ifdef SPECCOMPILE_AMX
// Writes the products to `sums`, by AMX: two blocks of rows share every load of weights. Where there are more, all of them
// fetch the weights that are wanted next, so that memory is never idle.
//
// `turn`: how many pairs of blocks of the same panels have been before; `num_turns`: how many there are.
inline void multiply_by_amx(const Activations& x, const RowBlock* blocks, int num_blocks, const Weights* panels, int num_panels,
                            int turn, int num_turns, float* sums) {
    constexpr int kLines = kAmxStepBytes / 64;
    const int pairs = static_cast<int>(x.stride / 2);  // of k
    const std::int64_t first_row = blocks->at, num_rows = blocks[num_blocks - 1].at + blocks[num_blocks - 1].height - first_row;
    const int stretch = num_panels > 1 ? kAmxSteps * kPartWords : pairs;
    for (int pair = 0; pair < pairs; pair += stretch) {
        for (int panel = 0; panel < num_panels; panel++) {
            const auto weights = [&](int of, int from) {
                return static_cast<const char*>(panels[of].values) + static_cast<std::ptrdiff_t>(from) * kAmxRowBytes;
            };
            AmxStretch s{};
            s.weights = weights(panel, pair);
            s.num_pairs = std::min(pairs - pair, stretch);
            s.is_new = pair == 0;
            s.lines = static_cast<int>(ceil_div(kLines, kAmxParts * num_turns));
            const char* next = panel + 1 < num_panels ? weights(panel + 1, pair) : pair + stretch < pairs ? weights(0, pair + stretch) : weights(panel, pairs);
            for (int block = 0; block < num_blocks; block += 2) {
                for (int i = 0; i < 2; i++) {
                    const bool is_there = block + i < num_blocks;
                    s.rows[i] = is_there ? blocks[block + i].height : 0;
                    if (is_there) s.parts[i] = x.from(blocks[block + i].at).parts + static_cast<std::ptrdiff_t>(pair / kPartWords) * kStepWords * s.rows[i];
                }
                s.sums = sums + (panel * num_rows + blocks[block].at - first_row) * kColumns;
                const std::ptrdiff_t bytes = static_cast<std::ptrdiff_t>(s.lines) * kAmxParts * 64 * ceil_div(s.num_pairs, kPartWords);
                s.next = num_turns == 1 ? s.weights + kAmxFar : next + (turn + block / 2) * bytes;
                add_by_amx(s);
            }
        }
    }
}
#endif

// Weights [num_in, num_out] in panels; with a gate, gate and up are interleaved and half as many columns come out.
template <class Form, bool kHasGate>
class Panels {
  public:
    // `has_unit`: activations have units, which an attribute names.
    explicit Panels(const Info& info, bool has_unit = true) : num_in_(info.integer("num_in")), num_out_(info.integer("num_out")) {
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
        if constexpr (Form::kIsInteger) {
            const std::int64_t group = info.integer("group", kGroup);
            unit_ = has_unit ? static_cast<int>(info.integer("unit", kGroup)) : group % kGroup == 0 ? kGroup : kGroup / 2;
            if ((unit_ != kGroup && unit_ != kGroup / 2) || group < unit_ || group > kMost || group % unit_ != 0) {
                throw Error("group " + std::to_string(group) + " and unit " + std::to_string(unit_) +
                            ", expected a unit of 16 or 32 and a group of some units; build the bundle again");
            }
            units_a_group_ = static_cast<int>(group / unit_);
            num_groups_ = ceil_div(num_in_, group);
        }
        num_panels_ = kHasGate ? padded_to(num_out_ / 2, kHalf) / kHalf : padded_to(num_out_, kColumns) / kColumns;
    }

  protected:
    // The inputs of packed weights: weights, scales and minimums, as far as the form has them.
    static constexpr std::size_t kNumPacked = 1 + Form::kIsInteger + Form::kHasMinimums;
    static constexpr const char* kPackedNames[3] = {"weights", "scales", "minimums"};
    static constexpr abi::ElementType kPackedTypes[3] = {Form::kWeightType, abi::kAnyType, abi::kAnyType};

    Dims packed_dims(std::size_t index) const { return index == 0 ? Form::dims(num_panels_, stride_) : Dims{num_panels_, num_groups_, kColumns}; }

    // Refuses a tensor that is not what the attributes say; `num_first`: its first dim, 0: it has none before its own.
    void check_packed(const char* op, std::size_t index, const Tensor& tensor, std::int64_t num_first = 0) const {
        Dims expected = packed_dims(index);
        if (num_first > 0) {
            for (std::size_t axis = expected.rank++; axis > 0; axis--) expected.sizes[axis] = expected.sizes[axis - 1];
            expected.sizes[0] = num_first;
        }
        expect_dims(op, kPackedNames[index], tensor.dims, expected);
        if (index > 0 && tensor.type != abi::kFloat16 && tensor.type != abi::kFloat) {
            throw Error(std::string(op) + ": " + kPackedNames[index] + " have element type " + std::to_string(tensor.type) +
                        ", expected float16 or float32; build the bundle again");
        }
    }

    // The weights in the inputs that get(0), get(1) ... return.
    template <class Get>
    Weights weights_in(const Get& get) const {
        Weights made;
        made.values = get(0).template data<void>();
        if constexpr (Form::kIsInteger) {
            const Tensor scales = get(1);
            made.scales = scales.template data<char>();
            made.scale_bytes = scales.type == abi::kFloat ? 4 : 2;
            made.unit = unit_, made.units_a_group = units_a_group_;
            if constexpr (Form::kHasMinimums) {
                const Tensor minimums = get(2);
                if (minimums.type != scales.type) throw Error("scales and minimums of two element types, expected one; build the bundle again");
                made.minimums = minimums.template data<char>();
            }
        }
        return made;
    }

    // The same from a panel on.
    Weights from_panel(const Weights& weights, std::int64_t panel) const {
        Weights later = weights;
        const std::int64_t scales = panel * num_groups_ * kColumns * weights.scale_bytes;
        later.values = static_cast<const char*>(weights.values) + panel * panel_bytes();
        if (Form::kIsInteger) later.scales += scales;
        if (Form::kHasMinimums) later.minimums += scales;
        return later;
    }

    std::int64_t width() const { return kHasGate ? num_out_ / 2 : num_out_; }
    std::int64_t panel_bytes() const { return stride_ * kColumns * Form::kBitsPerWeight / 8; }
    std::int64_t panels_a_task() const { return std::max<std::int64_t>(1, kTaskBytes / panel_bytes()); }

    // Tasks of nearly one size, whose number is even so that two threads end together. Rows make a small product worth
    // more of them.
    std::int64_t num_tasks(std::int64_t num_rows) const {
        const std::int64_t bytes = num_panels_ * panel_bytes(), most = bytes * std::min<std::int64_t>(num_rows, 8) / kTaskBytes;
        std::int64_t count = std::max(ceil_div(bytes, kTaskBytes), std::min<std::int64_t>(most, 10));
        // Panels that share activations make fewer tasks, but not fewer than there are cores.
        if (is_shared(num_rows)) count = std::min(count, std::max(ceil_div(num_panels_, kTogether), kNumCores));
        return std::min(num_panels_, count == 1 ? 1 : (count + 1) / 2 * 2);
    }

    template <class Body>
    void for_rows(const Context& context, std::int64_t num_rows, const Body& body) const {
        const std::int64_t rows_a_task = std::max<std::int64_t>(1, kParallelValues / context.cheapness() / num_in_);
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
        const std::int64_t num_rows = end[-1].at + end[-1].height;
        thread_local Scratch memory;
        if constexpr (Form::kIsInteger) {
            const std::int64_t units = ceil_div(num_in_, unit_);  // those of padding alone have no scales
            made.stride = units * unit_;
            const auto quantize = unit_ == kGroup ? quantize_row<Form, kGroup> : quantize_row<Form, kGroup / 2>;
            made.unit = unit_;
            made.words = units * (unit_ == kGroup ? Record<kGroup>::kWords : Record<kGroup / 2>::kWords);
            std::int32_t* records = memory.get<std::int32_t>(static_cast<std::size_t>(num_rows * made.words));
            made.records = records;
            for_units(context, begin, end, units, [&](const RowBlock& block, int r, std::int64_t first, std::int64_t last) {
                quantize(source(block.begin + r), num_in_, first, last, records + block.at * made.words + r, block.count);
            });
        } else if (takes_amx<Form>()) {
            const std::int64_t steps = ceil_div(stride_, kAmxStep);
            made.words = steps * kStepWords;
            std::int32_t* parts = memory.get<std::int32_t>(static_cast<std::size_t>(num_rows * made.words));
            made.parts = parts;
            for_units(context, begin, end, steps, [&](const RowBlock& block, int r, std::int64_t first, std::int64_t last) {
                std::int32_t* own = parts + block.at * made.words + r * kPartWords;
                split_row(source(block.begin + r), num_in_, first, last, own, block.height * kPartWords);
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
    //
    // Where the activations are more than a cache keeps, several panels share a stretch of them.
    template <class Place>
    void run_panels(const Activations& x, const RowBlock* begin, const RowBlock* end, const Weights& weights, const float* bias,
                    std::int64_t first_panel, std::int64_t last_panel, const Place& place) const {
        constexpr int kMost = Form::kIsInteger ? 1 : kTogether;
        const int together = is_shared(end[-1].at + end[-1].height - begin->at) ? kMost : 1;
        // By AMX results are two blocks, which are in the first-level cache.
        const std::ptrdiff_t chunk = !takes_amx<Form>() ? kChunkRows / Form::kMaxRows : together == 1 ? 2 : kAmxBlocks;
        alignas(64) float sums[kMost * kChunkRows * kColumns];
        for (std::int64_t panel = first_panel; panel < last_panel; panel += together) {
            const auto num_panels = static_cast<int>(std::min<std::int64_t>(together, last_panel - panel));
            Weights own[kMost];
            for (int p = 0; p < num_panels; p++) own[p] = from_panel(weights, panel + p);
            for (const RowBlock* first = begin; first < end; first += chunk) {
                const auto count = static_cast<int>(std::min(chunk, end - first));
                multiply(x, first, count, own, num_panels, static_cast<int>(first - begin) / 2, static_cast<int>(ceil_div(end - begin, 2)), sums);
                const RowBlock& last = first[count - 1];
                const std::int64_t height = last.at + last.height - first->at;
                for (int p = 0; p < num_panels; p++) emit_panel(panel + p, first, last, sums + p * height * kColumns, bias, place);
            }
        }
    }

    std::int64_t num_in_, num_out_, stride_ = 0, num_panels_ = 0, num_groups_ = 0;
    int unit_ = kGroup, units_a_group_ = 1;

  private:
    static void multiply(const Activations& x, const RowBlock* blocks, int num_blocks, const Weights* panels, int num_panels,
                         [[maybe_unused]] int turn, [[maybe_unused]] int num_turns, float* sums) {
#ifdef SPECCOMPILE_AMX
        if (takes_amx<Form>()) return multiply_by_amx(x, blocks, num_blocks, panels, num_panels, turn, num_turns, sums);
#endif
        multiply_panels<Form>(x, blocks, num_blocks, panels, num_panels, sums);
    }

    // body(block, row of the block, first, last) for all rows and units of numbers, in parallel where it pays: a task has
    // some units of all rows of a block, as tasks by rows would write to the same cache lines. The first tasks have the
    // first units, which the same thread has probably computed.
    template <class Body>
    void for_units(const Context& context, const RowBlock* begin, const RowBlock* end, std::int64_t units, const Body& body) const {
        const std::int64_t least = kParallelValues / context.cheapness();
        const bool is_small = (end[-1].begin + end[-1].count) * num_in_ <= least;
        const std::int64_t units_a_task = std::max<std::int64_t>(1, least / (most_rows<Form>() * kGroup));
        const std::int64_t parts = is_small ? 1 : (ceil_div(units, units_a_task) + 1) / 2 * 2;
        const auto run = [&](std::size_t task) {
            const RowBlock& block = begin[static_cast<std::int64_t>(task) % (end - begin)];
            const std::int64_t part = static_cast<std::int64_t>(task) / (end - begin);
            for (int r = 0; r < block.count; r++) body(block, r, units * part / parts, units * (part + 1) / parts);
        };
        const auto num_tasks = static_cast<std::size_t>((end - begin) * parts);
        if (is_small) {
            for (std::size_t task = 0; task < num_tasks; task++) run(task);
        } else {
            context.parallel(num_tasks, run);
        }
    }

    // Whether several panels share a stretch of the activations of so many rows.
    bool is_shared(std::int64_t num_rows) const {
        const std::int64_t bytes = takes_amx<Form>() ? 6 : 4;
        return !Form::kIsInteger && num_rows > most_rows<Form>() && num_rows * stride_ * bytes > kSharedBytes;
    }

    template <class Place>
    void emit_panel(std::int64_t panel, const RowBlock* first, const RowBlock& last, const float* sums, const float* bias, const Place& place) const {
        alignas(64) float added[kColumns] = {};
        copy_columns(panel, bias, added);
        for (const RowBlock* block = first; block <= &last; block++) {
            const float* own = sums + (block->at - first->at) * kColumns;
            for (int r = 0; r < block->count; r++, own += kColumns) {
                if constexpr (kHasGate) {
                    emit_gated(panel, own, added, place(block->begin + r));
                } else {
                    emit(panel, own, added, place(block->begin + r));
                }
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
