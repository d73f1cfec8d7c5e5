#include "closing_trie.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tureen {

namespace {

constexpr int WIDE = 12;  // children from which on they are not looked through

}  // namespace

Trie::Trie(std::vector<std::string> tokens) : texts(std::move(tokens)), same(texts.size(), -1) {
    std::vector<int32_t> order(texts.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return texts[a] < texts[b]; });
    std::vector<int32_t> path{0};  // the nodes of the text before
    byte.push_back(0);
    depth.push_back(0);
    end.push_back(0);
    token.push_back(-1);
    for (int32_t id : order) {
        const std::string& text = texts[id];
        if (text.empty() || text.size() > UINT16_MAX) continue;
        size_t shared = 0;
        while (shared + 1 < path.size() && shared < text.size() && byte[path[shared + 1]] == uint8_t(text[shared])) {
            shared++;
        }
        for (; path.size() > shared + 1; path.pop_back()) end[path.back()] = size();
        for (size_t at = shared; at < text.size(); at++) {
            path.push_back(size());
            byte.push_back(uint8_t(text[at]));
            depth.push_back(uint16_t(at + 1));
            end.push_back(0);
            token.push_back(-1);
        }
        int32_t& last = token[path.back()];
        if (last >= 0) same[id] = last;
        last = id;
    }
    for (; !path.empty(); path.pop_back()) end[path.back()] = size();
    wide_.assign(byte.size(), -1);
    for (int32_t node = 0; node < size(); node++) {
        int count = 0;
        for (int32_t at = node + 1; at < end[node]; at = end[at]) count++;
        if (count < WIDE) continue;
        wide_[node] = int32_t(children_.size() / 256);
        children_.resize(children_.size() + 256, -1);
        for (int32_t at = node + 1; at < end[node]; at = end[at]) children_[children_.size() - 256 + byte[at]] = at;
    }
}

}  // namespace tureen
