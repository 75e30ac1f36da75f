// Arranging a matrix in panels, getting rows of it back, and its product.
#include "panels.h"

#if defined(MP_AVX512)
enum { TILE_ROWS = 14, MANY = VECTORS };  // 28 sums, 2 vectors of weights, 1 or 2 for the row's numbers
#elif defined(MP_AVX2)
enum { TILE_ROWS = 6, MANY = 2 };
#else
enum { TILE_ROWS = 6, MANY = VECTORS / 2 };
#endif
// Whether few rows are fetched just ahead, into the first cache, or further into the second: as was faster (docs/kernels.md).
template <class T> constexpr bool NEAR_BY = W == 8 && __is_same(T, bf16);
template <class T> constexpr int64_t AHEAD = NEAR_BY<T> ? 1536 : 12 << 10;  // bytes
static const int64_t BLOCK_BYTES = 6 << 20;  // of rows that go through all panels together
static const int64_t PART_BYTES = 16 << 20;  // of a matrix that is worked on without looking for cores

// Whether elements of this type lie in pairs of inputs.
template <class T> constexpr bool paired() {
#if defined(MP_BF16)
    return __is_same(T, bf16);
#else
    return false;
#endif
}
// Where a panel has the weight of input k for one lane.
template <class T> INLINE int64_t place(int64_t k, int lane) {
    return paired<T>() ? (k / 2 * PANEL + lane) * 2 + k % 2 : k * PANEL + lane;
}

// ---- sums of M rows by NV vectors of a panel, from vector `from` on ----
// `ahead`: what is fetched meanwhile, `pace` bytes with each step.
template <class T, int M, int NV>
static __attribute__((noinline)) void sums_of(const float* x, int64_t stride, const T* panel, int from, int64_t K,
                                              const char* ahead, int64_t pace, float* out) {
    vf acc[M][NV] = {};
    panel += from * W;
    for (int64_t k = 0; k < K; k++, panel += PANEL, ahead += pace) {
        __builtin_prefetch(ahead, 0, NEAR_BY<T> ? 3 : 2);
        if (sizeof(T) == 4) __builtin_prefetch(ahead + 64, 0, 2);
        vf weight[NV];
        for (int j = 0; j < NV; j++) weight[j] = widen(panel + j * W);
        for (int i = 0; i < M; i++) {
            vf left = splat(x[i * stride + k]);
            for (int j = 0; j < NV; j++) acc[i][j] += left * weight[j];
        }
    }
    for (int i = 0; i < M; i++) for (int j = 0; j < NV; j++) store(out + i * PANEL + (from + j) * W, acc[i][j]);
}
#if defined(MP_BF16)
template <class T, int M, int NV>
static __attribute__((noinline)) void sums_of(const bf16* x, int64_t stride, const T* panel, int, int64_t K,
                                              const char* ahead, int64_t pace, float* out) {
    vf acc[M][NV] = {};
    for (int64_t k = 0; k < K; k += 2, panel += 2 * PANEL, ahead += pace) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + 64, 0, 2);
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
#endif
// M rows by a whole panel; `pace`: for all steps of the panel, in bytes.
template <class T, int M, class X>
INLINE void rows_by_panel(const X* x, int64_t stride, const T* panel, int64_t K, const char* ahead, int64_t span, float* out) {
    constexpr int NV = M * VECTORS <= (W == 8 ? 12 : 28) ? (int)VECTORS : (int)MANY;
    int64_t pace = span / (sizeof(X) == 2 ? K / 2 : K);
    for (int from = 0; from < VECTORS; from += NV)
        sums_of<T, M, NV>(x, stride, panel, from, K, ahead, pace, out);
}
template <class T, int M, class X>
INLINE void some_by_panel(int rows, const X* x, int64_t stride, const T* panel, int64_t K, const char* ahead, int64_t span, float* out) {
    if constexpr (M > 1) if (rows < M) return some_by_panel<T, M - 1>(rows, x, stride, panel, K, ahead, span, out);
    rows_by_panel<T, M>(x, stride, panel, K, ahead, span, out);
}

// What the sums read rows as: bf16 where they lie in pairs, else float.
template <class T, bool PAIRS> struct Reads { typedef float type; };
template <class T> struct Reads<T, true> { typedef T type; };

// Rows as the sums read them: as they are, or widened into `room` (null: no memory).
template <class X, class T> INLINE const X* readable(const T* x, int64_t& stride, int rows, int64_t K, Memory& room) {
    if constexpr (__is_same(X, T)) {
        return x;
    } else {
        int64_t wide_stride = (K + W - 1) / W * W + W;
        float* to = (float*)room.get(sizeof(float) * rows * wide_stride);
        for (int i = 0; to && i < rows; i++) {
            int64_t k = 0;
            for (; k + W <= K; k += W) store(to + i * wide_stride + k, widen(x + i * stride + k));
            for (; k < K; k++) to[i * wide_stride + k] = wide(x[i * stride + k]);
        }
        stride = wide_stride;
        return to;
    }
}

template <class T> INLINE void put_one(const Result& r, int64_t row, int64_t column, float value) {
    int64_t at = row * r.stride + column - r.first;
    T t;
    thin(&t, value);
    if (r.end == WIDE) ((float*)r.out)[at] = wide(t);
    else if (r.end == ADD) thin((T*)r.out + at, wide(((T*)r.out)[at]) + wide(t));
    else ((T*)r.out)[at] = t;
}
template <class T> INLINE void put_vector(const Result& r, int64_t row, int64_t column, vf value) {
    int64_t at = row * r.stride + column - r.first;
    value = rounded<T>(value);
    if (r.end == WIDE) store((float*)r.out + at, value);
    else if (r.end == ADD) narrow((T*)r.out + at, widen((T*)r.out + at) + value);
    else narrow((T*)r.out + at, value);
}
template <class T>
static void finish_plain(const Panels& p, int64_t panel, int64_t row, int rows, const float* sums, const Result& r) {
    const T* bias = (const T*)p.bias;
    for (int v = 0; v < VECTORS; v++) {
        int64_t column = panel * PANEL + v * W;
        bool whole = column >= r.first && column + W <= r.last;
        for (int i = 0; i < rows; i++) {
            const float* sum_ = sums + i * PANEL + v * W;
            if (whole) {
                vf value = load(sum_);
                put_vector<T>(r, row + i, column, bias ? value + widen(bias + column) : value);
            } else {
                for (int64_t c = column < r.first ? r.first : column; c < column + W && c < r.last; c++)
                    put_one<T>(r, row + i, c, bias ? sum_[c - column] + wide(bias[c]) : sum_[c - column]);
            }
        }
    }
}
// Gates and ups: activated and multiplied.
template <class T>
static void finish_gated(const Panels& p, int64_t panel, int64_t row, int rows, const float* sums, const Result& r) {
    int64_t half = p.outputs / 2;
    const T* bias = (const T*)p.bias;
    for (int v = 0; v < VECTORS; v += 2) {
        int64_t column = panel * (PANEL / 2) + v / 2 * W;
        int count = half - column < W ? (int)(half - column) : W;
        if (count <= 0) break;
        float gates[W] = {}, ups[W] = {};
        for (int c = 0; bias && c < count; c++) gates[c] = wide(bias[column + c]), ups[c] = wide(bias[half + column + c]);
        for (int i = 0; i < rows; i++) {
            vf gate = load(sums + i * PANEL + v * W), up = load(sums + i * PANEL + (v + 1) * W);
            if (bias) gate += load(gates), up += load(ups);
            vf value = rounded<T>(silu(rounded<T>(gate))) * rounded<T>(up);
            if (count == W) {
                narrow((T*)r.out + (row + i) * r.stride + column, value);
            } else {
                T some[W];
                narrow(some, value);
                memcpy((T*)r.out + (row + i) * r.stride + column, some, count * sizeof(T));
            }
        }
    }
}

template <class T>
int product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    typedef typename Reads<T, paired<T>()>::type X;
    int64_t K = p.inputs, width = p.width(), begin = r.first / width, panels = (r.last + width - 1) / width - begin;
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    if (!tiles || panels <= 0) return 0;
    // Rows go in blocks where there are many, or few panels for the threads.
    int64_t blocks = (rows * K * (int64_t)sizeof(T) + BLOCK_BYTES - 1) / BLOCK_BYTES, shared = 4 * threads / panels;
    if (threads > 1 && blocks < shared) blocks = shared;
    if (blocks > tiles) blocks = tiles;
    int64_t most = panels * PANEL * K / 32768 + 1;
    std::atomic<int> failed{0};
    parallel_runs(blocks * panels, most < threads ? (int)most : threads, [&](int64_t task) {
        static thread_local Memory room;
        int64_t panel = begin + task % panels, block = task / panels;
        int64_t tile = tiles * block / blocks, end = tiles * (block + 1) / blocks, passes = end - tile;
        const char* weight = p.weight + panel * p.bytes();
        float sums[TILE_ROWS * PANEL] __attribute__((aligned(64)));
        for (int64_t pass = 0; tile < end; tile++, pass++) {
            int64_t row = rows * tile / tiles, s = stride;
            int count = (int)(rows * (tile + 1) / tiles - row);
            const X* from = readable<X>(x + row * stride, s, count, K, room);
            if (!from) { failed = 1; return; }
            // One pass reads this panel from memory, some way ahead; of several each fetches its part of the next.
            const char* ahead = passes == 1 ? weight + AHEAD<T> : weight + p.bytes() + p.bytes() * pass / passes;
            some_by_panel<T, TILE_ROWS>(count, from, s, (const T*)weight, K, ahead, p.bytes() / passes, sums);
            if (p.gated) finish_gated<T>(p, panel, row, count, sums, r);
            else finish_plain<T>(p, panel, row, count, sums, r);
        }
    });
    return failed;
}
template int product<float>(const Panels&, const float*, int64_t, int64_t, const Result&, int);
template int product<bf16>(const Panels&, const bf16*, int64_t, int64_t, const Result&, int);
template int product<f16>(const Panels&, const f16*, int64_t, int64_t, const Result&, int);

// Reads all outputs of a panel side by side, and writes it from the first byte to the last.
template <class T> static int arrange(const Panels& p, const T* weight, int threads) {
    int64_t K = p.inputs;
    std::atomic<int> failed{0};
    parallel(p.count(), threads, [&](int64_t panel) {
        static thread_local Memory room;
        T* none = (T*)room.get(K * sizeof(T));  // of lanes that stand for no output
        if (!none) { failed = 1; return; }
        memset((void*)none, 0, K * sizeof(T));
        const T* from[PANEL];
        for (int lane = 0; lane < PANEL; lane++) {
            int64_t output = p.output(panel, lane);
            from[lane] = output < p.outputs ? weight + output * K : none;
        }
        T* to = (T*)(p.weight + panel * p.bytes());
        constexpr int step = paired<T>() ? 2 : 1;
        for (int64_t k = 0; k < K; k += step)
            for (int lane = 0; lane < PANEL; lane++, to += step) memcpy((void*)to, from[lane] + k, step * sizeof(T));
    });
    return failed;
}
template <class T> static int rows_back(const Panels& p, const int64_t* outputs, int64_t n, T* to, int threads) {
    split(n, worth(n * p.inputs, threads), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            Seat s = seat(p, outputs[i]);
            const T* from = (const T*)(p.weight + s.panel * p.bytes());
            for (int64_t k = 0; k < p.inputs; k++) to[i * p.inputs + k] = from[place<T>(k, s.lane)];
        }
    });
    return 0;
}

extern "C" int64_t mp_panels_bytes(const Panels* p) {  // 0: such a matrix cannot be arranged
#if defined(MP_BF16)
    if (p->type == BF16 && p->inputs % 2) return 0;
#endif
    return p->count() * p->bytes();
}
// The weight [outputs, inputs] into p's memory.
extern "C" int mp_arrange(const Panels* p, const void* weight, int threads) {
#define CALL(T) arrange<T>(*p, (const T*)weight, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
// Rows of the weight as they were; indices have been checked.
extern "C" int mp_rows(const Panels* p, const int64_t* outputs, int64_t n, void* to, int threads) {
#define CALL(T) rows_back<T>(*p, outputs, n, (T*)to, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
}
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
