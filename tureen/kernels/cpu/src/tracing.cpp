#include "tracing.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels.h"
#include "ranking.h"
#include "sampling.h"

namespace tureen {
namespace {

constexpr double NEAR = 64.0;  // of peaks: weights relative to one have the same digits relative to the other

// Puts what was saved into the row, and what was there in its place.
void undo(float* logits, Saved& saved) {
    for (size_t i = 0; i < saved.values.size(); i++) std::swap(logits[saved.token(i)], saved.values[i]);
}

// Takes that back. The order is the other one: a token may be named twice.
void redo(float* logits, Saved& saved) {
    for (size_t i = saved.values.size(); i-- > 0;) std::swap(logits[saved.token(i)], saved.values[i]);
}

double total_of(const std::vector<double>& sums) {
    double total = 0.0;
    for (double sum : sums) total += sum;
    return total;
}

// The softmax and the best tokens of a row that changes. It is kept for the buffers.
class State {
public:
    void start(const float* logits, int n, int width, bool changes) {
        n_ = n;
        logits_ = logits;
        changes_ = changes;
        find_peaks(logits, n, peaks_);
        find_best(width);
    }

    // The sums of all weights, relative to the largest logit.
    double whole_total() {
        reference_ = peak();
        sums_.resize((size_t(n_) + WEIGHT_BLOCK - 1) / WEIGHT_BLOCK);
        if (changes_) {
            weights_.resize(size_t(n_));
            kernels().sampling->weights(logits_, n_, reference_, 1.0, weights_.data());
            kernels().sampling->fold_blocks(weights_.data(), n_, sums_.data());
        } else {
            kernels().sampling->weight_sums(logits_, n_, reference_, 1.0, sums_.data());
        }
        return total_of(sums_);
    }

    // The same after some logits have changed: `before` has what they were.
    double changed_total(const Saved& before, int width) {
        find_changed(before);
        for_each_block(PEAK_BLOCK, [&](int begin, int count) {
            kernels().sampling->block_peaks(logits_ + begin, count, &peaks_[size_t(begin / PEAK_BLOCK)]);
        });
        find_best(width);
        if (!(std::fabs(peak() - reference_) < NEAR)) return whole_total();
        weigh_changed();
        for_each_block(WEIGHT_BLOCK, [&](int begin, int count) {
            kernels().sampling->fold_blocks(&weights_[size_t(begin)], count, &sums_[size_t(begin / WEIGHT_BLOCK)]);
        });
        double total = total_of(sums_);
        return peak() == reference_ ? total : total * std::exp(reference_ - peak());
    }

    double peak() const { return logits_[best_[0]]; }
    const std::vector<int64_t>& best() const { return best_; }

private:
    void find_best(int width) {
        best_.resize(size_t(width));
        best_tokens(logits_, n_, peaks_, width, best_.data());
    }

    void find_changed(const Saved& before) {
        changed_.clear();
        for (size_t i = 0; i < before.values.size(); i++) {
            int64_t token = before.token(i);
            if (logits_[token] != before.values[i]) changed_.push_back(int(token));
        }
        if (before.token_ids != nullptr) std::sort(changed_.begin(), changed_.end());
    }

    void weigh_changed() {
        static thread_local std::vector<float> own;
        static thread_local std::vector<double> weights;
        own.clear();
        for (int token : changed_) {
            if (logits_[token] != -INFINITY) own.push_back(logits_[token]);
        }
        weights.resize(own.size());
        kernels().sampling->weights(own.data(), int(own.size()), reference_, 1.0, weights.data());
        size_t place = 0;
        for (int token : changed_) weights_[size_t(token)] = logits_[token] == -INFINITY ? 0.0 : weights[place++];
    }

    // body(begin, count) of the blocks in which something has changed.
    template <class Body>
    void for_each_block(int size, const Body& body) {
        int end = 0;  // of the last block
        for (int token : changed_) {
            if (token < end) continue;
            int begin = token / size * size;
            end = std::min(n_, begin + size);
            body(begin, end - begin);
        }
    }

    int n_ = 0;
    const float* logits_ = nullptr;
    bool changes_ = false;
    double reference_ = 0.0;  // peak of the weights
    std::vector<float> peaks_;
    std::vector<double> weights_, sums_;
    std::vector<int64_t> best_;
    std::vector<int> changed_;  // tokens, ascending
};

void add_new(std::vector<int64_t>& tokens, const std::vector<int64_t>& more) {
    for (int64_t token : more) {
        if (std::find(tokens.begin(), tokens.end(), token) == tokens.end()) tokens.push_back(token);
    }
}

}  // namespace

Trace trace(TracedRow& row, int n, int width) {
    static thread_local State state;
    size_t num_states = row.saved.size() + 1;
    std::vector<double> peaks(num_states), totals(num_states);
    std::vector<std::vector<int64_t>> best(num_states);
    for (size_t s = row.saved.size(); s > 0; s--) undo(row.logits, row.saved[s - 1]);
    state.start(row.logits, n, width, num_states > 1);
    totals[0] = num_states == 1 && !std::isnan(row.total) ? row.total : state.whole_total();
    for (size_t s = 0;; s++) {
        best[s] = state.best();
        peaks[s] = state.peak();
        if (s + 1 == num_states) break;
        redo(row.logits, row.saved[s]);
        totals[s + 1] = state.changed_total(row.saved[s], width);
    }

    Trace traced;
    add_new(traced.candidates, best.back());
    add_new(traced.candidates, {row.token});
    for (size_t s = 0; s + 1 < num_states; s++) add_new(traced.candidates, best[s]);
    size_t count = traced.candidates.size();
    traced.logits.resize(num_states * count);
    traced.probabilities.resize(num_states * count);
    for (size_t s = num_states; s-- > 0;) {
        float* logits = &traced.logits[s * count];
        double* shares = &traced.probabilities[s * count];
        for (size_t i = 0; i < count; i++) logits[i] = row.logits[traced.candidates[i]];
        kernels().sampling->weights(logits, int(count), peaks[s], 1.0, shares);
        for (size_t i = 0; i < count; i++) shares[i] /= totals[s];
        if (s > 0) undo(row.logits, row.saved[s - 1]);
    }
    for (Saved& saved : row.saved) redo(row.logits, saved);
    return traced;
}

}  // namespace tureen
