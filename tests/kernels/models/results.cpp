// Prints what the kernels of TUREEN_CPU_ISA make of given numbers: a line for each operation, its name and the bytes in
// hexadecimal. tests/kernels/cpu/results.py prints the same through Python.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <iterator>
#include <string>
#include <vector>

#include "activations.h"
#include "formats.h"
#include "kernels.h"
#include "kv_cache.h"
#include "sampling.h"

using namespace tureen;

namespace {

using Values = std::vector<float>;

const char* const FORMATS[] = {"Q4_0", "Q4_1", "Q5_0",  "Q5_1",   "Q8_0",   "Q4_K", "Q5_K", "Q6_K", "Q8_ROW",
                               "BF16", "F32",  "MXFP4", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K", "Q16"};
constexpr int OUTPUTS = 56, INPUTS = 1024;
constexpr int ROWS[] = {1, 2, 5, 9, 37};
constexpr int COLS = 100;  // of rows that are worked on alone
constexpr int TOKENS = 600, QUERIES = 20, PAGE = 16;
constexpr int LOGITS = 250;
// No result is NaN, whose sign is not the same on all processors.
const float EDGES[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 3e38f, -3e38f, INFINITY, 88.5f, -88.5f, 103.5f, -103.5f};

template <class T>
void print(const std::string& name, const T* data, size_t count) {
    std::printf("%s ", name.c_str());
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(data);
    for (size_t i = 0; i < count * sizeof(T); i++) std::printf("%02x", bytes[i]);
    std::printf("\n");
}

void print(const std::string& name, const Values& values) { print(name, values.data(), values.size()); }

uint32_t scrambled(uint32_t seed, uint32_t i) {
    uint32_t x = i + seed * 0x9e3779b9u;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

// Within -scale and scale, a power of two.
Values make_values(uint32_t seed, size_t count, float scale) {
    Values values(count);
    for (size_t i = 0; i < count; i++)
        values[i] = float(int32_t(scrambled(seed, uint32_t(i)) >> 8) - (1 << 23)) * (scale / (1 << 23));
    return values;
}

void align(Matrix& w, std::vector<uint8_t>& memory) {
    w.data = memory.data() + 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
}

void fill_from_floats(Matrix& w, std::vector<uint8_t>& memory, uint32_t seed) {
    align(w, memory);
    Values values = make_values(seed, size_t(w.tiles) * TILE * INPUTS, 4);
    std::fill(values.begin() + long(w.rows) * INPUTS, values.end(), 0.0f);
    for (int tile = 0; tile < w.tiles; tile++)
        kernels().pack->put(w, values.data() + size_t(tile) * TILE * INPUTS, w.data + size_t(tile) * w.tile_bytes);
}

void fill_with_bytes(Matrix& w, std::vector<uint8_t>& memory, uint32_t seed) {
    align(w, memory);
    for (size_t i = 0; i < size_t(w.tiles) * w.tile_bytes; i++) {
        w.data[i] = uint8_t(scrambled(seed, uint32_t(i)));
        const bool is_scale = i % w.tile_bytes >= w.scales_offset;
        if (is_scale && i % 2 == 1) w.data[i] &= 0xbf;  // halves less than 2
        if (is_scale && w.format == Format::MXFP4) w.data[i] &= 7;
    }
}

ActivationBuffer quantized(const Values& x, int cols, Inputs kind) {
    ActivationBuffer buffer(kind, cols);
    const int rows = int(x.size() / size_t(cols));
    buffer.reserve(rows);
    for (int m = 0; m < rows; m++) kernels().rows->quantize(x.data() + size_t(m) * cols, cols, buffer.view(rows), m);
    return buffer;
}

void print_products_of(const Matrix& w, const std::string& name) {
    for (int rows : ROWS) {
        ActivationBuffer x = quantized(make_values(1, size_t(rows) * INPUTS, 4), INPUTS, w.inputs);
        Values out(size_t(rows) * OUTPUTS);
        kernels().linear->multiply(w, x.view(rows), 0, rows, 0, w.tiles, out.data(), OUTPUTS, false, nullptr);
        print(name + std::to_string(rows), out);
    }
}

void print_products() {
    uint32_t seed = 100;
    for (const char* format : FORMATS) {
        Matrix w = layout_of(format_named(format), OUTPUTS, INPUTS);
        std::vector<uint8_t> memory(size_t(w.tiles) * w.tile_bytes + 64);
        const bool made_of_floats = inputs_of(w.format) != Inputs::INT8_GROUP || w.format == Format::Q8_ROW;
        (made_of_floats ? fill_from_floats : fill_with_bytes)(w, memory, seed++);
        print(std::string("packed ") + format, w.data, size_t(w.tiles) * w.tile_bytes);
        print_products_of(w, "linear " + std::string(format) + " ");
        if (w.inputs != Inputs::INT8_GROUP) continue;
        w.inputs = Inputs::INT16_GROUP;
        print_products_of(w, "linear int16 " + std::string(format) + " ");
    }
}

void print_made() {
    Matrix w = layout_of(Format::Q4_1, OUTPUTS, INPUTS);
    std::vector<uint8_t> memory(size_t(w.tiles) * w.tile_bytes + 64);
    fill_from_floats(w, memory, 99);
    print("made Q4_1", w.data, size_t(w.tiles) * w.tile_bytes);
}

void print_integers(const Values& x, Inputs kind, const std::string& name) {
    const ActivationBuffer integers = quantized(x, COLS, kind);
    const Activations all = integers.view(3);
    const size_t count = 3 * size_t(input_rows(kind)) * size_t(all.stride);
    print(name + "q", all.q, count);
    print(name + "scale", all.scale, count / 32);
    print(name + "scaled_sum", all.scaled_sum, count / 32);
    print(name + "sum", all.sum, count / 32);
    print(name + "half_sum", all.half_sum, count / 16);
}

// scale: down to numbers that count as 0
void print_quantized(float scale) {
    const Values x = make_values(2, 3 * COLS, scale);
    const ActivationBuffer floats = quantized(x, COLS, Inputs::F32), halves = quantized(x, COLS, Inputs::BF16);
    const size_t count = 3 * size_t(floats.view(3).stride);
    const std::string name = scale == 4 ? "quantize " : "quantize tiny ";
    print(name + "f32", floats.view(3).f32, count);
    print(name + "bf16", halves.view(3).bf16, count);
    print_integers(x, Inputs::INT8_GROUP, name);
    print_integers(x, Inputs::INT16_GROUP, name + "int16 ");
    const ActivationBuffer words = quantized(x, COLS, Inputs::WORDS);
    print(name + "words words", words.view(3).words, count);
    print(name + "words scale", words.view(3).scale, count / SPAN);
}

void print_rows() {
    const RowKernels& rows = *kernels().rows;
    const Values x = make_values(3, COLS, 4), wide = make_values(4, COLS, 128), weight = make_values(5, COLS, 2);
    Values out(COLS);
    rows.rms_norm(x.data(), weight.data(), COLS, 1e-5f, out.data());
    print("rms_norm", out);
    rows.silu_mul(wide.data(), weight.data(), COLS, out.data());
    print("silu_mul", out);
    rows.silu_mul(EDGES, weight.data(), int(std::size(EDGES)), out.data());
    print("silu_mul edges", out.data(), std::size(EDGES));
    rows.gelu_tanh_mul(x.data(), weight.data(), COLS, out.data());
    print("gelu_tanh_mul", out);
    rows.gelu_mul(x.data(), nullptr, COLS, out.data());
    print("gelu", out);
    rows.quick_gelu_mul(x.data(), nullptr, COLS, out.data());
    print("quick_gelu", out);
    out = x;
    rows.add(weight.data(), COLS, 1.0f, out.data());
    print("add", out);
    out = x;
    rows.rotate(out.data(), wide.data(), weight.data(), COLS);
    print("rotate", out);
}

void print_attention(const std::string& dtype, KvType type, int dim, int values_from, float softcap) {
    const float scale = dim == 38 ? 1.0f : 0.125f;  // the larger one leaves most keys no weight
    KvCache cache({{1, dim, values_from, false}}, TOKENS / PAGE + 1, 0, PAGE, type);
    const AttentionKernels& attention = *kernels().attention;
    const Values keys = make_values(6, size_t(TOKENS * dim), 4), values = make_values(7, size_t(TOKENS * dim), 4),
                 q = make_values(8, size_t(QUERIES * dim), 4);
    const KvLayer kv = cache.layer(0);
    std::vector<int32_t> pages, first_key, num_keys;
    for (int page = 0; page < cache.num_pages(); page++) pages.push_back(page);
    for (int t = 0; t < TOKENS; t++)
        attention.store(kv, t / PAGE, t % PAGE, 0, &keys[size_t(t * dim)], &values[size_t(t * dim)]);
    for (int j = 0; j < QUERIES; j++) {
        first_key.push_back(j % 3 * 7);
        num_keys.push_back(TOKENS - QUERIES + 1 + j);
    }
    Values out(size_t(QUERIES * kv.value_dim()));
    std::vector<float*> rows;
    for (int j = 0; j < QUERIES; j++) rows.push_back(out.data() + j * kv.value_dim());
    const Queries queries{0, QUERIES, q.data(), size_t(dim), first_key.data(), num_keys.data(), scale, softcap};
    Memory scratch(attention.scratch_bytes(QUERIES, dim));
    Values states(QUERIES * attention.state_floats(kv.value_dim()));
    attention.attend(kv, pages.data(), queries, 0, (TOKENS - 1) / PIECE + 1, states.data(), scratch.data());
    attention.finish(QUERIES, 1, states.data(), kv.value_dim(), nullptr, rows.data());
    print("attention " + dtype + " " + std::to_string(dim) + " " + std::to_string(values_from) + " " +
              std::to_string(int(softcap)),
          out);
}

void print_sampling() {
    const Values logits = make_values(9, LOGITS, 16);
    float peak;
    int64_t token;
    kernels().sampling->peak(logits.data(), nullptr, LOGITS, &peak, &token);
    print("peak", &token, 1);
    std::vector<double> weights(LOGITS), sum(1);
    kernels().sampling->weights(logits.data(), LOGITS, peak, 1.0 / 0.7, weights.data());
    print("weights", weights.data(), weights.size());
    kernels().sampling->weight_sums(logits.data(), LOGITS, peak, 1.0 / 0.7, sum.data());
    print("weight sum", sum.data(), 1);
}

}  // namespace

int main() try {
    std::fprintf(stderr, "%s\n", kernels().name);
    print_products();
    print_made();
    print_quantized(4);
    print_quantized(0x1p-109f);
    print_rows();
    for (int dim : {38, 64}) {
        for (int values_from : {-1, 6}) {  // of their own, and a part of the keys
            for (float softcap : {0.0f, 30.0f}) {
                print_attention("float32", KvType::F32, dim, values_from, softcap);
                print_attention("bfloat16", KvType::BF16, dim, values_from, softcap);
                print_attention("int16", KvType::INT16, dim, values_from, softcap);
                print_attention("int8", KvType::INT8, dim, values_from, softcap);
                print_attention("int4", KvType::INT4, dim, values_from, softcap);
            }
        }
    }
    print_sampling();
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
