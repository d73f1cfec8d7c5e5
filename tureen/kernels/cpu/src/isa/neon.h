// ARMv8.2 with dot products and half floats: Apple M1, Graviton 2 and later.
// order: 10
// machine: aarch64
// needs: asimddp asimdhp
// flags: -march=armv8.2-a+dotprod+fp16 -fno-schedule-insns
// defines: TUREEN_ARM
#pragma once

#include "../integers.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int PACKED_ROWS = 4, PACKED_BLOCK = 4;
constexpr int PANEL_BLOCK = 4, PANEL_TILES = 1;
constexpr int PLAIN_BLOCK = 4, PLAIN_TILES = 1;
constexpr bool HAS_SIGNED_WEIGHTS = true;  // `sdot` has no unsigned operand

typedef int8x16_t Inputs;  // of the four quads that this one is among

template <int QUAD>
TUREEN_INLINE Inputs inputs_at(const int8_t* group) {
    return vld1q_s8(group + QUAD / 4 * 16);
}

template <int BITS>
struct DotSum {
    static constexpr int REGISTERS = 1;
    int32x4_t sum;

    TUREEN_INLINE void start(int32_t value) { sum = vdupq_n_s32(value); }

    template <int QUAD>
    TUREEN_INLINE void add(Integers w, Inputs x) {
        int8x16_t q = vreinterpretq_s8_u8(BITS == 8 ? veorq_u8(w, vdupq_n_u8(128)) : w);
        sum = vdotq_laneq_s32(sum, q, x, QUAD % 4);
    }

    TUREEN_INLINE int_part total() const { return (int_part)sum; }
};

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
