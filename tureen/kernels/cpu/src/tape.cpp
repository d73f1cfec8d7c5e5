#include "tape.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tureen {

namespace {

constexpr int REPEATED_ROWS = 4;  // so few rows every thread norms and quantises for itself: a barrier costs more
constexpr int FEW_ROWS = 8;       // up to this many, each thread takes one share of a product
constexpr int PANEL_TILES = 3;    // tiles that kernels like to have together where there are many rows
constexpr int SHARES = 4;         // else so many a thread, so that a slow one holds up less
constexpr int SCRATCH_FLOATS = 1 << 17;  // of a thread, at least
constexpr int BLOCK_ROWS = 256;          // of gate and up computed together
constexpr int MOST_VECTORS = 96;         // query vectors attended together

int ceil_div(int a, int b) { return (a + b - 1) / b; }

std::vector<Inputs> kinds_of(const Linear& linear) {
    std::vector<Inputs> kinds;
    for (const auto& part : linear.parts) {
        Inputs kind = inputs_of(part->matrix.format);
        if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
    }
    return kinds;
}

// One step's inputs in each form that the weights ask for.
struct View {
    Activations kinds[4];
    int count = 0;

    const Activations& of(Format format) const {
        int i = 0;
        while (kinds[i].kind != inputs_of(format)) i++;
        return kinds[i];
    }
};

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

}  // namespace

// Inputs of one width in the forms that are asked for, filled by all threads together, or by each for itself.
struct InputSet {
    int cols;
    std::vector<Inputs> kinds;
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

int Linear::rows() const {
    int sum = 0;
    for (const auto& part : parts) sum += part->matrix.rows;
    return sum;
}

// `tokens` consecutive tokens of one span, `heads` query heads of one kv head.
struct Piece {
    int span, token, tokens, kv_head, head, heads;
};

struct Tape::Buffers {
    Floats x;                         // [tokens][hidden]: the residual stream
    Floats qkv;                       // [tokens][heads + 2 kv heads][head_dim]
    Floats mixed;                     // [tokens][heads][head_dim]: what attention gives
    Floats inner;                     // [tokens][intermediate]
    Floats branch;                    // [tokens][hidden]: a branch's result before its norm
    std::vector<Floats> frequencies;  // of each rope: [head_dim / 2] radians a position
    std::vector<Floats> angles;       // of each rope: [tokens][cos, sin][head_dim / 2]
    std::vector<std::unique_ptr<InputSet>> inputs;
    std::vector<Floats> scratch;             // by thread
    std::vector<Memory> attending;           // by thread
    std::vector<AttentionShape> shapes;      // those that are dealt out differently
    std::vector<std::vector<Piece>> pieces;  // of each shape
    int qkv_width = 0, mixed_width = 0, inner_width = 0;
};

// What the operations of one replay share.
struct Tape::Frame {
    const Kernels& kernels;
    Pool& pool;
    Buffers& buffers;
    const Step& step;
    int tokens;
    std::atomic<int>* counters;

    int threads() const { return pool.threads(); }

    // body(i) once for each i in [0, pieces), by whichever thread comes first. `counter` is this piece of work's own.
    template <class Body>
    void deal(int counter, int pieces, const Body& body) const {
        for (int i; (i = counters[counter].fetch_add(1, std::memory_order_relaxed)) < pieces;) body(i);
    }
};

namespace {

using Frame = Tape::Frame;

// Rows of the inputs, made by `row(m, to)` for each m: a function that writes one row as float32 [cols] to `to`.
template <class MakeRow>
View make_inputs(Frame& frame, int thread, int counter, InputSet& set, int rows, int cols, const MakeRow& make_row) {
    bool repeated = rows <= REPEATED_ROWS;
    View view;
    for (auto& buffer : repeated ? set.by_thread[thread] : set.shared) view.kinds[view.count++] = buffer.view(rows);
    float* row = frame.buffers.scratch[thread].data();
    auto make = [&](int m) {
        const float* values = make_row(m, row);
        for (int i = 0; i < view.count; i++) frame.kernels.rows->quantize(values, cols, view.kinds[i], m);
    };
    if (repeated) {
        for (int m = 0; m < rows; m++) make(m);
    } else {
        int block = std::max(1, rows / (frame.threads() * SHARES));
        frame.deal(counter, ceil_div(rows, block), [&](int piece) {
            for (int m = piece * block; m < std::min(rows, (piece + 1) * block); m++) make(m);
        });
        frame.pool.barrier();
    }
    return view;
}

// Deal out the tiles [0, tiles) in contiguous shares: body(begin, end).
template <class Body>
void deal_tiles(Frame& frame, int counter, int rows, int tiles, const Body& body) {
    int unit = rows <= FEW_ROWS ? 1 : PANEL_TILES, units = ceil_div(tiles, unit);
    int shares = std::min(units, rows <= FEW_ROWS ? frame.threads() : frame.threads() * SHARES);
    frame.deal(counter, shares, [&](int share) {
        int begin = int(int64_t(units) * share / shares), end = int(int64_t(units) * (share + 1) / shares);
        body(begin * unit, std::min(end * unit, tiles));
    });
}

// out [rows][width of all parts] (+)= inputs · weights
void multiply(Frame& frame, int counter, const Linear& linear, const View& inputs, int rows, float* out, bool add) {
    int tiles = 0;
    for (const auto& part : linear.parts) tiles += part->matrix.tiles;
    size_t stride = linear.rows();
    deal_tiles(frame, counter, rows, tiles, [&](int begin, int end) {
        int first_tile = 0, first_row = 0;
        for (const auto& part : linear.parts) {
            const Matrix& w = part->matrix;
            int from = std::max(begin - first_tile, 0), to = std::min(end - first_tile, w.tiles);
            if (from < to) {
                const float* bias = linear.bias.empty() ? nullptr : linear.bias.data() + first_row;
                frame.kernels.linear->multiply(w, inputs.of(w.format), 0, rows, from, to, out + first_row, stride, add,
                                               bias);
            }
            first_tile += w.tiles;
            first_row += w.rows;
        }
    });
}

const float* normed(const Frame& frame, const Norm& norm, const float* x, int cols, float* to) {
    if (norm.weight.empty()) return x;
    frame.kernels.rows->rms_norm(x, norm.weight.data(), cols, norm.eps, to);
    return to;
}

// x += norm(inputs · weights); uses two counters
void add_branch(Frame& frame, int thread, int counter, const Linear& linear, const View& inputs, const Norm& norm) {
    int cols = linear.rows();
    bool is_normed = !norm.weight.empty();
    float* out = is_normed ? frame.buffers.branch.data() : frame.buffers.x.data();
    multiply(frame, counter, linear, inputs, frame.tokens, out, !is_normed);
    frame.pool.barrier();
    if (!is_normed) return;
    float* row = frame.buffers.scratch[thread].data();
    frame.deal(counter + 1, frame.tokens, [&](int m) {
        const float* values = normed(frame, norm, frame.buffers.branch.data() + size_t(m) * cols, cols, row);
        frame.kernels.rows->add(values, cols, frame.buffers.x.data() + size_t(m) * cols);
    });
    frame.pool.barrier();
}

// Rotate one token's queries, and store its key and value.
void place(Frame& frame, const AttentionShape& shape, const Norm& q_norm, const Norm& k_norm, const KvLayer& kv,
           const float* angles, int token, int head) {
    const RowKernels& rows = *frame.kernels.rows;
    int dim = shape.head_dim, half = dim / 2;
    const float* cos = angles + size_t(token) * dim;
    float* heads = frame.buffers.qkv.data() + size_t(token) * (shape.num_heads + 2 * shape.num_kv_heads) * dim;
    bool is_key = head >= shape.num_heads;
    const Norm& norm = is_key ? k_norm : q_norm;
    float* vector = heads + size_t(head) * dim;
    if (!norm.weight.empty()) rows.rms_norm(vector, norm.weight.data(), dim, norm.eps, vector);
    rows.rotate(vector, cos, cos + half, dim);
    if (!is_key) return;
    const Step& step = frame.step;
    const Span& span = step.spans[step.span_of[token]];
    int position = step.positions[token], kv_head = head - shape.num_heads;
    frame.kernels.attention->store(kv, step.pages[span.pages + position / kv.page_len], position % kv.page_len, kv_head,
                                   vector, vector + size_t(shape.num_kv_heads) * dim);
}

std::vector<Piece> attention_pieces(const Step& step, const AttentionShape& shape, int threads) {
    std::vector<Piece> pieces;
    int group = shape.num_heads / shape.num_kv_heads, best = kernels().attention->best_count;
    bool is_short_of_work = step.tokens() * shape.num_kv_heads < threads;
    int heads = is_short_of_work ? 1 : std::min(group, best);
    while (group % heads) heads--;
    int most = std::max(1, best / heads);
    for (int s = int(step.spans.size()) - 1; s >= 0; s--) {
        const Span& span = step.spans[s];
        for (int begin = (span.length - 1) / most * most; begin >= 0; begin -= most)  // the longest first
            for (int head = 0; head < shape.num_heads; head += heads)
                pieces.push_back(
                    {s, span.first + begin, std::min(most, span.length - begin), head / group, head, heads});
    }
    return pieces;
}

void attend(Frame& frame, int thread, const AttentionShape& shape, const KvLayer& kv, const Piece& piece) {
    int dim = shape.head_dim, count = piece.tokens * piece.heads;
    int stride = (shape.num_heads + 2 * shape.num_kv_heads) * dim;
    const Step& step = frame.step;
    float* q = frame.buffers.scratch[thread].data();
    int32_t first_key[MOST_VECTORS], num_keys[MOST_VECTORS];
    float* out[MOST_VECTORS];
    for (int j = 0; j < count; j++) {
        int token = piece.token + j / piece.heads, head = piece.head + j % piece.heads;
        const float* from = frame.buffers.qkv.data() + size_t(token) * stride + size_t(head) * dim;
        std::copy(from, from + dim, q + size_t(j) * dim);
        out[j] = frame.buffers.mixed.data() + (size_t(token) * shape.num_heads + head) * dim;
        num_keys[j] = step.positions[token] + 1;
        first_key[j] = shape.window > 0 ? std::max(0, num_keys[j] - shape.window) : 0;
    }
    frame.kernels.attention->attend(kv, step.pages.data() + step.spans[piece.span].pages, piece.kv_head, count, q, dim,
                                    first_key, num_keys, shape.scale, out, frame.buffers.attending[thread].data());
}

// inner = activation(gate · inputs) * (up · inputs)
void gated(Frame& frame, int thread, int counter, const Linear& gate, const Linear& up, Gate activation,
           const View& inputs, int rows) {
    const Matrix& g = gate.parts[0]->matrix;
    const Matrix& u = up.parts[0]->matrix;
    const LinearKernels& linear = *frame.kernels.linear;
    auto activate = activation == Gate::SILU ? frame.kernels.rows->silu_mul : frame.kernels.rows->gelu_tanh_mul;
    const float* gate_bias = gate.bias.empty() ? nullptr : gate.bias.data();
    const float* up_bias = up.bias.empty() ? nullptr : up.bias.data();
    deal_tiles(frame, counter, rows, g.tiles, [&](int begin, int end) {
        int first = begin * TILE, width = std::min(end * TILE, g.rows) - first;
        Floats& scratch = frame.buffers.scratch[thread];
        int block = std::clamp(int(scratch.size() / 2 / width), 1, BLOCK_ROWS);
        float* gates = scratch.data();
        float* ups = gates + size_t(block) * width;
        for (int m = 0; m < rows; m += block) {
            int stop = std::min(rows, m + block);
            ptrdiff_t shift = ptrdiff_t(m) * width + first;
            linear.multiply(g, inputs.of(g.format), m, stop, begin, end, gates - shift, width, false, gate_bias);
            linear.multiply(u, inputs.of(u.format), m, stop, begin, end, ups - shift, width, false, up_bias);
            for (int i = m; i < stop; i++) {
                size_t from = size_t(i - m) * width;
                activate(gates + from, ups + from, width, frame.buffers.inner.data() + size_t(i) * g.rows + first);
            }
        }
    });
}

}  // namespace

Tape::Tape(std::shared_ptr<Pool> pool, std::shared_ptr<KvCache> cache, int hidden, int vocab)
    : pool_(std::move(pool)), cache_(std::move(cache)), hidden_(hidden), vocab_(vocab), buffers_(new Buffers) {
    require(kernels().attention->best_count <= MOST_VECTORS, "attention wants more vectors than there is room for");
    buffers_->scratch.assign(pool_->threads(), Floats(SCRATCH_FLOATS));
}

Tape::~Tape() = default;

void Tape::embed(std::shared_ptr<PackedMatrix> table, float scale) {
    require(table->matrix.cols == hidden_ && table->matrix.rows == vocab_,
            "the embedding has another shape than the tape");
    int counter = num_counters_++;
    body_.push_back([this, table, scale, counter](Frame& frame, int) {
        const Step& step = frame.step;
        frame.deal(counter, frame.tokens, [&](int m) {
            float* x = frame.buffers.x.data() + size_t(m) * hidden_;
            if (step.token_ids[m] >= 0) {
                frame.kernels.linear->unpack_row(table->matrix, step.token_ids[m], x);
                if (scale != 1.0f) std::transform(x, x + hidden_, x, [&](float value) { return value * scale; });
            } else {
                size_t given = std::count(step.token_ids.begin(), step.token_ids.begin() + m, -1);
                std::copy_n(step.embedded.data() + given * hidden_, hidden_, x);
            }
            for (size_t rope = 0; rope < frame.buffers.frequencies.size(); rope++) {
                const Floats& frequencies = frame.buffers.frequencies[rope];
                float* cos = frame.buffers.angles[rope].data() + 2 * m * frequencies.size();
                for (size_t i = 0; i < frequencies.size(); i++) {
                    float angle = float(step.positions[m]) * frequencies[i];
                    cos[i] = std::cos(angle);
                    cos[i + frequencies.size()] = std::sin(angle);
                }
            }
        });
        frame.pool.barrier();
    });
}

void Tape::attention(int layer, Norm norm, Linear qkv, Norm q_norm, Norm k_norm, AttentionShape shape, Linear out,
                     Norm post) {
    int width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, mixed = shape.num_heads * shape.head_dim;
    require(qkv.cols() == hidden_ && qkv.rows() == width, "q, k and v have another shape than the attention");
    require(out.cols() == mixed && out.rows() == hidden_, "the output projection has another shape than the attention");
    require(layer >= 0 && layer < cache_->num_layers(), "the KV cache has no such layer");
    require(cache_->layer(layer).head_dim == shape.head_dim && cache_->layer(layer).kv_heads == shape.num_kv_heads &&
                int(shape.frequencies.size()) * 2 == shape.head_dim,
            "the KV cache or the rope has another shape than the attention");
    buffers_->qkv_width = std::max(buffers_->qkv_width, width);
    buffers_->mixed_width = std::max(buffers_->mixed_width, mixed);
    size_t rope = rope_of(shape.frequencies), kind = kind_of(shape);
    KvLayer kv = cache_->layer(layer);
    InputSet& into_qkv = inputs_for(qkv);
    InputSet& into_out = inputs_for(out);
    int first = num_counters_;
    num_counters_ += 7;
    body_.push_back([=, &into_qkv, &into_out](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        View inputs = make_inputs(frame, thread, first, into_qkv, rows, hidden_, [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        multiply(frame, first + 1, qkv, inputs, rows, b.qkv.data(), false);
        frame.pool.barrier();
        int turned = shape.num_heads + shape.num_kv_heads;
        frame.deal(first + 2, rows, [&](int token) {
            for (int head = 0; head < turned; head++)
                place(frame, shape, q_norm, k_norm, kv, b.angles[rope].data(), token, head);
        });
        frame.pool.barrier();
        const std::vector<Piece>& pieces = b.pieces[kind];
        frame.deal(first + 3, int(pieces.size()), [&](int i) { attend(frame, thread, shape, kv, pieces[i]); });
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 4, into_out, rows, mixed,
                             [&](int m, float*) { return b.mixed.data() + size_t(m) * mixed; });
        add_branch(frame, thread, first + 5, out, inputs, post);
    });
}

void Tape::mlp(Norm norm, Linear gate, Linear up, Gate activation, Linear down, Norm post) {
    int inner = gate.rows();
    require(gate.parts.size() == 1 && up.parts.size() == 1, "gate and up are one matrix each");
    require(gate.cols() == hidden_ && up.cols() == hidden_ && up.rows() == inner, "gate and up differ in shape");
    require(down.cols() == inner && down.rows() == hidden_, "down has another shape than gate and up");
    buffers_->inner_width = std::max(buffers_->inner_width, inner);
    Linear both{{gate.parts[0], up.parts[0]}, {}};
    InputSet& into_both = inputs_for(both);
    InputSet& into_down = inputs_for(down);
    int first = num_counters_;
    num_counters_ += 5;
    body_.push_back([=, &into_both, &into_down](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        int rows = frame.tokens;
        View inputs = make_inputs(frame, thread, first, into_both, rows, hidden_, [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        gated(frame, thread, first + 1, gate, up, activation, inputs, rows);
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 2, into_down, rows, inner,
                             [&](int m, float*) { return b.inner.data() + size_t(m) * inner; });
        add_branch(frame, thread, first + 3, down, inputs, post);
    });
}

void Tape::head(Norm norm, std::shared_ptr<PackedMatrix> matrix) {
    require(matrix->matrix.cols == hidden_ && matrix->matrix.rows == vocab_,
            "the head has another shape than the tape");
    final_norm_ = norm;
    Linear linear{{matrix}, {}};
    InputSet& into_head = inputs_for(linear);
    int first = num_counters_;
    num_counters_ += 2;
    head_.push_back([=, &into_head](Frame& frame, int thread) {
        int rows = int(asked_.size());
        if (rows == 0) return;
        View inputs = make_inputs(frame, thread, first, into_head, rows, hidden_, [&](int m, float* to) {
            return normed(frame, norm, frame.buffers.x.data() + size_t(asked_[m]) * hidden_, hidden_, to);
        });
        multiply(frame, first + 1, linear, inputs, rows, logits_.data(), false);
        frame.pool.barrier();
    });
}

void Tape::run(Step step) {
    asked_ = step.sampled;
    step_ = std::move(step);
    replay(true);
}

void Tape::score(const std::vector<int32_t>& tokens) {
    asked_ = tokens;
    replay(false);
}

void Tape::last_hidden(const std::vector<int32_t>& tokens, float* out) {
    for (int token : tokens) {
        const float* x = buffers_->x.data() + size_t(token) * hidden_;
        kernels().rows->rms_norm(x, final_norm_.weight.data(), hidden_, final_norm_.eps, out);
        out += hidden_;
    }
}

InputSet& Tape::inputs_for(const Linear& linear) {
    std::vector<Inputs> kinds = kinds_of(linear);
    for (auto& set : buffers_->inputs)
        if (set->cols == linear.cols() && set->kinds == kinds) return *set;
    buffers_->inputs.emplace_back(new InputSet(linear.cols(), kinds, pool_->threads()));
    return *buffers_->inputs.back();
}

size_t Tape::rope_of(const Floats& frequencies) {
    std::vector<Floats>& known = buffers_->frequencies;
    size_t place = std::find(known.begin(), known.end(), frequencies) - known.begin();
    if (place == known.size()) known.push_back(frequencies);
    buffers_->angles.resize(known.size());
    return place;
}

size_t Tape::kind_of(const AttentionShape& shape) {
    std::vector<AttentionShape>& known = buffers_->shapes;
    for (size_t i = 0; i < known.size(); i++)
        if (known[i].num_heads == shape.num_heads && known[i].num_kv_heads == shape.num_kv_heads) return i;
    known.push_back(shape);
    buffers_->pieces.emplace_back();
    int count = std::max(kernels().attention->best_count, 1);
    size_t bytes = kernels().attention->scratch_bytes(count, shape.head_dim);
    if (buffers_->attending.empty() || buffers_->attending[0].bytes() < bytes) {
        buffers_->attending.clear();
        for (int thread = 0; thread < pool_->threads(); thread++) buffers_->attending.emplace_back(bytes);
    }
    return known.size() - 1;
}

void Tape::reserve(int tokens) {
    Buffers& b = *buffers_;
    auto grow = [](Floats& floats, size_t rows, size_t width) {
        if (floats.size() < rows * width) floats.resize(rows * width);
    };
    grow(b.x, tokens, hidden_);
    grow(b.branch, tokens, hidden_);
    grow(b.qkv, tokens, b.qkv_width);
    grow(b.mixed, tokens, b.mixed_width);
    grow(b.inner, tokens, b.inner_width);
    for (size_t rope = 0; rope < b.angles.size(); rope++) grow(b.angles[rope], tokens, 2 * b.frequencies[rope].size());
    int widest = std::max({hidden_, 2 * b.inner_width, b.mixed_width});  // gate and up of one row
    for (Floats& scratch : b.scratch) grow(scratch, 1, widest);
    for (auto& set : b.inputs)
        for (ActivationBuffer& buffer : set->shared) buffer.reserve(std::max(tokens, int(asked_.size())));
    grow(logits_, asked_.size(), vocab_);
}

void Tape::replay(bool whole) {
    auto start = std::chrono::steady_clock::now();
    reserve(step_.tokens());
    if (!counters_) counters_.reset(new std::atomic<int>[num_counters_]);
    for (int i = 0; i < num_counters_; i++) counters_[i].store(0, std::memory_order_relaxed);
    for (size_t i = 0; i < buffers_->shapes.size(); i++)
        buffers_->pieces[i] = attention_pieces(step_, buffers_->shapes[i], pool_->threads());
    Frame frame{kernels(), *pool_, *buffers_, step_, step_.tokens(), counters_.get()};
    pool_->run([&](int thread) {
        if (whole)
            for (const Operation& operation : body_) operation(frame, thread);
        for (const Operation& operation : head_) operation(frame, thread);
    });
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace tureen
