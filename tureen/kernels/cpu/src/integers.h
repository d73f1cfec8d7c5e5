// A quad's integers in one register: for each of PART_LANES outputs, the weights of 4 neighbouring inputs as bytes.
//
// For the files that are compiled once for each instruction set; it depends on the width of the registers only.
#pragma once

#include "formats.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {
namespace {

#if defined(TUREEN_512)

typedef __m512i Integers;
TUREEN_INLINE Integers load_integers(const uint8_t* from) { return _mm512_loadu_si512(from); }
TUREEN_INLINE void store_integers(uint8_t* to, Integers q) { _mm512_storeu_si512(to, q); }
TUREEN_INLINE Integers low_nibbles(Integers q) { return _mm512_and_si512(q, _mm512_set1_epi8(15)); }
TUREEN_INLINE Integers high_nibbles(Integers q) { return low_nibbles(_mm512_srli_epi16(q, 4)); }
TUREEN_INLINE Integers two_bits(Integers q, int from) {
    return _mm512_and_si512(_mm512_srli_epi16(q, unsigned(from)), _mm512_set1_epi8(3));
}
TUREEN_INLINE Integers load_table(const uint8_t* from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
}
TUREEN_INLINE Integers looked_up(Integers table, Integers q) { return _mm512_shuffle_epi8(table, q); }
// q with bit `bit` set where the packed bits (a bit for each byte) have a 1; it was 0.
TUREEN_INLINE Integers with_bits(Integers q, const uint8_t* packed, int bit) {
    return _mm512_mask_add_epi8(q, tureen::load<__mmask64>(packed), q, _mm512_set1_epi8(char(1 << bit)));
}
TUREEN_INLINE part load_halves(const uint8_t* from) {
    return (part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
TUREEN_INLINE part load_bytes(const uint8_t* from) {
    return (part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
}

#elif defined(TUREEN_256)

typedef __m256i Integers;
TUREEN_INLINE Integers load_integers(const uint8_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
TUREEN_INLINE void store_integers(uint8_t* to, Integers q) { _mm256_storeu_si256((__m256i*)to, q); }
TUREEN_INLINE Integers low_nibbles(Integers q) { return _mm256_and_si256(q, _mm256_set1_epi8(15)); }
TUREEN_INLINE Integers high_nibbles(Integers q) { return low_nibbles(_mm256_srli_epi16(q, 4)); }
TUREEN_INLINE Integers two_bits(Integers q, int from) {
    return _mm256_and_si256(_mm256_srli_epi16(q, from), _mm256_set1_epi8(3));
}
TUREEN_INLINE Integers load_table(const uint8_t* from) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
}
TUREEN_INLINE Integers looked_up(Integers table, Integers q) { return _mm256_shuffle_epi8(table, q); }
TUREEN_INLINE Integers with_bits(Integers q, const uint8_t* packed, int bit) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(tureen::load<int32_t>(packed)), byte_of);
    __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
    return _mm256_or_si256(q, _mm256_and_si256(is_set, _mm256_set1_epi8(char(1 << bit))));
}
TUREEN_INLINE part load_halves(const uint8_t* from) {
    return (part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
TUREEN_INLINE part load_bytes(const uint8_t* from) {
    return (part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}

#elif defined(TUREEN_ARM)

typedef uint8x16_t Integers;
TUREEN_INLINE Integers load_integers(const uint8_t* from) { return vld1q_u8(from); }
TUREEN_INLINE void store_integers(uint8_t* to, Integers q) { vst1q_u8(to, q); }
TUREEN_INLINE Integers low_nibbles(Integers q) { return vandq_u8(q, vdupq_n_u8(15)); }
TUREEN_INLINE Integers high_nibbles(Integers q) { return vshrq_n_u8(q, 4); }
TUREEN_INLINE Integers two_bits(Integers q, int from) { return vandq_u8(q >> from, vdupq_n_u8(3)); }
TUREEN_INLINE Integers load_table(const uint8_t* from) { return vld1q_u8(from); }
TUREEN_INLINE Integers looked_up(Integers table, Integers q) { return vqtbl1q_u8(table, q); }
TUREEN_INLINE Integers with_bits(Integers q, const uint8_t* packed, int bit) {
    const uint8x16_t bit_of = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    uint8x16_t bytes = vcombine_u8(vdup_n_u8(packed[0]), vdup_n_u8(packed[1]));
    return vorrq_u8(q, vandq_u8(vtstq_u8(bytes, bit_of), vdupq_n_u8(uint8_t(1 << bit))));
}
TUREEN_INLINE part load_halves(const uint8_t* from) { return (part)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
TUREEN_INLINE part load_bytes(const uint8_t* from) {
    const int8x8_t bytes = vreinterpret_s8_u32(vdup_n_u32(tureen::load<uint32_t>(from)));
    return (part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}

#else

typedef uint8_t Integers __attribute__((vector_size(16)));
typedef uint8_t loose_integers __attribute__((vector_size(16), aligned(1), may_alias));
TUREEN_INLINE Integers load_integers(const uint8_t* from) { return *(const loose_integers*)from; }
TUREEN_INLINE void store_integers(uint8_t* to, Integers q) { *(loose_integers*)to = q; }
TUREEN_INLINE Integers low_nibbles(Integers q) { return q & 15; }
TUREEN_INLINE Integers high_nibbles(Integers q) { return q >> 4; }
TUREEN_INLINE Integers two_bits(Integers q, int from) { return (q >> from) & 3; }
TUREEN_INLINE Integers load_table(const uint8_t* from) { return load_integers(from); }
TUREEN_INLINE Integers looked_up(Integers table, Integers q) {
    for (int i = 0; i < PART_BYTES; i++) q[i] = table[q[i]];
    return q;
}
TUREEN_INLINE Integers with_bits(Integers q, const uint8_t* packed, int bit) {
    const Integers bit_of = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8_t a = packed[0], b = packed[1], value = uint8_t(1 << bit);
    const Integers bytes = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
    return q | ((Integers)((bytes & bit_of) == bit_of) & value);
}
TUREEN_INLINE part load_halves(const uint8_t* from) {
    return part{half_at(from), half_at(from + 2), half_at(from + 4), half_at(from + 6)};
}
TUREEN_INLINE part load_bytes(const uint8_t* from) {
    return part{float(int8_t(from[0])), float(int8_t(from[1])), float(int8_t(from[2])), float(int8_t(from[3]))};
}

#endif

// What `unpack_quad` looks up; nothing for formats without a table.
template <Format F>
TUREEN_INLINE Integers table_for(const Matrix& w) {
    if constexpr (!has_table(F)) return Integers{};
    return load_table(table_of(w.format));
}

// The integers of quad `quad` of a group, in part p of the 16 outputs.
template <Format F>
TUREEN_INLINE Integers unpack_quad(const uint8_t* group, int quad, int p, Integers table) {
    constexpr int BITS = tureen::bits_of(F), SHARING = BITS < 4 ? 4 : 2;  // quads in the same bytes
    if (BITS == 8) return load_integers(group + 64 * quad + PART_BYTES * p);
    const Integers all = load_integers(group + 64 * (quad / SHARING) + PART_BYTES * p);
    if (has_table(F)) return looked_up(table, quad % 2 ? high_nibbles(all) : low_nibbles(all));
    Integers q = SHARING == 4 ? two_bits(all, 2 * (quad % 4)) : quad % 2 ? high_nibbles(all) : low_nibbles(all);
    TUREEN_UNROLL
    for (int bit = 8 / SHARING; bit < BITS; bit++)
        q = with_bits(q, group + 64 * bit + 8 * quad + PART_BYTES / 8 * p, bit);
    return q;
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
