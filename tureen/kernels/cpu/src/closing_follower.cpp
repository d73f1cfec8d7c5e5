#include <algorithm>

#include "closing_automaton.h"
#include "closing_place.h"

namespace tureen {

namespace {

constexpr size_t MAX_STATES = 20000, MAX_STATES_OF_A_WALK = 200000;
constexpr int64_t MAX_CONFIGURATIONS = 1000000;  // and what is as large: some 40 MB
constexpr int64_t MAX_WORK = 20000000;           // of one call: configurations that are looked at; some 50 ms
constexpr size_t MAX_REACHED = 200000;
constexpr int MAX_OPENED = 4000;
constexpr size_t FEW_REACHED = 256;  // the first size of the table of reached configurations

}  // namespace

size_t Follower::Hash::operator()(const std::vector<int32_t>& key) const {
    uint64_t hash = 1469598103934665603u;
    for (int32_t part : key) hash = (hash ^ uint32_t(part)) * 1099511628211u;
    return size_t(hash ^ (hash >> 29));
}

Follower::Follower(Program program, std::shared_ptr<const Trie> trie)
    : program_(std::move(program)), trie_(std::move(trie)), classes_(classes_of(program_.sets)) {
    num_classes_ = *std::max_element(classes_.begin(), classes_.end()) + 1;
    members_.resize(size_t(num_classes_));
    for (int byte = 0; byte < 256; byte++) members_[classes_[byte]] = uint8_t(byte);
    for (size_t place = 0; place + 1 < program_.from.size(); place++) {
        if (program_.from[place] < program_.from[place + 1]) {
            roomy_ = std::max(roomy_, program_.rests[size_t(program_.from[place])].items);
        }
    }
    roomy_ += trie_->longest;
    for (int32_t items : program_.fewest) fewest_ = items < NEVER ? std::max(fewest_, items) : fewest_;
    heads_.resize(FEW_REACHED);
    last_opened_.resize(program_.rules.size());
    read_characters();
    reset();
    std::lock_guard<std::mutex> held(trie_->kept->lock);
    trie_->kept->followers.push_back(this);
}

Follower::~Follower() {
    std::lock_guard<std::mutex> held(trie_->kept->lock);
    std::vector<Follower*>& all = trie_->kept->followers;
    all.erase(std::find(all.begin(), all.end(), this));
    trie_->kept->total -= counted_;
}

void Follower::reset() {
    states_.clear();
    costs_.clear();
    moves_.clear();
    accepts_.clear();
    state_ids_.clear();
    frame_ids_.clear();
    frames_.clear();
    known_.clear();
    after_plain_.clear();
    uncounted_.clear();
    plain_loops_.clear();
    plain_items_.clear();
    next_.clear();
    num_configurations_ = 0;
    settled_states_ = 0;
    settled_configurations_ = 0;
    frames_.push_back({0, 0, 0, {}});
    starts_.clear();
    for (int32_t start = 0; start < program_.num_starts; start++) {
        const int32_t state = closed({{program_.rules[size_t(start)].entry, 0, 0}});
        starts_.push_back(state < 0 ? state_of({}, false) : state);
    }
}

void Follower::tidy() {
    work_ = 0;
    used_ = ++trie_->kept->clock;
    const bool has_many = states_.size() >= MAX_STATES + settled_states_ ||
                          num_configurations_ >= MAX_CONFIGURATIONS + settled_configurations_;
    if (has_many || is_full_) forget();
    count_kept();
    if (trie_->kept->total > trie_->kept->most) make_room();
}

void Follower::forget() {
    generation++;
    work_ = 0;
    is_full_ = false;
    reset();
    count_kept();
}

void Follower::count_kept() {
    trie_->kept->total += num_configurations_ - counted_;
    counted_ = num_configurations_;
}

// Clears other languages, the least recently used first, except those in use.
void Follower::make_room() {
    Kept& kept = *trie_->kept;
    std::lock_guard<std::mutex> held(kept.lock);
    std::vector<std::pair<int64_t, Follower*>> others;
    for (Follower* each : kept.followers) others.emplace_back(each->used_, each);
    std::sort(others.begin(), others.end());
    for (auto [used, other] : others) {
        if (kept.total <= kept.most / 2) return;
        if (other == this) continue;
        const std::unique_lock<std::mutex> used_by_none(other->lock, std::try_to_lock);
        if (used_by_none.owns_lock()) other->forget();
    }
}

// Raises the thresholds of `tidy` by what a replayed output needs, so that it is not replayed again at once.
void Follower::settle() {
    settled_states_ = states_.size();
    settled_configurations_ = num_configurations_;
}

// Whether thresholds that are raised now stay below the bounds at which `state_of` fails.
bool Follower::may_settle() const {
    return states_.size() <= MAX_STATES_OF_A_WALK - 2 * MAX_STATES && num_configurations_ <= 6 * MAX_CONFIGURATIONS;
}

int32_t Follower::after(int32_t state, int32_t token) {
    if (token < 0 || size_t(token) >= trie_->texts.size() || trie_->texts[size_t(token)].empty()) return DEAD;
    for (char byte : trie_->texts[size_t(token)]) {
        if (state < 0) break;
        state = after_byte(state, uint8_t(byte));
    }
    return state;
}

int32_t Follower::move(int32_t state, int32_t cls) {
    int32_t target = after_plain_[size_t(state)];
    if (!is_plain_[size_t(cls)] || target < DEAD) {
        Configurations next;
        for (const Configuration& c : states_[size_t(state)]) {
            const Instruction& i = program_.code[c.pc];
            if (has(program_.sets[i.x], members_[cls])) next.push_back({i.y, c.count, c.frame});
        }
        target = next.empty() ? DEAD : closed(std::move(next));
    }
    return moves_[size_t(state) * num_classes_ + cls] = target;
}

// Returns the state for the epsilon closure of `waiting`.
int32_t Follower::closed(Configurations waiting) {
    opened_.clear();
    reached_.clear();
    round_++;
    bool accepts = false;
    while (!waiting.empty()) {
        Configuration c = waiting.back();
        waiting.pop_back();
        if (reached_.size() > MAX_REACHED) throw TooLarge("it can be matched in too many ways at once");
        close_one(c, waiting, accepts);
    }
    Configurations takers;
    for (const Reached& each : reached_) {
        if (program_.code[size_t(each.what.pc)].op == BYTES) takers.push_back(each.what);
    }
    for (Configuration& c : takers) {
        if (c.frame < 0) c.frame = frame_of(~c.frame, 0);
    }
    std::sort(takers.begin(), takers.end());
    drop_covered_takers(takers);
    if (takers.empty() && !accepts) return DEAD;
    return state_of(std::move(takers), accepts);
}

// Adds a configuration, unless another one covers it. Returns whether it was added. An equal one covers it. If
// `is_counted`, so does one with a lower count that has already reached the rule's minimum.
bool Follower::reach(const Configuration& c, bool is_counted) {
    if (reached_.size() >= heads_.size()) spread_reached();
    Last& head = head_of(c);
    if (head.round != round_) head = {round_, -1};
    const Rule& rule = program_.rules[size_t(rule_of(c.frame))];
    for (int32_t at = head.number; at >= 0; at = reached_[size_t(at)].before) {
        const Configuration& o = reached_[size_t(at)].what;
        spend(1);
        if (o.frame != c.frame || o.pc != c.pc) continue;
        if (o.count == c.count || (is_counted && o.count < c.count && o.count >= rule.least)) return false;
    }
    reached_.push_back({c, head.number});
    head.number = int32_t(reached_.size()) - 1;
    return true;
}

Follower::Last& Follower::head_of(const Configuration& c) {
    const uint64_t hash = (uint64_t(uint32_t(c.pc)) << 32 | uint32_t(c.frame)) * 0x9e3779b97f4a7c15u;
    return heads_[size_t(hash >> 32) & (heads_.size() - 1)];
}

void Follower::spread_reached() {
    heads_.assign(4 * heads_.size(), {});
    for (size_t at = 0; at < reached_.size(); at++) {
        Last& head = head_of(reached_[at].what);
        reached_[at].before = head.round == round_ ? head.number : -1;
        head = {round_, int32_t(at)};
    }
}

void Follower::close_one(Configuration c, Configurations& waiting, bool& accepts) {
    const Instruction& i = program_.code[c.pc];
    const int32_t place = program_.place_of(c.pc);
    spend(1);
    if (place >= 0 && c.count + program_.fewest[size_t(place)] > program_.rules[rule_of(c.frame)].most) return;
    if (!reach(c, i.op == BYTES || i.op == LOOP)) return;
    switch (i.op) {
        case SPLIT:
            spend(i.y);
            for (int32_t at = i.x; at < i.x + i.y; at++) waiting.push_back({program_.targets[at], c.count, c.frame});
            break;
        case CALL: call(c, i, waiting); break;
        case RET: end_rule(c.frame, waiting, accepts); break;
        case LOOP: {
            const Rule& rule = program_.rules[i.x];
            if (c.count >= rule.least) end_rule(c.frame, waiting, accepts);
            if (rule.most < 0 || c.count < rule.most) waiting.push_back({rule.body, c.count, c.frame});
            break;
        }
        case NEXT: {
            const Rule& rule = program_.rules[i.x];
            int32_t count = rule.most < 0 ? std::min(c.count + 1, rule.least) : c.count + 1;
            waiting.push_back({rule.entry, count, c.frame});
            break;
        }
        case COUNT: waiting.push_back({i.y, c.count + 1, c.frame}); break;
        default: break;
    }
}

void Follower::call(const Configuration& c, const Instruction& i, Configurations& waiting) {
    Last& last = last_opened_[size_t(i.x)];
    if (last.round != round_) {
        last = {round_, int32_t(opened_.size())};
        opened_.push_back({i.x, false, {}, UNKNOWN});
        waiting.push_back({program_.rules[i.x].entry, 0, ~last.number});
    }
    const size_t at = size_t(last.number);
    Edge edge{i.y, c.count, c.frame};
    opened_[at].edges.push_back(edge);
    if (opened_[at].is_over) waiting.push_back({edge.pc, edge.count, edge.frame});
}

void Follower::end_rule(int32_t frame, Configurations& waiting, bool& accepts) {
    if (frame == 0) accepts = true;
    if (frame < 0) opened_[size_t(~frame)].is_over = true;
    const std::vector<Edge>& edges = frame < 0 ? opened_[size_t(~frame)].edges : frames_[size_t(frame)].edges;
    spend(int64_t(edges.size()));
    for (const Edge& edge : edges) waiting.push_back({edge.pc, edge.count, edge.frame});
}

void Follower::spend(int64_t work) {
    work_ += work;
    if (work_ > MAX_WORK) throw TooLarge("it takes too long to follow");
}

int32_t Follower::frame_of(int32_t number, int depth) {
    if (depth > MAX_OPENED) {
        throw TooLarge("more than " + std::to_string(MAX_OPENED) +
                       " rules call each other before a character is matched");
    }
    if (opened_[size_t(number)].frame >= 0) return opened_[size_t(number)].frame;
    if (opened_[size_t(number)].frame == DEAD) throw TooLarge("a rule calls itself first");
    opened_[size_t(number)].frame = DEAD;  // under way
    std::vector<Edge> edges;
    for (Edge edge : std::vector<Edge>(opened_[size_t(number)].edges)) {
        if (edge.frame < 0) edge.frame = frame_of(~edge.frame, depth + 1);
        if (edge.frame == 0 || program_.code[size_t(edge.pc)].op != RET) {
            edges.push_back(edge);
            continue;
        }
        const std::vector<Edge>& outer = frames_[size_t(edge.frame)].edges;  // nothing is left to do in that rule
        spend(int64_t(outer.size()));
        edges.insert(edges.end(), outer.begin(), outer.end());
    }
    return opened_[size_t(number)].frame = frame_with(opened_[size_t(number)].rule, std::move(edges));
}

int32_t Follower::frame_with(int32_t rule, std::vector<Edge> edges) {
    std::sort(edges.begin(), edges.end());
    edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
    drop_covered(edges);
    std::vector<int32_t> key{rule};
    int32_t cost = NEVER;
    for (const Edge& edge : edges) {
        key.insert(key.end(), {edge.pc, edge.count, edge.frame});
        cost = std::min(cost, cost_of({edge.pc, edge.count, edge.frame}));
    }
    auto [known, is_new] = frame_ids_.try_emplace(std::move(key), int32_t(frames_.size()));
    const int32_t number = known->second;
    if (!is_new) return number;
    num_configurations_ += int64_t(edges.size());
    frames_.push_back({rule, cost, number, edges});
    for (Edge& edge : edges) edge = {edge.pc, uncounted(edge.count, edge.frame), frames_[size_t(edge.frame)].uncounted};
    if (edges != frames_[size_t(number)].edges) {
        const int32_t same = frame_with(rule, std::move(edges));  // its counts are normal already
        frames_[size_t(number)].uncounted = same;
    }
    return number;
}

int32_t Follower::cost_of(const Configuration& c) const {
    const Frame& frame = frames_[size_t(c.frame)];
    const int32_t place = program_.place_of(c.pc);
    if (place >= 0) {
        return sum_of(program_.cost_within(place, program_.rules[frame.rule].most - c.count), frame.cost);
    }
    return sum_of(int64_t(program_.cost[c.pc]) + program_.more(frame.rule, c.count), frame.cost);
}

bool Follower::is_free(int32_t state) const {
    const Configurations& takers = states_[size_t(state)];
    return std::any_of(takers.begin(), takers.end(), [this](const Configuration& c) { return is_free(c); });
}

int32_t Follower::state_of(Configurations takers, bool accepts) {
    std::sort(takers.begin(), takers.end());
    std::vector<int32_t> key{accepts};
    for (const Configuration& c : takers) key.insert(key.end(), {c.pc, c.count, c.frame});
    if (const auto known = state_ids_.find(key); known != state_ids_.end()) return known->second;
    if (states_.size() >= MAX_STATES_OF_A_WALK || num_configurations_ > 8 * MAX_CONFIGURATIONS) {
        is_full_ = true;  // the next call clears the states
        throw TooLarge("it can go on in too many ways");
    }
    const int32_t number = int32_t(states_.size());
    state_ids_.emplace(std::move(key), number);
    int32_t cost = accepts ? 0 : NEVER;
    for (const Configuration& c : takers) cost = std::min(cost, is_free(c) ? 0 : cost_of(c));
    num_configurations_ += int64_t(takers.size()) + num_classes_ / 8 + 4;
    states_.push_back(std::move(takers));
    costs_.push_back(cost);
    accepts_.push_back(accepts);
    after_plain_.push_back(UNKNOWN);
    uncounted_.push_back(UNKNOWN);
    moves_.insert(moves_.end(), size_t(num_classes_), UNKNOWN);
    return number;
}

void Place::rollback(size_t count) {
    tokens_.resize(tokens_.size() - std::min(count, tokens_.size()));
    if (states_.size() > tokens_.size() + 1) states_.resize(tokens_.size() + 1);
}

int32_t Place::state() {
    Follower& follower = *follower_;
    follower.tidy();
    const bool is_replayed = generation_ != follower.generation;
    if (is_replayed) {
        states_.clear();
        generation_ = follower.generation;
    }
    if (states_.empty()) states_.push_back(follower.start());
    while (states_.size() <= tokens_.size()) {
        follower.begin_work();  // each token stayed within the limit when it was accepted
        states_.push_back(follower.after(states_.back(), tokens_[states_.size() - 1]));
    }
    follower.begin_work();
    if (is_replayed && tokens_.size() > 0) follower.settle();
    return states_.back();
}

bool Place::accept(int32_t token) {
    std::lock_guard<std::mutex> held(follower_->lock);
    const int32_t here = state();
    const int32_t next = here < 0 ? here : follower_->after(here, token);
    if (next < 0) return false;
    tokens_.push_back(token);
    states_.push_back(next);
    return true;
}

void Place::fill(uint32_t* mask) {
    std::lock_guard<std::mutex> held(follower_->lock);
    const int32_t here = state();
    const std::vector<uint32_t>& known = follower_->next(here).mask;
    std::copy(known.begin(), known.end(), mask);
    if (!follower_->accepts(here)) return;
    const std::vector<uint32_t>& ends = follower_->trie().ends;
    for (size_t word = 0; word < ends.size(); word++) mask[word] |= ends[word];
}

std::string Place::forced(size_t most) {
    std::lock_guard<std::mutex> held(follower_->lock);
    std::string text;
    for (int32_t at = state(); text.size() < most && !follower_->accepts(at);) {
        const int32_t byte = follower_->only_byte(at);
        if (byte < 0) break;
        text.push_back(char(byte));
        at = follower_->after_byte(at, uint8_t(byte));
    }
    return text;
}

bool Place::accepts() {
    std::lock_guard<std::mutex> held(follower_->lock);
    return follower_->accepts(state());
}

bool Place::is_free() {
    std::lock_guard<std::mutex> held(follower_->lock);
    const int32_t here = state();
    return here >= 0 && follower_->is_free(here);
}

bool Place::is_over() {
    std::lock_guard<std::mutex> held(follower_->lock);
    const int32_t here = state();
    return follower_->accepts(here) && follower_->is_over(here);
}

int32_t Place::cost() {
    std::lock_guard<std::mutex> held(follower_->lock);
    return follower_->cost(state());
}

size_t Place::num_closing(const std::vector<int32_t>& tokens, int32_t left) {
    std::lock_guard<std::mutex> held(follower_->lock);
    int32_t here = state();
    for (size_t at = 0; at < tokens.size(); at++) {
        here = follower_->after(here, tokens[at]);
        if (here < 0 || int64_t(follower_->cost(here)) > int64_t(left) - int64_t(at) - 1) return at;
    }
    return tokens.size();
}

namespace {

bool is_in_word(uint8_t byte) {
    return byte >= 0x80 || (byte >= '0' && byte <= '9') || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}

bool ends_sentence(const std::string& text) {
    uint8_t last = text.empty() ? 0 : uint8_t(text.back());
    return last == '.' || last == '!' || last == '?' || last == '\n';
}

bool is_in(int32_t token, const std::vector<std::string>& texts) { return token >= 0 && size_t(token) < texts.size(); }

void keep(std::vector<uint32_t>& mask, int32_t token) {
    if (size_t(token) / 32 < mask.size()) mask[size_t(token) / 32] |= uint32_t(1) << (token % 32);
}

// What of a mask is in the other one, or among the ends.
std::vector<uint32_t> common(const uint32_t* mask, const std::vector<uint32_t>& other,
                             const std::vector<uint32_t>& ends) {
    std::vector<uint32_t> both(other.size());
    for (size_t word = 0; word < other.size(); word++) both[word] = mask[word] & (other[word] | ends[word]);
    return both;
}

bool is_any(const std::vector<uint32_t>& mask) {
    return std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; });
}

}  // namespace

Nearness Place::restrict(uint32_t* mask, int32_t left, Zones zones) {
    std::lock_guard<std::mutex> held(follower_->lock);
    Follower& follower = *follower_;
    const std::vector<uint32_t>& ends = follower.trie().ends;
    const size_t num_words = ends.size();
    int32_t here = state();
    if (follower.cost(here) >= NEVER) return AWAY;
    const int32_t cost = follower.cost(here), spare = left - cost;
    if (follower.next(here).is_nearest) return AWAY;
    if (spare > std::max({Follower::FAR, zones.words, zones.sentences})) {
        for (auto [token, target] : follower.next(here).far) {
            if (target > left - 1) mask[size_t(token) / 32] &= ~(uint32_t(1) << (token % 32));
        }
        return AWAY;
    }
    const std::vector<std::string>& texts = follower.trie().texts;
    const bool is_sentence = !tokens_.empty() && is_in(tokens_.back(), texts) && ends_sentence(texts[tokens_.back()]);
    std::vector<uint32_t> closing(num_words, 0), word(num_words, 0), nearer(num_words, 0);
    follower.each_token(here, [&](int32_t token, int32_t target) {
        int32_t then = follower.cost(target);
        if (then > left - 1) return;
        keep(closing, token);
        if (then < cost) keep(nearer, token);
        if (then < cost || is_in_word(uint8_t(texts[token][0]))) keep(word, token);
    });
    open_ = common(mask, closing, ends);
    nearer_ = common(mask, nearer, ends);
    const bool ends_here = is_sentence && spare <= zones.sentences, ends_soon = spare <= zones.words;
    std::vector<uint32_t> kept = !is_any(nearer_) ? open_
                                 : ends_here      ? nearer_
                                 : ends_soon      ? common(mask, word, ends)
                                                  : open_;
    if (follower.is_free(here)) {  // the limit cuts free text: remove only tokens that open what cannot be closed
        if (is_any(open_)) std::copy(open_.begin(), open_.end(), mask);
        return AWAY;
    }
    if (!is_any(kept) || std::equal(kept.begin(), kept.end(), mask)) return AWAY;
    std::copy(kept.begin(), kept.end(), mask);
    return ends_soon && !ends_here && is_any(nearer_) ? AT_A_WORD : NEAR;
}

}  // namespace tureen
