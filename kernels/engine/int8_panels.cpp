// Finds the highest logit of a row by a head in bytes, half or a quarter of what the head itself has.
//
// A logit is a product of two vectors, w x. Bytes stand for w' = w - e, and the row in fixed point for x' = x - d, so by
// Cauchy and Schwarz |w x - w' x'| <= |e| |x| + |w'| |d|, which is known for each output before. Whoever may reach the
// highest logit that is certain is computed as always, with all others of its panel: the result is exact.
#include "int8_panels.h"

#include <math.h>

#if defined(MP_AVX512) || defined(MP_AVX2)
enum { FEW = 8 };  // one panel in so many may be computed; with more, all are

static int64_t pairs_of(const Panels& p) { return (p.inputs + 1) / 2; }
static int64_t panel_bytes(const Panels& p) { return pairs_of(p) * 2 * PANEL; }

// ---- making it ----
static const double LONGEST = 1e18;  // of an output; nothing that is worked out of it and of a row is infinite
template <class T> static bool make_int8(const Panels& p, const Int8Panels& s, int threads) {
    std::atomic<bool> finite{true};
    const float rounding = 4 * (p.inputs + 16) * 0x1p-24f, up = 1 + rounding;  // of sums, and of lengths
    parallel(p.count(), threads, [&](int64_t panel) {
        const T* weight = (const T*)(p.weight + panel * p.bytes());
        int8_t* to = s.weight + panel * panel_bytes(p);
        memset(to, 0, panel_bytes(p));
        for (int lane = 0; lane < PANEL; lane++) {
            float most = 0;
            double squares = 0, errors = 0;  // of the smallest numbers, too
            for (int64_t k = 0; k < p.inputs; k++) {
                float w = fabsf(wide(weight[place<T>(k, lane)]));
                if (!(w < LONGEST)) finite = false;
                most = fmaxf(most, w);
            }
            float unit = most > 1e-30f ? most / 127 : 0, times = most > 1e-30f ? 127 / most : 0;
            for (int64_t k = 0; k < p.inputs; k++) {
                float w = wide(weight[place<T>(k, lane)]), q = rintf(w * times);
                to[(k / 2 * PANEL + lane) * 2 + k % 2] = (int8_t)q;
                double told = (double)q * unit;
                squares += told * told, errors += (w - told) * (w - told);
            }
            float length = (float)sqrt(squares) * up, error = (float)sqrt(errors) * up;
            int64_t at = panel * PANEL + lane;
            if (!(length + error < LONGEST)) finite = false;
            s.unit[at] = unit, s.length[at] = length, s.off[at] = error + rounding * (length + error);
        }
    });
    return finite;
}

// ---- looking at it ----
INLINE vi two_inputs(const int8_t* p) {  // W outputs' two weights each, as halves of integers
#if defined(MP_AVX512)
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#else
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#endif
}
INLINE vi products(vi a, vi b) {  // of both halves, added up
#if defined(MP_AVX512)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
// Sums of M rows by S panels side by side, to out[s][i][PANEL].
template <int M, int S>
static __attribute__((noinline)) void sums_of(const int16_t* x, int64_t stride, const int8_t* panel, int64_t pairs, int32_t* out) {
    vi acc[S][M][VECTORS] = {};
    for (int64_t q = 0; q < pairs; q++, panel += 2 * PANEL) {
        vi row[M];
        for (int i = 0; i < M; i++) {
            int32_t two;
            memcpy(&two, x + i * stride + 2 * q, 4);
            row[i] = two - (vi){};
        }
        for (int s = 0; s < S; s++) {
            const int8_t* from = panel + s * pairs * 2 * PANEL;
            __builtin_prefetch(from + STREAM_AHEAD<S>, 0, 3);
            for (int v = 0; v < VECTORS; v++) {
                vi weight = two_inputs(from + 2 * v * W);
                for (int i = 0; i < M; i++) acc[s][i][v] += products(weight, row[i]);
            }
        }
    }
    for (int s = 0; s < S; s++) for (int i = 0; i < M; i++) for (int v = 0; v < VECTORS; v++)
        memcpy(out + ((s * M + i) * VECTORS + v) * W, &acc[s][i][v], sizeof(vi));
}
// One row: what it is looked at by.
struct Look {
    float unit, length, lost;  // what 1 of its fixed point stands for; lengths of the row, and of what fixed point lost
    float *tops, *sures;       // of each panel: the highest that a logit may be, and that one is for certain
    void panel(const Panels& p, const Int8Panels& s, int64_t panel, const int32_t* sums) const {
        vf top = splat(-__builtin_inff()), sure = top;
        for (int v = 0; v < VECTORS; v++) {
            int64_t at = panel * PANEL + v * W, left = p.outputs - at;
            if (left <= 0) break;
            vf value = __builtin_convertvector(load_as<vi>(sums + v * W), vf) * (load(s.unit + at) * unit);
            vf off = load(s.off + at) * length + load(s.length + at) * lost;
            vi there = first_lanes(left < W ? (int)left : W);
            top = vmax(there ? value + off : top, top), sure = vmax(there ? value - off : sure, sure);
        }
        tops[panel] = max_of(top), sures[panel] = max_of(sure);
    }
};
template <int M, int S>
static void look(const Panels& p, const Int8Panels& s, const int16_t* x, int64_t stride, const Look* looks, int64_t panel) {
    int32_t sums[S * M * PANEL] __attribute__((aligned(64)));
    sums_of<M, S>(x, stride, s.weight + panel * panel_bytes(p), pairs_of(p), sums);
    for (int at = 0; at < S; at++) for (int i = 0; i < M; i++) looks[i].panel(p, s, panel + at, sums + (at * M + i) * PANEL);
}
static void look_at_all(const Panels& p, const Int8Panels& s, const int16_t* x, int64_t stride, int rows, const Look* looks, int threads) {
    parallel_runs(p.count(), rows == 1 ? streams : 1, threads, [&](int64_t panel, int64_t count) {
        if (rows == 3) look<3, 1>(p, s, x, stride, looks, panel);
        else if (rows == 2) look<2, 1>(p, s, x, stride, looks, panel);
        else if (count == STREAMS) look<1, STREAMS>(p, s, x, stride, looks, panel);
        else for (int64_t i = 0; i < count; i++) look<1, 1>(p, s, x, stride, looks, panel + i);
    });
}
// A row in fixed point, without its last input's partner where it has none.
static void put_row(const float* x, int64_t K, int64_t padded, int16_t* to, Look* look) {
    float most = 0;
    double squares = 0, lost = 0;
    for (int64_t k = 0; k < K; k++) most = fmaxf(most, fabsf(x[k])), squares += (double)x[k] * x[k];
    int64_t largest = INT32_MAX / (127 * padded);  // so that sums fit
    float times = most > 1e-30f ? (float)(largest < 32767 ? largest : 32767) / most : 0;
    look->unit = times > 0 ? 1 / times : 0;
    for (int64_t k = 0; k < padded; k++) {
        float q = k < K ? truncf(x[k] * times) : 0;
        to[k] = (int16_t)q;
        if (k < K) lost += ((double)x[k] - (double)q * look->unit) * ((double)x[k] - (double)q * look->unit);
    }
    look->length = (float)sqrt(squares) * (1 + 0x1p-20f), look->lost = (float)sqrt(lost) * (1 + 0x1p-20f);
}
// Logits are rounded to T: those this much below another, of its size, may become equal to it, and near nothing so much.
template <class T> constexpr float EQUAL = __is_same(T, bf16) ? 0x1p-7f : __is_same(T, f16) ? 0x1p-10f : 0;
template <class T> constexpr float NOTHING = __is_same(T, f16) ? 0x1p-23f : 1e-30f;

template <class T> static int highest(const Panels& p, const Int8Panels& s, const T* x, int rows, int32_t* tokens, int threads) {
    static thread_local Memory memory;
    int64_t K = p.inputs, padded = 2 * pairs_of(p), panels = p.count();
    struct Exact { int64_t row, panel; float best; int32_t token; };
    size_t bytes = rows * (K * sizeof(float) + 2 * panels * sizeof(float) + padded * sizeof(int16_t)) + 64 + rows * panels * sizeof(Exact);
    Exact* exact = (Exact*)memory.get(bytes);
    if (!exact) return -1;
    float* floats = (float*)(exact + rows * panels);
    float* ends = floats + rows * K;
    int16_t* fixed = (int16_t*)(ends + 2 * rows * panels);
    Look looks[INT8_ROWS];
    for (int r = 0; r < rows; r++) {
        for (int64_t k = 0; k < K; k++) floats[r * K + k] = wide(x[r * K + k]);
        put_row(floats + r * K, K, padded, fixed + r * padded, looks + r);
        looks[r].tops = ends + 2 * r * panels, looks[r].sures = looks[r].tops + panels;
    }
    look_at_all(p, s, fixed, padded, rows, looks, threads);
    int64_t count = 0;
    for (int r = 0; r < rows; r++) {
        float sure = -INFINITY, top = 0;
        for (int64_t i = 0; i < panels; i++) sure = fmaxf(sure, looks[r].sures[i]), top = fmaxf(top, fabsf(looks[r].tops[i]));
        if (!(top < 1e30f) || !(sure > -1e30f) || !(looks[r].length < 1e15f)) return 1;  // or not a number
        float from = sure - fabsf(sure) * EQUAL<T> - NOTHING<T>;
        int64_t before = count;
        for (int64_t i = 0; i < panels; i++)
            if (looks[r].tops[i] >= from) exact[count++] = {r, i, -INFINITY, 0};
        if ((count - before) * FEW > panels + FEW) return 1;
    }
    parallel(count, threads, [&](int64_t i) {
        Exact& e = exact[i];
        int64_t first = e.panel * PANEL, last = first + PANEL < p.outputs ? first + PANEL : p.outputs;
        float logits[PANEL];
        const void* row = __is_same(Read<T>, T) ? (const void*)(x + e.row * K) : floats + e.row * K;
        one_panel<T>(p, (const Read<T>*)row, e.panel, Result{logits, PANEL, WIDE, first, last});
        for (int64_t at = first; at < last; at++)
            if (!(logits[at - first] <= e.best)) e.best = logits[at - first], e.token = (int32_t)at;
    });
    float best[INT8_ROWS] = {-INFINITY, -INFINITY, -INFINITY};
    int32_t found[INT8_ROWS] = {};
    for (int64_t i = 0; i < count; i++)
        if (!(exact[i].best <= best[exact[i].row])) best[exact[i].row] = exact[i].best, found[exact[i].row] = exact[i].token;
    for (int r = 0; r < rows; r++) if (!isfinite(best[r])) return 1;
    memcpy(tokens, found, rows * sizeof(int32_t));
    return 0;
}
#endif

extern "C" int64_t mp_int8_panels_bytes(const Panels* p) {  // 0: there is none of such a matrix, or on such a machine
#if defined(MP_AVX512) || defined(MP_AVX2)
    return p->bits || p->gated || p->bias || p->inputs > 1 << 16 ? 0 : p->count() * panel_bytes(*p);
#else
    return 0;
#endif
}
// Into s's memory. Returns 1 where a weight is not finite.
extern "C" int mp_int8_panels(const Panels* p, const Int8Panels* s, int threads) {
#if defined(MP_AVX512) || defined(MP_AVX2)
#define CALL(T) !make_int8<T>(*p, *s, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
#else
    return 1;
#endif
}
extern "C" int mp_highest(const Panels* p, const Int8Panels* s, const void* x, int64_t rows, int32_t* tokens, int threads) {
#if defined(MP_AVX512) || defined(MP_AVX2)
#define CALL(T) highest<T>(*p, *s, (const T*)x, (int)rows, tokens, threads)
    FOR_TYPE(p->type, CALL)
#undef CALL
#else
    return 1;
#endif
}
