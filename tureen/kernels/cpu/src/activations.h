// Memory for activations.
#pragma once

#include "matrix.h"
#include "memory.h"

namespace tureen {

class ActivationBuffer {
public:
    ActivationBuffer(Inputs kind, int cols);

    // Room for at least so many rows. Growing loses what is stored, and views made before. Throws std::bad_alloc.
    void reserve(int rows);
    // The first `rows` of those reserved.
    Activations view(int rows) const;

private:
    Activations all_{};  // rows = those reserved
    Memory memory_{0, false};
};

}  // namespace tureen
