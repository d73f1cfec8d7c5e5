// How fast this machine reads memory and multiplies integers: the benchmark sets its figures beside it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "bind.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tureen {

namespace {

constexpr size_t LINE = 64;
constexpr size_t PREFETCH = 20 * LINE / 8;  // words ahead

// Everything is read once; the sum only keeps the compiler from leaving it out.
uint64_t sum(const uint64_t* words, size_t lines) {
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (const uint64_t* end = words + lines * 8; words < end; words += 8) {
        __builtin_prefetch(words + PREFETCH);
        a += words[0] + words[4];
        b += words[1] + words[5];
        c += words[2] + words[6];
        d += words[3] + words[7];
    }
    return a + b + c + d;
}

double read_bandwidth(int threads, size_t bytes, int repeats) {
    size_t lines = bytes / LINE / size_t(std::max(threads, 1));
    if (lines == 0 || repeats < 1) throw std::invalid_argument("nothing to read");
    Pool pool(threads);
    Memory memory(lines * LINE * size_t(threads));
    std::atomic<uint64_t> kept{0};
    double best = 0.0;
    auto share = [&](int thread) { return memory.data() + size_t(thread) * lines * LINE; };
    pool.run([&](int thread) { std::memset(share(thread), 1, lines * LINE); });
    for (int repeat = 0; repeat < repeats; ++repeat) {
        auto start = std::chrono::steady_clock::now();
        pool.run([&](int thread) { kept += sum(reinterpret_cast<const uint64_t*>(share(thread)), lines); });
        std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, double(memory.bytes()) / seconds.count() / 1e9);
    }
    return best;
}

// All threads multiply until `seconds` are over; the best of a few spans of time.
double peak(int threads, double seconds) {
    constexpr int ROUNDS = 20000, SPANS = 5;
    Pool pool(threads);
    double best = 0.0;
    for (int span = 0; span < SPANS; span++) {
        std::atomic<int64_t> operations{0};
        const auto start = std::chrono::steady_clock::now();
        const auto passed = [&] {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        };
        pool.run([&](int) {
            int64_t own = 0;
            do own += int64_t(kernels().linear->repeat_products(ROUNDS));
            while (passed() < seconds / SPANS);
            operations += own;
        });
        best = std::max(best, double(operations.load()) / passed() / 1e9);
    }
    return best;
}

}  // namespace

void bind_bench(nb::module_& m) {
    m.def("read_bandwidth", &read_bandwidth, "threads"_a, "bytes"_a, "repeats"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "GB/s at which `threads` threads together read `bytes` bytes in huge pages, each its own share: the best of "
          "`repeats` readings. More bytes than the last cache holds: main memory. Raises ValueError for nothing to "
          "read.");
    m.def("peak", &peak, "threads"_a, "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Billions of operations a second (two for a product) that `threads` threads together do with the instruction "
          "that multiplies 8-bit integers, in registers only: the best of a few spans of `seconds` in all.");
}

}  // namespace tureen
