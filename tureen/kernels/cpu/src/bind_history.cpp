#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "history.h"

namespace nb = nanobind;

namespace tureen {

void bind_history(nb::module_& m) {
    nb::class_<History>(m, "History", "The tokens of one sequence, indexed to guess what follows.")
        .def(nb::init<>())
        .def("__len__", &History::size)
        .def(
            "append",
            [](History& history, const std::vector<int64_t>& tokens) { history.append(tokens.data(), tokens.size()); },
            nb::arg("tokens"), "Appends tokens.")
        .def(
            "look_up",
            [](const History& history, size_t most) {
                History::Found found = history.look_up(most);
                return std::pair(std::move(found.following), found.match);
            },
            nb::arg("most"),
            "Returns what followed the last earlier occurrence of the last three tokens, or else of the last two: "
            "`most` "
            "tokens, and the number of tokens, at most 32, that agree before them. Returns ([], 0) if there is none.");
}

}  // namespace tureen
