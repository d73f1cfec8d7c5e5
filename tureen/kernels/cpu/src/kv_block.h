// How 16 keys, or 16 values, of one kv head lie in memory. Included by attention.cpp, once for each instruction set.
//
// A block is a small matrix: keys [head_dim][16 tokens], so that one register holds a dimension of 16 keys and scores
// need no sum across lanes; values [16 tokens][padded_dim]. F32 stores it row after row; the others store two rows
// interleaved, [rows / 2][width][2], so that a 32-bit lane has a pair. INT16 and INT8 have float scales [16 tokens]
// after it.
#pragma once

#include "kernels.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {

constexpr int BLOCK = 16;

inline int padded_dim(int head_dim) { return (head_dim + 15) / 16 * 16; }

inline size_t element_bytes(KvType type) { return type == KvType::F32 ? 4 : type == KvType::INT8 ? 1 : 2; }

inline bool has_scales(KvType type) { return type == KvType::INT16 || type == KvType::INT8; }

// The largest integer: of INT16, what leaves room for sums of products in 32 bits, see attention.cpp.
inline float levels_of(KvType type) { return type == KvType::INT16 ? 8191.0f : 127.0f; }

inline size_t block_bytes(KvType type, int head_dim) {
    size_t values = size_t(BLOCK) * size_t(padded_dim(head_dim)) * element_bytes(type);
    return values + (has_scales(type) ? BLOCK * sizeof(float) : 0);
}

inline float* token_scales(KvType type, uint8_t* block, int head_dim) {
    return (float*)(block + size_t(BLOCK) * size_t(padded_dim(head_dim)) * element_bytes(type));
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

// INT16, or INT8 unpacked.
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
inline void scatter(const KvLayer& kv, const Element* key, const Element* value, const Token& to) {
    auto* keys = (Element*)to.key_block;
    auto* values = (Element*)to.value_block;
    each_place<Element>(kv.head_dim, to.lane, [&](size_t in_keys, size_t in_values, int d) {
        keys[in_keys] = key[d];
        if (kv.has_values()) values[in_values] = value[d];
    });
}

// value: [head_dim]; unused if the layer stores no values.
template <typename Element>
inline void gather(const KvLayer& kv, const Token& from, Element* key, Element* value) {
    auto* keys = (const Element*)from.key_block;
    auto* values = (const Element*)from.value_block;
    each_place<Element>(kv.head_dim, from.lane, [&](size_t in_keys, size_t in_values, int d) {
        key[d] = keys[in_keys];
        if (kv.has_values()) value[d] = values[in_values];
    });
}

template <typename Element>
inline void copy_elements(const KvLayer& kv, const Token& from, const Token& to) {
    Element key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
    gather(kv, from, key, value);
    scatter(kv, key, value, to);
}

inline void copy_token(const KvLayer& kv, const Token& from, const Token& to) {
    if (kv.type == KvType::F32) return copy_elements<float>(kv, from, to);
    if (kv.type == KvType::INT8)
        copy_elements<int8_t>(kv, from, to);
    else
        copy_elements<uint16_t>(kv, from, to);
    if (!has_scales(kv.type)) return;
    auto copy_scale = [&](uint8_t* source, uint8_t* target) {
        token_scales(kv.type, target, kv.head_dim)[to.lane] = token_scales(kv.type, source, kv.head_dim)[from.lane];
    };
    copy_scale(from.key_block, to.key_block);
    if (kv.has_values()) copy_scale(from.value_block, to.value_block);
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

template <typename Integer>
inline void store_integers(const KvLayer& kv, const Token& to, const float* key, const float* value) {
    Integer keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
    float levels = levels_of(kv.type);
    token_scales(kv.type, to.key_block, kv.head_dim)[to.lane] =
        to_integers(key, kv.head_dim, levels, 0.0f, [&](int i, vec16 x) { store_rounded(keys + i, x); });
    if (kv.has_values())
        token_scales(kv.type, to.value_block, kv.head_dim)[to.lane] =
            to_integers(value, kv.head_dim, levels, 0.0f, [&](int i, vec16 x) { store_rounded(values + i, x); });
    scatter(kv, keys, values, to);
}

inline void store_token(const KvLayer& kv, int page, int at, int kv_head, const float* key, const float* value) {
    Token to = token_at(kv, page, at, kv_head);
    if (kv.type == KvType::F32) return scatter(kv, key, value, to);
    if (kv.type == KvType::INT16) return store_integers<int16_t>(kv, to, key, value);
    if (kv.type == KvType::INT8) return store_integers<int8_t>(kv, to, key, value);
    uint16_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
    for (int i = 0; i < kv.head_dim; i += 16) {
        store_bf16(keys + i, lanes_at(key, kv.head_dim, i));
        if (kv.has_values()) store_bf16(values + i, lanes_at(value, kv.head_dim, i));
    }
    scatter(kv, keys, values, to);
}

template <typename Integer>
inline void load_integers(const KvLayer& kv, const Token& from, float* key, float* value) {
    Integer keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
    gather(kv, from, keys, values);
    float key_scale = token_scales(kv.type, from.key_block, kv.head_dim)[from.lane];
    for (int d = 0; d < kv.head_dim; d++) key[d] = key_scale * float(keys[d]);
    if (!kv.has_values()) return;
    float value_scale = token_scales(kv.type, from.value_block, kv.head_dim)[from.lane];
    for (int d = 0; d < kv.head_dim; d++) value[d] = value_scale * float(values[d]);
}

inline void load_bf16(const KvLayer& kv, const Token& from, float* key, float* value) {
    uint16_t keys[MAX_HEAD_DIM], values[MAX_HEAD_DIM];
    gather(kv, from, keys, values);
    for (int d = 0; d < kv.head_dim; d++) key[d] = float_of_bf16(keys[d]);
    for (int d = 0; d < kv.head_dim && kv.has_values(); d++) value[d] = float_of_bf16(values[d]);
}

inline void load_token(const KvLayer& kv, int page, int at, int kv_head, float* key, float* value) {
    Token from = token_at(kv, page, at, kv_head);
    if (kv.type == KvType::F32) gather(kv, from, key, value);
    if (kv.type == KvType::BF16) load_bf16(kv, from, key, value);
    if (kv.type == KvType::INT16) load_integers<int16_t>(kv, from, key, value);
    if (kv.type == KvType::INT8) load_integers<int8_t>(kv, from, key, value);
    for (int d = 0; d < kv.value_dim() && !kv.has_values(); d++) value[d] = key[kv.values_from + d];
}

}  // namespace VARIANT
}  // namespace tureen
