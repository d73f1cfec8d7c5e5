// A decoder's forward pass as a list of operations, recorded once and replayed with one call.
//
// Every thread of the pool walks the whole list; an operation deals its work out in pieces that threads take as they
// come, and threads meet at a barrier where the next piece of work needs what others wrote. No number depends on who
// computed it or on how work was dealt out.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "activations.h"
#include "kernels.h"
#include "kv_cache.h"
#include "pack.h"
#include "pool.h"

namespace tureen {

using Matrices = std::vector<std::shared_ptr<PackedMatrix>>;
using Floats = std::vector<float>;

// Several matrices with the same inputs; their outputs stand one after another.
struct Linear {
    Matrices parts;
    Floats bias;  // of all outputs, or empty

    int rows() const;
    int cols() const { return parts.front()->matrix.cols; }
};

struct Norm {
    Floats weight;  // empty = no norm
    float eps = 0;
};

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim;
    float scale;
    int window;          // 0 = none; a token sees itself and the window - 1 before it
    Floats frequencies;  // [head_dim / 2] radians a position
};

enum class Gate { SILU, GELU_TANH };

// One sequence's share of a step.
struct Span {
    int first;  // of its tokens among the step's
    int length;
    int start;     // position of its first token
    size_t pages;  // index of its first page in Step::pages
    size_t num_pages;
};

struct Step {
    std::vector<int32_t> token_ids;  // -1 = given in `embedded`
    std::vector<int32_t> positions;
    std::vector<int32_t> span_of;  // of each token
    std::vector<Span> spans;
    std::vector<int32_t> pages;
    std::vector<int32_t> sampled;  // tokens whose logits are wanted
    Floats embedded;               // [tokens with id -1][hidden]

    int tokens() const { return int(token_ids.size()); }
};

struct InputSet;

class Tape {
public:
    Tape(std::shared_ptr<Pool> pool, std::shared_ptr<KvCache> cache, int hidden, int vocab);
    ~Tape();

    // Recording, in the order of the forward pass.
    void embed(std::shared_ptr<PackedMatrix> table, float scale);
    // x += post(out(attend(qkv(norm(x)))))
    void attention(int layer, Norm norm, Linear qkv, Norm q_norm, Norm k_norm, AttentionShape shape, Linear out,
                   Norm post);
    // x += post(down(gate(norm(x)) * up(norm(x))))
    void mlp(Norm norm, Linear gate, Linear up, Gate activation, Linear down, Norm post);
    void head(Norm norm, std::shared_ptr<PackedMatrix> matrix);

    // Replay. `step` is not checked. Logits of step.sampled are in logits().
    void run(Step step);
    // For tokens of the last step: their logits, or their states after the final norm.
    void score(const std::vector<int32_t>& tokens);
    void last_hidden(const std::vector<int32_t>& tokens, float* out);
    float* logits() { return logits_.data(); }

    int hidden() const { return hidden_; }
    int vocab() const { return vocab_; }
    int tokens() const { return step_.tokens(); }  // of the last step
    const KvCache& cache() const { return *cache_; }
    double seconds() const { return seconds_; }  // spent in run and score

    struct Frame;
    using Operation = std::function<void(Frame&, int thread)>;

    struct Buffers;

private:
    InputSet& inputs_for(const Linear& linear);
    size_t rope_of(const Floats& frequencies);
    size_t kind_of(const AttentionShape& shape);
    void reserve(int tokens);
    void replay(bool whole);

    std::shared_ptr<Pool> pool_;
    std::shared_ptr<KvCache> cache_;
    int hidden_, vocab_;
    double seconds_ = 0;
    std::unique_ptr<Buffers> buffers_;
    std::vector<Operation> body_, head_;
    Norm final_norm_;
    Step step_;                   // the last one
    std::vector<int32_t> asked_;  // tokens of it that the head is asked about
    Floats logits_;               // [asked][vocab]
    int num_counters_ = 0;
    std::unique_ptr<std::atomic<int>[]> counters_;
};

}  // namespace tureen
