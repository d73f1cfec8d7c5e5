// Which instruction set is used. isas.inc lists those for this kind of machine, best first; CMake writes it from the
// files in isa/. LEFT_OUT: the compiler did not know it.
#include "dispatch.h"

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

#ifdef __x86_64__
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "kernels.h"

namespace tureen {

#define ISA(NAME, ATTENTION, REST, NEEDS, BY_DEFAULT) \
    namespace NAME {                                  \
    extern const LinearKernels linear_kernels;        \
    }                                                 \
    namespace ATTENTION {                             \
    extern const AttentionKernels attention_kernels;  \
    }                                                 \
    namespace REST {                                  \
    extern const RowKernels row_kernels;              \
    extern const PackKernels pack_kernels;            \
    extern const SamplingKernels sampling_kernels;    \
    }                                                 \
    namespace NAME {                                  \
    const Kernels all{#NAME,                          \
                      &linear_kernels,                \
                      &REST::row_kernels,             \
                      &ATTENTION::attention_kernels,  \
                      &REST::pack_kernels,            \
                      &REST::sampling_kernels};       \
    }
#define LEFT_OUT(NAME, NEEDS)
#include "isas.inc"
#undef ISA
#undef LEFT_OUT

namespace {

struct Candidate {
    const Kernels* kernels;
    const char* needs;  // features, with spaces between
    bool by_default;
};

const Candidate CANDIDATES[] = {
#define ISA(NAME, ATTENTION, REST, NEEDS, BY_DEFAULT) {&NAME::all, NEEDS, BY_DEFAULT},
#define LEFT_OUT(NAME, NEEDS)
#include "isas.inc"
#undef ISA
#undef LEFT_OUT
};

#ifdef __x86_64__

// A bit of what `cpuid` says, and the parts of the registers that the system must save for it (XCR0).
struct Feature {
    const char* name;
    unsigned leaf, subleaf;
    int output;  // eax, ebx, ecx, edx
    int bit;
    unsigned saved;
};

constexpr unsigned YMM = 0x6, ZMM = 0xe6, TILES = 0x60000;

const Feature FEATURES[] = {
    {"fma", 1, 0, 2, 12, YMM},        {"f16c", 1, 0, 2, 29, YMM},       {"avx2", 7, 0, 1, 5, YMM},
    {"avx512f", 7, 0, 1, 16, ZMM},    {"avx512dq", 7, 0, 1, 17, ZMM},   {"avx512bw", 7, 0, 1, 30, ZMM},
    {"avx512vl", 7, 0, 1, 31, ZMM},   {"avx512vnni", 7, 0, 2, 11, ZMM}, {"avxvnni", 7, 1, 0, 4, YMM},
    {"amx_bf16", 7, 0, 3, 22, TILES}, {"amx_tile", 7, 0, 3, 24, TILES}, {"amx_int8", 7, 0, 3, 25, TILES},
};

unsigned saved_registers() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0) return 0;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

#ifdef __linux__
constexpr int ARCH_GET_XCOMP_SUPP = 0x1021, ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;

// Whether Linux would lend the tile registers to a process that asks for them.
bool may_use_tiles() {
    unsigned long supported = 0;
    return syscall(SYS_arch_prctl, ARCH_GET_XCOMP_SUPP, &supported) == 0 && (supported >> XTILEDATA & 1) != 0;
}

// For this process and its children. Throws std::runtime_error when Linux does not lend them.
void ask_for_tiles() {
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) != 0)
        throw std::runtime_error("TUREEN_CPU_ISA is amx; Linux does not lend its registers to this process");
}
#else
bool may_use_tiles() { return false; }
void ask_for_tiles() {}
#endif

bool has(const std::string& name) {
    for (const Feature& feature : FEATURES) {
        if (name != feature.name) continue;
        unsigned out[4];
        if (!__get_cpuid_count(feature.leaf, feature.subleaf, &out[0], &out[1], &out[2], &out[3])) return false;
        return (out[feature.output] >> feature.bit & 1) != 0 && (saved_registers() & feature.saved) == feature.saved &&
               (feature.saved != TILES || may_use_tiles());
    }
    throw std::logic_error("isa/: no processor has " + name);
}

#elif defined(__aarch64__) && defined(__linux__)

#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif

bool has(const std::string& name) {
    if (name == "asimddp") return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    if (name == "asimdhp") return (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) != 0;
    if (name == "i8mm") return (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
    throw std::logic_error("isa/: no processor has " + name);
}

#elif defined(__aarch64__)

bool has(const std::string& name) { return name != "i8mm"; }  // Apple's all have dot products and half floats

#else

bool has(const std::string&) { return false; }

#endif

#ifndef __x86_64__
void ask_for_tiles() {}
#endif

bool runs(const Candidate& candidate) {
    std::istringstream needs(candidate.needs);
    for (std::string name; needs >> name;)
        if (!has(name)) return false;
    return true;
}

const Kernels& choose() {
    const char* variable = std::getenv("TUREEN_CPU_ISA");
    const std::string wanted = variable == nullptr ? "" : variable;
    std::string known;
    for (const Candidate& candidate : CANDIDATES) {
        if (!runs(candidate)) continue;
        if (wanted.empty() ? candidate.by_default : wanted == candidate.kernels->name) {
            if (std::strstr(candidate.needs, "amx_tile") != nullptr) ask_for_tiles();
            return *candidate.kernels;
        }
        known += std::string(known.empty() ? "" : ", ") + candidate.kernels->name;
    }
    if (known.empty())
        throw std::runtime_error(
            "they were built for another kind of processor; build them here: make native, or pip install");
    throw std::runtime_error("TUREEN_CPU_ISA is " + wanted + "; this processor runs: " + known);
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose();
    return chosen;
}

std::vector<Isa> isas() {
    std::vector<Isa> all;
    for (const Candidate& candidate : CANDIDATES)
        all.push_back({candidate.kernels->name, runs(candidate), candidate.by_default});
    return all;
}

std::vector<std::pair<std::string, std::string>> needs_of_isas() {
    return {
#define ISA(NAME, ATTENTION, REST, NEEDS, BY_DEFAULT) {#NAME, NEEDS},
#define LEFT_OUT(NAME, NEEDS) {#NAME, NEEDS},
#include "isas.inc"
#undef ISA
#undef LEFT_OUT
    };
}

}  // namespace tureen
