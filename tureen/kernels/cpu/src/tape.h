// A decoder's forward pass as a list of operations, recorded once and replayed with one call.
//
// Every thread of the pool walks the whole list; an operation deals its work out in pieces that threads take as they
// come, and threads meet at a barrier where the next piece of work needs what others wrote. No number depends on who
// computed it or on how work was dealt out.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "activations.h"
#include "best.h"
#include "kernels.h"
#include "kv_cache.h"
#include "low_rank.h"
#include "pack.h"
#include "pool.h"
#include "thread_tuner.h"

namespace tureen {

using Matrices = std::vector<std::shared_ptr<PackedMatrix>>;
using Floats = std::vector<float>;

// Several matrices with the same inputs; their outputs stand one after another.
struct Linear {
    Matrices parts;
    Floats bias;                                     // of all outputs, or empty
    std::shared_ptr<Additions> additions = nullptr;  // what adapters add; may be shared with others of the same inputs
    int first_part = 0;                              // number of the first part in these

    int rows() const;
    int cols() const { return parts.front()->matrix.cols; }
};

struct Norm {
    Floats weight;  // empty = no norm
    float eps = 0;
};

struct Rope {
    Floats frequencies;  // [rotated dimensions / 2] radians a position; none = positions do not turn vectors
    float magnitude;     // what is turned is also multiplied by it

    bool operator==(const Rope& other) const {
        return frequencies == other.frequencies && magnitude == other.magnitude;
    }
};

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim;
    float scale;
    float softcap;  // 0 = none
    int window;     // 0 = none; a token sees itself and the window - 1 before it
    Rope rope;
};

enum class Gate { SILU, GELU_TANH };

// down(activation(gate(x)) * up(x)); gate and up are one matrix each
struct GatedLinear {
    Linear gate, up, down;
    Gate activation;
};

// Several mlps, of which each token uses a few (arXiv:2101.03961).
struct Experts {
    std::shared_ptr<PackedMatrix> router;  // F32
    std::vector<GatedLinear> each;
    int num_chosen;
    bool is_normalised;                         // the weights of those chosen are made to sum to 1
    std::vector<GatedLinear> shared;            // one that all tokens use, or none
    std::shared_ptr<PackedMatrix> shared_gate;  // F32, one row
};

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
    std::vector<int32_t> adapters;    // of each token; 0 = none
    std::vector<int32_t> by_adapter;  // tokens, those with the same adapter together; none where no token has one
    std::vector<int32_t> sampled;     // tokens whose logits are wanted
    Floats embedded;                  // [tokens with id -1][hidden]

    int tokens() const { return int(token_ids.size()); }
};

struct InputSet;

class Tape {
public:
    Tape(std::shared_ptr<Pool> pool, std::shared_ptr<KvCache> cache, int hidden, int vocab);
    ~Tape();

    // Recording, in the order of the forward pass.
    void embed(std::shared_ptr<PackedMatrix> table, float scale);
    // x += scale * post(out(attend(qkv(norm(x))))). module: the name that adapters have for it.
    void attention(const std::string& module, int layer, Norm norm, Linear qkv, Norm q_norm, Norm k_norm,
                   AttentionShape shape, Linear out, Norm post, float scale);
    // x += scale * post(mlp(norm(x)))
    void mlp(const std::string& module, Norm norm, GatedLinear mlp, Norm post, float scale);
    // x += scale * experts(norm(x))
    void experts(const std::string& module, Norm norm, Experts experts, float scale);
    // logits = softcap * tanh(scale * matrix(norm(x)) / softcap), or without it where it is 0
    void head(Norm norm, std::shared_ptr<PackedMatrix> matrix, float scale, float softcap);

    // What an adapter adds to the matrix of that name: up [rows][rank] · (down [rank][cols] · x). Throws
    // std::invalid_argument when there is none, or its shape is another.
    void load_adapter(int number, const std::string& module, const float* down, const float* up, int rank, int cols,
                      int rows);
    void unload_adapter(int number);

    // Replay. `step` is not checked. Logits of step.sampled are in logits(), and the best of each row in best().
    void run(Step step);
    // For tokens of the last step: their logits, or their states after the final norm.
    void score(const std::vector<int32_t>& tokens);
    void last_hidden(const std::vector<int32_t>& tokens, float* out);
    float* logits() { return logits_.data(); }
    const Best& best() const { return best_; }

    // Count how many tokens each expert takes from now on, or no longer.
    void count_experts(bool is_on) { counts_experts_ = is_on; }
    // The counts of each `experts`, in the order of recording, since they were last taken.
    std::vector<std::vector<int64_t>> take_expert_counts();

    int hidden() const { return hidden_; }
    int vocab() const { return vocab_; }
    int tokens() const { return step_.tokens(); }  // of the last step
    const KvCache& cache() const { return *cache_; }
    double seconds() const { return seconds_; }  // spent in run and score
    int threads() const { return threads_; }     // that shared the last step

    struct Frame;
    using Operation = std::function<void(Frame&, int thread)>;

    struct Buffers;

private:
    InputSet& inputs_for(const Matrices& parts);
    void may_add(const std::string& module, const std::vector<std::string>& names, Linear& linear,
                 std::shared_ptr<Additions> additions);
    void prepare(const std::string& module, GatedLinear& mlp);
    void may_gather(const Matrices& parts);
    size_t rope_of(const Rope& rope);
    size_t kind_of(const AttentionShape& shape);
    void reserve(int tokens);
    void replay(bool whole);

    std::shared_ptr<Pool> pool_;
    std::shared_ptr<KvCache> cache_;
    int hidden_, vocab_;
    double seconds_ = 0;
    int threads_;
    std::vector<ThreadTuner>
        tuners_;    // for steps of a few tokens, of more, of many; none where the pool does not adapt
    struct Place {  // of a matrix that adapters may change
        std::shared_ptr<Additions> additions;
        int part, rows, cols;
    };

    std::unique_ptr<Buffers> buffers_;
    std::map<std::string, Place> places_;  // by name
    std::map<int, Arena> adapters_;        // the memory of each
    std::vector<Operation> body_, head_;
    Norm final_norm_;
    Step step_;                                        // the last one
    std::vector<int32_t> asked_;                       // tokens of it that the head is asked about
    Floats logits_;                                    // [asked][vocab]
    Best best_;                                        // of these
    std::vector<std::vector<int64_t>> expert_counts_;  // [experts operation][expert]: tokens that it took
    bool counts_experts_ = false;
    int num_counters_ = 0;
    std::unique_ptr<std::atomic<int>[]> counters_;
};

}  // namespace tureen
