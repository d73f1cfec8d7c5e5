#include "bind.h"

#include "kernels.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a server that ends need not take its model apart
    m.doc() = "Kernels of the CPU. Results are numpy arrays; long calls release the GIL.";
    m.def("isa", [] { return tureen::kernels().name; }, "The instruction set in use: avx512, avx2, neon or portable.");
    tureen::bind_linear(m);
    tureen::bind_attention(m);
    tureen::bind_sampling(m);
    tureen::bind_tape(m);
    tureen::bind_bench(m);
    tureen::bind_pool(m);
}
