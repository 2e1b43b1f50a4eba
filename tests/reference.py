"""The slow twins: every mechanism once more, straight from the paper's equations, in float64, with loops where clearest.

Nothing here imports ngpt_core. A twin is never optimized: it is what the fast code is compared with.
"""

import hashlib
import math

import numpy as np

# ---- optimizer (sections 2.2 and 2.3, appendices A-D) ----------------------------------------------------------------


def gate(d: float, a: float, eps_gate: float) -> float:
    """sigma(a log(d / eps_gate)); Algorithm 1, line 9."""
    if d == 0:
        return 0.0
    x = a * math.log(d / eps_gate)
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def tangent(g: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Appendix B, for one vector."""
    return g - w * (w @ g) / max(w @ w, 1e-12)


def growth_clip(g: float, v: float, k: int, beta2: float, R: float, s_min: float) -> float:
    """Appendix C, for one coordinate."""
    v_bar = max(v, (1 - beta2**k) * s_min**2)
    C_R = math.sqrt((R - beta2) / (1 - beta2))
    return math.copysign(min(abs(g), C_R * math.sqrt(v_bar)), g)


def sign(seed: int, name: str, t: int, i: int) -> int:
    """xi of the coordinate i of the parameter ``name`` at step t: 32-bit arithmetic, one coordinate at a time."""

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little")
    k = mix(key ^ mix(t))
    return 1 if mix(mix(i % 2**32 ^ k) ^ i // 2**32) < 2**31 else -1


def psi(s: float, tau: float, profile: str, b: float) -> float:
    """Appendix D."""
    if profile == "step":
        return 1.0 if s <= tau else 0.0
    return 1 / (1 + (s / tau) ** b)


def cap_angle(w: np.ndarray, candidate: np.ndarray, theta_max: float) -> np.ndarray:
    """The Angular Step Cap of section 2.3, for one vector, from the candidate as the paper writes it."""
    u = candidate - w * (w @ candidate) / (w @ w)
    phi = math.atan2(np.linalg.norm(u), w @ candidate / np.linalg.norm(w))
    if phi > theta_max and np.linalg.norm(u) > 0:
        return math.cos(theta_max) * w / np.linalg.norm(w) + math.sin(theta_max) * u / np.linalg.norm(u)
    return candidate


def carried(m: np.ndarray, w: np.ndarray, new: np.ndarray, transport: str) -> np.ndarray:
    """The first moment after w has moved to ``new``, both unit: projected, or turned in the plane of the two by their angle."""
    if transport == "project":
        return tangent(m, new)
    across = new - w * (w @ new)
    if np.linalg.norm(across) == 0:
        return m
    e = across / np.linalg.norm(across)  # w and e span the plane; phi is the angle of the step
    phi = math.atan2(np.linalg.norm(across), w @ new)
    along, ahead = w @ m, e @ m
    turned = (along * math.cos(phi) - ahead * math.sin(phi)) * w + (along * math.sin(phi) + ahead * math.cos(phi)) * e
    return m - along * w - ahead * e + turned


class GatedAdamW:
    """One parameter under Algorithm 1 with everything around it, vectors along the last axis, in float64 and with loops.

    ``smgc``, ``pmen``: None or dicts of the paper's symbols. ``alpha`` not None: the decay is eta_t lambda, eta_t = lr / alpha.
    """

    def __init__(self, theta, *, betas, eps_gate, eps_num, a, weight_decay=0.0, alpha=None, unit=False, tangent=True, smgc=None,
                 pmen=None, name="0", transport=None):  # fmt: skip
        self.theta = np.array(theta, dtype=np.float64)
        if unit:
            self.theta = self.theta / np.linalg.norm(self.theta, axis=-1, keepdims=True)
        self.m, self.v, self.t = np.zeros_like(self.theta), np.zeros_like(self.theta), 0
        self.betas, self.eps_gate, self.eps_num, self.a = betas, eps_gate, eps_num, a
        self.weight_decay, self.alpha, self.unit, self.tangent = weight_decay, alpha, unit, tangent
        self.smgc, self.pmen, self.name, self.transport = smgc, pmen, name, transport

    def step(self, grad, lr, cap=None):
        g, (beta1, beta2) = np.array(grad, dtype=np.float64), self.betas
        rows = [index for index in np.ndindex(self.theta.shape[:-1])] if self.unit else []
        k, self.t = self.t, self.t + 1
        eps_gate = self.threshold(k)
        if self.tangent:
            for row in rows:
                g[row] = tangent(g[row], self.theta[row])
        if self.smgc is not None and k >= self.smgc["start"]:
            for i in np.ndindex(g.shape):
                g[i] = growth_clip(g[i], self.v[i], k, beta2, self.smgc["R"], self.smgc["s_min"])
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        m_hat, v_hat = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
        eta = lr if self.alpha is None else lr / self.alpha
        new = np.empty_like(self.theta)
        for i in np.ndindex(g.shape):
            d = math.sqrt(v_hat[i]) + self.eps_num
            if d > 0:
                direction = gate(d, self.a, eps_gate) * m_hat[i] / d
            else:
                direction = m_hat[i] / eps_gate if self.a == 1 else 0.0
            new[i] = self.theta[i] - (lr * direction + eta * self.weight_decay * self.theta[i])
        if self.pmen is not None and rows:
            x = self.pmen
            if self.t >= x["start"] and (self.t - x["start"]) % x["every"] == 0:
                c = 1 / math.sqrt(self.theta.shape[-1]) if x["reference"] == "row" else math.sqrt((1 - beta1) / (1 + beta1))
                for n, i in enumerate(np.ndindex(g.shape)):
                    xi = sign(x["seed"], self.name, self.t, n)
                    new[i] += lr * x["strength"] * c * psi(math.sqrt(self.v[i]), x["tau"], x["profile"], x["b"]) * xi
        for row in rows:
            if cap is not None:
                new[row] = cap_angle(self.theta[row], new[row], cap)
            new[row] /= np.linalg.norm(new[row])
            if self.transport is not None:
                self.m[row] = carried(self.m[row], self.theta[row], new[row], self.transport)
        self.theta = new
        return new

    def threshold(self, k):
        """eps_gate of step k + 1: a number, a function of the step, or {"quantile", "every"} of sqrt(v_hat) after k steps."""
        if callable(self.eps_gate):
            return self.eps_gate(k + 1)
        if not isinstance(self.eps_gate, dict):
            return self.eps_gate
        if k >= 1 and (k - 1) % self.eps_gate["every"] == 0:
            scales = sorted(math.sqrt(v / (1 - self.betas[1] ** k)) for v in self.v.ravel() if v > 0)
            if scales:
                self.kept = scales[math.ceil(self.eps_gate["quantile"] * len(scales)) - 1]
        return getattr(self, "kept", 1e-8)


def log_decay(r, rho, eta_max=1.0, eta_min=0.0):
    """Section 2.2, eta(t), as written."""
    return eta_min + (eta_max - eta_min) * (1 - math.log(1 + r / rho) / math.log(1 + 1 / rho))


def scheduled(t, T, peak_lr, rho, warmup, peak_cap=None):
    """(lr, cap) of step t: section 4.1, decay from the first step, a group's warmup on top, a cap that does not decay."""
    lr = peak_lr * log_decay(t / T, rho) * (1.0 if warmup == 0 else min(1.0, t / (warmup * T)))
    return lr, None if peak_cap is None else peak_cap * min(1.0, t / (0.1 * T))


# ---- logit scale and loss (section 2.1) ------------------------------------------------------------------------------


def lgp_scale(s_z, q, form):
    """b(s_z) of section 2.1, entry by entry; q None stands for the ordinary gradient."""
    V = len(s_z)
    if q is None:
        return [float(s) for s in s_z]
    if form == "ratio":
        mean = sum(float(s) for s in s_z) / V
        return [(float(s) / mean) ** q for s in s_z]
    mean = sum(float(s) ** q for s in s_z) / V
    return [float(s) ** q / mean for s in s_z]


def positive(s, init, scale):
    """s_eff of a positive s_z stored as s: the plain s_eff = s init / scale above its initial value, an exponential below."""
    return [init * (x if x > 1 else math.exp(x - 1)) for x in (float(one) / scale for one in s)]


def lgp_cross_entropy(h, W, targets, s_z=None, q=None, form="ratio", ignore_index=-100):
    """(loss, dh, dW, ds_z) of the mean cross-entropy, token by token; LGP on the paths to h and W, ds_z exact."""
    h, W = np.asarray(h, dtype=np.float64), np.asarray(W, dtype=np.float64)
    s = np.ones(len(W)) if s_z is None else np.asarray(s_z, dtype=np.float64)
    b = np.array(lgp_scale(s, q, form)) if s_z is not None else s
    loss, dh, dW, ds = 0.0, np.zeros_like(h), np.zeros_like(W), np.zeros_like(s)
    count = sum(int(y) != ignore_index for y in targets)
    for n, y in enumerate(targets):
        if int(y) == ignore_index:
            continue
        u = np.array([float(w @ h[n]) for w in W])
        z = s * u  # eq. sz
        p = np.exp(z - z.max())
        p /= p.sum()
        loss += -math.log(p[y]) / count
        dz = p.copy()
        dz[y] -= 1.0
        dz /= count
        du = b * dz  # eq. LGP
        dh[n] = sum(du[i] * W[i] for i in range(len(W)))
        for i in range(len(W)):
            dW[i] += du[i] * h[n]
        ds += dz * u
    return loss, dh, dW, ds


# ---- model blocks (section 3) ----------------------------------------------------------------------------------------
# Vectors of the model are the last axis; matrices hold them as rows [n, d]. W maps h to W h; an output matrix maps u to u W.


def norm(x):
    """Norm(x) along the last axis."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def rope(x, position, theta):
    """One vector x [d_k]: the pair (i, i + d_k/2), as a complex number, is multiplied by exp(j position theta^(-2i/d_k))."""
    half = len(x) // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * theta ** (-2 * np.arange(half) / len(x)))
    return np.concatenate([z.real, z.imag])


def attention(h, Wq, Wk, Wv, Wo, heads, kv_heads, s_qk=None, theta=None, rope_first=False):
    """ATTN(h) of one sequence h [T, d], token by token and head by head. s_qk None: GPT (no QK norm, 1/sqrt(d_k)).
    rope_first: the rotary embedding before Norm and s_qk, as in the original nGPT, and not after them."""
    T, d_k, out = len(h), len(Wq) // heads, np.zeros_like(h)
    for head in range(heads):
        g = head // (heads // kv_heads)  # the key head that serves this query head
        q, k, v = h @ Wq[head * d_k : (head + 1) * d_k].T, h @ Wk[g * d_k : (g + 1) * d_k].T, h @ Wv[g * d_k : (g + 1) * d_k].T
        if theta is not None and rope_first:
            q, k = (np.stack([rope(x[t], t, theta) for t in range(T)]) for x in (q, k))
        if s_qk is not None:
            q, k = norm(q) * s_qk, norm(k) * s_qk
        if theta is not None and not rope_first:
            q, k = (np.stack([rope(x[t], t, theta) for t in range(T)]) for x in (q, k))
        for t in range(T):
            a = np.array([q[t] @ k[s] for s in range(t + 1)]) * (math.sqrt(d_k) if s_qk is not None else 1 / math.sqrt(d_k))
            a = np.exp(a - a.max())
            out[t] += (a / a.sum()) @ v[: t + 1] @ Wo[head * d_k : (head + 1) * d_k]
    return out


def mlp_relu2(h, up, down, s_u=None):
    u = h @ up.T
    return np.maximum(u if s_u is None else u * s_u, 0) ** 2 @ down


def mlp_swiglu(h, up, gate, down, s_u=None, s_v=None):
    """The original nGPT: u <- u s_u, v <- v s_v sqrt(d_model), u * SiLU(v). Without scales: GPT."""
    u, v = h @ up.T, h @ gate.T
    if s_u is not None:
        u, v = u * s_u, v * s_v * math.sqrt(h.shape[-1])
    return u * silu(v) @ down


def moe(x, router, bias, up, down, top_k, routed_scaling, s_u=None):
    """The routed experts on tokens x [n, d], one token and one expert at a time; s_u [E, ff]. -> (y [n, d], chosen [n, k])."""
    y, chosen = np.zeros_like(x), []
    for t, token in enumerate(x):
        s = 1 / (1 + np.exp(-(router @ token)))
        best = np.argsort(-(s + bias))[:top_k]
        for e in best:
            y[t] += routed_scaling * s[e] / s[best].sum() * mlp_relu2(token, up[e], down[e], None if s_u is None else s_u[e])
        chosen.append(best)
    return y, np.array(chosen)


def balance(x, router, bias, top_k):
    """The sequence-wise balance loss of x [B, T, d]: mean over sequences of sum_i f_i P_i."""
    losses = []
    for sequence in x:
        f, P = np.zeros(len(router)), np.zeros(len(router))
        for token in sequence:
            s = 1 / (1 + np.exp(-(router @ token)))
            f[np.argsort(-(s + bias))[:top_k]] += len(router) / (top_k * len(sequence))
            P += s / s.sum() / len(sequence)
        losses.append(f @ P)
    return np.mean(losses)


def dense_ngpt(tokens, E_in, layers, E_out, s_z, heads, kv_heads, theta):
    """Logits [T, V] of one sequence by the original nGPT's equations. A layer is (attention's arguments by name, alpha_A,
    SwiGLU's arguments by name, alpha_M)."""
    h = E_in[tokens]
    for attn, alpha_A, mlp, alpha_M in layers:
        h_A = norm(attention(h, heads=heads, kv_heads=kv_heads, theta=theta, rope_first=True, **attn))
        h = norm(h + alpha_A * (h_A - h))
        h = norm(h + alpha_M * (norm(mlp_swiglu(h, **mlp)) - h))
    return h @ E_out.T * s_z


# ---- state-space scan (section 3.2) ----------------------------------------------------------------------------------
def state_space_scan(x, dt, A, B, C, D=None, initial_state=None, documents=None):
    """S <- exp(dt A) S + dt x B^T,  y = S C + D x, for every row, head and token by itself; arrays as in nn/ssd.py."""
    x, dt, A, B, C = (np.asarray(v, dtype=np.float64) for v in (x, dt, A, B, C))
    (b, T, H, P), (G, N) = x.shape, B.shape[2:]
    y, final = np.zeros_like(x), np.zeros((b, H, P, N))
    for i in range(b):
        for head in range(H):
            g = head // (H // G)  # neighboring heads share a group
            S = np.zeros((P, N)) if initial_state is None else np.array(initial_state[i, head], dtype=np.float64)
            for t in range(T):
                if documents is not None and t > 0 and documents[i, t] != documents[i, t - 1]:
                    S = np.zeros((P, N))
                S = math.exp(dt[i, t, head] * A[head]) * S + dt[i, t, head] * np.outer(x[i, t, head], B[i, t, g])
                y[i, t, head] = S @ C[i, t, g] + (0.0 if D is None else float(D[head]) * x[i, t, head])
            final[i, head] = S
    return y, final


def mamba2(h, p, heads, groups, state, s_mamba=None, eps=1e-5, documents=None, scale_dt=True):
    """The Mamba-2 layer of section 3.2 for h [b, T, d]. ``p`` maps the names of its parameters to arrays. ``s_mamba`` (nGPT)
    multiplies the input (that of dt only with ``scale_dt``). Without it (GPT), the gated output is divided by its root mean
    square in each group and multiplied by norm_weight."""

    def silu(v):
        return v / (1 + np.exp(-v))

    b, T, _ = h.shape
    inner, BC, K = p["out_proj"].shape[0], groups * state, p["conv_weight"].shape[0]
    mixed = (h if s_mamba is None else h * s_mamba) @ p["in_proj"].T
    z, u, dt = mixed[..., :inner], mixed[..., inner : 2 * inner + 2 * BC], mixed[..., 2 * inner + 2 * BC :]
    if not scale_dt:
        dt = (h @ p["in_proj"].T)[..., 2 * inner + 2 * BC :]
    v = np.zeros_like(u)
    for i in range(b):
        for t in range(T):
            v[i, t] = p["conv_bias"]
            for back in range(K):  # the tap for the token ``back`` places ago
                if t >= back and (documents is None or documents[i, t - back] == documents[i, t]):
                    v[i, t] += p["conv_weight"][K - 1 - back] * u[i, t - back]
    v = silu(v)
    y, _ = state_space_scan(
        v[..., :inner].reshape(b, T, heads, -1),
        np.log1p(np.exp(dt + p["dt_bias"])),
        -np.exp(p["A_log"]),
        v[..., inner : inner + BC].reshape(b, T, groups, state),
        v[..., inner + BC :].reshape(b, T, groups, state),
        p["D"],
        documents=documents,
    )
    y = y.reshape(b, T, inner) * silu(z)
    if s_mamba is None:
        parts = y.reshape(b, T, groups, -1)
        parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + eps)
        y = parts.reshape(b, T, inner) * p["norm_weight"]
    return y @ p["out_proj"]
