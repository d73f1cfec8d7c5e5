// Layers that mix tokens without attention. Tokens of a sequence pass one by one, so the numbers are the same however a
// prompt is cut.
#include <cmath>
#include <utility>

#include "tape_frame.h"

namespace tureen {

namespace {

using Frame = Tape::Frame;

constexpr int CHANNELS = 128;  // of a convolution, computed together
const Floats NO_BIAS;

// The last inputs of a convolution's channels [begin, end), the oldest first.
class Window {
public:
    Window(const Span& span, size_t start, int tokens, int channels, int begin, int end)
        : start_(start), tokens_(tokens - 1), channels_(channels), begin_(begin), width_(end - begin) {
        for (int t = 0; t < tokens_; t++) {
            if (span.state == nullptr)
                std::fill_n(row(t), width_, 0.0f);
            else
                std::copy_n(span.state + start_ + size_t(t) * channels_ + begin_, width_, row(t));
        }
    }

    // sum[c] += kernel · (the window, then `input`); then `input` is the newest of the window.
    void pass(const float* kernel, const float* input, float* sum) {
        for (int t = 0; t <= tokens_; t++) {
            const float *weights = kernel + size_t(t) * channels_ + begin_, *values = t < tokens_ ? row(t) : input;
            for (int c = 0; c < width_; c++) sum[c] += weights[c] * values[c];
        }
        if (tokens_ == 0) return;
        for (int t = 0; t + 1 < tokens_; t++) std::copy_n(row(t + 1), width_, row(t));
        std::copy_n(input, width_, row(tokens_ - 1));
    }

    void save(float* state) const {
        for (int t = 0; t < tokens_; t++)
            std::copy_n(values_ + t * CHANNELS, width_, state + start_ + size_t(t) * channels_ + begin_);
    }

private:
    float* row(int t) { return values_ + t * CHANNELS; }

    static constexpr int MOST_TOKENS = 8;
    friend void check_kernel(size_t, int);
    size_t start_;
    int tokens_, channels_, begin_, width_;
    float values_[MOST_TOKENS * CHANNELS];
};

void check_kernel(size_t numbers, int channels) {
    require(channels > 0 && numbers % channels == 0 && numbers / channels >= 1 &&
                numbers / channels <= Window::MOST_TOKENS + 1,
            "a convolution is over 1 to 9 tokens");
}

// Call save(state) for each state that the span keeps after its first `after` tokens.
template <class Save>
void save_states(const Span& span, int after, const Save& save) {
    for (const SavedState& saved : span.saved)
        if (saved.after == after) save(saved.to);
    if (after == span.length) save(span.next_state);
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// to = x / |x| * scale
void to_unit(const float* x, int count, float scale, float* to) {
    float squares = 0;
    for (int i = 0; i < count; i++) squares += x[i] * x[i];
    float factor = scale / std::sqrt(squares + 1e-6f);
    for (int i = 0; i < count; i++) to[i] = x[i] * factor;
}

// A convolution over some channels of the rows that a layer projects.
struct Convolution {
    const Floats& kernel;         // [tokens][channels]
    const Floats& bias;           // [channels], or empty
    size_t start;                 // of its inputs in a state
    int channels, first, stride;  // the first channel's place in a row, and the size of a row
};

// The convolution of channels [begin, end), and its SiLU, in place of its inputs.
void convolve(Frame& frame, const Convolution& conv, const Span& span, int begin, int end) {
    Window window(span, conv.start, int(conv.kernel.size()) / conv.channels, conv.channels, begin, end);
    float sums[CHANNELS];
    for (int t = 0; t < span.length; t++) {
        float* inputs = frame.buffers.qkv.data() + size_t(span.first + t) * conv.stride + conv.first + begin;
        for (int c = 0; c < end - begin; c++) sums[c] = conv.bias.empty() ? 0.0f : conv.bias[begin + c];
        window.pass(conv.kernel.data(), inputs, sums);
        frame.kernels.rows->silu_mul(sums, nullptr, end - begin, inputs);
        save_states(span, t + 1, [&](float* state) { window.save(state); });
    }
}

// Copy a head's matrix of `size` numbers from a span's state into its next state, where it is updated.
float* begin_matrix(const Span& span, size_t start, size_t size) {
    float* matrix = span.next_state + start;
    if (span.state == nullptr)
        std::fill_n(matrix, size, 0.0f);
    else
        std::copy_n(span.state + start, size, matrix);
    return matrix;
}

void save_matrix(const Span& span, int after, const float* matrix, size_t start, size_t size) {
    for (const SavedState& saved : span.saved)
        if (saved.after == after) std::copy_n(matrix, size, saved.to + start);
}

// One value head of a span.
void follow(Frame& frame, const GatedDelta& rule, const Span& span, int stride, int head, float* scratch) {
    int key_dim = rule.key_dim, value_dim = rule.value_dim, channels = rule.channels();
    size_t size = size_t(key_dim) * value_dim, tokens = rule.kernel.size() / channels;
    size_t start = rule.start + (tokens - 1) * channels + head * size;
    float* matrix = begin_matrix(span, start, size);
    int keys = rule.num_key_heads, group = rule.is_apart ? head % keys : head / (rule.num_value_heads / keys);
    float *query = scratch, *key = query + key_dim, *decay = key + key_dim, scale = 1.0f / std::sqrt(float(key_dim));
    for (int t = 0; t < span.length; t++) {
        const float* row = frame.buffers.qkv.data() + size_t(span.first + t) * stride;
        const float *z = row + channels, *b = z + rule.values(), *a = b + rule.num_value_heads;
        to_unit(row + group * key_dim, key_dim, scale, query);
        to_unit(row + rule.keys() + group * key_dim, key_dim, 1.0f, key);
        std::fill_n(decay, key_dim, std::exp(-rule.decay[head] * softplus(a[head] + rule.dt_bias[head])));
        float* out = frame.buffers.mixed.data() + size_t(span.first + t) * rule.values() + head * value_dim;
        frame.kernels.rows->delta_step(matrix, query, key, row + 2 * rule.keys() + head * value_dim, key_dim, value_dim,
                                       decay, sigmoid(b[head]), out);
        normalise(frame.kernels, rule.norm, out, value_dim, out);
        const float* gates = z + head * value_dim;
        for (int i = 0; i < value_dim; i++) out[i] *= gates[i] * sigmoid(gates[i]);
        save_matrix(span, t + 1, matrix, start, size);
    }
}

// One head of a span. The projections of decays and gates are in `queries` and `gates`.
void follow(Frame& frame, const KimiDelta& rule, const Span& span, int stride, int head, float* scratch) {
    Tape::Buffers& b = frame.buffers;
    int dim = rule.head_dim, width = rule.width(), at = head * dim;
    size_t size = size_t(dim) * dim, start = rule.start + rule.kernel.size() - rule.channels() + head * size;
    float* matrix = begin_matrix(span, start, size);
    float *query = scratch, *key = query + dim, *decay = key + dim, scale = 1.0f / std::sqrt(float(dim));
    for (int t = 0; t < span.length; t++) {
        size_t token = span.first + t;
        const float* row = b.qkv.data() + token * stride;
        const float *rates = b.queries.data() + token * width + at, *gates = b.gates.data() + token * width + at;
        to_unit(row + at, dim, scale, query);
        to_unit(row + width + at, dim, 1.0f, key);
        for (int i = 0; i < dim; i++)
            decay[i] = std::exp(-rule.decay[head] * softplus(rates[i] + rule.dt_bias[at + i]));
        float* out = b.mixed.data() + token * width + at;
        frame.kernels.rows->delta_step(matrix, query, key, row + 2 * width + at, dim, dim, decay,
                                       sigmoid(row[3 * width + head]), out);
        normalise(frame.kernels, rule.norm, out, dim, out);
        for (int i = 0; i < dim; i++) out[i] *= sigmoid(gates[i]);
        save_matrix(span, t + 1, matrix, start, size);
    }
}

// Compute one head of a span. Updates its matrix in the next state, and writes its results to `mixed`, multiplied by
// its gate unless the gate is applied after the norm. Leaves the gate activated.
void follow(Frame& frame, const Mamba2& ssm, const Span& span, int head) {
    const RowKernels& rows = *frame.kernels.rows;
    int dim = ssm.head_dim, width = ssm.width(), channels = ssm.channels(), stride = width + channels + ssm.num_heads;
    size_t size = size_t(ssm.state_dim) * dim;
    size_t start = ssm.start + ssm.kernel.size() - channels + head * size;
    float* matrix = span.next_state + start;
    const float* before = span.state == nullptr ? matrix : span.state + start;
    if (span.state == nullptr) std::fill_n(matrix, size, 0.0f);
    int group = head / (ssm.num_heads / ssm.num_groups);
    for (int t = 0; t < span.length; t++) {
        float* gate = frame.buffers.qkv.data() + size_t(span.first + t) * stride;
        const float *values = gate + width, *keys = values + width, *queries = keys + ssm.num_groups * ssm.state_dim;
        float step = softplus(gate[width + channels + head] * ssm.step_scale + ssm.dt_bias[head]);
        step = std::clamp(step, ssm.least_step, ssm.most_step);
        float* out = frame.buffers.mixed.data() + size_t(span.first + t) * width + head * dim;
        rows.ssm_step(before, matrix, values + head * dim, keys + group * ssm.state_dim,
                      queries + group * ssm.state_dim, ssm.state_dim, dim, std::exp(-ssm.decay[head] * step), step,
                      ssm.skip[head], out);
        before = matrix;
        gate += head * dim;
        if (ssm.gate_scale != 1.0f) rows.scale_and_cap(gate, dim, ssm.gate_scale, 0.0f);
        if (ssm.gate_last)
            rows.silu_mul(gate, nullptr, dim, gate);
        else
            rows.silu_mul(gate, out, dim, out);
        save_matrix(span, t + 1, matrix, start, size);
    }
}

// A token's results of all heads, normalised group by group: in place where they need no norm, else in `to`.
const float* normalise_groups(const Frame& frame, const Mamba2& ssm, const float* mixed, const float* gate, float* to) {
    int width = ssm.width(), size = width / ssm.num_groups;
    if (ssm.norm.weight.empty()) return mixed;
    for (int from = 0; from < width; from += size)
        frame.kernels.rows->rms_norm(mixed + from, ssm.norm.weight.data() + from, size, ssm.norm.eps, to + from);
    for (int i = 0; ssm.gate_last && i < width; i++) to[i] *= gate[i];
    return to;
}

void check(const Mamba2& ssm) {
    size_t heads = ssm.num_heads;
    require(ssm.num_groups > 0 && ssm.num_heads % ssm.num_groups == 0, "groups have equally many heads");
    check_kernel(ssm.kernel.size(), ssm.channels());
    require(ssm.bias.empty() || int(ssm.bias.size()) == ssm.channels(), "the bias has another size than the kernel");
    require(ssm.decay.size() == heads && ssm.dt_bias.size() == heads && ssm.skip.size() == heads,
            "each head has a decay, a bias and a skip");
    require(ssm.norm.weight.empty() ? !ssm.gate_last : int(ssm.norm.weight.size()) == ssm.width(),
            "the norm has the size of all heads; a gate after it needs it");
}

}  // namespace

void Tape::short_conv(const std::string& module, Norm norm, Linear in, ShortConv conv, Linear out, float scale) {
    int size = out.cols();
    require(in.cols() == hidden_ && in.rows() == 3 * size && out.rows() == hidden_,
            "the projections of a convolution have other shapes than the tape");
    check_kernel(conv.kernel.size(), size);
    require(conv.bias.empty() || int(conv.bias.size()) == size, "the bias has another size than the convolution");
    require(states_ != nullptr && conv.start + (conv.kernel.size() - size) <= states_->floats(), "there is no state");
    buffers_->qkv_width = std::max(buffers_->qkv_width, 3 * size);
    buffers_->mixed_width = std::max(buffers_->mixed_width, size);
    may_add(module, {"in_proj"}, in, std::make_shared<Additions>());
    may_add(module, {"out_proj"}, out, std::make_shared<Additions>());
    InputSet& into_conv = inputs_for(in.parts);
    InputSet& into_out = inputs_for(out.parts);
    int first = num_counters_, tokens = int(conv.kernel.size()) / size, blocks = ceil_div(size, CHANNELS);
    num_counters_ += 6;
    body_.push_back([=, &into_conv, &into_out](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        View inputs = make_inputs(frame, thread, first, into_conv, rows, in.additions.get(), [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        multiply(frame, first + 1, in, inputs, rows, b.qkv.data(), false);
        frame.pool.barrier();
        frame.deal(first + 2, int(frame.step.spans.size()) * blocks, [&](int piece) {
            const Span& span = frame.step.spans[piece / blocks];
            int begin = piece % blocks * CHANNELS, end = std::min(size, begin + CHANNELS);
            Window window(span, conv.start, tokens, size, begin, end);
            float products[CHANNELS];
            for (int t = 0; t < span.length; t++) {
                const float* gate = b.qkv.data() + size_t(span.first + t) * 3 * size + begin;
                const float *second = gate + size, *x = second + size;
                float* result = b.mixed.data() + size_t(span.first + t) * size + begin;
                for (int c = 0; c < end - begin; c++) {
                    products[c] = gate[c] * x[c];
                    result[c] = conv.bias.empty() ? 0.0f : conv.bias[begin + c];
                }
                window.pass(conv.kernel.data(), products, result);
                for (int c = 0; c < end - begin; c++) result[c] *= second[c];
                save_states(span, t + 1, [&](float* state) { window.save(state); });
            }
        });
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 3, into_out, rows, out.additions.get(),
                             [&](int m, float*) { return b.mixed.data() + size_t(m) * size; });
        add_branch(frame, thread, first + 4, out, inputs, Norm{}, scale, b.x.data());
    });
}

void Tape::gated_delta(const std::string& module, Norm norm, Linear in, GatedDelta given, Linear out, float scale) {
    auto rule = std::make_shared<GatedDelta>(std::move(given));
    int channels = rule->channels(), values = rule->values(), heads = rule->num_value_heads;
    int width = channels + values + 2 * heads;
    require(in.parts.size() == 4 && in.cols() == hidden_ && in.rows() == width && out.cols() == values &&
                out.rows() == hidden_,
            "the projections of a delta rule have other shapes than the tape");
    require(rule->num_key_heads > 0 && heads % rule->num_key_heads == 0, "key heads have equally many value heads");
    check_kernel(rule->kernel.size(), channels);
    require(int(rule->decay.size()) == heads && int(rule->dt_bias.size()) == heads &&
                int(rule->norm.weight.size()) == rule->value_dim,
            "a delta rule has a decay and a bias for each head");
    size_t matrices = size_t(heads) * rule->key_dim * rule->value_dim;
    require(states_ != nullptr && rule->start + (rule->kernel.size() - channels) + matrices <= states_->floats(),
            "there is no state");
    buffers_->qkv_width = std::max(buffers_->qkv_width, width);
    buffers_->mixed_width = std::max({buffers_->mixed_width, values, 3 * rule->key_dim});
    may_add(module, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}, in, std::make_shared<Additions>());
    may_add(module, {"out_proj"}, out, std::make_shared<Additions>());
    InputSet& into_rule = inputs_for(in.parts);
    InputSet& into_out = inputs_for(out.parts);
    int first = num_counters_, blocks = ceil_div(channels, CHANNELS);
    num_counters_ += 7;
    body_.push_back([=, &into_rule, &into_out](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens, spans = int(frame.step.spans.size());
        View inputs = make_inputs(frame, thread, first, into_rule, rows, in.additions.get(), [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        multiply(frame, first + 1, in, inputs, rows, b.qkv.data(), false);
        frame.pool.barrier();
        frame.deal(first + 2, spans * blocks, [&](int piece) {
            int begin = piece % blocks * CHANNELS;
            convolve(frame, {rule->kernel, NO_BIAS, rule->start, channels, 0, width}, frame.step.spans[piece / blocks],
                     begin, std::min(channels, begin + CHANNELS));
        });
        frame.pool.barrier();
        frame.deal(first + 3, spans * heads, [&](int piece) {
            follow(frame, *rule, frame.step.spans[piece / heads], width, piece % heads, b.scratch[thread].data());
        });
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 4, into_out, rows, out.additions.get(),
                             [&](int m, float*) { return b.mixed.data() + size_t(m) * values; });
        add_branch(frame, thread, first + 5, out, inputs, Norm{}, scale, b.x.data());
    });
}

void Tape::kimi_delta(const std::string& module, Norm norm, Linear in, KimiDelta given, Linear out, float scale) {
    auto rule = std::make_shared<KimiDelta>(std::move(given));
    int channels = rule->channels(), width = rule->width(), heads = rule->num_heads, dim = rule->head_dim;
    int stride = channels + heads + 2 * dim;
    require(in.parts.size() == 6 && in.cols() == hidden_ && in.rows() == stride && out.cols() == width &&
                out.rows() == hidden_,
            "the projections of a delta rule have other shapes than the tape");
    for (const Linear& linear : {rule->decays, rule->gates})
        require(linear.cols() == dim && linear.rows() == width, "decays and gates have other shapes than the heads");
    check_kernel(rule->kernel.size(), channels);
    require(
        int(rule->decay.size()) == heads && int(rule->dt_bias.size()) == width && int(rule->norm.weight.size()) == dim,
        "a delta rule has a decay for each head, and a bias for each of its dimensions");
    require(
        states_ != nullptr && rule->start + rule->kernel.size() - channels + size_t(width) * dim <= states_->floats(),
        "there is no state");
    buffers_->qkv_width = std::max(buffers_->qkv_width, stride);
    buffers_->query_width = std::max(buffers_->query_width, width);
    buffers_->gate_width = std::max(buffers_->gate_width, width);
    buffers_->mixed_width = std::max({buffers_->mixed_width, width, 3 * dim});
    may_add(module, {"q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"}, in,
            std::make_shared<Additions>());
    may_add(module, {"f_b_proj"}, rule->decays, std::make_shared<Additions>());
    may_add(module, {"g_b_proj"}, rule->gates, std::make_shared<Additions>());
    may_add(module, {"o_proj"}, out, std::make_shared<Additions>());
    InputSet &into_rule = inputs_for(in.parts), &into_decays = inputs_for(rule->decays.parts);
    InputSet &into_gates = inputs_for(rule->gates.parts), &into_out = inputs_for(out.parts);
    int first = num_counters_, blocks = ceil_div(channels, CHANNELS);
    num_counters_ += 11;
    body_.push_back([=, &into_rule, &into_decays, &into_gates, &into_out](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens, spans = int(frame.step.spans.size());
        View inputs = make_inputs(frame, thread, first, into_rule, rows, in.additions.get(), [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        multiply(frame, first + 1, in, inputs, rows, b.qkv.data(), false);
        frame.pool.barrier();
        auto low = [&](int m, int which) { return b.qkv.data() + size_t(m) * stride + channels + heads + which * dim; };
        inputs = make_inputs(frame, thread, first + 2, into_decays, rows, rule->decays.additions.get(),
                             [&](int m, float*) { return low(m, 0); });
        multiply(frame, first + 3, rule->decays, inputs, rows, b.queries.data(), false);
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 4, into_gates, rows, rule->gates.additions.get(),
                             [&](int m, float*) { return low(m, 1); });
        multiply(frame, first + 5, rule->gates, inputs, rows, b.gates.data(), false);
        frame.pool.barrier();
        frame.deal(first + 6, spans * blocks, [&](int piece) {
            int begin = piece % blocks * CHANNELS;
            convolve(frame, {rule->kernel, NO_BIAS, rule->start, channels, 0, stride}, frame.step.spans[piece / blocks],
                     begin, std::min(channels, begin + CHANNELS));
        });
        frame.pool.barrier();
        frame.deal(first + 7, spans * heads, [&](int piece) {
            follow(frame, *rule, frame.step.spans[piece / heads], stride, piece % heads, b.scratch[thread].data());
        });
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 8, into_out, rows, out.additions.get(),
                             [&](int m, float*) { return b.mixed.data() + size_t(m) * width; });
        add_branch(frame, thread, first + 9, out, inputs, Norm{}, scale, b.x.data());
    });
}

void Tape::mamba2(const std::string& module, Norm norm, Linear in, Mamba2 given, Linear out, float scale) {
    check(given);
    auto ssm = std::make_shared<Mamba2>(std::move(given));
    int values = ssm->width(), channels = ssm->channels(), heads = ssm->num_heads;
    int width = values + channels + heads;
    require(in.parts.size() == 1 && in.cols() == hidden_ && in.rows() == width && out.cols() == values &&
                out.rows() == hidden_,
            "the projections of a state space have other shapes than the tape");
    size_t numbers = ssm->kernel.size() - channels + size_t(values) * ssm->state_dim;
    require(states_ != nullptr && ssm->start + numbers <= states_->floats(), "there is no state");
    bool adds_held = std::exchange(is_held_, false);
    buffers_->qkv_width = std::max(buffers_->qkv_width, width);
    buffers_->mixed_width = std::max(buffers_->mixed_width, values);
    may_add(module, {"in_proj"}, in, std::make_shared<Additions>());
    may_add(module, {"out_proj"}, out, std::make_shared<Additions>());
    InputSet& into_ssm = inputs_for(in.parts);
    InputSet& into_out = inputs_for(out.parts);
    int first = num_counters_, blocks = ceil_div(channels, CHANNELS);
    num_counters_ += 8;
    body_.push_back([=, &into_ssm, &into_out](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens, spans = int(frame.step.spans.size());
        View inputs = make_inputs(frame, thread, first, into_ssm, rows, in.additions.get(), [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        multiply(frame, first + 1, in, inputs, rows, b.qkv.data(), false);
        frame.pool.barrier();
        frame.deal(first + 2, spans * blocks, [&](int piece) {
            int begin = piece % blocks * CHANNELS;
            convolve(frame, {ssm->kernel, ssm->bias, ssm->start, channels, values, width},
                     frame.step.spans[piece / blocks], begin, std::min(channels, begin + CHANNELS));
        });
        frame.pool.barrier();
        frame.deal(first + 3, spans * heads,
                   [&](int piece) { follow(frame, *ssm, frame.step.spans[piece / heads], piece % heads); });
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 4, into_out, rows, out.additions.get(), [&](int m, float* to) {
            return normalise_groups(frame, *ssm, b.mixed.data() + size_t(m) * values, b.qkv.data() + size_t(m) * width,
                                    to);
        });
        add_branch(frame, thread, first + 5, out, inputs, Norm{}, scale, b.x.data());
        if (adds_held) add_held(frame, first + 7, hidden_);
    });
}

}  // namespace tureen
