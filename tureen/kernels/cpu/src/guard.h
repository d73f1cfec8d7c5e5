// A guarded output: of the tokens that its language allows, removes those that would break a fact.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "closing_place.h"
#include "guard_facts.h"
#include "guard_reader.h"

namespace tureen::guard {

using TokenIds = std::vector<int32_t>;

// The tokens of a vocabulary, indexed for guards.
class Tokens {
public:
    explicit Tokens(std::shared_ptr<const Trie> trie);

    const std::string& text(int32_t token) const {
        return token >= 0 && size_t(token) < trie_->texts.size() ? trie_->texts[size_t(token)] : empty_;
    }
    size_t num_words() const { return trie_->num_words(); }
    const std::vector<uint32_t>& ends() const { return trie_->ends; }
    // The tokens that a text begins with.
    TokenIds beginning(std::string_view text) const;
    // The tokens that are longer than a text and begin with it.
    TokenIds beyond(std::string_view text) const;
    // The tokens that complete a text, whose beginning may be at the end of `before`, and go on after it.
    TokenIds across(const std::string& text, std::string_view before) const;
    // The tokens of this text.
    TokenIds of(std::string_view text) const;
    // Sorts tokens by their texts.
    void sort(TokenIds& tokens) const;

    TokenIds quoting, opening;  // in the order of their texts: with a quote, with what opens a value
    std::vector<uint32_t> quoting_mask, unfinished;  // masks: with a quote; those that end within a character

private:
    // The node of the trie at the end of a text, or -1.
    int32_t node_of(std::string_view text) const;
    void add(int32_t node, TokenIds& tokens) const;

    const std::shared_ptr<const Trie> trie_;
    const std::string empty_;
    std::vector<int32_t> ranks_;  // by token, in the order of texts
    mutable std::mutex lock_;
    mutable std::unordered_map<std::string, std::shared_ptr<const TokenIds>> holding_;  // with the lock
};

// Returns how many bytes the last character of a UTF-8 text lacks.
int missing_bytes(std::string_view text);

// A place in the output. `value`: the place in its JSON value, if it has one.
struct StepPlace {
    int32_t step = THE_END, start = 0;
    JsonPlaces value;
};

class Guard {
public:
    Guard(std::shared_ptr<const Facts> facts, std::shared_ptr<const Tokens> tokens, std::shared_ptr<Follower> language,
          Multiples multiples);

    size_t num_words() const { return tokens_->num_words(); }
    void fill(uint32_t* mask);
    bool accept(int32_t token);
    void rollback(size_t count);
    bool accepts();
    // Returns whether appending a text breaks no fact.
    bool allows(std::string_view text);
    // The number that is being written, if it must be a multiple, and its node.
    bool number(std::string& text, int32_t& node);
    // How many alternatives the current value still fits.
    int32_t num_places() const { return places_.back().value.count; }
    int64_t num_parts_read() const { return reader_.num_parts_read; }

    // The place in the language, without the guard.
    Place language;

private:
    struct Kept;

    const Step* step(const StepPlace& place) const {
        return place.step == THE_END ? nullptr : &facts_->steps[size_t(place.step)];
    }
    const std::string& data() const { return reader_.data; }
    std::string_view from(int32_t start) const { return std::string_view(reader_.data).substr(size_t(start)); }

    // Steps.
    StepPlace entered(int32_t step, int32_t at);
    bool read(StepPlace& place, int32_t at, int depth = 0);
    bool read_fixed(const Step& step, StepPlace& place, int32_t at, int depth);
    bool read_free(const Step& step, StepPlace& place, int32_t at);
    bool read_value(const Step& step, StepPlace& place, int32_t at, int depth);
    bool read_key(const Step& step, StepPlace& place, int32_t at);
    bool read_again(StepPlace& place, int32_t at, int depth);
    // Reads the byte at a position. Fails if a token budget is exceeded.
    bool go_on(StepPlace& place, int32_t at);
    // Returns whether a token may end at a place.
    bool can_end_token(StepPlace& place);

    // Budgets of tokens.
    bool is_in_budget(const StepPlace& place);
    bool was_in_budget(const StepPlace& place, int32_t end);
    int64_t num_tokens(const StepPlace& place) const;
    std::vector<std::string> rests(const Step& step, const StepPlace& place) const;
    void restrict_to_budget(uint32_t* mask);

    // Masks.
    void fill_language(uint32_t* mask);
    TokenIds looked_at(const uint32_t* mask);
    TokenIds across(const std::vector<std::string>& stops, const StepPlace& place);
    template <class Body>
    void each_place(const TokenIds& tokens, const Body& body);
    bool is_near(const StepPlace& place);
    TokenIds going_on(const uint32_t* mask);
    bool has_way_out(int32_t token);
    bool has_way_on();
    bool is_any_free(const TokenIds& tokens, uint32_t* mask, TokenIds& near);
    bool is_each_looked_at() const;
    bool is_in_text() const;

    const std::shared_ptr<const Facts> facts_;
    const std::shared_ptr<const Tokens> tokens_;
    Reader reader_;
    std::vector<StepPlace> places_;              // after each token
    std::vector<int32_t> sizes_;                 // of the text there
    std::vector<Reader::Marks> marks_;           // what the reader had there
    int looks_left_ = 0;                         // for the mask that is filled
    size_t looked_from_ = 0;                     // where the text of dead ends begins
    std::unordered_set<std::string> dead_ends_;  // texts without a valid continuation
    const bool counts_tokens_;                   // a step has a budget of tokens
};

}  // namespace tureen::guard
