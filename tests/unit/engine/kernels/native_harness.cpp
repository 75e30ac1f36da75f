// Compares every function of a built library with plain double-precision formulas on fresh random inputs.
//
//   harness LIBRARY SEED      prints the largest error of each function and type, as a part of what it may be
//
// Nothing of Python or torch: it runs under an emulator of another processor as it does here. Every array ends at a
// page that may not be touched; outputs, gaps between rows and unused slots of the pool begin as NaN.
#include "panels.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

static std::mt19937_64 random_;
static double normal() { return std::normal_distribution<double>()(random_); }
static int any(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }

// ---- element types, by definition ----
struct Format { int mantissa, least; double largest; bool saturates; };
static const Format formats[] = {{23, -126, 3.4028234663852886e38, false}, {7, -126, 3.3895313892515355e38, false},
                                 {10, -14, 65504, false}, {0, 0, 127, true}, {3, -6, 448, true}};
static const char* const names[] = {"float32", "bfloat16", "float16", "int8", "float8"};
static double unit(int type) { return std::ldexp(1, -formats[type].mantissa - 1); }  // of rounding, relative
static double tiny(int type) { return std::ldexp(1, formats[type].least - formats[type].mantissa); }
static double rounded_to(int type, double x) {
    const Format& f = formats[type];
    if (x == 0 || !std::isfinite(x)) return x;
    int step = type == I8 ? 0 : std::max(std::ilogb(x), f.least) - f.mantissa;
    x = std::ldexp(std::nearbyint(std::ldexp(x, -step)), step);
    if (std::fabs(x) <= f.largest) return x;
    return std::copysign(f.saturates ? f.largest : INFINITY, x);
}
static uint32_t encoded(int type, double x) {  // x is rounded
    const Format& f = formats[type];
    if (type == I8) return (uint8_t)(int8_t)x;
    uint32_t sign = (uint32_t)std::signbit(x) << (8 * type_bytes[type] - 1);
    x = std::fabs(x);
    if (std::isinf(x)) x = std::ldexp(1, std::ilogb(f.largest) + 1);
    int exponent = x == 0 ? f.least - 1 : std::ilogb(x);
    if (exponent < f.least) return sign | (uint32_t)std::ldexp(x, f.mantissa - f.least);
    return sign | (((uint32_t)(exponent - f.least) << f.mantissa) + (uint32_t)std::ldexp(x, f.mantissa - exponent));
}
static double decoded(int type, uint32_t bits) {
    const Format& f = formats[type];
    if (type == I8) return (int8_t)bits;
    int width = 8 * type_bytes[type];
    uint32_t magnitude = bits & ((1u << (width - 1)) - 1), exponent = magnitude >> f.mantissa;
    uint32_t fraction = magnitude & ((1u << f.mantissa) - 1);
    double x = std::ldexp(exponent ? fraction + (1u << f.mantissa) : fraction, (int)(exponent ? exponent - 1 : 0) + f.least - f.mantissa);
    if (x > f.largest) x = fraction || type == F8 ? NAN : INFINITY;
    return bits >> (width - 1) ? -x : x;
}

// Elements that end where memory ends. All bits are set at first: NaN.
struct Array {
    int type;
    size_t count, whole;
    char *base, *data;
    Array(int type_, size_t count_) : type(type_), count(count_) {
        size_t page = 65536, bytes = count * type_bytes[type];
        whole = (bytes + page - 1) / page * page;
        base = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED || mprotect(base + whole, page, PROT_NONE)) abort();
        data = base + whole - bytes;
        memset(data, 0xff, bytes);
        whole += page;
    }
    Array(const Array& other) : Array(other.type, other.count) { memcpy(data, other.data, bytes()); }
    Array& operator=(const Array&) = delete;
    ~Array() { munmap(base, whole); }
    size_t bytes() const { return count * type_bytes[type]; }
    uint32_t bits(size_t i) const {
        uint32_t b = 0;
        memcpy(&b, data + i * type_bytes[type], type_bytes[type]);
        return b;
    }
    double operator[](size_t i) const { return decoded(type, bits(i)); }
    void put(size_t i, double x) {
        uint32_t b = encoded(type, rounded_to(type, x));
        memcpy(data + i * type_bytes[type], &b, type_bytes[type]);
    }
    Array& fill(double size = 1) {
        for (size_t i = 0; i < count; i++) put(i, normal() * size);
        return *this;
    }
    bool same(const Array& other) const { return !memcmp(data, other.data, bytes()); }
};
template <class T> struct Numbers : Array {  // of indices
    Numbers(size_t n) : Array(I8, n * sizeof(T)) {}
    T& operator[](size_t i) { return ((T*)data)[i]; }
    T* begin() { return (T*)data; }
};

// ---- what was found ----
struct Found { double worst = 0; long checks = 0; };
static std::map<std::string, Found> found;
static bool failed = false;
static void check(const std::string& name, double got, double want, double allowed, const std::string& where) {
    Found& f = found[name];
    double error = got == want ? 0 : std::fabs(got - want) / allowed;
    f.checks++;
    if (!(error <= 1) && f.worst <= 1) printf("WRONG %s (%s): %.9g, should be %.9g +- %.3g\n", name.c_str(), where.c_str(), got, want, allowed);
    if (!(error <= 1)) failed = true;
    f.worst = std::isnan(error) ? INFINITY : std::max(f.worst, error);
}
static void must(const std::string& name, bool right, const std::string& where) { check(name, right, 1, 1e-9, where); }
static std::string text(std::vector<int> numbers) {
    std::string s;
    for (int n : numbers) s += (s.empty() ? "" : " ") + std::to_string(n);
    return s;
}
// Rows of `used` elements, `stride` apart: what lies between is as it was.
static bool gaps_kept(const Array& a, size_t rows, size_t used, size_t stride) {
    for (size_t r = 0; r + 1 < rows; r++)
        for (size_t i = used; i < stride; i++) if (!std::isnan(a[r * stride + i])) return false;
    return true;
}

// ---- the library ----
template <class R, class... A> struct Function {
    R (*f)(A...) = nullptr;
    void get(void* library, const char* name) {
        f = (R(*)(A...))dlsym(library, name);
        if (!f) printf("no %s\n", name), exit(1);
    }
    R operator()(A... a) const { return f(a...); }
};
typedef const void* P;
typedef int64_t L;
static Function<int> width, has_bf16;
static Function<int, const Attention*, int> decode, prefill;
static Function<int, int, P, L, void*, P, float, void*, L, L, int> rms_norm;
static Function<int, int, P, L, P, P, void*, L, L, int, int, int> rope;
static Function<int, int, P, L, void*, L, L, int> silu_mul;
static Function<int, P, L, P, L, void*, L, P, P, L, int, L, L, int> write_kv;
static Function<int, int, P, L, P, L, int, void*, L, L, void*, L, L, P, P, L, int, int, int> write_quantized;
static Function<int, P, L, L, L> outside;
static Function<int, void*, L, L, L, L, P, P, L, int> copy_blocks;
static Function<L, const Panels*> panels_bytes;
static Function<int, const Panels*, P, int> arrange;
static Function<int, const Panels*, P, L, void*, int> rows_back;
static Function<int, const Panels*, P, L, L, void*, int, int> product_;
static Function<int, int> threads_used;
static Function<int, P, L, int> read_;
static Function<int, void*, L, L, int, int> exponentials;

struct Sequence { int rows, context; };
#include "native_steps.h"

static void open_library(const char* path) {
    void* library = dlopen(path, RTLD_NOW);
    if (!library) printf("%s\n", dlerror()), exit(1);
#define GET(function, name) function.get(library, "mp_" name)
    GET(width, "width"), GET(has_bf16, "has_bf16"), GET(decode, "decode"), GET(prefill, "prefill");
    GET(rms_norm, "rms_norm"), GET(rope, "rope"), GET(silu_mul, "silu_mul"), GET(write_kv, "write_kv");
    GET(write_quantized, "write_quantized"), GET(outside, "outside"), GET(copy_blocks, "copy_blocks");
    GET(panels_bytes, "panels_bytes"), GET(arrange, "arrange"), GET(rows_back, "rows"), GET(product_, "product");
    GET(threads_used, "threads_used"), GET(read_, "read"), GET(exponentials, "exp");
    GET(step_, "step"), GET(go_on, "go_on"), GET(sample, "sample"), GET(uniform, "uniform");
}

// ---- attention ----
struct Shape { int D, G, kv_heads, block_size; };

struct Batch {
    int q_type, kv_type;
    Shape s;
    std::vector<Sequence> sequences;
    int heads, rows = 0, columns = 0, blocks = 3, q_stride, out_stride;
    int64_t block_stride, scale_stride;
    double scale;
    int window, chunked;        // 0: all tokens are seen
    std::vector<float> sinks;  // of each head, or none

    Batch(int qt, int kt, Shape shape, std::vector<Sequence> all, bool plain = false) : q_type(qt), kv_type(kt), s(shape), sequences(all) {
        heads = s.G * s.kv_heads;
        window = plain || any(0, 1) ? 0 : any(1, 300), chunked = any(0, 1);
        for (int h = 0; !plain && h < heads && (h || any(0, 2) == 0); h++) sinks.push_back((float)normal() * 2);
        for (auto& one : sequences) {
            int needs = (one.context + s.block_size - 1) / s.block_size;
            rows += one.rows, blocks += needs, columns = std::max(columns, needs + 1);
        }
        q_stride = heads * s.D + 8 * any(0, 2), out_stride = heads * s.D + 8 * any(0, 2);
        block_stride = (int64_t)s.kv_heads * 2 * s.block_size * s.D * type_bytes[kv_type] + 64 * any(0, 1);
        scale_stride = 2 * s.kv_heads * s.block_size + 16 * any(0, 1);
        scale = std::pow(s.D, -0.5) * std::vector<double>{1, 1, 1, -1, 0.5}[any(0, 4)];
    }
    std::string name() const { return std::string(names[q_type]) + (kv_type == q_type ? "" : std::string(" on ") + names[kv_type]); }
    std::string where() const {
        std::string t = "dim, group, kv heads, block: " + text({s.D, s.G, s.kv_heads, s.block_size}) + "; rows/context:";
        for (auto& one : sequences) t += " " + std::to_string(one.rows) + "/" + std::to_string(one.context);
        return t + (window ? (chunked ? "; chunks of " : "; window of ") + std::to_string(window) : "") + (sinks.empty() ? "" : "; sinks");
    }
    size_t slot(int block, int head, int plane, int t) const {  // in elements of its block
        (void)block;
        return ((size_t)(head * 2 + plane) * s.block_size + t) * s.D;
    }
    void run(const std::string& what, const Function<int, const Attention*, int>& f, bool tight) {
        Array q(q_type, (size_t)rows * q_stride), out(q_type, (size_t)rows * out_stride);
        Array kv(I8, blocks * block_stride), scales(F32, blocks * scale_stride);
        Numbers<int32_t> tables(sequences.size() * columns), items(sequences.size() * 4);
        std::vector<int> free_(blocks);
        for (int i = 0; i < blocks; i++) free_[i] = i;
        std::shuffle(free_.begin(), free_.end(), random_);
        q.fill();
        bool quantized = kv_type == I8 || kv_type == F8;
        int row = 0;
        for (size_t n = 0; n < sequences.size(); n++) {
            int32_t item[] = {row, sequences[n].rows, (int32_t)n, sequences[n].context};
            memcpy(items.begin() + 4 * n, item, sizeof item);
            row += sequences[n].rows;
            for (int c = 0; c < columns; c++) tables[n * columns + c] = 0x7fffffff;
            for (int t = 0; t < sequences[n].context; t++) {
                int32_t& block = tables[n * columns + t / s.block_size];
                if (t % s.block_size == 0) block = free_.back(), free_.pop_back();
                for (int i = 0; i < 2 * s.kv_heads; i++) {
                    scales.put(block * scale_stride + i * s.block_size + t % s.block_size,
                               std::exp(normal() * (tight ? 6 : 1)) * (kv_type == I8 ? 0.02 : 0.01));
                    put_slot(kv, block, i, t % s.block_size);
                }
            }
        }
        Attention a{q.data, q_stride, q_type, kv.data, block_stride, (int64_t)s.block_size * s.D * type_bytes[kv_type], kv_type,
                    quantized ? (float*)scales.data : nullptr, scale_stride, s.block_size, tables.begin(), columns, items.begin(), (int64_t)sequences.size(), heads, s.kv_heads,
                    s.D, s.block_size, (float)scale, out.data, out_stride, window, chunked, sinks.empty() ? nullptr : sinks.data()};
        must(what + " " + name() + ": done", f(&a, 1) == 0, where());
        Array other(q_type, out.count);
        a.out = other.data;
        f(&a, 3);
        must(what + " " + name() + ": same by 3 threads", other.same(out), where());
        must(what + " " + name() + ": between rows", gaps_kept(out, rows, heads * s.D, out_stride), where());
        compare(what, q, kv, quantized ? &scales : nullptr, tables, out, tight);
    }
    void put_slot(Array& kv, int block, int plane, int t) {
        for (int d = 0; d < s.D; d++) {
            double x = kv_type == I8 ? any(-127, 127) : kv_type == F8 ? normal() * 100 : normal();
            uint32_t bits = encoded(kv_type, rounded_to(kv_type, x));
            memcpy(kv.data + block * block_stride + (slot(block, 0, plane, t) + d) * type_bytes[kv_type], &bits, type_bytes[kv_type]);
        }
    }
    double number(const Array& kv, const Array* scales, int block, int plane, int t, int d) const {
        uint32_t bits = 0;
        memcpy(&bits, kv.data + block * block_stride + (slot(block, 0, plane, t) + d) * type_bytes[kv_type], type_bytes[kv_type]);
        return decoded(kv_type, bits) * (scales ? (*scales)[block * scale_stride + plane * s.block_size + t] : 1);
    }
    void compare(const std::string& what, const Array& q, const Array& kv, const Array* scales, Numbers<int32_t>& tables,
                 const Array& out, bool tight) {
        int row = 0;
        for (size_t n = 0; n < sequences.size(); row += sequences[n++].rows) {
            int context = sequences[n].context, count = sequences[n].rows;
            for (int head = 0; head < s.kv_heads; head++) {
                std::vector<double> both[2];
                double top = 0;
                for (int plane = 0; plane < 2; plane++) for (int t = 0; t < context; t++) for (int d = 0; d < s.D; d++)
                    both[plane].push_back(number(kv, scales, tables[n * columns + t / s.block_size], 2 * head + plane, t % s.block_size, d));
                for (double v : both[1]) top = std::max(top, std::fabs(v));
                for (int r = 0; r < count; r++) for (int g = 0; g < s.G; g++)
                    compare_row(what, q, (size_t)(row + r) * q_stride + (head * s.G + g) * s.D, head * s.G + g, both, context - count + r + 1,
                                out, (size_t)(row + r) * out_stride + (head * s.G + g) * s.D, tight ? 0 : top);
            }
        }
    }
    void compare_row(const std::string& what, const Array& q, size_t from, int head, const std::vector<double>* kv, int seen,
                     const Array& out, size_t to, double top_value) {  // 0: must be exact
        std::vector<double> weights(seen), query(s.D), sums(s.D);
        double top = sinks.empty() ? -INFINITY : sinks[head], all = 0, longest = std::fabs(sinks.empty() ? 0 : top);
        int first = !window ? 0 : std::max(0, chunked ? (seen - 1) / window * window : seen - window);
        for (int d = 0; d < s.D; d++) query[d] = q[from + d] * (double)(float)scale;
        for (int t = first; t < seen; t++) {
            double score = 0, length = 0;
            for (int d = 0; d < s.D; d++) {
                double one = query[d] * kv[0][(size_t)t * s.D + d];
                score += one, length += std::fabs(one);
            }
            longest = std::max(longest, length);
            top = std::max(top, weights[t] = score);
        }
        for (int t = first; t < seen; t++) all += weights[t] = std::exp(weights[t] - top);
        if (!sinks.empty()) all += std::exp(sinks[head] - top);
        for (int t = first; t < seen; t++) for (int d = 0; d < s.D; d++) sums[d] += weights[t] * kv[1][(size_t)t * s.D + d];
        // A weight is as exact as its score; products in bf16 round weights, and keys where those are scaled.
        bool pairs = has_bf16() && q_type == BF16 && kv_type != F32 && kv_type != F16;
        double part = pairs ? std::ldexp(1 + (kv_type == q_type ? 0 : longest), -8) : std::ldexp(8 + longest, -22);
        for (int d = 0; d < s.D; d++) {
            double want = sums[d] / all, allowed = top_value * part;
            if (top_value == 0) want = rounded_to(q_type, (float)want);  // a float, then rounded once more: exactly that
            check(what + " " + name(), out[to + d], want, allowed + 1.01 * unit(q_type) * std::fabs(want) * (allowed > 0) + tiny(q_type) / 4, where());
        }
    }
};

static void attention() {
    const int dims[] = {64, 80, 96, 128, 16, 48, 256}, blocks[] = {16, 48, 256};
    const int lengths[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 130, 255, 256, 257, 300}, long_[] = {511, 512, 513, 700, 1025};
    int turn = any(0, 6), group = any(0, 15);
    for (int q_type : {F32, BF16, F16}) for (int kv_type : {q_type, (int)I8, (int)F8}) {
        for (int i = 0; i < 6; i++) {  // dims and group sizes go round: each comes with every kind of type
            Shape s{dims[turn++ % 7], 1 + (group++ * 5) % 16, any(1, 3), blocks[any(0, 2)]};
            std::vector<Sequence> one;
            for (int n = any(1, 4); n > 0; n--) one.push_back({1, lengths[any(0, 14)]});
            if (i % 3 == 0) one.push_back({1, long_[any(0, 4)]});
            Batch(q_type, kv_type, s, one).run("decode", decode, false);
        }
        for (int i = 0; i < 3; i++) {
            Shape s{dims[turn++ % 7], 1 + (group++ * 5) % 16, any(1, 2), blocks[any(0, 2)]};
            std::vector<Sequence> one;
            for (int n = any(1, 3); n > 0; n--) {
                int rows = std::max(1, std::vector<int>{1, 2, 17, 40, 97}[any(0, 4)] / s.G);
                one.push_back({rows, rows + (any(0, 2) ? any(0, 200) : 0)});
            }
            if (i == 0) one.push_back({1, long_[any(0, 4)]});
            Batch(q_type, kv_type, s, one).run("prefill", prefill, false);
        }
        if (kv_type == q_type) continue;
        // One token weighs exactly 1: its value, scaled, rounded to the result's type, subnormal and beyond it too.
        bool exact = !(has_bf16() && q_type == BF16);
        for (int i = 0; exact && i < 12; i++) Batch(q_type, kv_type, {64, 1, 2, 16}, {{1, 1}, {1, 1}, {1, 1}}, true).run("rounding", decode, true);
    }
}

// ---- what is small and frequent ----
static void conversions(int type) {  // every finite number there and back
    double allowed = type == BF16 && has_bf16() ? 0x1p-126 : 1e-300;  // x86's instruction for bf16 knows no subnormals
    for (int D : {32, 6}) {
        int heads = 65536 / D;
        Array x(type, (size_t)heads * D), cos(type, D), sin(type, D), out(type, (size_t)heads * D);
        for (size_t i = 0; i < x.count; i++) {
            uint16_t bits = (uint16_t)(i * 40503);
            memcpy(x.data + 2 * i, &bits, 2);
            if (!std::isfinite(x[i])) x.put(i, 0);
        }
        for (int d = 0; d < D; d++) cos.put(d, 1), sin.put(d, 0);
        rope(type, x.data, 0, cos.data, sin.data, out.data, 0, 1, heads, D, 1);
        for (size_t i = 0; i < x.count; i++) check(std::string("conversions ") + names[type], out[i], x[i], allowed, text({(int)x.bits(i)}));
    }
}
static void small_operations(int type) {
    double u = unit(type), least = 2 * tiny(type), sum = std::ldexp(1, -21);
    std::string t = std::string(" ") + names[type];
    for (int i = 0; i < 24; i++) {
        int rows = any(1, 9), n = i % 6 == 0 ? any(500, 2300) : any(1, 80), gap = any(0, 5), threads = any(1, 3);
        std::string where = "rows, size: " + text({rows, n});
        Array x(type, rows * (n + gap)), weight(type, n), residual(type, rows * n), out(type, rows * n);
        x.fill(), weight.fill(), residual.fill();
        Array before(residual);
        rms_norm(type, x.data, n + gap, i % 2 ? residual.data : nullptr, weight.data, 1e-5f, out.data, rows, n, threads);
        for (int r = 0; r < rows; r++) {
            std::vector<double> v(n);
            double mean = 0;
            for (int k = 0; k < n; k++) {
                v[k] = x[r * (n + gap) + k];
                if (i % 2) v[k] = rounded_to(type, (float)(v[k] + before[r * n + k]));
                if (i % 2) check("rms_norm: residual" + t, residual[r * n + k], v[k], 1e-300, where);
                mean += v[k] * v[k] / n;
            }
            for (int k = 0; k < n; k++) {
                double want = rounded_to(type, v[k] / std::sqrt(mean + (double)1e-5f)) * weight[k];
                check("rms_norm" + t, out[r * n + k], want, std::fabs(want) * (4 * u + sum) + least, where);
            }
        }
        Array both(type, rows * (2 * n + gap)), product(type, rows * n);
        both.fill(i % 4 ? 2 : 60);
        silu_mul(type, both.data, 2 * n + gap, product.data, rows, n, threads);
        for (int r = 0; r < rows; r++) for (int k = 0; k < n; k++) {
            double gate = both[r * (2 * n + gap) + k], want = rounded_to(type, gate / (1 + std::exp(-gate))) * both[r * (2 * n + gap) + n + k];
            // Floats: e^-x is as exact as x * log2(e) is a float. What is below 2^-126 may become 2^-126 (times gate and up).
            double allowed = std::fabs(want) * (4 * u + sum + std::ldexp(std::fabs(gate), -22)) + 60 * least + 1e-33;
            check("silu_mul" + t, product[r * n + k], want, allowed, where);
        }
        int heads = any(1, 5), D = i % 3 ? std::vector<int>{64, 80, 96, 128}[any(0, 3)] : 2 * any(1, 40), half = D / 2;
        where = "rows, heads, dim: " + text({rows, heads, D});
        Array turned(type, rows * (heads * D + gap)), cos(type, rows * D), sin(type, rows * D), to(type, rows * (heads * D + 3));
        turned.fill(), cos.fill(), sin.fill();
        rope(type, turned.data, heads * D + gap, cos.data, sin.data, to.data, heads * D + 3, rows, heads, D, threads);
        must("rope: between rows" + t, gaps_kept(to, rows, heads * D, heads * D + 3), where);
        for (int r = 0; r < rows; r++) for (int h = 0; h < heads; h++) for (int d = 0; d < D; d++) {
            size_t at = r * (heads * D + gap) + h * D;
            double a = turned[at + d] * cos[r * D + d], b = turned[at + (d + half) % D] * sin[r * D + d];
            check("rope" + t, to[r * (heads * D + 3) + h * D + d], a + b, 1.01 * u * std::fabs(a + b) + sum * (std::fabs(a) + std::fabs(b)) + least, where);
        }
    }
}
// What arranged matrices give, and that they give their rows back; `width`: the library's, as arrangements depend on it.
static void products(int type) {
    for (int i = 0; i < 24; i++) {
        bool gated = i % 3 == 2, biased = i % 2, wide = i % 5 == 4 && !gated;
        // Some have several parts of a panel for several tiles, some several blocks of rows: see multiply.cpp.
        int rows = i == 22 ? any(193, 200) : any(1, 40), K = 2 * (i % 8 == 7 ? any(257, 400) : any(1, 75));
        int n = any(1, 90), gap = any(0, 5), threads = any(1, 3);
        if (gated) n *= 2;
        int columns = gated ? n / 2 : n;
        Array x(type, rows * (K + gap)), weight(type, n * K), bias(type, n), out(wide ? F32 : type, rows * columns), back(type, n * K);
        x.fill(), weight.fill(), bias.fill();
        Panels p{nullptr, biased ? bias.data : nullptr, n, K, type, gated};
        Array memory(I8, (size_t)panels_bytes(&p));
        p.weight = memory.data;
        std::vector<int64_t> all(n);
        for (int j = 0; j < n; j++) all[j] = j;
        must("arrange", arrange(&p, weight.data, threads) == 0 && rows_back(&p, all.data(), n, back.data, threads) == 0, "");
        must("rows", memcmp(back.data, weight.data, weight.bytes()) == 0, "rows, outputs: " + text({K, n}));
        int code = product_(&p, x.data, K + gap, rows, out.data, wide ? 2 : 0, threads), row = any(0, rows - 1);
        Array alone(out.type, columns);
        must("product of a row alone", product_(&p, x.data + (size_t)row * (K + gap) * type_bytes[type], K + gap, 1, alone.data, wide ? 2 : 0, 1) == 0 &&
             !memcmp(alone.data, out.data + (size_t)row * columns * type_bytes[out.type], alone.bytes()), "row, rows, inputs, outputs: " + text({row, rows, K, n}));
        for (int r = 0; r < rows; r++) for (int j = 0; j < columns; j++) {
            double want[2], room[2];
            for (int half = 0; half <= gated; half++) {
                int output = j + half * columns;
                want[half] = biased ? bias[output] : 0;
                double sizes = std::fabs(want[half]);
                for (int k = 0; k < K; k++) {
                    double one = x[r * (K + gap) + k] * weight[output * K + k];
                    want[half] += one, sizes += std::fabs(one);
                }
                room[half] = 1.01 * unit(type) * std::fabs(want[half]) + std::ldexp(sizes, -21) + tiny(type);
            }
            double value = want[0], allowed = room[0];
            if (gated) {  // silu's slope is below 1.1
                double active = want[0] / (1 + std::exp(-want[0]));
                value = active * want[1];
                allowed = std::fabs(active) * room[1] + (1.1 * room[0] + 1.01 * unit(type) * std::fabs(active) + 1e-6) * (std::fabs(want[1]) + room[1]);
                allowed += 1.01 * unit(type) * std::fabs(value) + tiny(type);
            }
            check(std::string(gated ? "gated " : "product ") + names[type], code ? NAN : out[r * columns + j], value, allowed,
                  "rows, inputs, outputs: " + text({rows, K, n}));
        }
    }
}

// ---- the pool: compared byte by byte ----
static void writes(int type) {
    for (int i = 0; i < 8; i++) {
        int heads = any(1, 4), D = 16 * any(1, 8), bt = 16 * any(1, 3), blocks = 5, rows = any(1, 20), gap = any(0, 9), size = type_bytes[type];
        int64_t block = (int64_t)heads * 2 * bt * D, stride = block + 32;
        std::string where = "rows, heads, dim, block: " + text({rows, heads, D, bt});
        Array k(type, rows * (heads * D + gap)), v(type, rows * (heads * D)), kv(type, blocks * stride);
        k.fill(), v.fill(), kv.fill();
        Array want(kv);
        Numbers<int64_t> ids(rows), offsets(rows);
        std::vector<int> slots(blocks * bt);
        for (size_t n = 0; n < slots.size(); n++) slots[n] = (int)n;
        std::shuffle(slots.begin(), slots.end(), random_);
        for (int r = 0; r < rows; r++) {
            ids[r] = slots[r] / bt, offsets[r] = slots[r] % bt;
            if (r && any(0, 3) == 0) {  // stored nowhere
                ids[r] = -1;
                continue;
            }
            for (int h = 0; h < heads; h++) {
                char* to = want.data + (ids[r] * stride + (int64_t)h * 2 * bt * D + offsets[r] * D) * size;
                memcpy(to, k.data + (r * (heads * D + gap) + h * D) * size, D * size);
                memcpy(to + bt * D * size, v.data + (r * heads + h) * D * size, D * size);
            }
        }
        write_kv(k.data, (heads * D + gap) * size, v.data, heads * D * size, kv.data, stride * size, ids.begin(), offsets.begin(),
                 rows, heads, D * size, bt, any(1, 3));
        must(std::string("write_kv ") + names[type], kv.same(want), where);
        must("outside", outside(ids.begin(), rows, -1, blocks) == 0 && outside(ids.begin(), rows, -1, ids[0]) == 1, where);
        ids[rows - 1] = -1;
        must("outside", outside(ids.begin(), rows, 0, blocks) == 1, where);
        Numbers<int64_t> source(2), target(2);
        source[0] = 1, source[1] = 3, target[0] = 4, target[1] = 0;
        // The same memory as 1 layer of 5 blocks.
        for (int n = 0; n < 2; n++) memcpy(want.data + target[n] * stride * size, want.data + source[n] * stride * size, block * size);
        copy_blocks(kv.data, blocks * stride * size, 1, stride * size, block * size, source.begin(), target.begin(), 2, any(1, 3));
        must(std::string("copy_blocks ") + names[type], kv.same(want), where);
    }
}
static void quantized_writes(int from, int type) {
    for (int i = 0; i < 6; i++) {
        int heads = any(1, 3), D = 16 * any(1, 8), bt = 16 * any(1, 2), blocks = 3, rows = any(1, 20);
        int scale_stride = 2 * heads * bt + 3, gap = 8 * any(0, 1);
        int64_t stride = (int64_t)heads * 2 * bt * D + 64;
        float limit = (float)formats[type].largest;
        Array kv(type, blocks * stride), scales(F32, blocks * scale_stride), want(kv), wanted(scales);
        Array k(from, (size_t)rows * (heads * D + gap)), v(from, (size_t)rows * heads * D);
        k.fill(0.7), v.fill(i % 2 ? 1e-4 : 3);
        if (i == 3) memset(v.data, 0, v.bytes());
        Numbers<int64_t> ids(rows), offsets(rows);
        std::vector<int> slots(blocks * bt);
        for (size_t n = 0; n < slots.size(); n++) slots[n] = (int)n;
        std::shuffle(slots.begin(), slots.end(), random_);
        for (int r = 0; r < rows; r++) {
            ids[r] = slots[r] / bt, offsets[r] = slots[r] % bt;
            if (r && any(0, 3) == 0) {  // stored nowhere
                ids[r] = -1;
                continue;
            }
            for (int p = 0; p < 2 * heads; p++) {
                auto given = [&](int d) { return (float)(p % 2 ? v[(r * heads + p / 2) * D + d] : k[(size_t)r * (heads * D + gap) + p / 2 * D + d]); };
                float top = 0;
                for (int d = 0; d < D; d++) top = std::max(top, std::fabs(given(d)));
                float scale = top / limit;
                for (int d = 0; d < D; d++)
                    want.put(ids[r] * stride + ((size_t)p * bt + offsets[r]) * D + d, scale > 0 ? given(d) / scale : 0);
                wanted.put(ids[r] * scale_stride + p * bt + offsets[r], scale);
            }
        }
        write_quantized(from, k.data, heads * D + gap, v.data, heads * D, type, kv.data, stride, (int64_t)bt * D,
                        scales.data, scale_stride, bt, ids.begin(), offsets.begin(), rows, heads, D, any(1, 3));
        bool same = true;
        for (size_t n = 0; n < kv.count; n++) same &= kv.bits(n) == want.bits(n) || (type == F8 && kv[n] == 0 && want[n] == 0);
        std::string name = std::string("write_quantized ") + names[from] + " to " + names[type];
        must(name, same, "heads, dim, block: " + text({heads, D, bt}));
        must(name + ": scales", scales.same(wanted), "heads, dim, block: " + text({heads, D, bt}));
    }
}
static void measures() {
    for (int exact : {0, 1}) {
        Array x(F32, 4096);
        for (size_t i = 0; i < x.count; i++) x.put(i, -130.0 * (double)i / (double)x.count);
        Array out(x);
        exponentials(out.data, 4096, 1, exact, 1);
        for (size_t i = 0; i < x.count; i++) {
            double want = x[i] < -126.5 ? 0 : -std::exp2(x[i]);  // below 2^-126 not all of the bits are left
            double allowed = std::fabs(want) * (exact ? 4e-7 : 5e-6) + 0x1p-149 * (x[i] < -126 && x[i] >= -126.5);
            check(exact ? "exponentials of degree 6" : "exponentials of degree 4", out[i], want, allowed, text({(int)i}));
        }
    }
    Array memory(F32, 1 << 17);
    memory.fill();
    must("read", read_(memory.data, (L)memory.bytes(), 2) == 0, "");
    must("threads_used", threads_used(1) == 1 && threads_used(3) == std::min<int>(3, (int)std::thread::hardware_concurrency()), "team");
}

int main(int count, char** words) {
    if (count != 3) return fprintf(stderr, "harness LIBRARY SEED\n"), 2;
    random_.seed(strtoull(words[2], nullptr, 10));
    printf("seed %s\n", words[2]);
    open_library(words[1]);
    printf("width %d, bf16 %d\n", width(), has_bf16());
    measures();
    for (int type : {F32, BF16, F16}) {
        if (type != F32) conversions(type);
        small_operations(type), products(type), writes(type);
        for (int to : {I8, F8}) quantized_writes(type, to);
    }
    attention();
    for (int type : {F32, BF16, F16})
        for (int kv_type : {type, (int)I8, (int)F8}) whole_steps(type, kv_type), whole_runs(type, kv_type);
    for (auto& [name, f] : found) printf("%-48s %9ld checks, worst %.3f of what is allowed\n", name.c_str(), f.checks, f.worst);
    printf(failed ? "FAILED\n" : "passed\n");
    return failed;
}
