#include <algorithm>

#include "guard.h"

namespace tureen::guard {

namespace {

constexpr size_t MAX_HOLDING = 1000;  // texts of which the tokens that hold them are kept

}  // namespace

int missing_bytes(std::string_view text) {
    for (int size = 1; size <= 3 && size_t(size) <= text.size(); size++) {
        const uint8_t byte = uint8_t(text[text.size() - size_t(size)]);
        if (byte >= 0xc0) return std::max((byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4) - size, 0);
        if (byte < 0x80) break;
    }
    return 0;
}

Tokens::Tokens(std::shared_ptr<const Trie> trie)
    : quoting_mask(trie->num_words(), 0),
      unfinished(trie->num_words(), 0),
      trie_(std::move(trie)),
      ranks_(trie_->texts.size(), 0) {
    int32_t rank = 0;
    for (int32_t node = 1; node < trie_->size(); node++) {
        for (int32_t token = trie_->token[size_t(node)]; token >= 0; token = trie_->same[size_t(token)]) {
            const std::string& text = trie_->texts[size_t(token)];
            ranks_[size_t(token)] = rank++;
            const bool has_bit = size_t(token) / 32 < unfinished.size();
            const uint32_t bit = uint32_t(has_bit) << (token % 32);
            if (text.find('"') != std::string::npos && has_bit) {
                quoting.push_back(token);
                quoting_mask[size_t(token) / 32] |= bit;
            }
            if (text.find_first_of("[{") != std::string::npos && has_bit) opening.push_back(token);
            if (missing_bytes(text) > 0 && has_bit) unfinished[size_t(token) / 32] |= bit;
        }
    }
}

void Tokens::add(int32_t node, TokenIds& tokens) const {
    for (int32_t token = trie_->token[size_t(node)]; token >= 0; token = trie_->same[size_t(token)]) {
        tokens.push_back(token);
    }
}

int32_t Tokens::node_of(std::string_view text) const {
    int32_t node = 0;
    for (size_t at = 0; at < text.size() && node >= 0; at++) node = trie_->child(node, uint8_t(text[at]));
    return node;
}

TokenIds Tokens::beginning(std::string_view text) const {
    TokenIds tokens;
    int32_t node = 0;
    for (char byte : text) {
        node = trie_->child(node, uint8_t(byte));
        if (node < 0) break;
        add(node, tokens);
    }
    return tokens;
}

TokenIds Tokens::beyond(std::string_view text) const {
    TokenIds tokens;
    const int32_t node = node_of(text);
    if (node < 0) return tokens;
    const int32_t end = node == 0 ? trie_->size() : trie_->end[size_t(node)];
    for (int32_t below = node + 1; below < end; below++) add(below, tokens);
    return tokens;
}

TokenIds Tokens::across(const std::string& text, std::string_view before) const {
    std::shared_ptr<const TokenIds> known;
    {
        std::lock_guard<std::mutex> held(lock_);
        std::shared_ptr<const TokenIds>& holding = holding_[text];
        if (holding == nullptr) {
            TokenIds found;
            for (int32_t token = 0; size_t(token) < trie_->texts.size(); token++) {
                const std::string& own = trie_->texts[size_t(token)];
                const size_t at = own.find(text);
                if (at != std::string::npos && at + text.size() < own.size()) found.push_back(token);
            }
            holding = std::make_shared<const TokenIds>(std::move(found));
        }
        known = holding;
        if (holding_.size() > MAX_HOLDING) holding_.clear();
    }
    TokenIds tokens = *known;
    for (size_t size = 1; size < text.size(); size++) {
        if (before.size() < size || before.substr(before.size() - size) != std::string_view(text).substr(0, size)) {
            continue;
        }
        const TokenIds more = beyond(std::string_view(text).substr(size));
        tokens.insert(tokens.end(), more.begin(), more.end());
    }
    return tokens;
}

TokenIds Tokens::of(std::string_view text) const {
    TokenIds tokens;
    const int32_t node = text.empty() ? -1 : node_of(text);
    if (node > 0) add(node, tokens);
    return tokens;
}

void Tokens::sort(TokenIds& tokens) const {
    const auto is_before = [&](int32_t a, int32_t b) { return ranks_[size_t(a)] < ranks_[size_t(b)]; };
    if (!std::is_sorted(tokens.begin(), tokens.end(), is_before)) std::sort(tokens.begin(), tokens.end(), is_before);
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
}

}  // namespace tureen::guard
