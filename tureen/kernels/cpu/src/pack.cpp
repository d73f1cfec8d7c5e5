#include "pack.h"

#include <algorithm>
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

struct Encoding {
    const char* name;
    Format format;  // that keeps the values as they are
    int block_len;  // values
    int block_bytes;
    void (*integers)(Bytes block, uint8_t* q);  // null: floats
};

// F16 has no format of its own: block_bytes tells it from BF16 and F32, the name from BF16.
constexpr Encoding ENCODINGS[] = {
    {"F32", Format::F32, 1, 4, nullptr},    {"BF16", Format::BF16, 1, 2, nullptr},
    {"F16", Format::F32, 1, 2, nullptr},    {"Q4_0", Format::Q4_0, 32, 18, q4_0},
    {"Q4_1", Format::Q4_1, 32, 20, q4_1},   {"Q5_0", Format::Q5_0, 32, 22, q5_0},
    {"Q5_1", Format::Q5_1, 32, 24, q5_1},   {"Q8_0", Format::Q8_0, 32, 34, q8_0},
    {"Q4_K", Format::Q4_K, 256, 144, q4_k}, {"Q5_K", Format::Q5_K, 256, 176, q5_k},
    {"Q6_K", Format::Q6_K, 256, 210, q6_k},
};

const Encoding& encoding_named(const std::string& name) {
    std::string known;
    for (const Encoding& encoding : ENCODINGS) {
        if (name == encoding.name) return encoding;
        known += (known.empty() ? "" : ", ") + std::string(encoding.name);
    }
    throw std::invalid_argument("encoding " + name + " is unknown; there are " + known);
}

// Q4_K and Q5_K: 8 scales and 8 offsets of 6 bits each in 12 bytes.
void sub_scales(Bytes packed, uint8_t* scales, uint8_t* offsets) {
    for (int i = 0; i < 4; i++) {
        uint8_t low = packed[i], mid = packed[4 + i], high = packed[8 + i];
        scales[i] = low & 63;
        offsets[i] = mid & 63;
        scales[4 + i] = uint8_t((high & 15) | low >> 6 << 4);
        offsets[4 + i] = uint8_t(high >> 4 | mid >> 6 << 4);
    }
}

// Values of one stored block of integers.
void dequantize_block(const Encoding& encoding, Bytes block, float* out) {
    uint8_t q[SUPER], scales[GROUPS], offsets[GROUPS];
    encoding.integers(block, q);
    int zero = zero_of(encoding.format);
    if (encoding.format == Format::Q6_K) {
        float d = half_at(block + 208);
        for (int i = 0; i < SUPER; i++) out[i] = d * float(int8_t(block[192 + i / 16])) * float(int(q[i]) - zero);
    } else if (is_super(encoding.format)) {
        float d = half_at(block), m = half_at(block + 2);
        sub_scales(block + 4, scales, offsets);
        for (int i = 0; i < SUPER; i++) {
            out[i] = d * float(scales[i / GROUP]) * float(q[i]) - m * float(offsets[i / GROUP]);
        }
    } else {
        float d = half_at(block);
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
        for (int j = 0; j < 4; j++) {
            uint32_t low = load<uint32_t>(q + 8 * j) & 0x0f0f0f0f, high = load<uint32_t>(q + 8 * j + 4) & 0x0f0f0f0f;
            uint32_t both = low | high << 4;
            std::memcpy(to + j * 64 + r * 4, &both, 4);
        }
        for (int bit = 4; bit < bits; bit++) put_bit(to + 256 + (bit - 4) * 64, q, bit);
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

// A block of the format's own encoding: nothing is lost.
void put_block(const Encoding& encoding, Bytes block, int index, const Row& row) {
    uint8_t q[SUPER], scales[GROUPS], offsets[GROUPS];
    encoding.integers(block, q);
    int groups = encoding.block_len / GROUP;
    for (int group = 0; group < groups; group++) row.put(index * groups + group, q + group * GROUP);
    if (encoding.format == Format::Q6_K) {
        row.put_half(index, 0, load<uint16_t>(block + 208));
        for (int i = 0; i < SUPER / 16; i++) row.scales(index)[2 * TILE + i * TILE + row.r] = block[192 + i];
        return;
    }
    row.put_half(index, 0, load<uint16_t>(block));
    if (has_offsets(encoding.format)) row.put_half(index, 1, load<uint16_t>(block + 2));
    if (!is_super(encoding.format)) return;
    sub_scales(block + 4, scales, offsets);
    for (int group = 0; group < GROUPS; group++) {
        uint8_t* to = row.scales(index) + 4 * TILE + group * 2 * TILE + row.r;
        to[0] = scales[group];
        to[TILE] = offsets[group];
    }
}

bool made_of_floats(Format format) {
    return format == Format::F32 || format == Format::BF16 || format == Format::Q8_ROW || format == Format::Q4_1;
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
