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
#include "state_pool.h"
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
    Floats bias = {};         // of a layer norm, or empty
    bool is_centred = false;  // a layer norm (arXiv:1607.06450), which subtracts the mean first
};

struct Rope {
    Floats frequencies;           // [rotated dimensions / 2] radians a position; none = positions do not turn vectors
    float magnitude;              // rotated vectors are also multiplied by it
    bool is_interleaved = false;  // pairs are (x[2i], x[2i + 1]), not (x[i], x[i + half])
    std::vector<uint8_t> axes;    // of Step::places, for each frequency; none = it turns with the position

    bool operator==(const Rope& other) const {
        return frequencies == other.frequencies && magnitude == other.magnitude &&
               is_interleaved == other.is_interleaved && axes == other.axes;
    }
};

struct AttentionShape {
    int num_heads, num_kv_heads, head_dim;
    float scale;
    float softcap;  // 0 = none
    int window;     // 0 = none; a token sees itself and the window - 1 before it
    Rope rope;
    bool norms_last = false;  // q and k are normalised after the rotation
    float growth = 0;         // queries at position p are multiplied by 1 + growth * log(1 + floor(p / growth_every))
    int growth_every = 1;
    Floats sinks = {};     // [num_heads]: one more score in each head's softmax, which belongs to no token; or empty
    int values_from = -1;  // see KvLayer
    // A row of the buffer holds a token's queries, and then: 2: keys and values; 1: keys, from which values are made;
    // 0: nothing, because the layer uses the keys and values of another.
    int kv_parts = 2;
    bool sees_pictures_whole = false;  // a picture's tokens see all of it, see Step::num_seen

    int value_dim() const { return values_from < 0 ? head_dim : head_dim - values_from; }
    int row_width() const { return (num_heads + kv_parts * num_kv_heads) * head_dim; }
};

// The keys and values of all heads are made from one latent per token (DeepSeek-V2, arXiv:2405.04434); see
// layers/latent.py.
struct Latent {
    Linear in;        // queries, or their low-rank input; the latent, then the rotated part of the key
    Norm query_norm;  // of the low-rank input, or empty
    Linear query;     // of the low-rank input; without parts, `in` gives the queries
    Norm latent_norm;
    Matrices keys, values;  // of each head: [latent][query's dimensions that are not rotated], [value][latent]
    AttentionShape shape;   // of queries in the latent's space: rotated dimensions, then the latent's
};

enum class Gate { SILU, GELU_TANH, RELU_SQUARED, XIELU, CLAMPED_SWIGLU };

// down(activation(gate(x)) * up(x)); gate and up are one matrix each. Without a gate: down(activation(up(x)))
struct GatedLinear {
    Linear gate, up, down;
    Gate activation;
    float gate_scale = 1;  // gate(x) is multiplied by it
    Xielu xielu = {};      // of the activation with that name, which has no gate
    bool is_cut = false;   // gates become max(0, gate - mean - cutoff * deviation)
    float cutoff = 0;
};

enum class Score { SOFTMAX, SIGMOID, SPARSE_MIXER };

// How a token's experts are chosen and weighted.
struct Routing {
    Score score;
    int num_chosen;
    bool is_normalised;             // the weights of those chosen are made to sum to 1
    float factor;                   // the weights are multiplied by it
    Floats correction;              // [experts]: added to the scores for the choice, not for the weights; or empty
    int num_groups, chosen_groups;  // only the experts of the best groups are considered; 1, 1: all
    int group_top_k;                // a group's score is the sum of as many of its largest values
    float jitter;                   // of SPARSE_MIXER
    Floats scales = {};             // [experts]: factors of the weights, or empty
};

// Several mlps, of which each token uses a few (arXiv:2101.03961).
struct Experts {
    std::shared_ptr<PackedMatrix> router;  // F32
    Floats router_bias;                    // or empty
    std::vector<GatedLinear> each;
    Routing routing;
    std::vector<GatedLinear> shared;            // one that all tokens use, or none
    std::shared_ptr<PackedMatrix> shared_gate;  // F32, one row; null = the shared one has weight 1
    Norm router_norm = {};                      // of the router's input; empty: the router reads the experts' input
    // With the held result of an mlp: x += scale * post(held + own_post(experts(norm(x))))
    Norm own_post = {}, post = {};  // empty without such an mlp
};

// The weights with which a layer predicts and corrects residual streams (AltUp, arXiv:2301.13310); see
// layers/layer_inputs.py.
struct StreamMix {
    Norm router_norm;
    Floats router;      // [streams][hidden]
    Floats prediction;  // [streams * streams][streams]
    Floats correction;  // [streams][streams]
    Floats scale;       // [hidden]: of the first stream, for the layer's part of the second embedding
};

// A second embedding, of which each layer has a part: (norm(scale * projection(x)) + token_scale * table[token]) *
// sum_scale.
struct LayerInputs {
    // [vocabulary][layers * size]. Tokens given as embeddings use its first row.
    std::shared_ptr<PackedMatrix> table;
    Linear projection;
    Norm norm;  // of a layer's part
    float scale, token_scale, sum_scale;
};

// A gated convolution over the last tokens: C * conv(B * x), where B, C and x are thirds of what `in` gives.
struct ShortConv {
    Floats kernel;  // [tokens][channels], the oldest first
    Floats bias;    // [channels], or empty
    size_t start;   // of its numbers in a state: the last tokens - 1 products B * x
};

// A gated delta rule after a convolution (arXiv:2412.06464); see layers/mixers.py.
struct GatedDelta {
    int num_key_heads, num_value_heads, key_dim, value_dim;
    bool is_apart;
    Floats kernel;          // [tokens][channels], the oldest first
    Floats decay, dt_bias;  // [value heads]: a token's decay is e^(-decay * softplus(a + dt_bias))
    Norm norm;              // of what each head gives
    size_t start;           // of its numbers in a state: the convolution's last inputs, then the heads' matrices

    int keys() const { return num_key_heads * key_dim; }
    int values() const { return num_value_heads * value_dim; }
    int channels() const { return 2 * keys() + values(); }
};

// A delta rule whose keys decay dimension by dimension (Kimi Linear, arXiv:2510.26692); see layers/mixers.py.
struct KimiDelta {
    int num_heads, head_dim;
    Floats kernel;         // [tokens][channels], the oldest first
    Floats decay;          // [heads]
    Floats dt_bias;        // [heads][head_dim]
    Norm norm;             // of what each head gives
    Linear decays, gates;  // [heads * head_dim][head_dim]: of their low-rank inputs
    size_t start;          // of its numbers in a state: the convolutions' last inputs, then the heads' matrices

    int width() const { return num_heads * head_dim; }
    int channels() const { return 3 * width(); }
};

// A selective state space after a convolution (Mamba 2, arXiv:2405.21060); see layers/mixers.py.
struct Mamba2 {
    int num_heads, head_dim, state_dim, num_groups;
    Floats kernel;                // [tokens][channels], the oldest first
    Floats bias;                  // [channels] of the convolution, or empty
    Floats decay, dt_bias, skip;  // [heads]
    Norm norm;                    // of all heads' results, group by group
    bool gate_last;               // the gate is multiplied after the norm
    float gate_scale, step_scale;
    float least_step, most_step;  // of a token
    size_t start;                 // of its numbers in a state: the convolution's last inputs, then the heads' matrices

    int width() const { return num_heads * head_dim; }
    int channels() const { return width() + 2 * num_groups * state_dim; }
};

// A state of a sequence that a step saves on its way.
struct SavedState {
    int after;  // tokens of the span
    float* to;
};

// One sequence's share of a step.
struct Span {
    int first;  // of its tokens among the step's
    int length;
    int start;     // position of its first token
    size_t pages;  // index of its first page in Step::pages and Step::window_pages
    size_t num_pages;
    const float* state = nullptr;  // before its first token; null = zeros
    float* next_state = nullptr;   // after its last one; not the same
    std::vector<SavedState> saved = {};
};

struct Step {
    std::vector<int32_t> token_ids;  // -1 = given in `embedded`
    std::vector<int32_t> positions;
    std::vector<int32_t> places;    // [tokens][3]: frame, row and column; none = all three are the position
    std::vector<int32_t> num_seen;  // [tokens]: a picture's tokens see the positions before this; none = no pictures
    std::vector<int32_t> span_of;   // of each token
    std::vector<Span> spans;
    std::vector<int32_t> pages;
    std::vector<int32_t> window_pages;  // of the same tokens; 0 where no token of the step sees it
    std::vector<int32_t> adapters;      // of each token; 0 = none
    std::vector<int32_t> by_adapter;    // tokens, those with the same adapter together; none where no token has one
    std::vector<int32_t> sampled;       // tokens whose logits are wanted
    Floats embedded;                    // [tokens with id -1][embedded_width]
    size_t embedded_width = 0;          // hidden, or more for the operations add_given

    int tokens() const { return int(token_ids.size()); }
    // The position after the last one that a token sees.
    int seen_end(int token, const AttentionShape& shape) const {
        return shape.sees_pictures_whole && !num_seen.empty() ? num_seen[token] : positions[token] + 1;
    }
    // The page table of a span in a layer.
    const int32_t* pages_of(const Span& span, const KvLayer& kv) const {
        return (kv.in_window_pages ? window_pages : pages).data() + span.pages;
    }
};

struct InputSet;

class Tape {
public:
    // states: null where all layers have attention.
    Tape(std::shared_ptr<Pool> pool, std::shared_ptr<KvCache> cache, std::shared_ptr<StatePool> states, int hidden,
         int vocab);
    ~Tape();

    // Recording, in the order of the forward pass.
    void embed(std::shared_ptr<PackedMatrix> table, float scale);
    // x += scale * post(out(attend(qkv(norm(x))))). module: the name that adapters have for it. is_held: the result is
    // added by the next mlp, so that both see the same x. q_norm and k_norm have a head's size, or that of all heads.
    // v_norm has a head's size. gate: its sigmoid multiplies each head's result; without parts =
    // none.
    void attention(const std::string& module, int layer, Norm norm, Linear qkv, Linear gate, Norm q_norm, Norm k_norm,
                   Norm v_norm, AttentionShape shape, Linear out, Norm post, float scale, bool is_held);
    // x += scale * out(attend(...)), see Latent
    void latent_attention(const std::string& module, int layer, Norm norm, Latent latent, Linear out, float scale);
    // x += scale * out(conv(in(norm(x))))
    void short_conv(const std::string& module, Norm norm, Linear in, ShortConv conv, Linear out, float scale);
    // x += scale * out(rule(in(norm(x)))). in: queries, keys and values; gates z; b and a of each value head.
    void gated_delta(const std::string& module, Norm norm, Linear in, GatedDelta rule, Linear out, float scale);
    // The same. in: queries, keys, values; b of each head; the low-rank inputs of decays and of gates.
    void kimi_delta(const std::string& module, Norm norm, Linear in, KimiDelta rule, Linear out, float scale);
    // x += scale * out(ssm(in(norm(x)))), and what an attention before it holds. in: gates, values, keys, queries, time
    // steps.
    void mamba2(const std::string& module, Norm norm, Linear in, Mamba2 ssm, Linear out, float scale);
    // x += scale * post(mlp(norm(x))). is_held: the experts after it add the result.
    void mlp(const std::string& module, Norm norm, GatedLinear mlp, Norm post, float scale, bool is_held);
    // x += scale * experts(norm(x))
    void experts(const std::string& module, Norm norm, Experts experts, float scale);
    // Compute the layers' parts of the second embedding, after `embed`.
    void layer_inputs(LayerInputs inputs);
    // x += post(out(activation(gate(x)) * part)), with a layer's part of `layer_inputs`. With streams, the result is
    // added to every stream but the first, not to x.
    void layer_input(const std::string& module, int layer, Linear gate, Gate activation, Linear out, Norm post);
    // Makes streams after `embed`: x, and its product with each matrix, scaled to the mean square of x.
    void begin_streams(Matrices into);
    // Predicts the streams of a layer from all streams; x = the first.
    void predict_streams(StreamMix mix);
    // Corrects the streams by the difference between x and the predicted first stream; x = scale * the first.
    void correct_streams(StreamMix mix);
    // x = the mean of the first stream and of the others' products with their matrices, scaled to its mean square
    void end_streams(Matrices out);
    // Keeps y + post(right(left(y))) of y = norm(x) until `join`: x = factor * (x + kept).
    void low_rank(const std::string& module, Norm norm, Linear left, Linear right, Norm post);
    void join(float factor);
    // x *= factor
    void scale(float factor);
    // x += the next part of a token's given embedding, if it has one
    void add_given();
    // logits = softcap * tanh(scale * matrix(norm(x)) / softcap), or without it where it is 0
    void head(Norm norm, std::shared_ptr<PackedMatrix> matrix, Floats bias, float scale, float softcap);

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
    // The parts of a given embedding, each of `hidden` numbers.
    int given_parts() const { return given_parts_; }
    int tokens() const { return step_.tokens(); }  // of the last step
    const KvCache& cache() const { return *cache_; }
    int longest_window() const { return longest_window_; }
    const StatePool* states() const { return states_.get(); }
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
    std::shared_ptr<StatePool> states_;
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
    int layer_input_size_ = 0;             // of a layer's part
    int longest_window_ = 0;               // of its attentions; 0 = they have none
    int num_streams_ = 0;                  // 0 = no residual streams beside x
    std::vector<Operation> body_, head_;
    Norm final_norm_;
    Step step_;                                        // the last one
    std::vector<int32_t> asked_;                       // tokens of it that the head is asked about
    Floats logits_;                                    // [asked][vocab]
    Best best_;                                        // of these
    std::vector<std::vector<int64_t>> expert_counts_;  // [experts operation][expert]: tokens that it took
    bool counts_experts_ = false;
    int given_parts_ = 1;
    int num_counters_ = 0;
    bool is_held_ = false;  // the last result waits for the operation after it
    std::unique_ptr<std::atomic<int>[]> counters_;
};

}  // namespace tureen
