// Stored weights -> matrices.
#pragma once

#include <memory>
#include <string>

#include "matrix.h"
#include "memory.h"
#include "pool.h"

namespace tureen {

// A matrix, and what keeps its memory.
struct PackedMatrix {
    Matrix matrix;
    std::shared_ptr<uint8_t> memory;

    size_t bytes() const { return size_t(matrix.tiles) * matrix.tile_bytes; }
};

// Zeros, to be filled. Matrices that are made one after the other stand close together, in huge pages. Throws
// std::invalid_argument.
std::shared_ptr<PackedMatrix> blank(Format format, int rows, int cols);

// stored: the tensor's bytes as in the file. encoding: F32, F16, BF16 or a block format of
// matrix.h, as GGUF has them, row after row. row_order: [rows] the stored row of each packed one (there may be more
// stored than packed), or null = all as stored. format: that of the same name keeps the values as they are; Q8_ROW,
// Q4_1, BF16 and F32 can be made of every encoding. Threads of the pool share the work. Throws std::invalid_argument.
std::shared_ptr<PackedMatrix> pack(Pool& pool, const uint8_t* stored, size_t bytes, const std::string& encoding,
                                   Format format, int rows, int cols, const int64_t* row_order);

}  // namespace tureen
