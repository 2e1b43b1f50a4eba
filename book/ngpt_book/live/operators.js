// What does each operator of the model compute, for one byte? The listing to read: the equations of nn/, without batches.
//
// h [d] is the hidden state, a Float64Array. A matrix is a Float32Array of rows of length d ("a row is a point"), like the
// parameters of ngpt_core: linear(W, h) is W h, one cosine per row in nGPT; mix(u, W) is the sum of the rows, weighted by u.

function linear(W, h, from = 0, to = W.length / h.length) {
  const d = h.length, out = new Float64Array(to - from);
  for (let i = from, row = from * d; i < to; i++, row += d) {
    let a = 0, b = 0, c = 0, e = 0, j = 0;  // four sums: the processor adds them side by side
    for (; j + 3 < d; j += 4) {
      a += W[row + j] * h[j];
      b += W[row + j + 1] * h[j + 1];
      c += W[row + j + 2] * h[j + 2];
      e += W[row + j + 3] * h[j + 3];
    }
    for (; j < d; j++) a += W[row + j] * h[j];
    out[i - from] = a + b + c + e;
  }
  return out;
}

function mix(u, W, d, from = 0, out = new Float64Array(d), weight = 1) {
  for (let i = 0, row = from * d; i < u.length; i++, row += d) {
    const w = weight * u[i];
    if (w !== 0) for (let j = 0; j < d; j++) out[j] += w * W[row + j];  // most of a squared ReLU is zero
  }
  return out;
}

const dot = (a, b) => { let sum = 0; for (let i = 0; i < a.length; i++) sum += a[i] * b[i]; return sum; };
const length = (x) => Math.sqrt(dot(x, x));
const scaled = (x, s) => x.map((v, i) => v * (s.length === 1 ? s[0] : s[i]));
const silu = (x) => x / (1 + Math.exp(-x));
const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const softplus = (x) => (x > 20 ? x : Math.log1p(Math.exp(x)));
const relu2 = (x) => (x > 0 ? x * x : 0);

function softmax(z, temperature = 1) {
  const top = z.reduce((a, b) => Math.max(a, b), -Infinity), p = Float64Array.from(z, (v) => Math.exp((v - top) / temperature));
  const sum = p.reduce((a, b) => a + b, 0);
  return p.map((v) => v / sum);
}

// Norm(x): the point of the sphere in the direction of x. A zero stays zero.
function norm(x) {
  const n = length(x);
  return n > 0 ? x.map((v) => v / n) : x.slice();
}

// GPT: x / rms(x) * weight, over the whole vector or over each of `groups` parts.
function rmsNorm(x, weight, eps, groups = 1) {
  const out = new Float64Array(x.length), size = x.length / groups;
  for (let g = 0; g < groups; g++) {
    let square = 0;
    for (let i = g * size; i < (g + 1) * size; i++) square += x[i] * x[i];
    const r = 1 / Math.sqrt(square / size + eps);
    for (let i = g * size; i < (g + 1) * size; i++) out[i] = x[i] * r * weight[i];
  }
  return out;
}

// nGPT's residual step: Norm(h + alpha (Norm(f(h)) - h))                                          eqs. ATTNnew2, MLPnew2
function step(h, suggestion, alpha) {
  const to = norm(suggestion);
  return norm(h.map((v, j) => v + alpha[j] * (to[j] - v)));
}

// softmax(sqrt(d_k) q k^T) v W_o, q and k on the sphere; `cache` holds the keys and values of the bytes before      item 3
function attention(p, c, h, cache, knobs) {
  const d_k = c.head_dim, r = c.n_heads / c.n_kv_heads, nGPT = c.normalized;
  const s_qk = nGPT && Float64Array.from(p.s_qk, (s) => s * knobs.s_qk);
  const heads = (W) => {
    const x = linear(W, h);
    return Array.from({ length: x.length / d_k }, (_, i) => x.slice(i * d_k, (i + 1) * d_k));
  };
  const onSphere = (x) => (nGPT ? scaled(norm(x), s_qk) : x);             // eqs. qkscaling1, qkscaling2
  const q = heads(p.q_proj).map(onSphere);
  cache.k.push(heads(p.k_proj).map(onSphere));
  cache.v.push(heads(p.v_proj));
  const scale = nGPT ? Math.sqrt(d_k) : 1 / Math.sqrt(d_k);              // item 3
  const weights = q.map((q_i, i) => softmax(cache.k.map((k) => scale * dot(q_i, k[Math.floor(i / r)]))));
  const out = new Float64Array(c.n_heads * d_k);
  weights.forEach((a, i) => a.forEach((a_s, s) => {
    const v = cache.v[s][Math.floor(i / r)];
    for (let j = 0; j < d_k; j++) out[i * d_k + j] += a_s * v[j];
  }));
  return { out: mix(out, p.o_proj, h.length), weights };
}

// SiLU(bias + sum_k weight_k x_{t-K+1+k}), channel by channel; `past` holds the K - 1 inputs before          nn/mamba2.py
function conv(x, past, weight, bias, K) {
  const y = Float64Array.from(bias), n = x.length;
  [...past, x].forEach((x_k, k) => { for (let j = 0; j < n; j++) y[j] += weight[k * n + j] * x_k[j]; });
  if (K > 1) { past.push(x); past.shift(); }
  return y.map(silu);
}

// Mamba-2 for one byte:  S <- exp(dt A) S + dt x B^T,   y = S C + D x,   out = (y SiLU(z)) W_out             section 3.2
function mamba2(p, c, h, cache, knobs) {
  const H = c.mamba_heads, P = c.mamba_head_dim, N = c.state, G = c.groups, inner = H * P, channels = inner + 2 * G * N;
  const x_in = c.normalized ? scaled(h, p.s_mamba.map((s) => s * knobs.s_mamba)) : h;             // item 6
  const all = linear(p.in_proj, x_in), z = all.subarray(0, inner);
  const xBC = conv(all.slice(inner, inner + channels), cache.conv, p.conv_weight, p.conv_bias, c.conv);
  const B = inner, C = inner + G * N, y = new Float64Array(inner), decay = new Float64Array(H), { S } = cache;
  for (let head = 0; head < H; head++) {
    const dt = Math.max(c.dt_min, softplus(all[inner + channels + head] + p.dt_bias[head]));
    const a = Math.exp(-dt * Math.exp(p.A_log[head])), g = Math.floor((head * G) / H) * N;        // a = exp(dt A)
    decay[head] = a;
    for (let i = head * P; i < (head + 1) * P; i++) {
      const row = i * N, u = dt * xBC[i];
      let sum = 0;
      for (let n = 0; n < N; n++) {
        S[row + n] = a * S[row + n] + u * xBC[B + g + n];                                          // S_t
        sum += S[row + n] * xBC[C + g + n];                                                        // y_t = S_t C_t
      }
      y[i] = (sum + p.D[head] * xBC[i]) * silu(z[i]);
    }
  }
  const gated = c.normalized ? y : rmsNorm(y, p.norm_weight, c.norm_eps, G);
  return { out: mix(gated, p.out_proj, h.length), decay };
}

// Which experts, with what weights: sigmoid scores, a bias for the choice only, weights that sum to routed_scaling    section 3.2
function route(p, c, x) {
  const scores = linear(p["router.weight"], x).map(sigmoid);
  const order = [...scores.keys()].sort((a, b) => scores[b] + p["router.bias"][b] - scores[a] - p["router.bias"][a]);
  const chosen = order.slice(0, c.top_k), total = chosen.reduce((sum, e) => sum + scores[e], 0);
  return chosen.map((e) => [e, (c.routed_scaling * scores[e]) / total]);
}

// relu2(s_u W_up x) W_down for the rows from `first` on: a routed expert, or the shared one                  eq. mlpscaling1
function expert(up, down, s_u, x, first, ff, weight, out) {
  const u = linear(up, x, first, first + ff).map((v, i) => relu2(s_u ? s_u[i] * v : v));
  return mix(u, down, x.length, first, out, weight);
}

// sum_chosen weight_i expert_i(x) + shared(x),   x = s_moe h                                                 section 3.2
function moe(p, c, h, knobs) {
  const x = c.normalized ? scaled(h, p.s_moe.map((s) => s * knobs.s_moe)) : h;                     // item 6
  const chosen = route(p, c, x), out = new Float64Array(h.length), ff = c.expert_ff;
  for (const [e, weight] of chosen) expert(p["experts.up"], p["experts.down"], p["experts.s_u"], x, e * ff, ff, weight, out);
  if (c.shared_ff) expert(p["shared.up"], p["shared.down"], p["shared.s_u"], x, 0, c.shared_ff, 1, out);
  return { out, chosen };
}
