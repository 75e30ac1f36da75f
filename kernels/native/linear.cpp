// x @ weight.T for few rows: the weight is read once, straight as it lies, and that is what it takes.
//
// Rows of x go 1 to 4 at a time over 4 rows of the weight; every output is one running sum over K in a fixed order, so
// a row's result depends neither on the other rows nor on the threads.
#include "parallel.h"
#include "pool.h"

enum { OUTPUTS = 4, PART = 64 };

// Sums over K of M rows of x by N rows of the weight.
template <int M, int N> INLINE void dots(const float* const* x, const float* const* w, int64_t K, vf (*acc)[OUTPUTS]) {
    int64_t k = 0;
    for (; k + W <= K; k += W) {
        vf right[N];
        for (int j = 0; j < N; j++) right[j] = load(w[j] + k);
        for (int i = 0; i < M; i++) {
            vf left = load(x[i] + k);
            for (int j = 0; j < N; j++) acc[i][j] += left * right[j];
        }
    }
    for (; k < K; k++)
        for (int i = 0; i < M; i++) for (int j = 0; j < N; j++) acc[i][j][0] += x[i][k] * w[j][k];
}
#if defined(MP_BF16)
template <int M, int N> INLINE void dots(const bf16* const* x, const bf16* const* w, int64_t K, vf (*acc)[OUTPUTS]) {
    for (int64_t k = 0; k < K; k += 32) {
        __mmask32 some = K - k >= 32 ? ~0u : (1u << (K - k)) - 1;
        vu right[N];
        for (int j = 0; j < N; j++) right[j] = (vu)_mm512_maskz_loadu_epi16(some, w[j] + k);
        for (int i = 0; i < M; i++) {
            vu left = (vu)_mm512_maskz_loadu_epi16(some, x[i] + k);
            for (int j = 0; j < N; j++) acc[i][j] = dot2(acc[i][j], left, right[j]);
        }
    }
}
#else
#endif
template <class T, int M, int N> INLINE void dots_wide(const T* const* x, const T* const* w, int64_t K, vf (*acc)[OUTPUTS]) {
    int64_t k = 0;
    for (; k + W <= K; k += W) {
        vf right[N];
        for (int j = 0; j < N; j++) right[j] = widen(w[j] + k);
        for (int i = 0; i < M; i++) {
            vf left = widen(x[i] + k);
            for (int j = 0; j < N; j++) acc[i][j] += left * right[j];
        }
    }
    if (k < K) {
        T rest[W];
        auto tail = [&](const T* p) {
            memset(rest, 0, sizeof rest);
            memcpy(rest, p + k, (K - k) * sizeof(T));
            return widen(rest);
        };
        for (int i = 0; i < M; i++) for (int j = 0; j < N; j++) acc[i][j] += tail(x[i]) * tail(w[j]);
    }
}
INLINE float one(const float* p) { return *p; }
INLINE float one(const bf16* p) { return scalar(*p); }
INLINE float one(const f16* p) { f16 t[W] = {*p}; return widen(t)[0]; }
INLINE void give(float* p, float x) { *p = x; }
INLINE void give(bf16* p, float x) { *p = to_bf16(x); }
INLINE void give(f16* p, float x) { f16 t[W]; narrow(t, splat(x)); *p = t[0]; }

template <class T, int M, int N>
static __attribute__((noinline)) void tile(const T* x, int64_t stride, const T* w, const T* bias, T* out, int64_t n, int64_t K) {
    vf acc[M][OUTPUTS] = {};
    const T *xs[M], *ws[N];
    for (int i = 0; i < M; i++) xs[i] = x + i * stride;
    for (int j = 0; j < N; j++) ws[j] = w + j * K;
#if defined(MP_BF16)
    if constexpr (sizeof(T) == 2 && !__is_same(T, f16)) dots<M, N>(xs, ws, K, acc);
    else
#endif
    if constexpr (sizeof(T) == 4) dots<M, N>(xs, ws, K, acc);
    else dots_wide<T, M, N>(xs, ws, K, acc);
    for (int i = 0; i < M; i++) for (int j = 0; j < N; j++)
        give(out + i * n + j, sum(acc[i][j]) + (bias ? one(bias + j) : 0.0f));
}
template <class T, int N>
INLINE void rows_of(const T* x, int64_t stride, const T* w, const T* bias, T* out, int64_t rows, int64_t n, int64_t K) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) tile<T, 4, N>(x + i * stride, stride, w, bias, out + i * n, n, K);
    for (; i < rows; i++) tile<T, 1, N>(x + i * stride, stride, w, bias, out + i * n, n, K);
}
template <class T>
static int linear(const T* x, int64_t stride, const T* w, const T* bias, T* out, int64_t rows, int64_t n, int64_t K, int threads) {
    int64_t parts = (n + PART - 1) / PART, most = n * K / 32768 + 1;
    parallel(parts, most < threads ? (int)most : threads, [&](int64_t part) {
        int64_t j = part * PART, last = j + PART < n ? j + PART : n;
        for (; j + OUTPUTS <= last; j += OUTPUTS)
            rows_of<T, OUTPUTS>(x, stride, w + j * K, bias ? bias + j : nullptr, out + j, rows, n, K);
        for (; j < last; j++) rows_of<T, 1>(x, stride, w + j * K, bias ? bias + j : nullptr, out + j, rows, n, K);
    });
    return 0;
}
extern "C" int mp_linear(int type, const void* x, int64_t stride, const void* w, const void* bias, void* out,
                         int64_t rows, int64_t n, int64_t K, int threads) {
    switch (type) {
        case F32: return linear((const float*)x, stride, (const float*)w, (const float*)bias, (float*)out, rows, n, K, threads);
        case BF16: return linear((const bf16*)x, stride, (const bf16*)w, (const bf16*)bias, (bf16*)out, rows, n, K, threads);
        case F16: return linear((const f16*)x, stride, (const f16*)w, (const f16*)bias, (f16*)out, rows, n, K, threads);
        default: return 1;
    }
}
