// Memory for activations.
#pragma once

#include "matrix.h"
#include "memory.h"

namespace tureen {

class ActivationBuffer {
public:
    ActivationBuffer(Inputs kind, int cols);

    // Changes the kind and the number of columns; keeps the memory.
    void become(Inputs kind, int cols);
    // Makes room for at least `rows` rows. Growing discards the stored values and invalidates earlier views. Throws
    // std::bad_alloc.
    void reserve(int rows);
    // The first `rows` of those reserved.
    Activations view(int rows) const;

private:
    Activations all_{};  // rows = those reserved
    Memory memory_{0, false};
};

}  // namespace tureen
