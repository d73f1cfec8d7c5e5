// AVX-512 with VNNI: Intel Cascade Lake, Ice Lake, Tiger Lake, Rocket Lake and later; AMD Zen 4 and later.
// order: 40
// machine: x86_64
// needs: avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512vnni
// flags: -mfma -mf16c -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mprefer-vector-width=512 -mtune=icelake-server
// defines: TUREEN_512 TUREEN_VNNI
// rest: avx512
#pragma once

#include "../vnni.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int PACKED_ROWS = 8, PACKED_BLOCK = 8;
constexpr int PANEL_BLOCK = 4, PANEL_TILES = 3;
constexpr int PLAIN_BLOCK = 8, PLAIN_TILES = 3;

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
