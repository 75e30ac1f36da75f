// Rows by a packed matrix whose codes stand for floats: NF4 and FP4 by a table, floats of 8 bits by their digits.
//
// Rows stay as they are. A weight becomes a float as it is read; sums over a chunk of 32 inputs (16, if groups are so
// small) are added in order, each times the group's scale. Where the machine multiplies pairs of bf16, rows in bf16 do:
// floats of 8 bits fit into bf16, tables are rounded as dense weights in bf16 are.
#include "packed_walk.h"

#if defined(MP_AVX512)
enum { FLOAT_ROWS = 14, FLOAT_MANY = VECTORS };
#elif defined(MP_AVX2)
enum { FLOAT_ROWS = 6, FLOAT_MANY = 2 };
#else
enum { FLOAT_ROWS = 6, FLOAT_MANY = VECTORS / 2 };
#endif

// ---- weights of W outputs from a word of each, which has the codes of some inputs ----
template <int VALUES> constexpr int WORD = VALUES == FLOAT_TABLE ? 8 : 4;  // inputs
template <int VALUES, class C> struct Weights {  // step i of a word, an input
    typedef vf Each;
    static constexpr int STEPS = WORD<VALUES>;
#if defined(MP_AVX512)
    vf all;
    explicit Weights(const float* from) : all(load(from)) {}
    INLINE_IN vf chosen(vu code) const { return (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)all); }
#elif defined(MP_AVX2)
    vf low, high;
    explicit Weights(const float* from) : low(load(from)), high(load(from + W)) {}
    INLINE_IN vf chosen(vu code) const {
        __m256 below = _mm256_permutevar8x32_ps((__m256)low, (__m256i)code), above = _mm256_permutevar8x32_ps((__m256)high, (__m256i)code);
        return (vf)_mm256_blendv_ps(below, above, (__m256)(code << 28));
    }
#else
    const float* all;
    explicit Weights(const float* from) : all(from) {}
    INLINE_IN vf chosen(vu code) const {
        vf to;
        for (int j = 0; j < W; j++) to[j] = all[code[j] & 15];
        return to;
    }
#endif
    INLINE_IN vf at(vu word, int i) const {
        if constexpr (VALUES == FLOAT_TABLE) return chosen(word >> (i % 4 * 8 + i / 4 * 4));
        vi high = (vi)(word << (24 - 8 * i));
        return (vf)(high >> FLOAT8_RIGHT<VALUES> & FLOAT8_MASK<VALUES>) * FLOAT8_UNIT<VALUES>;
    }
};
INLINE vf left_of(const float* x) { return splat(*x); }
INLINE vf times(vf sum, vf left, vf weight) { return fused(sum, left, weight); }
INLINE void put_row(float* to, const float* x, int64_t K) { memcpy(to, x, K * sizeof(float)); }
template <class T> INLINE void put_row(float* to, const T* x, int64_t K) {
    for (int64_t k = 0; k < K; k += W) store(to + k, widen(x + k));
}
#if defined(MP_BF16)
template <class T> using Factor = Read<T>;  // what rows are multiplied as
typedef uint16_t Halves __attribute__((vector_size(64)));
// Step i is the pair of inputs that lie in a word's halves: 0 and 2, 1 and 3, then those of the other nibbles. Rows are in
// this order, too.
template <int VALUES> struct Weights<VALUES, bf16> {
    typedef vu Each;
    static constexpr int STEPS = WORD<VALUES> / 2, BITS = VALUES == FLOAT_E4M3 ? 3 : 2;  // behind a float's point
    Halves table;  // of 16 floats, or of the smallest floats of 8 bits
    explicit Weights(const float* from) {
        for (int i = 0; i < 32; i++) table[i] = to_bf16(VALUES == FLOAT_TABLE ? from[i % 16] : float8(VALUES, i)).bits;
    }
    INLINE_IN vu at(vu word, int i) const {
        Halves both = (Halves)word;
        if constexpr (VALUES == FLOAT_TABLE) return (vu)_mm512_permutexvar_epi16((__m512i)(both >> (i % 2 * 8 + i / 2 * 4)), (__m512i)table);
        Halves code = i ? both >> 8 : both, sign = (i ? both : both << 8) & 0x8000;
        code &= 127;
        Halves value = (code << (7 - BITS)) + (uint16_t)((BITS == 3 ? 120 : 112) << 7);
        __mmask32 small = _mm512_cmplt_epu16_mask((__m512i)code, _mm512_set1_epi16(1 << BITS));
        return (vu)(sign | (Halves)_mm512_mask_permutexvar_epi16((__m512i)value, small, (__m512i)code, (__m512i)table));
    }
};
INLINE vu left_of(const bf16* x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (vu)_mm512_set1_epi32(pair);
}
INLINE vf times(vf sum, vu left, vu weight) { return dot2(sum, weight, left); }
INLINE void put_row(bf16* to, const bf16* x, int64_t K) {
    for (int64_t k = 0; k < K; k += 4) to[k] = x[k], to[k + 1] = x[k + 2], to[k + 2] = x[k + 1], to[k + 3] = x[k + 3];
}
#else
template <class T> using Factor = float;
#endif

// ---- sums of M rows by NV vectors of a panel, from vector `from` on ----
template <int M, int NV, int VALUES, int PART, class C>
static __attribute__((noinline)) void float_sums(const Panels& p, const C* x, int64_t stride, const char* at, int from, Ahead ahead, float* out) {
    typedef Weights<VALUES, C> Its;
    const Its weights(p.floats);
    int lane = from * W;
    int64_t scales = PANEL * p.scale_bytes, inner = p.group / PART;
    vf total[M][NV] = {};
    for (int64_t left = p.inputs; left > 0; left -= p.group) {
        vf scale[NV];
        for (int v = 0; v < NV; v++) scale[v] = scales_at(at, p.scale_bytes, lane + v * W, (vf){});
        at += scales;
        for (int64_t i = 0; i < inner; i++) {
            vf sums[M][NV] = {};
            for (int64_t b = 0; b < ahead.pace; b += 64) __builtin_prefetch(ahead.at + b, 0, 2);
            ahead.at += ahead.pace;
            for (int k = 0; k < PART / WORD<VALUES>; k++, at += 4 * PANEL) {
                vu words[NV];
                for (int v = 0; v < NV; v++) words[v] = load_as<vu>(at + (lane + v * W) * 4);
#pragma GCC unroll 8
                for (int j = 0; j < Its::STEPS; j++, x += WORD<VALUES> / Its::STEPS) {
                    typename Its::Each weight[NV];
                    for (int v = 0; v < NV; v++) weight[v] = weights.at(words[v], j);
                    for (int m = 0; m < M; m++) {
                        auto its = left_of(x + m * stride);
                        for (int v = 0; v < NV; v++) sums[m][v] = times(sums[m][v], its, weight[v]);
                    }
                }
            }
            for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) total[m][v] = fused(total[m][v], sums[m][v], scale[v]);
        }
    }
    for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) store(out + m * PANEL + (from + v) * W, total[m][v]);
}
// Vectors of a panel that M rows take at once, as many as there are registers for their sums.
template <int M> constexpr int floats_at_once() { return M * VECTORS <= (W == 8 ? 12 : 28) ? (int)VECTORS : (int)FLOAT_MANY; }
template <int M, int VALUES, int PART, class C>
static void float_tile(const Panels& p, int rows, const C* x, int64_t stride, const char* panel, Ahead ahead, float* out) {
    if constexpr (M > 1) if (rows < M) return float_tile<M - 1, VALUES, PART>(p, rows, x, stride, panel, ahead, out);
    constexpr int NV = floats_at_once<M>();
    ahead.pace = ahead.pace * NV / VECTORS;
    for (int from = 0; from < VECTORS; from += NV, ahead.at += ahead.pace * (p.inputs / PART))
        float_sums<M, NV, VALUES, PART>(p, x, stride, panel, from, ahead, out);
}

template <class T, int VALUES, int PART>
static int product_of(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    static thread_local Memory room;
    typedef Factor<T> C;
    int64_t K = p.inputs, distance = K + 64 / sizeof(C);  // rows a power of two apart would share few sets of the cache
    C* own = (C*)room.get(rows * distance * sizeof(C));
    if (!own) return 1;
    split(rows, worth(rows * K, threads), [&](int64_t row, int64_t end) {
        for (; row < end; row++) put_row(own + row * distance, x + row * stride, K);
    });
    walk_panels<T, FLOAT_ROWS, FLOAT_ROWS>(p, rows, distance * sizeof(C), K / PART, r, threads, [&](int count, int64_t row, const char* panel, Turn, Ahead ahead, float* sums) {
        float_tile<FLOAT_ROWS, VALUES, PART>(p, count, own + row * distance, distance, panel, ahead, sums);
    });
    return 0;
}
template <class T, int PART>
static int product_by_values(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    if (p.values == FLOAT_E4M3) return product_of<T, FLOAT_E4M3, PART>(p, x, stride, rows, r, threads);
    if (p.values == FLOAT_E5M2) return product_of<T, FLOAT_E5M2, PART>(p, x, stride, rows, r, threads);
    return product_of<T, FLOAT_TABLE, PART>(p, x, stride, rows, r, threads);
}
template <class T>
int packed_float_product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    if (p.group == CHUNK / 2) return product_by_values<T, CHUNK / 2>(p, x, stride, rows, r, threads);
    return product_by_values<T, CHUNK>(p, x, stride, rows, r, threads);
}
template int packed_float_product<float>(const Panels&, const float*, int64_t, int64_t, const Result&, int);
template int packed_float_product<bf16>(const Panels&, const bf16*, int64_t, int64_t, const Result&, int);
template int packed_float_product<f16>(const Panels&, const f16*, int64_t, int64_t, const Result&, int);
