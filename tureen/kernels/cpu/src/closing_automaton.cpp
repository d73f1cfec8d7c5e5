#include "closing_automaton.h"

#include <algorithm>
#include <deque>
#include <map>
#include <unordered_map>

namespace tureen {

namespace {

constexpr size_t MAX_STATES = 200000;
constexpr int64_t MAX_WORK = 300000000;  // instructions that are looked at

constexpr int32_t UNKNOWN = -2;

enum Truth { NO, YES, OPEN };

class Determination {
public:
    Determination(const Program& program, const std::vector<int32_t>& leaves, const BoolTree& condition,
                  int32_t counted)
        : program_(program), leaves_(leaves), condition_(condition), counted_(counted), is_countable_(counted >= 0) {}

    Automaton made() {
        read_code();
        read_classes();
        Key start;
        for (int32_t leaf : starts_) append({leaf}, start);
        number_of(start);
        std::vector<Moves> moves;
        for (size_t state = 0; state < states_.size(); state++) {  // grows
            moves.emplace_back();
            const Key key(states_.begin(state), states_.end(state));
            find_moves(key, moves.back());
        }
        return live(moves);
    }

private:
    using Key = std::vector<int32_t>;  // for each leaf its instructions in order, then -1

    // Numbers keys in the order in which they come.
    class Keys {
    public:
        size_t size() const { return hashes_.size(); }
        const int32_t* begin(size_t number) const { return items_.data() + from_[number]; }
        const int32_t* end(size_t number) const { return items_.data() + from_[number + 1]; }

        // -1 for a new one, which `add` may number.
        int32_t find(const Key& key) {
            if (size() * 2 >= slots_.size()) grow();
            hash_ = hash_of(key);
            for (at_ = hash_ & (slots_.size() - 1); slots_[at_] >= 0; at_ = (at_ + 1) & (slots_.size() - 1)) {
                const size_t number = size_t(slots_[at_]);
                if (hashes_[number] == hash_ && std::equal(key.begin(), key.end(), begin(number), end(number))) {
                    return int32_t(number);
                }
            }
            return -1;
        }
        // The key that was not found.
        void add(const Key& key) {
            slots_[at_] = int32_t(size());
            hashes_.push_back(hash_);
            items_.insert(items_.end(), key.begin(), key.end());
            from_.push_back(items_.size());
        }

    private:
        static uint64_t hash_of(const Key& key) {
            uint64_t hash = key.size();
            for (int32_t item : key) hash = (hash ^ uint32_t(item)) * 0x9E3779B97F4A7C15;
            return hash ^ hash >> 32;
        }
        void grow() {
            slots_.assign(std::max<size_t>(64, slots_.size() * 2), -1);
            for (size_t number = 0; number < size(); number++) {
                size_t at = hashes_[number] & (slots_.size() - 1);
                while (slots_[at] >= 0) at = (at + 1) & (slots_.size() - 1);
                slots_[at] = int32_t(number);
            }
        }

        std::vector<int32_t> items_, slots_;
        std::vector<size_t> from_{0};
        std::vector<uint64_t> hashes_;
        uint64_t hash_ = 0;
        size_t at_ = 0;
    };

    using Moves = std::vector<std::pair<int32_t, ByteSet>>;  // by target

    // Copies the instructions of the leaves, of all those that the program has so far.
    void read_code() {
        std::unordered_map<int32_t, int32_t> numbers, set_numbers;
        std::vector<int32_t> waiting;
        auto number = [&](int32_t pc) {
            const auto [at, is_new] = numbers.try_emplace(pc, int32_t(code_.size()));
            if (is_new) code_.push_back(program_.code[pc]), waiting.push_back(at->second);
            return at->second;
        };
        for (int32_t leaf : leaves_) starts_.push_back(number(leaf));
        while (!waiting.empty()) {
            const int32_t at = waiting.back();
            waiting.pop_back();
            Instruction i = code_[size_t(at)];
            if (i.op == BYTES) {
                const auto [set, is_new] = set_numbers.try_emplace(i.x, int32_t(sets_.size()));
                if (is_new) sets_.push_back(program_.sets[i.x]);
                i = {BYTES, set->second, number(i.y)};
            } else if (i.op == SPLIT) {
                const int32_t from = int32_t(followers_.size());
                for (int32_t to = i.x; to < i.x + i.y; to++) followers_.push_back(number(program_.targets[to]));
                i.x = from;
            }
            code_[size_t(at)] = i;
        }
        closures_.resize(code_.size());
        seen_.assign(code_.size(), 0);
    }

    // The bytes that no set tells apart.
    void read_classes() {
        const std::array<uint8_t, 256> classes = classes_of(sets_);
        const int32_t num_classes = *std::max_element(classes.begin(), classes.end()) + 1;
        members_.assign(size_t(num_classes), 0);
        bytes_.assign(size_t(num_classes), ByteSet{});
        for (int byte = 0; byte < 256; byte++) {
            members_[classes[byte]] = uint8_t(byte);
            put(bytes_[classes[byte]], uint8_t(byte));
        }
        classes_.resize(sets_.size());
        parts_of_.resize(sets_.size());
        seen_set_.assign(sets_.size(), 0);
        for (size_t set = 0; set < sets_.size(); set++) {
            for (int32_t cls = 0; cls < num_classes; cls++) {
                if (has(sets_[set], members_[size_t(cls)])) classes_[set].push_back(cls);
            }
        }
    }

    // What is reached from an instruction without a byte, in order.
    const std::vector<int32_t>& closure(int32_t from) {
        std::vector<int32_t>& reached = closures_[size_t(from)];
        if (!reached.empty()) return reached;
        waiting_.assign(1, from);
        round_++;
        while (!waiting_.empty()) {
            const int32_t pc = waiting_.back();
            waiting_.pop_back();
            if (++work_ > MAX_WORK) throw TooLarge("an automaton takes too much work");
            if (seen_[pc] == round_) continue;
            seen_[pc] = round_;
            const Instruction& i = code_[pc];
            if (i.op == SPLIT) {
                waiting_.insert(waiting_.end(), followers_.data() + i.x, followers_.data() + i.x + i.y);
            } else {
                reached.push_back(pc);
            }
        }
        std::sort(reached.begin(), reached.end());
        return reached;
    }

    // Appends what is reached from these instructions without a byte.
    void append(const std::vector<int32_t>& from, Key& key) {
        if (from.size() == 1) {
            const std::vector<int32_t>& reached = closure(from[0]);
            key.insert(key.end(), reached.begin(), reached.end());
        } else if (!from.empty()) {
            const size_t start = key.size();
            for (int32_t pc : from) closure(pc);  // which marks instructions too
            round_++;
            bool is_sorted = true;
            for (int32_t pc : from) {
                for (int32_t reached : closures_[size_t(pc)]) {
                    if (seen_[reached] == round_) continue;
                    seen_[reached] = round_;
                    is_sorted = is_sorted && (key.size() == start || key.back() < reached);
                    key.push_back(reached);
                }
                work_ += int64_t(closures_[size_t(pc)].size());
            }
            if (work_ > MAX_WORK) throw TooLarge("an automaton takes too much work");
            if (!is_sorted) std::sort(key.begin() + int64_t(start), key.end());
        }
        key.push_back(-1);
    }

    // Where each byte leads. Classes that the instructions of a state do not tell apart are looked at once.
    void find_moves(const Key& key, Moves& moves) {
        parts_.assign(members_.size(), 0);
        int32_t num_parts = 1;
        set_round_++;
        here_.clear();
        for (int32_t pc : key) {
            if (pc < 0 || code_[pc].op != BYTES) continue;
            int32_t& seen = seen_set_[size_t(code_[pc].x)];  // another instruction has the same set, often
            if (seen == set_round_) continue;
            seen = set_round_;
            here_.push_back(code_[pc].x);
            renamed_.assign(size_t(num_parts), -1);
            for (int32_t cls : classes_[size_t(code_[pc].x)]) {
                int32_t& name = renamed_[size_t(parts_[size_t(cls)])];
                if (name < 0) name = num_parts++;
                parts_[size_t(cls)] = name;
            }
        }
        find_next(key, size_t(num_parts));
        targets_.assign(size_t(num_parts), UNKNOWN);
        for (size_t cls = 0; cls < members_.size(); cls++) {
            int32_t& target = targets_[size_t(parts_[cls])];
            if (target == UNKNOWN) target = number_of(next_[size_t(parts_[cls])]);
            if (target < 0) continue;
            auto at =
                std::lower_bound(moves.begin(), moves.end(), target,
                                 [](const Moves::value_type& move, int32_t number) { return move.first < number; });
            if (at == moves.end() || at->first != target) at = moves.insert(at, {target, ByteSet{}});
            for (int word = 0; word < 4; word++) at->second[word] |= bytes_[cls][word];
        }
    }

    // Finds where each part of the bytes leads.
    void find_next(const Key& key, size_t num_parts) {
        for (int32_t set : here_) {
            std::vector<int32_t>& parts = parts_of_[size_t(set)];
            parts.clear();
            for (int32_t cls : classes_[size_t(set)]) parts.push_back(parts_[size_t(cls)]);
            std::sort(parts.begin(), parts.end());
            parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
        }
        if (next_.size() < num_parts) next_.resize(num_parts), reached_.resize(num_parts);
        for (size_t part = 0; part < num_parts; part++) next_[part].clear();
        for (int32_t pc : key) {
            if (pc < 0) {
                for (size_t part = 0; part < num_parts; part++) {
                    append(reached_[part], next_[part]);
                    reached_[part].clear();
                }
            } else if (code_[pc].op == BYTES) {
                for (int32_t part : parts_of_[size_t(code_[pc].x)]) {
                    reached_[size_t(part)].push_back(code_[pc].y);
                }
            }
        }
    }

    // -1 where the condition can hold no more.
    int32_t number_of(const Key& key) {
        const int32_t known = states_.find(key);
        if (known >= 0) return known;
        now_.clear();
        later_.clear();
        bool is_between = false;
        for (size_t at = 0; at < key.size(); at++) {
            bool is_match = false;
            size_t from = at;
            for (; key[at] >= 0; at++) is_match = is_match || code_[key[at]].op == RET;
            if (int32_t(now_.size()) == counted_) is_between = is_match && is_next_item(&key[from], at - from);
            now_.push_back(is_match ? YES : NO);
            later_.push_back(at == from ? NO : OPEN);
        }
        const int32_t number = int32_t(states_.size());
        if (number > 0 && truth(condition_, later_) == NO) return -1;
        if (states_.size() >= MAX_STATES) throw TooLarge("an automaton has too many states");
        states_.add(key);
        accepts_.push_back(truth(condition_, now_) == YES);
        is_between_.push_back(is_between);
        return number;
    }

    // Whether the counted leaf, which may end, can only go on with another item. Else no item may be told from what is
    // longer, and nothing can be counted.
    bool is_next_item(const int32_t* pcs, size_t count) {
        if (first_item_.empty()) first_item_.assign(pcs, pcs + count);
        const bool is_same = first_item_.size() == count && std::equal(pcs, pcs + count, first_item_.begin());
        is_countable_ = is_countable_ && is_same;
        return is_same;
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

    const Program& program_;
    const std::vector<int32_t>& leaves_;
    const BoolTree& condition_;
    const int32_t counted_;
    bool is_countable_;
    Key first_item_;
    std::vector<int32_t> starts_;
    std::vector<Instruction> code_;
    std::vector<int32_t> followers_;
    std::vector<ByteSet> sets_;
    std::vector<uint8_t> members_;               // a byte of each class
    std::vector<ByteSet> bytes_;                 // all of them
    std::vector<std::vector<int32_t>> classes_;  // by set
    Keys states_;
    std::vector<Truth> now_, later_;
    std::vector<bool> accepts_, is_between_;
    std::vector<std::vector<int32_t>> closures_;  // by instruction, once it is known
    std::vector<int32_t> seen_, waiting_, parts_, renamed_, targets_, here_;
    std::vector<std::vector<int32_t>> parts_of_, reached_;  // of a set of bytes; by part
    std::vector<Key> next_;                                 // by part
    std::vector<int32_t> seen_set_;                         // by set: the state of which it was last looked at
    int32_t round_ = 0, set_round_ = 0;
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

Automaton determined(const Program& program, const std::vector<int32_t>& leaves, const BoolTree& condition,
                     int32_t counted) {
    return Determination(program, leaves, condition, counted).made();
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
        if (states.size() > MAX_STATES) throw TooLarge("an automaton has too many states");
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
