// The memory of all layers' keys and values. A page's layers stand one after another, so that memory is touched page by
// page as the cache fills.
#pragma once

#include <vector>

#include "kernels.h"
#include "memory.h"

namespace tureen {

// The shape of one layer; see KvLayer.
struct KvShape {
    int kv_heads, head_dim, values_from;
};

class KvCache {
public:
    // Zeros at first; pages that nobody touches take no memory. Throws std::invalid_argument, std::bad_alloc.
    KvCache(const std::vector<KvShape>& layers, int num_pages, int page_len, KvType type);

    KvLayer layer(int index) const;
    int num_layers() const { return int(layers_.size()); }
    int num_pages() const { return num_pages_; }
    int page_len() const { return page_len_; }
    size_t page_bytes() const { return page_bytes_; }
    // Of all keys and values.
    size_t nbytes() const { return memory_.bytes(); }
    // What a token takes in all layers.
    size_t bytes_per_token() const;

private:
    int num_pages_, page_len_;
    size_t page_bytes_;            // of all layers
    std::vector<KvLayer> layers_;  // without their data
    std::vector<size_t> starts_;   // of each layer in a page
    Memory memory_;
};

}  // namespace tureen
