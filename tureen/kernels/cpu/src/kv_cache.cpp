#include "kv_cache.h"

#include <stdexcept>
#include <string>

namespace tureen {

namespace {

void check(const char* name, int value, int least, int most) {
    if (value >= least && value <= most) return;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", not " + std::to_string(least) +
                                " … " + std::to_string(most));
}

}  // namespace

KvCache::KvCache(int num_layers, int num_pages, int page_len, int kv_heads, int head_dim, KvType type)
    : num_layers_(num_layers), num_pages_(num_pages), memory_(0, false) {
    check("num_layers", num_layers, 1, 1 << 16);
    check("num_pages", num_pages, 1, 1 << 30);
    check("page_len", page_len, 1, 1024);
    check("kv_heads", kv_heads, 1, 1 << 16);
    check("head_dim", head_dim, 2, 256);
    if (head_dim % 2 != 0) throw std::invalid_argument("head_dim is " + std::to_string(head_dim) + ", not even");
    layer_.type = type;
    layer_.kv_heads = kv_heads;
    layer_.head_dim = head_dim;
    layer_.page_len = page_len;
    layer_.page_blocks = (page_len + 15) / 16;
    layer_.block_bytes = kernels().attention->block_bytes(type, head_dim);
    layer_bytes_ = size_t(kv_heads) * layer_.page_blocks * layer_.block_bytes;
    layer_.page_bytes = 2 * size_t(num_layers) * layer_bytes_;
    memory_ = Memory(size_t(num_pages) * layer_.page_bytes);
}

KvLayer KvCache::layer(int index) const {
    KvLayer layer = layer_;
    layer.keys = memory_.data() + 2 * size_t(index) * layer_bytes_;
    layer.values = layer.keys + layer_bytes_;
    return layer;
}

size_t KvCache::bytes_per_token() const {
    size_t tokens = size_t(layer_.page_len);
    return (layer_.page_bytes + tokens - 1) / tokens;
}

}  // namespace tureen
