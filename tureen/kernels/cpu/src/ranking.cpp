#include "ranking.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "kernels.h"
#include "sampling.h"

namespace tureen {
namespace {

// Integers whose ascending order is that of the ranking: the higher logit first, then the lower index.
uint64_t rank_key(const float* logits, int64_t index) {
    float with_one_zero = logits[index] + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &with_one_zero, sizeof bits);
    uint32_t descending = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return uint64_t(descending) << 32 | uint64_t(index);
}

bool can_search(const std::vector<float>& peaks, int width) { return size_t(width) * 2 <= peaks.size(); }

// Keys of tokens among which are the `width` best, and few others, found by the largest logit of every 64; none where
// there are too few of these.
void find_candidates(const float* logits, int n, const std::vector<float>& peaks, int width,
                     std::vector<uint64_t>& keys) {
    static thread_local std::vector<float> ordered;
    keys.clear();
    if (!can_search(peaks, width)) return;
    ordered = peaks;
    std::nth_element(ordered.begin(), ordered.begin() + (width - 1), ordered.end(), std::greater<float>());
    float least = ordered[width - 1];  // as many blocks have a logit that is not less
    for (size_t b = 0; b < peaks.size(); b++) {
        if (!(peaks[b] >= least)) continue;
        int64_t end = std::min<int64_t>(n, int64_t(b + 1) * PEAK_BLOCK);
        for (int64_t i = int64_t(b) * PEAK_BLOCK; i < end; i++) {
            if (logits[i] >= least) keys.push_back(rank_key(logits, i));
        }
    }
    if (keys.size() < size_t(width)) keys.clear();  // NaN was passed over
}

// By their upper halves, 11 bits at a time; keys with equal ones stay in the order they have.
void radix_sort(std::vector<uint64_t>& keys) {
    constexpr int BITS = 11, BUCKETS = 1 << BITS, ROUNDS = 3;
    auto bucket = [](uint64_t key, int round) { return key >> (32 + round * BITS) & (BUCKETS - 1); };
    static thread_local std::vector<uint64_t> sorted;
    sorted.resize(keys.size());
    uint32_t places[ROUNDS][BUCKETS] = {};
    for (uint64_t key : keys) {
        for (int round = 0; round < ROUNDS; round++) places[round][bucket(key, round)]++;
    }
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t begin = 0;
        for (uint32_t& place : places[round]) begin += std::exchange(place, begin);
        for (uint64_t key : keys) sorted[places[round][bucket(key, round)]++] = key;
        keys.swap(sorted);
    }
}

}  // namespace

void best_tokens(const float* logits, int n, const std::vector<float>& peaks, int width, int64_t* out) {
    static thread_local std::vector<uint64_t> keys;
    find_candidates(logits, n, peaks, width, keys);
    if (keys.empty()) {
        keys.resize(size_t(n));
        for (int64_t i = 0; i < n; i++) keys[size_t(i)] = rank_key(logits, i);
        radix_sort(keys);
    } else {
        if (keys.size() > 2 * size_t(width)) std::nth_element(keys.begin(), keys.begin() + width, keys.end());
        std::sort(keys.begin(), keys.begin() + std::min(keys.size(), 2 * size_t(width)));
    }
    for (int i = 0; i < width; i++) out[i] = int64_t(keys[i] & 0xffffffffu);
}

void best_tokens(const float* logits, int n, int width, int64_t* out) {
    static thread_local std::vector<float> peaks;
    find_peaks(logits, n, peaks);
    best_tokens(logits, n, peaks, width, out);
}

void find_peaks(const float* logits, int n, std::vector<float>& peaks) {
    peaks.resize((size_t(n) + PEAK_BLOCK - 1) / PEAK_BLOCK);
    kernels().sampling->block_peaks(logits, n, peaks.data());
}

}  // namespace tureen
