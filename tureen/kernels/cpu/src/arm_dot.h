// Integer products on ARM: a dot product takes the four inputs of a quad from a register that holds four quads.
//
// Before it, an instruction set has defined how four products are added to each sum:
//     template <int BITS, int LANE> int32x4_t add_dot(int32x4_t sum, Integers w, Inputs x);
#pragma once

#include "integers.h"

namespace tureen {
namespace VARIANT {
namespace {

// Of 32 registers, 16 hold sums.
constexpr int PACKED_ROWS = 4, PACKED_BLOCK = 4;
constexpr int PANEL_BLOCK = 4, PANEL_TILES = 1;
constexpr int PLAIN_BLOCK = 4, PLAIN_TILES = 1;

template <int QUAD>
TUREEN_INLINE Inputs inputs_at(const int8_t* group) {
    return vld1q_s8(group + QUAD / 4 * 16);
}

template <int BITS, int SUMMED>
struct DotSum {
    static constexpr int REGISTERS = 1;
    int32x4_t sum;

    TUREEN_INLINE void start(int32_t value) { sum = vdupq_n_s32(value); }

    template <int QUAD>
    TUREEN_INLINE void add(Integers w, Inputs x) {
        sum = add_dot<BITS, QUAD % 4>(sum, w, x);
    }

    TUREEN_INLINE int_part total() const { return (int_part)sum; }
};

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
