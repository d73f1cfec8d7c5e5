// Operations on all tokens of a text or picture: attention of each to all, activations, norms, rotations.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

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

// Queries of one head that are computed together.
struct QueryBlock {
    int head, first, count;
};

// A thread's memory for one QueryBlock.
struct QueryScratch {
    std::unique_ptr<uint8_t[]> scratch;
    std::unique_ptr<float[]> states;
    std::vector<float*> rows;

    QueryScratch(int count, int head_dim)
        : scratch(new uint8_t[kernels().attention->scratch_bytes(count, head_dim)]),
          states(new float[size_t(count) * kernels().attention->state_floats(head_dim)]),
          rows(size_t(count)) {}
};

void attend_all(Pool& pool, const AnyArray& queries, const SeenTokens& seen, const WritableArray& out, float scale) {
    In q(queries, "queries");
    Out to(out, "out");
    to.require_shape_of(q, "out");
    KvLayer kv = seen.layer();
    if (q.heads != kv.kv_heads || q.head_dim != kv.head_dim)
        throw nb::value_error("queries have other heads than keys");
    if (seen.tokens() == 0) throw nb::value_error("there are no keys");
    const AttentionKernels& attention = *kernels().attention;
    const int most = attention.best_count, blocks = (q.tokens + most - 1) / most, units = blocks * q.heads;
    const int pieces = (seen.tokens() + PIECE - 1) / PIECE;
    std::vector<int32_t> first_key(size_t(most), 0), num_keys(size_t(most), seen.tokens());
    std::vector<QueryScratch> own;
    for (int i = 0; i < pool.threads(); i++) own.emplace_back(most, q.head_dim);
    nb::gil_scoped_release release;
    pool.run([&](int thread) {
        QueryScratch& memory = own[size_t(thread)];
        for (int unit = thread; unit < units; unit += pool.threads()) {
            QueryBlock block{unit / blocks, unit % blocks * most, 0};
            block.count = std::min(most, q.tokens - block.first);
            Queries rows{block.head,
                         block.count,
                         q.at(block.first, block.head),
                         size_t(q.token_stride),
                         first_key.data(),
                         num_keys.data(),
                         scale,
                         0.0f};
            attention.attend(kv, seen.pages(), rows, 0, pieces, memory.states.get(), memory.scratch.get());
            for (int i = 0; i < block.count; i++) memory.rows[size_t(i)] = to.at(block.first + i, block.head);
            attention.finish(block.count, 1, memory.states.get(), q.head_dim, nullptr, memory.rows.data());
        }
    });
}

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

void activate(Pool& pool, const WritableArray& x, const std::string& name) {
    constexpr int64_t PART = 1 << 14;
    float* values = checked<float>(x, "x", {ANY, ANY});
    int64_t count = int64_t(x.size()), parts = (count + PART - 1) / PART;
    Activation activation = activation_named(name);
    nb::gil_scoped_release release;
    pool.run([&](int thread) {
        for (int64_t part = thread; part < parts; part += pool.threads()) {
            float* from = values + part * PART;
            activation(from, nullptr, int(std::min(PART, count - part * PART)), from);
        }
    });
}

void rotate_heads(const WritableArray& x, const AnyArray& cos, const AnyArray& sin) {
    Out heads(x, "x");
    int64_t pairs = heads.head_dim / 2;
    const float* cosines = checked<const float>(cos, "cos", {heads.tokens, pairs});
    const float* sines = checked<const float>(sin, "sin", {heads.tokens, pairs});
    nb::gil_scoped_release release;
    for (int token = 0; token < heads.tokens; token++)
        for (int head = 0; head < heads.heads; head++)
            kernels().rows->rotate(heads.at(token, head), cosines + token * pairs, sines + token * pairs,
                                   heads.head_dim);
}

nb::ndarray<nb::numpy, float> layer_norm(const AnyArray& x, const AnyArray& weight, const std::optional<AnyArray>& bias,
                                         float eps) {
    const float* inputs = checked<const float>(x, "x", {ANY, ANY});
    size_t cols = x.shape(1);
    const float* weights = checked<const float>(weight, "weight", {int64_t(cols)});
    const float* biases = bias ? checked<const float>(*bias, "bias", {int64_t(cols)}) : nullptr;
    float* out;
    auto array = make_array<float>({x.shape(0), cols}, &out);
    nb::gil_scoped_release release;
    for (size_t row = 0; row < x.shape(0); row++)
        kernels().rows->layer_norm(inputs + row * cols, weights, biases, int(cols), eps, out + row * cols);
    return array;
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
    m.def("activate", &activate, nb::arg("pool"), nb::arg("x"), nb::arg("name"),
          "x float32 [m, cols], in place: gelu, gelu_pytorch_tanh, quick_gelu or silu. Raises ValueError.");
    m.def("rotate_heads", &rotate_heads, nb::arg("x"), nb::arg("cos"), nb::arg("sin"),
          "x float32 [tokens, heads, head_dim], in place, by the angles whose cos and sin are [tokens, head_dim / 2]: "
          "pairs are a number of the first half and one of the second. Raises ValueError.");
    m.def("layer_norm", &layer_norm, nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("eps"),
          "x float32 [m, cols] -> [m, cols].");
}

}  // namespace tureen
