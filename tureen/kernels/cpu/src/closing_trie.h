// The tokens of a vocabulary as a trie, its nodes in the order of a walk in depth.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tureen {

struct Trie {
    // `tokens`: by id; an empty one is no text.
    explicit Trie(std::vector<std::string> tokens);

    int32_t size() const { return int32_t(byte.size()); }

    std::vector<std::string> texts;  // by token
    std::vector<int32_t> same;       // by token: another one of the same text, or -1
    // By node; 0 is the root.
    std::vector<uint8_t> byte;
    std::vector<uint16_t> depth;
    std::vector<int32_t> end;    // behind the nodes below this one, which is also the next sibling
    std::vector<int32_t> token;  // that ends here, or -1

    // The node of this byte below another one, or -1.
    int32_t child(int32_t node, uint8_t value) const {
        if (wide_[node] >= 0) return children_[size_t(wide_[node]) * 256 + value];
        for (int32_t at = node + 1; at < end[node]; at = end[at]) {
            if (byte[at] == value) return at;
        }
        return -1;
    }

private:
    std::vector<int32_t> wide_;      // by node: where it has a row of children by byte, or -1
    std::vector<int32_t> children_;  // [rows, 256]
};

}  // namespace tureen
