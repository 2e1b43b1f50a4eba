/* What do our C++ kernels share? Vectors as wide as this processor's registers, what torch's exp and log1p are to them, products of
   matrices that fit into the cache, threads.

No torch header and no runtime library: each source has a C interface that a Python file of the same name calls (see native.py).
The vectors are the compiler's own (GCC, Clang).
*/
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int LINE = 16;                                      // floats in a cache line
constexpr int UNROLL = LANES * 2 > LINE ? 2 : LINE / LANES;   // independent sums: an addition waits for the one before it

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));
typedef uint32_t word __attribute__((vector_size(4 * LANES)));

static inline vec root(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
    return (vec)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (vec)_mm_sqrt_ps((__m128)x);
#else
    for (int l = 0; l < LANES; l++) x[l] = std::sqrt(x[l]);
    return x;
#endif
}

static inline bool any(mask x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)x) != 0;
#elif defined(__x86_64__)
    return _mm_movemask_ps((__m128)x) != 0;
#else
    int32_t bits = 0;
    for (int l = 0; l < LANES; l++) bits |= x[l];
    return bits != 0;
#endif
}

static inline vec all(float x) { return vec{} + x; }
static inline vec least(vec a, vec b) { return a < b ? a : b; }
static inline vec most(vec a, vec b) { return a > b ? a : b; }

/* root(x) and a / b to one more rounding error. AVX-512 has a first guess of 14 bits, and one step of Newton's method doubles
   them, in less time than the exact instructions need. Zero, infinity and NaN as there. The quotient's b is a normal float > 0,
   infinity or NaN. */
static inline vec quick_root(vec x) {
#if defined(__AVX512DQ__)
    const __m512 v = (__m512)x;
    const vec guess = (vec)_mm512_rsqrt14_ps(v), y = x * guess, better = (x - y * y) * (guess * 0.5f) + y;
    return (vec)_mm512_mask_mov_ps((__m512)better, _mm512_fpclass_ps_mask(v, 0x1E), v);  // both zeros, both infinities
#else
    return root(x);
#endif
}
static inline vec quick_quotient(vec a, vec b) {
#if defined(__AVX512DQ__)
    const vec guess = (vec)_mm512_rcp14_ps((__m512)b), y = a * guess;
    return (a - y * least(all(1e38f), b)) * guess + y;  // 0 times infinity would be NaN
#else
    return a / b;
#endif
}

static inline vec load(const float* p) { vec x; std::memcpy(&x, p, sizeof x); return x; }
static inline void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }

/* The sum of the lanes, in a fixed order. */
static inline float sum(vec x) {
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) x[l] += x[l + half];
    return x[0];
}

/* e^x to two rounding errors; 0 below -87.3, and no more than e^88. NaN stays. (The polynomial is that of Cephes.) */
static inline vec exp(vec x) {
    const vec low = all(-87.3f), bounded = x > 88 ? all(88) : x < low ? low : x, magic = all(12582912);
    const vec n = (bounded * 1.44269504f + magic) - magic, f = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    const vec y = p * f * f + f + 1;
    const vec scale = (vec)((__builtin_convertvector(n, mask) + 127) << 23);
    return x < low ? vec{} : y * scale;
}
static inline vec sigmoid(vec x) { return 1 / (1 + exp(-x)); }

/* log(1 + y) for finite y >= 0, or NaN: 1 + y = 2^e m with m in [sqrt(1/2), sqrt(2)); where e = 0, y itself has more digits than m - 1. */
static inline vec log1p(vec y) {
    const vec x = 1 + y;
    const mask e = ((mask)x - 0x3F3504F3) >> 23;
    const vec m = (vec)((mask)x - (e << 23)), r = (e == 0 ? y : m - 1) / (e == 0 ? 2 + y : m + 1), rr = r * r;
    const vec odd = r * (2 + rr * (0.666666667f + rr * (0.4f + rr * (0.285714286f + rr * 0.222222222f))));
    return y == y ? __builtin_convertvector(e, vec) * 0.693147181f + odd : y;  // the bits of NaN are no number
}
static inline vec softplus(vec x) { return x > 20 ? x : log1p(exp(x)); }

constexpr int ROWS = LANES == 16 ? 8 : 4;  // of a tile of a matrix product, which is two vectors wide
enum Shape { FULL, LOWER, UPPER };         // of the left matrix; the other triangle is zero
static inline long padded(long n) { return (n + LANES - 1) / LANES * LANES; }

template <int R, int V>
static inline __attribute__((always_inline)) void tile(long k0, long k1, const float* a, long row, long col, const float* b, long ldb,
                                                       float* c, long ldc, bool add) {
    vec sum[R][V];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int j = 0; j < V; j++) sum[i][j] = add ? load(c + i * ldc + j * LANES) : vec{};
    for (long k = k0; k < k1; k++) {
        vec x[V];
#pragma GCC unroll 2
        for (int j = 0; j < V; j++) x[j] = load(b + k * ldb + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++)
#pragma GCC unroll 2
            for (int j = 0; j < V; j++) sum[i][j] += a[i * row + k * col] * x[j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int j = 0; j < V; j++) store(c + i * ldc + j * LANES, sum[i][j]);
}

/* c [m, n] = a [m, k] b [k, n], or += with `add`. a has any strides; n is a multiple of LANES. */
static inline void product(long m, long n, long k, const float* a, long row, long col, const float* b, long ldb, float* c, long ldc, bool add,
                    Shape shape = FULL) {
    for (long j = 0; j < n; j += 2 * LANES) {
        const bool two = j + LANES < n;
        for (long i = 0; i < m;) {
            const long rest = m - i, R = rest >= ROWS ? ROWS : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
            const long k0 = shape == UPPER ? i : 0, k1 = shape == LOWER ? std::min(k, i + R) : k;
            const float *x = a + i * row, *y = b + j;
            float* z = c + i * ldc + j;
#define TILE(R) two ? tile<R, 2>(k0, k1, x, row, col, y, ldb, z, ldc, add) : tile<R, 1>(k0, k1, x, row, col, y, ldb, z, ldc, add)
            R == ROWS ? TILE(ROWS) : R == 4 ? TILE(4) : R == 2 ? TILE(2) : TILE(1);
#undef TILE
            i += R;
        }
    }
}

static inline void transpose(long rows, long cols, const float* from, long ld, float* to, long ld_to) {
    for (long j = 0; j < cols; j++)
        for (long i = 0; i < rows; i++) to[j * ld_to + i] = from[i * ld + j];
}

/* work(i, buffer) for i in [0, total) on several threads of our own: a second OpenMP runtime would compete with torch's. */
template <class Work> static void share(long total, int threads, Work work) {
    std::atomic<long> next{0};
    auto loop = [&] {
        std::vector<float> buffer;
        for (long i; (i = next++) < total;) work(i, buffer);
    };
    std::vector<std::thread> others;
    try {
        for (long n = std::min<long>(threads, total); n > 1; n--) others.emplace_back(loop);
    } catch (const std::system_error&) {
    }  // no more threads are available: the running ones do all the work
    loop();
    for (auto& thread : others) thread.join();
}
