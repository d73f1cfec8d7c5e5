// The memory of all layers' keys and values. A page's layers stand one after another, so that memory is touched page by
// page as the cache fills.
#pragma once

#include "kernels.h"
#include "memory.h"

namespace tureen {

class KvCache {
public:
    // Zeros at first; pages that nobody touches take no memory. Throws std::invalid_argument, std::bad_alloc.
    KvCache(int num_layers, int num_pages, int page_len, int kv_heads, int head_dim, KvType type);

    KvLayer layer(int index) const;
    int num_layers() const { return num_layers_; }
    int num_pages() const { return num_pages_; }
    int page_len() const { return layer_.page_len; }
    // Of all keys and values.
    size_t nbytes() const { return memory_.bytes(); }
    // What a token takes in all layers.
    size_t bytes_per_token() const;

private:
    int num_layers_, num_pages_;
    size_t layer_bytes_;  // keys, or values, of one page in one layer
    KvLayer layer_{};     // without its data
    Memory memory_;
};

}  // namespace tureen
