// Decode attention straight out of the paged pool: one query row per sequence, split over the KV length.
//
// A task is a split of one sequence: 512 tokens of the context from the first seen on, some key/value heads. It attends to its
// tokens in tiles of 64 with a running softmax (Milakov and Gimelshein 2018; split and reduction as in Dao et al.,
// "Flash-Decoding", 2023). How a sequence is divided depends only on its length and the window, so its result does not depend on the batch.
//
//              blocks of the pool (e.g. 16 tokens each, anywhere in memory)
//            | b7 | b2 | b9 | b4 | b1 | b8 | ...            | b3 |
//            |<---- tile: 64 ---->|<-- tile -->| ...             |
//   head 0   |   step 0           |  step 2    |                 |
//   head 1   |   step 1           |  step 3    |                 |   steps of a split with heads [0, 2)
//   head 2   |                                                   |
//   head 3   |              another task                         |
//            |<-------------- split: 512 tokens ---------------->|<- next split ...
//
// Splits of a sequence leave unfinished rows (maximum, sum of weights, weighted values), which `joined` adds up in order.
#include "bytes.h"
#include "parallel.h"
#include "pool.h"
#include "products.h"

enum { SPLIT = 512 };
enum { TOUCH = 32 * 4096 };  // bytes of the pool whose pages' addresses are translated at once

template <class C> INLINE int query_width(const C*, int D) { return D; }  // elements that a query's row takes

template <int HB, class C>
static __attribute__((noinline)) void heads_of(const C* q, const Tile<C>& t, const Attention& a, const Running& r) {
    float s[HB * ROW] __attribute__((aligned(64)));
    C p[HB * TILE] __attribute__((aligned(64)));
    float fade[W];
    scores<HB>(q, t, a.head_dim, s);
    softmax<HB>(s, t, __builtin_fabsf(a.scale) * LOG2E, r, fade, p);
    values_row<HB>(p, t, a.head_dim, fade, r.o, r.width);
}
template <int HB, class C>
INLINE void block_of(int heads, const C* q, const Tile<C>& t, const Attention& a, const Running& r) {
    if constexpr (HB > 1) if (heads < HB) return block_of<HB - 1>(heads, q, t, a, r);
    heads_of<HB>(q, t, a, r);
}

// What a tile's weights, 1 at most, are in the type of its products: in fixed point FIXED_ONE is the largest scale.
template <class C> INLINE void weigh(Tile<C>&) {}
#if defined(MP_BF16)
INLINE void weigh(Tile<fixed>& t) {
    vi top = {};
    float* scale = t.scales->v;
    for (int k = 0; k < t.n; k += W) top = imax(top, load_as<vi>(scale + k));
    float most = largest(top), times = most > 0 ? FIXED_ONE / most : 0;
    for (int k = 0; k < t.n; k += W) store(scale + k, load(scale + k) * times);
    t.weight_unit = most / FIXED_ONE;
}
#endif

// f(first token, how many, block, slot) for each block of tokens [begin, end).
template <class F> INLINE void each_block(const Attention& a, const int32_t* table, int begin, int end, const F& f) {
    int bt = a.block_size;
    for (int at = begin; at < end;) {
        int slot = at % bt, count = bt - slot < end - at ? bt - slot : end - at;
        f(at - begin, count, (int64_t)table[at / bt], slot);
        at += count;
    }
}
// Where the rows of tokens [begin, end) of one head lie.
INLINE void find(Rows& t, const Attention& a, const int32_t* table, int head, int begin, int end) {
    int64_t row = a.head_dim * type_bytes[a.kv_type], plane = a.plane_stride;
    t.n = end - begin;
    each_block(a, table, begin, end, [&](int k, int count, int64_t block, int slot) {
        const char* keys = a.kv + block * a.block_stride + 2 * head * plane + slot * row;
        for (int i = 0; i < count; i++) t.k[k + i] = keys + i * row, t.v[k + i] = keys + plane + i * row;
    });
    for (int k = t.n; k < TILE + W; k++) t.k[k] = t.k[t.n - 1], t.v[k] = t.v[t.n - 1];
}
INLINE void find(Scales& t, const Attention& a, const int32_t* table, int head, int begin, int end) {
    each_block(a, table, begin, end, [&](int k, int count, int64_t block, int slot) {
        const float* scale = a.scales + block * a.scale_stride + 2 * head * a.scale_plane_stride + slot;
        memcpy(t.k + k, scale, 4 * count), memcpy(t.v + k, scale + a.scale_plane_stride, 4 * count);
    });
    for (int k = end - begin; k % W; k++) t.k[k] = 1, t.v[k] = 0;
}

// Tokens [begin, end) of one sequence for heads [head0, head1). Its steps are a tile of one head each, all
// heads of a tile before the next.
struct Split {
    const int32_t* item; const int32_t* table;
    int begin, end, head0, head1;
    int heads() const { return head1 - head0; }
    int steps() const { return (end - begin + TILE - 1) / TILE * heads(); }
    int first(int step) const { return begin + step / heads() * TILE; }
    int last(int step) const { return first(step) + TILE < end ? first(step) + TILE : end; }
    // The rows of a step's tile, of the split's first head.
    void locate(Rows& rows, const Attention& a, int step) const { find(rows, a, table, head0, first(step), last(step)); }
    void locate(Scales& scales, const Attention& a, int step) const {
        find(scales, a, table, head0 + step % heads(), first(step), last(step));
    }
    int64_t shift(const Attention& a, int step) const {  // to the rows of the step's head
        return step % heads() * 2 * a.plane_stride;
    }
    // Scales are read before their rows are worked on, and are no part of any stream.
    __attribute__((always_inline)) void fetch_scales(const Attention& a, int step) const {
        each_block(a, table, first(step), last(step), [&](int, int count, int64_t block, int slot) __attribute__((always_inline)) {
            const float* scale = a.scales + block * a.scale_stride + (head0 + step % heads()) * 2 * a.scale_plane_stride + slot;
            for (int i = 0; i < count; i += 16) __builtin_prefetch(scale + i, 0, 3), __builtin_prefetch(scale + a.scale_plane_stride + i, 0, 3);
        });
    }
    // Has the addresses of the pages of tokens [from, to) translated before their rows are fetched: blocks lie anywhere
    // in the pool, on small pages, and a fetch that waits for its translation keeps those behind it waiting. Many at
    // once, as their waits then overlap. Always inline, as all that fetches is.
    __attribute__((always_inline)) void touch(const Attention& a, int from, int to) const {
        int bt = a.block_size;
        int64_t bytes = heads() * 2 * a.plane_stride;  // scales lie behind each plane
        if (to > end) to = end;
        for (int block = from / bt; block * bt < to; block++) {
            const char* row = a.kv + table[block] * a.block_stride + head0 * 2 * a.plane_stride;
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
    float most = largest(top);
    put_query(row, most > 0 ? FIXED_ONE / most : 0, to, D);
    return most == 0 ? 1.0f : most / FIXED_ONE;  // never 0, by which minus infinity must not be multiplied
}
#endif

// A split's queries in C; its rows start empty.
template <class C> INLINE void start(const Attention& a, const Split& split, const Running& all, C* queries) {
    bool sinks = a.sinks && split.begin == a.first_seen(split.item[3] - 1);  // in a sequence's first split
    int G = a.heads / a.kv_heads, D = a.head_dim, bytes = type_bytes[a.q_type], rows = split.heads() * G, stride = query_width(queries, D);
    const char* q = a.q + (split.item[0] * a.q_stride + (int64_t)split.head0 * G * D) * bytes;
    for (int r = 0; r < rows; r++) {
        all.q_scale[r] = query(a.q_type, q + (int64_t)r * D * bytes, queries + r * stride, D, a.scale < 0 ? -1.0f : 1.0f);
        all.top[r] = sinks ? a.sink(split.head0 * G + r) : -__builtin_inff();
        store(all.sums + r * W, (vf){sinks ? 1.0f : 0.0f});
    }
    memset(all.o, 0, sizeof(float) * rows * all.width);
}

// Computes one split. Meanwhile fetches the first tile of `following`, which the same thread computes next; null: none.
template <class C>
static void attend_split(const Attention& a, const Split& split, const Split* following, const Running& all, C* queries) {
    int begin = split.begin, end = split.end, G = a.heads / a.kv_heads;
    start(a, split, all, queries);
    Rows found[2];  // of the tile that is worked on, and of the next
    Scales scales;
    Tile<C> t;
    t.row_bytes = a.head_dim * type_bytes[a.kv_type];
    t.scales = a.scales ? &scales : nullptr;
    int heads = split.heads(), steps = split.steps();
    int block_bytes = heads * 2 * (int)a.plane_stride, touched = begin;
    int span = block_bytes < TOUCH ? TOUCH / block_bytes * a.block_size : a.block_size;
    split.locate(found[0], a, 0);
    t.next = {&found[0], 0};
    for (int step = 0; step < steps; step++) {
        for (int last = begin + (step / heads + 2) * TILE; touched < last && touched < end; touched += span)
            split.touch(a, touched, touched + span);
        (Place&)t = t.next;
        t.n = t.rows->n;
        Rows* other = &found[t.rows == &found[0]];
        if (step + 1 < steps) {
            if ((step + 1) % heads == 0) split.locate(*other, a, step + 1);
            t.next = {(step + 1) % heads ? t.rows : other, split.shift(a, step + 1)};
        } else if (following) {
            following->touch(a, following->begin, following->begin + span);
            following->locate(*other, a, 0);
            t.next = {other, 0};
        }
        if (a.scales) {
            split.locate(scales, a, step);
            if (step + 2 < steps) split.fetch_scales(a, step + 2);
            else if (following && step + 2 - steps < following->steps()) following->fetch_scales(a, step + 2 - steps);
            weigh(t);
        }
        Place next = t.next;
        for (int r = step % heads * G, last = r + G; r < last;) {
            int block = last - r < HB_MAX<C> ? last - r : HB_MAX<C>;
            block_of<HB_MAX<C>>(block, queries + r * query_width(queries, a.head_dim), t, a, all.from(r));
            t.next = t;
            r += block;
        }
        t.next = next;
    }
}

// One row of o, by its sum, to the result.
template <class C> INLINE void finish(const Attention& a, const int32_t* item, int head, float l, const float* o) {
    float inverse = 1.0f / l, values[16];
    int64_t to = item[0] * a.out_stride + (int64_t)head * a.head_dim;
    for (int d = 0; d < a.head_dim; d += 16) {
        unpad((const C*)nullptr, o, d, values);
        for (int i = 0; i < 16; i += W) put(a.q_type, a.out, to + d + i, load(values + i) * inverse);
    }
}

// Adds up what `count` splits know of one row, each `apart` floats behind the other, into the first; returns its sum of weights.
INLINE float joined(const Running& row, int64_t count, int64_t apart) {
    float top = *row.top;
    vf l = {};
    for (int64_t c = 1; c < count; c++) top = top > row.top[c * apart] ? top : row.top[c * apart];
    for (int64_t c = 0; c < count; c++) {
        vf weight = exp2v<6>(splat(row.top[c * apart] - top));
        l += load(row.sums + c * apart) * weight;
        const float* add = row.o + c * apart;
        for (int d = 0; d < row.width; d += W) {
            vf x = load(add + d) * weight;
            store(row.o + d, c ? load(row.o + d) + x : x);
        }
    }
    return sum(l);
}

template <class C> static int decode(const Attention& a, int threads) {
    int width = padded((const C*)nullptr, a.head_dim), G = a.heads / a.kv_heads;
    int64_t splits = 0;
    auto first_of = [&](int64_t i) { return a.first_seen(a.items[4 * i + 3] - 1); };
    auto splits_of = [&](int64_t i) { return (a.items[4 * i + 3] - first_of(i) + SPLIT - 1) / SPLIT; };
    for (int64_t i = 0; i < a.n; i++) splits += splits_of(i);
    // All heads of a token lie together: one task takes as many as leave work for everyone.
    int share = a.kv_heads;
    while (share > 1 && splits * ((a.kv_heads + share - 1) / share) < 8 * threads) share = (share + 1) / 2;
    int shares = (a.kv_heads + share - 1) / share;
    static thread_local Memory memory;
    int64_t H = a.heads, row_floats = Running::floats(H, width);  // of one split's unfinished result
    int64_t* first = (int64_t*)memory.get((a.n + 1 + splits) * 8 + splits * row_floats * 4 + 64);
    if (!first) return 1;
    int64_t* owner = first + a.n + 1;
    float* unfinished = (float*)(((uintptr_t)(owner + splits) + 63) & ~(uintptr_t)63);
    first[0] = 0;
    for (int64_t i = 0, at = 0; i < a.n; i++) {
        first[i + 1] = first[i] + splits_of(i);
        while (at < first[i + 1]) owner[at++] = i;
    }
    std::atomic<int> failed{0};
    // Each thread claims its next task before it computes one: the first tile is fetched by then.
    auto split_of = [&](int64_t task) {
        int64_t split = task / shares, i = owner[split];
        const int32_t* item = a.items + 4 * i;
        int head0 = (int)(task % shares) * share, begin = first_of(i) + (int)(split - first[i]) * SPLIT;
        return Split{item, a.tables + item[2] * a.table_stride, begin, begin + SPLIT < item[3] ? begin + SPLIT : item[3],
                     head0, head0 + share < a.kv_heads ? head0 + share : a.kv_heads};
    };
    parallel_ahead(splits * shares, threads, [&](int64_t task, int64_t after) {
        bool more = after < splits * shares;
        Split current = split_of(task);
        Split following = split_of(more ? after : task);
        int64_t split = task / shares, i = owner[split];
        int head0 = current.head0, head1 = current.head1;
        static thread_local Memory query_memory;
        C* queries = (C*)query_memory.get((int64_t)(head1 - head0) * G * query_width((C*)nullptr, a.head_dim) * sizeof(C));
        if (!queries) { failed = 1; return; }
        Running rows = Running::in(unfinished + split * row_floats, H, width).from(head0 * G);
        attend_split<C>(a, current, more ? &following : nullptr, rows, queries);
        if (first[i + 1] - first[i] > 1) return;
        for (int r = 0; r < (head1 - head0) * G; r++)
            finish<C>(a, current.item, head0 * G + r, sum(load(rows.sums + r * W)), rows.o + r * width);
    });
    if (failed) return 1;
    if (splits > a.n) parallel(a.n, threads, [&](int64_t i) {
        int64_t count = first[i + 1] - first[i];
        if (count > 1) for (int64_t r = 0; r < H; r++) {
            Running row = Running::in(unfinished + first[i] * row_floats, H, width).from(r);
            float l = joined(row, count, row_floats);
            finish<C>(a, a.items + 4 * i, (int)r, l, row.o);
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
    switch (a->kv_type) {
        case F32: return decode<float_over<float>>(*a, threads);
        case BF16: return decode<float_over<bf16>>(*a, threads);
        case F16: return decode<float_over<f16>>(*a, threads);
        case I8: return decode<float_over<int8_t>>(*a, threads);
        default: return decode<float_over<f8>>(*a, threads);
    }
}
