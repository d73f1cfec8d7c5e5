// A tree of expressions becomes instructions.
#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "closing_emitter.h"
#include "closing_program.h"
#include "closing_tree.h"

namespace tureen {

namespace {

constexpr int64_t MAX_CODE = 2000000;
constexpr int64_t MAX_UNROLLED_LEAST = 600, MAX_UNROLLED_MORE = 64;  // instructions of a repeat written out
constexpr int64_t MAX_REPEATED = 64;  // of a part that is written out in more than one place
constexpr int64_t MAX_ALL_INLINED = 100000;
constexpr int MAX_DEPTH = 4000;

}  // namespace

Emitter::Emitter(const Tree& tree) : tree_(tree) {
    byte_ids_.fill(-1);
    ret_ = add({RET, 0, 0});
}

Program Emitter::whole() {
    measure();
    program_.num_starts = int32_t(tree_.starts.size());
    program_.rules.assign(tree_.starts.size(), {-1, -1, 0, 0});
    for (size_t start = 0; start < tree_.starts.size(); start++) {
        const int32_t entry = emit(tree_.starts[start], ret_);
        program_.rules[start].entry = entry;
        while (!to_do_.empty()) {
            auto [name, pc] = to_do_.back();
            to_do_.pop_back();
            set_targets(pc, {emit(tree_.rules[name], ret_)});
        }
    }
    compact();
    return std::move(program_);
}

int32_t Emitter::add(Instruction instruction, bool skips) {
    if (int64_t(program_.code.size()) >= (is_flat_ ? flat_limit_ : MAX_CODE)) throw TooLarge("too many instructions");
    program_.code.push_back(instruction);
    program_.skips.push_back(skips);
    return int32_t(program_.code.size()) - 1;
}

int32_t Emitter::set_of(const ByteSet& set) {
    auto [at, is_new] = set_ids_.try_emplace(set, int32_t(program_.sets.size()));
    if (is_new) program_.sets.push_back(set);
    return at->second;
}

int32_t Emitter::bytes(const ByteSet& set, int32_t next) { return bytes(set_of(set), next); }

int32_t Emitter::bytes(int32_t number, int32_t next) {
    int32_t& known = by_bytes_.at(number, next);
    if (known < 0) known = add({BYTES, number, next});
    return known;
}

int32_t Emitter::any_of(std::vector<int32_t> targets, bool skips) {
    std::sort(targets.begin(), targets.end());
    targets.erase(std::unique(targets.begin(), targets.end()), targets.end());
    if (targets.size() == 1) return targets[0];
    auto [at, is_new] = (skips ? by_skipped_ : by_targets_).try_emplace(targets, -1);
    if (is_new) {
        at->second = add({SPLIT, 0, 0}, skips);
        set_targets(at->second, targets);
    }
    return at->second;
}

void Emitter::set_targets(int32_t pc, const std::vector<int32_t>& targets) {
    program_.code[pc].x = int32_t(program_.targets.size());
    program_.code[pc].y = int32_t(targets.size());
    program_.targets.insert(program_.targets.end(), targets.begin(), targets.end());
}

// How many instructions each node takes, about, and which rules call themselves.
void Emitter::measure() {
    size_.assign(tree_.nodes.size(), -1);
    num_emitted_.assign(tree_.nodes.size(), 0);
    find_recursive();
    for (size_t node = 0; node < tree_.nodes.size(); node++) measure(int32_t(node), 0);
}

int64_t Emitter::measure(int32_t id, int depth) {
    if (depth > MAX_DEPTH) throw TooLarge("nested too deep");
    if (size_[id] >= 0) return size_[id];
    const TreeNode& node = tree_.nodes[id];
    int64_t size = 1;
    switch (node.kind) {
        case TREE_TEXT: size = int64_t(node.numbers.size()); break;
        case TREE_CHARS: size = node.numbers.empty() || node.numbers.back() < 0x80 ? 1 : 12; break;
        case TREE_CALL: {
            const int32_t rule = node.numbers[0];
            if (!is_recursive_[rule]) size = measure(tree_.rules[rule], depth + 1);
            break;
        }
        case TREE_REPEAT: {
            int64_t least = node.numbers[1], most = node.numbers[2];
            int64_t item = std::max<int64_t>(1, measure(node.numbers[0], depth + 1));
            int64_t extra = most < 0 ? 1 : most - least;
            size = 2 + item * (least * item <= MAX_UNROLLED_LEAST ? least : 1) +
                   item * (extra * item <= MAX_UNROLLED_MORE ? extra : 1);
            break;
        }
        default:
            for (int32_t part : node.numbers) size += measure(part, depth + 1);
    }
    return size_[id] = std::min<int64_t>(size, 1 << 30);
}

void Emitter::find_recursive() {
    // Tarjan's components, over the rules.
    size_t count = tree_.rules.size();
    std::vector<std::vector<int32_t>> callees(count);
    for (size_t rule = 0; rule < count; rule++) callees[rule] = tree_.calls(tree_.rules[rule]);
    is_recursive_.assign(count, false);
    std::vector<int32_t> number(count, -1), low(count, 0), stack;
    std::vector<bool> is_open(count, false);
    int32_t next = 0;
    std::function<void(int32_t, int)> visit = [&](int32_t rule, int depth) {
        if (depth > MAX_DEPTH) throw TooLarge("rules call each other too deep");
        number[rule] = low[rule] = next++;
        stack.push_back(rule);
        is_open[rule] = true;
        for (int32_t callee : callees[rule]) {
            if (callee == rule) is_recursive_[rule] = true;
            if (number[callee] < 0) visit(callee, depth + 1);
            if (is_open[callee]) low[rule] = std::min(low[rule], low[callee]);
        }
        if (low[rule] != number[rule]) return;
        bool is_many = stack.back() != rule;
        for (bool is_last = false; !is_last;) {
            is_last = stack.back() == rule;
            is_open[stack.back()] = false;
            if (is_many) is_recursive_[stack.back()] = true;
            stack.pop_back();
        }
    };
    for (size_t rule = 0; rule < count; rule++) {
        if (number[rule] < 0) visit(int32_t(rule), 0);
    }
}

// Instructions that match a node, then go on at `next`.
int32_t Emitter::emit(int32_t id, int32_t next) {
    if (depth_ > MAX_DEPTH) throw TooLarge("nested too deep");
    if (const int32_t known = by_node_.known(id, next); known >= 0) return known;
    if (!is_flat_ && next != ret_ && size_[id] > MAX_REPEATED && num_emitted_[id]++ > 0) return emit_shared(id, next);
    depth_++;
    const TreeNode& node = tree_.nodes[id];
    int32_t pc = -1;
    switch (node.kind) {
        case TREE_TEXT:
            pc = next;
            for (size_t at = node.numbers.size(); at-- > 0;) pc = byte(uint8_t(node.numbers[at]), pc);
            break;
        case TREE_CHARS: pc = emit_chars(node.numbers, next); break;
        case TREE_CHAIN:
            pc = next;
            for (size_t at = node.numbers.size(); at-- > 0;) pc = emit(node.numbers[at], pc);
            break;
        case TREE_CHOICE: pc = emit_choice(node, next); break;
        case TREE_REPEAT: pc = emit_repeat(node, next); break;
        case TREE_CALL: pc = emit_call(node.numbers[0], next); break;
        case TREE_FREE: pc = is_flat_ ? emit(node.numbers[0], next) : emit_free(node.numbers[0], next); break;
        default: pc = emit_regular(id, next);
    }
    depth_--;
    return by_node_.at(id, next) = pc;
}

// A part that stands in several places becomes a rule.
int32_t Emitter::emit_shared(int32_t id, int32_t next) {
    auto [at, is_new] = shared_.try_emplace(id, int32_t(program_.rules.size()));
    const int32_t rule = at->second;
    if (is_new) {
        program_.rules.push_back({-1, -1, 0, 0});
        const int32_t entry = emit(id, ret_);
        program_.rules[rule].entry = entry;
    }
    return by_node_.at(id, next) = add({CALL, rule, next});
}

// Free text is a rule of its own, so that a place shows whether it is in it.
int32_t Emitter::emit_free(int32_t item, int32_t next) {
    const int32_t call = emit_shared(item, next);
    program_.rules[size_t(program_.code[size_t(call)].x)].is_free = 1;
    return call;
}

int32_t Emitter::byte(uint8_t value, int32_t next) {
    int32_t& number = byte_ids_[value];
    if (number < 0) {
        ByteSet set{};
        put(set, value);
        number = set_of(set);
    }
    return bytes(number, next);
}

int32_t Emitter::emit_choice(const TreeNode& node, int32_t next) {
    std::vector<const std::vector<int32_t>*> texts;
    std::vector<int32_t> targets;
    for (int32_t part : node.numbers) {
        if (tree_.nodes[part].kind == TREE_TEXT) {
            texts.push_back(&tree_.nodes[part].numbers);
        } else {
            targets.push_back(emit(part, next));
        }
    }
    if (!texts.empty()) {
        std::sort(texts.begin(), texts.end(), [](auto* a, auto* b) { return *a < *b; });
        targets.push_back(emit_texts(texts.data(), texts.data() + texts.size(), 0, next));
    }
    return any_of(targets);
}

// Sorted texts that are the same up to `at`.
int32_t Emitter::emit_texts(const std::vector<int32_t>** from, const std::vector<int32_t>** to, size_t at,
                            int32_t next) {
    if (at > size_t(MAX_DEPTH)) throw TooLarge("a text is too long");
    std::vector<int32_t> targets;
    std::map<int32_t, ByteSet> by_next;
    while (from < to && (*from)->size() == at) {
        if (targets.empty()) targets.push_back(next);
        from++;
    }
    while (from < to) {
        int32_t value = (**from)[at];
        auto last = from;
        while (last < to && (**last)[at] == value) last++;
        int32_t pc;
        if (last == from + 1) {  // one text is left: no matter how long
            pc = next;
            for (size_t end = (*from)->size(); end-- > at + 1;) pc = byte(uint8_t((**from)[end]), pc);
        } else {
            pc = emit_texts(from, last, at + 1, next);
        }
        put(by_next[pc], uint8_t(value));
        from = last;
    }
    for (auto& [pc, set] : by_next) targets.push_back(bytes(set, pc));
    return any_of(targets);
}

namespace {

struct Span {
    uint8_t first, last;
};
using Sequence = std::vector<Span>;  // the UTF-8 of a range of characters, byte by byte

int length_of(int32_t point) { return point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4; }

std::array<uint8_t, 4> utf8(int32_t point, int length) {
    static const uint8_t leads[] = {0, 0x00, 0xC0, 0xE0, 0xF0};
    std::array<uint8_t, 4> bytes{};
    for (int at = length - 1; at > 0; at--, point >>= 6) bytes[at] = uint8_t(0x80 | (point & 0x3F));
    bytes[0] = uint8_t(leads[length] | point);
    return bytes;
}

// Splits a range until each byte ranges by itself.
void add_sequences(int32_t first, int32_t last, std::vector<Sequence>& sequences) {
    static const int32_t lengths[] = {0x7F, 0x7FF, 0xFFFF};
    for (int32_t bound : lengths) {
        if (first <= bound && bound < last) {
            add_sequences(first, bound, sequences);
            add_sequences(bound + 1, last, sequences);
            return;
        }
    }
    int length = length_of(last);
    for (int tail = 1; tail < length; tail++) {
        int32_t low = (1 << (6 * tail)) - 1;
        if ((first & ~low) == (last & ~low)) continue;
        if ((first & low) != 0) {
            add_sequences(first, first | low, sequences);
            add_sequences((first | low) + 1, last, sequences);
            return;
        }
        if ((last & low) != low) {
            add_sequences(first, (last & ~low) - 1, sequences);
            add_sequences(last & ~low, last, sequences);
            return;
        }
    }
    auto from = utf8(first, length), to = utf8(last, length);
    Sequence sequence;
    for (int at = 0; at < length; at++) sequence.push_back({from[at], to[at]});
    sequences.push_back(sequence);
}

}  // namespace

// The bytes of the characters of some ranges: how they branch, whatever follows.
CharBytes::CharBytes(const std::vector<int32_t>& ranges) {
    std::vector<Sequence> sequences;
    for (size_t at = 0; at + 1 < ranges.size(); at += 2) add_sequences(ranges[at], ranges[at + 1], sequences);
    // Sequences in order: those with the same first byte stand together, and no first bytes overlap otherwise.
    std::function<int32_t(size_t, size_t, size_t)> of = [&](size_t from, size_t to, size_t at) {
        std::vector<Branch> branches;
        for (size_t last; from < to; from = last) {
            Span span = sequences[from][at];
            for (last = from + 1; last < to && sequences[last][at].first == span.first; last++) {}
            const int32_t then = sequences[from].size() == at + 1 ? -1 : of(from, last, at + 1);
            auto same = std::find_if(branches.begin(), branches.end(), [&](auto& one) { return one.then == then; });
            if (same == branches.end()) same = branches.insert(same, {{}, -1, then});
            for (int value = span.first; value <= span.last; value++) put(same->set, uint8_t(value));
        }
        const auto known = std::find(places.begin(), places.end(), branches);
        if (known != places.end()) return int32_t(known - places.begin());
        places.push_back(branches);
        return int32_t(places.size()) - 1;
    };
    of(0, sequences.size(), 0);
}

int32_t Emitter::emit_chars(const std::vector<int32_t>& ranges, int32_t next) {
    auto known = char_bytes_.find(ranges);
    if (known == char_bytes_.end()) known = char_bytes_.emplace(ranges, CharBytes(ranges)).first;
    std::vector<int32_t> pcs, targets;
    std::vector<std::pair<int32_t, CharBytes::Branch*>> ordered;
    for (auto& branches : known->second.places) {
        ordered.clear();
        targets.clear();
        for (auto& branch : branches) ordered.emplace_back(branch.then < 0 ? next : pcs[size_t(branch.then)], &branch);
        std::sort(ordered.begin(), ordered.end());
        for (auto& [pc, branch] : ordered) {
            if (branch->number < 0) branch->number = set_of(branch->set);
            targets.push_back(bytes(branch->number, pc));
        }
        pcs.push_back(any_of(targets));
    }
    return pcs.back();
}

int32_t Emitter::emit_repeat(const TreeNode& node, int32_t next) {
    int32_t item = node.numbers[0], least = node.numbers[1], most = node.numbers[2];
    int64_t size = std::max<int64_t>(1, size_[item]);
    bool writes_least = is_flat_ || least * size <= MAX_UNROLLED_LEAST;
    int64_t extra = most < 0 ? 0 : most - least;
    if (is_flat_ && (least + extra) * size > flat_limit_) throw TooLarge("a repeat is too large");
    if (!writes_least) {
        if (tree_.is_nullable(item)) least = 0;
        return counted(item, least, most, next);
    }
    int32_t pc = next;
    if (most < 0) {
        pc = add({SPLIT, 0, 0}, true);
        int32_t body = emit(item, pc);
        set_targets(pc, {body, next});
    } else if (is_flat_ || extra * size <= MAX_UNROLLED_MORE) {
        for (int64_t more = 0; more < extra; more++) pc = any_of({emit(item, pc), next}, true);
    } else {
        pc = counted(item, 0, int32_t(extra), next);
    }
    for (int32_t time = 0; time < least; time++) pc = emit(item, pc);
    return pc;
}

int32_t Emitter::counted(int32_t item, int32_t least, int32_t most, int32_t next) {
    auto [at, is_new] = counted_.try_emplace({item, least, most}, int32_t(program_.rules.size()));
    int32_t rule = at->second;
    if (is_new) {
        int32_t loop = add({LOOP, rule, 0}), again = add({NEXT, rule, 0});
        program_.rules.push_back({loop, again, least, most});
        int32_t body = emit(item, again);
        program_.rules[rule].body = body;
    }
    return add({CALL, rule, next});
}

int32_t Emitter::emit_call(int32_t name, int32_t next) {
    if (!is_recursive_[name] && (is_flat_ || int64_t(program_.code.size()) < MAX_ALL_INLINED)) {
        return emit(tree_.rules[name], next);
    }
    if (is_flat_)
        throw std::invalid_argument(
            "only what is regular can be combined with & or excluded, and this calls a rule that calls itself");
    auto [at, is_new] = entries_.try_emplace(name, -1);
    if (is_new) {
        at->second = add({SPLIT, 0, 0});
        to_do_.emplace_back(name, at->second);
    }
    if (next == ret_) return at->second;  // what follows the last call of a rule is what follows the rule
    int32_t& rule = rule_ids_.try_emplace(name, -1).first->second;
    if (rule < 0) {
        rule = int32_t(program_.rules.size());
        program_.rules.push_back({at->second, -1, 0, 0});
    }
    return add({CALL, rule, next});
}

// Leaves out the instructions that nothing leads to.
void Emitter::compact() {
    const std::vector<Instruction> code = std::move(program_.code);
    const std::vector<int32_t> targets = std::move(program_.targets);
    const std::vector<Rule> rules = std::move(program_.rules);
    const std::vector<bool> skips = std::move(program_.skips);
    std::vector<int32_t> place(code.size(), -1), rule_place(rules.size(), -1), order, rule_order;
    auto use = [&](int32_t pc) {
        if (place[pc] < 0) {
            place[pc] = 0;
            order.push_back(pc);
        }
    };
    auto use_rule = [&](int32_t rule) {
        if (rule_place[rule] >= 0) return;
        rule_place[rule] = int32_t(rule_order.size());
        rule_order.push_back(rule);
        use(rules[rule].entry);
        if (rules[rule].body >= 0) use(rules[rule].body);
    };
    for (int32_t start = 0; start < program_.num_starts; start++) use_rule(start);
    for (size_t at = 0; at < order.size(); at++) {  // grows
        const Instruction& i = code[order[at]];
        if (i.op == CALL) use_rule(i.x);
        if (i.op == LOOP || i.op == NEXT || i.op == COUNT) use_rule(i.x);
        if (i.op == BYTES || i.op == CALL || i.op == COUNT) use(i.y);
        if (i.op == SPLIT) std::for_each(targets.data() + i.x, targets.data() + i.x + i.y, use);
    }
    std::sort(order.begin(), order.end());
    for (size_t at = 0; at < order.size(); at++) place[order[at]] = int32_t(at);
    program_.code.clear();
    program_.targets.clear();
    program_.rules.clear();
    program_.skips.clear();
    std::vector<int32_t> places = std::move(program_.places);
    places.resize(num_places_ > 0 ? code.size() : 0, -1);
    program_.places.clear();
    for (int32_t pc : order) {
        if (num_places_ > 0) program_.places.push_back(places[pc]);
        Instruction i = code[pc];
        if (i.op == CALL || i.op == LOOP || i.op == NEXT || i.op == COUNT) i.x = rule_place[i.x];
        if (i.op == BYTES || i.op == CALL || i.op == COUNT) i.y = place[i.y];
        if (i.op == SPLIT) {
            int32_t from = i.x;
            i.x = int32_t(program_.targets.size());
            for (int32_t at = 0; at < i.y; at++) program_.targets.push_back(place[targets[from + at]]);
        }
        program_.code.push_back(i);
        program_.skips.push_back(skips[pc]);
    }
    for (int32_t rule : rule_order) {
        Rule r = rules[rule];
        r.entry = place[r.entry];
        if (r.body >= 0) r.body = place[r.body];
        program_.rules.push_back(r);
    }
}

Program emit_program(const int32_t* data, size_t size) {
    Tree tree = read_tree(data, size);
    return Emitter(tree).whole();
}

}  // namespace tureen
