#include "tape.h"

#include <chrono>
#include <cmath>
#include <utility>

#include "tape_frame.h"

namespace tureen {

namespace {

using Frame = Tape::Frame;

constexpr int SCRATCH_FLOATS = 1 << 17;  // of a thread, at least
constexpr int LOOKED_AT = 1 << 16;       // logits computed before the best are looked for: they stay in a cache

// Normalise all heads of a token's queries and keys together, where their norms have that size.
void normalise_together(Frame& frame, const AttentionShape& shape, const Norm& q_norm, const Norm& k_norm, int token) {
    int queries = shape.num_heads * shape.head_dim, keys = shape.num_kv_heads * shape.head_dim;
    float* q = frame.buffers.qkv.data() + size_t(token) * shape.row_width();
    if (int(q_norm.weight.size()) == queries) normalise(frame.kernels, q_norm, q, queries, q);
    if (int(k_norm.weight.size()) == keys) normalise(frame.kernels, k_norm, q + queries, keys, q + queries);
}

// Normalise and rotate a vector of one token's queries and keys; store a key, and its value.
void place(Frame& frame, const AttentionShape& shape, const Norm& q_norm, const Norm& k_norm, const Norm& v_norm,
           const KvLayer& kv, const float* angles, int token, int head) {
    const RowKernels& rows = *frame.kernels.rows;
    int dim = shape.head_dim, half = int(shape.rope.frequencies.size());
    const float* cos = angles + size_t(token) * 2 * half;
    float* heads = frame.buffers.qkv.data() + size_t(token) * shape.row_width();
    bool is_key = head >= shape.num_heads;
    const Norm& norm = is_key ? k_norm : q_norm;
    float* vector = heads + size_t(head) * dim;
    float key[MAX_HEAD_DIM], *value = vector + size_t(shape.num_kv_heads) * dim;
    if (is_key && shape.kv_parts == 1) {  // the vector becomes the value
        std::copy_n(vector, dim, key);
        value = std::exchange(vector, key);
    }
    bool has_norm = int(norm.weight.size()) == dim;
    if (has_norm && !shape.norms_last) normalise(frame.kernels, norm, vector, dim, vector);
    if (half > 0 && shape.rope.is_interleaved) take_pairs_apart(vector, half);
    if (half > 0) rows.rotate(vector, cos, cos + half, 2 * half);
    if (has_norm && shape.norms_last) normalise(frame.kernels, norm, vector, dim, vector);
    const Step& step = frame.step;
    int position = step.positions[token];
    if (spreads_keys(kv)) rows.spread(vector, dim, !is_key);
    if (!is_key) {
        float grown = shape.growth == 0 ? 1.0f : 1 + shape.growth * std::log1p(float(position / shape.growth_every));
        if (grown != 1.0f) std::transform(vector, vector + dim, vector, [&](float value) { return value * grown; });
        return;
    }
    const Span& span = step.spans[step.span_of[token]];
    int kv_head = head - shape.num_heads;
    if (!v_norm.weight.empty()) normalise(frame.kernels, v_norm, value, dim, value);
    if (spreads_values(kv)) rows.spread(value, dim, false);
    int page = step.pages_of(span, kv)[position / kv.page_len];
    frame.kernels.attention->store(kv, page, position % kv.page_len, kv_head, vector, value);
}

// The sum of f(i) for i in [0, count).
template <class Value>
double sum_of(int count, const Value& f) {
    double sums[8] = {}, sum = 0;
    int i = 0;
    for (; i + 8 <= count; i += 8)
        for (int lane = 0; lane < 8; lane++) sums[lane] += f(i + lane);
    for (; i < count; i++) sum += f(i);
    for (double one : sums) sum += one;
    return sum;
}

// activation(gate) * up of token m, with gates cut at `cutoff` deviations above their mean.
const float* cut_gates(Frame& frame, const GatedLinear& mlp, int m, float* to) {
    int inner = mlp.up.rows();
    const float* gate = frame.buffers.gate_up.data() + size_t(m) * 2 * inner;
    double mean = sum_of(inner, [&](int i) { return double(gate[i]); }) / inner;
    double square = sum_of(inner, [&](int i) { return (gate[i] - mean) * (gate[i] - mean); }) / inner;
    float least = float(mean + std::sqrt(square) * mlp.cutoff);
    for (int i = 0; i < inner; i++) to[i] = gate[i] > least ? gate[i] - least : 0.0f;
    activation_of(*frame.kernels.rows, mlp.activation)(to, gate + inner, inner, to);
    return to;
}

}  // namespace

int Linear::rows() const {
    int sum = 0;
    for (const auto& part : parts) sum += part->matrix.rows;
    return sum;
}

Tape::Tape(std::shared_ptr<Pool> pool, std::shared_ptr<KvCache> cache, std::shared_ptr<StatePool> states, int hidden,
           int vocab)
    : pool_(std::move(pool)),
      cache_(std::move(cache)),
      states_(std::move(states)),
      hidden_(hidden),
      vocab_(vocab),
      threads_(pool_->threads()),
      buffers_(new Buffers) {
    // A prompt is the first thing that a client waits for: fewer threads are tried only where there is a cause.
    if (pool_->adapts()) tuners_ = {{threads_, true}, {threads_, true}, {threads_, false}};
    buffers_->scratch.assign(pool_->threads(), Floats(SCRATCH_FLOATS));
    buffers_->own_low.resize(pool_->threads());
}

Tape::~Tape() = default;

void Tape::embed(std::shared_ptr<PackedMatrix> table, float scale) {
    require(table->matrix.cols == hidden_ && table->matrix.rows == vocab_,
            "the embedding has another shape than the tape");
    int counter = num_counters_++;
    body_.push_back([this, table, scale, counter](Frame& frame, int) {
        const Step& step = frame.step;
        frame.deal(counter, frame.tokens, [&](int m) {
            float* x = frame.buffers.x.data() + size_t(m) * hidden_;
            if (step.token_ids[m] >= 0) {
                frame.kernels.linear->unpack_row(table->matrix, step.token_ids[m], x);
                if (scale != 1.0f) std::transform(x, x + hidden_, x, [&](float value) { return value * scale; });
            } else {
                size_t given = std::count(step.token_ids.begin(), step.token_ids.begin() + m, -1);
                std::copy_n(step.embedded.data() + given * step.embedded_width, hidden_, x);
            }
            for (size_t rope = 0; rope < frame.buffers.ropes.size(); rope++) {
                const auto& [frequencies, magnitude, is_interleaved, axes] = frame.buffers.ropes[rope];
                float* cos = frame.buffers.angles[rope].data() + 2 * m * frequencies.size();
                for (size_t i = 0; i < frequencies.size(); i++) {
                    bool has_place = !axes.empty() && !step.places.empty();
                    int32_t place = has_place ? step.places[3 * m + axes[i]] : step.positions[m];
                    float angle = float(place) * frequencies[i];
                    cos[i] = std::cos(angle) * magnitude;
                    cos[i + frequencies.size()] = std::sin(angle) * magnitude;
                }
            }
        });
        frame.pool.barrier();
    });
}

void Tape::attention(const std::string& module, int layer, Norm norm, Linear qkv, Linear gate, Norm q_norm, Norm k_norm,
                     Norm v_norm, AttentionShape shape, Linear out, Norm post, float scale, bool is_held) {
    require(!qkv.parts.empty() && qkv.parts.size() <= 3, "an attention has one to three matrices of its input");
    shape.kv_parts = int(qkv.parts.size()) - 1;
    int width = shape.row_width(), mixed = shape.num_heads * shape.head_dim;
    require(qkv.cols() == hidden_ && qkv.rows() == width, "q, k and v have another shape than the attention");
    require(out.cols() == mixed && out.rows() == hidden_, "the output projection has another shape than the attention");
    require(layer >= 0 && layer < cache_->num_layers(), "the KV cache has no such layer");
    require(cache_->layer(layer).head_dim == shape.head_dim && cache_->layer(layer).kv_heads == shape.num_kv_heads &&
                cache_->layer(layer).has_values() && int(shape.rope.frequencies.size()) * 2 <= shape.head_dim,
            "the KV cache or the rope has another shape than the attention");
    auto fits = [&](const Norm& norm, int heads) {
        int size = int(norm.weight.size());
        return size == 0 || size == shape.head_dim || size == heads * shape.head_dim;
    };
    require(fits(q_norm, shape.num_heads) && fits(k_norm, shape.num_kv_heads) && fits(v_norm, 1),
            "the norms of q, k and v do not fit them");
    require(shape.window > 0 || !cache_->layer(layer).in_window_pages, "a layer without a window keeps all tokens");
    longest_window_ = std::max(longest_window_, shape.window);
    require(shape.sinks.empty() || int(shape.sinks.size()) == shape.num_heads, "each head has one sink");
    is_held_ = is_held;
    buffers_->holds |= is_held;
    bool are_together = !q_norm.weight.empty() && int(q_norm.weight.size()) != shape.head_dim;
    buffers_->qkv_width = std::max(buffers_->qkv_width, width);
    buffers_->mixed_width = std::max(buffers_->mixed_width, mixed);
    size_t rope = rope_of(shape.rope), kind = kind_of(shape);
    KvLayer kv = cache_->layer(layer);
    std::vector<std::string> names{"q_proj", "k_proj", "v_proj"};
    names.resize(qkv.parts.size());
    bool has_gate = !gate.parts.empty();
    require(!has_gate || (gate.cols() == hidden_ && gate.rows() == mixed), "the gate has another shape than the heads");
    auto into_all = std::make_shared<Additions>();
    may_add(module, names, qkv, into_all);
    gate.first_part = int(qkv.parts.size());
    if (has_gate) may_add(module, {"gate_proj"}, gate, into_all);
    may_add(module, {"o_proj"}, out, std::make_shared<Additions>());
    Matrices parts = qkv.parts;
    parts.insert(parts.end(), gate.parts.begin(), gate.parts.end());
    InputSet& into_qkv = inputs_for(parts);
    buffers_->gate_width = std::max(buffers_->gate_width, has_gate ? mixed : 0);
    InputSet& into_out = inputs_for(out.parts);
    int first = num_counters_;
    num_counters_ += 9;
    body_.push_back([=, &into_qkv, &into_out](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        auto row = [&](int m, float* to) { return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to); };
        View inputs = make_inputs(frame, thread, first, into_qkv, rows, qkv.additions.get(), row);
        multiply(frame, first + 1, qkv, inputs, rows, b.qkv.data(), false);
        if (has_gate) multiply(frame, first + 8, gate, inputs, rows, b.gates.data(), false);
        frame.pool.barrier();
        int turned = shape.num_heads + (shape.kv_parts > 0 ? shape.num_kv_heads : 0);
        frame.deal(first + 2, rows, [&](int token) {
            if (are_together) normalise_together(frame, shape, q_norm, k_norm, token);
            for (int head = 0; head < turned; head++)
                place(frame, shape, q_norm, k_norm, v_norm, kv, b.angles[rope].data(), token, head);
        });
        frame.pool.barrier();
        attend(frame, thread, first + 3, shape, kv, b.plans[kind]);
        inputs = make_inputs(frame, thread, first + 5, into_out, rows, out.additions.get(),
                             [&](int m, float* to) -> const float* {
                                 const float* values = b.mixed.data() + size_t(m) * mixed;
                                 if (!has_gate) return values;
                                 const float* gates = b.gates.data() + size_t(m) * mixed;
                                 for (int i = 0; i < mixed; i++) to[i] = values[i] * sigmoid(gates[i]);
                                 return to;
                             });
        add_branch(frame, thread, first + 6, out, inputs, post, scale, is_held ? b.held.data() : b.x.data());
    });
}

void Tape::mlp(const std::string& module, Norm norm, GatedLinear mlp, Norm post, float scale, bool is_held) {
    prepare(module, mlp);
    bool adds_held = std::exchange(is_held_, is_held);
    require(!adds_held || !is_held, "an mlp that adds a result is not held itself");
    buffers_->holds |= is_held;
    int inner = mlp.up.rows();
    InputSet& into_both = inputs_for(first_parts(mlp));
    InputSet& into_down = inputs_for(mlp.down.parts);
    Linear both{first_parts(mlp), {}, mlp.up.additions};
    bool is_plain = mlp.gate.bias.empty() && mlp.up.bias.empty() && mlp.gate_scale == 1.0f;
    require(!mlp.is_cut || (mlp.gate.parts.size() == 1 && is_plain && !adds_held && !is_held),
            "an mlp with cut gates must have one gate matrix, no bias or factor, and no experts beside it");
    if (mlp.is_cut) buffers_->gate_up_width = std::max(buffers_->gate_up_width, 2 * inner);
    int first = num_counters_;
    num_counters_ += 6;
    body_.push_back([=, &into_both, &into_down](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        auto row = [&](int m, float* to) { return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to); };
        View inputs = make_inputs(frame, thread, first, into_both, rows, mlp.up.additions.get(), row);
        if (mlp.is_cut) {
            multiply(frame, first + 1, both, inputs, rows, b.gate_up.data(), false);
            frame.pool.barrier();
            inputs = make_inputs(frame, thread, first + 2, into_down, rows, mlp.down.additions.get(),
                                 [&](int m, float* to) { return cut_gates(frame, mlp, m, to); });
            add_branch(frame, thread, first + 3, mlp.down, inputs, post, scale, b.x.data());
            return;
        }
        deal_tiles(frame, first + 1, rows, ceil_div(inner, TILE),
                   [&](int begin, int end) { gated(frame, thread, mlp, inputs, rows, begin, end, b.inner.data()); });
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 2, into_down, rows, mlp.down.additions.get(),
                             [&](int m, float*) { return b.inner.data() + size_t(m) * inner; });
        add_branch(frame, thread, first + 3, mlp.down, inputs, post, scale, is_held ? b.held.data() : b.x.data());
        if (adds_held) add_held(frame, first + 5, hidden_);
    });
}

void Tape::head(Norm norm, std::shared_ptr<PackedMatrix> matrix, Floats bias, float scale, float softcap) {
    require(matrix->matrix.cols == hidden_ && matrix->matrix.rows == vocab_,
            "the head has another shape than the tape");
    final_norm_ = norm;
    InputSet& into_head = inputs_for({matrix});
    bool is_plain = scale == 1.0f && softcap == 0.0f;
    int first = num_counters_;
    num_counters_ += 2;
    head_.push_back([=, &into_head](Frame& frame, int thread) {
        int rows = int(asked_.size());
        if (rows == 0) return;
        View inputs = make_inputs(frame, thread, first, into_head, rows, nullptr, [&](int m, float* to) {
            return normed(frame, norm, frame.buffers.x.data() + size_t(asked_[m]) * hidden_, hidden_, to);
        });
        const Matrix& w = matrix->matrix;
        int block = std::max(1, LOOKED_AT / (TILE * PANEL_TILES * rows)) * PANEL_TILES;
        deal_tiles(frame, first + 1, rows, w.tiles, [&](int begin, int end) {
            for (int from = begin; from < end; from += block) {
                int to = std::min(from + block, end), column = from * TILE;
                frame.kernels.linear->multiply(w, inputs.of(w), 0, rows, from, to, logits_.data(), vocab_, false,
                                               bias.empty() ? nullptr : bias.data());
                int width = std::min(to * TILE, vocab_) - column;
                for (int m = 0; m < rows && !is_plain; m++)
                    frame.kernels.rows->scale_and_cap(logits_.data() + size_t(m) * vocab_ + column, width, scale,
                                                      softcap);
                best_.look(thread, logits_.data(), vocab_, column, width);
            }
        });
    });
}

void Tape::run(Step step) {
    asked_ = step.sampled;
    step_ = std::move(step);
    replay(true);
}

void Tape::score(const std::vector<int32_t>& tokens) {
    asked_ = tokens;
    replay(false);
}

void Tape::last_hidden(const std::vector<int32_t>& tokens, float* out) {
    for (int token : tokens) {
        const float* x = buffers_->x.data() + size_t(token) * hidden_;
        normalise(kernels(), final_norm_, x, hidden_, out);
        out += hidden_;
    }
}

void Tape::load_adapter(int number, const std::string& module, const float* down, const float* up, int rank, int cols,
                        int rows) {
    auto found = places_.find(module);
    require(found != places_.end(), "adapters cannot change " + module);
    const Place& place = found->second;
    require(place.cols == cols && place.rows == rows, "the adapter has another shape than " + module);
    place.additions->load(adapters_[number], number, place.part, down, up, rank, cols, rows);
}

void Tape::unload_adapter(int number) {
    for (auto& [module, place] : places_) place.additions->unload(number);
    adapters_.erase(number);
}

// The parts of the linear layer may be changed, by these names.
void Tape::may_add(const std::string& module, const std::vector<std::string>& names, Linear& linear,
                   std::shared_ptr<Additions> additions) {
    linear.additions = additions;
    for (size_t part = 0; part < names.size(); part++) {
        const Matrix& w = linear.parts[part]->matrix;
        places_[module + "." + names[part]] = {additions, linear.first_part + int(part), w.rows, w.cols};
    }
}

// Check an mlp's shapes, and make room for what it computes.
void Tape::prepare(const std::string& module, GatedLinear& mlp) {
    int inner = mlp.up.rows();
    require(mlp.gate.parts.size() <= 1 && mlp.up.parts.size() == 1, "gate and up are one matrix each");
    require(mlp.up.cols() == hidden_, "up has another shape than the tape");
    require(mlp.activation != Gate::CLAMPED_SWIGLU || !mlp.gate.parts.empty(), "clamped_swiglu needs a gate");
    require(mlp.gate.parts.empty() || (mlp.gate.cols() == hidden_ && mlp.gate.rows() == inner),
            "gate and up differ in shape");
    require(mlp.down.cols() == inner && mlp.down.rows() == hidden_, "down has another shape than gate and up");
    buffers_->inner_width = std::max(buffers_->inner_width, inner);
    if (module.empty()) return;
    auto into_both = std::make_shared<Additions>();
    mlp.up.first_part = int(mlp.gate.parts.size());
    if (!mlp.gate.parts.empty()) may_add(module, {"gate_proj"}, mlp.gate, into_both);
    may_add(module, {"up_proj"}, mlp.up, into_both);
    may_add(module, {"down_proj"}, mlp.down, std::make_shared<Additions>());
}

InputSet& Tape::inputs_for(const Matrices& parts) {
    std::vector<Inputs> kinds = kinds_of(parts);
    int cols = parts.front()->matrix.cols;
    for (auto& set : buffers_->inputs)
        if (set->cols == cols && set->kinds == kinds) return *set;
    buffers_->inputs.emplace_back(new InputSet(cols, kinds, pool_->threads()));
    return *buffers_->inputs.back();
}

size_t Tape::rope_of(const Rope& rope) {
    std::vector<Rope>& known = buffers_->ropes;
    size_t place = std::find(known.begin(), known.end(), rope) - known.begin();
    if (place == known.size()) known.push_back(rope);
    buffers_->angles.resize(known.size());
    return place;
}

size_t Tape::kind_of(const AttentionShape& shape) {
    std::vector<AttentionShape>& known = buffers_->shapes;
    for (size_t i = 0; i < known.size(); i++)
        if (known[i].num_heads == shape.num_heads && known[i].num_kv_heads == shape.num_kv_heads &&
            known[i].head_dim == shape.head_dim && known[i].values_from == shape.values_from &&
            known[i].window == shape.window && known[i].sees_pictures_whole == shape.sees_pictures_whole)
            return i;
    known.push_back(shape);
    buffers_->plans.emplace_back();
    size_t bytes = attention_bytes(shape);
    if (buffers_->attending.empty() || buffers_->attending[0].bytes() < bytes) {
        buffers_->attending.clear();
        for (int thread = 0; thread < pool_->threads(); thread++) buffers_->attending.emplace_back(bytes);
    }
    return known.size() - 1;
}

void Tape::reserve(int tokens) {
    Buffers& b = *buffers_;
    auto grow = [](Floats& floats, size_t rows, size_t width) {
        if (floats.size() < rows * width) floats.resize(rows * width);
    };
    grow(b.x, tokens, hidden_);
    grow(b.branch, tokens, hidden_);
    grow(b.held, tokens, b.holds ? hidden_ : 0);
    grow(b.given, size_t(tokens) * b.num_places, hidden_);
    grow(b.qkv, tokens, b.qkv_width);
    grow(b.mixed, tokens, b.mixed_width);
    grow(b.gates, tokens, b.gate_width);
    grow(b.latent, tokens, b.latent_width);
    grow(b.queries, tokens, b.query_width);
    grow(b.layer_inputs, tokens, b.layer_input_width);
    grow(b.streams, tokens, b.stream_width);
    grow(b.stream_parts, tokens, b.stream_width == 0 ? 0 : b.stream_width - hidden_);
    grow(b.gate_up, tokens, b.gate_up_width);
    grow(b.inner, size_t(tokens) * std::max(1, b.num_places), b.inner_width);
    for (size_t rope = 0; rope < b.angles.size(); rope++)
        grow(b.angles[rope], tokens, 2 * b.ropes[rope].frequencies.size());
    Routes& r = b.routes;
    r.expert.resize(size_t(tokens) * b.num_places);
    r.place.resize(r.expert.size());
    r.weight.resize(r.expert.size());
    r.token.resize(r.expert.size());
    r.shared_weight.resize(tokens);
    int widest_low = 0;
    for (const auto& [module, place] : places_) widest_low = std::max(widest_low, place.additions->width());
    grow(b.low, tokens, widest_low);
    for (Floats& low : b.own_low) grow(low, REPEATED_ROWS, widest_low);
    int widest = std::max({hidden_, 2 * b.inner_width, b.mixed_width, b.latent_width, b.layer_input_width});
    for (Floats& scratch : b.scratch) grow(scratch, TOGETHER, widest);
    for (auto& set : b.inputs)
        for (ActivationBuffer& buffer : set->shared) buffer.reserve(std::max(tokens * set->copies, int(asked_.size())));
    for (auto& own : b.gathered)
        for (ActivationBuffer& buffer : own) buffer.reserve(tokens);
    grow(logits_, asked_.size(), vocab_);
}

void Tape::replay(bool whole) {
    auto start = std::chrono::steady_clock::now();
    reserve(step_.tokens());
    if (!counters_) counters_.reset(new std::atomic<int>[num_counters_]);
    for (int i = 0; i < num_counters_; i++) counters_[i].store(0, std::memory_order_relaxed);
    size_t kind = step_.tokens() <= FEW_ROWS ? 0 : step_.tokens() <= MANY_ROWS ? 1 : 2;
    bool adapts = whole && !tuners_.empty();
    if (adapts) threads_ = tuners_[kind].threads();
    for (size_t i = 0; i < buffers_->shapes.size(); i++) buffers_->plans[i].make(step_, buffers_->shapes[i], threads_);
    best_.start(int(asked_.size()), threads_);
    Frame frame{kernels(), *pool_, *buffers_, step_, step_.tokens(), threads_, counters_.get()};
    double waited = pool_->run_together(threads_, [&](int thread) {
        if (whole)
            for (const Operation& operation : body_) operation(frame, thread);
        for (const Operation& operation : head_) operation(frame, thread);
    });
    best_.settle(logits_.data(), vocab_);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    seconds_ += seconds;
    if (adapts && tuners_[kind].took(step_.tokens(), seconds, waited))
        for (ThreadTuner& tuner : tuners_) tuner.hurry();
}

}  // namespace tureen
