// How fast the linear kernels are, by format, shape and rows of inputs: the shapes of SmolLM2-135M.
//
//     cmake -B build -G Ninja && ninja -C build bench_linear && build/bench_linear [FORMAT...]
//
// GOPS counts two operations for each weight and row of inputs; GB/s is the packed weights read once. Each figure is
// the best of many calls. Calls go through copies of the weights that together exceed the L2 cache, as the layers of a
// model do.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "activations.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"

using namespace tureen;

namespace {

constexpr size_t COLD_BYTES = size_t(32) << 20;
constexpr double SECONDS = 0.1;  // for each figure, at least
constexpr int FEW_ROWS = 16;     // up to this number, each thread takes one share of the tiles
constexpr int SHARE_TILES = 12;  // of more rows
constexpr int ROWS[] = {1, 4, 16, 64, 512};

struct Shape {
    const char* name;
    int cols;
    std::vector<int> rows;  // of the matrices that share their inputs
};

const Shape SHAPES[] = {{"qkv", 576, {576, 192, 192}},
                        {"out", 576, {576}},
                        {"gate, up", 576, {1536, 1536}},
                        {"down", 1536, {576}},
                        {"head", 576, {49152}}};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Weights {
    std::vector<Matrix> matrices;  // copy after copy of the shape's
    size_t bytes = 0;              // of one copy
    Memory memory{0};

    Weights(Format format, const Shape& shape) {
        for (int rows : shape.rows) matrices.push_back(layout_of(format, rows, shape.cols));
        for (const Matrix& w : matrices) bytes += size_t(w.tiles) * w.tile_bytes;
        size_t one = matrices.size(), copies = std::max<size_t>(1, COLD_BYTES / bytes);
        memory = Memory(copies * bytes);
        std::memset(memory.data(), 0x3C, memory.bytes());  // as half, bfloat16 and float: a small number
        while (matrices.size() < copies * one) matrices.push_back(matrices[matrices.size() - one]);
        uint8_t* data = memory.data();
        for (Matrix& w : matrices) {
            w.data = data;
            data += size_t(w.tiles) * w.tile_bytes;
        }
    }
};

ActivationBuffer make_inputs(Format format, int rows, int cols) {
    ActivationBuffer buffer(inputs_of(format), cols);
    buffer.reserve(rows);
    std::vector<float> row(static_cast<size_t>(cols));
    for (int m = 0; m < rows; m++) {
        for (int i = 0; i < cols; i++) row[size_t(i)] = float((m + 1) * (i + 3) % 255 - 127);
        kernels().rows->quantize(row.data(), cols, buffer.view(rows), m);
    }
    return buffer;
}

// Seconds that one copy of the weights takes.
double measure(Pool& pool, const Weights& weights, size_t matrices, const Activations& x, float* out) {
    double best = 1e9, end = now() + SECONDS;
    for (size_t first = 0; now() < end; first = (first + matrices) % weights.matrices.size()) {
        double start = now();
        pool.run([&](int thread) {
            for (size_t i = first; i < first + matrices; i++) {
                const Matrix& w = weights.matrices[i];
                int share = x.rows <= FEW_ROWS ? (w.tiles + pool.threads() - 1) / pool.threads() : SHARE_TILES;
                for (int t = thread * share; t < w.tiles; t += pool.threads() * share) {
                    kernels().linear->multiply(w, x, 0, x.rows, t, std::min(w.tiles, t + share), out, size_t(w.rows),
                                               false, nullptr);
                }
            }
        });
        best = std::min(best, now() - start);
    }
    return best;
}

void print_table(Pool& pool, Format format) {
    std::printf("\n%s, %s, %d thread%s: GOPS (GB/s)\n%-10s", name_of(format), kernels().name, pool.threads(),
                pool.threads() == 1 ? "" : "s", "rows");
    for (int rows : ROWS) std::printf("%14d", rows);
    for (const Shape& shape : SHAPES) {
        std::printf("\n%-10s", shape.name);
        Weights weights(format, shape);
        for (int rows : ROWS) {
            ActivationBuffer inputs = make_inputs(format, rows, shape.cols);
            int widest = *std::max_element(shape.rows.begin(), shape.rows.end()), outputs = 0;
            for (int width : shape.rows) outputs += width;
            std::vector<float> out(size_t(rows) * size_t(widest));
            double seconds = measure(pool, weights, shape.rows.size(), inputs.view(rows), out.data());
            double operations = 2.0 * rows * outputs * shape.cols, read = double(weights.bytes);
            std::printf("%7.0f (%4.1f)", 1e-9 * operations / seconds, 1e-9 * read / seconds);
            std::fflush(stdout);
        }
    }
    std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> names(argv + 1, argv + argc);
    if (names.empty()) {
        names = {"F32",  "BF16", "Q8_ROW", "Q8_0",  "Q6_K",   "Q5_K",   "Q5_1", "Q5_0",
                 "Q4_K", "Q4_1", "Q4_0",   "MXFP4", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K"};
    }
    for (int threads : {1, 2}) {
        Pool pool(threads);
        for (const std::string& name : names) print_table(pool, format_named(name.c_str()));
    }
}
