// AVX2: Intel Haswell and later, AMD Zen and later.
// order: 10
// machine: x86_64
// needs: avx2 fma f16c
// flags: -mavx2 -mfma -mf16c -mtune=haswell
// defines: TUREEN_256
#pragma once

#include "../maddubs.h"

namespace tureen {
namespace VARIANT {
namespace {

// Of 16 registers, 8 hold sums.
constexpr int PACKED_ROWS = 4, PACKED_BLOCK = 4;
constexpr int PANEL_BLOCK = 4, PANEL_TILES = 1;
constexpr int PLAIN_BLOCK = 4, PLAIN_TILES = 1;

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
