// Several residual streams, of which layers compute only the first (AltUp, arXiv:2301.13310; Gemma 3n), and a low-rank
// product beside attention (LAuReL, arXiv:2411.07501); see layers/layer_inputs.py.
#include "tape_frame.h"

namespace tureen {

namespace {

using Frame = Tape::Frame;

constexpr int MOST_STREAMS = 16;
constexpr double LEAST_SQUARE = 1e-5;  // the smallest mean square by which a stream is scaled
constexpr int LANES = 8;

double dot(const float* a, const float* b, int count) {
    float sums[LANES] = {};
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += a[i + lane] * b[i + lane];
    double sum = 0;
    for (; i < count; i++) sum += double(a[i]) * b[i];
    for (float one : sums) sum += one;
    return sum;
}

// The factor that gives x the mean square of `like`.
float as_large(const float* x, const float* like, int count) {
    double own = std::max(dot(x, x, count) / count, LEAST_SQUARE);
    return float(std::sqrt(dot(like, like, count) / count / own));
}

// The weights of the streams for x.
void route(const Frame& frame, const StreamMix& mix, int streams, const float* x, int hidden, float* row, float* to) {
    normalise(frame.kernels, mix.router_norm, x, hidden, row);
    for (int i = 0; i < streams; i++)
        to[i] = float(std::tanh(dot(row, mix.router.data() + size_t(i) * hidden, hidden) / hidden));
}

void check_mix(const StreamMix& mix, int streams, int hidden) {
    require(streams > 0 && int(mix.router_norm.weight.size()) == hidden &&
                mix.router.size() == size_t(streams) * hidden &&
                mix.prediction.size() == size_t(streams) * streams * streams &&
                mix.correction.size() == size_t(streams) * streams && int(mix.scale.size()) == hidden,
            "the mix of a layer has another number or size of streams than the tape");
}

}  // namespace

void Tape::begin_streams(Matrices given) {
    num_streams_ = int(given.size()) + 1;
    int streams = num_streams_;
    require(streams >= 2 && streams <= MOST_STREAMS,
            "the number of streams must be 2 to " + std::to_string(MOST_STREAMS));
    for (const auto& one : given)
        require(one->matrix.rows == hidden_ && one->matrix.cols == hidden_,
                "the matrix of a stream must be square, with the hidden size");
    buffers_->stream_width = streams * hidden_;
    buffers_->holds = true;
    InputSet& into = inputs_for(given);
    int first = num_counters_;
    num_counters_ += streams + 1;
    body_.push_back([=, &into](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        View inputs = make_inputs(frame, thread, first, into, rows, nullptr,
                                  [&](int m, float*) { return b.x.data() + size_t(m) * hidden_; });
        for (int i = 1; i < streams; i++)
            multiply(frame, first + i, Linear{{given[i - 1]}, {}}, inputs, rows,
                     b.stream_parts.data() + size_t(i - 1) * rows * hidden_, false);
        frame.pool.barrier();
        frame.deal(first + streams, rows, [&](int m) {
            const float* x = b.x.data() + size_t(m) * hidden_;
            float* to = b.streams.data() + size_t(m) * streams * hidden_;
            std::copy_n(x, hidden_, to);
            for (int i = 1; i < streams; i++) {
                const float* part = b.stream_parts.data() + (size_t(i - 1) * rows + m) * hidden_;
                float scale = as_large(part, x, hidden_);
                std::transform(part, part + hidden_, to + size_t(i) * hidden_,
                               [&](float value) { return value * scale; });
            }
        });
        frame.pool.barrier();
    });
}

void Tape::predict_streams(StreamMix given) {
    auto mix = std::make_shared<StreamMix>(std::move(given));
    int streams = num_streams_, counter = num_counters_++;
    check_mix(*mix, streams, hidden_);
    body_.push_back([=](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        float* row = b.scratch[thread].data();
        frame.deal(counter, frame.tokens, [&](int m) {
            float *own = b.streams.data() + size_t(m) * streams * hidden_, routed[MOST_STREAMS];
            float shares[MOST_STREAMS * MOST_STREAMS], before[MOST_STREAMS];
            route(frame, *mix, streams, own, hidden_, row, routed);
            for (int k = 0; k < streams * streams; k++)
                shares[k] = float(dot(mix->prediction.data() + k * streams, routed, streams));
            for (int at = 0; at < hidden_; at++) {
                for (int i = 0; i < streams; i++) before[i] = own[size_t(i) * hidden_ + at];
                for (int j = 0; j < streams; j++) {
                    float sum = 0;
                    for (int i = 0; i < streams; i++) sum += shares[j * streams + i] * before[i];
                    own[size_t(j) * hidden_ + at] = before[j] + sum;
                }
            }
            std::copy_n(own, hidden_, b.x.data() + size_t(m) * hidden_);
        });
        frame.pool.barrier();
    });
}

void Tape::correct_streams(StreamMix given) {
    auto mix = std::make_shared<StreamMix>(std::move(given));
    int streams = num_streams_, counter = num_counters_++;
    check_mix(*mix, streams, hidden_);
    body_.push_back([=](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        float* row = b.scratch[thread].data();
        frame.deal(counter, frame.tokens, [&](int m) {
            float *own = b.streams.data() + size_t(m) * streams * hidden_, *x = b.x.data() + size_t(m) * hidden_;
            float routed[MOST_STREAMS];
            route(frame, *mix, streams, x, hidden_, row, routed);
            for (int at = 0; at < hidden_; at++) row[at] = x[at] - own[at];
            for (int j = 0; j < streams; j++) {
                float share = float(dot(mix->correction.data() + j * streams, routed, streams)) + 1.0f;
                for (int at = 0; at < hidden_; at++) own[size_t(j) * hidden_ + at] += row[at] * share;
            }
            for (int at = 0; at < hidden_; at++) x[at] = own[at] * mix->scale[at];
        });
        frame.pool.barrier();
    });
}

void Tape::end_streams(Matrices given) {
    int streams = num_streams_;
    require(int(given.size()) + 1 == streams, "every stream but the first needs a matrix");
    for (const auto& one : given)
        require(one->matrix.rows == hidden_ && one->matrix.cols == hidden_,
                "the matrix of a stream must be square, with the hidden size");
    InputSet& into = inputs_for(given);
    int first = num_counters_;
    num_counters_ += 2 * streams;
    body_.push_back([=, &into](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        for (int i = 1; i < streams; i++) {
            View inputs = make_inputs(frame, thread, first + 2 * i - 2, into, rows, nullptr, [&](int m, float*) {
                return b.streams.data() + (size_t(m) * streams + i) * hidden_;
            });
            multiply(frame, first + 2 * i - 1, Linear{{given[i - 1]}, {}}, inputs, rows,
                     b.stream_parts.data() + size_t(i - 1) * rows * hidden_, false);
            frame.pool.barrier();
        }
        frame.deal(first + 2 * streams - 2, rows, [&](int m) {
            const float* own = b.streams.data() + size_t(m) * streams * hidden_;
            float* x = b.x.data() + size_t(m) * hidden_;
            std::copy_n(own, hidden_, x);
            for (int i = 1; i < streams; i++) {
                const float* part = b.stream_parts.data() + (size_t(i - 1) * rows + m) * hidden_;
                frame.kernels.rows->add(part, hidden_, as_large(part, own, hidden_), x);
            }
            for (int at = 0; at < hidden_; at++) x[at] /= float(streams);
        });
        frame.pool.barrier();
    });
}

void Tape::low_rank(const std::string& module, Norm norm, Linear left, Linear right, Norm post) {
    int rank = left.rows();
    require(left.cols() == hidden_ && right.cols() == rank && right.rows() == hidden_ &&
                int(norm.weight.size()) == hidden_ && int(post.weight.size()) == hidden_,
            "a low-rank product has another shape than the tape");
    buffers_->holds = true;
    buffers_->inner_width = std::max(buffers_->inner_width, rank);
    may_add(module, {"linear_left"}, left, std::make_shared<Additions>());
    may_add(module, {"linear_right"}, right, std::make_shared<Additions>());
    InputSet &into_left = inputs_for(left.parts), &into_right = inputs_for(right.parts);
    int first = num_counters_;
    num_counters_ += 5;
    body_.push_back([=, &into_left, &into_right](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        View inputs = make_inputs(frame, thread, first, into_left, rows, left.additions.get(), [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        multiply(frame, first + 1, left, inputs, rows, b.inner.data(), false);
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 2, into_right, rows, right.additions.get(),
                             [&](int m, float*) { return b.inner.data() + size_t(m) * rank; });
        multiply(frame, first + 3, right, inputs, rows, b.branch.data(), false);
        frame.pool.barrier();
        float* row = b.scratch[thread].data();
        frame.deal(first + 4, rows, [&](int m) {
            float* to = b.held.data() + size_t(m) * hidden_;
            normalise(frame.kernels, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
            normalise(frame.kernels, post, b.branch.data() + size_t(m) * hidden_, hidden_, row);
            frame.kernels.rows->add(row, hidden_, 1.0f, to);
        });
        frame.pool.barrier();
    });
}

void Tape::join(float factor) {
    require(buffers_->holds, "no low-rank product is kept");
    int counter = num_counters_++;
    body_.push_back([=](Frame& frame, int) {
        frame.deal(counter, frame.tokens, [&](int m) {
            float* x = frame.buffers.x.data() + size_t(m) * hidden_;
            const float* held = frame.buffers.held.data() + size_t(m) * hidden_;
            for (int at = 0; at < hidden_; at++) x[at] = (x[at] + held[at]) * factor;
        });
        frame.pool.barrier();
    });
}

}  // namespace tureen
