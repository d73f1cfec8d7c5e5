#include "pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "formats.h"
#include "kernels.h"

namespace tureen {

namespace {

using Bytes = const uint8_t*;

// Low halves of n bytes, then the high halves.
void nibbles(Bytes packed, int n, uint8_t* q) {
    for (int i = 0; i < n; i++) {
        q[i] = packed[i] & 15;
        q[n + i] = packed[i] >> 4;
    }
}

void fifth_bits(Bytes packed, uint8_t* q) {
    uint32_t bits = load<uint32_t>(packed);
    for (int i = 0; i < 32; i++) q[i] = uint8_t(q[i] | (bits >> i & 1) << 4);
}

// The integers of a stored block, as the matrix formats have them (matrix.h).

void q4_0(Bytes block, uint8_t* q) { nibbles(block + 2, 16, q); }

void q4_1(Bytes block, uint8_t* q) { nibbles(block + 4, 16, q); }

void q5_0(Bytes block, uint8_t* q) {
    nibbles(block + 6, 16, q);
    fifth_bits(block + 2, q);
}

void q5_1(Bytes block, uint8_t* q) {
    nibbles(block + 8, 16, q);
    fifth_bits(block + 4, q);
}

void q8_0(Bytes block, uint8_t* q) {
    for (int i = 0; i < 32; i++) q[i] = block[2 + i] ^ 0x80;
}

void q4_k(Bytes block, uint8_t* q) {
    for (int pair = 0; pair < 4; pair++) nibbles(block + 16 + 32 * pair, 32, q + 64 * pair);
}

void q5_k(Bytes block, uint8_t* q) {
    for (int pair = 0; pair < 4; pair++) nibbles(block + 48 + 32 * pair, 32, q + 64 * pair);
    for (int group = 0; group < GROUPS; group++) {
        for (int i = 0; i < GROUP; i++) q[group * GROUP + i] |= uint8_t((block[16 + i] >> group & 1) << 4);
    }
}

void q6_k(Bytes block, uint8_t* q) {
    for (int group = 0; group < GROUPS; group++) {
        int half = group / 4, quarter = group % 4;
        Bytes low = block + half * 64 + quarter % 2 * 32, high = block + 128 + half * 32;
        for (int i = 0; i < GROUP; i++) {
            int top = high[i] >> 2 * quarter & 3;
            q[group * GROUP + i] = uint8_t((low[i] >> 4 * (quarter / 2) & 15) | top << 4);
        }
    }
}

void mxfp4(Bytes block, uint8_t* q) { nibbles(block + 1, 16, q); }

void iq4_xs(Bytes block, uint8_t* q) {
    for (int group = 0; group < GROUPS; group++) nibbles(block + 8 + 16 * group, 16, q + GROUP * group);
}

void wide(Bytes block, uint8_t* q) {
    for (int group = 0; group < GROUPS; group++) nibbles(block + 18 + 16 * group, 16, q + GROUP * group);
}

// Q2_K and Q3_K: four groups share 32 bytes.
void two_bits(Bytes packed, uint8_t* q) {
    for (int i = 0; i < SUPER; i++) q[i] = packed[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
}

void q2_k(Bytes block, uint8_t* q) { two_bits(block + 16, q); }

void q3_k(Bytes block, uint8_t* q) {
    two_bits(block + 32, q);
    for (int i = 0; i < SUPER; i++) q[i] = uint8_t(q[i] | (block[i % 32] >> i / 32 & 1) << 2);
}

struct Encoding {
    const char* name;
    Format format;  // that keeps the values as they are
    int block_len;  // values
    int block_bytes;
    void (*integers)(Bytes block, uint8_t* q);  // null: floats
};

// F16 has no format of its own: block_bytes tells it from BF16 and F32, the name from BF16.
constexpr Encoding ENCODINGS[] = {
    {"F32", Format::F32, 1, 4, nullptr},
    {"BF16", Format::BF16, 1, 2, nullptr},
    {"F16", Format::F32, 1, 2, nullptr},
    {"Q4_0", Format::Q4_0, 32, 18, q4_0},
    {"Q4_1", Format::Q4_1, 32, 20, q4_1},
    {"Q5_0", Format::Q5_0, 32, 22, q5_0},
    {"Q5_1", Format::Q5_1, 32, 24, q5_1},
    {"Q8_0", Format::Q8_0, 32, 34, q8_0},
    {"Q4_K", Format::Q4_K, 256, 144, q4_k},
    {"Q5_K", Format::Q5_K, 256, 176, q5_k},
    {"Q6_K", Format::Q6_K, 256, 210, q6_k},
    {"Q3_K", Format::Q3_K, 256, 110, q3_k},
    {"Q2_K", Format::Q2_K, 256, 84, q2_k},
    {"IQ4_XS", Format::IQ4_XS, 256, 136, iq4_xs},
    {"IQ4_NL", Format::IQ4_NL, 32, 18, q4_0},
    {"MXFP4", Format::MXFP4, 32, 17, mxfp4},
    {"WIDE_IQ2", Format::WIDE_IQ2, 256, 146, wide},
    {"WIDE_IQ3_XXS", Format::WIDE_IQ3_XXS, 256, 146, wide},
    {"WIDE_IQ3_S", Format::WIDE_IQ3_S, 256, 146, wide},
};

const Encoding& encoding_named(const std::string& name) {
    std::string known;
    for (const Encoding& encoding : ENCODINGS) {
        if (name == encoding.name) return encoding;
        known += (known.empty() ? "" : ", ") + std::string(encoding.name);
    }
    throw std::invalid_argument("encoding " + name + " is unknown; there are " + known);
}

// The scales of a stored super block, of 8 groups or 16 half groups.
struct SuperScales {
    Bytes d, m;  // halves; m of formats with offsets
    int8_t scale[SUPER / 16];
    uint8_t offset[SUPER / 16];
};

// Q4_K and Q5_K: 8 scales and 8 offsets of 6 bits each in 12 bytes.
SuperScales scales_with_offsets(Bytes block) {
    SuperScales s{block, block + 2, {}, {}};
    for (int i = 0; i < 4; i++) {
        uint8_t low = block[4 + i], mid = block[8 + i], high = block[12 + i];
        s.scale[i] = low & 63;
        s.offset[i] = mid & 63;
        s.scale[4 + i] = int8_t((high & 15) | low >> 6 << 4);
        s.offset[4 + i] = uint8_t(high >> 4 | mid >> 6 << 4);
    }
    return s;
}

SuperScales scales_of_q2_k(Bytes block) {
    SuperScales s{block + 80, block + 82, {}, {}};
    for (int i = 0; i < SUPER / 16; i++) {
        s.scale[i] = block[i] & 15;
        s.offset[i] = block[i] >> 4;
    }
    return s;
}

// 16 scales of 6 bits in 12 bytes: first the low halves, then the high bits.
SuperScales scales_of_q3_k(Bytes block) {
    SuperScales s{block + 108, nullptr, {}, {}};
    for (int i = 0; i < SUPER / 16; i++) {
        int low = block[96 + i % 8] >> 4 * (i / 8) & 15, high = block[104 + i % 4] >> 2 * (i / 4) & 3;
        s.scale[i] = int8_t((low | high << 4) - 32);
    }
    return s;
}

SuperScales scales_of_iq4_xs(Bytes block) {
    SuperScales s{block, nullptr, {}, {}};
    for (int i = 0; i < GROUPS; i++) {
        int low = block[4 + i / 2] >> 4 * (i % 2) & 15, high = load<uint16_t>(block + 2) >> 2 * i & 3;
        s.scale[i] = int8_t((low | high << 4) - 32);
    }
    return s;
}

SuperScales super_scales(Format format, Bytes block) {
    switch (format) {
        case Format::Q2_K: return scales_of_q2_k(block);
        case Format::Q3_K: return scales_of_q3_k(block);
        case Format::IQ4_XS: return scales_of_iq4_xs(block);
        case Format::Q6_K: {
            SuperScales s{block + 208, nullptr, {}, {}};
            std::memcpy(s.scale, block + 192, sizeof s.scale);
            return s;
        }
        case Format::WIDE_IQ2:
        case Format::WIDE_IQ3_XXS:
        case Format::WIDE_IQ3_S: {
            SuperScales s{block, nullptr, {}, {}};
            std::memcpy(s.scale, block + 2, sizeof s.scale);
            return s;
        }
        default: return scales_with_offsets(block);
    }
}

// Values of one stored block of integers.
void dequantize_block(const Encoding& encoding, Bytes block, float* out) {
    uint8_t q[SUPER];
    encoding.integers(block, q);
    int zero = zero_of(encoding.format);
    if (has_table(encoding.format)) {
        for (int i = 0; i < encoding.block_len; i++) q[i] = table_of(encoding.format)[q[i]];
    }
    if (is_super(encoding.format)) {
        SuperScales s = super_scales(encoding.format, block);
        int sharing = GROUP / halves_of(encoding.format);
        float d = half_at(s.d), m = has_offsets(encoding.format) ? half_at(s.m) : 0.0f;
        for (int i = 0; i < SUPER; i++) {
            out[i] = d * float(s.scale[i / sharing]) * sub_scale_unit(encoding.format) * float(int(q[i]) - zero);
            if (has_offsets(encoding.format)) out[i] -= m * float(s.offset[i / sharing]);
        }
    } else {
        float d = encoding.format == Format::MXFP4 ? power_of_two(int(block[0]) - 128) : half_at(block);
        for (int i = 0; i < GROUP; i++) out[i] = d * float(int(q[i]) - zero);
        if (!has_offsets(encoding.format)) return;
        float m = half_at(block + 2);
        for (int i = 0; i < GROUP; i++) out[i] += m;
    }
}

void dequantize(const Encoding& encoding, Bytes row, int cols, float* out) {
    if (encoding.integers != nullptr) {
        for (int begin = 0; begin < cols; begin += encoding.block_len, row += encoding.block_bytes) {
            dequantize_block(encoding, row, out + begin);
        }
    } else if (encoding.format == Format::BF16) {
        for (int i = 0; i < cols; i++) out[i] = bf16_to_float(load<uint16_t>(row + 2 * size_t(i)));
    } else if (encoding.block_bytes == 2) {
        for (int i = 0; i < cols; i++) out[i] = half_at(row + 2 * size_t(i));
    } else {
        std::memcpy(out, row, size_t(cols) * 4);
    }
}

// One row of one tile, to be filled. The memory is zero before.
struct Row {
    const Matrix matrix;  // not a reference: stores of bytes would make the compiler read it again and again
    uint8_t* tile;
    int r;

    uint8_t* scales(int index) const {
        return tile + matrix.scales_offset + size_t(index) * size_t(scale_bytes(matrix.format));
    }

    // 32 integers.
    void put(int group, const uint8_t* q) const {
        int bits = bits_of(matrix.format);
        uint8_t* to = tile + size_t(group) * size_t(group_bytes(bits));
        if (bits == 8) {
            for (int quad = 0; quad < 8; quad++) std::memcpy(to + quad * 64 + r * 4, q + quad * 4, 4);
            return;
        }
        int low = bits < 4 ? 2 : 4;
        for (int j = 0; j < low; j++) put_low_bits(to + j * 64, q + 32 / low * j, low);
        for (int bit = low; bit < bits; bit++) put_bit(to + bit * 64, q, bit);
    }

    // The low bits of 8 / bits quads, which share a byte each.
    void put_low_bits(uint8_t* to, const uint8_t* q, int bits) const {
        uint32_t shared = 0, mask = bits == 2 ? 0x03030303 : 0x0f0f0f0f;
        for (int quad = 0; quad < 8 / bits; quad++) shared |= (load<uint32_t>(q + 4 * quad) & mask) << bits * quad;
        std::memcpy(to + r * 4, &shared, 4);
    }

    void put_bit(uint8_t* to, const uint8_t* q, int bit) const {
        for (int quad = 0; quad < 8; quad++) {
            uint32_t ones = load<uint32_t>(q + 4 * quad) >> bit & 0x01010101;
            uint32_t four = ones * 0x01020408 >> 24 & 15;  // byte b's bit becomes bit b
            to[quad * 8 + r / 2] |= uint8_t(four << r % 2 * 4);
        }
    }

    void put_half(int index, int at, uint16_t half) const {
        std::memcpy(scales(index) + at * 2 * TILE + 2 * r, &half, 2);
    }
};

void put_super_scales(Format format, Bytes block, int index, const Row& row) {
    SuperScales s = super_scales(format, block);
    row.put_half(index, 0, load<uint16_t>(s.d));
    if (has_offsets(format)) row.put_half(index, 1, load<uint16_t>(s.m));
    uint8_t* to = row.scales(index) + (has_offsets(format) ? 4 : 2) * TILE + row.r;
    for (int i = 0; i < GROUPS * halves_of(format); i++, to += TILE) {
        *to = uint8_t(s.scale[i]);
        if (format == Format::Q2_K) *to = uint8_t(*to | s.offset[i] << 4);
        if (format == Format::Q4_K || format == Format::Q5_K) *(to += TILE) = s.offset[i];
    }
}

// A block of the format's own encoding: nothing is lost.
void put_block(const Encoding& encoding, Bytes block, int index, const Row& row) {
    uint8_t q[SUPER];
    encoding.integers(block, q);
    int groups = encoding.block_len / GROUP;
    for (int group = 0; group < groups; group++) row.put(index * groups + group, q + group * GROUP);
    if (is_super(encoding.format)) return put_super_scales(encoding.format, block, index, row);
    if (encoding.format == Format::MXFP4) {
        row.scales(index)[row.r] = block[0] ^ 0x80;  // -128
        return;
    }
    row.put_half(index, 0, load<uint16_t>(block));
    if (has_offsets(encoding.format)) row.put_half(index, 1, load<uint16_t>(block + 2));
}

bool made_of_floats(Format format) {
    return format == Format::F32 || format == Format::BF16 || format == Format::Q16 || format == Format::Q8_ROW ||
           format == Format::Q4_1;
}

size_t row_bytes(const Encoding& encoding, int cols) {
    if (cols < 1 || cols % encoding.block_len) {
        throw std::invalid_argument("rows of " + std::string(encoding.name) + " hold a multiple of " +
                                    std::to_string(encoding.block_len) + " values, not " + std::to_string(cols));
    }
    return size_t(cols / encoding.block_len) * size_t(encoding.block_bytes);
}

void check_rows(const Encoding& encoding, size_t bytes, int rows, int cols, const int64_t* row_order) {
    size_t each = row_bytes(encoding, cols);
    bool whole = row_order == nullptr ? bytes == each * size_t(rows) : bytes % each == 0;
    if (!whole) {
        throw std::invalid_argument(std::to_string(bytes) + " bytes are not " + std::to_string(rows) + " rows of " +
                                    std::to_string(cols) + " values in " + encoding.name);
    }
    for (int i = 0; row_order != nullptr && i < rows; i++) {
        if (row_order[i] < 0 || size_t(row_order[i]) >= bytes / each) {
            throw std::invalid_argument("row_order[" + std::to_string(i) + "] is " + std::to_string(row_order[i]) +
                                        "; there are " + std::to_string(bytes / each) + " rows");
        }
    }
}

// The stored bytes of row r of a tile; null beyond the last row.
Bytes stored_row(const Encoding& encoding, Bytes stored, const int64_t* row_order, const Matrix& made, int tile,
                 int r) {
    int row = tile * TILE + r;
    if (row >= made.rows) return nullptr;
    return stored + size_t(row_order == nullptr ? row : row_order[row]) * row_bytes(encoding, made.cols);
}

void keep_tile(const Encoding& encoding, Bytes stored, const int64_t* row_order, const Matrix& made, int tile) {
    for (int r = 0; r < TILE; r++) {
        Bytes from = stored_row(encoding, stored, row_order, made, tile, r);
        if (from == nullptr) return;
        Row row{made, made.data + size_t(tile) * made.tile_bytes, r};
        for (int b = 0; b < made.cols / encoding.block_len; b++) {
            put_block(encoding, from + size_t(b) * size_t(encoding.block_bytes), b, row);
        }
    }
}

// values: room for [TILE][cols].
void make_tile(const Encoding& encoding, Bytes stored, const int64_t* row_order, const Matrix& made, int tile,
               float* values, const PackKernels& kernels) {
    for (int r = 0; r < TILE; r++) {
        Bytes from = stored_row(encoding, stored, row_order, made, tile, r);
        float* to = values + size_t(r) * size_t(made.cols);
        if (from == nullptr) {
            std::fill(to, to + made.cols, 0.0f);
        } else {
            dequantize(encoding, from, made.cols, to);
        }
    }
    kernels.put(made, values, made.data + size_t(tile) * made.tile_bytes);
}

}  // namespace

std::shared_ptr<PackedMatrix> blank(Format format, int rows, int cols) {
    static Arena arena;
    auto packed = std::make_shared<PackedMatrix>(PackedMatrix{layout_of(format, rows, cols), nullptr});
    packed->memory = arena.take(packed->bytes());
    packed->matrix.data = packed->memory.get();
    return packed;
}

std::shared_ptr<PackedMatrix> pack(Pool& pool, const uint8_t* stored, size_t bytes, const std::string& name,
                                   Format format, int rows, int cols, const int64_t* row_order) {
    const Encoding& encoding = encoding_named(name);
    const PackKernels& pack_kernels = *kernels().pack;  // may throw, which threads of the pool may not
    layout_of(format, rows, cols);                      // refuses sizes that check_rows would take
    check_rows(encoding, bytes, rows, cols, row_order);
    bool keep = encoding.integers != nullptr && encoding.format == format;
    if (!keep && !made_of_floats(format)) {
        throw std::invalid_argument(name + " weights cannot become " + name_of(format));
    }
    auto packed = blank(format, rows, cols);
    const Matrix& made = packed->matrix;
    std::vector<float> scratch(keep ? 0 : size_t(pool.threads()) * TILE * size_t(cols));
    pool.run([&](int thread) {
        int64_t tiles = made.tiles, threads = pool.threads();
        float* values = scratch.data() + (keep ? 0 : size_t(thread) * TILE * size_t(cols));
        for (int tile = int(tiles * thread / threads); tile < int(tiles * (thread + 1) / threads); tile++) {
            if (keep) {
                keep_tile(encoding, stored, row_order, made, tile);
            } else {
                make_tile(encoding, stored, row_order, made, tile, values, pack_kernels);
            }
        }
    });
    return packed;
}

}  // namespace tureen
