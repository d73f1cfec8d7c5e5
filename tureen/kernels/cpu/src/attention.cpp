// Attention over keys and values in pages. Compiled once for each instruction set; see kernels.h.
//
// What a query vector gets, whoever is computed with it (softmax by pieces: Milakov & Gimelshein, arXiv:1805.02867):
//   score of key t       s[t] = q · k[t], summed over the dimensions in order; a key to each lane
//   of a piece           e[t] = 2^((s[t] - max s) * c) with c = scale * log2 e; sum of e[t], lane by lane, block after
//                        block; sum of e[t] v[t] over t in order
//   of all               the pieces' sums, rescaled to the larger maximum, in the order of the pieces
// If values are the last dimensions of the keys (latent attention: DeepSeek-V2, arXiv:2405.04434), e[t] v[t] is summed
// lane by lane, block after block, and then over the lanes.
// INT16, INT8 and INT4: q becomes integers of 15 bits or a little less with one scale, and so do the weights e[t] *
// (scale of v[t]) of a piece. The sum of their magnitudes times `levels_of` the cache is less than 2^31, so q · k and
// the sum over t are exact in 32 bits.
//
// Blocks hold places that are not (or not yet) the sequence's. They may contain NaN: their scores are replaced, and
// their values are never multiplied (or, as integers, multiplied by 0).
#include "attention_piece.h"
#include "kernels.h"
#include "kv_block.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {

namespace {

// The share for `scale_within` that keeps sums of products with the cache's integers below 2^31. A sum has as many
// integers as a key or a piece, each rounded by up to a half.
float share_of_sum(const KvLayer& kv) {
    float levels = levels_of(kv.key_type);  // at least those of the values
    return LEVELS * levels / (2147483648.0f - float(kv.head_dim > PIECE ? kv.head_dim : PIECE) * levels);
}

inline size_t state_floats(int value_dim) { return size_t(STATE_HEAD + padded_dim(value_dim)); }

// Nothing is seen yet. (Once something is, the sum is not 0: the largest weight is 1.)
void clear(float* kept) { kept[SUM] = 0.0f; }

void merge(float* kept, float new_max, float new_sum, const float* new_out, int width) {
    float* out = kept + STATE_HEAD;
    if (kept[SUM] == 0.0f) {
        kept[MAX] = new_max;
        kept[SUM] = new_sum;
        for (int i = 0; i < width; i += 16) store(out + i, load(new_out + i));
        return;
    }
    vec16 old_max = broadcast(kept[MAX]), added_max = broadcast(new_max), larger = max(old_max, added_max);
    vec16 c = broadcast(kept[FACTOR]);
    vec16 keep = exp2_of_negative((old_max - larger) * c), take = exp2_of_negative((added_max - larger) * c);
    store(kept + MAX, larger, 1);
    store(kept + SUM, fma(broadcast(kept[SUM]), keep, broadcast(new_sum) * take), 1);
    for (int i = 0; i < width; i += 16) store(out + i, fma(load(out + i), keep, load(new_out + i) * take));
}

// One call's memory, cut from `base`; with null it only counts.
struct Scratch {
    uint8_t* at;
    size_t used = 0;
    State* states;
    int16_t* words;         // [count][width]: q as integers
    float* scores;          // [MOST][PIECE]
    int16_t* weight_words;  // [MOST][PIECE]
    float* sums;            // [MOST][width]
    uint8_t* keys;          // [PIECE_BLOCKS][block_bytes of F32]: unpacked, or put in order
    uint8_t* values;

    Scratch(uint8_t* base, int count, int width) : at(base) {
        size_t block = size_t(BLOCK) * size_t(width) * sizeof(float);
        states = take<State>(size_t(count));
        words = take<int16_t>(size_t(count) * size_t(width));
        scores = take<float>(MOST * PIECE);
        weight_words = take<int16_t>(MOST * PIECE);
        sums = take<float>(size_t(MOST) * size_t(width));
        keys = take<uint8_t>(PIECE_BLOCKS * block);
        values = take<uint8_t>(PIECE_BLOCKS * block);
    }

    template <typename T>
    T* take(size_t count) {
        T* begin = (T*)(at + used);
        used += (count * sizeof(T) + 63) / 64 * 64;
        return begin;
    }
};

size_t scratch_bytes(int count, int head_dim) { return Scratch(nullptr, count, padded_dim(head_dim)).used + 64; }

// Where the blocks of keys [begin, end) are: as they lie in their pages; or, where pages do not hold whole blocks,
// copied in order.
void find_blocks(const KvLayer& kv, const int32_t* pages, int kv_head, int begin, int end, const Scratch& scratch,
                 Piece& piece) {
    int piece_begin = begin / PIECE * PIECE;
    bool whole = kv.page_len % BLOCK == 0;
    for (int b = (begin - piece_begin) / BLOCK; b * BLOCK < end - piece_begin; b++) {
        int position = piece_begin + b * BLOCK;
        Token token =
            token_in(kv, scratch.keys + size_t(b) * kv.key_bytes, scratch.values + size_t(b) * kv.value_bytes, 0);
        if (whole) token = token_at(kv, pages[position / kv.page_len], position % kv.page_len, kv_head);
        if (!kv.has_values()) token.value = token.key;
        piece.keys[b] = token.key.block;
        piece.values[b] = token.value.block;
        piece.key_scales[b] = token_scales(kv.key_type, token.key.block, kv.head_dim);
        piece.value_scales[b] = token_scales(kv.value_type, token.value.block, kv.head_dim);
    }
    int first = (begin - piece_begin) / BLOCK, last = (end - 1 - piece_begin) / BLOCK;
    for (int i = 1; i <= WIDTH; i++) {
        piece.keys[last + i] = piece.values[first];
        piece.values[last + i] = piece.values[last];
    }
    if (whole) return;
    for (int position = begin; position < end; position++) {
        Token from = token_at(kv, pages[position / kv.page_len], position % kv.page_len, kv_head);
        size_t block = size_t((position - piece_begin) / BLOCK);
        copy_token(kv, from,
                   token_in(kv, scratch.keys + block * kv.key_bytes, scratch.values + block * kv.value_bytes,
                            position % BLOCK));
    }
}

// Once for all groups, where there are several.
void unpack(const KvLayer& kv, int begin, int end, const Scratch& scratch, Piece& piece) {
    size_t bytes = BLOCK * row_bytes(kv.key_type == KvType::BF16 ? KvType::F32 : KvType::INT16, kv.head_dim);
    for (int b = begin / BLOCK; b * BLOCK < end; b++) {
        uint8_t *keys = scratch.keys + size_t(b) * bytes, *values = scratch.values + size_t(b) * bytes;
        unpack_block(kv.key_type, piece.keys[b], piece.head_dim, BLOCK, keys);
        if (piece.values_from < 0) unpack_block(kv.value_type, piece.values[b], BLOCK, piece.width, values);
        piece.keys[b] = keys;
        piece.values[b] = piece.values_from < 0 ? values : keys;
    }
}

void attend_group(Group& g, const KvLayer& kv, bool unpacked, const Piece& piece) {
    find_bounds(g);
    KvType type = kv.key_type;
    if (type == KvType::INT16 || (type == KvType::INT8 && unpacked))
        attend_integers<WordBlock, WordBlock>(g, piece);
    else if (type == KvType::INT8 && kv.value_type == KvType::INT4)
        attend_integers<ByteBlock, NibbleBlock>(g, piece);
    else if (type == KvType::INT8)
        attend_integers<ByteBlock, ByteBlock>(g, piece);
    else if (type == KvType::BF16 && !unpacked)
        attend_floats<Bf16Block>(g, piece);
    else
        attend_floats<FloatBlock>(g, piece);
    for (int n = 0; n < g.count; n++)
        merge(g.state[n]->kept, g.max[n], g.sum[n], g.sums + n * piece.width, piece.width);
}

struct Bounds {
    int begin, end;
};

// The keys of [begin, begin + PIECE) that a query vector sees, relative to `begin`.
inline Bounds within(int begin, int first_key, int num_keys) {
    return {first_key > begin ? first_key - begin : 0, num_keys < begin + PIECE ? num_keys - begin : PIECE};
}

void attend_piece(const KvLayer& kv, const int32_t* pages, const Queries& queries, int begin, const Scratch& scratch) {
    Bounds all{PIECE, 0};
    int active = 0;
    for (int j = 0; j < queries.count; j++) {
        Bounds own = within(begin, queries.first_key[j], queries.num_keys[j]);
        if (own.begin >= own.end) continue;
        active++;
        if (own.begin < all.begin) all.begin = own.begin;
        if (own.end > all.end) all.end = own.end;
    }
    if (active == 0) return;
    Piece piece{};
    piece.head_dim = kv.head_dim;
    piece.width = padded_dim(kv.value_dim());
    piece.values_from = kv.values_from;
    piece.share = share_of_sum(kv);
    find_blocks(kv, pages, queries.kv_head, begin + all.begin, begin + all.end, scratch, piece);
    int groups = (active + MOST - 1) / MOST;
    bool packed = kv.key_type == KvType::BF16 || kv.key_type == KvType::INT8;
    bool unpacked = groups > 1 && packed && kv.page_len % BLOCK == 0;
    if (unpacked) unpack(kv, all.begin, all.end, scratch, piece);
    int size = (active + groups - 1) / groups;
    Group g;
    g.count = 0;
    g.scores = scratch.scores;
    g.words = scratch.weight_words;
    g.sums = scratch.sums;
    for (int j = 0; j < queries.count; j++) {
        Bounds own = within(begin, queries.first_key[j], queries.num_keys[j]);
        if (own.begin < own.end) {
            g.state[g.count] = &scratch.states[j];
            g.bias[g.count] = queries.bias != nullptr ? queries.bias + begin - j : nullptr;
            g.lo[g.count] = own.begin;
            g.hi[g.count++] = own.end;
            active--;
        }
        if (g.count == size || (active == 0 && g.count > 0)) {
            attend_group(g, kv, unpacked, piece);
            g.count = 0;
        }
    }
}

void attend(const KvLayer& kv, const int32_t* pages, const Queries& queries, int begin, int end, float* states,
            void* memory) {
    int width = padded_dim(kv.head_dim);
    Scratch scratch((uint8_t*)(((size_t)memory + 63) / 64 * 64), queries.count, width);
    for (int j = 0; j < queries.count; j++) {
        int16_t* words = scratch.words + size_t(j) * size_t(width);
        float* kept = states + size_t(j) * state_floats(kv.value_dim());
        float c = queries.scale * LOG2_E;
        const float* q = queries.q + size_t(j) * queries.q_stride;
        if (has_scales(kv.key_type)) {
            auto put = [&](int i, vec16 x) { store_int16(words + i, x); };
            float q_scale = to_integers(q, kv.head_dim, LEVELS, share_of_sum(kv), put);
            if (q_scale != 0.0f) c *= q_scale;  // else the scores are 0 as they are, and c must not be: -inf * 0 is NaN
        }
        clear(kept);
        kept[FACTOR] = c;
        kept[CAP] = queries.softcap == 0.0f ? 0.0f : c / (queries.softcap * LOG2_E);
        scratch.states[j] = {q, words, kept};
    }
    for (int piece = begin; piece < end; piece++) attend_piece(kv, pages, queries, piece * PIECE, scratch);
}

void finish(int count, int parts, const float* states, int value_dim, const float* sinks, float* const* out) {
    int width = padded_dim(value_dim);
    size_t floats = state_floats(value_dim);
    float kept[STATE_HEAD + MAX_HEAD_DIM], no_value[MAX_HEAD_DIM] = {};
    for (int j = 0; j < count; j++) {
        clear(kept);
        for (int part = 0; part < parts; part++) {
            const float* from = states + (size_t(part) * size_t(count) + size_t(j)) * floats;
            kept[FACTOR] = from[FACTOR];
            if (from[SUM] != 0.0f) merge(kept, from[MAX], from[SUM], from + STATE_HEAD, width);
        }
        if (sinks != nullptr) merge(kept, sinks[j] * LOG2_E / kept[FACTOR], 1.0f, no_value, width);
        vec16 sum = broadcast(kept[SUM]);
        for (int i = 0; i < value_dim; i += 16)
            store(out[j] + i, load(kept + STATE_HEAD + i) / sum, value_dim - i < 16 ? value_dim - i : 16);
    }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels{block_bytes, store_token,   load_token,   attend,
                                         finish,      scratch_bytes, state_floats, 16 * MOST};

}  // namespace VARIANT
}  // namespace tureen
