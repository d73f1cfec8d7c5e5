// Arithmetic on single rows. Compiled once for each instruction set; see kernels.h.
#include "kernels.h"
#include "vec16.h"

namespace tureen {
namespace VARIANT {

namespace {

// out[i] = value(at) for i in [0, cols), 16 at a time; at(x) is x[i]. Lanes beyond the last see zeros.
template <typename Value>
TUREEN_INLINE void map(int cols, float* out, Value value) {
    int i = 0;
    for (; i + 16 <= cols; i += 16) store(out + i, value([&](const float* x) { return load(x + i); }));
    if (int rest = cols - i) store(out + i, value([&](const float* x) { return load(x + i, rest); }), rest);
}

void add(const float* x, int cols, float scale, float* y) {
    map(cols, y, [&](auto at) { return fma(broadcast(scale), at(x), at(y)); });
}

void scale_and_cap(float* x, int count, float scale, float cap) {
    if (cap == 0.0f)
        map(count, x, [&](auto at) { return at(x) * broadcast(scale); });
    else
        map(count, x, [&](auto at) { return tanh(at(x) * broadcast(scale / cap)) * broadcast(cap); });
}

TUREEN_INLINE vec16 load_factor(const float* from) { return load(from); }
TUREEN_INLINE vec16 load_factor(const uint16_t* from) { return load_bf16(from); }

// Of R inputs and N rows at once, each summed as it is alone.
template <int R, int N, typename V>
TUREEN_INLINE void shrink_rows(const V* down, int cols, const ShrunkRow* inputs, int k) {
    size_t stride = size_t(cols + 15) / 16 * 16;
    vec16 sums[R * N];
    TUREEN_UNROLL
    for (int s = 0; s < R * N; s++) sums[s] = zeros();
    for (int i = 0; i < cols; i += 16) {
        vec16 x[R];
        TUREEN_UNROLL
        for (int r = 0; r < R; r++) x[r] = i + 16 <= cols ? load(inputs[r].x + i) : load(inputs[r].x + i, cols - i);
        TUREEN_UNROLL
        for (int n = 0; n < N; n++) {
            vec16 values = load_factor(down + (k + n) * stride + i);
            TUREEN_UNROLL
            for (int r = 0; r < R; r++) sums[n * R + r] = fma(values, x[r], sums[n * R + r]);
        }
    }
    TUREEN_UNROLL
    for (int s = 0; s < R * N; s++) inputs[s % R].low[k + s / R] = reduce_add(sums[s]);
}

template <int R, int N, typename V>
void shrink_inputs(const V* down, int rank, int cols, const ShrunkRow* inputs) {
    int k = 0;
    for (; k + N <= rank; k += N) shrink_rows<R, N>(down, cols, inputs, k);
    for (; k < rank; k++) shrink_rows<R, 1>(down, cols, inputs, k);
}

template <typename V>
void shrink_all(const V* down, int rank, int cols, const ShrunkRow* inputs, int count) {
    int r = 0;
    for (; r + 4 <= count; r += 4) shrink_inputs<4, 4>(down, rank, cols, inputs + r);
    for (; r < count; r++) shrink_inputs<1, 8>(down, rank, cols, inputs + r);
}

void shrink(Factor down, int rank, int cols, const ShrunkRow* inputs, int count) {
    if (down.is_bf16)
        shrink_all((const uint16_t*)down.values, rank, cols, inputs, count);
    else
        shrink_all((const float*)down.values, rank, cols, inputs, count);
}

// Of R rows and T tiles at once: enough sums that none waits for the one before.
template <int R, int T, typename V>
TUREEN_INLINE void expand_tiles(const V* up, int rank, const LowRow* rows, int at, int last) {
    vec16 sums[R * T];
    TUREEN_UNROLL
    for (int s = 0; s < R * T; s++) sums[s] = zeros();
    for (int k = 0; k < rank; k++) {
        TUREEN_UNROLL
        for (int t = 0; t < T; t++) {
            vec16 values = load_factor(up + (t * rank + k) * 16);
            TUREEN_UNROLL
            for (int r = 0; r < R; r++) sums[t * R + r] = fma(values, broadcast(rows[r].low[k]), sums[t * R + r]);
        }
    }
    TUREEN_UNROLL
    for (int s = 0; s < R * T; s++) {
        float* y = rows[s % R].y + at + s / R * 16;
        if (last == 16)
            store(y, load(y) + sums[s]);
        else  // of one tile
            store(y, load(y, last) + sums[s], last);
    }
}

template <int R, int T, typename V>
void expand_rows(const V* up, int rank, const LowRow* rows, int count) {
    int i = 0;
    for (; i + 16 * T <= count; i += 16 * T) expand_tiles<R, T>(up + size_t(i) * rank, rank, rows, i, 16);
    for (; i + 16 <= count; i += 16) expand_tiles<R, 1>(up + size_t(i) * rank, rank, rows, i, 16);
    if (i < count) expand_tiles<R, 1>(up + size_t(i) * rank, rank, rows, i, count - i);
}

template <typename V>
void expand_all(const V* up, int rank, const LowRow* rows, int num_rows, int count) {
    int r = 0;
    for (; r + 4 <= num_rows; r += 4) expand_rows<4, 3>(up, rank, rows + r, count);
    for (; r < num_rows; r++) expand_rows<1, 4>(up, rank, rows + r, count);
}

void expand(Factor up, int rank, const LowRow* rows, int num_rows, int count) {
    if (up.is_bf16)
        expand_all((const uint16_t*)up.values, rank, rows, num_rows, count);
    else
        expand_all((const float*)up.values, rank, rows, num_rows, count);
}

// y times what `up` holds; a null `up` is 1
template <typename At>
TUREEN_INLINE vec16 times(vec16 y, At at, const float* up) {
    return up == nullptr ? y : y * at(up);
}

void silu_mul(const float* gate, const float* up, int cols, float* out) {
    map(cols, out, [&](auto at) {
        vec16 g = at(gate);
        return times(g / (broadcast(1.0f) + exp(zeros() - g)), at, up);
    });
}

// The logistic approximation of GELU (Hendrycks & Gimpel, arXiv:1606.08415): g * sigmoid(1.702 g).
void quick_gelu_mul(const float* gate, const float* up, int cols, float* out) {
    map(cols, out, [&](auto at) {
        vec16 g = at(gate);
        return times(g / (broadcast(1.0f) + exp(g * broadcast(-1.702f))), at, up);
    });
}

// GELU (Hendrycks & Gimpel, arXiv:1606.08415): g times the probability that a standard normal number is below g. The
// probability that one is above |g| is e^(-g² / 2) * p(t) / 2 with t = 1 / (1 + 0.3275911 |g| / sqrt(2)), to 7.5e-8
// (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26).
void gelu_mul(const float* gate, const float* up, int cols, float* out) {
    map(cols, out, [&](auto at) {
        vec16 g = at(gate), size = min(broadcast(15.0f), abs(g));  // no number above 15 is as likely as 1e-45
        vec16 t = broadcast(1.0f) / fma(size, broadcast(0.3275911f * 0.70710678f), broadcast(1.0f));
        vec16 p = fma(t, broadcast(0.5f * 1.061405429f), broadcast(0.5f * -1.453152027f));
        p = fma(p, t, broadcast(0.5f * 1.421413741f));
        p = fma(p, t, broadcast(0.5f * -0.284496736f));
        p = fma(p, t, broadcast(0.5f * 0.254829592f));
        vec16 above = p * t * exp(size * size * broadcast(-0.5f));
        return times(max(zeros(), g) - size * above, at, up);
    });
}

// The tanh form of GELU (Hendrycks & Gimpel, arXiv:1606.08415): g / 2 * (1 + tanh u) = g / (1 + e^-2u) with
// u = sqrt(2 / pi) * (g + 0.044715 g³).
void gelu_tanh_mul(const float* gate, const float* up, int cols, float* out) {
    constexpr float TWICE_ROOT = 1.59576912f;  // 2 sqrt(2 / pi)
    map(cols, out, [&](auto at) {
        vec16 g = at(gate);
        vec16 u = g * fma(g * g, broadcast(-TWICE_ROOT * 0.044715f), broadcast(-TWICE_ROOT));
        return times(g / (broadcast(1.0f) + exp(u)), at, up);
    });
}

// The square of ReLU (So et al. 2021, arXiv:2109.08668).
void relu_squared_mul(const float* gate, const float* up, int cols, float* out) {
    map(cols, out, [&](auto at) {
        vec16 g = max(at(gate), zeros());
        return times(g * g, at, up);
    });
}

// W * 16 columns of the matrix from `c` on; the last have `width`.
template <int W>
TUREEN_INLINE void delta_columns(float* matrix, const float* query, const float* key, const float* value, int key_dim,
                                 int value_dim, int c, int width, const float* decay, float beta, float* out) {
    auto get = [&](const float* from) { return width == 16 ? load(from) : load(from, width); };
    auto put = [&](float* to, vec16 x) { width == 16 ? store(to, x) : store(to, x, width); };
    vec16 known[W], change[W], result[W];
    TUREEN_UNROLL
    for (int w = 0; w < W; w++) known[w] = result[w] = zeros();
    for (int i = 0; i < key_dim; i++) {
        const float* at = matrix + size_t(i) * size_t(value_dim) + c;
        TUREEN_UNROLL
        for (int w = 0; w < W; w++)
            known[w] = fma(get(at + 16 * w) * broadcast(decay[i]), broadcast(key[i]), known[w]);
    }
    TUREEN_UNROLL
    for (int w = 0; w < W; w++) change[w] = (get(value + c + 16 * w) - known[w]) * broadcast(beta);
    for (int i = 0; i < key_dim; i++) {
        float* at = matrix + size_t(i) * size_t(value_dim) + c;
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) {
            vec16 updated = fma(broadcast(key[i]), change[w], get(at + 16 * w) * broadcast(decay[i]));
            put(at + 16 * w, updated);
            result[w] = fma(updated, broadcast(query[i]), result[w]);
        }
    }
    TUREEN_UNROLL
    for (int w = 0; w < W; w++) put(out + c + 16 * w, result[w]);
}

void delta_step(float* matrix, const float* query, const float* key, const float* value, int key_dim, int value_dim,
                const float* decay, float beta, float* out) {
    int c = 0;
    for (; c + 32 <= value_dim; c += 32)
        delta_columns<2>(matrix, query, key, value, key_dim, value_dim, c, 16, decay, beta, out);
    for (; c < value_dim; c += 16)
        delta_columns<1>(matrix, query, key, value, key_dim, value_dim, c, value_dim - c < 16 ? value_dim - c : 16,
                         decay, beta, out);
}

// W * 16 columns of the matrix from `c` on; the last have `width`.
template <int W>
TUREEN_INLINE void ssm_columns(const float* before, float* matrix, const float* x, const float* key, const float* query,
                               int state_dim, int head_dim, int c, int width, float decay, float step, float skip,
                               float* out) {
    auto get = [&](const float* from) { return width == 16 ? load(from) : load(from, width); };
    auto put = [&](float* to, vec16 y) { width == 16 ? store(to, y) : store(to, y, width); };
    vec16 values[W], change[W], result[W], kept = broadcast(decay);
    TUREEN_UNROLL
    for (int w = 0; w < W; w++) {
        values[w] = get(x + c + 16 * w);
        change[w] = values[w] * broadcast(step);
        result[w] = zeros();
    }
    for (int i = 0; i < state_dim; i++) {
        size_t row = size_t(i) * size_t(head_dim) + c;
        TUREEN_UNROLL
        for (int w = 0; w < W; w++) {
            vec16 updated = fma(broadcast(key[i]), change[w], get(before + row + 16 * w) * kept);
            put(matrix + row + 16 * w, updated);
            result[w] = fma(updated, broadcast(query[i]), result[w]);
        }
    }
    TUREEN_UNROLL
    for (int w = 0; w < W; w++) put(out + c + 16 * w, fma(values[w], broadcast(skip), result[w]));
}

void ssm_step(const float* before, float* matrix, const float* x, const float* key, const float* query, int state_dim,
              int head_dim, float decay, float step, float skip, float* out) {
    int c = 0;
    for (; c + 32 <= head_dim; c += 32)
        ssm_columns<2>(before, matrix, x, key, query, state_dim, head_dim, c, 16, decay, step, skip, out);
    for (; c < head_dim; c += 16)
        ssm_columns<1>(before, matrix, x, key, query, state_dim, head_dim, c, head_dim - c < 16 ? head_dim - c : 16,
                       decay, step, skip, out);
}

void clamped_swiglu(const float* gate, const float* up, int cols, float* out) {
    vec16 limit = broadcast(7.0f);
    map(cols, out, [&](auto at) {
        vec16 g = min(at(gate), limit), u = max(min(at(up), limit), zeros() - limit);
        return g / (broadcast(1.0f) + exp(g * broadcast(-1.702f))) * (u + broadcast(1.0f));
    });
}

void xielu(const float* x, const Xielu& c, int cols, float* out) {
    map(cols, out, [&](auto at) {
        vec16 v = at(x), above = max(v, zeros()), below = min(v, zeros());
        // e^x - 1 - x is at least 0; without max, e^most - 1 of it would remain of a positive x
        vec16 bent = max(exp(min(below, broadcast(c.most))) - broadcast(1.0f) - below, zeros());
        vec16 straight = fma(v, broadcast(c.slope), broadcast(c.positive) * above * above);
        return fma(bent, broadcast(c.negative), straight);
    });
}

// Row j of the Hadamard matrix of 16 rows: 1 or -1.
struct HadamardSigns {
    alignas(64) float rows[16][16];
    constexpr HadamardSigns() : rows() {
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++) {
                int both = i & j;
                rows[i][j] = ((both ^ (both >> 1) ^ (both >> 2) ^ (both >> 3)) & 1) ? -1.0f : 1.0f;
            }
    }
};

constexpr HadamardSigns HADAMARD;

void spread(float* x, int size, bool is_query) {
    int groups = size / 16, together = 1;
    for (int g = 0; g < groups; g++) {
        vec16 sum = zeros();
        for (int j = 0; j < 16; j++) sum = fma(broadcast(x[16 * g + j]), load(HADAMARD.rows[j]), sum);
        store(x + 16 * g, sum);
    }
    for (; groups % (2 * together) == 0 && groups > 0; together *= 2)
        for (int g = 0; g < groups; g++) {
            if (g & together) continue;
            float *a = x + 16 * g, *b = a + 16 * together;
            vec16 sum = load(a) + load(b), difference = load(a) - load(b);
            store(a, sum);
            store(b, difference);
        }
    if (is_query) map(16 * groups, x, [&](auto at) { return at(x) * broadcast(1.0f / float(16 * together)); });
}

void rotate(float* x, const float* cos, const float* sin, int size) {
    int half = size / 2;
    auto turn = [&](int i, auto get, auto put) {
        vec16 a = get(x + i), b = get(x + half + i), c = get(cos + i), s = get(sin + i);
        put(x + i, a * c - b * s);
        put(x + half + i, b * c + a * s);
    };
    int i = 0;
    for (; i + 16 <= half; i += 16)
        turn(i, [](const float* p) { return load(p); }, [](float* p, vec16 y) { store(p, y); });
    if (int rest = half - i)
        turn(i, [&](const float* p) { return load(p, rest); }, [&](float* p, vec16 y) { store(p, y, rest); });
}

// Sum 16 numbers at a time by next(sum, numbers), four sums side by side, so that no addition waits for the one before.
template <typename Next>
TUREEN_INLINE float sum_of(const float* x, int cols, Next next) {
    vec16 sums[4] = {zeros(), zeros(), zeros(), zeros()};
    int i = 0;
    for (; i + 64 <= cols; i += 64)
        for (int j = 0; j < 4; j++) sums[j] = next(sums[j], load(x + i + 16 * j));
    for (; i < cols; i += 16) sums[0] = next(sums[0], load(x + i, cols - i < 16 ? cols - i : 16));
    return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void rms_norm(const float* x, const float* weight, int cols, float eps, float* y) {
    float squares = sum_of(x, cols, [](vec16 sum, vec16 v) { return fma(v, v, sum); });
    vec16 scale = broadcast(1.0f / __builtin_sqrtf(squares / float(cols) + eps));
    map(cols, y, [&](auto at) { return at(x) * scale * at(weight); });
}

void layer_norm(const float* x, const float* weight, const float* bias, int cols, float eps, float* y) {
    float sum = sum_of(x, cols, [](vec16 sum, vec16 v) { return sum + v; });
    vec16 mean = broadcast(sum / float(cols));
    int whole = cols / 16 * 16;
    float squares = sum_of(x, whole, [&](vec16 sum, vec16 v) { return fma(v - mean, v - mean, sum); });
    if (int rest = cols - whole) {  // the lanes beyond the last are 0, not minus the mean
        float centred[16];
        store(centred, load(x + whole, rest) - mean, rest);
        vec16 v = load(centred, rest);
        squares += reduce_add(v * v);
    }
    vec16 scale = broadcast(1.0f / __builtin_sqrtf(squares / float(cols) + eps));
    map(cols, y, [&](auto at) {
        vec16 normed = (at(x) - mean) * scale * at(weight);
        return bias == nullptr ? normed : normed + at(bias);
    });
}

// -- quantize ---------------------------------------------------------------------------------------------------------

constexpr int CHUNK = 256;  // inputs done together: 8 groups, or 16 halves of groups

struct Row {  // of Activations
    int8_t* q;
    float *scale, *scaled_sum;
    int32_t *sum, *half_sum;
};

// Inputs [begin, begin + CHUNK), whose groups have these scales (lane g: group g). rest: what the integers leave of the
// inputs, [CHUNK], or null.
void quantize_chunk(const float* x, int cols, int begin, const Scales& s, const Row& row, float* rest) {
    float scale[16], inverse[16];
    store(scale, s.scale);
    store(inverse, s.inverse);
    vec16 q[16];
    TUREEN_UNROLL
    for (int h = 0; h < 16; h++) {
        float factor = inverse[h / 2];
        vec16 inputs = lanes_at(x, cols, begin + 16 * h);
        q[h] = factor == 0.0f ? zeros() : round(inputs * broadcast(factor));
        store_int8(row.q + begin + 16 * h, q[h]);
        if (rest != nullptr) store(rest + 16 * h, fma(q[h], broadcast(-scale[h / 2]), inputs));
    }
    int32_t* halves = row.half_sum + begin / 16;
    store_int32(halves, reduce_each(q, Sum{}));
    for (int g = 0; g < CHUNK / GROUP; g++) {
        int at = begin / GROUP + g;
        row.scale[at] = scale[g];
        row.sum[at] = halves[2 * g] + halves[2 * g + 1];
        row.scaled_sum[at] = scale[g] * float(row.sum[at]);
    }
}

// The scales of the groups of inputs [begin, begin + CHUNK).
Scales chunk_scales(const float* x, int cols, int begin) {
    vec16 largest[16];  // of group g, twice
    TUREEN_UNROLL
    for (int g = 0; g < 8; g++) {
        vec16 low = lanes_at(x, cols, begin + 32 * g), high = lanes_at(x, cols, begin + 32 * g + 16);
        largest[g] = largest[g + 8] = max_of_abs(abs(low), abs(high));
    }
    return scales_of(reduce_each(largest, LargerOfAbs{}), 127.0f);
}

// second: the row that gets what the first leaves, or null.
void quantize_by_group(const float* x, int cols, int stride, const Row& first, const Row* second) {
    float rest[CHUNK];
    for (int begin = 0; begin < stride; begin += CHUNK) {
        quantize_chunk(x, cols, begin, chunk_scales(x, cols, begin), first, second != nullptr ? rest : nullptr);
        if (second == nullptr) continue;
        const Row own{second->q + begin, second->scale + begin / GROUP, second->scaled_sum + begin / GROUP,
                      second->sum + begin / GROUP, second->half_sum + begin / (GROUP / 2)};
        quantize_chunk(rest, CHUNK, 0, chunk_scales(rest, CHUNK, 0), own, nullptr);
    }
}

// Integers of a span are at most 32767, and the sum of their magnitudes times WORD_LEVELS stays below 2^31.
void quantize_words(const float* x, int cols, int16_t* words, float* scale) {
    constexpr float LEVELS = 32767, SHARE = LEVELS * WORD_LEVELS / (0x1p31f - SPAN * WORD_LEVELS);
    for (int spans; cols > 0; x += spans * SPAN, words += spans * SPAN, scale += spans, cols -= spans * SPAN) {
        spans = cols < 16 * SPAN ? (cols + SPAN - 1) / SPAN : 16;
        vec16 largest[16];
        float sums[16] = {};
        for (int s = 0; s < 16; s++) {
            vec16 sum = largest[s] = zeros();
            for (int i = 0; i < SPAN && s < spans; i += 16) {
                const vec16 size = abs(lanes_at(x, cols, s * SPAN + i));
                largest[s] = max_of_abs(largest[s], size);
                sum = sum + size;
            }
            if (s < spans) sums[s] = reduce_add(sum);
        }
        const vec16 most = max_of_abs(reduce_each(largest, LargerOfAbs{}), load(sums) * broadcast(SHARE));
        const Scales all = scales_of(most, LEVELS);
        float inverse[16];
        store(inverse, all.inverse);
        store(scale, all.scale, spans);
        for (int s = 0; s < spans; s++)
            for (int i = s * SPAN; i < (s + 1) * SPAN; i += 16)
                store_int16(words + i,
                            inverse[s] == 0.0f ? zeros() : lanes_at(x, cols, i) * broadcast(inverse[s]));
    }
}

Row row_at(const Activations& out, size_t begin) {
    return {out.q + begin, out.scale + begin / GROUP, out.scaled_sum + begin / GROUP, out.sum + begin / GROUP,
            out.half_sum + begin / (GROUP / 2)};
}

void quantize(const float* x, int cols, const Activations& out, int m) {
    size_t begin = size_t(m) * out.stride;
    if (out.kind == Inputs::F32) {
        for (int i = 0; i < out.stride; i += 16) store(out.f32 + begin + i, lanes_at(x, cols, i));
    } else if (out.kind == Inputs::BF16) {
        for (int i = 0; i < out.stride; i += 16) store_bf16(out.bf16 + begin + i, lanes_at(x, cols, i));
    } else if (out.kind == Inputs::WORDS) {
        quantize_words(x, cols, out.words + begin, out.scale + begin / SPAN);
    } else if (out.kind == Inputs::INT8_GROUP) {
        quantize_by_group(x, cols, out.stride, row_at(out, begin), nullptr);
    } else {
        const Row second = row_at(out, 2 * begin + out.stride);
        quantize_by_group(x, cols, out.stride, row_at(out, 2 * begin), &second);
    }
}

}  // namespace

extern const RowKernels row_kernels;
const RowKernels row_kernels{quantize,       rms_norm,      layer_norm,       add,        silu_mul, quick_gelu_mul,
                             gelu_mul,       gelu_tanh_mul, relu_squared_mul, delta_step, ssm_step, clamped_swiglu,
                             xielu,          rotate,        spread,           scale_and_cap,    shrink,     expand};

}  // namespace VARIANT
}  // namespace tureen
