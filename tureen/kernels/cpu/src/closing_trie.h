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
};

}  // namespace tureen
