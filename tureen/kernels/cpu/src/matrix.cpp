#include "matrix.h"

#include <stdexcept>
#include <string>

#include "formats.h"

namespace tureen {

namespace {

constexpr const char* NAMES[] = {"F32",  "BF16", "Q8_ROW",   "Q8_0",         "Q6_K",       "Q5_K",   "Q5_1",
                                 "Q5_0", "Q4_K", "Q4_1",     "Q4_0",         "MXFP4",      "IQ4_NL", "IQ4_XS",
                                 "Q3_K", "Q2_K", "WIDE_IQ2", "WIDE_IQ3_XXS", "WIDE_IQ3_S", "Q16"};

bool scaled_by_group(Format format) {
    return format != Format::F32 && format != Format::BF16 && format != Format::Q8_ROW && format != Format::Q16;
}

// Scales of a row with so many inputs.
int num_scales(Format format, int inputs) {
    if (is_super(format)) return inputs / SUPER;
    if (format == Format::Q16) return (inputs + SPAN - 1) / SPAN;
    return scaled_by_group(format) ? inputs / GROUP : 1;
}

int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

const char* name_of(Format format) { return NAMES[int(format)]; }

Format format_named(const char* name) {
    std::string known;
    for (int i = 0; i < int(sizeof NAMES / sizeof *NAMES); i++) {
        if (std::string(NAMES[i]) == name) return Format(i);
        known += std::string(i ? ", " : "") + NAMES[i];
    }
    throw std::invalid_argument("matrix format " + std::string(name) + " is unknown; there are " + known);
}

Inputs inputs_of(Format format) {
    switch (format) {
        case Format::F32: return Inputs::F32;
        case Format::BF16: return Inputs::BF16;
        case Format::Q16: return Inputs::WORDS;
        default: return Inputs::INT8_GROUP;
    }
}

Matrix layout_of(Format format, int rows, int cols) {
    std::string shape = std::to_string(rows) + " x " + std::to_string(cols);
    if (rows < 1 || cols < 1 || rows > INT32_MAX - TILE || cols > INT32_MAX - SUPER) {
        throw std::invalid_argument("a matrix cannot be " + shape);
    }
    Matrix matrix{};
    matrix.format = format;
    matrix.inputs = inputs_of(format);
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.padded_cols = round_up(cols, is_super(format) ? SUPER : scaled_by_group(format) ? GROUP : ROW_INPUTS);
    matrix.tiles = (rows + TILE - 1) / TILE;
    size_t inputs = size_t(matrix.padded_cols);
    matrix.scales_offset = inputs / GROUP * size_t(group_bytes(bits_of(format)));
    size_t scaled = size_t(num_scales(format, matrix.padded_cols)) * size_t(scale_bytes(format));
    matrix.tile_bytes = (matrix.scales_offset + scaled + 63) / 64 * 64;
    return matrix;
}

}  // namespace tureen
