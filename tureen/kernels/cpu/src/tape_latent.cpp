// Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in its absorbed form: the cache holds one key a token,
// the rotated dimensions and then the latent, and the values of all heads are made of the latent. A head's matrix for
// keys maps its query into the latent's space; its matrix for values maps the result of attention out of it.
#include "tape_frame.h"

namespace tureen {

namespace {

using Frame = Tape::Frame;

// Multiply `rows` rows of one head by its matrix. make_row(m) returns row m; its product is written to out + m *
// stride.
template <class MakeRow>
void multiply_rows(Frame& frame, int thread, InputSet& set, const Matrix& w, int rows, const MakeRow& make_row,
                   float* out, size_t stride) {
    for (ActivationBuffer& buffer : set.by_thread[thread]) {
        if (buffer.view(0).kind != w.inputs) continue;
        buffer.reserve(rows);
        Activations inputs = buffer.view(rows);
        for (int m = 0; m < rows; m++) frame.kernels.rows->quantize(make_row(m), w.cols, inputs, m);
        frame.kernels.linear->multiply(w, inputs, 0, rows, 0, w.tiles, out, stride, false, nullptr);
    }
}

// Deal out the heads of a step's tokens: body(head, first token, number of tokens).
template <class Body>
void deal_heads(const Frame& frame, int counter, int heads, const Body& body) {
    int blocks = ceil_div(frame.tokens, BLOCK_ROWS);
    frame.deal(counter, heads * blocks, [&](int piece) {
        int from = piece / heads * BLOCK_ROWS;
        body(piece % heads, from, std::min(BLOCK_ROWS, frame.tokens - from));
    });
}

void turn(const Frame& frame, const Rope& rope, const float* angles, int token, float* x) {
    int half = int(rope.frequencies.size());
    if (half == 0) return;
    const float* cos = angles + size_t(token) * 2 * half;
    if (rope.is_interleaved) take_pairs_apart(x, half);
    frame.kernels.rows->rotate(x, cos, cos + half, 2 * half);
}

}  // namespace

void Tape::latent_attention(const std::string& module, int layer, Norm norm, Latent given, Linear out, float scale) {
    auto latent = std::make_shared<Latent>(std::move(given));
    latent->shape.kv_parts = 0;
    const AttentionShape& shape = latent->shape;
    int heads = shape.num_heads, dim = shape.head_dim, turned = shape.values_from, rank = shape.value_dim();
    require(heads > 0 && turned >= 0 && shape.num_kv_heads == 1,
            "a latent attention has one key, in which its values are");
    require(int(latent->keys.size()) == heads && int(latent->values.size()) == heads,
            "a latent attention has two matrices for each head");
    int plain = latent->keys[0]->matrix.cols, width = latent->values[0]->matrix.rows;
    for (int head = 0; head < heads; head++)
        require(latent->keys[head]->matrix.rows == rank && latent->keys[head]->matrix.cols == plain &&
                    latent->values[head]->matrix.rows == width && latent->values[head]->matrix.cols == rank,
                "the heads of a latent attention differ in shape");
    bool is_low_rank = !latent->query.parts.empty();
    Linear& in = latent->in;
    require(in.parts.size() == 2 && in.cols() == hidden_ && in.parts[1]->matrix.rows == dim,
            "the projections of a latent attention have another shape than the tape");
    int query_rank = in.parts[0]->matrix.rows, query_dim = plain + turned;
    require((is_low_rank ? latent->query.cols() == query_rank && latent->query.rows() == heads * query_dim
                         : query_rank == heads * query_dim) &&
                (latent->query_norm.weight.empty() || int(latent->query_norm.weight.size()) == query_rank) &&
                int(latent->latent_norm.weight.size()) == rank,
            "the queries or norms of a latent attention have other shapes than its heads");
    require(out.cols() == heads * width && out.rows() == hidden_,
            "the output projection has another shape than the attention");
    require(layer >= 0 && layer < cache_->num_layers(), "the KV cache has no such layer");
    KvLayer kv = cache_->layer(layer);
    require(kv.kv_heads == 1 && kv.head_dim == dim && kv.values_from == turned && !kv.in_window_pages &&
                (shape.rope.frequencies.empty() || int(shape.rope.frequencies.size()) * 2 == turned),
            "the KV cache or the rope has another shape than the attention");
    Buffers& own = *buffers_;
    own.qkv_width = std::max(own.qkv_width, shape.row_width());
    own.mixed_width = std::max(own.mixed_width, heads * rank);
    own.latent_width = std::max(own.latent_width, in.rows());
    own.query_width = std::max({own.query_width, is_low_rank ? heads * query_dim : 0, heads * width});
    size_t rope = rope_of(shape.rope), kind = kind_of(shape);
    may_add(module, {is_low_rank ? "q_a_proj" : "q_proj", "kv_a_proj_with_mqa"}, in, std::make_shared<Additions>());
    if (is_low_rank) may_add(module, {"q_b_proj"}, latent->query, std::make_shared<Additions>());
    may_add(module, {"o_proj"}, out, std::make_shared<Additions>());
    InputSet& into = inputs_for(in.parts);
    InputSet* into_query = is_low_rank ? &inputs_for(latent->query.parts) : nullptr;
    InputSet& into_keys = inputs_for(latent->keys);
    InputSet& into_values = inputs_for(latent->values);
    InputSet& into_out = inputs_for(out.parts);
    int first = num_counters_;
    num_counters_ += 12;
    body_.push_back([=, &into, &into_keys, &into_values, &into_out](Frame& frame, int thread) {
        Buffers& b = frame.buffers;
        const AttentionShape& shape = latent->shape;
        int rows = frame.tokens;
        size_t projected = size_t(latent->in.rows()), row_width = size_t(shape.row_width());
        View inputs = make_inputs(frame, thread, first, into, rows, latent->in.additions.get(), [&](int m, float* to) {
            return normed(frame, norm, b.x.data() + size_t(m) * hidden_, hidden_, to);
        });
        multiply(frame, first + 1, latent->in, inputs, rows, b.latent.data(), false);
        frame.pool.barrier();
        float* queries = b.latent.data();
        size_t query_stride = projected;
        if (is_low_rank) {
            inputs = make_inputs(frame, thread, first + 2, *into_query, rows, latent->query.additions.get(),
                                 [&](int m, float* to) {
                                     const float* low = b.latent.data() + m * projected;
                                     return normed(frame, latent->query_norm, low, query_rank, to);
                                 });
            multiply(frame, first + 3, latent->query, inputs, rows, b.queries.data(), false);
            frame.pool.barrier();
            queries = b.queries.data();
            query_stride = size_t(heads) * query_dim;
        }
        frame.deal(first + 4, rows, [&](int token) {
            const Step& step = frame.step;
            const float* angles = b.angles[rope].data();
            const float* from =
                b.latent.data() + token * projected + query_rank;  // the latent, then the rotated part of the key
            float key[MAX_HEAD_DIM];
            std::copy_n(from + rank, turned, key);
            turn(frame, shape.rope, angles, token, key);
            normalise(frame.kernels, latent->latent_norm, from, rank, key + turned);
            int position = step.positions[token];
            int page = step.pages_of(step.spans[step.span_of[token]], kv)[position / kv.page_len];
            frame.kernels.attention->store(kv, page, position % kv.page_len, 0, key, nullptr);
            for (int head = 0; head < heads; head++) {
                float* query = b.qkv.data() + token * row_width + size_t(head) * dim;
                std::copy_n(queries + token * query_stride + size_t(head) * query_dim + plain, turned, query);
                turn(frame, shape.rope, angles, token, query);
            }
        });
        deal_heads(frame, first + 5, heads, [&](int head, int from, int count) {
            auto row = [&](int m) { return queries + (from + m) * query_stride + size_t(head) * query_dim; };
            float* to = b.qkv.data() + from * row_width + size_t(head) * dim + turned;
            multiply_rows(frame, thread, into_keys, latent->keys[head]->matrix, count, row, to, row_width);
        });
        frame.pool.barrier();
        attend(frame, thread, first + 6, shape, kv, b.plans[kind]);
        size_t mixed = size_t(heads) * rank, given = size_t(heads) * width;
        deal_heads(frame, first + 8, heads, [&](int head, int from, int count) {
            auto row = [&](int m) { return b.mixed.data() + (from + m) * mixed + size_t(head) * rank; };
            float* to = b.queries.data() + from * given + size_t(head) * width;
            multiply_rows(frame, thread, into_values, latent->values[head]->matrix, count, row, to, given);
        });
        frame.pool.barrier();
        inputs = make_inputs(frame, thread, first + 9, into_out, rows, out.additions.get(),
                             [&](int m, float*) { return b.queries.data() + m * given; });
        add_branch(frame, thread, first + 10, out, inputs, Norm{}, scale, b.x.data());
    });
}

}  // namespace tureen
