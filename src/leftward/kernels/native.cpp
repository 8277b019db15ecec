// The parts of a training step on a CPU that are neither matrix products nor PyTorch's: each reads its rows once and
// writes them once, where a chain of tensor operations would go through memory five to ten times.
//
// Every function has a twin in PyTorch's own operations, in the file that calls it, and a test that holds the two
// together. Arithmetic is in fp32; numbers of type 1 are bf16, rounded to nearest even once, at the end; those of type 0
// are fp32. Rows are contiguous. Sums over rows are taken in blocks of a fixed size and in a fixed order, so that no
// result depends on the number of threads.

#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 64;  // rows whose sum is taken together

// Adds the rows of `partial` [n_blocks, width] to `sum`, in their order.
void add_blocks(const std::vector<float> &partial, int64_t n_blocks, int64_t width, float *sum) {
    for (int64_t b = 0; b < n_blocks; b++)
#pragma omp simd
        for (int64_t i = 0; i < width; i++) sum[i] += partial[b * width + i];
}

// ---- RMSNorm: y = x · w / rms

template <typename T>
void rms_norm(const T *x, const float *w, T *y, float *rstd, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = x + row * width;
        T *to = y + row * width;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += get(from[i]) * get(from[i]);
        float scale = 1 / std::sqrt(sum / width + eps);
        rstd[row] = scale;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) put(to + i, get(from[i]) * scale * w[i]);
    }
}

template <typename T>
void rms_norm_back(const T *grad, const T *x, const float *w, const float *rstd, T *dx, float *dw, int64_t rows,
                   int64_t width) {
    int64_t n_blocks = (rows + BLOCK - 1) / BLOCK;
    std::vector<float> partial(n_blocks * width, 0.0f);
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < n_blocks; b++) {
        float *sums = partial.data() + b * width;
        for (int64_t row = b * BLOCK; row < std::min(rows, (b + 1) * BLOCK); row++) {
            const T *g = grad + row * width, *from = x + row * width;
            T *to = dx + row * width;
            float scale = rstd[row], dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < width; i++) {
                float unit = get(from[i]) * scale, gi = get(g[i]);
                sums[i] += gi * unit;
                dot += gi * w[i] * unit;
            }
            dot /= width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++)
                put(to + i, (get(g[i]) * w[i] - get(from[i]) * scale * dot) * scale);
        }
    }
    add_blocks(partial, n_blocks, width, dw);
}

// ---- q, k and v out of one matrix's rows: norm over each head of q and k, rotation, heads to the front

struct Heads {
    int64_t batch, length, n_heads, n_kv_heads, head_dim, rope_dim;
    int64_t n_qk() const { return n_heads + n_kv_heads; }
    int64_t n_all() const { return n_heads + 2 * n_kv_heads; }
};

// Where head `h` of the token (b, t) lives in q, k or v, [batch, heads, length, head_dim] each.
template <typename T>
T *place_of(const Heads &s, T *q, T *k, T *v, int64_t b, int64_t t, int64_t h) {
    if (h < s.n_heads) return q + ((b * s.n_heads + h) * s.length + t) * s.head_dim;
    h -= s.n_heads;
    T *base = h < s.n_kv_heads ? k : v;
    if (h >= s.n_kv_heads) h -= s.n_kv_heads;
    return base + ((b * s.n_kv_heads + h) * s.length + t) * s.head_dim;
}

constexpr int64_t WIDEST_HEAD = 512;

// `cos` and `sin` [batch or 1, length, rope_dim], the sine negated for the first of a pair (i, i + rope_dim / 2); null
// without rotation. `wq` and `wk` [head_dim], null without norm.
template <typename T>
void split_heads(const T *qkv, const float *wq, const float *wk, const float *cos, const float *sin,
                 int64_t angle_stride, T *q, T *k, T *v, float *rstd, Heads s, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < s.batch * s.length; token++) {
        int64_t b = token / s.length, t = token % s.length, half = s.rope_dim / 2;
        const float *c = cos ? cos + b * angle_stride + t * s.rope_dim : nullptr;
        const float *n = sin ? sin + b * angle_stride + t * s.rope_dim : nullptr;
        float u[WIDEST_HEAD];
        for (int64_t h = 0; h < s.n_all(); h++) {
            const T *from = qkv + (token * s.n_all() + h) * s.head_dim;
            T *to = place_of(s, q, k, v, b, t, h);
            if (h >= s.n_qk()) {
                std::memcpy(to, from, s.head_dim * sizeof(T));
                continue;
            }
            const float *w = h < s.n_heads ? wq : wk;
#pragma omp simd
            for (int64_t i = 0; i < s.head_dim; i++) u[i] = get(from[i]);
            if (w) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < s.head_dim; i++) sum += u[i] * u[i];
                float scale = 1 / std::sqrt(sum / s.head_dim + eps);
                rstd[token * s.n_qk() + h] = scale;
#pragma omp simd
                for (int64_t i = 0; i < s.head_dim; i++) u[i] *= scale * w[i];
            }
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                put(to + i, u[i] * c[i] + u[i + half] * n[i]);
                put(to + i + half, u[i + half] * c[i + half] + u[i] * n[i + half]);
            }
#pragma omp simd
            for (int64_t i = s.rope_dim; i < s.head_dim; i++) put(to + i, u[i]);
        }
    }
}

// `dw` [2, head_dim]: of q's and of k's factor.
template <typename T>
void split_heads_back(const T *dq, const T *dk, const T *dv, const T *qkv, const float *wq, const float *wk,
                      const float *cos, const float *sin, int64_t angle_stride, const float *rstd, T *dqkv, float *dw,
                      Heads s) {
    int64_t tokens = s.batch * s.length, n_blocks = (tokens + BLOCK - 1) / BLOCK, width = 2 * s.head_dim;
    std::vector<float> partial(wq ? n_blocks * width : 0, 0.0f);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < n_blocks; block++) {
        float g[WIDEST_HEAD];
        for (int64_t token = block * BLOCK; token < std::min(tokens, (block + 1) * BLOCK); token++) {
            int64_t b = token / s.length, t = token % s.length, half = s.rope_dim / 2;
            const float *c = cos ? cos + b * angle_stride + t * s.rope_dim : nullptr;
            const float *n = sin ? sin + b * angle_stride + t * s.rope_dim : nullptr;
            for (int64_t h = 0; h < s.n_all(); h++) {
                int64_t at = (token * s.n_all() + h) * s.head_dim;
                const T *grad = place_of(s, dq, dk, dv, b, t, h), *from = qkv + at;
                T *to = dqkv + at;
                if (h >= s.n_qk()) {
                    std::memcpy(to, grad, s.head_dim * sizeof(T));
                    continue;
                }
#pragma omp simd
                for (int64_t i = 0; i < half; i++) {  // a rotation's gradient is the rotation back
                    g[i] = get(grad[i]) * c[i] + get(grad[i + half]) * n[i + half];
                    g[i + half] = get(grad[i + half]) * c[i + half] + get(grad[i]) * n[i];
                }
#pragma omp simd
                for (int64_t i = s.rope_dim; i < s.head_dim; i++) g[i] = get(grad[i]);
                const float *w = h < s.n_heads ? wq : wk;
                if (!w) {
#pragma omp simd
                    for (int64_t i = 0; i < s.head_dim; i++) put(to + i, g[i]);
                    continue;
                }
                float *sums = partial.data() + block * width + (h < s.n_heads ? 0 : s.head_dim);
                float scale = rstd[token * s.n_qk() + h], dot = 0;
#pragma omp simd reduction(+ : dot)
                for (int64_t i = 0; i < s.head_dim; i++) {
                    float unit = get(from[i]) * scale;
                    sums[i] += g[i] * unit;
                    dot += g[i] * w[i] * unit;
                }
                dot /= s.head_dim;
#pragma omp simd
                for (int64_t i = 0; i < s.head_dim; i++)
                    put(to + i, (g[i] * w[i] - get(from[i]) * scale * dot) * scale);
            }
        }
    }
    if (wq) add_blocks(partial, n_blocks, width, dw);
}

// ---- causal softmax, in place; row r of each [queries, keys] matrix sees the keys up to (r mod length)

template <typename T>
void causal_softmax(T *scores, int64_t rows, int64_t length, float scale) {
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t row = 0; row < rows; row++) {
        static thread_local std::vector<float> power;
        power.resize(length);
        T *s = scores + row * length;
        int64_t seen = row % length + 1;
        float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < seen; i++) most = std::max(most, get(s[i]));
        float shift = most * scale;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < seen; i++) sum += power[i] = fast_exp(get(s[i]) * scale - shift);
        float share = 1 / sum;
#pragma omp simd
        for (int64_t i = 0; i < seen; i++) put(s + i, power[i] * share);
        std::memset(static_cast<void *>(s + seen), 0, (length - seen) * sizeof(T));
    }
}

// grad becomes that of the scores before scaling.
template <typename T>
void causal_softmax_back(T *grad, const T *weights, int64_t rows, int64_t length, float scale) {
#pragma omp parallel for schedule(dynamic, 64)
    for (int64_t row = 0; row < rows; row++) {
        T *g = grad + row * length;
        const T *w = weights + row * length;
        int64_t seen = row % length + 1;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t i = 0; i < seen; i++) dot += get(g[i]) * get(w[i]);
#pragma omp simd
        for (int64_t i = 0; i < seen; i++) put(g + i, (get(g[i]) - dot) * get(w[i]) * scale);
        std::memset(static_cast<void *>(g + seen), 0, (length - seen) * sizeof(T));
    }
}

// ---- SwiGLU of rows [gate, up]

template <typename T>
void swiglu(const T *x, T *y, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + 2 * row * width, *up = gate + width;
        T *to = y + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) put(to + i, get(gate[i]) / (1 + fast_exp(-get(gate[i]))) * get(up[i]));
    }
}

template <typename T>
void swiglu_back(const T *grad, const T *x, T *dx, int64_t rows, int64_t width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + 2 * row * width, *up = gate + width, *g = grad + row * width;
        T *dgate = dx + 2 * row * width, *dup = dgate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float a = get(gate[i]), sigmoid = 1 / (1 + fast_exp(-a)), gi = get(g[i]);
            put(dgate + i, gi * get(up[i]) * sigmoid * (1 + a * (1 - sigmoid)));
            put(dup + i, gi * a * sigmoid);
        }
    }
}

// ---- cross-entropy: the loss of each row, and in place of its logits the gradient of the loss times `factor`

template <typename T>
void cross_entropy(T *logits, const int64_t *targets, float *losses, int64_t rows, int64_t width, float factor) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        T *z = logits + row * width;
        int64_t target = targets[row];
        if (target < 0) {  // ignored
            losses[row] = 0;
            std::memset(static_cast<void *>(z), 0, width * sizeof(T));
            continue;
        }
        float most = -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < width; i++) most = std::max(most, get(z[i]));
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += fast_exp(get(z[i]) - most);
        float right = get(z[target]) - most, share = factor / sum;
        losses[row] = std::log(sum) - right;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) put(z + i, fast_exp(get(z[i]) - most) * share);
        put(z + target, fast_exp(right) * share - factor);
    }
}

// ---- the square of a norm

template <typename T>
double sum_of_squares(const T *x, int64_t n) {
    constexpr int64_t length = 4096;
    int64_t n_blocks = (n + length - 1) / length;
    std::vector<float> partial(n_blocks);
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < n_blocks; b++) {
        int64_t to = std::min(n, (b + 1) * length);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = b * length; i < to; i++) sum += get(x[i]) * get(x[i]);
        partial[b] = sum;
    }
    double total = 0;
    for (float sum : partial) total += sum;
    return total;
}

// ---- AdamW (Loshchilov and Hutter 2019), and the rounded copy of the new weights

template <typename G>
void adamw(float *weights, const G *grads, float *averages, float *squares, bf16 *copy, int64_t n, float grad_scale,
           float lr, float beta1, float beta2, float eps, float decay, float correction1, float correction2) {
#pragma omp parallel for schedule(static)
    for (int64_t from = 0; from < n; from += 4096) {
        int64_t to = std::min(n, from + 4096);
#pragma omp simd
        for (int64_t i = from; i < to; i++) {
            float g = get(grads[i]) * grad_scale;
            float m = averages[i] + (g - averages[i]) * (1 - beta1);
            float s = squares[i] * beta2 + g * g * (1 - beta2);
            float w = weights[i] * (1 - lr * decay) - lr * (m / correction1) / (std::sqrt(s / correction2) + eps);
            averages[i] = m;
            squares[i] = s;
            weights[i] = w;
        }
        if (copy)
#pragma omp simd
            for (int64_t i = from; i < to; i++) put(copy + i, weights[i]);
    }
}

}  // namespace

// A call for both types of numbers; what is void * is of that type.
#define EITHER(call) \
    if (type == 0) { \
        using T = float; \
        call; \
    } else { \
        using T = bf16; \
        call; \
    }

extern "C" {

void leftward_rms_norm(int type, const void *x, const float *w, void *y, float *rstd, int64_t rows, int64_t width,
                       float eps) {
    EITHER(rms_norm((const T *)x, w, (T *)y, rstd, rows, width, eps))
}

void leftward_rms_norm_back(int type, const void *grad, const void *x, const float *w, const float *rstd, void *dx,
                            float *dw, int64_t rows, int64_t width) {
    EITHER(rms_norm_back((const T *)grad, (const T *)x, w, rstd, (T *)dx, dw, rows, width))
}

void leftward_split_heads(int type, const void *qkv, const float *wq, const float *wk, const float *cos,
                          const float *sin, int64_t angle_stride, void *q, void *k, void *v, float *rstd,
                          int64_t batch, int64_t length, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                          int64_t rope_dim, float eps) {
    Heads s{batch, length, n_heads, n_kv_heads, head_dim, rope_dim};
    EITHER(split_heads((const T *)qkv, wq, wk, cos, sin, angle_stride, (T *)q, (T *)k, (T *)v, rstd, s, eps))
}

void leftward_split_heads_back(int type, const void *dq, const void *dk, const void *dv, const void *qkv,
                               const float *wq, const float *wk, const float *cos, const float *sin,
                               int64_t angle_stride, const float *rstd, void *dqkv, float *dw, int64_t batch,
                               int64_t length, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                               int64_t rope_dim) {
    Heads s{batch, length, n_heads, n_kv_heads, head_dim, rope_dim};
    EITHER(split_heads_back((const T *)dq, (const T *)dk, (const T *)dv, (const T *)qkv, wq, wk, cos, sin,
                            angle_stride, rstd, (T *)dqkv, dw, s))
}

void leftward_causal_softmax(int type, void *scores, int64_t rows, int64_t length, float scale) {
    EITHER(causal_softmax((T *)scores, rows, length, scale))
}

void leftward_causal_softmax_back(int type, void *grad, const void *weights, int64_t rows, int64_t length,
                                  float scale) {
    EITHER(causal_softmax_back((T *)grad, (const T *)weights, rows, length, scale))
}

void leftward_swiglu(int type, const void *x, void *y, int64_t rows, int64_t width) {
    EITHER(swiglu((const T *)x, (T *)y, rows, width))
}

void leftward_swiglu_back(int type, const void *grad, const void *x, void *dx, int64_t rows, int64_t width) {
    EITHER(swiglu_back((const T *)grad, (const T *)x, (T *)dx, rows, width))
}

void leftward_cross_entropy(int type, void *logits, const int64_t *targets, float *losses, int64_t rows,
                            int64_t width, float factor) {
    EITHER(cross_entropy((T *)logits, targets, losses, rows, width, factor))
}

void leftward_sum_of_squares(int type, const void *x, double *sum, int64_t n) {
    EITHER(*sum = sum_of_squares((const T *)x, n))
}

void leftward_adamw(int type, float *weights, const void *grads, float *averages, float *squares, void *copy,
                    int64_t n, float grad_scale, float lr, float beta1, float beta2, float eps, float decay,
                    float correction1, float correction2) {
    EITHER(adamw(weights, (const T *)grads, averages, squares, (bf16 *)copy, n, grad_scale, lr, beta1, beta2, eps,
                 decay, correction1, correction2))
}

}
