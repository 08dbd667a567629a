/* A decoder layer for a few rows in float32: products that read each weight once, and all between them without leaving C.

   Weights [outputs, inputs] are packed into panels of PANEL outputs, panel[input][output], read straight through while
   every row uses them from registers. Panels hold float32, or 16-bit floats that widen as they are read: few rows wait for
   memory, so half of the bytes is nearly half of the time. All sums run in an order that does not depend on the number of rows, and a masked
   key adds exactly nothing, so a row of a chain gets the same bits alone and among others. Built by kernel.py with
   -O3 -march=native -fopenmp; functions with an `omp for` inside are called by all threads of a team. */

#include <math.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16, VECTORS = 2, MOST_ROWS = 12 };
#else
enum { LANES = 8, VECTORS = 2, MOST_ROWS = 6 };
#endif
enum { PANEL = LANES * VECTORS, AHEAD = 64 * PANEL };

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef float half_vector __attribute__((vector_size(LANES / 2 * sizeof(float)), aligned(4), may_alias));
typedef float quarter_vector __attribute__((vector_size(LANES / 4 * sizeof(float)), aligned(4), may_alias));
typedef int integers __attribute__((vector_size(LANES * sizeof(int))));
typedef unsigned short shorts __attribute__((vector_size(LANES * sizeof(short)), aligned(2), may_alias));

/* How numbers in memory are stored. */
enum { FLOAT32, BFLOAT16, FLOAT16 };

int omp_get_thread_num(void);

int panel_width(void) { return PANEL; }
int lanes(void) { return LANES; }
#if defined(__AVX512F__) || defined(__F16C__)
int has_float16(void) { return 1; }
#else
int has_float16(void) { return 0; }
#endif

static inline __attribute__((always_inline)) long bytes_of(const int kind) { return kind == FLOAT32 ? 4 : 2; }

/* LANES numbers of p from the i-th on. */
static inline __attribute__((always_inline)) vector at(const void *p, long i, const int kind) {
    if (kind == BFLOAT16)
        return (vector)(__builtin_convertvector(*(const shorts *)((const short *)p + i), integers) << 16);
#ifdef __AVX512F__
    if (kind == FLOAT16) return (vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const short *)p + i)));
#elif defined(__F16C__)
    if (kind == FLOAT16) return (vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const short *)p + i)));
#endif
    return *(const vector *)((const float *)p + i);
}

/* `rows` and `kind` are constants at every call, so the loops unroll and the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const int kind, const float *x, const void *panel,
                                                       float *y, long inputs, long stride, int width) {
    vector sum[MOST_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sum[r][v] = (vector){0};
    for (long k = 0; k < inputs; k++) {
        vector w[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) {
            const long i = k * PANEL + v * LANES;
            __builtin_prefetch((const char *)panel + (i + AHEAD) * bytes_of(kind));
            w[v] = at(panel, i, kind);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * inputs + k] * w[v];
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        if (width == PANEL)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) *(vector *)(y + r * stride + v * LANES) = sum[r][v];
        else
            for (int i = 0; i < width; i++) y[r * stride + i] = sum[r][i / LANES][i % LANES];
}

/* All rows against one panel. */
static inline __attribute__((always_inline)) void panel_rows_of(const int kind, const float *x, const void *panel, float *y,
                                                                long rows, long inputs, long stride, int width) {
    long done = 0;
#define ROWS(n) \
    for (; done + n <= rows; done += n) tile(n, kind, x + done * inputs, panel, y + done * stride, inputs, stride, width);
#ifdef __AVX512F__
    ROWS(12)
#endif
    ROWS(6) ROWS(4) ROWS(2) ROWS(1)
}

static void panel_rows(int kind, const float *x, const void *panel, float *y, long rows, long inputs, long stride,
                       int width) {
    if (kind == BFLOAT16)
        panel_rows_of(BFLOAT16, x, panel, y, rows, inputs, stride, width);
    else if (kind == FLOAT16)
        panel_rows_of(FLOAT16, x, panel, y, rows, inputs, stride, width);
    else
        panel_rows_of(FLOAT32, x, panel, y, rows, inputs, stride, width);
}

/* Packed weights: the panels and how they are stored. */
struct panels {
    const void *data;
    long kind;
};

/* The panel whose first output is PANEL · p. */
static inline const void *panel_of(const struct panels *w, long p, long inputs) {
    return (const char *)w->data + p * PANEL * inputs * bytes_of(w->kind);
}

/* y = x Wᵀ [+ bias] [+ base], shared out over the team. */
static void product(const float *x, const struct panels *w, const float *bias, const float *base, float *y, long rows,
                    long inputs, long outputs) {
    const long count = (outputs + PANEL - 1) / PANEL;
#pragma omp for schedule(static)
    for (long p = 0; p < count; p++) {
        const long first = p * PANEL;
        const int width = outputs - first < PANEL ? (int)(outputs - first) : PANEL;
        float sums[rows * width];
        panel_rows(w->kind, x, panel_of(w, p, inputs), sums, rows, inputs, width, width);
        for (long r = 0; r < rows; r++)
            for (int i = 0; i < width; i++) {
                float value = sums[r * width + i];
                if (bias) value += bias[first + i];
                if (base) value += base[r * outputs + first + i];
                y[r * outputs + first + i] = value;
            }
    }
}

void matmul(const float *x, const void *data, int kind, float *y, long rows, long inputs, long outputs, int threads) {
    const struct panels w = {data, kind};
#pragma omp parallel num_threads(threads)
    {
        const long count = (outputs + PANEL - 1) / PANEL;
#pragma omp for schedule(static)
        for (long p = 0; p < count; p++) {
            const long first = p * PANEL;
            const int width = outputs - first < PANEL ? (int)(outputs - first) : PANEL;
            panel_rows(kind, x, panel_of(&w, p, inputs), y + first, rows, inputs, outputs, width);
        }
    }
}

static inline float total(vector v) {
    const half_vector half = ((half_vector *)&v)[0] + ((half_vector *)&v)[1];
    const quarter_vector quarter = ((quarter_vector *)&half)[0] + ((quarter_vector *)&half)[1];
    float sum = 0;
    for (int i = 0; i < LANES / 4; i++) sum += quarter[i];
    return sum;
}

/* eˣ within an ulp or two: 2ⁿ times a polynomial on [-ln2/2, ln2/2]; 0 below -87 (so for -inf), capped above 88. */
static inline vector exponential(vector x) {
    const vector low = (vector){0} - 87.0f, high = (vector){0} + 88.0f;
    const integers keep = x > low;
    x = (vector)(((integers)x & (x < high)) | ((integers)high & ~(x < high)));
    x = (vector)(((integers)x & keep) | ((integers)low & ~keep));
    const vector shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vector p = (vector){0} + 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const integers power = ((integers)shifted - 0x4B400000 + 127) << 23;
    return (vector)((integers)(p * (vector)power) & keep);
}

static void normalise(const float *x, const float *weight, float *y, long width, float eps) {
    float sum = 0;
    long i = 0;
    vector squares = {0};
    for (; i + LANES <= width; i += LANES) squares += *(const vector *)(x + i) * *(const vector *)(x + i);
    sum = total(squares);
    for (; i < width; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / width + eps);
    for (i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
}

/* Rotate one head in place by cos, sin [dim], where sin's first half is negated. */
static void rotate(float *x, const float *cosine, const float *sine, long dim) {
    for (long i = 0, j = dim / 2; j < dim; i++, j++) {
        const float low = x[i], high = x[j];
        x[i] = low * cosine[i] + high * sine[i];
        x[j] = high * cosine[j] + low * sine[j];
    }
}

/* One query over `keys` rows of k and v, of one kind: softmax of scale·q·k + mask. scores has room for keys + LANES. */
static inline __attribute__((always_inline)) void attend(const float *q, const void *k, const void *v, const int kind,
                                                         const float *mask, float *y, float *scores, long keys, long dim,
                                                         float scale) {
    float most = -INFINITY;
    for (long j = 0; j < keys; j++) {
        if (mask && mask[j] == -INFINITY) {
            scores[j] = -INFINITY;
            continue;
        }
        vector sum = {0};
        for (long i = 0; i < dim; i += LANES) sum += *(const vector *)(q + i) * at(k, j * dim + i, kind);
        scores[j] = total(sum) * scale + (mask ? mask[j] : 0.0f);
        if (scores[j] > most) most = scores[j];
    }
    for (long j = keys; j < keys + LANES; j++) scores[j] = -INFINITY;
    vector sums = {0};
    for (long j = 0; j < keys; j += LANES) {
        const vector p = exponential(*(vector *)(scores + j) - most);
        *(vector *)(scores + j) = p;
        sums += p;
    }
    const float inverse = 1.0f / total(sums);
    memset(y, 0, dim * sizeof(float));
    for (long i = 0; i < dim; i += LANES) {
        vector sum = {0};
        for (long j = 0; j < keys; j++) sum += scores[j] * at(v, j * dim + i, kind);
        *(vector *)(y + i) = sum * inverse;
    }
}

/* One query of each of many sequences: q and y [slots, heads, dim] over the first lengths[s] rows of slot s in keys and
   values [slots, kv_heads, capacity, dim]; scores [threads, capacity + LANES]. */
void attend_slots(const float *q, const void *keys, const void *values, int kind, const long *lengths, float *y,
                  long slots, long heads, long kv_heads, long capacity, long dim, float *scores, int threads) {
    const long group = heads / kv_heads;
    const float scale = 1.0f / sqrtf((float)dim);
#pragma omp parallel for num_threads(threads) schedule(dynamic) collapse(2)
    for (long s = 0; s < slots; s++)
        for (long h = 0; h < kv_heads; h++) {
            const long first = (s * kv_heads + h) * capacity * dim * bytes_of(kind);
            const void *k = (const char *)keys + first, *v = (const char *)values + first;
            float *own = scores + omp_get_thread_num() * (capacity + LANES);
            for (long i = (s * kv_heads + h) * group; i < (s * kv_heads + h + 1) * group; i++)
                if (kind == BFLOAT16)
                    attend(q + i * dim, k, v, BFLOAT16, NULL, y + i * dim, own, lengths[s], dim, scale);
                else if (kind == FLOAT16)
                    attend(q + i * dim, k, v, FLOAT16, NULL, y + i * dim, own, lengths[s], dim, scale);
                else
                    attend(q + i * dim, k, v, FLOAT32, NULL, y + i * dim, own, lengths[s], dim, scale);
        }
}

struct layer {
    const float *attention_norm, *qkv_bias, *q_norm, *k_norm, *o_bias, *mlp_norm, *gate_up_bias, *down_bias;
    struct panels qkv, o, gate_up, down;
    long width, width_in, heads, kv_heads, head_dim, inner;
    float eps;
};

/* silu(gate) · up, each panel of gate with its panel of up. */
static void gated(const struct layer *l, const float *x, float *y, long rows) {
    const long count = l->inner / PANEL;
    const struct panels *w = &l->gate_up;
#pragma omp for schedule(static)
    for (long p = 0; p < count; p++) {
        float gate[rows * PANEL], up[rows * PANEL];
        panel_rows(w->kind, x, panel_of(w, p, l->width), gate, rows, l->width, PANEL, PANEL);
        panel_rows(w->kind, x, panel_of(w, count + p, l->width), up, rows, l->width, PANEL, PANEL);
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < PANEL; i += LANES) {
                vector g = *(vector *)(gate + r * PANEL + i), u = *(vector *)(up + r * PANEL + i);
                if (l->gate_up_bias) {
                    g += *(const vector *)(l->gate_up_bias + p * PANEL + i);
                    u += *(const vector *)(l->gate_up_bias + l->inner + p * PANEL + i);
                }
                *(vector *)(y + r * l->inner + p * PANEL + i) = g / (1.0f + exponential(-g)) * u;
            }
    }
}

long scratch_size(const struct layer *l, long rows, long keys, int threads) {
    const long heads = l->heads + 2 * l->kv_heads;
    return rows * (l->width + (heads + l->heads) * l->head_dim + l->inner) + threads * (keys + LANES);
}

/* x [rows, width_in] → y [rows, width]. Attention reads x normed by attention_norm, or as it is without one; its output
   is added to residual [rows, width]. keys and values [kv_heads, capacity, head_dim] hold `past` rows and get the new ones; cosine and
   sine [rows, head_dim]; mask [rows, past + rows] is added to the scores; with `causal` row r sees keys up to past + r. */
void layer_forward(const struct layer *l, const float *x, const float *residual, float *y, const float *cosine,
                   const float *sine, float *keys, float *values, long capacity, long past, long rows, const float *mask, int causal, float *scratch,
                   int threads) {
    const long dim = l->head_dim, heads = l->heads + 2 * l->kv_heads, all = past + rows;
    float *normed = scratch, *qkv = normed + rows * l->width, *attended = qkv + rows * heads * dim;
    float *inner = attended + rows * l->heads * dim, *scores = inner + rows * l->inner;
#pragma omp parallel num_threads(threads)
    {
        if (l->attention_norm) {
#pragma omp for schedule(static)
            for (long r = 0; r < rows; r++)
                normalise(x + r * l->width, l->attention_norm, normed + r * l->width, l->width, l->eps);
        }
        product(l->attention_norm ? normed : x, &l->qkv, l->qkv_bias, NULL, qkv, rows, l->width_in, heads * dim);
#pragma omp for schedule(static) collapse(2)
        for (long h = 0; h < heads; h++)
            for (long r = 0; r < rows; r++) {
                float *head = qkv + (r * heads + h) * dim;
                const long kv = h - l->heads;
                if (kv < l->kv_heads) {
                    const float *norm = kv < 0 ? l->q_norm : l->k_norm;
                    if (norm) normalise(head, norm, head, dim, l->eps);
                    rotate(head, cosine + r * dim, sine + r * dim, dim);
                }
                if (kv >= 0) {
                    float *rows_of = kv < l->kv_heads ? keys : values;
                    memcpy(rows_of + (kv % l->kv_heads * capacity + past + r) * dim, head, dim * sizeof(float));
                }
            }
#pragma omp for schedule(static) collapse(2)
        for (long h = 0; h < l->heads; h++)
            for (long r = 0; r < rows; r++) {
                const long kv = h / (l->heads / l->kv_heads) * capacity * dim;
                attend(qkv + (r * heads + h) * dim, keys + kv, values + kv, FLOAT32, mask ? mask + r * all : NULL,
                       attended + (r * l->heads + h) * dim, scores + omp_get_thread_num() * (all + LANES),
                       causal ? past + r + 1 : all, dim, 1.0f / sqrtf((float)dim));
            }
        product(attended, &l->o, l->o_bias, residual, y, rows, l->heads * dim, l->width);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
            normalise(y + r * l->width, l->mlp_norm, normed + r * l->width, l->width, l->eps);
        gated(l, normed, inner, rows);
        product(inner, &l->down, l->down_bias, y, y, rows, l->inner, l->width);
    }
}
