// Where a matrix's integers and scales lie, and small floats. Everything here is private to the file that includes it,
// so that each instruction set compiles its own.
#pragma once

#include <cstring>

#include "matrix.h"

namespace tureen {
namespace {

template <class T>
inline T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff, bits;
    if (magnitude < 0x400) {  // subnormal
        float value = float(magnitude) * 0x1p-24f;
        std::memcpy(&bits, &value, 4);
    } else {
        bits = (magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23);
    }
    bits |= sign;
    return load<float>(reinterpret_cast<uint8_t*>(&bits));
}

inline float half_at(const uint8_t* from) { return half_to_float(load<uint16_t>(from)); }

inline float bf16_to_float(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    return load<float>(reinterpret_cast<uint8_t*>(&bits));
}

// 2^exponent, for -128 to 127: the least ones are subnormal.
inline float power_of_two(int exponent) { return __builtin_ldexpf(1.0f, exponent); }

constexpr int GROUPS = SUPER / GROUP;  // in a super

constexpr int bits_of(Format format) {
    switch (format) {
        case Format::F32: return 32;
        case Format::BF16:
        case Format::Q16: return 16;
        case Format::Q8_ROW:
        case Format::Q8_0: return 8;
        case Format::Q6_K: return 6;
        case Format::Q5_K:
        case Format::Q5_1:
        case Format::Q5_0: return 5;
        case Format::Q3_K: return 3;
        case Format::Q2_K: return 2;
        default: return 4;
    }
}

// The values that the 4 bits of a format stand for, plus `zero_of`.
constexpr uint8_t MXFP4_TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t IQ4_TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

constexpr uint8_t WIDE_IQ2_TABLE[16] = {128, 129, 135, 136, 137, 144, 153, 171, 128, 127, 121, 120, 119, 112, 103, 85};
constexpr uint8_t WIDE_IQ3_XXS_TABLE[16] = {136, 152, 168, 184, 200, 216, 232, 252, 120, 104, 88, 72, 56, 40, 24, 4};
constexpr uint8_t WIDE_IQ3_S_TABLE[16] = {136, 152, 168, 184, 200, 216, 232, 248, 120, 104, 88, 72, 56, 40, 24, 8};

constexpr bool is_wide(Format format) {
    return format == Format::WIDE_IQ2 || format == Format::WIDE_IQ3_XXS || format == Format::WIDE_IQ3_S;
}

constexpr bool has_table(Format format) {
    return format == Format::MXFP4 || format == Format::IQ4_NL || format == Format::IQ4_XS || is_wide(format);
}

inline const uint8_t* table_of(Format format) {
    switch (format) {
        case Format::MXFP4: return MXFP4_TABLE;
        case Format::WIDE_IQ2: return WIDE_IQ2_TABLE;
        case Format::WIDE_IQ3_XXS: return WIDE_IQ3_XXS_TABLE;
        case Format::WIDE_IQ3_S: return WIDE_IQ3_S_TABLE;
        default: return IQ4_TABLE;
    }
}

// What sub-scales are multiples of.
constexpr float sub_scale_unit(Format format) { return is_wide(format) ? 0.125f : 1.0f; }

// Bits that products need: those of a table's entries.
constexpr int sum_bits_of(Format format) {
    if (has_table(format)) return format == Format::MXFP4 ? 5 : 8;
    switch (format) {
        case Format::Q3_K:
        case Format::Q2_K: return 4;
        default: return bits_of(format);
    }
}

// What is taken off the integers. 0 where the format has an offset instead.
constexpr int zero_of(Format format) {
    if (has_table(format)) return format == Format::MXFP4 ? 12 : 128;
    switch (format) {
        case Format::Q8_ROW:
        case Format::Q8_0: return 128;
        case Format::Q6_K: return 32;
        case Format::Q5_0: return 16;
        case Format::Q4_0: return 8;
        case Format::Q3_K: return 4;
        default: return 0;
    }
}

constexpr bool is_super(Format format) {
    return format == Format::Q6_K || format == Format::Q5_K || format == Format::Q4_K || format == Format::IQ4_XS ||
           format == Format::Q3_K || format == Format::Q2_K || is_wide(format);
}

constexpr bool has_offsets(Format format) {
    return format == Format::Q5_K || format == Format::Q4_K || format == Format::Q2_K || format == Format::Q5_1 ||
           format == Format::Q4_1;
}

// Parts of a group that have a scale each.
constexpr int halves_of(Format format) {
    return format == Format::Q6_K || format == Format::Q3_K || format == Format::Q2_K || is_wide(format) ? 2 : 1;
}

constexpr int group_bytes(int bits) { return GROUP * TILE * bits / 8; }

// Bytes of scales of a group, or of a super where the format has them; of the whole tile in Q8_ROW.
constexpr int scale_bytes(Format format) {
    if (is_wide(format)) return TILE * (2 + SUPER / 16);
    switch (format) {
        case Format::F32:
        case Format::BF16: return 0;
        case Format::Q8_ROW:
        case Format::Q16: return TILE * 4;
        case Format::Q6_K:
        case Format::Q3_K: return TILE * (2 + SUPER / 16);
        case Format::Q2_K: return TILE * (4 + SUPER / 16);
        case Format::IQ4_XS: return TILE * (2 + GROUPS);
        case Format::MXFP4: return TILE;
        case Format::Q5_K:
        case Format::Q4_K: return TILE * (4 + 2 * GROUPS);
        default: return TILE * (has_offsets(format) ? 4 : 2);
    }
}

// From the begin of a super's scales to the 16 bytes that scale half `half` of a group. Offsets follow them, except in
// Q2_K, which has both in the same bytes.
template <Format FORMAT>
constexpr int sub_scale_at(int group, int half) {
    if (FORMAT == Format::Q4_K || FORMAT == Format::Q5_K) return 4 * TILE + 2 * group * TILE;
    return (FORMAT == Format::Q2_K ? 4 : 2) * TILE + (halves_of(FORMAT) == 2 ? 2 * group + half : group) * TILE;
}

}  // namespace
}  // namespace tureen
