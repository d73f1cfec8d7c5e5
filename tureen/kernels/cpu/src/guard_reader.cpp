#include "guard_reader.h"

#include <algorithm>

namespace tureen::guard {

namespace {

bool is_scalar(Mode mode) {
    return mode == Mode::STRING || mode == Mode::ESCAPE || mode == Mode::KEY || mode == Mode::KEY_ESCAPE ||
           mode == Mode::NUMBER || mode == Mode::WORD;
}

bool is_key(Mode mode) { return mode == Mode::KEY || mode == Mode::KEY_ESCAPE || mode == Mode::KEY_OR_END; }

}  // namespace

const Node Reader::NO_NODE;

JsonPlaces Reader::begin(int32_t node, int32_t at) { return kept({{Mode::VALUE, false, -1, at, node, -1}}, false); }

JsonPlaces Reader::kept(const std::vector<JsonPlace>& places, bool is_narrow) {
    const int32_t first = int32_t(places_.size());
    places_.insert(places_.end(), places.begin(), places.end());
    return {first, int32_t(places.size()), is_narrow};
}

void Reader::forget(const Marks& marks) {
    frames_.resize(marks.frames);
    holds_.resize(marks.holds);
    seen_.erase(seen_.begin() + int64_t(marks.seen), seen_.end());
    places_.resize(marks.places);
}

bool Reader::read(JsonPlaces& places, int32_t at) {
    after_.clear();
    bool is_narrow = places.is_narrow, is_counted = false;
    for (int32_t index = places.first; index < places.first + places.count; index++) {
        const JsonPlace place = places_[size_t(index)];
        is_counted |= place.frame >= 0 && node(frames_[size_t(place.frame)].node).has_count;
        is_narrow |= read_one(place, at) == BROKEN;
    }
    if (after_.empty()) return false;
    if (after_.size() > 1) leave_different();
    if (after_.size() > MAX_PLACES) {
        is_narrow = true;
        std::vector<JsonPlace> fewer;
        for (const JsonPlace& place : after_) {
            if (fewer.size() < MAX_PLACES && fit(place.holds, -1, size_t(at) + 1)) fewer.push_back(place);
        }
        if (fewer.empty()) return false;
        after_ = std::move(fewer);
    }
    const bool is_held = std::any_of(after_.begin(), after_.end(), [](const JsonPlace& p) { return p.holds >= 0; });
    is_narrow = is_held && (is_narrow || is_counted);
    if (places.count == 1 && after_.size() == 1 && after_[0] == place(places)) {
        places.is_narrow = is_narrow;
    } else {
        places = kept(after_, is_narrow);
    }
    return true;
}

// Of places that differ in what they count only the one that has counted most is left, where it may have counted any
// number.
void Reader::leave_different() {
    std::vector<JsonPlace> different;
    for (const JsonPlace& place : after_) {
        const bool is_free = counts_freely(place);
        const auto known = std::find_if(different.begin(), different.end(), [&](const JsonPlace& other) {
            return are_same(place, other, !is_free || !counts_freely(other));
        });
        if (known == different.end()) {
            different.push_back(place);
        } else if (is_free && frames_[size_t(place.frame)].num_counted > frames_[size_t(known->frame)].num_counted) {
            *known = place;
        }
    }
    after_ = std::move(different);
}

bool Reader::counts_freely(const JsonPlace& place) const {
    if (place.mode != Mode::AFTER || place.frame < 0) return false;
    const Node& own = node(frames_[size_t(place.frame)].node);
    return own.has_count && own.count.most < 0;
}

bool Reader::are_same(const JsonPlace& a, const JsonPlace& b, bool counts_too) const {
    return a.mode == b.mode && a.counts == b.counts && a.start == b.start && a.node == b.node &&
           are_same_holds(a.holds, b.holds) && are_same_frames(a.frame, b.frame, counts_too);
}

bool Reader::are_same_frames(int32_t a, int32_t b, bool counts_too) const {
    for (; a != b; counts_too = true) {
        if (a < 0 || b < 0) return false;
        const Frame &one = frames_[size_t(a)], &other = frames_[size_t(b)];
        const bool are_same = one.is_array == other.is_array && one.counts == other.counts && one.node == other.node &&
                              one.start == other.start && one.inner == other.inner && one.num_done == other.num_done &&
                              (!counts_too || one.num_counted == other.num_counted) &&
                              are_same_holds(one.holds, other.holds) && are_same_seen(one.seen, other.seen);
        if (!are_same) return false;
        a = one.parent, b = other.parent;
    }
    return true;
}

bool Reader::are_same_holds(int32_t a, int32_t b) const {
    for (; a != b; a = holds_[size_t(a)].parent, b = holds_[size_t(b)].parent) {
        if (a < 0 || b < 0) return false;
        const Hold &one = holds_[size_t(a)], &other = holds_[size_t(b)];
        if (one.branch != other.branch || one.start != other.start) return false;
    }
    return true;
}

bool Reader::are_same_seen(int32_t a, int32_t b) const {
    for (; a != b; a = seen_[size_t(a)].before, b = seen_[size_t(b)].before) {
        if (a < 0 || b < 0 || seen_[size_t(a)].whole.text != seen_[size_t(b)].whole.text) return false;
    }
    return true;
}

// Whether the text up to an end fits what its values were taken for, from the innermost up to before `until`.
bool Reader::fit(int32_t holds, int32_t until, size_t end) {
    for (int32_t at = holds; at != until && at >= 0; at = holds_[size_t(at)].parent) {
        if (!branches_.fits(holds_[size_t(at)].branch, holds_[size_t(at)].start, data, end)) return false;
    }
    return true;
}

JsonPlaces Reader::fitting(const JsonPlaces& places) {
    std::vector<JsonPlace> left;
    for (int32_t index = places.first; index < places.first + places.count; index++) {
        if (fit(places_[size_t(index)].holds, -1, data.size())) left.push_back(places_[size_t(index)]);
    }
    return int32_t(left.size()) == places.count ? places : kept(left, places.is_narrow);
}

bool Reader::end(const JsonPlaces& places, int32_t at) {
    JsonPlace place = places_[size_t(places.first)];
    return complete(place, at) == RIGHT;
}

bool Reader::ends(const JsonPlaces& places) {
    const JsonPlace& first = place(places);
    return first.mode != Mode::NUMBER || first.frame >= 0 || end(places, int32_t(data.size()));
}

void Reader::restrict(const JsonPlaces& places, uint32_t* mask, size_t num_words) {
    std::vector<uint32_t> every(num_words, 0), own;
    for (int32_t index = places.first; index < places.first + places.count; index++) {
        own.assign(num_words, ~uint32_t(0));
        for (int32_t at = places_[size_t(index)].holds; at >= 0; at = holds_[size_t(at)].parent) {
            branches_.restrict(holds_[size_t(at)].branch, holds_[size_t(at)].start, data, own);
        }
        for (size_t word = 0; word < num_words; word++) every[word] |= own[word];
    }
    for (size_t word = 0; word < num_words; word++) mask[word] &= every[word];
}

bool Reader::number(const JsonPlaces& places, std::string& number, int32_t& its_node) {
    for (int32_t index = places.first; index < places.first + places.count; index++) {
        const JsonPlace& place = places_[size_t(index)];
        if (place.mode != Mode::NUMBER || !node(place.node).has_step) continue;
        number = data.substr(size_t(place.start));
        its_node = place.node;
        return true;
    }
    return false;
}

// Calls with where each item or key begins that is being written, and the last of what it must not be equal to, until
// a call returns true.
template <class Call>
bool Reader::any_written(const JsonPlace& place, const Call& call) {
    int32_t start = is_scalar(place.mode) ? place.start : int32_t(data.size()), at = place.frame;
    bool has_part = at >= 0 && (frames_[size_t(at)].is_array ? place.mode != Mode::AFTER : is_key(place.mode));
    while (at >= 0) {
        const Frame& frame = frames_[size_t(at)];
        if (has_part && frame.seen >= 0 && call(start, frame.seen)) return true;
        start = frame.start, at = frame.parent;
        has_part = at >= 0 && frames_[size_t(at)].is_array;
    }
    return false;
}

bool Reader::is_near(const JsonPlace& place) {
    return any_written(place, [&](int32_t start, int32_t seen) {
        Becoming becoming(text(start, int32_t(data.size())));
        bool can_be = false;
        for (; seen >= 0 && !can_be; seen = seen_[size_t(seen)].before) {
            can_be = becoming.can_be(seen_[size_t(seen)].whole);
        }
        num_parts_read += int64_t(becoming.num_read());
        return can_be;
    });
}

bool Reader::are_near(const JsonPlaces& places) {
    const auto each_is_near = [&](const JsonPlaces& some, int32_t& count) {
        count = 0;
        for (int32_t index = some.first; index < some.first + some.count; index++) {
            count += is_near(places_[size_t(index)]);
        }
        return count == some.count;
    };
    int32_t count = 0;
    if (each_is_near(places, count)) return true;
    if (count == 0) return false;
    const JsonPlaces left = fitting(places);
    return left.count > 0 && each_is_near(left, count);
}

void Reader::each_rest(const JsonPlaces& places, const std::function<void(std::string_view)>& call) {
    for (int32_t index = places.first; index < places.first + places.count; index++) {
        any_written(places_[size_t(index)], [&](int32_t start, int32_t seen) {
            const std::string_view begun = text(start, int32_t(data.size()));
            for (; seen >= 0; seen = seen_[size_t(seen)].before) {
                const std::string_view other = seen_[size_t(seen)].whole.text;
                if (other.substr(0, begun.size()) == begun) call(other.substr(begun.size()));
            }
            return false;
        });
    }
}

// False where a number begins so that it can never be right: it is no multiple, or it is a zero with an exponent where
// a zero is there already, of which no digit makes another number.
bool Reader::begins_right(const JsonPlace& place, int32_t end) {
    const std::string_view number = text(place.start, end);
    if (node(place.node).has_step && !multiples_(place.node, number, false)) return false;
    return !is_zero_for_good(number) || !any_written(place, [&](int32_t, int32_t seen) {
        for (; seen >= 0; seen = seen_[size_t(seen)].before) {
            if (seen_[size_t(seen)].whole.has_zero()) return true;
        }
        return false;
    });
}

// Adds an item or a key to those of a frame. False where it is there.
bool Reader::add_seen(Frame& frame, std::string value, std::string_view whole) {
    const size_t hash = std::hash<std::string>()(value);
    for (int32_t at = frame.seen; at >= 0; at = seen_[size_t(at)].before) {
        if (seen_[size_t(at)].hash == hash && seen_[size_t(at)].value == value) return false;
    }
    seen_.push_back({frame.seen, hash, std::move(value), Whole(whole)});
    frame.seen = int32_t(seen_.size()) - 1;
    return true;
}

}  // namespace tureen::guard
