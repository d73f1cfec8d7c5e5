#include "activations.h"

#include <utility>

namespace tureen {

namespace {

// Gives out parts of a piece of memory one after the other, each 64-byte aligned; without memory it only counts.
struct Divider {
    uint8_t* memory;
    size_t used = 0;

    template <class T>
    void take(T*& array, size_t count) {
        if (memory != nullptr) array = reinterpret_cast<T*>(memory + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
    }
};

size_t divide(Activations& all, uint8_t* memory) {
    Divider divider{memory};
    size_t rows = size_t(all.rows) * size_t(input_rows(all.kind)), inputs = rows * size_t(all.stride);
    if (all.kind == Inputs::F32) {
        divider.take(all.f32, inputs);
    } else if (all.kind == Inputs::BF16) {
        divider.take(all.bf16, inputs);
    } else if (all.kind == Inputs::WORDS) {
        divider.take(all.words, inputs);
        divider.take(all.scale, inputs / SPAN);
    } else {
        divider.take(all.q, inputs);
        divider.take(all.scale, inputs / GROUP);
        divider.take(all.scaled_sum, inputs / GROUP);
        divider.take(all.sum, inputs / GROUP);
        divider.take(all.half_sum, inputs / (GROUP / 2));
    }
    return divider.used;
}

}  // namespace

ActivationBuffer::ActivationBuffer(Inputs kind, int cols) { become(kind, cols); }

void ActivationBuffer::become(Inputs kind, int cols) {
    all_ = {};
    all_.kind = kind;
    all_.cols = cols;
    all_.stride = (cols + SUPER - 1) / SUPER * SUPER;
}

void ActivationBuffer::reserve(int rows) {
    if (rows <= all_.rows) return;
    Activations grown = all_;
    grown.rows = rows;
    const size_t bytes = divide(grown, nullptr);
    if (bytes > memory_.bytes()) memory_ = Memory(bytes);
    divide(grown, memory_.data());
    all_ = grown;
}

Activations ActivationBuffer::view(int rows) const {
    Activations some = all_;
    some.rows = rows;
    return some;
}

}  // namespace tureen
