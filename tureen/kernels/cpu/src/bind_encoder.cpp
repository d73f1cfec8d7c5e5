// Operations on all tokens of a text or picture: attention of each to all, activations, norms, rotations.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.h"
#include "bind.h"
#include "kernels.h"
#include "kv_cache.h"
#include "pool.h"

namespace tureen {

namespace {

constexpr int LONGEST_PAGE = 512;  // keys
constexpr int TEXT_PAGE = 64;      // keys
constexpr int LAYER = 0;

// An array [tokens, heads, head_dim] whose tokens and heads may lie anywhere.
template <class T>
struct Heads {
    T* data;
    int tokens, heads, head_dim;
    int64_t token_stride, head_stride;

    template <class Array>
    Heads(const Array& array, const char* name) {
        if (array.dtype() != nb::dtype<float>() || array.device_type() != nb::device::cpu::value)
            throw nb::type_error((std::string(name) + " is not float32").c_str());
        if (array.ndim() != 3 || (array.shape(2) > 1 && array.stride(2) != 1))
            throw nb::value_error(
                (std::string(name) + " is not [tokens, heads, head_dim], the last contiguous").c_str());
        data = static_cast<T*>(const_cast<void*>(static_cast<const void*>(array.data())));
        tokens = int(array.shape(0));
        heads = int(array.shape(1));
        head_dim = int(array.shape(2));
        token_stride = array.stride(0);
        head_stride = array.stride(1);
    }

    T* at(int token, int head) const { return data + token * token_stride + head * head_stride; }

    template <class Other>
    void require_shape_of(const Heads<Other>& other, const char* name) const {
        if (tokens != other.tokens || heads != other.heads || head_dim != other.head_dim)
            throw nb::value_error((std::string(name) + " has another shape").c_str());
    }
};

using In = Heads<const float>;
using Out = Heads<float>;

// Keys and values of some tokens, which queries of the same heads then see, all of them.
class SeenTokens {
public:
    SeenTokens(Pool& pool, const AnyArray& keys, const AnyArray& values)
        : SeenTokens(pool, In(keys, "keys"), In(values, "values")) {}

    int tokens() const { return tokens_; }
    KvLayer layer() const { return cache_.layer(LAYER); }
    const int32_t* pages() const { return pages_.data(); }

private:
    SeenTokens(Pool& pool, const In& keys, const In& values)
        : tokens_(keys.tokens),
          page_len_(std::min(LONGEST_PAGE, std::max(1, (keys.tokens + 15) / 16) * 16)),
          cache_({{keys.heads, keys.head_dim, -1, false}}, std::max(1, (keys.tokens + page_len_ - 1) / page_len_), 0,
                 page_len_, KvType::F32) {
        values.require_shape_of(keys, "values");
        for (int i = 0; i < cache_.num_pages(); i++) pages_.push_back(i);
        KvLayer kv = layer();
        int blocks = (tokens_ + 15) / 16, units = blocks * keys.heads;
        nb::gil_scoped_release release;
        pool.run([&](int thread) {
            for (int unit = thread; unit < units; unit += pool.threads()) {
                int head = unit / blocks, first = unit % blocks * 16, end = std::min(first + 16, tokens_);
                for (int t = first; t < end; t++)
                    kernels().attention->store(kv, t / page_len_, t % page_len_, head, keys.at(t, head),
                                               values.at(t, head));
            }
        });
    }

    int tokens_, page_len_;
    KvCache cache_;
    std::vector<int32_t> pages_;
};

// A thread's memory for a block of queries.
struct QueryScratch {
    std::unique_ptr<uint8_t[]> scratch;
    std::unique_ptr<float[]> states;
    std::vector<float*> rows;

    QueryScratch(int count, int head_dim)
        : scratch(new uint8_t[kernels().attention->scratch_bytes(count, head_dim)]),
          states(new float[size_t(count) * kernels().attention->state_floats(head_dim)]),
          rows(size_t(count)) {}
};

// Attention of a block of queries of one text; memory: the thread's.
void attend_block(const KvLayer& kv, const int32_t* pages, int pieces, const Queries& queries, QueryScratch& memory,
                  float* out, int64_t out_stride) {
    const AttentionKernels& attention = *kernels().attention;
    attention.attend(kv, pages, queries, 0, pieces, memory.states.get(), memory.scratch.get());
    for (int i = 0; i < queries.count; i++) memory.rows[size_t(i)] = out + i * out_stride;
    attention.finish(queries.count, 1, memory.states.get(), kv.head_dim, nullptr, memory.rows.data());
}

int pieces_of(int tokens) { return (tokens + PIECE - 1) / PIECE; }

std::vector<QueryScratch> scratch_for(const Pool& pool, int head_dim) {
    std::vector<QueryScratch> own;
    for (int i = 0; i < pool.threads(); i++) own.emplace_back(kernels().attention->best_count, head_dim);
    return own;
}

void attend_all(Pool& pool, const AnyArray& queries, const SeenTokens& seen, const WritableArray& out, float scale) {
    In q(queries, "queries");
    Out to(out, "out");
    to.require_shape_of(q, "out");
    KvLayer kv = seen.layer();
    if (q.heads != kv.kv_heads || q.head_dim != kv.head_dim)
        throw nb::value_error("queries have other heads than keys");
    if (seen.tokens() == 0) throw nb::value_error("there are no keys");
    const int most = kernels().attention->best_count, blocks = (q.tokens + most - 1) / most, units = blocks * q.heads;
    std::vector<int32_t> first_key(size_t(most), 0), num_keys(size_t(most), seen.tokens());
    std::vector<QueryScratch> own = scratch_for(pool, q.head_dim);
    nb::gil_scoped_release release;
    pool.run([&](int thread) {
        for (int unit = thread; unit < units; unit += pool.threads()) {
            const int head = unit / blocks, first = unit % blocks * most;
            Queries rows{head,
                         std::min(most, q.tokens - first),
                         q.at(first, head),
                         size_t(q.token_stride),
                         first_key.data(),
                         num_keys.data(),
                         scale,
                         0.0f};
            attend_block(kv, seen.pages(), pieces_of(seen.tokens()), rows, own[size_t(thread)], to.at(first, head),
                         to.token_stride);
        }
    });
}

// Attention of texts that lie one after the other, each to itself. The memory for keys and values serves layer after
// layer.
class Texts {
public:
    // starts: the first token of each text, and the number of all tokens. biases: [heads][2 * length of the longest
    // text - 1], by the distance from a query to a key.
    Texts(Pool& pool, const std::vector<int32_t>& starts, int kv_heads, int head_dim,
          const std::optional<AnyArray>& biases)
        : pool_(pool),
          starts_(checked_starts(starts)),
          first_pages_(pages_before(starts)),
          cache_({{kv_heads, head_dim, -1, false}}, std::max(1, first_pages_.back()), 0, TEXT_PAGE, KvType::F32),
          scratch_(scratch_for(pool, head_dim)) {
        for (int text = 0; text < num_texts(); text++)
            for (int page = first_pages_[size_t(text)]; page < first_pages_[size_t(text) + 1]; page++) {
                pages_.push_back(page);
                texts_of_pages_.push_back(text);
            }
        if (!biases) return;
        for (size_t i = 1; i < starts_.size(); i++) longest_ = std::max(longest_, starts_[i] - starts_[i - 1]);
        const int row = 2 * longest_ - 1;
        const float* given = checked<const float>(*biases, "biases", {ANY, row});
        bias_row_ = row + 15;  // a block of keys is read whole
        biases_.assign(biases->shape(0) * size_t(bias_row_), 0.0f);
        for (size_t head = 0; head < biases->shape(0); head++)
            std::copy_n(given + head * size_t(row), row, biases_.begin() + ptrdiff_t(head) * bias_row_);
    }

    // window: tokens that a token sees on each side, or a negative number: it sees all.
    void attend(const AnyArray& queries, const AnyArray& keys, const AnyArray& values, const WritableArray& out,
                float scale, int window) {
        In q(queries, "queries"), k(keys, "keys"), v(values, "values");
        Out to(out, "out");
        to.require_shape_of(q, "out");
        v.require_shape_of(k, "values");
        KvLayer kv = cache_.layer(LAYER);
        const int heads_each = q.heads / kv.kv_heads;
        if (k.heads != kv.kv_heads || k.head_dim != kv.head_dim || q.head_dim != kv.head_dim ||
            q.heads % kv.kv_heads != 0 || k.tokens != starts_.back() || q.tokens != starts_.back())
            throw nb::value_error("queries or keys have another shape than the texts");
        if (!biases_.empty() && biases_.size() != size_t(q.heads) * size_t(bias_row_))
            throw nb::value_error("biases have another number of heads than queries");
        nb::gil_scoped_release release;
        pool_.run([&](int thread) { store(kv, k, v, thread, pool_.threads()); });
        std::vector<Block> blocks = blocks_of(q.heads);
        const size_t most = size_t(kernels().attention->best_count);
        pool_.run([&](int thread) {
            std::vector<int32_t> first_key(most), num_keys(most);
            for (size_t i = size_t(thread); i < blocks.size(); i += size_t(pool_.threads())) {
                const Block& block = blocks[i];
                const int begin = starts_[size_t(block.text)], length = starts_[size_t(block.text) + 1] - begin;
                for (int j = 0; j < block.count; j++) {
                    const int at = block.first + j;
                    first_key[size_t(j)] = window < 0 ? 0 : std::max(0, at - window);
                    num_keys[size_t(j)] = window < 0 ? length : std::min(length, at + window + 1);
                }
                Queries rows{block.head / heads_each,
                             block.count,
                             q.at(begin + block.first, block.head),
                             size_t(q.token_stride),
                             first_key.data(),
                             num_keys.data(),
                             scale,
                             0.0f,
                             bias_at(block.head, block.first)};
                attend_block(kv, pages_.data() + first_pages_[size_t(block.text)], pieces_of(length), rows,
                             scratch_[size_t(thread)], to.at(begin + block.first, block.head), to.token_stride);
            }
        });
    }

private:
    struct Block {
        int text, head, first, count;
    };

    static const std::vector<int32_t>& checked_starts(const std::vector<int32_t>& starts) {
        if (starts.empty() || starts.front() != 0 || !std::is_sorted(starts.begin(), starts.end()))
            throw nb::value_error("starts do not rise from 0");
        return starts;
    }

    int num_texts() const { return int(starts_.size()) - 1; }

    // The number of pages before each text, and of all.
    static std::vector<int32_t> pages_before(const std::vector<int32_t>& starts) {
        std::vector<int32_t> pages{0};
        for (size_t i = 1; i < starts.size(); i++)
            pages.push_back(pages.back() + (starts[i] - starts[i - 1] + TEXT_PAGE - 1) / TEXT_PAGE);
        return pages;
    }

    const float* bias_at(int head, int query) const {
        return biases_.empty() ? nullptr : biases_.data() + size_t(head) * size_t(bias_row_) + longest_ - 1 - query;
    }

    void store(const KvLayer& kv, const In& k, const In& v, int thread, int threads) const {
        for (size_t page = size_t(thread); page < pages_.size(); page += size_t(threads)) {
            const size_t text = size_t(texts_of_pages_[page]);
            const int first = starts_[text] + (int(page) - first_pages_[text]) * TEXT_PAGE;
            for (int t = first; t < std::min(first + TEXT_PAGE, starts_[text + 1]); t++)
                for (int head = 0; head < kv.kv_heads; head++)
                    kernels().attention->store(kv, int(page), t - first, head, k.at(t, head), v.at(t, head));
        }
    }

    std::vector<Block> blocks_of(int heads) const {
        const int most = kernels().attention->best_count;
        std::vector<Block> blocks;
        for (int text = 0; text < num_texts(); text++) {
            const int length = starts_[size_t(text) + 1] - starts_[size_t(text)];
            for (int head = 0; head < heads; head++)
                for (int first = 0; first < length; first += most)
                    blocks.push_back({text, head, first, std::min(most, length - first)});
        }
        return blocks;
    }

    Pool& pool_;
    std::vector<int32_t> starts_;
    std::vector<int32_t> first_pages_;
    KvCache cache_;
    std::vector<int32_t> pages_;
    std::vector<int> texts_of_pages_;
    std::vector<QueryScratch> scratch_;  // of each thread
    std::vector<float> biases_;
    int longest_ = 1, bias_row_ = 0;  // of texts with biases
};

using Activation = void (*)(const float* gate, const float* up, int cols, float* out);

Activation activation_named(const std::string& name) {
    const RowKernels& rows = *kernels().rows;
    const std::pair<const char*, Activation> KNOWN[] = {
        {"gelu", rows.gelu_mul},
        {"gelu_pytorch_tanh", rows.gelu_tanh_mul},
        {"quick_gelu", rows.quick_gelu_mul},
        {"silu", rows.silu_mul},
    };
    for (const auto& known : KNOWN)
        if (name == known.first) return known.second;
    throw nb::value_error(("there is no activation " + name).c_str());
}

// Rows or values [begin, end) of `count` on each thread.
template <class Body>
void in_shares(Pool& pool, int64_t count, int64_t least, Body body) {
    const int64_t parts = std::min<int64_t>(pool.threads(), (count + least - 1) / least);
    if (parts < 2) return body(int64_t(0), count);
    pool.run([&](int thread) {
        if (thread < parts) body(count * thread / parts, count * (thread + 1) / parts);
    });
}

constexpr int64_t SHARED_VALUES = 1 << 14;  // minimum for a thread

// The minimum number of rows for a thread.
int64_t rows_of(int64_t cols) { return std::max<int64_t>(1, SHARED_VALUES / std::max<int64_t>(1, cols)); }

void activate(Pool& pool, const WritableArray& x, const std::string& name, const std::optional<AnyArray>& factors) {
    float* values = checked<float>(x, "x", {ANY, ANY});
    const int64_t rows = int64_t(x.shape(0)), cols = int64_t(x.shape(1));
    const float* up = factors ? checked<const float>(*factors, "factors", {rows, cols}) : nullptr;
    Activation activation = activation_named(name);
    nb::gil_scoped_release release;
    in_shares(pool, rows * cols, SHARED_VALUES, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at += SHARED_VALUES)
            activation(values + at, up == nullptr ? nullptr : up + at, int(std::min(SHARED_VALUES, end - at)),
                       values + at);
    });
}

void rotate_heads(Pool& pool, const WritableArray& x, const AnyArray& cos, const AnyArray& sin) {
    Out heads(x, "x");
    int64_t pairs = heads.head_dim / 2;
    const float* cosines = checked<const float>(cos, "cos", {heads.tokens, pairs});
    const float* sines = checked<const float>(sin, "sin", {heads.tokens, pairs});
    nb::gil_scoped_release release;
    in_shares(pool, heads.tokens, rows_of(heads.heads * heads.head_dim), [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++)
            for (int head = 0; head < heads.heads; head++)
                kernels().rows->rotate(heads.at(int(token), head), cosines + token * pairs, sines + token * pairs,
                                       heads.head_dim);
    });
}

using FloatArray = nb::ndarray<nb::numpy, float>;

using MaybeFloats = std::optional<FloatArray>;

// norm(row of x, row of the result) for each row; the result is `given`, or new.
template <class Norm>
FloatArray norm_rows(Pool& pool, const AnyArray& x, const MaybeFloats& given, Norm norm) {
    const float* inputs = checked<const float>(x, "x", {ANY, ANY});
    const int64_t rows = int64_t(x.shape(0)), cols = int64_t(x.shape(1));
    float* out;
    FloatArray array = given ? *given : make_array<float>({x.shape(0), x.shape(1)}, &out);
    if (given) out = checked<float>(array, "out", {rows, cols});
    nb::gil_scoped_release release;
    in_shares(pool, rows, rows_of(cols), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) norm(inputs + row * cols, out + row * cols);
    });
    return array;
}

const float* checked_of(const AnyArray& values, const char* name, const AnyArray& x) {
    return checked<const float>(values, name, {x.ndim() == 2 ? int64_t(x.shape(1)) : 0});
}

FloatArray layer_norm(Pool& pool, const AnyArray& x, const AnyArray& weight, const std::optional<AnyArray>& bias,
                      float eps, const MaybeFloats& given) {
    const float* weights = checked_of(weight, "weight", x);
    const float* biases = bias ? checked_of(*bias, "bias", x) : nullptr;
    const int cols = int(weight.size());
    return norm_rows(pool, x, given, [&](const float* row, float* out) {
        kernels().rows->layer_norm(row, weights, biases, cols, eps, out);
    });
}

FloatArray rms_norm(Pool& pool, const AnyArray& x, const AnyArray& weight, float eps, const MaybeFloats& given) {
    const float* weights = checked_of(weight, "weight", x);
    const int cols = int(weight.size());
    return norm_rows(pool, x, given,
                     [&](const float* row, float* out) { kernels().rows->rms_norm(row, weights, cols, eps, out); });
}

}  // namespace

void bind_encoder(nb::module_& m) {
    nb::class_<SeenTokens>(m, "SeenTokens", "Keys and values of tokens that are all seen by each query.")
        .def(nb::init<Pool&, const AnyArray&, const AnyArray&>(), nb::arg("pool"), nb::arg("keys"), nb::arg("values"),
             "keys, values: float32 [tokens, heads, head_dim], the last contiguous. head_dim is even. Raises "
             "ValueError.");
    m.def("attend_all", &attend_all, nb::arg("pool"), nb::arg("queries"), nb::arg("seen"), nb::arg("out"),
          nb::arg("scale"),
          "softmax(scale * queries @ keys.T) @ values of each head into out; queries, out: float32 [tokens, heads, "
          "head_dim], the last contiguous. Raises ValueError.");
    nb::class_<Texts>(m, "Texts", "The places of texts that are computed together, each of which attends to itself.")
        .def(
            nb::init<Pool&, const std::vector<int32_t>&, int, int, const std::optional<AnyArray>&>(),
            nb::keep_alive<1, 2>(), nb::arg("pool"), nb::arg("starts"), nb::arg("kv_heads"), nb::arg("head_dim"),
            nb::arg("biases") = nb::none(),
            "starts: the first token of each text, and the number of all tokens. biases: float32 [heads, 2 * length of "
            "the longest text - 1], by the distance from a token to one that it sees. head_dim is even. Raises "
            "ValueError.")
        .def("attend", &Texts::attend, nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("out"),
             nb::arg("scale"), nb::arg("window") = -1,
             "softmax(scale * queries @ keys.T + biases) @ values of each text and head into out; all float32 [tokens, "
             "heads, head_dim], the last contiguous. Several heads of queries may share one of keys. window: tokens on "
             "each side that a token sees; -1 = all. Raises ValueError.");
    m.def("activate", &activate, nb::arg("pool"), nb::arg("x"), nb::arg("name"), nb::arg("factors") = nb::none(),
          "x float32 [m, cols], in place: gelu, gelu_pytorch_tanh, quick_gelu or silu; times factors, of the same "
          "shape. Raises ValueError.");
    m.def("rotate_heads", &rotate_heads, nb::arg("pool"), nb::arg("x"), nb::arg("cos"), nb::arg("sin"),
          "x float32 [tokens, heads, head_dim], in place, by the angles whose cos and sin are [tokens, head_dim / 2]: "
          "pairs are a number of the first half and one of the second. Raises ValueError.");
    m.def("layer_norm", &layer_norm, nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("eps"),
          nb::arg("out").noconvert() = nb::none(),
          "x float32 [m, cols] -> [m, cols]: into out, where it is given, which may be x.");
    m.def("rms_norm", &rms_norm, nb::arg("pool"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"),
          nb::arg("out").noconvert() = nb::none(), "As layer_norm.");
    m.attr("MAX_HEAD_DIM") = MAX_HEAD_DIM;
}

}  // namespace tureen
