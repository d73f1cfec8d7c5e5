#include "low_rank.h"

#include <algorithm>

namespace tureen {

const Additions::Adapter* Additions::find(int number) const {
    for (const Adapter& adapter : adapters_)
        if (adapter.number == number) return &adapter;
    return nullptr;
}

void Additions::load(Arena& arena, int number, int part, const float* down, const float* up, int rank, int cols,
                     int rows) {
    auto zeros = [&](size_t floats) { return arena.take(floats * sizeof(float)); };
    auto same = [&](const Adapter& adapter) { return adapter.number == number; };
    auto place = std::find_if(adapters_.begin(), adapters_.end(), same);
    int at = place == adapters_.end() ? 0 : place->parts.back().at + place->parts.back().rank;
    size_t tiles = size_t(rows + TILE - 1) / TILE;
    LowRank added{part, rank, cols, rows, at, zeros(size_t(rank) * cols), zeros(tiles * rank * TILE)};
    std::copy_n(down, size_t(rank) * cols, (float*)added.down_memory.get());
    float* tile = (float*)added.up_memory.get();
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < rank; k++) tile[(size_t(r / TILE) * rank + k) * TILE + r % TILE] = up[size_t(r) * rank + k];
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

void Additions::shrink(const RowKernels& kernels, int number, const float* x, float* low) const {
    const Adapter* adapter = find(number);
    if (adapter == nullptr) return;
    for (const LowRank& one : adapter->parts) kernels.shrink(one.down(), one.rank, one.cols, x, low + one.at);
}

void Additions::expand(const RowKernels& kernels, int number, int part, const float* low, int begin, int end,
                       float* y) const {
    const Adapter* adapter = find(number);
    if (adapter == nullptr) return;
    for (const LowRank& one : adapter->parts)
        if (one.part == part)
            kernels.expand(one.up() + size_t(begin) * one.rank, one.rank, low + one.at, end - begin, y);
}

int Additions::width() const {
    int width = 0;
    for (const Adapter& adapter : adapters_)
        width = std::max(width, adapter.parts.back().at + adapter.parts.back().rank);
    return width;
}

}  // namespace tureen
