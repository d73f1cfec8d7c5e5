// The tokens of a vocabulary as a trie, its nodes in the order of a walk in depth.
#pragma once

#include <array>
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
        for (int32_t at = node + 1; at < end[node]; at = end[at]) {  // in the order of their bytes
            if (byte[at] >= value) return byte[at] == value ? at : -1;
        }
        return -1;
    }

    // Calls with the nodes below another one whose bytes are in a set, in their order.
    template <class Call>
    void each_child(int32_t node, const std::array<uint64_t, 4>& bytes, Call call) const {
        if (wide_[node] < 0) {
            for (int32_t at = node + 1; at < end[node]; at = end[at]) {
                if (bytes[byte[at] >> 6] >> (byte[at] & 63) & 1) call(at);
            }
            return;
        }
        const int32_t* row = children_.data() + size_t(wide_[node]) * 256;
        for (int word = 0; word < 4; word++) {
            for (uint64_t left = bytes[size_t(word)]; left != 0; left &= left - 1) {
                const int32_t at = row[word * 64 + __builtin_ctzll(left)];
                if (at >= 0) call(at);
            }
        }
    }

private:
    std::vector<int32_t> wide_;      // by node: where it has a row of children by byte, or -1
    std::vector<int32_t> children_;  // [rows, 256]
};

}  // namespace tureen
