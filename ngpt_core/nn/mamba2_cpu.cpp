/* What does the inside of a Mamba-2 layer cost when a chunk of tokens never leaves the cache? From in_proj's output to out_proj's input.

The same function as the plain form, Mamba2.inside in mamba2.py with ssd_chunked of ssd.py: convolution, SiLU, softplus, scan, skip,
gate and (GPT) the norm of a group. The plain form reads and writes some fifty tensors of activations; here one group of heads of
one sequence goes through all steps chunk by chunk, and memory sees its inputs and outputs once. The forward pass keeps only y before
the gate and the states at the chunk borders; the backward pass goes through the chunks in reverse and computes the rest again.

Symbols: those of ssd.py. Q tokens of a chunk, r heads of P channels, N columns of a state, K taps. A capital p at the end of a size
(Pp, Np, Qp) is the size rounded up to whole vectors; what is added is zero. In a row of L = r Pp + 2 Np floats lie x, B and C.
    log_a[q]  log(a_1 ... a_q)          M[q][s] = C_q . B_s L[q][s],  L[q][s] = a_{s+1} ... a_q for s < q, 1 for s = q
    u = dt x  what a token writes       S [N][P] the state at the start of the chunk (transposed)
A name that begins with d_ is the gradient of what follows.
*/
#include "../simd.h"

extern "C" {
struct Layer {  // mamba2_cpu.py has the same list
    int64_t batch, T, G, r, P, N, K, Q;
    double dt_min, eps;
    const float *p, *conv_weight, *conv_bias, *dt_bias, *A, *D, *norm_weight;  // p [b, T, z x B C dt]; norm_weight: GPT only
    const int32_t* segment;                                                     // [b, T], or null: one document per sequence
    float *out, *y, *states;                       // [b, T, d_inner] twice, [b, G, chunks, r, N, P] padded
    const float* d_out;
    float *d_p, *sums;                             // sums [b, total]: conv_weight, conv_bias, dt_bias, A, D, norm_weight
};
}

static inline vec at_least(vec x, float low) { return x < low ? all(low) : x; }  // NaN stays

/* One group of heads of one sequence: where its columns lie, its parameters, its memory. */
struct Group {
    const Layer& l;
    const long b, g, T, r, P, N, K, Q, Pp, Np, Qp, L, RP, H, d_inner, channels, W;
    std::vector<float>& memory;
    long used = 0;
    float *weight, *bias, *raw, *act, *across, *log_a, *dt, *from_start, *to_end, *write, *M, *left, *right, *u, *y;
    int32_t *segment;  // of the chunk's tokens
    float through[64]; // what a chunk leaves of the incoming state, by head

    float* take(long n) {  // zero, and aligned to a cache line
        float* p = memory.data() + used;
        used += (n + LINE - 1) / LINE * LINE;
        return p;
    }
    long size() const {  // what the constructor and the longer of the two passes take, each rounded up to a cache line
        return 4 * (Q + K) * L + 4 * Qp * Qp + 2 * Qp * (Np + Pp) + std::max(Pp, Np) * std::max(Qp, Pp) + r * Np * Pp + 2 * Q * RP +
               4 * RP + 5 * (r + 1) * Qp + 64 * LINE;
    }

    Group(const Layer& layer, long index, std::vector<float>& buffer)
        : l(layer), b(index / layer.G), g(index % layer.G), T(l.T), r(l.r), P(l.P), N(l.N), K(l.K), Q(l.Q), Pp(padded(P)), Np(padded(N)),
          Qp(padded(Q)), L(r * Pp + 2 * Np), RP(r * Pp), H(l.G * r), d_inner(H * P), channels(d_inner + 2 * l.G * N), W(d_inner + channels + H),
          memory(buffer) {
        memory.assign(size(), 0.f);
        used = (LINE - (reinterpret_cast<uintptr_t>(memory.data()) / 4) % LINE) % LINE;
        weight = take(K * L), bias = take(L), raw = take((K - 1 + Q) * L), act = take(Q * L), across = take(Qp * Qp);
        log_a = take(r * Qp), dt = take(r * Qp), from_start = take(r * Qp), to_end = take(r * Qp), write = take(r * Qp);
        M = take(Qp * Qp), left = take(Qp * Np), right = take(Np * Qp), u = take(Qp * Pp), y = take(Q * RP);
        segment = (int32_t*)take(Qp);
        for (long k = 0; k < K; k++) columns(l.conv_weight + k * channels, weight + k * L);
        columns(l.conv_bias, bias);
    }

    /* A row of channels x, B, C <-> the padded row of this group; a row of d_inner likewise. */
    template <class Copy> void spans(Copy copy) const {
        heads([&](long from, long to, long n) { copy(from, to, n); });
        copy(d_inner + g * N, RP, N);
        copy(d_inner + l.G * N + g * N, RP + Np, N);
    }
    template <class Copy> void heads(Copy copy) const {
        if (P == Pp) return copy(g * r * P, 0, r * P);
        for (long h = 0; h < r; h++) copy((g * r + h) * P, h * Pp, P);
    }
    void columns(const float* from, float* to) const { spans([&](long i, long j, long n) { std::memcpy(to + j, from + i, 4 * n); }); }
    void uncolumns(const float* from, float* to) const { spans([&](long i, long j, long n) { std::memcpy(to + i, from + j, 4 * n); }); }
    void inner(const float* from, float* to) const { heads([&](long i, long j, long n) { std::memcpy(to + j, from + i, 4 * n); }); }
    void uninner(const float* from, float* to) const { heads([&](long i, long j, long n) { std::memcpy(to + i, from + j, 4 * n); }); }

    const float* row(long t) const { return l.p + (b * T + t) * W; }
    float* state(long chunk, long h) const { return l.states + (((b * l.G + g) * ((T + Q - 1) / Q) + chunk) * r + h) * Np * Pp; }
    bool tap(long k, long t) const {  // whether tap k of token t reads its own document
        const long from = t - K + 1 + k;
        return from >= 0 && (!l.segment || l.segment[b * T + from] == l.segment[b * T + t]);
    }

    /* Tokens t0 .. t0 + n: the convolution before and after SiLU, the steps, the decays, C . B^T (or its transpose). */
    void open(long t0, long n, float* before, bool transposed) {
        for (long i = 0; i < K - 1 + n; i++) {
            const long t = t0 + i - (K - 1);
            if (t >= 0) columns(row(t) + d_inner, raw + i * L);
            else std::fill_n(raw + i * L, L, 0.f);
        }
        for (long q = 0; q < n; q++) {
            bool reads[16];
            for (long k = 0; k < K; k++) reads[k] = tap(k, t0 + q);
            for (long i = 0; i < L; i += LANES) {
                vec x = load(bias + i);
                for (long k = 0; k < K; k++)
                    if (reads[k]) x += load(weight + k * L + i) * load(raw + (q + k) * L + i);
                if (before) store(before + q * L + i, x);
                store(act + q * L + i, x * sigmoid(x));
            }
        }
        for (long q = 0; q < Qp; q++) segment[q] = l.segment && q < n ? l.segment[b * T + t0 + q] : q < n ? 0 : -1;
        const int32_t first = l.segment && t0 > 0 ? l.segment[b * T + t0 - 1] : segment[0], last = segment[n - 1];
        for (long h = 0; h < r; h++) {
            float *step = dt + h * Qp, *log_h = log_a + h * Qp;
            const float A = l.A[g * r + h], shift = l.dt_bias[g * r + h];
            for (long q = 0; q < Qp; q++) step[q] = q < n ? row(t0 + q)[d_inner + channels + g * r + h] + shift : 0.f;
            for (long q = 0; q < Qp; q += LANES) store(step + q, at_least(softplus(load(step + q)), l.dt_min));
            double sum = 0;
            for (long q = 0; q < Qp; q++) {
                if (q >= n) step[q] = 0;
                log_h[q] = sum += (double)step[q] * A;
            }
            sum = 0;
            for (long q = n - 1; q >= 0; q--) {
                to_end[h * Qp + q] = segment[q] == last ? (float)sum : -std::numeric_limits<float>::infinity();
                from_start[h * Qp + q] = segment[q] == first ? log_h[q] : -std::numeric_limits<float>::infinity();
                sum += (double)step[q] * A;
            }
            for (long q = 0; q < Qp; q += LANES) {
                const vec end = q < n ? exp(load(to_end + h * Qp + q)) : vec{};
                store(from_start + h * Qp + q, exp(load(from_start + h * Qp + q)));
                store(to_end + h * Qp + q, end);
                store(write + h * Qp + q, end * load(step + q));
            }
            through[h] = last == first ? std::exp(log_h[n - 1]) : 0.f;
        }
        const float *B = act + RP, *C = B + Np;
        transpose(n, N, transposed ? C : B, L, right, Qp);
        product(n, Qp, N, transposed ? B : C, L, 1, right, Qp, across, Qp, false);
    }

    /* exp(log a_later - log a_earlier) for a vector of pairs, 0 across documents. */
    vec decay(vec later, vec earlier, long one, long others) const {
        const vec gap = later - earlier, d = exp(gap > 0 ? vec{} : gap);
        if (!l.segment) return d;
        mask of;
        std::memcpy(&of, segment + others, sizeof of);
        return of == segment[one] ? d : vec{};
    }

    void scale(long n, const float* x, long ld, const float* by, float* to) const {  // to [n, Pp] = by[q] x
        for (long q = 0; q < n; q++)
            for (long i = 0; i < Pp; i += LANES) store(to + q * Pp + i, by[q] * load(x + q * ld + i));
    }

    void forward() {
        float *S = take(r * Np * Pp), *z = take(RP), *norm = take(RP);
        if (l.norm_weight) inner(l.norm_weight, norm);
        mask lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        for (long t0 = 0, c = 0; t0 < T; t0 += Q, c++) {
            const long n = std::min(Q, T - t0);
            open(t0, n, nullptr, false);
            const float *B = act + RP, *C = B + Np;
            for (long h = 0; h < r; h++) {
                float *x = act + h * Pp, *S_h = S + h * Np * Pp;
                const float* log_h = log_a + h * Qp;
                for (long q = 0; q < n; q++) {
                    for (long s = 0; s <= q; s += LANES) {
                        const vec m = load(across + q * Qp + s) * decay(all(log_h[q]), load(log_h + s), q, s);
                        store(M + q * Qp + s, lane + (int32_t)s < (int32_t)q ? m : vec{});
                    }
                    M[q * Qp + q] = across[q * Qp + q];
                    for (long i = 0; i < Np; i += LANES) store(left + q * Np + i, from_start[h * Qp + q] * load(C + q * L + i));
                }
                std::memcpy(state(c, h), S_h, 4 * Np * Pp);
                scale(n, x, L, dt + h * Qp, u);
                product(n, Pp, n, M, Qp, 1, u, Pp, y + h * Pp, RP, false, LOWER);
                product(n, Pp, N, left, Np, 1, S_h, Pp, y + h * Pp, RP, true);
                scale(n, x, L, write + h * Qp, u);
                for (long i = 0; i < Np * Pp; i += LANES) store(S_h + i, through[h] * load(S_h + i));
                product(N, Pp, n, B, 1, L, u, Pp, S_h, Pp, true);
            }
            for (long q = 0; q < n; q++) {
                float* y_q = y + q * RP;
                for (long h = 0; h < r; h++)
                    for (long i = 0; i < Pp; i += LANES) {
                        float* at = y_q + h * Pp + i;
                        store(at, load(at) + l.D[g * r + h] * load(act + q * L + h * Pp + i));
                    }
                const long at = (b * T + t0 + q) * d_inner;
                uninner(y_q, l.y + at);
                inner(row(t0 + q), z);
                vec square = {};
                for (long i = 0; i < RP; i += LANES) {
                    const vec z_i = load(z + i), gated = load(y_q + i) * (z_i * sigmoid(z_i));
                    square += gated * gated;
                    store(y_q + i, gated);
                }
                if (l.norm_weight) {
                    const float inverse = 1 / std::sqrt(sum(square) / (r * P) + (float)l.eps);
                    for (long i = 0; i < RP; i += LANES) store(y_q + i, load(y_q + i) * inverse * load(norm + i));
                }
                uninner(y_q, l.out + at);
            }
        }
    }

    /* The gate and the norm backwards, for one token: d_y in place of d_out, d_z to memory. */
    void ungate(long t, const float* norm, float* d_norm, float* y_q, float* z, float* d_y, float* gated) {
        const long at = (b * T + t) * d_inner;
        inner(l.y + at, y_q), inner(row(t), z), inner(l.d_out + at, d_y);
        float inverse = 1, along = 0;
        if (l.norm_weight) {
            vec square = {}, dot = {};
            for (long i = 0; i < RP; i += LANES) {
                const vec z_i = load(z + i), x = load(y_q + i) * (z_i * sigmoid(z_i));
                square += x * x;
                dot += load(d_y + i) * load(norm + i) * x;
                store(gated + i, x);
            }
            inverse = 1 / std::sqrt(sum(square) / (r * P) + (float)l.eps);
            along = sum(dot) * inverse * inverse * inverse / (r * P);
        }
        for (long i = 0; i < RP; i += LANES) {
            vec d = load(d_y + i);
            if (l.norm_weight) {
                const vec x = load(gated + i);
                store(d_norm + i, load(d_norm + i) + d * x * inverse);
                d = d * load(norm + i) * inverse - along * x;
            }
            const vec z_i = load(z + i), s = sigmoid(z_i);
            store(z + i, d * load(y_q + i) * (s * (1 + z_i * (1 - s))));
            store(d_y + i, d * (z_i * s));
        }
        uninner(z, l.d_p + (b * T + t) * W);
    }

    void backward() {
        float *before = take(Q * L), *d_act = take((Q + K - 1) * L), *d_S = take(r * Np * Pp), *d_y = take(Q * RP), *z = take(RP);
        float *gated = take(RP), *norm = take(RP), *d_norm = take(RP), *d_weight = take(K * L), *d_bias = take(L), *d_across = take(Qp * Qp);
        float *flipped = take(std::max(Pp, Np) * std::max(Qp, Pp)), *d_u = take(Qp * Pp), *d_M = take(Qp * Qp), *later = take(Qp);
        float *d_log = take(Qp), *d_to_end = take(Qp), *d_dt = take(Qp);
        std::vector<double> d_A(r), d_D(r), d_shift(r);
        if (l.norm_weight) inner(l.norm_weight, norm);
        mask lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        const long chunks = (T + Q - 1) / Q;
        for (long c = chunks - 1; c >= 0; c--) {
            const long t0 = c * Q, n = std::min(Q, T - t0);
            open(t0, n, before, true);
            const float *B = act + RP, *C = B + Np;
            float *d_B = d_act + RP, *d_C = d_B + Np;
            // the rows after this chunk hold the first rows of the next one, for the convolution
            if (c < chunks - 1) std::memmove(d_act + n * L, d_act, 4 * (K - 1) * L);
            for (long q = 0; q < n; q++) {
                ungate(t0 + q, norm, d_norm, y + q * RP, z, d_y + q * RP, gated);
                std::fill_n(d_act + q * L, L, 0.f);
            }
            std::fill_n(d_across, Qp * Qp, 0.f);
            for (long h = 0; h < r; h++) {
                float *x = act + h * Pp, *S_h = state(c, h), *d_S_h = d_S + h * Np * Pp, *d_x = d_act + h * Pp, *d_y_h = d_y + h * Pp;
                const float *log_h = log_a + h * Qp, *step = dt + h * Qp, *start = from_start + h * Qp, *end = to_end + h * Qp;
                // 1. inside the chunk, by (s, q): d_M = u . d_y, and M, whose decays pass their part on to log_a
                transpose(n, P, d_y_h, RP, flipped, Qp);
                scale(n, x, L, step, u);
                product(n, Qp, P, u, Pp, 1, flipped, Qp, d_M, Qp, false);
                std::fill_n(later, Qp, 0.f);
                for (long s = 0; s < n; s++) {
                    vec own = {};
                    const long from = s / LANES * LANES;
                    for (long q = from; q < Qp; q += LANES) {
                        const mask after = lane + (int32_t)q > (int32_t)s;
                        const vec decays = after ? decay(load(log_h + q), all(log_h[s]), s, q) : vec{};
                        const vec m = load(across + s * Qp + q) * decays, d = load(d_M + s * Qp + q), d_log_m = d * m;
                        own += d_log_m;
                        store(later + q, load(later + q) + d_log_m);
                        store(M + s * Qp + q, m);
                        store(d_across + s * Qp + q, load(d_across + s * Qp + q) + d * decays);
                    }
                    M[s * Qp + s] = across[s * Qp + s];
                    d_across[s * Qp + s] += d_M[s * Qp + s];
                    d_log[s] = -sum(own);
                }
                for (long q = 0; q < n; q++) d_log[q] += later[q];
                product(n, Pp, n, M, Qp, 1, d_y_h, RP, d_u, Pp, false, UPPER);
                // 2. what the chunk adds to the state: d_u += to_end (B d_S), d_B += write x d_S^T
                scale(n, x, L, write + h * Qp, u);
                transpose(N, Pp, d_S_h, Pp, flipped, Np);
                product(n, Np, P, u, Pp, 1, flipped, Np, d_B, L, true);
                product(n, Pp, N, B, L, 1, d_S_h, Pp, u, Pp, false);
                double d_D_h = 0;
                for (long s = 0; s < n; s++) {
                    vec of_end = {}, of_dt = {}, of_D = {};
                    for (long i = 0; i < Pp; i += LANES) {
                        const vec x_i = load(x + s * L + i), state_i = end[s] * load(u + s * Pp + i), all_i = load(d_u + s * Pp + i) + state_i;
                        const vec y_i = load(d_y_h + s * RP + i);
                        of_end += x_i * state_i;
                        of_dt += x_i * all_i;
                        of_D += x_i * y_i;
                        store(d_x + s * L + i, step[s] * all_i + l.D[g * r + h] * y_i);
                    }
                    d_to_end[s] = step[s] * sum(of_end);
                    d_dt[s] = sum(of_dt);
                    d_D_h += sum(of_D);
                }
                d_D[h] += d_D_h;
                // 3. what the incoming state contributes: d_C += from_start d_y S^T, d_S <- through d_S + C^T (from_start d_y)
                scale(n, d_y_h, RP, start, u);
                transpose(N, Pp, S_h, Pp, flipped, Np);
                product(n, Np, P, u, Pp, 1, flipped, Np, left, Np, false);
                for (long q = 0; q < n; q++) {
                    vec dot = {};
                    for (long i = 0; i < Np; i += LANES) {
                        const vec d = load(left + q * Np + i);
                        dot += d * load(C + q * L + i);
                        store(d_C + q * L + i, load(d_C + q * L + i) + d);
                    }
                    d_log[q] += sum(dot);
                }
                vec kept = {};
                for (long i = 0; i < Np * Pp; i += LANES) {
                    const vec d = through[h] * load(d_S_h + i);
                    kept += d * load(S_h + i);
                    store(d_S_h + i, d);
                }
                product(N, Pp, n, C, 1, L, u, Pp, d_S_h, Pp, true);
                // 4. the decays: log_a and to_end are sums of dt A from both sides, and through is the whole sum
                double before_it = 0, after_it = sum(kept), d_A_h = 0, d_shift_h = 0;
                for (long q = 0; q < n; q++) after_it += d_log[q];
                for (long q = 0; q < n; q++) {
                    const double d_each = after_it + before_it;
                    after_it -= d_log[q], before_it += d_to_end[q];
                    const float v = row(t0 + q)[d_inner + channels + g * r + h] + l.dt_bias[g * r + h];
                    const bool free = !(l.dt_min > 0) || step[q] > (float)l.dt_min;  // not clamped
                    const float d_v = free ? (d_dt[q] + d_each * l.A[g * r + h]) * (v > 20 ? 1 : 1 / (1 + std::exp(-v))) : 0;
                    d_A_h += d_each * step[q], d_shift_h += d_v;
                    l.d_p[(b * T + t0 + q) * W + d_inner + channels + g * r + h] = d_v;
                }
                d_A[h] += d_A_h, d_shift[h] += d_shift_h;
            }
            product(n, Np, n, d_across, 1, Qp, B, L, d_C, L, true, LOWER);
            product(n, Np, n, d_across, Qp, 1, C, L, d_B, L, true, UPPER);
            // 5. SiLU and the convolution
            for (long q = 0; q < n; q++) {
                float* d = d_act + q * L;
                bool reads[16];
                for (long k = 0; k < K; k++) reads[k] = tap(k, t0 + q);
                for (long i = 0; i < L; i += LANES) {
                    const vec x = load(before + q * L + i), s = sigmoid(x), d_x = load(d + i) * (s * (1 + x * (1 - s)));
                    store(d + i, d_x);
                    store(d_bias + i, load(d_bias + i) + d_x);
                    for (long k = 0; k < K; k++)
                        if (reads[k]) store(d_weight + k * L + i, load(d_weight + k * L + i) + d_x * load(raw + (q + k) * L + i));
                }
            }
            for (long q = 0; q < n; q++) {
                bool read[16];
                for (long k = 0; k < K; k++) read[k] = t0 + q + K - 1 - k < T && tap(k, t0 + q + K - 1 - k);
                float* d = raw + q * L;  // no longer needed
                for (long i = 0; i < L; i += LANES) {
                    vec x = {};
                    for (long k = 0; k < K; k++)
                        if (read[k]) x += load(weight + k * L + i) * load(d_act + (q + K - 1 - k) * L + i);
                    store(d + i, x);
                }
                uncolumns(d, l.d_p + (b * T + t0 + q) * W + d_inner);
            }
        }
        float* to = l.sums + b * ((K + 1) * channels + 3 * H + d_inner);
        for (long k = 0; k < K; k++) uncolumns(d_weight + k * L, to + k * channels);
        uncolumns(d_bias, to + K * channels);
        to += (K + 1) * channels;
        for (long h = 0; h < r; h++) to[g * r + h] = d_shift[h], to[H + g * r + h] = d_A[h], to[2 * H + g * r + h] = d_D[h];
        uninner(d_norm, to + 3 * H);
    }
};

/* One token of every sequence, from a cache that is written in place: the recurrence itself. past [b, K-1, channels], state
   [b, H, P, N]; y is scratch [b, d_inner + channels]. */
extern "C" void ngpt_mamba2_token(const Layer* layer, float* past, float* state) {
    const Layer& l = *layer;
    const long H = l.G * l.r, P = l.P, N = l.N, K = l.K, d_inner = H * P, channels = d_inner + 2 * l.G * N, W = d_inner + channels + H;
    for (long b = 0; b < l.batch; b++) {
        const float *z = l.p + b * W, *in = z + d_inner, *steps = in + channels;
        float *old = past + b * (K - 1) * channels, *x = l.y + b * (d_inner + channels), *y = x + channels, *out = l.out + b * d_inner;
        std::memcpy(x, l.conv_bias, 4 * channels);
        for (long k = 0; k < K; k++) {
            const float *w = l.conv_weight + k * channels, *from = k + 1 < K ? old + k * channels : in;
            for (long i = 0; i < channels; i++) x[i] += w[i] * from[i];
        }
        if (K > 1) {
            std::memmove(old, old + channels, 4 * (K - 2) * channels);
            std::memcpy(old + (K - 2) * channels, in, 4 * channels);
        }
        for (long i = 0; i < channels; i++) x[i] /= 1 + std::exp(-x[i]);
        for (long h = 0; h < H; h++) {
            const long g = h / l.r;
            const float *B = x + d_inner + g * N, *C = B + l.G * N, v = steps[h] + l.dt_bias[h];
            const float softplus = v > 20 ? v : std::log1p(std::exp(v)), dt = softplus < l.dt_min ? l.dt_min : softplus;
            const float a = std::exp(dt * l.A[h]);
            for (long p = 0; p < P; p++) {
                float *S = state + ((b * H + h) * P + p) * N, u = dt * x[h * P + p], sum = 0;
                for (long n = 0; n < N; n++) S[n] = a * S[n] + u * B[n];
                for (long n = 0; n < N; n++) sum += S[n] * C[n];
                y[h * P + p] = sum + l.D[h] * x[h * P + p];
            }
        }
        for (long i = 0; i < d_inner; i++) out[i] = y[i] * z[i] / (1 + std::exp(-z[i]));
        for (long g = 0; l.norm_weight && g < l.G; g++) {
            const long width = l.r * P;
            float square = 0, *o = out + g * width;
            for (long i = 0; i < width; i++) square += o[i] * o[i];
            const float inverse = 1 / std::sqrt(square / width + (float)l.eps);
            for (long i = 0; i < width; i++) o[i] *= inverse * l.norm_weight[g * width + i];
        }
    }
}

extern "C" int64_t ngpt_mamba2_lanes() { return LANES; }
extern "C" void ngpt_mamba2(const Layer* l, int32_t backward, int32_t threads) {
    share(l->batch * l->G, threads, [&](long i, std::vector<float>& buffer) {
        Group group(*l, i, buffer);
        backward ? group.backward() : group.forward();
    });
}
