// Guards. Their facts are converted from the objects of grammar/guard/facts.py.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <vector>

#include "bind.h"
#include "guard.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tureen {

namespace {

using guard::Facts;
using guard::Guard;
using guard::Node;
using guard::Step;
using guard::Tokens;
using guard::Variants;
using Mask = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Converts a count; WITHOUT for None. Larger counts become the largest number.
int64_t count_of(nb::handle value) {
    if (value.is_none()) return guard::WITHOUT;
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (number == -1 && overflow == 0 && PyErr_Occurred() != nullptr) throw nb::python_error();
    constexpr int64_t MOST = int64_t(1) << 60;
    return overflow > 0 || number > MOST ? MOST : overflow < 0 || number < 0 ? 0 : number;
}

std::string bytes_of(nb::handle value) {
    const nb::bytes bytes = nb::cast<nb::bytes>(value);
    return std::string(bytes.c_str(), bytes.size());
}

std::string key_of(nb::handle value) { return bytes_of(value.attr("encode")("utf-8", "surrogatepass")); }

int32_t number_of(nb::handle value) { return nb::cast<int32_t>(value); }

std::vector<int32_t> numbers_of(nb::handle values) { return nb::cast<std::vector<int32_t>>(values); }

Variants variants_of(nb::handle values) {
    Variants variants;
    for (nb::handle value : values) {
        variants.push_back(
            {number_of(value.attr("node")), number_of(value.attr("branch")), nb::cast<bool>(value.attr("counts"))});
    }
    return variants;
}

guard::KeySet key_set_of(nb::handle value) {
    guard::KeySet keys;
    for (nb::handle moves : value.attr("moves")) {
        keys.moves.emplace_back();
        for (nb::handle move : moves) {
            keys.moves.back().push_back({count_of(move[0]), count_of(move[1]), number_of(move[2])});
        }
    }
    keys.accepting = nb::cast<std::vector<bool>>(value.attr("accepting"));
    return keys;
}

Node node_of(nb::handle value) {
    Node node;
    node.is_unique = nb::cast<bool>(value.attr("is_unique"));
    node.least_keys = count_of(value.attr("least_keys"));
    node.has_step = !value.attr("step").is_none();
    node.first_items = numbers_of(value.attr("first_items"));
    node.items = number_of(value.attr("items"));
    node.others = number_of(value.attr("others"));
    for (nb::handle pair : value.attr("keys").attr("items")()) node.keys[key_of(pair[0])] = number_of(pair[1]);
    for (nb::handle pair : value.attr("key_sets")) {
        node.key_sets.emplace_back(key_set_of(pair[0]), number_of(pair[1]));
    }
    node.arrays = variants_of(value.attr("arrays"));
    node.objects = variants_of(value.attr("objects"));
    const nb::object count = value.attr("count");
    node.has_count = !count.is_none();
    if (!node.has_count) return node;
    node.count.start = count_of(count.attr("start"));
    node.count.least = count_of(count.attr("least"));
    node.count.most = count_of(count.attr("most"));
    node.count.most_items = count_of(count.attr("most_items"));
    for (nb::handle variants : count.attr("first")) node.count.first.push_back(variants_of(variants));
    node.count.rest = variants_of(count.attr("rest"));
    return node;
}

int32_t other_step(nb::handle value) { return value.is_none() ? guard::NO_STEP : number_of(value); }

// `kinds`: the numbers of the types of steps.
Step step_of(nb::handle value, const nb::dict& kinds) {
    Step step;
    step.kind = Step::Kind(nb::cast<int>(kinds[value.type()]));
    if (step.kind == Step::FIXED || step.kind == Step::FREE) {
        for (nb::handle pair : value.attr(step.kind == Step::FIXED ? "texts" : "stops")) {
            step.texts.emplace_back(bytes_of(pair[0]), number_of(pair[1]));
        }
    }
    if (step.kind == Step::FIXED) step.otherwise = other_step(value.attr("otherwise"));
    if (step.kind == Step::FREE) {
        step.most_tokens = count_of(value.attr("most_tokens"));
        for (nb::handle text : value.attr("never")) step.never.push_back(bytes_of(text));
    }
    if (step.kind == Step::VALUE) {
        step.node = number_of(value.attr("node"));
        step.then = number_of(value.attr("then"));
        step.otherwise = other_step(value.attr("free"));
    }
    if (step.kind == Step::KEY) {
        for (nb::handle stop : value.attr("stops")) step.stops.push_back(bytes_of(stop));
        for (nb::handle pair : value.attr("keys").attr("items")()) step.keys[key_of(pair[0])] = numbers_of(pair[1]);
        step.others = numbers_of(value.attr("others"));
    }
    return step;
}

std::shared_ptr<Facts> facts_of(nb::handle value, const nb::dict& kinds, const Follower& language) {
    auto facts = std::make_shared<Facts>();
    try {
        for (nb::handle node : value.attr("nodes")) facts->nodes.push_back(node_of(node));
        for (nb::handle step : value.attr("steps")) facts->steps.push_back(step_of(step, kinds));
        facts->start = number_of(value.attr("start"));
    } catch (const nb::cast_error&) {
        throw std::invalid_argument("the facts of a guard are not of this version");
    }
    facts->check(size_t(language.program().num_starts) - 1);
    return facts;
}

guard::Multiples multiples_of(nb::callable judged) {
    return [judged = std::move(judged)](int32_t node, std::string_view number, bool is_whole) {
        nb::gil_scoped_acquire held;
        return nb::cast<bool>(judged(node, nb::bytes(number.data(), number.size()), is_whole));
    };
}

}  // namespace

void bind_guard(nb::module_& m) {
    nb::class_<Tokens>(m, "GuardTokens", "The tokens of a vocabulary, indexed for guards.")
        .def(
            "__init__", [](Tokens* self, std::shared_ptr<Trie> trie) { new (self) Tokens(std::move(trie)); }, "trie"_a)
        .def(
            "beginning",
            [](const Tokens& self, nb::bytes text) {
                return self.beginning(std::string_view(text.c_str(), text.size()));
            },
            "text"_a, "Returns the tokens that a text begins with.");
    nb::class_<Facts>(m, "GuardFacts", "The facts that a guard enforces.")
        .def_static("of", &facts_of, "facts"_a, "kinds"_a, "language"_a,
                    "kinds: the number of each type of step. Raises ValueError for facts with a wrong reference.");
    nb::class_<Guard>(m, "Guard", "The place of a guarded output.")
        .def(
            "__init__",
            [](Guard* self, std::shared_ptr<Facts> facts, std::shared_ptr<Tokens> tokens,
               std::shared_ptr<Follower> language, nb::callable multiples) {
                new (self)
                    Guard(std::move(facts), std::move(tokens), std::move(language), multiples_of(std::move(multiples)));
            },
            "facts"_a, "tokens"_a, "language"_a, "multiples"_a,
            "multiples(node, number, is_whole): returns whether a number is a multiple, or can become one.")
        .def(
            "fill",
            [](Guard& self, Mask mask) {
                if (mask.size() != self.num_words()) throw std::invalid_argument("a mask of another size");
                nb::gil_scoped_release released;
                self.fill(mask.data());
            },
            "mask"_a, "Writes the tokens that are allowed and leave a valid continuation.")
        .def("accept", &Guard::accept, "token_id"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Appends a token. Returns False, and changes nothing, if it is not allowed.")
        .def("rollback", &Guard::rollback, "num_tokens"_a)
        .def(
            "allows",
            [](Guard& self, nb::bytes text) {
                const std::string next(text.c_str(), text.size());
                nb::gil_scoped_release released;
                return self.allows(next);
            },
            "text"_a, "Returns whether appending a text, which the language allows, breaks no fact.")
        .def_prop_ro(
            "number",
            [](Guard& self) -> nb::object {
                std::string text;
                int32_t node = 0;
                bool is_number;
                {
                    nb::gil_scoped_release released;
                    is_number = self.number(text, node);
                }
                if (!is_number) return nb::none();
                return nb::make_tuple(nb::bytes(text.data(), text.size()), node);
            },
            "The number that is being written, if it must be a multiple, and its node; or None.")
        .def_prop_ro("num_places", &Guard::num_places, "How many things the value that is being written may be.")
        .def_prop_ro("num_parts_read", &Guard::num_parts_read,
                     "Parts of items and keys that were compared so far, for tests that count work.")
        .def_prop_ro("accepts", &Guard::accepts, nb::call_guard<nb::gil_scoped_release>(),
                     "Whether the output may end here.")
        .def_prop_ro(
            "language", [](Guard& self) -> Place& { return self.language; }, nb::rv_policy::reference_internal,
            "The place in the language without the guard.");
    m.attr("MAX_GUARD_PLACES") = guard::MAX_PLACES;
}

}  // namespace tureen
