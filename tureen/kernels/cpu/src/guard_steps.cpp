// Follows an output to the values in it that are guarded, and counts the tokens of its free texts.
#include <algorithm>

#include "guard.h"

namespace tureen::guard {

namespace {

constexpr int MAX_AGAIN = 32;  // steps that a text is read as, one after the other

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool begins_with(std::string_view text, std::string_view begin) { return text.substr(0, begin.size()) == begin; }

void keep_only(uint32_t* mask, const TokenIds& tokens, size_t num_words) {
    std::vector<uint32_t> kept(num_words, 0);
    for (int32_t token : tokens) {
        if (size_t(token) / 32 < num_words) kept[size_t(token) / 32] |= uint32_t(1) << (token % 32);
    }
    for (size_t word = 0; word < num_words; word++) mask[word] &= kept[word];
}

}  // namespace

StepPlace Guard::entered(int32_t number, int32_t at) {
    StepPlace place{number, at, {}};
    const Step* entered = step(place);
    if (entered != nullptr && entered->kind == Step::VALUE) place.value = reader_.begin(entered->node, at);
    return place;
}

bool Guard::read(StepPlace& place, int32_t at, int depth) {
    if (depth > MAX_AGAIN) throw TooLarge("the steps of a guard lead back to each other");
    const Step* here = step(place);
    if (here == nullptr) return true;
    switch (here->kind) {
        case Step::FIXED: return read_fixed(*here, place, at, depth);
        case Step::FREE: return read_free(*here, place, at);
        case Step::VALUE: return read_value(*here, place, at, depth);
        default: return read_key(*here, place, at);
    }
}

bool Guard::read_fixed(const Step& step, StepPlace& place, int32_t at, int depth) {
    const std::string_view text = from(place.start).substr(0, size_t(at + 1 - place.start));
    bool is_begun = step.otherwise == NO_STEP;
    for (const auto& [fixed, then] : step.texts) {
        if (fixed == text) {
            place = entered(then, at + 1);
            return true;
        }
        is_begun = is_begun || begins_with(fixed, text);
    }
    if (is_begun) return true;
    place = entered(step.otherwise, place.start);
    return read_again(place, at, depth);
}

bool Guard::read_free(const Step& step, StepPlace& place, int32_t at) {
    const std::string_view text = from(place.start).substr(0, size_t(at + 1 - place.start));
    for (const auto& [stop, then] : step.texts) {
        if (!ends_with(text, stop)) continue;
        place = entered(then, at + 1);
        break;
    }
    return true;
}

bool Guard::read_value(const Step& step, StepPlace& place, int32_t at, int depth) {
    const JsonPlace inside = reader_.place(place.value);
    const uint8_t byte = uint8_t(data()[size_t(at)]);
    const bool begins = inside.mode == Mode::VALUE && inside.frame < 0 && !is_space(byte);
    if (begins && step.otherwise != NO_STEP && byte != '[' && byte != '{') {
        place = entered(step.otherwise, place.start);
        return read_again(place, at, depth);
    }
    if (inside.mode == Mode::NUMBER && inside.frame < 0 && !is_in_number(byte)) {
        if (!reader_.end(place.value, at)) return false;
        place = entered(step.then, at);
        return read(place, at, depth + 1);
    }
    if (!reader_.read(place.value, at)) return false;
    if (reader_.place(place.value).mode == Mode::END) place = entered(step.then, at + 1);
    return true;
}

bool Guard::read_key(const Step& step, StepPlace& place, int32_t at) {
    const std::string_view text = from(place.start).substr(0, size_t(at + 1 - place.start));
    for (size_t number = 0; number < step.stops.size(); number++) {
        if (!ends_with(text, step.stops[number])) continue;
        const auto known = step.keys.find(std::string(text.substr(0, text.size() - step.stops[number].size())));
        place = entered((known == step.keys.end() ? step.others : known->second)[number], at + 1);
        break;
    }
    return true;
}

// Reads the text of a step once more, as that of another step.
bool Guard::read_again(StepPlace& place, int32_t at, int depth) {
    for (int32_t index = place.start; index <= at; index++) {
        if (!read(place, index, depth + 1)) return false;
    }
    return true;
}

bool Guard::go_on(StepPlace& place, int32_t at) {
    const StepPlace before = place;
    return read(place, at) && (place.start == before.start || was_in_budget(before, at + 1));
}

bool Guard::can_end_token(StepPlace& place) {
    if (place.value.count > 0 && place.value.is_narrow) {
        place.value = reader_.fitting(place.value);
        return place.value.count > 0;
    }
    return is_in_budget(place);
}

// Whether the free text that a place is in has no more tokens than it may have, where the last one ends with the text
// and is not counted yet.
bool Guard::is_in_budget(const StepPlace& place) {
    const Step* here = step(place);
    if (here == nullptr || here->kind != Step::FREE || here->most_tokens < 0 || int32_t(data().size()) == place.start) {
        return true;
    }
    const int64_t left = here->most_tokens - num_tokens(place) - 1;
    return left >= 0 ? missing_bytes(data()) <= left : !rests(*here, place).empty();
}

// Whether the free text that a place was in, which one of its ends ends, has no more tokens than it may have.
bool Guard::was_in_budget(const StepPlace& place, int32_t end) {
    const Step* here = step(place);
    if (here == nullptr || here->kind != Step::FREE || here->most_tokens < 0) return true;
    const std::string_view text = from(place.start).substr(0, size_t(end - place.start));
    const auto stop = std::find_if(here->texts.begin(), here->texts.end(),
                                   [&](const auto& pair) { return ends_with(text, pair.first); });
    const int32_t free_end = end - (stop == here->texts.end() ? 0 : int32_t(stop->first.size()));
    const auto first = std::upper_bound(sizes_.begin(), sizes_.end(), place.start);
    const int64_t count = std::lower_bound(sizes_.begin(), sizes_.end(), free_end) - first + 1;
    return free_end == place.start || count <= here->most_tokens;
}

// How many tokens hold some of the text of a step.
int64_t Guard::num_tokens(const StepPlace& place) const {
    return sizes_.end() - std::upper_bound(sizes_.begin(), sizes_.end(), place.start);
}

// What must still come of a text that ends a free text, all of whose tokens are there.
std::vector<std::string> Guard::rests(const Step& step, const StepPlace& place) const {
    const auto first = std::upper_bound(sizes_.begin(), sizes_.end(), place.start);
    const bool has_last = step.most_tokens > 0 && sizes_.end() - first >= step.most_tokens;
    const int32_t last =
        has_last ? first[step.most_tokens - 1] : place.start;  // where the free text ends at the latest
    const std::string_view text = from(place.start);
    std::vector<std::string> rests;
    for (const auto& [stop, then] : step.texts) {
        const size_t from_start = text.size() > stop.size() ? text.size() - stop.size() : 0;
        for (size_t start = from_start; start <= std::min(size_t(last - place.start), text.size()); start++) {
            const bool is_never =
                std::find(step.never.begin(), step.never.end(), text.substr(0, start)) != step.never.end();
            if (begins_with(stop, text.substr(start)) && !is_never) rests.push_back(stop.substr(text.size() - start));
        }
    }
    return rests;
}

// Leaves the tokens that end a free text where it has all tokens that it may have.
void Guard::restrict_to_budget(uint32_t* mask) {
    const StepPlace& place = places_.back();
    const Step* here = step(place);
    if (here == nullptr || here->kind != Step::FREE || here->most_tokens < 0) return;
    const int64_t left = here->most_tokens - num_tokens(place);
    if (left > 3) return;
    if (left > 0) {  // no character may need more tokens than there are
        const bool is_within = missing_bytes(data()) > 0;
        const std::string before = data().substr(data().size() - std::min<size_t>(3, data().size()));
        for (size_t word = 0; word < num_words(); word++) {
            for (uint32_t bits = mask[word] & (is_within ? ~uint32_t(0) : tokens_->unfinished[word]); bits != 0;) {
                const int bit = __builtin_ctz(bits);
                bits &= bits - 1;
                const std::string text = before + tokens_->text(int32_t(word) * 32 + bit);
                if (missing_bytes(text) >= left) mask[word] &= ~(uint32_t(1) << bit);
            }
        }
        return;
    }
    if (here->texts.empty()) {
        for (size_t word = 0; word < num_words(); word++) mask[word] &= tokens_->ends()[word];
        return;
    }
    TokenIds tokens;
    for (const std::string& rest : rests(*here, place)) {
        for (int32_t token : tokens_->beginning(rest)) tokens.push_back(token);
        for (int32_t token : tokens_->beyond(rest)) tokens.push_back(token);
    }
    keep_only(mask, tokens, num_words());
}

}  // namespace tureen::guard
