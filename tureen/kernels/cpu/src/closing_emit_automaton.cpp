// Intersections and complements become instructions.
#include <algorithm>
#include <utility>

#include "closing_automaton.h"
#include "closing_emitter.h"
#include "closing_program.h"
#include "closing_tree.h"

namespace tureen {

namespace {

constexpr int64_t MAX_FLAT_CODE = 600000;
constexpr int64_t MAX_KEPT_WORK = 5000000;   // of the leaves that are kept for the next condition
constexpr int64_t MAX_WRITTEN_OUT = 200;     // states of an automaton that could count beside it
constexpr size_t MAX_SEARCHED_STATES = 100;  // of an automaton whose shortest text need not be that of fewest tokens

}  // namespace

int32_t Emitter::emit_regular(int32_t id, int32_t next) {
    auto known = regular_.find({id, is_flat_});
    if (known == regular_.end()) known = regular_.emplace(std::make_pair(id, is_flat_), made(id)).first;
    return known->second.most < 0 ? emit_automaton(known->second.machine, next) : emit_bounded(known->second, next);
}

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

// The automaton of a condition. `counted`: the leaf of which any number of items is taken, and `least` at least.
Automaton Emitter::automaton(const Condition& condition, int32_t counted, int32_t least) {
    const bool was_flat = is_flat_;
    if (!was_flat) {
        flat_limit_ = int64_t(program_.code.size()) + MAX_FLAT_CODE;
        std::swap(by_node_, by_flat_node_);  // what was emitted for other purposes may have counters in it
    }
    is_flat_ = true;
    BoolTree tree = condition.tree;
    std::vector<int32_t> starts;
    for (size_t at = 0; at < condition.leaves.size(); at++) {
        const int32_t leaf = condition.leaves[at];
        const bool is_counted = int32_t(at) == counted;
        starts.push_back(is_counted ? emit_items(tree_.nodes[leaf].numbers[0], 0)
                         : leaf < 0 ? emit_any_text()
                                    : emit(leaf, ret_));
    }
    if (least > 0) {
        const int32_t item = tree_.nodes[condition.leaves[size_t(counted)]].numbers[0];
        tree = {BoolTree::AND, 0, {tree, {BoolTree::LEAF, int32_t(starts.size()), {}}}};
        starts.push_back(emit_items(item, least));
    }
    is_flat_ = was_flat;
    if (!was_flat) std::swap(by_node_, by_flat_node_);
    return determined(starts, tree, counted);
}

// The automaton of a condition. `starts`: where its leaves begin. They are kept for the next condition, but not if they
// are large: the next one would reach the bounds sooner.
Automaton Emitter::determined(const std::vector<int32_t>& starts, const BoolTree& condition, int32_t counted) {
    leaf_work_ = 0;
    std::vector<Leaf*> leaves;
    for (int32_t start : starts) {
        leaves.push_back(&leaves_.try_emplace(start, program_, start, leaf_work_).first->second);
    }
    Automaton machine = tureen::determined(leaves, condition, counted);
    kept_work_ += leaf_work_;
    if (kept_work_ > MAX_KEPT_WORK) {
        leaves_.clear();
        kept_work_ = 0;
    }
    return machine;
}

Emitter::Regular Emitter::made(int32_t id) {
    Condition condition;
    condition.tree = condition_of(id, condition.leaves);
    const int32_t leaf = counted_leaf(condition);
    Regular regular;
    if (leaf >= 0) regular = counted(condition, leaf);
    if (regular.machine.moves.empty()) regular.machine = automaton(condition, -1, 0);
    return regular;
}

// Counts the items of a leaf beside the automaton of the rest, where that is much smaller. Without an automaton where
// the items cannot be told from each other.
Emitter::Regular Emitter::counted(const Condition& condition, int32_t leaf) {
    const std::vector<int32_t>& repeat = tree_.nodes[condition.leaves[size_t(leaf)]].numbers;
    const int32_t least = repeat[1], most = repeat[2];
    Automaton machine = automaton(condition, leaf, 0);
    if (!machine.is_countable) return {};
    if (machine.fewest_items()[0] < least) machine = automaton(condition, leaf, least);
    const int32_t longest = machine.most_items();
    if (longest >= 0 && longest <= most) return {std::move(machine)};
    const int64_t num_states = int64_t(machine.moves.size()) * most;
    if (num_states <= MAX_WRITTEN_OUT) return {with_at_most(machine, most)};
    if (!is_flat_) return {std::move(machine), most};
    if (num_states > MAX_FLAT_CODE) throw TooLarge("an automaton has too many states");
    return {with_at_most(machine, most)};
}

// The leaf that takes most to write out: a repeat with an end, which every text must match.
int32_t Emitter::counted_leaf(const Condition& condition) const {
    int32_t best = -1;
    std::vector<const BoolTree*> waiting{&condition.tree};
    while (!waiting.empty()) {
        const BoolTree& tree = *waiting.back();
        waiting.pop_back();
        if (tree.kind == BoolTree::AND) waiting.insert(waiting.end(), {&tree.parts[0], &tree.parts[1]});
        if (tree.kind != BoolTree::LEAF || condition.leaves[size_t(tree.leaf)] < 0) continue;
        auto most_of = [&](int32_t leaf) {
            const TreeNode& node = tree_.nodes[condition.leaves[size_t(leaf)]];
            return node.kind == TREE_REPEAT && !tree_.is_nullable(node.numbers[0]) ? node.numbers[2] : -1;
        };
        if (most_of(tree.leaf) > (best < 0 ? 0 : most_of(best))) best = tree.leaf;
    }
    return best;
}

// Any number of items, `least` at least.
int32_t Emitter::emit_items(int32_t item, int32_t least) {
    if (least * std::max<int64_t>(1, size_[item]) > flat_limit_) throw TooLarge("a repeat is too large");
    int32_t pc = add({SPLIT, 0, 0});
    set_targets(pc, {emit(item, pc), ret_});
    for (int32_t time = 0; time < least; time++) pc = emit(item, pc);
    return pc;
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

// A rule whose automaton counts items as they are over.
int32_t Emitter::emit_bounded(Regular& regular, int32_t next) {
    if (regular.machine.fewest_items()[0] > regular.most) return any_of({});
    if (regular.rule < 0) {
        const Automaton& machine = regular.machine;
        const int32_t rule = regular.rule = int32_t(program_.rules.size());
        std::vector<int32_t> states(machine.moves.size());
        auto mark = [&](int32_t pc, size_t state) {
            program_.places.resize(program_.code.size(), -1);
            program_.places[size_t(pc)] = num_places_ + int32_t(state);
        };
        const bool is_large = states.size() > MAX_SEARCHED_STATES;
        for (size_t state = 0; state < states.size(); state++)
            mark(states[state] = add({SPLIT, 0, 0}, is_large), state);
        const int32_t entry = add({SPLIT, 0, 0});
        set_targets(entry, {states[0]});
        program_.rules.push_back({entry, -1, 0, regular.most});
        for (size_t state = 0; state < states.size(); state++) {
            std::vector<int32_t> targets;
            for (auto& [set, to] : machine.moves[state]) {
                const int32_t target = states[size_t(to)];
                targets.push_back(add({BYTES, set_of(set), -1}));
                mark(targets.back(), state);
                const bool is_over = machine.is_between[size_t(to)];
                program_.code[size_t(targets.back())].y = is_over ? add({COUNT, rule, target}) : target;
            }
            if (machine.accepts[state]) targets.push_back(ret_);
            set_targets(states[state], targets);
        }
        num_places_ += int32_t(states.size());
    }
    return add({CALL, regular.rule, next});
}

int32_t Emitter::emit_any_text() {
    if (any_text_ < 0) {
        any_text_ = add({SPLIT, 0, 0});
        set_targets(any_text_, {emit_chars({0, 0xD7FF, 0xE000, 0x10FFFF}, any_text_), ret_});
    }
    return any_text_;
}

}  // namespace tureen
