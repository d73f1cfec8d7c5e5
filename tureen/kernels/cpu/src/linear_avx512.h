// Products on AVX-512 with VNNI.
//
// Lane r of a register is output row r of a tile. A quad of a row of inputs, 4 bytes, is broadcast to all lanes.
// Three kernels keep their sums in registers:
//   multiply_plain   F32, BF16: one sum over all inputs, MR rows x NT tiles at once.
//   multiply_packed  group formats, few rows: a group is unpacked in registers and used for up to 8 rows.
//   multiply_panel   group formats, many rows: groups of 3 tiles are unpacked into the L1 cache and used for all rows.
// The last two do the same arithmetic, that of add_group, group after group: no bit depends on which of them ran.
#pragma once

// GCC 12 takes what its own header leaves undefined on purpose for a mistake.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "formats.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int PACKED_ROWS = 8;   // up to so many, a panel does not pay
constexpr int PACKED_BLOCK = 8;  // rows of inputs whose sums and totals fit the registers, next to a group
constexpr int PANEL_BLOCK = 4;   // likewise, in a panel
constexpr int PANEL_TILES = 3;
constexpr int PANEL_GROUPS = 9;  // 19 KB of the 48 KB L1 cache
constexpr int PANEL_ROWS = 256;  // rows that use a panel before the next is unpacked
constexpr int PREFETCH = 4096;   // bytes ahead: the next page, which the processor's own prefetcher does not enter

// An integer sum n is kept as the bits of the float MAGIC + n, which holds it for |n| < 2^22; groups stay below
// 32 * 128 * 127. Then fma(MAGIC + n, d, -MAGIC * d) = n * d, rounded once, without a conversion: MAGIC has 2
// significant bits and a scale d at most 19 (half * int8), so that MAGIC * d is exact.
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t MAGIC_BITS = 0x4B400000;

// sum + the products of 4 unsigned and 4 signed bytes. Not the intrinsic, whose sums GCC spills to memory.
inline __m512i dot4(__m512i sum, __m512i w, __m512i x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
    return sum;
}

inline __m512i broadcast4(const void* bytes) {
    int32_t value;
    __builtin_memcpy(&value, bytes, sizeof value);
    return _mm512_set1_epi32(value);
}

inline __m512 halves(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

inline __m512 bytes(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

inline void prefetch(const uint8_t* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) _mm_prefetch((const char*)from + at, _MM_HINT_T0);
}

// Where the products go.
struct Output {
    const Matrix& w;
    float* data;
    size_t stride;
    bool add;
    const float* bias;

    void store(int m, int tile, __m512 value) const {
        int first = tile * TILE, rest = w.rows - first;
        __mmask16 exist = rest >= TILE ? 0xFFFF : __mmask16((1 << rest) - 1);
        float* to = data + size_t(m) * stride + first;
        if (bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(exist, bias + first));
        if (add) value = _mm512_add_ps(_mm512_maskz_loadu_ps(exist, to), value);
        _mm512_mask_storeu_ps(to, exist, value);
    }
};

// -- group formats ----------------------------------------------------------------------------------------------------

// Q6_K scales 16 inputs, the others 32.
constexpr int halves_of(Format format) { return format == Format::Q6_K ? 2 : 1; }

// What the integers of one group of one tile are multiplied with.
template <Format F>
struct Scales {
    __m512 scale[halves_of(F)];
    __m512 magic[halves_of(F)];  // -MAGIC * scale
    __m512 offset;               // of formats that have it
};

constexpr size_t QUADS_BYTES = GROUP * TILE;  // of a group's integers as bytes, counted from 0

// Quads of a group as bytes, given to take(quad, integers) in their order.
template <Format F, class Take>
inline void unpack_integers(const uint8_t* from, const Take& take) {
    constexpr int BITS = bits_of(F);
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; quad++) {
        if (BITS == 8) {
            take(quad, _mm512_loadu_si512(from + 64 * quad));
            continue;
        }
        const __m512i both = _mm512_loadu_si512(from + 64 * (quad / 2));
        __m512i integers = _mm512_and_si512(quad % 2 ? _mm512_srli_epi16(both, 4) : both, low);
        for (int bit = 4; bit < BITS; bit++) {
            __mmask64 set;
            __builtin_memcpy(&set, from + 64 * bit + 8 * quad, sizeof set);
            integers = _mm512_mask_add_epi8(integers, set, integers, _mm512_set1_epi8(char(1 << bit)));
        }
        take(quad, integers);
    }
}

template <Format F>
inline const uint8_t* integers_of(const uint8_t* tile, int group) {
    return tile + size_t(group) * size_t(group_bytes(bits_of(F)));
}

template <Format F>
inline Scales<F> scales_of(const Matrix& w, const uint8_t* tile, int group) {
    Scales<F> s;
    if (F == Format::Q8_ROW) return s;
    const uint8_t* own = tile + w.scales_offset + size_t(is_super(F) ? group / GROUPS : group) * size_t(scale_bytes(F));
    for (int half = 0; half < halves_of(F); half++) {
        s.scale[half] = halves(own);
        const uint8_t* times = own + (is_super(F) ? sub_scale_at<F>(group % GROUPS, half) : 0);
        if (is_super(F)) s.scale[half] = _mm512_mul_ps(s.scale[half], bytes(times));
        s.magic[half] = _mm512_mul_ps(s.scale[half], _mm512_set1_ps(-MAGIC));
    }
    if (has_offsets(F)) s.offset = halves(own + 2 * TILE);
    if (has_offsets(F) && is_super(F)) {
        __m512 times = bytes(own + sub_scale_at<F>(group % GROUPS, 0) + TILE);
        s.offset = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(s.offset, times));
    }
    return s;
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
        size_t at = size_t(m) * stride / GROUP + size_t(group);
        q = x.q + at * GROUP;
        scale = x.scale + at;
        scaled_sum = x.scaled_sum + at;
        sum = halves_of(F) == 2 ? x.half_sum + 2 * at : x.sum + at;
    }

    __m512i quad(int row, int group, int index) const {
        return broadcast4(q + size_t(row) * stride + group * GROUP + 4 * index);
    }
    // What a sum begins with: integers count from 0, but stand for those from ZERO.
    __m512i start(int row, int group, int half) const {
        if (zero_of(F) == 0) return _mm512_set1_epi32(MAGIC_BITS);
        const int32_t* sums = sum + size_t(row) * stride / GROUP * halves_of(F);
        return _mm512_set1_epi32(MAGIC_BITS - zero_of(F) * sums[group * halves_of(F) + half]);
    }
};

// total + what a group adds for one row of inputs; `sums` are those of its halves.
template <Format F>
inline __m512 add_group(__m512 total, const __m512i* sums, const Scales<F>& w, const Rows<F>& x, int row, int group) {
    const size_t at = size_t(row) * x.stride / GROUP + size_t(group);
    for (int half = 0; half < halves_of(F); half++) {
        const __m512 sum = _mm512_castsi512_ps(sums[half]);
        const __m512 product = F == Format::Q8_ROW ? _mm512_sub_ps(sum, _mm512_set1_ps(MAGIC))
                                                   : _mm512_fmadd_ps(sum, w.scale[half], w.magic[half]);
        total = _mm512_fmadd_ps(product, _mm512_set1_ps(x.scale[at]), total);
    }
    if (has_offsets(F)) total = _mm512_fmadd_ps(w.offset, _mm512_set1_ps(x.scaled_sum[at]), total);
    return total;
}

// What a row of Q8_ROW has but once.
template <Format F>
inline __m512 finished(__m512 total, const Matrix& w, int tile) {
    if (F != Format::Q8_ROW) return total;
    return _mm512_mul_ps(total, _mm512_loadu_ps(w.tile(tile) + w.scales_offset));
}

template <Format F, int MR>
void multiply_packed(const Matrix& w, const Activations& inputs, int m, int tile, const Output& out) {
    constexpr size_t BYTES = size_t(group_bytes(bits_of(F)) + scale_bytes(F) / (is_super(F) ? GROUPS : 1));
    const Rows<F> x(inputs, m, 0);
    __m512 totals[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) totals[i] = _mm512_setzero_ps();
    const int groups = w.padded_cols / GROUP;
    for (int g = 0; g < groups; g++) {
        prefetch(w.tile(tile) + size_t(g) * BYTES + PREFETCH, BYTES);
        __m512i quads[8];
        unpack_integers<F>(integers_of<F>(w.tile(tile), g),
                           [&](int quad, __m512i integers) { quads[quad] = integers; });
        const Scales<F> scales = scales_of<F>(w, w.tile(tile), g);
        __m512i sums[MR][halves_of(F)];
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
            for (int half = 0; half < halves_of(F); half++) sums[i][half] = x.start(i, g, half);
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++) {
            const int half = quad * halves_of(F) / 8;
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) sums[i][half] = dot4(sums[i][half], quads[quad], x.quad(i, g, quad));
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) totals[i] = add_group<F>(totals[i], sums[i], scales, x, i, g);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) out.store(m + i, tile, finished<F>(totals[i], w, tile));
}

// Blocks of about the same size, at most PACKED_BLOCK rows each.
template <Format F>
void multiply_few(const Matrix& w, const Activations& x, int m, int m_end, int tile, const Output& out) {
    for (int blocks = (m_end - m + PACKED_BLOCK - 1) / PACKED_BLOCK; blocks > 0; blocks--) {
        int rows = (m_end - m) / blocks;
        switch (rows) {
            case 1: multiply_packed<F, 1>(w, x, m, tile, out); break;
            case 2: multiply_packed<F, 2>(w, x, m, tile, out); break;
            case 3: multiply_packed<F, 3>(w, x, m, tile, out); break;
            case 4: multiply_packed<F, 4>(w, x, m, tile, out); break;
            case 5: multiply_packed<F, 5>(w, x, m, tile, out); break;
            case 6: multiply_packed<F, 6>(w, x, m, tile, out); break;
            case 7: multiply_packed<F, 7>(w, x, m, tile, out); break;
            case 8: multiply_packed<F, 8>(w, x, m, tile, out); break;
        }
        m += rows;
    }
}

// Groups of PANEL_TILES tiles, ready for use.
template <Format F>
struct Panel {
    int groups;
    const uint8_t* integers[PANEL_TILES];  // group after group; those of 8 bits stay where they are
    Scales<F> scales[PANEL_GROUPS][PANEL_TILES];
    alignas(64) uint8_t unpacked[bits_of(F) == 8 ? 1 : PANEL_TILES][PANEL_GROUPS * QUADS_BYTES];

    void fill(const Matrix& w, int tile, int begin, int count) {
        groups = count;
        for (int t = 0; t < PANEL_TILES; t++) {
            integers[t] = bits_of(F) == 8 ? integers_of<F>(w.tile(tile + t), begin) : unpacked[t];
            for (int g = 0; g < groups; g++) {
                scales[g][t] = scales_of<F>(w, w.tile(tile + t), begin + g);
                if (bits_of(F) == 8) continue;
                uint8_t* to = unpacked[t] + size_t(g) * QUADS_BYTES;
                unpack_integers<F>(integers_of<F>(w.tile(tile + t), begin + g),
                                   [&](int quad, __m512i quads) { _mm512_store_si512(to + 64 * quad, quads); });
            }
        }
    }
    __m512i quad(int t, int group, int index) const {
        return _mm512_loadu_si512(integers[t] + size_t(group) * QUADS_BYTES + size_t(64 * index));
    }
};

// Memory that will be wanted, fetched a little at a time: many fetches at once would hold up the loads beside them.
struct Ahead {
    const uint8_t* at;
    const uint8_t* end;
    size_t share;

    void fetch() {
        if (at >= end) return;
        prefetch(at, share);
        at += share;
    }
};

using PanelTotals = __m512[PANEL_TILES];

// totals += the panel's groups for PANEL_BLOCK rows; x begins at the panel's first group.
template <Format F>
void multiply_panel(const Panel<F>& panel, const Rows<F>& x, int row, PanelTotals* totals, Ahead& ahead) {
    constexpr int MR = PANEL_BLOCK, NT = PANEL_TILES;
    __m512 sum_of_groups[MR][NT];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int t = 0; t < NT; t++) sum_of_groups[i][t] = totals[i][t];
    for (int g = 0; g < panel.groups; g++) {
        ahead.fetch();
        __m512i sums[MR][NT][halves_of(F)];
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
            for (int half = 0; half < halves_of(F); half++) {
                const __m512i start = x.start(row + i, g, half);
#pragma GCC unroll 8
                for (int t = 0; t < NT; t++) sums[i][t][half] = start;
            }
#pragma GCC unroll 8
        for (int quad = 0; quad < 8; quad++) {
            const int half = quad * halves_of(F) / 8;
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                const __m512i inputs = x.quad(row + i, g, quad);
#pragma GCC unroll 8
                for (int t = 0; t < NT; t++) sums[i][t][half] = dot4(sums[i][t][half], panel.quad(t, g, quad), inputs);
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
            for (int t = 0; t < NT; t++)
                sum_of_groups[i][t] = add_group<F>(sum_of_groups[i][t], sums[i][t], panel.scales[g][t], x, row + i, g);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int t = 0; t < NT; t++) totals[i][t] = sum_of_groups[i][t];
}

// PANEL_TILES tiles times `rows` rows, a multiple of PANEL_BLOCK and at most PANEL_ROWS.
template <Format F>
void multiply_many(const Matrix& w, const Activations& x, int m, int rows, int tile, const Output& out) {
    Panel<F> panel;
    PanelTotals totals[PANEL_ROWS];
    for (int i = 0; i < rows; i++)
        for (int t = 0; t < PANEL_TILES; t++) totals[i][t] = _mm512_setzero_ps();
    const int groups = w.padded_cols / GROUP;
    const size_t bytes = PANEL_TILES * w.tile_bytes, steps = size_t(groups * rows / PANEL_BLOCK);
    const uint8_t* next = w.tile(tile + PANEL_TILES);
    Ahead ahead{next, next + bytes, (bytes / 64 + steps - 1) / steps * 64};
    for (int begin = 0; begin < groups; begin += PANEL_GROUPS) {
        panel.fill(w, tile, begin, groups - begin < PANEL_GROUPS ? groups - begin : PANEL_GROUPS);
        const Rows<F> inputs(x, m, begin);
        for (int i = 0; i < rows; i += PANEL_BLOCK) {
            multiply_panel<F>(panel, inputs, i, totals + i, ahead);
            if (begin + panel.groups < groups) continue;
            for (int row = i; row < i + PANEL_BLOCK; row++)  // not all at the end: stores wait for memory
                for (int t = 0; t < PANEL_TILES; t++)
                    out.store(m + row, tile + t, finished<F>(totals[row][t], w, tile + t));
        }
    }
}

template <Format F>
void multiply_groups(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile, int tile_end,
                     const Output& out) {
    const int rows = m_end - m_begin, paneled = rows <= PACKED_ROWS ? 0 : rows / PANEL_BLOCK * PANEL_BLOCK;
    for (; paneled > 0 && tile + PANEL_TILES <= tile_end; tile += PANEL_TILES) {
        for (int i = 0; i < paneled; i += PANEL_ROWS) {
            int count = paneled - i < PANEL_ROWS ? paneled - i : PANEL_ROWS;
            multiply_many<F>(w, x, m_begin + i, count, tile, out);
        }
        for (int t = 0; t < PANEL_TILES; t++) multiply_few<F>(w, x, m_begin + paneled, m_end, tile + t, out);
    }
    for (; tile < tile_end; tile++) multiply_few<F>(w, x, m_begin, m_end, tile, out);
}

// -- F32 and BF16: 64 bytes of a tile meet 4 bytes of each row of inputs in one step --------------------------

template <class T>
const uint8_t* row_of(const T* values, const Activations& x, int m) {
    return reinterpret_cast<const uint8_t*>(values + size_t(m) * size_t(x.stride));
}

struct PlainF32 {
    using Sum = __m512;
    static constexpr int INPUTS = 1;  // a step
    static const uint8_t* row(const Activations& x, int m) { return row_of(x.f32, x, m); }
    static Sum start(const Activations&, int) { return _mm512_setzero_ps(); }
    static Sum step(Sum sum, __m512i w, __m512i x) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
    }
};

// As floats: vdpbf16ps takes two products at once, but four times as long.
struct PlainBf16 : PlainF32 {
    static constexpr int INPUTS = 2;
    static const uint8_t* row(const Activations& x, int m) { return row_of(x.bf16, x, m); }
    static Sum step(Sum sum, __m512i w, __m512i x) {
        sum = PlainF32::step(sum, _mm512_slli_epi32(w, 16), _mm512_slli_epi32(x, 16));
        const __m512i second = _mm512_set1_epi32(int(0xFFFF0000));
        return PlainF32::step(sum, _mm512_and_si512(w, second), _mm512_and_si512(x, second));
    }
};

template <class Plain, int MR, int NT>
void multiply_plain(const Matrix& w, const Activations& x, int m, int tile, const Output& out) {
    const uint8_t* tiles = w.tile(tile);
    const uint8_t* rows = Plain::row(x, m);
    const size_t row_bytes = size_t(Plain::row(x, 1) - Plain::row(x, 0));
    typename Plain::Sum sums[MR][NT];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 8
        for (int t = 0; t < NT; t++) sums[i][t] = Plain::start(x, m + i);
    const size_t steps = size_t(w.padded_cols / Plain::INPUTS);
    for (size_t step = 0; step < steps; step++) {
        __m512i weights[NT];
#pragma GCC unroll 8
        for (int t = 0; t < NT; t++) {
            const uint8_t* from = tiles + size_t(t) * w.tile_bytes + step * 64;
            prefetch(from + PREFETCH, 64);
            weights[t] = _mm512_loadu_si512(from);
        }
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            const __m512i inputs = broadcast4(rows + size_t(i) * row_bytes + step * 4);
#pragma GCC unroll 8
            for (int t = 0; t < NT; t++) sums[i][t] = Plain::step(sums[i][t], weights[t], inputs);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < NT; t++) {
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) out.store(m + i, tile + t, sums[i][t]);
    }
}

template <class Plain, int NT>
void multiply_plain_rows(const Matrix& w, const Activations& x, int m, int m_end, int tile, const Output& out) {
    for (; m + 8 <= m_end; m += 8) multiply_plain<Plain, 8, NT>(w, x, m, tile, out);
    for (; m + 4 <= m_end; m += 4) multiply_plain<Plain, 4, NT>(w, x, m, tile, out);
    for (; m + 2 <= m_end; m += 2) multiply_plain<Plain, 2, NT>(w, x, m, tile, out);
    for (; m < m_end; m++) multiply_plain<Plain, 1, NT>(w, x, m, tile, out);
}

template <class Plain>
void multiply_whole(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile, int tile_end,
                    const Output& out) {
    for (; tile + 3 <= tile_end; tile += 3) multiply_plain_rows<Plain, 3>(w, x, m_begin, m_end, tile, out);
    for (; tile < tile_end; tile++) multiply_plain_rows<Plain, 1>(w, x, m_begin, m_end, tile, out);
}

void multiply(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile_begin, int tile_end, float* data,
              size_t stride, bool add, const float* bias) {
    const Output out{w, data, stride, add, bias};
    auto run = [&](auto kernel) { kernel(w, x, m_begin, m_end, tile_begin, tile_end, out); };
    switch (w.format) {
        case Format::F32: return run(multiply_whole<PlainF32>);
        case Format::BF16: return run(multiply_whole<PlainBf16>);
        case Format::Q8_ROW: return run(multiply_groups<Format::Q8_ROW>);
        case Format::Q8_0: return run(multiply_groups<Format::Q8_0>);
        case Format::Q6_K: return run(multiply_groups<Format::Q6_K>);
        case Format::Q5_K: return run(multiply_groups<Format::Q5_K>);
        case Format::Q5_1: return run(multiply_groups<Format::Q5_1>);
        case Format::Q5_0: return run(multiply_groups<Format::Q5_0>);
        case Format::Q4_K: return run(multiply_groups<Format::Q4_K>);
        case Format::Q4_1: return run(multiply_groups<Format::Q4_1>);
        case Format::Q4_0: return run(multiply_groups<Format::Q4_0>);
    }
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
