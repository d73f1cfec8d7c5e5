// Compiled once for each instruction set, with its file of isa/ as ISA_HEADER; see kernels.h.
#include "kernels.h"
#include "unpack.h"

#include ISA_HEADER
#include "products.h"
#include "word_products.h"
#ifdef TUREEN_TILE_PRODUCTS
#include "tile_products.h"
#endif

namespace tureen {
namespace VARIANT {
namespace {

#ifdef TUREEN_TILE_PRODUCTS
#define GROUPS_BY multiply_groups_by_tiles
#define BF16_BY multiply_bf16_by_tiles
#define REPEATED_BY products_by_tiles
#else
#define GROUPS_BY multiply_groups
#define BF16_BY multiply_whole<PlainBf16>
#define REPEATED_BY panel_products
#endif

void multiply(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile_begin, int tile_end, float* data,
              size_t stride, bool add, const float* bias) {
    const int each = input_rows(x.kind);
    m_begin *= each;
    m_end *= each;
    const Output out{w, data, stride, add, bias, each == 2};
    auto run = [&](auto kernel) { kernel(w, x, m_begin, m_end, tile_begin, tile_end, out); };
    switch (w.format) {
        case Format::F32: return run(multiply_whole<PlainF32>);
        case Format::BF16: return run(BF16_BY);
        case Format::Q16: return run(multiply_words);
        case Format::Q8_ROW: return run(GROUPS_BY<Format::Q8_ROW>);
        case Format::Q8_0: return run(GROUPS_BY<Format::Q8_0>);
        case Format::Q6_K: return run(GROUPS_BY<Format::Q6_K>);
        case Format::Q5_K: return run(GROUPS_BY<Format::Q5_K>);
        case Format::Q5_1: return run(GROUPS_BY<Format::Q5_1>);
        case Format::Q5_0: return run(GROUPS_BY<Format::Q5_0>);
        case Format::Q4_K: return run(GROUPS_BY<Format::Q4_K>);
        case Format::Q4_1: return run(GROUPS_BY<Format::Q4_1>);
        case Format::Q4_0: return run(GROUPS_BY<Format::Q4_0>);
        case Format::MXFP4: return run(GROUPS_BY<Format::MXFP4>);
        case Format::IQ4_NL: return run(GROUPS_BY<Format::IQ4_NL>);
        case Format::IQ4_XS: return run(GROUPS_BY<Format::IQ4_XS>);
        case Format::Q3_K: return run(GROUPS_BY<Format::Q3_K>);
        case Format::Q2_K: return run(GROUPS_BY<Format::Q2_K>);
        case Format::WIDE_IQ2:
        case Format::WIDE_IQ3_XXS:
        case Format::WIDE_IQ3_S: return run(GROUPS_BY<Format::WIDE_IQ2>);  // their tables alone differ
    }
}

#ifndef TUREEN_TILE_PRODUCTS
// The products of a panel of 4-bit weights, without what else a panel needs.
double panel_products(int rounds) {
    using Kernel = PanelKernel<Format::Q4_0>;
    using Cells = CellOf<Format::Q4_0>;
    constexpr int MR = Kernel::ROWS, NT = PANEL_COLUMNS, ROWS = Cells::ROWS, QUADS = Cells::QUADS;
    alignas(64) uint8_t weights[PANEL_TILES * QUADS_BYTES];
    int8_t inputs[MR * GROUP];
    __builtin_memset(weights, 1, sizeof weights);
    __builtin_memset(inputs, 1, sizeof inputs);
    int_part kept = {};
    for (int round = 0; round < rounds; round++) {
        asm volatile("" : : "r"(weights), "r"(inputs) : "memory");  // who knows what they hold now
        Cells cells[MR / ROWS][NT];
        const int32_t starts[2] = {};
    TUREEN_UNROLL
        for (int i = 0; i < MR / ROWS; i++)
            TUREEN_UNROLL
            for (int c = 0; c < NT; c++) cells[i][c].start(starts);
        unrolled<0, 8, QUADS>([&](auto quad) TUREEN_INLINE_BODY {
            typename Cells::Weights w[NT];
            TUREEN_UNROLL
            for (int c = 0; c < NT; c++)
                w[c] = Cells::weights_at(weights + c / PARTS * QUADS_BYTES + 64 * quad.value +
                                           c % PARTS * PART_BYTES);
            TUREEN_UNROLL
            for (int i = 0; i < MR / ROWS; i++) {
                const Inputs x = Cells::inputs_at<quad.value>(inputs + i * ROWS * GROUP, GROUP);
                TUREEN_UNROLL
                for (int c = 0; c < NT; c++) cells[i][c].template add<quad.value>(w[c], x);
            }
        });
        TUREEN_UNROLL
        for (int i = 0; i < MR; i++)
            TUREEN_UNROLL
            for (int c = 0; c < NT; c++) kept ^= cells[i / ROWS][c].total(i % ROWS);
    }
    volatile int32_t seen = kept[0];
    (void)seen;
    return 2.0 * rounds * MR * NT * GROUP * PART_LANES;
}
#endif

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels{multiply, unpack_row, REPEATED_BY};

}  // namespace VARIANT
}  // namespace tureen
