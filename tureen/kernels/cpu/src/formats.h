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

constexpr int GROUPS = SUPER / GROUP;  // in a super

constexpr int bits_of(Format format) {
    switch (format) {
        case Format::F32: return 32;
        case Format::BF16: return 16;
        case Format::Q8_ROW:
        case Format::Q8_0: return 8;
        case Format::Q6_K: return 6;
        case Format::Q5_K:
        case Format::Q5_1:
        case Format::Q5_0: return 5;
        default: return 4;
    }
}

// What is taken off the integers. 0 where the format has an offset instead.
constexpr int zero_of(Format format) {
    switch (format) {
        case Format::Q8_ROW:
        case Format::Q8_0: return 128;
        case Format::Q6_K: return 32;
        case Format::Q5_0: return 16;
        case Format::Q4_0: return 8;
        default: return 0;
    }
}

constexpr bool is_super(Format format) {
    return format == Format::Q6_K || format == Format::Q5_K || format == Format::Q4_K;
}

constexpr bool has_offsets(Format format) {
    return format == Format::Q5_K || format == Format::Q4_K || format == Format::Q5_1 || format == Format::Q4_1;
}

constexpr int group_bytes(int bits) { return GROUP * TILE * bits / 8; }

// Bytes of scales of a group, or of a super where the format has them; of the whole tile in Q8_ROW.
constexpr int scale_bytes(Format format) {
    switch (format) {
        case Format::F32:
        case Format::BF16: return 0;
        case Format::Q8_ROW: return TILE * 4;
        case Format::Q6_K: return TILE * (2 + SUPER / 16);
        case Format::Q5_K:
        case Format::Q4_K: return TILE * (4 + 2 * GROUPS);
        default: return TILE * (has_offsets(format) ? 4 : 2);
    }
}

// From the begin of a super's scales to the 16 bytes that scale half `half` of a group. Offsets follow them.
template <Format FORMAT>
constexpr int sub_scale_at(int group, int half) {
    return FORMAT == Format::Q6_K ? 2 * TILE + (2 * group + half) * TILE : 4 * TILE + 2 * group * TILE;
}

}  // namespace
}  // namespace tureen
