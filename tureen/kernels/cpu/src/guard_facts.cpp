#include "guard_facts.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "guard_texts.h"

namespace tureen::guard {

namespace {

void check_number(int32_t number, int32_t least, size_t count) {
    if (number < least || int64_t(number) >= int64_t(count)) {
        throw std::invalid_argument("the facts of a guard lead to nothing: they are not of this version");
    }
}

void check_variants(const Variants& variants, size_t num_nodes, size_t num_branches) {
    for (const Variant& variant : variants) {
        check_number(variant.node, NOWHERE, num_nodes);
        check_number(variant.branch, NOWHERE, num_branches);
    }
}

bool has_counted(const Variants& variants) {
    return std::any_of(variants.begin(), variants.end(), [](const Variant& variant) { return variant.counts; });
}

void check_node(const Node& node, size_t num_nodes, size_t num_branches) {
    for (int32_t item : node.first_items) check_number(item, NOWHERE, num_nodes);
    check_number(node.items, NOWHERE, num_nodes);
    check_number(node.others, NOWHERE, num_nodes);
    for (const auto& [key, value] : node.keys) check_number(value, NOWHERE, num_nodes);
    for (const auto& [keys, value] : node.key_sets) {
        check_number(value, NOWHERE, num_nodes);
        check_number(0, 0, keys.moves.size());
        check_number(int32_t(keys.moves.size()) - 1, 0, keys.accepting.size());
        for (const auto& moves : keys.moves) {
            for (const KeySet::Move& move : moves) check_number(move.target, 0, keys.moves.size());
        }
    }
    check_variants(node.arrays, num_nodes, num_branches);
    check_variants(node.objects, num_nodes, num_branches);
    for (const Variants& variants : node.count.first) check_variants(variants, num_nodes, num_branches);
    check_variants(node.count.rest, num_nodes, num_branches);
}

void check_step(const Step& step, size_t num_steps, size_t num_nodes) {
    for (const auto& [text, then] : step.texts) check_number(then, THE_END, num_steps);
    check_number(step.otherwise, NO_STEP, num_steps);
    check_number(step.node, NOWHERE, num_nodes);
    check_number(step.then, THE_END, num_steps);
    if (step.kind != Step::KEY) return;
    const auto check_key = [&](const std::vector<int32_t>& steps) {
        check_number(int32_t(step.stops.size()) - 1, -1, steps.size());
        for (int32_t then : steps) check_number(then, THE_END, num_steps);
    };
    check_key(step.others);
    for (const auto& [key, steps] : step.keys) check_key(steps);
}

}  // namespace

bool KeySet::has(const std::vector<uint32_t>& key) const {
    size_t state = 0;
    for (uint32_t point : key) {
        const std::vector<Move>& known = moves[state];
        const auto after = std::upper_bound(known.begin(), known.end(), int64_t(point),
                                            [](int64_t value, const Move& move) { return value < move.first; });
        if (after == known.begin() || (after - 1)->last < int64_t(point)) return false;
        state = size_t((after - 1)->target);
    }
    return accepting[state];
}

int64_t CountedItems::most_after(int64_t index) const {
    const int64_t most = most_items < 0 ? std::numeric_limits<int64_t>::max() : most_items;
    const int64_t num_first = int64_t(first.size());
    int64_t count = 0;
    for (int64_t at = index + 1; at < std::min(num_first, most); at++) count += has_counted(first[size_t(at)]);
    const int64_t rest_from = std::max(index + 1, num_first);
    return has_counted(rest) && most > rest_from ? most - rest_from + count : count;
}

int32_t Node::node_of(const std::string& key) const {
    if (const auto known = keys.find(key); known != keys.end()) return known->second;
    if (key_sets.empty()) return others;
    const std::vector<uint32_t> points = code_points(key);
    for (const auto& [set, node] : key_sets) {
        if (set.has(points)) return node;
    }
    return others;
}

void Facts::check(size_t num_branches) const {
    check_number(start, THE_END, steps.size());
    for (const Node& node : nodes) check_node(node, nodes.size(), num_branches);
    for (const Step& step : steps) check_step(step, steps.size(), nodes.size());
}

}  // namespace tureen::guard
