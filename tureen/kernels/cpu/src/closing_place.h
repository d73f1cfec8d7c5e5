// Where an output is in its language, followed byte by byte in an automaton that is made deterministic as it goes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "closing_program.h"
#include "closing_trie.h"

namespace tureen {

// One language for one vocabulary. What is made of it on the way is kept for all outputs; a lock guards it.
class Follower {
public:
    Follower(Program program, std::shared_ptr<const Trie> trie);
    ~Follower();
    Follower(const Follower&) = delete;
    Follower& operator=(const Follower&) = delete;

    // An instruction that takes a byte, how often the counted rule that it is in has been matched, and its frame.
    struct Configuration {
        int32_t pc, count, frame;
        bool operator==(const Configuration& o) const { return pc == o.pc && count == o.count && frame == o.frame; }
        bool operator<(const Configuration& o) const {
            return pc != o.pc ? pc < o.pc : frame != o.frame ? frame < o.frame : count < o.count;
        }
    };
    using Configurations = std::vector<Configuration>;

    // With more spare tokens than this, only tokens that raise the cost by more are checked against the limit.
    static constexpr int32_t FAR = 32;

    static constexpr int32_t DEAD = -1, UNKNOWN = -2, SEVERAL = -3;

    // The state at the beginning: 0 is the whole, 1 its first branch.
    int32_t start(int32_t of = 0) const { return starts_[size_t(of)]; }
    int32_t after_byte(int32_t state, uint8_t byte) {
        int32_t target = moves_[size_t(state) * num_classes_ + classes_[byte]];
        return target != UNKNOWN ? target : move(state, classes_[byte]);
    }
    int32_t after(int32_t state, int32_t token);
    int32_t cost(int32_t state) const { return costs_[state]; }
    bool accepts(int32_t state) const { return accepts_[state]; }
    // Whether it is in free text with which the output may go on without end, and may also end. Such a state costs
    // nothing, not even within a character: the limit cuts free text anywhere.
    bool is_free(int32_t state) const;

    // body(token, state behind it) for all tokens that the language allows.
    template <class Body>
    void each_token(int32_t state, const Body& body) {
        walk<false>(*trie_, 1, trie_->size(), state, body);
    }

    // The next token's mask. `far`: the tokens that raise the cost beyond `bound`, with the cost after each.
    struct Next {
        std::vector<uint32_t> mask;
        std::vector<std::pair<int32_t, int32_t>> far;
        int32_t bound;
        bool is_nearest = false;  // the mask has only tokens that lead nearest to the end
    };
    const Next& next(int32_t state);
    // The only byte that can follow, or -1.
    int32_t only_byte(int32_t state);
    // Whether no byte can follow.
    bool is_over(int32_t state);

    // Starts a call. Clears the states if there are too many, and raises `generation`. If all languages together keep
    // too much, clears those that were used least recently.
    void tidy();
    void settle();
    bool may_settle() const;
    void begin_work() { work_ = 0; }
    int64_t num_kept() const { return num_configurations_; }

    std::mutex lock;
    int64_t generation = 0;
    int64_t num_walked = 0;  // nodes of the trie, for tests that count work
    const Trie& trie() const { return *trie_; }
    const Program& program() const { return program_; }

private:
    struct Reached {
        Configuration what;
        int32_t before;  // the previous one with the same hash, or -1
    };
    struct Last {  // the last entry in `reached_` or `opened_`, valid in its round
        int64_t round = 0;
        int32_t number = -1;
    };
    using Steps = std::vector<std::vector<uint8_t>>;  // for each byte of a character, a member of each class
    struct Edge {
        int32_t pc, count, frame;
        bool operator<(const Edge& o) const {
            return pc != o.pc ? pc < o.pc : count != o.count ? count < o.count : frame < o.frame;
        }
        bool operator==(const Edge& o) const { return pc == o.pc && count == o.count && frame == o.frame; }
    };
    struct Frame {  // a rule that is being matched, and what follows it
        int32_t rule, cost;
        int32_t uncounted;  // the same frame with normalised counts
        std::vector<Edge> edges;
    };
    struct Opened {  // a rule that was begun at this byte
        int32_t rule;
        bool is_over;  // it matched the empty string
        std::vector<Edge> edges;
        int32_t frame;  // once it is known
    };
    struct Known {
        int32_t larger = -1, smaller = -1;
        bool is_covered = false;
    };
    struct Hash {
        size_t operator()(const std::vector<int32_t>& key) const;
    };

    void reset();
    void forget();
    void count_kept();
    void make_room();
    void spend(int64_t work);
    int32_t move(int32_t state, int32_t cls);
    int32_t closed(Configurations waiting);
    bool reach(const Configuration& c, bool is_counted);
    Last& head_of(const Configuration& c);
    void spread_reached();
    bool covers(int32_t larger, int32_t smaller, int depth);
    template <class Item>
    bool covers(const Item& larger, const Item& smaller, int depth);
    template <class Body>
    bool any_from(int32_t pc, int depth, const Body& body);
    bool leads_to(int32_t from, int32_t to);
    bool may_end(int32_t pc, int32_t count, const Rule& rule);
    Known& known_of(int32_t larger, int32_t smaller);
    void spread_known();
    void drop_covered_takers(Configurations& takers);
    template <class Item>
    void drop_covered(std::vector<Item>& items);
    void close_one(Configuration c, Configurations& waiting, bool& accepts);
    void call(const Configuration& c, const Instruction& i, Configurations& waiting);
    void end_rule(int32_t frame, Configurations& waiting, bool& accepts);
    int32_t frame_of(int32_t opened, int depth);
    int32_t frame_with(int32_t rule, std::vector<Edge> edges);
    int32_t uncounted(int32_t count, int32_t frame) const;
    int32_t uncounted(int32_t state);
    void read_characters();
    int32_t after_plain(int32_t state);
    bool leads_to_one(int32_t state, const Steps& steps, int32_t& target);
    bool is_in_one_frame(int32_t state) const;
    std::vector<int32_t> counted_shape(int32_t state) const;
    Configurations one_more(int32_t state) const;
    int32_t num_plain(int32_t state);
    bool is_near(int32_t state, int32_t num_plain, int32_t bound);
    void fill(int32_t same, Next& next);
    Next nearest(int32_t state);
    void add_tokens(const Nodes& nodes, int32_t from, int32_t to, int32_t state, Next& next);
    void add_by_first(int32_t state, Next& next);
    // With `is_uncounted`, with normalised counts: more places of the trie have the same state.
    template <bool is_uncounted, class Body>
    void walk(const Nodes& nodes, int32_t from, int32_t to, int32_t state, const Body& body);
    int32_t rule_of(int32_t frame) const { return frame >= 0 ? frames_[frame].rule : opened_[~frame].rule; }
    int32_t state_of(Configurations takers, bool accepts);
    int32_t cost_of(const Configuration& c) const;
    bool is_free(const Configuration& c) const {
        const Frame& frame = frames_[size_t(c.frame)];
        return program_.rules[size_t(frame.rule)].is_free && frame.cost == 0;
    }

    const Program program_;
    const std::shared_ptr<const Trie> trie_;
    std::array<uint8_t, 256> classes_{};
    std::vector<uint8_t> members_;  // a byte of each class
    std::vector<bool> is_plain_;    // by class: its bytes are plain characters
    int32_t num_classes_ = 1;
    int32_t roomy_ = 0;   // items that a token and the cheapest rest behind it take at most
    int32_t fewest_ = 0;  // items that lead to the end from any place of a bounded rule
    std::vector<int32_t> starts_;

    std::vector<Configurations> states_;
    std::vector<int32_t> costs_, moves_;
    std::vector<int32_t> after_plain_, uncounted_;  // by state: see the functions
    std::vector<bool> accepts_;
    std::unordered_map<std::vector<int32_t>, int32_t, Hash> state_ids_, frame_ids_;
    std::vector<Frame> frames_;
    int64_t num_configurations_ = 0, settled_configurations_ = 0;
    size_t settled_states_ = 0;                                   // as many as one output took when all began anew
    int64_t work_ = 0;                                            // of this call
    bool is_full_ = false;                                        // a state could not be added
    std::vector<Steps> characters_;                               // all plain ones
    std::unordered_set<std::vector<int32_t>, Hash> plain_loops_;  // configurations that plain characters lead back to
    std::unordered_set<std::vector<int32_t>, Hash> plain_items_;  // ... that each plain character counts on by one
    std::unordered_map<int32_t, Next> next_;                      // by state with normalised counts
    std::vector<int32_t> path_;
    int64_t counted_ = 0;           // this language's part of the total
    std::atomic<int64_t> used_{0};  // the time of the last use

    std::vector<Opened> opened_;
    std::vector<Reached> reached_;
    std::vector<Last> heads_, last_opened_;  // by the hash of instruction and frame, and by rule
    int32_t compared_ = 0;                   // steps of one comparison
    std::vector<Known> known_;               // some answers of `covers`, by the hash of its frames
    int64_t round_ = 0;
};

template <bool is_uncounted, class Body>
void Follower::walk(const Nodes& nodes, int32_t from, int32_t to, int32_t state, const Body& body) {
    if (from >= to) return;
    path_.resize(size_t(trie_->longest) + 1);  // states by depth
    path_[size_t(nodes.depth[from]) - 1] = state;
    for (int32_t node = from; node < to;) {
        num_walked++;
        const size_t depth = nodes.depth[node];
        int32_t target = after_byte(path_[depth - 1], nodes.byte[node]);
        if (target < 0) {
            node = nodes.end[node];
            continue;
        }
        if (is_uncounted) target = uncounted(target);
        path_[depth] = target;
        for (int32_t token = nodes.token[node]; token >= 0; token = trie_->same[token]) body(token, target);
        node++;
    }
}

// How an output must end within a limit.
struct Zones {
    int32_t words, sentences;  // tokens to spare from which on no word, no sentence is begun
};

enum Nearness {
    AWAY,       // nothing was taken because the end is near
    NEAR,       // something was
    AT_A_WORD,  // the word that is being written may be ended, no other one may be begun
};

// One output's place.
class Place {
public:
    explicit Place(std::shared_ptr<Follower> follower) : follower_(std::move(follower)) {}

    // Appends a token. Returns false, and changes nothing, if the language does not allow it.
    bool accept(int32_t token);
    void rollback(size_t count);
    int32_t cost();
    // Writes the next token's mask, with the end tokens if the output may end.
    void fill(uint32_t* mask);
    size_t num_words() const { return follower_->trie().num_words(); }
    // The text that every continuation starts with, up to `most` bytes.
    std::string forced(size_t most);
    bool accepts();
    bool is_free();
    // Whether the output can only end.
    bool is_over();
    // How many of these tokens may follow so that the output still ends within `left` tokens.
    size_t num_closing(const std::vector<int32_t>& tokens, int32_t left);
    // Removes tokens from a mask after which the output cannot end within `left` tokens.
    Nearness restrict(uint32_t* mask, int32_t left, Zones zones);
    // Of the last mask that was taken from near the end: all that could be ended in time, and what leads nearer to it.
    const std::vector<uint32_t>& open() const { return open_; }
    const std::vector<uint32_t>& nearer() const { return nearer_; }

private:
    int32_t state();  // with the lock

    const std::shared_ptr<Follower> follower_;
    std::vector<int32_t> tokens_, states_;
    std::vector<uint32_t> open_, nearer_;
    int64_t generation_ = -1;
};

}  // namespace tureen
