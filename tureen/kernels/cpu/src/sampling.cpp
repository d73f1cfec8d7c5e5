// Compiled once for each instruction set; see kernels.h. Plain loops, which compilers turn into vector instructions.
#include "sampling.h"
#include "kernels.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int SPAN = 512;  // logits searched together: they stay in the first cache between two passes
constexpr int WORD = 32;   // tokens of a mask's word
constexpr float FORBIDDEN = -__builtin_inff();

// Integers in the order of the floats, with one zero. NaN lies beyond the infinities, on both sides.
constexpr int32_t KEY_OF_INFINITY = 0x7f800000;
constexpr int32_t KEY_OF_MINUS_INFINITY = -0x7f800001;

inline int32_t key_of(float x) {
    float with_one_zero = x + 0.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &with_one_zero, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float value_of(int32_t key) {
    int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

struct Bits {
    uint32_t of[WORD];
};

constexpr Bits make_bits() {
    Bits bits{};
    for (int i = 0; i < WORD; i++) bits.of[i] = uint32_t(1) << i;
    return bits;
}

constexpr Bits BITS = make_bits();

void forbid(const float* logits, const uint32_t* mask, int n, float* out) {
    int whole = n / WORD;
    for (int w = 0; w < whole; w++) {
        uint32_t word = mask[w];
        const float* x = logits + w * WORD;
        float* y = out + w * WORD;
#pragma GCC ivdep
        for (int i = 0; i < WORD; i++) {
            float logit = x[i];
            y[i] = (word & BITS.of[i]) ? logit : FORBIDDEN;
        }
    }
    for (int i = whole * WORD; i < n; i++) out[i] = (mask[whole] & BITS.of[i % WORD]) ? logits[i] : FORBIDDEN;
}

struct Range {
    int32_t least = INT32_MAX, largest = INT32_MIN;
};

// Of the keys of logits [n].
Range range_of(const float* logits, int n) {
    int32_t least = INT32_MAX, largest = INT32_MIN;
    for (int i = 0; i < n; i++) {
        int32_t key = key_of(logits[i]);
        least = key < least ? key : least;
        largest = key > largest ? key : largest;
    }
    return {least, largest};
}

void peak(const float* logits, const uint32_t* mask, int n, float* value, int64_t* index) {
    Range all;
    int32_t best = INT32_MIN;
    int at = 0;  // where the span begins that has the best first
    for (int begin = 0; begin < n; begin += SPAN) {
        int count = n - begin < SPAN ? n - begin : SPAN;
        Range range = range_of(logits + begin, count);
        all.least = range.least < all.least ? range.least : all.least;
        all.largest = range.largest > all.largest ? range.largest : all.largest;
        int32_t allowed = range.largest;
        if (mask != nullptr && allowed > best) {
            float kept[SPAN];
            forbid(logits + begin, mask + begin / WORD, count, kept);
            allowed = range_of(kept, count).largest;
        }
        if (allowed > best) {
            best = allowed;
            at = begin;
        }
    }
    *index = 0;
    *value = __builtin_nanf("");
    if (all.largest >= KEY_OF_INFINITY || all.largest <= KEY_OF_MINUS_INFINITY || all.least < KEY_OF_MINUS_INFINITY)
        return;
    *value = value_of(best);
    if (best == KEY_OF_MINUS_INFINITY) return;
    auto is_allowed = [&](int i) { return mask == nullptr || (mask[i / WORD] & BITS.of[i % WORD]); };
    while (key_of(logits[at]) != best || !is_allowed(at)) at++;
    *index = at;
}

// a * b + c. Where processors have no such instruction it is rounded twice.
inline double fused(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

constexpr double LEAST_EXPONENT = -708.0;  // below it powers of two are no normal numbers
constexpr double LOG2_E = 1.4426950408889634;
constexpr double LN2_HIGH = 6.93147180369123816490e-01;  // 32 bits: times an exponent it is exact
constexpr double LN2_LOW = 1.90821492927058770002e-10;   // ln 2 - LN2_HIGH
constexpr double TO_INTEGER = 6755399441055744.0;        // 1.5 * 2^52: added, it leaves no places after the point
constexpr uint64_t BITS_OF_ONE = uint64_t(1023) << 52;
constexpr int TERMS = 14;

struct Reciprocals {
    double of_factorial[TERMS];
};

constexpr Reciprocals make_reciprocals() {
    Reciprocals table{};
    double factorial = 1.0;
    for (int k = 0; k < TERMS; k++) {
        factorial *= k > 1 ? k : 1;
        table.of_factorial[k] = 1.0 / factorial;
    }
    return table;
}

constexpr Reciprocals SERIES = make_reciprocals();

// exp(x) for x <= 700, off by at most 2 units in the last place; NaN of NaN. x = n ln 2 + r with |r| <= ln(2) / 2, and
// the series of exp(r) is cut where its terms are less than a unit in the last place.
inline double exp_of(double x) {
    double bounded = x < LEAST_EXPONENT ? LEAST_EXPONENT : x;
    double shifted = fused(bounded, LOG2_E, TO_INTEGER);
    double n = shifted - TO_INTEGER;
    double r = fused(n, -LN2_LOW, fused(n, -LN2_HIGH, bounded));
    double sum = SERIES.of_factorial[TERMS - 1];
#pragma GCC unroll 16
    for (int k = TERMS - 2; k >= 0; k--) sum = fused(sum, r, SERIES.of_factorial[k]);
    uint64_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    bits = x < LEAST_EXPONENT ? 0 : (bits << 52) + BITS_OF_ONE;  // of 2^n: the last bits of `shifted` are n
    double power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return sum * power;
}

void weights(const float* logits, int n, double peak, double scale, double* out) {
    for (int i = 0; i < n; i++) out[i] = exp_of((double(logits[i]) - peak) * scale);
}

// values[i] += values[i + HALF], until one is left.
template <int HALF>
inline void fold(double* values) {
    for (int i = 0; i < HALF; i++) values[i] += values[i + HALF];
    if constexpr (HALF > 1) fold<HALF / 2>(values);
}

void weight_sums(const float* logits, int n, double peak, double scale, double* sums) {
    alignas(64) double block[WEIGHT_BLOCK];
    int whole = n / WEIGHT_BLOCK, rest = n % WEIGHT_BLOCK;
    for (int b = 0; b < whole; b++) {
        weights(logits + b * WEIGHT_BLOCK, WEIGHT_BLOCK, peak, scale, block);
        fold<WEIGHT_BLOCK / 2>(block);
        sums[b] = block[0];
    }
    if (rest > 0) {
        weights(logits + whole * WEIGHT_BLOCK, rest, peak, scale, block);
        for (int i = rest; i < WEIGHT_BLOCK; i++) block[i] = 0.0;
        fold<WEIGHT_BLOCK / 2>(block);
        sums[whole] = block[0];
    }
}

void fold_blocks(const double* weights, int n, double* sums) {
    alignas(64) double block[WEIGHT_BLOCK];
    for (int begin = 0; begin < n; begin += WEIGHT_BLOCK) {
        int count = n - begin < WEIGHT_BLOCK ? n - begin : WEIGHT_BLOCK;
        for (int i = 0; i < count; i++) block[i] = weights[begin + i];
        for (int i = count; i < WEIGHT_BLOCK; i++) block[i] = 0.0;
        fold<WEIGHT_BLOCK / 2>(block);
        sums[begin / WEIGHT_BLOCK] = block[0];
    }
}

void block_peaks(const float* logits, int n, float* out) {
    constexpr int LANES = 16;
    int whole = n / PEAK_BLOCK;
    for (int b = 0; b < whole; b++) {
        float best[LANES];
        for (int j = 0; j < LANES; j++) best[j] = FORBIDDEN;
        for (int i = 0; i < PEAK_BLOCK; i += LANES) {
            const float* x = logits + b * PEAK_BLOCK + i;
            for (int j = 0; j < LANES; j++) best[j] = x[j] > best[j] ? x[j] : best[j];
        }
        for (int half = LANES / 2; half > 0; half /= 2) {
            for (int j = 0; j < half; j++) best[j] = best[j + half] > best[j] ? best[j + half] : best[j];
        }
        out[b] = best[0];
    }
    if (whole * PEAK_BLOCK < n) {
        float best = FORBIDDEN;
        for (int i = whole * PEAK_BLOCK; i < n; i++) best = logits[i] > best ? logits[i] : best;
        out[whole] = best;
    }
}

}  // namespace

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels{peak, forbid, weights, weight_sums, fold_blocks, block_peaks};

}  // namespace VARIANT
}  // namespace tureen
