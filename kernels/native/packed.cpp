// Rows by a packed matrix in panels.
#include "packed.h"
#include "ends.h"
#if defined(__SSE2__) && W == 4
#include <emmintrin.h>
#endif

#if defined(MP_AVX512)
enum { PACKED_ROWS = 14 };
#else
enum { PACKED_ROWS = 6 };
#endif
static const int64_t PACKED_BLOCK = 1 << 20;  // bytes of rows that go through all panels together
enum { PACKED_AHEAD = 4096 };                  // bytes of a panel that are fetched ahead

// ---- products of bytes ----
// Codes: of W outputs some inputs. Row: the same inputs of one row. Sums: of W outputs; `whole` gives them as integers.
template <int BITS> constexpr int STEP_INPUTS = BITS == 4 ? 8 : SIDE_BY_SIDE;             // of one load of codes
template <int BITS> constexpr int STEP_BYTES = STEP_INPUTS<BITS> * BITS / 8 * (int)PANEL;  // from it to the next one
template <int BITS> constexpr int HALVES = BITS == 4 ? 2 : 1;                              // that a load gives
// Rows' numbers are bytes only where the machine multiplies bytes of this many bits as they are.
template <bool BYTES> struct NumberOf { typedef int8_t type; };
template <> struct NumberOf<false> { typedef int16_t type; };
template <int BITS> using Number = typename NumberOf<W != 4 && (BITS == 4 || SIDE_BY_SIDE == 4)>::type;

#if defined(MP_AVX512)
typedef __m512i Codes, Row, Sums;
INLINE Codes low_nibbles(Codes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
INLINE Codes high_nibbles(Codes a) { return low_nibbles(_mm512_srli_epi16(a, 4)); }
INLINE Row row_of(const void* numbers) { return _mm512_set1_epi32(load_as<int32_t>(numbers)); }
#if defined(MP_BF16)
INLINE Codes bytes_of(const uint8_t* p) { return _mm512_loadu_si512(p); }
template <int BITS> INLINE void dot(Sums& sums, Codes codes, Row row) { sums = _mm512_dpbusd_epi32(sums, codes, row); }
template <int BITS> INLINE vi whole(Sums sums) { return (vi)sums; }
#else
INLINE Codes bytes_of(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
template <int BITS> INLINE void dot(Sums& sums, Codes codes, Row row) {
    if (BITS == 4) sums = _mm512_add_epi16(sums, _mm512_maddubs_epi16(codes, row));
    else sums = _mm512_add_epi32(sums, _mm512_madd_epi16(codes, row));
}
template <int BITS> INLINE vi whole(Sums sums) { return (vi)(BITS == 4 ? _mm512_madd_epi16(sums, _mm512_set1_epi16(1)) : sums); }
#endif
#elif defined(MP_AVX2)
typedef __m256i Codes, Row, Sums;
INLINE Codes low_nibbles(Codes a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
INLINE Codes high_nibbles(Codes a) { return low_nibbles(_mm256_srli_epi16(a, 4)); }
INLINE Row row_of(const void* numbers) { return _mm256_set1_epi32(load_as<int32_t>(numbers)); }
INLINE Codes bytes_of(const uint8_t* p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)); }
// A chunk's sums of nibbles fit into 16 bits: 16 * 15 * 127 of each half of a lane.
template <int BITS> INLINE void dot(Sums& sums, Codes codes, Row row) {
    if (BITS == 4) sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, row));
    else sums = _mm256_add_epi32(sums, _mm256_madd_epi16(codes, row));
}
template <int BITS> INLINE vi whole(Sums sums) { return (vi)(BITS == 4 ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums); }
#else
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int16_t Row __attribute__((vector_size(16)));  // four inputs, twice
struct Codes { Row low, high; };                       // of outputs 0 and 1, and of 2 and 3
struct Sums { Row low, high; };                        // of bytes as four integers each
INLINE Codes widened_codes(Bytes b) {
    typedef uint8_t Eight __attribute__((vector_size(8)));
    Eight half[2];
    memcpy(half, &b, sizeof b);
    return {__builtin_convertvector(half[0], Row), __builtin_convertvector(half[1], Row)};
}
INLINE Codes low_nibbles(Bytes a) { return widened_codes(a & 15); }
INLINE Codes high_nibbles(Bytes a) { return widened_codes(a >> 4); }
INLINE Codes bytes_of(const uint8_t* p) { return widened_codes(load_as<Bytes>(p)); }
INLINE Row row_of(const void* numbers) {
    typedef int64_t Two __attribute__((vector_size(16)));
    return (Row)(load_as<int64_t>(numbers) - (Two){});
}
// To each integer a pair of products, each of which fits into 16 bits: 255 * 127.
INLINE Row add_pairs(Row sums, Row codes, Row row) {
#if defined(__aarch64__)
    return (Row)vpadalq_s16((int32x4_t)sums, (int16x8_t)(codes * row));
#elif defined(__SSE2__)
    return (Row)((vi)sums + (vi)_mm_madd_epi16((__m128i)codes, (__m128i)row));
#else
    Row products = codes * row;
    vi all = (vi)sums;
    for (int i = 0; i < 4; i++) all[i] += products[2 * i] + products[2 * i + 1];
    return (Row)all;
#endif
}
template <int BITS> INLINE void dot(Sums& sums, const Codes& codes, Row row) {
    if (BITS == 4) sums.low += codes.low * row, sums.high += codes.high * row;  // 8 * 15 * 127 at most
    else sums.low = add_pairs(sums.low, codes.low, row), sums.high = add_pairs(sums.high, codes.high, row);
}
template <int BITS> INLINE vi whole(const Sums& sums) {
    const Row one = (Row){} + 1;
    vi low = (vi)(BITS == 4 ? add_pairs((Row){}, sums.low, one) : sums.low), high = (vi)(BITS == 4 ? add_pairs((Row){}, sums.high, one) : sums.high);
    return (vi){low[0] + low[1], low[2] + low[3], high[0] + high[1], high[2] + high[3]};
}
#endif
template <int BITS> INLINE void codes_of(const uint8_t* p, Codes* codes) {
#if defined(MP_AVX512)
    if (BITS == 4) { __m512i both = _mm512_loadu_si512(p); codes[0] = low_nibbles(both), codes[1] = high_nibbles(both); }
#elif defined(MP_AVX2)
    if (BITS == 4) { __m256i both = _mm256_loadu_si256((const __m256i*)p); codes[0] = low_nibbles(both), codes[1] = high_nibbles(both); }
#else
    if (BITS == 4) { Bytes both = load_as<Bytes>(p); codes[0] = low_nibbles(both), codes[1] = high_nibbles(both); }
#endif
    else codes[0] = bytes_of(p);
}

// ---- rows in bytes ----
// Inputs that are summed as whole numbers, and what makes a number of their sum.
struct Part {
    float scale, sum;  // sum: of the row's numbers, times the scale
    int32_t less;      // sum of the row's numbers, times the weight's zero
};
template <class N> struct PackedRows {
    N* numbers;   // [rows, inputs]
    Part* parts;  // [rows, count]
    int64_t inputs, count;
};
template <class T, class N> static void quantise_row(const T* x, int64_t K, int part, int zero, N* numbers, Part* parts) {
    for (int64_t k = 0; k < K; k += CHUNK, numbers += CHUNK) {
        vf v[CHUNK / W];
        vi top = {};
        for (int i = 0; i < CHUNK / W; i++) {
            v[i] = widen(x + k + i * W);
            vi bits = (vi)v[i] & 0x7fffffff;
            top = imax(top, bits);
        }
        float most = largest(top), scale = most / 127;
        bool some = most > 1e-30f && most < __builtin_inff();  // else all are 0, and a scale that is no number remains
        int32_t sums[2] = {};
        for (int i = 0; i < CHUNK / W; i++) {
            vi q = some ? nearest(v[i] / scale) : (vi){};  // a product would be fused with what rounds it
            if (sizeof(N) == 1) store_bytes(numbers + i * W, q);
            else for (int j = 0; j < W; j++) numbers[i * W + j] = (N)q[j];
            for (int j = 0; j < W; j++) sums[i * W / (CHUNK / 2)] += q[j];
        }
        if (part == CHUNK) sums[0] += sums[1];
        for (int i = 0; i < CHUNK / part; i++) *parts++ = {scale, scale * (float)sums[i], zero * sums[i]};
    }
}

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

// ---- sums of M rows by NV vectors of a panel, from vector `from` on ----
template <int M, int NV, int BITS, int PART>
static __attribute__((noinline)) void packed_sums(const Panels& p, const PackedRows<Number<BITS>>& x, int64_t row, const char* group, int from, float* out) {
    constexpr int STEPS = PART / STEP_INPUTS<BITS>, LOAD = STEP_BYTES<BITS> / VECTORS;
    constexpr int CHAINS = SIDE_BY_SIDE == 4 && W != 4 && M * NV <= 4 ? 2 : 1;  // that do not wait for one another
    const Number<BITS>* numbers = x.numbers + row * x.inputs;
    const Part* parts = x.parts + row * x.count;
    int64_t inner = p.group / PART, scales = PANEL * p.scale_bytes, code_bytes = PANEL * p.group * BITS / 8;
    vf total[M][NV] = {};
    for (int64_t left = x.inputs; left > 0; left -= p.group) {
        const char* offsets = group + scales;
        const uint8_t* codes = (const uint8_t*)offsets + PANEL * p.offset_bytes;
        group = (const char*)codes + code_bytes;
        codes += from * LOAD;
        vf scale[NV], offset[NV] = {};
        for (int v = 0; v < NV; v++) {
            int at = (from + v) * W;
            scale[v] = p.scale_bytes == 2 ? widen((const f16*)(offsets - scales) + at) : load((const float*)(offsets - scales) + at);
            if (p.offset_bytes) offset[v] = p.offset_bytes == 2 ? widen((const f16*)offsets + at) : load((const float*)offsets + at);
        }
        for (int64_t i = 0; i < inner; i++, numbers += PART, parts++) {
            Sums sums[CHAINS][M][NV] = {};
#pragma GCC unroll 4
            for (int k = 0; k < STEPS; k++, codes += STEP_BYTES<BITS>) {
                Codes its[NV][2];
                for (int v = 0; v < NV; v++) {
                    __builtin_prefetch(codes + v * LOAD + PACKED_AHEAD, 0, 2);
                    codes_of<BITS>(codes + v * LOAD, its[v]);
                }
                for (int m = 0; m < M; m++) {
                    for (int half = 0; half < HALVES<BITS>; half++) {
                        Row four = row_of(numbers + m * x.inputs + k * STEP_INPUTS<BITS> + half * 4);
                        for (int v = 0; v < NV; v++) dot<BITS>(sums[(k + half) % CHAINS][m][v], its[v][half], four);
                    }
                }
            }
            for (int m = 0; m < M; m++) {
                const Part& its = parts[m * x.count];
                for (int v = 0; v < NV; v++) {
                    vi sum = whole<BITS>(sums[0][m][v]) - its.less;
                    if (CHAINS == 2) sum += whole<BITS>(sums[CHAINS - 1][m][v]);
                    total[m][v] = fused(total[m][v], __builtin_convertvector(sum, vf), scale[v] * its.scale);
                    if (p.offset_bytes) total[m][v] = fused(total[m][v], offset[v], splat(its.sum));
                }
            }
        }
    }
    for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) store(out + m * PANEL + (from + v) * W, total[m][v]);
}
// Vectors of a panel that M rows take at once, as many as there are registers for their sums.
template <int M> constexpr int packed_at_once() { return W == 16 ? (M <= 7 ? 2 : 1) : M * VECTORS <= 12 ? (int)VECTORS : 2; }
template <int M, int BITS, int PART>
static void packed_tile(const Panels& p, int rows, const PackedRows<Number<BITS>>& x, int64_t row, const char* panel, float* out) {
    if constexpr (M > 1) if (rows < M) return packed_tile<M - 1, BITS, PART>(p, rows, x, row, panel, out);
    constexpr int NV = packed_at_once<M>();
    for (int from = 0; from < VECTORS; from += NV) packed_sums<M, NV, BITS, PART>(p, x, row, panel, from, out);
}

template <class T, int BITS, int PART>
static int product_of(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    static thread_local Memory room;
    int64_t K = p.inputs, width = p.width(), begin = r.first / width, panels = (r.last + width - 1) / width - begin;
    if (!rows || panels <= 0) return 0;
    PackedRows<Number<BITS>> packed{nullptr, nullptr, K, K / PART};
    packed.parts = (Part*)room.get(rows * (K * sizeof(Number<BITS>) + packed.count * sizeof(Part)));
    if (!packed.parts) return 1;
    packed.numbers = (Number<BITS>*)(packed.parts + rows * packed.count);
    split(rows, worth(rows * K, threads), [&](int64_t row, int64_t end) {
        for (; row < end; row++)
            quantise_row(x + row * stride, K, PART, p.zero, packed.numbers + row * K, packed.parts + row * packed.count);
    });
    int64_t tiles = (rows + PACKED_ROWS - 1) / PACKED_ROWS, size = PACKED_BLOCK / (K * PACKED_ROWS) + 1, blocks = (tiles + size - 1) / size;
    int64_t shared = threads > 1 ? 4 * threads / panels : 0;  // of few panels every thread has a block of its own
    if (blocks < shared) blocks = shared < tiles ? shared : tiles;
    int64_t most = panels * PANEL * K / 65536 + 1;
    if (most < threads) threads = (int)most;
    parallel_runs(blocks * panels, 1, threads, [&](int64_t task, int64_t) {
        int64_t panel = begin + task % panels, block = task / panels;
        float sums[PACKED_ROWS * PANEL] __attribute__((aligned(64)));
        for (int64_t tile = tiles * block / blocks; tile < tiles * (block + 1) / blocks; tile++) {
            int64_t row = rows * tile / tiles;
            int count = (int)(rows * (tile + 1) / tiles - row);
            packed_tile<PACKED_ROWS, BITS, PART>(p, count, packed, row, p.weight + panel * p.bytes(), sums);
            finish<T>(p, panel, row, count, sums, r);
        }
    });
    return 0;
}
template <class T>
int packed_product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    bool half = p.group == CHUNK / 2;
    if (p.bits == 8) return half ? product_of<T, 8, CHUNK / 2>(p, x, stride, rows, r, threads) : product_of<T, 8, CHUNK>(p, x, stride, rows, r, threads);
    return half ? product_of<T, 4, CHUNK / 2>(p, x, stride, rows, r, threads) : product_of<T, 4, CHUNK>(p, x, stride, rows, r, threads);
}
template int packed_product<float>(const Panels&, const float*, int64_t, int64_t, const Result&, int);
template int packed_product<bf16>(const Panels&, const bf16*, int64_t, int64_t, const Result&, int);
template int packed_product<f16>(const Panels&, const f16*, int64_t, int64_t, const Result&, int);
