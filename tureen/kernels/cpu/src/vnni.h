// Integer products on x86 processors with VNNI: `vpdpbusd` adds four products to a sum in 32 bits.
#pragma once

#include "integers.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr bool HAS_SIGNED_WEIGHTS = false;

typedef Integers Inputs;

template <int QUAD>
TUREEN_INLINE Inputs inputs_at(const int8_t* group) {
    return (Inputs)int_part_of(tureen::load<int32_t>((const uint8_t*)group + 4 * QUAD));
}

template <int BITS, int SUMMED>
struct DotSum {
    static constexpr int REGISTERS = 1;
    int_part sum;

    TUREEN_INLINE void start(int32_t value) { sum = int_part_of(value); }

    template <int QUAD>
    TUREEN_INLINE void add(Integers w, Inputs x) {  // not the intrinsic, whose sums GCC spills to memory
        asm(TUREEN_ENCODED("vpdpbusd %2, %1, %0")
            : "+" TUREEN_VNNI_REGISTER(sum)
            : TUREEN_VNNI_REGISTER(w), TUREEN_VNNI_REGISTER(x));
    }

    TUREEN_INLINE int_part total() const { return sum; }
};

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
