#include "guard.h"

#include <algorithm>

namespace tureen::guard {

namespace {

constexpr int MAX_LOOKS = 256;  // look-aheads of one mask; after these, a continuation is assumed
constexpr size_t WORDS = 16;    // words of a mask that are checked in one batch
constexpr size_t FEW = 8;       // tokens of the first batch, if one free token is enough

bool is_in(const uint32_t* mask, int32_t token) { return mask[token / 32] >> (token % 32) & 1; }
void clear(uint32_t* mask, int32_t token) { mask[token / 32] &= ~(uint32_t(1) << (token % 32)); }

bool is_in_string(Mode mode) {
    return mode == Mode::STRING || mode == Mode::ESCAPE || mode == Mode::KEY || mode == Mode::KEY_ESCAPE;
}

// Returns the tokens of a mask that are not in another one.
TokenIds ids_of(const uint32_t* mask, const std::vector<uint32_t>& without) {
    TokenIds ids;
    const uint32_t* others = without.data();
    const size_t num_words = without.size();
    for (size_t first = 0; first < num_words; first += WORDS) {
        const size_t end = std::min(first + WORDS, num_words);
        uint32_t any = 0;
        for (size_t word = first; word < end; word++) any |= mask[word] & ~others[word];
        if (any == 0) continue;
        for (size_t word = first; word < end; word++) {
            for (uint32_t bits = mask[word] & ~others[word]; bits != 0; bits &= bits - 1) {
                ids.push_back(int32_t(word) * 32 + __builtin_ctz(bits));
            }
        }
    }
    return ids;
}

// Returns whether a mask has a token that is neither in another one nor in a list.
bool is_any_left(const uint32_t* mask, const std::vector<uint32_t>& without, const TokenIds& list) {
    for (size_t word = 0; word < without.size(); word++) {
        uint32_t bits = mask[word] & ~without[word];
        if (bits == 0) continue;
        for (int32_t token : list) {
            if (size_t(token) / 32 == word) bits &= ~(uint32_t(1) << (token % 32));
        }
        if (bits != 0) return true;
    }
    return false;
}

size_t common_size(std::string_view a, std::string_view b) {
    const size_t size = std::min(a.size(), b.size());
    return size_t(std::mismatch(a.begin(), a.begin() + int64_t(size), b.begin()).first - a.begin());
}

}  // namespace

// Restores the text and the reader when it is destroyed.
struct Guard::Kept {
    explicit Kept(Guard& guard_) : guard(guard_), size(guard.data().size()), marks(guard.reader_.marks()) {}
    ~Kept() {
        if (is_over) return;
        guard.reader_.cut(size);
        guard.reader_.forget(marks);
    }

    Guard& guard;
    const size_t size;
    const Reader::Marks marks;
    bool is_over = false;
};

Guard::Guard(std::shared_ptr<const Facts> facts, std::shared_ptr<const Tokens> tokens,
             std::shared_ptr<Follower> language_, Multiples multiples)
    : language(language_),
      facts_(std::move(facts)),
      tokens_(std::move(tokens)),
      reader_(*facts_, Branches(std::move(language_)), std::move(multiples)),
      sizes_{0},
      counts_tokens_(std::any_of(facts_->steps.begin(), facts_->steps.end(),
                                 [](const Step& step) { return step.most_tokens != WITHOUT; })) {
    places_.push_back(entered(facts_->start, 0));
    marks_.push_back(reader_.marks());
}

bool Guard::accept(int32_t token) {
    if (!language.accept(token)) return false;  // first, because it bounds the numbers that the guard computes with
    Kept kept(*this);
    StepPlace place = places_.back();
    bool is_right = true;
    try {
        for (char byte : tokens_->text(token)) {
            reader_.data.push_back(byte);
            is_right = is_right && go_on(place, int32_t(data().size()) - 1);
        }
        is_right = is_right && can_end_token(place);
        if (is_right && place.value.count > 1) {
            const JsonPlaces fitting = reader_.fitting(place.value);
            if (fitting.count > 0) place.value = fitting;
        }
    } catch (...) {
        language.rollback(1);
        throw;
    }
    if (!is_right) {
        language.rollback(1);
        return false;
    }
    kept.is_over = true;
    places_.push_back(place);
    sizes_.push_back(int32_t(data().size()));
    marks_.push_back(reader_.marks());
    return true;
}

void Guard::rollback(size_t count) {
    language.rollback(count);
    const size_t left = places_.size() - std::min(count, places_.size() - 1);
    if (left == places_.size()) return;
    places_.resize(left);
    sizes_.resize(left);
    marks_.resize(left);
    reader_.cut(size_t(sizes_.back()));
    reader_.forget(marks_.back());
}

bool Guard::accepts() {
    const Kept kept(*this);
    return language.accepts() && (places_.back().value.count == 0 || reader_.ends(places_.back().value));
}

bool Guard::allows(std::string_view text) {
    const Kept kept(*this);
    StepPlace place = places_.back();
    for (char byte : text) {
        reader_.data.push_back(byte);
        if (!go_on(place, int32_t(data().size()) - 1)) return false;
    }
    return can_end_token(place);
}

bool Guard::number(std::string& text, int32_t& node) {
    return num_places() > 0 && reader_.number(places_.back().value, text, node);
}

void Guard::fill(uint32_t* mask) {
    looks_left_ = MAX_LOOKS;
    looked_from_ = data().size();
    dead_ends_.clear();
    fill_language(mask);
    TokenIds near = going_on(mask);
    TokenIds looked = looked_at(mask);
    tokens_->sort(looked);
    each_place(looked, [&](int32_t token, const StepPlace* place) {
        if (place == nullptr) {
            clear(mask, token);
        } else if (is_near(*place)) {
            near.push_back(token);
        }
        return true;
    });
    std::sort(near.begin(), near.end());
    near.erase(std::unique(near.begin(), near.end()), near.end());
    for (int32_t token : near) {
        if (is_in(mask, token) && !has_way_out(token)) clear(mask, token);
    }
}

// Removes tokens by whole masks, without looking at each one.
void Guard::fill_language(uint32_t* mask) {
    const Kept kept(*this);
    language.fill(mask);
    const JsonPlaces& value = places_.back().value;
    if (value.count > 0 && !reader_.ends(value)) {
        for (size_t word = 0; word < num_words(); word++) mask[word] &= ~tokens_->ends()[word];
    }
    if (value.count > 0 && value.is_narrow) reader_.restrict(value, mask, num_words());
    restrict_to_budget(mask);
}

// Returns the tokens of a mask that can break a fact: those that end the current string, key or value.
TokenIds Guard::looked_at(const uint32_t* mask) {
    const StepPlace& place = places_.back();
    const Step* here = step(place);
    TokenIds tokens;
    if (here == nullptr) return tokens;
    if (is_each_looked_at()) return ids_of(mask, tokens_->ends());
    if (here->kind == Step::VALUE) {
        for (int32_t token : is_in_text() ? tokens_->quoting : tokens_->opening) {
            if (is_in(mask, token)) tokens.push_back(token);
        }
        return tokens;
    }
    if (here->kind == Step::FIXED) {
        const std::string_view text = from(place.start);
        if (here->otherwise >= 0 && text.empty()) {
            tokens = ids_of(mask, tokens_->ends());
        } else {
            for (const auto& [fixed, then] : here->texts) {
                if (std::string_view(fixed).substr(0, text.size()) != text) continue;
                const TokenIds more = tokens_->beyond(std::string_view(fixed).substr(text.size()));
                tokens.insert(tokens.end(), more.begin(), more.end());
            }
        }
    } else if (here->kind == Step::KEY) {
        tokens = across(here->stops, place);
    } else {
        std::vector<std::string> stops;
        for (const auto& [stop, then] : here->texts) stops.push_back(stop);
        tokens = across(stops, place);
        for (const std::string& text : here->never) {
            const TokenIds same = tokens_->of(text);
            tokens.insert(tokens.end(), same.begin(), same.end());
        }
    }
    const auto is_out = [&](int32_t token) { return size_t(token) / 32 >= num_words() || !is_in(mask, token); };
    tokens.erase(std::remove_if(tokens.begin(), tokens.end(), is_out), tokens.end());
    return tokens;
}

TokenIds Guard::across(const std::vector<std::string>& stops, const StepPlace& place) {
    TokenIds tokens;
    for (const std::string& stop : stops) {
        const TokenIds more = tokens_->across(stop, from(place.start));
        tokens.insert(tokens.end(), more.begin(), more.end());
    }
    return tokens;
}

// Calls body(token, place), with a null place if the token breaks a fact, in the order of the tokens' texts, until it
// returns false. Reads a common beginning once. During a call, the text ends with the token.
template <class Body>
void Guard::each_place(const TokenIds& tokens, const Body& body) {
    const Kept kept(*this);
    std::vector<StepPlace> trail{places_.back()};  // by the number of bytes
    std::string_view read;
    size_t broken = std::string::npos;  // the number of bytes with which a fact is broken
    for (int32_t token : tokens) {
        const std::string_view text = tokens_->text(token);
        const size_t same = common_size(read, text);
        if (same >= broken) {
            if (!body(token, nullptr)) return;
            continue;
        }
        reader_.cut(kept.size + same);
        trail.resize(same + 1);
        read = text, broken = std::string::npos;
        while (trail.size() <= text.size()) {
            StepPlace place = trail.back();
            reader_.data.push_back(text[trail.size() - 1]);
            if (!go_on(place, int32_t(data().size()) - 1)) {
                broken = trail.size();
                break;
            }
            trail.push_back(place);
        }
        StepPlace place = trail.back();
        const bool is_right = broken == std::string::npos && can_end_token(place);
        if (!body(token, is_right ? &place : nullptr)) return;
    }
}

// Returns whether ending here would repeat an item or give an excluded free text.
bool Guard::is_near(const StepPlace& place) {
    if (place.value.count > 0) return reader_.are_near(place.value);
    const Step* here = step(place);
    if (here == nullptr || here->kind != Step::FREE || here->never.empty()) return false;
    const std::string_view text = from(place.start);
    return !text.empty() && std::find(here->never.begin(), here->never.end(), text) != here->never.end();
}

// Returns the tokens of a mask that continue a string as an earlier one continues.
TokenIds Guard::going_on(const uint32_t* mask) {
    TokenIds tokens;
    if (!is_in_text()) return tokens;
    reader_.each_rest(places_.back().value, [&](std::string_view rest) {
        for (int32_t token : tokens_->beginning(rest)) {
            if (is_in(mask, token)) tokens.push_back(token);
        }
    });
    return tokens;
}

// Returns whether a token leaves a valid continuation. Many sequences of tokens give the same text, so a text without a
// continuation is remembered, unless the number of tokens matters too, or the token has no text, as end tokens.
bool Guard::has_way_out(int32_t token) {
    std::string text = data().substr(looked_from_).append(tokens_->text(token));
    if (dead_ends_.count(text) > 0) return false;
    if (looks_left_ <= 0) return true;
    looks_left_--;
    if (!accept(token)) return false;
    try {
        const bool has_way = has_way_on();
        rollback(1);
        if (!has_way && !counts_tokens_ && !tokens_->text(token).empty()) dead_ends_.insert(std::move(text));
        return has_way;
    } catch (...) {
        rollback(1);
        throw;
    }
}

// Returns whether any token leaves a valid continuation.
bool Guard::has_way_on() {
    std::vector<uint32_t> mask(num_words());
    fill_language(mask.data());
    TokenIds near = going_on(mask.data());
    if (is_in_text() && is_any_left(mask.data(), tokens_->quoting_mask, near)) return true;
    TokenIds looked = looked_at(mask.data());
    if (is_each_looked_at()) {
        uint32_t end = 0;
        for (size_t word = 0; word < mask.size(); word++) end |= mask[word] & tokens_->ends()[word];
        if (end != 0) return true;
        const TokenIds few(looked.begin(), looked.begin() + int64_t(std::min(FEW, looked.size())));
        if (is_any_free(few, mask.data(), near)) return true;
        looked.erase(looked.begin(), looked.begin() + int64_t(few.size()));
    } else {
        std::vector<uint32_t> others = mask;
        for (int32_t token : looked) clear(others.data(), token);
        if (is_any_left(others.data(), std::vector<uint32_t>(num_words(), 0), near)) return true;
    }
    tokens_->sort(looked);
    if (is_any_free(looked, mask.data(), near)) return true;
    std::sort(near.begin(), near.end());
    near.erase(std::unique(near.begin(), near.end()), near.end());
    return std::any_of(near.begin(), near.end(),
                       [&](int32_t token) { return is_in(mask.data(), token) && has_way_out(token); });
}

// Removes the tokens that break a fact from the mask, and adds those that may lead to a break to `near`. Returns at the
// first token that cannot break anything: whether there is one.
bool Guard::is_any_free(const TokenIds& tokens, uint32_t* mask, TokenIds& near) {
    const size_t num_going_on = near.size();
    bool is_free = false;
    each_place(tokens, [&](int32_t token, const StepPlace* place) {
        const auto end = near.begin() + int64_t(num_going_on);
        if (place == nullptr) {
            clear(mask, token);
        } else if (is_near(*place)) {
            near.push_back(token);
        } else {
            is_free = std::find(near.begin(), end, token) == end;
        }
        return !is_free;
    });
    return is_free;
}

// Whether a string or a key is being written.
bool Guard::is_in_text() const {
    const JsonPlaces& value = places_.back().value;
    return value.count > 0 && is_in_string(reader_.place(value).mode);
}

// Whether each token that does not end the output can break something.
bool Guard::is_each_looked_at() const {
    const StepPlace& place = places_.back();
    const Step* here = step(place);
    if (here == nullptr || here->kind != Step::VALUE) return false;
    const JsonPlace& inside = reader_.place(place.value);
    const bool is_open = inside.mode == Mode::VALUE && inside.frame < 0 && here->otherwise != NO_STEP;
    return !is_open && !is_in_text();
}

}  // namespace tureen::guard
