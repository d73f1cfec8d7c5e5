// Experts: route each token to a few mlps, compute each mlp for all its tokens together, and add up what they give.
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "tape_frame.h"

namespace tureen {

namespace {

using Frame = Tape::Frame;

// Mark the `count` largest of the values that are not marked yet, the lower one of equals.
void mark_largest(const Floats& values, int begin, int end, int count, std::vector<bool>& is_marked) {
    for (int k = 0; k < count; k++) {
        int best = -1;
        for (int i = begin; i < end; i++)
            if (!is_marked[i] && (best < 0 || values[i] > values[best])) best = i;
        if (best >= 0) is_marked[best] = true;
    }
}

// Exclude all but the best groups (DeepSeek-V2, arXiv:2405.04434).
void exclude_groups(const Routing& routing, Floats& ranked) {
    int groups = routing.num_groups, size = int(ranked.size()) / groups;
    Floats sums(groups);
    for (int g = 0; g < groups; g++) {
        Floats own(ranked.begin() + g * size, ranked.begin() + (g + 1) * size);
        auto end = own.begin() + std::min(routing.group_top_k, size);
        std::partial_sort(own.begin(), end, own.end(), std::greater<float>());
        sums[g] = std::accumulate(own.begin(), end, 0.0f);
    }
    std::vector<bool> is_kept(groups);
    mark_largest(sums, 0, groups, routing.chosen_groups, is_kept);
    for (int e = 0; e < int(ranked.size()); e++)
        if (!is_kept[e / size]) ranked[e] = -std::numeric_limits<float>::infinity();
}

// Each of the `count` best experts in turn, the first removed for the second: its weight is a softmax over those whose
// logits are near enough to it (Liu et al. 2024, arXiv:2409.12136).
void mix_sparsely(const Routing& routing, const float* logits, int count, int* expert, float* weight) {
    Floats left(logits, logits + count);
    for (int k = 0; k < routing.num_chosen; k++) {
        int best = int(std::max_element(left.begin(), left.end()) - left.begin());
        float largest = left[best], sum = 0;
        for (int e = 0; e < count; e++) {
            float scale = std::max(std::fabs(logits[e]), largest);
            if ((largest - logits[e]) / scale <= 2 * routing.jitter) sum += std::exp(left[e] - largest);
        }
        expert[k] = best;
        weight[k] = 1 / sum;
        left[best] = -std::numeric_limits<float>::infinity();
    }
}

// The experts of token m, in ascending order, and their weights: logits [experts] become scores.
void choose(const Routing& routing, float* logits, int count, int m, Routes& routes) {
    int chosen = routing.num_chosen;
    int* expert = routes.expert.data() + size_t(m) * chosen;
    float* weight = routes.weight.data() + size_t(m) * chosen;
    if (routing.score == Score::SPARSE_MIXER) {
        mix_sparsely(routing, logits, count, expert, weight);
        if (chosen == 2 && expert[0] > expert[1]) {
            std::swap(expert[0], expert[1]);
            std::swap(weight[0], weight[1]);
        }
        return;
    }
    Floats ranked(logits, logits + count);
    if (routing.score == Score::SIGMOID) {
        for (int e = 0; e < count; e++) logits[e] = sigmoid(logits[e]);
    } else {
        float largest = *std::max_element(logits, logits + count), sum = 0;
        for (int e = 0; e < count; e++) sum += std::exp(logits[e] - largest);
        for (int e = 0; e < count; e++) logits[e] = std::exp(logits[e] - largest) / sum;
    }
    for (size_t e = 0; e < routing.correction.size(); e++) ranked[e] = logits[e] + routing.correction[e];
    if (routing.num_groups > 1) exclude_groups(routing, ranked);
    std::vector<bool> is_chosen(count);
    mark_largest(ranked, 0, count, chosen, is_chosen);
    float total = 0;
    for (int e = 0, k = 0; e < count; e++) {
        if (!is_chosen[e]) continue;
        expert[k] = e;
        weight[k] = logits[e];
        total += weight[k++];
    }
    for (int k = 0; k < chosen && routing.is_normalised; k++) weight[k] /= total;
    for (int k = 0; k < chosen && routing.factor != 1.0f; k++) weight[k] *= routing.factor;
    for (int k = 0; k < chosen && !routing.scales.empty(); k++) weight[k] *= routing.scales[expert[k]];
}

// Route token m: its experts, and how much of the shared one it gets. own: the inputs of a
// router that reads other inputs than the experts; null = the same.
void route(Frame& frame, int thread, const Experts& experts, const View& inputs, InputSet* own, int m) {
    const LinearKernels& linear = *frame.kernels.linear;
    Routes& routes = frame.buffers.routes;
    float* logits = frame.buffers.scratch[thread].data();
    auto multiply_one = [&](const Matrix& w, float* out) {
        linear.multiply(w, inputs.of(w), m, m + 1, 0, w.tiles, out - size_t(m) * w.rows, w.rows, false, nullptr);
    };
    if (own == nullptr) {
        multiply_one(experts.router->matrix, logits);
    } else {
        const Matrix& w = experts.router->matrix;
        const Activations& row = own->by_thread[thread][0].view(1);
        normalise(frame.kernels, experts.router_norm, frame.buffers.x.data() + size_t(m) * w.cols, w.cols, logits);
        frame.kernels.rows->quantize(logits, w.cols, row, 0);
        linear.multiply(w, row, 0, 1, 0, w.tiles, logits, w.rows, false, nullptr);
    }
    for (size_t e = 0; e < experts.router_bias.size(); e++) logits[e] += experts.router_bias[e];
    choose(experts.routing, logits, int(experts.each.size()), m, routes);
    routes.shared_weight[m] = 1.0f;
    if (experts.shared_gate == nullptr) return;
    multiply_one(experts.shared_gate->matrix, logits);
    routes.shared_weight[m] = sigmoid(logits[0]);
}

// Give every token its places, by a counting sort.
void settle(Routes& routes, int tokens, int chosen, int count) {
    routes.first.assign(count + 1, 0);
    for (int i = 0; i < tokens * chosen; i++) routes.first[routes.expert[i] + 1]++;
    routes.active.clear();
    for (int e = 0; e < count; e++)
        if (routes.first[e + 1] > 0) routes.active.push_back(e);
    std::partial_sum(routes.first.begin(), routes.first.end(), routes.first.begin());
    std::vector<int> next(routes.first.begin(), routes.first.end() - 1);
    for (int i = 0; i < tokens * chosen; i++) {
        int place = next[routes.expert[i]]++;
        routes.place[i] = place;
        routes.token[place] = i / chosen;
    }
}

void copy_rows(const Activations& from, const int* tokens, const Activations& to) {
    size_t stride = size_t(from.stride) * size_t(input_rows(from.kind));
    auto copy = [&](auto* source, auto* target, size_t width) {
        for (int m = 0; m < to.rows; m++)
            std::copy_n(source + size_t(tokens[m]) * width, width, target + size_t(m) * width);
    };
    if (from.kind == Inputs::F32) {
        copy(from.f32, to.f32, stride);
    } else if (from.kind == Inputs::BF16) {
        copy(from.bf16, to.bf16, stride);
    } else {
        copy(from.q, to.q, stride);
        copy(from.scale, to.scale, stride / GROUP);
        copy(from.scaled_sum, to.scaled_sum, stride / GROUP);
        copy(from.sum, to.sum, stride / GROUP);
        copy(from.half_sum, to.half_sum, stride / (GROUP / 2));
    }
}

// Rows of some tokens, one after the other, in the forms that an expert asks for.
View gathered(const View& inputs, const std::vector<ActivationBuffer>& own, const GatedLinear& expert,
              const int* tokens, int count) {
    View view;
    for (Inputs kind : kinds_of(first_parts(expert))) {
        int place = 0;
        while (own[place].view(0).kind != kind) place++;
        view.kinds[view.count] = own[place].view(count);
        int from = 0;
        while (inputs.kinds[from].kind != kind) from++;
        copy_rows(inputs.kinds[from], tokens, view.kinds[view.count++]);
    }
    return view;
}

// Deal out the tiles of all active experts: body(expert, begin, end).
template <class Body>
void deal_experts(Frame& frame, int counter, int tiles, const Body& body) {
    const std::vector<int>& active = frame.buffers.routes.active;
    int shares = std::min(ceil_div(tiles, PANEL_TILES), std::max(1, frame.threads * SHARES / int(active.size())));
    frame.deal(counter, int(active.size()) * shares, [&](int piece) {
        int share = piece % shares;
        int begin = int(int64_t(tiles) * share / shares), end = int(int64_t(tiles) * (share + 1) / shares);
        body(active[piece / shares], begin, end);
    });
}

}  // namespace

// Each thread will gather rows of such inputs.
void Tape::may_gather(const Matrices& parts) {
    buffers_->gathered.resize(pool_->threads());
    for (Inputs kind : kinds_of(parts))
        for (auto& own : buffers_->gathered) {
            auto same = [&](const ActivationBuffer& buffer) { return buffer.view(0).kind == kind; };
            if (std::none_of(own.begin(), own.end(), same)) own.emplace_back(kind, hidden_);
        }
}

void Tape::experts(const std::string& module, Norm norm, Experts given, float scale) {
    auto experts = std::make_shared<Experts>(std::move(given));
    bool adds_held = std::exchange(is_held_, false);
    require(adds_held == !experts->post.weight.empty() && adds_held == !experts->own_post.weight.empty(),
            "experts beside an mlp, and no others, have norms after them");
    require(!adds_held || experts->shared.empty(), "experts beside an mlp have no shared one");
    const Routing& routing = experts->routing;
    int count = int(experts->each.size()), chosen = routing.num_chosen;
    require(count > 0 && chosen > 0 && chosen <= count, "a token uses 1 to all of the experts");
    require(experts->router_bias.empty() || int(experts->router_bias.size()) == count,
            "the router's bias has a number an expert");
    require(routing.score != Score::SPARSE_MIXER || chosen == 2, "a sparse mixer chooses two experts");
    require(routing.correction.empty() || int(routing.correction.size()) == count,
            "a correction has a number an expert");
    require(routing.scales.empty() || int(routing.scales.size()) == count, "each expert has one scale");
    require(routing.group_top_k > 0, "a group's score is the sum of one value or more");
    require(routing.num_groups > 0 && count % routing.num_groups == 0 && routing.chosen_groups > 0 &&
                routing.chosen_groups <= routing.num_groups &&
                count / routing.num_groups * routing.chosen_groups >= chosen,
            "groups of experts are of one size, and those chosen have enough experts");
    require(experts->router->matrix.rows == count && experts->router->matrix.cols == hidden_,
            "the router has another shape than the experts");
    bool reads_own = !experts->router_norm.weight.empty();
    Matrices into_experts, gate_up, into_down;
    if (!reads_own) into_experts.push_back(experts->router);
    for (GatedLinear& one : experts->each) {
        prepare("", one);
        require(one.up.rows() == experts->each[0].up.rows(), "experts differ in shape");
        for (const auto& part : first_parts(one)) gate_up.push_back(part);
        into_down.push_back(one.down.parts[0]);
    }
    into_experts.insert(into_experts.end(), gate_up.begin(), gate_up.end());
    InputSet* into_shared_down = nullptr;
    for (GatedLinear& one : experts->shared) {
        prepare(module + ".shared_expert", one);
        for (const auto& part : first_parts(one)) into_experts.push_back(part);
        if (experts->shared_gate != nullptr) {
            require(experts->shared_gate->matrix.rows == 1 && experts->shared_gate->matrix.cols == hidden_,
                    "the gate of the shared expert is one row");
            into_experts.push_back(experts->shared_gate);
        }
        into_shared_down = &inputs_for(one.down.parts);
    }
    InputSet& into = inputs_for(into_experts);
    buffers_->inputs.emplace_back(new InputSet(experts->each[0].down.cols(), kinds_of(into_down), pool_->threads()));
    InputSet& down = *buffers_->inputs.back();  // its own: the other inputs are still needed when it is filled
    down.copies = chosen;
    InputSet* into_router = nullptr;
    if (reads_own) {  // a set of its own, like `down`
        buffers_->inputs.emplace_back(new InputSet(hidden_, kinds_of({experts->router}), pool_->threads()));
        into_router = buffers_->inputs.back().get();
    }
    buffers_->num_places = std::max(buffers_->num_places, chosen);
    may_gather(gate_up);
    int first = num_counters_, inner = experts->each[0].up.rows();
    num_counters_ += 10;
    size_t place = expert_counts_.size();
    expert_counts_.emplace_back(count, 0);
    body_.push_back([=, &into, &down](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        Routes& routes = b.routes;
        int rows = frame.tokens, places = rows * chosen;
        const Additions* added = experts->shared.empty() ? nullptr : experts->shared[0].up.additions.get();
        View inputs = make_inputs(frame, thread, first, into, rows, added, [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        frame.deal(first + 1, rows, [&](int m) { route(frame, thread, *experts, inputs, into_router, m); });
        frame.pool.barrier();
        frame.deal(first + 2, 1, [&](int) {
            settle(routes, rows, chosen, count);
            for (int e = 0; e < count && counts_experts_; e++)
                expert_counts_[place][e] += routes.first[e + 1] - routes.first[e];
        });
        frame.pool.barrier();
        deal_experts(frame, first + 3, ceil_div(inner, TILE), [&](int e, int begin, int end) {
            int from = routes.first[e], size = routes.first[e + 1] - from;
            View own = gathered(inputs, b.gathered[thread], experts->each[e], routes.token.data() + from, size);
            gated(frame, thread, experts->each[e], own, size, begin, end, b.inner.data() + size_t(from) * inner);
        });
        frame.pool.barrier();
        View into_down = make_inputs(frame, thread, first + 4, down, places, nullptr,
                                     [&](int m, float*) { return b.inner.data() + size_t(m) * inner; });
        deal_experts(frame, first + 5, ceil_div(hidden_, TILE), [&](int e, int begin, int end) {
            const Linear& last = experts->each[e].down;
            const Matrix& w = last.parts[0]->matrix;
            frame.kernels.linear->multiply(w, into_down.of(w), routes.first[e], routes.first[e + 1], begin, end,
                                           b.given.data(), hidden_, false,
                                           last.bias.empty() ? nullptr : last.bias.data());
        });
        frame.pool.barrier();
        for (const GatedLinear& one : experts->shared) {
            int wide = one.up.rows();
            deal_tiles(frame, first + 6, rows, ceil_div(wide, TILE), [&](int begin, int end) {
                gated(frame, thread, one, inputs, rows, begin, end, b.inner.data());
            });
            frame.pool.barrier();
            View last = make_inputs(frame, thread, first + 7, *into_shared_down, rows, one.down.additions.get(),
                                    [&](int m, float*) { return b.inner.data() + size_t(m) * wide; });
            multiply(frame, first + 8, one.down, last, rows, b.branch.data(), false);
            frame.pool.barrier();
        }
        frame.deal(first + 9, rows, [&](int m) {
            float* x = (adds_held ? b.branch : b.x).data() + size_t(m) * hidden_;
            if (adds_held) std::fill_n(x, hidden_, 0.0f);
            for (int i = m * chosen; i < (m + 1) * chosen; i++)
                frame.kernels.rows->add(b.given.data() + size_t(routes.place[i]) * hidden_, hidden_,
                                        routes.weight[i] * (adds_held ? 1.0f : scale), x);
            if (!experts->shared.empty())
                frame.kernels.rows->add(b.branch.data() + size_t(m) * hidden_, hidden_, routes.shared_weight[m] * scale,
                                        x);
            if (!adds_held) return;
            normalise(frame.kernels, experts->own_post, x, hidden_, x);
            frame.kernels.rows->add(b.held.data() + size_t(m) * hidden_, hidden_, 1.0f, x);
            normalise(frame.kernels, experts->post, x, hidden_, x);
            frame.kernels.rows->add(x, hidden_, scale, b.x.data() + size_t(m) * hidden_);
        });
        frame.pool.barrier();
    });
}

std::vector<std::vector<int64_t>> Tape::take_expert_counts() {
    auto taken = expert_counts_;
    for (auto& counts : expert_counts_) std::fill(counts.begin(), counts.end(), 0);
    return taken;
}

}  // namespace tureen
