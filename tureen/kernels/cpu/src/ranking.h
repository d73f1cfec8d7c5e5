// The tokens with the largest logits.
#pragma once

#include <cstdint>
#include <vector>

namespace tureen {

// The `width` best tokens of a row of n logits, best first, the lower one first among equals. width <= n.
void best_tokens(const float* logits, int n, int width, int64_t* out);

// The largest logits of every 64 tokens.
void find_peaks(const float* logits, int n, std::vector<float>& peaks);

// The same tokens, where these are known.
void best_tokens(const float* logits, int n, const std::vector<float>& peaks, int width, int64_t* out);

}  // namespace tureen
