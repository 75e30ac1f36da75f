// Rows by a packed matrix in panels.
#include "packed_walk.h"
#include "tiles.h"
#if defined(__SSE2__) && W == 4
#include <emmintrin.h>
#endif

// Rows of a single tile: as many as take all vectors of a panel at once. A panel that is walked over twice by the same rows
// waits for memory in the first walk, and has half the rate. And rows of each of several tiles: as many as keep both their
// whole sums and their totals in registers.
#if defined(MP_AVX512)
enum { PACKED_ROWS = 14, PACKED_MANY = 6 };
#elif defined(MP_AVX2)
enum { PACKED_ROWS = 3, PACKED_MANY = 3 };
#else
enum { PACKED_ROWS = 6, PACKED_MANY = 6 };
#endif

// ---- products of bytes ----
// Codes: of W outputs four inputs each. Row: the same inputs of one row. Sums: of W outputs; `whole` gives them as integers.
enum Form { BYTES, NIBBLES, TABLE, FIVE, SIX };
template <int FORM> constexpr int BITS = FORM == BYTES ? 8 : FORM == FIVE ? 5 : FORM == SIX ? 6 : 4;
template <int FORM> constexpr int MOST = FORM == TABLE ? 255 : (1 << BITS<FORM>) - 1;  // of codes
template <int FORM, int PART> constexpr int PART_BYTES = PART * BITS<FORM> / 8 * (int)PANEL;
typedef uint8_t Codes __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(4 * W)));

// W of the table's 16 bytes at a time, by codes below 16.
INLINE Codes table_of(const uint8_t* table) {
    Codes all;
    for (int i = 0; i < W / 4; i++) memcpy((char*)&all + 16 * i, table, 16);
    return all;
}
INLINE Codes chosen(Codes table, Codes a) {
#if defined(MP_AVX512)
    return (Codes)_mm512_shuffle_epi8((__m512i)table, (__m512i)a);
#elif defined(MP_AVX2)
    return (Codes)_mm256_shuffle_epi8((__m256i)table, (__m256i)a);
#elif defined(__aarch64__)
    return (Codes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)a);
#else
    for (int i = 0; i < 4 * W; i++) a[i] = table[a[i]];
    return a;
#endif
}
// The codes that quad q of a part has for W outputs, from lane `lane` on.
template <int FORM> INLINE Codes quad(const uint8_t* part, int q, int lane, Codes table) {
    if (FORM == BYTES) return load_as<Codes>(part + (q * PANEL + lane) * 4);
    constexpr int HIGHER = FORM == FIVE ? 8 : FORM == SIX ? 4 : 2;  // quads whose nibbles lie together
    const uint8_t* run = part + q / HIGHER * (HIGHER * 4 * BITS<FORM> / 8 * PANEL);
    q %= HIGHER;
    Codes both = load_as<Codes>(run + (q / 2 * PANEL + lane) * 4), low = (q % 2 ? (Codes)((Halves)both >> 4) : both) & 15;
    if (FORM == NIBBLES) return low;
    if (FORM == TABLE) return chosen(table, low);
    Halves higher = load_as<Halves>(run + (HIGHER / 2 * PANEL + lane) * 4);
    constexpr uint8_t mask = FORM == FIVE ? 16 : 48;
    int right = q * (BITS<FORM> - 4) - 4;
    return low | ((Codes)(right < 0 ? higher << -right : higher >> right) & mask);
}

#if defined(MP_AVX512) || defined(MP_AVX2)
typedef int8_t Number;
typedef vi Row;
typedef vi Sums;
INLINE Row row_of(const Number* numbers) { return load_as<int32_t>(numbers) - (vi){}; }
#if defined(MP_AVX512) && defined(__AVX512VNNI__)
enum { VNNI = 1 };
INLINE vi dpbusd(vi sums, Codes codes, Row row) { return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, (__m512i)row); }
#elif defined(MP_AVX2) && defined(__AVXVNNI__)
enum { VNNI = 1 };
INLINE vi dpbusd(vi sums, Codes codes, Row row) { return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, (__m256i)row); }
#else
enum { VNNI = 0 };
INLINE vi dpbusd(vi sums, Codes, Row) { return sums; }
#endif
#if defined(MP_AVX512)
INLINE vi pairs(Codes codes, Row row) { return (vi)_mm512_maddubs_epi16((__m512i)codes, (__m512i)row); }
INLINE vi added(vi a, vi b) { return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b); }
INLINE vi quads(vi pairs) { return (vi)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
INLINE Codes magnitude(Codes a) { return (Codes)_mm512_abs_epi8((__m512i)a); }
INLINE Row with_sign(Row row, Codes a) {
    return (vi)_mm512_mask_sub_epi8((__m512i)row, _mm512_movepi8_mask((__m512i)a), _mm512_setzero_si512(), (__m512i)row);
}
#else
INLINE vi pairs(Codes codes, Row row) { return (vi)_mm256_maddubs_epi16((__m256i)codes, (__m256i)row); }
INLINE vi added(vi a, vi b) { return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b); }
INLINE vi quads(vi pairs) { return (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
INLINE Codes magnitude(Codes a) { return (Codes)_mm256_abs_epi8((__m256i)a); }
INLINE Row with_sign(Row row, Codes a) { return (vi)_mm256_sign_epi8((__m256i)row, (__m256i)a); }
#endif
INLINE Sums begin_at(int32_t number) { return number - (vi){}; }
// Without VNNI products are added as pairs in 16 bits, as many as fit; bytes only as magnitudes of signed ones.
template <int FORM> constexpr bool SIGNED = !VNNI && MOST<FORM> == 255;
template <int FORM, int PART> constexpr bool NARROW = !VNNI && PART / 2 * MOST<FORM> * 127 <= 32767;  // of a whole part
template <int FORM> constexpr int RUN = VNNI || SIGNED<FORM> ? 1 : FORM == FIVE ? 4 : 2;                 // quads together
template <int FORM> INLINE Codes prepared(Codes a) { return SIGNED<FORM> ? a ^ 128 : a; }
template <int FORM> constexpr int ZERO = SIGNED<FORM> ? 128 : 0;  // what `prepared` takes off codes
template <int FORM, int PART> INLINE void dot(Sums& sums, const Codes* codes, const Row* rows) {
    constexpr int N = RUN<FORM>;
    if (VNNI) {
        for (int i = 0; i < N; i++) sums = dpbusd(sums, codes[i], rows[i]);
    } else if (SIGNED<FORM>) {
        sums += quads(pairs(magnitude(codes[0]), with_sign(rows[0], codes[0])));
    } else {
        vi all = pairs(codes[0], rows[0]);
        for (int i = 1; i < N; i++) all = added(all, pairs(codes[i], rows[i]));
        if (NARROW<FORM, PART>) sums = added(sums, all);
        else sums += quads(all);
    }
}
template <int FORM, int PART> INLINE vi whole(Sums sums) { return NARROW<FORM, PART> ? quads(sums) : sums; }
#elif defined(__ARM_FEATURE_DOTPROD)
// Four products at once, of signed bytes.
typedef int8_t Number;
typedef vi Row;
typedef vi Sums;
enum { VNNI = 1 };
INLINE Row row_of(const Number* numbers) { return load_as<int32_t>(numbers) - (vi){}; }
INLINE Sums begin_at(int32_t number) { return number - (vi){}; }
template <int FORM> constexpr int RUN = 1;
template <int FORM> constexpr int ZERO = MOST<FORM> == 255 ? 128 : 0;
template <int FORM> INLINE Codes prepared(Codes a) { return MOST<FORM> == 255 ? a ^ 128 : a; }
template <int FORM, int PART> INLINE void dot(Sums& sums, const Codes* codes, const Row* rows) {
    sums = (vi)vdotq_s32((int32x4_t)sums, (int8x16_t)*codes, (int8x16_t)*rows);
}
template <int FORM, int PART> INLINE vi whole(Sums sums) { return sums; }
#else
typedef int16_t Number;
typedef int16_t Row __attribute__((vector_size(16)));  // four inputs, twice
struct Sums { Row low, high; };                        // of outputs 0 and 1, and of 2 and 3
INLINE Row row_of(const Number* numbers) {
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
template <int FORM, int PART> constexpr bool NARROW = PART / 4 * MOST<FORM> * 127 <= 32767;  // sums of a part fit into 16 bits
enum { VNNI = 0 };
INLINE Sums begin_at(int32_t) { Sums none = {}; return none; }
template <int FORM> constexpr int RUN = 1;
template <int FORM> constexpr int ZERO = 0;
template <int FORM> INLINE Codes prepared(Codes a) { return a; }
template <int FORM, int PART> INLINE void dot(Sums& sums, const Codes* codes, const Row* rows) {
    typedef uint8_t Eight __attribute__((vector_size(8)));
    Eight half[2];
    memcpy(half, codes, sizeof half);
    Row low = __builtin_convertvector(half[0], Row), high = __builtin_convertvector(half[1], Row);
    if (NARROW<FORM, PART>) sums.low += low * *rows, sums.high += high * *rows;
    else sums.low = add_pairs(sums.low, low, *rows), sums.high = add_pairs(sums.high, high, *rows);
}
template <int FORM, int PART> INLINE vi whole(const Sums& sums) {
    const Row one = (Row){} + 1;
    bool narrow = NARROW<FORM, PART>;
    vi low = (vi)(narrow ? add_pairs((Row){}, sums.low, one) : sums.low), high = (vi)(narrow ? add_pairs((Row){}, sums.high, one) : sums.high);
    return (vi){low[0] + low[1], low[2] + low[3], high[0] + high[1], high[2] + high[3]};
}
#endif

// ---- rows in bytes ----
// Inputs that are summed as whole numbers, and what makes a number of their sum.
struct Part {
    float scale, sum;  // sum: of the row's numbers, times the scale
    int32_t less;      // sum of the row's numbers, times the weight's zero
};
struct PackedRows {
    Number* numbers;  // [rows, inputs]
    Part* parts;      // [rows, count]
    int64_t inputs, count;
};
template <class T> static void quantise_row(const T* x, int64_t K, int part, int zero, Number* numbers, Part* parts) {
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
            if (sizeof(Number) == 1) store_bytes(numbers + i * W, q);
            else for (int j = 0; j < W; j++) numbers[i * W + j] = (Number)q[j];
            for (int j = 0; j < W; j++) sums[i * W / (CHUNK / 2)] += q[j];
        }
        if (part == CHUNK) sums[0] += sums[1];
        for (int i = 0; i < CHUNK / part; i++) *parts++ = {scale, scale * (float)sums[i], zero * sums[i]};
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// A chunk's sums of M rows added to `sums`, by matrices: 8 inputs of two rows by 8 inputs of two outputs an instruction.
template <int M, int NV, int FORM, int PART>
INLINE void matrix_sums(Sums (&sums)[M][NV], const uint8_t* codes, int lane, Codes table, const Number* numbers, int64_t inputs) {
    constexpr int TWOS = (M + 1) / 2;  // an odd last row goes with itself
    int32x4_t whole[TWOS][NV][2] = {};
#pragma GCC unroll 4
    for (int k = 0; k < PART / 8; k++) {
        int8x16_t rows[TWOS];
        for (int m = 0; m < TWOS; m++) {
            const Number *first = numbers + 2 * m * inputs + 8 * k, *second = 2 * m + 1 < M ? first + inputs : first;
            rows[m] = vcombine_s8(vld1_s8(first), vld1_s8(second));
        }
        for (int v = 0; v < NV; v++) {
            int32x4_t four = (int32x4_t)prepared<FORM>(quad<FORM>(codes, 2 * k, lane + v * W, table));
            int32x4_t next = (int32x4_t)prepared<FORM>(quad<FORM>(codes, 2 * k + 1, lane + v * W, table));
            int8x16_t low = (int8x16_t)vzip1q_s32(four, next), high = (int8x16_t)vzip2q_s32(four, next);
            for (int m = 0; m < TWOS; m++) {
                whole[m][v][0] = vmmlaq_s32(whole[m][v][0], rows[m], low);
                whole[m][v][1] = vmmlaq_s32(whole[m][v][1], rows[m], high);
            }
        }
    }
    for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) {
        const int32x4_t* two = whole[m / 2][v];
        sums[m][v] += (vi)(m % 2 ? vcombine_s32(vget_high_s32(two[0]), vget_high_s32(two[1])) : vcombine_s32(vget_low_s32(two[0]), vget_low_s32(two[1])));
    }
}
constexpr bool MATRICES = true;
#else
template <int M, int NV, int FORM, int PART>
INLINE void matrix_sums(Sums (&)[M][NV], const uint8_t*, int, Codes, const Number*, int64_t) {}
constexpr bool MATRICES = false;
#endif

// ---- sums of M rows by NV vectors of a panel, from vector `from` on ----
template <int M, int NV, int FORM, int PART>
static __attribute__((noinline)) void packed_sums(const Panels& p, const PackedRows& x, int64_t row, const char* at, int from, Ahead ahead, float* out) {
    constexpr int RUNS = PART / 4 / RUN<FORM>;
    constexpr int CHAINS = VNNI && M * NV <= 4 ? 2 : 1;  // that do not wait for one another
    const Number* numbers = x.numbers + row * x.inputs;
    const Part* parts = x.parts + row * x.count;
    const Codes table = FORM == TABLE ? table_of(p.table) : (Codes){};
    const int lane = from * W;
    int64_t scales = PANEL * p.scale_bytes, offsets = PANEL * p.offset_bytes, groups = p.block / p.group, inner = p.group / PART;
    vf total[M][NV] = {}, unit[NV] = {}, offset_unit[NV] = {};
    for (int64_t left = x.inputs; left > 0; left -= p.block) {
        const f16* units = (const f16*)at + lane;
        if (p.scale_bytes == 1) for (int v = 0; v < NV; v++) unit[v] = widen(units + v * W);
        if (p.offset_bytes == 1) for (int v = 0; v < NV; v++) offset_unit[v] = widen(units + (p.scale_bytes == 1) * PANEL + v * W);
        at += p.unit_bytes();
        for (int64_t g = 0; g < groups; g++) {
            vf scale[NV], offset[NV] = {};
            for (int v = 0; v < NV; v++) {
                scale[v] = scales_at(at, p.scale_bytes, lane + v * W, unit[v]);
                if (p.offset_bytes) offset[v] = scales_at(at + scales, p.offset_bytes, lane + v * W, offset_unit[v]);
            }
            at += scales + offsets;
            for (int64_t i = 0; i < inner; i++, numbers += PART, parts++, at += PART_BYTES<FORM, PART>) {
                const uint8_t* codes = (const uint8_t*)at;
                Sums sums[CHAINS][M][NV] = {};
                if (VNNI) for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) sums[0][m][v] = begin_at(-parts[m * x.count].less);
                for (int64_t b = 0; b < ahead.pace; b += 64) __builtin_prefetch(ahead.at + b, 0, 2);
                ahead.at += ahead.pace;
                constexpr bool MATRIX = MATRICES && M > 1;
                if constexpr (MATRIX) matrix_sums<M, NV, FORM, PART>(sums[0], codes, lane, table, numbers, x.inputs);
#pragma GCC unroll 8
                for (int k = 0; k < (MATRIX ? 0 : RUNS); k++) {
                    Codes its[NV][RUN<FORM>];
                    for (int v = 0; v < NV; v++)
                        for (int q = 0; q < RUN<FORM>; q++)
                            its[v][q] = prepared<FORM>(quad<FORM>(codes, k * RUN<FORM> + q, lane + v * W, table));
                    for (int m = 0; m < M; m++) {
                        Row some[RUN<FORM>];
                        for (int q = 0; q < RUN<FORM>; q++) some[q] = row_of(numbers + m * x.inputs + (k * RUN<FORM> + q) * 4);
                        for (int v = 0; v < NV; v++) dot<FORM, PART>(sums[k % CHAINS][m][v], its[v], some);
                    }
                }
                for (int m = 0; m < M; m++) {
                    const Part& its = parts[m * x.count];
                    for (int v = 0; v < NV; v++) {
                        vi sum = whole<FORM, PART>(sums[0][m][v]) - (VNNI ? 0 : its.less);
                        if (CHAINS == 2) sum += whole<FORM, PART>(sums[CHAINS - 1][m][v]);
                        total[m][v] = fused(total[m][v], __builtin_convertvector(sum, vf), scale[v] * its.scale);
                        if (p.offset_bytes) total[m][v] = fused(total[m][v], offset[v], splat(its.sum));
                    }
                }
            }
        }
    }
    for (int m = 0; m < M; m++) for (int v = 0; v < NV; v++) store(out + m * PANEL + (from + v) * W, total[m][v]);
}
// Vectors of a panel that M rows take at once, as many as there are registers for their sums.
template <int M> constexpr int packed_at_once() { return W == 16 || M * VECTORS <= 12 ? (int)VECTORS : 2; }
template <int M, int FORM, int PART>
static void packed_tile(const Panels& p, int rows, const PackedRows& x, int64_t row, const char* panel, Ahead ahead, float* out) {
    if constexpr (M > 1) if (rows < M) return packed_tile<M - 1, FORM, PART>(p, rows, x, row, panel, ahead, out);
    constexpr int NV = packed_at_once<M>();
    ahead.pace = ahead.pace * NV / VECTORS;
    for (int from = 0; from < VECTORS; from += NV, ahead.at += ahead.pace * x.count)
        packed_sums<M, NV, FORM, PART>(p, x, row, panel, from, ahead, out);
}

#if defined(MP_TILES)
// ---- the same by tiles of AMX, 16 rows by 16 outputs ----
// A part's sums leave their tile as whole numbers, while the next parts are multiplied. So the bits are those of
// `packed_sums`, and few rows, which were faster there, stay there.
enum { TILED_ROWS = 16, TILED_SHAPE = 128 };  // the latter: a number of a shape, see shape_tiles

// Tiles 0 and 1: sums of two parts; 4 and 5: rows; 6 and 7: weights.
template <int PART> INLINE TileConfig packed_shape(int rows) {
    TileConfig c = {1};
    for (int t = 0; t < 8; t++) c.rows[t] = t < 6 ? rows : PART / 4, c.colsb[t] = t / 2 == 2 ? PART : 64;
    return c;
}
// A panel's parts in their order.
template <int FORM, int PART> struct PanelParts {
    const Panels& p;
    const char *at, *units, *scales;
    int64_t groups = 0, parts = 0;  // that are left, of this block and of this group
    PanelParts(const Panels& its, const char* panel) : p(its), at(panel), units(nullptr), scales(nullptr) {}
    const uint8_t* next() {
        if (!parts) {
            if (!groups) units = at, at += p.unit_bytes(), groups = p.block / p.group;
            scales = at, at += PANEL * (p.scale_bytes + p.offset_bytes);
            groups--, parts = p.group / PART;
        }
        parts--, at += PART_BYTES<FORM, PART>;
        return (const uint8_t*)at - PART_BYTES<FORM, PART>;
    }
};
// Whether codes less their zero are signed bytes. Then rows of several tiles share one copy of the panel in signed bytes:
// codes are unpacked once, and nothing is to be taken off the sums.
template <int FORM> INLINE bool are_signed(const Panels& p) { return p.zero <= 128 && MOST<FORM> - p.zero <= 127; }
template <int FORM, int PART> static void unpack_panel(const Panels& p, const char* panel, int64_t count, uint8_t* to) {
    const Codes table = FORM == TABLE ? table_of(p.table) : (Codes){};
    PanelParts<FORM, PART> all(p, panel);
    for (int64_t i = 0; i < count; i++) {
        const uint8_t* part = all.next();
        for (int q = 0; q < PART / 4; q++) for (int lane = 0; lane < PANEL; lane += W, to += 4 * W) {
            Codes its = quad<FORM>(part, q, lane, table) - (uint8_t)p.zero;
            memcpy(to, &its, sizeof its);
        }
    }
}
template <int FORM, int PART, bool FULL, bool SIGNED>  // FULL: 16 rows; SIGNED: of `unpacked`
static void packed_by_tiles(const Panels& p, int rows, const PackedRows& x, int64_t row, const char* panel, const uint8_t* unpacked, Ahead ahead, float* out) {
    constexpr int NV = 16 / W;
    const Number* numbers = x.numbers + row * x.inputs;
    const Part* parts = x.parts + row * x.count;
    const Codes table = FORM == TABLE ? table_of(p.table) : (Codes){};
    alignas(64) int32_t whole[2][2][16][16];
    alignas(64) uint8_t codes[2][PART / 4][64];
    ahead.pace /= 2;
    shape_tiles(TILED_SHAPE + (PART == CHUNK ? 0 : 32) + rows, [&] { return packed_shape<PART>(rows); });
    for (int lane = 0; lane < PANEL; lane += 16) {
        PanelParts<FORM, PART> multiplied(p, panel), added(p, panel);
        vf total[16][NV] = {};
        // A tile of the part's weights: bytes as they lie, others by quads.
        auto weights = [&](int64_t chunk, const char*& from, int64_t& stride) __attribute__((always_inline)) {
            stride = 4 * PANEL;
            if (SIGNED) { from = (const char*)unpacked + chunk * PART * PANEL + 4 * lane; return; }
            const uint8_t* part = multiplied.next();
            from = (const char*)part + 4 * lane;
            if (FORM == BYTES) return;
            auto& to = codes[chunk % 2];
            for (int q = 0; q < PART / 4; q++) for (int v = 0; v < NV; v++) {
                Codes its = quad<FORM>(part, q, lane + v * W, table);
                memcpy(to[q] + 4 * v * W, &its, sizeof its);
            }
            from = (const char*)to, stride = 64;
        };
        auto multiply = [&](int64_t chunk) __attribute__((always_inline)) {
            const char* from;
            int64_t stride;
            auto& to = whole[chunk / 2 % 2];
            weights(chunk, from, stride);
            tile_zero<0>(), tile_load<4>(numbers + chunk * PART, x.inputs), tile_load<6>(from, stride);
            if (SIGNED) tile_signed_bytes<0, 4, 6>();
            else tile_bytes<0, 4, 6>();
            tile_store<0>(to[0], 64);
            if (chunk + 1 == x.count) return;
            weights(chunk + 1, from, stride);
            tile_zero<1>(), tile_load<5>(numbers + (chunk + 1) * PART, x.inputs), tile_load<7>(from, stride);
            if (SIGNED) tile_signed_bytes<1, 5, 7>();
            else tile_bytes<1, 5, 7>();
            tile_store<1>(to[1], 64);
        };
        multiply(0);
        for (int64_t chunk = 0; chunk < x.count; chunk++) {
            for (int64_t b = 0; b < ahead.pace; b += 64) __builtin_prefetch(ahead.at + b, 0, 2);
            ahead.at += ahead.pace;
            if (chunk % 2 == 0 && chunk + 2 < x.count) multiply(chunk + 2);
            added.next();
            const auto& sums = whole[chunk / 2 % 2][chunk % 2];
            for (int v = 0; v < NV; v++) {
                const f16* units = (const f16*)added.units + lane + v * W;
                vf unit = p.scale_bytes == 1 ? widen(units) : (vf){}, offset = {};
                vf scale = scales_at(added.scales, p.scale_bytes, lane + v * W, unit);
                if (p.offset_bytes) {
                    unit = p.offset_bytes == 1 ? widen(units + (p.scale_bytes == 1) * PANEL) : unit;
                    offset = scales_at(added.scales + PANEL * p.scale_bytes, p.offset_bytes, lane + v * W, unit);
                }
                auto add = [&](int m) __attribute__((always_inline)) {
                    const Part& its = parts[m * x.count + chunk];
                    vi sum = load_as<vi>(sums[m] + v * W) - (SIGNED ? 0 : its.less);
                    total[m][v] = fused(total[m][v], __builtin_convertvector(sum, vf), scale * its.scale);
                    if (p.offset_bytes) total[m][v] = fused(total[m][v], offset, splat(its.sum));
                };
                if (FULL) {
#pragma GCC unroll 16
                    for (int m = 0; m < 16; m++) add(m);
                } else {
                    for (int m = 0; m < rows; m++) add(m);
                }
            }
        }
        for (int m = 0; m < rows; m++) for (int v = 0; v < NV; v++) store(out + m * PANEL + lane + v * W, total[m][v]);
    }
}
#endif

template <class T, int FORM, int PART>
static int product_of(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    static thread_local Memory room;
    int64_t K = p.inputs;
    PackedRows packed{nullptr, nullptr, K, K / PART};
    packed.parts = (Part*)room.get(rows * (K * sizeof(Number) + packed.count * sizeof(Part)));
    if (!packed.parts) return 1;
    packed.numbers = (Number*)(packed.parts + rows * packed.count);
#if defined(MP_TILES)
    bool tiled = rows >= TILED_ROWS;
#else
    constexpr bool tiled = false;
#endif
    split(rows, worth(rows * K, threads), [&](int64_t row, int64_t end) {
        for (; row < end; row++)
            quantise_row(x + row * stride, K, PART, p.zero - (tiled ? 0 : ZERO<FORM>), packed.numbers + row * K, packed.parts + row * packed.count);
    });
#if defined(MP_TILES)
    if (tiled) {
        std::atomic<int> failed{0};
        walk_panels<T, TILED_ROWS, TILED_ROWS, TilesInUse>(p, rows, K, packed.count, r, threads, [&](int count, int64_t row, const char* panel, Turn turn, Ahead ahead, float* sums) {
            static thread_local Memory copy;
            uint8_t* unpacked = nullptr;
            if (turn.of > 1 && are_signed<FORM>(p)) {
                unpacked = (uint8_t*)copy.get(K * PANEL);
                if (!unpacked) { failed = 1; return; }
                if (!turn.at) unpack_panel<FORM, PART>(p, panel, packed.count, unpacked);
            }
            auto tile = count == TILED_ROWS ? (unpacked ? packed_by_tiles<FORM, PART, true, true> : packed_by_tiles<FORM, PART, true, false>)
                                            : (unpacked ? packed_by_tiles<FORM, PART, false, true> : packed_by_tiles<FORM, PART, false, false>);
            tile(p, count, packed, row, panel, unpacked, ahead, sums);
        });
        return failed;
    }
#endif
    walk_panels<T, PACKED_ROWS, PACKED_MANY>(p, rows, K, packed.count, r, threads, [&](int count, int64_t row, const char* panel, Turn, Ahead ahead, float* sums) {
        packed_tile<PACKED_ROWS, FORM, PART>(p, count, packed, row, panel, ahead, sums);
    });
    return 0;
}
template <class T, int PART>
static int product_by_form(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    if (p.bits == 8) return product_of<T, BYTES, PART>(p, x, stride, rows, r, threads);
    if (p.bits == 6) return product_of<T, SIX, PART>(p, x, stride, rows, r, threads);
    if (p.values == BYTE_TABLE) return product_of<T, TABLE, PART>(p, x, stride, rows, r, threads);
    return product_of<T, NIBBLES, PART>(p, x, stride, rows, r, threads);
}
template <class T>
int packed_product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads) {
    if (p.values >= FLOAT_TABLE) return packed_float_product<T>(p, x, stride, rows, r, threads);
    if (p.group == CHUNK / 2) return product_by_form<T, CHUNK / 2>(p, x, stride, rows, r, threads);
    if (p.bits == 5) return product_of<T, FIVE, CHUNK>(p, x, stride, rows, r, threads);
    return product_by_form<T, CHUNK>(p, x, stride, rows, r, threads);
}
template int packed_product<float>(const Panels&, const float*, int64_t, int64_t, const Result&, int);
template int packed_product<bf16>(const Panels&, const bf16*, int64_t, int64_t, const Result&, int);
template int packed_product<f16>(const Panels&, const f16*, int64_t, int64_t, const Result&, int);
