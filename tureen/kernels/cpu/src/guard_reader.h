// Reads the JSON that is being written, byte by byte, and finds what breaks a fact as soon as it does.
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

// The kinds of places in JSON: what may come next.
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

constexpr size_t MAX_PLACES = 16;  // that a text may be at; beyond, it is held to some of them

inline bool is_space(uint8_t byte) { return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; }
inline bool is_in_number(uint8_t byte) {
    return (byte >= '0' && byte <= '9') || byte == '+' || byte == '-' || byte == '.' || byte == 'e' || byte == 'E';
}

// Where in a value a text is. `frame`, `holds`: numbers, or -1 for none.
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

// All places that a text may be at, as its values may be several things. Their modes are the same.
struct JsonPlaces {
    int32_t first = 0, count = 0;
    bool is_narrow = false;  // the grammar may allow what is none of these
};

// Answers for numbers with a step: whether one is a multiple, or where it is not whole, can become one.
using Multiples = std::function<bool(int32_t node, std::string_view number, bool is_whole)>;

// Follows values in the languages of branches. What was read before is gone on with.
class Branches {
public:
    explicit Branches(std::vector<std::shared_ptr<Follower>> followers) : followers_(std::move(followers)) {}

    // Whether the text, from where a value begins up to an end, begins one of the branch.
    bool fits(int32_t branch, int32_t start, const std::string& data, size_t end);
    // Leaves of a mask what goes on with a value of the branch.
    void restrict(int32_t branch, int32_t start, const std::string& data, std::vector<uint32_t>& mask);
    // The text is cut to a size.
    void cut(size_t size);

private:
    struct Followed {
        int32_t branch, start;
        int64_t generation;
        std::vector<int32_t> states;  // after each byte
    };

    // Goes on as far as the branch has the text; with the follower's lock.
    Followed& followed(int32_t branch, int32_t start, const std::string& data, size_t end);

    const std::vector<std::shared_ptr<Follower>> followers_;
    std::vector<Followed> followed_;  // the last is the one used last
};

// Goes from place to place over a text. Places, and what they are made of, are kept until `forget`.
class Reader {
public:
    struct Marks {
        size_t frames = 0, holds = 0, seen = 0, places = 0;
    };

    Reader(const Facts& facts, Branches branches, Multiples multiples)
        : facts_(facts), branches_(std::move(branches)), multiples_(std::move(multiples)) {}

    JsonPlaces begin(int32_t node, int32_t at);
    // Goes on by the byte of the text at a position. False where it breaks a fact.
    bool read(JsonPlaces& places, int32_t at);
    // Ends a number that is the whole value. False where it breaks a fact.
    bool end(const JsonPlaces& places, int32_t at);
    // Whether no fact is broken by the text's end.
    bool ends(const JsonPlaces& places);
    // Leaves the places that the text can be at.
    JsonPlaces fitting(const JsonPlaces& places);
    // Whether what is being written may still become equal to what was written before it, at all places.
    bool are_near(const JsonPlaces& places);
    // Calls with what must come so that what is being written goes on as something did that was written before it.
    void each_rest(const JsonPlaces& places, const std::function<void(std::string_view)>& call);
    // Leaves the tokens of a mask that one of the places has at least.
    void restrict(const JsonPlaces& places, uint32_t* mask, size_t num_words);
    // The number with a step that is being written, and its node.
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
    // A value that is taken for one of several things.
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
    // Makes of the place of a value that after it.
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
