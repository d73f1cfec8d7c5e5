#include "kv_cache.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace tureen {

namespace {

void check(const char* name, int value, int least, int most) {
    if (value >= least && value <= most) return;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", not " + std::to_string(least) +
                                " … " + std::to_string(most));
}

void check_even(const char* name, int value) {
    if (value % 2 != 0) throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", not even");
}

}  // namespace

KvCache::KvCache(const std::vector<KvShape>& layers, int num_pages, int num_window_pages, int page_len, KvType type)
    : page_len_(page_len), pages_{num_pages}, window_pages_{num_window_pages} {
    check("the number of layers", int(layers.size()), 1, 1 << 16);
    check("num_pages", num_pages, 1, 1 << 30);
    check("num_window_pages", num_window_pages, 0, 1 << 30);
    check("page_len", page_len, 1, 1024);
    for (const KvShape& shape : layers) {
        check("kv_heads", shape.kv_heads, 1, 1 << 16);
        check("head_dim", shape.head_dim, 2, MAX_HEAD_DIM);
        check_even("head_dim", shape.head_dim);
        check("values_from", shape.values_from, -1, shape.head_dim - 2);
        if (shape.values_from >= 0) check_even("values_from", shape.values_from);
        KvLayer layer{};
        layer.kv_heads = shape.kv_heads;
        layer.head_dim = shape.head_dim;
        layer.values_from = shape.values_from;
        layer.key_type = type == KvType::INT4 ? KvType::INT8 : type;
        layer.value_type = layer.has_values() ? type : layer.key_type;
        layer.page_len = page_len;
        layer.page_blocks = (page_len + 15) / 16;
        layer.key_bytes = kernels().attention->block_bytes(layer.key_type, shape.head_dim);
        layer.value_bytes = layer.has_values() ? kernels().attention->block_bytes(type, shape.head_dim) : 0;
        layer.in_window_pages = shape.has_window && num_window_pages > 0;
        Pages& pages = layer.in_window_pages ? window_pages_ : pages_;
        starts_.push_back(pages.page_bytes);
        pages.page_bytes += size_t(shape.kv_heads) * layer.page_blocks * (layer.key_bytes + layer.value_bytes);
        layers_.push_back(layer);
    }
    for (Pages* pages : {&pages_, &window_pages_}) pages->memory = Memory(size_t(pages->count) * pages->page_bytes);
}

KvLayer KvCache::layer(int index) const {
    KvLayer layer = layers_[index];
    const Pages& pages = layer.in_window_pages ? window_pages_ : pages_;
    layer.page_bytes = pages.page_bytes;
    layer.keys = pages.memory.data() + starts_[index];
    layer.values = layer.keys;
    if (layer.has_values()) layer.values += size_t(layer.kv_heads) * layer.page_blocks * layer.key_bytes;
    return layer;
}

void KvCache::fill(int byte) {
    for (const Pages* pages : {&pages_, &window_pages_})
        if (pages->memory.bytes() > 0) std::memset(pages->memory.data(), byte, pages->memory.bytes());
}

}  // namespace tureen
