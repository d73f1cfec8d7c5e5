// Weights as the kernels read them.
//
// 16 output rows (a tile) stand side by side, one to each 32-bit lane of a 512-bit register, so that a product needs no
// sum across lanes. A tile's values come first, its scales after them; both are read front to back. The layout is the
// same for every instruction set. Rows beyond the last, and inputs beyond `cols`, are stored so that they add nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tureen {

constexpr int TILE = 16;        // output rows side by side
constexpr int GROUP = 32;       // inputs that share a scale
constexpr int SUPER = 256;      // inputs that share the scale of scales in K formats
constexpr int ROW_INPUTS = 64;  // cols of Q8_ROW, Q16, BF16 and F32 are padded to a multiple of this
constexpr int SPAN = 128;       // inputs that share a scale in Q16

// Largest magnitude of Q16's integers. What they are multiplied with is so scaled that the sum over a span fits in 32
// bits.
constexpr float WORD_LEVELS = 8191;

// The values of a quantised format are unsigned integers q; what they stand for is d * (q - ZERO) or d * q + m. Where a
// format has a table (formats.h), the stored bits are an index of it, and q is the entry.
enum class Format : int {
    F32,     // tile: [cols][16] float
    BF16,    // tile: [cols / 2][16][2] bfloat16
    Q8_ROW,  // q - 128, one d a row.           values: 8 bits;  scales: [16] float
    Q8_0,    // d * (q - 128).                  values: 8 bits;  scales: a group: [16] half d
    Q6_K,  // d * scale * (q - 32).           values: 6 bits;  scales: a super: [16] half d, [16 sixteens of inputs][16]
           // int8 scale
    Q5_K,  // d * scale * q - m * offset.     values: 5 bits;  scales as Q4_K
    Q5_1,  // d * q + m.                      values: 5 bits;  scales as Q4_1
    Q5_0,  // d * (q - 16).                   values: 5 bits;  scales as Q8_0
    Q4_K,  // d * scale * q - m * offset.     values: 4 bits;  scales: a super: [16] half d, [16] half m, [8
           // groups]{[16] uint8 scale, [16] uint8 offset}
    Q4_1,  // d * q + m.                      values: 4 bits;  scales: a group: [16] half d, [16] half m
    Q4_0,  // d * (q - 8).                    values: 4 bits;  scales as Q8_0
    MXFP4,   // 2^e * (table[q] - 12).        values: 4 bits;  scales: a group: [16] int8 e
    IQ4_NL,  // d * (table[q] - 128).         values: 4 bits;  scales as Q8_0
    IQ4_XS,  // d * scale * (table[q] - 128). values: 4 bits;  scales: a super: [16] half d, [8 groups][16] int8 scale
    Q3_K,    // d * scale * (q - 4).          values: 3 bits;  scales as Q6_K
    Q2_K,  // d * scale * q - m * offset.   values: 2 bits;  scales: a super: [16] half d, [16] half m, [16 sixteens of
           // inputs][16] uint8: scale in the low half, offset in the high half
    // d * scale / 8 * (table[q] - 128): what tureen/weights/gguf_widen.py makes of IQ1, IQ2, TQ1 and TQ2, and of IQ3.
    WIDE_IQ2,      // values: 4 bits;  scales as Q6_K
    WIDE_IQ3_XXS,  // the same
    WIDE_IQ3_S,    // the same
    Q16,           // d * q, q from -8191 to 8191.     values: [cols / 2][16][2] int16;  scales: a span: [16] float d
};
// Values of a tile, group after group of 32 inputs. r = row in the tile, i = input in the group, i = 4 * quad + b:
//   8 bits: [8 quads][16 r][4 b] bytes.
//   4 bits: [4 j][16 r][4 b] bytes: the low half is quad 2j, the high half quad 2j + 1.
//   5 bits: as 4 bits (256 bytes), then bit 4: [8 quads] uint64, bit 4r + b.
//   6 bits: as 4 bits (256 bytes), then bit 4 as above, then bit 5 likewise: [8 quads] uint64 each.
//   2 bits: [2 j][16 r][4 b] bytes: bits 2 k and 2 k + 1 are quad 4j + k.
//   3 bits: as 2 bits (128 bytes), then bit 2: [8 quads] uint64, bit 4r + b.

// What a matrix is multiplied with. INT16_GROUP: 16 bits in two rows of INT8_GROUP, the second being what the first one
// leaves; a product is the sum of theirs, the first one's first. WORDS: 16 bits, with a scale for each span.
enum class Inputs : int { F32, BF16, INT8_GROUP, INT16_GROUP, WORDS };

struct Matrix {
    Format format;
    Inputs inputs;         // of a format whose inputs are integers: of 8 or 16 bits
    int rows;              // outputs
    int cols;              // inputs, as the model has them
    int padded_cols;       // a multiple of ROW_INPUTS, GROUP or SUPER, as the format asks
    int tiles;             // ceil(rows / 16)
    size_t scales_offset;  // bytes from a tile's begin to its scales
    size_t tile_bytes;     // a multiple of 64
    uint8_t* data;         // 64-byte aligned, tiles * tile_bytes bytes

    const uint8_t* tile(int t) const { return data + size_t(t) * tile_bytes; }
};

Inputs inputs_of(Format format);                                                       // at first
constexpr int input_rows(Inputs kind) { return kind == Inputs::INT16_GROUP ? 2 : 1; }  // that a row of inputs takes
const char* name_of(Format format);
Format format_named(const char* name);  // throws std::invalid_argument naming those known

// The sizes of a matrix of this format; `data` is null. Throws std::invalid_argument naming what does not fit.
Matrix layout_of(Format format, int rows, int cols);

// Activations: `rows` rows of `cols` inputs, each row padded with zeros to a multiple of 256 inputs (`stride`).
// Which arrays are filled depends on `kind`; the others may hold anything.
struct Activations {
    Inputs kind;
    int rows;
    int cols;
    int stride;      // inputs from one row to the next
    float* f32;      // [rows][stride]                      F32
    uint16_t* bf16;  // [rows][stride], nearest even        BF16
    int16_t* words;  // [rows][stride]                      WORDS
    int8_t* q;       // [rows][stride], -127 … 127          INT8_GROUP; INT16_GROUP: [rows][2][stride], likewise below
    float* scale;    // [rows][stride / 32]: value = scale * q; WORDS: [rows][stride / 128]
    float* scaled_sum;  // [rows][stride / 32]: scale * sum of the group's q
    int32_t* sum;       // [rows][stride / 32]: sum of the group's q
    int32_t* half_sum;  // [rows][stride / 16]: sums of its two halves
};

}  // namespace tureen
