// Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): what they add to a product, up · (down · x).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace tureen {

// What one adapter adds to one matrix.
struct LowRank {
    int part;  // of the matrices that share the inputs
    int rank, cols, rows;
    int at;  // where its down · x stands in a row of them
    std::shared_ptr<uint8_t> down_memory, up_memory;

    const float* down() const { return (const float*)down_memory.get(); }  // [rank][cols]
    const float* up() const { return (const float*)up_memory.get(); }      // [tiles][rank][16 rows]
};

// What adapters add to the matrices that share some inputs.
class Additions {
public:
    // down: [rank][cols], up: [rows][rank]; of matrix number `part`.
    void load(Arena& arena, int adapter, int part, const float* down, const float* up, int rank, int cols, int rows);
    void unload(int adapter);

    // low = down · x, of all that the adapter adds; [width()] floats.
    void shrink(const RowKernels& kernels, int adapter, const float* x, float* low) const;
    // y += up · low for outputs [begin, end) of the matrix; begin is a multiple of 16.
    void expand(const RowKernels& kernels, int adapter, int part, const float* low, int begin, int end, float* y) const;
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
