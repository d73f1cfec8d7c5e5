// Experts: route each token to a few mlps, compute each mlp for all its tokens together, and add up what they give.
#include <cmath>
#include <numeric>

#include "tape_frame.h"

namespace tureen {

namespace {

using Frame = Tape::Frame;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The experts of token m: those with the largest logits, the lower one of equals; their weights are a softmax over all.
void choose(const Experts& experts, const float* logits, int m, Routing& routing) {
    int count = int(experts.each.size()), chosen = experts.num_chosen;
    int* expert = routing.expert.data() + size_t(m) * chosen;
    float* weight = routing.weight.data() + size_t(m) * chosen;
    float largest = *std::max_element(logits, logits + count), sum = 0;
    for (int e = 0; e < count; e++) sum += std::exp(logits[e] - largest);
    std::vector<bool> is_chosen(count);
    for (int k = 0; k < chosen; k++) {
        int best = -1;
        for (int e = 0; e < count; e++)
            if (!is_chosen[e] && (best < 0 || logits[e] > logits[best])) best = e;
        is_chosen[best] = true;
    }
    float total = 0;
    for (int e = 0, k = 0; e < count; e++) {
        if (!is_chosen[e]) continue;
        expert[k] = e;
        weight[k] = std::exp(logits[e] - largest) / sum;
        total += weight[k++];
    }
    if (experts.is_normalised)
        for (int k = 0; k < chosen; k++) weight[k] /= total;
}

// Route token m: its experts, and how much of the shared one it gets.
void route(Frame& frame, int thread, const Experts& experts, const View& inputs, int m) {
    const LinearKernels& linear = *frame.kernels.linear;
    Routing& routing = frame.buffers.routing;
    float* logits = frame.buffers.scratch[thread].data();
    auto multiply_one = [&](const Matrix& w, float* out) {
        linear.multiply(w, inputs.of(w), m, m + 1, 0, w.tiles, out - size_t(m) * w.rows, w.rows, false, nullptr);
    };
    multiply_one(experts.router->matrix, logits);
    choose(experts, logits, m, routing);
    if (experts.shared.empty()) return;
    multiply_one(experts.shared_gate->matrix, logits);
    routing.shared_weight[m] = sigmoid(logits[0]);
}

// Give every token its places, by a counting sort.
void settle(Routing& routing, int tokens, int chosen, int count) {
    routing.first.assign(count + 1, 0);
    for (int i = 0; i < tokens * chosen; i++) routing.first[routing.expert[i] + 1]++;
    routing.active.clear();
    for (int e = 0; e < count; e++)
        if (routing.first[e + 1] > 0) routing.active.push_back(e);
    std::partial_sum(routing.first.begin(), routing.first.end(), routing.first.begin());
    std::vector<int> next(routing.first.begin(), routing.first.end() - 1);
    for (int i = 0; i < tokens * chosen; i++) {
        int place = next[routing.expert[i]]++;
        routing.place[i] = place;
        routing.token[place] = i / chosen;
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
    for (Inputs kind : kinds_of({expert.gate.parts[0], expert.up.parts[0]})) {
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
    const std::vector<int>& active = frame.buffers.routing.active;
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
    int count = int(experts->each.size()), chosen = experts->num_chosen;
    require(count > 0 && chosen > 0 && chosen <= count, "a token uses 1 to all of the experts");
    require(experts->router->matrix.rows == count && experts->router->matrix.cols == hidden_,
            "the router has another shape than the experts");
    Matrices into_experts{experts->router}, gate_up, into_down;
    for (GatedLinear& one : experts->each) {
        prepare("", one);
        require(one.gate.rows() == experts->each[0].gate.rows(), "experts differ in shape");
        gate_up.insert(gate_up.end(), {one.gate.parts[0], one.up.parts[0]});
        into_down.push_back(one.down.parts[0]);
    }
    into_experts.insert(into_experts.end(), gate_up.begin(), gate_up.end());
    InputSet* into_shared_down = nullptr;
    for (GatedLinear& one : experts->shared) {
        require(experts->shared_gate->matrix.rows == 1 && experts->shared_gate->matrix.cols == hidden_,
                "the gate of the shared expert is one row");
        prepare(module + ".shared_expert", one);
        into_experts.insert(into_experts.end(), {experts->shared_gate, one.gate.parts[0], one.up.parts[0]});
        into_shared_down = &inputs_for(one.down.parts);
    }
    InputSet& into = inputs_for(into_experts);
    buffers_->inputs.emplace_back(new InputSet(experts->each[0].down.cols(), kinds_of(into_down), pool_->threads()));
    InputSet& down = *buffers_->inputs.back();  // its own: the other inputs are still needed when it is filled
    down.copies = chosen;
    buffers_->num_places = std::max(buffers_->num_places, chosen);
    may_gather(gate_up);
    int first = num_counters_, inner = experts->each[0].gate.rows();
    num_counters_ += 10;
    size_t place = expert_counts_.size();
    expert_counts_.emplace_back(count, 0);
    body_.push_back([=, &into, &down](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        Routing& routing = b.routing;
        int rows = frame.tokens, places = rows * chosen;
        const Additions* added = experts->shared.empty() ? nullptr : experts->shared[0].gate.additions.get();
        View inputs = make_inputs(frame, thread, first, into, rows, added, [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        frame.deal(first + 1, rows, [&](int m) { route(frame, thread, *experts, inputs, m); });
        frame.pool.barrier();
        frame.deal(first + 2, 1, [&](int) {
            settle(routing, rows, chosen, count);
            for (int e = 0; e < count && counts_experts_; e++)
                expert_counts_[place][e] += routing.first[e + 1] - routing.first[e];
        });
        frame.pool.barrier();
        deal_experts(frame, first + 3, ceil_div(inner, TILE), [&](int e, int begin, int end) {
            int from = routing.first[e], size = routing.first[e + 1] - from;
            View own = gathered(inputs, b.gathered[thread], experts->each[e], routing.token.data() + from, size);
            gated(frame, thread, experts->each[e], own, size, begin, end, b.inner.data() + size_t(from) * inner);
        });
        frame.pool.barrier();
        View into_down = make_inputs(frame, thread, first + 4, down, places, nullptr,
                                     [&](int m, float*) { return b.inner.data() + size_t(m) * inner; });
        deal_experts(frame, first + 5, ceil_div(hidden_, TILE), [&](int e, int begin, int end) {
            const Matrix& w = experts->each[e].down.parts[0]->matrix;
            frame.kernels.linear->multiply(w, into_down.of(w), routing.first[e], routing.first[e + 1], begin, end,
                                           b.given.data(), hidden_, false, nullptr);
        });
        frame.pool.barrier();
        for (const GatedLinear& one : experts->shared) {
            int wide = one.gate.rows();
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
            float* x = b.x.data() + size_t(m) * hidden_;
            for (int i = m * chosen; i < (m + 1) * chosen; i++)
                frame.kernels.rows->add(b.given.data() + size_t(routing.place[i]) * hidden_, hidden_,
                                        routing.weight[i] * scale, x);
            if (!experts->shared.empty())
                frame.kernels.rows->add(b.branch.data() + size_t(m) * hidden_, hidden_,
                                        routing.shared_weight[m] * scale, x);
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
