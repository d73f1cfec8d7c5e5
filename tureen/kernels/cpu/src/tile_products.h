// Products by Intel's tiles (AMX): one instruction multiplies 16 rows of inputs by 16 outputs.
//
// What a tile register holds is set by `configure`. A tile of weights lies in memory as the instructions want it: a row
// is a quad (or two bfloat16) of 16 outputs. Sums of bytes are exact, so that rows computed by vectors give the same
// bits. Sums of bfloat16 are the instruction's own: first the products of even and of odd inputs of 32, then their sum.
#pragma once

#include "products.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int TILE_ROWS = 16;

// Registers. The compiler wants their numbers as literals.
#define SUMS_0 0
#define SUMS_1 1
#define GROUP_INPUTS 2   // 32 bytes a row
#define GROUP_WEIGHTS 3  // 8 quads
#define HALF_INPUTS 4    // 16 bytes a row
#define HALF_WEIGHTS 5   // 4 quads
#define PAIR_INPUTS 6    // 32 bfloat16 a row
#define PAIR_WEIGHTS 7   // 16 pairs

// Intel's Architectures Software Developer's Manual, LDTILECFG.
struct Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int row_bytes) {
        rows[tile] = uint8_t(num_rows);
        bytes[tile] = uint16_t(row_bytes);
    }
};

// Neither the compiler's intrinsics nor its inline assembly say which memory they use.
TUREEN_INLINE void order_memory() { asm volatile("" ::: "memory"); }

// rows: of inputs and sums.
void configure(int rows) {
    Configuration c;
    c.set(SUMS_0, rows, 64);
    c.set(SUMS_1, rows, 64);
    c.set(GROUP_INPUTS, rows, 32);
    c.set(GROUP_WEIGHTS, 8, 64);
    c.set(HALF_INPUTS, rows, 16);
    c.set(HALF_WEIGHTS, 4, 64);
    c.set(PAIR_INPUTS, rows, 64);
    c.set(PAIR_WEIGHTS, 16, 64);
    asm volatile("" : : "r"(&c) : "memory");
    _tile_loadconfig(&c);
}

void release() { _tile_release(); }

// sums [halves][16 rows][16 outputs] of one group of one tile.
template <Format F>
TUREEN_INLINE void multiply_group(const Panel<F>& panel, const Rows<F>& x, int row, int tile, int group,
                                  int32_t (&sums)[halves_of(F)][TILE_ROWS][TILE]) {
    order_memory();
    if constexpr (halves_of(F) == 1) {
        _tile_zero(SUMS_0);
        _tile_loadd(GROUP_INPUTS, x.group(row, group), x.stride);
        _tile_loadd(GROUP_WEIGHTS, panel.quad(tile, group, 0), 64);
        _tile_dpbsud(SUMS_0, GROUP_INPUTS, GROUP_WEIGHTS);
        _tile_stored(SUMS_0, sums[0], 64);
    } else {
        for (int half = 0; half < 2; half++) {
            _tile_zero(SUMS_0);
            _tile_loadd(HALF_INPUTS, x.group(row, group) + 16 * half, x.stride);
            _tile_loadd(HALF_WEIGHTS, panel.quad(tile, group, 4 * half), 64);
            _tile_dpbsud(SUMS_0, HALF_INPUTS, HALF_WEIGHTS);
            _tile_stored(SUMS_0, sums[half], 64);
        }
    }
    order_memory();
}

// In place of PanelKernel.
template <Format F>
struct TileKernel {
    static constexpr int ROWS = TILE_ROWS, ABOVE = TILE_ROWS - 1;

    static void run(const Panel<F>& panel, const Rows<F>& x, int row, PanelTotals* totals, Ahead& ahead) {
        for (int g = 0; g < panel.groups; g++) {
            ahead.fetch();
            for (int t = 0; t < PANEL_TILES; t++) {
                alignas(64) int32_t sums[halves_of(F)][TILE_ROWS][TILE];
                multiply_group<F>(panel, x, row, t, g, sums);
        TUREEN_UNROLL
                for (int i = 0; i < ROWS; i++)
                    totals[i][t] = add_group<F>(
                        totals[i][t],
                        [&](int half) TUREEN_INLINE_BODY {
                            return *(const int_part*)sums[half][i] + x.start(row + i, g, half);
                        },
                        panel.scales[g][t], x, row + i, g);
            }
        }
    }
};

template <Format F>
void multiply_groups_by_tiles(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile, int tile_end,
                              const Output& out) {
    if (m_end - m_begin < TILE_ROWS) return multiply_groups<F>(w, x, m_begin, m_end, tile, tile_end, out);
    configure(TILE_ROWS);
    multiply_groups<F, TileKernel<F>>(w, x, m_begin, m_end, tile, tile_end, out);
    release();
}

// `rows` rows, as configured, times one tile.
void multiply_bf16_tile(const Matrix& w, const Activations& x, int m, int rows, int tile, const Output& out) {
    alignas(64) float sums[TILE_ROWS][TILE];
    order_memory();
    _tile_zero(SUMS_0);
    _tile_zero(SUMS_1);
    const uint16_t* inputs = x.bf16 + size_t(m) * size_t(x.stride);
    for (int i = 0; i < w.padded_cols; i += GROUP) {
        prefetch(w.tile(tile) + size_t(i) * TILE * 2 + PREFETCH, GROUP * TILE * 2);
        _tile_loadd(PAIR_INPUTS, inputs + i, size_t(x.stride) * 2);
        _tile_loadd(PAIR_WEIGHTS, w.tile(tile) + size_t(i) * TILE * 2, 64);
        _tile_dpbf16ps(SUMS_0, PAIR_INPUTS, PAIR_WEIGHTS);
    }
    _tile_stored(SUMS_0, sums, 64);
    order_memory();
    for (int i = 0; i < rows; i++) out.store(m + i, tile, 0, *(const part*)sums[i]);
}

// Few rows too, since vectors would round otherwise.
void multiply_bf16_by_tiles(const Matrix& w, const Activations& x, int m, int m_end, int tile_begin, int tile_end,
                            const Output& out) {
    for (int rows = 0; m < m_end; m += rows) {
        if (rows == 0 || m_end - m < rows) {
            rows = m_end - m < TILE_ROWS ? m_end - m : TILE_ROWS;
            configure(rows);
        }
        for (int tile = tile_begin; tile < tile_end; tile++) multiply_bf16_tile(w, x, m, rows, tile, out);
    }
    release();
}

double products_by_tiles(int rounds) {
    alignas(64) uint8_t ones[1024];
    __builtin_memset(ones, 1, sizeof ones);
    configure(TILE_ROWS);
    order_memory();
    _tile_zero(SUMS_0);
    _tile_zero(SUMS_1);
    _tile_loadd(GROUP_INPUTS, ones, 32);
    _tile_loadd(GROUP_WEIGHTS, ones, 64);
    for (int round = 0; round < rounds; round++) {
        _tile_dpbsud(SUMS_0, GROUP_INPUTS, GROUP_WEIGHTS);
        _tile_dpbsud(SUMS_1, GROUP_INPUTS, GROUP_WEIGHTS);
    }
    _tile_stored(SUMS_0, ones, 64);
    _tile_stored(SUMS_1, ones, 64);
    release();
    return 2.0 * rounds * 2 * TILE_ROWS * TILE * GROUP;
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
