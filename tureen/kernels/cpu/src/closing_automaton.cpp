#include "closing_automaton.h"

#include <algorithm>
#include <map>
#include <unordered_map>

namespace tureen {

namespace {

constexpr size_t MAX_STATES = 20000;
constexpr int64_t MAX_WORK = 20000000;  // instructions that are looked at

enum Truth { NO, YES, OPEN };

class Determination {
public:
    Determination(const Program& program, const std::vector<int32_t>& leaves, const BoolTree& condition)
        : program_(program), leaves_(leaves), condition_(condition), seen_(program.code.size(), 0) {}

    Automaton made() {
        classes_ = classes_of(reached_sets());
        int32_t num_classes = *std::max_element(classes_.begin(), classes_.end()) + 1;
        std::vector<uint8_t> member(size_t(num_classes), 0);
        std::vector<ByteSet> bytes(size_t(num_classes), ByteSet{});
        for (int byte = 0; byte < 256; byte++) {
            member[classes_[byte]] = uint8_t(byte);
            put(bytes[classes_[byte]], uint8_t(byte));
        }
        Key start;
        for (int32_t leaf : leaves_) append({leaf}, start);
        number_of(start);
        std::vector<std::map<int32_t, ByteSet>> moves;
        for (size_t state = 0; state < keys_.size(); state++) {  // grows
            moves.emplace_back();
            for (int32_t cls = 0; cls < num_classes; cls++) {
                int32_t target = number_of(after(*keys_[state], member[cls]));
                if (target < 0) continue;
                ByteSet& set = moves[state][target];
                for (int word = 0; word < 4; word++) set[word] |= bytes[cls][word];
            }
        }
        return live(moves);
    }

private:
    using Key = std::vector<int32_t>;  // for each leaf its instructions in order, then -1

    struct KeyHash {
        size_t operator()(const Key& key) const {
            uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
            for (int32_t pc : key) hash = (hash ^ uint32_t(pc)) * 0x100000001b3;
            return size_t(hash ^ hash >> 29);
        }
    };

    std::vector<ByteSet> reached_sets() {
        std::vector<ByteSet> sets;
        std::vector<int32_t> waiting(leaves_);
        std::vector<bool> seen(program_.code.size(), false), seen_set(program_.sets.size(), false);
        while (!waiting.empty()) {
            int32_t pc = waiting.back();
            waiting.pop_back();
            if (seen[pc]) continue;
            seen[pc] = true;
            const Instruction& i = program_.code[pc];
            if (i.op == BYTES) {
                if (!seen_set[i.x]) sets.push_back(program_.sets[i.x]);
                seen_set[i.x] = true;
                waiting.push_back(i.y);
            } else if (i.op == SPLIT) {
                waiting.insert(waiting.end(), program_.targets.data() + i.x, program_.targets.data() + i.x + i.y);
            }
        }
        return sets;
    }

    // Appends what is reached from these instructions without a byte.
    void append(std::vector<int32_t> waiting, Key& key) {
        size_t from = key.size();
        round_++;
        while (!waiting.empty()) {
            int32_t pc = waiting.back();
            waiting.pop_back();
            if (++work_ > MAX_WORK) throw TooLarge("an automaton takes too much work");
            if (seen_[pc] == round_) continue;
            seen_[pc] = round_;
            const Instruction& i = program_.code[pc];
            if (i.op == SPLIT) {
                waiting.insert(waiting.end(), program_.targets.data() + i.x, program_.targets.data() + i.x + i.y);
            } else {
                key.push_back(pc);
            }
        }
        std::sort(key.begin() + int64_t(from), key.end());
        key.push_back(-1);
    }

    Key after(const Key& key, uint8_t byte) {
        Key next;
        std::vector<int32_t> targets;
        for (int32_t pc : key) {
            if (pc < 0) {
                append(std::move(targets), next);
                targets.clear();
            } else if (program_.code[pc].op == BYTES && has(program_.sets[program_.code[pc].x], byte)) {
                targets.push_back(program_.code[pc].y);
            }
        }
        return next;
    }

    // -1 where the condition can hold no more.
    int32_t number_of(Key key) {
        auto known = numbers_.find(key);
        if (known != numbers_.end()) return known->second;
        std::vector<Truth> now, later;
        for (size_t at = 0; at < key.size(); at++) {
            bool is_match = false;
            size_t from = at;
            for (; key[at] >= 0; at++) is_match = is_match || program_.code[key[at]].op == RET;
            now.push_back(is_match ? YES : NO);
            later.push_back(at == from ? NO : OPEN);
        }
        bool is_start = keys_.empty();
        if (!is_start && truth(condition_, later) == NO) return -1;
        if (keys_.size() >= MAX_STATES) throw TooLarge("an automaton has too many states");
        auto at = numbers_.emplace(std::move(key), int32_t(keys_.size())).first;
        keys_.push_back(&at->first);
        accepts_.push_back(truth(condition_, now) == YES);
        return at->second;
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
    Automaton live(const std::vector<std::map<int32_t, ByteSet>>& moves) const {
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
        place[0] = 0;
        for (size_t at = 0; at < order.size(); at++) {  // grows
            size_t state = size_t(order[at]);
            machine.moves.emplace_back();
            machine.accepts.push_back(accepts_[state]);
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

    const Program& program_;
    const std::vector<int32_t>& leaves_;
    const BoolTree& condition_;
    std::array<uint8_t, 256> classes_{};
    std::unordered_map<Key, int32_t, KeyHash> numbers_;
    std::vector<const Key*> keys_;
    std::vector<bool> accepts_;
    std::vector<int32_t> seen_;
    int32_t round_ = 0;
    int64_t work_ = 0;
};

}  // namespace

std::array<uint8_t, 256> classes_of(const std::vector<ByteSet>& sets) {
    std::array<uint8_t, 256> classes{};
    int32_t count = 1;
    for (const ByteSet& set : sets) {
        // Each class falls into those inside and those outside.
        std::array<int32_t, 256> inside;
        std::array<bool, 256> is_outside{};
        inside.fill(-1);
        for (int byte = 0; byte < 256; byte++) is_outside[classes[byte]] |= !has(set, uint8_t(byte));
        for (int byte = 0; byte < 256; byte++) {
            uint8_t old = classes[byte];
            if (!has(set, uint8_t(byte)) || !is_outside[old]) continue;
            if (inside[old] < 0) inside[old] = count++;
            classes[byte] = uint8_t(inside[old]);
        }
    }
    return classes;
}

Automaton determined(const Program& program, const std::vector<int32_t>& leaves, const BoolTree& condition) {
    return Determination(program, leaves, condition).made();
}

}  // namespace tureen
