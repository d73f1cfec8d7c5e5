// The tokens of a vocabulary as a trie, its nodes in the order of a walk in depth.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tureen {

// Nodes by number, in the order of a walk in depth; 0 is the root.
struct Nodes {
    // Builds the trie of these texts, given the ids of the non-empty ones in order.
    void add(const std::vector<std::string>& texts, const std::vector<int32_t>& sorted);

    int32_t size() const { return int32_t(byte.size()); }

    std::vector<uint8_t> byte;
    std::vector<uint16_t> depth;
    std::vector<int32_t> end;    // one past the last node of the subtree
    std::vector<int32_t> token;  // the last token that ends here, or -1
};

// The states and masks of all languages of a vocabulary, counted in configurations.
struct Kept {
    explicit Kept(int64_t most_) : most(most_) {}

    const int64_t most;
    std::mutex lock;
    std::vector<class Follower*> followers;  // with the lock
    std::atomic<int64_t> total{0}, clock{0};
};

// A plain token is made of whole characters that JSON writes as they are: no quote, no backslash, no control character.
struct Trie : Nodes {
    // `tokens`: texts by id; empty: not a text token. `end_ids`: the tokens that end an output. `num_tokens`: bits of a
    // mask. `most_kept`: configurations that its languages may keep before the least recently used are cleared.
    Trie(std::vector<std::string> tokens, const std::vector<int32_t>& end_ids, size_t num_tokens, int64_t most_kept);

    size_t num_words() const { return ends.size(); }
    // Adds the plain tokens of up to `num_characters` characters to a mask.
    void add_plain(int32_t num_characters, std::vector<uint32_t>& mask) const;

    std::vector<std::string> texts;  // by token
    std::vector<uint32_t> ends;      // a mask
    std::vector<int32_t> same;       // by token: another one of the same text, or -1
    Nodes others;                    // of the tokens that are not plain
    // By first byte, if it is ASCII: a mask of the plain tokens that begin with it; empty if there are none.
    std::array<std::vector<uint32_t>, 128> plain_by_first;
    const std::unique_ptr<Kept> kept;
    int32_t longest = 0, longest_plain = 0;  // bytes of a token; characters of a plain one

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
    void mark_plain(const std::vector<int32_t>& sorted);

    std::vector<std::vector<uint32_t>> plain_;               // masks by the number of characters, for short tokens
    std::vector<std::pair<int32_t, int32_t>> longer_plain_;  // longer tokens: the number of characters, and the id
    std::vector<int32_t> wide_;                              // by node: where it has a row of children by byte, or -1
    std::vector<int32_t> children_;                          // [rows, 256]
};

}  // namespace tureen
