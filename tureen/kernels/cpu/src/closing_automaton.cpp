#include "closing_automaton.h"

#include <algorithm>
#include <deque>
#include <map>

namespace tureen {

namespace {

constexpr int32_t UNKNOWN = -2;

enum Truth { NO, YES, OPEN };

// The product of the leaves' automata, as far as the condition can hold.
class Determination {
public:
    Determination(const std::vector<Leaf*>& leaves, const BoolTree& condition, int32_t counted)
        : leaves_(leaves), condition_(condition), counted_(counted), is_countable_(counted >= 0) {}

    Automaton made() {
        find_classes();
        order_leaves();
        number_of(Key(leaves_.size(), 0));
        std::vector<Moves> moves;
        for (size_t state = 0; state < states_.size(); state++) {  // grows
            moves.emplace_back();
            find_moves(state, moves.back());
        }
        return live(moves);
    }

private:
    using Key = SequenceNumbers::Key;                        // a state of each leaf
    using Moves = std::vector<std::pair<int32_t, ByteSet>>;  // by target

    // Bytes of a class are of the same class in each leaf.
    struct Class {
        std::vector<uint8_t> of_leaves;
        ByteSet bytes{};
    };

    void find_classes() {
        std::array<size_t, 256> class_of{};
        size_t count = 1;
        for (const Leaf* leaf : leaves_) {
            std::vector<int32_t> numbers(count * 256, -1);  // by both classes
            count = 0;
            for (size_t byte = 0; byte < 256; byte++) {
                int32_t& number = numbers[class_of[byte] * 256 + leaf->classes()[byte]];
                if (number < 0) number = int32_t(count++);
                class_of[byte] = size_t(number);
            }
        }
        classes_.resize(count);
        for (size_t byte = 0; byte < 256; byte++) {
            Class& cls = classes_[class_of[byte]];
            put(cls.bytes, uint8_t(byte));
            if (!cls.of_leaves.empty()) continue;
            for (const Leaf* leaf : leaves_) cls.of_leaves.push_back(leaf->classes()[byte]);
        }
    }

    // Leaves without which the condition cannot hold come first: after their end no other one is asked.
    void order_leaves() {
        std::vector<Truth> dead(leaves_.size(), OPEN);
        for (size_t leaf = 0; leaf < leaves_.size(); leaf++) {
            dead[leaf] = NO;
            is_needed_.push_back(truth(condition_, dead) == NO);
            dead[leaf] = OPEN;
            order_.push_back(leaf);
        }
        std::stable_partition(order_.begin(), order_.end(), [&](size_t leaf) { return is_needed_[leaf]; });
    }

    void find_moves(size_t state, Moves& moves) {
        const Key key(states_.begin(state), states_.end(state));
        next_.assign(leaves_.size(), UNKNOWN);
        for (const Class& cls : classes_) {
            const int32_t target = after(key, cls);
            if (target < 0) continue;
            auto at =
                std::lower_bound(moves.begin(), moves.end(), target,
                                 [](const Moves::value_type& move, int32_t number) { return move.first < number; });
            if (at == moves.end() || at->first != target) at = moves.insert(at, {target, ByteSet{}});
            for (int word = 0; word < 4; word++) at->second[size_t(word)] |= cls.bytes[size_t(word)];
        }
    }

    // -1 where the condition can hold no more.
    int32_t after(const Key& key, const Class& cls) {
        bool is_same = true;  // as the last one that was looked up
        for (size_t leaf : order_) {
            const int32_t next = leaves_[leaf]->after(key[leaf], cls.of_leaves[leaf]);
            is_same = is_same && next == next_[leaf];
            next_[leaf] = next;
            if (is_needed_[leaf] && leaves_[leaf]->is_dead(next)) {
                next_[order_.back()] = UNKNOWN;
                return -1;
            }
        }
        if (!is_same) last_ = number_of(next_);
        return last_;
    }

    // -1 where the condition can hold no more.
    int32_t number_of(const Key& key) {
        const int32_t known = states_.find(key);
        if (known >= 0) return known;
        now_.clear();
        later_.clear();
        for (size_t leaf = 0; leaf < key.size(); leaf++) {
            now_.push_back(leaves_[leaf]->accepts(key[leaf]) ? YES : NO);
            later_.push_back(leaves_[leaf]->is_dead(key[leaf]) ? NO : OPEN);
        }
        const bool is_between = counted_ >= 0 && now_[size_t(counted_)] == YES && is_next_item(key[size_t(counted_)]);
        const int32_t number = int32_t(states_.size());
        if (number > 0 && truth(condition_, later_) == NO) return -1;
        if (states_.size() >= MAX_AUTOMATON_STATES) throw TooLarge("an automaton has too many states");
        states_.add(key);
        accepts_.push_back(truth(condition_, now_) == YES);
        is_between_.push_back(is_between);
        return number;
    }

    // Whether the counted leaf, which may end, can only go on with another item. Else no item may be told from what is
    // longer, and nothing can be counted.
    bool is_next_item(int32_t state) {
        if (first_item_ < 0) first_item_ = state;
        is_countable_ = is_countable_ && first_item_ == state;
        return first_item_ == state;
    }

    static Truth truth(const BoolTree& tree, const std::vector<Truth>& leaves) {
        if (tree.kind == BoolTree::LEAF) return leaves[size_t(tree.leaf)];
        Truth first = truth(tree.parts[0], leaves);
        if (tree.kind == BoolTree::NOT) return first == OPEN ? OPEN : first == YES ? NO : YES;
        if (first == NO) return NO;
        Truth second = truth(tree.parts[1], leaves);
        return second == NO ? NO : first == OPEN ? OPEN : second;
    }

    // Without the states from which no accepting one is reached.
    Automaton live(const std::vector<Moves>& moves) const {
        std::vector<std::vector<int32_t>> sources(moves.size());
        for (size_t state = 0; state < moves.size(); state++) {
            for (auto& move : moves[state]) sources[size_t(move.first)].push_back(int32_t(state));
        }
        std::vector<bool> is_live(moves.size(), false);
        std::vector<int32_t> waiting, place(moves.size(), -1), order{0};
        for (size_t state = 0; state < moves.size(); state++) {
            if (accepts_[state]) waiting.push_back(int32_t(state));
        }
        while (!waiting.empty()) {
            int32_t state = waiting.back();
            waiting.pop_back();
            if (is_live[size_t(state)]) continue;
            is_live[size_t(state)] = true;
            waiting.insert(waiting.end(), sources[size_t(state)].begin(), sources[size_t(state)].end());
        }
        Automaton machine;
        machine.is_countable = is_countable_;
        place[0] = 0;
        for (size_t at = 0; at < order.size(); at++) {  // grows
            size_t state = size_t(order[at]);
            machine.moves.emplace_back();
            machine.accepts.push_back(accepts_[state]);
            machine.is_between.push_back(is_between_[state]);
            for (auto& [target, set] : moves[state]) {
                if (!is_live[size_t(target)]) continue;
                int32_t& number = place[size_t(target)];
                if (number < 0) {
                    number = int32_t(order.size());
                    order.push_back(target);
                }
                machine.moves.back().emplace_back(set, number);
            }
        }
        return machine;
    }

    const std::vector<Leaf*>& leaves_;
    const BoolTree& condition_;
    const int32_t counted_;
    bool is_countable_;
    int32_t first_item_ = -1;
    std::vector<Class> classes_;
    SequenceNumbers states_;
    std::vector<Truth> now_, later_;
    std::vector<bool> accepts_, is_between_;
    std::vector<bool> is_needed_;  // by leaf
    std::vector<size_t> order_;    // of leaves
    Key next_;
    int32_t last_ = -1;
};

}  // namespace

std::array<uint8_t, 256> classes_of(const std::vector<ByteSet>& sets) {
    std::vector<ByteSet> members{{~uint64_t(0), ~uint64_t(0), ~uint64_t(0), ~uint64_t(0)}};
    for (const ByteSet& set : sets) {
        const size_t count = members.size();
        for (size_t cls = 0; cls < count; cls++) {
            // It falls into those inside and those outside.
            ByteSet inside, outside;
            uint64_t is_inside = 0, is_outside = 0;
            for (size_t word = 0; word < 4; word++) {
                is_inside |= inside[word] = members[cls][word] & set[word];
                is_outside |= outside[word] = members[cls][word] & ~set[word];
            }
            if (is_inside == 0 || is_outside == 0) continue;
            members[cls] = outside;
            members.push_back(inside);
        }
    }
    std::array<uint8_t, 256> classes{};
    for (size_t cls = 1; cls < members.size(); cls++) {
        for (size_t word = 0; word < 4; word++) {
            for (uint64_t left = members[cls][word]; left != 0; left &= left - 1) {
                classes[word * 64 + size_t(__builtin_ctzll(left))] = uint8_t(cls);
            }
        }
    }
    return classes;
}

Automaton determined(const std::vector<Leaf*>& leaves, const BoolTree& condition, int32_t counted) {
    return Determination(leaves, condition, counted).made();
}

std::vector<int32_t> Automaton::fewest_items() const {
    std::vector<std::vector<int32_t>> sources(moves.size());
    for (size_t state = 0; state < moves.size(); state++) {
        for (auto& move : moves[state]) sources[size_t(move.second)].push_back(int32_t(state));
    }
    std::vector<int32_t> fewest(moves.size(), NEVER);
    std::deque<int32_t> waiting;  // by ever more items
    for (size_t state = 0; state < moves.size(); state++) {
        if (accepts[state]) fewest[state] = 0, waiting.push_back(int32_t(state));
    }
    while (!waiting.empty()) {
        const size_t state = size_t(waiting.front());
        waiting.pop_front();
        const int32_t items = fewest[state] + is_between[state];
        for (int32_t source : sources[state]) {
            if (fewest[size_t(source)] <= items) continue;
            fewest[size_t(source)] = items;
            is_between[state] ? waiting.push_back(source) : waiting.push_front(source);
        }
    }
    return fewest;
}

int32_t Automaton::most_items() const {
    // Topological order, of the states that lead to no circle.
    std::vector<int32_t> num_sources(moves.size(), 0), most(moves.size(), 0), waiting{0};
    for (auto& list : moves) {
        for (auto& move : list) num_sources[size_t(move.second)]++;
    }
    if (num_sources[0] > 0) return -1;
    size_t num_seen = 0;
    int32_t whole = 0;
    for (; !waiting.empty(); num_seen++) {
        const size_t state = size_t(waiting.back());
        waiting.pop_back();
        whole = std::max(whole, most[state]);
        for (auto& [set, to] : moves[state]) {
            most[size_t(to)] = std::max(most[size_t(to)], most[state] + is_between[size_t(to)]);
            if (--num_sources[size_t(to)] == 0) waiting.push_back(to);
        }
    }
    return num_seen == moves.size() ? whole : -1;
}

Automaton with_at_most(const Automaton& machine, int32_t most) {
    const std::vector<int32_t> fewest = machine.fewest_items();
    std::map<std::pair<int32_t, int32_t>, int32_t> numbers;
    std::vector<std::pair<int32_t, int32_t>> states;  // with the items before it
    auto number_of = [&](int32_t state, int32_t items) {
        auto [at, is_new] = numbers.try_emplace({state, items}, int32_t(states.size()));
        if (is_new) states.emplace_back(state, items);
        return at->second;
    };
    number_of(0, 0);
    Automaton bounded;
    for (size_t at = 0; at < states.size(); at++) {  // grows
        if (states.size() > MAX_AUTOMATON_STATES) throw TooLarge("an automaton has too many states");
        const auto [state, items] = states[at];
        bounded.moves.emplace_back();
        bounded.accepts.push_back(machine.accepts[size_t(state)]);
        for (auto& [set, to] : machine.moves[size_t(state)]) {
            const int32_t then = items + machine.is_between[size_t(to)];
            if (then + fewest[size_t(to)] <= most) bounded.moves.back().emplace_back(set, number_of(to, then));
        }
    }
    return bounded;
}

}  // namespace tureen
