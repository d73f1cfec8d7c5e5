#include "attention_plan.h"

#include <algorithm>

namespace tureen {

namespace {

constexpr int MOST_VECTORS = 96;                 // query vectors attended together
constexpr int SHARES = 4;                        // fewer a thread: shares are cut into their pieces
constexpr size_t MOST_STATES = size_t(1) << 22;  // floats: more are not kept

const AttentionKernels& attention() { return *kernels().attention; }

int most_vectors() { return std::clamp(attention().best_count, 1, MOST_VECTORS); }

int first_key_of(int position, int window) { return window > 0 ? std::max(0, position + 1 - window) : 0; }

size_t state_floats(const Share& share, const AttentionShape& shape) {
    return size_t(share.tokens * share.heads) * attention().state_floats(shape.value_dim());
}

void attend(const AttentionRows& rows, const KvLayer& kv, const Share& share, float* states, float* q, void* scratch) {
    int dim = rows.shape.head_dim, stride = rows.shape.row_width();
    int32_t first_key[MOST_VECTORS], num_keys[MOST_VECTORS];
    int count = share.tokens * share.heads;
    for (int j = 0; j < count; j++) {
        int token = share.token + j / share.heads, head = share.head + j % share.heads;
        std::copy_n(rows.qkv + size_t(token) * stride + size_t(head) * dim, dim, q + size_t(j) * dim);
        first_key[j] = first_key_of(rows.step.positions[token], rows.shape.window);
        num_keys[j] = rows.step.seen_end(token, rows.shape);
    }
    const int32_t* pages = rows.step.pages_of(rows.step.spans[share.span], kv);
    Queries queries{share.kv_head, count, q, size_t(dim), first_key, num_keys, rows.shape.scale, rows.shape.softcap};
    attention().attend(kv, pages, queries, share.begin, share.end, states, scratch);
}

// A thread's memory: states, query vectors, and what the kernel needs.
struct Cut {
    float *states, *q;
    void* scratch;

    Cut(Memory& memory, const AttentionShape& shape) {
        states = (float*)memory.data();
        q = states + most_vectors() * attention().state_floats(shape.value_dim());
        scratch = q + most_vectors() * shape.head_dim;
    }
};

}  // namespace

size_t attention_bytes(const AttentionShape& shape) {
    size_t floats = most_vectors() * (attention().state_floats(shape.value_dim()) + size_t(shape.head_dim));
    return floats * sizeof(float) + attention().scratch_bytes(most_vectors(), shape.head_dim);
}

void AttentionPlan::make(const Step& step, const AttentionShape& shape, int threads) {
    shares.clear();
    parts.clear();
    int group = shape.num_heads / shape.num_kv_heads;
    int wanted = (threads - 1) / (step.tokens() * shape.num_kv_heads) + 1;  // of each kv head and token
    int heads = std::clamp(group / wanted, 1, most_vectors());
    while (group % heads) heads--;
    int most = std::max(1, most_vectors() / heads);
    size_t floats = 0;
    int pieces = 0;
    for (int s = int(step.spans.size()) - 1; s >= 0; s--) {
        const Span& span = step.spans[s];
        for (int begin = (span.length - 1) / most * most; begin >= 0; begin -= most)
            for (int head = 0; head < shape.num_heads; head += heads) {
                int token = span.first + begin, tokens = std::min(most, span.length - begin);
                int first = first_key_of(step.positions[token], shape.window) / PIECE;
                int end = (step.seen_end(token + tokens - 1, shape) - 1) / PIECE + 1;
                shares.push_back({s, token, tokens, head / group, head, heads, first, end, floats});
                floats += state_floats(shares.back(), shape) * size_t(end - first);
                pieces += end - first;
            }
    }
    if (int(shares.size()) >= threads * SHARES || pieces == int(shares.size()) || floats > MOST_STATES) return;
    if (states.size() < floats) states.resize(floats);
    for (const Share& share : shares)
        for (int piece = share.begin; piece < share.end; piece++) {
            size_t before = state_floats(share, shape) * size_t(piece - share.begin);
            parts.push_back({share.span, share.token, share.tokens, share.kv_head, share.head, share.heads, piece,
                             piece + 1, share.states + before});
        }
}

void attend_part(const AttentionRows& rows, const KvLayer& kv, AttentionPlan& plan, const Share& part, Memory& memory) {
    Cut cut(memory, rows.shape);
    attend(rows, kv, part, plan.states.data() + part.states, cut.q, cut.scratch);
}

void attend_share(const AttentionRows& rows, const KvLayer& kv, const AttentionPlan& plan, const Share& share,
                  Memory& memory) {
    Cut cut(memory, rows.shape);
    bool is_whole = plan.parts.empty();
    if (is_whole) attend(rows, kv, share, cut.states, cut.q, cut.scratch);
    int count = share.tokens * share.heads, dim = rows.shape.value_dim();
    float *out[MOST_VECTORS], sinks[MOST_VECTORS];
    bool has_sinks = !rows.shape.sinks.empty();
    for (int j = 0; j < count; j++) {
        int token = share.token + j / share.heads, head = share.head + j % share.heads;
        out[j] = rows.mixed + (size_t(token) * rows.shape.num_heads + head) * dim;
        if (has_sinks) sinks[j] = rows.shape.sinks[head];
    }
    const float* states = is_whole ? cut.states : plan.states.data() + share.states;
    attention().finish(count, is_whole ? 1 : share.end - share.begin, states, dim, has_sinks ? sinks : nullptr, out);
    if (spreads_values(kv))
        for (int j = 0; j < count; j++) kernels().rows->spread(out[j], dim, true);
}

}  // namespace tureen
