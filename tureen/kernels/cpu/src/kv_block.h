// How 16 keys, or 16 values, of one kv head lie in memory. Included by attention.cpp, once for each instruction set.
//
// A block is a small matrix: keys [head_dim][16 tokens], so that one register holds a dimension of 16 keys and scores
// need no sum across lanes; values [16 tokens][padded_dim]. F32 stores it row after row; BF16 and INT8 store two rows
// interleaved, [rows / 2][width][2], so that a 32-bit lane has a pair. INT8 has float scales [16 tokens] after it.
#pragma once

#include "kernels.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {

constexpr int BLOCK = 16;
constexpr int MAX_HEAD_DIM = 256;

inline int padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }

inline size_t element_bytes(KvType type) { return type == KvType::F32 ? 4 : type == KvType::BF16 ? 2 : 1; }

inline size_t block_bytes(KvType type, int head_dim) {
    size_t values = size_t(BLOCK) * size_t(padded_dim(head_dim)) * element_bytes(type);
    return values + (type == KvType::INT8 ? BLOCK * sizeof(float) : 0);
}

inline float* token_scales(uint8_t* block, int head_dim) {
    return (float*)(block + size_t(BLOCK) * size_t(padded_dim(head_dim)));
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

// int8 made int16.
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

// Write a block as FloatBlock or WordBlock has it.
inline void unpack_block(KvType type, const uint8_t* block, int rows, int width, uint8_t* to) {
    for (int pair = 0; pair < rows / 2; pair++)
        for (int col = 0; col < width; col += 16) {
            if (type == KvType::BF16) {
                float* row = (float*)to + 2 * pair * width + col;
                store(row, Bf16Block::row<0>(block, width, pair, col));
                store(row + width, Bf16Block::row<1>(block, width, pair, col));
            } else {
                store_words((int16_t*)to + 2 * (pair * width + col), ByteBlock::rows(block, width, pair, col));
            }
        }
}

// -- one token --------------------------------------------------------------------------------------------------------

struct Token {  // in a layer's blocks
    uint8_t* key_block;
    uint8_t* value_block;
    int lane;
};

inline Token token_at(const KvLayer& kv, int page, int at, int kv_head) {
    size_t offset = kv.block_at(page, kv_head, at / BLOCK);
    return {kv.keys + offset, kv.values + offset, at % BLOCK};
}

// Calls body(index in the key block, index in the value block, dimension) for each dimension.
template <typename Element, typename Body>
TUREEN_INLINE void each_place(int head_dim, int lane, Body body) {
    int width = padded_dim(head_dim);
    for (int d = 0; d < head_dim; d++) body(place<Element>(BLOCK, d, lane), place<Element>(width, lane, d), d);
}

template <typename Element>
inline void scatter(const Element* key, const Element* value, int head_dim, const Token& to) {
    auto* keys = (Element*)to.key_block;
    auto* values = (Element*)to.value_block;
    each_place<Element>(head_dim, to.lane, [&](size_t in_keys, size_t in_values, int d) {
        keys[in_keys] = key[d];
        values[in_values] = value[d];
    });
}

template <typename Element>
inline void gather(const Token& from, int head_dim, Element* key, Element* value) {
    auto* keys = (const Element*)from.key_block;
    auto* values = (const Element*)from.value_block;
    each_place<Element>(head_dim, from.lane, [&](size_t in_keys, size_t in_values, int d) {
        key[d] = keys[in_keys];
        value[d] = values[in_values];
    });
}

template <typename Element>
inline void copy_elements(const Token& from, const Token& to, int head_dim) {
    Element key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
    gather(from, head_dim, key, value);
    scatter(key, value, head_dim, to);
}

inline void copy_token(KvType type, const Token& from, const Token& to, int head_dim) {
    if (type == KvType::F32) return copy_elements<float>(from, to, head_dim);
    if (type == KvType::BF16) return copy_elements<uint16_t>(from, to, head_dim);
    copy_elements<int8_t>(from, to, head_dim);
    token_scales(to.key_block, head_dim)[to.lane] = token_scales(from.key_block, head_dim)[from.lane];
    token_scales(to.value_block, head_dim)[to.lane] = token_scales(from.value_block, head_dim)[from.lane];
}

// x [count] -> integers in -levels … levels, zeros up to a multiple of 16; returns the scale.
template <typename Put>
TUREEN_INLINE float to_integers(const float* x, int count, float levels, Put put) {
    vec16 largest = zeros();
    for (int i = 0; i < count; i += 16) largest = max_of_abs(largest, abs(lanes_at(x, count, i)));
    Scale s = scale_of(reduce_max_of_abs(largest), levels);
    for (int i = 0; i < count; i += 16)
        put(i, s.inverse == 0.0f ? zeros() : lanes_at(x, count, i) * broadcast(s.inverse));
    return s.scale;
}

inline void store_token(const KvLayer& kv, int page, int at, int kv_head, const float* key, const float* value) {
    Token to = token_at(kv, page, at, kv_head);
    if (kv.type == KvType::F32) {
        scatter(key, value, kv.head_dim, to);
    } else if (kv.type == KvType::BF16) {
        uint16_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
        for (int i = 0; i < kv.head_dim; i += 16) {
            store_bf16(keys + i, lanes_at(key, kv.head_dim, i));
            store_bf16(values + i, lanes_at(value, kv.head_dim, i));
        }
        scatter(keys, values, kv.head_dim, to);
    } else {
        int8_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
        auto put_key = [&](int i, vec16 x) { store_int8(keys + i, x); };
        auto put_value = [&](int i, vec16 x) { store_int8(values + i, x); };
        token_scales(to.key_block, kv.head_dim)[to.lane] = to_integers(key, kv.head_dim, 127.0f, put_key);
        token_scales(to.value_block, kv.head_dim)[to.lane] = to_integers(value, kv.head_dim, 127.0f, put_value);
        scatter(keys, values, kv.head_dim, to);
    }
}

inline void load_token(const KvLayer& kv, int page, int at, int kv_head, float* key, float* value) {
    Token from = token_at(kv, page, at, kv_head);
    if (kv.type == KvType::F32) {
        gather(from, kv.head_dim, key, value);
    } else if (kv.type == KvType::BF16) {
        uint16_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
        gather(from, kv.head_dim, keys, values);
        for (int d = 0; d < kv.head_dim; d++) {
            key[d] = float_of_bf16(keys[d]);
            value[d] = float_of_bf16(values[d]);
        }
    } else {
        int8_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
        gather(from, kv.head_dim, keys, values);
        float key_scale = token_scales(from.key_block, kv.head_dim)[from.lane];
        float value_scale = token_scales(from.value_block, kv.head_dim)[from.lane];
        for (int d = 0; d < kv.head_dim; d++) {
            key[d] = key_scale * float(keys[d]);
            value[d] = value_scale * float(values[d]);
        }
    }
}

}  // namespace VARIANT
}  // namespace tureen
