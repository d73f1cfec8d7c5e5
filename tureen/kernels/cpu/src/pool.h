// Threads that stay: they spin for a while after each piece of work, then sleep.
#pragma once

#include <functional>
#include <memory>

namespace tureen {

class Pool {
public:
    // `threads` counts the calling thread. Throws std::invalid_argument when it is less than 1 or more than MOST,
    // std::system_error when the system starts no more threads. adapts: whether fewer of them may be used at a time,
    // where steps are faster so.
    explicit Pool(int threads, bool adapts = false);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    static constexpr int MOST = 0xffff;

    int threads() const;
    bool adapts() const;

    // body(i) once for each i in [0, threads()), on the threads that are in use; returns when all are done. What was
    // written before is seen in `body`, what `body` writes is seen after. Several callers take turns. Not to be nested.
    // A `body` that throws ends the process. Throws std::runtime_error in a process forked since: the threads are not
    // in it.
    void run(const std::function<void(int)>& body);

    // As `run`, but body(thread) for each thread < count at once, the caller's being 0, and these are in use from then
    // on. Returns how many seconds that one of them waited for others that waited most.
    double run_together(int count, const std::function<void(int)>& body);

    // Inside `run_together`: wait until every thread has arrived here. What was written before is seen after.
    void barrier();

private:
    struct Team;
    std::unique_ptr<Team> team_;
};

}  // namespace tureen
