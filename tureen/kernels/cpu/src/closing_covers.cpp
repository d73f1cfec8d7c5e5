// Places of an output that add nothing to another one. In an ambiguous language, each way to read the text so far has a
// place of its own. Most of them can go on only as another one can, and are dropped: otherwise their number grows with
// the output.
#include <algorithm>

#include "closing_place.h"

namespace tureen {

namespace {

constexpr int MAX_DEPTH = 6;         // frames in each other that are compared; an earlier answer ends it sooner
constexpr int MAX_STEPS = 300;       // of one comparison
constexpr int32_t MAX_BRANCHES = 8;  // of a choice that is looked into
constexpr size_t MAX_COMPARED = 8;   // places with which each one is compared
constexpr size_t FEW_KNOWN = 1 << 10;

}  // namespace

Follower::Known& Follower::known_of(int32_t larger, int32_t smaller) {
    const uint64_t hash = (uint64_t(uint32_t(larger)) << 32 | uint32_t(smaller)) * 0x9e3779b97f4a7c15u;
    return known_[size_t(hash >> 32) & (known_.size() - 1)];
}

void Follower::spread_known() {
    std::vector<Known> before(std::max(FEW_KNOWN, 8 * known_.size()));
    std::swap(before, known_);
    for (const Known& each : before) {
        if (each.larger >= 0) known_of(each.larger, each.smaller) = each;
    }
}

// Returns whether the rules around one frame can go on in each way in which those around another one can. False if that
// is not found out in a few steps.
bool Follower::covers(int32_t larger, int32_t smaller, int depth) {
    if (larger == smaller) return true;
    const Frame &more = frames_[size_t(larger)], &less = frames_[size_t(smaller)];
    if (smaller == 0 || larger == 0 || more.rule != less.rule || depth >= MAX_DEPTH) return false;
    if (frames_.size() * 2 >= known_.size()) spread_known();
    const Known known = known_of(larger, smaller);
    if (known.larger == larger && known.smaller == smaller) return known.is_covered;
    const bool is_covered = std::all_of(less.edges.begin(), less.edges.end(), [&](const Edge& edge) {
        return std::any_of(more.edges.begin(), more.edges.end(),
                           [&](const Edge& other) { return covers(other, edge, depth + 1); });
    });
    if (is_covered || depth == 0) known_of(larger, smaller) = {larger, smaller, is_covered};
    return is_covered;
}

// Compares what two places allow. A lower count allows more once it has reached the rule's minimum.
template <class Item>
bool Follower::covers(const Item& larger, const Item& smaller, int depth) {
    if (++compared_ > MAX_STEPS) return false;
    const Rule& rule = program_.rules[size_t(frames_[size_t(larger.frame)].rule)];
    const bool is_same_rule = frames_[size_t(larger.frame)].rule == frames_[size_t(smaller.frame)].rule;
    const bool is_lower = larger.count < smaller.count && larger.count >= rule.least;
    if (is_same_rule && (larger.count == smaller.count || is_lower) && leads_to(larger.pc, smaller.pc) &&
        covers(larger.frame, smaller.frame, depth)) {
        return true;
    }
    if (larger.frame == 0 || depth >= MAX_DEPTH || !may_end(larger.pc, larger.count, rule)) return false;
    const std::vector<Edge>& outer = frames_[size_t(larger.frame)].edges;
    const Edge wanted{smaller.pc, smaller.count, smaller.frame};
    return std::any_of(outer.begin(), outer.end(), [&](const Edge& edge) { return covers(edge, wanted, depth + 1); });
}

// Calls the body with each instruction that is reached without a byte, a call or a count. Returns whether the body was
// true of one.
template <class Body>
bool Follower::any_from(int32_t pc, int depth, const Body& body) {
    if (body(pc)) return true;
    const Instruction& i = program_.code[size_t(pc)];
    if (i.op != SPLIT || i.y > MAX_BRANCHES || depth >= MAX_DEPTH) return false;
    for (int32_t at = i.x; at < i.x + i.y && compared_ <= MAX_STEPS; at++) {
        compared_++;
        if (any_from(program_.targets[size_t(at)], depth + 1, body)) return true;
    }
    return false;
}

bool Follower::leads_to(int32_t from, int32_t to) {
    return any_from(from, 0, [to](int32_t pc) { return pc == to; });
}

// Returns whether its rule may end before the next byte, as far as is easily seen.
bool Follower::may_end(int32_t pc, int32_t count, const Rule& rule) {
    return any_from(pc, 0, [&](int32_t at) {
        const int32_t op = program_.code[size_t(at)].op;
        const bool is_last = op == NEXT && (rule.most < 0 || count < rule.most) && count + 1 >= rule.least;
        return op == RET || (op == LOOP && count >= rule.least) || is_last;
    });
}

// Drops each of the items that another one covers.
template <class Item>
void Follower::drop_covered(std::vector<Item>& items) {
    if (items.size() < 2) return;
    std::vector<Item> kept;
    const auto is_over = [&](const Item& larger, const Item& smaller) {
        compared_ = 0;
        const bool is_covered = covers(larger, smaller, 0);
        spend(1 + compared_);
        return is_covered;
    };
    for (size_t at = items.size(); at-- > 0;) {  // later frames mostly cover earlier ones
        const Item item = items[at];
        if (at + 1 < items.size() && is_over(items[at + 1], item)) continue;  // which is kept, or covered itself
        bool is_covered = false;
        const size_t first = kept.size() - std::min(kept.size(), MAX_COMPARED);  // the next ones in their order
        for (size_t other = kept.size(); other-- > first && !is_covered;) {
            is_covered = is_over(kept[other], item);
            if (is_covered || !is_over(item, kept[other])) continue;
            kept[other] = item;
            is_covered = true;
        }
        if (!is_covered) kept.push_back(item);
    }
    std::sort(kept.begin(), kept.end());
    items = std::move(kept);
}

// Of instructions that take a byte, only the same one can cover another.
void Follower::drop_covered_takers(Configurations& takers) {
    const auto is_same = [](const Configuration& a, const Configuration& b) { return a.pc == b.pc; };
    if (std::adjacent_find(takers.begin(), takers.end(), is_same) != takers.end()) drop_covered(takers);
}

template void Follower::drop_covered(std::vector<Edge>&);

}  // namespace tureen
