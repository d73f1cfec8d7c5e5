// How each byte of a JSON text leads from a place to the next ones.
#include <algorithm>

#include "guard_reader.h"

namespace tureen::guard {

namespace {

constexpr std::string_view WORDS[] = {"true", "false", "null"};

}  // namespace

// Adds the places after the byte to `after_`; of them none unless the outcome is RIGHT or a variant was.
Reader::Outcome Reader::read_one(JsonPlace place, int32_t at) {
    const uint8_t byte = uint8_t(data[size_t(at)]);
    switch (place.mode) {
        case Mode::STRING:
        case Mode::KEY: {
            const bool is_string = place.mode == Mode::STRING;
            if (byte == '"' && !is_string) return key(place, at + 1);
            if (byte == '\\') place.mode = is_string ? Mode::ESCAPE : Mode::KEY_ESCAPE;
            const Outcome outcome = byte == '"' ? complete(place, at + 1) : RIGHT;
            if (outcome == RIGHT) after_.push_back(place);
            return outcome;
        }
        case Mode::ESCAPE:
        case Mode::KEY_ESCAPE:
            place.mode = place.mode == Mode::ESCAPE ? Mode::STRING : Mode::KEY;
            after_.push_back(place);
            return RIGHT;
        case Mode::WORD: {
            const std::string_view word = text(place.start, at + 1);
            const bool is_whole = std::find(std::begin(WORDS), std::end(WORDS), word) != std::end(WORDS);
            const Outcome outcome = is_whole ? complete(place, at + 1) : RIGHT;
            if (outcome == RIGHT) after_.push_back(place);
            return outcome;
        }
        case Mode::NUMBER:
            if (is_in_number(byte)) {
                if (!begins_right(place, at + 1)) return BROKEN;
                after_.push_back(place);
                return RIGHT;
            }
            if (const Outcome outcome = complete(place, at); outcome != RIGHT) return outcome;
            return between(place, at);
        default: return between(place, at);
    }
}

// Reads a byte outside of scalars and keys.
Reader::Outcome Reader::between(JsonPlace place, int32_t at) {
    const uint8_t byte = uint8_t(data[size_t(at)]);
    if (is_space(byte)) {
        after_.push_back(place);
        return RIGHT;
    }
    if (place.mode == Mode::KEY_OR_END && byte != '}') {
        place.mode = Mode::KEY, place.start = at;
        after_.push_back(place);
        return RIGHT;
    }
    if (place.frame < 0) return begin_item(place, at);
    if (byte == ']' || byte == '}') return close(place.frame, at + 1);
    const Frame& frame = frames_[size_t(place.frame)];
    if (place.mode == Mode::COLON) {
        after_.push_back({Mode::VALUE, false, place.frame, at, frame.inner, frame.holds});
        return RIGHT;
    }
    if (place.mode == Mode::AFTER) {
        if (!frame.is_array) {
            after_.push_back({Mode::KEY_OR_END, false, place.frame, at, 0, frame.holds});
            return RIGHT;
        }
        if (!has_items(frame)) return BROKEN;
        after_.push_back({Mode::VALUE, false, place.frame, at, item_of(frame), frame.holds});
        return RIGHT;
    }
    return begin_item(place, at);
}

// Begins what an item of an array can be, or another value.
Reader::Outcome Reader::begin_item(const JsonPlace& place, int32_t at) {
    if (place.frame < 0) return begin_value(place, at);
    const Frame frame = frames_[size_t(place.frame)];
    const Node& array = node(frame.node);
    if (!frame.is_array || !array.has_count || frame.num_done < array.count.start) return begin_value(place, at);
    Outcome outcome = RIGHT;
    for (const Variant& variant : array.count.variants(frame.num_done)) {
        if (is_allowed(frame, variant) && begin_value(taken(place, variant, at), at) != RIGHT) outcome = BROKEN;
    }
    return outcome;
}

JsonPlace Reader::taken(JsonPlace place, const Variant& variant, int32_t at) {
    if (variant.branch != NOWHERE) {
        holds_.push_back({variant.branch, at, place.holds});
        place.holds = int32_t(holds_.size()) - 1;
    }
    place.node = variant.node;
    place.counts = place.counts || variant.counts;
    return place;
}

bool Reader::is_allowed(const Frame& frame, const Variant& variant) const {
    const CountedItems& count = node(frame.node).count;
    if (variant.counts) return frame.num_counted < (count.most < 0 ? count.least : count.most);
    return count.least - frame.num_counted <= count.most_after(frame.num_done);
}

// Whether something can be the next item.
bool Reader::has_items(const Frame& frame) const {
    const Node& own = node(frame.node);
    if (!own.has_count || frame.num_done < own.count.start) return true;
    const Variants& variants = own.count.variants(frame.num_done);
    return std::any_of(variants.begin(), variants.end(), [&](const Variant& v) { return is_allowed(frame, v); });
}

int32_t Reader::item_of(const Frame& frame) const {
    const Node& own = node(frame.node);
    return frame.num_done < int64_t(own.first_items.size()) ? own.first_items[size_t(frame.num_done)] : own.items;
}

Reader::Outcome Reader::begin_value(JsonPlace place, int32_t at) {
    const uint8_t byte = uint8_t(data[size_t(at)]);
    if (byte == '[' || byte == '{') {
        const bool is_array = byte == '[';
        const Variants& variants = is_array ? node(place.node).arrays : node(place.node).objects;
        if (variants.empty()) open(place, is_array, at);
        for (const Variant& variant : variants) open(taken(place, variant, at), is_array, at);
        return RIGHT;
    }
    const bool is_number = byte == '-' || (byte >= '0' && byte <= '9');
    place.mode = byte == '"' ? Mode::STRING : is_number ? Mode::NUMBER : Mode::WORD;
    place.start = at;
    if (is_number && !begins_right(place, at + 1)) return BROKEN;
    after_.push_back(place);
    return RIGHT;
}

void Reader::open(const JsonPlace& place, bool is_array, int32_t at) {
    Frame frame{is_array, place.counts, place.node, at, place.frame};
    frame.holds = place.holds;
    const int32_t opened = add(frame), inner = is_array ? item_of(frame) : 0;
    after_.push_back({is_array ? Mode::ITEM_OR_END : Mode::KEY_OR_END, false, opened, at, inner, place.holds});
}

Reader::Outcome Reader::key(const JsonPlace& place, int32_t end) {
    if (place.frame < 0) {
        after_.push_back(place);
        return RIGHT;
    }
    const std::string_view written = text(place.start, end);
    const Node& own = node(frames_[size_t(place.frame)].node);
    int32_t frame = place.frame;
    if (&own != &NO_NODE) {
        Frame changed = frames_[size_t(place.frame)];
        std::string key = said(written);
        changed.inner = own.node_of(key);
        if (own.least_keys > 0 && !add_seen(changed, std::move(key), written)) return BROKEN;
        frame = add(changed);
    }
    after_.push_back({Mode::COLON, false, frame, end, 0, frames_[size_t(frame)].holds});
    return RIGHT;
}

Reader::Outcome Reader::close(int32_t number, int32_t end) {
    const Frame& frame = frames_[size_t(number)];
    const Node& own = node(frame.node);
    if (!frame.is_array && frame.num_done < own.least_keys) return BROKEN;
    if (frame.is_array && own.has_count && frame.num_counted < own.count.least) return BROKEN;
    JsonPlace place{Mode::AFTER, frame.counts, frame.parent, frame.start, frame.node, frame.holds};
    const Outcome outcome = complete(place, end);
    if (outcome == RIGHT) after_.push_back(place);
    return outcome;
}

Reader::Outcome Reader::complete(JsonPlace& place, int32_t end) {
    const int32_t outer = place.frame < 0 ? -1 : frames_[size_t(place.frame)].holds;
    const bool is_number = place.mode == Mode::NUMBER;
    // Only what follows a number shows that it is complete.
    if (!fit(place.holds, outer, size_t(end) + is_number)) return ELSEWHERE;
    if (is_number && node(place.node).has_step && !multiples_(place.node, text(place.start, end), true)) return BROKEN;
    if (place.frame < 0) {
        place = {};
        return RIGHT;
    }
    Frame frame = frames_[size_t(place.frame)];
    if (frame.is_array && node(frame.node).is_unique) {
        const std::string_view written = text(place.start, end);
        if (!add_seen(frame, comparable(written), written)) return BROKEN;
    }
    frame.num_done++;
    frame.num_counted += place.counts;
    place = {Mode::AFTER, false, add(frame), end, 0, frame.holds};
    return RIGHT;
}

}  // namespace tureen::guard
