// Floats -> 4-bit integers with a scale and an offset.
#pragma once

#include <cstdint>

namespace tureen {

uint16_t float_to_half(float value);  // nearest, ties to even
uint16_t float_to_bf16(float value);

struct AffineScale {
    uint16_t d, m;  // half floats
};

// q [32], 0 … 15, d and m with a small sum of (x - (d * q + m))² over the n <= 32 values; the rest of q is 0. A value
// that is not finite makes d and m NaN.
AffineScale fit_affine(const float* x, int n, uint8_t* q);

}  // namespace tureen
