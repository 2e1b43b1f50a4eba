/* What does causal attention cost when a head's scores never leave the cache? softmax(scale q k^T) v, forward and backward.

The plain form is `causal` in attention.py. Here a thread takes the query heads of one key head and walks through them BLOCK queries
at a time; their scores with all keys that the first or the last of them sees are one panel. The forward pass keeps, for every query,
the logarithm of the sum under its softmax, from which the backward pass computes the panel again. Nothing depends on the number of threads.

Symbols: P = softmax(S), S = scale q k^T (rows are queries); a name that begins with d_ is the gradient of what follows.
    d_v = P^T d_out     d_P = d_out v^T     d_S = P (d_P - <d_out, out>)     d_q = scale d_S k     d_k = d_S^T scale q
Rows of d_k floats are padded with zeros to whole vectors (a p at the end of a size).
*/
#include "../simd.h"

extern "C" {
struct Heads {  // attention_cpu.py has the same list
    int64_t batch, T, H, G, d;  // tokens, query heads, key heads, floats of a head
    int64_t at[5][3];           // of q, k, v, out, d_out: floats from one sequence, head, token to the next
    const float *q, *k, *v;
    const int32_t* segment;     // [batch, T] numbers of documents, or null: one document per sequence
    float *out, *log_sum;       // log_sum [batch, H, T], or null
    const float* d_out;
    float *d_q, *d_k, *d_v;     // [batch, T, heads, d]
    double scale;
};
}

namespace {
constexpr long BLOCK = 32;
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
enum Name { Q, K, V, OUT, D_OUT };

struct KeyHead {
    const Heads& l;
    const long b, g, T, d, dp, Tp, ld;  // ld: an odd number of cache lines, so that the rows of a panel do not collide in the cache
    float *free, *keys, *values, *block, *S;
    long low, high;  // the panel's first key, rounded down to whole vectors, and the end of its last

    KeyHead(const Heads& heads, long index, std::vector<float>& memory, long more)
        : l(heads), b(index / heads.G), g(index % heads.G), T(l.T), d(l.d), dp(padded(d)), Tp(padded(T)), ld((Tp + LINE - 1) / LINE / 2 * 2 * LINE + LINE) {
        memory.assign(2 * dp * ld + BLOCK * (dp + ld) + more + 2 * LINE, 0.f);
        free = memory.data() + (LINE - reinterpret_cast<uintptr_t>(memory.data()) / 4 % LINE) % LINE;
        block = take(BLOCK * dp), S = take(BLOCK * ld);
    }
    float* take(long n) { float* p = free; return free += n, p; }
    const float* row(Name name, const float* x, long head, long t) const { return x + b * l.at[name][0] + head * l.at[name][1] + t * l.at[name][2]; }

    /* Rows t0 .. t0 + n of a head, times a factor; as columns. */
    void rows(Name name, const float* x, long head, long t0, long n, float factor, float* to) const {
        for (long t = 0; t < n; t++) {
            const float* from = row(name, x, head, t0 + t);
            for (long i = 0; i < d; i++) to[t * dp + i] = factor * from[i];
        }
    }
    void columns(Name name, const float* x, float* to) const {
        for (long t = 0; t < T; t += LINE) transpose(std::min<long>(LINE, T - t), d, row(name, x, g, t), l.at[name][2], to + t, ld);
    }
    /* S = scale q k^T for n queries from t0 on, and -infinity for what they do not see: later tokens, other documents. */
    void scores(long head, long t0, long n) {
        const int32_t* segment = l.segment ? l.segment + b * T : nullptr;
        long begin = t0;
        while (begin > 0 && !(segment && segment[begin - 1] != segment[t0])) begin = segment ? begin - 1 : 0;
        low = begin / LANES * LANES, high = padded(t0 + n);
        rows(Q, l.q, head, t0, n, l.scale, block);
        product(n, high - low, dp, block, dp, 1, keys + low, ld, S + low, ld, false);
        for (long i = 0; i < n; i++) {
            const long t = t0 + i;
            if (segment && segment[t] != segment[t0 + std::max(0l, i - 1)]) begin = t;
            for (long j = low; j < begin; j++) S[i * ld + j] = LOWEST;
            for (long j = t + 1; j < high; j++) S[i * ld + j] = LOWEST;
        }
    }
};

void forward(const Heads& l, long index, std::vector<float>& memory) {
    const long dp = padded(l.d);
    KeyHead own(l, index, memory, (l.T + BLOCK) * dp);
    own.keys = own.take(dp * own.ld), own.values = own.take(l.T * dp);
    float *o = own.take(BLOCK * dp), *S = own.S;
    own.columns(K, l.k, own.keys);
    own.rows(V, l.v, own.g, 0, l.T, 1, own.values);
    for (long head = own.g * (l.H / l.G); head < (own.g + 1) * (l.H / l.G); head++)
        for (long t0 = 0; t0 < l.T; t0 += BLOCK) {
            const long n = std::min(BLOCK, l.T - t0);
            own.scores(head, t0, n);
            const long low = own.low, high = own.high;
            float sums[BLOCK];
            for (long i = 0; i < n; i++) {
                float* s = S + i * own.ld;
                vec top_of = all(LOWEST), total = {};
                for (long j = low; j < high; j += LANES) top_of = most(load(s + j), top_of);
                float top = LOWEST;
                for (int lane = 0; lane < LANES; lane++) top = std::max(top, top_of[lane]);
                for (long j = low; j < high; j += LANES) {
                    const vec p = exp(load(s + j) - top);
                    store(s + j, p);
                    total += p;
                }
                sums[i] = sum(total);
                if (l.log_sum) l.log_sum[(own.b * l.H + head) * l.T + t0 + i] = top + std::log(sums[i]);
            }
            product(n, dp, std::min(high, l.T) - low, S + low, own.ld, 1, own.values + low * dp, dp, o, dp, false);
            for (long i = 0; i < n; i++) {
                float* to = const_cast<float*>(own.row(OUT, l.out, head, t0 + i));
                for (long c = 0; c < l.d; c++) to[c] = o[i * dp + c] / sums[i];
            }
        }
}

void backward(const Heads& l, long index, std::vector<float>& memory) {
    const long dp = padded(l.d), size = l.T * dp;
    KeyHead own(l, index, memory, 3 * size + 2 * BLOCK * dp + BLOCK * (padded(l.T) + 3 * LINE));
    own.keys = own.take(dp * own.ld), own.values = own.take(dp * own.ld);
    float *k = own.take(size), *d_k = own.take(size), *d_v = own.take(size), *d_o = own.take(BLOCK * dp), *d_q = own.take(BLOCK * dp);
    float *d_S = own.take(BLOCK * own.ld), *P = own.S;
    own.columns(K, l.k, own.keys);
    own.columns(V, l.v, own.values);
    own.rows(K, l.k, own.g, 0, l.T, 1, k);
    for (long head = own.g * (l.H / l.G); head < (own.g + 1) * (l.H / l.G); head++)
        for (long t0 = 0; t0 < l.T; t0 += BLOCK) {
            const long n = std::min(BLOCK, l.T - t0);
            own.scores(head, t0, n);
            const long low = own.low, high = own.high, keys = std::min(high, l.T) - low;
            own.rows(D_OUT, l.d_out, head, t0, n, 1, d_o);
            product(n, high - low, dp, d_o, dp, 1, own.values + low, own.ld, d_S + low, own.ld, false);
            for (long i = 0; i < n; i++) {
                float *p = P + i * own.ld, *s = d_S + i * own.ld, along = 0;
                const float *o = own.row(OUT, l.out, head, t0 + i), log_sum = l.log_sum[(own.b * l.H + head) * l.T + t0 + i];
                for (long c = 0; c < l.d; c++) along += d_o[i * dp + c] * o[c];
                for (long j = low; j < high; j += LANES) {
                    const vec x = exp(load(p + j) - log_sum);
                    store(p + j, x);
                    store(s + j, x * (load(s + j) - along));
                }
            }
            product(keys, dp, n, P + low, 1, own.ld, d_o, dp, d_v + low * dp, dp, true);
            product(keys, dp, n, d_S + low, 1, own.ld, own.block, dp, d_k + low * dp, dp, true);
            product(n, dp, keys, d_S + low, own.ld, 1, k + low * dp, dp, d_q, dp, false);
            for (long i = 0; i < n; i++)
                for (long c = 0; c < l.d; c++) l.d_q[((own.b * l.T + t0 + i) * l.H + head) * l.d + c] = l.scale * d_q[i * dp + c];
        }
    for (long t = 0; t < l.T; t++) {
        const long at = ((own.b * l.T + t) * l.G + own.g) * l.d;
        std::memcpy(l.d_k + at, d_k + t * dp, 4 * l.d);
        std::memcpy(l.d_v + at, d_v + t * dp, 4 * l.d);
    }
}
}  // namespace

extern "C" void ngpt_attention(const Heads* l, int32_t back, int32_t threads) {
    share(l->batch * l->G, threads, [=](long i, std::vector<float>& memory) { back ? backward(*l, i, memory) : forward(*l, i, memory); });
}
