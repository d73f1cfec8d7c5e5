#include "closing_tree.h"

#include <algorithm>
#include <stdexcept>

namespace tureen {

namespace {

bool is_nullable(const Tree& tree, const TreeNode& node) {
    auto test = [&](int32_t part) { return bool(tree.nullable[part]); };
    const std::vector<int32_t>& parts = node.numbers;
    switch (node.kind) {
        case TREE_TEXT: return parts.empty();
        case TREE_CHAIN:
        case TREE_FREE:
        case TREE_BOTH: return std::all_of(parts.begin(), parts.end(), test);
        case TREE_CHOICE: return std::any_of(parts.begin(), parts.end(), test);
        case TREE_REPEAT: return parts[1] == 0 || test(parts[0]);
        case TREE_NOT: return !test(parts[0]);
        case TREE_CALL: return test(tree.rules[parts[0]]);
        default: return false;
    }
}

void check(bool is_right) {
    if (!is_right) throw std::invalid_argument("this is no language");
}

void check_node(const TreeNode& node, int32_t num_before, int32_t num_rules) {
    size_t count = node.numbers.size(), num_parts = count;
    switch (node.kind) {
        case TREE_TEXT:
            for (int32_t byte : node.numbers) check(byte >= 0 && byte < 256);
            return;
        case TREE_CHARS:
            check(count % 2 == 0);
            for (size_t at = 0; at < count; at += 2) {
                check(node.numbers[at] >= 0 && node.numbers[at] <= node.numbers[at + 1]);
                check(node.numbers[at + 1] <= 0x10FFFF);
            }
            return;
        case TREE_CALL: check(count == 1 && node.numbers[0] >= 0 && node.numbers[0] < num_rules); return;
        case TREE_REPEAT:
            check(count == 3 && node.numbers[1] >= 0);
            check(node.numbers[2] == -1 || node.numbers[2] >= node.numbers[1]);
            num_parts = 1;
            break;
        case TREE_BOTH: check(count == 2); break;
        case TREE_FREE:
        case TREE_NOT: check(count == 1); break;
        default: break;
    }
    for (size_t at = 0; at < num_parts; at++) check(node.numbers[at] >= 0 && node.numbers[at] < num_before);
}

}  // namespace

std::vector<int32_t> Tree::calls(int32_t root) const {
    std::vector<int32_t> names, waiting{root};
    std::vector<bool> seen(size_t(root) + 1, false);  // parts come before
    while (!waiting.empty()) {
        int32_t id = waiting.back();
        waiting.pop_back();
        if (seen[id]) continue;
        seen[id] = true;
        const TreeNode& node = nodes[id];
        if (node.kind == TREE_CALL) names.push_back(node.numbers[0]);
        if (node.kind == TREE_REPEAT || node.kind == TREE_FREE) waiting.push_back(node.numbers[0]);
        if (node.kind == TREE_CHAIN || node.kind == TREE_CHOICE || node.kind == TREE_BOTH || node.kind == TREE_NOT) {
            waiting.insert(waiting.end(), node.numbers.begin(), node.numbers.end());
        }
    }
    return names;
}

Tree read_tree(const int32_t* data, size_t size) {
    Tree tree;
    size_t at = 0;
    auto number = [&] {
        check(at < size);
        return data[at++];
    };
    int32_t num_rules = number();
    check(num_rules >= 0 && size_t(num_rules) < size);
    for (int32_t rule = 0; rule < num_rules; rule++) tree.rules.push_back(number());
    const int32_t num_starts = number();
    check(num_starts > 0 && size_t(num_starts) < size);
    for (int32_t start = 0; start < num_starts; start++) tree.starts.push_back(number());
    while (at < size) {
        TreeNode node;
        int32_t kind = number(), count = number();
        check(kind >= TREE_TEXT && kind <= TREE_FREE && count >= 0 && size_t(count) <= size - at);
        node.kind = TreeKind(kind);
        node.numbers.assign(data + at, data + at + count);
        at += size_t(count);
        check_node(node, int32_t(tree.nodes.size()), num_rules);
        tree.nodes.push_back(std::move(node));
    }
    int32_t num_nodes = int32_t(tree.nodes.size());
    for (int32_t start : tree.starts) check(start >= 0 && start < num_nodes);
    for (int32_t rule : tree.rules) check(rule >= 0 && rule < num_nodes);
    tree.nullable.assign(size_t(num_nodes), false);
    for (bool changed = true; changed;) {
        changed = false;
        for (int32_t id = 0; id < num_nodes; id++) {
            if (!tree.nullable[id] && is_nullable(tree, tree.nodes[id])) tree.nullable[id] = changed = true;
        }
    }
    return tree;
}

}  // namespace tureen
