// Intersections and complements become instructions.
#include <utility>

#include "closing_automaton.h"
#include "closing_emitter.h"
#include "closing_program.h"
#include "closing_tree.h"

namespace tureen {

namespace {

constexpr int64_t MAX_FLAT_CODE = 100000;
constexpr size_t MAX_SEARCHED_STATES = 100;  // of an automaton whose shortest text need not be that of fewest tokens

}  // namespace

int32_t Emitter::emit_automaton(const Automaton& machine, int32_t next) {
    std::vector<int32_t> states(machine.moves.size());
    for (int32_t& pc : states) pc = add({SPLIT, 0, 0}, states.size() > MAX_SEARCHED_STATES);
    for (size_t state = 0; state < states.size(); state++) {
        std::vector<int32_t> targets;
        for (auto& [set, target] : machine.moves[state]) targets.push_back(bytes(set, states[target]));
        if (machine.accepts[state]) targets.push_back(next);
        set_targets(states[state], targets);
    }
    return states[0];
}

// The automaton of an intersection or a complement.
const Automaton& Emitter::automaton(int32_t id) {
    auto known = automata_.find(id);
    if (known != automata_.end()) return known->second;
    bool was_flat = is_flat_;
    if (!was_flat) flat_limit_ = int64_t(program_.code.size()) + MAX_FLAT_CODE;
    is_flat_ = true;
    std::vector<int32_t> leaves;
    BoolTree condition = condition_of(id, leaves);
    // What was emitted for other purposes may have counters in it.
    std::unordered_map<int64_t, int32_t> others;
    std::swap(others, by_node_);
    for (int32_t& leaf : leaves) leaf = leaf < 0 ? emit_any_text() : emit(leaf, ret_);
    std::swap(others, by_node_);
    is_flat_ = was_flat;
    return automata_.emplace(id, determined(program_, leaves, condition)).first->second;
}

BoolTree Emitter::condition_of(int32_t id, std::vector<int32_t>& leaves) {
    const TreeNode& node = tree_.nodes[id];
    if (node.kind == TREE_BOTH) {
        BoolTree first = condition_of(node.numbers[0], leaves), second = condition_of(node.numbers[1], leaves);
        return {BoolTree::AND, 0, {first, second}};
    }
    if (node.kind == TREE_NOT) {
        leaves.push_back(-1);  // text at all
        BoolTree text{BoolTree::LEAF, int32_t(leaves.size()) - 1, {}};
        return {BoolTree::AND, 0, {text, {BoolTree::NOT, 0, {condition_of(node.numbers[0], leaves)}}}};
    }
    leaves.push_back(id);
    return {BoolTree::LEAF, int32_t(leaves.size()) - 1, {}};
}

int32_t Emitter::emit_any_text() {
    int32_t loop = add({SPLIT, 0, 0});
    set_targets(loop, {emit_chars({0, 0xD7FF, 0xE000, 0x10FFFF}, loop), ret_});
    return loop;
}

}  // namespace tureen
