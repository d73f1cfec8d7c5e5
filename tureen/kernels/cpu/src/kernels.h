// What each instruction set offers: plain functions that run on the calling thread and allocate nothing.
//
// linear.cpp, rowwise.cpp, attention.cpp, pack_floats.cpp and sampling.cpp are compiled once for each instruction set,
// in a namespace of its name (VARIANT). They may include nothing that puts shared inline code into the object files (no
// std:: containers or algorithms): the linker would keep one copy for all, compiled for the newest processor.
//
// Every result is a function of its own row alone, computed in one order whatever the other rows, the number of rows
// and the range of tiles are: no bit depends on them.
#pragma once

#include "matrix.h"

namespace tureen {

struct LinearKernels {
    // out[m * out_stride + r] (+)= x[m] · w[r] + bias[r] for m in [m_begin, m_end) and rows r of tiles [tile_begin,
    // tile_end). add: to what is there, else it is overwritten. bias: [w.rows] or null. Rows r >= w.rows are not
    // written.
    void (*multiply)(const Matrix& w, const Activations& x, int m_begin, int m_end, int tile_begin, int tile_end,
                     float* out, size_t out_stride, bool add, const float* bias);
    // Values of one row of w as float32: out [w.cols].
    void (*unpack_row)(const Matrix& w, int row, float* out);
    // Multiplies 8-bit integers in registers for a while; returns how many operations that were, two for each product.
    double (*repeat_products)(int rounds);
};

// One of an adapter's two matrices, as bfloat16 or float32.
struct Factor {
    const void* values;
    bool is_bf16;

    Factor from(size_t first) const {
        return {(const uint8_t*)values + first * (is_bf16 ? sizeof(uint16_t) : sizeof(float)), is_bf16};
    }
};

// A row of inputs, and where what an adapter's first matrix makes of them goes.
struct ShrunkRow {
    const float* x;  // [cols]
    float* low;      // [rank]
};

// A row of an output, and what an adapter's first matrix made of the inputs it is for.
struct LowRow {
    const float* low;  // [rank]
    float* y;
};

// The activation of Huang and Schlag (2024, arXiv:2411.13010): for x > 0 positive * x² + slope * x, else
// negative * (e^min(x, most) - 1 - x) + slope * x.
struct Xielu {
    float positive = 0, negative = 0, slope = 0, most = 0;
};

struct RowKernels {
    // x [cols] -> row m of `out`, in the form of out.kind; the padding is zeroed. A value that is not finite makes all
    // products of its row (of integers: of its group) NaN. Integers: what is all below 1e-33 counts as 0, with scale 0.
    void (*quantize)(const float* x, int cols, const Activations& out, int m);
    // y = x / sqrt(mean(x²) + eps) * weight, over [cols]. y may be x.
    void (*rms_norm)(const float* x, const float* weight, int cols, float eps, float* y);
    // y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; a null bias is 0. y may be x.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int cols, float eps, float* y);
    void (*add)(const float* x, int cols, float scale, float* y);  // y += scale * x
    // out = activation(gate) * up; a null up is 1.
    void (*silu_mul)(const float* gate, const float* up, int cols, float* out);
    void (*quick_gelu_mul)(const float* gate, const float* up, int cols, float* out);
    void (*gelu_mul)(const float* gate, const float* up, int cols, float* out);
    void (*gelu_tanh_mul)(const float* gate, const float* up, int cols, float* out);
    void (*relu_squared_mul)(const float* gate, const float* up, int cols, float* out);
    // The gated delta rule for one token and head. Row i of matrix [key_dim][value_dim] is multiplied by decay[i]; then
    // key ⊗ beta * (value - key · matrix) is added; out [value_dim] = query · matrix.
    void (*delta_step)(float* matrix, const float* query, const float* key, const float* value, int key_dim,
                       int value_dim, const float* decay, float beta, float* out);
    // A selective state space for one token and head. matrix [state_dim][head_dim] = before * decay + key ⊗ (step * x);
    // out [head_dim] = query · matrix + skip * x. before may be the matrix.
    void (*ssm_step)(const float* before, float* matrix, const float* x, const float* key, const float* query,
                     int state_dim, int head_dim, float decay, float step, float skip, float* out);
    // gate * sigmoid(1.702 * gate) * (up + 1), the gate at most 7, up between -7 and 7 (arXiv:2508.10925)
    void (*clamped_swiglu)(const float* gate, const float* up, int cols, float* out);
    void (*xielu)(const float* x, const Xielu& xielu, int cols, float* out);
    // x [size] -> each pair (x[i], x[i + size / 2]) turned: cos and sin [size / 2]. In place.
    void (*rotate)(float* x, const float* cos, const float* sin, int size);
    // x [size] -> Hx, so that a few large numbers become many of about the same size. H is a Hadamard matrix for as
    // many blocks of 16 as a power of two divides; fewer than 16 numbers at the end stay. A query is divided by the
    // rows of H: its dot product with a key stays what it was. In place.
    void (*spread)(float* x, int size, bool is_query);
    // x [count] -> cap * tanh(x * scale / cap), or x * scale where cap is 0. In place.
    void (*scale_and_cap)(float* x, int count, float scale, float cap);
    // low[k] = down[k] · x for k < rank, of each of the inputs; down [rank][cols, padded to 16 with zeros].
    void (*shrink)(Factor down, int rank, int cols, const ShrunkRow* inputs, int count);
    // y[i] += sum of up[i / 16][k][i % 16] * low[k] over k < rank, for i < count, of each of the rows.
    void (*expand)(Factor up, int rank, const LowRow* rows, int num_rows, int count);
};

constexpr int MAX_HEAD_DIM = 576;

// Of the numbers in a block of keys or values. INT4 is a type of values; their keys are INT8.
enum class KvType : int { F32, BF16, INT16, INT8, INT4 };

// Where one layer's keys and values lie: [page][kv_head][block of 16 tokens]; kv_block.h says what a block is. Where
// page_len is no multiple of 16, attention copies each piece's keys and values first. head_dim and values_from are
// even, head_dim is at most MAX_HEAD_DIM.
struct KvLayer {
    KvType key_type, value_type;
    int kv_heads, head_dim;
    int values_from;     // values are the keys' dimensions from this one on; -1: values are stored
    int page_len;        // tokens a page holds
    int page_blocks;     // ceil(page_len / 16)
    size_t key_bytes;    // of one kv head's 16 keys, a multiple of 64
    size_t value_bytes;  // the same of values
    uint8_t* keys;
    uint8_t* values;

    size_t page_bytes;  // from one page to the next: the keys and values of all its layers lie between
    bool in_window_pages;

    bool has_values() const { return values_from < 0; }
    int value_dim() const { return has_values() ? head_dim : head_dim - values_from; }

    size_t block_at(int kv_head, int block) const { return size_t(kv_head) * page_blocks + block; }
    uint8_t* key_block(int page, int kv_head, int block) const {
        return keys + page * page_bytes + block_at(kv_head, block) * key_bytes;
    }
    uint8_t* value_block(int page, int kv_head, int block) const {
        return values + page * page_bytes + block_at(kv_head, block) * value_bytes;
    }
};

constexpr int PIECE = 512;  // keys attended together; what comes of the pieces is merged in their order

// Query vectors j of `count`, of the heads of one kv head: q + j * q_stride, [head_dim]. Each sees the keys at
// positions [first_key[j], num_keys[j]) of the sequence, at least one. Those that see nearly the same keys should be
// neighbours: it is faster.
struct Queries {
    int kv_head, count;
    const float* q;
    size_t q_stride;
    const int32_t* first_key;
    const int32_t* num_keys;
    float scale;                  // > 0
    float softcap;                // > 0: scores become softcap * tanh(score / softcap); 0 = none
    const float* bias = nullptr;  // added to the scaled score of query j and key t: bias[t - j]; null = none
};

struct AttentionKernels {
    size_t (*block_bytes)(KvType type, int head_dim);
    // Store the key and value [head_dim] (float32, rotated) of one token and kv head at offset `at` in `page`. value is
    // ignored if the layer stores no values.
    void (*store)(const KvLayer& kv, int page, int at, int kv_head, const float* key, const float* value);
    // Read them back as float32 (tests, and the reference): value [value_dim].
    void (*load)(const KvLayer& kv, int page, int at, int kv_head, float* key, float* value);
    // Attention to the pieces [begin, end) of the sequence whose pages these are; piece p is keys [512 p, 512 (p + 1)).
    // Writes states [count][state_floats(value_dim)]. scratch has scratch_bytes(count, head_dim) bytes. Pages wholly
    // before first_key are not looked at.
    void (*attend)(const KvLayer& kv, const int32_t* pages, const Queries& queries, int begin, int end, float* states,
                   void* scratch);
    // states [parts][count][state_floats] -> out [count] pointers to [value_dim]. The parts cover every
    // piece with a visible key, in order: one part for all, or one each, with the same result. sinks: [count] one more
    // score for each query vector, which belongs to no key, or null.
    void (*finish)(int count, int parts, const float* states, int value_dim, const float* sinks, float* const* out);
    size_t (*scratch_bytes)(int count, int head_dim);
    size_t (*state_floats)(int value_dim);
    int best_count;  // query vectors to give it at once, where there are as many
};

struct PackKernels {
    // rows [16][cols] float32 -> a tile of w, which is F32, BF16, Q8_ROW or Q4_1. The same bits with every instruction
    // set.
    void (*put)(const Matrix& w, const float* rows, uint8_t* tile);
};

struct SamplingKernels;  // sampling.h

struct Kernels {
    const char* name;  // of its file in isa/
    const LinearKernels* linear;
    const RowKernels* rows;
    const AttentionKernels* attention;
    const PackKernels* pack;
    const SamplingKernels* sampling;
};

// The best that this processor runs of those that are chosen by themselves, or the one that the environment variable
// TUREEN_CPU_ISA names. Throws std::runtime_error naming it when that is unknown or cannot run here.
const Kernels& kernels();

}  // namespace tureen
