// How many threads of a pool share a step: as many as steps were fastest with. It has no clock: times go in, a number
// comes out, and no result depends on it.
#pragma once

#include <algorithm>

namespace tureen {

class ThreadTuner {
public:
    // asks_first: fewer threads are tried at the beginning, since two processors may be one core.
    ThreadTuner(int most, bool asks_first) : most_(most), now_(most), asks_first_(asks_first) {}

    // For the next step.
    int threads() const { return other_ != 0 && is_others_turn() ? other_ : now_; }

    // A step of `tokens` took `seconds` with threads(); that one of them that waited most for others waited `waited` of
    // these. Whether the number for steps to come has changed.
    bool took(int tokens, double seconds, double waited) {
        if (most_ == 1) return false;
        if (other_ != 0) return compare({tokens, seconds});
        steps_++;
        waiting_ += (waited / seconds - waiting_) / FADING;
        if (steps_ >= rest_) ask();
        return false;
    }

    // Ask soon whether another number is better: something else has changed.
    void hurry() { rest_ = std::min(rest_, FIRST_REST); }

private:
    static constexpr int PAIRS = 6;             // of steps that a trial compares
    static constexpr int MOST_PAIRS = 12;       // that it takes for this: steps of different sizes cannot be compared
    static constexpr int FIRST_REST = 16;       // steps between trials, doubled by each that changes nothing
    static constexpr int LONGEST_REST = 128;    // so long goes unnoticed that a neighbour has left
    static constexpr int FADING = 8;            // steps that the mean of the waiting goes back, about
    static constexpr double SUSPICIOUS = 0.25;  // of a step, waited
    static constexpr double BETTER = 0.95;      // of the time: less is not worth a change

    struct Step {
        int tokens;
        double seconds;
    };

    // now, other, other, now, …: what grows from step to step falls to both alike
    bool is_others_turn() const { return (tried_ + 1) / 2 % 2 != 0; }

    void ask() {
        if (waiting_ > SUSPICIOUS && now_ > 1) {
            // One fewer is no faster where several processors are busy; half, and then more again, finds how many.
            start(halves_ ? now_ / 2 : now_ - 1);
            halves_ = !halves_;
        } else if (asks_first_ && now_ > 1) {
            start(now_ / 2);
        } else if (now_ < most_) {
            start(now_ + 1);
        }
        asks_first_ = false;
    }

    void start(int other) {
        other_ = other;
        tried_ = compared_ = 0;
        seconds_[0] = seconds_[1] = 0;
    }

    bool compare(Step step) {
        bool is_other = is_others_turn(), is_second = tried_ % 2 != 0;
        tried_++;
        if (!is_second) {
            first_ = step;
            return false;
        }
        int more = std::max(step.tokens, first_.tokens), fewer = std::min(step.tokens, first_.tokens);
        if (more - fewer <= more / 8) {
            seconds_[is_other] += step.seconds / step.tokens;
            seconds_[!is_other] += first_.seconds / first_.tokens;
            compared_++;
        }
        return (compared_ == PAIRS || tried_ == 2 * MOST_PAIRS) && decide();
    }

    bool decide() {
        bool changes = compared_ > 0 && seconds_[1] < BETTER * seconds_[0];
        rest_ = changes ? FIRST_REST : std::min(2 * rest_, LONGEST_REST);
        if (changes) {
            now_ = other_;
            halves_ = false;
        }
        other_ = 0;
        steps_ = 0;
        waiting_ = 0;
        return changes;
    }

    int most_, now_;
    bool asks_first_, halves_ = false;
    int other_ = 0;  // what is tried; 0 = nothing
    int steps_ = 0, rest_ = FIRST_REST;
    double waiting_ = 0;  // mean share of the last steps
    int tried_ = 0, compared_ = 0;
    Step first_ = {};         // of a pair
    double seconds_[2] = {};  // a token, summed: with now_, with other_
};

}  // namespace tureen
