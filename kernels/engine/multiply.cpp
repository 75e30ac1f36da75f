// Rows by a matrix in panels.
//
// Few rows wait for memory, many for the processor's sums. So one row goes through several panels side by side, as memory
// gives more to several streams. Rows that walk over a panel again and again, as they do without AVX-512, do so part by
// part, while a part is in the first cache, and each walk fetches its share of the next part.
#include "ends.h"
#include "matrices.h"
#include "packed.h"
#include "tile_products.h"

#if defined(MP_AVX512)
enum { TILE_ROWS = 14, MANY = VECTORS };  // 28 sums, 2 vectors of weights, 1 or 2 for the row's numbers
#elif defined(MP_AVX2)
enum { TILE_ROWS = 6, MANY = 2 };
#else
enum { TILE_ROWS = 6, MANY = VECTORS / 2 };
#endif
// What was faster where it was measured, on AVX2 and AVX-512 (docs/kernels.md): so many rows of one walk at most fetch into
// the first cache, more into the second; and so many bytes ahead.
template <class T> constexpr int NEAR_BY = paired<T>() ? 4 : W == 8 && __is_same(T, bf16) ? (int)TILE_ROWS : 0;
template <class T> constexpr int64_t ahead_of(int64_t rows) { return rows > NEAR_BY<T> ? 12 << 10 : W == 8 ? 1536 : 4096; }
enum { BLOCK_TILES = 32 };  // of rows that go through all panels together and are widened for that;
static const int64_t BLOCK_BYTES = 6 << 20;  // and of others that stay as they are
static const int64_t PART_BYTES = 16 << 20;  // of a matrix that is worked on without looking for cores

template <class T> constexpr bool widened() { return !__is_same(T, Read<T>); }
#if defined(MP_BFMMLA)
constexpr bool IN_TWOS = true;  // rows of pairs take the registers of an even number of rows
#else
constexpr bool IN_TWOS = false;
#endif
// Vectors of a panel that M rows take at once, as many as there are registers for their sums.
template <class X, int M> constexpr int at_once() {
    constexpr int rows = IN_TWOS && __is_same(X, bf16) ? (M + 1) / 2 * 2 : M;
    return rows * VECTORS <= (W == 8 ? 12 : 28) ? (int)VECTORS : (int)MANY;
}

// ---- sums of M rows by NV vectors of a panel, from vector `from` on ----
// `ahead`: what is fetched meanwhile, `pace` bytes with each step. `more`: added to the sums that are there.
template <class T, int M, int NV>
static __attribute__((noinline)) void sums_of(const float* x, int64_t stride, const T* panel, int from, int64_t K,
                                              const char* ahead, int64_t pace, bool more, float* out) {
    vf acc[M][NV] = {};
    out += from * W;
    if (more) for (int i = 0; i < M; i++) for (int j = 0; j < NV; j++) acc[i][j] = load(out + i * PANEL + j * W);
    for (int64_t k = 0; k < K; k++, panel += PANEL, ahead += pace) {
        __builtin_prefetch(ahead, 0, M <= NEAR_BY<T> ? 3 : 2);
        if (sizeof(T) == 4) __builtin_prefetch(ahead + 64, 0, 2);
        for (int j = 0; j < NV; j += 2) {
            vf weight[2];
            two_vectors(panel, from + j, weight);
            const float* row = x + k;
            if (W == 8 && M == 3) asm volatile("" : "+r"(row));  // keeping three numbers would cost a sum its register
            for (int i = 0; i < M; i++) {
                vf left = splat(row[i * stride]);
                acc[i][j] += left * weight[0], acc[i][j + 1] += left * weight[1];
            }
        }
    }
    for (int i = 0; i < M; i++) for (int j = 0; j < NV; j++) store(out + i * PANEL + j * W, acc[i][j]);
}
#if defined(MP_BF16) && !defined(MP_TILES)
template <class T, int M, int NV>
static __attribute__((noinline)) void sums_of(const bf16* x, int64_t stride, const T* panel, int, int64_t K,
                                              const char* ahead, int64_t pace, bool, float* out) {
    vf acc[M][NV] = {};
    for (int64_t k = 0; k < K; k += 2, panel += 2 * PANEL, ahead += pace) {
        __builtin_prefetch(ahead, 0, M <= NEAR_BY<T> ? 3 : 2);
        __builtin_prefetch(ahead + 64, 0, M <= NEAR_BY<T> ? 3 : 2);
        vu weight[NV];
        for (int j = 0; j < NV; j++) weight[j] = load_as<vu>(panel + 2 * j * W);
        for (int i = 0; i < M; i++) {
            int32_t pair;
            memcpy(&pair, x + i * stride + k, 4);
            vu left = (vu)_mm512_set1_epi32(pair);
            for (int j = 0; j < NV; j++) acc[i][j] = dot2(acc[i][j], weight[j], left);
        }
    }
    for (int i = 0; i < M; i++) for (int j = 0; j < NV; j++) store(out + i * PANEL + j * W, acc[i][j]);
}
#elif defined(MP_BFMMLA)
template <class T, int M, int NV>
static __attribute__((noinline)) void sums_of(const bf16* x, int64_t stride, const T* panel, int from, int64_t K,
                                              const char* ahead, int64_t pace, bool more, float* out) {
    vf acc[M][NV] = {};
    out += from * W;
    if (more) for (int i = 0; i < M; i++) for (int j = 0; j < NV; j++) acc[i][j] = load(out + i * PANEL + j * W);
    add_by_matrices(acc, x, 2 * stride, panel + 2 * from * W, 4 * PANEL, K / 2, ahead, pace);
    for (int i = 0; i < M; i++) for (int j = 0; j < NV; j++) store(out + i * PANEL + j * W, acc[i][j]);
}
#endif
// M rows by `K` inputs of a panel, all vectors; `span`: bytes that are fetched meanwhile, a share with each walk.
template <class T, int M, class X>
INLINE void tile_by_part(int rows, const X* x, int64_t stride, const T* part, int64_t K, const char* ahead, int64_t span,
                         bool more, float* out) {
    if constexpr (M > 1) if (rows < M) return tile_by_part<T, M - 1>(rows, x, stride, part, K, ahead, span, more, out);
    constexpr int NV = at_once<X, M>();
    int64_t share = span * NV / VECTORS, pace = share / (sizeof(X) == 2 ? K / 2 : K);
    for (int from = 0; from < VECTORS; from += NV, ahead += share)
        sums_of<T, M, NV>(x, stride, part, from, K, ahead, pace, more, out);
}

// ---- sums of one row by S panels side by side ----
template <class T, int S>
static __attribute__((noinline)) void sums_beside(const float* x, const T* panel, int64_t K, float* out) {
    vf acc[S][VECTORS] = {};
    for (int64_t k = 0; k < K; k++, panel += PANEL) {
        vf left = splat(x[k]);
        for (int s = 0; s < S; s++) {
            const T* input = panel + s * K * PANEL;
            for (int64_t line = 0; line < PANEL * (int64_t)sizeof(T); line += 64)
                __builtin_prefetch((const char*)input + STREAM_AHEAD<S> + line, 0, 3);
            for (int j = 0; j < VECTORS; j += 2) {
                vf weight[2];
                two_vectors(input, j, weight);
                acc[s][j] += left * weight[0], acc[s][j + 1] += left * weight[1];
            }
        }
    }
    for (int s = 0; s < S; s++) for (int j = 0; j < VECTORS; j++) store(out + s * PANEL + j * W, acc[s][j]);
}

// One row by `count` panels, S at most.
template <class T, int S, class X>
INLINE void row_by_panels(const Panels& p, const X* x, int64_t panel, int64_t count, const Result& r) {
    if constexpr (S > 1) if (count < S) return row_by_panels<T, S - 1>(p, x, panel, count, r);
    float sums[S * PANEL] __attribute__((aligned(64)));
    sums_beside<T, S>(x, (const T*)(p.weight + panel * p.bytes()), p.inputs, sums);
    for (int s = 0; s < S; s++) finish<T>(p, panel + s, 0, 1, sums + s * PANEL, r);
}
#if defined(MP_BF16) && !defined(MP_TILES)
enum { BESIDE_ROWS = 4 };
// Sums [2][rows][PANEL] of up to M rows by two panels.
template <int M>
static __attribute__((noinline)) void rows_beside(int rows, const bf16* x, int64_t stride, const char* panel, int64_t bytes, int64_t K, float* out) {
    if constexpr (M > 1) if (rows < M) return rows_beside<M - 1>(rows, x, stride, panel, bytes, K, out);
    vf acc[2][M][VECTORS] = {};
    for (int64_t k = 0; k < K; k += 2, panel += 4 * PANEL) {
        vu left[M];
        for (int i = 0; i < M; i++) left[i] = (vu)_mm512_set1_epi32(load_as<int32_t>(x + i * stride + k));
        for (int s = 0; s < 2; s++) for (int j = 0; j < VECTORS; j++) {
            const char* from = panel + s * bytes + 4 * j * W;
            __builtin_prefetch(from + STREAM_AHEAD<2>, 0, 3);
            vu weight = load_as<vu>(from);
            for (int i = 0; i < M; i++) acc[s][i][j] = dot2(acc[s][i][j], weight, left[i]);
        }
    }
    for (int s = 0; s < 2; s++) for (int i = 0; i < M; i++) for (int j = 0; j < VECTORS; j++)
        store(out + (s * M + i) * PANEL + j * W, acc[s][i][j]);
}
#endif
#if defined(MP_TILES)
__attribute__((constructor)) static void permit_tiles() { ask_for_tiles(); }  // of programs that load this library by themselves
template <class T> constexpr bool tiled() { return __is_same(T, bf16); }
#else
template <class T> constexpr bool tiled() { return false; }
#endif
// Up to MOST_ROWS rows by a panel, whatever type; `ahead` and `span` as in tile_by_part. sums [rows, PANEL].
template <class T> constexpr int MOST_ROWS = tiled<T>() ? 32 : (int)TILE_ROWS;
template <class T, int MOST>
static void rows_by_panel(int rows, const Read<T>* x, int64_t stride, const char* weight, int64_t K, const char* ahead, int64_t span, float* sums) {
#if defined(MP_TILES)
    if constexpr (tiled<T>()) {
        TilesInUse tiles_in_use;
        by_tiles({(const char*)x, 2 * stride, weight, 4 * PANEL, sums, 4 * PANEL, false, ahead, span * TILE_DEEP / K}, rows, K);
    } else
#endif
    tile_by_part<T, MOST>(rows, x, stride, (const T*)weight, K, ahead, span, false, sums);
}
template <class T> void one_panel(const Panels& p, const Read<T>* x, int64_t panel, const Result& r) {
    const char* weight = p.weight + panel * p.bytes();
    float sums[PANEL] __attribute__((aligned(64)));
    rows_by_panel<T, 1>(1, x, 0, weight, p.inputs, weight + ahead_of<T>(1), p.bytes(), sums);
    finish<T>(p, panel, 0, 1, sums, r);
}
template void one_panel<float>(const Panels&, const Read<float>*, int64_t, const Result&);
template void one_panel<bf16>(const Panels&, const Read<bf16>*, int64_t, const Result&);
template void one_panel<f16>(const Panels&, const Read<f16>*, int64_t, const Result&);

template <class T> void add_low_rank(const LowRankRows& a, int64_t panel, int64_t row, int rows, float* sums) {
    float more[MOST_ROWS<T> * PANEL] __attribute__((aligned(64)));
    for (int first = 0, last; first < rows; first = last) {
        const Panels* up = a.ups[row + first];
        for (last = first + 1; last < rows && last - first < MOST_ROWS<T> && a.ups[row + last] == up;) last++;
        if (!up) continue;
        const char* weight = up->weight + panel * up->bytes();
        const Read<T>* x = (const Read<T>*)a.x + (row + first) * a.stride;
        rows_by_panel<T, TILE_ROWS>(last - first, x, a.stride, weight, up->inputs, weight, 0, more);
        for (int i = 0; i < (last - first) * PANEL; i++) sums[first * PANEL + i] += more[i];
    }
}
template void add_low_rank<float>(const LowRankRows&, int64_t, int64_t, int, float*);
template void add_low_rank<bf16>(const LowRankRows&, int64_t, int64_t, int, float*);
template void add_low_rank<f16>(const LowRankRows&, int64_t, int64_t, int, float*);

// Rows as equal tiles, of which a block has some, one after the other.
struct Tiles {
    int64_t rows, count, blocks;
    int64_t row(int64_t tile) const { return rows * tile / count; }          // the first one
    int64_t tile(int64_t block) const { return count * block / blocks; }
    int64_t block_row(int64_t block) const { return row(tile(block)); }
};
// A block of rows by a panel; x is its first row.
template <class T, class X>
static void block_by_panel(const Panels& p, const X* x, int64_t stride, const Tiles& t, int64_t block, int64_t panel, const Result& r) {
    int64_t K = p.inputs, first = t.tile(block), tiles = t.tile(block + 1) - first, row = t.row(first);
    int64_t input_bytes = PANEL * sizeof(T), most = tiles > 1 ? TILE_ROWS : t.row(first + 1) - row;
    bool again = tiles > 1 || most * VECTORS > TILE_ROWS * MANY;
    // In parts only where a tile has several walks: with wider vectors that has not been measured.
    bool parts = again && MANY < VECTORS;
    int64_t part = parts ? (tiles > 1 ? 32 << 10 : 8 << 10) / input_bytes : K;
    float sums[(MANY < VECTORS ? (int)BLOCK_TILES : 1) * TILE_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t k = 0; k < K; k += part) {
        int64_t n = K - k < part ? K - k : part, bytes = n * input_bytes;
        const char* weight = p.weight + panel * p.bytes() + k * input_bytes;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t at = t.row(first + tile);
            int count = (int)(t.row(first + tile + 1) - at);
            const char* ahead = weight + (again ? bytes + bytes * tile / tiles : ahead_of<T>(count));
            float* its = sums + (parts ? at - row : 0) * PANEL;
            tile_by_part<T, TILE_ROWS>(count, x + (at - row) * stride + k, stride, (const T*)weight, n, ahead, bytes / tiles, k > 0, its);
            if (k + n == K) finish<T>(p, panel, at, count, its, r);
        }
    }
}

// Rows [begin, end) as the sums read them: as they are, or widened into `room`. Null: no memory.
template <class X, class T>
static const X* readable(const T* x, int64_t& stride, int64_t begin, int64_t end, int64_t K, Memory& room, int threads) {
    x += begin * stride;
    if constexpr (__is_same(X, T)) {
        return x;
    } else {
        int64_t from_stride = stride;
        stride = (K + W - 1) / W * W + W;
        float* to = (float*)room.get(sizeof(float) * (end - begin) * stride);
        if (to) split(end - begin, worth((end - begin) * K, threads), [&](int64_t row, int64_t last) {
            for (; row < last; row++) {
                int64_t k = 0;
                for (; k + W <= K; k += W) store(to + row * stride + k, widen(x + row * from_stride + k));
                for (; k < K; k++) to[row * stride + k] = wide(x[row * from_stride + k]);
            }
        });
        return to;
    }
}

// The panels of a result from `begin` on by all rows.
template <class T>
static int walked_product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int64_t begin, int64_t panels, int threads) {
    static thread_local Memory room;
    int64_t K = p.inputs;
    // Rows go in blocks where there are many, or few panels for the threads; of widened ones a few blocks at a time.
    int64_t size = W <= 8 || widened<T>() ? BLOCK_TILES * TILE_ROWS : BLOCK_BYTES / (K * (int64_t)sizeof(T)) + 1;
    Tiles t{rows, (rows + TILE_ROWS - 1) / TILE_ROWS, (rows + size - 1) / size};
    int64_t shared = threads > 1 ? 4 * threads / panels : 0;
    if (t.blocks < shared) t.blocks = shared < t.count ? shared : t.count;
    int64_t together = !widened<T>() ? t.blocks : shared > 1 ? shared : 1;
    int64_t most = panels * PANEL * K / 32768 + 1;
    if (most < threads) threads = (int)most;
#if defined(MP_BF16) && !defined(MP_TILES)
    if constexpr (paired<T>()) if (streams > 1 && rows <= BESIDE_ROWS) {
        parallel_runs(panels, 2, threads, [&](int64_t task, int64_t count) {
            int64_t panel = begin + task;
            if (count == 1) return block_by_panel<T>(p, x, stride, t, 0, panel, r);
            float sums[2 * BESIDE_ROWS * PANEL] __attribute__((aligned(64)));
            rows_beside<BESIDE_ROWS>((int)rows, x, stride, p.weight + panel * p.bytes(), p.bytes(), K, sums);
            for (int s = 0; s < 2; s++) finish<T>(p, panel + s, 0, (int)rows, sums + s * rows * PANEL, r);
        });
        return 0;
    }
#endif
    for (int64_t block = 0; block < t.blocks; block += together) {
        int64_t last = block + together < t.blocks ? block + together : t.blocks, first_row = t.block_row(block), s = stride;
        const Read<T>* from = readable<Read<T>>(x, s, first_row, t.block_row(last), K, room, threads);
        if (!from) return 1;
        parallel_runs((last - block) * panels, rows == 1 && !paired<T>() ? streams : 1, threads, [&](int64_t task, int64_t count) {
            int64_t panel = begin + task % panels, its = block + task / panels;
            if constexpr (STREAMS > 1 && !paired<T>()) if (rows == 1 && streams > 1) return row_by_panels<T, STREAMS>(p, from, panel, count, r);
            block_by_panel<T>(p, from + (t.block_row(its) - first_row) * s, s, t, its, panel, r);
        });
    }
    return 0;
}
#if defined(MP_TILES)
// The same through tiles.
static int tiled_product(const Panels& p, const bf16* x, int64_t stride, int64_t rows, const Result& r, int64_t begin, int64_t panels, int threads) {
    int64_t K = p.inputs, most = panels * PANEL * K / 32768 + 1;
    if (most < threads) threads = (int)most;
    if (rows <= 16) {  // memory is what such products wait for
        constexpr int AHEAD = STREAM_AHEAD<2>;
        parallel_runs(panels, 2, threads, [&](int64_t task, int64_t count) {
            float sums[2 * 16 * PANEL] __attribute__((aligned(64)));
            int64_t panel = begin + task;
            const char* weight = p.weight + panel * p.bytes();
            TilesInUse tiles_in_use;
            if (count == 2 && K % TILE_DEEP == 0) two_panels_by_tiles((const char*)x, 2 * stride, (int)rows, weight, p.bytes(), K, AHEAD, sums);
            else for (int64_t s = 0; s < count; s++, weight += p.bytes())
                by_tiles({(const char*)x, 2 * stride, weight, 4 * PANEL, sums + s * 16 * PANEL, 4 * PANEL, false, weight + AHEAD, 2 * PANEL * TILE_DEEP}, (int)rows, K);
            for (int64_t s = 0; s < count; s++) finish<bf16>(p, panel + s, 0, (int)rows, sums + s * 16 * PANEL, r);
        });
        return 0;
    }
    // Blocks of whole tiles; of few panels every thread has a block of its own.
    int64_t size = tiled_block_rows(K), blocks = (rows + size - 1) / size, tiles = (rows + TILE_HIGH - 1) / TILE_HIGH;
    int64_t shared = threads > 1 ? 4 * threads / panels : 0;
    if (blocks < shared) blocks = shared < tiles ? shared : tiles;
    parallel_runs(blocks * panels, 1, threads, [&](int64_t task, int64_t) {
        int64_t panel = begin + task % panels, block = task / panels;
        int64_t first = tiles * block / blocks * TILE_HIGH, last = tiles * (block + 1) / blocks * TILE_HIGH;
        if (last > rows) last = rows;
        float sums[TILE_HIGH * PANEL] __attribute__((aligned(64)));
        const char* weight = p.weight + panel * p.bytes();
        int64_t pace = last - first > TILE_HIGH ? 0 : 2 * PANEL * TILE_DEEP;  // else the panel stays in a cache
        TilesInUse tiles_in_use;
        for (int64_t row = first; row < last; row += TILE_HIGH) {
            int count = last - row < TILE_HIGH ? (int)(last - row) : (int)TILE_HIGH;
            by_tiles({(const char*)(x + row * stride), 2 * stride, weight, 4 * PANEL, sums, 4 * PANEL, false, weight + ahead_of<bf16>(count), pace}, count, K);
            finish<bf16>(p, panel, row, count, sums, r);
        }
    });
    return 0;
}
#endif

template <class T>
int product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    if (p.bits) return packed_product<T>(p, x, stride, rows, r, threads);
    int64_t width = p.width(), begin = r.first / width, panels = (r.last + width - 1) / width - begin;
    if (!rows || panels <= 0) return 0;
#if defined(MP_TILES)
    if constexpr (tiled<T>()) return tiled_product(p, x, stride, rows, r, begin, panels, threads); else
#endif
    return walked_product<T>(p, x, stride, rows, r, begin, panels, threads);
}
template int product<float>(const Panels&, const float*, int64_t, int64_t, const Result&, int);
template int product<bf16>(const Panels&, const bf16*, int64_t, int64_t, const Result&, int);
template int product<f16>(const Panels&, const f16*, int64_t, int64_t, const Result&, int);

// All columns, in several regions where the matrix is large (a head's takes milliseconds): cores that come free are used.
template <class T>
static int whole_product(const Panels& p, const T* x, int64_t stride, int64_t rows, char* out, int end, int threads) {
    int64_t columns = p.columns(), part = (PART_BYTES / p.bytes() + 1) * p.width();
    int64_t size = end == WIDE ? sizeof(float) : sizeof(T);
    if (p.gated) part = columns;  // no head is, and ends of gated ones know no first column
    for (int64_t first = 0; first < columns; first += part) {
        Result r{out + first * size, columns, end, first, first + part < columns ? first + part : columns};
        if (int code = product<T>(p, x, stride, rows, r, threads)) return code;
    }
    return 0;
}
// `end`: see End.
extern "C" int mp_product(const Panels* p, const void* x, int64_t stride, int64_t rows, void* out, int end, int threads) {
#define CALL(T) whole_product<T>(*p, (const T*)x, stride, rows, (char*)out, end, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
