// The best token of each row of logits, looked for by the threads that compute them while they are in a cache.
#pragma once

#include <cstdint>
#include <vector>

namespace tureen {

class Best {
public:
    void start(int rows, int threads);  // nothing has been seen
    // One thread has computed columns first … first + count - 1 of all rows: logits [rows][width].
    void look(int thread, const float* logits, int width, int first, int count);
    // All columns have been seen.
    void settle(const float* logits, int width);

    // As SamplingKernels::peak has it, but for the token -1 where the value is not finite.
    std::vector<float> values;
    std::vector<int64_t> token_ids;

private:
    struct Found {
        float value;
        int64_t token_id;

        void take(float other, int64_t other_id);
    };

    std::vector<Found> found_;  // [threads][rows]
};

}  // namespace tureen
