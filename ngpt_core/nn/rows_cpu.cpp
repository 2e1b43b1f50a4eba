/* What do the small steps between matrix products cost when each row is read once? Norms, the residual step, activations, rotations, experts.

Each function stands for a few lines of torch, which are the plain form and are named beside it; rows_cpu.py calls both passes. A row
stays in the cache between the sweeps over it. Sums over rows (gradients of scales) go piece by piece in a fixed order, so they
do not depend on the number of threads.
*/
#include "../simd.h"

constexpr long PIECE = 64;  // rows that one thread takes at a time

/* body(i, at): once for every vector of a row of n; the last one may be partial. */
struct Whole {
    static vec get(const float* p) { return load(p); }
    static void put(float* p, vec x) { store(p, x); }
};
struct Rest {
    long n;
    vec get(const float* p) const { vec x = {}; std::memcpy(&x, p, 4 * n); return x; }
    void put(float* p, vec x) const { std::memcpy(p, &x, 4 * n); }
};
template <class Body> static inline __attribute__((always_inline)) void sweep(long n, Body body) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) body(i, Whole{});
    if (i < n) body(i, Rest{n - i});
}
/* work(first, last, sums): rows [first, last), with a row of `width` sums of its own; the sums of all pieces are added in order. */
template <class Work> static void pieces(long rows, long width, float* total, int threads, Work work) {
    const long count = (rows + PIECE - 1) / PIECE;
    std::vector<float> sums(count * width);
    share(count, count > 1 ? threads : 1, [&](long i, std::vector<float>&) { work(i * PIECE, std::min(rows, (i + 1) * PIECE), sums.data() + i * width); });
    for (long j = 0; j < width; j++) total[j] = 0;
    for (long i = 0; i < count; i++)
        for (long j = 0; j < width; j++) total[j] += sums[i * width + j];
}
/* *to becomes x if that is larger; neither is negative, so their bits are in the same order. */
static void raise(float* to, float x) {
    int32_t bits, *at = (int32_t*)to;
    std::memcpy(&bits, &x, 4);
    for (int32_t old = __atomic_load_n(at, __ATOMIC_RELAXED); bits > old;)
        if (__atomic_compare_exchange_n(at, &old, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
}
static inline float inverse_root(float square) { return square > 0 ? 1 / std::sqrt(square) : square == 0 ? 1 : square; }  // NaN stays

extern "C" {
/* Norm(h + alpha (Norm(f) - h)): sphere.step(h, sphere.unit(f), alpha). norms [rows, 2]: the two reciprocal lengths.
   off: null, or a number that becomes the largest | ||h|| - 1 | if that is larger. */
void ngpt_step_forward(int64_t rows, int64_t d, const float* h, const float* f, const float* alpha, float* out, float* norms, float* off,
                       int32_t threads) {
    pieces(rows, 0, nullptr, threads, [=](long first, long last, float*) {
        float furthest = 0;
        for (long t = first; t < last; t++) {
            const float *x = h + t * d, *y = f + t * d;
            float* z = out + t * d;
            vec ff = {}, zz = {}, hh = {};
            sweep(d, [&](long i, auto at) { const vec a = at.get(y + i); ff += a * a; });
            const float r = inverse_root(sum(ff));
            sweep(d, [&](long i, auto at) {
                const vec a = at.get(x + i), b = a + at.get(alpha + i) * (at.get(y + i) * r - a);
                zz += b * b;
                hh += a * a;
                at.put(z + i, b);
            });
            if (off) furthest = std::max(furthest, std::fabs(std::sqrt(sum(hh)) - 1));
            const float s = inverse_root(sum(zz));
            sweep(d, [&](long i, auto at) { at.put(z + i, at.get(z + i) * s); });
            norms[2 * t] = r, norms[2 * t + 1] = s;
        }
        if (off) raise(off, furthest);
    });
}
/* The same for the h of the last block, which no step reads. */
void ngpt_norms(int64_t rows, int64_t d, const float* h, float* off, int32_t threads) {
    pieces(rows, 0, nullptr, threads, [=](long first, long last, float*) {
        float furthest = 0;
        for (long t = first; t < last; t++) {
            vec hh = {};
            sweep(d, [&](long i, auto at) { const vec a = at.get(h + t * d + i); hh += a * a; });
            furthest = std::max(furthest, std::fabs(std::sqrt(sum(hh)) - 1));
        }
        raise(off, furthest);
    });
}
void ngpt_step_backward(int64_t rows, int64_t d, const float* g, const float* out, const float* h, const float* f, const float* alpha,
                        const float* norms, float* d_h, float* d_f, float* d_alpha, int32_t threads) {
    pieces(rows, d, d_alpha, threads, [=](long first, long last, float* sums) {
        for (long t = first; t < last; t++) {
            const float *x = h + t * d, *y = f + t * d, *o = out + t * d, *go = g + t * d, r = norms[2 * t], s = norms[2 * t + 1];
            float *dx = d_h + t * d, *dy = d_f + t * d;
            vec along = {}, oo = {}, inner = {}, uu = {};
            sweep(d, [&](long i, auto at) { along += at.get(go + i) * at.get(o + i); oo += at.get(o + i) * at.get(o + i); });
            const float k = sum(oo) > 0 ? sum(along) : 0;  // through a vector of zero the gradient passes unchanged
            sweep(d, [&](long i, auto at) {
                const vec dz = (at.get(go + i) - at.get(o + i) * k) * s, a = at.get(alpha + i), u = at.get(y + i) * r, e = at.get(x + i), du = dz * a;
                at.put(dx + i, dz - du);
                at.put(dy + i, du);
                at.put(sums + i, at.get(sums + i) + dz * (u - e));
                inner += du * u;
                uu += u * u;
            });
            const float q = sum(uu) > 0 ? sum(inner) : 0;
            sweep(d, [&](long i, auto at) { at.put(dy + i, (at.get(dy + i) - at.get(y + i) * (r * q)) * r); });
        }
    });
}

/* RMSNorm times a weight, F.rms_norm(x, (d,), weight, eps); with mean = 0, Norm times a scale, sphere.unit(x) * scale. */
void ngpt_norm_forward(int64_t rows, int64_t d, int32_t mean, float eps, const float* x, const float* weight, float* out, float* norms, int32_t threads) {
    pieces(rows, 0, nullptr, threads, [=](long first, long last, float*) {
        for (long t = first; t < last; t++) {
            const float* y = x + t * d;
            vec yy = {};
            sweep(d, [&](long i, auto at) { const vec a = at.get(y + i); yy += a * a; });
            const float r = mean ? 1 / std::sqrt(sum(yy) / d + eps) : inverse_root(sum(yy));
            sweep(d, [&](long i, auto at) { at.put(out + t * d + i, at.get(y + i) * r * at.get(weight + i)); });
            norms[t] = r;
        }
    });
}
void ngpt_norm_backward(int64_t rows, int64_t d, int32_t mean, const float* g, const float* x, const float* weight, const float* norms,
                        float* d_x, float* d_weight, int32_t threads) {
    pieces(rows, d, d_weight, threads, [=](long first, long last, float* sums) {
        for (long t = first; t < last; t++) {
            const float *y = x + t * d, *go = g + t * d, r = norms[t];
            vec inner = {}, yy = {};
            sweep(d, [&](long i, auto at) {
                const vec u = at.get(y + i) * r, a = at.get(go + i);
                at.put(sums + i, at.get(sums + i) + a * u);
                inner += a * at.get(weight + i) * u;
                yy += u * u;
            });
            const float k = mean ? sum(inner) / d : sum(yy) > 0 ? sum(inner) : 0;
            sweep(d, [&](long i, auto at) { at.put(d_x + t * d + i, (at.get(go + i) * at.get(weight + i) - at.get(y + i) * (r * k)) * r); });
        }
    });
}

/* relu(s u)^2 with s of the columns, or none: mlp.relu2(u * s). */
void ngpt_relu2_forward(int64_t rows, int64_t d, const float* u, const float* s, float* out, int32_t threads) {
    pieces(rows, 0, nullptr, threads, [=](long first, long last, float*) {
        for (long t = first; t < last; t++)
            sweep(d, [&](long i, auto at) {
                const vec x = s ? at.get(u + t * d + i) * at.get(s + i) : at.get(u + t * d + i), y = x < 0 ? vec{} : x;
                at.put(out + t * d + i, y * y);
            });
    });
}
void ngpt_relu2_backward(int64_t rows, int64_t d, const float* g, const float* u, const float* s, float* d_u, float* d_s, int32_t threads) {
    pieces(rows, s ? d : 0, d_s, threads, [=](long first, long last, float* sums) {
        for (long t = first; t < last; t++)
            sweep(d, [&](long i, auto at) {
                const vec v = at.get(u + t * d + i), k = s ? at.get(s + i) : all(1), x = v * k, dx = at.get(g + t * d + i) * (x < 0 ? vec{} : x + x);
                at.put(d_u + t * d + i, dx * k);
                if (s) at.put(sums + i, at.get(sums + i) + dx * v);
            });
    });
}

/* u * v * sigmoid(v): mlp.swiglu(u, v). */
void ngpt_swiglu_forward(int64_t rows, int64_t d, const float* u, const float* v, float* out, int32_t threads) {
    pieces(rows, 0, nullptr, threads, [=](long first, long last, float*) {
        sweep((last - first) * d, [&](long j, auto at) {
            const long i = first * d + j;
            const vec y = at.get(v + i);
            at.put(out + i, at.get(u + i) * (y * sigmoid(y)));
        });
    });
}
void ngpt_swiglu_backward(int64_t rows, int64_t d, const float* g, const float* u, const float* v, float* d_u, float* d_v, int32_t threads) {
    pieces(rows, 0, nullptr, threads, [=](long first, long last, float*) {
        sweep((last - first) * d, [&](long j, auto at) {
            const long i = first * d + j;
            const vec y = at.get(v + i), s = sigmoid(y), a = at.get(g + i), silu = y * s;
            at.put(d_u + i, a * silu);
            at.put(d_v + i, a * at.get(u + i) * (s + silu * (1 - s)));
        });
    });
}

/* The rows of x turned by their position's angles, attention.rotate; sign = -1: back. table [2, T, d/2]: cosines, then sines. Each
   `repeat` rows share a position, and after T positions the next sequence begins. */
void ngpt_rotate(int64_t rows, int64_t d, int64_t T, int64_t repeat, float sign, const float* x, const float* table, float* out, int32_t threads) {
    const long half = d / 2;
    pieces(rows, 0, nullptr, threads, [=](long first, long last, float*) {
        for (long t = first; t < last; t++) {
            const float *a = x + t * d, *b = a + half, *cos = table + t / repeat % T * half, *sin = cos + T * half;
            sweep(half, [&](long i, auto at) {
                const vec c = at.get(cos + i), s = sign * at.get(sin + i), p = at.get(a + i), q = at.get(b + i);
                at.put(out + t * d + i, p * c - q * s);
                at.put(out + t * d + half + i, q * c + p * s);
            });
        }
    });
}

/* The rows of an expert: x [rows, d] = from[token[i]], and back: to[token[i]] += x[i]. */
void ngpt_gather(int64_t rows, int64_t d, const float* from, const int64_t* token, float* x) {
    for (long i = 0; i < rows; i++) std::memcpy(x + i * d, from + token[i] * d, 4 * d);
}
void ngpt_scatter(int64_t rows, int64_t d, const float* x, const int64_t* token, float* to) {
    for (long i = 0; i < rows; i++) {
        float* y = to + token[i] * d;
        sweep(d, [&](long j, auto at) { at.put(y + j, at.get(y + j) + at.get(x + i * d + j)); });
    }
}
/* What an expert does between its two products: a = weight relu(s u)^2, by row and column. */
void ngpt_expert_forward(int64_t rows, int64_t d, const float* u, const float* s, const float* weight, float* a) {
    for (long t = 0; t < rows; t++) {
        const float w = weight[t];
        sweep(d, [&](long i, auto at) {
            const vec x = s ? at.get(u + t * d + i) * at.get(s + i) : at.get(u + t * d + i), y = x < 0 ? vec{} : x;
            at.put(a + t * d + i, w * (y * y));
        });
    }
}
/* Its gradients: g is that of a, and becomes that of u; a itself is computed again; d_s accumulates. */
void ngpt_expert_backward(int64_t rows, int64_t d, float* g, const float* u, const float* s, const float* weight, float* a, float* d_weight, float* d_s) {
    for (long t = 0; t < rows; t++) {
        const float w = weight[t];
        vec inner = {};
        sweep(d, [&](long i, auto at) {
            const vec v = at.get(u + t * d + i), k = s ? at.get(s + i) : all(1), x = v * k, y = x < 0 ? vec{} : x, da = at.get(g + t * d + i);
            const vec dx = da * (w * (y + y));
            inner += da * (y * y);
            at.put(a + t * d + i, w * (y * y));
            at.put(g + t * d + i, dx * k);
            if (s) at.put(d_s + i, at.get(d_s + i) + dx * v);
        });
        d_weight[t] = sum(inner);
    }
}

/* What a few tokens receive from their experts: x [n, d], chosen and weights [n, k], the matrices [E, ff, d]. s [ff] per expert if
   `own`. One expert of one token at a time, which reads its matrices once; no gradients. */
void ngpt_few(int64_t n, int64_t k, int64_t d, int64_t ff, int64_t own, const float* x, const int64_t* chosen, const float* weight,
              const float* up, const float* down, const float* s, float* out) {
    for (long t = 0; t < n; t++) {
        const float* y = x + t * d;
        float* to = out + t * d;
        std::fill_n(to, d, 0.f);
        for (long j = t * k; j < (t + 1) * k; j++) {
            const float *in = up + chosen[j] * ff * d, *back = down + chosen[j] * ff * d, *scale = s ? s + own * chosen[j] * ff : nullptr;
            for (long f = 0; f < ff; f += 4) {  // four rows at once: four sums that do not wait for each other
                const long m = std::min(4L, ff - f), r1 = m > 1 ? d : 0, r2 = m > 2 ? 2 * d : 0, r3 = m > 3 ? 3 * d : 0;
                const float *a = in + f * d, *b = back + f * d;
                vec sums[4] = {};
                sweep(d, [&](long i, auto at) {
                    const vec z = at.get(y + i);
                    sums[0] += z * at.get(a + i), sums[1] += z * at.get(a + r1 + i);
                    sums[2] += z * at.get(a + r2 + i), sums[3] += z * at.get(a + r3 + i);
                });
                float act[4] = {};
                for (long l = 0; l < m; l++) {
                    const float u = scale ? sum(sums[l]) * scale[f + l] : sum(sums[l]), v = u < 0 ? 0 : u;
                    act[l] = weight[j] * (v * v);
                }
                sweep(d, [&](long i, auto at) {
                    vec z = at.get(to + i) + act[0] * at.get(b + i);
                    if (m > 1) z += act[1] * at.get(b + r1 + i);
                    if (m > 2) z += act[2] * at.get(b + r2 + i);
                    if (m > 3) z += act[3] * at.get(b + r3 + i);
                    at.put(to + i, z);
                });
            }
        }
    }
}
}
