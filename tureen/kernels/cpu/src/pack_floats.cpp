// Floats -> tiles of the formats that can be made of them. Compiled once for each instruction set; see kernels.h. No
// product and sum is fused: all instruction sets give the same bits.
#include "kernels.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {

namespace {

// 16 rows side by side, one a lane.

constexpr float LARGEST_HALF = 65504;
constexpr float NAN_HALF = 98304;  // what store_halves makes a NaN of
constexpr int LEVELS = 16;

// By what part of the range the least and the greatest level are moved inwards, as starting points: to cut the ends off
// is good for the values between them.
constexpr float MOVES[] = {0.0f, -0.03f, 0.04f};

struct Values {
    vec16 x[GROUP];
};

// The rows' values from column `begin` on; zeros beyond the last column.
Values transposed(const float* rows, int cols, int begin) {
    float lanes[GROUP][TILE] = {};
    int count = cols - begin < GROUP ? cols - begin : GROUP;
    for (int r = 0; r < TILE; r++) {
        for (int i = 0; i < count; i++) lanes[i][r] = rows[size_t(r) * size_t(cols) + size_t(begin + i)];
    }
    Values values;
    for (int i = 0; i < GROUP; i++) values.x[i] = load(lanes[i]);
    return values;
}

template <typename Function>
TUREEN_INLINE ivec16 each_int_part(Function function) {
    ivec16 y;
    for (int i = 0; i < PARTS; i++) y.p[i] = function(i);
    return y;
}

TUREEN_INLINE void store_ints(void* to, ivec16 x) { __builtin_memcpy(to, &x, sizeof x); }

// Lanes of a where the mask is all ones, else of b.
TUREEN_INLINE vec16 choose(ivec16 mask, vec16 a, vec16 b) {
    return each_part(
        [&](int i) { return float_of_bits((bits_of(a.p[i]) & mask.p[i]) | (bits_of(b.p[i]) & ~mask.p[i])); });
}

TUREEN_INLINE ivec16 less(vec16 a, vec16 b) {
    return each_int_part([&](int i) -> int_part { return a.p[i] < b.p[i]; });
}

// As bfloat16, to the nearest even, in the low and the high half of each lane. NaN stays NaN.
TUREEN_INLINE ivec16 pair_of_bf16(vec16 low, vec16 high) {
    auto rounded = [](part x) {
        int_part bits = bits_of(x), is_number = x == x;
        int_part even = bits + 0x7fff + ((bits >> 16) & 1);
        return (even & is_number) | ((bits | 0x400000) & ~is_number);
    };
    return each_int_part([&](int i) { return ((rounded(low.p[i]) >> 16) & 0xffff) | (rounded(high.p[i]) & ~0xffff); });
}

TUREEN_INLINE ivec16 pair_of_words(vec16 low, vec16 high) {
    auto integers = [](part x) { return __builtin_convertvector(x, int_part); };
    return each_int_part([&](int i) { return (integers(low.p[i]) & 0xffff) | integers(high.p[i]) << 16; });
}

TUREEN_INLINE void store_floats(uint8_t* to, vec16 x) { __builtin_memcpy(to, &x, sizeof x); }

void put_f32(const Matrix& w, const float* rows, uint8_t* tile) {
    for (int begin = 0; begin < w.cols; begin += GROUP) {
        Values values = transposed(rows, w.cols, begin);
        __builtin_memcpy(tile + size_t(begin) * TILE * 4, &values, sizeof values);
    }
}

void put_bf16(const Matrix& w, const float* rows, uint8_t* tile) {
    for (int begin = 0; begin < w.cols; begin += GROUP) {
        Values values = transposed(rows, w.cols, begin);
        for (int i = 0; i < GROUP; i += 2) {
            store_ints(tile + size_t(begin + i) * TILE * 2, pair_of_bf16(values.x[i], values.x[i + 1]));
        }
    }
}

// sum | x << shift, for whole numbers x.
TUREEN_INLINE ivec16 with_bits(ivec16 sum, vec16 x, int shift) {
    return each_int_part([&](int i) { return sum.p[i] | __builtin_convertvector(x.p[i], int_part) << shift; });
}

// The scales with which the largest magnitude of each row's columns [begin, end) becomes ±levels. With a value that is
// not finite the scale is NaN.
struct Symmetric {
    vec16 d, divisor;
    ivec16 usable;
    float levels;

    Symmetric(const float* rows, int cols, int begin, int end, float most) : levels(most) {
        float scales[TILE];
        for (int r = 0; r < TILE; r++) {
            vec16 largest = zeros();
            const float* row = rows + size_t(r) * size_t(cols);
            for (int i = begin; i < end; i += 16) largest = max_of_abs(largest, abs(lanes_at(row, end, i)));
            float found = reduce_max_of_abs(largest);
            scales[r] = found < __builtin_inff() ? found / levels : __builtin_nanf("");
        }
        d = load(scales);
        usable = less(zeros(), d);
        divisor = choose(usable, d, broadcast(1.0f));
    }

    TUREEN_INLINE vec16 integers(vec16 x) const {
        vec16 scaled = choose(usable, x / divisor, zeros());
        return round(max(min(scaled, broadcast(levels)), broadcast(-levels)));
    }
};

void put_q8_row(const Matrix& w, const float* rows, uint8_t* tile) {
    Symmetric row(rows, w.cols, 0, w.cols, 127);
    store_floats(tile + w.scales_offset, row.d);
    for (int begin = 0; begin < w.padded_cols; begin += GROUP) {
        Values values = transposed(rows, w.cols, begin);
        for (int quad = 0; quad < GROUP / 4; quad++) {
            ivec16 bytes = int_zeros();
            for (int b = 0; b < 4; b++)
                bytes = with_bits(bytes, row.integers(values.x[4 * quad + b]) + broadcast(128.0f), 8 * b);
            store_ints(tile + size_t(begin) * TILE + quad * 64, bytes);
        }
    }
}

void put_q16(const Matrix& w, const float* rows, uint8_t* tile) {
    for (int begin = 0; begin < w.cols; begin += SPAN) {
        int end = w.cols - begin < SPAN ? w.cols : begin + SPAN;
        Symmetric span(rows, w.cols, begin, end, WORD_LEVELS);
        store_floats(tile + w.scales_offset + size_t(begin / SPAN) * TILE * 4, span.d);
        for (int at = begin; at < end; at += GROUP) {
            Values values = transposed(rows, w.cols, at);
            for (int i = 0; i < GROUP; i += 2)
                store_ints(tile + size_t(at + i) * TILE * 2,
                           pair_of_words(span.integers(values.x[i]), span.integers(values.x[i + 1])));
        }
    }
}

// -- 4 bits -----------------------------------------------------------------------------------------------------------

struct Line {
    vec16 d, m;
};

// To what a half float holds, nearest even.
TUREEN_INLINE vec16 rounded_to_half(vec16 x) {
    x = min(max(x, broadcast(-LARGEST_HALF)), broadcast(LARGEST_HALF));
    return each_part([&](int i) {
        int_part bits = bits_of(x.p[i]), magnitude = bits & INT32_MAX;
        int_part normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & ~0x1fff;
        int_part small = bits_of((float_of_bits(magnitude) + 0.5f) - 0.5f);  // steps of 2^-24
        int_part is_small = magnitude < 0x38800000;
        return float_of_bits((bits & INT32_MIN) | (small & is_small) | (normal & ~is_small));
    });
}

// Of what rounded_to_half gives.
TUREEN_INLINE void store_halves(uint8_t* to, vec16 x) {
    int32_t halves[TILE];
    uint16_t words[TILE];
    store_ints(halves, each_int_part([&](int i) {
                   int_part bits = bits_of(x.p[i]), magnitude = bits & INT32_MAX;
                   int_part small = __builtin_convertvector(float_of_bits(magnitude) * 0x1p24f, int_part);
                   int_part is_small = magnitude < 0x38800000, normal = (magnitude - 0x38000000) >> 13;
                   return ((bits >> 16) & 0x8000) | (small & is_small) | (normal & ~is_small);
               }));
    for (int r = 0; r < TILE; r++) words[r] = uint16_t(halves[r]);
    __builtin_memcpy(to, words, sizeof words);
}

// 1 / d, but 0 where there is no line.
TUREEN_INLINE vec16 inverse_of(vec16 d) { return choose(less(zeros(), d), broadcast(1.0f) / d, zeros()); }

TUREEN_INLINE vec16 nearest_level(vec16 x, vec16 m, vec16 inverse) {
    return round(min(max((x - m) * inverse, zeros()), broadcast(LEVELS - 1)));
}

// Of every second term each: an addition need not wait for the one before.
struct Sums {
    vec16 sum[2] = {zeros(), zeros()};

    TUREEN_INLINE void add(int i, vec16 term) { sum[i % 2] = sum[i % 2] + term; }
    TUREEN_INLINE vec16 all() const { return sum[0] + sum[1]; }
};

// Least squares: x ≈ d * level + m for the levels nearest to x on the line `start`. d is 0 or NaN when all levels are
// one. The mean of x is about 0.
TUREEN_INLINE Line solve(const Values& values, Line start) {
    vec16 inverse = inverse_of(start.d);
    Sums levels, squares, products;
    TUREEN_UNROLL
    for (int i = 0; i < GROUP; i++) {
        vec16 level = nearest_level(values.x[i], start.m, inverse);
        levels.add(i, level);
        squares.add(i, level * level);
        products.add(i, level * values.x[i]);
    }
    vec16 n = broadcast(GROUP), sum = levels.all();
    vec16 d = n * products.all() / (n * squares.all() - sum * sum);
    return {d, zeros() - d * sum / n};
}

// The best so far.
struct Fit {
    vec16 error, d, m;

    // centre: what was taken off the values and the line.
    TUREEN_INLINE void consider(const Values& values, vec16 centre, Line line) {
        vec16 new_d = rounded_to_half(line.d), new_m = rounded_to_half(line.m + centre);
        vec16 inverse = inverse_of(new_d), from = new_m - centre;
        Sums squares;
        TUREEN_UNROLL
        for (int i = 0; i < GROUP; i++) {
            vec16 off = values.x[i] - (nearest_level(values.x[i], from, inverse) * new_d + from);
            squares.add(i, off * off);
        }
        ivec16 is_less = less(squares.all(), error), is_line = less(zeros(), new_d);
        ivec16 is_better = each_int_part([&](int i) { return is_less.p[i] & is_line.p[i]; });
        error = choose(is_better, squares.all(), error);
        d = choose(is_better, new_d, d);
        m = choose(is_better, new_m, m);
    }
};

// The line with a small sum of squared differences from x, in half floats.
Line fitted(const Values& values) {
    vec16 least = values.x[0], greatest = least, mean = zeros();
    for (int i = 0; i < GROUP; i++) {
        least = min(least, values.x[i]);
        greatest = max(greatest, values.x[i]);
        mean = mean + values.x[i] * broadcast(1.0f / GROUP);
    }
    Values centred;
    for (int i = 0; i < GROUP; i++) centred.x[i] = values.x[i] - mean;
    vec16 range = greatest - least, steps = broadcast(LEVELS - 1);
    Fit fit{broadcast(__builtin_inff()), zeros(), rounded_to_half(mean)};
    fit.consider(centred, mean, {range / steps, least - mean});
    for (float low : MOVES) {
        for (float high : MOVES) {
            Line start{range * broadcast(1 - low - high) / steps, least - mean + range * broadcast(low)};
            fit.consider(centred, mean, solve(centred, start));
        }
    }
    return {fit.d, fit.m};
}

// The first `count` columns of a group. A group with a value that is not finite becomes NaN.
void put_q4_group(Values values, int count, uint8_t* integers, uint8_t* scales) {
    vec16 largest = zeros();
    for (int i = 0; i < GROUP; i++) {
        values.x[i] = values.x[i % count];
        largest = max_of_abs(largest, abs(values.x[i]));
    }
    ivec16 finite = less(largest, broadcast(__builtin_inff()));
    for (int i = 0; i < GROUP; i++) values.x[i] = choose(finite, values.x[i], zeros());
    Line line = fitted(values);
    vec16 inverse = inverse_of(line.d);
    for (int begin = 0; begin < GROUP; begin += 8) {
        ivec16 nibbles = int_zeros();
        for (int i = begin; i < begin + 8 && i < count; i++) {
            nibbles = with_bits(nibbles, nearest_level(values.x[i], line.m, inverse), i % 4 * 8 + i % 8 / 4 * 4);
        }
        store_ints(integers + begin * 8, nibbles);
    }
    store_halves(scales, choose(finite, line.d, broadcast(NAN_HALF)));
    store_halves(scales + 2 * TILE, choose(finite, line.m, broadcast(NAN_HALF)));
}

void put_q4_1(const Matrix& w, const float* rows, uint8_t* tile) {
    uint8_t* scales = tile + w.scales_offset;
    for (int begin = 0; begin < w.cols; begin += GROUP, tile += GROUP * TILE / 2, scales += 4 * TILE) {
        int count = w.cols - begin < GROUP ? w.cols - begin : GROUP;
        put_q4_group(transposed(rows, w.cols, begin), count, tile, scales);
    }
}

void put(const Matrix& w, const float* rows, uint8_t* tile) {
    switch (w.format) {
        case Format::F32: return put_f32(w, rows, tile);
        case Format::BF16: return put_bf16(w, rows, tile);
        case Format::Q16: return put_q16(w, rows, tile);
        case Format::Q8_ROW: return put_q8_row(w, rows, tile);
        default: return put_q4_1(w, rows, tile);
    }
}

}  // namespace

extern const PackKernels pack_kernels;
const PackKernels pack_kernels{put};

}  // namespace VARIANT
}  // namespace tureen
