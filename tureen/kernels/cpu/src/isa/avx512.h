// AVX-512 without VNNI: Intel Skylake-SP and Skylake-X.
// order: 30
// machine: x86_64
// needs: avx2 fma f16c avx512f avx512bw avx512dq avx512vl
// flags: -mfma -mf16c -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512 -mtune=skylake-avx512
// defines: TUREEN_512
#pragma once

#include "../maddubs.h"

namespace tureen {
namespace VARIANT {
namespace {

constexpr int PACKED_ROWS = 8, PACKED_BLOCK = 8;
constexpr int PANEL_BLOCK = 4, PANEL_TILES = 3;
constexpr int PLAIN_BLOCK = 8, PLAIN_TILES = 3;

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
