// How rows go through the panels of a packed matrix, and what its products share.
#pragma once
#include "packed.h"
#include "ends.h"

static const int64_t PACKED_BLOCK = 1 << 20;  // bytes of rows that go through all panels together
enum { PACKED_AHEAD = 4096 };                  // bytes of a panel that a single tile fetches ahead
// Rows up to which a tile leaves fetching to the processor, as was faster (docs/kernels.md): few rows wait for memory, and
// more rows, or codes that take more work, for sums.
INLINE int64_t unaided_rows(const Panels& p) { return W < 16 ? 0 : p.values == WHOLE && p.bits % 4 == 0 ? 3 : 1; }
// What a tile fetches meanwhile: `pace` bytes with each part, from `at` on.
struct Ahead { const char* at; int64_t pace; };
struct Turn { int64_t at, of; };  // which of a task's tiles one is: a task goes through them in order, in one thread

// c + a * b in one rounding, if the machine can: compilers choose anew in each function whether they join the two.
INLINE vf fused(vf c, vf a, vf b) {
#if defined(MP_AVX512)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(MP_AVX2)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return c + a * b;
#endif
}
// Scales or offsets of W outputs: whole numbers of `unit`, or as they are.
INLINE vf scales_at(const char* p, int bytes, int at, vf unit) {
    if (bytes == 1) return widen((const int8_t*)p + at) * unit;
    return bytes == 2 ? widen((const f16*)p + at) : load((const float*)p + at);
}

// All rows by the columns of the result, in one tile of at most MOST rows or several of at most MANY; of a row `row_bytes` are
// read, and a panel has `parts` steps. tile(rows, first row, panel, turn, ahead, sums) gives the sums of one panel, [rows, PANEL].
// Each task of a thread has a Scope.
struct NoScope { ~NoScope() {} };
template <class T, int MOST, int MANY, class Scope = NoScope, class Tile>
static void walk_panels(const Panels& p, int64_t rows, int64_t row_bytes, int64_t parts, const Result& r, int threads, const Tile& tile_of) {
    int64_t width = p.width(), begin = r.first / width, panels = (r.last + width - 1) / width - begin;
    if (!rows || panels <= 0) return;
    int64_t most_rows = rows > MOST ? MANY : MOST, tiles = (rows + most_rows - 1) / most_rows;
    int64_t size = PACKED_BLOCK / (row_bytes * most_rows) + 1, blocks = (tiles + size - 1) / size;
    int64_t shared = threads > 1 ? 4 * threads / panels : 0;  // of few panels every thread has a block of its own
    if (blocks < shared) blocks = shared < tiles ? shared : tiles;
    int64_t most = panels * PANEL * p.inputs / 65536 + 1;
    if (most < threads) threads = (int)most;
    parallel_runs(blocks * panels, 1, threads, [&](int64_t task, int64_t) {
        int64_t panel = begin + task % panels, block = task / panels;
        float sums[MOST * PANEL] __attribute__((aligned(64)));
        const char* weight = p.weight + panel * p.bytes();
        Scope scope;
        // Several tiles fetch the next panel together, a share each; a single tile fetches what comes soon.
        int64_t first = tiles * block / blocks, last = tiles * (block + 1) / blocks, part = p.bytes() / parts;
        Ahead ahead = last - first > 1 ? Ahead{weight + p.bytes(), part / (last - first)}
                                       : Ahead{weight + PACKED_AHEAD, rows <= unaided_rows(p) ? 0 : part};
        for (int64_t tile = first; tile < last; tile++, ahead.at += ahead.pace * parts) {
            int64_t row = rows * tile / tiles;
            int count = (int)(rows * (tile + 1) / tiles - row);
            tile_of(count, row, weight, Turn{tile - first, last - first}, ahead, sums);
            finish<T>(p, panel, row, count, sums, r);
        }
    });
}
