/* Transformer layers for inference on packed sequences, and two steps of training, for x86-64
processors with AVX512 or AVX2.

In inference, a layer is computed for a few sequences at a time, so that what its steps pass on
stays in the second-level cache. There are three modes, which differ in the elements of matrix
products:

  fp32   fp32 weights and inputs
  bf16   bf16 weights and inputs, with fp32 sums
  int8   integer weights with a scale per output, and integer inputs with a scale per token that is
         found as the token is computed; their sums are exact. AVX512-VNNI multiplies weights of 8
         bits by unsigned inputs of 8 bits. AVX2 multiplies pairs of 16 bits: there weights are up
         to 511 and inputs up to 1023, whose sums over 4096 inputs are below 2^31

With AVX2 there is no bf16. Where a processor has AMX, its tiles multiply bf16 and 8 bits: 16 rows by
16 outputs at a time. The sums of integers are the same. Attention's products are fp32 or bf16.
Hidden states, residual sums, GELU, softmax and LayerNorm are fp32 in every mode. A row of a result
never depends on other rows of the batch, except through attention within its sequence, and not on
the number of threads.

A product reads its inputs in groups of four bytes: one fp32, two bf16, or four or two integers.
Weights are laid out in panels of PANEL outputs: (panels, groups, outputs, elements of a group).

This file is compiled once for each of the two sets of instructions. What depends on them stands at
its beginning; `vec` is a vector of floats.
*/

#define _GNU_SOURCE
#include <dlfcn.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>

long syscall(long number, ...); /* unistd.h also has functions called `read` and `write` */

#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAS_TILES
#include <cpuid.h>
#endif

enum { FP32, BF16, INT8 };
enum { TILE = 6, BLOCK = 64, GROUP = 128, QUERIES = 16, WIDEST = 256 }; /* the widest head */
enum { SPINS = 1 << 13 }; /* pauses of a waiting thread before it sleeps: about 0.1 ms */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

typedef uint16_t bf16;

/* A matrix product with a bias. These structs are filled by native.py. */
typedef struct {
    const void *weight;   /* panels, see above */
    const float *bias;    /* (panels x PANEL) */
    const float *scale;   /* (panels x PANEL) of the integers; INT8 only */
    const int32_t *shift; /* (panels x PANEL) the zero point times the sum of an output's weights;
                             NULL for 16 bits */
    int64_t inputs, outputs;
} Product;

typedef struct {
    int64_t mode, attention_mode, heads, head_width, direction, gelu_tanh;
    Product query_key_value, attention_output, intermediate, output;
    const float *attention_norm[2], *output_norm[2]; /* weight, bias */
    double epsilon;
} Layer;

/* The integers of a product's inputs: what stands for 0, and how far they go to either side. */
typedef struct {
    int zero, below, above;
} Range;

/* A batch: hidden states, sequence boundaries, and which rows of the result are wanted. */
typedef struct {
    const float *hidden;       /* (tokens, width) */
    const int32_t *boundaries; /* (sequences + 1) */
    const int64_t *rows;       /* (count) indices of tokens; NULL for all of them, in order */
    const char *projected;     /* what `project` wrote for all tokens; NULL to compute it */
    float *out;                /* (count, width) */
    int64_t sequences, count;
} Batch;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

#ifdef __AVX512F__
enum { VECTOR = 16, PARTS = 4, INTEGER = 1 }; /* bytes of an integer */
/* Before other products, and after GELU, few of whose values are negative. */
static const Range RANGES[2] = {{128, 127, 127}, {16, 16, 239}};
typedef __m512 vec;
typedef __mmask16 mask;
typedef uint32_t ints __attribute__((vector_size(64)));

/* The first `left` elements; none if it is negative. */
INLINE mask lanes(int64_t left) {
    return left >= VECTOR ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
}
INLINE vec set(float x) { return _mm512_set1_ps(x); }
INLINE vec load(const void *x) { return _mm512_loadu_ps(x); }
INLINE void store(void *out, vec x) { _mm512_storeu_ps(out, x); }
INLINE vec load_some(mask m, const float *x) { return _mm512_maskz_loadu_ps(m, x); }
INLINE void store_some(mask m, float *out, vec x) { _mm512_mask_storeu_ps(out, m, x); }
INLINE mask without(mask a, mask b) { return a & ~b; }
INLINE vec keep(mask m, vec x) { return _mm512_maskz_mov_ps(m, x); }
INLINE vec keep_max(mask m, vec a, vec b) { return _mm512_mask_max_ps(a, m, a, b); }
INLINE vec max(vec a, vec b) { return _mm512_max_ps(a, b); } /* b, if one of them is NaN */
INLINE vec min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec fma_plus(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec fma_minus(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); }
INLINE vec minus_fma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
INLINE float max_of(vec x) { return _mm512_reduce_max_ps(x); }
INLINE vec nearest(vec x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE vec times_power(vec x, vec whole) { return _mm512_scalef_ps(x, whole); }
INLINE vec rough_reciprocal(vec x) { return _mm512_rcp14_ps(x); }

INLINE void store_bf16(bf16 *out, vec x) {
    _mm256_storeu_si256((__m256i *)out, (__m256i)_mm512_cvtneps_pbh(x));
}
INLINE void store_some_bf16(mask m, bf16 *out, vec x) {
    _mm256_mask_storeu_epi16(out, m, (__m256i)_mm512_cvtneps_pbh(x));
}
INLINE vec load_some_bf16(mask m, const bf16 *x) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, x)), 16);
}
/* Pairs of bf16 from two rows. */
INLINE vec interleave(const bf16 *first, const bf16 *second) {
    __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)first));
    __m512i b = _mm512_setzero_si512();
    if (second) b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)second));
    return (vec)_mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}
/* A sum of products of integers as a number, without the part that the zero point adds. */
INLINE vec exact_sum(vec sum, const int32_t *shift) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32((__m512i)sum, _mm512_loadu_si512(shift)));
}
INLINE void store_some_integers(mask m, char *out, vec x, int zero) {
    __m512i integers = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(zero));
    _mm_mask_storeu_epi8(out, m, _mm512_cvtusepi32_epi8(integers));
}
#else /* AVX2 */
enum { VECTOR = 8, PARTS = 2, INTEGER = 2 };
static const Range RANGES[2] = {{0, 1023, 1023}, {0, 1023, 1023}};
typedef __m256 vec;
typedef __m256i mask;
typedef uint32_t ints __attribute__((vector_size(32)));

INLINE mask lanes(int64_t left) {
    const __m256i numbers = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)least(left, VECTOR)), numbers);
}
INLINE vec set(float x) { return _mm256_set1_ps(x); }
INLINE vec load(const void *x) { return _mm256_loadu_ps(x); }
INLINE void store(void *out, vec x) { _mm256_storeu_ps(out, x); }
INLINE vec load_some(mask m, const float *x) { return _mm256_maskload_ps(x, m); }
INLINE void store_some(mask m, float *out, vec x) { _mm256_maskstore_ps(out, m, x); }
INLINE mask without(mask a, mask b) { return _mm256_andnot_si256(b, a); }
INLINE vec keep(mask m, vec x) { return _mm256_and_ps(x, (vec)m); }
INLINE vec max(vec a, vec b) { return _mm256_max_ps(a, b); } /* b, if one of them is NaN */
INLINE vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
INLINE vec keep_max(mask m, vec a, vec b) { return _mm256_blendv_ps(a, max(a, b), (vec)m); }
INLINE vec fma_plus(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec fma_minus(vec a, vec b, vec c) { return _mm256_fmsub_ps(a, b, c); }
INLINE vec minus_fma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE float sum_of(vec x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}
INLINE float max_of(vec x) {
    float top = x[0];
    UNROLL
    for (int i = 1; i < VECTOR; i++) top = x[i] > top ? x[i] : top;
    return top;
}
INLINE vec nearest(vec x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE vec power(__m256i n) {
    return (vec)_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
}
/* In two steps, because a power below 2^-126 is not in the range of normal floats. */
INLINE vec times_power(vec x, vec whole) {
    __m256i n = _mm256_cvtps_epi32(whole), half = _mm256_srai_epi32(n, 1);
    return x * power(half) * power(_mm256_sub_epi32(n, half));
}
INLINE vec rough_reciprocal(vec x) { return _mm256_rcp_ps(x); }

INLINE vec exact_sum(vec sum, const int32_t *shift) { return _mm256_cvtepi32_ps((__m256i)sum); }
/* All elements of a vector, because the widths of layers are multiples of 16. */
INLINE void store_some_integers(mask m, char *out, vec x, int zero) {
    __m256i integers = _mm256_cvtps_epi32(x);
    integers = _mm256_permute4x64_epi64(_mm256_packs_epi32(integers, integers), 0x08);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(integers));
}

/* There is no bf16 with AVX2. */
INLINE void store_bf16(bf16 *out, vec x) { __builtin_trap(); }
INLINE void store_some_bf16(mask m, bf16 *out, vec x) { __builtin_trap(); }
INLINE vec load_some_bf16(mask m, const bf16 *x) { __builtin_trap(); }
INLINE vec interleave(const bf16 *first, const bf16 *second) { __builtin_trap(); }
#endif

enum { PANEL = PARTS * VECTOR };

INLINE int64_t element_size(int64_t mode) { return mode == FP32 ? 4 : mode == BF16 ? 2 : INTEGER; }

/* 2 to the power of x, for x of at most 127, with a relative error below 3e-7. */
INLINE vec power_of_two(vec x) {
    x = max(set(-150.0f), x); /* in this order, NaN stays NaN */
    vec whole = nearest(x);
    vec r = x - whole;
    vec y = set(1.3534167e-3f);
    y = fma_plus(y, r, set(9.6704127e-3f));
    y = fma_plus(y, r, set(5.5503033e-2f));
    y = fma_plus(y, r, set(2.4022120e-1f));
    y = fma_plus(y, r, set(6.9314718e-1f));
    y = fma_plus(y, r, set(1.0f));
    return times_power(y, whole);
}

/* 1 / x with a relative error of about 1e-7: an approximation and one step of Newton's method. */
INLINE vec reciprocal(vec x) {
    vec y = rough_reciprocal(x);
    return y * minus_fma(x, y, set(2.0f));
}

/* x times the normal distribution's cumulative probability at x (Hendrycks and Gimpel 2016), which
is 1/2 plus x times a rational function of its square up to EDGE, and there 0 or 1 but for 1e-7. The
coefficients are a minimax fit (Lawson's algorithm); the error is below 3e-7 times max(1, |x|). */
#define EDGE 5.2f
INLINE vec gelu_erf(vec x) {
    x = max(set(-EDGE), x); /* in this order, NaN stays NaN */
    const vec inner = min(set(EDGE), x), z = inner * inner;
    vec p = set(2.40390617e-8f), q = set(1.24298464e-6f);
    p = fma_plus(p, z, set(6.4625611e-6f)), q = fma_plus(q, z, set(7.31663339e-5f));
    p = fma_plus(p, z, set(1.65152061e-4f)), q = fma_plus(q, z, set(1.86339898e-3f));
    p = fma_plus(p, z, set(4.65755639e-3f)), q = fma_plus(q, z, set(2.83899989e-2f));
    p = fma_plus(p, z, set(3.33572423e-2f)), q = fma_plus(q, z, set(2.50279519e-1f));
    p = fma_plus(p, z, set(3.98942155e-1f)), q = fma_plus(q, z, set(1.0f));
    return x * fma_plus(inner * p, reciprocal(q), set(0.5f));
}

/* The approximation with tanh, written with a logistic function: x / (1 + exp(-2 u)). */
INLINE vec gelu_tanh(vec x) {
    vec u = fma_plus(x * x * set(0.044715f), x, x);
    vec e = power_of_two(min(set(126.0f), u * set(-2 * 0.79788456f * 1.44269504f)));
    return x * reciprocal(e + set(1.0f));
}

/* One step of a product's sums: add the products of a group of inputs and a vector of groups of
weights. The instructions are written out, because GCC moves the sums between registers around the
intrinsics. */
INLINE vec multiply_add(int mode, vec sum, vec inputs, vec weights) {
#ifdef __AVX512F__
    if (mode == INT8)
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(inputs), "v"(weights));
#else
    vec both;
    if (mode == INT8)
        __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
                : "+x"(sum), "=&x"(both) : "x"(inputs), "x"(weights));
#endif
    else if (mode == BF16)
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(inputs), "v"(weights));
    else
        __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(inputs), "v"(weights));
    return sum;
}

/* The sums of `count` rows with `parts` vectors of a panel. Rows are `stride` bytes apart. */
INLINE void tile_sums(int mode, int count, int parts, const char *rows, int64_t stride,
                      const char *panel, int64_t groups, vec sums[TILE][PARTS]) {
    vec s[TILE][PARTS];
    UNROLL
    for (int i = 0; i < count; i++) {
        UNROLL
        for (int j = 0; j < parts; j++) s[i][j] = set(0);
    }
    for (int64_t g = 0; g < groups; g++) {
        vec weights[PARTS];
        UNROLL
        for (int j = 0; j < parts; j++) weights[j] = load(panel + (g * PARTS + j) * VECTOR * 4);
        UNROLL
        for (int i = 0; i < count; i++) {
            vec inputs = set(*(const float *)(rows + i * stride + g * 4));
            UNROLL
            for (int j = 0; j < parts; j++)
                s[i][j] = multiply_add(mode, s[i][j], inputs, weights[j]);
        }
    }
    UNROLL
    for (int i = 0; i < count; i++) {
        UNROLL
        for (int j = 0; j < parts; j++) sums[i][j] = s[i][j];
    }
}

/* What happens to the sums of a product before they are stored. */
enum { STORE, STORE_BF16, GELU_ERF, GELU_TANH };

typedef struct {
    const Product *product;
    const char *rows;           /* inputs */
    const float *row_scales;    /* (count) of integers; INT8 only */
    void *out;                  /* fp32, or bf16 for STORE_BF16 */
    int64_t stride, out_stride; /* bytes of an input row; elements of an output row */
} Call;

/* Store a row's results for a vector of outputs, given their sums and their bias. */
INLINE void finish(int mode, int end, const Call *call, int64_t row, int64_t column, vec sum,
                   vec bias) {
    const Product *p = call->product;
    const mask wanted = lanes(p->outputs - column);
    vec y = sum + bias;
    if (mode == INT8) {
        vec scale = set(call->row_scales[row]) * load(p->scale + column);
        y = fma_plus(exact_sum(sum, p->shift + column), scale, bias);
    }
    if (end == GELU_ERF) y = gelu_erf(y);
    if (end == GELU_TANH) y = gelu_tanh(y);
    const int64_t place = row * call->out_stride + column;
    if (end == STORE_BF16)
        store_some_bf16(wanted, (bf16 *)call->out + place, y);
    else
        store_some(wanted, (float *)call->out + place, y);
}

INLINE void tile(int mode, int count, int end, const Call *call, int64_t row, int64_t panel) {
    const Product *p = call->product;
    const int64_t groups = p->inputs * element_size(mode) / 4, first = panel * PANEL;
    vec sums[TILE][PARTS];
    tile_sums(mode, count, PARTS, call->rows + row * call->stride, call->stride,
              (const char *)p->weight + panel * groups * PANEL * 4, groups, sums);
    UNROLL
    for (int j = 0; j < PARTS; j++) {
        const int64_t column = first + j * VECTOR;
        const vec bias = load(p->bias + column);
        UNROLL
        for (int i = 0; i < count; i++)
            finish(mode, end, call, row + i, column, sums[i][j], bias);
    }
}

INLINE void product_of(int mode, int end, const Call *call, int64_t count) {
    const int64_t panels = (call->product->outputs + PANEL - 1) / PANEL;
    for (int64_t panel = 0; panel < panels; panel++) {
        int64_t row = 0;
        for (; row + TILE <= count; row += TILE) tile(mode, TILE, end, call, row, panel);
        switch (count - row) {
        case 5: tile(mode, 5, end, call, row, panel); break;
        case 4: tile(mode, 4, end, call, row, panel); break;
        case 3: tile(mode, 3, end, call, row, panel); break;
        case 2: tile(mode, 2, end, call, row, panel); break;
        case 1: tile(mode, 1, end, call, row, panel); break;
        }
    }
}

#define DEFINE_PRODUCT(name, mode, end) \
    static __attribute__((noinline)) void name(const Call *call, int64_t count) { \
        product_of(mode, end, call, count); \
    }
DEFINE_PRODUCT(fp32_store, FP32, STORE)
DEFINE_PRODUCT(fp32_erf, FP32, GELU_ERF)
DEFINE_PRODUCT(fp32_tanh, FP32, GELU_TANH)
DEFINE_PRODUCT(int8_store, INT8, STORE)
DEFINE_PRODUCT(int8_erf, INT8, GELU_ERF)
DEFINE_PRODUCT(int8_tanh, INT8, GELU_TANH)
#ifdef __AVX512F__
DEFINE_PRODUCT(bf16_store, BF16, STORE)
DEFINE_PRODUCT(bf16_bf16, BF16, STORE_BF16)
DEFINE_PRODUCT(bf16_erf, BF16, GELU_ERF)
DEFINE_PRODUCT(bf16_tanh, BF16, GELU_TANH)
DEFINE_PRODUCT(int8_bf16, INT8, STORE_BF16)
#endif

static void (*const PRODUCTS[3][4])(const Call *, int64_t) = {
    [FP32] = {[STORE] = fp32_store, [GELU_ERF] = fp32_erf, [GELU_TANH] = fp32_tanh},
#ifdef __AVX512F__
    [BF16] = {bf16_store, bf16_bf16, bf16_erf, bf16_tanh},
    [INT8] = {int8_store, int8_bf16, int8_erf, int8_tanh},
#else
    [INT8] = {[STORE] = int8_store, [GELU_ERF] = int8_erf, [GELU_TANH] = int8_tanh},
#endif
};

static int tiles; /* whether products may use AMX */

#ifdef HAS_TILES
#define AMX __attribute__((target("amx-tile,amx-int8,amx-bf16")))
enum { ROWS_OF_TILE = 16, GROUPS_OF_TILE = 16 };

static AMX void configure_tiles(void) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.bytes[i] = 64, all.rows[i] = ROWS_OF_TILE;
    /* _tile_loadconfig of GCC before 12.4 tells the compiler of 8 bytes, and it drops the others. */
    __asm__ volatile("ldtilecfg %0" : : "m"(all));
}

/* The sums of 32 rows, or of 16, with a panel's first `outputs`; rows are `room` sums apart. */
INLINE AMX void sums_by_tiles(int mode, int both, const char *rows, int64_t stride,
                              const char *panel, int64_t groups, int64_t outputs, float *sums,
                              int64_t room) {
    /* Nor does GCC know that tiles are loaded from memory, which must be written before. */
    __asm__ volatile("" : : : "memory");
    for (int half = 0; half < least(outputs, PANEL); half += 2 * VECTOR) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t g = 0; g < groups; g += GROUPS_OF_TILE) {
            const char *weights = panel + (g * PANEL + half) * 4;
            _tile_loadd(4, rows + g * 4, stride);
            _tile_loadd(6, weights, PANEL * 4);
            _tile_loadd(7, weights + VECTOR * 4, PANEL * 4);
            if (both) _tile_loadd(5, rows + ROWS_OF_TILE * stride + g * 4, stride);
            if (mode == INT8) {
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 4, 7);
            } else {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (both && mode == INT8) {
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            } else if (both) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        float *lower = sums + ROWS_OF_TILE * room + half;
        _tile_stored(0, sums + half, room * 4);
        _tile_stored(1, sums + half + VECTOR, room * 4);
        if (both) {
            _tile_stored(2, lower, room * 4);
            _tile_stored(3, lower + VECTOR, room * 4);
        }
    }
}

/* A product by tiles. Rows are read up to a multiple of 16; what is beyond `count` is not used. */
INLINE AMX void product_by_tiles(int mode, int end, const Call *call, int64_t count) {
    const Product *p = call->product;
    const int64_t groups = p->inputs * element_size(mode) / 4;
    float sums[2 * ROWS_OF_TILE * PANEL] __attribute__((aligned(64)));
    configure_tiles();
    for (int64_t first = 0; first < p->outputs; first += PANEL) {
        const char *panel = (const char *)p->weight + first * groups * 4;
        for (int64_t row = 0; row < count; row += 2 * ROWS_OF_TILE) {
            const char *rows = call->rows + row * call->stride;
            if (count - row > ROWS_OF_TILE)
                sums_by_tiles(mode, 1, rows, call->stride, panel, groups, PANEL, sums, PANEL);
            else
                sums_by_tiles(mode, 0, rows, call->stride, panel, groups, PANEL, sums, PANEL);
            UNROLL
            for (int j = 0; j < PARTS; j++) {
                const int64_t column = first + j * VECTOR;
                const vec bias = load(p->bias + column);
                for (int64_t i = 0; i < least(count - row, 2 * ROWS_OF_TILE); i++)
                    finish(mode, end, call, row + i, column, load(sums + i * PANEL + j * VECTOR),
                           bias);
            }
        }
    }
    _tile_release();
}

#define DEFINE_BY_TILES(name, mode, end) \
    static AMX __attribute__((noinline)) void name(const Call *call, int64_t count) { \
        product_by_tiles(mode, end, call, count); \
    }
DEFINE_BY_TILES(bf16_store_tiles, BF16, STORE)
DEFINE_BY_TILES(bf16_bf16_tiles, BF16, STORE_BF16)
DEFINE_BY_TILES(bf16_erf_tiles, BF16, GELU_ERF)
DEFINE_BY_TILES(bf16_tanh_tiles, BF16, GELU_TANH)
DEFINE_BY_TILES(int8_store_tiles, INT8, STORE)
DEFINE_BY_TILES(int8_bf16_tiles, INT8, STORE_BF16)
DEFINE_BY_TILES(int8_erf_tiles, INT8, GELU_ERF)
DEFINE_BY_TILES(int8_tanh_tiles, INT8, GELU_TANH)

static void (*const BY_TILES[3][4])(const Call *, int64_t) = {
    [BF16] = {bf16_store_tiles, bf16_bf16_tiles, bf16_erf_tiles, bf16_tanh_tiles},
    [INT8] = {int8_store_tiles, int8_bf16_tiles, int8_erf_tiles, int8_tanh_tiles},
};
#endif

/* Compute a product, by tiles if they divide its inputs. */
static void compute_product(int mode, int end, const Call *call, int64_t count) {
#ifdef HAS_TILES
    const int64_t bytes = call->product->inputs * element_size(mode);
    if (tiles && mode != FP32 && bytes % (GROUPS_OF_TILE * 4) == 0) {
        BY_TILES[mode][end](call, count);
        return;
    }
#endif
    PRODUCTS[mode][end](call, count);
}

/* Write a row's elements in the type of a product's inputs; for integers, return their scale. */
static float convert_row(int mode, int gelu, const float *x, int64_t width, char *out) {
    if (mode == FP32) {
        memcpy(out, x, width * 4);
        return 1;
    }
    if (mode == BF16) {
        for (int64_t i = 0; i < width; i += VECTOR) {
            const mask m = lanes(width - i);
            store_some_bf16(m, (bf16 *)out + i, load_some(m, x + i));
        }
        return 1;
    }
    vec above = set(0), below = above, nothing = above;
    for (int64_t i = 0; i < width; i += VECTOR) {
        vec values = load_some(lanes(width - i), x + i);
        above = max(above, values);
        below = max(below, set(0) - values);
        nothing = fma_plus(values, set(0), nothing);
    }
    const float top = max_of(above), bottom = max_of(below);
    const Range range = RANGES[gelu];
    float scale = fmaxf(fmaxf(top / range.above, bottom / range.below), 1e-12f);
    scale += sum_of(nothing); /* NaN, if a value is NaN or infinite */
    for (int64_t i = 0; i < width; i += VECTOR) {
        const mask m = lanes(width - i);
        store_some_integers(m, out + i * INTEGER, load_some(m, x + i) * set(1 / scale),
                            range.zero);
    }
    return scale;
}

/* LayerNorm of x + residual, in place. */
static void add_norm(float *x, const float *residual, const float *const norm[2], int64_t width,
                     float epsilon) {
    vec sum = set(0), squares = sum;
    for (int64_t i = 0; i < width; i += VECTOR) {
        const mask m = lanes(width - i);
        vec y = load_some(m, x + i) + load_some(m, residual + i);
        store_some(m, x + i, y);
        sum = sum + y;
    }
    const vec mean = set(sum_of(sum) / width);
    for (int64_t i = 0; i < width; i += VECTOR) {
        const mask m = lanes(width - i);
        vec y = keep(m, load_some(m, x + i) - mean);
        squares = fma_plus(y, y, squares);
    }
    const vec factor = set(1 / sqrtf(sum_of(squares) / width + epsilon));
    for (int64_t i = 0; i < width; i += VECTOR) {
        const mask m = lanes(width - i);
        vec y = (load_some(m, x + i) - mean) * factor;
        store_some(m, x + i, fma_plus(y, load_some(m, norm[0] + i), load_some(m, norm[1] + i)));
    }
}

/* Dropout (paper section A.2). Which elements it keeps is a hash of their place and of a seed, so
nothing is stored for the backward pass, and threads change nothing. */
typedef struct {
    uint32_t seed[2], least; /* an element is kept if its hash is at least `least` */
    float scale;             /* of what is kept */
} Dropout;

/* A hash of 32-bit numbers whose every output bit depends evenly on every input bit. */
INLINE ints scramble(ints x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

/* The elements at `place` and every `step` after it, scaled, with some of them 0. */
INLINE vec drop(const Dropout *dropout, int64_t place, int64_t step, vec x) {
    if (!dropout->least) return x;
    ints number;
    UNROLL
    for (int i = 0; i < VECTOR; i++) number[i] = (uint32_t)i;
    number = number * (uint32_t)step + (uint32_t)place;
    number = scramble(scramble(number ^ dropout->seed[0]) ^ dropout->seed[1]);
    ints kept = (ints)(number >= dropout->least);
    return (vec)((ints)(x * set(dropout->scale)) & kept);
}

/* What one thread writes in between. */
typedef struct {
    char *inputs;         /* (BLOCK, intermediate size) elements of products' inputs */
    float *scales;        /* (BLOCK) */
    float *middle, *wide; /* (BLOCK, width), (BLOCK, intermediate size) */
    char *keys, *values;  /* panels of one head's keys and values */
    float *scores;        /* (QUERIES, longest sequence) */
    char *weights;        /* (QUERIES, longest sequence) attention weights */
    int64_t length;       /* the longest sequence, rounded up to PANEL */
    float scale;          /* of scores */
    const Dropout *dropout; /* of attention weights, and where each query's begin; NULL without */
    int64_t places[QUERIES];
    float logarithms[QUERIES]; /* to base 2, of the sums of exponentials of scores */
} Scratch;

static void multiply(const Layer *layer, const Product *product, int end, const float *x,
                     int64_t count, int gelu_before, Scratch *scratch, void *out,
                     int64_t out_stride) {
    const int mode = (int)layer->mode;
    const int64_t width = product->inputs, stride = width * element_size(mode);
    for (int64_t i = 0; i < count; i++)
        scratch->scales[i] =
            convert_row(mode, gelu_before, x + i * width, width, scratch->inputs + i * stride);
    Call call = {product, scratch->inputs, scratch->scales, out, stride, out_stride};
    compute_product(mode, end, &call, count);
}

/* The rows that go through a layer's products at a time: whole tiles, of either kind. */
static int64_t rows_of_block(const Layer *layer) {
    return tiles && layer->mode != FP32 ? BLOCK : 8 * TILE;
}

/* Queries, keys and values of tokens, (count, 3 width) in the type of attention's products. */
static void project(const Layer *layer, const float *hidden, int64_t count, Scratch *scratch,
                    char *projected) {
    const int64_t width = layer->query_key_value.inputs;
    const int end = layer->attention_mode == FP32 ? STORE : STORE_BF16;
    const int64_t size = element_size(layer->attention_mode);
    const int64_t most = rows_of_block(layer);
    for (int64_t i = 0; i < count; i += most)
        multiply(layer, &layer->query_key_value, end, hidden + i * width, least(most, count - i),
                 0, scratch, projected + i * 3 * width * size, 3 * width);
}

/* What follows attention: (count, width) fp32, given attention's result and the layer's input. */
static void complete(const Layer *layer, const float *attended, const float *hidden,
                     const int64_t *rows, int64_t count, Scratch *scratch, float *out) {
    const int64_t width = layer->query_key_value.inputs, inner = layer->intermediate.outputs;
    const float epsilon = (float)layer->epsilon;
    const int64_t most = rows_of_block(layer);
    for (int64_t first = 0; first < count; first += most) {
        const int64_t block = least(most, count - first);
        float *middle = scratch->middle, *result = out + first * width;
        multiply(layer, &layer->attention_output, STORE, attended + first * width, block, 0,
                 scratch, middle, width);
        for (int64_t i = 0; i < block; i++) {
            const int64_t row = rows ? rows[first + i] : first + i;
            add_norm(middle + i * width, hidden + row * width, layer->attention_norm, width,
                     epsilon);
        }
        multiply(layer, &layer->intermediate, layer->gelu_tanh ? GELU_TANH : GELU_ERF, middle,
                 block, 0, scratch, scratch->wide, inner);
        multiply(layer, &layer->output, STORE, scratch->wide, block, 1, scratch, result, width);
        for (int64_t i = 0; i < block; i++)
            add_norm(result + i * width, middle + i * width, layer->output_norm, width, epsilon);
    }
}

/* Transpose 32-bit elements, (rows, columns) to (columns, rows), in squares of four. Rows that are
not `there` are zeros. */
INLINE void transpose(const char *in, int64_t stride, int64_t there, int64_t rows, int64_t columns,
                      char *out, int64_t out_stride) {
    for (int64_t row = 0; row < rows; row += 4)
        for (int64_t column = 0; column < columns; column += 4) {
            __m128 x[4];
            UNROLL
            for (int i = 0; i < 4; i++)
                x[i] = row + i < there
                           ? _mm_loadu_ps((const float *)(in + (row + i) * stride + column * 4))
                           : _mm_setzero_ps();
            _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
            UNROLL
            for (int i = 0; i < 4; i++)
                _mm_storeu_ps((float *)(out + (column + i) * out_stride + row * 4), x[i]);
        }
}

/* Lay out the keys of a head as weights: an output is a key, an input an element of a query. */
INLINE void pack_keys(int mode, const char *keys, int64_t stride, int64_t length, int64_t width,
                      char *panels) {
    const int64_t groups = width * element_size(mode) / 4;
    for (int64_t key = 0; key < length; key += PANEL)
        transpose(keys + key * stride, stride, length - key,
                  least(PANEL, round_up(length, 32) - key), groups, panels + key * groups * 4,
                  PANEL * 4);
}

/* The groups of keys by which values are multiplied. With tiles, the last ones can be empty. */
INLINE int64_t groups_of_keys(int mode, int64_t length) {
    return mode == FP32 ? length : tiles ? round_up(length, 32) / 2 : (length + 1) / 2;
}

/* Lay out the values of a head as weights: an output is an element, an input a key. */
INLINE void pack_values(int mode, const char *values, int64_t stride, int64_t length, int64_t width,
                        char *panels) {
    const int64_t group = 4 / element_size(mode), groups = groups_of_keys(mode, length);
    for (int64_t g = 0; g < groups; g++) {
        const char *one = values + g * group * stride;
        for (int64_t i = 0; i < width; i += VECTOR) {
            char *out = panels + ((i / PANEL * groups + g) * PANEL + i % PANEL) * 4;
            const char *two = g * 2 + 1 < length ? one + stride + i * 2 : NULL;
            if (g * group >= length)
                store(out, set(0));
            else if (mode == FP32)
                store(out, load(one + i * 4));
            else
                store(out, interleave((const bf16 *)(one + i * 2), (const bf16 *)two));
        }
    }
}

/* Turn scores into unnormalized weights in place of the product's inputs; return 1 / their sum. */
INLINE float softmax_row(int mode, float *scores, int64_t from, int64_t to, int64_t length,
                         float scale, char *weights, const Dropout *dropout, int64_t place,
                         float *logarithm) {
    const vec factor = set(scale * 1.44269504f);
    vec top = set(-INFINITY), sum = set(0);
    if (from)
        for (int64_t i = 0; i < from; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < to; i += VECTOR)
        top = keep_max(lanes(to - i), top, load(scores + i));
    const vec highest = set(max_of(top)) * factor;
    for (int64_t i = 0; i < length; i += VECTOR) {
        vec y = set(0);
        if (i < to) {
            y = keep(lanes(to - i), power_of_two(fma_minus(load(scores + i), factor, highest)));
            sum = sum + y;
            if (dropout) y = drop(dropout, place + i, 1, y);
        }
        if (mode == FP32)
            store((float *)weights + i, y);
        else
            store_bf16((bf16 *)weights + i, y);
    }
    const float total = sum_of(sum);
    if (dropout) *logarithm = max_of(highest) + log2f(total);
    return 1 / total;
}

/* The same for the scores of some queries, up to the last group of keys; see `softmax_row`. */
INLINE void weigh_keys(int mode, int count, const Layer *layer, const int64_t *positions,
                       int64_t length, Scratch *scratch, float *normalizers) {
    const int64_t size = element_size(mode), room = scratch->length;
    const int64_t keys = groups_of_keys(mode, length) * 4 / size;
    for (int i = 0; i < count; i++) {
        const int64_t from = 0;
        const int64_t to = layer->direction < 0 ? positions[i] + 1 : length;
        normalizers[i] = softmax_row(mode, scratch->scores + i * room, from, to, keys,
                                     scratch->scale, scratch->weights + i * room * size,
                                     scratch->dropout, scratch->places[i],
                                     scratch->logarithms + i);
    }
}

/* Attention of up to six queries of a sequence in one head. */
INLINE void attend_tile(int mode, int count, int parts, const Layer *layer,
                        const char *const *queries, const int64_t *positions, int64_t length,
                        Scratch *scratch, float *out, int64_t out_stride) {
    const int64_t width = layer->head_width, size = element_size(mode), room = scratch->length;
    const int64_t groups = width * size / 4, key_groups = groups_of_keys(mode, length);
    char copied[TILE * WIDEST * 4];
    UNROLL
    for (int i = 0; i < count; i++) memcpy(copied + i * width * size, queries[i], width * size);
    vec sums[TILE][PARTS];
    for (int64_t key = 0; key < length; key += PANEL) {
        tile_sums(mode, count, PARTS, copied, width * size, scratch->keys + key * groups * 4,
                  groups, sums);
        UNROLL
        for (int i = 0; i < count; i++) {
            float *scores = scratch->scores + i * room + key;
            UNROLL
            for (int j = 0; j < PARTS; j++)
                store(scores + j * VECTOR, sums[i][j]);
        }
    }
    float normalizers[TILE];
    weigh_keys(mode, count, layer, positions, length, scratch, normalizers);
    for (int64_t panel = 0; panel * PANEL < width; panel++) {
        tile_sums(mode, count, parts, scratch->weights, room * size,
                  scratch->values + panel * key_groups * PANEL * 4, key_groups, sums);
        UNROLL
        for (int i = 0; i < count; i++) {
            const vec normalizer = set(normalizers[i]);
            UNROLL
            for (int j = 0; j < parts; j++) {
                const int64_t column = panel * PANEL + j * VECTOR;
                if (column < width)
                    store(out + i * out_stride + column, sums[i][j] * normalizer);
            }
        }
    }
}

#ifdef HAS_TILES
/* The same for up to 16 queries, by tiles. */
static AMX __attribute__((noinline)) void attend_by_tiles(
    int count, const Layer *layer, const char *const *queries, const int64_t *positions,
    int64_t length, Scratch *scratch, float *out, int64_t out_stride) {
    const int64_t width = layer->head_width, room = scratch->length;
    const int64_t key_groups = groups_of_keys(BF16, length);
    char copied[QUERIES * WIDEST * 2];
    float sums[QUERIES * PANEL] __attribute__((aligned(64)));
    for (int i = 0; i < count; i++) memcpy(copied + i * width * 2, queries[i], width * 2);
    configure_tiles();
    for (int64_t key = 0; key < length; key += PANEL)
        sums_by_tiles(BF16, 0, copied, width * 2, scratch->keys + key * width * 2, width / 2,
                      length - key, scratch->scores + key, room);
    float normalizers[QUERIES];
    weigh_keys(BF16, count, layer, positions, length, scratch, normalizers);
    for (int64_t first = 0; first < width; first += PANEL) {
        sums_by_tiles(BF16, 0, scratch->weights, room * 2,
                      scratch->values + first * key_groups * 4, key_groups, width - first, sums,
                      PANEL);
        for (int i = 0; i < count; i++)
            for (int64_t j = 0; j < least(PANEL, width - first); j += VECTOR)
                store(out + i * out_stride + first + j,
                      load(sums + i * PANEL + j) * set(normalizers[i]));
    }
    _tile_release();
}
#endif

/* clang-format off */
#define CASE(mode, count, parts) \
    case count: \
        attend_tile(mode, count, parts, layer, queries, positions, length, scratch, out, stride); \
        break;
#define DEFINE_ATTEND(name, mode, parts) \
    static __attribute__((noinline)) void name( \
        int count, const Layer *layer, const char *const *queries, const int64_t *positions, \
        int64_t length, Scratch *scratch, float *out, int64_t stride) { \
        switch (count) { \
            CASE(mode, 1, parts) CASE(mode, 2, parts) CASE(mode, 3, parts) \
            CASE(mode, 4, parts) CASE(mode, 5, parts) CASE(mode, 6, parts) \
        } \
    }
/* clang-format on */
DEFINE_ATTEND(attend_fp32_narrow, FP32, 2)
DEFINE_ATTEND(attend_fp32_wide, FP32, PARTS)
#ifdef __AVX512F__
DEFINE_ATTEND(attend_bf16_narrow, BF16, 2)
DEFINE_ATTEND(attend_bf16_wide, BF16, PARTS)
#endif
typedef void (*Attend)(int, const Layer *, const char *const *, const int64_t *, int64_t, Scratch *,
                       float *, int64_t);

static const Attend ATTEND[2][2] = {
    [FP32] = {attend_fp32_narrow, attend_fp32_wide},
#ifdef __AVX512F__
    [BF16] = {attend_bf16_narrow, attend_bf16_wide},
#endif
};

/* The function for heads of a width, and how many queries it takes. */
static Attend choose_attend(int mode, int64_t width, int *queries) {
#ifdef HAS_TILES
    if (tiles && mode == BF16 && width % (2 * GROUPS_OF_TILE) == 0) {
        *queries = QUERIES;
        return attend_by_tiles;
    }
#endif
    *queries = TILE;
    return ATTEND[mode][width > 2 * VECTOR];
}

INLINE int64_t sequence_of(const Batch *batch, int64_t token) {
    int64_t low = 0, high = batch->sequences;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (batch->boundaries[middle] <= token)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Attention for rows [first, end) of the result, (end - first, width).

`projected` holds the queries, keys and values of tokens from `origin` on. */
static void attend(const Layer *layer, const Batch *batch, const char *projected, int64_t origin,
                   int64_t first, int64_t end, Scratch *scratch, float *attended) {
    const int mode = (int)layer->attention_mode;
    const int64_t width = layer->head_width, full = layer->heads * width, size = element_size(mode);
    const int64_t stride = 3 * full * size;
    int most;
    const Attend function = choose_attend(mode, width, &most);
    for (int64_t run = first, next; run < end; run = next) {
        const int64_t sequence = sequence_of(batch, batch->rows ? batch->rows[run] : run);
        const int64_t start = batch->boundaries[sequence], stop = batch->boundaries[sequence + 1];
        for (next = run + 1; next < end; next++) {
            const int64_t token = batch->rows ? batch->rows[next] : next;
            if (token < start || token >= stop) break;
        }
        for (int64_t head = 0; head < layer->heads; head++) {
            const char *base = projected + (start - origin) * stride + head * width * size;
            const char *keys = base + full * size, *values = base + 2 * full * size;
            if (mode == FP32) {
                pack_keys(FP32, keys, stride, stop - start, width, scratch->keys);
                pack_values(FP32, values, stride, stop - start, width, scratch->values);
            } else {
                pack_keys(BF16, keys, stride, stop - start, width, scratch->keys);
                pack_values(BF16, values, stride, stop - start, width, scratch->values);
            }
            for (int64_t row = run; row < next; row += most) {
                const int count = (int)least(most, next - row);
                const char *queries[QUERIES];
                int64_t positions[QUERIES];
                for (int i = 0; i < count; i++) {
                    positions[i] = (batch->rows ? batch->rows[row + i] : row + i) - start;
                    queries[i] = base + positions[i] * stride;
                }
                function(count, layer, queries, positions, stop - start, scratch,
                         attended + (row - first) * full + head * width, full);
            }
        }
    }
}

/* Wait until all threads have arrived: busily for a moment, then asleep, which leaves this thread's
core to one that another program keeps from its own. */
static void arrive_and_wait(_Atomic int32_t *arrived, int32_t threads) {
    int32_t now = atomic_fetch_add(arrived, 1) + 1;
    if (now == threads) syscall(SYS_futex, arrived, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
    for (int64_t spins = 0; now < threads; spins++, now = atomic_load(arrived))
        if (spins < SPINS)
            _mm_pause();
        else
            syscall(SYS_futex, arrived, FUTEX_WAIT_PRIVATE, now, NULL, NULL, 0);
}

/* One computation of a layer, by one thread or several. */
typedef struct {
    const Layer *layer;
    const Batch *batch;
    int64_t threads, thread_bytes; /* `threads` is the most there can be */
    char *memory, *projected;
    float *attended;
    _Atomic int32_t arrived; /* threads that are done with their projections */
} Job;

static void *take(char **room, int64_t bytes) {
    void *taken = *room;
    *room += round_up(bytes, 64);
    return taken;
}

/* Lay out the scratch memory of a thread from `room`; return its bytes. */
static int64_t make_scratch(const Layer *layer, int64_t longest, char *room, Scratch *scratch) {
    const int64_t width = layer->query_key_value.inputs, inner = layer->intermediate.outputs;
    const int64_t most = width > inner ? width : inner;
    char *at = room;
    scratch->dropout = NULL;
    scratch->scale = 1 / sqrtf((float)layer->head_width);
    scratch->length = round_up(longest, PANEL);
    scratch->inputs = take(&at, BLOCK * most * 4);
    scratch->scales = take(&at, BLOCK * 4);
    scratch->middle = take(&at, BLOCK * width * 4);
    scratch->wide = take(&at, BLOCK * inner * 4);
    scratch->keys = take(&at, scratch->length * layer->head_width * 4);
    scratch->values = take(&at, scratch->length * round_up(layer->head_width, PANEL) * 4);
    scratch->scores = take(&at, QUERIES * scratch->length * 4);
    scratch->weights = take(&at, QUERIES * scratch->length * 4);
    return at - room;
}

static int64_t longest_sequence(const Batch *batch) {
    int64_t longest = 0;
    for (int64_t i = 0; i < batch->sequences; i++) {
        const int64_t length = batch->boundaries[i + 1] - batch->boundaries[i];
        longest = length > longest ? length : longest;
    }
    return longest;
}

/* A thread computes a few sequences at a time. */
static void compute_groups(const Job *job, Scratch *scratch) {
    const Batch *batch = job->batch;
    const int64_t width = job->layer->query_key_value.inputs;
    for (int64_t sequence = 0; sequence < batch->sequences;) {
        const int64_t first = batch->boundaries[sequence];
        while (sequence < batch->sequences && batch->boundaries[sequence] - first < GROUP)
            sequence++;
        const int64_t end = batch->boundaries[sequence];
        const float *hidden = batch->hidden + first * width;
        project(job->layer, hidden, end - first, scratch, job->projected);
        attend(job->layer, batch, job->projected, first, first, end, scratch, job->attended);
        complete(job->layer, job->attended, hidden, NULL, end - first, scratch,
                 batch->out + first * width);
    }
}

/* The share of a thread: first the projections of its tokens, then, when all threads are done with
theirs, its rows of the result. */
static void compute_share(Job *job, int64_t thread, int64_t threads) {
    const Layer *layer = job->layer;
    const Batch *batch = job->batch;
    const int64_t width = layer->query_key_value.inputs, count = batch->count;
    const int64_t tokens = batch->boundaries[batch->sequences];
    const int64_t size = 3 * width * element_size(layer->attention_mode);
    Scratch scratch;
    make_scratch(layer, longest_sequence(batch), job->memory + thread * job->thread_bytes,
                 &scratch);
    if (job->threads == 1 && !batch->rows && !batch->projected) {
        compute_groups(job, &scratch);
        return;
    }
    const char *projected = batch->projected ? batch->projected : job->projected;
    if (!batch->projected) {
        const int64_t first = tokens * thread / threads, end = tokens * (thread + 1) / threads;
        project(layer, batch->hidden + first * width, end - first, &scratch,
                job->projected + first * size);
        arrive_and_wait(&job->arrived, (int32_t)threads);
    }
    const int64_t first = count * thread / threads, end = count * (thread + 1) / threads;
    const int64_t *rows = batch->rows ? batch->rows + first : NULL;
    float *attended = job->attended + first * width;
    attend(layer, batch, projected, 0, first, end, &scratch, attended);
    complete(layer, attended, batch->hidden + (rows ? 0 : first * width), rows, end - first,
             &scratch, batch->out + first * width);
}

/* torch's OpenMP. Its threads wait for work in any case, and threads of our own would compete with
them for the cores. */
static struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread)(void), (*threads)(void);
} openmp;

static int has_openmp(void) {
    if (!openmp.threads) {
        *(void **)&openmp.parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
        *(void **)&openmp.thread = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
        *(void **)&openmp.threads = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    }
    return openmp.parallel && openmp.thread && openmp.threads;
}

static void compute_own_share(void *job) { compute_share(job, openmp.thread(), openmp.threads()); }

/* The hash of this file when it was compiled, which compiled.py compares with the file's. */
const char *bertkit_source(void) { return SOURCE_HASH; }

/* The outputs in a panel of weights. */
int64_t bertkit_panel(void) { return PANEL; }

/* The bytes of a mode's elements; 0 if the mode is not compiled. */
int64_t bertkit_element_size(int64_t mode) { return PRODUCTS[mode][STORE] ? element_size(mode) : 0; }

/* Use AMX if it is wanted, the processor has it, and the system lets this process use it. */
void bertkit_use_tiles(int64_t wanted) {
#ifdef HAS_TILES
    const unsigned needed = 1 << 22 | 1 << 24 | 1 << 25; /* bf16, tiles, int8 */
    unsigned a, b, c, d;
    tiles = wanted && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed &&
            !syscall(SYS_arch_prctl, 0x1023, 18); /* ARCH_REQ_XCOMP_PERM, XTILEDATA */
#endif
}

/* Whether products use AMX. */
int64_t bertkit_tiles(void) { return tiles; }

/* Lay out the memory of a job: that of its threads, and what they pass on; return its bytes. */
static int64_t lay_out(Job *job, char *memory) {
    const Batch *batch = job->batch;
    Scratch scratch;
    const int64_t longest = longest_sequence(batch), width = job->layer->query_key_value.inputs;
    const int64_t tokens = batch->boundaries[batch->sequences];
    const int groups = job->threads == 1 && !batch->rows && !batch->projected;
    const int64_t most = groups ? least(tokens, GROUP + longest) : tokens;
    char *at = (char *)(intptr_t)round_up((intptr_t)memory, 64);
    job->memory = at;
    job->thread_bytes = make_scratch(job->layer, longest, NULL, &scratch);
    take(&at, job->threads * job->thread_bytes);
    job->attended = take(&at, (groups ? most : batch->count) * width * 4);
    job->projected = take(&at, most * 3 * width * element_size(job->layer->attention_mode));
    return at - job->memory + 64;
}

/* The bytes of memory that `bertkit_layer` needs for a batch. */
int64_t bertkit_layer_bytes(const Layer *layer, const Batch *batch, int64_t threads) {
    Job job = {.layer = layer, .batch = batch, .threads = threads};
    return lay_out(&job, NULL);
}

/* Compute a layer for a batch with up to `threads` threads, in the memory that is given for it. */
void bertkit_layer(const Layer *layer, const Batch *batch, int64_t threads, char *memory) {
    const int shared = threads > 1 && has_openmp();
    Job job = {.layer = layer, .batch = batch, .threads = shared ? threads : 1};
    lay_out(&job, memory);
    if (shared)
        openmp.parallel(compute_own_share, &job, (unsigned)threads, 0);
    else
        compute_share(&job, 0, 1);
}

/* The bytes of memory that the two functions below need. */
int64_t bertkit_parts_bytes(const Layer *layer) {
    Scratch scratch;
    return make_scratch(layer, 0, NULL, &scratch) + 64;
}

/* Queries, keys and values of tokens: (count, 3 width) fp32 or bf16, given their hidden states. */
void bertkit_project(const Layer *layer, const float *hidden, int64_t count, char *projected,
                     char *memory) {
    Scratch scratch;
    make_scratch(layer, 0, (char *)(intptr_t)round_up((intptr_t)memory, 64), &scratch);
    project(layer, hidden, count, &scratch, projected);
}

/* The layer's output, (count, width), given attention's result and the layer's input. */
void bertkit_complete(const Layer *layer, const float *attended, const float *hidden, int64_t count,
                      float *out, char *memory) {
    Scratch scratch;
    make_scratch(layer, 0, (char *)(intptr_t)round_up((intptr_t)memory, 64), &scratch);
    complete(layer, attended, hidden, NULL, count, &scratch, out);
}

/* Two steps of training, forward and backward: attention, and LayerNorm(dropout(x) + residual) in
one pass over the rows. Elements are fp32 or bf16, numbers in between are fp32. */

enum { ROWS = 64 }; /* for which one thread sums the gradients of LayerNorm's parameters */

typedef struct {
    int64_t rows, width;
    const void *x, *residual; /* (rows, width); in the backward pass, `x` is y's gradient */
    const float *weight, *bias;
    void *y, *normalized;     /* (rows, width) of the residual's type */
    float *deviations;        /* (rows) 1 / standard deviation */
    void *gradient, *residual_gradient; /* NULL in the forward pass */
    float *sums;              /* (rows / ROWS, 2, width) parts of the parameters' gradients */
    double epsilon;
    Dropout dropout;
} AddNorm;

INLINE vec read(int type, mask m, const void *x, int64_t i) {
    return type == FP32 ? load_some(m, (const float *)x + i)
                        : load_some_bf16(m, (const bf16 *)x + i);
}
INLINE void write(int type, mask m, void *out, int64_t i, vec x) {
    if (type == FP32)
        store_some(m, (float *)out + i, x);
    else
        store_some_bf16(m, (bf16 *)out + i, x);
}

typedef void (*Work)(const void *step, int64_t first, int64_t end);

INLINE void add_norm_rows(int type, int wide, const AddNorm *a, int64_t first, int64_t end) {
    const int64_t width = a->width;
    float row[round_up(width, VECTOR)];
    for (int64_t at = first; at < end; at++) {
        const int64_t base = at * width;
        vec sum = set(0), squares = sum;
        for (int64_t i = 0; i < width; i += VECTOR) {
            const mask m = lanes(width - i);
            vec y = drop(&a->dropout, base + i, 1, read(type, m, a->x, base + i));
            y = y + read(wide, m, a->residual, base + i);
            store(row + i, y);
            sum = sum + y;
        }
        const vec mean = set(sum_of(sum) / width);
        for (int64_t i = 0; i < width; i += VECTOR) {
            const vec y = keep(lanes(width - i), load(row + i) - mean);
            squares = fma_plus(y, y, squares);
        }
        const float deviation = 1 / sqrtf(sum_of(squares) / width + (float)a->epsilon);
        a->deviations[at] = deviation;
        for (int64_t i = 0; i < width; i += VECTOR) {
            const mask m = lanes(width - i);
            const vec y = (load(row + i) - mean) * set(deviation);
            write(wide, m, a->normalized, base + i, y);
            const vec weight = load_some(m, a->weight + i), bias = load_some(m, a->bias + i);
            write(wide, m, a->y, base + i, fma_plus(y, weight, bias));
        }
    }
}

/* For whole parts of ROWS rows. */
INLINE void add_norm_gradients(int type, int wide, const AddNorm *a, int64_t first, int64_t end) {
    const int64_t width = a->width;
    for (int64_t part = first; part < end; part++) {
        float *sums = a->sums + part * 2 * width;
        memset(sums, 0, 2 * width * 4);
        for (int64_t at = part * ROWS; at < least(a->rows, (part + 1) * ROWS); at++) {
            const int64_t base = at * width;
            vec sum = set(0), products = sum;
            for (int64_t i = 0; i < width; i += VECTOR) {
                const mask m = lanes(width - i);
                const vec g = read(wide, m, a->x, base + i);
                const vec y = read(wide, m, a->normalized, base + i);
                store_some(m, sums + i, fma_plus(g, y, load_some(m, sums + i)));
                store_some(m, sums + width + i, g + load_some(m, sums + width + i));
                const vec scaled = g * load_some(m, a->weight + i);
                sum = sum + scaled;
                products = fma_plus(scaled, y, products);
            }
            const vec mean = set(sum_of(sum) / width), along = set(sum_of(products) / width);
            for (int64_t i = 0; i < width; i += VECTOR) {
                const mask m = lanes(width - i);
                const vec g = read(wide, m, a->x, base + i) * load_some(m, a->weight + i);
                const vec y = read(wide, m, a->normalized, base + i);
                const vec x = minus_fma(y, along, g - mean) * set(a->deviations[at]);
                write(wide, m, a->residual_gradient, base + i, x);
                write(type, m, a->gradient, base + i, drop(&a->dropout, base + i, 1, x));
            }
        }
    }
}

/* A function for given types. */
#define DEFINE_STEP(name, function, ...) \
    static void name(const void *step, int64_t first, int64_t end) { \
        function(__VA_ARGS__, step, first, end); \
    }
DEFINE_STEP(add_norm_fp32, add_norm_rows, FP32, FP32)
DEFINE_STEP(add_norm_gradients_fp32, add_norm_gradients, FP32, FP32)
#ifdef __AVX512F__
DEFINE_STEP(add_norm_mixed, add_norm_rows, BF16, FP32)
DEFINE_STEP(add_norm_gradients_mixed, add_norm_gradients, BF16, FP32)
DEFINE_STEP(add_norm_bf16, add_norm_rows, BF16, BF16)
DEFINE_STEP(add_norm_gradients_bf16, add_norm_gradients, BF16, BF16)
#endif

/* [type of x + type of the residual][whether it is the backward pass] */
static const Work ADD_NORM[3][2] = {
    {add_norm_fp32, add_norm_gradients_fp32},
#ifdef __AVX512F__
    {add_norm_mixed, add_norm_gradients_mixed},
    {add_norm_bf16, add_norm_gradients_bf16},
#endif
};

typedef struct {
    Work work;
    const void *step;
    int64_t count;
} Rows;

static void work_own_rows(void *given) {
    const Rows *rows = given;
    const int64_t thread = openmp.thread(), threads = openmp.threads();
    rows->work(rows->step, rows->count * thread / threads, rows->count * (thread + 1) / threads);
}

static void work_rows(Work work, const void *step, int64_t count, int64_t threads) {
    Rows rows = {work, step, count};
    if (threads > 1 && has_openmp())
        openmp.parallel(work_own_rows, &rows, (unsigned)threads, 0);
    else
        work(step, 0, count);
}

static Dropout dropout_of(int64_t seed, double probability) {
    const double least = fmin(round(probability * 4294967296.0), 4294967295.0);
    return (Dropout){{(uint32_t)seed, (uint32_t)(seed >> 32)}, (uint32_t)least,
                     (float)(1 / (1 - least / 4294967296.0))};
}

/* Attention in training, of one sequence and one head at a time. */
typedef struct {
    Layer layer;               /* heads, their width in memory of our own, and the direction */
    int64_t width;             /* of a head */
    const int32_t *boundaries; /* (sequences + 1) */
    int64_t sequences, longest;
    const char *projected;     /* (tokens, 3, heads, width) queries, keys and values */
    char *attended;            /* (tokens, heads, width) */
    float *logarithms;         /* (tokens, heads), see Scratch */
    const char *given;         /* attended's gradient; NULL in the forward pass */
    char *gradient;            /* of `projected` */
    Dropout dropout;
    char *memory;
    int64_t thread_bytes;
    _Atomic int64_t next; /* the sequence and head that the next thread takes */
} Attention;

/* What one thread writes in the backward pass. `room` is the longest sequence, rounded up. */
typedef struct {
    char *queries[2], *given[2]; /* panels: as keys are packed, and as values are */
    char *keys, *values;         /* (KEYS, width) */
    float *scores, *products;    /* (KEYS, room) keys with queries, values with the gradient */
    char *weights, *slopes;      /* (KEYS, room) with dropout; the gradient of scores */
    char *panels;                /* all slopes: an output is a query, an input a key */
    char *columns;               /* (width, room) the keys */
    float *sums;                 /* (KEYS, width) or (width, room) */
    float *logarithms, *means;   /* (room) */
    int64_t room;
} Gradients;

enum { KEYS = 48 }; /* whole tiles, of either kind */

/* The sums of rows, up to a multiple of TILE or of 16, with panels; they are `room` apart. */
INLINE void sum_by_vectors(int mode, const char *rows, int64_t stride, int64_t count,
                           const char *panels, int64_t groups, int64_t outputs, float *sums,
                           int64_t room) {
    vec s[TILE][PARTS];
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const char *panel = panels + first * groups * 4;
        const int parts = outputs - first > 2 * VECTOR ? PARTS : 2;
        for (int64_t row = 0; row < count; row += TILE) {
            if (parts == PARTS)
                tile_sums(mode, TILE, PARTS, rows + row * stride, stride, panel, groups, s);
            else
                tile_sums(mode, TILE, 2, rows + row * stride, stride, panel, groups, s);
            for (int i = 0; i < TILE; i++)
                for (int j = 0; j < parts; j++)
                    store(sums + (row + i) * room + first + j * VECTOR, s[i][j]);
        }
    }
}

#ifdef HAS_TILES
static AMX __attribute__((noinline)) void sum_by_tiles(const char *rows, int64_t stride,
                                                       int64_t count, const char *panels,
                                                       int64_t groups, int64_t outputs,
                                                       float *sums, int64_t room) {
    configure_tiles();
    for (int64_t first = 0; first < outputs; first += PANEL) {
        const char *panel = panels + first * groups * 4;
        for (int64_t row = 0; row < count; row += 2 * ROWS_OF_TILE) {
            const char *from = rows + row * stride;
            float *to = sums + row * room + first;
            if (count - row > ROWS_OF_TILE)
                sums_by_tiles(BF16, 1, from, stride, panel, groups, outputs - first, to, room);
            else
                sums_by_tiles(BF16, 0, from, stride, panel, groups, outputs - first, to, room);
        }
    }
    _tile_release();
}
#endif

static __attribute__((noinline)) void sum_products(int mode, const char *rows, int64_t stride,
                                                   int64_t count, const char *panels,
                                                   int64_t groups, int64_t outputs, float *sums,
                                                   int64_t room) {
#ifdef HAS_TILES
    if (tiles && mode == BF16 && groups % GROUPS_OF_TILE == 0) {
        sum_by_tiles(rows, stride, count, panels, groups, outputs, sums, room);
        return;
    }
#endif
    if (mode == FP32)
        sum_by_vectors(FP32, rows, stride, count, panels, groups, outputs, sums, room);
#ifdef __AVX512F__
    else
        sum_by_vectors(BF16, rows, stride, count, panels, groups, outputs, sums, room);
#endif
}

/* The elements of a row of weights and of other rows like them: see `drop`. */
INLINE int64_t place_of(const Attention *a, int64_t token, int64_t head) {
    return (token * a->layer.heads + head) * a->longest;
}

/* The rows of a head; if their width is no multiple of 16, copied, with zeros at the end. */
INLINE const char *padded_rows(int mode, const Attention *a, const char *rows, int64_t *stride,
                               int64_t length, char **room) {
    const int64_t own = a->width * element_size(mode);
    const int64_t wide = a->layer.head_width * element_size(mode);
    if (own == wide) return rows;
    char *copy = take(room, round_up(a->longest, 64) * wide);
    for (int64_t i = 0; i < length; i++) {
        memcpy(copy + i * wide, rows + i * *stride, own);
        memset(copy + i * wide + own, 0, wide - own);
    }
    *stride = wide;
    return copy;
}

INLINE void attend_head(int mode, const Attention *a, int64_t sequence, int64_t head, char *room) {
    const int64_t width = a->layer.head_width, heads = a->layer.heads, size = element_size(mode);
    const int64_t full = heads * a->width * size, start = a->boundaries[sequence];
    const int64_t length = a->boundaries[sequence + 1] - start;
    const char *parts[3]; /* queries, keys, values */
    int64_t stride;
    for (int i = 0; i < 3; i++) {
        stride = 3 * full;
        parts[i] = a->projected + start * stride + i * full + head * a->width * size;
        parts[i] = padded_rows(mode, a, parts[i], &stride, length, &room);
    }
    float out[QUERIES * WIDEST] __attribute__((aligned(64)));
    Scratch scratch;
    make_scratch(&a->layer, a->longest, room, &scratch);
    scratch.scale = 1 / sqrtf((float)a->width);
    scratch.dropout = &a->dropout;
    pack_keys(mode, parts[1], stride, length, width, scratch.keys);
    pack_values(mode, parts[2], stride, length, width, scratch.values);
    int most;
    const Attend function = choose_attend(mode, width, &most);
    for (int64_t first = 0; first < length; first += most) {
        const int count = (int)least(most, length - first);
        const char *queries[QUERIES];
        int64_t positions[QUERIES];
        for (int i = 0; i < count; i++) {
            positions[i] = first + i;
            queries[i] = parts[0] + positions[i] * stride;
            scratch.places[i] = place_of(a, start + first + i, head);
        }
        function(count, &a->layer, queries, positions, length, &scratch, out, width);
        for (int i = 0; i < count; i++) {
            const int64_t row = (start + first + i) * heads + head;
            a->logarithms[row] = scratch.logarithms[i];
            convert_row(mode, 0, out + i * width, a->width, a->attended + row * a->width * size);
        }
    }
}

/* Lay out the memory of a thread in the backward pass; return its bytes. */
static int64_t make_gradients(const Attention *a, char *memory, Gradients *g) {
    const int64_t room = round_up(a->longest, 64), width = a->layer.head_width;
    const int64_t panels = round_up(width, PANEL), rows = round_up(width, KEYS);
    char *at = memory;
    g->room = room;
    for (int i = 0; i < 2; i++) {
        g->queries[i] = take(&at, room * panels * 4);
        g->given[i] = take(&at, room * panels * 4);
    }
    g->keys = take(&at, KEYS * width * 4);
    g->values = take(&at, KEYS * width * 4);
    g->scores = take(&at, KEYS * room * 4);
    g->products = take(&at, KEYS * room * 4);
    g->weights = take(&at, KEYS * room * 4);
    g->slopes = take(&at, KEYS * room * 4);
    g->panels = take(&at, room * room * 4);
    g->columns = take(&at, rows * room * 4);
    g->sums = take(&at, (KEYS * panels > rows * room ? KEYS * panels : rows * room) * 4);
    g->logarithms = take(&at, room * 4);
    g->means = take(&at, room * 4);
    return at - memory;
}

/* The weights and the gradient of the scores of some keys, from `first` on, with all queries. */
INLINE void compute_slopes(int mode, const Attention *a, const Gradients *g, int64_t start,
                           int64_t length, int64_t head, int64_t first, int64_t count) {
    const float scale = 1 / sqrtf((float)a->width);
    const int64_t size = element_size(mode), groups = groups_of_keys(mode, length);
    for (int64_t i = 0; i < count; i++) {
        const int64_t key = first + i, direction = a->layer.direction;
        const int64_t from = direction < 0 ? key : 0, to = length;
        char *weights = g->weights + i * g->room * size, *slopes = g->slopes + i * g->room * size;
        for (int64_t q = 0; q < round_up(length, 32); q += VECTOR) {
            vec y = load(g->scores + i * g->room + q);
            y = power_of_two(
                fma_minus(y, set(scale * 1.44269504f), load(g->logarithms + q)));
            y = keep(without(lanes(to - q), lanes(from - q)), y);
            const vec kept = drop(&a->dropout, place_of(a, start + q, head) + key,
                                  a->layer.heads * a->longest, set(1));
            const vec product = load(g->products + i * g->room + q) * kept;
            const vec slope = y * (product - load(g->means + q)) * set(scale);
            if (mode == FP32) {
                store((float *)weights + q, y * kept);
                store((float *)slopes + q, slope);
                store(g->panels + ((q / PANEL * groups + key) * PANEL + q % PANEL) * 4, slope);
            } else {
                store_bf16((bf16 *)weights + q, y * kept);
                store_bf16((bf16 *)slopes + q, slope);
            }
        }
    }
    if (mode == FP32) return;
    for (int64_t i = 0; i < count; i += 2) {
        const bf16 *one = (const bf16 *)g->slopes + i * g->room;
        const bf16 *two = i + 1 < count ? one + g->room : NULL;
        for (int64_t q = 0; q < round_up(length, 32); q += VECTOR)
            store(g->panels + ((q / PANEL * groups + (first + i) / 2) * PANEL + q % PANEL) * 4,
                  interleave(one + q, two ? two + q : NULL));
    }
}

INLINE void head_gradients(int mode, const Attention *a, int64_t sequence, int64_t head,
                           char *room) {
    const int64_t width = a->layer.head_width, heads = a->layer.heads, size = element_size(mode);
    const int64_t full = heads * a->width * size, start = a->boundaries[sequence];
    const int64_t length = a->boundaries[sequence + 1] - start, row_bytes = width * size;
    const int64_t panels = round_up(width, PANEL), offset = head * a->width * size;
    const int64_t inner = row_bytes / 4, groups = groups_of_keys(mode, length);
    const char *attended = a->attended + start * full + offset;
    const char *upward = a->given + start * full + offset;
    char *out = a->gradient + start * 3 * full + offset;
    const char *parts[4]; /* queries, keys, values, and the gradient of what is attended */
    int64_t stride, given_stride = full;
    for (int i = 0; i < 3; i++) {
        stride = 3 * full;
        parts[i] = a->projected + start * stride + i * full + offset;
        parts[i] = padded_rows(mode, a, parts[i], &stride, length, &room);
    }
    parts[3] = padded_rows(mode, a, upward, &given_stride, length, &room);
    Gradients g;
    make_gradients(a, room, &g);
    pack_keys(mode, parts[0], stride, length, width, g.queries[0]);
    pack_keys(mode, parts[3], given_stride, length, width, g.given[0]);
    pack_values(mode, parts[0], stride, length, width, g.queries[1]);
    pack_values(mode, parts[3], given_stride, length, width, g.given[1]);
    memset(g.logarithms, 0, g.room * 4);
    memset(g.means, 0, g.room * 4);
    for (int64_t q = 0; q < length; q++) {
        vec sum = set(0);
        for (int64_t i = 0; i < a->width; i += VECTOR) {
            const mask m = lanes(a->width - i);
            sum = fma_plus(read(mode, m, attended + q * full, i), read(mode, m, upward + q * full, i),
                           sum);
        }
        g.means[q] = sum_of(sum);
        g.logarithms[q] = a->logarithms[(start + q) * heads + head];
    }
    for (int64_t first = 0; first < length; first += KEYS) {
        const int64_t count = least(KEYS, length - first);
        for (int64_t i = 0; i < count; i++) {
            memcpy(g.keys + i * row_bytes, parts[1] + (first + i) * stride, row_bytes);
            memcpy(g.values + i * row_bytes, parts[2] + (first + i) * stride, row_bytes);
        }
        sum_products(mode, g.keys, row_bytes, count, g.queries[0], inner, length, g.scores, g.room);
        sum_products(mode, g.values, row_bytes, count, g.given[0], inner, length, g.products,
                     g.room);
        compute_slopes(mode, a, &g, start, length, head, first, count);
        for (int part = 1; part < 3; part++) {
            sum_products(mode, part == 1 ? g.slopes : g.weights, g.room * size, count,
                         part == 1 ? g.queries[1] : g.given[1], groups, width, g.sums, panels);
            for (int64_t i = 0; i < count; i++)
                convert_row(mode, 0, g.sums + i * panels, a->width,
                            out + (first + i) * 3 * full + part * full);
        }
    }
    for (int64_t group = (length * size + 3) / 4; group < groups; group++)
        for (int64_t q = 0; q < length; q += PANEL)
            memset(g.panels + (q / PANEL * groups + group) * PANEL * 4, 0, PANEL * 4);
    pack_values(mode, parts[1], stride, length, width, g.queries[1]);
    for (int64_t i = 0; i < width; i += PANEL)
        transpose(g.queries[1] + i * groups * 4, PANEL * 4, groups, groups,
                  least(PANEL, width - i), g.columns + i * g.room * size, g.room * size);
    sum_products(mode, g.columns, g.room * size, width, g.panels, groups, length, g.sums, g.room);
    transpose((const char *)g.sums, g.room * 4, width, width, length, g.queries[1], width * 4);
    for (int64_t q = 0; q < length; q++)
        convert_row(mode, 0, (const float *)g.queries[1] + q * width, a->width, out + q * 3 * full);
}

/* The share of a thread: it takes sequences and heads until there are none. */
INLINE void share_of_attention(int mode, Attention *a, int64_t thread) {
    char *memory = a->memory + thread * a->thread_bytes;
    for (int64_t item; (item = atomic_fetch_add(&a->next, 1)) < a->sequences * a->layer.heads;) {
        const int64_t sequence = item / a->layer.heads, head = item % a->layer.heads;
        if (a->given)
            head_gradients(mode, a, sequence, head, memory);
        else
            attend_head(mode, a, sequence, head, memory);
    }
}

static void attention_fp32(void *given) { share_of_attention(FP32, given, openmp.thread()); }
static void attention_fp32_alone(void *given) { share_of_attention(FP32, given, 0); }
#ifdef __AVX512F__
static void attention_bf16(void *given) { share_of_attention(BF16, given, openmp.thread()); }
static void attention_bf16_alone(void *given) { share_of_attention(BF16, given, 0); }
#endif

/* [type][whether one thread works alone] */
static void (*const ATTENTION[2][2])(void *) = {
    {attention_fp32, attention_fp32_alone},
#ifdef __AVX512F__
    {attention_bf16, attention_bf16_alone},
#endif
};

/* The bytes that a thread of the function below needs, for the longest sequence. */
int64_t bertkit_attention_bytes(int64_t width, int64_t longest) {
    const int64_t wide = round_up(width, 16);
    const Attention a = {.layer = {.head_width = wide}, .longest = longest};
    Scratch scratch;
    Gradients gradients;
    const int64_t forward = make_scratch(&a.layer, longest, NULL, &scratch);
    const int64_t backward = make_gradients(&a, NULL, &gradients);
    const int64_t copies = wide == width ? 0 : 4 * round_up(longest, 64) * wide * 4;
    return copies + (forward > backward ? forward : backward);
}

/* Attention, or its gradient if `given` is not NULL; see Attention. */
void bertkit_attention(int64_t type, int64_t heads, int64_t width, int64_t direction,
                       const int32_t *boundaries, int64_t sequences, int64_t longest,
                       const void *projected, void *attended, float *logarithms, const void *given,
                       void *gradient, int64_t seed, double probability, void *memory,
                       int64_t threads) {
    Attention a = {
        .layer = {.heads = heads, .head_width = round_up(width, 16), .direction = direction},
        .width = width, .boundaries = boundaries, .sequences = sequences, .longest = longest,
        .projected = projected, .attended = attended, .logarithms = logarithms, .given = given,
        .gradient = gradient, .dropout = dropout_of(seed, probability), .memory = memory,
        .thread_bytes = bertkit_attention_bytes(width, longest)};
    if (threads > 1 && has_openmp())
        openmp.parallel(ATTENTION[type][0], &a, (unsigned)threads, 0);
    else
        ATTENTION[type][1](&a);
}

void bertkit_add_norm(int64_t type, int64_t residual_type, int64_t rows, int64_t width,
                      const void *x, const void *residual, const float *weight, const float *bias,
                      void *y, void *normalized, float *deviations, double epsilon, int64_t seed,
                      double probability, int64_t threads) {
    const AddNorm a = {.rows = rows, .width = width, .x = x, .residual = residual, .weight = weight,
                       .bias = bias, .y = y, .normalized = normalized, .deviations = deviations,
                       .epsilon = epsilon, .dropout = dropout_of(seed, probability)};
    work_rows(ADD_NORM[type + residual_type][0], &a, rows, threads);
}

void bertkit_add_norm_gradients(int64_t type, int64_t residual_type, int64_t rows, int64_t width,
                                const void *y_gradient, const float *weight, void *normalized,
                                float *deviations, void *gradient, void *residual_gradient,
                                float *sums, int64_t seed, double probability, int64_t threads) {
    const AddNorm a = {.rows = rows, .width = width, .x = y_gradient, .weight = weight,
                       .normalized = normalized, .deviations = deviations, .gradient = gradient,
                       .residual_gradient = residual_gradient, .sums = sums,
                       .dropout = dropout_of(seed, probability)};
    work_rows(ADD_NORM[type + residual_type][1], &a, (rows + ROWS - 1) / ROWS, threads);
}

/* The rows whose gradients of the parameters are summed in one part. */
int64_t bertkit_rows_of_a_part(void) { return ROWS; }
