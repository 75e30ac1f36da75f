// The tile instructions of AMX as templates over numbers of tiles: the processor's, or the model of them (MP_TILE_MODEL), by which
// tests run on every machine what is built on tiles. Compilers' own macros take only literal numbers, and do not say that a
// load reads memory: what was just written might come after the load.
#pragma once
#include "vec.h"

#if defined(MP_TILES)
// Of each tile the rows and the bytes of a row. Sixteen and 64 at most.
struct alignas(64) TileConfig { uint8_t palette, start, none[14]; uint16_t colsb[16]; uint8_t rows[16]; };

#if !defined(MP_TILE_MODEL)
#include <sys/syscall.h>
#include <unistd.h>

// Asks Linux for tiles, for all threads of this process; without that the first tile instruction ends the process. The build
// asks too, before this library is chosen (moonpool/base/native/build.py).
INLINE bool ask_for_tiles() { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0; }
INLINE void tile_config(const TileConfig& c) { asm volatile("ldtilecfg %0" ::"m"(c)); }
INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T> INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> INLINE void tile_load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T> INLINE void tile_store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// Sums C += rows A by weights B: of bfloat16; of signed bytes by unsigned ones, or by signed ones.
template <int C, int A, int B> INLINE void tile_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
template <int C, int A, int B> INLINE void tile_bytes() { asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
template <int C, int A, int B> INLINE void tile_signed_bytes() { asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
#else
#include "tile_model.h"

struct ModelTiles { TileConfig shape; alignas(64) uint8_t at[8][16][64]; };
inline thread_local ModelTiles model_tiles;
INLINE bool ask_for_tiles() { return true; }
INLINE void tile_config(const TileConfig& c) { memset(&model_tiles, 0, sizeof model_tiles), model_tiles.shape = c; }
INLINE void tile_release() { memset(&model_tiles, 0, sizeof model_tiles); }
template <int T> INLINE void tile_is_there() { if (!model_tiles.shape.palette || !model_tiles.shape.rows[T]) __builtin_trap(); }
template <int T> INLINE void tile_zero() { tile_is_there<T>(), memset(model_tiles.at[T], 0, sizeof model_tiles.at[T]); }
template <int T> INLINE void tile_load(const void* p, int64_t stride) {
    tile_zero<T>();
    for (int r = 0; r < model_tiles.shape.rows[T]; r++) memcpy(model_tiles.at[T][r], (const char*)p + r * stride, model_tiles.shape.colsb[T]);
}
template <int T> INLINE void tile_store(void* p, int64_t stride) {
    tile_is_there<T>();
    for (int r = 0; r < model_tiles.shape.rows[T]; r++) memcpy((char*)p + r * stride, model_tiles.at[T][r], model_tiles.shape.colsb[T]);
}
// A processor refuses tiles whose shapes do not fit one another.
template <int C, int A, int B> INLINE void tiles_fit() {
    const TileConfig& s = model_tiles.shape;
    if (s.rows[C] != s.rows[A] || s.colsb[A] != 4 * s.rows[B] || s.colsb[C] != s.colsb[B]) __builtin_trap();
}
#define TILES_OF(F, TC, TA, LA, TB) \
    tiles_fit<C, A, B>(); \
    const TileConfig& s = model_tiles.shape; \
    tile_model::F((TC(*)[16])model_tiles.at[C], (const TA(*)[LA])model_tiles.at[A], (const TB(*)[LA])model_tiles.at[B], s.rows[C], s.rows[B], s.colsb[C] / 4)
template <int C, int A, int B> INLINE void tile_bf16() { TILES_OF(tdpbf16ps, float, uint16_t, 32, uint16_t); }
template <int C, int A, int B> INLINE void tile_bytes() { TILES_OF(tdpb, int32_t, int8_t, 64, uint8_t); }
template <int C, int A, int B> INLINE void tile_signed_bytes() { TILES_OF(tdpb, int32_t, int8_t, 64, int8_t); }
#undef TILES_OF
#endif

// The shape of this thread's tiles, loaded when it changes. Put back where a task ends (TilesInUse), so that a switch of
// threads saves no tiles. One number stands for all of a shape's: 0 for none.
inline thread_local int tiles_shape = 0;
template <class F> INLINE void shape_tiles(int number, const F& config) {
    if (tiles_shape == number) return;
    tile_config(config());
    tiles_shape = number;
}
struct TilesInUse { ~TilesInUse() { tile_release(), tiles_shape = 0; } };
#endif
