// The forward pass, for runner/graphs.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "bind.h"
#include "tape.h"

namespace nb = nanobind;

namespace tureen {

namespace {

using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Floats floats(const FloatArray& array) { return Floats(array.data(), array.data() + array.size()); }

Gate gate_of(const std::string& name) {
    if (name == "silu") return Gate::SILU;
    if (name == "gelu_pytorch_tanh") return Gate::GELU_TANH;
    if (name == "relu2") return Gate::RELU_SQUARED;
    if (name == "xielu") return Gate::XIELU;
    if (name == "clamped_swiglu") return Gate::CLAMPED_SWIGLU;
    throw std::invalid_argument("activation " + name +
                                " is unknown; known: silu, gelu_pytorch_tanh, relu2, xielu, clamped_swiglu");
}

Score score_of(const std::string& name) {
    if (name == "softmax") return Score::SOFTMAX;
    if (name == "sigmoid") return Score::SIGMOID;
    if (name == "sparsemixer") return Score::SPARSE_MIXER;
    throw std::invalid_argument("score " + name + " is unknown; known: softmax, sigmoid, sparsemixer");
}

Linear linear_of(Matrices parts, const FloatArray& bias) {
    Linear linear{std::move(parts), floats(bias)};
    if (!linear.bias.empty() && int(linear.bias.size()) != linear.rows())
        throw std::invalid_argument("a bias has a number for each output");
    return linear;
}

// (activation, its constants, gate or None, its bias, up, its bias, down, its bias)
GatedLinear gated_of(nb::tuple parts) {
    if (parts.size() != 8) throw std::invalid_argument("an mlp has eight parts");
    auto linear = [&](int i) {
        if (parts[i].is_none()) return Linear{};
        return linear_of({nb::cast<std::shared_ptr<PackedMatrix>>(parts[i])}, nb::cast<FloatArray>(parts[i + 1]));
    };
    GatedLinear mlp{linear(2), linear(4), linear(6), gate_of(nb::cast<std::string>(parts[0]))};
    Floats constants = floats(nb::cast<FloatArray>(parts[1]));
    if (mlp.activation == Gate::XIELU) {
        if (constants.size() != 4 || !mlp.gate.parts.empty())
            throw std::invalid_argument("xielu has four constants and no gate");
        mlp.xielu = {constants[0], constants[1], constants[2], constants[3]};
    } else if (!constants.empty()) {
        mlp.gate_scale = constants[0];
    }
    return mlp;
}

// The fields of a contract.runner.Row that a step needs.
struct RowNames {
    nb::object token_ids = name("token_ids"), start = name("start"), pages = name("pages"), sample = name("sample");
    nb::object adapter = name("adapter"), state_from = name("state_from"), state_to = name("state_to");
    nb::object state_saves = name("state_saves"), places = name("places"), pictures = name("pictures");
    nb::object window_from = name("window_from"), window_pages = name("window_pages"), num_drafts = name("num_drafts");

    static nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
};

int checked(nb::handle number, int least, int end, const char* what) {
    int value = nb::cast<int>(number);
    if (value < least || value >= end) throw std::invalid_argument(what);
    return value;
}

// The states that a row begins with, ends with and saves.
void add_states(Span& span, const StatePool& states, nb::handle row) {
    static const RowNames& names = *new RowNames;
    const char* wrong = "a state is not in the pool";
    int from = checked(nb::getattr(row, names.state_from), -1, states.count(), wrong);
    int to = checked(nb::getattr(row, names.state_to), 0, states.count(), wrong);
    if (from == to || (from < 0) != (span.start == 0)) throw std::invalid_argument("a row's state does not fit it");
    span.state = from < 0 ? nullptr : states.at(from);
    span.next_state = states.at(to);
    for (nb::handle saved : nb::cast<nb::tuple>(nb::getattr(row, names.state_saves))) {
        nb::tuple pair = nb::cast<nb::tuple>(saved);
        int after = checked(pair[0], 1, span.length + 1, "a state is saved after a token of the row");
        span.saved.push_back({after, states.at(checked(pair[1], 0, states.count(), wrong))});
    }
}

// The window pages of a row, one for each of its pages. Page 0 fills the entries outside the window.
void add_window_pages(Step& step, const Tape& tape, const Span& span, nb::handle row) {
    static const RowNames& names = *new RowNames;
    int page_len = tape.cache().page_len();
    int from = checked(nb::getattr(row, names.window_from), 0, int(span.num_pages) + 1, "a row has no such page");
    nb::tuple given = nb::cast<nb::tuple>(nb::getattr(row, names.window_pages));
    int first_seen = std::max(0, span.start + 1 - tape.longest_window());
    int last = (span.start + span.length - 1) / page_len;
    if (from > first_seen / page_len || size_t(last) >= from + given.size() || from + given.size() > span.num_pages)
        throw std::invalid_argument("window_pages does not cover the tokens that the row attends to");
    step.window_pages.resize(span.pages + span.num_pages);
    auto to = step.window_pages.begin() + std::ptrdiff_t(span.pages) + from;
    for (nb::handle page : given)
        *to++ = checked(page, 0, tape.cache().num_window_pages(), "a window page is not in the KV cache");
}

// The places of the row's tokens, once a row of the step has any. Those of other rows are their positions.
void add_places(Step& step, const Span& span, nb::handle row) {
    static const RowNames& names = *new RowNames;
    nb::bytes given = nb::cast<nb::bytes>(nb::getattr(row, names.places));
    if (given.size() == 0 && step.places.empty()) return;
    for (int token = int(step.places.size() / 3); token < span.first + span.length; token++)
        step.places.insert(step.places.end(), 3, step.positions[token]);
    if (given.size() == 0) return;
    if (given.size() != size_t(span.length) * 3 * sizeof(int32_t))
        throw std::invalid_argument("a row has three numbers of places for each token");
    std::memcpy(step.places.data() + size_t(span.first) * 3, given.data(), given.size());
}

// What the row's tokens see if layers see pictures whole, once a row of the step has a picture.
void add_pictures(Step& step, const Span& span, nb::handle row) {
    static const RowNames& names = *new RowNames;
    nb::tuple pictures = nb::cast<nb::tuple>(nb::getattr(row, names.pictures));
    if (pictures.size() == 0 && step.num_seen.empty()) return;
    for (int token = int(step.num_seen.size()); token < span.first + span.length; token++)
        step.num_seen.push_back(step.positions[token] + 1);
    int least = 0, last = span.start + span.length;
    for (nb::handle picture : pictures) {
        nb::tuple bounds = nb::cast<nb::tuple>(picture);
        int start = checked(bounds[0], least, last, "a row's pictures lie in its tokens, in order");
        int end = checked(bounds[1], std::max(start, span.start) + 1, last + 1, "a row ends after a whole picture");
        for (int position = std::max(start, span.start); position < end; position++)
            step.num_seen[span.first + position - span.start] = end;
        least = end;
    }
}

// A row's share of the step. Throws std::invalid_argument for what does not fit.
void add_row(Step& step, const Tape& tape, nb::handle row) {
    static const RowNames& names = *new RowNames;  // outlives the interpreter, which frees nothing then
    const KvCache& cache = tape.cache();
    nb::tuple tokens = nb::cast<nb::tuple>(nb::getattr(row, names.token_ids));
    nb::tuple pages = nb::cast<nb::tuple>(nb::getattr(row, names.pages));
    int start = nb::cast<int>(nb::getattr(row, names.start));
    Span span{step.tokens(), int(tokens.size()), start, step.pages.size(), pages.size()};
    if (span.length < 1 || start < 0 || size_t(start) + span.length > span.num_pages * cache.page_len())
        throw std::invalid_argument("a row's tokens do not fit its pages");
    if (tape.states() != nullptr) add_states(span, *tape.states(), row);
    if (cache.num_window_pages() > 0) add_window_pages(step, tape, span, row);
    for (nb::handle id : tokens)
        step.token_ids.push_back(checked(id, -1, tape.vocab(), "a token id is not in the vocabulary"));
    int adapter = nb::cast<int>(nb::getattr(row, names.adapter));
    for (int i = 0; i < span.length; i++) {
        step.positions.push_back(start + i);
        step.span_of.push_back(int(step.spans.size()));
        step.adapters.push_back(adapter);
    }
    add_places(step, span, row);
    add_pictures(step, span, row);
    for (nb::handle page : pages)
        step.pages.push_back(checked(page, 0, cache.num_pages(), "a page is not in the KV cache"));
    step.spans.push_back(span);
    if (!nb::cast<bool>(nb::getattr(row, names.sample))) return;
    int drafts = checked(nb::getattr(row, names.num_drafts), 0, span.length, "a row has a token that is no guess");
    for (int back = drafts; back >= 0; back--) step.sampled.push_back(step.tokens() - 1 - back);
}

// Throws std::invalid_argument for what does not fit.
Step step_of(const Tape& tape, nb::tuple rows, const FloatRows* embedded) {
    Step step;
    for (nb::handle row : rows) add_row(step, tape, row);
    if (step.spans.empty()) throw std::invalid_argument("a step has at least one row");
    if (std::any_of(step.adapters.begin(), step.adapters.end(), [](int adapter) { return adapter != 0; })) {
        step.by_adapter.resize(step.tokens());
        std::iota(step.by_adapter.begin(), step.by_adapter.end(), 0);
        std::stable_sort(step.by_adapter.begin(), step.by_adapter.end(),
                         [&](int a, int b) { return step.adapters[a] < step.adapters[b]; });
    }
    size_t given = std::count(step.token_ids.begin(), step.token_ids.end(), -1);
    if (given > 0) {
        size_t width = embedded == nullptr ? 0 : embedded->shape(1), hidden = tape.hidden();
        if (width == 0 || embedded->shape(0) != given || (width != hidden && width != hidden * tape.given_parts()))
            throw std::invalid_argument("tokens without an id need one embedding each");
        step.embedded_width = width;
        step.embedded.assign(embedded->data(), embedded->data() + embedded->size());
    }
    return step;
}

void check_tokens(const Tape& tape, const std::vector<int32_t>& tokens) {
    for (int32_t token : tokens)
        if (token < 0 || token >= tape.tokens()) throw std::invalid_argument("a token is not in the last step");
}

// A view of the tape's own array, overwritten by its next call.
nb::ndarray<nb::numpy, float> logits_view(nb::handle self, Tape& tape, size_t rows) {
    size_t shape[2] = {rows, size_t(tape.vocab())};
    return nb::ndarray<nb::numpy, float>(tape.logits(), 2, shape, self);
}

template <class T>
nb::ndarray<nb::numpy, T> copied(const std::vector<T>& values) {
    auto* copy = new std::vector<T>(values);
    nb::capsule owner(copy, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(copy->data(), {copy->size()}, owner);
}

}  // namespace

void bind_tape(nb::module_& m) {
    using SharedMatrix = std::shared_ptr<PackedMatrix>;
    nb::class_<Norm>(m, "Norm", "A norm of vectors; an empty weight: none. is_centred: a layer norm, else an RMS norm.")
        .def(
            "__init__",
            [](Norm* norm, FloatArray weight, float eps, FloatArray bias, bool is_centred) {
                if (bias.size() > 0 && (!is_centred || bias.size() != weight.size()))
                    throw std::invalid_argument("the bias of a layer norm has the size of its weight");
                new (norm) Norm{floats(weight), eps, floats(bias), is_centred};
            },
            nb::arg("weight"), nb::arg("eps"), nb::arg("bias"), nb::arg("is_centred"));
    nb::class_<StreamMix>(m, "StreamMix",
                          "The weights with which a layer mixes residual streams. Matrices are row-major.")
        .def(
            "__init__",
            [](StreamMix* mix, Norm router_norm, FloatArray router, FloatArray prediction, FloatArray correction,
               FloatArray scale) {
                new (mix) StreamMix{router_norm, floats(router), floats(prediction), floats(correction), floats(scale)};
            },
            nb::kw_only(), nb::arg("router_norm"), nb::arg("router"), nb::arg("prediction"), nb::arg("correction"),
            nb::arg("scale"));
    nb::class_<Tape>(m, "Tape", "A decoder's forward pass, recorded operation by operation, replayed with one call.")
        .def(nb::init<std::shared_ptr<Pool>, std::shared_ptr<KvCache>, std::shared_ptr<StatePool>, int, int>(),
             nb::arg("pool"), nb::arg("cache"), nb::arg("states").none(), nb::arg("hidden"), nb::arg("vocab"))
        .def("embed", &Tape::embed, nb::arg("table"), nb::arg("scale"))
        .def(
            "attention",
            [](Tape& tape, const std::string& module, int layer, Norm norm, Matrices qkv, FloatArray qkv_bias,
               Matrices gate, Norm q_norm, Norm k_norm, Norm v_norm, bool norms_last, int num_heads, int num_kv_heads,
               int head_dim, float scale, float softcap, int window, FloatArray frequencies, float magnitude,
               bool is_interleaved, std::vector<uint8_t> axes, float growth, int growth_every, FloatArray sinks,
               bool sees_pictures_whole, SharedMatrix out, FloatArray out_bias, Norm post, float residual_scale,
               bool is_held) {
                if (!axes.empty() &&
                    (axes.size() != frequencies.size() || *std::max_element(axes.begin(), axes.end()) > 2))
                    throw std::invalid_argument("each frequency turns with one of three axes");
                Rope rope{floats(frequencies), magnitude, is_interleaved, std::move(axes)};
                AttentionShape shape{num_heads, num_kv_heads, head_dim, scale,        softcap,      window,
                                     rope,      norms_last,   growth,   growth_every, floats(sinks)};
                shape.sees_pictures_whole = sees_pictures_whole;
                tape.attention(module, layer, norm, linear_of(std::move(qkv), qkv_bias), {std::move(gate), {}}, q_norm,
                               k_norm, v_norm, shape, linear_of({out}, out_bias), post, residual_scale, is_held);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("layer"), nb::arg("norm"), nb::arg("qkv"), nb::arg("qkv_bias"),
            nb::arg("gate"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("v_norm"), nb::arg("norms_last"),
            nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("scale"), nb::arg("softcap"),
            nb::arg("window"), nb::arg("frequencies"), nb::arg("magnitude"), nb::arg("is_interleaved"), nb::arg("axes"),
            nb::arg("growth"), nb::arg("growth_every"), nb::arg("sinks"), nb::arg("sees_pictures_whole"),
            nb::arg("out"), nb::arg("out_bias"), nb::arg("post"), nb::arg("residual_scale"), nb::arg("is_held"),
            "x += residual_scale * post(out(attend(qkv(norm(x))))); is_held: the next mlp adds it. Empty arrays and "
            "empty norms: none. window, softcap and growth 0: none. qkv without the matrix of values: they are the "
            "keys before their norm; without that of keys, too: the cache has both already.")
        .def(
            "latent_attention",
            [](Tape& tape, const std::string& module, int layer, Norm norm, Matrices in, FloatArray in_bias,
               Norm query_norm, Matrices query, Norm latent_norm, Matrices keys, Matrices values, int values_from,
               float scale, int window, FloatArray frequencies, float magnitude, bool is_interleaved, SharedMatrix out,
               FloatArray out_bias, float residual_scale) {
                if (keys.empty()) throw std::invalid_argument("a latent attention has heads");
                int num_heads = int(keys.size()), head_dim = values_from + keys[0]->matrix.rows;
                AttentionShape shape{
                    num_heads, 1, head_dim, scale, 0.0f, window, {floats(frequencies), magnitude, is_interleaved, {}}};
                shape.values_from = values_from;
                Latent latent{linear_of(std::move(in), in_bias),
                              query_norm,
                              {std::move(query), {}},
                              latent_norm,
                              std::move(keys),
                              std::move(values),
                              std::move(shape)};
                tape.latent_attention(module, layer, norm, std::move(latent), linear_of({out}, out_bias),
                                      residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("layer"), nb::arg("norm"), nb::arg("in_proj"), nb::arg("in_bias"),
            nb::arg("query_norm"), nb::arg("query"), nb::arg("latent_norm"), nb::arg("keys"), nb::arg("values"),
            nb::arg("values_from"), nb::arg("scale"), nb::arg("window"), nb::arg("frequencies"), nb::arg("magnitude"),
            nb::arg("is_interleaved"), nb::arg("out"), nb::arg("out_bias"), nb::arg("residual_scale"),
            "x += residual_scale * out(the heads' values). in_proj: queries, or what `query` makes them of; the latent "
            "and the rotated part of the key in one. keys, values: a matrix for each head. values_from: the rotated "
            "dimensions.")
        .def(
            "short_conv",
            [](Tape& tape, const std::string& module, Norm norm, SharedMatrix in, FloatArray in_bias, FloatArray kernel,
               FloatArray bias, size_t start, SharedMatrix out, FloatArray out_bias, float residual_scale) {
                tape.short_conv(module, norm, linear_of({in}, in_bias), {floats(kernel), floats(bias), start},
                                linear_of({out}, out_bias), residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("in_proj"), nb::arg("in_bias"),
            nb::arg("kernel"), nb::arg("bias"), nb::arg("start"), nb::arg("out"), nb::arg("out_bias"),
            nb::arg("residual_scale"),
            "x += residual_scale * out(c * conv(b * y)), with b, c and y the thirds of in_proj(norm(x)). kernel: "
            "[tokens, channels]. start: the place of its numbers in a state.")
        .def(
            "gated_delta",
            [](Tape& tape, const std::string& module, Norm norm, Matrices in, FloatArray kernel, FloatArray decay,
               FloatArray dt_bias, Norm head_norm, int num_key_heads, int num_value_heads, int key_dim, int value_dim,
               bool is_apart, size_t start, SharedMatrix out, float residual_scale) {
                GatedDelta rule{num_key_heads,  num_value_heads, key_dim,         value_dim, is_apart,
                                floats(kernel), floats(decay),   floats(dt_bias), head_norm, start};
                tape.gated_delta(module, norm, {std::move(in), {}}, std::move(rule), {{out}, {}}, residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("in_proj"), nb::arg("kernel"), nb::arg("decay"),
            nb::arg("dt_bias"), nb::arg("head_norm"), nb::arg("num_key_heads"), nb::arg("num_value_heads"),
            nb::arg("key_dim"), nb::arg("value_dim"), nb::arg("is_apart"), nb::arg("start"), nb::arg("out"),
            nb::arg("residual_scale"),
            "x += residual_scale * out(rule(norm(x))). in_proj: q, k and v in one, z, b, a. kernel: [tokens, "
            "channels].")
        .def(
            "kimi_delta",
            [](Tape& tape, const std::string& module, Norm norm, Matrices in, FloatArray kernel, FloatArray decay,
               FloatArray dt_bias, Norm head_norm, SharedMatrix decays, SharedMatrix gates, int num_heads, int head_dim,
               size_t start, SharedMatrix out, float residual_scale) {
                KimiDelta rule{num_heads, head_dim,       floats(kernel), floats(decay), floats(dt_bias),
                               head_norm, {{decays}, {}}, {{gates}, {}},  start};
                tape.kimi_delta(module, norm, {std::move(in), {}}, std::move(rule), {{out}, {}}, residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("in_proj"), nb::arg("kernel"), nb::arg("decay"),
            nb::arg("dt_bias"), nb::arg("head_norm"), nb::arg("decays"), nb::arg("gates"), nb::arg("num_heads"),
            nb::arg("head_dim"), nb::arg("start"), nb::arg("out"), nb::arg("residual_scale"),
            "x += residual_scale * out(rule(norm(x))). in_proj: q, k, v, b, the low-rank inputs of decays and of "
            "gates. "
            "kernel: [tokens, channels].")
        .def(
            "mamba2",
            [](Tape& tape, const std::string& module, Norm norm, SharedMatrix in, FloatArray in_bias, FloatArray kernel,
               FloatArray bias, FloatArray decay, FloatArray dt_bias, FloatArray skip, Norm group_norm, bool gate_last,
               float gate_scale, float step_scale, float least_step, float most_step, int num_heads, int head_dim,
               int state_dim, int num_groups, size_t start, SharedMatrix out, FloatArray out_bias,
               float residual_scale) {
                Mamba2 ssm{num_heads,     head_dim,        state_dim,    num_groups, floats(kernel), floats(bias),
                           floats(decay), floats(dt_bias), floats(skip), group_norm, gate_last,      gate_scale,
                           step_scale,    least_step,      most_step,    start};
                tape.mamba2(module, norm, linear_of({in}, in_bias), std::move(ssm), linear_of({out}, out_bias),
                            residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("in_proj"), nb::arg("in_bias"),
            nb::arg("kernel"), nb::arg("bias"), nb::arg("decay"), nb::arg("dt_bias"), nb::arg("skip"),
            nb::arg("group_norm"), nb::arg("gate_last"), nb::arg("gate_scale"), nb::arg("step_scale"),
            nb::arg("least_step"), nb::arg("most_step"), nb::arg("num_heads"), nb::arg("head_dim"),
            nb::arg("state_dim"), nb::arg("num_groups"), nb::arg("start"), nb::arg("out"), nb::arg("out_bias"),
            nb::arg("residual_scale"),
            "x += residual_scale * out(ssm(norm(x))), plus the held result of an attention before it. in_proj: gate, "
            "values, keys, queries and time steps in one. kernel: [tokens, channels].")
        .def(
            "mlp",
            [](Tape& tape, const std::string& module, Norm norm, nb::tuple gated, Norm post, float residual_scale,
               bool is_held, std::optional<float> cutoff) {
                GatedLinear mlp = gated_of(gated);
                mlp.is_cut = cutoff.has_value();
                mlp.cutoff = cutoff.value_or(0.0f);
                tape.mlp(module, norm, std::move(mlp), post, residual_scale, is_held);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("gated"), nb::arg("post"),
            nb::arg("residual_scale"), nb::arg("is_held"), nb::arg("cutoff").none(),
            "x += residual_scale * post(down(activation(gate(norm(x))) * up(norm(x)))). gated: (activation, constants, "
            "gate, its bias, up, its bias, down, its bias). constants: those of xielu, or a factor of the gate. A gate "
            "of None: down(activation(up)). Empty arrays: no bias. is_held: the experts after it add it. "
            "cutoff: gates become max(0, gate - mean - cutoff * deviation).")
        .def(
            "experts",
            [](Tape& tape, const std::string& module, Norm norm, SharedMatrix router, FloatArray router_bias,
               nb::list each, const std::string& score, float jitter, int num_chosen, bool is_normalised, float factor,
               FloatArray correction, int num_groups, int chosen_groups, int group_top_k, nb::list shared,
               SharedMatrix shared_gate, Norm router_norm, FloatArray scales, Norm own_post, Norm post,
               float residual_scale) {
                Routing routing{score_of(score), num_chosen,    is_normalised, factor, floats(correction),
                                num_groups,      chosen_groups, group_top_k,   jitter};
                routing.scales = floats(scales);
                Experts experts{router, floats(router_bias), {}, routing, {}, shared_gate, router_norm, own_post, post};
                for (nb::handle one : each) experts.each.push_back(gated_of(nb::cast<nb::tuple>(one)));
                for (nb::handle one : shared) experts.shared.push_back(gated_of(nb::cast<nb::tuple>(one)));
                tape.experts(module, norm, std::move(experts), residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("router"), nb::arg("router_bias"),
            nb::arg("each"), nb::arg("score"), nb::arg("jitter"), nb::arg("num_chosen"), nb::arg("is_normalised"),
            nb::arg("factor"), nb::arg("correction"), nb::arg("num_groups"), nb::arg("chosen_groups"),
            nb::arg("group_top_k"), nb::arg("shared"), nb::arg("shared_gate").none(), nb::arg("router_norm"),
            nb::arg("scales"), nb::arg("own_post"), nb::arg("post"), nb::arg("residual_scale"),
            "x += residual_scale * the sum of the chosen experts by their weights. each, shared: as `gated` of mlp; "
            "shared has one that all tokens use, or none; without shared_gate its weight is 1. router_norm: of what "
            "the "
            "router reads; empty: it reads what experts do. scales: of the experts' weights, or empty. With a held "
            "mlp: "
            "x += residual_scale * post(the mlp's result + own_post(the experts' sum)).")
        .def(
            "layer_inputs",
            [](Tape& tape, SharedMatrix table, SharedMatrix projection, Norm norm, float scale, float token_scale,
               float sum_scale) {
                tape.layer_inputs({table, {{projection}, {}}, norm, scale, token_scale, sum_scale});
            },
            nb::kw_only(), nb::arg("table"), nb::arg("projection"), nb::arg("norm"), nb::arg("scale"),
            nb::arg("token_scale"), nb::arg("sum_scale"),
            "A second embedding, of which each layer has a part: (norm(scale * projection(x)) + token_scale * "
            "table[token]) * sum_scale.")
        .def(
            "layer_input",
            [](Tape& tape, const std::string& module, int layer, SharedMatrix gate, const std::string& activation,
               SharedMatrix out,
               Norm post) { tape.layer_input(module, layer, {{gate}, {}}, gate_of(activation), {{out}, {}}, post); },
            nb::kw_only(), nb::arg("module"), nb::arg("layer"), nb::arg("gate"), nb::arg("activation"), nb::arg("out"),
            nb::arg("post"), "x += post(out(activation(gate(x)) * the layer's part of layer_inputs))")
        .def("add_given", &Tape::add_given, "x += the next part of a token's given embedding, if it has one")
        .def("scale", &Tape::scale, nb::arg("factor"), "x *= factor")
        .def("begin_streams", &Tape::begin_streams, nb::arg("into"),
             "Makes residual streams from x: x, and one per matrix.")
        .def("predict_streams", &Tape::predict_streams, nb::arg("mix"),
             "Predicts the streams of a layer; x = the first.")
        .def("correct_streams", &Tape::correct_streams, nb::arg("mix"),
             "Corrects the streams by the change of x; x = scale * the first.")
        .def("end_streams", &Tape::end_streams, nb::arg("out"),
             "x = the mean of the first stream and the projections of the others")
        .def(
            "low_rank",
            [](Tape& tape, const std::string& module, Norm norm, SharedMatrix left, SharedMatrix right, Norm post) {
                tape.low_rank(module, norm, {{left}, {}}, {{right}, {}}, post);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("left"), nb::arg("right"), nb::arg("post"),
            "Keeps y + post(right(left(y))) for `join`; y = norm(x).")
        .def("join", &Tape::join, nb::arg("factor"), "x = factor * (x + the vector that low_rank kept)")
        .def(
            "head",
            [](Tape& tape, Norm norm, SharedMatrix matrix, FloatArray bias, float scale, float softcap) {
                tape.head(norm, matrix, floats(bias), scale, softcap);
            },
            nb::kw_only(), nb::arg("norm"), nb::arg("matrix"), nb::arg("bias"), nb::arg("scale"), nb::arg("softcap"))
        .def(
            "load_adapter",
            [](Tape& tape, int number, const std::string& module, FloatRows down, FloatRows up) {
                if (down.shape(0) != up.shape(1)) throw std::invalid_argument("the factors differ in rank");
                tape.load_adapter(number, module, down.data(), up.data(), int(down.shape(0)), int(down.shape(1)),
                                  int(up.shape(0)));
            },
            nb::arg("number"), nb::arg("module"), nb::arg("down"), nb::arg("up"),
            "What rows with that adapter add to the module's outputs: up [outputs, rank] · (down [rank, inputs] · x).")
        .def("unload_adapter", &Tape::unload_adapter, nb::arg("number"))
        .def(
            "run",
            [](Tape& tape, nb::tuple rows, std::optional<FloatRows> embedded) {
                Step step = step_of(tape, rows, embedded ? &*embedded : nullptr);
                nb::gil_scoped_release release;
                tape.run(std::move(step));
            },
            nb::arg("rows"), nb::arg("embedded") = nb::none(),
            "rows: with the fields of contract.runner.Row. embedded: float32 [tokens with id -1, hidden].")
        .def(
            "best", [](const Tape& tape) { return tape.best().token_ids; },
            "Of each row of the last logits the lowest token that has the largest; -1 where a row has NaN or +inf, or "
            "-inf alone.")
        .def(
            "sampled",
            [](nb::handle self) {
                Tape& tape = nb::cast<Tape&>(self);
                const Best& best = tape.best();
                size_t rows = best.values.size();
                return nb::make_tuple(logits_view(self, tape, rows), copied(best.values), copied(best.token_ids));
            },
            "The logits of the last step float32 [rows that sample, vocab], valid until the next call, the largest "
            "of each row float32, and its token int64 as `best` has it.")
        .def(
            "score",
            [](nb::handle self, std::vector<int32_t> tokens) {
                Tape& tape = nb::cast<Tape&>(self);
                check_tokens(tape, tokens);
                {
                    nb::gil_scoped_release release;
                    tape.score(tokens);
                }
                return logits_view(self, tape, tokens.size());
            },
            nb::arg("tokens"),
            "Tokens of the last step -> their logits float32 [tokens, vocab], valid until the next call.")
        .def(
            "last_hidden",
            [](Tape& tape, std::vector<int32_t> tokens) {
                check_tokens(tape, tokens);
                auto out = std::make_unique<float[]>(tokens.size() * tape.hidden());
                tape.last_hidden(tokens, out.get());
                size_t shape[2] = {tokens.size(), size_t(tape.hidden())};
                float* data = out.release();
                nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
                return nb::ndarray<nb::numpy, float>(data, 2, shape, owner);
            },
            nb::arg("tokens"), "Tokens of the last step -> float32 [tokens, hidden] after the final norm.")
        .def("count_experts", &Tape::count_experts, nb::arg("is_on"),
             "Counts how many tokens each expert takes from now on, or no longer.")
        .def("take_expert_counts", &Tape::take_expert_counts,
             "The counts of each `experts`, in the order of recording, since they were last taken.")
        .def_prop_ro("seconds", &Tape::seconds, "Time spent computing, in all.")
        .def_prop_ro("threads", &Tape::threads, "How many shared the last step.");
}

}  // namespace tureen
