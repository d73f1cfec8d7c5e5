// How a row of logits came about, stage by stage: the best tokens of each state, and the probabilities of some tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tureen {

// What brings back a row as it was before a stage: `count` logits, at token_ids or, where this is null, all of the row.
struct Saved {
    const int64_t* token_ids;
    std::vector<float> values;

    int64_t token(size_t i) const { return token_ids == nullptr ? int64_t(i) : token_ids[i]; }
};

struct Trace {
    std::vector<int64_t> candidates;
    // One row for each state, the first one before all stages; a column for each candidate. At temperature 1.
    std::vector<float> logits;
    std::vector<double> probabilities;
};

struct TracedRow {
    float* logits;             // [n], after all stages; the same again afterwards
    std::vector<Saved> saved;  // of the stages, in order
    int64_t token;             // is a candidate
    double total;              // of the weights at temperature 1 where that is known and there is no stage; else NaN
};

// The candidates are the `width` best tokens of the last state, the row's token, then those of the others in order. A
// state takes no pass over the vocabulary but the first and those of stages that saved all of the row: where few
// logits changed, few weights are computed again. They stay relative to the peak of the first state while the state's
// own is near; so probabilities may differ in the last places from those that a softmax of the state would have.
Trace trace(TracedRow& row, int n, int width);

}  // namespace tureen
