// Integer products with NEON's dot product instructions (Armv8.2).
#pragma once

#include "formats.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {
namespace {

TUREEN_INLINE part load_halves(const uint8_t* from) { return (part)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }

TUREEN_INLINE part load_bytes(const uint8_t* from) {
    return part{float(int8_t(from[0])), float(int8_t(from[1])), float(int8_t(from[2])), float(int8_t(from[3]))};
}

// 16 bits -> 16 bytes: 1 << bit, or 0.
TUREEN_INLINE uint8x16_t spread_bits(const uint8_t* from, int bit) {
    const uint8x16_t bit_of = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    uint8x16_t bytes = vcombine_u8(vdup_n_u8(from[0]), vdup_n_u8(from[1]));
    return vandq_u8(vtstq_u8(bytes, bit_of), vdupq_n_u8(uint8_t(1 << bit)));
}

// The integers of a quad, in part p of the 16 rows.
template <int BITS>
TUREEN_INLINE int8x16_t load_quad(const uint8_t* group, int quad, int p) {
    if constexpr (BITS == 8)
        return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(group + quad * 64 + p * 16), vdupq_n_u8(128)));
    uint8x16_t packed = vld1q_u8(group + quad / 2 * 64 + p * 16);
    uint8x16_t q = quad % 2 ? vshrq_n_u8(packed, 4) : vandq_u8(packed, vdupq_n_u8(15));
    for (int bit = 4; bit < BITS; bit++) {
        q = vorrq_u8(q, spread_bits(group + 256 + (bit - 4) * 64 + quad * 8 + p * 2, bit));
    }
    return vreinterpretq_s8_u8(q);
}

template <int BITS, int ROWS>
TUREEN_INLINE void dot(const uint8_t* group, int p, int quad, int quads, const int8_t* x, size_t stride,
                       int_part* sums) {
    for (int i = 0; i < quads; i += 4) {
        int8x16_t q0 = load_quad<BITS>(group, quad + i, p), q1 = load_quad<BITS>(group, quad + i + 1, p);
        int8x16_t q2 = load_quad<BITS>(group, quad + i + 2, p), q3 = load_quad<BITS>(group, quad + i + 3, p);
        for (int m = 0; m < ROWS; m++) {
            int8x16_t inputs = vld1q_s8(x + size_t(m) * stride + 4 * i);
            int32x4_t sum = (int32x4_t)sums[m];
            sum = vdotq_laneq_s32(sum, q0, inputs, 0);
            sum = vdotq_laneq_s32(sum, q1, inputs, 1);
            sum = vdotq_laneq_s32(sum, q2, inputs, 2);
            sum = vdotq_laneq_s32(sum, q3, inputs, 3);
            sums[m] = (int_part)sum;
        }
    }
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
