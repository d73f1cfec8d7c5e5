#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
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

thread_local int64_t waited = 0;  // ns that this thread spent waiting for others of a round, but for the shortest waits

std::atomic<int> forks{0};  // between the first process and this one

// Starting to count at the first call is early enough: no pool is older.
int count_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    (void)registered;
    return forks.load(std::memory_order_relaxed);
}

void require_own(int forks_at_start) {
    if (forks_at_start == count_forks()) return;
    throw std::runtime_error("the threads of this pool are in the process that forked this one; make a pool here");
}

}  // namespace

// What is known of a round before it begins: its number, from 1, and how many threads take part.
struct Round {
    uint64_t word;

    Round(uint64_t word) : word(word) {}
    Round(uint64_t number, int count) : word(number << 16 | uint64_t(count)) {}
    uint64_t number() const { return word >> 16; }
    int count() const { return int(word & Pool::MOST); }
};

// What a waiter waits for is a counter's value; who makes it so wakes those that sleep.
struct Pool::Team {
    Team(int threads, bool adapts);
    ~Team();

    void work(int thread);
    void call(int thread) noexcept;
    void run(int count, const std::function<void(int)>& body);
    template <class Done>
    bool spin(Done done, int64_t limit, int64_t* took);
    template <class Done>
    void wait_in_round(Done done);
    struct WaitQueue {
        std::condition_variable changed;
        alignas(64) std::atomic<int> sleeping{0};
    };
    template <class Done>
    void sleep(WaitQueue& queue, Done done);
    void wake(WaitQueue& queue);
    void wake_workers(int count);

    const int threads;
    const bool adapts;
    const int forks_at_start = count_forks();
    std::vector<std::thread> workers;
    std::mutex caller;  // held by the one whose body runs
    const std::function<void(int)>* body = nullptr;
    bool stop = false;
    int in_use;                  // threads, in this round or the last
    std::vector<int64_t> waits;  // ns, of each thread in that round
    std::mutex mutex;
    std::vector<WaitQueue> idle;                   // of each thread: a worker that has nothing to do
    WaitQueue within;                              // a round: who waits for others
    alignas(64) std::atomic<uint64_t> round{0};    // the one begun last, as Round
    alignas(64) std::atomic<int> finished{0};      // workers, with this round
    alignas(64) std::atomic<uint64_t> arrived{0};  // threads, at all barriers of this round
    alignas(64) std::atomic<int64_t> spin_limit{LONGEST_SPIN};
    std::atomic<unsigned> long_waits{0};
};

Pool::Team::Team(int threads, bool adapts)
    : threads(threads), adapts(adapts), in_use(threads), waits(threads), idle(threads) {}

Pool::Team::~Team() {
    stop = true;
    round.store(Round(Round(round.load()).number() + 1, threads).word);
    wake_workers(threads);
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
void Pool::Team::sleep(WaitQueue& queue, Done done) {
    std::unique_lock<std::mutex> lock(mutex);
    queue.sleeping.fetch_add(1);
    queue.changed.wait(lock, done);
    queue.sleeping.fetch_sub(1);
}

void Pool::Team::wake(WaitQueue& queue) {
    if (queue.sleeping.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex); }  // who counted itself and saw no change is in wait() after this
    queue.changed.notify_all();
}

// Those that take part in a round of `count` threads, and no others.
void Pool::Team::wake_workers(int count) {
    for (int thread = 1; thread < count; thread++) wake(idle[thread]);
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
        waited += took;
    } else {
        spin_limit.store(std::max(limit / 2, SHORTEST_SPIN), std::memory_order_relaxed);
        const auto begin = Clock::now();
        sleep(within, done);
        waited += took + std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
    }
}

void Pool::Team::call(int thread) noexcept {
    const int64_t before = waited;
    (*body)(thread);
    waits[thread] = waited - before;
}

void Pool::Team::work(int thread) {
    Round now(0);
    while (true) {
        const uint64_t last = now.number();
        const auto begun = [&] {
            now = Round(round.load());
            return now.number() > last && thread < now.count();
        };
        int64_t took;
        if (!spin(begun, spin_limit.load(std::memory_order_relaxed), &took)) sleep(idle[thread], begun);
        if (stop) return;
        call(thread);
        finished.fetch_add(1);
        wake(within);
    }
}

// `caller` is held.
void Pool::Team::run(int count, const std::function<void(int)>& given) {
    body = &given;
    in_use = count;
    finished.store(0);
    arrived.store(0);
    round.store(Round(Round(round.load()).number() + 1, count).word);
    wake_workers(count);
    call(0);
    const int64_t before = waited;
    wait_in_round([&] { return finished.load() >= count - 1; });
    waits[0] += waited - before;
}

Pool::Pool(int threads, bool adapts) {
    if (threads < 1) throw std::invalid_argument("a pool needs at least one thread");
    if (threads > MOST) throw std::invalid_argument("a pool has at most " + std::to_string(MOST) + " threads");
    team_ = std::make_unique<Team>(threads, adapts);
    for (int i = 1; i < threads; i++) team_->workers.emplace_back([team = team_.get(), i] { team->work(i); });
}

// A forked process has no threads to join, and a condition variable with sleepers waits for them before it goes.
Pool::~Pool() {
    if (team_->forks_at_start != count_forks()) team_.release();
}

int Pool::threads() const { return team_->threads; }

bool Pool::adapts() const { return team_->adapts; }

void Pool::run(const std::function<void(int)>& body) {
    Team& team = *team_;
    require_own(team.forks_at_start);
    std::lock_guard<std::mutex> turn(team.caller);
    const int count = team.in_use;
    team.run(count, [&](int thread) {
        for (int i = thread; i < team.threads; i += count) body(i);
    });
}

double Pool::run_together(int count, const std::function<void(int)>& body) {
    Team& team = *team_;
    require_own(team.forks_at_start);
    std::lock_guard<std::mutex> turn(team.caller);
    team.run(count, body);
    return double(*std::max_element(team.waits.begin(), team.waits.begin() + count)) / 1e9;
}

void Pool::barrier() {
    Team& team = *team_;
    const uint64_t count = uint64_t(team.in_use);
    const uint64_t arrived = team.arrived.fetch_add(1) + 1;
    const uint64_t all = (arrived + count - 1) / count * count;
    if (arrived == all) {
        team.wake(team.within);
    } else {
        team.wait_in_round([&] { return team.arrived.load() >= all; });
    }
}

}  // namespace tureen
