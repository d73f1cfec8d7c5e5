// KvCache; and, for tests, the attention kernels on numpy arrays.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "arrays.h"
#include "bind.h"
#include "kernels.h"
#include "kv_cache.h"
#include "state_pool.h"

namespace tureen {

namespace {

using FloatArray = nb::ndarray<nb::numpy, float>;

KvType type_named(const std::string& dtype) {
    if (dtype == "float32") return KvType::F32;
    if (dtype == "bfloat16") return KvType::BF16;
    if (dtype == "int16") return KvType::INT16;
    if (dtype == "int8") return KvType::INT8;
    if (dtype == "int4") return KvType::INT4;
    throw nb::value_error(("dtype is " + dtype + ", none of float32, bfloat16, int16, int8, int4").c_str());
}

void check_index(const char* name, int index, int count) {
    if (index >= 0 && index < count) return;
    std::string message = std::string(name) + " is " + std::to_string(index) + " of " + std::to_string(count);
    throw nb::index_error(message.c_str());
}

struct Place {
    int page, at, kv_head;
};

KvLayer checked_layer(const KvCache& cache, int layer, int kv_head) {
    check_index("layer", layer, cache.num_layers());
    KvLayer kv = cache.layer(layer);
    check_index("kv_head", kv_head, kv.kv_heads);
    return kv;
}

KvLayer checked_place(const KvCache& cache, int layer, const Place& place) {
    KvLayer kv = checked_layer(cache, layer, place.kv_head);
    check_index("page", place.page, kv.in_window_pages ? cache.num_window_pages() : cache.num_pages());
    check_index("at", place.at, kv.page_len);
    return kv;
}

void store(KvCache& cache, int layer, int page, int at, int kv_head, const AnyArray& key, const AnyArray& value) {
    KvLayer kv = checked_place(cache, layer, {page, at, kv_head});
    const float* keys = checked<const float>(key, "key", {kv.head_dim});
    const float* values = kv.has_values() ? checked<const float>(value, "value", {kv.head_dim}) : nullptr;
    kernels().attention->store(kv, page, at, kv_head, keys, values);
}

std::pair<FloatArray, FloatArray> load(const KvCache& cache, int layer, int page, int at, int kv_head) {
    KvLayer kv = checked_place(cache, layer, {page, at, kv_head});
    float *key, *value;
    auto keys = make_array<float>({size_t(kv.head_dim)}, &key);
    auto values = make_array<float>({size_t(kv.value_dim())}, &value);
    kernels().attention->load(kv, page, at, kv_head, key, value);
    return {keys, values};
}

nb::ndarray<nb::numpy, uint8_t> page_data(nb::handle self, int page) {
    KvCache& cache = nb::cast<KvCache&>(self);
    check_index("page", page, cache.num_pages());
    return nb::ndarray<nb::numpy, uint8_t>(cache.page(page), {cache.page_bytes()}, self);
}

nb::ndarray<nb::numpy, uint8_t> window_page_data(nb::handle self, int page) {
    KvCache& cache = nb::cast<KvCache&>(self);
    check_index("page", page, cache.num_window_pages());
    return nb::ndarray<nb::numpy, uint8_t>(cache.window_page(page), {cache.window_page_bytes()}, self);
}

FloatArray attend(const KvCache& cache, int layer, const AnyArray& pages, int kv_head, const AnyArray& q,
                  const AnyArray& first_key, const AnyArray& num_keys, float scale, bool each_piece, float softcap) {
    KvLayer kv = checked_layer(cache, layer, kv_head);
    const float* queries_at = checked<const float>(q, "q", {ANY, kv.head_dim});
    size_t count = q.shape(0), dim = size_t(kv.head_dim);
    const int32_t* table = checked<const int32_t>(pages, "pages", {ANY});
    const int32_t* first = checked<const int32_t>(first_key, "first_key", {int64_t(count)});
    const int32_t* num = checked<const int32_t>(num_keys, "num_keys", {int64_t(count)});
    for (size_t j = 0; j < count; j++) {
        if (first[j] < 0 || first[j] >= num[j] || size_t(num[j]) > pages.size() * size_t(kv.page_len))
            throw nb::value_error("a query vector's keys are none, or beyond the pages");
        for (int p = first[j] / kv.page_len; p * kv.page_len < num[j]; p++)
            check_index("page", table[p], kv.in_window_pages ? cache.num_window_pages() : cache.num_pages());
    }
    float* out;
    size_t value_dim = size_t(kv.value_dim());
    auto array = make_array<float>({count, value_dim}, &out);
    if (count == 0) return array;
    std::vector<float*> rows(count);
    for (size_t j = 0; j < count; j++) rows[j] = out + j * value_dim;
    const AttentionKernels& attention = *kernels().attention;
    Memory scratch(attention.scratch_bytes(int(count), kv.head_dim));
    Queries queries{kv_head, int(count), queries_at, dim, first, num, scale, softcap};
    int begin = *std::min_element(first, first + count) / PIECE;
    int end = (*std::max_element(num, num + count) - 1) / PIECE + 1;
    int parts = each_piece ? end - begin : 1;
    size_t floats = count * attention.state_floats(kv.value_dim());
    std::vector<float> states(size_t(parts) * floats);
    for (int i = 0; i < parts; i++)
        attention.attend(kv, table, queries, begin + i, each_piece ? begin + i + 1 : end, states.data() + i * floats,
                         scratch.data());
    attention.finish(int(count), parts, states.data(), kv.value_dim(), nullptr, rows.data());
    return array;
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<KvCache>(m, "KvCache", "Keys and values of all layers, in pages of page_len tokens; zeros at first.")
        .def(
            "__init__",
            [](KvCache* self, const std::vector<std::tuple<int, int, int, bool>>& layers, int num_pages, int page_len,
               const std::string& dtype, int num_window_pages) {
                std::vector<KvShape> shapes;
                for (auto [kv_heads, head_dim, values_from, has_window] : layers)
                    shapes.push_back({kv_heads, head_dim, values_from, has_window});
                new (self) KvCache(shapes, num_pages, num_window_pages, page_len, type_named(dtype));
            },
            nb::arg("layers"), nb::arg("num_pages"), nb::arg("page_len"), nb::arg("dtype"),
            nb::arg("num_window_pages") = 0,
            "layers: (kv_heads, head_dim, values_from, has_window) of each; values are the keys' dimensions from "
            "values_from on, or -1: stored. dtype: float32, bfloat16, int16, int8 or int4. num_window_pages: 0 = "
            "layers "
            "with a window are in the pages of the others. Raises ValueError, MemoryError.")
        .def_prop_ro("nbytes", &KvCache::nbytes)
        .def("page", &page_data, nb::arg("page"),
             "The bytes of a page in all its layers, uint8 [page_bytes]: not a copy.")
        .def("window_page", &window_page_data, nb::arg("page"), "The same of a window page.")
        .def_prop_ro("bytes_per_token", &KvCache::bytes_per_token, "In all layers but those in window pages.")
        .def_prop_ro("window_bytes_per_token", &KvCache::window_bytes_per_token);
    nb::class_<StatePool>(m, "StatePool", "States of sequences in layers without attention; zeros at first.")
        .def(nb::init<int, size_t>(), nb::arg("count"), nb::arg("floats"))
        .def_prop_ro("count", &StatePool::count)
        .def_prop_ro("state_bytes", &StatePool::state_bytes)
        .def(
            "state",
            [](nb::handle self, int number) {
                StatePool& pool = nb::cast<StatePool&>(self);
                if (number < 0 || number >= pool.count()) throw std::invalid_argument("there is no such state");
                size_t shape[1] = {pool.floats()};
                return nb::ndarray<nb::numpy, float>(pool.at(number), 1, shape, self);
            },
            nb::arg("number"), "The numbers of a state, float32: not a copy.");
    m.def("kv_store", store, nb::arg("cache"), nb::arg("layer"), nb::arg("page"), nb::arg("at"), nb::arg("kv_head"),
          nb::arg("key"), nb::arg("value"),
          "key, value: float32 [head_dim]. value is ignored if the layer stores no values.");
    m.def("kv_load", load, nb::arg("cache"), nb::arg("layer"), nb::arg("page"), nb::arg("at"), nb::arg("kv_head"),
          "-> key, value: float32 [head_dim], [value_dim].");
    m.def("kv_fill", &KvCache::fill, nb::arg("cache"), nb::arg("byte"), "Set every byte of the memory.");
    m.def("attend", attend, nb::arg("cache"), nb::arg("layer"), nb::arg("pages"), nb::arg("kv_head"), nb::arg("q"),
          nb::arg("first_key"), nb::arg("num_keys"), nb::arg("scale"), nb::arg("each_piece") = false,
          nb::arg("softcap") = 0.0f,
          "q: float32 [count, head_dim]; pages: int32; first_key, num_keys: int32 [count] -> [count, value_dim]. "
          "each_piece: of 512 keys is computed by itself, and then all are merged.");
}

}  // namespace tureen
