// Which instruction set is used.
#include <cstdlib>
#include <stdexcept>
#include <string>

#ifdef TUREEN_X86
#include <cpuid.h>
#endif
#if defined(TUREEN_NEON) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels.h"

#define DECLARE(VARIANT)                                                                                              \
    namespace VARIANT {                                                                                               \
    extern const LinearKernels linear_kernels;                                                                        \
    extern const RowKernels row_kernels;                                                                              \
    extern const AttentionKernels attention_kernels;                                                                  \
    extern const PackKernels pack_kernels;                                                                            \
    extern const SamplingKernels sampling_kernels;                                                                    \
    const Kernels all{#VARIANT, &linear_kernels, &row_kernels, &attention_kernels, &pack_kernels, &sampling_kernels}; \
    }

namespace tureen {

DECLARE(portable)
#ifdef TUREEN_X86
DECLARE(avx2)
DECLARE(avx512)
#endif
#ifdef TUREEN_NEON
DECLARE(neon)
#endif

namespace {

struct Candidate {
    const Kernels* kernels;
    bool can_run;
};

#ifdef TUREEN_X86
// By the compiler's runtime, which asks the system too: registers that it does not save cannot be used.
bool runs_avx2() {
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C) != 0;
}

bool runs_avx512() {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}
#endif

#ifdef TUREEN_NEON
bool runs_neon() {
#ifdef __linux__
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 && (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) != 0;
#else
    return true;  // Apple's processors all have dot products and half floats
#endif
}
#endif

// Best first.
const Candidate* candidates(int* count) {
    static const Candidate list[] = {
#ifdef TUREEN_X86
        {&avx512::all, runs_avx512()},
        {&avx2::all, runs_avx2()},
#endif
#ifdef TUREEN_NEON
        {&neon::all, runs_neon()},
#endif
        {&portable::all, true},
    };
    *count = int(sizeof list / sizeof *list);
    return list;
}

const Kernels& choose() {
    const char* variable = std::getenv("TUREEN_CPU_ISA");
    const std::string wanted = variable == nullptr ? "" : variable;
    std::string known;
    int count;
    const Candidate* list = candidates(&count);
    for (int i = 0; i < count; i++) {
        if (!list[i].can_run) continue;
        if (wanted.empty() || wanted == list[i].kernels->name) return *list[i].kernels;
        known += std::string(known.empty() ? "" : ", ") + list[i].kernels->name;
    }
    throw std::runtime_error("TUREEN_CPU_ISA is " + wanted + "; this processor runs: " + known);
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

}  // namespace tureen
