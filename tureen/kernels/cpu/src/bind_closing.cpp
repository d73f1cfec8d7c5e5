// Languages: compiling them, and following outputs in them.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bind.h"
#include "closing_place.h"
#include "closing_program.h"
#include "closing_trie.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tureen {

namespace {

using Numbers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Trie> trie_of(const std::vector<nb::bytes>& tokens, const std::vector<int32_t>& end_ids,
                              size_t num_tokens, int64_t most_kept) {
    std::vector<std::string> texts;
    texts.reserve(tokens.size());
    for (const nb::bytes& token : tokens) texts.emplace_back(token.c_str(), token.size());
    nb::gil_scoped_release released;
    return std::make_shared<Trie>(std::move(texts), end_ids, num_tokens, most_kept);
}

void check_size(const Place& place, const Mask& mask) {
    if (mask.size() != place.num_words()) throw std::invalid_argument("a mask of another size");
}

nb::bytes program_of(const Numbers& tree, const Trie& trie) {
    std::string data;
    {
        nb::gil_scoped_release released;
        Program program = emit_program(tree.data(), tree.size());
        find_costs(program, trie);
        data = pack(program);
    }
    return nb::bytes(data.data(), data.size());
}

}  // namespace

void bind_closing(nb::module_& m) {
    nb::class_<Trie>(m, "Trie", "The tokens of a vocabulary, for the languages below.")
        .def_static(
            "of", &trie_of, "tokens"_a, "end_ids"_a, "num_tokens"_a, "most_kept"_a,
            "tokens: texts by id; b'': not a text token. end_ids: the tokens that end an output. num_tokens: bits of a "
            "mask. most_kept: configurations, about 40 bytes each, that all languages may keep.")
        .def_prop_ro("num_kept", [](const Trie& t) { return t.kept->total.load(); });
    m.def("closing_program", &program_of, "tree"_a, "trie"_a,
          "Compiles a language, as grammar/tree.py writes it. Raises RuntimeError where it is too large, ValueError.");
    nb::class_<Follower>(m, "Follower", "A compiled language.")
        .def(
            "__init__",
            [](Follower* self, nb::bytes program, std::shared_ptr<Trie> trie) {
                std::string data(program.c_str(), program.size());
                nb::gil_scoped_release released;
                new (self) Follower(unpack(data.data(), data.size()), trie);
            },
            "program"_a, "trie"_a)
        .def_prop_ro(
            "least", [](const Follower& f) { return f.program().least(); },
            "The fewest tokens of an output. Never more than are needed where no token is shared by two rules.")
        .def_prop_ro("num_instructions", [](const Follower& f) { return f.program().code.size(); })
        .def_prop_ro(
            "num_branches", [](const Follower& f) { return f.program().num_starts - 1; },
            "Other languages over the same rules, which guards ask about values.")
        .def_prop_ro("num_kept", &Follower::num_kept)
        .def_prop_ro("num_walked", [](const Follower& f) { return f.num_walked; });
    nb::class_<Place>(m, "Place", "Where an output is in a language. It takes the tokens that it is told.")
        .def(nb::init<std::shared_ptr<Follower>>(), "follower"_a)
        .def("accept", &Place::accept, "token_id"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Appends a token. Returns False, and changes nothing, if the language does not allow it.")
        .def(
            "fill",
            [](Place& self, Mask mask) {
                check_size(self, mask);
                nb::gil_scoped_release released;
                self.fill(mask.data());
            },
            "mask"_a, "Writes the next token's mask, with the end tokens if the output may end.")
        .def(
            "forced",
            [](Place& self, size_t most) {
                std::string text;
                {
                    nb::gil_scoped_release released;
                    text = self.forced(most);
                }
                return nb::bytes(text.data(), text.size());
            },
            "most"_a, "Returns the text that every continuation starts with, up to `most` bytes.")
        .def_prop_ro("accepts", &Place::accepts, nb::call_guard<nb::gil_scoped_release>(),
                     "Whether the output may end here.")
        .def_prop_ro("is_free", &Place::is_free, nb::call_guard<nb::gil_scoped_release>(),
                     "Whether it is in free text with which the output may go on without end, and may also end.")
        .def_prop_ro("is_over", &Place::is_over, nb::call_guard<nb::gil_scoped_release>(),
                     "Whether it can only end here.")
        .def("rollback", &Place::rollback, "num_tokens"_a)
        .def("cost", &Place::cost, nb::call_guard<nb::gil_scoped_release>(),
             "Tokens that it takes to come to an end, without one that ends the output.")
        .def("num_closing", &Place::num_closing, "token_ids"_a, "left"_a, nb::call_guard<nb::gil_scoped_release>(),
             "How many of these tokens may follow so that the output can still end within `left` tokens.")
        .def(
            "restrict",
            [](Place& self, Mask mask, int32_t left, int32_t words, int32_t sentences) {
                check_size(self, mask);
                nb::gil_scoped_release released;
                return int(self.restrict(mask.data(), left, {words, sentences}));
            },
            "mask"_a, "left"_a, "words"_a, "sentences"_a,
            "Removes tokens after which the output cannot end within `left` tokens. Returns 1 if it removed some "
            "because "
            "the end is near, 2 if the current word may be finished but no other one begun, else 0.")
        .def(
            "endings",
            [](const Place& self, Mask open, Mask nearer) {
                if (open.size() != self.open().size() || nearer.size() != self.nearer().size()) {
                    throw std::invalid_argument("masks of another size");
                }
                std::copy(self.open().begin(), self.open().end(), open.data());
                std::copy(self.nearer().begin(), self.nearer().end(), nearer.data());
            },
            "open"_a, "nearer"_a,
            "Where `restrict` took some: writes all tokens that could be closed in time, and those that lead nearer to "
            "the end.");
    m.attr("NEVER") = NEVER;
}

}  // namespace tureen
