// Products of weights and rows of inputs, for every instruction set.
//
// A column is a register of outputs: a tile, or a part of one. Before this file, one of isa/ has defined
//     PACKED_ROWS                  for this many rows of inputs or fewer, a panel does not pay
//     PACKED_BLOCK                 rows whose sums fit the registers next to a group of a tile
//     PANEL_BLOCK, PANEL_TILES     rows and tiles whose sums fit the registers, in a panel
//     PLAIN_BLOCK, PLAIN_TILES     likewise, of floats
//     HAS_SIGNED_WEIGHTS           whether `DotSum<8>` takes its weights from -128 in place of 0
//     Inputs, inputs_at<QUAD>(x)   what a sum is given of 32 inputs x: at least those of the quad
//     DotSum<BITS, SUMMED>         sums of one row and one column in 32 bits: start(n) sets them, add<QUAD>(w, x) adds
//                                  the products of a quad, total() has them. Of the quads 0 to 7, SUMMED in their order
//                                  make a sum.
// and may have defined
//     Cell<BITS, SUMMED>, TUREEN_OWN_CELL  the same for ROWS rows and QUADS quads at once, for panels
//     TUREEN_TILE_PRODUCTS         the instruction set multiplies whole matrices: see tile_products.h
//
// Three kernels keep their sums in registers:
//     multiply_plain    F32, BF16: one sum over all inputs
//     multiply_packed   group formats, few rows: a group is unpacked in registers
//     multiply_panel    group formats, many rows: groups are unpacked into the nearest cache and used for all rows
// The last two do the same arithmetic, that of `add_group`, group after group: sums of integers are exact, and the sums
// of floats go over the groups in their order. No bit depends on which of the kernels ran, nor on the instruction set
// (but where `fma` rounds twice: portable).
#pragma once

#include "integers.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int PANEL_COLUMNS = PANEL_TILES * PARTS;
constexpr int PANEL_GROUPS = 27 / PANEL_TILES;  // 14 KB of integers and as much of scales, of the nearest cache
constexpr int PANEL_ROWS = 256;                 // rows that use a panel before the next is unpacked, about
constexpr int PREFETCH = 4096;  // bytes ahead: the next page, which the processor's own prefetcher does not enter
constexpr bool HAS_MANY_REGISTERS = PART_BYTES == 64;  // for sums and totals of a panel at once

// Where `fma` rounds once, an integer sum n is kept as the bits of the float MAGIC + n, which holds it for |n| < 2^22;
// groups stay below 32 * 128 * 127. Then fma(MAGIC + n, d, -MAGIC * d) = n * d, rounded once, without a conversion:
// MAGIC has 2 significant bits and a scale d at most 19 (half * int8), so that MAGIC * d is exact.
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t MAGIC_BITS = IS_FUSED ? 0x4B400000 : 0;

template <int N>
struct Number {
    static constexpr int value = N;
};

// body(Number<i>) for i from BEGIN to END in steps of STEP.
template <int BEGIN, int END, int STEP, class Body>
TUREEN_INLINE void unrolled(const Body& body) {
    if constexpr (BEGIN < END) {
        body(Number<BEGIN>{});
        unrolled<BEGIN + STEP, END, STEP>(body);
    }
}

#define TUREEN_INLINE_BODY __attribute__((always_inline))

TUREEN_INLINE void prefetch(const uint8_t* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

// Where the products go.
struct Output {
    const Matrix& w;
    float* data;
    size_t stride;
    bool add;
    const float* bias;
    bool in_pairs;  // INT16_GROUP: rows 2 m and 2 m + 1 of the inputs make row m, and come in this order

    // Part p of a tile; m: the row of inputs.
    TUREEN_INLINE void store(int m, int tile, int p, part value) const {
        const int first = tile * TILE + p * PART_LANES, rest = w.rows - first;
        const bool is_second = in_pairs && m % 2 != 0, adds = add || is_second;
        float* to = data + size_t(in_pairs ? m / 2 : m) * stride + first;
        const float* added = bias != nullptr && !is_second ? bias + first : nullptr;
        if (rest >= PART_LANES) {
            if (added != nullptr) value += *(const loose_part*)added;
            if (adds) value += *(const loose_part*)to;
            *(loose_part*)to = value;
            return;
        }
        store_some(to, added, adds, rest, value);
    }

    // Of the last tile: the first `rest` lanes.
    __attribute__((noinline)) static void store_some(float* to, const float* added, bool adds, int rest, part value) {
        for (int r = 0; r < rest; r++) {
            const float one = added != nullptr ? value[r] + added[r] : value[r];
            to[r] = adds ? to[r] + one : one;
        }
    }
};

// -- group formats ----------------------------------------------------------------------------------------------------

// What the integers, as sums are given them, count from.
constexpr int counts_from(Format format) {
    return zero_of(format) - (HAS_SIGNED_WEIGHTS && sum_bits_of(format) == 8 ? 128 : 0);
}

template <Format F>
using GroupSum = DotSum<sum_bits_of(F), 8 / halves_of(F)>;

// Of `most` rows, as many as fit the registers where a sum takes several of them.
template <Format F>
constexpr int rows_that_fit(int most) {
    const int fit = most / (halves_of(F) * GroupSum<F>::REGISTERS);
    return fit > 0 ? fit : 1;
}

constexpr size_t QUADS_BYTES = GROUP * TILE;  // of a group's integers as bytes

#ifndef TUREEN_OWN_CELL
template <int BITS, int SUMMED>
struct Cell {
    static constexpr int ROWS = 1, QUADS = 1;
    using Weights = Integers;
    DotSum<BITS, SUMMED> sum;

    TUREEN_INLINE static void arrange(uint8_t*) {}
    TUREEN_INLINE static Weights weights_at(const uint8_t* quad) { return load_integers(quad); }
    template <int QUAD>
    TUREEN_INLINE static Inputs inputs_at(const int8_t* group, size_t) {
        return VARIANT::inputs_at<QUAD>(group);
    }
    TUREEN_INLINE void start(const int32_t* value) { sum.start(*value); }
    template <int QUAD>
    TUREEN_INLINE void add(Weights w, Inputs x) {
        sum.template add<QUAD>(w, x);
    }
    TUREEN_INLINE int_part total(int) const { return sum.total(); }
};
constexpr bool ARE_WEIGHTS_ARRANGED = false;
#else
constexpr bool ARE_WEIGHTS_ARRANGED = true;
#endif

template <Format F>
using CellOf = Cell<sum_bits_of(F), 8 / halves_of(F)>;

// What the integers of one group of one column are multiplied with.
template <Format F>
struct GroupScales {
    part scale[halves_of(F)];
    part magic[halves_of(F)];   // -MAGIC * scale
    part offset[halves_of(F)];  // of formats that have it
};

template <Format F>
TUREEN_INLINE const uint8_t* integers_of(const uint8_t* tile, int group) {
    return tile + size_t(group) * size_t(group_bytes(tureen::bits_of(F)));
}

TUREEN_INLINE part low_halves(const uint8_t* bytes) {
    return __builtin_convertvector(__builtin_convertvector(load_bytes(bytes), int_part) & 15, part);
}

TUREEN_INLINE part high_halves(const uint8_t* bytes) {
    return __builtin_convertvector(__builtin_convertvector(load_bytes(bytes), int_part) >> 4 & 15, part);
}

template <Format F>
TUREEN_INLINE void load_scales(const Matrix& w, const uint8_t* tile, int group, int p, GroupScales<F>& s) {
    if (F == Format::Q8_ROW) return;
    const uint8_t* own = tile + w.scales_offset + size_t(is_super(F) ? group / GROUPS : group) * size_t(scale_bytes(F));
    for (int half = 0; half < halves_of(F); half++) {
        const uint8_t* sub_scales = own + sub_scale_at<F>(group % GROUPS, half) + p * PART_LANES;
        if (F == Format::MXFP4) {
            const part exponent = load_bytes(own + p * PART_LANES);
            s.scale[half] = times_power_of_two(part_of(1.0f), exponent, exponent + ROUNDER);
        } else {
            s.scale[half] = load_halves(own + 2 * p * PART_LANES);
            if (is_super(F)) s.scale[half] *= F == Format::Q2_K ? low_halves(sub_scales) : load_bytes(sub_scales);
            if (is_wide(F)) s.scale[half] *= sub_scale_unit(F);
        }
        s.magic[half] = s.scale[half] * -MAGIC;
        if (!has_offsets(F)) continue;
        s.offset[half] = load_halves(own + 2 * TILE + 2 * p * PART_LANES);
        if (!is_super(F)) continue;
        s.offset[half] *= -(F == Format::Q2_K ? high_halves(sub_scales) : load_bytes(sub_scales + TILE));
    }
}

// Rows of INT8_GROUP inputs from row m and group `group` on.
template <Format F>
struct Rows {
    size_t stride;
    const int8_t* q;
    const float* scale;
    const float* scaled_sum;
    const int32_t* sum;

    Rows(const Activations& x, int m, int group) : stride(size_t(x.stride)) {
        const size_t at = size_t(m) * stride / GROUP + size_t(group);
        q = x.q + at * GROUP;
        scale = x.scale + at;
        scaled_sum = x.scaled_sum + at;
        sum = halves_of(F) == 2 ? x.half_sum + 2 * at : x.sum + at;
    }

    TUREEN_INLINE const int8_t* group(int row, int group) const { return q + size_t(row) * stride + group * GROUP; }

    // What a sum begins with: integers are given from 0, but stand for those from `counts_from`.
    TUREEN_INLINE int32_t start(int row, int group, int half) const {
        if (counts_from(F) == 0) return MAGIC_BITS;
        const int32_t* sums = sum + size_t(row) * stride / GROUP * halves_of(F);
        return MAGIC_BITS - counts_from(F) * sums[group * halves_of(F) + half];
    }

    // What an offset is multiplied with: the sum of the inputs that share it.
    TUREEN_INLINE float input_sum(size_t at, int half) const {
        return halves_of(F) == 1 ? scaled_sum[at] : scale[at] * float(sum[2 * at + size_t(half)]);
    }
};

// total + what half `half` of a group adds for one row; `sum` as kept.
template <Format F>
TUREEN_INLINE part add_half(part total, int_part sum, int half, const GroupScales<F>& w, const Rows<F>& x, size_t at) {
    part product;
    if (F == Format::Q8_ROW)
        product = IS_FUSED ? float_of_bits(sum) - MAGIC : __builtin_convertvector(sum, part);
    else
        product = IS_FUSED ? fma(float_of_bits(sum), w.scale[half], w.magic[half])
                           : __builtin_convertvector(sum, part) * w.scale[half];
    return fma(product, part_of(x.scale[at]), total);
}

// total + what a group adds for one row; sum_of(half) are the sums as kept.
template <Format F, class SumOf>
TUREEN_INLINE part add_group(part total, const SumOf& sum_of, const GroupScales<F>& w, const Rows<F>& x, int row,
                             int group) {
    const size_t at = size_t(row) * x.stride / GROUP + size_t(group);
    for (int half = 0; half < halves_of(F); half++) total = add_half<F>(total, sum_of(half), half, w, x, at);
    for (int half = 0; has_offsets(F) && half < halves_of(F); half++)
        total = fma(w.offset[half], part_of(x.input_sum(at, half)), total);
    return total;
}

// What a row of Q8_ROW has but once.
template <Format F>
TUREEN_INLINE part finished(part total, const Matrix& w, int tile, int p) {
    if (F != Format::Q8_ROW) return total;
    return total * *(const loose_part*)(w.tile(tile) + w.scales_offset + p * PART_BYTES);
}

template <Format F, int MR>
__attribute__((noinline)) void multiply_packed(const Matrix& w, const Activations& inputs, int m, int tile,
                                               const Output& out) {
    constexpr int HALVES = halves_of(F);
    constexpr size_t BYTES = size_t(group_bytes(tureen::bits_of(F)) + scale_bytes(F) / (is_super(F) ? GROUPS : 1));
    const Rows<F> x(inputs, m, 0);
    const Integers table = table_for<F>(w);
    part totals[MR][PARTS];
    TUREEN_UNROLL
    for (int i = 0; i < MR; i++)
        TUREEN_UNROLL
        for (int p = 0; p < PARTS; p++) totals[i][p] = part{};
    const int groups = w.padded_cols / GROUP;
    for (int g = 0; g < groups; g++) {
        // A tile's scales lie behind all its integers, but its first group needs the first of them: they must have been
        // fetched by the end of the tile before.
        prefetch(w.tile(tile) + size_t(g) * BYTES + w.scales_offset + PREFETCH, BYTES);
        const uint8_t* integers = integers_of<F>(w.tile(tile), g);
        GroupSum<F> sums[HALVES][MR][PARTS];
        TUREEN_UNROLL
        for (int half = 0; half < HALVES; half++)
            TUREEN_UNROLL
            for (int i = 0; i < MR; i++)
                TUREEN_UNROLL
                for (int p = 0; p < PARTS; p++) sums[half][i][p].start(x.start(i, g, half));
        unrolled<0, 8, 1>([&](auto quad) TUREEN_INLINE_BODY {
            constexpr int HALF = quad.value * HALVES / 8;
            Integers q[PARTS];
            TUREEN_UNROLL
            for (int p = 0; p < PARTS; p++) q[p] = unpack_quad<F>(integers, quad.value, p, table);
            TUREEN_UNROLL
            for (int i = 0; i < MR; i++) {
                const Inputs in = inputs_at<quad.value>(x.group(i, g));
                TUREEN_UNROLL
                for (int p = 0; p < PARTS; p++) sums[HALF][i][p].template add<quad.value>(q[p], in);
            }
        });
        TUREEN_UNROLL
        for (int p = 0; p < PARTS; p++) {
            GroupScales<F> scales;
            load_scales<F>(w, w.tile(tile), g, p, scales);
            TUREEN_UNROLL
            for (int i = 0; i < MR; i++)
                totals[i][p] = add_group<F>(
                    totals[i][p], [&](int half) TUREEN_INLINE_BODY { return sums[half][i][p].total(); }, scales, x, i,
                    g);
        }
    }
    TUREEN_UNROLL
    for (int i = 0; i < MR; i++)
        TUREEN_UNROLL
        for (int p = 0; p < PARTS; p++) out.store(m + i, tile, p, finished<F>(totals[i][p], w, tile, p));
}

template <Format F, int MR>
void multiply_packed_rows(int rows, const Matrix& w, const Activations& x, int m, int tile, const Output& out) {
    if constexpr (MR > 0) {
        if (rows == MR) return multiply_packed<F, MR>(w, x, m, tile, out);
        multiply_packed_rows<F, MR - 1>(rows, w, x, m, tile, out);
    }
}

// Blocks of about the same size.
template <Format F>
void multiply_few(const Matrix& w, const Activations& x, int m, int m_end, int tile, const Output& out) {
    constexpr int BLOCK = rows_that_fit<F>(PACKED_BLOCK);
    for (int blocks = (m_end - m + BLOCK - 1) / BLOCK; blocks > 0; blocks--) {
        const int rows = (m_end - m) / blocks;
        multiply_packed_rows<F, BLOCK>(rows, w, x, m, tile, out);
        m += rows;
    }
}

// Groups of PANEL_TILES tiles, ready for use.
template <Format F>
struct Panel {
    static constexpr bool IS_COPY = tureen::bits_of(F) < 8 || ARE_WEIGHTS_ARRANGED;
    int groups;
    const uint8_t* integers[PANEL_TILES];  // group after group; those of 8 bits may stay where they are
    GroupScales<F> scales[PANEL_GROUPS][PANEL_COLUMNS];
    alignas(64) uint8_t unpacked[IS_COPY ? PANEL_TILES : 1][PANEL_GROUPS * QUADS_BYTES];

    void fill(const Matrix& w, int tile, int begin, int count) {
        const Integers table = table_for<F>(w);
        groups = count;
        for (int t = 0; t < PANEL_TILES; t++) {
            integers[t] = IS_COPY ? unpacked[t] : integers_of<F>(w.tile(tile + t), begin);
            for (int g = 0; g < groups; g++) {
                TUREEN_UNROLL
                for (int p = 0; p < PARTS; p++)
                    load_scales<F>(w, w.tile(tile + t), begin + g, p, scales[g][t * PARTS + p]);
                if (IS_COPY)
                    unpack(integers_of<F>(w.tile(tile + t), begin + g), unpacked[t] + size_t(g) * QUADS_BYTES, table);
            }
        }
    }

    TUREEN_INLINE static void unpack(const uint8_t* from, uint8_t* to, Integers table) {
        constexpr int QUADS = CellOf<F>::QUADS;
        TUREEN_UNROLL
        for (int quad = 0; quad < 8; quad++)
            TUREEN_UNROLL
            for (int p = 0; p < PARTS; p++)
                store_integers(to + 64 * quad + PART_BYTES * p, unpack_quad<F>(from, quad, p, table));
        TUREEN_UNROLL
        for (int quad = 0; quad < 8; quad += QUADS)
            TUREEN_UNROLL
            for (int p = 0; p < PARTS; p++) CellOf<F>::arrange(to + 64 * quad + PART_BYTES * p);
    }

    TUREEN_INLINE const uint8_t* quad(int column, int group, int index) const {
        return integers[column / PARTS] + size_t(group) * QUADS_BYTES + size_t(64 * index) +
               column % PARTS * PART_BYTES;
    }
};

// Memory that will be wanted, fetched a little at a time: many fetches at once would hold up the loads beside them.
struct Ahead {
    const uint8_t* at;
    const uint8_t* end;
    size_t share;

    TUREEN_INLINE void fetch() {
        if (at >= end) return;
        prefetch(at, share);
        at += share;
    }
};

using PanelTotals = part[PANEL_COLUMNS];

// totals += the panel's groups for MR rows; x begins at the panel's first group.
template <Format F, int MR>
__attribute__((noinline)) void multiply_panel(const Panel<F>& panel, const Rows<F>& x, int row, PanelTotals* totals, Ahead& ahead) {
    constexpr int HALVES = halves_of(F), NT = PANEL_COLUMNS;
    constexpr int ROWS = CellOf<F>::ROWS, QUADS = CellOf<F>::QUADS;
    part own[HAS_MANY_REGISTERS ? MR : 1][NT];
    TUREEN_UNROLL
    for (int i = 0; i < (HAS_MANY_REGISTERS ? MR : 0); i++)
        TUREEN_UNROLL
        for (int c = 0; c < NT; c++) own[i][c] = totals[i][c];
    for (int g = 0; g < panel.groups; g++) {
        ahead.fetch();
        CellOf<F> cells[HALVES][MR / ROWS][NT];
        TUREEN_UNROLL
        for (int half = 0; half < HALVES; half++)
            TUREEN_UNROLL
            for (int i = 0; i < MR / ROWS; i++) {
                int32_t starts[ROWS];
                TUREEN_UNROLL
                for (int r = 0; r < ROWS; r++) starts[r] = x.start(row + i * ROWS + r, g, half);
                TUREEN_UNROLL
                for (int c = 0; c < NT; c++) cells[half][i][c].start(starts);
            }
        unrolled<0, 8, QUADS>([&](auto quad) TUREEN_INLINE_BODY {
            constexpr int HALF = quad.value * HALVES / 8;
            typename CellOf<F>::Weights w[NT];
            TUREEN_UNROLL
            for (int c = 0; c < NT; c++) w[c] = CellOf<F>::weights_at(panel.quad(c, g, quad.value));
            TUREEN_UNROLL
            for (int i = 0; i < MR / ROWS; i++) {
                const Inputs in = CellOf<F>::template inputs_at<quad.value>(x.group(row + i * ROWS, g), x.stride);
                TUREEN_UNROLL
                for (int c = 0; c < NT; c++) cells[HALF][i][c].template add<quad.value>(w[c], in);
            }
        });
        TUREEN_UNROLL
        for (int c = 0; c < NT; c++)
            TUREEN_UNROLL
            for (int i = 0; i < MR; i++) {
                part& total = HAS_MANY_REGISTERS ? own[i][c] : totals[i][c];
                total = add_group<F>(
                    total,
                    [&](int half) TUREEN_INLINE_BODY { return cells[half][i / ROWS][c].total(i % ROWS); },
                    panel.scales[g][c], x, row + i, g);
            }
    }
    TUREEN_UNROLL
    for (int i = 0; i < (HAS_MANY_REGISTERS ? MR : 0); i++)
        TUREEN_UNROLL
        for (int c = 0; c < NT; c++) totals[i][c] = own[i][c];
}

// How many rows a panel is multiplied with at once, and above how many it is used.
template <Format F>
struct PanelKernel {
    static constexpr int CELL = CellOf<F>::ROWS, FIT = rows_that_fit<F>(PANEL_BLOCK);
    static constexpr int ROWS = FIT < CELL ? CELL : FIT / CELL * CELL, ABOVE = PACKED_ROWS;

    static void run(const Panel<F>& panel, const Rows<F>& x, int row, PanelTotals* totals, Ahead& ahead) {
        multiply_panel<F, ROWS>(panel, x, row, totals, ahead);
    }
};

// PANEL_TILES tiles times `rows` rows, a multiple of the kernel's and at most PANEL_ROWS.
template <Format F, class Kernel>
void multiply_many(const Matrix& w, const Activations& x, int m, int rows, int tile, const Output& out) {
    Panel<F> panel;
    PanelTotals totals[PANEL_ROWS];
    for (int i = 0; i < rows; i++)
        for (int c = 0; c < PANEL_COLUMNS; c++) totals[i][c] = part{};
    const int groups = w.padded_cols / GROUP;
    const size_t bytes = PANEL_TILES * w.tile_bytes, steps = size_t(groups * rows / Kernel::ROWS);
    const uint8_t* next = w.tile(tile + PANEL_TILES);
    Ahead ahead{next, next + bytes, (bytes / 64 + steps - 1) / steps * 64};
    for (int begin = 0; begin < groups; begin += PANEL_GROUPS) {
        panel.fill(w, tile, begin, groups - begin < PANEL_GROUPS ? groups - begin : PANEL_GROUPS);
        const Rows<F> inputs(x, m, begin);
        for (int i = 0; i < rows; i += Kernel::ROWS) {
            Kernel::run(panel, inputs, i, totals + i, ahead);
            if (begin + panel.groups < groups) continue;
            for (int row = i; row < i + Kernel::ROWS; row++)  // not all at the end: stores wait for memory
                for (int c = 0; c < PANEL_COLUMNS; c++)
                    out.store(m + row, tile + c / PARTS, c % PARTS,
                              finished<F>(totals[row][c], w, tile + c / PARTS, c % PARTS));
        }
    }
}

template <Format F, class Kernel = PanelKernel<F>>
void multiply_groups(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile, int tile_end,
                     const Output& out) {
    constexpr int MOST = PANEL_ROWS / Kernel::ROWS * Kernel::ROWS;
    const int rows = m_end - m_begin, paneled = rows <= Kernel::ABOVE ? 0 : rows / Kernel::ROWS * Kernel::ROWS;
    for (; paneled > 0 && tile + PANEL_TILES <= tile_end; tile += PANEL_TILES) {
        for (int i = 0; i < paneled; i += MOST) {
            const int count = paneled - i < MOST ? paneled - i : MOST;
            multiply_many<F, Kernel>(w, x, m_begin + i, count, tile, out);
        }
        for (int t = 0; t < PANEL_TILES; t++) multiply_few<F>(w, x, m_begin + paneled, m_end, tile + t, out);
    }
    for (; tile < tile_end; tile++) multiply_few<F>(w, x, m_begin, m_end, tile, out);
}

// -- F32 and BF16: 64 bytes of a tile meet 4 bytes of each row of inputs in one step --------------------------

template <class T>
TUREEN_INLINE const uint8_t* row_of(const T* values, const Activations& x, int m) {
    return reinterpret_cast<const uint8_t*>(values + size_t(m) * size_t(x.stride));
}

struct PlainF32 {
    static constexpr int INPUTS = 1;  // a step
    static const uint8_t* row(const Activations& x, int m) { return row_of(x.f32, x, m); }
    TUREEN_INLINE static part step(part sum, int_part w, int_part x) {
        return fma(float_of_bits(w), float_of_bits(x), sum);
    }
};

// As floats: vdpbf16ps takes two products at once, but rounds otherwise than `fma`, so other instruction sets would give
// other bits. The first of two is the lower half.
struct PlainBf16 {
    static constexpr int INPUTS = 2;
    static const uint8_t* row(const Activations& x, int m) { return row_of(x.bf16, x, m); }
    TUREEN_INLINE static part step(part sum, int_part w, int_part x) {
        const int_part second = int_part_of(int32_t(0xffff0000));
        sum = fma(float_of_bits(w << 16), float_of_bits(x << 16), sum);
        return fma(float_of_bits(w & second), float_of_bits(x & second), sum);
    }
};

template <class Plain, int MR, int NT>
void multiply_plain(const Matrix& w, const Activations& x, int m, int tile, const Output& out) {
    const uint8_t* tiles = w.tile(tile);
    const uint8_t* rows = Plain::row(x, m);
    const size_t row_bytes = size_t(Plain::row(x, 1) - Plain::row(x, 0));
    part sums[MR][NT * PARTS];
    TUREEN_UNROLL
    for (int i = 0; i < MR; i++)
        TUREEN_UNROLL
        for (int c = 0; c < NT * PARTS; c++) sums[i][c] = part{};
    const size_t steps = size_t(w.padded_cols / Plain::INPUTS);
    for (size_t step = 0; step < steps; step++) {
        int_part weights[NT * PARTS];
        TUREEN_UNROLL
        for (int c = 0; c < NT * PARTS; c++) {
            const uint8_t* from = tiles + size_t(c / PARTS) * w.tile_bytes + step * 64 + c % PARTS * PART_BYTES;
            if (c % PARTS == 0) prefetch(from + PREFETCH, 64);
            weights[c] = *(const loose_int_part*)from;
        }
        TUREEN_UNROLL
        for (int i = 0; i < MR; i++) {
            const int_part inputs = int_part_of(tureen::load<int32_t>(rows + size_t(i) * row_bytes + step * 4));
            TUREEN_UNROLL
            for (int c = 0; c < NT * PARTS; c++) sums[i][c] = Plain::step(sums[i][c], weights[c], inputs);
        }
    }
    TUREEN_UNROLL
    for (int c = 0; c < NT * PARTS; c++)
        TUREEN_UNROLL
        for (int i = 0; i < MR; i++) out.store(m + i, tile + c / PARTS, c % PARTS, sums[i][c]);
}

// Blocks of MR rows, then of half as many, until none is left.
template <class Plain, int MR, int NT>
void multiply_plain_rows(const Matrix& w, const Activations& x, int m, int m_end, int tile, const Output& out) {
    for (; m + MR <= m_end; m += MR) multiply_plain<Plain, MR, NT>(w, x, m, tile, out);
    if constexpr (MR > 1) multiply_plain_rows<Plain, MR / 2, NT>(w, x, m, m_end, tile, out);
}

template <class Plain>
void multiply_whole(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile, int tile_end,
                    const Output& out) {
    for (; tile + PLAIN_TILES <= tile_end; tile += PLAIN_TILES)
        multiply_plain_rows<Plain, PLAIN_BLOCK, PLAIN_TILES>(w, x, m_begin, m_end, tile, out);
    for (; tile < tile_end; tile++) multiply_plain_rows<Plain, PLAIN_BLOCK, 1>(w, x, m_begin, m_end, tile, out);
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
