// Deterministic automata over bytes, of intersections and complements.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "closing_leaf.h"
#include "closing_program.h"

namespace tureen {

// Over texts each of which is matched or not: the leaves.
struct BoolTree {
    enum Kind { LEAF, AND, NOT } kind;
    int32_t leaf;
    std::vector<BoolTree> parts;
};

// It starts in state 0. From every state but an only one an accepting state is reached.
struct Automaton {
    std::vector<std::vector<std::pair<ByteSet, int32_t>>> moves;
    std::vector<bool> accepts;
    // Where a leaf is counted, which repeats an item without end: whether a whole number of items came before a state.
    std::vector<bool> is_between;
    bool is_countable = false;  // it is certain which bytes belong to which item

    // By state: how many items come at least, before an accepting state.
    std::vector<int32_t> fewest_items() const;
    // How many items come at most; -1 without a bound.
    int32_t most_items() const;
};

// The bytes in classes that these sets do not tell apart; the number of classes is that of the last class and 1.
std::array<uint8_t, 256> classes_of(const std::vector<ByteSet>& sets);

// The texts for which the condition holds. `counted`: the leaf whose items are counted, or -1. Throws TooLarge.
Automaton determined(const std::vector<Leaf*>& leaves, const BoolTree& condition, int32_t counted = -1);

// The texts of a countable automaton with `most` items at most. Throws TooLarge.
Automaton with_at_most(const Automaton& machine, int32_t most);

}  // namespace tureen
