#include "low_rank.h"

#include <algorithm>
#include <cstring>

namespace tureen {

const Additions::Adapter* Additions::find(int number) const {
    for (const Adapter& adapter : adapters_)
        if (adapter.number == number) return &adapter;
    return nullptr;
}

namespace {

bool fits_bf16(const float* values, size_t count) {
    return std::all_of(values, values + count, [](float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return (bits & 0xffff) == 0;
    });
}

// Zeros but for what `place` says: value number i stands at place(i).
template <class Place>
std::shared_ptr<uint8_t> stored(Arena& arena, const float* values, size_t count, size_t size, bool is_bf16,
                                const Place& place) {
    auto memory = arena.take(size * (is_bf16 ? sizeof(uint16_t) : sizeof(float)));
    for (size_t i = 0; i < count; i++) {
        if (is_bf16)
            std::memcpy((uint16_t*)memory.get() + place(i), (const uint8_t*)(values + i) + 2, 2);  // the upper half
        else
            ((float*)memory.get())[place(i)] = values[i];
    }
    return memory;
}

}  // namespace

void Additions::load(Arena& arena, int number, int part, const float* down, const float* up, int rank, int cols,
                     int rows) {
    auto same = [&](const Adapter& adapter) { return adapter.number == number; };
    auto place = std::find_if(adapters_.begin(), adapters_.end(), same);
    int at = place == adapters_.end() ? 0 : place->parts.back().at + place->parts.back().rank;
    size_t stride = size_t(cols + TILE - 1) / TILE * TILE, tiles = size_t(rows + TILE - 1) / TILE;
    size_t num_down = size_t(rank) * cols, num_up = size_t(rows) * rank;
    bool is_bf16 = fits_bf16(down, num_down) && fits_bf16(up, num_up);
    auto down_memory =
        stored(arena, down, num_down, rank * stride, is_bf16, [&](size_t i) { return i / cols * stride + i % cols; });
    auto up_memory = stored(arena, up, num_up, tiles * rank * TILE, is_bf16, [&](size_t i) {
        size_t r = i / rank, k = i % rank;
        return (r / TILE * rank + k) * TILE + r % TILE;
    });
    LowRank added{part, rank, cols, at, is_bf16, std::move(down_memory), std::move(up_memory)};
    if (place == adapters_.end())
        adapters_.push_back({number, {std::move(added)}});
    else
        place->parts.push_back(std::move(added));
}

void Additions::unload(int number) {
    adapters_.erase(std::remove_if(adapters_.begin(), adapters_.end(),
                                   [&](const Adapter& adapter) { return adapter.number == number; }),
                    adapters_.end());
}

void Additions::shrink(const RowKernels& kernels, int number, const ShrunkRow* inputs, int count) const {
    const Adapter* adapter = find(number);
    if (adapter == nullptr) return;
    for (const LowRank& one : adapter->parts) {
        ShrunkRow its[TOGETHER];
        for (int i = 0; i < count; i++) its[i] = {inputs[i].x, inputs[i].low + one.at};
        kernels.shrink(one.down(), one.rank, one.cols, its, count);
    }
}

void Additions::expand(const RowKernels& kernels, const int* adapters, int count, int part, const float* low,
                       int low_width, int begin, int end, float* y, size_t stride) const {
    constexpr int MANY = 16;
    for (const Adapter& adapter : adapters_) {
        auto its = [&](const LowRank& one) { return one.part == part; };
        auto one = std::find_if(adapter.parts.begin(), adapter.parts.end(), its);
        if (one == adapter.parts.end()) continue;
        LowRow rows[MANY];
        int num_rows = 0;
        for (int m = 0; m < count; m++) {
            if (adapters[m] == adapter.number)
                rows[num_rows++] = {low + size_t(m) * low_width + one->at, y + size_t(m) * stride};
            if (num_rows == MANY || (m == count - 1 && num_rows > 0)) {
                kernels.expand(one->up().from(size_t(begin) * one->rank), one->rank, rows, num_rows, end - begin);
                num_rows = 0;
            }
        }
    }
}

int Additions::width() const {
    int width = 0;
    for (const Adapter& adapter : adapters_)
        width = std::max(width, adapter.parts.back().at + adapter.parts.back().rank);
    return width;
}

}  // namespace tureen
