// The forward pass, for runner/graphs.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

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

// rows: of (token_ids, start, pages), each a sequence's share. Throws std::invalid_argument for what does not fit.
Step step_of(const Tape& tape, nb::handle rows, const std::vector<int32_t>& sampled, const FloatRows* embedded) {
    Step step;
    const KvCache& cache = tape.cache();
    int page_len = cache.layer(0).page_len;
    int given = 0;
    for (nb::handle row : rows) {
        nb::tuple parts = nb::cast<nb::tuple>(row);
        nb::tuple tokens = nb::cast<nb::tuple>(parts[0]), pages = nb::cast<nb::tuple>(parts[2]);
        Span span{step.tokens(), int(tokens.size()), nb::cast<int>(parts[1]), step.pages.size(), pages.size()};
        if (span.length < 1 || span.start < 0 || size_t(span.start) + span.length > span.num_pages * page_len)
            throw std::invalid_argument("a row's tokens do not fit its pages");
        for (nb::handle id : tokens) {
            int token_id = nb::cast<int>(id);
            if (token_id < -1 || token_id >= tape.vocab())
                throw std::invalid_argument("a token id is not in the vocabulary");
            given += token_id < 0;
            step.token_ids.push_back(token_id);
        }
        for (int i = 0; i < span.length; i++) {
            step.positions.push_back(span.start + i);
            step.span_of.push_back(int(step.spans.size()));
        }
        for (nb::handle page : pages) {
            int number = nb::cast<int>(page);
            if (number < 0 || number >= cache.num_pages()) throw std::invalid_argument("a page is not in the KV cache");
            step.pages.push_back(number);
        }
        step.spans.push_back(span);
    }
    if (step.spans.empty()) throw std::invalid_argument("a step has at least one row");
    for (int32_t token : sampled)
        if (token < 0 || token >= step.tokens()) throw std::invalid_argument("a sampled token is not in the step");
    if (given > 0) {
        if (embedded == nullptr || int(embedded->shape(0)) != given || int(embedded->shape(1)) != tape.hidden())
            throw std::invalid_argument("tokens without an id need one embedding each");
        step.embedded.assign(embedded->data(), embedded->data() + embedded->size());
    }
    step.sampled = sampled;
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

}  // namespace

void bind_tape(nb::module_& m) {
    using SharedMatrix = std::shared_ptr<PackedMatrix>;
    nb::class_<Tape>(m, "Tape", "A decoder's forward pass, recorded operation by operation, replayed with one call.")
        .def(nb::init<std::shared_ptr<Pool>, std::shared_ptr<KvCache>, int, int>(), nb::arg("pool"), nb::arg("cache"),
             nb::arg("hidden"), nb::arg("vocab"))
        .def("embed", &Tape::embed, nb::arg("table"), nb::arg("scale"))
        .def(
            "attention",
            [](Tape& tape, int layer, FloatArray norm, float eps, Matrices qkv, FloatArray qkv_bias, FloatArray q_norm,
               FloatArray k_norm, int num_heads, int num_kv_heads, int head_dim, float scale, int window,
               FloatArray frequencies, SharedMatrix out, FloatArray out_bias, FloatArray post) {
                AttentionShape shape{num_heads, num_kv_heads, head_dim, scale, window, floats(frequencies)};
                tape.attention(layer, {floats(norm), eps}, {std::move(qkv), floats(qkv_bias)}, {floats(q_norm), eps},
                               {floats(k_norm), eps}, shape, {{out}, floats(out_bias)}, {floats(post), eps});
            },
            nb::kw_only(), nb::arg("layer"), nb::arg("norm"), nb::arg("eps"), nb::arg("qkv"), nb::arg("qkv_bias"),
            nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
            nb::arg("scale"), nb::arg("window"), nb::arg("frequencies"), nb::arg("out"), nb::arg("out_bias"),
            nb::arg("post"), "x += post(out(attend(qkv(norm(x))))); empty arrays: no bias, no norm. window 0: none.")
        .def(
            "mlp",
            [](Tape& tape, FloatArray norm, float eps, SharedMatrix gate, FloatArray gate_bias, SharedMatrix up,
               FloatArray up_bias, const std::string& activation, SharedMatrix down, FloatArray down_bias,
               FloatArray post) {
                tape.mlp({floats(norm), eps}, {{gate}, floats(gate_bias)}, {{up}, floats(up_bias)}, gate_of(activation),
                         {{down}, floats(down_bias)}, {floats(post), eps});
            },
            nb::kw_only(), nb::arg("norm"), nb::arg("eps"), nb::arg("gate"), nb::arg("gate_bias"), nb::arg("up"),
            nb::arg("up_bias"), nb::arg("activation"), nb::arg("down"), nb::arg("down_bias"), nb::arg("post"),
            "x += post(down(activation(gate(norm(x))) * up(norm(x)))); empty arrays: no bias, no norm.")
        .def(
            "head",
            [](Tape& tape, FloatArray norm, float eps, SharedMatrix matrix) { tape.head({floats(norm), eps}, matrix); },
            nb::kw_only(), nb::arg("norm"), nb::arg("eps"), nb::arg("matrix"))
        .def(
            "run",
            [](nb::handle self, nb::list rows, std::vector<int32_t> sampled, std::optional<FloatRows> embedded) {
                Tape& tape = nb::cast<Tape&>(self);
                Step step = step_of(tape, rows, sampled, embedded ? &*embedded : nullptr);
                {
                    nb::gil_scoped_release release;
                    tape.run(std::move(step));
                }
                return logits_view(self, tape, sampled.size());
            },
            nb::arg("rows"), nb::arg("sampled"), nb::arg("embedded") = nb::none(),
            "rows: of (token ids, start, pages), tuples of ints. -> logits float32 [sampled, vocab], valid until the "
            "next "
            "call. embedded: float32 [tokens with id -1, hidden].")
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
        .def_prop_ro("seconds", &Tape::seconds, "Time spent computing, in all.");
}

}  // namespace tureen
