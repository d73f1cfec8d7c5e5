// Integer products without intrinsics. A part is 4 rows: 16 integers of a quad, in two registers of 16-bit lanes.
#pragma once

#include "formats.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {
namespace {

typedef int16_t words __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(8)));
typedef int8_t signed_bytes __attribute__((vector_size(8)));

TUREEN_INLINE part load_halves(const uint8_t* from) {
    return part{half_at(from), half_at(from + 2), half_at(from + 4), half_at(from + 6)};
}

TUREEN_INLINE part load_bytes(const uint8_t* from) {
    return part{float(int8_t(from[0])), float(int8_t(from[1])), float(int8_t(from[2])), float(int8_t(from[3]))};
}

TUREEN_INLINE words load_words(const uint8_t* from) {
    return __builtin_convertvector(tureen::load<bytes>(from), words);
}

// 8 bits -> 8 words: 1 << bit, or 0.
TUREEN_INLINE words spread_bits(uint8_t bits, int bit) {
    const words bit_of = {1, 2, 4, 8, 16, 32, 64, 128};
    const int16_t value = int16_t(1 << bit);
    return ((words{} + int16_t(bits)) & bit_of) == bit_of ? words{} + value : words{};
}

// The integers of rows 2 h and 2 h + 1 of part p in a quad.
template <int BITS>
TUREEN_INLINE words load_quad(const uint8_t* group, int quad, int p, int h) {
    int at = 16 * p + 8 * h;
    if constexpr (BITS == 8) return load_words(group + quad * 64 + at) - 128;
    words q = (load_words(group + quad / 2 * 64 + at) >> quad % 2 * 4) & 15;
    for (int bit = 4; bit < BITS; bit++) q |= spread_bits(group[256 + (bit - 4) * 64 + quad * 8 + at / 8], bit);
    return q;
}

// The four inputs of a quad, twice.
TUREEN_INLINE words repeat_quad(const int8_t* x) {
    uint32_t four = tureen::load<uint32_t>(reinterpret_cast<const uint8_t*>(x));
    uint64_t twice = uint64_t(four) << 32 | four;
    return __builtin_convertvector((signed_bytes)twice, words);
}

// Sums of four neighbours: [2 r][4 b] and two more rows -> [4 r].
TUREEN_INLINE int_part sum_quads(words a, words b) {
    int_part x = ((int_part)a << 16 >> 16) + ((int_part)a >> 16), y = ((int_part)b << 16 >> 16) + ((int_part)b >> 16);
    return int_part{x[0], x[2], y[0], y[2]} + int_part{x[1], x[3], y[1], y[3]};
}

template <int BITS, int ROWS>
TUREEN_INLINE void dot(const uint8_t* group, int p, int quad, int quads, const int8_t* x, size_t stride,
                       int_part* sums) {
    constexpr int FIT = BITS <= 5 ? 8 : BITS == 6 ? 4 : 2;  // products that fit 16 bits together
    for (int begin = 0; begin < quads; begin += FIT) {
        words products[ROWS][2] = {};
        for (int i = begin; i < begin + FIT; i++) {
            words low = load_quad<BITS>(group, quad + i, p, 0), high = load_quad<BITS>(group, quad + i, p, 1);
            for (int m = 0; m < ROWS; m++) {
                words inputs = repeat_quad(x + size_t(m) * stride + 4 * i);
                products[m][0] += low * inputs;
                products[m][1] += high * inputs;
            }
        }
        for (int m = 0; m < ROWS; m++) sums[m] += sum_quads(products[m][0], products[m][1]);
    }
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
