// The facts that a guard enforces, as grammar/guard/facts.py declares them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tureen::guard {

constexpr int32_t NOWHERE = -1;  // the node of values in which nothing is guarded; no branch
constexpr int32_t THE_END = -1;  // the step after which nothing is guarded any more
constexpr int32_t NO_STEP = -2;  // no other step
constexpr int64_t WITHOUT = -1;  // without a limit

// A set of keys, as a deterministic automaton over code points that starts in state 0.
struct KeySet {
    struct Move {
        int64_t first, last;
        int32_t target;
    };

    bool has(const std::vector<uint32_t>& key) const;

    std::vector<std::vector<Move>> moves;  // by state, sorted
    std::vector<bool> accepting;
};

// One of several things that a value can be.
struct Variant {
    int32_t node, branch;
    bool counts;
};
using Variants = std::vector<Variant>;

struct CountedItems {
    const Variants& variants(int64_t index) const {
        return index < int64_t(first.size()) ? first[size_t(index)] : rest;
    }
    // How many items after an index can be counted.
    int64_t most_after(int64_t index) const;

    int64_t start = 0, least = 0, most = WITHOUT, most_items = WITHOUT;
    std::vector<Variants> first;
    Variants rest;
};

// The facts that values at one place are held to, and the nodes of what they hold.
struct Node {
    // The node of a key's value.
    int32_t node_of(const std::string& key) const;

    bool is_unique = false, has_step = false, has_count = false;
    int64_t least_keys = 0;
    std::vector<int32_t> first_items;
    int32_t items = NOWHERE, others = NOWHERE;
    std::unordered_map<std::string, int32_t> keys;
    std::vector<std::pair<KeySet, int32_t>> key_sets;
    Variants arrays, objects;
    CountedItems count;
};

struct Step {
    enum Kind { FIXED, FREE, VALUE, KEY } kind = FREE;
    std::vector<std::pair<std::string, int32_t>> texts;  // FIXED, FREE: texts and the steps after them
    int32_t otherwise = NO_STEP;             // FIXED: for other texts; VALUE: for what is no array, no object
    int64_t most_tokens = WITHOUT;           // FREE
    std::vector<std::string> never;          // FREE
    int32_t node = NOWHERE, then = THE_END;  // VALUE
    std::vector<std::string> stops;          // KEY: and by key, the steps after each
    std::unordered_map<std::string, std::vector<int32_t>> keys;
    std::vector<int32_t> others;
};

struct Facts {
    // Throws std::invalid_argument if an index is out of range.
    void check(size_t num_branches) const;

    std::vector<Node> nodes;
    std::vector<Step> steps;
    int32_t start = 0;
};

}  // namespace tureen::guard
