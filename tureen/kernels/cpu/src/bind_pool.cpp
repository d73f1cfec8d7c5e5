// What the threads of a pool do and see, for its tests.
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tureen {

namespace {

using Counts = std::vector<uint64_t>;

// In each phase of each round every thread writes its own element, meets the others at a barrier and looks at theirs;
// one of them comes `late` us after the others. The elements are plain memory: the pool alone orders the accesses.
std::pair<Counts, uint64_t> exercise(Pool& pool, int rounds, int phases, int late) {
    const int threads = pool.threads();
    Counts visits(threads), written(threads);
    std::atomic<uint64_t> stale{0};
    for (int round = 0; round < rounds; round++) {
        pool.run([&](int thread) {
            visits[thread]++;
            for (int phase = 0; phase < phases; phase++) {
                if (late > 0 && (round + phase) % threads == thread) {
                    std::this_thread::sleep_for(std::chrono::microseconds(late));
                }
                written[thread]++;
                pool.barrier();
                for (int other = 0; other < threads; other++) {
                    if (written[other] != uint64_t(round) * phases + phase + 1) stale++;
                }
                pool.barrier();
            }
        });
    }
    return {visits, stale};
}

void throw_in(Pool& pool, int throwing) {
    pool.run([&](int thread) {
        if (thread == throwing) throw std::logic_error("thrown in a pool");
    });
}

}  // namespace

void bind_pool(nb::module_& m) {
    m.def("exercise_pool", &exercise, "pool"_a, "rounds"_a, "phases"_a, "late"_a = 0,
          nb::call_guard<nb::gil_scoped_release>(),
          "Calls of each thread, and how often one did not see what another had written before a barrier. late: "
          "microseconds by which one thread comes after the others.");
    m.def("throw_in_pool", &throw_in, "pool"_a, "thread"_a, "Throws in the body of one thread: ends the process.");
}

}  // namespace tureen
