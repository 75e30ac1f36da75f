// Vectors of the machine's width, element types, and the few functions everything is made of.
// Plain GCC/clang vector extensions; intrinsics only where they have no word for it.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define MP_AVX512 1
#define W 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define MP_AVX2 1
#define W 8
#else
#define W 4  // NEON, or SSE2
#endif
#if defined(MP_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define MP_BF16 1
#endif
// Tiles: matrices of bf16 or bytes that AMX multiplies, or the model of them in tests (tiles.h).
#if (defined(MP_BF16) && defined(__AMX_BF16__) && defined(__AMX_INT8__)) || defined(MP_TILE_MODEL)
#define MP_TILES 1
#endif
// ARM's matrices of bf16 (matrices.h).
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MP_BFMMLA 1
#endif
#if defined(MP_BF16) || defined(MP_TILES) || defined(MP_BFMMLA)
#define MP_PAIRS 1  // bf16 is multiplied in pairs of inputs
#endif
#if defined(MP_AVX2)
#define NC_MAX 2  // 16 registers: 6 rows of 2 vectors of sums
#else
#define NC_MAX 4  // 32 registers: 6 rows of 4
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int8_t vb __attribute__((vector_size(W)));

enum Type { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, F8 = 4 };
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct f8 { uint8_t bits; };

#define INLINE_IN inline __attribute__((always_inline))  // in a class
#define INLINE static INLINE_IN

template <class V> INLINE V load_as(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }
INLINE vf load(const float* p) { return load_as<vf>(p); }
INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){}; }
INLINE vf vmax(vf a, vf b) {  // b where there is no order
#if defined(MP_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(MP_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// ---- conversions of one vector to and from float ----
INLINE float scalar(bf16 x) { uint32_t u = (uint32_t)x.bits << 16; float f; memcpy(&f, &u, 4); return f; }
INLINE bf16 to_bf16(float f) {  // round to nearest even; NaN stays one
    uint32_t u; memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {(uint16_t)((u >> 16) | 0x40)};
    return {(uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}

INLINE vf widen(const float* p) { return load(p); }
// Halves as wide integers, and back, by the machine's own instructions: compilers take several where they are left alone.
INLINE vu integers(const uint16_t* p) {
#if defined(MP_AVX512)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#elif defined(MP_AVX2)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    return __builtin_convertvector(load_as<vh>(p), vu);
#endif
}
INLINE void store_halves(void* p, vu x) {  // each is less than 2^16
#if defined(MP_AVX2)
    __m256i v = (__m256i)x;
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
#else
    vh h = __builtin_convertvector(x, vh);
    memcpy(p, &h, sizeof h);
#endif
}
INLINE vf widen(const bf16* p) { return (vf)(integers(&p->bits) << 16); }
INLINE vf half_bits_to_float(vu h) {  // exact for all but NaN payloads
    vu magnitude = h & 0x7fff;
    vf scaled = (vf)(magnitude << 13) * 0x1p112f;  // subnormals too
    vu inf = (vu)((vi)magnitude >= 0x7c00);
    vu bits = (inf & (0x7f800000u | (magnitude << 13))) | (~inf & (vu)scaled);
    return (vf)(bits | ((h & 0x8000) << 16));
}
INLINE vf widen(const f16* p) {
#if defined(MP_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(MP_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)  // in every such processor, whatever else of half precision it has
    return (vf)vcvt_f32_f16((float16x4_t)load_as<vh>(p));
#else
    return half_bits_to_float(__builtin_convertvector(load_as<vh>(p), vu));
#endif
}
// W bytes as wide integers, and back: compilers go byte by byte where they are left alone with it.
INLINE vi integers(const int8_t* p) {
#if defined(MP_AVX512)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(MP_AVX2)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    return __builtin_convertvector(load_as<vb>(p), vi);
#endif
}
INLINE void store_bytes(void* p, vi x) {
#if defined(MP_AVX512)
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    vb b = __builtin_convertvector(x, vb);
    memcpy(p, &b, sizeof b);
#endif
}
INLINE vf widen(const int8_t* p) { return __builtin_convertvector(integers(p), vf); }
INLINE vf widen(const f8* p) {  // e4m3fn without its NaN, which is never stored; subnormals come right by the product
    return (vf)((vu)(integers((const int8_t*)p) << 20) & 0x87f00000) * 0x1p120f;
}

INLINE vi nearest(vf x) {  // to nearest even, |x| < 2^22: the sum's last bits are the number
    return (vi)(x + 12582912.0f) - 0x4b400000;
}
INLINE void narrow(float* p, vf v) { store(p, v); }
INLINE void narrow(bf16* p, vf v) {
#if defined(MP_BF16)
    __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &h, sizeof h);
#else
    vu u = (vu)v;
    vu nan = (vu)((vi)(u & 0x7fffffffu) > 0x7f800000);
    vu r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    store_halves(p, (nan & ((u >> 16) | 0x40)) | (~nan & r));
#endif
}
INLINE void narrow(f16* p, vf v) {
#if defined(MP_AVX512)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(MP_AVX2)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#elif defined(__aarch64__)
    float16x4_t h = vcvt_f16_f32((float32x4_t)v);
    memcpy(p, &h, sizeof h);
#else
    vu u = (vu)v, sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    vf tiny = (vf)a + 0.5f;  // below 2^-14 the sum's last bits are the half's, rounded
    vu small = (vu)tiny - 0x3f000000;
    vu normal = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
    vu is_small = (vu)((vi)a < 0x38800000), is_big = (vu)((vi)a >= 0x47800000), nan = (vu)((vi)a > 0x7f800000);
    vu h = (is_small & small) | (~is_small & normal);
    h = (is_big & (0x7c00 | (nan & 0x200))) | (~is_big & h);
    vh out = __builtin_convertvector(h | sign, vh);
    memcpy(p, &out, sizeof out);
#endif
}
template <class T> INLINE vf rounded(vf v) { T t[W]; narrow(t, v); return widen(t); }
template <> inline __attribute__((always_inline)) vf rounded<float>(vf v) { return v; }

// 2^x for x <= 127; exactly 1 at 0, exactly 0 up to -126.5; NaN stays one. DEGREE 6: 1e-7 relative, 4: 3e-6.
template <int DEGREE> INLINE vf exp2v(vf x) {
    vf low = splat(-127.0f), magic = splat(12582912.0f + 127);
    x = vmax(low, x);
    vf t = x + magic;  // its low bits are round(x) + 127: the power's exponent
    vf f = x - (t - magic);
    vf y;
    if (DEGREE == 6) {
        y = splat(1.537070260e-4f);
        y = y * f + 1.339984826e-3f;
        y = y * f + 9.618373259e-3f;
        y = y * f + 5.550329035e-2f;
        y = y * f + 2.402264846e-1f;
        y = y * f + 6.931472056e-1f;
    } else {
        y = splat(9.600395517e-3f);
        y = y * f + 5.591689383e-2f;
        y = y * f + 2.402371846e-1f;
        y = y * f + 6.931219948e-1f;
    }
    y = y * f + 1.0f;
    return y * (vf)((vi)t << 23);
}
#define LOG2E 1.44269504088896341f

// ---- across lanes: v[0..W) become one vector of their W sums, or largest ones ----
#define SHUF __builtin_shufflevector
#if W == 16
#define LOW_1 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH_1 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#elif W == 8
#define LOW_1 0, 8, 1, 9, 4, 12, 5, 13
#define HIGH_1 2, 10, 3, 11, 6, 14, 7, 15
#define LOW_2 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_2 2, 3, 10, 11, 6, 7, 14, 15
#define LOW_4 0, 1, 2, 3, 8, 9, 10, 11
#define HIGH_4 4, 5, 6, 7, 12, 13, 14, 15
#else
#define LOW_1 0, 4, 1, 5
#define HIGH_1 2, 6, 3, 7
#define LOW_2 0, 1, 4, 5
#define HIGH_2 2, 3, 6, 7
#endif
struct Added { static INLINE_IN vf of(vf a, vf b) { return a + b; } };
struct Larger { static INLINE_IN vf of(vf a, vf b) { return vmax(a, b); } };
template <int STEP, class F> INLINE vf merge(vf a, vf b) {
    if constexpr (STEP == 1) return F::of(SHUF(a, b, LOW_1), SHUF(a, b, HIGH_1));
    else if constexpr (STEP == 2) return F::of(SHUF(a, b, LOW_2), SHUF(a, b, HIGH_2));
#if W >= 8
    else if constexpr (STEP == 4) return F::of(SHUF(a, b, LOW_4), SHUF(a, b, HIGH_4));
#endif
#if W >= 16
    else return F::of(SHUF(a, b, LOW_8), SHUF(a, b, HIGH_8));
#endif
}
// Lane i of the result is of v[i], for i < N; all others are of any of them.
template <class F, int N = W, int STEP = 1> INLINE vf across(vf* v) {
    if constexpr (STEP == W) {
        return v[0];
    } else {
        constexpr int LEFT = (N + 1) / 2;
        for (int i = 0; i < LEFT; i++) v[i] = merge<STEP, F>(v[2 * i], v[2 * i + 1 < N ? 2 * i + 1 : 2 * i]);
        return across<F, LEFT, 2 * STEP>(v);
    }
}
INLINE vf sums(vf* v) { return across<Added>(v); }
INLINE float sum(vf v) {
    float t[W], r = 0;
    store(t, v);
    for (int s = W / 2; s; s /= 2) for (int i = 0; i < s; i++) t[i] += t[i + s];
    r = t[0];
    return r;
}
INLINE float max_of(vf v) {
#if defined(MP_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__aarch64__)
    return vmaxvq_f32((float32x4_t)v);
#endif
    float t[W];
    store(t, v);
    for (int s = W / 2; s; s /= 2) for (int i = 0; i < s; i++) t[i] = t[i] > t[i + s] ? t[i] : t[i + s];
    return t[0];
}
INLINE vi first_lanes(int n) {  // all bits set in lanes below n
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    return lane < n;
}
INLINE vi imax(vi a, vi b) { return a > b ? a : b; }
// The largest of magnitudes that are given as their bits. As integers, NaN is above all numbers, so that it stays.
INLINE float largest(vi bits) {
#if defined(MP_AVX512)
    int32_t most = _mm512_reduce_max_epi32((__m512i)bits);
#else
    int32_t most = bits[0];
    for (int i = 1; i < W; i++) most = bits[i] > most ? bits[i] : most;
#endif
    float x;
    memcpy(&x, &most, 4);
    return x;
}

#if defined(MP_BF16)
// 16 vectors of 16 lanes, rows for columns.
INLINE void turn(vu* r) {
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32((__m512i)r[i], (__m512i)r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32((__m512i)r[i], (__m512i)r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i += 8) for (int j = 0; j < 4; j++) {
        t[i + j] = _mm512_shuffle_i32x4(u[i + j], u[i + 4 + j], 0x88);
        t[i + 4 + j] = _mm512_shuffle_i32x4(u[i + j], u[i + 4 + j], 0xdd);
    }
    for (int j = 0; j < 8; j++) {
        // t[j] has lanes of 128 bits 0 and 2 (j < 4) or 1 and 3 of rows 0 to 7, t[8 + j] of rows 8 to 15.
        __m512i low = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88), high = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
        r[j] = (vu)low, r[8 + j] = (vu)high;
    }
}
// Sums of 16 pairs of products added to c: the machine's bf16 instruction.
INLINE vf dot2(vf c, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
#elif defined(MP_BFMMLA)
INLINE vf dot2(vf c, vu a, vu b) { return (vf)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b); }
#elif defined(MP_PAIRS)
INLINE vf dot2(vf c, vu a, vu b) {
    c += (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
    return c + (vf)(a << 16) * (vf)(b << 16);
}
#endif
