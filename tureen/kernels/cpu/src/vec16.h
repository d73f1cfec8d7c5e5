// 16 float lanes as one type, whatever the registers are: one of 512 bits, two of 256 or four of 128.
//
// For the files that are compiled once for each instruction set. All sums across lanes are taken in one order, the same
// everywhere. The portable variant rounds twice in `fma`, the others once.
#pragma once

#include <cstdint>

// TUREEN_512, TUREEN_256 or TUREEN_ARM says which registers the instruction set has; none of them: those that any
// processor has. TUREEN_VNNI: it multiplies and adds integers in one instruction. What the compiler may use besides is
// not looked at: a builder's own flags (-march=native) must not turn one instruction set into another.
#if defined(TUREEN_512) || defined(TUREEN_256)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarms of GCC 12 about _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(TUREEN_ARM)
#include <arm_neon.h>
#endif

// Products of 8-bit and 16-bit integers: AVX-512's encoding, or the shorter one of processors without AVX-512. Tests
// run the shorter one's code on a processor that has the other only (TUREEN_MODELS).
#if defined(TUREEN_VNNI) && defined(TUREEN_512)
#define TUREEN_ENCODED(instruction) instruction
#define TUREEN_VNNI_REGISTER "v"
#elif defined(TUREEN_VNNI)
#if defined(TUREEN_MODELS)
#define TUREEN_ENCODED(instruction) instruction
#else
#define TUREEN_ENCODED(instruction) "%{vex%} " instruction
#endif
#define TUREEN_VNNI_REGISTER "x"
#endif

#define TUREEN_INLINE inline __attribute__((always_inline))

// Before a loop of constant length: unrolled early, so that an array which it indexes can live in registers.
#if defined(__clang__)
#define TUREEN_UNROLL _Pragma("unroll")
#else
#define TUREEN_UNROLL _Pragma("GCC unroll 16")
#endif

namespace tureen {
namespace VARIANT {

#if defined(TUREEN_512)
constexpr int PART_BYTES = 64;
#elif defined(TUREEN_256)
constexpr int PART_BYTES = 32;
#else
constexpr int PART_BYTES = 16;
#endif
constexpr int PARTS = 64 / PART_BYTES;
constexpr int PART_LANES = 16 / PARTS;

// Of the size of a register: + - * / and comparisons are the compiler's, lane by lane.
typedef float part __attribute__((vector_size(PART_BYTES)));
typedef int32_t int_part __attribute__((vector_size(PART_BYTES)));

// The same at any address.
typedef float loose_part __attribute__((vector_size(PART_BYTES), aligned(1), may_alias));
typedef int32_t loose_int_part __attribute__((vector_size(PART_BYTES), aligned(1), may_alias));

struct vec16 {
    part p[PARTS];
};

// -- one register -----------------------------------------------------------------------------------------------------

TUREEN_INLINE part part_of(float x) { return x - part{}; }
TUREEN_INLINE int_part bits_of(part x) { return (int_part)x; }
TUREEN_INLINE part float_of_bits(int_part x) { return (part)x; }
TUREEN_INLINE int_part int_part_of(int32_t x) { return x - int_part{}; }

// Whether `fma` rounds once.
#if defined(TUREEN_512) || defined(TUREEN_256) || defined(TUREEN_ARM) || defined(TUREEN_MODELS)
constexpr bool IS_FUSED = true;
#else
constexpr bool IS_FUSED = false;
#endif

TUREEN_INLINE part fma(part a, part b, part c) {
#if defined(TUREEN_512)
    return (part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(TUREEN_256)
    return (part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(TUREEN_ARM)
    return (part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(TUREEN_MODELS)
    for (int i = 0; i < PART_LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

// The larger one; b where either is NaN.
TUREEN_INLINE part max(part a, part b) {
#if defined(TUREEN_512)
    return (part)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(TUREEN_256)
    return (part)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return float_of_bits(a > b ? bits_of(a) : bits_of(b));
#endif
}

// The smaller one; b where either is NaN.
TUREEN_INLINE part min(part a, part b) {
#if defined(TUREEN_512)
    return (part)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(TUREEN_256)
    return (part)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return float_of_bits(a < b ? bits_of(a) : bits_of(b));
#endif
}

TUREEN_INLINE part abs(part x) { return float_of_bits(bits_of(x) & 0x7fffffff); }

// The larger of two that are not negative; NaN where either is NaN.
TUREEN_INLINE part max_of_abs(part a, part b) {
    int_part x = bits_of(a), y = bits_of(b);
    return float_of_bits(x > y ? x : y);
}

constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: to add it rounds |x| < 2^22 to nearest even

// p 2^n for p near 1 and -151 <= n <= 128; shifted = n + ROUNDER.
TUREEN_INLINE part times_power_of_two(part p, part n, part shifted) {
#if defined(TUREEN_512)
    (void)shifted;
    return (part)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    (void)n;
    int_part whole = bits_of(shifted) - bits_of(part_of(ROUNDER));
    int_part half = whole >> 1;  // in two factors: 2^n itself may be beyond the normal numbers
    return p * float_of_bits((half + 127) << 23) * float_of_bits((whole - half + 127) << 23);
#endif
}

// e^x to about 1 ulp, subnormal results included; e^-inf = 0, NaN stays.
//
// e^x = 2^n e^r with |r| <= ln 2 / 2, and e^r = 1 + r + r² p(r), p fitted for the least relative error.
TUREEN_INLINE part exp(part x) {
    x = min(part_of(89.0f), max(part_of(-104.0f), x));
    part shifted = fma(x, part_of(1.44269504f), part_of(ROUNDER));
    part n = shifted - ROUNDER;
    part r = fma(n, part_of(-0.693145752f), x);  // ln 2, its first 15 bits: n times it is exact
    r = fma(n, part_of(-1.42860677e-6f), r);
    part p = part_of(0.00138144672f);
    p = fma(p, r, part_of(0.00836878084f));
    p = fma(p, r, part_of(0.0416683927f));
    p = fma(p, r, part_of(0.166665196f));
    p = fma(p, r, part_of(0.49999994f));
    return times_power_of_two(fma(r * r, p, r) + 1.0f, n, shifted);
}

// 2^x for x <= 0 (a little above does no harm), to about 1 ulp; 2^0 = 1, 2^-inf = 0, NaN stays.
TUREEN_INLINE part exp2_of_negative(part x) {
#if defined(TUREEN_512)
    part r = (part)_mm512_reduce_ps((__m512)x, 0), n = x - r, shifted = n;
#else
    x = max(part_of(-151.0f), x);
    part shifted = x + ROUNDER;
    part n = shifted - ROUNDER;
    part r = x - n;
#endif
    part p = part_of(0.0013264727f);
    p = fma(p, r, part_of(0.009671513f));
    p = fma(p, r, part_of(0.055507336f));
    p = fma(p, r, part_of(0.24022242f));
    p = fma(p, r, part_of(0.693147f));
    return times_power_of_two(fma(p, r, part_of(1.0f)), n, shifted);
}

// -- 16 lanes ---------------------------------------------------------------------------------------------------------

template <typename Function>
TUREEN_INLINE vec16 each_part(Function function) {
    vec16 y;
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) y.p[i] = function(i);
    return y;
}

TUREEN_INLINE vec16 broadcast(float x) {
    return each_part([&](int) { return part_of(x); });
}

TUREEN_INLINE vec16 zeros() {
    return each_part([&](int) { return part{}; });
}

TUREEN_INLINE vec16 load(const float* from) {
    return each_part([&](int i) -> part { return ((const loose_part*)from)[i]; });
}

TUREEN_INLINE void store(float* to, vec16 x) {
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) ((loose_part*)to)[i] = x.p[i];
}

// The first n (0 … 16); the other lanes are 0.
TUREEN_INLINE vec16 load(const float* from, int n) {
#if defined(TUREEN_512)
    return {(part)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), from)};
#else
    float lanes[16] = {};
    for (int i = 0; i < n; i++) lanes[i] = from[i];
    return load(lanes);
#endif
}

TUREEN_INLINE void store(float* to, vec16 x, int n) {
#if defined(TUREEN_512)
    _mm512_mask_storeu_ps(to, __mmask16((1u << n) - 1), (__m512)x.p[0]);
#else
    float lanes[16];
    store(lanes, x);
    for (int i = 0; i < n; i++) to[i] = lanes[i];
#endif
}

// The first n lanes of a, the others of b.
TUREEN_INLINE vec16 first(int n, vec16 a, vec16 b) {
#if defined(TUREEN_512)
    return {(part)_mm512_mask_mov_ps((__m512)b.p[0], __mmask16((1u << n) - 1), (__m512)a.p[0])};
#else
    float lanes[16], others[16];
    store(lanes, a);
    store(others, b);
    for (int i = n; i < 16; i++) lanes[i] = others[i];
    return load(lanes);
#endif
}

TUREEN_INLINE vec16 operator+(vec16 a, vec16 b) {
    return each_part([&](int i) { return a.p[i] + b.p[i]; });
}
TUREEN_INLINE vec16 operator-(vec16 a, vec16 b) {
    return each_part([&](int i) { return a.p[i] - b.p[i]; });
}
TUREEN_INLINE vec16 operator*(vec16 a, vec16 b) {
    return each_part([&](int i) { return a.p[i] * b.p[i]; });
}
TUREEN_INLINE vec16 operator/(vec16 a, vec16 b) {
    return each_part([&](int i) { return a.p[i] / b.p[i]; });
}
// a * b + c
TUREEN_INLINE vec16 fma(vec16 a, vec16 b, vec16 c) {
    return each_part([&](int i) { return fma(a.p[i], b.p[i], c.p[i]); });
}
// b where either is NaN
TUREEN_INLINE vec16 max(vec16 a, vec16 b) {
    return each_part([&](int i) { return max(a.p[i], b.p[i]); });
}
TUREEN_INLINE vec16 min(vec16 a, vec16 b) {
    return each_part([&](int i) { return min(a.p[i], b.p[i]); });
}
TUREEN_INLINE vec16 abs(vec16 x) {
    return each_part([&](int i) { return abs(x.p[i]); });
}
// For lanes that are not negative; NaN where either is NaN.
TUREEN_INLINE vec16 max_of_abs(vec16 a, vec16 b) {
    return each_part([&](int i) { return max_of_abs(a.p[i], b.p[i]); });
}
TUREEN_INLINE vec16 exp(vec16 x) {
    return each_part([&](int i) { return exp(x.p[i]); });
}
TUREEN_INLINE vec16 exp2_of_negative(vec16 x) {
    return each_part([&](int i) { return exp2_of_negative(x.p[i]); });
}
// 1 - 2 / (1 + e^2x): within 1e-7 of it.
TUREEN_INLINE vec16 tanh(vec16 x) {
    return broadcast(1.0f) - broadcast(2.0f) / (broadcast(1.0f) + exp(x + x));
}
// To the nearest whole number, ties to even; |x| < 2^22.
TUREEN_INLINE vec16 round(vec16 x) {
    return each_part([&](int i) { return (x.p[i] + ROUNDER) - ROUNDER; });
}

// -- across lanes -----------------------------------------------------------------------------------------------------

// Lanes i and i + 8 first, then i and i + 4, then i and i + 2, then the two that remain.
template <typename Combine>
TUREEN_INLINE float reduce(vec16 x, Combine combine) {
#if defined(TUREEN_512)
    __m512 all = (__m512)x.p[0];
    __m256 a = combine(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    __m128 b = combine(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#elif defined(TUREEN_256)
    __m256 a = combine((__m256)x.p[0], (__m256)x.p[1]);
    __m128 b = combine(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#else
    part b = combine(combine(x.p[0], x.p[2]), combine(x.p[1], x.p[3]));
#endif
    return combine(combine(b[0], b[2]), combine(b[1], b[3]));
}

struct Sum {
    template <typename Lanes>
    TUREEN_INLINE Lanes operator()(Lanes a, Lanes b) const { return a + b; }
};

struct LargerOfAbs {
    template <typename Lanes>
    TUREEN_INLINE Lanes operator()(Lanes a, Lanes b) const {
        typedef int32_t bits __attribute__((vector_size(sizeof a)));
        return (Lanes)((bits)a > (bits)b ? (bits)a : (bits)b);
    }
    TUREEN_INLINE float operator()(float a, float b) const { return a > b || a != a ? a : b; }
};

TUREEN_INLINE float reduce_add(vec16 x) {
    return reduce(x, Sum{});
}
// A lane that is NaN may be passed over.
TUREEN_INLINE float reduce_max(vec16 x) {
    return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}
// Of lanes that are not negative; NaN if one is NaN.
TUREEN_INLINE float reduce_max_of_abs(vec16 x) {
    return reduce(x, LargerOfAbs{});
}

// Lane i = reduce(x[i]); but lanes are combined in another order, which sums of floats that are not whole would show.
template <typename Combine>
TUREEN_INLINE vec16 reduce_each(const vec16 (&x)[16], Combine combine) {
#if defined(TUREEN_512)
    // Each step combines two halves of the lanes, for twice as many rows a register.
    part four[4];  // [i]: rows 4i … 4i + 3, in each of the four 128-bit quarters
    TUREEN_UNROLL
    for (int i = 0; i < 4; i++) {
        __m512 r[4], two[2];
        TUREEN_UNROLL
        for (int j = 0; j < 4; j++) r[j] = (__m512)x[4 * i + j].p[0];
        TUREEN_UNROLL
        for (int j = 0; j < 2; j++)
            two[j] = (__m512)combine((part)_mm512_unpacklo_ps(r[2 * j], r[2 * j + 1]),
                                     (part)_mm512_unpackhi_ps(r[2 * j], r[2 * j + 1]));
        four[i] = combine((part)_mm512_shuffle_ps(two[0], two[1], 0x44), (part)_mm512_shuffle_ps(two[0], two[1], 0xee));
    }
    auto quarters = [&](part a, part b) {
        return combine((part)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88),
                       (part)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd));
    };
    return {quarters(quarters(four[0], four[1]), quarters(four[2], four[3]))};
#else
    float lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = reduce(x[i], combine);
    return load(lanes);
#endif
}

// -- other number formats ---------------------------------------------------------------------------------------------

TUREEN_INLINE float float_of_bf16(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    __builtin_memcpy(&y, &bits, sizeof y);
    return y;
}

// Nearest even; NaN stays NaN.
TUREEN_INLINE uint16_t bf16_of_float(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

TUREEN_INLINE float float_of_half(uint16_t x) {
#if defined(TUREEN_512) || defined(TUREEN_256)
    return _cvtsh_ss(x);
#elif defined(TUREEN_ARM)
    __fp16 y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
#else
    uint32_t magnitude = uint32_t(x & 0x7fff) << 13, sign = uint32_t(x & 0x8000) << 16;
    if (magnitude >= 0x7c00u << 13) magnitude |= 0x7f800000;  // infinity, NaN
    float y;
    __builtin_memcpy(&y, &magnitude, sizeof y);
    y *= 5.19229686e33f;  // 2^112: moves the exponent's offset from 15 to 127, subnormals too
    uint32_t bits;
    __builtin_memcpy(&bits, &y, sizeof bits);
    bits |= sign;
    __builtin_memcpy(&y, &bits, sizeof y);
    return y;
#endif
}

TUREEN_INLINE vec16 load_bf16(const uint16_t* from) {
#if defined(TUREEN_512)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return {(part)_mm512_slli_epi32(wide, 16)};
#elif defined(TUREEN_256)
    return each_part([&](int i) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + 8 * i)));
        return (part)_mm256_slli_epi32(wide, 16);
    });
#elif defined(TUREEN_ARM)
    return each_part([&](int i) { return (part)vshll_n_u16(vld1_u16(from + 4 * i), 16); });
#else
    float lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = float_of_bf16(from[i]);
    return load(lanes);
#endif
}

// Nearest even; NaN stays NaN.
TUREEN_INLINE void store_bf16(uint16_t* to, vec16 x) {
    vec16 rounded = each_part([&](int i) {
        int_part bits = bits_of(x.p[i]);
        int_part even = bits + 0x7fff + ((bits >> 16) & 1);
        return float_of_bits(((x.p[i] == x.p[i] ? even : bits | 0x400000) >> 16) & 0xffff);
    });
#if defined(TUREEN_512)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)rounded.p[0]));
#else
    int32_t lanes[16];
    __builtin_memcpy(lanes, &rounded, sizeof lanes);
    for (int i = 0; i < 16; i++) to[i] = uint16_t(lanes[i]);
#endif
}

TUREEN_INLINE vec16 load_half(const uint16_t* from) {
#if defined(TUREEN_512)
    return {(part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from))};
#elif defined(TUREEN_256)
    return each_part([&](int i) { return (part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8 * i))); });
#elif defined(TUREEN_ARM)
    return each_part([&](int i) { return (part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i))); });
#else
    float lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = float_of_half(from[i]);
    return load(lanes);
#endif
}

TUREEN_INLINE vec16 load_int8(const int8_t* from) {
#if defined(TUREEN_512)
    return {(part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)))};
#elif defined(TUREEN_256)
    return each_part([&](int i) {
        return (part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * i))));
    });
#elif defined(TUREEN_ARM)
    int8x16_t bytes = vld1q_s8(from);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{(part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), (part)vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
             (part)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), (part)vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
#else
    float lanes[16];
    for (int i = 0; i < 16; i++) lanes[i] = from[i];
    return load(lanes);
#endif
}

// x, rounded to nearest even, must be in -128 … 127.
TUREEN_INLINE void store_int8(int8_t* to, vec16 x) {
#if defined(TUREEN_512)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x.p[0])));
#elif defined(TUREEN_256)
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)x.p[0]), _mm256_cvtps_epi32((__m256)x.p[1]));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    int32_t lanes[16];
    vec16 shifted = each_part([&](int i) { return x.p[i] + ROUNDER; });
    __builtin_memcpy(lanes, &shifted, sizeof lanes);
    for (int i = 0; i < 16; i++) to[i] = int8_t(uint8_t(lanes[i]));
#endif
}

// x must be whole numbers that int32 holds.
TUREEN_INLINE void store_int32(int32_t* to, vec16 x) {
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) ((loose_int_part*)to)[i] = __builtin_convertvector(x.p[i], int_part);
}

// x, rounded to nearest even, must be in -32768 … 32767.
TUREEN_INLINE void store_int16(int16_t* to, vec16 x) {
#if defined(TUREEN_512)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)x.p[0])));
#elif defined(TUREEN_256)
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)x.p[0]), _mm256_cvtps_epi32((__m256)x.p[1]));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(words, 0xd8));
#else
    int32_t lanes[16];
    vec16 shifted = each_part([&](int i) { return x.p[i] + ROUNDER; });
    __builtin_memcpy(lanes, &shifted, sizeof lanes);
    for (int i = 0; i < 16; i++) to[i] = int16_t(uint16_t(lanes[i]));
#endif
}

// The symmetric integers of values whose largest magnitude is `largest`: q = round(x * inverse) in -levels … levels,
// x is about scale * q.
struct Scales {  // of 16 at once
    vec16 scale;    // NaN where a value is not finite
    vec16 inverse;  // 0 where all q are to be 0
};

TUREEN_INLINE Scales scales_of(vec16 largest, float levels) {
    constexpr float TINY = 1e-33f;  // smaller values count as 0: the scale and its inverse stay normal numbers
    Scales s;
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) {
        part x = largest.p[i];
        int_part finite = x < part_of(__builtin_inff()), usable = finite & (x >= part_of(TINY));
        s.scale.p[i] = float_of_bits((bits_of(x / levels) & usable) | (bits_of(part_of(__builtin_nanf(""))) & ~finite));
        s.inverse.p[i] = float_of_bits(bits_of(levels / x) & usable);
    }
    return s;
}

struct Scale {
    float scale, inverse;
};

TUREEN_INLINE Scale scale_of(float largest, float levels) {
    Scales s = scales_of(broadcast(largest), levels);
    return {s.scale.p[0][0], s.inverse.p[0][0]};
}

// 16 of x [count], from `begin`; zeros beyond the last.
TUREEN_INLINE vec16 lanes_at(const float* x, int count, int begin) {
    if (begin + 16 <= count) return load(x + begin);
    return begin < count ? load(x + begin, count - begin) : zeros();
}

// -- 16 lanes of two int16 --------------------------------------------------------------------------------------------

struct ivec16 {  // or of one int32
    int_part p[PARTS];
};

TUREEN_INLINE ivec16 int_zeros() {
    ivec16 y;
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) y.p[i] = int_part{};
    return y;
}

TUREEN_INLINE ivec16 load_words(const int16_t* from) {
    ivec16 y;
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) y.p[i] = ((const loose_int_part*)from)[i];
    return y;
}

TUREEN_INLINE void store_words(int16_t* to, ivec16 x) {
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) ((loose_int_part*)to)[i] = x.p[i];
}

// 32 bytes, as int16.
TUREEN_INLINE ivec16 widen(const int8_t* from) {
#if defined(TUREEN_512)
    return {(int_part)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from))};
#elif defined(TUREEN_256)
    const __m128i* halves = (const __m128i*)from;
    return {{(int_part)_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)),
             (int_part)_mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))}};
#elif defined(TUREEN_ARM)
    int8x16_t a = vld1q_s8(from), b = vld1q_s8(from + 16);
    return {{(int_part)vmovl_s8(vget_low_s8(a)), (int_part)vmovl_high_s8(a), (int_part)vmovl_s8(vget_low_s8(b)),
             (int_part)vmovl_high_s8(b)}};
#else
    int16_t words[32];
    for (int i = 0; i < 32; i++) words[i] = from[i];
    return load_words(words);
#endif
}

// The nibbles of 16 bytes, signed, as int16: first all lower ones, then all upper ones.
TUREEN_INLINE ivec16 widen_nibbles(const int8_t* from) {
#if defined(TUREEN_512)
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(12), _mm256_set1_epi16(8), 1);
    __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
    return {(int_part)_mm512_srai_epi16(_mm512_sllv_epi16(_mm512_cvtepi8_epi16(twice), left), 12)};
#elif defined(TUREEN_256)
    __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
    return {{(int_part)_mm256_srai_epi16(_mm256_slli_epi16(words, 12), 12), (int_part)_mm256_srai_epi16(words, 4)}};
#elif defined(TUREEN_ARM)
    int8x16_t bytes = vld1q_s8(from), upper = vshrq_n_s8(bytes, 4), lower = vshrq_n_s8(vshlq_n_s8(bytes, 4), 4);
    return {{(int_part)vmovl_s8(vget_low_s8(lower)), (int_part)vmovl_high_s8(lower),
             (int_part)vmovl_s8(vget_low_s8(upper)), (int_part)vmovl_high_s8(upper)}};
#else
    int16_t words[32];
    for (int i = 0; i < 16; i++) {
        words[i] = int16_t((from[i] & 15) - ((from[i] & 8) << 1));
        words[16 + i] = int16_t(from[i] >> 4);
    }
    return load_words(words);
#endif
}

// Load 16 int16 into the upper halves of the lanes, or into the lower ones; the other halves are 0.
template <bool IS_UPPER>
TUREEN_INLINE ivec16 load_halves(const int16_t* from) {
    typedef int16_t loose_words __attribute__((vector_size(PART_BYTES / 2), aligned(1), may_alias));
    ivec16 y;
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) {
        int_part lanes = __builtin_convertvector(((const loose_words*)from)[i], int_part);
        y.p[i] = IS_UPPER ? lanes << 16 : lanes & 0xffff;
    }
    return y;
}

// The same two int16 in each lane.
TUREEN_INLINE ivec16 broadcast_words(const int16_t* two) {
    int32_t lane;
    __builtin_memcpy(&lane, two, sizeof lane);
    ivec16 y;
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) y.p[i] = int_part_of(lane);
    return y;
}

// sum + a · b in each lane, which holds two int16.
TUREEN_INLINE int_part dot(int_part sum, int_part a, int_part b) {
#if defined(TUREEN_VNNI)
    // not the intrinsic, whose sums GCC spills to memory
    asm(TUREEN_ENCODED("vpdpwssd %2, %1, %0") : "+" TUREEN_VNNI_REGISTER(sum)
        : TUREEN_VNNI_REGISTER(a), TUREEN_VNNI_REGISTER(b));
    return sum;
#elif defined(TUREEN_512)
    return sum + (int_part)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(TUREEN_256)
    return sum + (int_part)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(TUREEN_ARM)
    int16x8_t u = (int16x8_t)a, v = (int16x8_t)b;
    return sum + (int_part)vpaddq_s32(vmull_s16(vget_low_s16(u), vget_low_s16(v)), vmull_high_s16(u, v));
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

TUREEN_INLINE ivec16 dot(ivec16 sum, ivec16 a, ivec16 b) {
    ivec16 y;
    TUREEN_UNROLL
    for (int i = 0; i < PARTS; i++) y.p[i] = dot(sum.p[i], a.p[i], b.p[i]);
    return y;
}

TUREEN_INLINE int32_t reduce_add(ivec16 x) {
    int_part sum = x.p[0];
    TUREEN_UNROLL
    for (int i = 1; i < PARTS; i++) sum += x.p[i];
    int32_t total = 0;
    TUREEN_UNROLL
    for (int i = 0; i < PART_LANES; i++) total += sum[i];
    return total;
}

TUREEN_INLINE vec16 float_of(ivec16 x) {
    return each_part([&](int i) { return __builtin_convertvector(x.p[i], part); });
}

}  // namespace VARIANT
}  // namespace tureen
