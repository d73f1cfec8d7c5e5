// Arithmetic on rows of logits.
#pragma once

#include <cstdint>

namespace tureen {

constexpr int WEIGHT_BLOCK = 256;  // weights summed together; a power of two
constexpr int PEAK_BLOCK = 64;     // logits of which the largest is looked up when the best are sought

struct SamplingKernels {
    // The largest of those logits [n] that have a bit in mask [ceil(n / 32)], lowest bit first, and the lowest index
    // that has it; mask may be null = all. NaN and 0 where any logit is NaN or +infinity, or all are -infinity;
    // -infinity and 0 where the mask leaves nothing else.
    void (*peak)(const float* logits, const uint32_t* mask, int n, float* value, int64_t* index);
    // out[i] = logits[i] where the mask has a bit, else -infinity. out may be logits.
    void (*forbid)(const float* logits, const uint32_t* mask, int n, float* out);
    // Softmax without its sum: out[i] = exp((logits[i] - peak) * scale), 0 where that is less than exp(-708). A logit
    // that equals the peak weighs exactly 1; one above it may exceed it by 700 / scale. An element does not depend on
    // its place.
    void (*weights)(const float* logits, int n, double peak, double scale, double* out);
    // The sums [ceil(n / 256)] of the weights of every 256 logits, each the same tree of additions.
    void (*weight_sums)(const float* logits, int n, double peak, double scale, double* sums);
    // These sums of weights [n] that are known.
    void (*fold_blocks)(const double* weights, int n, double* sums);
    // The largest [ceil(n / 64)] of every 64 logits; NaN is passed over.
    void (*block_peaks)(const float* logits, int n, float* out);
};

}  // namespace tureen
