// Any processor: the compiler's vector types, no instructions by name.
// order: 0
// machine: any
// model needs: fma
// model flags: -mfma
#pragma once

#include "../integers.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int PACKED_ROWS = 2, PACKED_BLOCK = 2;
constexpr int PANEL_BLOCK = 2, PANEL_TILES = 1;
constexpr int PLAIN_BLOCK = 4, PLAIN_TILES = 1;
constexpr bool HAS_SIGNED_WEIGHTS = false;

typedef int16_t words __attribute__((vector_size(16)));
typedef uint8_t half_integers __attribute__((vector_size(8)));
typedef int8_t half_inputs __attribute__((vector_size(8)));

// The 4 inputs of a quad, twice.
typedef words Inputs;

template <int QUAD>
TUREEN_INLINE Inputs inputs_at(const int8_t* group) {
    const uint64_t four = tureen::load<uint32_t>((const uint8_t*)group + 4 * QUAD);
    return __builtin_convertvector((half_inputs)(four << 32 | four), words);
}

// Products are summed in 16 bits, of as many quads as fit; then four neighbours make a sum in 32 bits.
template <int BITS, int SUMMED>
struct DotSum {
    static constexpr int MOST = BITS <= 5 ? 8 : BITS == 6 ? 4 : 1;  // MOST * (2^BITS - 1) * 127 < 2^15
    static constexpr int FIT = MOST < SUMMED ? MOST : SUMMED;
    static constexpr int REGISTERS = 2;
    int_part sum;
    words low, high;

    TUREEN_INLINE void start(int32_t value) { sum = int_part_of(value); }

    template <int QUAD>
    TUREEN_INLINE void add(Integers w, Inputs x) {
        half_integers halves[2];
        __builtin_memcpy(halves, &w, sizeof w);
        const words a = __builtin_convertvector(halves[0], words) * x,
                    b = __builtin_convertvector(halves[1], words) * x;
        low = QUAD % FIT == 0 ? a : low + a;
        high = QUAD % FIT == 0 ? b : high + b;
        if ((QUAD + 1) % FIT == 0) sum += sum_quads(low, high);
    }

    TUREEN_INLINE int_part total() const { return sum; }

    // [2 outputs][4 inputs] and two more outputs -> [4 outputs]
    TUREEN_INLINE static int_part sum_quads(words a, words b) {
        int_part x = ((int_part)a << 16 >> 16) + ((int_part)a >> 16);
        int_part y = ((int_part)b << 16 >> 16) + ((int_part)b >> 16);
        return int_part{x[0], x[2], y[0], y[2]} + int_part{x[1], x[3], y[1], y[3]};
    }
};

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
