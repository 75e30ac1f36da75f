// Weights arranged for products: panels of PANEL outputs that are read from the first byte to the last, whatever the
// number of rows. A panel has, input by input, the weights of its outputs; in bf16, where the machine multiplies pairs of
// it, pair by pair of inputs, elsewhere so that they are quickly widened. A gated panel has vectors of gates and of ups in turn.
//
// Every output is one running sum over the inputs, in their order: a row's result depends neither on the other rows, nor
// on how many there are, nor on the threads.
#pragma once
#include "parallel.h"
#include "pool.h"
#include "rows.h"

enum { PANEL = 32, VECTORS = PANEL / W };  // outputs, and vectors of them
// Panels that one row goes through side by side, and bytes that each is fetched ahead: as was faster (docs/kernels.md). With
// AVX-512, memory gives Intel's processors more by two panels and 1 KB ahead; AMD's want one.
enum { STREAMS = W == 8 ? 3 : W == 16 ? 2 : 1 };  // at most
#if defined(MP_AVX512)
static const int streams = (__builtin_cpu_init(), __builtin_cpu_is("intel")) ? STREAMS : 1;
#else
constexpr int streams = STREAMS;
#endif
template <int S> constexpr int STREAM_AHEAD = W == 16 && S > 1 ? 1024 : 512;

// What codes of a packed weight stand for: whole numbers, one of 16 bytes or floats, or floats of 8 bits.
enum Values { WHOLE = 0, BYTE_TABLE = 1, FLOAT_TABLE = 2, FLOAT_E4M3 = 3, FLOAT_E5M2 = 4 };
// One arranged matrix. Mirrors moonpool/engine/kernels/native/structures.py.
struct Panels {
    const char* weight;
    const char* bias;  // [outputs] in the matrix's type, or null
    int64_t outputs, inputs;
    int32_t type, gated;  // gated: outputs are gates, then as many ups; results are half as many
    // Of packed weights, see packed.h; bits 0: weights are of `type`. Of a scale or an offset bytes: 1, 2 or 4; no offsets: 0.
    int32_t bits, zero, scale_bytes, offset_bytes;
    int64_t group, block;  // inputs that share a scale; that share units, else the same as group
    int32_t values;  // what codes stand for, see Values
    uint8_t table[16];
    float floats[16];
    int64_t columns() const { return gated ? outputs / 2 : outputs; }       // of the result
    int64_t width() const { return gated ? PANEL / 2 : PANEL; }              // columns of a panel
    int64_t count() const { return (columns() + width() - 1) / width(); }    // panels
    int64_t bytes() const { return bits ? inputs / block * block_bytes() : PANEL * inputs * type_bytes[type]; }  // of a panel
    int64_t group_bytes() const { return PANEL * (scale_bytes + offset_bytes + group * bits / 8); }
    int64_t unit_bytes() const { return PANEL * 2 * ((scale_bytes == 1) + (offset_bytes == 1)); }  // in front of a block
    int64_t block_bytes() const { return unit_bytes() + block / group * group_bytes(); }
    // The output that lane `lane` of panel `panel` stands for, or `outputs` or more for none.
    int64_t output(int64_t panel, int lane) const {
        if (!gated) return panel * PANEL + lane;
        int64_t column = panel * (PANEL / 2) + lane / (2 * W) * W + lane % W;
        if (column >= outputs / 2) return outputs;
        return lane / W % 2 ? outputs / 2 + column : column;
    }
};
// Whether elements of this type lie in pairs of inputs.
template <class T> constexpr bool paired() {
#if defined(MP_PAIRS)
    return __is_same(T, bf16);
#else
    return false;
#endif
}
// What the sums read rows as: bf16 where it lies in pairs, else float.
template <class T, bool PAIRS> struct Reads { typedef float type; };
template <class T> struct Reads<T, true> { typedef T type; };
template <class T> using Read = typename Reads<T, paired<T>()>::type;
// Where a panel has the weight of input k for one lane. Two vectors of bf16 lie as the halves of one of integers.
template <class T> INLINE int64_t place(int64_t k, int lane) {
    if (paired<T>()) return (k / 2 * PANEL + lane) * 2 + k % 2;
    return k * PANEL + (__is_same(T, bf16) ? lane / (2 * W) * 2 * W + lane % W * 2 + lane / W % 2 : lane);
}
// Vectors `from` and `from` + 1 of a panel's input, `from` even.
template <class T> INLINE void two_vectors(const T* input, int from, vf* to) {
    to[0] = widen(input + from * W), to[1] = widen(input + (from + 1) * W);
}
INLINE void two_vectors(const bf16* input, int from, vf* to) {
    vu both = load_as<vu>(input + from * W);
    to[0] = (vf)(both << 16), to[1] = (vf)(both & 0xffff0000u);
}
// Where one output's weights lie: its panel, and its lane there.
struct Seat { int64_t panel; int lane; };
INLINE Seat seat(const Panels& p, int64_t output) {
    if (!p.gated) return {output / PANEL, (int)(output % PANEL)};
    int up = output >= p.outputs / 2;
    int64_t column = up ? output - p.outputs / 2 : output;
    int in = (int)(column % (PANEL / 2));
    return {column / (PANEL / 2), in / W * 2 * W + up * W + in % W};
}
// ---- what becomes of sums: [rows, columns first to last) of the result ----
enum End { PLAIN = 0, ADD = 1, WIDE = 2 };  // the result; added to what is there; as float
// What each row gets besides, before it is finished: the product of x [rows, ranks], as sums read it, with a matrix that
// has the result's outputs in the same lanes; by row, null: nothing.
struct LowRankRows { const void* x; int64_t stride; const Panels* const* ups; };
struct Result { void* out; int64_t stride; int end; int64_t first, last; const LowRankRows* added; };

// x [rows, inputs] by the columns first to last of the result. Returns 1 where there is no memory to work in.
template <class T>
int product(const Panels& p, const T* x, int64_t stride, int64_t rows, const Result& r, int threads);
// Adds to sums [rows, PANEL] of a panel, `row` the first of them.
template <class T> void add_low_rank(const LowRankRows& a, int64_t panel, int64_t row, int rows, float* sums);
// One row by the outputs of one panel, as `product`.
template <class T> void one_panel(const Panels& p, const Read<T>* x, int64_t panel, const Result& r);
