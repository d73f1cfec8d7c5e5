// The forward pass, for runner/graphs.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
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
    throw std::invalid_argument("activation " + name + " is unknown; known: silu, gelu_pytorch_tanh");
}

// (activation, gate, its bias, up, its bias, down, its bias)
GatedLinear gated_of(nb::tuple parts) {
    if (parts.size() != 7) throw std::invalid_argument("an mlp has seven parts");
    auto linear = [&](int i) {
        return Linear{{nb::cast<std::shared_ptr<PackedMatrix>>(parts[i])}, floats(nb::cast<FloatArray>(parts[i + 1]))};
    };
    return {linear(1), linear(3), linear(5), gate_of(nb::cast<std::string>(parts[0]))};
}

// The fields of a contract.runner.Row that a step needs.
struct RowNames {
    nb::object token_ids = name("token_ids"), start = name("start"), pages = name("pages"), sample = name("sample");
    nb::object adapter = name("adapter");

    static nb::object name(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }
};

int checked(nb::handle number, int least, int end, const char* what) {
    int value = nb::cast<int>(number);
    if (value < least || value >= end) throw std::invalid_argument(what);
    return value;
}

// A row's share of the step. Throws std::invalid_argument for what does not fit.
void add_row(Step& step, const Tape& tape, nb::handle row) {
    static const RowNames& names = *new RowNames;  // outlives the interpreter, which frees nothing then
    const KvCache& cache = tape.cache();
    nb::tuple tokens = nb::cast<nb::tuple>(nb::getattr(row, names.token_ids));
    nb::tuple pages = nb::cast<nb::tuple>(nb::getattr(row, names.pages));
    int start = nb::cast<int>(nb::getattr(row, names.start));
    Span span{step.tokens(), int(tokens.size()), start, step.pages.size(), pages.size()};
    if (span.length < 1 || start < 0 || size_t(start) + span.length > span.num_pages * cache.layer(0).page_len)
        throw std::invalid_argument("a row's tokens do not fit its pages");
    for (nb::handle id : tokens)
        step.token_ids.push_back(checked(id, -1, tape.vocab(), "a token id is not in the vocabulary"));
    int adapter = nb::cast<int>(nb::getattr(row, names.adapter));
    for (int i = 0; i < span.length; i++) {
        step.positions.push_back(start + i);
        step.span_of.push_back(int(step.spans.size()));
        step.adapters.push_back(adapter);
    }
    for (nb::handle page : pages)
        step.pages.push_back(checked(page, 0, cache.num_pages(), "a page is not in the KV cache"));
    step.spans.push_back(span);
    if (nb::cast<bool>(nb::getattr(row, names.sample))) step.sampled.push_back(step.tokens() - 1);
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
        if (embedded == nullptr || embedded->shape(0) != given || int(embedded->shape(1)) != tape.hidden())
            throw std::invalid_argument("tokens without an id need one embedding each");
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
    nb::class_<Tape>(m, "Tape", "A decoder's forward pass, recorded operation by operation, replayed with one call.")
        .def(nb::init<std::shared_ptr<Pool>, std::shared_ptr<KvCache>, int, int>(), nb::arg("pool"), nb::arg("cache"),
             nb::arg("hidden"), nb::arg("vocab"))
        .def("embed", &Tape::embed, nb::arg("table"), nb::arg("scale"))
        .def(
            "attention",
            [](Tape& tape, const std::string& module, int layer, FloatArray norm, float eps, Matrices qkv,
               FloatArray qkv_bias, FloatArray q_norm, FloatArray k_norm, int num_heads, int num_kv_heads, int head_dim,
               float scale, float softcap, int window, FloatArray frequencies, float magnitude, SharedMatrix out,
               FloatArray out_bias, FloatArray post, float residual_scale) {
                Rope rope{floats(frequencies), magnitude};
                AttentionShape shape{num_heads, num_kv_heads, head_dim, scale, softcap, window, rope};
                tape.attention(module, layer, {floats(norm), eps}, {std::move(qkv), floats(qkv_bias)},
                               {floats(q_norm), eps}, {floats(k_norm), eps}, shape, {{out}, floats(out_bias)},
                               {floats(post), eps}, residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("layer"), nb::arg("norm"), nb::arg("eps"), nb::arg("qkv"),
            nb::arg("qkv_bias"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("num_heads"), nb::arg("num_kv_heads"),
            nb::arg("head_dim"), nb::arg("scale"), nb::arg("softcap"), nb::arg("window"), nb::arg("frequencies"),
            nb::arg("magnitude"), nb::arg("out"), nb::arg("out_bias"), nb::arg("post"), nb::arg("residual_scale"),
            "x += residual_scale * post(out(attend(qkv(norm(x))))); empty arrays: no bias, no norm, no rotation. "
            "window "
            "and softcap 0: none.")
        .def(
            "mlp",
            [](Tape& tape, const std::string& module, FloatArray norm, float eps, nb::tuple gated, FloatArray post,
               float residual_scale) {
                tape.mlp(module, {floats(norm), eps}, gated_of(gated), {floats(post), eps}, residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("eps"), nb::arg("gated"), nb::arg("post"),
            nb::arg("residual_scale"),
            "x += residual_scale * post(down(activation(gate(norm(x))) * up(norm(x)))). gated: (activation, gate, its "
            "bias, up, its bias, down, its bias); empty arrays: no bias, no norm.")
        .def(
            "experts",
            [](Tape& tape, const std::string& module, FloatArray norm, float eps, SharedMatrix router, nb::list each,
               int num_chosen, bool is_normalised, nb::list shared, SharedMatrix shared_gate, float residual_scale) {
                Experts experts{router, {}, num_chosen, is_normalised, {}, shared_gate};
                for (nb::handle one : each) experts.each.push_back(gated_of(nb::cast<nb::tuple>(one)));
                for (nb::handle one : shared) experts.shared.push_back(gated_of(nb::cast<nb::tuple>(one)));
                tape.experts(module, {floats(norm), eps}, std::move(experts), residual_scale);
            },
            nb::kw_only(), nb::arg("module"), nb::arg("norm"), nb::arg("eps"), nb::arg("router"), nb::arg("each"),
            nb::arg("num_chosen"), nb::arg("is_normalised"), nb::arg("shared"), nb::arg("shared_gate").none(),
            nb::arg("residual_scale"),
            "x += residual_scale * the sum of the chosen experts by their weights. each, shared: as `gated` of mlp; "
            "shared has one that all tokens use, or none.")
        .def(
            "head",
            [](Tape& tape, FloatArray norm, float eps, SharedMatrix matrix, float scale, float softcap) {
                tape.head({floats(norm), eps}, matrix, scale, softcap);
            },
            nb::kw_only(), nb::arg("norm"), nb::arg("eps"), nb::arg("matrix"), nb::arg("scale"), nb::arg("softcap"))
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
            "rows: with token_ids, start, pages, sample, as contract.runner.Row has them. embedded: float32 [tokens "
            "with "
            "id -1, hidden].")
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
