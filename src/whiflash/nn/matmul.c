/* y = x Wᵀ for a few rows of x, float32, with W packed into panels of `panel_width()` outputs: panel[k][output].

   Few rows are bound by reading W, so each panel is read once, straight through, and every row uses it while it is in
   registers. Each output is one chain of fused multiply-adds over k in order, whatever the number of rows: a row's
   result is bit for bit the same alone and among others. Built by kernel.py with -O3 -march=native -fopenmp. */

#ifdef __AVX512F__
enum { LANES = 16, VECTORS = 2, MOST_ROWS = 12 };
#else
enum { LANES = 8, VECTORS = 2, MOST_ROWS = 6 };
#endif
enum { PANEL = LANES * VECTORS, AHEAD = 64 * PANEL };

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));

/* `rows` is a constant at every call, so the loops unroll and the sums stay in registers. */
static inline __attribute__((always_inline)) void tile(const int rows, const float *x, const float *panel, float *y,
                                                       long inputs, long outputs, int width) {
    vector sum[MOST_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sum[r][v] = (vector){0};
    for (long k = 0; k < inputs; k++) {
        const vector *w = (const vector *)(panel + k * PANEL);
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) __builtin_prefetch(panel + k * PANEL + v * LANES + AHEAD);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[r][v] += x[r * inputs + k] * w[v];
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
        if (width == PANEL)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) *(vector *)(y + r * outputs + v * LANES) = sum[r][v];
        else
            for (int i = 0; i < width; i++) y[r * outputs + i] = sum[r][i / LANES][i % LANES];
}

int panel_width(void) { return PANEL; }

void matmul(const float *x, const float *panels, float *y, long rows, long inputs, long outputs, int threads) {
    const long count = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long p = 0; p < count; p++) {
        const float *panel = panels + p * inputs * PANEL;
        const int width = outputs - p * PANEL < PANEL ? (int)(outputs - p * PANEL) : PANEL;
        long done = 0;
#define ROWS(n) \
    for (; done + n <= rows; done += n) tile(n, x + done * inputs, panel, y + done * outputs + p * PANEL, inputs, outputs, width);
#ifdef __AVX512F__
        ROWS(12)
#endif
        ROWS(6) ROWS(4) ROWS(2) ROWS(1)
    }
}
