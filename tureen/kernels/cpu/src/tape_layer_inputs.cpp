// A second embedding, of which each layer has a part (Gemma 3n and 4); see layers/layer_inputs.py.
#include "tape_frame.h"

namespace tureen {

void Tape::layer_inputs(LayerInputs given) {
    auto own = std::make_shared<LayerInputs>(std::move(given));
    int width = own->table->matrix.cols, size = int(own->norm.weight.size());
    require(size > 0 && width % size == 0, "each layer has a part of the second embedding");
    require(own->projection.cols() == hidden_ && own->projection.rows() == width,
            "the projection has another shape than the second embedding");
    layer_input_size_ = size;
    buffers_->layer_input_width = width;
    InputSet& into = inputs_for(own->projection.parts);
    int first = num_counters_;
    num_counters_ += 3;
    body_.push_back([=, &into](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        View inputs = make_inputs(frame, thread, first, into, rows, nullptr,
                                  [&](int m, float*) { return b.x.data() + size_t(m) * hidden_; });
        multiply(frame, first + 1, own->projection, inputs, rows, b.layer_inputs.data(), false);
        frame.pool.barrier();
        float* row = b.scratch[thread].data();
        frame.deal(first + 2, rows, [&](int m) {
            int token = frame.step.token_ids[m];
            bool is_known = token >= 0 && token < own->table->matrix.rows;
            frame.kernels.linear->unpack_row(own->table->matrix, is_known ? token : 0, row);
            float* parts = b.layer_inputs.data() + size_t(m) * width;
            for (int i = 0; i < width; i++) parts[i] *= own->scale;
            for (int at = 0; at < width; at += size) normalise(frame.kernels, own->norm, parts + at, size, parts + at);
            for (int i = 0; i < width; i++) parts[i] = (parts[i] + row[i] * own->token_scale) * own->sum_scale;
        });
        frame.pool.barrier();
    });
}

void Tape::layer_input(const std::string& module, int layer, Linear gate, Gate activation, Linear out, Norm post) {
    int size = layer_input_size_, width = buffers_->layer_input_width;
    require(gate.cols() == hidden_ && gate.rows() == size && out.cols() == size && out.rows() == hidden_ &&
                layer >= 0 && (layer + 1) * size <= width,
            "the layer has another shape than its part of the second embedding");
    buffers_->inner_width = std::max(buffers_->inner_width, size);
    may_add(module, {"per_layer_input_gate"}, gate, std::make_shared<Additions>());
    may_add(module, {"per_layer_projection"}, out, std::make_shared<Additions>());
    InputSet &into = inputs_for(gate.parts), &into_out = inputs_for(out.parts);
    int first = num_counters_, streams = num_streams_;
    num_counters_ += 6;
    body_.push_back([=, &into, &into_out](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        View inputs = make_inputs(frame, thread, first, into, rows, gate.additions.get(),
                                  [&](int m, float*) { return b.x.data() + size_t(m) * hidden_; });
        multiply(frame, first + 1, gate, inputs, rows, b.inner.data(), false);
        frame.pool.barrier();
        auto activate = activation_of(*frame.kernels.rows, activation);
        auto row = [&](int m, float* to) {
            activate(b.inner.data() + size_t(m) * size, b.layer_inputs.data() + size_t(m) * width + layer * size, size,
                     to);
            return to;
        };
        inputs = make_inputs(frame, thread, first + 2, into_out, rows, out.additions.get(), row);
        add_branch(frame, thread, first + 3, out, inputs, post, 1.0f, streams > 0 ? b.held.data() : b.x.data());
        if (streams == 0) return;
        frame.deal(first + 5, rows, [&](int m) {
            for (int i = 1; i < streams; i++)
                frame.kernels.rows->add(b.held.data() + size_t(m) * hidden_, hidden_, 1.0f,
                                        b.streams.data() + (size_t(m) * streams + i) * hidden_);
        });
        frame.pool.barrier();
    });
}

void Tape::scale(float factor) {
    int counter = num_counters_++;
    body_.push_back([=](Frame& frame, int) {
        frame.deal(counter, frame.tokens, [&](int m) {
            frame.kernels.rows->scale_and_cap(frame.buffers.x.data() + size_t(m) * hidden_, hidden_, factor, 0.0f);
        });
        frame.pool.barrier();
    });
}

void Tape::add_given() {
    int counter = num_counters_++, part = given_parts_++;
    body_.push_back([=](Frame& frame, int) {
        const Step& step = frame.step;
        if (step.embedded_width <= size_t(hidden_)) return;
        frame.deal(counter, frame.tokens, [&](int m) {
            if (step.token_ids[m] >= 0) return;
            size_t given = std::count(step.token_ids.begin(), step.token_ids.begin() + m, -1);
            const float* more = step.embedded.data() + given * step.embedded_width + size_t(part) * hidden_;
            float* x = frame.buffers.x.data() + size_t(m) * hidden_;
            std::transform(x, x + hidden_, more, x, std::plus<float>());
        });
        frame.pool.barrier();
    });
}

}  // namespace tureen
