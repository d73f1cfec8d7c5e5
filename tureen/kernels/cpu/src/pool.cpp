#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tureen {

namespace {

using Clock = std::chrono::steady_clock;

// To sleep and be woken takes some 80 us on a quiet virtual machine, so there spinning pays for long. Beside other busy
// processes it keeps the very thread that is waited for off the processor, and every wait should end in sleep soon.
constexpr int64_t LONGEST_SPIN = 200'000;  // ns
constexpr int64_t SHORTEST_SPIN = 1'000;
constexpr unsigned PROBE_EVERY = 64;  // waits: then the longest spin is tried again
constexpr int POLLS = 16;             // between two looks at the clock: under a microsecond

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

std::atomic<int> forks{0};  // between the first process and this one

// Starting to count at the first call is early enough: no pool is older.
int count_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
    return forks.load(std::memory_order_relaxed);
}

}  // namespace

// The counters only grow. What a waiter waits for is a counter's value; who makes it so calls wake().
struct Pool::Team {
    explicit Team(int threads);
    ~Team();

    void work(int thread);
    void call(int thread) noexcept { (*body)(thread); }
    template <class Done>
    bool spin(Done done, int64_t limit, int64_t* took);
    template <class Done>
    void wait_in_round(Done done);
    template <class Done>
    void sleep(Done done);
    void wake();

    const int threads;
    const int forks_at_start = count_forks();
    std::vector<std::thread> workers;
    std::mutex caller;  // held by the one whose body runs
    const std::function<void(int)>* body = nullptr;
    bool stop = false;
    std::mutex mutex;
    std::condition_variable changed;
    alignas(64) std::atomic<uint64_t> rounds{0};    // begun
    alignas(64) std::atomic<uint64_t> finished{0};  // bodies, by workers, of all rounds
    alignas(64) std::atomic<uint64_t> arrived{0};   // threads, at all barriers
    alignas(64) std::atomic<int> sleeping{0};
    alignas(64) std::atomic<int64_t> spin_limit{LONGEST_SPIN};
    std::atomic<unsigned> long_waits{0};
};

Pool::Team::Team(int threads) : threads(threads) {}

Pool::Team::~Team() {
    stop = true;
    rounds.fetch_add(1);
    wake();
    for (auto& worker : workers) worker.join();
}

// Polls until done or `limit` ns have passed; `took` is how many it were, 0 for less than a microsecond.
template <class Done>
bool Pool::Team::spin(Done done, int64_t limit, int64_t* took) {
    const auto begin = Clock::now();
    *took = 0;
    while (true) {
        for (int i = 0; i < POLLS; i++) {
            if (done()) return true;
            relax();
        }
        *took = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
        if (*took >= limit) return false;
    }
}

// Waiters count themselves before they look a last time, wakers change before they look for waiters: one of both sees
// the other. (All four are sequentially consistent.)
template <class Done>
void Pool::Team::sleep(Done done) {
    std::unique_lock<std::mutex> lock(mutex);
    sleeping.fetch_add(1);
    changed.wait(lock, done);
    sleeping.fetch_sub(1);
}

void Pool::Team::wake() {
    if (sleeping.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex); }  // who counted itself and saw no change is in wait() after this
    changed.notify_all();
}

// Waits for other threads of the same round. Learns from it how long to spin: four times what was enough before, half
// when it was not enough.
template <class Done>
void Pool::Team::wait_in_round(Done done) {
    for (int i = 0; i < POLLS; i++) {
        if (done()) return;
        relax();
    }
    const int64_t limit = spin_limit.load(std::memory_order_relaxed);
    const bool probe = long_waits.fetch_add(1, std::memory_order_relaxed) % PROBE_EVERY == 0;
    int64_t took;
    if (spin(done, probe ? LONGEST_SPIN : limit, &took)) {
        if (4 * took > limit) spin_limit.store(std::min(4 * took, LONGEST_SPIN), std::memory_order_relaxed);
    } else {
        spin_limit.store(std::max(limit / 2, SHORTEST_SPIN), std::memory_order_relaxed);
        sleep(done);
    }
}

void Pool::Team::work(int thread) {
    for (uint64_t seen = 0;; seen++) {
        const auto begun = [&] { return rounds.load() > seen; };
        int64_t took;
        if (!spin(begun, spin_limit.load(std::memory_order_relaxed), &took)) sleep(begun);
        if (stop) return;
        call(thread);
        finished.fetch_add(1);
        wake();
    }
}

Pool::Pool(int threads) {
    if (threads < 1) throw std::invalid_argument("a pool needs at least one thread");
    team_ = std::make_unique<Team>(threads);
    for (int i = 1; i < threads; i++) team_->workers.emplace_back([team = team_.get(), i] { team->work(i); });
}

// In a forked process there is nobody to join, and a condition variable with sleepers waits for them before it goes.
Pool::~Pool() {
    if (team_->forks_at_start != count_forks()) team_.release();
}

int Pool::threads() const { return team_->threads; }

void Pool::run(const std::function<void(int)>& body) {
    Team& team = *team_;
    if (team.forks_at_start != count_forks()) {
        throw std::runtime_error("the threads of this pool are in the process that forked this one; make a pool here");
    }
    std::lock_guard<std::mutex> turn(team.caller);
    team.body = &body;
    const uint64_t all = (team.rounds.fetch_add(1) + 1) * team.workers.size();
    team.wake();
    team.call(0);
    team.wait_in_round([&] { return team.finished.load() >= all; });
}

void Pool::barrier() {
    Team& team = *team_;
    const uint64_t count = uint64_t(team.threads);
    const uint64_t arrived = team.arrived.fetch_add(1) + 1;
    const uint64_t all = (arrived + count - 1) / count * count;
    if (arrived == all) {
        team.wake();
    } else {
        team.wait_in_round([&] { return team.arrived.load() >= all; });
    }
}

}  // namespace tureen
