// A language as grammar/tree.py writes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tureen {

enum TreeKind : int32_t {
    TREE_TEXT,
    TREE_CHARS,
    TREE_CHAIN,
    TREE_CHOICE,
    TREE_REPEAT,
    TREE_BOTH,
    TREE_NOT,
    TREE_CALL,
    TREE_FREE
};

struct TreeNode {
    TreeKind kind;
    // TEXT: bytes. CHARS: first and last of each range. CHAIN, CHOICE, BOTH, NOT, FREE: nodes. REPEAT: node, least,
    // most or -1. CALL: rule.
    std::vector<int32_t> numbers;
};

struct Tree {
    std::vector<TreeNode> nodes;  // each behind its parts
    std::vector<int32_t> rules;   // their nodes
    std::vector<int32_t> starts;  // of the language, then of its branches

    std::vector<int32_t> calls(int32_t node) const;
    bool is_nullable(int32_t node) const { return nullable[node]; }

    std::vector<bool> nullable;
};

// Throws std::invalid_argument.
Tree read_tree(const int32_t* data, size_t size);

}  // namespace tureen
