// Prefill attention: causal, packed ragged chunks after a cached prefix, on own matrix products.
//
// For each sequence and key/value head the keys and values are first arranged as the products read them (pairs of
// bf16, or floats), 64 keys to a strip. Then tiles of query rows (all heads of the group, row = token * G + head) walk
// tiles of KEYS keys at absolute positions with a running softmax (Dao et al., "FlashAttention-2", 2023).
// A row's arithmetic depends on its own position and the keys' positions only: results do not depend on the batch,
// nor on where a prompt was cut.
#include "matrices.h"
#include "parallel.h"
#include "pool.h"
#include "tile_products.h"

enum { KEYS = 256, STRIP = 64, ROWS = 96, MR = 6 };
#if defined(MP_TILES)
enum { WIDTH = 64 };  // columns of values at a time
#else
enum { WIDTH = NC_MAX * W };
#endif
static const int64_t ARRANGED_BYTES = 48 << 20;  // of arranged keys and values at a time

// One element of a product's left side is 4 bytes: a float, or two bf16.
template <bool PAIRS> INLINE vf product(vf c, uint32_t a, vu b) {
#if defined(MP_PAIRS)
    if (PAIRS) return dot2(c, a - (vu){}, b);
#endif
    float f;
    memcpy(&f, &a, 4);
    return c + splat(f) * (vf)b;
}

// c[M][NC * W] = (or +=) a[M][k] b[k][NC * W]
template <bool PAIRS, int M, int NC>
static __attribute__((noinline)) void gemm(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c,
                                           int64_t ldc, int k, bool add) {
    vf acc[M][NC];
    for (int i = 0; i < M; i++) for (int j = 0; j < NC; j++) acc[i][j] = add ? load(c + i * ldc + j * W) : (vf){};
#if defined(MP_BFMMLA)
    if constexpr (PAIRS) add_by_matrices(acc, a, 4 * lda, b, 4 * ldb, k), k = 0;
#endif
    for (int p = 0; p < k; p++) {
        vu right[NC];
        for (int j = 0; j < NC; j++) right[j] = load_as<vu>(b + p * ldb + j * W);
        for (int i = 0; i < M; i++) {
            for (int j = 0; j < NC; j++) acc[i][j] = product<PAIRS>(acc[i][j], a[i * lda + p], right[j]);
        }
    }
    for (int i = 0; i < M; i++) for (int j = 0; j < NC; j++) store(c + i * ldc + j * W, acc[i][j]);
}
template <bool PAIRS, int M>
INLINE void gemm_columns(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc, int k,
                         int n, bool add) {
    int j = 0;
    for (; j + NC_MAX * W <= n; j += NC_MAX * W) gemm<PAIRS, M, NC_MAX>(a, lda, b + j, ldb, c + j, ldc, k, add);
    for (; j < n; j += W) gemm<PAIRS, M, 1>(a, lda, b + j, ldb, c + j, ldc, k, add);
}
template <bool PAIRS>
static void gemm_rows(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc, int rows,
                      int k, int n, bool add) {
    int i = 0;
#if defined(MP_TILES)
    if (PAIRS && n % TILE_WIDE == 0) {
        for (; i < rows; i += TILE_HIGH) for (int j = 0; j < n; j += TILE_WIDE)
            by_tiles({(const char*)(a + i * lda), 4 * lda, (const char*)(b + j), 4 * ldb, c + i * ldc + j, 4 * ldc, add, nullptr, 0},
                     rows - i < TILE_HIGH ? rows - i : (int)TILE_HIGH, 2 * k);
        return;
    }
#endif
    for (; i + MR <= rows; i += MR) gemm_columns<PAIRS, MR>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, k, n, add);
    for (; i + 2 <= rows; i += 2) gemm_columns<PAIRS, 2>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, k, n, add);
    for (; i < rows; i++) gemm_columns<PAIRS, 1>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, k, n, add);
}

// Keys and values of one sequence and head. k: strips of [words][STRIP]; v: [keys (or pairs)][head_dim] words.
struct Arranged { uint32_t* k; uint32_t* v; };

// Of strip `strip` of the sequence, which is strip `at` of what is arranged.
template <bool PAIRS> static void arrange(const Attention& a, const int32_t* item, int head, int strip, int at, Arranged to) {
    int D = a.head_dim, words = PAIRS ? D / 2 : D, bt = a.block_size, context = item[3];
    int row = D * type_bytes[a.kv_type];
    const int32_t* table = a.tables + item[2] * a.table_stride;
    uint32_t k[256], v[256];
    uint32_t* keys = to.k + (int64_t)at * words * STRIP;
    int seen = a.first_seen(context - item[1]);  // the first token that the first row sees
    for (int i = 0; i < STRIP; i++) {
        int t = strip * STRIP + i;
        if (t < context && t >= seen) {
            int64_t block = table[t / bt];
            const char *from = a.kv + block * a.block_stride + 2 * head * a.plane_stride + t % bt * row, *value = from + a.plane_stride;
            const float* scale = a.scales ? a.scales + block * a.scale_stride + 2 * head * a.scale_plane_stride + t % bt : nullptr;
            float ks = scale ? scale[0] : 1.0f, vs = scale ? scale[a.scale_plane_stride] : 1.0f;
            if (PAIRS) convert(a.kv_type, from, (bf16*)k, D, ks), convert(a.kv_type, value, (bf16*)v, D, vs);
            else convert(a.kv_type, from, (float*)k, D, ks), convert(a.kv_type, value, (float*)v, D, vs);
        } else {  // weights are 0 there, and so must values be: the pool may hold NaN, or nothing of this sequence
            memset(k, 0, sizeof k), memset(v, 0, sizeof v);
        }
        for (int w = 0; w < words; w++) keys[w * STRIP + i] = k[w];
        if (PAIRS) {
            uint16_t* values = (uint16_t*)(to.v + (int64_t)(at * STRIP + i) / 2 * D) + (t & 1);
            for (int d = 0; d < D; d++) values[2 * d] = ((uint16_t*)v)[d];
        } else {
            memcpy(to.v + (int64_t)(at * STRIP + i) * D, v, 4 * D);
        }
    }
}

struct Room {  // of one thread
    uint32_t* q;  // [ROWS][words]
    float* s;     // [ROWS][KEYS]
    uint32_t* p;  // [ROWS][KEYS (/ 2)]; for floats the same as s
    float* o;     // [ROWS][head_dim]
    float m[ROWS], l[ROWS];
};

// Turn scores of keys [from, from + n) into weights, row by row; what a row does not see, behind its own position or before
// its window, becomes 0. Scores start at key `from + before`. A score without an order, NaN or infinite, makes the sum NaN, and by that the row's result.
template <bool PAIRS>
static void softmax(const Attention& a, Room& r, int rows, int G, int position, int from, int before, int n) {
    constexpr int DEGREE = PAIRS ? 4 : 6;
    float scale = __builtin_fabsf(a.scale) * LOG2E;
    int D = a.head_dim, pairs = PAIRS ? KEYS / 2 : KEYS;
    for (int i = 0; i < rows; i++) {
        float* s = r.s + (int64_t)i * KEYS;
        float* weights = (float*)(r.p + (int64_t)i * pairs);
        int seen = position + i / G + 1 - from;
        seen = seen < 0 ? 0 : seen > n ? n : seen;
        int first = a.first_seen(position + i / G) - from, begin = first > before ? first / W * W : before;
        if (begin >= seen) {
            memset((char*)weights + before * (PAIRS ? 2 : 4), 0, (size_t)(n - before) * (PAIRS ? 2 : 4));
            continue;
        }
        int full = (seen + W - 1) / W * W;
        for (int k = begin; k < first; k++) s[k] = -__builtin_inff();
        for (int k = seen; k < full; k++) s[k] = -__builtin_inff();
        memset((char*)weights + before * (PAIRS ? 2 : 4), 0, (size_t)(begin - before) * (PAIRS ? 2 : 4));
        vf top = splat(-__builtin_inff()), l = {};
        for (int k = begin; k < full; k += W) top = vmax(top, load(s + k));
        float m = max_of(top) * scale;
        if (m > r.m[i]) {
            float alpha = exp2v<6>(splat(r.m[i] - m))[0];
            float* o = r.o + (int64_t)i * D;
            for (int d = 0; d < D; d += W) store(o + d, load(o + d) * alpha);
            r.l[i] *= alpha;
            r.m[i] = m;
        }
        m = r.m[i];
        for (int k = begin; k < full; k += W) {
            vf x = load(s + k) * scale - m;
            if (k + W > seen) x = first_lanes(seen - k) ? x : splat(-__builtin_inff());
            vf e = exp2v<DEGREE>(x);
            l += e;
            if (PAIRS) narrow((bf16*)weights + k, e);
            else store(weights + k, e);
        }
        memset((char*)weights + full * (PAIRS ? 2 : 4), 0, (size_t)(n - full) * (PAIRS ? 2 : 4));
        r.l[i] += sum(l);
    }
}

// Rows [first, first + rows) of one sequence and head (row = token * G + head of the group); `arranged`: the first key that is.
template <bool PAIRS>
static void attend(const Attention& a, const int32_t* item, int head, int first, int rows, int arranged, Arranged kv, Room& r) {
    int G = a.heads / a.kv_heads, D = a.head_dim, words = PAIRS ? D / 2 : D, bytes = type_bytes[a.q_type];
    // Tiles begin with whole tokens, see below: row i belongs to token first / G + i / G.
    for (int i = 0; i < rows; i++) {
        int row = first + i;
        const char* q = a.q + ((item[0] + row / G) * a.q_stride + ((int64_t)head * G + row % G) * D) * bytes;
        float sign = a.scale < 0 ? -1.0f : 1.0f;
        if (PAIRS) convert(a.q_type, q, (bf16*)(r.q + i * words), D, sign);
        else convert(a.q_type, q, (float*)(r.q + i * words), D, sign);
        r.m[i] = a.sink(head * G + row % G), r.l[i] = a.sinks ? 1 : 0;
    }
    memset(r.o, 0, sizeof(float) * rows * D);
    int position = item[3] - item[1] + first / G;  // of the first row
    int end = position + (rows - 1) / G + 1;       // keys that any row sees
    int first_key = a.first_seen(position) / STRIP * STRIP;  // that any row sees, or of its strip
    for (int from = first_key / KEYS * KEYS; from < end; from += KEYS) {
        int n = end - from < KEYS ? end - from : KEYS, before = first_key > from ? first_key - from : 0;
        for (int k = before; k < n; k += STRIP) {
            const uint32_t* strip = kv.k + (int64_t)(from + k - arranged) * words;
            gemm_rows<PAIRS>(r.q, words, strip, STRIP, r.s + k, KEYS, rows, words, STRIP, false);
        }
        n = (n + STRIP - 1) / STRIP * STRIP;
        softmax<PAIRS>(a, r, rows, G, position, from, before, n);
        int unit = PAIRS ? 2 : 1, depth = (n - before) / unit;
        const uint32_t* values = kv.v + (int64_t)((from + before - arranged) / unit) * D;
        for (int d = 0; d < D; d += WIDTH) {
            int width = D - d < WIDTH ? D - d : (int)WIDTH;
            gemm_rows<PAIRS>(r.p + before / unit, KEYS / unit, values + d, D, r.o + d, D, rows, depth, width, true);
        }
    }
    for (int i = 0; i < rows; i++) {
        int row = first + i;
        int64_t to = (item[0] + row / G) * a.out_stride + ((int64_t)head * G + row % G) * D;
        float inverse = 1.0f / r.l[i];
        for (int d = 0; d < D; d += W) put(a.q_type, a.out, to + d, load(r.o + (int64_t)i * D + d) * inverse);
    }
}

template <bool PAIRS> static Room* room_of(const Attention& a, Memory& memory) {
    int D = a.head_dim, words = PAIRS ? D / 2 : D;
    size_t need = sizeof(Room) + 4 * ROWS * (size_t)(words + KEYS + (PAIRS ? KEYS / 2 : 0) + D) + 5 * 64;
    char* p = (char*)memory.get(need);
    if (!p) return nullptr;
    Room* r = (Room*)p;
    auto take = [&](size_t count) {
        p = (char*)(((uintptr_t)p + 63) & ~(uintptr_t)63);
        char* result = p;
        p += 4 * count;
        return result;
    };
    p += sizeof(Room);
    r->q = (uint32_t*)take((size_t)ROWS * words);
    r->s = (float*)take(ROWS * KEYS);
    r->p = PAIRS ? (uint32_t*)take(ROWS * KEYS / 2) : (uint32_t*)r->s;
    r->o = (float*)take((size_t)ROWS * D);
    return r;
}

struct Unit { int64_t item; int head, seen; int64_t strips, tiles, strip0, tile0; Arranged kv; };  // seen: strips from this one on

template <bool PAIRS> static int prefill(const Attention& a, int threads) {
    int G = a.heads / a.kv_heads, D = a.head_dim;
    int tokens = G >= ROWS ? 1 : ROWS / G;  // of one tile: whole tokens
    int64_t word_bytes = PAIRS ? 2 : 4, all = a.n * a.kv_heads;
    static thread_local Memory memory, listed;
    Unit* units = (Unit*)listed.get(sizeof(Unit) * (all ? all : 1));
    if (!units) return 1;
    for (int64_t begin = 0, end; begin < all; begin = end) {
        int64_t bytes = 0, strips = 0, tiles = 0;
        for (end = begin; end < all; end++) {
            const int32_t* item = a.items + 4 * (end / a.kv_heads);
            int seen = a.first_seen(item[3] - item[1]) / STRIP;
            Unit u{end / a.kv_heads, (int)(end % a.kv_heads), seen, (item[3] + STRIP - 1) / STRIP - seen, (item[1] + tokens - 1) / tokens, strips, tiles, {}};
            int64_t more = u.strips * STRIP * D * word_bytes * 2;
            if (end > begin && bytes + more > ARRANGED_BYTES) break;
            bytes += more, strips += u.strips, tiles += u.tiles;
            units[end - begin] = u;
        }
        int64_t count = end - begin;
        char* p = (char*)memory.get((size_t)bytes + 64);
        if (!p) return 1;
        for (int64_t i = 0; i < count; i++) {
            int64_t half = units[i].strips * STRIP * D * word_bytes;
            units[i].kv = {(uint32_t*)p, (uint32_t*)(p + half)};
            p += 2 * half;
        }
        auto unit_at = [&](int64_t i, auto first) {
            int64_t low = 0, high = count;
            while (high - low > 1) {
                int64_t middle = (low + high) / 2;
                if (first(units[middle]) <= i) low = middle;
                else high = middle;
            }
            return units[low];
        };
        parallel(strips, threads, [&](int64_t i) {
            Unit u = unit_at(i, [](const Unit& x) { return x.strip0; });
            int at = (int)(i - u.strip0);
            arrange<PAIRS>(a, a.items + 4 * u.item, u.head, u.seen + at, at, u.kv);
        });
        std::atomic<int> failed{0};
        parallel(tiles, threads, [&](int64_t i) {
            static thread_local Memory mine;
            Room* r = room_of<PAIRS>(a, mine);
            if (!r) { failed = 1; return; }
            Unit u = unit_at(i, [](const Unit& x) { return x.tile0; });
            const int32_t* item = a.items + 4 * u.item;
            int64_t tile = u.tiles - 1 - (i - u.tile0);  // the longest first
#if defined(MP_TILES)
            TilesInUse tiles_in_use;
#endif
            int first = (int)tile * tokens * G, rows = item[1] * G - first < tokens * G ? item[1] * G - first : tokens * G;
            // More heads than a tile has rows: in parts, each of one token.
            for (int at = 0; at < rows; at += ROWS)
                attend<PAIRS>(a, item, u.head, first + at, rows - at < ROWS ? rows - at : ROWS, u.seen * STRIP, u.kv, *r);
        });
        if (failed) return 1;
    }
    return 0;
}

extern "C" int mp_prefill(const Attention* a, int threads) {
#if defined(MP_PAIRS)
    if (in_bf16(*a)) return prefill<true>(*a, threads);
#endif
    return prefill<false>(*a, threads);
}
