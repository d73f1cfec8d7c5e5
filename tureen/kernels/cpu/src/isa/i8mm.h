// ARMv8.2 with matrix products of bytes: Graviton 3 and later, Ampere One.
// order: 20
// machine: aarch64
// needs: asimddp asimdhp i8mm
// flags: -march=armv8.2-a+dotprod+fp16+i8mm -fno-schedule-insns
// defines: TUREEN_ARM
// rest: neon
// attention: neon
// chosen: by name
#pragma once

#include "../integers.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr bool HAS_SIGNED_WEIGHTS = false;

typedef int8x16_t Inputs;  // of the four quads that a quad is among

template <int BITS, int LANE>
TUREEN_INLINE int32x4_t add_dot(int32x4_t sum, Integers w, Inputs x) {
    return vusdotq_laneq_s32(sum, w, x, LANE);
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen

#include "../arm_dot.h"

namespace tureen {
namespace VARIANT {
namespace {

// `usmmla` multiplies 2 outputs x 8 inputs by 8 inputs x 2 rows: twice the products of a dot product.
#define TUREEN_OWN_CELL
template <int BITS, int SUMMED>
struct Cell {
    static constexpr int ROWS = 2, QUADS = 2;
    struct Weights {
        Integers low, high;  // of outputs 0 and 1, and 2 and 3: 8 inputs each
    };
    int32x4_t low, high;  // [output][row]

    // Two quads of 4 outputs, one after the other in a panel -> for each output its 8 inputs.
    TUREEN_INLINE static void arrange(uint8_t* quads) {
        uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(quads)), b = vreinterpretq_u32_u8(vld1q_u8(quads + 64));
        vst1q_u8(quads, vreinterpretq_u8_u32(vzip1q_u32(a, b)));
        vst1q_u8(quads + 64, vreinterpretq_u8_u32(vzip2q_u32(a, b)));
    }
    TUREEN_INLINE static Weights weights_at(const uint8_t* quads) { return {vld1q_u8(quads), vld1q_u8(quads + 64)}; }

    template <int QUAD>
    TUREEN_INLINE static Inputs inputs_at(const int8_t* group, size_t stride) {
        return vcombine_s8(vld1_s8(group + 4 * QUAD), vld1_s8(group + stride + 4 * QUAD));
    }

    TUREEN_INLINE void start(const int32_t* values) {
        int32x2_t two = vld1_s32(values);
        low = high = vcombine_s32(two, two);
    }

    template <int QUAD>
    TUREEN_INLINE void add(Weights w, Inputs x) {
        low = vusmmlaq_s32(low, w.low, x);
        high = vusmmlaq_s32(high, w.high, x);
    }

    TUREEN_INLINE int_part total(int row) const {
        return (int_part)(row == 0 ? vuzp1q_s32(low, high) : vuzp2q_s32(low, high));
    }
};

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
