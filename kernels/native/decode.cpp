// Decode attention straight out of the paged pool: one query row per sequence, split over the KV length.
//
// A task is (sequence, 512 tokens of context at absolute positions, some key/value heads). It walks its tokens in tiles
// of 64 with a running softmax (Milakov and Gimelshein 2018; split and reduction as in Dao et al., "Flash-Decoding",
// 2023). How a sequence is divided depends on nothing but its length, so its result does not depend on the batch.
#include "parallel.h"
#include "pool.h"

enum { TILE = 64, SPLIT = 512, STATE = 1 + W };
enum { ROW = TILE + W };  // of scores: the last group of keys may write past the tile's end
// Heads of a group that are computed together: bf16 products are quick enough to be worth more registers.
template <class C> constexpr int HB_MAX = sizeof(C) == 2 ? 8 : 4;

// One tile: where its rows lie (in the pool, or in `buffer` once converted), and what they are multiplied with.
struct Rows {
    const char* k[TILE + W]; const char* v[TILE + W];  // from n on: the last one
    float k_scale[TILE], v_scale[TILE];
    int n;
};
template <class C> struct Tile : Rows {
    const Rows* next;  // what is worked on after this, fetched meanwhile; itself where there is nothing
    int row_bytes;
    int part;          // bytes of 32 elements
    const C* key(int i) const { return (const C*)k[i]; }
    const C* value(int i) const { return (const C*)v[i]; }
    void fetch(const char* const* rows, int i) const {
        for (int b = 0; b < row_bytes; b += 64) __builtin_prefetch(rows[i] + b, 0, 1);
    }
    // 32 elements from d on: of row i of the next, into the second cache, and of a row of this one into the first.
    // Few at a time, between products: what finds all of the cache's requests taken is dropped.
    void fetch_part(const char* const* far, const char* near, int i, int d) const {
        int at = part * (d >> 5);
        __builtin_prefetch(far[i] + at, 0, 1);
        __builtin_prefetch(near + at, 0, 3);
    }
};

// ---- scores: s[h][ROW] = q[h] . k[t] for HB heads, KB keys at a time; HB * KB = W ----
template <int HB> INLINE void scores(const float* q, const Tile<float>& t, int D, float* s) {
    constexpr int KB = W / HB;  // lane h * KB + k of the sums; the last lanes may stay idle
    for (int at = 0; at < t.n; at += KB) {
        vf acc[W] = {};
        const float* rows[KB];
        for (int k = 0; k < KB; k++) t.fetch(t.next->k, at + k);
        for (int k = 0; k < KB; k++) rows[k] = t.key(at + k);
        for (int d = 0; d < D; d += W) {
            vf key[KB];
            for (int k = 0; k < KB; k++) key[k] = load(rows[k] + d);
            for (int h = 0; h < HB; h++) {
                vf query = load(q + h * D + d);
                for (int k = 0; k < KB; k++) acc[h * KB + k] += query * key[k];
            }
        }
        float both[W];
        store(both, sums(acc));
        for (int h = 0; h < HB; h++) memcpy(s + h * ROW + at, both + h * KB, 4 * KB);
    }
}
// ---- o[h] += p[h] v: HB heads, NC vectors of the row at a time ----
template <int HB, int NC> INLINE void values(const float* p, const Tile<float>& t, int d, float* o, int stride) {
    vf acc[HB][NC];
    for (int h = 0; h < HB; h++) for (int c = 0; c < NC; c++) acc[h][c] = load(o + h * stride + d + c * W);
    for (int k = 0; k < t.n; k++) {
        t.fetch(t.next->v, k);
        vf value[NC];
        for (int c = 0; c < NC; c++) value[c] = load(t.value(k) + d + c * W);
        for (int h = 0; h < HB; h++) {
            vf weight = splat(p[h * TILE + k]);
            for (int c = 0; c < NC; c++) acc[h][c] += weight * value[c];
        }
    }
    for (int h = 0; h < HB; h++) for (int c = 0; c < NC; c++) store(o + h * stride + d + c * W, acc[h][c]);
}
template <int HB> INLINE void values_row(const float* p, const Tile<float>& t, int D, float* o, int stride) {
    constexpr int NC = HB > 4 ? 2 : NC_MAX;
    int d = NC * W <= D ? NC * W : W;
    if (NC * W <= D) values<HB, NC>(p, t, 0, o, stride);
    else values<HB, 1>(p, t, 0, o, stride);
    for (; d + NC * W <= D; d += NC * W) values<HB, NC>(p, t, d, o, stride);
    for (; d < D; d += W) values<HB, 1>(p, t, d, o, stride);
}
INLINE int padded(const float*, int D) { return D; }
INLINE void unpad(const float*, const float* o, int d, float* to) { memcpy(to, o + d, 64); }

#if defined(MP_BF16)
INLINE vu load32(const bf16* p, int left) {  // up to 32 elements; the rest is 0
    if (left >= 32) return load_as<vu>(p);
    return (vu)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p));
}
template <int HB> INLINE void scores(const bf16* q, const Tile<bf16>& t, int D, float* s) {
    constexpr int KB = W / HB;
    for (int at = 0; at < t.n; at += KB) {
        vf acc[W] = {};
        const bf16* rows[KB];
        for (int k = 0; k < KB; k++) t.fetch(t.next->k, at + k);
        for (int k = 0; k < KB; k++) rows[k] = t.key(at + k);
        int d = 0;
        for (; d + 32 <= D; d += 32) {
            vu key[KB];
            for (int k = 0; k < KB; k++) key[k] = load_as<vu>(rows[k] + d);
            for (int h = 0; h < HB; h++) {
                vu query = load_as<vu>(q + h * D + d);
                for (int k = 0; k < KB; k++) acc[h * KB + k] = dot2(acc[h * KB + k], query, key[k]);
            }
        }
        if (d < D) {
            for (int h = 0; h < HB; h++) {
                vu query = load32(q + h * D + d, 16);
                for (int k = 0; k < KB; k++)
                    acc[h * KB + k] = dot2(acc[h * KB + k], query, load32(rows[k] + d, 16));
            }
        }
        float both[W];
        store(both, sums(acc));
        for (int h = 0; h < HB; h++) memcpy(s + h * ROW + at, both + h * KB, 4 * KB);
    }
}
// The same with a key in each lane, for many heads: 16 keys are turned around once, and no sum crosses lanes.
template <int HB> INLINE void scores_turned(const bf16* q, const Tile<bf16>& t, int D, float* s) {
    for (int at = 0; at < t.n; at += 16) {
        vf acc[HB] = {};
        const char* const* near = at + 16 < t.n ? t.k + at + 16 : t.v;
        for (int d = 0; d < D; d += 32) {
            vu key[16];
            for (int k = 0; k < 16; k++) key[k] = load32(t.key(at + k) + d, D - d);
            turn(key);
            auto eight = [&](int from) {
#pragma GCC unroll 8
                for (int i = from; i < from + 8; i++) {
                    t.fetch_part(t.next->k + at, near[i], i, d);
                    for (int h = 0; h < HB; h++) {
                        int32_t pair;
                        memcpy(&pair, q + h * D + d + 2 * i, 4);
                        acc[h] = dot2(acc[h], (vu)_mm512_set1_epi32(pair), key[i]);
                    }
                }
            };
            eight(0);
            if (D - d >= 32) eight(8);
            else for (int i = 8; i < 16; i++) t.fetch_part(t.next->k + at, near[i], i, d);
        }
        for (int h = 0; h < HB; h++) store(s + h * ROW + at, acc[h]);
    }
}
// Two rows at a time, interleaved: 32 elements of o lie as two vectors in the order of unpacking, until the end.
template <int HB, int NC>
INLINE void values(const bf16* p, const Tile<bf16>& t, int d, int left, float* o, int stride) {
    vf acc[HB][2 * NC];
    for (int h = 0; h < HB; h++) for (int c = 0; c < 2 * NC; c++) acc[h][c] = load(o + h * stride + d + c * W);
    for (int k = 0; k < t.n; k += 2) {
        for (int c = 0; c < NC; c++)
            for (int i = k; i < k + 2; i++) t.fetch_part(t.next->v, t.v[(i + 8) & (TILE - 1)], i, d + 32 * c);
        const bf16* a = t.value(k) + d;
        const bf16* b = t.value(k + 1) + d;  // its weight is 0
        vu value[2 * NC];
        for (int c = 0; c < NC; c++) {
            __m512i x = (__m512i)load32(a + 32 * c, left - 32 * c), y = (__m512i)load32(b + 32 * c, left - 32 * c);
            value[2 * c] = (vu)_mm512_unpacklo_epi16(x, y);
            value[2 * c + 1] = (vu)_mm512_unpackhi_epi16(x, y);
        }
        for (int h = 0; h < HB; h++) {
            int32_t pair;
            memcpy(&pair, p + h * TILE + k, 4);
            vu weight = (vu)_mm512_set1_epi32(pair);
            for (int c = 0; c < 2 * NC; c++) acc[h][c] = dot2(acc[h][c], weight, value[c]);
        }
    }
    for (int h = 0; h < HB; h++) for (int c = 0; c < 2 * NC; c++) store(o + h * stride + d + c * W, acc[h][c]);
}
template <int HB> INLINE void values_row(const bf16* p, const Tile<bf16>& t, int D, float* o, int stride) {
    constexpr int NC = HB > 4 ? 1 : 2;
    int d = 32 * NC <= D ? 32 * NC : 32;
    if (32 * NC <= D) values<HB, NC>(p, t, 0, 32 * NC, o, stride);
    else values<HB, 1>(p, t, 0, D, o, stride);
    for (; d + 32 * NC <= D; d += 32 * NC) values<HB, NC>(p, t, d, 32 * NC, o, stride);
    for (; d < D; d += 32) values<HB, 1>(p, t, d, D - d, o, stride);
}
INLINE int padded(const bf16*, int D) { return (D + 31) & ~31; }
INLINE void unpad(const bf16*, const float* o, int d, float* to) {  // 16 elements from d on
    const float* low = o + (d & ~31);
    int from = d & 16 ? 8 : 0;
    memcpy(to, low + from, 16), memcpy(to + 4, low + 16 + from, 16);
    memcpy(to + 8, low + from + 4, 16), memcpy(to + 12, low + 16 + from + 4, 16);
}
#endif

// Running softmax of one head over one tile: s becomes weights, o is scaled to the new maximum. state: the maximum,
// then W sums of weights.
template <class C>
INLINE void softmax(float* s, const Tile<C>& t, bool scaled, float scale, float* state, float* o, int width, C* p) {
    constexpr int DEGREE = sizeof(C) == 2 ? 4 : 6;
    vf top = splat(-__builtin_inff());
    int full = (t.n + W - 1) / W * W;
    for (int k = t.n; k < full; k++) s[k] = -__builtin_inff();
    for (int k = 0; k < full; k += W) {
        vf x = load(s + k) * scale;
        if (scaled) x = x * load(t.k_scale + k);
        store(s + k, x);
        top = vmax(top, x);
    }
    float m = max_of(top);
    vf l = load(state + 1);
    if (m > state[0]) {
        float alpha = exp2v<6>(splat(state[0] - m))[0];
        for (int d = 0; d < width; d += W) store(o + d, load(o + d) * alpha);
        l = l * alpha;
        state[0] = m;
    }
    m = state[0];
    for (int k = 0; k < full; k += W) {
        vf e = exp2v<DEGREE>(load(s + k) - m);
        l += e;
        if (scaled) e = e * load(t.v_scale + k);
        narrow(p + k, e);
    }
    store(state + 1, l);
}

template <int HB, class C>
static __attribute__((noinline)) void heads_of(const C* q, const Tile<C>& t, const Attention& a, float* state, float* o, int width) {
    float s[HB * ROW] __attribute__((aligned(64)));
    C p[HB * TILE] __attribute__((aligned(64)));
#if defined(MP_BF16)
    if (sizeof(C) == 2 && HB >= 5) scores_turned<HB>((const bf16*)q, (const Tile<bf16>&)t, a.head_dim, s);
    else
#endif
    scores<HB>(q, t, a.head_dim, s);
    for (int h = 0; h < HB; h++)
        softmax(s + h * ROW, t, a.scales, __builtin_fabsf(a.scale) * LOG2E, state + STATE * h, o + h * width, width, p + h * TILE);
    values_row<HB>(p, t, a.head_dim, o, width);
}
template <int HB, class C>
INLINE void block_of(int heads, const C* q, const Tile<C>& t, const Attention& a, float* state, float* o, int width) {
    if constexpr (HB > 1) if (heads < HB) return block_of<HB - 1>(heads, q, t, a, state, o, width);
    heads_of<HB>(q, t, a, state, o, width);
}

template <class C> INLINE const C* row_of(int type, const char* from, C* to, int D) {
    convert(type, from, to, D);
    return to;
}

// Keys and values are taken by the group: those after the end are the last one again, and weigh nothing.
INLINE void repeat_last(Rows& t) {
    for (int k = t.n; k < TILE + W; k++) t.k[k] = t.k[t.n - 1], t.v[k] = t.v[t.n - 1];
}

// Where the rows of tokens [begin, end) of one head lie.
INLINE void find(Rows& t, const Attention& a, const int32_t* table, int head, int begin, int end) {
    int bt = a.block_tokens, row = a.head_dim * type_bytes[a.kv_type];
    t.n = end - begin;
    for (int at = begin; at < end;) {
        int64_t block = table[at / bt];
        int slot = at % bt, count = bt - slot < end - at ? bt - slot : end - at;
        const char* keys = a.kv + block * a.block_stride + ((int64_t)head * 2 * bt + slot) * row;
        const char* vals = keys + (int64_t)bt * row;
        for (int i = 0, k = at - begin; i < count; i++, k++) t.k[k] = keys + i * row, t.v[k] = vals + i * row;
        if (a.scales) {
            const float* scale = a.scales + block * a.scale_stride + 2 * head;
            for (int k = at - begin; k < at - begin + count; k++) t.k_scale[k] = scale[0], t.v_scale[k] = scale[1];
        }
        at += count;
    }
    repeat_last(t);
    if (a.scales) for (int k = t.n; k < (t.n + W - 1) / W * W; k++) t.k_scale[k] = t.v_scale[k] = 1;
}

// Has the pages' addresses translated before their rows are fetched: blocks lie anywhere in the pool, on small pages,
// and a fetch that has to wait for its translation keeps others waiting.
INLINE void touch(const Rows& t, int row_bytes) {
    for (int k = 0; k < TILE; k += 16) {
        __builtin_prefetch(t.k[k], 0, 1);
        __builtin_prefetch(t.v[k], 0, 1);
        __builtin_prefetch(t.v[k + 15] + row_bytes - 1, 0, 1);
    }
}

// One split of one sequence for heads [head0, head1).
template <class C>
static void walk(const Attention& a, const int32_t* item, int begin, int end, int head0, int head1, bool direct,
                 float* state, float* o, int width, C* queries, C* buffer) {
    int G = a.heads / a.kv_heads, D = a.head_dim, bytes = type_bytes[a.q_type];
    const char* q = a.q + (item[0] * a.q_stride + (int64_t)head0 * G * D) * bytes;
    int rows = (head1 - head0) * G;
    for (int r = 0; r < rows; r++) {
        convert(a.q_type, q + (int64_t)r * D * bytes, queries + r * D, D, a.scale < 0 ? -1.0f : 1.0f);
        state[STATE * r] = -__builtin_inff();
        store(state + STATE * r + 1, (vf){});
    }
    memset(o, 0, sizeof(float) * rows * width);
    const int32_t* table = a.tables + item[2] * a.table_stride;
    Rows found[3];  // this step's, and the next two's
    Tile<C> t;
    t.row_bytes = D * type_bytes[a.kv_type];
    t.part = 32 * type_bytes[a.kv_type];
    int heads = head1 - head0, steps = (end - begin + TILE - 1) / TILE * heads;
    auto locate = [&](Rows& rows_, int step) {
        int at = begin + step / heads * TILE;
        find(rows_, a, table, head0 + step % heads, at, at + TILE < end ? at + TILE : end);
    };
    for (int step = 0; step < 2 && step < steps; step++) {
        locate(found[step], step);
        touch(found[step], t.row_bytes);
    }
    for (int step = 0; step < steps; step++) {
        (Rows&)t = found[step % 3];
        t.next = step + 1 < steps ? &found[(step + 1) % 3] : &t;
        if (step + 2 < steps) {
            Rows& later = found[(step + 2) % 3];
            locate(later, step + 2);
            touch(later, t.row_bytes);
        }
        if (!direct) {
            for (int k = 0; k < t.n; k++) {
                t.k[k] = (const char*)row_of(a.kv_type, t.k[k], buffer + k * D, D);
                t.v[k] = (const char*)row_of(a.kv_type, t.v[k], buffer + (TILE + k) * D, D);
            }
            repeat_last(t);
        }
        for (int r = step % heads * G, last = r + G; r < last;) {
            int block = last - r < HB_MAX<C> ? last - r : HB_MAX<C>;
            block_of<HB_MAX<C>>(block, queries + r * D, t, a, state + STATE * r, o + r * width, width);
            t.next = &t;
            r += block;
        }
    }
}

// One row of o, by its sum, to the result.
template <class C> INLINE void finish(const Attention& a, const int32_t* item, int head, float l, const float* o) {
    float inverse = 1.0f / l, part[16];
    int64_t to = item[0] * a.out_stride + (int64_t)head * a.head_dim;
    for (int d = 0; d < a.head_dim; d += 16) {
        unpad((const C*)nullptr, o, d, part);
        for (int i = 0; i < 16; i += W) put(a.q_type, a.out, to + d + i, load(part + i) * inverse);
    }
}

template <class C> static int decode(const Attention& a, bool direct, int threads) {
    int width = padded((const C*)nullptr, a.head_dim), G = a.heads / a.kv_heads;
    int64_t splits = 0;
    for (int64_t i = 0; i < a.n; i++) splits += (a.items[4 * i + 3] + SPLIT - 1) / SPLIT;
    // All heads of a token lie together: one task takes as many as leave work for everyone.
    int share = a.kv_heads;
    while (share > 1 && splits * ((a.kv_heads + share - 1) / share) < 8 * threads) share = (share + 1) / 2;
    int shares = (a.kv_heads + share - 1) / share;
    static thread_local Memory memory;
    int64_t H = a.heads, part = H * (STATE + width);  // floats of one split's unfinished result
    int64_t* first = (int64_t*)memory.get((a.n + 1 + splits) * 8 + splits * part * 4 + 64);
    if (!first) return 1;
    int64_t* owner = first + a.n + 1;
    float* parts = (float*)(((uintptr_t)(owner + splits) + 63) & ~(uintptr_t)63);
    first[0] = 0;
    for (int64_t i = 0, at = 0; i < a.n; i++) {
        first[i + 1] = first[i] + (a.items[4 * i + 3] + SPLIT - 1) / SPLIT;
        while (at < first[i + 1]) owner[at++] = i;
    }
    std::atomic<int> failed{0};
    parallel(splits * shares, threads, [&](int64_t task) {
        int64_t split = task / shares, i = owner[split];
        const int32_t* item = a.items + 4 * i;
        int head0 = (int)(task % shares) * share, head1 = head0 + share < a.kv_heads ? head0 + share : a.kv_heads;
        int begin = (int)(split - first[i]) * SPLIT, end = begin + SPLIT < item[3] ? begin + SPLIT : item[3];
        static thread_local Memory mine;
        C* buffer = (C*)mine.get(((int64_t)(head1 - head0) * G + 2 * TILE) * a.head_dim * sizeof(C) + 64);
        if (!buffer) { failed = 1; return; }
        float* o = parts + split * part + head0 * G * width;
        float* state = parts + split * part + H * width + head0 * G * STATE;
        walk<C>(a, item, begin, end, head0, head1, direct, state, o, width, buffer + 2 * TILE * a.head_dim, buffer);
        if (first[i + 1] - first[i] > 1) return;
        for (int r = 0; r < (head1 - head0) * G; r++)
            finish<C>(a, item, head0 * G + r, sum(load(state + r * STATE + 1)), o + r * width);
    });
    if (failed) return 1;
    if (splits > a.n) parallel(a.n, threads, [&](int64_t i) {
        int64_t count = first[i + 1] - first[i];
        if (count == 1) return;
        for (int64_t r = 0; r < H; r++) {
            float* o = parts + first[i] * part + r * width;
            float* state = parts + first[i] * part + H * width + r * STATE;
            float m = *state, l = 0;
            for (int64_t c = 1; c < count; c++) m = m > state[c * part] ? m : state[c * part];
            for (int64_t c = 0; c < count; c++) {
                float weight = exp2v<6>(splat(state[c * part] - m))[0];
                l += sum(load(state + c * part + 1)) * weight;
                const float* add = o + c * part;
                for (int d = 0; d < width; d += W) {
                    vf x = load(add + d) * weight;
                    store(o + d, c ? load(o + d) + x : x);
                }
            }
            finish<C>(a, a.items + 4 * i, (int)r, l, o);
        }
    });
    return 0;
}

extern "C" int mp_decode(const Attention* a, int threads) {
#if defined(MP_BF16)
    if (in_bf16(*a)) return decode<bf16>(*a, a->kv_type == BF16, threads);
#endif
    return decode<float>(*a, a->kv_type == F32, threads);
}
