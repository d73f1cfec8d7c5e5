// Integer products on x86 processors without VNNI: `vpmaddubsw` adds two neighbouring products in 16 bits.
#pragma once

#include "integers.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr bool HAS_SIGNED_WEIGHTS = false;

#if defined(TUREEN_512)
TUREEN_INLINE Integers broadcast_quad(const int8_t* x) {
    return _mm512_set1_epi32(tureen::load<int32_t>((const uint8_t*)x));
}
TUREEN_INLINE int_part sum_pairs(Integers pairs, int16_t times) {
    return (int_part)_mm512_madd_epi16(pairs, _mm512_set1_epi16(times));
}
#else
TUREEN_INLINE Integers broadcast_quad(const int8_t* x) {
    return _mm256_set1_epi32(tureen::load<int32_t>((const uint8_t*)x));
}
TUREEN_INLINE int_part sum_pairs(Integers pairs, int16_t times) {
    return (int_part)_mm256_madd_epi16(pairs, _mm256_set1_epi16(times));
}
#endif

// Not intrinsics: GCC would move the products away from their sums, and spill them to memory.
template <bool IS_FIRST>
TUREEN_INLINE void add_products(Integers& pairs, Integers w, Integers x) {
    if constexpr (IS_FIRST) {
        asm("vpmaddubsw %2, %1, %0" : "=v"(pairs) : "v"(w), "v"(x));
    } else {
        Integers products;
        asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(pairs), "=&v"(products) : "v"(w), "v"(x));
    }
}

typedef Integers Inputs;

template <int QUAD>
TUREEN_INLINE Inputs inputs_at(const int8_t* group) {
    return broadcast_quad(group + 4 * QUAD);
}

// Pairs are summed in 16 bits, of as many quads as fit, before they become sums in 32 bits.
template <int BITS, int SUMMED>
struct DotSum {
    static constexpr int MOST = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;  // MOST * 2 * (2^BITS - 1) * 127 < 2^15
    static constexpr int FIT = MOST < SUMMED ? MOST : SUMMED;
    static constexpr int REGISTERS = BITS == 4 ? 1 : 2;
    int32_t first;
    int_part sum;
    Integers pairs;

    TUREEN_INLINE void start(int32_t value) { first = value; }

    template <int QUAD>
    TUREEN_INLINE void add(Integers w, Inputs x) {
        constexpr bool IS_FIRST = QUAD % SUMMED < FIT;
        add_products<QUAD % FIT == 0>(pairs, w, x);
        if ((QUAD + 1) % FIT == 0) sum = IS_FIRST ? sum_pairs(pairs, 1) : sum + sum_pairs(pairs, 1);
    }

    TUREEN_INLINE int_part total() const { return sum + int_part_of(first); }
};

// A pair of products of 8 bits does not fit: the two halves of an integer are multiplied each for itself.
template <int SUMMED>
struct DotSum<8, SUMMED> {
    static constexpr int REGISTERS = 2;
    int32_t first;
    Integers low, high;

    TUREEN_INLINE void start(int32_t value) { first = value; }

    template <int QUAD>
    TUREEN_INLINE void add(Integers w, Inputs x) {
        add_products<QUAD % SUMMED == 0>(low, low_nibbles(w), x);
        add_products<QUAD % SUMMED == 0>(high, high_nibbles(w), x);
    }

    TUREEN_INLINE int_part total() const { return int_part_of(first) + sum_pairs(low, 1) + sum_pairs(high, 16); }
};

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
