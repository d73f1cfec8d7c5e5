// AMX's intrinsics in plain C++, for processors without it: Intel's Architectures Software Developer's Manual, volume
// 2, LDTILECFG to TDPBSUD. Only what isa/amx.h uses. A use that a processor would answer with a fault ends the process.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx_model {

struct Tile {
    int rows, bytes;
    alignas(64) uint8_t data[16][64];
};

struct State {
    bool is_configured;
    Tile tiles[8];
};

inline State& state() {
    static thread_local State own;
    return own;
}

inline void demand(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "amx_model: %s\n", what);
    std::abort();
}

inline Tile& tile(int number) {
    demand(state().is_configured, "tiles are not configured");
    demand(number >= 0 && number < 8 && state().tiles[number].rows > 0, "no such tile");
    return state().tiles[number];
}

inline void loadconfig(const void* from) {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    demand(bytes[0] == 1, "palette is not 1");
    State& all = state();
    std::memset(&all, 0, sizeof all);
    for (int i = 0; i < 8; i++) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, bytes + 16 + 2 * i, sizeof row_bytes);
        all.tiles[i].bytes = row_bytes;
        all.tiles[i].rows = bytes[48 + i];
        demand(row_bytes <= 64 && bytes[48 + i] <= 16, "a tile is too large");
    }
    all.is_configured = true;
}

inline void release() { state().is_configured = false; }

inline void zero(int number) {
    Tile& to = tile(number);
    std::memset(to.data, 0, sizeof to.data);
}

inline void loadd(int number, const void* base, long stride) {
    Tile& to = tile(number);
    std::memset(to.data, 0, sizeof to.data);
    for (int row = 0; row < to.rows; row++)
        std::memcpy(to.data[row], static_cast<const uint8_t*>(base) + row * stride, size_t(to.bytes));
}

inline void stored(int number, void* base, long stride) {
    const Tile& from = tile(number);
    for (int row = 0; row < from.rows; row++)
        std::memcpy(static_cast<uint8_t*>(base) + row * stride, from.data[row], size_t(from.bytes));
}

inline void demand_shapes(const Tile& sums, const Tile& a, const Tile& b) {
    demand(sums.rows == a.rows && sums.bytes == b.bytes && a.bytes == 4 * b.rows, "tiles do not fit each other");
}

// Signed bytes of a times unsigned bytes of b.
inline void dpbsud(int to, int of_a, int of_b) {
    Tile &sums = tile(to), &a = tile(of_a), &b = tile(of_b);
    demand_shapes(sums, a, b);
    for (int m = 0; m < sums.rows; m++)
        for (int n = 0; n < sums.bytes / 4; n++) {
            uint32_t sum;
            std::memcpy(&sum, &sums.data[m][4 * n], 4);
            for (int i = 0; i < a.bytes; i++)
                sum += uint32_t(int32_t(int8_t(a.data[m][i])) * int32_t(b.data[i / 4][4 * n + i % 4]));
            std::memcpy(&sums.data[m][4 * n], &sum, 4);
        }
}

// Numbers below the normal ones are 0, as inputs and as results.
inline float flushed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000) == 0) bits &= 0x80000000;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline float bf16_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return flushed(x);
}

// Even and odd inputs are summed each for themselves, with one rounding a product; their sum is added last.
inline void dpbf16ps(int to, int of_a, int of_b) {
    Tile &sums = tile(to), &a = tile(of_a), &b = tile(of_b);
    demand_shapes(sums, a, b);
    for (int m = 0; m < sums.rows; m++)
        for (int n = 0; n < sums.bytes / 4; n++) {
            float parts[2] = {};
            for (int i = 0; i < a.bytes / 2; i++)
                parts[i % 2] = flushed(__builtin_fmaf(bf16_at(&a.data[m][2 * i]),
                                                      bf16_at(&b.data[i / 2][4 * n + 2 * (i % 2)]), parts[i % 2]));
            float sum;
            std::memcpy(&sum, &sums.data[m][4 * n], 4);
            sum = flushed(flushed(sum) + flushed(parts[0] + parts[1]));
            std::memcpy(&sums.data[m][4 * n], &sum, 4);
        }
}

}  // namespace amx_model

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_model::loadconfig
#define _tile_release amx_model::release
#define _tile_zero amx_model::zero
#define _tile_loadd amx_model::loadd
#define _tile_stored amx_model::stored
#define _tile_dpbsud amx_model::dpbsud
#define _tile_dpbf16ps amx_model::dpbf16ps
