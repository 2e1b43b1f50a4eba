/* What does one optimizer step cost when every number is read once? The whole of algorithm.py, one row at a time.

A row of w, g, m, v comes from memory once and goes back once, as in a fused AdamW; what the recipe adds happens while the row
is in the cache. Three sweeps over it:
    1. <w,w> and <w,g>, for the tangent projection;
    2. projection, SMGC, moments, gate: the direction z goes to a row buffer, with <w,z> and <z,z> (and PMEN, where it acts);
    3. w <- A w + B z, where the numbers A and B hold the step, weight decay, the angular cap and Norm at once.

Symbols: those of algorithm.py. Also
    z       the displacement without its scale: delta = step z - decay w, step = -lr / (1 - beta1^t)
    x       the gradient after projection and SMGC
    u       the part of delta that is tangent to w
*/
#include "../simd.h"

constexpr long BLOCK = 1024;                                  // coordinates that float sums may hold
constexpr long CHUNK = 32768;                                 // coordinates that a thread takes at a time

/* x^p for x >= 0, to a few rounding errors: x = 2^e m with m in [sqrt(1/2), sqrt(2)), then 2^(p e + p log2 m). */
static inline vec power(vec x, float p) {
    const mask e = ((mask)x - 0x3F3504F3) >> 23;
    const vec m = (vec)((mask)x - (e << 23)), r = (m - 1) / (m + 1), rr = r * r;
    const vec log2m = r * (2.88539008f + rr * (0.961796694f + rr * (0.577078016f + rr * (0.412198583f + rr * 0.320598898f))));
    const float high = (float)(int32_t)(p * 4096) / 4096, magic = 12582912;  // high e is exact; adding magic rounds
    const vec E = __builtin_convertvector(e, vec), whole = (high * E + magic) - magic;
    const vec rest = (high * E - whole) + ((p - high) * E + p * log2m), more = (rest + magic) - magic, f = (rest - more) * 0.693147181f;
    const vec exp = 1 + f * (1 + f * (0.5f + f * (1 / 6.f + f * (1 / 24.f + f * (1 / 120.f + f * (1 / 720.f + f * (1 / 5040.f)))))));
    const vec n = whole + more;
    const vec y = exp * (vec)((__builtin_convertvector(most(least(n, all(127)), all(-126)), mask) + 127) << 23);
    const float infinite = std::numeric_limits<float>::infinity();
    return x == 0 ? all(p > 0 ? 0 : infinite) : n > 127 ? all(infinite) : n < -126 ? vec{} : y;
}

/* A sum over a row: float lanes within a BLOCK, double beyond it, so that long rows lose no digits. */
struct Sum {
    vec lanes[UNROLL] = {};
    double total = 0;
    inline __attribute__((always_inline)) void flush() {
        vec s = lanes[0];
        for (int u = 1; u < UNROLL; u++) s += lanes[u];
        double t[LANES];
        for (int l = 0; l < LANES; l++) t[l] = s[l];
        for (int half = LANES / 2; half; half /= 2)
            for (int l = 0; l < half; l++) t[l] += t[l + half];
        total += t[0];
        for (int u = 0; u < UNROLL; u++) lanes[u] = vec{};
    }
};

/* A whole vector, or the rest of a row: what is not there reads as `fill`, is not written, and is zero after `take`. */
struct Whole {
    static vec load(const float* p, float = 0) { vec x; std::memcpy(&x, p, sizeof x); return x; }
    static void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }
    static vec take(vec x) { return x; }
};
struct Rest {
    long n;
    vec load(const float* p, float fill = 0) const { vec x = all(fill); std::memcpy(&x, p, 4 * n); return x; }
    void store(float* p, vec x) const { std::memcpy(p, &x, 4 * n); }
    vec take(vec x) const { return load((const float*)&x); }
};

/* body(i, slot, at): once for every vector of a row; `slot` says which lanes of the sums it adds to. */
template <class Body, class... Sums> static inline __attribute__((always_inline)) void sweep(long n, Body body, Sums&... sums) {
    for (long i = 0; i < n;) {
        const long end = std::min(n, i + BLOCK);
        for (; i + UNROLL * LANES <= end; i += UNROLL * LANES) {
#pragma GCC unroll 8
            for (int u = 0; u < UNROLL; u++) body(i + u * LANES, u, Whole{});
        }
        for (; i + LANES <= end; i += LANES) body(i, 0, Whole{});
        if (i < end) body(i, 0, Rest{end - i});
        i = end;
        (sums.flush(), ...);
    }
}

extern "C" {
struct Rule {  // one group at one step; fused_cpu.py has the same list
    double lr, decay, beta1, beta2, eps_gate, eps_num, a, cap, R, s_min, strength, tau, b;
    int64_t smgc_start, pmen_start, pmen_every;
    int32_t unit, tangent, maximize, smooth, by_row, transport;  // by_row: PMEN's reference; transport of m: none, project, parallel
};
struct Job {  // one tensor, seen as rows of d coordinates (d = 1, if it is not unit)
    void* w;
    const void* g;
    float *m, *v;
    int64_t rows, d, t;
    uint64_t offset;                  // PMEN: index of the first coordinate in the full tensor
    float limit;                      // of the gradient's magnitudes
    float eps_gate;                   // its own threshold; 0: the rule's
    uint32_t key;
    int32_t bf16;
    int32_t* seal;                    // of the rows of w, m, v (3 times rows), or null: compared on reading, taken on writing
    uint8_t *changed, *off, *broken;  // where a seal did not fit; where ||w|| was not 1; whether there was either
    float tolerance;                  // of ||w||
};
struct Sealed {                       // the same list as in fused_cpu.py
    const float* x;
    int64_t rows, d;
    int32_t* seal;                    // one for each row, or for each number
    uint8_t *changed, *off, *broken;  // off: null if the rows are not unit vectors
    float tolerance;
    int32_t each;                     // 1: for each number
};
}

/* A row's seal: the sum of its words, modulo 2^32. */
static inline int32_t words(const float* x, long n) {
    uint32_t sum = 0;
    for (long i = 0; i < n; i++) {
        uint32_t word;
        std::memcpy(&word, x + i, 4);
        sum += word;
    }
    return (int32_t)sum;
}

/* What depends on t. */
struct Numbers {
    double bc1, bc2;                                                    // 1 - beta1^t, 1 - beta2^t
    double clip = std::numeric_limits<double>::infinity(), floor = 1;   // SMGC: C_R (infinite: off) and sqrt(1 - beta2^k) s_min
    double noise = 0;                                                   // PMEN: lambda_noise c (0: off)

    Numbers(const Rule& r, const Job& j) : bc1(1 - std::pow(r.beta1, j.t)), bc2(1 - std::pow(r.beta2, j.t)) {
        if (j.t - 1 >= r.smgc_start) {
            clip = std::sqrt((r.R - r.beta2) / (1 - r.beta2));             // app. C, eq. C_R
            floor = std::sqrt(1 - std::pow(r.beta2, j.t - 1)) * r.s_min;   // app. C, eq. v_bar, as sqrt(v_bar)
        }
        if (j.t >= r.pmen_start && (j.t - r.pmen_start) % r.pmen_every == 0)
            noise = r.strength * (r.by_row ? 1 / std::sqrt(j.d) : std::sqrt((1 - r.beta1) / (1 + r.beta1)));  // app. D, eq. c_j
    }
};

enum Gate { HALF, ONE, POWER };  // a = 1/2 and eps_num > 0; a = 1; any other

/* Sweep 2 for one vector: moments in place, the direction z returned. The same for a row and for coordinates. */
template <Gate gate> struct Moments {
    float beta1, rest1, beta2, rest2, clip, floor, clip2, floor2, root2, eps_num, eps_gate, root_gate, one_a;

    Moments(const Rule& r, const Numbers& n, double eps)
        : beta1(r.beta1), rest1(1 - r.beta1), beta2(r.beta2), rest2(1 - r.beta2), clip(n.clip),
          floor(n.floor), clip2(0.999999 * n.clip * n.clip), floor2(n.floor * n.floor), root2(1 / std::sqrt(n.bc2)),
          eps_num(r.eps_num), eps_gate(eps), root_gate(std::sqrt(eps)), one_a(1 - r.a) {}

    template <class At> inline __attribute__((always_inline)) vec operator()(vec x, float* m, float* v, At at, vec& least_v) const {
        vec v0 = at.load(v, 1e30f);  // lanes beyond the row: never clipped, never the smallest
        vec xx = x * x, bound2 = clip2 * most(v0, all(floor2));
        if (__builtin_expect(any(xx >= bound2), 0)) {  // app. C; the square root only where a coordinate may be clipped
            vec bound = clip * most(root(v0), all(floor));
            x = most(-bound, least(bound, x));  // in this order NaN stays NaN
            xx = x * x;
        }
        vec m0 = at.load(m), m1 = rest1 < 0.5f ? rest1 * (x - m0) + m0 : x - beta1 * (x - m0);  // alg. 1, line 4: the larger part as it is
        vec v1 = beta2 * v0 + rest2 * xx;  // alg. 1, line 5
        at.store(m, m1);
        at.store(v, v1);
        least_v = least(least_v, v1);
        vec d = quick_root(v1) * root2 + eps_num, whole;  // alg. 1, lines 7 and 8; app. A: d + eps_gate (d / eps_gate)^(1-a)
        if constexpr (gate == ONE) {
            whole = d + eps_gate;
        } else if constexpr (gate == HALF) {
            whole = quick_root(d) * root_gate + d;
        } else {
            whole = power(d * (1 / eps_gate), one_a) * eps_gate + d;
        }
        if constexpr (gate == POWER) return whole != 0 ? m1 / whole : vec{};  // at d = 0 the limit; NaN goes on
        return quick_quotient(m1, whole);
    }
};

template <class Word> static inline Word mix(Word x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* PMEN (app. D): z += scale psi(sqrt(v)) xi; <w,z> and <z,z> are summed again. Only for rows with a coordinate below tau. */
static void perturb(const Rule& r, const Job& j, const Numbers& now, uint64_t index, const float* w, const float* v, float* z,
                    double& wz, double& zz) {
    const uint32_t k = mix(j.key ^ mix((uint32_t)j.t)), low = (uint32_t)index, high = (uint32_t)(index >> 32);
    const float scale = -now.noise * now.bc1, tau = r.tau, b = r.b;  // z is multiplied by -lr / bc1
    word lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    Sum p, q;
    sweep(j.d, [&](long i, int u, auto at) {
        const word lo = lane + (low + (uint32_t)i);
        const word hi = (word)(lo < low ? word{} + 1 : word{}) + high;                      // i < 2^32: at most one carry
        const vec xi = (mix(mix(lo ^ k) ^ hi) >> 31) == 0 ? all(scale) : all(-scale);       // eq. xi
        const vec s = root(at.load(v + i, 1e30f));
        const vec psi = r.smooth ? 1 / (1 + power(s / tau, b)) : s <= tau ? all(1) : vec{};  // eqs. psi_b, psi_step
        const vec x = at.load(z + i) + psi * xi;
        at.store(z + i, x);
        p.lanes[u] += at.load(w + i) * x;
        q.lanes[u] += at.take(x * x);
    }, p, q);
    wz = p.total, zz = q.total;
}

struct Cap {
    double cos, sin;
    explicit Cap(double angle) : cos(std::cos(std::min(angle, M_PI))), sin(std::sin(std::min(angle, M_PI))) {}
};

/* The first moment follows its row from w to n = A w + B z (algorithm.carried). */
static void carry(const Rule& r, long n, const float* w, const float* z, float* m, double A, double B, double ww) {
    Sum p, q, s;
    sweep(n, [&](long i, int u, auto at) {
        const vec x = at.load(w + i), y = at.load(m + i), b = at.load(z + i);
        p.lanes[u] += x * y;
        q.lanes[u] += b * y;
        s.lanes[u] += x * b;
    }, p, q, s);
    const double norm = std::sqrt(ww), nm = A * p.total + B * q.total;
    double along = 0, ahead = nm;  // m - along w_bar - ahead n
    if (r.transport == 2) {
        const double c = (A * ww + B * s.total) / norm, radial = p.total / norm;
        if (!(1 + c > 1e-6)) return;
        along = (radial + nm) / (1 + c);
        ahead = along - 2 * radial;
    }
    const float a = along / norm + ahead * A, b = ahead * B;
    sweep(n, [&](long i, int, auto at) { at.store(m + i, at.load(m + i) - a * at.load(w + i) - b * at.load(z + i)); });
}

/* A row that keeps its place keeps its bits; only a projected first moment is projected all the same. */
static bool stay(const Rule& r, long n, const float* w, float* m, double ww) {
    if (r.transport == 1) carry(r, n, w, w, m, 1, 0, ww);
    return false;
}

/* One unit row. False: it did not move, and w keeps its bits. `ahead`, `ahead_w`: how far the next row is, for prefetching.
   `moments` is a copy: what lies in memory would be read again after every store. */
template <Gate gate>
static bool row_step(const Rule& r, const Job& j, const Numbers& now, const Moments<gate> moments, Cap cap, float* w, const float* g, float* m,
                     float* v, float* z, uint64_t index, long ahead, long ahead_w) {
    const long n = j.d;
    Sum square, product;
    sweep(n, [&](long i, int u, auto at) {
        vec x = at.load(w + i);
        square.lanes[u] += x * x;
        product.lanes[u] += x * at.load(g + i);
    }, square, product);
    const double ww = square.total;
    if (j.off && std::fabs(std::sqrt(ww) - 1) > j.tolerance) j.off[(index - j.offset) / n] = *j.broken = 1;
    const float sign = r.maximize ? -1 : 1, radial = r.tangent ? sign * product.total / std::max(ww, 1e-12) : 0;

    Sum p, q;
    vec least_v = all(std::numeric_limits<float>::max());
    sweep(n, [&](long i, int u, auto at) {
        if (u * LANES % LINE == 0) {  // the next row comes while the square roots of this one are busy
            __builtin_prefetch(w + ahead_w + i, 1);
            __builtin_prefetch(g + ahead_w + i, 0);
            __builtin_prefetch(m + ahead + i, 1);
            __builtin_prefetch(v + ahead + i, 1);
        }
        vec y = at.load(w + i);
        vec direction = moments(sign * at.load(g + i) - radial * y, m + i, v + i, at, least_v);  // app. B
        at.store(z + i, direction);
        p.lanes[u] += y * direction;
        q.lanes[u] += direction * direction;
    }, p, q);
    double wz = p.total, zz = q.total;

    float smallest = least_v[0];
    for (int l = 1; l < LANES; l++) smallest = std::min(smallest, least_v[l]);
    if (now.noise != 0 && (r.smooth || std::sqrt(smallest) <= (float)r.tau)) perturb(r, j, now, index, w, v, z, wz, zz);

    const double step = -r.lr / now.bc1;
    if (ww == 0 || ((step == 0 || zz == 0) && r.decay == 0)) return stay(r, n, w, m, ww);  // a vector of zero has no sphere to move on
    // The candidate w + step z - decay w, seen from w: `across` = ||u||, `along` = its component along w / ||w||.
    const double norm = std::sqrt(ww), k = wz / ww;
    double uu = zz - wz * k;
    if (uu < 0.01 * zz) {  // z is nearly radial: the difference has lost its digits
        Sum square;
        const float k32 = k;
        sweep(n, [&](long i, int u, auto at) {
            vec x = at.load(z + i) - k32 * at.load(w + i);
            square.lanes[u] += x * x;
        }, square);
        uu = square.total;
    }
    const double across = std::fabs(step) * std::sqrt(uu), along = norm * (1 + step * k - r.decay);
    const double length = std::sqrt(across * across + along * along);
    if (length == 0 || length == std::numeric_limits<double>::infinity()) return stay(r, n, w, m, ww);  // no direction: zero, or beyond the range
    double A = (1 - r.decay) / length, B = step / length;  // Norm
    const double moved2 = step * step * zz - 2 * step * r.decay * wz + r.decay * r.decay * ww;
    const double rounding = 4 * std::numeric_limits<float>::epsilon();
    if (r.cap >= 0 && across * across > rounding * rounding * moved2 && across * cap.cos > along * cap.sin) {
        B = step * cap.sin / across;  // phi > theta_max, both in [0, pi]: the point at theta_max in the same direction
        A = cap.cos / norm - B * k;   // section 2.3, ASC
    }
    if (r.transport) carry(r, n, w, z, m, A, B, ww);
    const float A32 = A, B32 = B;
    sweep(n, [&](long i, int, auto at) { at.store(w + i, A32 * at.load(w + i) + B32 * at.load(z + i)); });
    return true;
}

/* Coordinates without geometry: algorithm 1 and SMGC. */
template <Gate gate>
static void flat_step(const Rule& r, const Numbers& now, const Moments<gate> moments, long n, float* w, const float* g, float* m, float* v) {
    const float step = -r.lr / now.bc1, decay = r.decay, sign = r.maximize ? -1 : 1;
    vec unused = {};
    sweep(n, [&](long i, int, auto at) {
        vec y = at.load(w + i);
        vec delta = step * moments(sign * at.load(g + i), m + i, v + i, at, unused) - decay * y;
        at.store(w + i, delta == 0 ? y : y + delta);  // adding a zero would turn -0.0 into 0.0
    });
}

/* bfloat16 is the upper half of a float; back with rounding to the nearest, ties to even, NaN kept. */
static void widen(const uint16_t* from, float* to, long n) {
    for (long i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        std::memcpy(to + i, &bits, 4);
    }
}
static void narrow(const float* from, uint16_t* to, long n) {
    for (long i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, from + i, 4);
        const uint32_t even = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
        to[i] = from[i] == from[i] ? even : 0x7FC0u;
    }
}

/* Rows [first, last) of a unit tensor; coordinates [first, last) of another. */
template <Gate gate> static void part(const Rule& r, const Job& j, const Numbers& now, long first, long last, std::vector<float>& buffer) {
    const long d = r.unit ? j.d : last - first;  // what is one row here
    if (r.unit || j.bf16) buffer.resize(3 * d);
    const Moments<gate> moments(r, now, j.eps_gate > 0 ? j.eps_gate : r.eps_gate);
    float *z = buffer.data(), *w32 = z + d, *g32 = w32 + d;
    const Cap cap(r.cap);
    for (long row = first; row < last; row += r.unit ? 1 : last - first) {
        const long at = r.unit ? row * d : first, ahead = r.unit && row + 1 < j.rows ? d : 0;
        float *w = (float*)j.w + at, *m = j.m + at, *v = j.v + at;
        const float* g = (const float*)j.g + at;
        uint16_t* half = (uint16_t*)j.w + at;
        if (j.bf16) {
            widen(half, w = w32, d);
            widen((const uint16_t*)j.g + at, g32, d);
            g = g32;
        }
        const float* const sealed[] = {w, m, v};
        if (j.seal)
            for (long k = 0; k < 3; k++)
                if (words(sealed[k], d) != j.seal[k * j.rows + row]) j.changed[k * j.rows + row] = *j.broken = 1;
        bool moved = true;
        if (r.unit)
            moved = row_step<gate>(r, j, now, moments, cap, w, g, m, v, z, j.offset + at, ahead, j.bf16 ? 0 : ahead);
        else
            flat_step<gate>(r, now, moments, d, w, g, m, v);
        if (j.seal)
            for (long k = 0; k < 3; k++) j.seal[k * j.rows + row] = words(sealed[k], d);
        if (j.bf16 && moved) narrow(w, half, d);
    }
}

/* A tensor cut into pieces of about `size` coordinates: rows [first, last) of it. */
struct Piece {
    long job, first, last;
};
static void cut(std::vector<Piece>& pieces, long job, long rows, long d, long size = CHUNK) {
    const long each = std::max(1L, size / std::max(1L, d));
    for (long i = 0; i < rows; i += each) pieces.push_back({job, i, std::min(rows, i + each)});
}

extern "C" void ngpt_step(const Rule* r, const Job* const* jobs, int64_t count, int32_t threads) {
    std::vector<Piece> pieces;
    std::vector<Numbers> now;
    for (long j = 0; j < count; j++) {
        cut(pieces, j, jobs[j]->rows, jobs[j]->d);
        now.emplace_back(*r, *jobs[j]);
    }
    auto run = r->a == 0.5 && (float)r->eps_num > 0 ? part<HALF> : r->a == 1 ? part<ONE> : part<POWER>;
    share(pieces.size(), threads, [&](long i, std::vector<float>& buffer) {
        const Piece& x = pieces[i];
        run(*r, *jobs[x.job], now[x.job], x.first, x.last, buffer);
    });
}

/* Compare the seals of these rows, and their norms, or take the seals. */
static void seal_rows(const Sealed& s, bool compare, long first, long last) {
    for (long row = first; row < last; row++) {
        const float* x = s.x + row * s.d;
        const int32_t sum = s.each ? 0 : words(x, s.d), *now = s.each ? (const int32_t*)x : &sum;
        const long count = s.each ? s.d : 1, at = row * count;
        if (!compare) std::memcpy(s.seal + at, now, 4 * count);
        if (!compare || !std::memcmp(s.seal + at, now, 4 * count)) continue;
        *s.broken = 1;
        for (long i = 0; i < count; i++) s.changed[at + i] |= now[i] != s.seal[at + i];
    }
    for (long row = first; compare && s.off && row < last; row++) {
        Sum square;
        sweep(s.d, [&](long i, int u, auto at) { const vec y = at.load(s.x + row * s.d + i); square.lanes[u] += y * y; }, square);
        if (std::fabs(std::sqrt(square.total) - 1) > s.tolerance) s.off[row] = *s.broken = 1;
    }
}
extern "C" void ngpt_seals(const Sealed* tensors, int64_t count, int32_t compare, int32_t threads) {
    std::vector<Piece> pieces;
    for (long j = 0; j < count; j++) cut(pieces, j, tensors[j].rows, tensors[j].d, 4 * CHUNK);
    share(pieces.size(), threads, [&](long i, std::vector<float>&) {
        const Piece& p = pieces[i];
        seal_rows(tensors[p.job], compare, p.first, p.last);
    });
}

/* The magnitude of a float grows with its bits, and infinity and NaN come last. Four places at once: one stream of reading
   leaves half of the memory's speed unused. */
template <class Bits> static bool finite(const Bits* x, long n, Bits limit) {
    const Bits magnitude = (Bits)~((Bits)1 << (8 * sizeof(Bits) - 1));
    const long q = n / 4;
    Bits a = 0, b = 0, c = 0, d = 0;
    for (long i = 0; i < q; i++) {
        a = std::max(a, (Bits)(x[i] & magnitude));
        b = std::max(b, (Bits)(x[i + q] & magnitude));
        c = std::max(c, (Bits)(x[i + 2 * q] & magnitude));
        d = std::max(d, (Bits)(x[i + 3 * q] & magnitude));
    }
    for (long i = 4 * q; i < n; i++) a = std::max(a, (Bits)(x[i] & magnitude));
    return std::max(std::max(a, b), std::max(c, d)) < limit;
}

/* Whether every gradient's magnitudes are below its limit. */
extern "C" int32_t ngpt_finite(const Job* const* jobs, int64_t count, int32_t threads) {
    std::atomic<bool> good{true};
    std::vector<Piece> pieces;
    for (long j = 0; j < count; j++) cut(pieces, j, jobs[j]->rows * jobs[j]->d, 1, 4 * CHUNK);
    share(pieces.size(), threads, [&](long i, std::vector<float>&) {
        const long first = pieces[i].first, n = pieces[i].last - first;
        const Job& j = *jobs[pieces[i].job];
        uint32_t limit;
        std::memcpy(&limit, &j.limit, 4);
        if (good && !(j.bf16 ? finite<uint16_t>((const uint16_t*)j.g + first, n, limit >> 16) :
                               finite<uint32_t>((const uint32_t*)j.g + first, n, limit))) good = false;
    });
    return good;
}
