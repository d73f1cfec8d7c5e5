#include "best.h"

#include <cmath>

#include "kernels.h"
#include "sampling.h"

namespace tureen {

// NaN stays.
void Best::Found::take(float other, int64_t other_id) {
    if (std::isnan(other) || other > value || (other == value && other_id < token_id)) *this = {other, other_id};
}

void Best::start(int rows, int threads) {
    found_.assign(size_t(rows) * threads, {-INFINITY, INT64_MAX});
    values.resize(rows);
    token_ids.resize(rows);
}

void Best::look(int thread, const float* logits, int width, int first, int count) {
    size_t rows = values.size();
    for (size_t row = 0; row < rows; row++) {
        float value;
        int64_t token_id;
        kernels().sampling->peak(logits + row * width + first, nullptr, count, &value, &token_id);
        found_[thread * rows + row].take(value, first + token_id);
    }
}

void Best::settle(const float* logits, int width) {
    size_t rows = values.size();
    for (size_t row = 0; row < rows; row++) {
        Found best = found_[row];
        for (size_t i = row + rows; i < found_.size(); i += rows) best.take(found_[i].value, found_[i].token_id);
        if (std::isnan(best.value))  // in some columns; of these all may have been -infinity
            kernels().sampling->peak(logits + row * width, nullptr, width, &best.value, &best.token_id);
        values[row] = best.value;
        token_ids[row] = std::isfinite(best.value) ? best.token_id : -1;
    }
}

}  // namespace tureen
