// What the operations of a tape are made of.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>

#include "attention_plan.h"
#include "tape.h"

namespace tureen {

constexpr int REPEATED_ROWS = 4;  // so few rows every thread norms and quantises for itself: a barrier costs more
constexpr int FEW_ROWS = 8;       // up to this many, each thread takes one share of a product
constexpr int MANY_ROWS = 64;     // more are a prompt's
constexpr int PANEL_TILES = 3;    // tiles that kernels like to have together where there are many rows
constexpr int SHARES = 4;         // else this number for each thread, so that a slow one holds up less
constexpr int BLOCK_ROWS = 256;   // of gate and up computed together

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

inline std::vector<Inputs> kinds_of(const Matrices& parts) {
    std::vector<Inputs> kinds;
    for (const auto& part : parts) {
        Inputs kind = part->matrix.inputs;
        if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
    }
    return kinds;
}

// Rows of inputs in each form that the weights ask for.
struct View {
    Activations kinds[4];
    int count = 0;
    const float* low = nullptr;  // [rows][low_width]: what Additions::shrink makes of them; null = no adapter
    int low_width = 0;

    const Activations& of(const Matrix& w) const {
        int i = 0;
        while (kinds[i].kind != w.inputs) i++;
        return kinds[i];
    }
};

// Inputs of one width in the forms that are asked for, filled by all threads together, or by each for itself.
struct InputSet {
    int cols;
    std::vector<Inputs> kinds;
    int copies = 1;                                        // rows for each token of a step
    std::vector<ActivationBuffer> shared;                  // by kind
    std::vector<std::vector<ActivationBuffer>> by_thread;  // [thread][kind]

    InputSet(int cols, const std::vector<Inputs>& kinds, int threads) : cols(cols), kinds(kinds), by_thread(threads) {
        for (Inputs kind : kinds) {
            shared.emplace_back(kind, cols);
            for (auto& own : by_thread) {
                own.emplace_back(kind, cols);
                own.back().reserve(REPEATED_ROWS);
            }
        }
    }
};

// Which experts the tokens of a step use. A place is one token with one of its experts; places are in the order of the
// experts, those of one expert in order of the tokens.
struct Routes {
    std::vector<int> expert,
        place;                // [token][chosen]: experts in ascending order, and where the token stands with each
    Floats weight;            // [token][chosen]
    Floats shared_weight;     // [token]
    std::vector<int> first;   // [expert + 1]: its first place
    std::vector<int> token;   // of each place
    std::vector<int> active;  // experts that have places
};

struct Tape::Buffers {
    Floats x;                    // [tokens][hidden]: the residual stream
    Floats qkv;                  // [tokens][row width]: queries, keys and values
    Floats mixed;                // [tokens][heads][value dim]: results of attention
    Floats gates;                // of results of attention
    Floats latent;               // [tokens][projected]: x projected for latent attention
    Floats queries;              // of a latent attention, then its heads' results
    Floats inner;                // [tokens, or places][intermediate]
    Floats branch;               // [tokens][hidden]: a branch's result before its norm
    Floats held;                 // [tokens][hidden]: the result that the next operation adds
    Floats given;                // [places][hidden]: what experts give
    Floats layer_inputs;         // [tokens][layers][size]: the second embedding
    Floats streams;              // [tokens][streams][hidden]: the residual streams, if there are several
    Floats stream_parts;         // [streams but the first][tokens][hidden]: their products with matrices
    Floats gate_up;              // [tokens][gate, up][intermediate]: of an mlp with cut gates
    Floats low;                  // [tokens][width of any Additions]
    std::vector<Rope> ropes;     // those that differ
    std::vector<Floats> angles;  // of each rope: [tokens][cos, sin][frequencies]
    std::vector<std::unique_ptr<InputSet>> inputs;
    std::vector<Floats> scratch;                          // by thread
    std::vector<std::vector<ActivationBuffer>> gathered;  // by thread: rows for an expert, in the forms asked for
    std::vector<Floats> own_low;                          // by thread: [REPEATED_ROWS][width of any Additions]
    std::vector<Memory> attending;                        // by thread
    std::vector<AttentionShape> shapes;                   // those that are dealt out differently
    std::vector<AttentionPlan> plans;                     // of each shape
    Routes routes;
    int qkv_width = 0, mixed_width = 0, inner_width = 0, num_places = 0;  // num_places: of a token
    int gate_width = 0, latent_width = 0, query_width = 0, layer_input_width = 0, stream_width = 0, gate_up_width = 0;
    bool holds = false;  // results are held
};

// The matrices of an mlp that read its inputs.
inline Matrices first_parts(const GatedLinear& mlp) {
    Matrices parts = mlp.gate.parts;
    parts.push_back(mlp.up.parts[0]);
    return parts;
}

// What the operations of one replay share.
struct Tape::Frame {
    const Kernels& kernels;
    Pool& pool;
    Buffers& buffers;
    const Step& step;
    int tokens;
    int threads;  // that share the step
    std::atomic<int>* counters;

    // body(i) once for each i in [0, pieces), by whichever thread comes first. `counter` is this piece of work's own.
    template <class Body>
    void deal(int counter, int pieces, const Body& body) const {
        for (int i; (i = counters[counter].fetch_add(1, std::memory_order_relaxed)) < pieces;) body(i);
    }
};

// Rows of the inputs, made by `make_row(m, to)` for each m: a function that writes row m as float32 [cols] to `to`, or
// says where it stands. additions: those of the matrices that the inputs are for; null = none. Row m is token m then.
template <class MakeRow>
View make_inputs(Tape::Frame& frame, int thread, int counter, InputSet& set, int rows, const Additions* additions,
                 const MakeRow& make_row) {
    bool repeated = rows <= REPEATED_ROWS;
    View view;
    for (auto& buffer : repeated ? set.by_thread[thread] : set.shared) view.kinds[view.count++] = buffer.view(rows);
    float* low = nullptr;
    if (additions != nullptr && !frame.step.by_adapter.empty()) {
        low = repeated ? frame.buffers.own_low[thread].data() : frame.buffers.low.data();
        view.low = low;
        view.low_width = additions->width();
    }
    float* scratch = frame.buffers.scratch[thread].data();
    size_t widest = frame.buffers.scratch[thread].size() / TOGETHER;
    auto make_one = [&](int m, float* to) {
        const float* values = make_row(m, to);
        for (int i = 0; i < view.count; i++) frame.kernels.rows->quantize(values, set.cols, view.kinds[i], m);
        return values;
    };
    // Rows [from, to), in the order of adapters where there are some: those with the same one together.
    auto make = [&](int from, int to) {
        const auto& order = frame.step.by_adapter;
        while (from < to && low != nullptr) {
            int adapter = frame.step.adapters[order[from]], count = 0;
            ShrunkRow inputs[TOGETHER];
            for (; count < TOGETHER && from < to && frame.step.adapters[order[from]] == adapter; count++, from++)
                inputs[count] = {make_one(order[from], scratch + count * widest),
                                 low + size_t(order[from]) * view.low_width};
            additions->shrink(*frame.kernels.rows, adapter, inputs, count);
        }
        for (; from < to; from++) make_one(from, scratch);
    };
    if (repeated) {
        make(0, rows);
    } else {
        int block = std::max(low == nullptr ? 1 : TOGETHER, rows / (frame.threads * SHARES));
        frame.deal(counter, ceil_div(rows, block),
                   [&](int piece) { make(piece * block, std::min(rows, (piece + 1) * block)); });
        frame.pool.barrier();
    }
    return view;
}

// Deal out the tiles [0, tiles) in contiguous shares of one size: body(begin, end).
template <class Body>
void deal_tiles(Tape::Frame& frame, int counter, int rows, int tiles, const Body& body) {
    int unit = rows <= FEW_ROWS ? 1 : PANEL_TILES, units = ceil_div(tiles, unit), threads = frame.threads;
    int share = rows <= FEW_ROWS ? ceil_div(units, threads) : std::max(1, units / (threads * SHARES));
    frame.deal(counter, ceil_div(units, share),
               [&](int i) { body(i * share * unit, std::min((i + 1) * share * unit, tiles)); });
}

// What adapters add to outputs [begin, end) of a matrix, of tokens [from, to); y: where output `begin` of token `from`
// stands.
inline void add_low_rank(const Tape::Frame& frame, const Linear& linear, int part, const View& inputs, int from, int to,
                         int begin, int end, float* y, size_t stride) {
    if (inputs.low == nullptr || linear.additions == nullptr) return;
    linear.additions->expand(*frame.kernels.rows, frame.step.adapters.data() + from, to - from,
                             linear.first_part + part, inputs.low + size_t(from) * inputs.low_width, inputs.low_width,
                             begin, end, y, stride);
}

// out [rows][width of all parts] (+)= inputs · weights
inline void multiply(Tape::Frame& frame, int counter, const Linear& linear, const View& inputs, int rows, float* out,
                     bool add) {
    int tiles = 0;
    for (const auto& part : linear.parts) tiles += part->matrix.tiles;
    size_t stride = linear.rows();
    deal_tiles(frame, counter, rows, tiles, [&](int begin, int end) {
        int first_tile = 0, first_row = 0;
        for (size_t part = 0; part < linear.parts.size(); part++) {
            const Matrix& w = linear.parts[part]->matrix;
            int from = std::max(begin - first_tile, 0), to = std::min(end - first_tile, w.tiles);
            if (from < to) {
                const float* bias = linear.bias.empty() ? nullptr : linear.bias.data() + first_row;
                frame.kernels.linear->multiply(w, inputs.of(w), 0, rows, from, to, out + first_row, stride, add, bias);
                add_low_rank(frame, linear, int(part), inputs, 0, rows, from * TILE, std::min(to * TILE, w.rows),
                             out + first_row + from * TILE, stride);
            }
            first_tile += w.tiles;
            first_row += w.rows;
        }
    });
}

inline void normalise(const Kernels& kernels, const Norm& norm, const float* x, int cols, float* to) {
    if (norm.is_centred)
        kernels.rows->layer_norm(x, norm.weight.data(), norm.bias.empty() ? nullptr : norm.bias.data(), cols, norm.eps,
                                 to);
    else
        kernels.rows->rms_norm(x, norm.weight.data(), cols, norm.eps, to);
}

inline const float* normed(const Tape::Frame& frame, const Norm& norm, const float* x, int cols, float* to) {
    if (norm.weight.empty()) return x;
    normalise(frame.kernels, norm, x, cols, to);
    return to;
}

// x += held, the result of an attention; uses one counter.
inline void add_held(Tape::Frame& frame, int counter, int hidden) {
    frame.deal(counter, frame.tokens, [&](int m) {
        size_t row = size_t(m) * hidden;
        frame.kernels.rows->add(frame.buffers.held.data() + row, hidden, 1.0f, frame.buffers.x.data() + row);
    });
    frame.pool.barrier();
}

// Adds scale * norm(inputs · weights) to x, or writes it to another `to`; uses two counters.
inline void add_branch(Tape::Frame& frame, int thread, int counter, const Linear& linear, const View& inputs,
                       const Norm& norm, float scale, float* to) {
    int cols = linear.rows();
    bool is_direct = norm.weight.empty() && scale == 1.0f, adds = to == frame.buffers.x.data();
    float* out = is_direct ? to : frame.buffers.branch.data();
    multiply(frame, counter, linear, inputs, frame.tokens, out, is_direct && adds);
    frame.pool.barrier();
    if (is_direct) return;
    float* row = frame.buffers.scratch[thread].data();
    frame.deal(counter + 1, frame.tokens, [&](int m) {
        const float* values = normed(frame, norm, frame.buffers.branch.data() + size_t(m) * cols, cols, row);
        if (!adds) std::fill_n(to + size_t(m) * cols, cols, 0.0f);
        frame.kernels.rows->add(values, cols, scale, to + size_t(m) * cols);
    });
    frame.pool.barrier();
}

inline auto activation_of(const RowKernels& rows, Gate gate) {
    switch (gate) {
        case Gate::SILU: return rows.silu_mul;
        case Gate::GELU_TANH: return rows.gelu_tanh_mul;
        case Gate::CLAMPED_SWIGLU: return rows.clamped_swiglu;
        default: return rows.relu_squared_mul;
    }
}

// out [rows][outputs of up] = activation(gate · inputs) * (up · inputs), for tiles [begin, end)
inline void gated(Tape::Frame& frame, int thread, const GatedLinear& mlp, const View& inputs, int rows, int begin,
                  int end, float* out) {
    const Matrix& u = mlp.up.parts[0]->matrix;
    const LinearKernels& linear = *frame.kernels.linear;
    auto activate = activation_of(*frame.kernels.rows, mlp.activation);
    bool has_gate = !mlp.gate.parts.empty();
    const float* gate_bias = mlp.gate.bias.empty() ? nullptr : mlp.gate.bias.data();
    const float* up_bias = mlp.up.bias.empty() ? nullptr : mlp.up.bias.data();
    int first = begin * TILE, width = std::min(end * TILE, u.rows) - first;
    Floats& scratch = frame.buffers.scratch[thread];
    int block = std::clamp(int(scratch.size() / 2 / width), 1, BLOCK_ROWS);
    float* gates = scratch.data();
    float* ups = gates + size_t(block) * width;
    for (int m = 0; m < rows; m += block) {
        int stop = std::min(rows, m + block);
        ptrdiff_t shift = ptrdiff_t(m) * width + first;
        linear.multiply(u, inputs.of(u), m, stop, begin, end, ups - shift, width, false, up_bias);
        add_low_rank(frame, mlp.up, 0, inputs, m, stop, first, first + width, ups, width);
        if (has_gate) {
            const Matrix& g = mlp.gate.parts[0]->matrix;
            linear.multiply(g, inputs.of(g), m, stop, begin, end, gates - shift, width, false, gate_bias);
            add_low_rank(frame, mlp.gate, 0, inputs, m, stop, first, first + width, gates, width);
            if (mlp.gate_scale != 1.0f)
                frame.kernels.rows->scale_and_cap(gates, (stop - m) * width, mlp.gate_scale, 0.0f);
        }
        for (int i = m; i < stop; i++) {
            size_t from = size_t(i - m) * width;
            float* to = out + size_t(i) * u.rows + first;
            if (mlp.activation == Gate::XIELU)
                frame.kernels.rows->xielu(ups + from, mlp.xielu, width, to);
            else
                activate(has_gate ? gates + from : ups + from, has_gate ? ups + from : nullptr, width, to);
        }
    }
}

// x [2 half]: the first of each pair, then the second. Products of queries and keys in this order are the same.
inline void take_pairs_apart(float* x, int half) {
    float pairs[MAX_HEAD_DIM];
    std::copy_n(x, 2 * half, pairs);
    for (int i = 0; i < half; i++) {
        x[i] = pairs[2 * i];
        x[half + i] = pairs[2 * i + 1];
    }
}

// Attention of all heads to `qkv`, in `mixed`; uses two counters.
inline void attend(Tape::Frame& frame, int thread, int counter, const AttentionShape& shape, const KvLayer& kv,
                   AttentionPlan& plan) {
    Tape::Buffers& b = frame.buffers;
    AttentionRows rows{frame.step, shape, b.qkv.data(), b.mixed.data()};
    frame.deal(counter, int(plan.parts.size()),
               [&](int i) { attend_part(rows, kv, plan, plan.parts[i], b.attending[thread]); });
    if (!plan.parts.empty()) frame.pool.barrier();
    frame.deal(counter + 1, int(plan.shares.size()),
               [&](int i) { attend_share(rows, kv, plan, plan.shares[i], b.attending[thread]); });
    frame.pool.barrier();
}

}  // namespace tureen
