// What it takes to end: by Knuth's "A generalization of Dijkstra's algorithm" (1977), in bytes and then in tokens.
#include <algorithm>
#include <initializer_list>
#include <map>
#include <numeric>
#include <queue>
#include <set>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "closing_emitter.h"
#include "closing_program.h"

namespace tureen {

namespace {

constexpr size_t MAX_WALK = 4096;  // places in the trie that are looked at from one instruction
constexpr int MAX_SILENT = 400;    // instructions in a row that take no byte

// A way to end from `target`: a fixed cost, and the cost of each of these instructions, times a number.
struct Way {
    int32_t target, cost, from, num_terms;
};

// Instructions in the order of their costs, of which none is added that is less than the last one taken.
class Waiting {
public:
    void push(int32_t cost, int32_t pc) {
        if (cost >= MAX_NEAR) {
            far_.push({cost, pc});
            return;
        }
        if (size_t(cost) >= near_.size()) near_.resize(size_t(cost) + 1);
        near_[size_t(cost)].push_back(pc);
    }
    // -1 where there are no more.
    int32_t next() {
        for (; at_ < near_.size(); at_++, taken_ = 0) {
            if (taken_ < near_[at_].size()) return near_[at_][taken_++];
        }
        if (far_.empty()) return -1;
        const int32_t pc = far_.top().second;
        far_.pop();
        return pc;
    }

private:
    using Entry = std::pair<int32_t, int32_t>;
    static constexpr int32_t MAX_NEAR = 1 << 14;  // most costs are less: those have a list each

    std::vector<std::vector<int32_t>> near_;
    size_t at_ = 0, taken_ = 0;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> far_;
};

// The least costs that fulfil: of each target the least of its ways.
class Equations {
public:
    using Term = std::pair<int32_t, int32_t>;

    explicit Equations(size_t size) : cost_(size, NEVER) {}

    // A fixed cost and that of one instruction, as most ways are.
    void add_edge(int32_t target, int32_t cost, int32_t from) { edges_.push_back({from, target, cost}); }
    void add(int32_t target, int32_t cost, const Term* terms, size_t num_terms) {
        ways_.push_back({target, cost, int32_t(terms_.size()), int32_t(num_terms)});
        terms_.insert(terms_.end(), terms, terms + num_terms);
    }
    void add(int32_t target, int32_t cost, std::initializer_list<Term> terms) {
        add(target, cost, terms.begin(), terms.size());
    }

    std::vector<int32_t> solved() {
        auto offer = [&](int32_t target, int32_t cost) {
            if (cost < cost_[size_t(target)]) {
                cost_[size_t(target)] = cost;
                queue_.push(cost, target);
            }
        };
        std::vector<int32_t> num_open;
        for (const Way& way : ways_) {
            num_open.push_back(way.num_terms);
            if (way.num_terms == 0) offer(way.target, way.cost);
        }
        // By instruction: the ways and the edges from it.
        std::vector<int32_t> from, uses(terms_.size()), edges_from;
        std::vector<std::pair<int32_t, int32_t>> leads_to(edges_.size());
        sort(
            from, terms_.size(), [&](size_t term) { return terms_[term].first; },
            [&](size_t place, size_t term) { uses[place] = int32_t(term); });
        sort(
            edges_from, edges_.size(), [&](size_t edge) { return edges_[edge].from; },
            [&](size_t place, size_t edge) { leads_to[place] = {edges_[edge].target, edges_[edge].cost}; });
        std::vector<int32_t> way_of(terms_.size());
        for (size_t way = 0; way < ways_.size(); way++) {
            std::fill_n(way_of.begin() + ways_[way].from, ways_[way].num_terms, int32_t(way));
        }
        std::vector<bool> is_settled(cost_.size(), false);
        for (int32_t pc; (pc = queue_.next()) >= 0;) {
            if (is_settled[size_t(pc)]) continue;
            is_settled[size_t(pc)] = true;
            for (int32_t at = edges_from[size_t(pc)]; at < edges_from[size_t(pc) + 1]; at++) {
                offer(leads_to[size_t(at)].first, sum_of(leads_to[size_t(at)].second, cost_[size_t(pc)]));
            }
            for (int32_t use = from[size_t(pc)]; use < from[size_t(pc) + 1]; use++) {
                const int32_t way = way_of[size_t(uses[size_t(use)])];
                if (--num_open[size_t(way)] == 0) offer(ways_[size_t(way)].target, cost_of(ways_[size_t(way)]));
            }
        }
        return std::move(cost_);
    }

private:
    struct Edge {
        int32_t from, target, cost;
    };

    // Sorts items by an instruction of each: where those of an instruction begin.
    template <class Key, class Put>
    void sort(std::vector<int32_t>& begins, size_t count, Key key, Put put) const {
        begins.assign(cost_.size() + 1, 0);
        for (size_t item = 0; item < count; item++) begins[size_t(key(item)) + 1]++;
        std::partial_sum(begins.begin(), begins.end(), begins.begin());
        std::vector<int32_t> at(begins.begin(), begins.end() - 1);
        for (size_t item = 0; item < count; item++) put(size_t(at[size_t(key(item))]++), item);
    }

    int32_t cost_of(const Way& way) const {
        int32_t cost = way.cost;
        for (int32_t at = way.from; at < way.from + way.num_terms; at++) {
            cost = sum_of(cost, times(terms_[size_t(at)].second, cost_[size_t(terms_[size_t(at)].first)]));
        }
        return cost;
    }

    std::vector<int32_t> cost_;
    std::vector<Edge> edges_;
    std::vector<Way> ways_;
    std::vector<Term> terms_;
    Waiting queue_;
};

// What all instructions but BYTES cost.
void add_silent(const Program& program, Equations& equations) {
    std::vector<bool> is_bounded_entry(program.code.size(), false);
    for (const Rule& rule : program.rules) {
        if (!rule.is_bounded() || program.rests.empty()) continue;
        is_bounded_entry[size_t(rule.entry)] = true;
        const int32_t start = program.places[size_t(program.targets[size_t(program.code[size_t(rule.entry)].x)])];
        const int32_t cost = program.cost_within(start, rule.most);
        if (cost < NEVER) equations.add(rule.entry, cost, {});
    }
    for (int32_t pc = 0; pc < int32_t(program.code.size()); pc++) {
        const Instruction& i = program.code[pc];
        if (is_bounded_entry[size_t(pc)]) continue;
        if (i.op == SPLIT) {
            for (int32_t at = i.x; at < i.x + i.y; at++) equations.add_edge(pc, 0, program.targets[at]);
        } else if (i.op == CALL) {
            equations.add(pc, 0, {{program.rules[i.x].entry, 1}, {i.y, 1}});
        } else if (i.op == LOOP && program.rules[i.x].least > 0) {
            equations.add(pc, 0, {{program.rules[i.x].body, program.rules[i.x].least}});
        } else if (i.op == COUNT) {
            equations.add_edge(pc, 0, i.y);
        } else if (i.op != BYTES) {
            equations.add(pc, 0, {});
        }
    }
}

std::vector<int32_t> costs_in_bytes(const Program& program) {
    Equations equations(program.code.size());
    add_silent(program, equations);
    for (int32_t pc = 0; pc < int32_t(program.code.size()); pc++) {
        if (program.code[pc].op == BYTES) equations.add_edge(pc, 1, program.code[pc].y);
    }
    return equations.solved();
}

// Which instructions lead to each other within their rule: Tarjan's components, without recursion.
std::vector<int32_t> components(const Program& program) {
    int32_t count = int32_t(program.code.size()), next = 0, num_components = 0;
    std::vector<int32_t> number(size_t(count), -1), low(size_t(count), 0), component(size_t(count), -1), stack;
    std::vector<std::pair<int32_t, int32_t>> path;
    auto num_targets = [&](int32_t pc) {
        const Instruction& i = program.code[pc];
        return i.op == SPLIT ? i.y : i.op == BYTES || i.op == CALL || i.op == COUNT ? 1 : 0;
    };
    auto target = [&](int32_t pc, int32_t at) {
        const Instruction& i = program.code[pc];
        return i.op == SPLIT ? program.targets[i.x + at] : i.y;
    };
    for (int32_t root = 0; root < count; root++) {
        if (number[root] >= 0) continue;
        path.emplace_back(root, 0);
        while (!path.empty()) {
            int32_t pc = path.back().first, at = path.back().second++;
            if (at == 0) {
                number[pc] = low[pc] = next++;
                stack.push_back(pc);
            }
            if (at < num_targets(pc)) {
                int32_t to = target(pc, at);
                if (number[to] < 0) {
                    path.emplace_back(to, 0);
                } else if (component[to] < 0) {
                    low[pc] = std::min(low[pc], number[to]);
                }
                continue;
            }
            path.pop_back();
            if (!path.empty()) low[path.back().first] = std::min(low[path.back().first], low[pc]);
            if (low[pc] != number[pc]) continue;
            for (int32_t member = -1; member != pc;) {
                member = stack.back();
                stack.pop_back();
                component[member] = num_components;
            }
            num_components++;
        }
    }
    return component;
}

// Sets of nodes of the trie, each of which leads on: by which bytes they were come to tells them apart. What is behind
// a byte is the same for all nodes of a set, so they are looked at once.
class NodeSets {
public:
    NodeSets(const Trie& trie, const std::vector<ByteSet>& sets) : trie_(trie), sets_(sets) {}

    struct Step {
        bool is_token;  // a token ends with the byte
        int32_t nodes;  // the set that is led to, or -1
    };

    // From a set of nodes, of which 0 is the root, by a byte of a set.
    Step after(int32_t nodes, int32_t bytes) {
        int32_t& number = numbers_.at(nodes, bytes);
        if (number >= 0) return steps_[size_t(number)];
        number = int32_t(steps_.size());
        Step step{false, int32_t(from_.size()) - 1};
        auto take = [&](int32_t node) {
            step.is_token |= trie_.token[node] >= 0;
            const bool leads_on = trie_.end[node] > node + 1;
            if (leads_on && nodes_.size() < size_t(from_.back()) + MAX_WALK) nodes_.push_back(node);
        };
        num_looked_at += from_[size_t(nodes) + 1] - from_[size_t(nodes)];
        for (int32_t at = from_[size_t(nodes)]; at < from_[size_t(nodes) + 1]; at++) {
            trie_.each_child(nodes_[size_t(at)], sets_[size_t(bytes)], take);
        }
        if (int32_t(nodes_.size()) > from_.back()) {
            from_.push_back(int32_t(nodes_.size()));
        } else {
            step.nodes = -1;
        }
        steps_.push_back(step);
        return step;
    }

    int64_t num_looked_at = 0;  // nodes so far

private:
    const Trie& trie_;
    const std::vector<ByteSet>& sets_;
    std::vector<int32_t> nodes_{0}, from_{0, 1};  // the nodes of each set, one set behind the other
    PairNumbers numbers_;                         // of a set of nodes and a set of bytes: a step
    std::vector<Step> steps_;
};

// The tokens that may come at an instruction, as far as they do not go round in circles: they leave what leads to
// itself, or come nearer to its end.
class Walk {
public:
    Walk(const Program& program, const Trie& trie, const std::vector<int32_t>& bytes,
         const std::vector<int32_t>& component)
        : program_(program),
          nodes_(trie, program.sets),
          bytes_(bytes),
          component_(component),
          seen_(program.code.size(), -1),
          marks_(program.code.size(), 0) {}

    void add_ways(int32_t pc, Equations& equations) {
        frames_.clear();
        places_.clear();
        frame_ids_.clear();
        ways_.clear();
        places_.push_back({0, pc, -1});
        const int64_t most = nodes_.num_looked_at + MAX_WALK;
        for (size_t at = 0; at < places_.size() && nodes_.num_looked_at < most; at++) {  // grows
            const Place place = places_[at];
            const Instruction& i = program_.code[place.pc];
            const auto step = nodes_.after(place.nodes, i.x);
            if (step.is_token) add_way(pc, i.y, place.frame, equations);
            if (step.nodes < 0) continue;
            follow(i.y, place.frame);
            for (const auto& [to, frame] : followers_) {
                if (places_.size() < MAX_WALK) places_.push_back({step.nodes, to, frame});
            }
        }
    }

private:
    struct Place {
        int32_t nodes, pc, frame;
    };
    struct Frame {
        int32_t rule, count, ret, below;
    };

    // Finds the instructions in the epsilon closure of an instruction that read a byte.
    void follow(int32_t pc, int32_t frame) {
        followers_.clear();
        if (program_.code[pc].op == BYTES) {  // as most
            followers_.push_back({pc, frame});
            return;
        }
        reached_.clear();
        round_++;
        reach(pc, frame, 0);
    }

    void add_way(int32_t pc, int32_t next, int32_t frame, Equations& equations) {
        if (frame < 0) {  // as most
            if (seen_[size_t(next)] != pc) equations.add_edge(pc, 1, next);
            seen_[size_t(next)] = pc;
            return;
        }
        int32_t cost = 1;
        std::vector<std::pair<int32_t, int32_t>> terms{{next, 1}};
        if (const Rule& rule = program_.rules[frames_[frame].rule]; rule.is_bounded()) {
            const bool is_over = program_.code[next].op == COUNT;
            const int32_t place = program_.places[is_over ? program_.code[next].y : next];
            cost += program_.cost_within(place, rule.most - frames_[frame].count - is_over);
            if (cost >= NEVER) return;
            terms[0].first = frames_[frame].ret;
            frame = frames_[frame].below;
        }
        for (; frame >= 0; frame = frames_[frame].below) {
            const Rule& rule = program_.rules[frames_[frame].rule];
            int32_t rest = rule.least - frames_[frame].count - 1;
            if (rule.body >= 0 && rest > 0) terms.emplace_back(rule.body, rest);
            terms.emplace_back(frames_[frame].ret, 1);
        }
        if (ways_.emplace(cost, terms).second) equations.add(pc, cost, terms.data(), terms.size());
    }

    void reach(int32_t pc, int32_t frame, int depth) {
        if (depth > MAX_SILENT || places_.size() + followers_.size() >= MAX_WALK) return;
        const std::pair<int32_t, int32_t> here{pc, frame};
        if (marks_[size_t(pc)] == round_ && std::find(reached_.begin(), reached_.end(), here) != reached_.end()) return;
        marks_[size_t(pc)] = round_;
        reached_.push_back(here);
        const Instruction& i = program_.code[pc];
        switch (i.op) {
            case BYTES: followers_.push_back(here); return;
            case SPLIT:
                for (int32_t at = i.x; at < i.x + i.y; at++) {
                    int32_t to = program_.targets[at];
                    const bool is_longer = bytes_[to] > bytes_[pc];
                    if (is_longer && (program_.skips[pc] || component_[to] == component_[pc])) continue;
                    reach(to, frame, depth + 1);
                }
                return;
            case CALL: reach(program_.rules[i.x].entry, pushed({i.x, 0, i.y, frame}), depth + 1); return;
            case LOOP:
                if (frame >= 0 && frames_[frame].count < program_.rules[i.x].least) {
                    reach(program_.rules[i.x].body, frame, depth + 1);
                    return;
                }
                [[fallthrough]];
            case RET:
                if (frame < 0) return;  // what follows is not known here
                reach(frames_[frame].ret, frames_[frame].below, depth + 1);
                return;
            case NEXT: {
                if (frame < 0) return;
                Frame again = frames_[frame];
                again.count++;
                reach(program_.rules[i.x].entry, pushed(again), depth + 1);
                return;
            }
            case COUNT: {
                Frame again = frames_[frame];
                if (again.count++ < program_.rules[i.x].most) reach(i.y, pushed(again), depth + 1);
                return;
            }
        }
    }

    int32_t pushed(const Frame& frame) {
        auto key = std::make_tuple(frame.rule, frame.count, frame.ret, frame.below);
        auto [at, is_new] = frame_ids_.try_emplace(key, int32_t(frames_.size()));
        if (is_new) frames_.push_back(frame);
        return at->second;
    }

    const Program& program_;
    NodeSets nodes_;
    const std::vector<int32_t>&bytes_, &component_;
    std::vector<int32_t> seen_;  // by instruction: from which one it is known as the next, without a frame
    std::vector<Place> places_;
    std::vector<Frame> frames_;
    std::vector<std::pair<int32_t, int32_t>> reached_, followers_;  // instructions, and their frames
    std::vector<uint32_t> marks_;  // by instruction: the round in which it was last reached
    uint32_t round_ = 0;
    std::map<std::tuple<int32_t, int32_t, int32_t, int32_t>, int32_t> frame_ids_;
    std::set<std::pair<int32_t, std::vector<std::pair<int32_t, int32_t>>>> ways_;
};

}  // namespace

void find_costs(Program& program, const Trie& trie) {
    const std::vector<int32_t> bytes = costs_in_bytes(program), component = components(program);
    find_rests(program, trie, bytes, component);
    Equations equations(program.code.size());
    add_silent(program, equations);
    Walk walk(program, trie, bytes, component);
    for (int32_t pc = 0; pc < int32_t(program.code.size()); pc++) {
        if (program.code[pc].op != BYTES) continue;
        const int32_t place = program.place_of(pc);
        if (place < 0) {
            walk.add_ways(pc, equations);
        } else if (program.from[place] < program.from[place + 1]) {
            equations.add(pc, program.rests[program.from[place]].tokens, {});
        }
    }
    program.cost = equations.solved();
    // Empty the instructions from which no text leads to the end.
    for (int32_t pc = 0; pc < int32_t(program.code.size()); pc++) {
        if (bytes[pc] >= NEVER) program.code[pc] = {SPLIT, 0, 0};
    }
    if (bytes[program.rules[0].entry] >= NEVER) {
        throw std::invalid_argument(
            "no text at all fits: its parts contradict each other, or ask for more than can be written");
    }
}

}  // namespace tureen
