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
    // Of these texts, of which an empty one has no node.
    void add(const std::vector<std::string>& texts, const std::vector<int32_t>& sorted);

    int32_t size() const { return int32_t(byte.size()); }

    std::vector<uint8_t> byte;
    std::vector<uint16_t> depth;
    std::vector<int32_t> end;    // the number of the next sibling, or of what follows the nodes below this one
    std::vector<int32_t> token;  // the last token that ends here, or -1
};

// What the languages of a vocabulary keep of their states and masks, together.
struct Kept {
    explicit Kept(int64_t most_) : most(most_) {}

    const int64_t most;
    std::mutex lock;
    std::vector<class Follower*> followers;  // with the lock
    std::atomic<int64_t> total{0}, clock{0};
};

// A plain token is made of whole characters that JSON writes as they are: no quote, no backslash, no control character.
struct Trie : Nodes {
    // `tokens`: by id; an empty one is no text. `end_ids`: those that end an output. `num_tokens`: of a mask.
    // `most_kept`: what its languages keep before those that were used longest ago forget theirs, in configurations.
    Trie(std::vector<std::string> tokens, const std::vector<int32_t>& end_ids, size_t num_tokens, int64_t most_kept);

    size_t num_words() const { return ends.size(); }
    // Adds the plain tokens of at most this many characters to a mask.
    void add_plain(int32_t num_characters, std::vector<uint32_t>& mask) const;

    std::vector<std::string> texts;  // by token
    std::vector<uint32_t> ends;      // a mask
    std::vector<int32_t> same;       // by token: another one of the same text, or -1
    Nodes others;                    // of the tokens that are not plain
    // By their first byte, where that is a character: the plain tokens, as a mask; none where there are none.
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

    std::vector<std::vector<uint32_t>> plain_;  // by the number of characters, up to a few: masks
    std::vector<std::pair<int32_t, int32_t>>
        longer_plain_;               // the number of characters of the other ones, and the token
    std::vector<int32_t> wide_;      // by node: where it has a row of children by byte, or -1
    std::vector<int32_t> children_;  // [rows, 256]
};

}  // namespace tureen
