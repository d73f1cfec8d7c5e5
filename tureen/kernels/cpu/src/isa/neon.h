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

constexpr bool HAS_SIGNED_WEIGHTS = true;  // `sdot` has no unsigned operand

typedef int8x16_t Inputs;  // of the four quads that a quad is among

template <int BITS, int LANE>
TUREEN_INLINE int32x4_t add_dot(int32x4_t sum, Integers w, Inputs x) {
    return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(BITS == 8 ? veorq_u8(w, vdupq_n_u8(128)) : w), x, LANE);
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen

#include "../arm_dot.h"
