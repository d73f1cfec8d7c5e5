// Integer products with AVX2.
#pragma once

#include "formats.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {
namespace {

TUREEN_INLINE __m256i load_register(const uint8_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
}

TUREEN_INLINE part load_halves(const uint8_t* from) {
    return (part)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

TUREEN_INLINE part load_bytes(const uint8_t* from) {
    return (part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

// The four inputs of a quad in every lane.
TUREEN_INLINE __m256i broadcast_quad(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

// 32 bits -> 32 bytes: 1 << bit, or 0.
TUREEN_INLINE __m256i spread_bits(const uint8_t* from, int bit) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    int32_t bits;
    __builtin_memcpy(&bits, from, 4);
    __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of), bit_of);
    return _mm256_and_si256(_mm256_cmpeq_epi8(bytes, bit_of), _mm256_set1_epi8(char(1 << bit)));
}

// The integers of a quad, in part p of the 16 rows. BITS < 8.
template <int BITS>
TUREEN_INLINE __m256i load_quad(const uint8_t* group, int quad, int p) {
    __m256i packed = load_register(group + quad / 2 * 64 + p * 32);
    __m256i q = _mm256_and_si256(quad % 2 ? _mm256_srli_epi16(packed, 4) : packed, _mm256_set1_epi8(15));
    for (int bit = 4; bit < BITS; bit++) {
        q = _mm256_or_si256(q, spread_bits(group + 256 + (bit - 4) * 64 + quad * 8 + p * 4, bit));
    }
    return q;
}

// Sums of two neighbouring products each, in 16 bits.
template <int BITS, int ROWS>
TUREEN_INLINE void dot(const uint8_t* group, int p, int quad, int quads, const int8_t* x, size_t stride,
                       int_part* sums) {
    constexpr int FIT = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;  // quads whose sums fit together
    for (int begin = 0; begin < quads; begin += FIT) {
        __m256i pairs[ROWS] = {};
        for (int i = begin; i < begin + FIT && i < quads; i++) {
            if constexpr (BITS == 8) {  // |q| <= 128 times ±x: the product of an unsigned and a signed number
                __m256i q = _mm256_xor_si256(load_register(group + (quad + i) * 64 + p * 32), _mm256_set1_epi8(-128));
                __m256i magnitude = _mm256_abs_epi8(q);
                for (int m = 0; m < ROWS; m++) {
                    __m256i signed_x = _mm256_sign_epi8(broadcast_quad(x + size_t(m) * stride + 4 * i), q);
                    pairs[m] = _mm256_maddubs_epi16(magnitude, signed_x);
                }
            } else {
                __m256i q = load_quad<BITS>(group, quad + i, p);
                for (int m = 0; m < ROWS; m++) {
                    __m256i products = _mm256_maddubs_epi16(q, broadcast_quad(x + size_t(m) * stride + 4 * i));
                    pairs[m] = _mm256_add_epi16(pairs[m], products);
                }
            }
        }
        for (int m = 0; m < ROWS; m++) sums[m] += (int_part)_mm256_madd_epi16(pairs[m], _mm256_set1_epi16(1));
    }
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
