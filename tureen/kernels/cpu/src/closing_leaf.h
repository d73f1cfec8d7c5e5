// The deterministic automaton of a flat part of a program, made as its states are visited.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "closing_program.h"

namespace tureen {

constexpr size_t MAX_AUTOMATON_STATES = 200000;

// Numbers sequences in the order in which they come.
class SequenceNumbers {
public:
    using Key = std::vector<int32_t>;

    size_t size() const { return hashes_.size(); }
    const int32_t* begin(size_t number) const { return items_.data() + from_[number]; }
    const int32_t* end(size_t number) const { return items_.data() + from_[number + 1]; }
    // -1 for a new one, which `add` may number.
    int32_t find(const Key& key);
    // Numbers the key that was not found.
    void add(const Key& key);

private:
    bool is_at(size_t number, const Key& key) const;
    void grow();

    std::vector<int32_t> items_, slots_;
    std::vector<size_t> from_{0};
    std::vector<uint64_t> hashes_;
    uint64_t hash_ = 0;
    size_t at_ = 0;
};

// A state is a set of instructions. State 0 is the start.
class Leaf {
public:
    // `start`: an instruction whose code has no call and ends with RET. `work` counts for all leaves of a condition;
    // each unit takes a few bytes of memory. Throws TooLarge.
    Leaf(const Program& program, int32_t start, int64_t& work);

    // The class of each byte. Bytes of a class lead to the same states.
    const std::array<uint8_t, 256>& classes() const { return class_of_; }
    // The state after a byte of a class. Throws TooLarge.
    int32_t after(int32_t state, uint8_t cls);
    bool accepts(int32_t state) const { return accepts_[size_t(state)]; }
    // Whether no byte can follow and the leaf does not match.
    bool is_dead(int32_t state) const { return states_.begin(size_t(state)) == states_.end(size_t(state)); }

private:
    using Key = SequenceNumbers::Key;

    void read_code(const Program& program, int32_t start);
    void read_classes();
    const std::vector<int32_t>& closure(int32_t from);
    void close(const std::vector<int32_t>& from, Key& key);
    void open(int32_t state);
    void find_next(const Key& key, size_t num_parts);
    int32_t number_of(const Key& key);
    void spend(int64_t work);

    std::vector<Instruction> code_;
    std::vector<int32_t> followers_;
    std::vector<ByteSet> sets_;
    std::array<uint8_t, 256> class_of_{};
    std::vector<std::vector<int32_t>> classes_;  // by set
    size_t num_classes_ = 1;
    SequenceNumbers states_;
    std::vector<bool> accepts_;
    std::vector<int64_t> rows_;                   // by state: where its moves begin, or -1
    std::vector<int32_t> moves_;                  // by class: a state, or the complement of a part not asked for yet
    int32_t opened_ = -1;                         // the state of which the instructions after each part are known
    std::vector<std::vector<int32_t>> closures_;  // by instruction, once it is known
    std::vector<int32_t> seen_, waiting_, parts_, renamed_, targets_, here_;
    std::vector<std::vector<int32_t>> parts_of_, reached_;  // of a set of bytes; by part
    std::vector<int32_t> seen_set_;                         // by set: the state of which it was last looked at
    Key key_, next_;
    int32_t round_ = 0, set_round_ = 0;
    int64_t& work_;
};

}  // namespace tureen
