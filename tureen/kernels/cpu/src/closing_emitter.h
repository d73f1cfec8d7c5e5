#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "closing_automaton.h"
#include "closing_program.h"
#include "closing_tree.h"

namespace tureen {

// Numbers by pairs of numbers that are not negative.
class PairNumbers {
public:
    // Of the pair; -1 where it is new. Holds until the next call.
    int32_t& at(int32_t a, int32_t b) {
        if (count_ * 2 >= slots_.size()) grow();
        Slot& slot = slots_[place(a, b)];
        if (slot.a < 0) slot = {a, b, -1}, count_++;
        return slot.number;
    }
    // -1 where it is not there.
    int32_t known(int32_t a, int32_t b) const { return slots_.empty() ? -1 : slots_[place(a, b)].number; }

private:
    struct Slot {
        int32_t a = -1, b = -1, number = -1;
    };

    size_t place(int32_t a, int32_t b) const {
        const uint64_t key = uint64_t(uint32_t(a)) << 32 | uint32_t(b);
        size_t at = size_t((key * 0x9E3779B97F4A7C15) >> shift_);
        while (slots_[at].a >= 0 && (slots_[at].a != a || slots_[at].b != b)) at = (at + 1) & (slots_.size() - 1);
        return at;
    }
    void grow() {
        std::vector<Slot> before = std::move(slots_);
        shift_ = before.empty() ? 54 : shift_ - 1;
        slots_.assign(size_t(1) << (64 - shift_), Slot{});
        for (const Slot& slot : before) {
            if (slot.a >= 0) slots_[place(slot.a, slot.b)] = slot;
        }
    }

    std::vector<Slot> slots_;
    size_t count_ = 0;
    int shift_ = 64;
};

struct ByteSetHash {
    size_t operator()(const ByteSet& set) const {
        uint64_t hash = 0;
        for (uint64_t word : set) hash = (hash ^ word ^ word >> 29) * 0x9E3779B97F4A7C15;
        return size_t(hash ^ hash >> 32);
    }
};

struct CharBytes {
    struct Branch {
        ByteSet set;
        int32_t number;  // of the set, or -1 where it has none yet
        int32_t then;    // a place, or -1: the character is over

        bool operator==(const Branch& other) const { return set == other.set && then == other.then; }
    };

    explicit CharBytes(const std::vector<int32_t>& ranges);

    std::vector<std::vector<Branch>> places;  // each behind those that it leads to; the last is the beginning
};

// Writes instructions from the end to the beginning: what follows a part is known when the part is written.
class Emitter {
public:
    explicit Emitter(const Tree& tree);
    Program whole();

private:
    using Texts = const std::vector<int32_t>**;

    int32_t add(Instruction instruction, bool skips = false);
    int32_t byte(uint8_t value, int32_t next);
    int32_t set_of(const ByteSet& set);
    int32_t bytes(const ByteSet& set, int32_t next);
    int32_t bytes(int32_t number, int32_t next);  // of a set
    int32_t any_of(std::vector<int32_t> targets, bool skips = false);
    void set_targets(int32_t pc, const std::vector<int32_t>& targets);
    void measure();
    int64_t measure(int32_t id, int depth);
    void find_recursive();
    int32_t emit(int32_t id, int32_t next);
    int32_t emit_shared(int32_t id, int32_t next);
    int32_t emit_free(int32_t item, int32_t next);
    int32_t emit_choice(const TreeNode& node, int32_t next);
    int32_t emit_texts(Texts from, Texts to, size_t at, int32_t next);
    int32_t emit_chars(const std::vector<int32_t>& ranges, int32_t next);
    int32_t emit_repeat(const TreeNode& node, int32_t next);
    int32_t counted(int32_t item, int32_t least, int32_t most, int32_t next);
    int32_t emit_call(int32_t name, int32_t next);
    // An intersection or a complement.
    struct Regular {
        Automaton machine;
        int32_t most = -1;  // items that are counted beside it, or -1
        int32_t rule = -1;  // the bounded rule, once it is emitted
    };
    // Which texts are in an intersection or a complement.
    struct Condition {
        BoolTree tree;
        std::vector<int32_t> leaves;  // nodes; -1 is text at all
    };

    int32_t emit_regular(int32_t id, int32_t next);
    int32_t emit_automaton(const Automaton& machine, int32_t next);
    int32_t emit_bounded(Regular& regular, int32_t next);
    int32_t emit_any_text();
    int32_t emit_items(int32_t item, int32_t least);
    Regular made(int32_t id);
    Regular counted(const Condition& condition, int32_t leaf);
    Automaton automaton(const Condition& condition, int32_t counted, int32_t least);
    Automaton determined(const std::vector<int32_t>& starts, const BoolTree& condition, int32_t counted);
    BoolTree condition_of(int32_t id, std::vector<int32_t>& leaves);
    int32_t counted_leaf(const Condition& condition) const;
    void compact();

    const Tree& tree_;
    Program program_;
    int32_t ret_;
    int depth_ = 0;
    bool is_flat_ = false;  // without counters, for what is made deterministic
    int64_t flat_limit_ = 0;
    std::vector<int64_t> size_;
    std::vector<int32_t> num_emitted_;
    std::vector<bool> is_recursive_;
    std::vector<std::pair<int32_t, int32_t>> to_do_;  // rules, and where they begin
    std::map<int32_t, int32_t> entries_, rule_ids_, shared_;
    std::unordered_map<ByteSet, int32_t, ByteSetHash> set_ids_;
    std::map<std::vector<int32_t>, CharBytes> char_bytes_;  // by ranges
    std::array<int32_t, 256> byte_ids_;                     // of the sets of one byte, or -1
    PairNumbers by_bytes_, by_node_;                        // of a set, of a node, and of what follows: an instruction
    PairNumbers by_flat_node_;                              // by_node_ of flat code; swapped with it while is_flat_
    std::map<int32_t, Leaf> leaves_;                        // by where they begin
    int64_t leaf_work_ = 0, kept_work_ = 0;                 // for the last condition; of all leaves
    int32_t any_text_ = -1;                                 // once it is emitted
    std::map<std::vector<int32_t>, int32_t> by_targets_, by_skipped_;
    std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> counted_;
    std::map<std::pair<int32_t, bool>, Regular> regular_;  // and whether it is flat
    int32_t num_places_ = 0;                               // of bounded rules
};

}  // namespace tureen
