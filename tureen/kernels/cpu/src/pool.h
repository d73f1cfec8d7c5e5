// Threads that stay: they spin for a while after each piece of work, then sleep.
#pragma once

#include <functional>
#include <memory>

namespace tureen {

class Pool {
public:
    // `threads` counts the calling thread. Throws std::invalid_argument when it is less than 1, std::system_error when
    // the system starts no more threads.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const;

    // body(thread) once on every thread, the caller's being 0; returns when all are done. What was written before is
    // seen in `body`, what `body` writes is seen after. Several callers take turns. Not to be nested. A `body` that
    // throws ends the process. Throws std::runtime_error in a process forked since: the threads are not in it.
    void run(const std::function<void(int)>& body);

    // Inside `run`: wait until every thread has arrived here. What was written before is seen after.
    void barrier();

private:
    struct Team;
    std::unique_ptr<Team> team_;
};

}  // namespace tureen
