// How 16 keys, or 16 values, of one kv head lie in memory. Included by attention.cpp, once for each instruction set.
//
// A block is a small matrix: keys [head_dim][16 tokens], so that one register holds a dimension of 16 keys and scores
// need no sum across lanes; values [16 tokens][padded_dim]. F32 stores it row after row; the others store two rows
// interleaved, [rows / 2][width][2], so that a 32-bit lane has a pair. In an INT4 row, 8 bytes hold 16 columns: the
// lower nibble of byte i is column i, the upper one column i + 8. So no two tokens share a byte, and threads may store
// them at the same time. INT16, INT8 and INT4 have float scales [16 tokens] after the matrix.
#pragma once

#include "kernels.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {

constexpr int BLOCK = 16;

inline int padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }

// The bytes of a row in a block of values. (A block of keys has as many bytes.)
inline size_t row_bytes(KvType type, int head_dim) {
    size_t width = size_t(padded_dim(head_dim));
    if (type == KvType::INT4) return width / 2;
    return width * (type == KvType::F32 ? 4 : type == KvType::INT8 ? 1 : 2);
}

inline bool has_scales(KvType type) { return type == KvType::INT16 || type == KvType::INT8 || type == KvType::INT4; }

// The largest integer: of INT16, what leaves room for sums of products in 32 bits, see attention.cpp.
inline float levels_of(KvType type) {
    if (type == KvType::INT4) return 7.0f;
    return type == KvType::INT16 ? 8191.0f : 127.0f;
}

inline size_t block_bytes(KvType type, int head_dim) {
    return BLOCK * row_bytes(type, head_dim) + (has_scales(type) ? BLOCK * sizeof(float) : 0);
}

inline float* token_scales(KvType type, uint8_t* block, int head_dim) {
    return (float*)(block + BLOCK * row_bytes(type, head_dim));
}

// Index of (row, col) in a block of this width.
template <typename Element>
inline size_t place(int width, int row, int col) {
    if (sizeof(Element) == sizeof(float)) return size_t(row * width + col);
    return size_t((row / 2 * width + col) * 2 + row % 2);
}

// -- as the kernels read them -----------------------------------------------------------------------------------------

// Of each: the rows 2 * pair and 2 * pair + 1, 16 columns from `col`; `prefetch` of the same place in another block.
TUREEN_INLINE const uint8_t* pair_at(const uint8_t* block, int width, int pair, int col, int element_bytes) {
    return block + 2 * (pair * width + col) * element_bytes;
}

struct FloatBlock {
    static TUREEN_INLINE void prefetch(const uint8_t* block, int width, int pair, int col) {
        const float* at = (const float*)block + 2 * pair * width + col;
        __builtin_prefetch(at);
        __builtin_prefetch(at + width);
    }
    template <int ODD>
    static TUREEN_INLINE vec16 row(const uint8_t* block, int width, int pair, int col) {
        return load((const float*)block + (2 * pair + ODD) * width + col);
    }
};

struct Bf16Block {
    static TUREEN_INLINE void prefetch(const uint8_t* block, int width, int pair, int col) {
        __builtin_prefetch(pair_at(block, width, pair, col, 2));
    }
    template <int ODD>
    static TUREEN_INLINE vec16 row(const uint8_t* block, int width, int pair, int col) {
        ivec16 both = load_words((const int16_t*)pair_at(block, width, pair, col, 2));
        return each_part(
            [&](int i) { return float_of_bits(ODD ? both.p[i] & int_part_of(int32_t(0xffff0000)) : both.p[i] << 16); });
    }
};

// INT16; or INT8 or INT4, unpacked.
struct WordBlock {
    static TUREEN_INLINE void prefetch(const uint8_t* block, int width, int pair, int col) {
        __builtin_prefetch(pair_at(block, width, pair, col, 2));
    }
    static TUREEN_INLINE ivec16 rows(const uint8_t* block, int width, int pair, int col) {
        return load_words((const int16_t*)pair_at(block, width, pair, col, 2));
    }
};

struct ByteBlock {
    static TUREEN_INLINE void prefetch(const uint8_t* block, int width, int pair, int col) {
        __builtin_prefetch(pair_at(block, width, pair, col, 1));
    }
    static TUREEN_INLINE ivec16 rows(const uint8_t* block, int width, int pair, int col) {
        return widen((const int8_t*)pair_at(block, width, pair, col, 1));
    }
};

struct NibbleBlock {
    static TUREEN_INLINE void prefetch(const uint8_t* block, int width, int pair, int col) {
        __builtin_prefetch(pair_at(block, width / 2, pair, col / 2, 1));
    }
    static TUREEN_INLINE ivec16 rows(const uint8_t* block, int width, int pair, int col) {
        return widen_nibbles((const int8_t*)pair_at(block, width / 2, pair, col / 2, 1));
    }
};

// Write a block as FloatBlock or WordBlock has it.
inline void unpack_block(KvType type, const uint8_t* block, int rows, int width, uint8_t* to) {
    for (int pair = 0; pair < rows / 2; pair++)
        for (int col = 0; col < width; col += 16) {
            int16_t* words = (int16_t*)to + 2 * (pair * width + col);
            if (type == KvType::BF16) {
                float* row = (float*)to + 2 * pair * width + col;
                store(row, Bf16Block::row<0>(block, width, pair, col));
                store(row + width, Bf16Block::row<1>(block, width, pair, col));
            } else if (type == KvType::INT4) {
                store_words(words, NibbleBlock::rows(block, width, pair, col));
            } else {
                store_words(words, ByteBlock::rows(block, width, pair, col));
            }
        }
}

// -- one token --------------------------------------------------------------------------------------------------------

// A token's key, a column of its block, or its value, a row.
struct Line {
    KvType type;
    int head_dim;
    uint8_t* block;
    int lane;
    bool is_key;

    float& scale() const { return token_scales(type, block, head_dim)[lane]; }

    // Calls body(element of the block, d) for each of `count` dimensions.
    template <typename Element, typename Body>
    TUREEN_INLINE void each(int width, int count, Body body) const {
        Element* elements = (Element*)block;
        for (int d = 0; d < count; d++)
            body(elements[is_key ? place<Element>(BLOCK, d, lane) : place<Element>(width, lane, d)], d);
    }

    template <typename Element>
    void put(const Element* from) const {
        each<Element>(padded_dim(head_dim), head_dim, [&](Element& element, int d) { element = from[d]; });
    }

    template <typename Element>
    void get(Element* to) const {
        each<Element>(padded_dim(head_dim), head_dim, [&](Element& element, int d) { to[d] = element; });
    }

    // [padded_dim] integers of 4 bits
    void put_nibbles(const int8_t* from) const {
        int width = padded_dim(head_dim);
        each<int8_t>(width / 2, width / 2, [&](int8_t& both, int i) {
            const int8_t* lower = from + i / 8 * 16 + i % 8;
            both = int8_t((lower[0] & 15) | lower[8] * 16);
        });
    }

    void get_nibbles(int8_t* to) const {
        int width = padded_dim(head_dim);
        each<int8_t>(width / 2, width / 2, [&](int8_t& both, int i) {
            int8_t* lower = to + i / 8 * 16 + i % 8;
            lower[0] = int8_t((both & 15) - ((both & 8) << 1));
            lower[8] = int8_t(both >> 4);
        });
    }
};

struct Token {  // in a layer's blocks
    Line key, value;
};

inline Token token_in(const KvLayer& kv, uint8_t* key_block, uint8_t* value_block, int lane) {
    return {{kv.key_type, kv.head_dim, key_block, lane, true}, {kv.value_type, kv.head_dim, value_block, lane, false}};
}

inline Token token_at(const KvLayer& kv, int page, int at, int kv_head) {
    int block = at / BLOCK;
    return token_in(kv, kv.key_block(page, kv_head, block), kv.value_block(page, kv_head, block), at % BLOCK);
}

template <typename Element>
inline void copy_elements(const Line& from, const Line& to) {
    Element elements[MAX_HEAD_DIM];
    from.get(elements);
    to.put(elements);
}

inline void copy_line(const Line& from, const Line& to) {
    if (from.type == KvType::F32) return copy_elements<float>(from, to);
    int8_t nibbles[MAX_HEAD_DIM];
    if (from.type == KvType::INT4) {
        from.get_nibbles(nibbles);
        to.put_nibbles(nibbles);
    } else if (from.type == KvType::INT8) {
        copy_elements<int8_t>(from, to);
    } else {
        copy_elements<uint16_t>(from, to);
    }
    if (has_scales(from.type)) to.scale() = from.scale();
}

inline void copy_token(const KvLayer& kv, const Token& from, const Token& to) {
    copy_line(from.key, to.key);
    if (kv.has_values()) copy_line(from.value, to.value);
}

// The scale of integers of values with this largest magnitude and this sum of magnitudes: all are in -levels … levels,
// and their magnitudes' sum is at most levels / share, but for rounding.
TUREEN_INLINE Scale scale_within(float largest, float sum, float levels, float share) {
    return scale_of(LargerOfAbs{}(largest, sum * share), levels);
}

// x [count] -> integers of `scale_within`, zeros up to a multiple of 16; returns the scale.
template <typename Put>
TUREEN_INLINE float to_integers(const float* x, int count, float levels, float share, Put put) {
    vec16 largest = zeros(), sum = zeros();
    for (int i = 0; i < count; i += 16) {
        vec16 size = abs(lanes_at(x, count, i));
        largest = max_of_abs(largest, size);
        sum = sum + size;
    }
    Scale s = scale_within(reduce_max_of_abs(largest), reduce_add(sum), levels, share);
    for (int i = 0; i < count; i += 16)
        put(i, s.inverse == 0.0f ? zeros() : lanes_at(x, count, i) * broadcast(s.inverse));
    return s.scale;
}

inline void store_rounded(int8_t* to, vec16 x) { store_int8(to, x); }
inline void store_rounded(int16_t* to, vec16 x) { store_int16(to, x); }

// x [head_dim] -> integers [padded_dim]; stores their scale.
template <typename Integer>
inline void round_line(const Line& to, const float* x, Integer* integers) {
    to.scale() = to_integers(x, to.head_dim, levels_of(to.type), 0.0f,
                             [&](int i, vec16 rounded) { store_rounded(integers + i, rounded); });
}

inline void store_line(const Line& to, const float* x) {
    int16_t words[MAX_HEAD_DIM];
    int8_t bytes[MAX_HEAD_DIM];
    if (to.type == KvType::F32) return to.put(x);
    if (to.type == KvType::BF16) {
        for (int i = 0; i < to.head_dim; i += 16) store_bf16((uint16_t*)words + i, lanes_at(x, to.head_dim, i));
        return to.put(words);
    }
    if (to.type == KvType::INT16) {
        round_line(to, x, words);
        return to.put(words);
    }
    round_line(to, x, bytes);
    if (to.type == KvType::INT4) return to.put_nibbles(bytes);
    to.put(bytes);
}

template <typename Integer>
inline void multiply_line(const Line& from, const Integer* integers, float* x) {
    for (int d = 0; d < from.head_dim; d++) x[d] = from.scale() * float(integers[d]);
}

inline void load_line(const Line& from, float* x) {
    int16_t words[MAX_HEAD_DIM];
    int8_t bytes[MAX_HEAD_DIM];
    if (from.type == KvType::F32) return from.get(x);
    if (from.type == KvType::BF16 || from.type == KvType::INT16) {
        from.get(words);
        if (from.type == KvType::INT16) return multiply_line(from, words, x);
        for (int d = 0; d < from.head_dim; d++) x[d] = float_of_bf16(uint16_t(words[d]));
        return;
    }
    if (from.type == KvType::INT4)
        from.get_nibbles(bytes);
    else
        from.get(bytes);
    multiply_line(from, bytes, x);
}

inline void store_token(const KvLayer& kv, int page, int at, int kv_head, const float* key, const float* value) {
    Token to = token_at(kv, page, at, kv_head);
    store_line(to.key, key);
    if (kv.has_values()) store_line(to.value, value);
}

inline void load_token(const KvLayer& kv, int page, int at, int kv_head, float* key, float* value) {
    Token from = token_at(kv, page, at, kv_head);
    load_line(from.key, key);
    if (kv.has_values()) return load_line(from.value, value);
    for (int d = 0; d < kv.value_dim(); d++) value[d] = key[kv.values_from + d];
}

}  // namespace VARIANT
}  // namespace tureen
