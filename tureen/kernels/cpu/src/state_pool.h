// States of sequences in layers without attention: each the same number of floats, whatever the sequence's length.
#pragma once

#include <stdexcept>

#include "memory.h"

namespace tureen {

class StatePool {
public:
    // Zeros at first; states that nothing has written take no memory. Throws std::invalid_argument, std::bad_alloc.
    StatePool(int count, size_t floats) : count_(count), floats_(floats), memory_(0, false) {
        if (count < 1 || floats < 1) throw std::invalid_argument("a pool has a state, and a state a number");
        memory_ = Memory(size_t(count) * stride() * sizeof(float));
    }

    float* at(int number) const { return (float*)memory_.data() + size_t(number) * stride(); }
    int count() const { return count_; }
    size_t floats() const { return floats_; }  // of a state
    size_t state_bytes() const { return stride() * sizeof(float); }

private:
    size_t stride() const { return (floats_ + 15) / 16 * 16; }

    int count_;
    size_t floats_;
    Memory memory_;
};

}  // namespace tureen
