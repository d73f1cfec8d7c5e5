// Rows of logits to tokens. What the instruction set does not matter for is here: draws and the ranking.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "bind_rows.h"
#include "kernels.h"
#include "pool.h"
#include "ranking.h"
#include "sampling.h"

namespace nb = nanobind;

namespace tureen {

namespace {

using Mask = Vector<uint32_t>;
using Sums = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr double RANK_COST = 8.0;

constexpr int64_t NOT_SOUND = -1, NOTHING_ALLOWED = -2;  // in place of a token

enum class Operation : int { ADD, WEAKEN, FORBID };

// Rows whose softmax is wanted: peaks [rows] are the largest logits, temperatures [rows] more than 0.
struct Softmaxes {
    Softmaxes(const Logits& logits, const Vector<int64_t>& rows, const Vector<float>& peaks,
              const Vector<double>& temperatures)
        : count(int64_t(rows.shape(0))),
          n(width_of(logits)),
          logits_(logits.data()),
          rows_(checked_rows(logits, rows)),
          peaks_(peaks.data()),
          temperatures_(temperatures.data()) {
        if (peaks.shape(0) != rows.shape(0) || temperatures.shape(0) != rows.shape(0))
            throw nb::value_error("rows, peaks and temperatures must be as many");
    }

    const float* row(int64_t i) const { return logits_ + rows_[i] * n; }
    double peak(int64_t i) const { return peaks_[i]; }
    double scale(int64_t i) const { return std::min(1.0 / temperatures_[i], DBL_MAX); }
    size_t num_blocks() const { return (size_t(n) + WEIGHT_BLOCK - 1) / WEIGHT_BLOCK; }

    // Sums of the weights of every 256 tokens, until the next call on this thread.
    const std::vector<double>& sums(int64_t i) const {
        static thread_local std::vector<double> sums;
        sums.resize(num_blocks());
        kernels().sampling->weight_sums(row(i), n, peak(i), scale(i), sums.data());
        return sums;
    }

    const int64_t count;
    const int n;

private:
    const float* logits_;
    const int64_t* rows_;
    const float* peaks_;
    const double* temperatures_;
};

double total_of(const std::vector<double>& sums) {
    double total = 0.0;
    for (double sum : sums) total += sum;
    return total;
}

// The first place with a weight at which the running sum, which is `before` at first, exceeds the target; else the last
// place with a weight. `before` becomes the sum before that place.
int64_t first_above(const double* weights, int64_t count, double target, double* before) {
    int64_t last = 0;
    double running = *before;
    for (int64_t i = 0; i < count; i++) {
        if (!(weights[i] > 0.0)) continue;
        last = i;
        *before = running;
        running += weights[i];
        if (running > target) break;
    }
    return last;
}

int64_t draw(const Softmaxes& softmaxes, int64_t i, const std::vector<double>& sums, double uniform) {
    double target = uniform * total_of(sums), before = 0.0;
    int64_t begin = first_above(sums.data(), int64_t(sums.size()), target, &before) * WEIGHT_BLOCK;
    int count = int(std::min<int64_t>(WEIGHT_BLOCK, softmaxes.n - begin));
    double weights[WEIGHT_BLOCK];
    kernels().sampling->weights(softmaxes.row(i) + begin, count, softmaxes.peak(i), softmaxes.scale(i), weights);
    return begin + first_above(weights, count, target, &before);
}

int clamp_width(int64_t width, int n) {
    if (width < 1) throw nb::value_error("width must be at least 1");
    return int(std::min<int64_t>(width, n));
}

nb::tuple bind_peaks(Pool& pool, Logits logits) {
    size_t rows = logits.shape(0);
    int n = width_of(logits);
    Table<float> values(rows, 1);
    Table<int64_t> indices(rows, 1);
    share(pool, int64_t(rows), n,
          [&](int64_t i) { kernels().sampling->peak(logits.data() + i * n, nullptr, n, values[i], indices[i]); });
    return nb::make_tuple(values.give_column(), indices.give_column());
}

void check_mask(const Mask& mask, int n) {
    if (mask.shape(0) * 32 < size_t(n)) throw nb::value_error("a mask has too few words");
}

std::vector<int64_t> bind_greedy(Pool& pool, Logits logits, std::vector<std::optional<Mask>> masks) {
    std::vector<int64_t> tokens(logits.shape(0));
    int n = width_of(logits);
    if (!masks.empty() && masks.size() != tokens.size()) throw nb::value_error("rows and masks must be as many");
    for (const auto& mask : masks) {
        if (mask) check_mask(*mask, n);
    }
    share(pool, int64_t(tokens.size()), masks.empty() ? n : 2.0 * n, [&](int64_t i) {
        const uint32_t* mask = masks.empty() || !masks[i] ? nullptr : masks[i]->data();
        float value;
        kernels().sampling->peak(logits.data() + i * n, mask, n, &value, &tokens[i]);
        if (!std::isfinite(value)) tokens[i] = std::isnan(value) ? NOT_SOUND : NOTHING_ALLOWED;
    });
    return tokens;
}

nb::tuple bind_forbid(Pool& pool, Logits logits, Vector<int64_t> rows, std::vector<Mask> masks) {
    int n = width_of(logits);
    const int64_t* row = checked_rows(logits, rows);
    if (masks.size() != rows.shape(0)) throw nb::value_error("rows and masks must be as many");
    for (const Mask& mask : masks) check_mask(mask, n);
    Table<float> values(masks.size(), 1);
    Table<int64_t> indices(masks.size(), 1);
    share(pool, int64_t(masks.size()), 2.0 * n, [&](int64_t i) {
        float* mine = logits.data() + row[i] * n;
        kernels().sampling->peak(mine, masks[i].data(), n, values[i], indices[i]);
        kernels().sampling->forbid(mine, masks[i].data(), n, mine);
    });
    return nb::make_tuple(values.give_column(), indices.give_column());
}

void bind_change(Logits logits, int64_t row, Operation operation, Vector<int64_t> token_ids, Vector<double> values) {
    int n = width_of(logits);
    if (row < 0 || row >= int64_t(logits.shape(0))) throw nb::index_error("no such row");
    if (token_ids.shape(0) != values.shape(0)) throw nb::value_error("token ids and values must be as many");
    const int64_t* ids = token_ids.data();
    for (size_t i = 0; i < token_ids.shape(0); i++) {
        if (ids[i] < 0 || ids[i] >= n) throw nb::index_error("no such token");
    }
    for (size_t i = 0; i < token_ids.shape(0); i++) {
        float& logit = logits.data()[row * n + ids[i]];
        double old = logit, value = values.data()[i];
        if (operation == Operation::FORBID) {
            logit = -INFINITY;
        } else if (operation == Operation::ADD) {
            logit = float(old + value);
        } else {
            double weaker = old > 0 ? old / value : old * value;
            logit = float(weaker > FLT_MAX ? FLT_MAX : weaker);
        }
    }
}

Result<double> bind_totals(Pool& pool, Logits logits, Vector<int64_t> rows, Vector<float> peaks,
                           Vector<double> temperatures) {
    Softmaxes softmaxes(logits, rows, peaks, temperatures);
    Table<double> totals(rows.shape(0), 1);
    share(pool, softmaxes.count, WEIGHT_COST * softmaxes.n,
          [&](int64_t i) { *totals[i] = total_of(softmaxes.sums(i)); });
    return totals.give_column();
}

Result<int64_t> bind_draw(Pool& pool, Logits logits, Vector<int64_t> rows, Vector<float> peaks,
                          Vector<double> temperatures, Vector<double> uniforms) {
    Softmaxes softmaxes(logits, rows, peaks, temperatures);
    if (uniforms.shape(0) != rows.shape(0)) throw nb::value_error("rows and uniform numbers must be as many");
    Table<int64_t> tokens(rows.shape(0), 1);
    share(pool, softmaxes.count, WEIGHT_COST * softmaxes.n,
          [&](int64_t i) { *tokens[i] = draw(softmaxes, i, softmaxes.sums(i), uniforms.data()[i]); });
    return tokens.give_column();
}

nb::tuple bind_draw_noting(Pool& pool, Logits logits, Vector<int64_t> rows, Vector<float> peaks,
                           Vector<double> temperatures, Vector<double> uniforms) {
    Softmaxes softmaxes(logits, rows, peaks, temperatures);
    if (uniforms.shape(0) != rows.shape(0)) throw nb::value_error("rows and uniform numbers must be as many");
    Table<int64_t> tokens(rows.shape(0), 1);
    Table<double> totals(rows.shape(0), 1), noted(rows.shape(0), softmaxes.num_blocks());
    share(pool, softmaxes.count, WEIGHT_COST * softmaxes.n, [&](int64_t i) {
        const std::vector<double>& sums = softmaxes.sums(i);
        *tokens[i] = draw(softmaxes, i, sums, uniforms.data()[i]);
        *totals[i] = total_of(sums);
        std::copy(sums.begin(), sums.end(), noted[i]);
    });
    return nb::make_tuple(tokens.give_column(), totals.give_column(), noted.give());
}

// Where `draw` draws a token: the sum of the weights before it; and its own weight.
std::pair<double, double> span_of(const Softmaxes& softmaxes, int64_t i, const double* sums, int64_t token) {
    int64_t block = token / WEIGHT_BLOCK, begin = block * WEIGHT_BLOCK;
    int count = int(std::min<int64_t>(WEIGHT_BLOCK, softmaxes.n - begin));
    double before = 0.0, weights[WEIGHT_BLOCK];
    for (int64_t b = 0; b < block; b++) before += sums[b];
    kernels().sampling->weights(softmaxes.row(i) + begin, count, softmaxes.peak(i), softmaxes.scale(i), weights);
    for (int64_t j = 0; j < token - begin; j++) before += weights[j];
    return {before, weights[token - begin]};
}

nb::tuple bind_spans(Pool& pool, Logits logits, Vector<int64_t> rows, Vector<float> peaks, Vector<double> temperatures,
                     Sums noted, Tokens token_ids) {
    Softmaxes softmaxes(logits, rows, peaks, temperatures);
    if (noted.shape(0) != rows.shape(0) || noted.shape(1) != softmaxes.num_blocks())
        throw nb::value_error("there must be sums of each row, one for every 256 tokens");
    if (token_ids.shape(0) != rows.shape(0)) throw nb::value_error("rows and lists of tokens must be as many");
    size_t columns = token_ids.shape(1);
    const int64_t* ids = token_ids.data();
    for (size_t i = 0; i < rows.shape(0) * columns; i++) {
        if (ids[i] < 0 || ids[i] >= softmaxes.n) throw nb::index_error("no such token");
    }
    Table<double> starts(rows.shape(0), columns), weights(rows.shape(0), columns);
    share(pool, softmaxes.count, WEIGHT_COST * WEIGHT_BLOCK * double(columns), [&](int64_t i) {
        const double* sums = noted.data() + size_t(i) * noted.shape(1);
        for (size_t j = 0; j < columns; j++)
            std::tie(starts[i][j], weights[i][j]) = span_of(softmaxes, i, sums, ids[size_t(i) * columns + j]);
    });
    return nb::make_tuple(starts.give(), weights.give());
}

Result<int64_t> bind_best(Pool& pool, Logits logits, Vector<int64_t> rows, int64_t width) {
    int n = width_of(logits), columns = clamp_width(width, n);
    const int64_t* row = checked_rows(logits, rows);
    Table<int64_t> tokens(rows.shape(0), size_t(columns));
    share(pool, int64_t(rows.shape(0)), RANK_COST * n,
          [&](int64_t i) { best_tokens(logits.data() + row[i] * n, n, columns, tokens[i]); });
    return tokens.give();
}

nb::tuple bind_rank(Pool& pool, Logits logits, Vector<int64_t> rows, Vector<float> peaks, Vector<double> temperatures,
                    int64_t width) {
    Softmaxes softmaxes(logits, rows, peaks, temperatures);
    int columns = clamp_width(width, softmaxes.n);
    Table<int64_t> tokens(rows.shape(0), size_t(columns));
    Table<double> weights(rows.shape(0), size_t(columns)), totals(rows.shape(0), 1);
    share(pool, softmaxes.count, (RANK_COST + WEIGHT_COST) * softmaxes.n, [&](int64_t i) {
        static thread_local std::vector<float> ranked;
        ranked.resize(size_t(columns));
        best_tokens(softmaxes.row(i), softmaxes.n, columns, tokens[i]);
        for (int j = 0; j < columns; j++) ranked[size_t(j)] = softmaxes.row(i)[tokens[i][j]];
        kernels().sampling->weights(ranked.data(), columns, softmaxes.peak(i), softmaxes.scale(i), weights[i]);
        *totals[i] = total_of(softmaxes.sums(i));
    });
    return nb::make_tuple(tokens.give(), weights.give(), totals.give_column());
}

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::enum_<Operation>(m, "Operation", "What becomes of a logit and a number.")
        .value("ADD", Operation::ADD)
        .value("WEAKEN", Operation::WEAKEN)
        .value("FORBID", Operation::FORBID);
    auto logits = nb::arg("logits").noconvert();
    m.def(
        "peaks", bind_peaks, nb::arg("pool"), logits,
        "The largest logit [rows] float32 and the lowest token [rows] int64 that has it, of logits [rows, vocabulary] "
        "float32. NaN and 0 where a row has NaN or +inf, or -inf alone.");
    m.def("greedy", bind_greedy, nb::arg("pool"), logits, nb::arg("masks"),
          "The token of `peaks` for each row, among those that its mask allows; -1 where there is none, -2 where only "
          "the mask is why. masks: none at all, or one for each row, or None for it.");
    m.def("forbid", bind_forbid, nb::arg("pool"), logits, nb::arg("rows"), nb::arg("masks"),
          "logits[rows[i], token] = -inf wherever masks[i] [words] uint32 has no bit. Returns the peaks of these rows; "
          "-inf and 0 where only the mask is why there is none.");
    m.def("change", bind_change, logits, nb::arg("row"), nb::arg("operation"), nb::arg("token_ids"), nb::arg("values"),
          "Changes logits[row, token_ids], in float64: ADD the value; WEAKEN divides what is positive by the value and "
          "multiplies the rest, up to the largest float32; FORBID makes it -inf.");
    m.def("totals", bind_totals, nb::arg("pool"), logits, nb::arg("rows"), nb::arg("peaks"), nb::arg("temperatures"),
          "[k] float64: sums of exp((logit - peak) / temperature) over rows [k].");
    m.def("draw", bind_draw, nb::arg("pool"), logits, nb::arg("rows"), nb::arg("peaks"), nb::arg("temperatures"),
          nb::arg("uniforms"),
          "[k] int64: in token order, the first whose running weight exceeds uniform * total of its row.");
    m.def("draw_noting", bind_draw_noting, nb::arg("pool"), logits, nb::arg("rows"), nb::arg("peaks"),
          nb::arg("temperatures"), nb::arg("uniforms"),
          "`draw`, `totals`, and the sums of the weights of every 256 tokens [k, blocks] float64, in which it looked.");
    m.def(
        "spans", bind_spans, nb::arg("pool"), logits, nb::arg("rows"), nb::arg("peaks"), nb::arg("temperatures"),
        nb::arg("sums"), nb::arg("token_ids"),
        "Where `draw_noting`, which gave the sums, draws token_ids [k, t]: the sums of the weights before them [k, t] "
        "float64, and their weights [k, t] float64.");
    m.def("best", bind_best, nb::arg("pool"), logits, nb::arg("rows"), nb::arg("width"),
          "[k, width] int64: the tokens with the largest logits, best first, lower ids first among equals.");
    m.def("rank", bind_rank, nb::arg("pool"), logits, nb::arg("rows"), nb::arg("peaks"), nb::arg("temperatures"),
          nb::arg("width"), "`best`, their weights [k, width] float64, and `totals`.");
}

}  // namespace tureen
