#include "history.h"

#include <algorithm>
#include <random>

namespace tureen {

namespace {

constexpr size_t FEWEST_SLOTS = 1 << 10;
constexpr uint64_t ODD = 0x9E3779B97F4A7C15;  // 2^64 divided by the golden ratio (Knuth, TAOCP 3, 6.4)

// What hashes begin with. No client knows it, so none can choose tokens whose runs all have the same slot.
uint64_t secret() {
    static const uint64_t value = [] {
        std::random_device source;
        return uint64_t(source()) << 32 | source();
    }();
    return value;
}

}  // namespace

void History::append(const int64_t* tokens, size_t count) {
    size_t first = tokens_.size();
    tokens_.insert(tokens_.end(), tokens, tokens + count);
    grow();
    for (size_t at = first; at < tokens_.size(); at++)
        for (Index& index : indices_) enter(index, at);
}

History::Found History::look_up(size_t most) const {
    Found found;
    size_t end = tokens_.size();
    for (const Index& index : indices_) {
        if (end <= index.length) continue;
        size_t next = index.followers[slot_of(index, end)];
        size_t match = 0;
        while (match < std::min(next, LONGEST_MATCH) && tokens_[next - 1 - match] == tokens_[end - 1 - match]) match++;
        if (match == 0) continue;  // no token followed it yet
        found.match = match;
        for (size_t i = 0; i < most; i++)  // past the end, the run repeats
            found.following.push_back(next + i < end ? tokens_[next + i] : found.following[next + i - end]);
        break;
    }
    return found;
}

// Note that the token at `at` followed the run that ends there.
void History::enter(Index& index, size_t at) {
    if (at >= index.length) index.followers[slot_of(index, at)] = uint32_t(at);
}

// Make room for all tokens; the runs are entered again, in their order.
void History::grow() {
    size_t slots = std::max(FEWEST_SLOTS, indices_[0].followers.size());
    while (slots < 2 * tokens_.size()) slots *= 2;
    for (Index& index : indices_) {
        if (index.followers.size() == slots) continue;
        index.followers.assign(slots, 0);
        for (size_t at = 0; at < tokens_.size(); at++) enter(index, at);
    }
}

// The slot of the run that ends before `end`: its own, or an empty one.
size_t History::slot_of(const Index& index, size_t end) const {
    uint64_t hash = secret();
    for (size_t i = end - index.length; i < end; i++) hash = (hash ^ uint64_t(tokens_[i])) * ODD;
    const int64_t* run = tokens_.data() + end - index.length;
    for (size_t slot = hash >> 20;; slot++) {
        slot &= index.followers.size() - 1;
        size_t next = index.followers[slot];
        if (next == 0 || std::equal(run, run + index.length, tokens_.data() + next - index.length)) return slot;
    }
}

}  // namespace tureen
