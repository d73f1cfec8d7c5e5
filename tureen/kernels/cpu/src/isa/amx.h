// AMX: Intel Sapphire Rapids and later. 8-bit products of 16 rows or more and all products of bfloat16 go by tiles.
// order: 50
// machine: x86_64
// needs: avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512vnni amx_tile amx_int8 amx_bf16
// flags: -mfma -mf16c -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mamx-tile -mamx-int8 -mamx-bf16 -mprefer-vector-width=512 -mtune=sapphirerapids
// defines: TUREEN_512 TUREEN_VNNI
// attention: avx512vnni
// rest: avx512
// chosen: by name
// model needs: avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512vnni
#pragma once

#include "../vnni.h"
#ifdef TUREEN_MODELS
#include "amx_model.h"
#endif

namespace tureen {
namespace VARIANT {
namespace {

constexpr int PACKED_ROWS = 8, PACKED_BLOCK = 8;
constexpr int PANEL_BLOCK = 4, PANEL_TILES = 3;
constexpr int PLAIN_BLOCK = 8, PLAIN_TILES = 3;

#define TUREEN_TILE_PRODUCTS

}  // namespace
}  // namespace VARIANT
}  // namespace tureen
