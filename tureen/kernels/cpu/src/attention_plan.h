// How one step's attention is dealt out.
#pragma once

#include "memory.h"
#include "tape.h"

namespace tureen {

// `tokens` consecutive tokens of one span, `heads` query heads of one kv head, and the pieces of keys that they see.
struct Share {
    int span, token, tokens, kv_head, head, heads;
    int begin, end;
    size_t states;  // where its first piece's are among all states
};

// Numbers of few bits share one scale: a dimension that is much larger than the others would take their bits. 8 bits
// are enough for values.
inline bool spreads_keys(const KvLayer& kv) { return kv.key_type == KvType::INT8 && kv.has_values(); }
inline bool spreads_values(const KvLayer& kv) { return kv.value_type == KvType::INT4; }

struct AttentionPlan {
    std::vector<Share> shares;  // the longest first
    std::vector<Share> parts;   // the shares' pieces, where shares alone would keep threads waiting
    Floats states;              // of the parts

    void make(const Step& step, const AttentionShape& shape, int threads);
};

// Of a thread's memory to attend with.
size_t attention_bytes(const AttentionShape& shape);

struct AttentionRows {
    const Step& step;
    const AttentionShape& shape;
    const float* qkv;  // [tokens][row_width]: queries [heads][head_dim] come first
    float* mixed;      // [tokens][heads][value_dim]: the results
};

// Attend to one piece, one of plan.parts.
void attend_part(const AttentionRows& rows, const KvLayer& kv, AttentionPlan& plan, const Share& part, Memory& memory);
// One of plan.shares: merge the states of its parts, or attend to all of it.
void attend_share(const AttentionRows& rows, const KvLayer& kv, const AttentionPlan& plan, const Share& share,
                  Memory& memory);

}  // namespace tureen
