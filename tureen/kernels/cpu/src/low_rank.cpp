#include "low_rank.h"

#include <algorithm>
#include <new>

namespace tureen {

namespace {

std::shared_ptr<uint8_t> zeros(size_t floats) {
    auto memory = std::make_shared<Memory>(floats * sizeof(float), false);
    return {memory, memory->data()};
}

}  // namespace

void Additions::load(int adapter, int part, const float* down, const float* up, int rank, int cols, int rows) {
    std::vector<LowRank>& own = by_adapter_[adapter];
    int at = own.empty() ? 0 : own.back().at + own.back().rank;
    size_t tiles = size_t(rows + TILE - 1) / TILE;
    LowRank added{part, rank, cols, rows, at, zeros(size_t(rank) * cols), zeros(tiles * rank * TILE)};
    std::copy_n(down, size_t(rank) * cols, (float*)added.down_memory.get());
    float* tile = (float*)added.up_memory.get();
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < rank; k++) tile[(size_t(r / TILE) * rank + k) * TILE + r % TILE] = up[size_t(r) * rank + k];
    own.push_back(std::move(added));
}

void Additions::shrink(const RowKernels& kernels, int adapter, const float* x, float* low) const {
    auto found = by_adapter_.find(adapter);
    if (found == by_adapter_.end()) return;
    for (const LowRank& one : found->second) kernels.shrink(one.down(), one.rank, one.cols, x, low + one.at);
}

void Additions::expand(const RowKernels& kernels, int adapter, int part, const float* low, int begin, int end,
                       float* y) const {
    auto found = by_adapter_.find(adapter);
    if (found == by_adapter_.end()) return;
    for (const LowRank& one : found->second)
        if (one.part == part)
            kernels.expand(one.up() + size_t(begin) * one.rank, one.rank, low + one.at, end - begin, y);
}

int Additions::width() const {
    int width = 0;
    for (const auto& [adapter, own] : by_adapter_) width = std::max(width, own.back().at + own.back().rank);
    return width;
}

}  // namespace tureen
