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
TUREEN_INLINE Integers pairs_of(Integers w, Integers x) { return _mm512_maddubs_epi16(w, x); }
TUREEN_INLINE Integers add_pairs(Integers a, Integers b) { return _mm512_add_epi16(a, b); }
TUREEN_INLINE int_part sum_pairs(Integers pairs, int16_t times) {
    return (int_part)_mm512_madd_epi16(pairs, _mm512_set1_epi16(times));
}
#else
TUREEN_INLINE Integers broadcast_quad(const int8_t* x) {
    return _mm256_set1_epi32(tureen::load<int32_t>((const uint8_t*)x));
}
TUREEN_INLINE Integers pairs_of(Integers w, Integers x) { return _mm256_maddubs_epi16(w, x); }
TUREEN_INLINE Integers add_pairs(Integers a, Integers b) { return _mm256_add_epi16(a, b); }
TUREEN_INLINE int_part sum_pairs(Integers pairs, int16_t times) {
    return (int_part)_mm256_madd_epi16(pairs, _mm256_set1_epi16(times));
}
#endif

typedef Integers Inputs;

template <int QUAD>
TUREEN_INLINE Inputs inputs_at(const int8_t* group) {
    return broadcast_quad(group + 4 * QUAD);
}

// Pairs are summed in 16 bits, of as many quads as fit, before they become sums in 32 bits.
template <int BITS>
struct DotSum {
    static constexpr int FIT = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;  // FIT * 2 * (2^BITS - 1) * 127 < 2^15
    int_part sum;
    Integers pairs;

    TUREEN_INLINE void start(int32_t value) { sum = int_part_of(value); }

    template <int QUAD>
    TUREEN_INLINE void add(Integers w, Inputs x) {
        const Integers products = pairs_of(w, x);
        pairs = QUAD % FIT == 0 ? products : add_pairs(pairs, products);
        if ((QUAD + 1) % FIT == 0) sum += sum_pairs(pairs, 1);
    }

    TUREEN_INLINE int_part total() const { return sum; }
};

// A pair of products of 8 bits does not fit: the two halves of an integer are multiplied each for itself.
template <>
struct DotSum<8> {
    DotSum<4> low, high;

    TUREEN_INLINE void start(int32_t value) { low.start(value); }

    template <int QUAD>
    TUREEN_INLINE void add(Integers w, Inputs x) {
        const Integers a = pairs_of(low_nibbles(w), x), b = pairs_of(high_nibbles(w), x);
        low.pairs = QUAD == 0 ? a : add_pairs(low.pairs, a);
        high.pairs = QUAD == 0 ? b : add_pairs(high.pairs, b);
    }

    TUREEN_INLINE int_part total() const { return low.sum + sum_pairs(low.pairs, 1) + sum_pairs(high.pairs, 16); }
};

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
