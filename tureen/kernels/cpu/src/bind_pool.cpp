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
#include "thread_tuner.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tureen {

namespace {

using Counts = std::vector<uint64_t>;

// In each phase of each round every thread writes its own element, meets the others at a barrier and looks at theirs;
// one of them comes `late` us after the others. The elements are plain memory: the pool alone orders the accesses.
std::pair<Counts, uint64_t> exercise(Pool& pool, int rounds, int phases, int late, int count) {
    if (count > pool.threads()) throw std::invalid_argument("the pool has fewer threads");
    const int threads = count > 0 ? count : pool.threads();
    Counts visits(threads), written(threads);
    std::atomic<uint64_t> stale{0};
    for (int round = 0; round < rounds; round++) {
        pool.run_together(threads, [&](int thread) {
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

// How often each index was given to `run`, after `count` threads were last in use together.
Counts share_out(Pool& pool, int count) {
    Counts visits(pool.threads());
    if (count > pool.threads()) throw std::invalid_argument("the pool has fewer threads");
    pool.run_together(count, [](int) {});
    pool.run([&](int i) { visits[i]++; });
    return visits;
}

// The longest wait, in seconds, of a round in which thread 0 comes `late` us after all others are about to wait.
double longest_wait(Pool& pool, int late) {
    std::atomic<int> waiting{0};
    return pool.run_together(pool.threads(), [&](int thread) {
        if (thread == 0) {
            while (waiting.load() < pool.threads() - 1) std::this_thread::yield();
            std::this_thread::sleep_for(std::chrono::microseconds(late));
        } else {
            waiting++;
        }
        pool.barrier();
    });
}

void throw_in(Pool& pool, int throwing) {
    pool.run([&](int thread) {
        if (thread == throwing) throw std::logic_error("thrown in a pool");
    });
}

}  // namespace

void bind_pool(nb::module_& m) {
    m.def("exercise_pool", &exercise, "pool"_a, "rounds"_a, "phases"_a, "late"_a = 0, "count"_a = 0,
          nb::call_guard<nb::gil_scoped_release>(),
          "Calls of each thread, and how often one did not see what another had written before a barrier. late: "
          "microseconds by which one thread comes after the others. count: threads in use; 0 = all.");
    m.def("share_out", &share_out, "pool"_a, "count"_a, nb::call_guard<nb::gil_scoped_release>(),
          "How often a pool calls for each index while `count` of its threads are in use.");
    m.def("longest_wait", &longest_wait, "pool"_a, "late"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Seconds that a pool counts as waited when its first thread comes `late` microseconds after the others.");
    nb::class_<ThreadTuner>(m, "ThreadTuner", "How many threads share a step, as the times of steps say.")
        .def(nb::init<int, bool>(), "most"_a, "asks_first"_a)
        .def_prop_ro("threads", &ThreadTuner::threads)
        .def("took", &ThreadTuner::took, "tokens"_a, "seconds"_a, "waited"_a)
        .def("hurry", &ThreadTuner::hurry);
    m.def("throw_in_pool", &throw_in, "pool"_a, "thread"_a, "Throws in the body of one thread: ends the process.");
}

}  // namespace tureen
