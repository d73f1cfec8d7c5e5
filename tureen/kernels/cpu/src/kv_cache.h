// The memory of all layers' keys and values. A page holds its layers one after another, so memory is touched page by
// page as the cache fills. Layers with a window may have pages of their own, which sequences give back earlier.
#pragma once

#include <vector>

#include "kernels.h"
#include "memory.h"

namespace tureen {

// The shape of one layer; see KvLayer.
struct KvShape {
    int kv_heads, head_dim, values_from;
    bool has_window;
};

class KvCache {
public:
    // Zeros at first; untouched pages take no memory. num_window_pages: 0 = layers with a window are in the pages of
    // the others. Throws std::invalid_argument, std::bad_alloc.
    KvCache(const std::vector<KvShape>& layers, int num_pages, int num_window_pages, int page_len, KvType type);

    KvLayer layer(int index) const;
    int num_layers() const { return int(layers_.size()); }
    int num_pages() const { return pages_.count; }
    int num_window_pages() const { return window_pages_.count; }
    int page_len() const { return page_len_; }
    // The bytes of a page, of all layers in it.
    uint8_t* page(int index) const { return pages_.memory.data() + size_t(index) * pages_.page_bytes; }
    size_t page_bytes() const { return pages_.page_bytes; }
    uint8_t* window_page(int index) const {
        return window_pages_.memory.data() + size_t(index) * window_pages_.page_bytes;
    }
    size_t window_page_bytes() const { return window_pages_.page_bytes; }
    size_t nbytes() const { return pages_.memory.bytes() + window_pages_.memory.bytes(); }
    // The bytes of a token in all layers of a page, and of a window page.
    size_t bytes_per_token() const { return per_token(pages_); }
    size_t window_bytes_per_token() const { return per_token(window_pages_); }
    // Sets every byte.
    void fill(int byte);

private:
    struct Pages {
        int count;
        size_t page_bytes = 0;  // of all their layers
        Memory memory = Memory(0, false);
    };

    size_t per_token(const Pages& pages) const { return (pages.page_bytes + page_len_ - 1) / size_t(page_len_); }

    int page_len_;
    Pages pages_, window_pages_;
    std::vector<KvLayer> layers_;  // without their data
    std::vector<size_t> starts_;   // of each layer in a page
};

}  // namespace tureen
