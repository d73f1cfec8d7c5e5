// A language as a program over bytes: what may come next, which rules are being matched, what it takes to end.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "closing_trie.h"

namespace tureen {

constexpr int32_t NEVER = 1 << 29;  // a cost: it cannot be ended

inline int32_t sum_of(int64_t a, int64_t b) { return int32_t(a + b < NEVER ? a + b : NEVER); }
inline int32_t times(int64_t count, int64_t cost) { return count == 0 ? 0 : sum_of(count * cost, 0); }

// The language is larger than is followed.
struct TooLarge : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum Op : int32_t {
    BYTES,  // one byte of set x, then y
    SPLIT,  // any of y targets, from x on
    CALL,   // rule x, then y
    RET,    // the end of a rule
    LOOP,   // a counted rule x: once more, or its end
    NEXT,   // one more time of rule x
    COUNT,  // one more item of the bounded rule x, then y
};

struct Instruction {
    int32_t op, x, y;
};

struct Rule {
    int32_t entry;
    int32_t body;         // of a counted rule, else -1
    int32_t least, most;  // times; most -1 = without end
    int32_t is_free = 0;  // it matches free text, with which an output that may end need not be brought to an end

    // An automaton that matches `most` items at most, of which it counts each.
    bool is_bounded() const { return body < 0 && most > 0; }
};

// A way to the end of a bounded rule.
struct Rest {
    int32_t tokens, items;
};

using ByteSet = std::array<uint64_t, 4>;

inline bool has(const ByteSet& set, uint8_t byte) { return set[byte >> 6] >> (byte & 63) & 1; }
inline void put(ByteSet& set, uint8_t byte) { set[byte >> 6] |= uint64_t(1) << (byte & 63); }

struct Program {
    std::vector<Instruction> code;
    std::vector<int32_t> targets;
    std::vector<ByteSet> sets;
    std::vector<Rule> rules;    // the first is the whole, those after it are its branches
    int32_t num_starts = 1;     // the whole and its branches
    std::vector<bool> skips;    // by instruction, while costs are looked for: what can be left out of a SPLIT is
    std::vector<int32_t> cost;  // by instruction: tokens to the end of its rule, or of the counted rule's item
    // Of bounded rules. Instructions of the same state of an automaton are of the same place.
    std::vector<int32_t> places;  // by instruction: its place, or -1; none at all where no rule is bounded
    std::vector<int32_t> from;    // by place, and one more: its first rest
    std::vector<Rest> rests;      // of a place: each takes more tokens than the one before, and fewer items
    std::vector<int32_t> fewest;  // by place: how few items lead to the end, whatever the tokens are

    int32_t place_of(int32_t pc) const { return places.empty() ? -1 : places[pc]; }
    // Tokens to the end of a bounded rule, from one of its places, with a limit on the items.
    int32_t cost_within(int32_t place, int32_t items) const {
        for (int32_t at = from[place]; at < from[place + 1]; at++) {
            if (rests[at].items <= items) return rests[at].tokens;
        }
        return NEVER;
    }

    // What a frame of this rule costs besides, where `count` times are over and one is under way.
    int32_t more(int32_t rule, int32_t count) const {
        const Rule& r = rules[rule];
        return r.body < 0 || count + 1 >= r.least ? 0 : times(r.least - count - 1, cost[r.body]);
    }
    int32_t least() const { return cost[rules[0].entry]; }
};

// Makes the instructions of a tree, as grammar/tree.py writes it. Throws TooLarge, std::invalid_argument.
Program emit_program(const int32_t* tree, size_t size);

// Fills in what it takes to end, in tokens of the vocabulary. Throws TooLarge.
void find_costs(Program& program, const Trie& trie);

// Fills in the rests. `bytes`, `component`: by instruction, how few bytes lead to the end of its rule, and which ones
// lead to each other. Throws TooLarge.
void find_rests(Program& program, const Trie& trie, const std::vector<int32_t>& bytes,
                const std::vector<int32_t>& component);

std::string pack(const Program& program);
Program unpack(const char* data, size_t size);  // throws std::invalid_argument

}  // namespace tureen
