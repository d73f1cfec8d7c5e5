// Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): what they add to a product, up · (down · x).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace tureen {

constexpr int TOGETHER = 4;  // inputs with the same adapter, which it is read once for

// What one adapter adds to one matrix.
struct LowRank {
    int part;  // of the matrices that share the inputs
    int rank, cols;
    int at;        // where its down · x stands in a row of them
    bool is_bf16;  // where bfloat16 holds all of both exactly: what is read costs more than what is computed
    std::shared_ptr<uint8_t> down_memory, up_memory;

    Factor down() const { return {down_memory.get(), is_bf16}; }  // [rank][cols, padded to 16]
    Factor up() const { return {up_memory.get(), is_bf16}; }      // [tiles][rank][16 rows]
};

// What adapters add to the matrices that share some inputs.
class Additions {
public:
    // down: [rank][cols], up: [rows][rank]; of matrix number `part`.
    void load(Arena& arena, int adapter, int part, const float* down, const float* up, int rank, int cols, int rows);
    void unload(int adapter);

    // low = down · x, of all that the adapter adds, of each of up to TOGETHER inputs; a low has [width()] floats.
    void shrink(const RowKernels& kernels, int adapter, const ShrunkRow* inputs, int count) const;
    // y[m] += up · low[m], with low [count][low_width], for outputs [begin, end) of the matrix, of the rows m < count
    // with their adapters; begin is a multiple of 16, y where output `begin` of row 0 stands. Rows of one adapter are
    // taken together.
    void expand(const RowKernels& kernels, const int* adapters, int count, int part, const float* low, int low_width,
                int begin, int end, float* y, size_t stride) const;
    int width() const;

private:
    struct Adapter {
        int number;
        std::vector<LowRank> parts;
    };

    const Adapter* find(int number) const;

    std::vector<Adapter> adapters_;  // few, and looked through for every row
};

}  // namespace tureen
