// Reads the JSON of an output byte by byte, and reports the first byte that breaks a fact.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "closing_place.h"
#include "guard_facts.h"
#include "guard_texts.h"

namespace tureen::guard {

// The kinds of places in JSON.
enum class Mode : uint8_t {
    VALUE,
    ITEM_OR_END,
    KEY_OR_END,
    COLON,
    AFTER,  // a comma, or the end of what holds the value
    STRING,
    ESCAPE,
    KEY,
    KEY_ESCAPE,
    NUMBER,
    WORD,
    END,
};

constexpr size_t MAX_PLACES = 16;  // alternatives that are followed; further ones are dropped

inline bool is_space(uint8_t byte) { return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; }
inline bool is_in_number(uint8_t byte) {
    return (byte >= '0' && byte <= '9') || byte == '+' || byte == '-' || byte == '.' || byte == 'e' || byte == 'E';
}

// A place in a value. `frame`, `holds`: indices, or -1 for none.
struct JsonPlace {
    bool operator==(const JsonPlace& o) const {
        return mode == o.mode && counts == o.counts && frame == o.frame && start == o.start && node == o.node &&
               holds == o.holds;
    }

    Mode mode = Mode::END;
    bool counts = false;  // the value is an item that is counted
    int32_t frame = -1;
    int32_t start = 0;   // of the scalar or key that is being written
    int32_t node = 0;    // of the value that comes or is being written
    int32_t holds = -1;  // of the value that is being written, and of what is open around it
};

// All places of a text, one for each combination of alternatives. They have the same mode.
struct JsonPlaces {
    int32_t first = 0, count = 0;
    bool is_narrow = false;  // the grammar may allow a text that fits none of these places
};

// A callback: returns whether a number is a multiple, or if it is incomplete, whether it can become one.
using Multiples = std::function<bool(int32_t node, std::string_view number, bool is_whole)>;

// Follows values in the branches of a language. It continues from the states of earlier calls.
class Branches {
public:
    explicit Branches(std::shared_ptr<Follower> language) : language_(std::move(language)) {}

    // Returns whether the text from a value's start to `end` is a prefix of the branch's language.
    bool fits(int32_t branch, int32_t start, const std::string& data, size_t end);
    // Removes the tokens from a mask that do not continue a value of the branch.
    void restrict(int32_t branch, int32_t start, const std::string& data, std::vector<uint32_t>& mask);
    // The text is cut to a size.
    void cut(size_t size);

private:
    struct Followed {
        int32_t branch, start;
        int64_t generation;
        std::vector<int32_t> states;  // after each byte
    };

    // Follows the text as far as the branch allows. Takes the language's lock.
    Followed& followed(int32_t branch, int32_t start, const std::string& data, size_t end);

    const std::shared_ptr<Follower> language_;
    std::vector<Followed> followed_;  // the last is the one used last
};

// Reads a text from place to place. Keeps places and their parts until `forget`.
class Reader {
public:
    struct Marks {
        size_t frames = 0, holds = 0, seen = 0, places = 0;
    };

    Reader(const Facts& facts, Branches branches, Multiples multiples)
        : facts_(facts), branches_(std::move(branches)), multiples_(std::move(multiples)) {}

    JsonPlaces begin(int32_t node, int32_t at);
    // Reads the byte at a position. Returns false if it breaks a fact.
    bool read(JsonPlaces& places, int32_t at);
    // Ends a number that is the whole value. Returns false if it breaks a fact.
    bool end(const JsonPlaces& places, int32_t at);
    // Returns whether the text may end here without breaking a fact.
    bool ends(const JsonPlaces& places);
    // Drops the places that the text does not fit.
    JsonPlaces fitting(const JsonPlaces& places);
    // Returns whether the current item or key may still become equal to an earlier one, at all places.
    bool are_near(const JsonPlaces& places);
    // Calls with each rest that would make the current item or key equal to an earlier one.
    void each_rest(const JsonPlaces& places, const std::function<void(std::string_view)>& call);
    // Removes the tokens from a mask that none of the places allows.
    void restrict(const JsonPlaces& places, uint32_t* mask, size_t num_words);
    // The number that is being written, if it must be a multiple, and its node.
    bool number(const JsonPlaces& places, std::string& text, int32_t& node);

    const JsonPlace& place(const JsonPlaces& places) const { return places_[size_t(places.first)]; }
    void cut(size_t size) {
        data.resize(size);
        branches_.cut(size);
    }
    Marks marks() const { return {frames_.size(), holds_.size(), seen_.size(), places_.size()}; }
    void forget(const Marks& marks);

    std::string data;
    int64_t num_parts_read = 0;  // of what is being written, to compare them

private:
    // An array or object that is open.
    struct Frame {
        bool is_array, counts;  // it is an item that is counted
        int32_t node, start, parent;
        int32_t holds = -1;
        int32_t seen = -1;        // the last of its items or keys, where no two may be equal
        int32_t inner = NOWHERE;  // the node of the member that is being written
        int64_t num_done = 0;     // items or members
        int64_t num_counted = 0;  // items
    };
    // A value that is followed as one of several alternatives.
    struct Hold {
        int32_t branch, start, parent;
    };
    struct Seen {
        int32_t before;
        size_t hash;
        std::string value;
        Whole whole;
    };
    enum Outcome { RIGHT, BROKEN, ELSEWHERE };  // ELSEWHERE: a value is not what it was taken for

    Outcome read_one(JsonPlace place, int32_t at);
    Outcome between(JsonPlace place, int32_t at);
    Outcome begin_item(const JsonPlace& place, int32_t at);
    Outcome begin_value(JsonPlace place, int32_t at);
    Outcome key(const JsonPlace& place, int32_t end);
    Outcome close(int32_t frame, int32_t end);
    // Turns the place of a value into the place after it.
    Outcome complete(JsonPlace& place, int32_t end);
    bool begins_right(const JsonPlace& place, int32_t end);
    bool add_seen(Frame& frame, std::string value, std::string_view text);
    JsonPlace taken(JsonPlace place, const Variant& variant, int32_t at);
    void open(const JsonPlace& place, bool is_array, int32_t at);
    bool is_allowed(const Frame& frame, const Variant& variant) const;
    bool has_items(const Frame& frame) const;
    int32_t item_of(const Frame& frame) const;
    bool fit(int32_t holds, int32_t until, size_t end);
    void leave_different();
    bool are_same(const JsonPlace& a, const JsonPlace& b, bool counts_too) const;
    bool are_same_frames(int32_t a, int32_t b, bool counts_too) const;
    bool are_same_holds(int32_t a, int32_t b) const;
    bool are_same_seen(int32_t a, int32_t b) const;
    bool counts_freely(const JsonPlace& place) const;
    bool is_near(const JsonPlace& place);
    template <class Call>
    bool any_written(const JsonPlace& place, const Call& call);
    JsonPlaces kept(const std::vector<JsonPlace>& places, bool is_narrow);
    int32_t add(const Frame& frame) {
        frames_.push_back(frame);
        return int32_t(frames_.size()) - 1;
    }
    const Node& node(int32_t number) const { return number == NOWHERE ? NO_NODE : facts_.nodes[size_t(number)]; }
    std::string_view text(int32_t start, int32_t end) const {
        return std::string_view(data).substr(size_t(start), size_t(end - start));
    }

    static const Node NO_NODE;

    const Facts& facts_;
    Branches branches_;
    const Multiples multiples_;
    std::vector<Frame> frames_;
    std::vector<Hold> holds_;
    std::vector<Seen> seen_;
    std::vector<JsonPlace> places_;
    std::vector<JsonPlace> after_;  // the byte that is being read
};

}  // namespace tureen::guard
