// Values in the languages of what they may be, where their beginning does not tell.
#include <algorithm>

#include "guard_reader.h"

namespace tureen::guard {

namespace {

constexpr size_t MAX_FOLLOWED = 32;

}  // namespace

Branches::Followed& Branches::followed(int32_t branch, int32_t start, const std::string& data, size_t end) {
    Follower& follower = *language_;
    const auto known = std::find_if(followed_.rbegin(), followed_.rend(), [&](const Followed& followed) {
        return followed.branch == branch && followed.start == start;
    });
    if (known == followed_.rend()) {
        if (followed_.size() == MAX_FOLLOWED) followed_.erase(followed_.begin());
        followed_.push_back({branch, start, -1, {}});
    } else if (known != followed_.rbegin()) {
        std::rotate(known.base() - 1, known.base(), followed_.end());
    }
    Followed& found = followed_.back();
    follower.tidy();
    const bool is_replayed = found.generation >= 0 && found.generation != follower.generation;
    if (is_replayed) found.states.clear();
    found.generation = follower.generation;
    std::vector<int32_t>& states = found.states;
    if (states.empty()) states.push_back(follower.start(branch + 1));
    while (states.back() >= 0 && states.size() <= end - size_t(start)) {
        if (is_replayed) follower.begin_work();  // each byte stayed within the limit before
        const int32_t next = follower.after_byte(states.back(), uint8_t(data[size_t(start) + states.size() - 1]));
        states.push_back(next);
    }
    if (is_replayed && follower.may_settle()) follower.settle();  // what needs more is replayed often
    return found;
}

bool Branches::fits(int32_t branch, int32_t start, const std::string& data, size_t end) {
    const size_t size = std::min(end, data.size());
    if (size < size_t(start)) return true;
    std::lock_guard<std::mutex> held(language_->lock);
    const std::vector<int32_t>& states = followed(branch, start, data, size).states;
    return states.size() > size - size_t(start) && states[size - size_t(start)] >= 0;
}

void Branches::restrict(int32_t branch, int32_t start, const std::string& data, std::vector<uint32_t>& mask) {
    Follower& follower = *language_;
    std::lock_guard<std::mutex> held(follower.lock);
    const int32_t state = followed(branch, start, data, data.size()).states.back();
    if (state < 0) {
        std::fill(mask.begin(), mask.end(), 0);
        return;
    }
    const std::vector<uint32_t>&own = follower.next(state).mask, &ends = follower.trie().ends;
    const uint32_t may_end = follower.accepts(state) ? ~uint32_t(0) : 0;
    for (size_t word = 0; word < mask.size(); word++) mask[word] &= own[word] | (ends[word] & may_end);
}

void Branches::cut(size_t size) {
    for (size_t at = followed_.size(); at-- > 0;) {
        Followed& followed = followed_[at];
        if (size_t(followed.start) >= size) {
            followed_.erase(followed_.begin() + int64_t(at));
        } else if (followed.states.size() > size - size_t(followed.start) + 1) {
            followed.states.resize(size - size_t(followed.start) + 1);
        }
    }
}

}  // namespace tureen::guard
