#include "closing_trie.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace tureen {

namespace {

constexpr int WIDE = 12;  // nodes with as many children have a table of them
constexpr int32_t MOST_MASKS = 17;

// Returns the number of bytes of the character at a place if it is complete and plain; else 0.
size_t plain_character(const std::string& text, size_t at) {
    auto byte = [&](size_t place) { return place < text.size() ? uint8_t(text[place]) : uint8_t(0); };
    const uint8_t lead = byte(at);
    if (lead < 0x80) return lead >= 0x20 && lead != '"' && lead != '\\' && lead != 0x7f;
    const size_t size = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    for (size_t more = 1; more < size; more++) {
        if ((byte(at + more) & 0xc0) != 0x80) return 0;
    }
    const uint8_t second = byte(at + 1);
    if (lead == 0xe0 && second < 0xa0) return 0;  // an overlong encoding
    if (lead == 0xed && second > 0x9f) return 0;  // a surrogate
    if (lead == 0xf0 && second < 0x90) return 0;
    if (lead == 0xf4 && second > 0x8f) return 0;  // beyond the last code point
    return size;
}

// Returns the number of characters; -1 if one of them is not plain.
int32_t plain_length(const std::string& text) {
    int32_t length = 0;
    for (size_t at = 0; at < text.size(); length++) {
        const size_t size = plain_character(text, at);
        if (size == 0) return -1;
        at += size;
    }
    return length;
}

void put(std::vector<uint32_t>& mask, int32_t token) { mask[size_t(token) / 32] |= uint32_t(1) << (token % 32); }

}  // namespace

void Nodes::add(const std::vector<std::string>& texts, const std::vector<int32_t>& sorted) {
    std::vector<int32_t> path{0};  // the nodes of the text before
    byte.push_back(0);
    depth.push_back(0);
    end.push_back(0);
    token.push_back(-1);
    for (int32_t id : sorted) {
        const std::string& text = texts[size_t(id)];
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
        token[path.back()] = id;
    }
    for (; !path.empty(); path.pop_back()) end[path.back()] = size();
}

Trie::Trie(std::vector<std::string> tokens, const std::vector<int32_t>& end_ids, size_t num_tokens, int64_t most_kept)
    : texts(std::move(tokens)),
      ends((num_tokens + 31) / 32, 0),
      same(texts.size(), -1),
      kept(std::make_unique<Kept>(most_kept)) {
    if (num_tokens < texts.size()) throw std::invalid_argument("masks have a bit for each token");
    for (int32_t id : end_ids) {
        if (id < 0 || size_t(id) >= num_tokens) throw std::invalid_argument("an end is no token");
        put(ends, id);
    }
    std::vector<int32_t> sorted;
    for (size_t id = 0; id < texts.size(); id++) {
        if (!texts[id].empty() && texts[id].size() <= UINT16_MAX) sorted.push_back(int32_t(id));
    }
    std::stable_sort(sorted.begin(), sorted.end(), [&](int32_t a, int32_t b) { return texts[a] < texts[b]; });
    for (size_t at = 0; at < sorted.size(); at++) {
        longest = std::max(longest, int32_t(texts[sorted[at]].size()));
        if (at > 0 && texts[sorted[at]] == texts[sorted[at - 1]]) same[sorted[at]] = sorted[at - 1];
    }
    add(texts, sorted);
    mark_plain(sorted);
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

void Trie::mark_plain(const std::vector<int32_t>& sorted) {
    std::vector<int32_t> rest;
    plain_.assign(MOST_MASKS, std::vector<uint32_t>(num_words(), 0));
    for (int32_t id : sorted) {
        const int32_t length = plain_length(texts[size_t(id)]);
        if (length < 0) {
            rest.push_back(id);
            continue;
        }
        longest_plain = std::max(longest_plain, length);
        if (length < MOST_MASKS) {
            put(plain_[size_t(length)], id);
        } else {
            longer_plain_.emplace_back(length, id);
        }
        const uint8_t first = uint8_t(texts[size_t(id)][0]);
        if (first >= 0x80) continue;
        plain_by_first[first].resize(num_words());
        put(plain_by_first[first], id);
    }
    for (size_t length = 1; length < plain_.size(); length++) {
        for (size_t word = 0; word < num_words(); word++) plain_[length][word] |= plain_[length - 1][word];
    }
    others.add(texts, rest);
}

void Trie::add_plain(int32_t num_characters, std::vector<uint32_t>& mask) const {
    const std::vector<uint32_t>& few = plain_[size_t(std::min(num_characters, MOST_MASKS - 1))];
    for (size_t word = 0; word < mask.size(); word++) mask[word] |= few[word];
    for (auto [length, id] : longer_plain_) {
        if (length <= num_characters) put(mask, id);
    }
}

}  // namespace tureen
