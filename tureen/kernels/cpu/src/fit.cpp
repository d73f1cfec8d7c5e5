#include "fit.h"

#include <algorithm>
#include <cmath>

#include "formats.h"

namespace tureen {

namespace {

constexpr uint16_t NAN_HALF = 0x7e00;
constexpr float LARGEST_HALF = 65504;
constexpr int LEVELS = 16;

// By what part of the range the least and the greatest level are moved inwards, as starting points: to cut the ends off
// is good for the values between them.
constexpr float MOVES[] = {0.0f, -0.03f, 0.04f};

typedef float floats __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));
constexpr int LANES = 4, PIECES = GROUP / LANES;

struct Values {
    floats piece[PIECES];
};

float sum(floats x) { return (x[0] + x[1]) + (x[2] + x[3]); }

float clamped(float value) { return std::min(std::max(value, -LARGEST_HALF), LARGEST_HALF); }

// The level nearest to each value: round((x - m) / d) within 0 … 15.
Values nearest_levels(const Values& x, float d, float m) {
    const floats least = {}, greatest = least + float(LEVELS - 1);
    float inverse = 1 / d;
    Values levels;
    for (int i = 0; i < PIECES; i++) {
        floats level = (x.piece[i] - m) * inverse;
        level = level > least ? level : least;
        level = level < greatest ? level : greatest;
        levels.piece[i] = __builtin_convertvector(__builtin_convertvector(level + 0.5f, ints), floats);
    }
    return levels;
}

float squared_error(const Values& x, const Values& levels, float d, float m) {
    floats total = {};
    for (int i = 0; i < PIECES; i++) {
        floats error = x.piece[i] - (levels.piece[i] * d + m);
        total += error * error;
    }
    return sum(total);
}

struct Line {
    float d, m;
};

// Least squares: x ≈ d * level + m. `near`: a number among the x, which keeps the sums small. d is 0 or NaN when all
// levels are one.
Line solve(const Values& x, const Values& levels, float near) {
    floats l = {}, ll = {}, lx = {}, xs = {};
    for (int i = 0; i < PIECES; i++) {
        floats level = levels.piece[i], centred = x.piece[i] - near;
        l += level;
        ll += level * level;
        lx += level * centred;
        xs += centred;
    }
    float sum_l = sum(l), sum_x = sum(xs);
    float d = (GROUP * sum(lx) - sum_l * sum_x) / (GROUP * sum(ll) - sum_l * sum_l);
    return {d, near + (sum_x - d * sum_l) / GROUP};
}

// The best so far.
struct Fit {
    float error = INFINITY;
    AffineScale scale{};
    Values levels{};

    void consider(const Values& x, Line line) {
        AffineScale rounded{float_to_half(clamped(line.d)), float_to_half(clamped(line.m))};
        float d = half_to_float(rounded.d), m = half_to_float(rounded.m);
        if (!(d > 0)) return;
        Values nearest = nearest_levels(x, d, m);
        float found = squared_error(x, nearest, d, m);
        if (!(found < error)) return;
        error = found;
        scale = rounded;
        levels = nearest;
    }
};

uint32_t bits_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

}  // namespace

uint16_t float_to_half(float value) {
    uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffff;
    uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return sign | NAN_HALF;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
    if (magnitude < 0x38800000) return sign | uint16_t(std::nearbyint(std::fabs(value) * 0x1p24f));  // subnormal
    return sign | uint16_t((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13);
}

uint16_t float_to_bf16(float value) {
    uint32_t bits = bits_of_float(value);
    if (std::isnan(value)) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

AffineScale fit_affine(const float* values, int n, uint8_t* q) {
    std::fill(q, q + GROUP, uint8_t(0));
    float least = values[0], greatest = values[0], total = 0;
    for (int i = 0; i < n; i++) {
        if (!std::isfinite(values[i])) return {NAN_HALF, NAN_HALF};
        least = std::min(least, values[i]);
        greatest = std::max(greatest, values[i]);
        total += values[i] / float(n);
    }
    Values x;
    for (int i = 0; i < GROUP; i++) x.piece[i / LANES][i % LANES] = values[i % n];
    Fit fit;
    fit.scale.m = float_to_half(clamped(total));  // should no line do
    float range = greatest - least;
    fit.consider(x, {range / (LEVELS - 1), least});
    for (float low : MOVES) {
        for (float high : MOVES) {
            float d = range * (1 - low - high) / (LEVELS - 1);
            if (!(d > 0)) break;
            fit.consider(x, solve(x, nearest_levels(x, d, least + low * range), total));
        }
    }
    for (int i = 0; i < n; i++) q[i] = uint8_t(fit.levels.piece[i / LANES][i % LANES]);
    return fit.scale;
}

}  // namespace tureen
