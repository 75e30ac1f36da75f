// Decode attention straight out of the paged pool: one query row per sequence, split over the KV length.
//
// A task is (sequence, 512 tokens of context at absolute positions, some key/value heads). It walks its tokens in tiles
// of 64 with a running softmax (Milakov and Gimelshein 2018; split and reduction as in Dao et al., "Flash-Decoding",
// 2023). How a sequence is divided depends on nothing but its length, so its result does not depend on the batch.
#include "parallel.h"
#include "pool.h"
#include "products.h"

enum { SPLIT = 512, UNIT = 1 + W, STATE };  // of a row's state: its query's unit is behind the sums
enum { TOUCH = 32 * 4096 };  // bytes of the pool whose pages' addresses are translated at once

// Running softmax of one head over one tile: s becomes weights p, o is scaled to the new maximum. state: the maximum,
// then W sums of weights. A score without an order, NaN or infinite, makes the sums NaN, and by that the row's result.
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
    vi odd = {};
    for (int k = 0; k < full; k += W) {
        vf x = load(s + k) - m;
        odd |= (x != x) & first_lanes(t.n - k);
        vf e = exp2v<DEGREE>(x);
        l += e;
        if (scaled) e = e * load(t.v_scale + k);
        narrow(p + k, e);
    }
    store(state + 1, l + nan_where(odd));
}

template <int HB, class C>
static __attribute__((noinline)) void heads_of(const C* q, const Tile<C>& t, const Attention& a, float* state, float* o, int width) {
    float s[HB * ROW] __attribute__((aligned(64)));
    C p[HB * TILE] __attribute__((aligned(64)));
#if defined(MP_BF16)
    if constexpr (sizeof(C) == 2 && HB >= 5) scores_turned<HB>(q, t, a.head_dim, s);
    else
#endif
    scores<HB>(q, t, a.head_dim, s);
    for (int h = 0; h < HB; h++) {
        float scale = __builtin_fabsf(a.scale) * LOG2E * state[STATE * h + UNIT];
        softmax(s + h * ROW, t, a.scales, scale, state + STATE * h, o + h * width, width, p + h * TILE);
    }
    values_row<HB>(p, t, a.head_dim, o, width);
}
template <int HB, class C>
INLINE void block_of(int heads, const C* q, const Tile<C>& t, const Attention& a, float* state, float* o, int width) {
    if constexpr (HB > 1) if (heads < HB) return block_of<HB - 1>(heads, q, t, a, state, o, width);
    heads_of<HB>(q, t, a, state, o, width);
}

// A row in float, where products are in float and the pool is not.
INLINE const char* row_of(int type, const char* from, float* to, int D) {
    convert(type, from, to, D);
    return (const char*)to;
}

// What a tile's weights, 1 at most, are in the type of its products: in fixed point FIXED_ONE is the largest scale.
template <class C> INLINE void weigh(Tile<C>&) {}
#if defined(MP_BF16)
INLINE void weigh(Tile<fixed>& t) {
    vi top = {};
    for (int k = 0; k < t.n; k += W) top = imax(top, load_as<vi>(t.v_scale + k));
    float most = largest(top), times = most > 0 ? FIXED_ONE / most : 0;
    for (int k = 0; k < t.n; k += W) store(t.v_scale + k, load(t.v_scale + k) * times);
    t.weight_unit = most / FIXED_ONE;
}
#endif

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
            const float* scale = a.scales + block * a.scale_stride + (int64_t)head * 2 * bt + slot;
            memcpy(t.k_scale + (at - begin), scale, 4 * count);
            memcpy(t.v_scale + (at - begin), scale + bt, 4 * count);
        }
        at += count;
    }
    repeat_last(t);
    if (a.scales) for (int k = t.n; k < (t.n + W - 1) / W * W; k++) t.k_scale[k] = 1, t.v_scale[k] = 0;
}

// Tokens [begin, end) of one sequence for heads [head0, head1): one split. Its steps are a tile of one head each, all
// heads of a tile before the next.
struct Part {
    const int32_t* item; const int32_t* table;
    int begin, end, head0, head1;
    int heads() const { return head1 - head0; }
    int steps() const { return (end - begin + TILE - 1) / TILE * heads(); }
    void locate(Rows& rows, const Attention& a, int step) const {
        int at = begin + step / heads() * TILE;
        find(rows, a, table, head0 + step % heads(), at, at + TILE < end ? at + TILE : end);
    }
    // Has the addresses of the pages of tokens [from, to) translated before their rows are fetched: blocks lie anywhere
    // in the pool, on small pages, and a fetch that waits for its translation keeps those behind it waiting. Many at
    // once, as their waits then overlap. Always inline, as all that fetches is.
    __attribute__((always_inline)) void touch(const Attention& a, int from, int to) const {
        int bt = a.block_tokens;
        int64_t plane = (int64_t)bt * a.head_dim * type_bytes[a.kv_type], bytes = heads() * 2 * plane;
        if (to > end) to = end;
        for (int block = from / bt; block * bt < to; block++) {
            const char* row = a.kv + table[block] * a.block_stride + head0 * 2 * plane;
            for (int64_t b = 0; b < bytes; b += 4096) __builtin_prefetch(row + b, 0, 1);
            __builtin_prefetch(row + bytes - 1, 0, 1);
        }
    }
};

// One query in the type of its products; returns what 1 of it stands for.
template <class C> INLINE float query(int type, const char* from, C* to, int D, float sign) {
    convert(type, from, to, D, sign);
    return 1;
}
#if defined(MP_BF16)
INLINE float query(int type, const char* from, bf16_f8* to, int D, float sign) { return query(type, from, (bf16*)to, D, sign); }
INLINE float query(int type, const char* from, fixed* to, int D, float sign) {
    float row[256];
    vi top = {};
    convert(type, from, row, D, sign);
    for (int d = 0; d < D; d += W) top = imax(top, load_as<vi>(row + d) & 0x7fffffff);
    float most = largest(top), times = most > 0 ? FIXED_ONE / most : 0;
    for (int d = 0; d < D; d += W) narrow(to + d, load(row + d) * times);
    return most == 0 ? 1.0f : most / FIXED_ONE;  // never 0, by which minus infinity must not be multiplied
}
#endif

// A part's queries in C, with states and results of nothing yet.
template <class C> INLINE void start(const Attention& a, const Part& part, float* state, float* o, int width, C* queries) {
    int G = a.heads / a.kv_heads, D = a.head_dim, bytes = type_bytes[a.q_type], rows = part.heads() * G;
    const char* q = a.q + (part.item[0] * a.q_stride + (int64_t)part.head0 * G * D) * bytes;
    for (int r = 0; r < rows; r++) {
        float unit = query(a.q_type, q + (int64_t)r * D * bytes, queries + r * D, D, a.scale < 0 ? -1.0f : 1.0f);
        state[STATE * r + UNIT] = unit;
        state[STATE * r] = -__builtin_inff();
        store(state + STATE * r + 1, (vf){});
    }
    memset(o, 0, sizeof(float) * rows * width);
}

// Computes one part, and meanwhile fetches the first tile of what the same thread does after it, unless that is null.
template <class C>
static void walk(const Attention& a, const Part& part, const Part* then, float* state, float* o, int width, C* queries, C* buffer) {
    int begin = part.begin, end = part.end, G = a.heads / a.kv_heads, D = a.head_dim;
    start(a, part, state, o, width, queries);
    Rows found[2];  // this step's and the next's
    Tile<C> t;
    t.row_bytes = D * type_bytes[a.kv_type];
    t.part = 32 * type_bytes[a.kv_type];
    int heads = part.heads(), steps = part.steps();
    int block_bytes = a.block_tokens * heads * 2 * t.row_bytes, touched = begin;
    int span = block_bytes < TOUCH ? TOUCH / block_bytes * a.block_tokens : a.block_tokens;
    part.locate(found[0], a, 0);
    for (int step = 0; step < steps; step++) {
        for (int last = begin + (step / heads + 2) * TILE; touched < last && touched < end; touched += span)
            part.touch(a, touched, touched + span);
        (Rows&)t = found[step % 2];
        weigh(t);
        Rows* next = &found[(step + 1) % 2];
        t.next = next;
        if (step + 1 < steps) {
            part.locate(*next, a, step + 1);
        } else if (then) {
            then->touch(a, then->begin, then->begin + span);
            then->locate(*next, a, 0);
        } else {
            t.next = &t;
        }
        if constexpr (sizeof(C) == 4) if (a.kv_type != F32) {
            for (int k = 0; k < t.n; k++) {
                t.k[k] = row_of(a.kv_type, t.k[k], buffer + k * D, D);
                t.v[k] = row_of(a.kv_type, t.v[k], buffer + (TILE + k) * D, D);
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

template <class C> static int decode(const Attention& a, int threads) {
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
    // Each thread claims its next task before it computes one: the first tile is fetched by then.
    auto part_of = [&](int64_t task) {
        int64_t split = task / shares, i = owner[split];
        const int32_t* item = a.items + 4 * i;
        int head0 = (int)(task % shares) * share, begin = (int)(split - first[i]) * SPLIT;
        return Part{item, a.tables + item[2] * a.table_stride, begin, begin + SPLIT < item[3] ? begin + SPLIT : item[3],
                    head0, head0 + share < a.kv_heads ? head0 + share : a.kv_heads};
    };
    parallel_ahead(splits * shares, threads, [&](int64_t task, int64_t after) {
        bool more = after < splits * shares;
        Part now = part_of(task), then = part_of(more ? after : task);
        int64_t split = task / shares, i = owner[split];
        int head0 = now.head0, head1 = now.head1;
        static thread_local Memory mine;
        C* buffer = (C*)mine.get(((int64_t)(head1 - head0) * G + 2 * TILE) * a.head_dim * sizeof(C) + 64);
        if (!buffer) { failed = 1; return; }
        float* o = parts + split * part + head0 * G * width;
        float* state = parts + split * part + H * width + head0 * G * STATE;
        walk<C>(a, now, more ? &then : nullptr, state, o, width, buffer + 2 * TILE * a.head_dim, buffer);
        if (first[i + 1] - first[i] > 1) return;
        for (int r = 0; r < (head1 - head0) * G; r++)
            finish<C>(a, now.item, head0 * G + r, sum(load(state + r * STATE + 1)), o + r * width);
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
    if (in_bf16(*a)) switch (a->kv_type) {
        case BF16: return decode<bf16>(*a, threads);
        case I8: return decode<fixed>(*a, threads);
        default: return decode<bf16_f8>(*a, threads);
    }
#endif
    return decode<float>(*a, threads);
}
