// Linear kernels but for the integer products, whatever the registers are. A tile is worked on in parts: the rows whose
// 32-bit lanes fill one register.
//
// Before it, linear_avx2.h, linear_neon.h or linear_portable.h has defined
//     part load_halves(const uint8_t* from);  // PART_LANES half floats
//     part load_bytes(const uint8_t* from);   // PART_LANES signed bytes
//     template <int BITS, int ROWS>
//     void dot(const uint8_t* group, int p, int quad, int quads, const int8_t* x, size_t stride, int_part* sums);
// the last of which adds the products of quads [quad, quad + quads) of part p of a group with ROWS rows of inputs (x:
// the first row's, at that quad) to sums [ROWS]. 8-bit integers count from -128, others from 0.
#pragma once

#include "formats.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int BLOCK = 4;    // rows of inputs that share the unpacking of weights
constexpr int CACHED = 32;  // rows of inputs that stay in the nearest cache while tiles pass by

template <class Part>
TUREEN_INLINE Part load_part(const void* from) {
    Part values;
    __builtin_memcpy(&values, from, sizeof values);
    return values;
}

// One tile times up to BLOCK rows of inputs.
struct Block {
    const Matrix& w;
    const uint8_t* tile;
    const Activations& x;
    int m;       // first row of inputs
    float* out;  // of that row and the tile's first row
    size_t out_stride;
    int rows;           // of the tile that exist
    const float* bias;  // of the tile's first row, or null
    bool add;

    const uint8_t* group(int index, int bits) const { return tile + size_t(index) * size_t(group_bytes(bits)); }
    size_t first_input() const { return size_t(m) * size_t(x.stride); }

    TUREEN_INLINE void write(int row, int p, part values) const {
        float* to = out + size_t(row) * out_stride + p * PART_LANES;
        const float* added = bias != nullptr ? bias + p * PART_LANES : nullptr;
        if (rows >= (p + 1) * PART_LANES) {
            if (added != nullptr) values += load_part<part>(added);
            if (add) values += load_part<part>(to);
            __builtin_memcpy(to, &values, sizeof values);
            return;
        }
        for (int r = 0; r < rows - p * PART_LANES; r++) {
            float value = added != nullptr ? values[r] + added[r] : values[r];
            to[r] = add ? value + to[r] : value;
        }
    }
};

template <Format FORMAT>
TUREEN_INLINE const uint8_t* scales_of(const Block& block, int group) {
    return block.tile + block.w.scales_offset + size_t(is_super(FORMAT) ? group / GROUPS : group) * scale_bytes(FORMAT);
}

// What the integers of half `half` of a group are multiplied with, and what is added then, for part p.
template <Format FORMAT>
TUREEN_INLINE part scales_at(const uint8_t* scales, int group, int half, int p) {
    if constexpr (FORMAT == Format::Q8_ROW) return part_of(1.0f);
    part d = load_halves(scales + 2 * p * PART_LANES);
    if constexpr (!is_super(FORMAT)) return d;
    return d * load_bytes(scales + sub_scale_at<FORMAT>(group % GROUPS, half) + p * PART_LANES);
}

template <Format FORMAT>
TUREEN_INLINE part offsets_at(const uint8_t* scales, int group, int p) {
    part m = load_halves(scales + 2 * TILE + 2 * p * PART_LANES);
    if constexpr (!is_super(FORMAT)) return m;
    return -(m * load_bytes(scales + sub_scale_at<FORMAT>(group % GROUPS, 0) + TILE + p * PART_LANES));
}

// Group after group: total = fma(float(exact sum of integers) * scale of the weights, scale of the inputs, total), then
// total = fma(offset, scaled sum of the inputs, total). A row's own scale comes last.
template <Format FORMAT, int ROWS>
void multiply_groups(const Block& block) {
    constexpr int BITS = tureen::bits_of(FORMAT), HALVES = FORMAT == Format::Q6_K ? 2 : 1;
    constexpr int ZERO = BITS == 8 ? 0 : zero_of(FORMAT);
    const Activations& x = block.x;
    const size_t stride = size_t(x.stride);
    for (int p = 0; p < PARTS; p++) {
        part totals[ROWS] = {};
        for (int group = 0; group < block.w.padded_cols / GROUP; group++) {
            const size_t at = block.first_input() + size_t(group) * GROUP;
            const uint8_t* scales = scales_of<FORMAT>(block, group);
            for (int half = 0; half < HALVES; half++) {
                int_part sums[ROWS] = {};
                dot<BITS, ROWS>(block.group(group, BITS), p, half * 4, 8 / HALVES, x.q + at + half * 16, stride, sums);
                part d = scales_at<FORMAT>(scales, group, half, p);
                for (int m = 0; m < ROWS; m++) {
                    size_t own = at + size_t(m) * stride;
                    if (ZERO != 0)
                        sums[m] -= ZERO * (HALVES == 2 ? x.half_sum[own / 16 + size_t(half)] : x.sum[own / GROUP]);
                    totals[m] =
                        fma(__builtin_convertvector(sums[m], part) * d, part_of(x.scale[own / GROUP]), totals[m]);
                }
            }
            if constexpr (has_offsets(FORMAT)) {
                part offsets = offsets_at<FORMAT>(scales, group, p);
                for (int m = 0; m < ROWS; m++) {
                    totals[m] = fma(offsets, part_of(x.scaled_sum[(at + size_t(m) * stride) / GROUP]), totals[m]);
                }
            }
        }
        if constexpr (FORMAT == Format::Q8_ROW) {
            part d = load_part<part>(block.tile + block.w.scales_offset + p * PART_BYTES);
            for (int m = 0; m < ROWS; m++) totals[m] *= d;
        }
        for (int m = 0; m < ROWS; m++) block.write(m, p, totals[m]);
    }
}

template <int ROWS>
void multiply_f32(const Block& block) {
    const float* x = block.x.f32 + block.first_input();
    const size_t stride = size_t(block.x.stride);
    part totals[ROWS][PARTS] = {};
    for (int i = 0; i < block.w.padded_cols; i++) {
        part weights[PARTS];
        for (int p = 0; p < PARTS; p++) weights[p] = load_part<part>(block.tile + (size_t(i) * PARTS + p) * PART_BYTES);
        for (int m = 0; m < ROWS; m++) {
            part input = part_of(x[size_t(m) * stride + size_t(i)]);
            for (int p = 0; p < PARTS; p++) totals[m][p] = fma(weights[p], input, totals[m][p]);
        }
    }
    for (int m = 0; m < ROWS; m++) {
        for (int p = 0; p < PARTS; p++) block.write(m, p, totals[m][p]);
    }
}

// Two inputs to a 32-bit lane: the first is its lower half.
TUREEN_INLINE part first_of_pairs(int_part pairs) { return float_of_bits(pairs << 16); }
TUREEN_INLINE part second_of_pairs(int_part pairs) { return float_of_bits(pairs & int32_t(0xffff0000)); }

template <int ROWS>
void multiply_bf16(const Block& block) {
    const uint16_t* x = block.x.bf16 + block.first_input();
    const size_t stride = size_t(block.x.stride);
    part totals[ROWS][PARTS] = {};
    for (int i = 0; i < block.w.padded_cols; i += 2) {
        int_part weights[PARTS];
        for (int p = 0; p < PARTS; p++)
            weights[p] = load_part<int_part>(block.tile + (size_t(i / 2) * PARTS + p) * PART_BYTES);
        for (int m = 0; m < ROWS; m++) {
            int32_t two;
            __builtin_memcpy(&two, x + size_t(m) * stride + size_t(i), sizeof two);
            int_part inputs = int_part_of(two);
            for (int p = 0; p < PARTS; p++) {
                totals[m][p] = fma(first_of_pairs(weights[p]), first_of_pairs(inputs), totals[m][p]);
                totals[m][p] = fma(second_of_pairs(weights[p]), second_of_pairs(inputs), totals[m][p]);
            }
        }
    }
    for (int m = 0; m < ROWS; m++) {
        for (int p = 0; p < PARTS; p++) block.write(m, p, totals[m][p]);
    }
}

template <int ROWS>
void multiply_block(const Block& block) {
    switch (block.w.format) {
        case Format::F32: return multiply_f32<ROWS>(block);
        case Format::BF16: return multiply_bf16<ROWS>(block);
        case Format::Q8_ROW: return multiply_groups<Format::Q8_ROW, ROWS>(block);
        case Format::Q8_0: return multiply_groups<Format::Q8_0, ROWS>(block);
        case Format::Q6_K: return multiply_groups<Format::Q6_K, ROWS>(block);
        case Format::Q5_K: return multiply_groups<Format::Q5_K, ROWS>(block);
        case Format::Q5_1: return multiply_groups<Format::Q5_1, ROWS>(block);
        case Format::Q5_0: return multiply_groups<Format::Q5_0, ROWS>(block);
        case Format::Q4_K: return multiply_groups<Format::Q4_K, ROWS>(block);
        case Format::Q4_1: return multiply_groups<Format::Q4_1, ROWS>(block);
        case Format::Q4_0: return multiply_groups<Format::Q4_0, ROWS>(block);
    }
}

void multiply_rows(const Matrix& w, const Activations& x, int m_begin, int m_end, int t, float* out, size_t out_stride,
                   bool add, const float* bias) {
    int first = t * TILE, rows = w.rows - first < TILE ? w.rows - first : TILE;
    for (int m = m_begin; m < m_end; m += BLOCK) {
        Block block{w,
                    w.tile(t),
                    x,
                    m,
                    out + size_t(m) * out_stride + first,
                    out_stride,
                    rows,
                    bias != nullptr ? bias + first : nullptr,
                    add};
        switch (m_end - m) {
            case 1: multiply_block<1>(block); break;
            case 2: multiply_block<2>(block); break;
            case 3: multiply_block<3>(block); break;
            default: multiply_block<BLOCK>(block);
        }
    }
}

void multiply(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile_begin, int tile_end, float* out,
              size_t out_stride, bool add, const float* bias) {
    for (int m = m_begin; m < m_end; m += CACHED) {
        int end = m_end - m < CACHED ? m_end : m + CACHED;
        for (int t = tile_begin; t < tile_end; t++) multiply_rows(w, x, m, end, t, out, out_stride, add, bias);
    }
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
