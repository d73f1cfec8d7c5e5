// The tokens of one sequence, with an index of where each short run of them was last followed by another token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tureen {

class History {
public:
    static constexpr size_t LONGEST_MATCH = 32;  // tokens that a match is compared for

    void append(const int64_t* tokens, size_t count);

    size_t size() const { return tokens_.size(); }

    // What followed the last earlier occurrence of the end: at most `most` tokens, and the tokens before that agree.
    struct Found {
        std::vector<int64_t> following;
        size_t match = 0;  // at most LONGEST_MATCH; 0: the end never occurred before
    };

    Found look_up(size_t most) const;

private:
    // For runs of one length, by hash: the index of the token that followed its last one. 0: the slot is empty.
    struct Index {
        size_t length;
        std::vector<uint32_t> followers;
    };

    void enter(Index& index, size_t at);
    void grow();
    size_t slot_of(const Index& index, size_t end) const;

    std::vector<int64_t> tokens_;
    Index indices_[2] = {{3, {}}, {2, {}}};  // longer runs are looked up first
};

}  // namespace tureen
