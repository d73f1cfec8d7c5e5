#include "closing_leaf.h"

#include <algorithm>
#include <unordered_map>

#include "closing_automaton.h"

namespace tureen {

namespace {

constexpr int64_t MAX_WORK = 300000000;  // instructions that are looked at
constexpr int64_t WORK_OF_STATE = 100;   // besides its instructions

uint64_t hash_of(const SequenceNumbers::Key& key) {
    uint64_t hash = key.size();
    for (int32_t item : key) hash = (hash ^ uint32_t(item)) * 0x9E3779B97F4A7C15;
    return hash ^ hash >> 32;
}

}  // namespace

int32_t SequenceNumbers::find(const Key& key) {
    if (size() * 2 >= slots_.size()) grow();
    hash_ = hash_of(key);
    for (at_ = hash_ & (slots_.size() - 1); slots_[at_] >= 0; at_ = (at_ + 1) & (slots_.size() - 1)) {
        const size_t number = size_t(slots_[at_]);
        if (hashes_[number] == hash_ && is_at(number, key)) return int32_t(number);
    }
    return -1;
}

bool SequenceNumbers::is_at(size_t number, const Key& key) const {
    const int32_t* const items = begin(number);
    if (end(number) - items != int64_t(key.size())) return false;
    for (size_t at = 0; at < key.size(); at++) {  // most are short
        if (items[at] != key[at]) return false;
    }
    return true;
}

void SequenceNumbers::add(const Key& key) {
    slots_[at_] = int32_t(size());
    hashes_.push_back(hash_);
    items_.insert(items_.end(), key.begin(), key.end());
    from_.push_back(items_.size());
}

void SequenceNumbers::grow() {
    slots_.assign(std::max<size_t>(64, slots_.size() * 2), -1);
    for (size_t number = 0; number < size(); number++) {
        size_t at = hashes_[number] & (slots_.size() - 1);
        while (slots_[at] >= 0) at = (at + 1) & (slots_.size() - 1);
        slots_[at] = int32_t(number);
    }
}

Leaf::Leaf(const Program& program, int32_t start, int64_t& work) : work_(work) {
    read_code(program, start);
    read_classes();
    close({0}, key_);
    number_of(key_);
    spend(int64_t(code_.size()));
}

int32_t Leaf::after(int32_t state, uint8_t cls) {
    if (rows_[size_t(state)] < 0) open(state);
    const size_t at = size_t(rows_[size_t(state)]) + cls;
    if (moves_[at] >= 0) return moves_[at];
    if (opened_ != state) open(state);
    const size_t part = size_t(~moves_[at]);
    if (targets_[part] < 0) {
        close(reached_[part], next_);
        targets_[part] = number_of(next_);
    }
    return moves_[at] = targets_[part];
}

// Copies the instructions of the leaf, of all those that the program has so far.
void Leaf::read_code(const Program& program, int32_t start) {
    std::unordered_map<int32_t, int32_t> numbers, set_numbers;
    std::vector<int32_t> waiting;
    auto number = [&](int32_t pc) {
        const auto [at, is_new] = numbers.try_emplace(pc, int32_t(code_.size()));
        if (is_new) code_.push_back(program.code[size_t(pc)]), waiting.push_back(at->second);
        return at->second;
    };
    number(start);
    while (!waiting.empty()) {
        const int32_t at = waiting.back();
        waiting.pop_back();
        Instruction i = code_[size_t(at)];
        if (i.op == BYTES) {
            const auto [set, is_new] = set_numbers.try_emplace(i.x, int32_t(sets_.size()));
            if (is_new) sets_.push_back(program.sets[size_t(i.x)]);
            i = {BYTES, set->second, number(i.y)};
        } else if (i.op == SPLIT) {
            const int32_t from = int32_t(followers_.size());
            for (int32_t to = i.x; to < i.x + i.y; to++) followers_.push_back(number(program.targets[size_t(to)]));
            i.x = from;
        }
        code_[size_t(at)] = i;
    }
    closures_.resize(code_.size());
    seen_.assign(code_.size(), 0);
}

// The bytes that no set tells apart.
void Leaf::read_classes() {
    class_of_ = classes_of(sets_);
    num_classes_ = size_t(*std::max_element(class_of_.begin(), class_of_.end())) + 1;
    std::vector<uint8_t> members(num_classes_);
    for (int byte = 0; byte < 256; byte++) members[class_of_[size_t(byte)]] = uint8_t(byte);
    classes_.resize(sets_.size());
    parts_of_.resize(sets_.size());
    seen_set_.assign(sets_.size(), 0);
    for (size_t set = 0; set < sets_.size(); set++) {
        for (size_t cls = 0; cls < num_classes_; cls++) {
            if (has(sets_[set], members[cls])) classes_[set].push_back(int32_t(cls));
        }
    }
}

// Returns the epsilon closure of an instruction, sorted: the instructions at which the leaf can read the next byte.
const std::vector<int32_t>& Leaf::closure(int32_t from) {
    std::vector<int32_t>& reached = closures_[size_t(from)];
    if (!reached.empty()) return reached;
    waiting_.assign(1, from);
    round_++;
    while (!waiting_.empty()) {
        const int32_t pc = waiting_.back();
        waiting_.pop_back();
        spend(1);
        if (seen_[size_t(pc)] == round_) continue;
        seen_[size_t(pc)] = round_;
        const Instruction& i = code_[size_t(pc)];
        if (i.op == SPLIT) {
            waiting_.insert(waiting_.end(), followers_.data() + i.x, followers_.data() + i.x + i.y);
        } else {
            reached.push_back(pc);
        }
    }
    std::sort(reached.begin(), reached.end());
    return reached;
}

// Writes the union of the epsilon closures of `from` to `key`, sorted.
void Leaf::close(const std::vector<int32_t>& from, Key& key) {
    key.clear();
    if (from.size() == 1) {
        key = closure(from[0]);
        return;
    }
    for (int32_t pc : from) closure(pc);  // which marks instructions too
    round_++;
    bool is_sorted = true;
    for (int32_t pc : from) {
        for (int32_t reached : closures_[size_t(pc)]) {
            if (seen_[size_t(reached)] == round_) continue;
            seen_[size_t(reached)] = round_;
            is_sorted = is_sorted && (key.empty() || key.back() < reached);
            key.push_back(reached);
        }
        spend(int64_t(closures_[size_t(pc)].size()));
    }
    if (!is_sorted) std::sort(key.begin(), key.end());
}

// Groups the classes that no instruction of the state distinguishes, and finds the target of each group.
void Leaf::open(int32_t state) {
    key_.assign(states_.begin(size_t(state)), states_.end(size_t(state)));
    parts_.assign(num_classes_, 0);
    int32_t num_parts = 1;
    set_round_++;
    here_.clear();
    for (int32_t pc : key_) {
        if (code_[size_t(pc)].op != BYTES) continue;
        const size_t set = size_t(code_[size_t(pc)].x);
        if (seen_set_[set] == set_round_) continue;  // another instruction has the same set, often
        seen_set_[set] = set_round_;
        here_.push_back(int32_t(set));
        renamed_.assign(size_t(num_parts), -1);
        for (int32_t cls : classes_[set]) {
            int32_t& name = renamed_[size_t(parts_[size_t(cls)])];
            if (name < 0) name = num_parts++;
            parts_[size_t(cls)] = name;
        }
    }
    find_next(key_, size_t(num_parts));
    targets_.assign(size_t(num_parts), -1);
    opened_ = state;
    spend(int64_t(num_classes_));
    if (rows_[size_t(state)] >= 0) return;
    rows_[size_t(state)] = int64_t(moves_.size());
    for (int32_t part : parts_) moves_.push_back(~part);
}

// Finds the instructions after a byte of each part.
void Leaf::find_next(const Key& key, size_t num_parts) {
    for (int32_t set : here_) {
        std::vector<int32_t>& parts = parts_of_[size_t(set)];
        parts.clear();
        for (int32_t cls : classes_[size_t(set)]) parts.push_back(parts_[size_t(cls)]);
        spend(int64_t(parts.size()));
        std::sort(parts.begin(), parts.end());
        parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
    }
    if (reached_.size() < num_parts) reached_.resize(num_parts);
    for (size_t part = 0; part < num_parts; part++) reached_[part].clear();
    for (int32_t pc : key) {
        const Instruction& i = code_[size_t(pc)];
        if (i.op != BYTES) continue;
        const std::vector<int32_t>& parts = parts_of_[size_t(i.x)];
        for (int32_t part : parts) reached_[size_t(part)].push_back(i.y);
        spend(int64_t(parts.size()));
    }
}

int32_t Leaf::number_of(const Key& key) {
    const int32_t known = states_.find(key);
    if (known >= 0) return known;
    if (states_.size() >= MAX_AUTOMATON_STATES) throw TooLarge("an automaton has too many states");
    spend(WORK_OF_STATE + int64_t(key.size()));
    states_.add(key);
    accepts_.push_back(std::any_of(key.begin(), key.end(), [&](int32_t pc) { return code_[size_t(pc)].op == RET; }));
    rows_.push_back(-1);
    return int32_t(states_.size()) - 1;
}

void Leaf::spend(int64_t work) {
    work_ += work;
    if (work_ > MAX_WORK) throw TooLarge("an automaton takes too much work");
}

}  // namespace tureen
