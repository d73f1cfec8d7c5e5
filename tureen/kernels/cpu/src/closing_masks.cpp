// Masks of the next token. Most states are inside strings. There, plain tokens come from precomputed bitmaps, and only
// the other tokens are followed byte by byte.
#include <algorithm>

#include "closing_place.h"

namespace tureen {

namespace {

constexpr size_t MAX_TARGETS = 8;  // states that the first bytes of a character may lead to

struct Range {
    int first, last;
};

// The UTF-8 byte ranges of plain characters: JSON does not escape them. Surrogates are excluded.
const std::vector<std::vector<Range>> PLAIN{
    {{0x20, 0x21}},
    {{0x23, 0x5b}},
    {{0x5d, 0x7e}},
    {{0xc2, 0xdf}, {0x80, 0xbf}},
    {{0xe0, 0xe0}, {0xa0, 0xbf}, {0x80, 0xbf}},
    {{0xe1, 0xec}, {0x80, 0xbf}, {0x80, 0xbf}},
    {{0xed, 0xed}, {0x80, 0x9f}, {0x80, 0xbf}},
    {{0xee, 0xef}, {0x80, 0xbf}, {0x80, 0xbf}},
    {{0xf0, 0xf0}, {0x90, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}},
    {{0xf1, 0xf3}, {0x80, 0xbf}, {0x80, 0xbf}, {0x80, 0xbf}},
    {{0xf4, 0xf4}, {0x80, 0x8f}, {0x80, 0xbf}, {0x80, 0xbf}},
};

}  // namespace

void Follower::read_characters() {
    is_plain_.assign(size_t(num_classes_), false);
    for (const std::vector<Range>& ranges : PLAIN) {
        for (int byte = ranges[0].first; ranges.size() == 1 && byte <= ranges[0].last; byte++) {
            is_plain_[classes_[size_t(byte)]] = true;
        }
        Steps steps;
        for (const Range& range : ranges) {
            steps.emplace_back();
            std::vector<bool> is_known(size_t(num_classes_), false);
            for (int byte = range.first; byte <= range.last; byte++) {
                if (is_known[classes_[size_t(byte)]]) continue;
                is_known[classes_[size_t(byte)]] = true;
                steps.back().push_back(uint8_t(byte));
            }
        }
        if (std::find(characters_.begin(), characters_.end(), steps) == characters_.end()) {
            characters_.push_back(std::move(steps));
        }
    }
}

// Normalises a count of a frame's rule. If one token cannot exceed the rule's maximum, the exact count changes neither
// the mask nor the cost.
int32_t Follower::uncounted(int32_t count, int32_t frame) const {
    const Rule& rule = program_.rules[size_t(frames_[size_t(frame)].rule)];
    if (rule.is_bounded()) return rule.most - count >= roomy_ ? 0 : count;
    if (rule.body < 0) return count;
    return rule.most < 0 || rule.most - count > trie_->longest ? std::min(count, rule.least) : count;
}

// Returns the state with normalised counts. No text up to the longest token tells it from `state`.
int32_t Follower::uncounted(int32_t state) {
    if (uncounted_[size_t(state)] != UNKNOWN) return uncounted_[size_t(state)];
    Configurations takers = states_[size_t(state)];
    for (Configuration& c : takers) {
        c = {c.pc, uncounted(c.count, c.frame), frames_[size_t(c.frame)].uncounted};
    }
    if (takers == states_[size_t(state)]) return uncounted_[size_t(state)] = state;
    std::sort(takers.begin(), takers.end());
    takers.erase(std::unique(takers.begin(), takers.end()), takers.end());
    const int32_t same = state_of(std::move(takers), accepts_[size_t(state)]);
    return uncounted_[size_t(state)] = same;
}

// Returns whether the state does not accept and all its configurations are in one frame.
bool Follower::is_in_one_frame(int32_t state) const {
    const Configurations& takers = states_[size_t(state)];
    return !accepts_[size_t(state)] && std::all_of(takers.begin(), takers.end(),
                                                   [&](const Configuration& c) { return c.frame == takers[0].frame; });
}

// Returns the configurations with the counts of the innermost frame less the lowest of these. Empty if the state
// accepts, or if its next items are near the bounds of the frame's rule.
//
// If plain characters lead from such a state to the same one with each of these counts higher by one, they do so from
// every state of the same shape: away from the bounds, the rule takes its items whatever their number is, and the other
// frames, which are older, know nothing of it.
std::vector<int32_t> Follower::counted_shape(int32_t state) const {
    const Configurations& takers = states_[size_t(state)];
    if (accepts_[size_t(state)] || takers.empty()) return {};
    int32_t frame = 0, low = NEVER, high = 0;
    for (const Configuration& c : takers) frame = std::max(frame, c.frame);
    for (const Configuration& c : takers) {
        if (c.frame == frame) low = std::min(low, c.count), high = std::max(high, c.count);
    }
    const Rule& rule = program_.rules[size_t(frames_[size_t(frame)].rule)];
    const bool is_between = rule.is_bounded() ? high + 1 + fewest_ <= rule.most
                                              : rule.body >= 0 && low >= rule.least && high + 1 < rule.most;
    if (!is_between) return {};
    std::vector<int32_t> shape{frame};
    for (const Configuration& c : takers) {
        shape.insert(shape.end(), {c.pc, c.frame == frame ? c.count - low : c.count, c.frame});
    }
    return shape;
}

// Returns the configurations of a state with each count of the innermost frame higher by one.
Follower::Configurations Follower::one_more(int32_t state) const {
    Configurations takers = states_[size_t(state)];
    int32_t frame = 0;
    for (const Configuration& c : takers) frame = std::max(frame, c.frame);
    for (Configuration& c : takers) c.count += c.frame == frame;
    std::sort(takers.begin(), takers.end());
    return takers;
}

// Returns the state after any plain character, or DEAD; SEVERAL if it depends on the character.
//
// If plain characters lead back to a state whose configurations are all in one frame, they do so in any other frame:
// they never pop it. If the rule could end, the state would accept or have a configuration of the calling frame.
int32_t Follower::after_plain(int32_t state) {
    if (after_plain_[size_t(state)] != UNKNOWN) return after_plain_[size_t(state)];
    std::vector<int32_t> shape;
    const bool is_in_one = is_in_one_frame(state);
    if (is_in_one) {
        for (const Configuration& c : states_[size_t(state)]) shape.insert(shape.end(), {c.pc, c.count});
        if (plain_loops_.count(shape) > 0) return after_plain_[size_t(state)] = state;
    }
    std::vector<int32_t> counted = counted_shape(state);
    if (plain_items_.count(counted) > 0) return after_plain_[size_t(state)] = state_of(one_more(state), false);
    int32_t target = UNKNOWN;
    for (const Steps& steps : characters_) {
        if (leads_to_one(state, steps, target)) continue;
        target = SEVERAL;
        break;
    }
    if (target == state && is_in_one) {
        num_configurations_ += int64_t(shape.size());
        plain_loops_.insert(std::move(shape));
    }
    if (target >= 0 && !counted.empty() && !accepts_[size_t(target)] && states_[size_t(target)] == one_more(state)) {
        num_configurations_ += int64_t(counted.size());
        plain_items_.insert(std::move(counted));
    }
    return after_plain_[size_t(state)] = target;
}

// Returns whether all these characters lead to one state: `target`, which is set if it is UNKNOWN.
bool Follower::leads_to_one(int32_t state, const Steps& steps, int32_t& target) {
    std::vector<int32_t> from{state}, to;
    for (const std::vector<uint8_t>& bytes : steps) {
        to.clear();
        for (int32_t at : from) {
            for (uint8_t byte : bytes) {
                const int32_t next = at < 0 ? DEAD : after_byte(at, byte);
                if (std::find(to.begin(), to.end(), next) == to.end()) to.push_back(next);
            }
        }
        if (to.size() > MAX_TARGETS) return false;
        std::swap(from, to);
    }
    if (target == UNKNOWN) target = from[0];
    return from.size() == 1 && from[0] == target;
}

// Returns how many plain characters can follow, up to the longest plain token; -1 if that depends on the characters.
int32_t Follower::num_plain(int32_t state) {
    int32_t count = 0;
    for (int32_t at = state; count < trie_->longest_plain; count++) {
        const int32_t next = after_plain(at);
        if (next == SEVERAL) return -1;
        if (next == DEAD) break;
        const int32_t same = uncounted(next);
        if (same == at) return trie_->longest_plain;
        at = same;
    }
    return count;
}

// Returns whether the cost stays within `bound` after 1 to `num_plain` plain characters.
bool Follower::is_near(int32_t state, int32_t num_plain, int32_t bound) {
    for (int32_t at = state; num_plain > 0; num_plain--) {
        const int32_t next = after_plain(at);
        if (cost(next) > bound) return false;
        const int32_t same = uncounted(next);
        if (same == at) break;
        at = same;
    }
    return true;
}

const Follower::Next& Follower::next(int32_t state) {
    const int32_t same = uncounted(state);
    if (auto known = next_.find(same); known != next_.end()) return known->second;
    Next next{std::vector<uint32_t>(trie_->num_words(), 0), {}, cost(same) + FAR};
    try {
        fill(same, next);
    } catch (const TooLarge&) {
        if (is_full_) throw;
        work_ = 0;
        next = nearest(same);
    }
    num_configurations_ += int64_t(next.mask.size()) / 8 + int64_t(next.far.size()) / 4;
    return next_.emplace(same, std::move(next)).first->second;
}

// Returns the tokens of one byte that lead nearest to the end, and none if the output may end here: all that is allowed
// where looking at more tokens takes too long. The output ends early instead of failing.
Follower::Next Follower::nearest(int32_t state) {
    Next next{std::vector<uint32_t>(trie_->num_words(), 0), {}, NEVER, true};
    if (accepts(state)) return next;
    int32_t least = NEVER;
    for (size_t token = 0; token < trie_->texts.size(); token++) {
        const std::string& text = trie_->texts[token];
        const int32_t target = text.size() == 1 ? after_byte(state, uint8_t(text[0])) : DEAD;
        if (target < 0 || cost(target) > least) continue;
        if (cost(target) < least) next.mask.assign(next.mask.size(), 0);
        least = cost(target);
        next.mask[token / 32] |= uint32_t(1) << (token % 32);
    }
    if (least == NEVER) throw TooLarge("it takes too long to follow");
    return next;
}

void Follower::fill(int32_t same, Next& next) {
    const int32_t count = num_plain(same);
    if (count >= 0 && is_near(same, count, next.bound)) {
        trie_->add_plain(count, next.mask);
        add_tokens(trie_->others, 1, trie_->others.size(), same, next);
    } else {
        add_by_first(same, next);
    }
}

void Follower::add_tokens(const Nodes& nodes, int32_t from, int32_t to, int32_t state, Next& next) {
    walk<true>(nodes, from, to, state, [&](int32_t token, int32_t target) {
        next.mask[size_t(token) / 32] |= uint32_t(1) << (token % 32);
        if (cost(target) > next.bound) next.far.emplace_back(token, cost(target));
    });
}

// If plain characters lead to different states, uses bitmaps after each first byte that any plain text can follow.
void Follower::add_by_first(int32_t state, Next& next) {
    const Nodes &all = *trie_, &others = trie_->others;
    for (int32_t node = 1, other = 1; node < all.size(); node = all.end[node]) {
        const uint8_t first = all.byte[node];
        while (other < others.size() && others.byte[other] < first) other = others.end[other];
        const int32_t target = after_byte(state, first);
        if (target < 0) continue;
        const bool is_plain = first < 0x80 && !trie_->plain_by_first[first].empty();
        if (!is_plain || num_plain(target) < trie_->longest_plain || cost(target) > next.bound ||
            !is_near(target, trie_->longest_plain, next.bound)) {
            add_tokens(all, node, all.end[node], state, next);
            continue;
        }
        for (size_t word = 0; word < next.mask.size(); word++) next.mask[word] |= trie_->plain_by_first[first][word];
        const bool has_others = other < others.size() && others.byte[other] == first;
        if (has_others) add_tokens(others, other, others.end[other], state, next);
    }
}

int32_t Follower::only_byte(int32_t state) {
    int32_t byte = -1;
    for (int32_t value = 0; value < 256; value++) {
        if (after_byte(state, uint8_t(value)) < 0) continue;
        if (byte >= 0) return -1;
        byte = value;
    }
    return byte;
}

bool Follower::is_over(int32_t state) {
    for (uint8_t member : members_) {
        if (after_byte(state, member) >= 0) return false;
    }
    return true;
}

}  // namespace tureen
