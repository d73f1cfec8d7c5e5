// Rows of logits and what was saved before each stage to what is shown of them: see tracing.h.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_rows.h"
#include "tracing.h"

namespace nb = nanobind;

namespace tureen {

namespace {

using History = std::vector<std::pair<std::optional<Vector<int64_t>>, Vector<float>>>;

Saved checked(const std::optional<Vector<int64_t>>& token_ids, const Vector<float>& values, int n) {
    size_t count = values.shape(0);
    if (count != (token_ids ? token_ids->shape(0) : size_t(n)))
        throw nb::value_error("as many logits must be saved as tokens are named, or all of the row");
    for (size_t i = 0; token_ids && i < count; i++) {
        int64_t token = token_ids->data()[i];
        if (token < 0 || token >= n) throw nb::index_error("no such token");
    }
    return {token_ids ? token_ids->data() : nullptr, {values.data(), values.data() + count}};
}

nb::tuple logits_of(const float* logits, size_t count) {
    nb::tuple shown = nb::steal<nb::tuple>(PyTuple_New(Py_ssize_t(count)));
    for (size_t i = 0; i < count; i++) {
        nb::object value =
            std::isfinite(logits[i]) ? nb::object(nb::float_(double(logits[i]))) : nb::object(nb::none());
        PyTuple_SET_ITEM(shown.ptr(), Py_ssize_t(i), value.release().ptr());
    }
    return shown;
}

nb::tuple numbers_of(const double* values, size_t count) {
    nb::tuple shown = nb::steal<nb::tuple>(PyTuple_New(Py_ssize_t(count)));
    for (size_t i = 0; i < count; i++)
        PyTuple_SET_ITEM(shown.ptr(), Py_ssize_t(i), nb::float_(values[i]).release().ptr());
    return shown;
}

nb::list bind_trace(Pool& pool, Logits logits, Vector<int64_t> rows, std::vector<History> histories,
                    Vector<int64_t> tokens, Vector<double> totals, int64_t width) {
    int n = width_of(logits);
    size_t count = rows.shape(0);
    const int64_t* row = checked_rows(logits, rows);
    if (histories.size() != count || tokens.shape(0) != count || totals.shape(0) != count)
        throw nb::value_error("rows, histories, tokens and totals must be as many");
    if (width < 1 || width > n) throw nb::value_error("width must be at least 1, and at most that of the vocabulary");
    std::vector<TracedRow> traced;
    for (size_t i = 0; i < count; i++) {
        int64_t token = tokens.data()[i];
        if (token < 0 || token >= n) throw nb::index_error("no such token");
        traced.push_back({logits.data() + row[i] * n, {}, token, totals.data()[i]});
        for (const auto& [token_ids, values] : histories[i]) traced[i].saved.push_back(checked(token_ids, values, n));
    }
    std::vector<Trace> traces(count);
    share(pool, int64_t(count), 2 * WEIGHT_COST * n,
          [&](int64_t i) { traces[size_t(i)] = trace(traced[size_t(i)], n, int(width)); });
    nb::list shown;
    for (const Trace& of_row : traces) {
        nb::list candidates, states;
        size_t columns = of_row.candidates.size();
        for (int64_t token : of_row.candidates) candidates.append(token);
        for (size_t s = 0; s < of_row.logits.size(); s += columns)
            states.append(
                nb::make_tuple(logits_of(&of_row.logits[s], columns), numbers_of(&of_row.probabilities[s], columns)));
        shown.append(nb::make_tuple(candidates, states));
    }
    return shown;
}

}  // namespace

void bind_tracing(nb::module_& m) {
    m.def("trace", bind_trace, nb::arg("pool"), nb::arg("logits").noconvert(), nb::arg("rows"), nb::arg("histories"),
          nb::arg("tokens"), nb::arg("totals"), nb::arg("width"),
          "How rows [k] came about: for each its candidates, and for each state their logits and their probabilities "
          "at temperature 1. histories[i] has, for each stage, the tokens that it changed or None for all, "
          "and their logits before it. The candidates are the `width` best of each state and tokens[i]. totals [k] are "
          "those of `totals` where they are known, else NaN.");
}

}  // namespace tureen
