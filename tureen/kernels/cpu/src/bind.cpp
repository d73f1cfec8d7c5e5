#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"
#include "kernels.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a server that ends need not take its model apart
    m.doc() = "Kernels of the CPU. Results are numpy arrays; long calls release the GIL.";
    m.def("isa", [] { return tureen::kernels().name; }, "The instruction set in use, by its name in isa/.");
    m.def(
        "isas",
        [] {
            std::vector<std::tuple<std::string, bool, bool>> all;
            for (const tureen::Isa& isa : tureen::isas()) all.emplace_back(isa.name, isa.runs, isa.by_default);
            return all;
        },
        "The instruction sets of this build, best first: name, whether this processor runs it, and whether it is taken "
        "without being named in TUREEN_CPU_ISA.");
    m.def("needs_of_isas", &tureen::needs_of_isas,
          "All instruction sets for this kind of machine, also those that the compiler did not know, best first: name, "
          "and the features that a processor must have, with spaces between.");
    tureen::bind_linear(m);
    tureen::bind_attention(m);
    tureen::bind_encoder(m);
    tureen::bind_sampling(m);
    tureen::bind_tracing(m);
    tureen::bind_tape(m);
    tureen::bind_bench(m);
    tureen::bind_pool(m);
    tureen::bind_closing(m);
    tureen::bind_closing_tree(m);
    tureen::bind_guard(m);
    tureen::bind_history(m);
}
