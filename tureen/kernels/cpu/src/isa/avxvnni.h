// AVX2 with VNNI in its 256-bit encoding: Intel Alder Lake to Lunar Lake and Sierra Forest.
// order: 20
// machine: x86_64
// needs: avx2 fma f16c avxvnni
// flags: -mavx2 -mfma -mf16c -mavxvnni -mtune=alderlake
// defines: TUREEN_256 TUREEN_VNNI
// rest: avx2
// model needs: avx2 fma f16c avx512f avx512vl avx512vnni
#pragma once

#include "../vnni.h"

namespace tureen {
namespace VARIANT {
namespace {

// Of 16 registers, 12 hold sums.
constexpr int PACKED_ROWS = 4, PACKED_BLOCK = 4;
constexpr int PANEL_BLOCK = 6, PANEL_TILES = 1;
constexpr int PLAIN_BLOCK = 4, PLAIN_TILES = 1;

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
