// Tokens through a Decoder: a list of operations on rows of activations, worked off by all threads together, so that a
// token costs one call instead of a thousand small ones. generation/program.py writes the list.
//
// Activations are fp32, a row a token. Every sum is taken in an order that depends on the row's own length and places
// alone: a token's numbers are the same, bit for bit, alone or among others, and in whatever portions a text is read.
//
// Weights are fp32 or bf16, a row an output, or packed (packed.py): blocks of 16 outputs × 32 inputs, so that a vector
// holds one number of each output. Packed weights meet activations that are rounded to 8 bits by blocks of 32, and the
// products of a block are summed as whole numbers.

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <type_traits>
#include <vector>

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

// What the list is made of. forward.py has the same, field by field.
struct Op {
    int64_t kind, in, out;       // buffers
    int64_t width, rows;         // numbers of a row that is read; numbers that are made of it
    int64_t out_width, offset;   // a row of `out`, and where in it the first number goes
    int64_t variant;
    const void *weights;
    const float *bias;
    float scale, eps;
};

enum Kind { EMBED, POSITION, RMS_NORM, LAYER_NORM, LINEAR, ATTEND, ACTIVATE, ADD };
enum Numbers { FP32, BF16, Q4, Q8, INT8 };
enum Activation { SWIGLU, GEGLU, GEGLU_TANH, SWIGLU_CLAMPED, GELU, GELU_TANH, RELU, RELU2 };
constexpr int64_t ADDS = 1 << 8;   // LINEAR: add `scale` times the result to what `out` holds
constexpr int64_t AGAIN = 1 << 9;  // LINEAR: the rounded input of the operation before is this one's too

struct Attention {
    int64_t layer, n_heads, n_kv_heads, head_dim, rope_dim, adjacent, window, norms_whole;
    const float *q_norm, *k_norm, *cosines, *sines, *slopes, *sinks;
    float eps, scale, softcap;
    int32_t has_norm;
};

struct Cache {  // of a layer and a row: [n_kv_heads, slots, head_dim]
    void *keys, *values;
    float *key_scales, *value_scales;  // [n_kv_heads, slots], of int8
    int64_t slots;
};

struct Pass {
    float *const *buffers;
    int64_t n_tokens;
    const int64_t *ids, *rows, *places;  // of each token; those of a row follow one another
    const Cache *caches;               // [layers, n_rows]
    int64_t n_rows, cache_type;
    const int64_t *overwrites;         // of each layer: what is written takes the place of what its own first tokens see
    int8_t *rounded;   // [n_tokens, widest input]
    float *steps;      // [n_tokens, blocks, STEPS]: what a rounded number counts, that times the block's sum, the sum
};

constexpr int64_t ROWS = 16, COLUMNS = 32;  // of a packed block
constexpr int64_t STEPS = 3;
constexpr int64_t BYTES_OF_Q4 = 320, BYTES_OF_Q8 = 544;
constexpr int64_t AHEAD = 1024;  // bytes of weights that are asked for before they are needed

// All threads meet here. They spin, since the next one is a microsecond away, and give way where it is not.
class Barrier {
  public:
    void set(int n) { n_ = n, left_.store(n); }
    void wait() {
        if (n_ == 1) return;
        int round = round_.load(std::memory_order_relaxed);
        if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            left_.store(n_, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++)
            if (spins > 4000) sched_yield();
    }

  private:
    int n_ = 1;
    alignas(64) std::atomic<int> left_{1};
    alignas(64) std::atomic<int> round_{0};
};

struct Thread {
    int id, n;
    Barrier *barrier;
    std::vector<float> *shared;  // by all of them; one makes room, and they meet before they use it
    // This thread's part of so many.
    int64_t begin(int64_t total) const { return total * id / n; }
    int64_t end(int64_t total) const { return total * (id + 1) / n; }
};

// ---- vectors

#if defined(__AVX512F__)
constexpr int64_t W = 16;
#elif defined(__AVX2__)
constexpr int64_t W = 8;
#else
constexpr int64_t W = 4;
#endif
typedef float vec __attribute__((vector_size(W * 4)));

inline vec load(const float *from) {
    vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline vec load(const bf16 *from) {
#if defined(__AVX512F__)
    __m256i bits = _mm256_loadu_si256((const __m256i *)from);
    return (vec)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(__AVX2__)
    __m128i bits = _mm_loadu_si128((const __m128i *)from);
    return (vec)_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
    vec v;
    for (int64_t i = 0; i < W; i++) v[i] = get(from[i]);
    return v;
#endif
}

inline vec load(const int8_t *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    vec v;
    for (int64_t i = 0; i < W; i++) v[i] = from[i];
    return v;
#endif
}

inline vec spread(float x) {
#if defined(__AVX512F__)
    return (vec)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (vec)_mm256_set1_ps(x);
#else
    return vec{} + x;
#endif
}

inline void store(float *to, vec v) { std::memcpy(to, &v, sizeof v); }

// a · b + c, rounded once where the machine can. Written out, because a compiler may decide it anew at every place.
inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Reads numbers that nobody needs yet, in their order, which the processor foresees.
template <typename T>
inline void touch(const T *from, int64_t n) {
    const char *bytes = (const char *)from;
    for (int64_t i = 0; i + 32 <= n * int64_t(sizeof(T)); i += 32) {
        int32_t read;
        std::memcpy(&read, bytes + i, 4);
        asm volatile("" : : "r"(read));
    }
}

// What is to be in a register here: left to itself, a compiler reads the same number from memory for every use, or puts
// sums off until it needs more registers than the 16 that AVX2 has.
template <typename V>
inline void pin(V &v) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    asm volatile("" : "+v"(v));
#endif
}

// The sums of 8 vectors: the upper half of each added to its lower half, and so on.
inline void sums_of_8(const vec *v, float *to) {
#if defined(__AVX2__)
    __m256 s[8];
    for (int i = 0; i < 8; i++) {
#if defined(__AVX512F__)
        s[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v[i], 1)));
#else
        s[i] = (__m256)v[i];
#endif
    }
    __m256 fours[4], twos[2];
    for (int i = 0; i < 4; i++)
        fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(s[i], s[i + 4], 0x20), _mm256_permute2f128_ps(s[i], s[i + 4], 0x31));
    for (int i = 0; i < 2; i++) {
        __m256 a = fours[2 * i], b = fours[2 * i + 1];
        twos[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    }
    __m256 a = twos[0], b = twos[1];
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)));
#else
    for (int i = 0; i < 8; i++) {
        float part[W];
        store(part, v[i]);
        for (int64_t half = W / 2; half; half /= 2)
            for (int64_t j = 0; j < half; j++) part[j] += part[j + half];
        to[i] = part[0];
    }
#endif
}

inline float sum(vec v) {
    vec vs[8] = {v};
    float sums[8];
    sums_of_8(vs, sums);
    return sums[0];
}

// ---- products with fp32 and bf16 weights

// R outputs of N tokens: sums[r][t] = Σ weights[r] · x[t].
template <int R, int N, typename T>
inline void dot(const T *weights, const float *x, int64_t width, float (*sums)[8]) {
    vec totals[R][N] = {};
    int64_t k = 0;
    for (; k + W <= width; k += W) {
        vec inputs[N];
        for (int t = 0; t < N; t++) inputs[t] = load(x + t * width + k);
        for (int r = 0; r < R; r++) {
            vec w = load(weights + r * width + k);
            for (int t = 0; t < N; t++) totals[r][t] = fused(w, inputs[t], totals[r][t]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) {
            float total = sum(totals[r][t]);
            for (int64_t i = k; i < width; i++) total = fused(get(weights[r * width + i]), x[t * width + i], total);
            sums[r][t] = total;
        }
}

inline void put_result(const Op &op, float *out, int64_t row, float value) {
    if (op.bias) value += op.bias[row];
    if (op.variant & ADDS)
        out[row] = fused(op.scale, value, out[row]);
    else
        out[row] = value;
}

template <int R, int N, typename T>
inline void dot_into(const Op &op, const T *weights, const float *x, float *out, int64_t row) {
    float sums[R][8];
    dot<R, N>(weights + row * op.width, x, op.width, sums);
    for (int r = 0; r < R; r++)
        for (int t = 0; t < N; t++) put_result(op, out + t * op.out_width, row + r, sums[r][t]);
}

template <int N, typename T>
void dots(const Op &op, const T *weights, const float *x, float *out, int64_t row, int64_t last) {
    constexpr int R = N >= 4 ? 3 : 8;
    for (; row + R <= last; row += R) dot_into<R, N>(op, weights, x, out, row);
    for (; row < last; row++) dot_into<1, N>(op, weights, x, out, row);
}

template <typename T>
void linear(const Op &op, const Pass &pass, const Thread &me) {
    const T *weights = (const T *)op.weights;
    const float *in = pass.buffers[op.in];
    float *out = pass.buffers[op.out] + op.offset;
    int64_t first = me.begin(op.rows), last = me.end(op.rows);
    // As many tokens at a time as stay in the cache, and of their products as many rows as do.
    int64_t tokens = std::max<int64_t>(4, (1 << 16) / op.width / 4 * 4);
    for (int64_t start = 0; start < pass.n_tokens; start += tokens)
        for (int64_t row = first; row < last; row += 24) {
            int64_t until = std::min(last, row + 24), stop = std::min(pass.n_tokens, start + tokens), t = start;
            for (; t + 4 <= stop; t += 4)
                dots<4>(op, weights, in + t * op.width, out + t * op.out_width, row, until);
            for (; t < stop; t++) dots<1>(op, weights, in + t * op.width, out + t * op.out_width, row, until);
        }
}

// ---- products with packed weights

// [n_tokens, width] to 8 bits, by blocks.
void round_inputs(const Op &op, const Pass &pass, const Thread &me) {
    int64_t n_blocks = op.width / COLUMNS, total = pass.n_tokens * n_blocks;
    for (int64_t b = me.begin(total); b < me.end(total); b++) {
        const float *x = pass.buffers[op.in] + b * COLUMNS;
        int8_t *to = pass.rounded + b * COLUMNS;
        vec sizes = {}, checks = {};
        for (int64_t i = 0; i < COLUMNS; i += W) {
            vec some = load(x + i);
            vec size = some < 0 ? -some : some;
            sizes = size > sizes ? size : sizes;
            checks += some * 0;  // rounding would make a number of what is none
        }
        float largest = 0, check = 0;
        for (int64_t i = 0; i < W; i++) largest = std::max(largest, sizes[i]), check += checks[i];
        float step = largest / 127, factor = largest > 0 ? 127 / largest : 0;
        int32_t whole = 0;
        for (int64_t i = 0; i < COLUMNS; i++) {
            int32_t q = int32_t(std::nearbyint(x[i] * factor));
            to[i] = int8_t(q);
            whole += q;
        }
        pass.steps[STEPS * b] = step + check;
        pass.steps[STEPS * b + 1] = (step + check) * whole;
        pass.steps[STEPS * b + 2] = whole;
    }
}

inline float half(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff, out;
    if (rest >= 0x7c00)
        out = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400)
        out = sign | ((rest << 13) + (112u << 23));
    else {
        float small = rest * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&out, &small, 4);
        out |= sign;
    }
    float value;
    std::memcpy(&value, &out, 4);
    return value;
#endif
}

inline int32_t four(const int8_t *from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return value;
}

// The products of one block, 16 outputs × 32 inputs, with N tokens' rounded inputs: totals[token][output] += step · step ·
// Σ q · x, and for Q4, whose numbers are step · q + least, + least · (the inputs' sum).
//
// In a block, byte j of pair p holds for Q4 number j of group p in its low half and of group p + 4 in its high half; a
// group is 4 inputs of each of the 16 outputs. Q8 has 8 groups of 64 bytes. Behind them are the 16 steps in fp16, and
// for Q4 the 16 least numbers.
//
// A group meets all tokens before the next one comes: its weights are taken apart once, four inputs of a token are spread
// once for all outputs, and what is held meanwhile are the sums.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

typedef __m512 Totals;
constexpr int64_t LANES = 16, VECTORS = ROWS / LANES;
constexpr int TOGETHER_Q4 = 8, TOGETHER_Q8 = 8;  // tokens, whose sums the registers hold

inline Totals no_totals() { return _mm512_setzero_ps(); }
inline void read_totals(const Totals &totals, float *to) { _mm512_storeu_ps(to, totals); }

template <int N>
inline void block_q4(const uint8_t *block, const int8_t *const *x, const float *const *steps, Totals (*totals)[1]) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i whole[N];
    for (int t = 0; t < N; t++) whole[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        __m512i both = _mm512_loadu_si512(block + 64 * (g % 4));
        __m512i q = _mm512_and_si512(g < 4 ? both : _mm512_srli_epi16(both, 4), low);
        for (int t = 0; t < N; t++) whole[t] = _mm512_dpbusd_epi32(whole[t], q, _mm512_set1_epi32(four(x[t] + 4 * g)));
    }
    __m512 step = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(block + 256)));
    __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(block + 288)));
    for (int t = 0; t < N; t++) {
        __m512 factor = _mm512_mul_ps(step, _mm512_set1_ps(steps[t][0]));
        totals[t][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[t]), factor, totals[t][0]);
        totals[t][0] = _mm512_fmadd_ps(least, _mm512_set1_ps(steps[t][1]), totals[t][0]);
    }
}

template <int N>
inline void block_q8(const uint8_t *block, const int8_t *const *x, const float *const *steps, Totals (*totals)[1]) {
    const __m512i sign = _mm512_set1_epi8(-128);
    __m512i whole[N];
    for (int t = 0; t < N; t++) whole[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        __m512i q = _mm512_xor_si512(_mm512_loadu_si512(block + 64 * g), sign);  // q + 128, an unsigned byte
        for (int t = 0; t < N; t++) whole[t] = _mm512_dpbusd_epi32(whole[t], q, _mm512_set1_epi32(four(x[t] + 4 * g)));
    }
    __m512 step = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(block + 512)));
    for (int t = 0; t < N; t++) {
        // Both are whole numbers below 2^24.
        __m512 products = _mm512_sub_ps(_mm512_cvtepi32_ps(whole[t]), _mm512_set1_ps(128 * steps[t][2]));
        __m512 factor = _mm512_mul_ps(step, _mm512_set1_ps(steps[t][0]));
        totals[t][0] = _mm512_fmadd_ps(products, factor, totals[t][0]);
    }
}

#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)

typedef __m256 Totals;
constexpr int64_t LANES = 8, VECTORS = ROWS / LANES;
constexpr int TOGETHER_Q4 = 6, TOGETHER_Q8 = 4;  // tokens, whose sums the registers hold

inline Totals no_totals() { return _mm256_setzero_ps(); }
inline void read_totals(const Totals &totals, float *to) { _mm256_storeu_ps(to, totals); }

inline __m256 halves(const uint8_t *from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }

template <int N>
inline void block_q4(const uint8_t *block, const int8_t *const *x, const float *const *steps,
                     Totals (*totals)[VECTORS]) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i whole[N][VECTORS];
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        __m256i q[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(block + 64 * (g % 4) + 32 * v));
            q[v] = _mm256_and_si256(g < 4 ? both : _mm256_srli_epi16(both, 4), low);
        }
        for (int t = 0; t < N; t++) {
            __m256i inputs = _mm256_set1_epi32(four(x[t] + 4 * g));
            for (int v = 0; v < VECTORS; v++) {
                // 16 bits are enough for eight of them: 8 · 2 · 15 · 127 = 30,480.
                __m256i pairs = _mm256_maddubs_epi16(q[v], inputs);
                whole[t][v] = g ? _mm256_add_epi16(whole[t][v], pairs) : pairs;
                if (N > 1) pin(whole[t][v]);
            }
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        __m256 step = halves(block + 256 + 16 * v), least = halves(block + 288 + 16 * v);
        for (int t = 0; t < N; t++) {
            __m256 products = _mm256_cvtepi32_ps(_mm256_madd_epi16(whole[t][v], ones));
            __m256 factor = _mm256_mul_ps(step, _mm256_set1_ps(steps[t][0]));
            totals[t][v] = _mm256_fmadd_ps(products, factor, totals[t][v]);
            totals[t][v] = _mm256_fmadd_ps(least, _mm256_set1_ps(steps[t][1]), totals[t][v]);
        }
    }
}

template <int N>
inline void block_q8(const uint8_t *block, const int8_t *const *x, const float *const *steps,
                     Totals (*totals)[VECTORS]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i whole[N][VECTORS];
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        __m256i q[VECTORS], sizes[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            q[v] = _mm256_loadu_si256((const __m256i *)(block + 64 * g + 32 * v));
            sizes[v] = _mm256_sign_epi8(q[v], q[v]);
        }
        for (int t = 0; t < N; t++) {
            __m256i inputs = _mm256_set1_epi32(four(x[t] + 4 * g));
            for (int v = 0; v < VECTORS; v++) {
                __m256i pairs = _mm256_maddubs_epi16(sizes[v], _mm256_sign_epi8(inputs, q[v]));  // 2 · 127 · 127 at most
                __m256i fours = _mm256_madd_epi16(pairs, ones);
                whole[t][v] = g ? _mm256_add_epi32(whole[t][v], fours) : fours;
                if (N > 1) pin(whole[t][v]);
            }
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        __m256 step = halves(block + 512 + 16 * v);
        for (int t = 0; t < N; t++) {
            __m256 factor = _mm256_mul_ps(step, _mm256_set1_ps(steps[t][0]));
            totals[t][v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[t][v]), factor, totals[t][v]);
        }
    }
}

#else

struct Totals {
    float of[ROWS];
};
constexpr int64_t LANES = ROWS, VECTORS = 1;
constexpr int TOGETHER_Q4 = 4, TOGETHER_Q8 = 4;  // tokens

inline Totals no_totals() { return {}; }
inline void read_totals(const Totals &totals, float *to) { std::copy(totals.of, totals.of + ROWS, to); }

template <int N, bool IS_Q4>
inline void block_of_any(const uint8_t *block, const int8_t *const *x, const float *const *steps, Totals (*totals)[1]) {
    for (int t = 0; t < N; t++) {
        int32_t whole[ROWS] = {};
        for (int g = 0; g < 8; g++)
            for (int r = 0; r < ROWS; r++)
                for (int i = 0; i < 4; i++) {
                    int at = 4 * r + i;
                    int q = IS_Q4 ? (g < 4 ? block[64 * g + at] & 15 : block[64 * (g - 4) + at] >> 4)
                                  : int(int8_t(block[64 * g + at]));
                    whole[r] += q * x[t][4 * g + i];
                }
        const uint8_t *behind = block + (IS_Q4 ? 256 : 512);
        for (int r = 0; r < ROWS; r++) {
            uint16_t bits;
            std::memcpy(&bits, behind + 2 * r, 2);
            totals[t][0].of[r] += whole[r] * (half(bits) * steps[t][0]);
            if (!IS_Q4) continue;
            std::memcpy(&bits, behind + 32 + 2 * r, 2);
            totals[t][0].of[r] += half(bits) * steps[t][1];
        }
    }
}

template <int N>
inline void block_q4(const uint8_t *block, const int8_t *const *x, const float *const *steps, Totals (*totals)[1]) {
    block_of_any<N, true>(block, x, steps, totals);
}

template <int N>
inline void block_q8(const uint8_t *block, const int8_t *const *x, const float *const *steps, Totals (*totals)[1]) {
    block_of_any<N, false>(block, x, steps, totals);
}

#endif

template <int N, bool IS_Q4>
void packed_rows(const Op &op, const Pass &pass, const uint8_t *strip, int64_t token, int64_t row, int64_t ahead) {
    constexpr int64_t BYTES = IS_Q4 ? BYTES_OF_Q4 : BYTES_OF_Q8;
    const int64_t n_blocks = op.width / COLUMNS;
    const int8_t *x[N];
    const float *steps[N];
    Totals totals[N][VECTORS];
    for (int t = 0; t < N; t++) {
        x[t] = pass.rounded + (token + t) * op.width;
        steps[t] = pass.steps + (token + t) * n_blocks * STEPS;
        for (int v = 0; v < VECTORS; v++) totals[t][v] = no_totals();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t *block = strip + b * BYTES;
        if (ahead)
            for (int64_t at = 0; at < BYTES; at += 64) __builtin_prefetch(block + ahead + at);
        if (IS_Q4)
            block_q4<N>(block, x, steps, totals);
        else
            block_q8<N>(block, x, steps, totals);
        for (int t = 0; t < N; t++) x[t] += COLUMNS, steps[t] += STEPS;
    }
    for (int v = 0; v < VECTORS; v++) {
        const int64_t first = row + v * LANES, here = std::min(LANES, op.rows - first);
        for (int t = 0; t < N; t++) {
            float results[LANES], *out = pass.buffers[op.out] + (token + t) * op.out_width + op.offset;
            read_totals(totals[t][v], results);
            for (int64_t r = 0; r < here; r++) put_result(op, out, first + r, results[r]);
        }
    }
}

// All tokens from `token` to `stop`, N at a time, then the rest. The first of all `n` wait for the memory: where there are
// no others, they ask for what comes next, and else the last ones ask for the strip `stride` bytes on.
template <int N, bool IS_Q4>
void packed_strip(const Op &op, const Pass &pass, const uint8_t *strip, int64_t stride, int64_t token, int64_t stop,
                  int64_t n, int64_t row) {
    for (; token + N <= stop; token += N)
        packed_rows<N, IS_Q4>(op, pass, strip, token, row, token + N < stop ? 0 : n <= N ? AHEAD : stride);
    if constexpr (N > 1)
        if (token < stop) packed_strip<N - 1, IS_Q4>(op, pass, strip, stride, token, stop, n, row);
}

template <bool IS_Q4>
void packed_linear(const Op &op, const Pass &pass, const Thread &me) {
    constexpr int TOGETHER = IS_Q4 ? TOGETHER_Q4 : TOGETHER_Q8;
    if (!(op.variant & AGAIN)) {
        round_inputs(op, pass, me);
        me.barrier->wait();
    }
    const uint8_t *weights = (const uint8_t *)op.weights;
    int64_t stride = op.width / COLUMNS * (IS_Q4 ? BYTES_OF_Q4 : BYTES_OF_Q8);  // bytes of 16 outputs
    int64_t n = (op.rows + ROWS - 1) / ROWS, first = me.begin(n), last = me.end(n);
    // As many tokens at a time as stay in the nearest cache.
    const int64_t tokens = std::max<int64_t>(TOGETHER, (1 << 14) / op.width / TOGETHER * TOGETHER);
    for (int64_t start = 0; start < pass.n_tokens; start += tokens)
        for (int64_t b = first; b < last; b++) {
            const int64_t stop = std::min(pass.n_tokens, start + tokens);
            packed_strip<TOGETHER, IS_Q4>(op, pass, weights + b * stride, stride, start, stop, stop - start, b * ROWS);
        }
}

// ---- rows of tables

void embed(const Op &op, const Pass &pass, const Thread &me) {
    for (int64_t t = me.begin(pass.n_tokens); t < me.end(pass.n_tokens); t++) {
        int64_t row = pass.ids[t], n_blocks = op.width / COLUMNS, r = row % ROWS;
        float *out = pass.buffers[op.out] + t * op.width;
        const uint8_t *packed = (const uint8_t *)op.weights;
        for (int64_t i = 0; i < op.width; i++) {
            int64_t b = row / ROWS * n_blocks + i / COLUMNS, group = i % COLUMNS / 4, at = 4 * r + i % 4;
            uint16_t bits;
            switch (op.variant) {
            case FP32: out[i] = ((const float *)op.weights)[row * op.width + i]; break;
            case BF16: out[i] = get(((const bf16 *)op.weights)[row * op.width + i]); break;
            case Q4: {
                const uint8_t *block = packed + b * BYTES_OF_Q4;
                int q = group < 4 ? block[64 * group + at] & 15 : block[64 * (group - 4) + at] >> 4;
                std::memcpy(&bits, block + 256 + 2 * r, 2);
                float value = half(bits) * q;
                std::memcpy(&bits, block + 288 + 2 * r, 2);
                out[i] = value + half(bits);
                break;
            }
            case Q8: {
                const uint8_t *block = packed + b * BYTES_OF_Q8;
                std::memcpy(&bits, block + 512 + 2 * r, 2);
                out[i] = half(bits) * int8_t(block[64 * group + at]);
            }
            }
            out[i] *= op.scale;
        }
    }
}

void add_position(const Op &op, const Pass &pass, const Thread &me) {
    for (int64_t t = me.begin(pass.n_tokens); t < me.end(pass.n_tokens); t++) {
        const float *row = (const float *)op.weights + pass.places[t] * op.width;
        float *out = pass.buffers[op.out] + t * op.width;
        for (int64_t i = 0; i < op.width; i++) out[i] += row[i];
    }
}

// ---- norms

inline float sum_of_squares(const float *x, int64_t width, float mean) {
    vec total = {};
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        vec v = load(x + i) - mean;
        total += v * v;
    }
    float result = sum(total);
    for (; i < width; i++) result += (x[i] - mean) * (x[i] - mean);
    return result;
}

inline float rms_scale(const float *x, int64_t width, float eps) {
    return 1 / std::sqrt(sum_of_squares(x, width, 0) / width + eps);
}

void norm(const Op &op, const Pass &pass, const Thread &me) {
    const float *weights = (const float *)op.weights;
    for (int64_t t = me.begin(pass.n_tokens); t < me.end(pass.n_tokens); t++) {
        const float *x = pass.buffers[op.in] + t * op.width;
        float *out = pass.buffers[op.out] + t * op.width, mean = 0, scale;
        if (op.kind == RMS_NORM) {
            scale = rms_scale(x, op.width, op.eps);
        } else {
            vec total = {};
            int64_t i = 0;
            for (; i + W <= op.width; i += W) total += load(x + i);
            mean = sum(total);
            for (; i < op.width; i++) mean += x[i];
            mean /= op.width;
            scale = 1 / std::sqrt(sum_of_squares(x, op.width, mean) / op.width + op.eps);
        }
        for (int64_t i = 0; i < op.width; i++) {
            float value = (x[i] - mean) * scale;
            if (weights) value *= weights[i];
            out[i] = op.bias ? value + op.bias[i] : value;
        }
    }
}

// ---- attention

inline float *head_of(const Op &op, const Pass &pass, int64_t token, int64_t head, int64_t head_dim) {
    return pass.buffers[op.in] + token * op.width + head * head_dim;
}

template <typename C>
inline C *slot_of(void *held, const Attention &a, const Cache &cache, int64_t kv_head, int64_t slot) {
    return (C *)held + (kv_head * cache.slots + slot) * a.head_dim;
}

// The norm and the rotation of a query's or key's head, where it is.
void turn(const Op &op, const Attention &a, const Pass &pass, int64_t token, int64_t head) {
    float *x = head_of(op, pass, token, head, a.head_dim);
    bool is_query = head < a.n_heads;
    if (a.has_norm && !a.norms_whole) {
        float scale = rms_scale(x, a.head_dim, a.eps);
        const float *w = is_query ? a.q_norm : a.k_norm;
        for (int64_t i = 0; i < a.head_dim; i++) x[i] = w ? x[i] * scale * w[i] : x[i] * scale;
    }
    if (!a.cosines) return;
    const float *c = a.cosines + pass.places[token] * a.rope_dim, *s = a.sines + pass.places[token] * a.rope_dim;
    int64_t n = a.rope_dim / 2;
    for (int64_t i = 0; i < n; i++) {
        int64_t one = a.adjacent ? 2 * i : i, other = a.adjacent ? 2 * i + 1 : i + n;
        float x1 = x[one], x2 = x[other];
        x[one] = x1 * c[one] + x2 * s[one];
        x[other] = x2 * c[other] + x1 * s[other];
    }
}

// The norm over all heads of the queries, or of the keys, of a token.
void norm_whole(const Op &op, const Attention &a, const Pass &pass, int64_t token, bool of_queries) {
    int64_t width = (of_queries ? a.n_heads : a.n_kv_heads) * a.head_dim;
    float *x = head_of(op, pass, token, of_queries ? 0 : a.n_heads, a.head_dim);
    const float *w = of_queries ? a.q_norm : a.k_norm;
    float scale = rms_scale(x, width, a.eps);
    for (int64_t i = 0; i < width; i++) x[i] = w ? x[i] * scale * w[i] : x[i] * scale;
}

template <typename C>
inline float number(C value) {
    if constexpr (std::is_same<C, int8_t>::value)
        return value;
    else
        return get(value);
}

inline void keep(const float *x, float *to, float *scale, int64_t n) { std::copy(x, x + n, to); }

inline void keep(const float *x, bf16 *to, float *scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) put(to + i, x[i]);
}

inline void keep(const float *x, int8_t *to, float *scale, int64_t n) {
    float largest = 0, check = 0;
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i])), check += x[i] * 0;
    *scale = largest / 127 + check;  // which is no number where one of them is none
    float least = std::max(largest / 127, 1.17549435e-38f);
    for (int64_t i = 0; i < n; i++) to[i] = int8_t(std::nearbyint(x[i] / least));
}

template <typename C>
void remember(const Op &op, const Attention &a, const Pass &pass, const Cache &cache, int64_t token, int64_t kv_head) {
    int64_t slot = pass.places[token] % cache.slots, at = kv_head * cache.slots + slot;
    const float *k = head_of(op, pass, token, a.n_heads + kv_head, a.head_dim);
    const float *v = head_of(op, pass, token, a.n_heads + a.n_kv_heads + kv_head, a.head_dim);
    keep(k, slot_of<C>(cache.keys, a, cache, kv_head, slot), cache.key_scales + at, a.head_dim);
    keep(v, slot_of<C>(cache.values, a, cache, kv_head, slot), cache.value_scales + at, a.head_dim);
}

constexpr int64_t KEYS = 64;     // worked on together
constexpr int64_t QUERIES = 3;   // with 4 keys they fill 16 registers
constexpr int64_t TOKENS = 8;    // whose queries meet a portion of the keys while it is in the nearest cache

struct Query {
    const float *q;
    float slope;
    int64_t place;
};

// What keys answer a query is head_dim + 2 numbers: the sums of weights · values, the largest score, and the sum of the
// weights e^(score - largest).
constexpr int64_t BESIDE_SUMS = 2;
constexpr int64_t MOST_SHARED = 1 << 24;  // numbers, 64 MB

struct Portion {  // of the keys of a row that follow one another from place `start` on
    int64_t start, n;
    const void *keys[KEYS], *values[KEYS];
    float key_scales[KEYS], value_scales[KEYS];
};

// The queries of some tokens of a row that share their keys. Several tokens see keys from the same place on.
struct Group {
    const Cache *cache;
    int64_t first_token, n_tokens, kv_head, n_heads;  // with that key
    int64_t first, last;                              // places that are seen
    bool is_alone;                                    // no other token of the row has brought its keys near
    int64_t n_portions() const { return (last - first) / KEYS + 1; }
    int64_t n_queries() const { return n_tokens * n_heads; }
    int64_t token(int64_t query) const { return first_token + query / n_heads; }
    int64_t head(int64_t query) const { return kv_head * n_heads + query % n_heads; }
};

// Scores of N queries and 8 keys, of which the last ones may be missing.
template <int N, typename C, int64_t FIXED>
inline void scores_of_8(const Query *queries, const C *const *keys, int64_t n, int64_t head_dim, float (*to)[KEYS]) {
    vec products[N][8];
    if (n < 8) std::memset(products, 0, sizeof products);  // of the missing ones
    int64_t whole = head_dim / W * W;
    for (int64_t j = 0; j < n; j += 4) {
        vec some[N][4] = {};
        const C *four[4];
        for (int64_t i = 0; i < 4; i++) four[i] = keys[std::min(j + i, n - 1)];
// All of a head unrolled would keep its queries on the stack.
#pragma GCC unroll 2
        for (int64_t d = 0; d < whole; d += W) {
            vec q[N];
            for (int i = 0; i < N; i++) q[i] = load(queries[i].q + d);
            for (int64_t k = 0; k < 4; k++) {
                vec key = load(four[k] + d);
                for (int i = 0; i < N; i++) some[i][k] = fused(key, q[i], some[i][k]);
            }
        }
        for (int i = 0; i < N; i++)
            for (int64_t k = 0; k < 4; k++) products[i][j + k] = some[i][k];
    }
    for (int i = 0; i < N; i++) {
        sums_of_8(products[i], to[i]);
        if (FIXED) continue;
        for (int64_t j = 0; j < n; j++) {
            float end = 0;
            for (int64_t d = whole; d < head_dim; d++) end = fused(number(keys[j][d]), queries[i].q[d], end);
            to[i][j] += end;
        }
    }
}

// Adds weights · values of keys `first` … `last` − 1 to the sums of N queries, `stride` numbers from one to the next.
template <int N, typename C, int64_t FIXED>
inline void add_values(float *sums, int64_t stride, const float (*weights)[KEYS], const C *const *values, int64_t first,
                       int64_t last, int64_t head_dim) {
    int64_t d = 0;
    for (; d + 4 * W <= head_dim; d += 4 * W) {
        vec out[N][4];
        for (int i = 0; i < N; i++)
            for (int j = 0; j < 4; j++) out[i][j] = load(sums + i * stride + d + j * W);
        for (int64_t k = first; k < last; k++) {
            vec weight[N];
            for (int i = 0; i < N; i++) weight[i] = spread(weights[i][k]);
            for (int j = 0; j < 4; j++) {
                vec value = load(values[k] + d + j * W);
                pin(value);
                for (int i = 0; i < N; i++) out[i][j] = fused(value, weight[i], out[i][j]);
            }
        }
        for (int i = 0; i < N; i++)
            for (int j = 0; j < 4; j++) store(sums + i * stride + d + j * W, out[i][j]);
    }
    for (; !FIXED && d < head_dim; d++)
        for (int i = 0; i < N; i++) {
            float out = sums[i * stride + d];
            for (int64_t k = first; k < last; k++) out += number(values[k][d]) * weights[i][k];
            sums[i * stride + d] = out;
        }
}

// What a portion of the keys answers N queries, each of which sees those up to its own place: [N, head_dim + 2].
template <int N, typename C, int64_t FIXED>
void meet(const Attention &a, const Query *queries, const Portion &portion, int64_t head_dim, float *answers) {
    constexpr bool IS_SCALED = std::is_same<C, int8_t>::value;
    const C *const *keys = (const C *const *)portion.keys, *const *values = (const C *const *)portion.values;
    const int64_t stride = head_dim + BESIDE_SUMS;
    alignas(64) float scores[N][KEYS];
    int64_t seen[N], common = KEYS, most = 0;
    for (int i = 0; i < N; i++) {
        seen[i] = std::min(portion.n, queries[i].place + 1 - portion.start);
        if (seen[i] < 0) seen[i] = 0;
        common = std::min(common, seen[i]), most = std::max(most, seen[i]);
    }
    for (int64_t k = 0; k < most; k += 8) {
        float some[N][KEYS];
        scores_of_8<N, C, FIXED>(queries, keys + k, std::min<int64_t>(8, most - k), head_dim, some);
        for (int i = 0; i < N; i++) std::copy(some[i], some[i] + 8, scores[i] + k);
    }
    std::fill(answers, answers + N * stride, 0.0f);
    for (int i = 0; i < N; i++) {
        const Query &query = queries[i];
        const int64_t n = seen[i];
        float *of = scores[i], top = -INFINITY;
        const int64_t end = (n + W - 1) / W * W;  // of whole vectors
        for (int64_t k = n; k < end; k++) of[k] = -INFINITY;
        for (int64_t k = 0; k < end; k += W) store(of + k, load(of + k) * a.scale);
        if (IS_SCALED)
            for (int64_t k = 0; k < n; k++) of[k] *= portion.key_scales[k];
        if (a.softcap > 0)
            for (int64_t k = 0; k < n; k++) of[k] = a.softcap * std::tanh(of[k] / a.softcap);
        if (a.slopes)
            for (int64_t k = 0; k < n; k++) of[k] -= query.slope * float(query.place - (portion.start + k));
        vec tops = spread(top), weights = {};
        for (int64_t k = 0; k < end; k += W) {
            vec some = load(of + k);
            tops = some > tops ? some : tops;
        }
        for (int64_t k = 0; k < W; k++) top = tops[k] > top ? tops[k] : top;
        const float from = top == -INFINITY ? 0 : top;  // of none of the keys is anything seen then
        for (int64_t k = 0; k < end; k += W) {
            for (int64_t j = 0; j < W; j++) of[k + j] = fast_exp(of[k + j] - from);
            weights += load(of + k);
        }
        answers[i * stride + head_dim] = top;
        answers[i * stride + head_dim + 1] = sum(weights);
        if (IS_SCALED)
            for (int64_t k = 0; k < n; k++) of[k] *= portion.value_scales[k];
    }
    add_values<N, C, FIXED>(answers, stride, scores, values, 0, common, head_dim);
    for (int i = 0; i < N; i++)
        add_values<1, C, FIXED>(answers + i * stride, stride, scores + i, values, common, seen[i], head_dim);
}

// What a portion of the keys answers a group's queries: [queries, head_dim + 2].
template <typename C, int64_t FIXED>
void meet_portion(const Attention &a, const Group &group, const std::vector<Query> &queries, int64_t number,
                  float *answers) {
    const Cache &cache = *group.cache;
    const int64_t head_dim = FIXED ? FIXED : a.head_dim, stride = head_dim + BESIDE_SUMS;
    const int64_t n = group.n_queries(), start = group.first + number * KEYS;
    Portion portion;
    portion.start = start, portion.n = std::min(KEYS, group.last + 1 - start);
    for (int64_t i = 0, slot = start % cache.slots; i < portion.n; i++) {
        portion.keys[i] = slot_of<C>(cache.keys, a, cache, group.kv_head, slot);
        portion.values[i] = slot_of<C>(cache.values, a, cache, group.kv_head, slot);
        if (std::is_same<C, int8_t>::value) {
            portion.key_scales[i] = cache.key_scales[group.kv_head * cache.slots + slot];
            portion.value_scales[i] = cache.value_scales[group.kv_head * cache.slots + slot];
        }
        slot = slot + 1 < cache.slots ? slot + 1 : 0;
    }
    if (group.is_alone)  // keys come from memory, and are met four at a time
        for (const void *const *held : {portion.keys, portion.values})
            for (int64_t i = 0; i < portion.n; i++) touch((const C *)held[i], head_dim);
    int64_t i = 0;
    for (; i + QUERIES <= n; i += QUERIES)
        meet<QUERIES, C, FIXED>(a, &queries[i], portion, head_dim, answers + i * stride);
    for (; i < n; i++) meet<1, C, FIXED>(a, &queries[i], portion, head_dim, answers + i * stride);
}

// Adds a portion's answer to that of all portions before it: always in their order, whoever has worked on them (Milakov
// and Gimelshein 2018, arXiv 1805.02867).
inline void add_answer(const float *part, float *all, int64_t head_dim) {
    const float last = all[head_dim], here = part[head_dim], top = here > last ? here : last;
    const auto factor = [top](float largest) {
        return largest == top ? 1.0f : largest == -INFINITY ? 0.0f : fast_exp(largest - top);
    };
    const float before = factor(last), now = factor(here);
    for (int64_t d = 0; d < head_dim; d++) all[d] = fused(all[d], before, part[d] * now);
    all[head_dim] = top;
    all[head_dim + 1] = fused(all[head_dim + 1], before, part[head_dim + 1] * now);
}

// The answer of no key yet, to a group's i-th query.
inline void begin_answer(const Attention &a, const Group &group, int64_t i, float *all) {
    std::fill(all, all + a.head_dim, 0.0f);
    all[a.head_dim] = a.sinks ? a.sinks[group.head(i)] : -INFINITY;
    all[a.head_dim + 1] = a.sinks ? 1 : 0;
}

inline void put_answer(const Op &op, const Attention &a, const Pass &pass, const Group &group, int64_t i,
                       const float *all) {
    float *out = pass.buffers[op.out] + group.token(i) * op.out_width + group.head(i) * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d++) out[d] = all[d] / all[a.head_dim + 1];
}

inline Group group_of(const Attention &a, const Pass &pass, int64_t token, int64_t n_tokens, int64_t kv_head) {
    const int64_t first = a.window ? std::max<int64_t>(0, pass.places[token] - a.window + 1) : 0;
    const int64_t row = pass.rows[token], behind = token + n_tokens;
    const bool follows = token > 0 && pass.rows[token - 1] == row;
    const bool is_followed = behind < pass.n_tokens && pass.rows[behind] == row;
    return {pass.caches + a.layer * pass.n_rows + row,
            token,
            n_tokens,
            kv_head,
            a.n_heads / a.n_kv_heads,
            first,
            pass.places[behind - 1],
            n_tokens == 1 && !follows && !is_followed};
}

std::vector<Query> queries_of(const Op &op, const Attention &a, const Pass &pass, const Group &group) {
    std::vector<Query> queries(group.n_queries());
    for (int64_t i = 0; i < group.n_queries(); i++) {
        const int64_t token = group.token(i), head = group.head(i);
        queries[i] = {head_of(op, pass, token, head, a.head_dim), a.slopes ? a.slopes[head] : 0, pass.places[token]};
    }
    return queries;
}

// softmax(scores) · values of a group's queries, by this thread alone.
template <typename C, int64_t FIXED>
void attend_to(const Op &op, const Attention &a, const Pass &pass, const Group &group) {
    const std::vector<Query> queries = queries_of(op, a, pass, group);
    const int64_t stride = a.head_dim + BESIDE_SUMS, n = group.n_queries();
    std::vector<float> all(n * stride), part(n * stride);
    for (int64_t i = 0; i < n; i++) begin_answer(a, group, i, &all[i * stride]);
    for (int64_t number = 0; number < group.n_portions(); number++) {
        meet_portion<C, FIXED>(a, group, queries, number, part.data());
        for (int64_t i = 0; i < n; i++) add_answer(&part[i * stride], &all[i * stride], a.head_dim);
    }
    for (int64_t i = 0; i < n; i++) put_answer(op, a, pass, group, i, &all[i * stride]);
}

// The same for few groups, by all threads: each takes portions, then each queries, whose answers it adds up.
template <typename C, int64_t FIXED>
void attend_together(const Op &op, const Attention &a, const Pass &pass, const std::vector<Group> &groups,
                     const Thread &me) {
    const int64_t stride = a.head_dim + BESIDE_SUMS;
    int64_t first = 0, turn = 0;  // the first portion's thread of each group; whose query it is
    float *at = me.shared->data();
    for (const Group &group : groups) {
        const std::vector<Query> queries = queries_of(op, a, pass, group);
        // The last portion is a short one: of each group it is another thread's.
        for (int64_t number = 0; number < group.n_portions(); number++, at += group.n_queries() * stride)
            if ((first + number) % me.n == me.id) meet_portion<C, FIXED>(a, group, queries, number, at);
        first++;
    }
    me.barrier->wait();
    std::vector<float> all(stride);
    at = me.shared->data();
    for (const Group &group : groups) {
        const int64_t n = group.n_queries();
        for (int64_t i = 0; i < n; i++, turn++) {
            if (turn % me.n != me.id) continue;
            begin_answer(a, group, i, all.data());
            for (int64_t number = 0; number < group.n_portions(); number++)
                add_answer(at + (number * n + i) * stride, all.data(), a.head_dim);
            put_answer(op, a, pass, group, i, all.data());
        }
        at += group.n_portions() * n * stride;
    }
}

// The token behind those that may be worked on together with `token`.
inline int64_t end_of_run(const Attention &a, const Pass &pass, int64_t token) {
    int64_t end = token + 1;
    while (end < pass.n_tokens && end < token + TOKENS && pass.rows[end] == pass.rows[token] &&
           (!a.window || pass.places[end] < a.window))
        end++;
    return end;
}

template <typename C, int64_t FIXED>
void attend(const Op &op, const Pass &pass, const Thread &me) {
    const Attention &a = *(const Attention *)op.weights;
    const Cache *caches = pass.caches + a.layer * pass.n_rows;
    const int64_t n = pass.n_tokens, n_qk = a.n_heads + a.n_kv_heads;
    const bool overwrites = pass.overwrites[a.layer];
    if (a.has_norm && a.norms_whole) {
        for (int64_t i = me.begin(2 * n); i < me.end(2 * n); i++) norm_whole(op, a, pass, i / 2, i % 2 == 0);
        me.barrier->wait();
    }
    for (int64_t i = me.begin(n * n_qk); i < me.end(n * n_qk); i++) {
        int64_t token = i / n_qk, head = i % n_qk;
        turn(op, a, pass, token, head);
        if (head >= a.n_heads && !overwrites)
            remember<C>(op, a, pass, caches[pass.rows[token]], token, head - a.n_heads);
    }
    if (!overwrites) {
        std::vector<Group> groups;
        int64_t n_shared = 0;
        for (int64_t token = 0, end; token < n; token = end) {
            end = end_of_run(a, pass, token);
            for (int64_t kv_head = 0; kv_head < a.n_kv_heads; kv_head++) {
                groups.push_back(group_of(a, pass, token, end - token, kv_head));
                n_shared += groups.back().n_portions() * groups.back().n_queries() * (a.head_dim + BESIDE_SUMS);
            }
        }
        // Where there are few, threads would wait for the one that has most.
        const bool together = me.n > 1 && int64_t(groups.size()) < 4 * me.n && n_shared <= MOST_SHARED;
        if (together && me.id == 0 && int64_t(me.shared->size()) < n_shared) me.shared->assign(n_shared, 0.0f);
        me.barrier->wait();
        if (together) return attend_together<C, FIXED>(op, a, pass, groups, me);
        // Later tokens see more: they are dealt out in turn.
        for (size_t i = me.id; i < groups.size(); i += me.n)
            attend_to<C, FIXED>(op, a, pass, groups[i]);
        return;
    }
    me.barrier->wait();
    // Every key only once the tokens before have seen what was in its place.
    for (int64_t first = 0, sequence = 0; first < n;) {
        int64_t last = first;
        while (last < n && pass.rows[last] == pass.rows[first]) last++;
        const Cache &cache = caches[pass.rows[first]];
        for (int64_t kv_head = 0; kv_head < a.n_kv_heads; kv_head++, sequence++) {
            if (sequence % me.n != me.id) continue;
            for (int64_t t = first; t < last; t++) {
                remember<C>(op, a, pass, cache, t, kv_head);
                attend_to<C, FIXED>(op, a, pass, group_of(a, pass, t, 1, kv_head));
            }
        }
        first = last;
    }
}

template <typename C>
void attend(const Op &op, const Pass &pass, const Thread &me) {
    switch (((const Attention *)op.weights)->head_dim) {
    case 64: return attend<C, 64>(op, pass, me);
    case 128: return attend<C, 128>(op, pass, me);
    case 256: return attend<C, 256>(op, pass, me);
    default: return attend<C, 0>(op, pass, me);
    }
}

// ---- between the two matrices of a feed-forward

inline float sigmoid(float x) { return 1 / (1 + fast_exp(-x)); }

inline float gelu_tanh(float x) {
    // (1 + tanh y) / 2 is the sigmoid of 2 y.
    return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

inline float gelu(float x) { return 0.5f * x * (1 + std::erf(x * 0.70710678118654752f)); }

inline float activation(int64_t kind, float gate, float up) {
    switch (kind) {
    case SWIGLU: return gate * sigmoid(gate) * up;
    case GEGLU: return gelu(gate) * up;
    case GEGLU_TANH: return gelu_tanh(gate) * up;
    case SWIGLU_CLAMPED:
        gate = gate > 7 ? 7 : gate;
        up = up > 7 ? 7 : up < -7 ? -7 : up;
        return gate * sigmoid(1.702f * gate) * (up + 1);
    case GELU: return gelu(gate);
    case GELU_TANH: return gelu_tanh(gate);
    case RELU: return gate < 0 ? 0 : gate;
    default: return gate < 0 ? 0 : gate * gate;
    }
}

template <int64_t KIND>
void activate(const Op &op, const Pass &pass, const Thread &me) {
    constexpr bool IS_GATED = KIND <= SWIGLU_CLAMPED;
    int64_t total = pass.n_tokens * op.rows, i = me.begin(total);
    while (i < me.end(total)) {
        int64_t token = i / op.rows, stop = std::min(me.end(total), (token + 1) * op.rows), at = i % op.rows;
        const float *gate = pass.buffers[op.in] + token * op.width + at, *up = IS_GATED ? gate + op.rows : gate;
        float *out = pass.buffers[op.out] + token * op.out_width + at;
        for (int64_t j = 0; j < stop - i; j++) out[j] = activation(KIND, gate[j], up[j]);
        i = stop;
    }
}

void activate(const Op &op, const Pass &pass, const Thread &me) {
    switch (op.variant) {
    case SWIGLU: return activate<SWIGLU>(op, pass, me);
    case GEGLU: return activate<GEGLU>(op, pass, me);
    case GEGLU_TANH: return activate<GEGLU_TANH>(op, pass, me);
    case SWIGLU_CLAMPED: return activate<SWIGLU_CLAMPED>(op, pass, me);
    case GELU: return activate<GELU>(op, pass, me);
    case GELU_TANH: return activate<GELU_TANH>(op, pass, me);
    case RELU: return activate<RELU>(op, pass, me);
    default: return activate<RELU2>(op, pass, me);
    }
}

void add(const Op &op, const Pass &pass, const Thread &me) {
    int64_t total = pass.n_tokens * op.width;
    const float *in = pass.buffers[op.in];
    float *out = pass.buffers[op.out];
    for (int64_t i = me.begin(total); i < me.end(total); i++) out[i] += op.scale * in[i];
}

void perform(const Op &op, const Pass &pass, const Thread &me) {
    switch (op.kind) {
    case EMBED: return embed(op, pass, me);
    case POSITION: return add_position(op, pass, me);
    case RMS_NORM:
    case LAYER_NORM: return norm(op, pass, me);
    case LINEAR:
        switch (op.variant & 0xff) {
        case FP32: return linear<float>(op, pass, me);
        case BF16: return linear<bf16>(op, pass, me);
        case Q4: return packed_linear<true>(op, pass, me);
        default: return packed_linear<false>(op, pass, me);
        }
    case ATTEND:
        switch (pass.cache_type) {
        case FP32: return attend<float>(op, pass, me);
        case BF16: return attend<bf16>(op, pass, me);
        default: return attend<int8_t>(op, pass, me);
        }
    case ACTIVATE: return activate(op, pass, me);
    default: return add(op, pass, me);
    }
}

// GGUF's blocks of 32 inputs (Q4_1: step, least number, and 16 bytes whose low halves are the first 16; Q8_0: step and 32
// bytes), a row an output, into ours of 16 × 32.
void pack(const uint8_t *from, uint8_t *to, bool is_q4, int64_t rows, int64_t n_blocks) {
    const int64_t bytes = is_q4 ? BYTES_OF_Q4 : BYTES_OF_Q8, begin = is_q4 ? 4 : 2, groups = is_q4 ? 4 : 8;
#pragma omp parallel for schedule(static)
    for (int64_t strip = 0; strip < (rows + ROWS - 1) / ROWS; strip++)
        for (int64_t r = 0; r < std::min(ROWS, rows - strip * ROWS); r++)
            for (int64_t b = 0; b < n_blocks; b++) {
                const uint8_t *own = from + ((strip * ROWS + r) * n_blocks + b) * (begin + 4 * groups);
                uint8_t *block = to + (strip * n_blocks + b) * bytes, *behind = block + 64 * groups;
                for (int64_t g = 0; g < groups; g++) std::memcpy(block + 64 * g + 4 * r, own + begin + 4 * g, 4);
                std::memcpy(behind + 2 * r, own, 2);
                if (is_q4) std::memcpy(behind + 32 + 2 * r, own + 2, 2);
            }
}

}  // namespace

extern "C" {

void leftward_forward(const Op *ops, int64_t n_ops, const Pass *pass) {
    Barrier barrier;
    std::vector<float> shared;
#pragma omp parallel
    {
#pragma omp single
        barrier.set(omp_get_num_threads());
        Thread me{omp_get_thread_num(), omp_get_num_threads(), &barrier, &shared};
        for (int64_t i = 0; i < n_ops; i++) {
            perform(ops[i], *pass, me);
            barrier.wait();
        }
    }
}

void leftward_pack(const uint8_t *from, uint8_t *to, int64_t is_q4, int64_t rows, int64_t n_blocks) {
    pack(from, to, is_q4, rows, n_blocks);
}
}
