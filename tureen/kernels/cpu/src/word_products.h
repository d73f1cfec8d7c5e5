// Products of Q16 weights, whose inputs are integers of 16 bits too: a sum over a span is exact, and the sums of spans
// are added as floats in their order. Included after products.h.
#pragma once

#include "products.h"

namespace tureen {
namespace VARIANT {
namespace {

// Rows whose totals are kept while the weights of a span, in the nearest cache, are used for all of them.
constexpr int WORD_ROWS = 64;

template <int NT>
struct WordPanel {
    static constexpr int COLUMNS = NT * PARTS;
    const Matrix& w;
    const Activations& x;
    int tile;
    part totals[WORD_ROWS][COLUMNS];

    // Adds the products of a span for MR rows, from row `at` of those that begin with m. Not inline: it gets all
    // registers, and tests find it by its name.
    template <int MR>
    __attribute__((noinline)) void add_span(int m, int at, int span) {
        const size_t stride = size_t(x.stride);
        const int16_t* rows = x.words + size_t(m + at) * stride;
        const float* scales = x.scale + size_t(m + at) * stride / SPAN + span;
        const int begin = span * SPAN, end = begin + SPAN < w.padded_cols ? begin + SPAN : w.padded_cols;
        int_part sums[MR][COLUMNS];
        TUREEN_UNROLL
        for (int i = 0; i < MR; i++)
            TUREEN_UNROLL
            for (int c = 0; c < COLUMNS; c++) sums[i][c] = int_part{};
        for (int input = begin; input < end; input += 2) {
            int_part weights[COLUMNS];
            TUREEN_UNROLL
            for (int c = 0; c < COLUMNS; c++) {
                const uint8_t* from = w.tile(tile + c / PARTS) + size_t(input) * 32 + c % PARTS * PART_BYTES;
                if (c % PARTS == 0) prefetch(from + PREFETCH, 64);
                weights[c] = *(const loose_int_part*)from;
            }
            TUREEN_UNROLL
            for (int i = 0; i < MR; i++) {
                const int_part two =
                    int_part_of(tureen::load<int32_t>((const uint8_t*)(rows + size_t(i) * stride + input)));
                TUREEN_UNROLL
                for (int c = 0; c < COLUMNS; c++) sums[i][c] = dot(sums[i][c], weights[c], two);
            }
        }
        TUREEN_UNROLL
        for (int c = 0; c < COLUMNS; c++) {
            const uint8_t* own = w.tile(tile + c / PARTS) + w.scales_offset + size_t(span) * 64;
            const part scale = *(const loose_part*)(own + c % PARTS * PART_BYTES);
            TUREEN_UNROLL
            for (int i = 0; i < MR; i++) {
                const part scaled =
                    __builtin_convertvector(sums[i][c], part) * part_of(scales[size_t(i) * stride / SPAN]);
                totals[at + i][c] = fma(scaled, scale, totals[at + i][c]);
            }
        }
    }

    // Blocks of MR rows, then of half as many, until none is left.
    template <int MR>
    void add_rows(int m, int at, int count, int span) {
        for (; at + MR <= count; at += MR) add_span<MR>(m, at, span);
        if constexpr (MR > 1) add_rows<MR / 2>(m, at, count, span);
    }

    void run(int m, int count, const Output& out) {
        for (int i = 0; i < count; i++)
            for (int c = 0; c < COLUMNS; c++) totals[i][c] = part{};
        for (int span = 0; span * SPAN < w.padded_cols; span++) add_rows<PLAIN_BLOCK>(m, 0, count, span);
        for (int i = 0; i < count; i++)
            TUREEN_UNROLL
            for (int c = 0; c < COLUMNS; c++) out.store(m + i, tile + c / PARTS, c % PARTS, totals[i][c]);
    }
};

template <int NT>
void multiply_word_tiles(const Matrix& w, const Activations& x, int m, int m_end, int tile, const Output& out) {
    WordPanel<NT> panel{w, x, tile, {}};
    for (; m < m_end; m += WORD_ROWS) panel.run(m, m_end - m < WORD_ROWS ? m_end - m : WORD_ROWS, out);
}

void multiply_words(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile, int tile_end,
                    const Output& out) {
    for (; tile + PLAIN_TILES <= tile_end; tile += PLAIN_TILES)
        multiply_word_tiles<PLAIN_TILES>(w, x, m_begin, m_end, tile, out);
    for (; tile < tile_end; tile++) multiply_word_tiles<1>(w, x, m_begin, m_end, tile, out);
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
