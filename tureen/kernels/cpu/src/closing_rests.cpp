// What it takes to end within a bounded rule: the fewest tokens, for each number of items that there is room for.
#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <tuple>
#include <utility>

#include "closing_program.h"

namespace tureen {

namespace {

constexpr size_t MAX_RESTS = 200000;          // of all places
constexpr int64_t MAX_STEPS = 400000;         // in the trie, from all places; of one ...
constexpr int64_t LEAST = 512, MOST = 16384;  // ... at least the tokens of one byte, and no more than MOST steps

// A deterministic automaton, some of whose moves complete an item.
class Rests {
public:
    Rests(Program& program, const Trie& trie, const std::vector<int32_t>& bytes, const std::vector<int32_t>& component)
        : program_(program), trie_(trie) {
        const size_t count = size_t(*std::max_element(program.places.begin(), program.places.end())) + 1;
        places_.resize(count);
        for (int32_t pc = 0; pc < int32_t(program.code.size()); pc++) {
            if (program.places[pc] < 0 || program.code[pc].op != SPLIT) continue;
            Place& place = places_[size_t(program.places[pc])];
            place.bytes = bytes[pc];
            place.component = component[pc];
            place.skips = program.skips[pc];
            read(pc, place);
        }
        for (const Rule& rule : program.rules) {
            if (rule.is_bounded()) most_ = std::max(most_, rule.most);
        }
    }

    void find() {
        find_shortest();
        sources_.resize(places_.size());
        seen_.assign(places_.size(), {-1, 0});
        for (size_t place = 0; place < places_.size(); place++) walk(int32_t(place));
        solve();
    }

private:
    struct Place {
        std::array<int32_t, 256> next;  // by byte, or -1
        std::vector<uint8_t> few;       // the bytes, where they are few
        std::vector<int32_t> targets;   // each once
        int32_t bytes = 0, component = 0;
        int32_t items = NEVER, length = NEVER;  // of the way with the fewest items; of these the shortest, in bytes
        bool accepts = false, is_between = false, skips = false;
    };
    struct Source {
        int32_t place, items;
    };
    static constexpr size_t FEW = 8;

    void read(int32_t pc, Place& place) {
        place.next.fill(-1);
        const Instruction& split = program_.code[pc];
        for (int32_t at = split.x; at < split.x + split.y; at++) {
            const Instruction& i = program_.code[program_.targets[at]];
            if (i.op == RET) {
                place.accepts = true;
                continue;
            }
            const bool is_over = program_.code[i.y].op == COUNT;
            const int32_t to = program_.places[is_over ? program_.code[i.y].y : i.y];
            if (is_over) places_[size_t(to)].is_between = true;
            place.targets.push_back(to);
            const ByteSet& set = program_.sets[i.x];
            for (size_t word = 0; word < set.size(); word++) {
                for (uint64_t left = set[word]; left != 0; left &= left - 1) {
                    const size_t byte = word * 64 + size_t(__builtin_ctzll(left));
                    place.next[byte] = to;
                    if (place.few.size() <= FEW) place.few.push_back(uint8_t(byte));
                }
            }
        }
    }

    // The fewest items to the end, by Dijkstra's algorithm.
    void find_shortest() {
        using Entry = std::tuple<int32_t, int32_t, int32_t>;
        std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
        std::vector<std::vector<int32_t>> sources(places_.size());
        for (size_t place = 0; place < places_.size(); place++) {
            for (int32_t to : places_[place].targets) sources[size_t(to)].push_back(int32_t(place));
            if (places_[place].accepts) queue.emplace(0, 0, int32_t(place));
        }
        while (!queue.empty()) {
            auto [items, length, at] = queue.top();
            queue.pop();
            Place& place = places_[size_t(at)];
            if (place.items < NEVER) continue;
            place.items = items;
            place.length = length;
            for (int32_t source : sources[size_t(at)]) queue.emplace(items + place.is_between, length + 1, source);
        }
    }

    // Whether a byte need not be left aside: it leaves what leads to itself, or comes nearer to the end.
    bool is_way(const Place& place, const Place& to) const {
        if (!place.skips && place.component != to.component) return true;
        if (to.bytes < place.bytes) return true;
        return std::make_pair(to.items + to.is_between, to.length + 1) == std::make_pair(place.items, place.length);
    }

    // The tokens that may come at a place.
    void walk(int32_t start) {
        struct Visit {
            int32_t node, place, items;
        };
        const int64_t most = std::clamp(MAX_STEPS / int64_t(places_.size()), LEAST, MOST);
        int64_t num_steps = 0;
        std::vector<Visit> visits{{0, start, 0}};
        targets_.clear();
        for (size_t at = 0; at < visits.size() && num_steps < most; at++) {  // grows
            const Visit visit = visits[at];
            const Place& place = places_[size_t(visit.place)];
            auto step = [&](int32_t node) {
                const int32_t next = place.next[trie_.byte[node]];
                num_steps++;
                if (next < 0 || (visit.node > 0 && !is_way(place, places_[size_t(next)]))) return;
                const int32_t items = visit.items + places_[size_t(next)].is_between;
                if (items > most_) return;
                if (trie_.token[node] >= 0) reached(start, next, items);
                if (trie_.end[node] > node + 1) visits.push_back({node, next, items});
            };
            if (place.few.size() <= FEW) {
                for (uint8_t byte : place.few) {
                    if (int32_t node = trie_.child(visit.node, byte); node >= 0) step(node);
                }
                continue;
            }
            for (int32_t node = visit.node + 1; node < trie_.end[visit.node]; node = trie_.end[node]) step(node);
        }
        for (int32_t to : targets_) sources_[size_t(to)].push_back({start, seen_[size_t(to)].items});
    }

    // A token leads from one place to another: only the fewest items matter.
    void reached(int32_t start, int32_t to, int32_t items) {
        Source& seen = seen_[size_t(to)];
        if (seen.place != start) {
            seen = {start, items};
            targets_.push_back(to);
        }
        seen.items = std::min(seen.items, items);
    }

    // By Dijkstra's algorithm: of each place the ways to the end than which none is better in both.
    void solve() {
        using Entry = std::tuple<int32_t, int32_t, int32_t>;  // tokens, items, place
        std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
        std::vector<std::vector<Rest>> rests(places_.size());
        size_t count = 0;
        for (size_t place = 0; place < places_.size(); place++) {
            if (places_[place].accepts) queue.emplace(0, 0, int32_t(place));
        }
        while (!queue.empty()) {
            auto [tokens, items, place] = queue.top();
            queue.pop();
            std::vector<Rest>& known = rests[size_t(place)];
            if (!known.empty() && known.back().items <= items) continue;
            known.push_back({tokens, items});
            if (++count > MAX_RESTS) throw TooLarge("a text can end in too many ways");
            for (const Source& source : sources_[size_t(place)]) {
                const int32_t more = items + source.items;
                const std::vector<Rest>& there = rests[size_t(source.place)];
                if (more <= most_ && (there.empty() || there.back().items > more)) {
                    queue.emplace(tokens + 1, more, source.place);
                }
            }
        }
        program_.from.push_back(0);
        for (const std::vector<Rest>& known : rests) {
            program_.rests.insert(program_.rests.end(), known.begin(), known.end());
            program_.from.push_back(int32_t(program_.rests.size()));
        }
        for (const Place& place : places_) program_.fewest.push_back(place.items);
    }

    Program& program_;
    const Trie& trie_;
    std::vector<Place> places_;
    std::vector<std::vector<Source>> sources_;  // by place: from which ones a token leads to it
    std::vector<Source> seen_;                  // by place: from which one it is known, and with how few items
    std::vector<int32_t> targets_;
    int32_t most_ = 0;
};

}  // namespace

void find_rests(Program& program, const Trie& trie, const std::vector<int32_t>& bytes,
                const std::vector<int32_t>& component) {
    if (!program.places.empty()) Rests(program, trie, bytes, component).find();
}

}  // namespace tureen
