// Attention of a few query vectors to one piece of a sequence; what its weights are is said in attention.cpp, which
// includes this once for each instruction set.
#pragma once

#include "kernels.h"
#include "kv_block.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int PIECE_BLOCKS = PIECE / BLOCK;
constexpr float LEVELS = 32767.0f;
constexpr float LOG2_E = 1.44269504f;

// Accumulators in registers: of MOST query vectors, WIDTH each.
constexpr int MOST = 6;
#if defined(TUREEN_512)
constexpr int WIDTH = 4;
#else
constexpr int WIDTH = 1;
#endif

template <int N>
struct Count {
    static constexpr int value = N;
};

// body(Count<n>) for 1 <= n <= MOST
template <typename Body>
TUREEN_INLINE void with_count(int n, Body body) {
    switch (n) {
        case 1: return body(Count<1>{});
        case 2: return body(Count<2>{});
        case 3: return body(Count<3>{});
        case 4: return body(Count<4>{});
        case 5: return body(Count<5>{});
        default: return body(Count<6>{});
    }
}

// body(Count<w>, i) for i from begin to end in steps w of WIDTH, then smaller ones.
template <typename Body>
TUREEN_INLINE void in_steps(int begin, int end, Body body) {
    int i = begin;
    for (; i + WIDTH <= end; i += WIDTH) body(Count<WIDTH>{}, i);
    if (WIDTH > 2 && i + 2 <= end) {
        body(Count<2>{}, i);
        i += 2;
    }
    if (WIDTH > 1 && i < end) body(Count<1>{}, i);
}

inline int round_up(int x, int step) { return (x + step - 1) / step * step; }

// 512 keys of the sequence, or as many of them as are needed.
struct Piece {
    int head_dim, width;                        // width: of a value, padded
    int values_from;                            // see KvLayer; if it is not -1, values points to the blocks of keys
    const uint8_t* keys[PIECE_BLOCKS + WIDTH];  // after the last: what is read next, to be prefetched
    const uint8_t* values[PIECE_BLOCKS + WIDTH];
    const float* key_scales[PIECE_BLOCKS];  // INT16, INT8, INT4
    const float* value_scales[PIECE_BLOCKS];
    float share;  // of `scale_within`: sums of integers times the cache's fit in 32 bits
};

// A query vector, and what is kept of it from piece to piece.
struct State {
    const float* q;
    const int16_t* words;  // q as integers, INT16, INT8 and INT4
    float* kept;           // max, sum, c, a; from STATE_HEAD on, out [width]
};

constexpr int MAX = 0, SUM = 1;
constexpr int FACTOR = 2;  // c: turns differences of scores into exponents of 2
constexpr int CAP = 3;     // a: scores s become tanh(a * s) / a; 0 = they stay
constexpr int STATE_HEAD = 16;

// Query vectors computed together, and the keys [lo, hi) of the piece that each sees; hi > lo.
struct Group {
    int count;
    State* state[MOST];
    int lo[MOST], hi[MOST];
    const float* bias[MOST];     // of each key of the piece, up to a whole block; or null
    float max[MOST], sum[MOST];  // of the piece's scores; of its weights
    float* scores;               // [count][PIECE], then the weights e
    int16_t* words;              // [count][PIECE]: weights as integers
    float* sums;                 // [count][width]: sums of weighted values
    int least_lo, greatest_lo, least_hi, greatest_hi;
};

void find_bounds(Group& g) {
    g.least_lo = g.greatest_lo = g.lo[0];
    g.least_hi = g.greatest_hi = g.hi[0];
    for (int n = 1; n < g.count; n++) {
        if (g.lo[n] < g.least_lo) g.least_lo = g.lo[n];
        if (g.lo[n] > g.greatest_lo) g.greatest_lo = g.lo[n];
        if (g.hi[n] < g.least_hi) g.least_hi = g.hi[n];
        if (g.hi[n] > g.greatest_hi) g.greatest_hi = g.hi[n];
    }
}

// -- weights ----------------------------------------------------------------------------------------------------------

// Lanes [i, i + 16) of some, with those outside of [lo, hi) set to `other`.
TUREEN_INLINE vec16 kept(vec16 x, int i, int lo, int hi, float other) {
    if (i < lo) x = first(lo - i, broadcast(other), x);
    if (i + BLOCK > hi) x = first(hi - i, x, broadcast(other));
    return x;
}

// Scores of query vector n -> weights, 0 in lanes that it does not see; use(i, 16 weights) is stored in their place.
template <typename Use>
TUREEN_INLINE void to_weights(Group& g, int n, Use use) {
    float* scores = g.scores + n * PIECE;
    int begin = g.lo[n] / BLOCK * BLOCK, end = round_up(g.hi[n], BLOCK);
    if (float a = g.state[n]->kept[CAP])
        for (int i = begin; i < end; i += BLOCK)
            store(scores + i, tanh(load(scores + i) * broadcast(a)) / broadcast(a));
    if (const float* bias = g.bias[n]) {
        vec16 unit = broadcast(LOG2_E / g.state[n]->kept[FACTOR]);
        for (int i = begin; i < end; i += BLOCK) store(scores + i, fma(load(bias + i), unit, load(scores + i)));
    }
    vec16 most = broadcast(-__builtin_inff());
    for (int i = begin; i < end; i += BLOCK) {
        vec16 seen = kept(load(scores + i), i, g.lo[n], g.hi[n], -__builtin_inff());
        store(scores + i, seen);
        most = max(most, seen);
    }
    g.max[n] = reduce_max(most);
    vec16 largest = broadcast(g.max[n]), factor = broadcast(g.state[n]->kept[FACTOR]), total = zeros();
    for (int i = begin; i < end; i += BLOCK) {
        vec16 e = exp2_of_negative((load(scores + i) - largest) * factor);
        total = total + e;
        store(scores + i, use(i, e));
    }
    g.sum[n] = reduce_add(total);
}

// -- values in keys ---------------------------------------------------------------------------------------------------

// The number of query vectors whose accumulators fit in registers: two dimensions each, those of one pair of rows.
constexpr int MOST_WITH_PAIRS = 3;

// Call body(Count<n>, first query vector, pair, sums) for each pair of dimensions that holds values, with the group's
// query vectors in steps of MOST_WITH_PAIRS.
template <typename Body>
TUREEN_INLINE void each_pair_of_values(const Group& g, const Piece& piece, Body body) {
    for (int n = 0; n < g.count; n += MOST_WITH_PAIRS)
        for (int pair = piece.values_from / 2; pair < piece.head_dim / 2; pair++) {
            float* sums = g.sums + n * piece.width + 2 * pair - piece.values_from;
            switch (g.count - n) {
                case 1: body(Count<1>{}, n, pair, sums); break;
                case 2: body(Count<2>{}, n, pair, sums); break;
                default: body(Count<MOST_WITH_PAIRS>{}, n, pair, sums);
            }
        }
}

// Write the weighted sums of one pair of dimensions for N query vectors from `first` on to `to` [n][width].
template <typename Block, int N>
void float_values_in_keys(const Group& g, const Piece& piece, int first, int pair, float* to) {
    vec16 sums[N][2];
    TUREEN_UNROLL
    for (int n = 0; n < N; n++) sums[n][0] = sums[n][1] = zeros();
    for (int i = g.least_lo / BLOCK * BLOCK; i < g.greatest_hi; i += BLOCK) {
        const uint8_t* keys = piece.keys[i / BLOCK];
        vec16 even = Block::template row<0>(keys, BLOCK, pair, 0), odd = Block::template row<1>(keys, BLOCK, pair, 0);
        bool is_seen = i >= g.greatest_lo && i + BLOCK <= g.least_hi;
        TUREEN_UNROLL
        for (int n = 0; n < N; n++) {
            int lo = g.lo[first + n], hi = g.hi[first + n];
            if (!is_seen && (i + BLOCK <= lo || i >= hi)) continue;
            vec16 weight = load(g.scores + (first + n) * PIECE + i);
            // Keys that a query vector does not see may be NaN.
            sums[n][0] = fma(weight, is_seen ? even : kept(even, i, lo, hi, 0.0f), sums[n][0]);
            sums[n][1] = fma(weight, is_seen ? odd : kept(odd, i, lo, hi, 0.0f), sums[n][1]);
        }
    }
    TUREEN_UNROLL
    for (int n = 0; n < N; n++) {
        to[n * piece.width] = reduce_add(sums[n][0]);
        to[n * piece.width + 1] = reduce_add(sums[n][1]);
    }
}

// The same for integers. `dot` adds both dimensions of a pair, so each product multiplies one of them by 0.
template <typename Block, int N>
void int_values_in_keys(const Group& g, const Piece& piece, const float* scales, int first, int pair, float* to) {
    ivec16 sums[N][2];
    TUREEN_UNROLL
    for (int n = 0; n < N; n++) sums[n][0] = sums[n][1] = int_zeros();
    for (int i = g.least_lo / BLOCK * BLOCK; i < g.greatest_hi; i += BLOCK) {
        ivec16 both = Block::rows(piece.keys[i / BLOCK], BLOCK, pair, 0);
        TUREEN_UNROLL
        for (int n = 0; n < N; n++) {
            const int16_t* weights = g.words + (first + n) * PIECE + i;
            sums[n][0] = dot(sums[n][0], load_halves<false>(weights), both);
            sums[n][1] = dot(sums[n][1], load_halves<true>(weights), both);
        }
    }
    TUREEN_UNROLL
    for (int n = 0; n < N; n++) {
        to[n * piece.width] = float(reduce_add(sums[n][0])) * scales[first + n];
        to[n * piece.width + 1] = float(reduce_add(sums[n][1])) * scales[first + n];
    }
}

// `noinline` keeps a kernel a separate function: it gets all registers, and tests find it by its name.

// -- F32 and BF16 -----------------------------------------------------------------------------------------------------

template <typename Block, int N, int W>
[[gnu::noinline]] void float_scores(const Group& g, const Piece& piece, int block) {
    vec16 sums[N][W];
    const float* q[N];
    TUREEN_UNROLL
    for (int n = 0; n < N; n++) {
        q[n] = g.state[n]->q;
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) sums[n][w] = zeros();
    }
    const uint8_t* keys[W];
    TUREEN_UNROLL
    for (int w = 0; w < W; w++) keys[w] = piece.keys[block + w];
    for (int pair = 0; pair < piece.head_dim / 2; pair++) {
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) Block::prefetch(piece.keys[block + W + w], BLOCK, pair, 0);
        vec16 k[W];
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) k[w] = Block::template row<0>(keys[w], BLOCK, pair, 0);
        TUREEN_UNROLL
        for (int n = 0; n < N; n++)
            TUREEN_UNROLL
            for (int w = 0; w < W; w++) sums[n][w] = fma(broadcast(q[n][2 * pair]), k[w], sums[n][w]);
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) k[w] = Block::template row<1>(keys[w], BLOCK, pair, 0);
        TUREEN_UNROLL
        for (int n = 0; n < N; n++)
            TUREEN_UNROLL
            for (int w = 0; w < W; w++) sums[n][w] = fma(broadcast(q[n][2 * pair + 1]), k[w], sums[n][w]);
    }
    TUREEN_UNROLL
    for (int n = 0; n < N; n++)
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) store(g.scores + n * PIECE + (block + w) * BLOCK, sums[n][w]);
}

// sums += weights of keys [begin, end), both even, times their values' columns from `col`, for all of the group.
template <typename Block, int N, int W>
[[gnu::noinline]] void float_values(const Group& g, const Piece& piece, int begin, int end, int col) {
    vec16 sums[N][W];
    TUREEN_UNROLL
    for (int n = 0; n < N; n++)
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) sums[n][w] = load(g.sums + n * piece.width + col + 16 * w);
    for (int t = begin; t < end;) {
        const uint8_t *values = piece.values[t / BLOCK], *next = piece.values[t / BLOCK + 1];
        int stop = t / BLOCK * BLOCK + BLOCK;
        if (stop > end) stop = end;
        for (; t < stop; t += 2) {
            const float* weight = g.scores + t;
            int pair = t % BLOCK / 2;
            TUREEN_UNROLL
            for (int w = 0; w < W; w++) Block::prefetch(next, piece.width, pair, col + 16 * w);
            vec16 v[W];
            TUREEN_UNROLL
            for (int w = 0; w < W; w++) v[w] = Block::template row<0>(values, piece.width, pair, col + 16 * w);
            TUREEN_UNROLL
            for (int n = 0; n < N; n++)
                TUREEN_UNROLL
                for (int w = 0; w < W; w++) sums[n][w] = fma(broadcast(weight[n * PIECE]), v[w], sums[n][w]);
            TUREEN_UNROLL
            for (int w = 0; w < W; w++) v[w] = Block::template row<1>(values, piece.width, pair, col + 16 * w);
            TUREEN_UNROLL
            for (int n = 0; n < N; n++)
                TUREEN_UNROLL
                for (int w = 0; w < W; w++) sums[n][w] = fma(broadcast(weight[n * PIECE + 1]), v[w], sums[n][w]);
        }
    }
    TUREEN_UNROLL
    for (int n = 0; n < N; n++)
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) store(g.sums + n * piece.width + col + 16 * w, sums[n][w]);
}

// The same for any keys [begin, end) and query vector n alone.
template <typename Block>
void float_values_alone(const Group& g, int n, const Piece& piece, int begin, int end) {
    for (int col = 0; col < piece.width; col += 16) {
        float* to = g.sums + n * piece.width + col;
        vec16 sum = load(to);
        for (int t = begin; t < end; t++) {
            const uint8_t* values = piece.values[t / BLOCK];
            int pair = t % BLOCK / 2;
            vec16 v = t % 2 == 0 ? Block::template row<0>(values, piece.width, pair, col)
                                 : Block::template row<1>(values, piece.width, pair, col);
            sum = fma(broadcast(g.scores[n * PIECE + t]), v, sum);
        }
        store(to, sum);
    }
}

template <typename Block>
void attend_floats(Group& g, const Piece& piece) {
    with_count(g.count, [&](auto n) {
        in_steps(g.least_lo / BLOCK, round_up(g.greatest_hi, BLOCK) / BLOCK,
                 [&](auto w, int block) { float_scores<Block, n.value, w.value>(g, piece, block); });
    });
    for (int n = 0; n < g.count; n++) {
        to_weights(g, n, [](int, vec16 e) { return e; });
        for (int i = 0; i < piece.width; i += 16) store(g.sums + n * piece.width + i, zeros());
    }
    if (piece.values_from >= 0) {
        return each_pair_of_values(g, piece, [&](auto n, int first, int pair, float* sums) {
            float_values_in_keys<Block, n.value>(g, piece, first, pair, sums);
        });
    }
    // Keys that not all of the group see are done for each query vector alone: a weight of 0 would not do, since the
    // value may be NaN.
    int begin = round_up(g.greatest_lo, 2), end = g.least_hi / 2 * 2;
    bool shared = begin < end;
    for (int n = 0; n < g.count; n++)
        float_values_alone<Block>(g, n, piece, g.lo[n], shared ? begin : g.hi[n]);
    if (!shared) return;
    with_count(g.count, [&](auto n) {
        in_steps(0, piece.width / 16,
                 [&](auto w, int i) { float_values<Block, n.value, w.value>(g, piece, begin, end, 16 * i); });
    });
    for (int n = 0; n < g.count; n++) float_values_alone<Block>(g, n, piece, end, g.hi[n]);
}

// -- INT16, INT8 and INT4 ---------------------------------------------------------------------------------------------

template <typename Block, int N, int W>
[[gnu::noinline]] void int_scores(const Group& g, const Piece& piece, int block) {
    ivec16 sums[N][W];
    const int16_t* q[N];
    TUREEN_UNROLL
    for (int n = 0; n < N; n++) {
        q[n] = g.state[n]->words;
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) sums[n][w] = int_zeros();
    }
    const uint8_t* keys[W];
    TUREEN_UNROLL
    for (int w = 0; w < W; w++) keys[w] = piece.keys[block + w];
    for (int pair = 0; pair < piece.head_dim / 2; pair++) {
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) Block::prefetch(piece.keys[block + W + w], BLOCK, pair, 0);
        ivec16 k[W];
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) k[w] = Block::rows(keys[w], BLOCK, pair, 0);
        TUREEN_UNROLL
        for (int n = 0; n < N; n++)
            TUREEN_UNROLL
            for (int w = 0; w < W; w++) sums[n][w] = dot(sums[n][w], broadcast_words(q[n] + 2 * pair), k[w]);
    }
    TUREEN_UNROLL
    for (int w = 0; w < W; w++) {
        vec16 scale = load(piece.key_scales[block + w]);
        TUREEN_UNROLL
        for (int n = 0; n < N; n++) store(g.scores + n * PIECE + (block + w) * BLOCK, float_of(sums[n][w]) * scale);
    }
}

// Scores of query vector n -> weights times the scales of their values, as integers; 0 in all other lanes of the group's
// blocks. Returns their scale.
float to_words(Group& g, int n, const Piece& piece) {
    const float* weights = g.scores + n * PIECE;
    int16_t* words = g.words + n * PIECE;
    int begin = g.lo[n] / BLOCK * BLOCK, end = round_up(g.hi[n], BLOCK);
    vec16 largest = zeros(), sum = zeros();
    to_weights(g, n, [&](int i, vec16 e) {
        vec16 weight = kept(e * load(piece.value_scales[i / BLOCK]), i, g.lo[n], g.hi[n], 0.0f);
        largest = max_of_abs(largest, weight);
        sum = sum + weight;
        return weight;
    });
    Scale s = scale_within(reduce_max_of_abs(largest), reduce_add(sum), LEVELS, piece.share);
    vec16 inverse = broadcast(s.inverse);
    for (int i = g.least_lo / BLOCK * BLOCK; i < begin; i += BLOCK) store_int16(words + i, zeros());
    for (int i = begin; i < end; i += BLOCK)
        store_int16(words + i, s.inverse == 0.0f ? zeros() : load(weights + i) * inverse);
    for (int i = end; i < round_up(g.greatest_hi, BLOCK); i += BLOCK) store_int16(words + i, zeros());
    return s.scale;
}

template <typename Block, int N, int W>
[[gnu::noinline]] void int_values(const Group& g, const Piece& piece, const float* scales, int col) {
    ivec16 sums[N][W];
    TUREEN_UNROLL
    for (int n = 0; n < N; n++)
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) sums[n][w] = int_zeros();
    for (int block = g.least_lo / BLOCK; block < round_up(g.greatest_hi, BLOCK) / BLOCK; block++) {
        const uint8_t *values = piece.values[block], *next = piece.values[block + 1];
        const int16_t* weights = g.words + block * BLOCK;
        for (int pair = 0; pair < BLOCK / 2; pair++) {
            TUREEN_UNROLL
            for (int w = 0; w < W; w++) Block::prefetch(next, piece.width, pair, col + 16 * w);
            ivec16 v[W];
            TUREEN_UNROLL
            for (int w = 0; w < W; w++) v[w] = Block::rows(values, piece.width, pair, col + 16 * w);
            TUREEN_UNROLL
            for (int n = 0; n < N; n++)
                TUREEN_UNROLL
                for (int w = 0; w < W; w++)
                    sums[n][w] = dot(sums[n][w], broadcast_words(weights + n * PIECE + 2 * pair), v[w]);
        }
    }
    TUREEN_UNROLL
    for (int n = 0; n < N; n++)
        TUREEN_UNROLL
        for (int w = 0; w < W; w++)
            store(g.sums + n * piece.width + col + 16 * w, float_of(sums[n][w]) * broadcast(scales[n]));
}

template <typename KeyBlock, typename ValueBlock>
void attend_integers(Group& g, const Piece& piece) {
    with_count(g.count, [&](auto n) {
        in_steps(g.least_lo / BLOCK, round_up(g.greatest_hi, BLOCK) / BLOCK,
                 [&](auto w, int block) { int_scores<KeyBlock, n.value, w.value>(g, piece, block); });
    });
    float scales[MOST];
    for (int n = 0; n < g.count; n++) {
        scales[n] = to_words(g, n, piece);
    }
    if (piece.values_from >= 0) {
        for (int i = 0; i < g.count * piece.width; i += 16) store(g.sums + i, zeros());
        return each_pair_of_values(g, piece, [&](auto n, int first, int pair, float* sums) {
            int_values_in_keys<KeyBlock, n.value>(g, piece, scales, first, pair, sums);
        });
    }
    with_count(g.count, [&](auto n) {
        in_steps(0, piece.width / 16,
                 [&](auto w, int i) { int_values<ValueBlock, n.value, w.value>(g, piece, scales, 16 * i); });
    });
}

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
