// The Python module's parts, one file each.
#pragma once

#include <nanobind/nanobind.h>

namespace tureen {

void bind_linear(nanobind::module_& m);     // Pool, Matrix, pack, linear; and the row kernels, for tests
void bind_attention(nanobind::module_& m);  // KvCache; store, load, attend, for tests
void bind_encoder(nanobind::module_& m);    // whole arrays, shared among threads
void bind_sampling(nanobind::module_& m);
void bind_tracing(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
void bind_bench(nanobind::module_& m);  // the memory's speed
void bind_pool(nanobind::module_& m);   // for tests of the pool
void bind_closing(nanobind::module_& m);
void bind_closing_tree(nanobind::module_& m);
void bind_guard(nanobind::module_& m);
void bind_history(nanobind::module_& m);

}  // namespace tureen
