// One row of a matrix as float32; the same for every instruction set.
#pragma once

#include "formats.h"

namespace tureen {
namespace {

// The 32 integers of row r in a group.
template <int BITS>
void integers_of_row(const uint8_t* group, int r, uint8_t* q) {
    for (int i = 0; i < GROUP; i++) {
        int quad = i / 4, lane = 4 * r + i % 4;
        if constexpr (BITS == 8) {
            q[i] = group[quad * 64 + lane];
            continue;
        }
        constexpr int LOW = BITS < 4 ? 2 : 4, SHARING = 8 / LOW;  // bits in the bytes that SHARING quads share
        int value = group[quad / SHARING * 64 + lane] >> (quad % SHARING * LOW) & ((1 << LOW) - 1);
        for (int bit = LOW; bit < BITS; bit++) {
            const uint8_t* bits = group + bit * 64 + quad * 8;
            value |= (bits[lane / 8] >> lane % 8 & 1) << bit;
        }
        q[i] = uint8_t(value);
    }
}

// What the integers of row r in half `half` of a group are multiplied with. `scales`: those of the tile.
template <Format FORMAT>
inline float scale_at(const uint8_t* scales, int group, int half, int r) {
    if constexpr (FORMAT == Format::Q8_ROW) return load<float>(scales + 4 * r);
    const uint8_t* own = scales + size_t(is_super(FORMAT) ? group / GROUPS : group) * size_t(scale_bytes(FORMAT));
    if constexpr (FORMAT == Format::MXFP4) return power_of_two(int8_t(own[r]));
    float d = half_at(own + 2 * r);
    if constexpr (!is_super(FORMAT)) return d;
    uint8_t scale = own[sub_scale_at<FORMAT>(group % GROUPS, half) + r];
    return d * (FORMAT == Format::Q2_K ? float(scale & 15) : float(int8_t(scale))) * sub_scale_unit(FORMAT);
}

// What is added then.
template <Format FORMAT>
inline float offset_at(const uint8_t* scales, int group, int half, int r) {
    const uint8_t* own = scales + size_t(is_super(FORMAT) ? group / GROUPS : group) * size_t(scale_bytes(FORMAT));
    float m = half_at(own + 2 * TILE + 2 * r);
    if constexpr (!is_super(FORMAT)) return m;
    const uint8_t* sub_scale = own + sub_scale_at<FORMAT>(group % GROUPS, half) + r;
    return -(m * float(FORMAT == Format::Q2_K ? *sub_scale >> 4 : sub_scale[TILE]));
}

template <Format FORMAT>
void unpack_integers(const Matrix& w, const uint8_t* tile, int r, float* out) {
    constexpr int BITS = bits_of(FORMAT);
    const uint8_t* scales = tile + w.scales_offset;
    for (int begin = 0, group = 0; begin < w.cols; begin += GROUP, group++) {
        uint8_t q[GROUP];
        integers_of_row<BITS>(tile + size_t(group) * group_bytes(BITS), r, q);
        for (int half = 0; half < 2; half++) {
            float offset = 0, d = scale_at<FORMAT>(scales, group, half, r);
            if constexpr (has_offsets(FORMAT)) offset = offset_at<FORMAT>(scales, group, half, r);
            for (int i = half * 16; i < half * 16 + 16 && begin + i < w.cols; i++) {
                int integer = has_table(FORMAT) ? table_of(w.format)[q[i]] : q[i];
                float value = d * float(integer - zero_of(FORMAT));
                out[begin + i] = has_offsets(FORMAT) ? value + offset : value;
            }
        }
    }
}

void unpack_row(const Matrix& w, int row, float* out) {
    const uint8_t* tile = w.tile(row / TILE);
    int r = row % TILE;
    switch (w.format) {
        case Format::F32:
            for (int i = 0; i < w.cols; i++) out[i] = load<float>(tile + (size_t(i) * TILE + r) * 4);
            return;
        case Format::BF16:
            for (int i = 0; i < w.cols; i++) {
                out[i] = bf16_to_float(load<uint16_t>(tile + ((size_t(i / 2) * TILE + r) * 2 + i % 2) * 2));
            }
            return;
        case Format::Q16:
            for (int i = 0; i < w.cols; i++) {
                float d = load<float>(tile + w.scales_offset + (size_t(i / SPAN) * TILE + r) * 4);
                out[i] = d * float(load<int16_t>(tile + ((size_t(i / 2) * TILE + r) * 2 + i % 2) * 2));
            }
            return;
        case Format::Q8_ROW: return unpack_integers<Format::Q8_ROW>(w, tile, r, out);
        case Format::Q8_0: return unpack_integers<Format::Q8_0>(w, tile, r, out);
        case Format::Q6_K: return unpack_integers<Format::Q6_K>(w, tile, r, out);
        case Format::Q5_K: return unpack_integers<Format::Q5_K>(w, tile, r, out);
        case Format::Q5_1: return unpack_integers<Format::Q5_1>(w, tile, r, out);
        case Format::Q5_0: return unpack_integers<Format::Q5_0>(w, tile, r, out);
        case Format::Q4_K: return unpack_integers<Format::Q4_K>(w, tile, r, out);
        case Format::Q4_1: return unpack_integers<Format::Q4_1>(w, tile, r, out);
        case Format::Q4_0: return unpack_integers<Format::Q4_0>(w, tile, r, out);
        case Format::MXFP4: return unpack_integers<Format::MXFP4>(w, tile, r, out);
        case Format::IQ4_NL: return unpack_integers<Format::IQ4_NL>(w, tile, r, out);
        case Format::IQ4_XS: return unpack_integers<Format::IQ4_XS>(w, tile, r, out);
        case Format::Q3_K: return unpack_integers<Format::Q3_K>(w, tile, r, out);
        case Format::Q2_K: return unpack_integers<Format::Q2_K>(w, tile, r, out);
        case Format::WIDE_IQ2:
        case Format::WIDE_IQ3_XXS:
        case Format::WIDE_IQ3_S: return unpack_integers<Format::WIDE_IQ2>(w, tile, r, out);
    }
}

}  // namespace
}  // namespace tureen
