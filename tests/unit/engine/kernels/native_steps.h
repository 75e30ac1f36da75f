// Whole steps, and runs of them, beside the same operations one by one: the same bits. Included by native_harness.cpp,
// which compares each of these operations with plain formulas and has the tools.
#pragma once
#include "go_on.h"

#include <deque>

static Function<L, const Model*, const Step*> step_;
static Function<L, GoOn*> go_on;
static Function<int, const Sampling*, int> sample;
static Function<int, P, P, uint64_t, L, double*> uniform;

struct Network {
    int type, H, I, heads, kv_heads, D, vocab = 150;
    float eps = 1e-5f;
    std::deque<Array> memory;
    std::vector<Layer> layers;
    Panels head;
    const char* norm;
    Model model;

    Network(int t) : type(t), H(2 * any(10, 40)), I(2 * any(10, 60)), kv_heads(any(1, 3)) {
        heads = kv_heads * any(1, 7), D = std::vector<int>{16, 48, 64}[any(0, 2)];
        bool biased = any(0, 1), normed = any(0, 1);
        for (int n = 0; n < 2; n++)
            layers.push_back({weights(H), weights(H), normed ? weights(D) : nullptr, normed ? weights(D) : nullptr,
                              matrix((heads + 2 * kv_heads) * D, H, 0, biased), matrix(H, heads * D, 0, false),
                              matrix(2 * I, H, 1, false), matrix(H, I, 0, false)});
        head = matrix(vocab, H, 0, false), norm = weights(H);
        model = {layers.data(), H, I, type, heads, kv_heads, D, eps, (float)std::pow(D, -0.5)};
    }
    const char* weights(size_t n) { return memory.emplace_back(type, n).fill().data; }
    Panels matrix(int64_t outputs, int64_t inputs, int gated, bool biased) {
        Array weight(type, (size_t)(outputs * inputs));
        weight.fill(std::pow((double)inputs, -0.5));
        Panels p{nullptr, biased ? weights((size_t)outputs) : nullptr, outputs, inputs, type, gated};
        p.weight = memory.emplace_back(I8, (size_t)panels_bytes(&p)).data;
        arrange(&p, weight.data, 1);
        return p;
    }
};

// A batch's place in a pool; a copy is another one.
struct Place {
    enum { TOKENS = 16, FURTHER = 3 };
    const Network* n;
    int kv_type, columns = 0, count, rows = 0;
    int64_t block_bytes, layer_bytes, block_scales;
    std::vector<Sequence> sequences;
    Array hidden, cos, sin, kv, scales;
    Numbers<int32_t> tables, single, several;
    Numbers<int64_t> blocks, offsets, wanted;
    int singles = 0, many = 0;

    static int all_rows(const std::vector<Sequence>& all) {
        int sum = 0;
        for (auto& one : all) sum += one.rows;
        return sum;
    }
    static int most_blocks(const std::vector<Sequence>& all) {
        int most = 0;
        for (auto& one : all) most = std::max(most, (one.context + FURTHER + TOKENS - 1) / TOKENS);
        return most;
    }
    Place(const Network& network, int kt, const std::vector<Sequence>& all)
        : n(&network), kv_type(kt), columns(most_blocks(all)), count((int)all.size() * columns + 2), rows(all_rows(all)),
          block_bytes(2ll * n->kv_heads * TOKENS * n->D * type_bytes[kt]), layer_bytes(count * block_bytes),
          block_scales(2 * n->kv_heads * TOKENS), sequences(all), hidden(n->type, rows * n->H), cos(n->type, rows * n->D),
          sin(n->type, rows * n->D), kv(I8, 2 * layer_bytes), scales(F32, 2 * count * block_scales),
          tables(all.size() * columns), single(4 * all.size()), several(4 * all.size()), blocks(rows), offsets(rows), wanted(all.size()) {
        hidden.fill(), cos.fill(), sin.fill();
        std::vector<int> free_(count);
        for (int i = 0; i < count; i++) free_[i] = i;
        std::shuffle(free_.begin(), free_.end(), random_);
        for (size_t i = 0; i < tables.count / 4; i++) tables[i] = free_[i];
        int row = 0;
        for (int i = 0; i < (int)all.size(); row += all[i++].rows) {
            int32_t item[] = {row, all[i].rows, i, all[i].context};
            memcpy(all[i].rows == 1 ? &single[4 * singles++] : &several[4 * many++], item, sizeof item);
            wanted[i] = row + all[i].rows - 1;
            for (int t = 0; t < all[i].context; t++) {
                int block = tables[i * columns + t / TOKENS], at = row + t - (all[i].context - all[i].rows);
                if (at >= row) blocks[at] = block, offsets[at] = t % TOKENS;
                else for (int layer = 0; layer < 2; layer++) stored(layer, block, t % TOKENS);
            }
        }
    }
    void stored(int layer, int block, int t) {  // a token's keys and values, that were there before
        for (int plane = 0; plane < 2 * n->kv_heads; plane++) {
            scales.put((layer * count + block) * block_scales + plane * TOKENS + t, 0.01 + 0.001 * any(0, 9));
            for (int d = 0; d < n->D; d++) {
                uint32_t bits = encoded(kv_type, rounded_to(kv_type, kv_type >= I8 ? any(-100, 100) : normal()));
                int size = type_bytes[kv_type];
                memcpy(kv.data + layer * layer_bytes + block * block_bytes + ((plane * TOKENS + t) * n->D + d) * size, &bits, size);
            }
        }
    }
    bool quantized() const { return kv_type != n->type; }
    int64_t plane_bytes() const { return block_bytes / (2 * n->kv_heads); }
    Step step(int threads) {
        Items all{single.begin(), singles, several.begin(), many};
        return {0, 2, 0, hidden.data, rows, cos.data, sin.data, blocks.begin(), offsets.begin(), kv.data, layer_bytes, block_bytes,
                plane_bytes(), TOKENS, quantized() ? (float*)scales.data : nullptr, count * block_scales, block_scales, TOKENS, kv_type, tables.begin(),
                columns, all, nullptr, 0, {}, nullptr, nullptr, nullptr, threads};
    }
    void attend(const Items& items, const Array& q, int64_t stride, int layer, Array& out) {
        Step s = step(1);
        Attention a{q.data, stride, n->type, kv.data + layer * layer_bytes, block_bytes, plane_bytes(), kv_type,
                    s.scales ? s.scales + layer * s.scale_layer_stride : nullptr, block_scales, TOKENS, tables.begin(), columns, items.single,
                    items.singles, n->heads, n->kv_heads, n->D, TOKENS, n->model.scale, out.data, n->heads * n->D};
        if (a.n) decode(&a, 1);
        a.items = items.several, a.n = items.many;
        if (a.n) prefill(&a, 1);
    }
    // As a step does it; `alone`: in the last layer the rows of `wanted` are attended one by one.
    void one_by_one(bool alone) {
        int q = n->heads * n->D, k = n->kv_heads * n->D, all = q + 2 * k, size = type_bytes[n->type], type = n->type;
        for (int layer = 0; layer < 2; layer++) {
            const Layer& l = n->layers[layer];
            Array normed(type, rows * n->H), qkv(type, rows * all), plain(type, rows * (q + k)), turned(plain), attended(type, rows * q), inner(type, rows * n->I);
            rms_norm(type, hidden.data, n->H, nullptr, l.input_norm, n->eps, normed.data, rows, n->H, 1);
            product_(&l.qkv, normed.data, n->H, rows, qkv.data, PLAIN, 1);
            for (int r = 0; r < rows; r++) {
                const char* from = qkv.data + r * all * size;
                char* to = plain.data + r * (q + k) * size;
                memcpy(to, from, (q + k) * size);
                if (l.q_norm) rms_norm(type, from, n->D, nullptr, l.q_norm, n->eps, to, n->heads, n->D, 1);
                if (l.k_norm) rms_norm(type, from + q * size, n->D, nullptr, l.k_norm, n->eps, to + q * size, n->kv_heads, n->D, 1);
            }
            rope(type, plain.data, q + k, cos.data, sin.data, turned.data, q + k, rows, n->heads + n->kv_heads, n->D, 1);
            const char *keys = turned.data + q * size, *values = qkv.data + (q + k) * size;
            char* to = kv.data + layer * layer_bytes;
            if (quantized())
                write_quantized(type, keys, q + k, values, all, kv_type, to, block_bytes, plane_bytes(),
                                (float*)scales.data + layer * count * block_scales, block_scales, TOKENS, blocks.begin(),
                                offsets.begin(), rows, n->kv_heads, n->D, 1);
            else
                write_kv(keys, (q + k) * size, values, all * size, to, block_bytes, blocks.begin(), offsets.begin(), rows, n->kv_heads,
                         n->D * size, TOKENS, 1);
            attend(step(1).all, turned, q + k, layer, attended);
            Numbers<int32_t> items(4 * sequences.size());
            for (size_t i = 0; i < sequences.size(); i++) {
                int32_t item[] = {(int32_t)wanted[i], 1, (int32_t)i, sequences[i].context};
                memcpy(&items[4 * i], item, sizeof item);
            }
            if (alone && layer) attend({items.begin(), (int64_t)sequences.size(), nullptr, 0}, turned, q + k, layer, attended);
            product_(&l.output, attended.data, q, rows, hidden.data, ADD, 1);
            rms_norm(type, hidden.data, n->H, nullptr, l.post_norm, n->eps, normed.data, rows, n->H, 1);
            product_(&l.gate_up, normed.data, n->H, rows, inner.data, PLAIN, 1);
            product_(&l.down, inner.data, n->I, rows, hidden.data, ADD, 1);
        }
    }
    bool finite() const {
        for (size_t i = 0; i < hidden.count; i++) if (!std::isfinite(hidden[i])) return false;
        return true;
    }
    bool same_pool(const Place& other) const { return kv.same(other.kv) && scales.same(other.scales); }
    bool same_row(const Place& other, int64_t r) const {
        int64_t bytes = n->H * type_bytes[n->type];
        return !memcmp(hidden.data + r * bytes, other.hidden.data + r * bytes, bytes);
    }
};

static void whole_steps(int type, int kv_type) {
    std::string name = std::string("step ") + names[type] + " on " + names[kv_type];
    for (int i = 0; i < 4; i++) {
        Network network(type);
        std::vector<Sequence> all;
        for (int s = std::vector<int>{1, 3, 8, 33}[i]; s > 0; s--) {
            int rows = i == 3 || any(0, 1) ? 1 : std::vector<int>{2, 15, 16, 17, 33}[any(0, 4)];
            all.push_back({rows, rows + std::vector<int>{0, 1, 14, 15, 16, 17, 31, 32, 600}[any(0, 8)]});
        }
        Place first(network, kv_type, all), trimmed(first), expected(first), last(first);
        expected.one_by_one(false), last.one_by_one(true);
        std::string where = "sequences, hidden, inner, heads, kv heads, dim: " +
                            text({(int)all.size(), network.H, network.I, network.heads, network.kv_heads, network.D});
        for (int threads : {1, 3}) {
            Place mine(first);
            Step s = mine.step(threads);
            must(name + ": done", step_(&network.model, &s) == 2, where);
            must(name, expected.finite() && mine.hidden.same(expected.hidden) && mine.same_pool(expected), where);
        }
        Step s = trimmed.step(2);
        Numbers<int32_t> some(4 * all.size());
        for (int n = 0; n < (int)all.size(); n++) some[4 * n] = n, some[4 * n + 1] = 1, some[4 * n + 2] = n, some[4 * n + 3] = all[n].context;
        s.wanted = trimmed.wanted.begin(), s.wanted_rows = (int64_t)all.size(), s.some = {some.begin(), (int64_t)all.size(), nullptr, 0};
        bool right = step_(&network.model, &s) == 2 && trimmed.same_pool(last);
        for (size_t n = 0; n < all.size(); n++) right &= trimmed.same_row(last, trimmed.wanted[n]);
        must(name + ": last rows", right, where);
    }
}

// A run of decode steps in one call, and each of its steps by itself.
static void whole_runs(int type, int kv_type) {
    enum { STEPS = Place::FURTHER, ANGLES = 64 };
    for (int sequences : {1, 7, 33}) {
        Network network(type);
        int H = network.H, D = network.D, size = type_bytes[type], vocab = network.vocab;
        std::vector<Sequence> all;
        for (int i = 0; i < sequences; i++) all.push_back({1, std::vector<int>{1, 15, 16, 17, 31, 32}[any(0, 5)]});
        Place mine(network, kv_type, all);
        mine.one_by_one(false);
        Place other(mine);
        Array cosines(type, ANGLES * D), sines(type, ANGLES * D), normed(type, sequences * H), logits(F32, sequences * vocab);
        cosines.fill(), sines.fill();
        Numbers<int32_t> chosen(sequences), contexts(sequences), found(STEPS * sequences), failed(sequences);
        Numbers<int64_t> tokens(sequences), positions(sequences), turns(sequences), full(STEPS * sequences), over(STEPS);
        Numbers<uint64_t> seeds(sequences), counters(sequences);
        std::vector<double> numbers(sequences);
        std::vector<Row> row(sequences);
        for (int r = 0; r < sequences; r++) {
            chosen[r] = any(0, vocab - 1), contexts[r] = all[r].context, positions[r] = turns[r] = all[r].context - 1;
            seeds[r] = random_(), counters[r] = (uint64_t)r, row[r] = {};
            row[r].top_p = r % 3 ? 1 : 0.9, row[r].scale = r % 2 ? 1.4f : -1, row[r].options.repetition_penalty = 1, row[r].draw = r, row[r].draws = 1, row[r].top = -1;
        }
        Sampling sampling{(float*)logits.data, sequences, vocab, row.data(), nullptr, numbers.data(), chosen.begin(), failed.begin(), nullptr, nullptr, nullptr, nullptr, 0};
        std::vector<int32_t> expected, now(chosen.begin(), chosen.begin() + sequences);
        std::vector<int64_t> filled;
        for (int step = 0; step < STEPS; step++) {
            std::vector<int64_t> ids(now.begin(), now.end());
            for (int r = 0; r < sequences; r++) {
                int position = all[r].context + step;
                other.sequences[r].context = other.single[4 * r + 3] = position + 1;
                other.blocks[r] = other.tables[r * other.columns + position / Place::TOKENS], other.offsets[r] = position % Place::TOKENS;
                memcpy(other.cos.data + r * D * size, cosines.data + position * D * size, D * size);
                memcpy(other.sin.data + r * D * size, sines.data + position * D * size, D * size);
                if (other.offsets[r] == Place::TOKENS - 1) filled.push_back(other.blocks[r]);
            }
            rows_back(&network.head, ids.data(), sequences, other.hidden.data, 1);
            other.one_by_one(false);
            rms_norm(type, other.hidden.data, H, nullptr, network.norm, network.eps, normed.data, sequences, H, 1);
            product_(&network.head, normed.data, H, sequences, logits.data, WIDE, 1);
            uniform(seeds.begin(), counters.begin(), (uint64_t)step, sequences, numbers.data());
            Sampling its = sampling;
            its.tokens = now.data();
            sample(&its, 1);
            expected.insert(expected.end(), now.begin(), now.end());
        }
        memset(logits.data, 0xff, logits.bytes()), memset(normed.data, 0xff, normed.bytes());
        Step s = mine.step(2);
        GoOn g{};
        g.model = &network.model, g.step = &s, g.chosen = chosen.begin(), g.tokens = tokens.begin(), g.positions = positions.begin();
        g.contexts = contexts.begin(), g.turns = turns.begin(), g.cosines = cosines.data, g.sines = sines.data;
        g.embedding = g.head = &network.head, g.norm = network.norm, g.normed = normed.data, g.logits = (float*)logits.data;
        g.sampling = &sampling, g.seeds = seeds.begin(), g.counters = counters.begin(), g.numbers = numbers.data();
        g.most = STEPS, g.until_ns = INT64_MAX, g.full = full.begin(), g.found = found.begin(), g.over_ns = over.begin();
        bool right = go_on(&g) == STEPS && !g.failed && !g.stopped && other.finite() && mine.same_pool(other) && mine.hidden.same(other.hidden);
        right &= !memcmp(found.begin(), expected.data(), expected.size() * 4);
        right &= g.filled == (int64_t)filled.size() && std::equal(filled.begin(), filled.end(), full.begin());
        must(std::string("run ") + names[type] + " on " + names[kv_type], right, "sequences, hidden, dim: " + text({sequences, H, D}));
    }
}
