"""What does the paper's scaling table say, and what does it not say? The data and the drawings of chapter 10.

``TABLE`` is the paper's table of losses (section 4.2, tab. gpt_ngpt_gatedadam_losses) with the active parameters of section
4.1, as printed. It is data, and cited; everything else here is computed from it. Tokens, C and GPT's rates: ``presets.py``.

    rung   one model size of the ladder, trained as GPT and as nGPT on the same number of tokens
    E A p  L(x) = E + A x^-p, a power law above an irreducible loss E, fitted along the ladder
    share  the part of the gain per doubling along the ladder that more tokens alone would bring, at a fixed size
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ngpt_core.presets import preset

from ..theme import COLORS


class Losses(NamedTuple):
    """One pair of the paper's table, in nats per token."""

    gpt: float
    ngpt: float
    diff: float
    """As printed."""
    percent: float
    """As printed: the gain as a share of GPT's loss."""


class Rung(NamedTuple):
    """One line of the paper's table."""

    total: float
    """Billions of parameters: the model's label."""
    active: float
    """Billions of parameters that one token uses, input embeddings excluded."""
    training: Losses
    validation: Losses


TABLE = {
    "1B": Rung(1, 0.21, Losses(2.0561, 1.9946, 0.0615, 2.99), Losses(1.6435, 1.5881, 0.0554, 3.37)),
    "2B": Rung(2, 0.37, Losses(1.9053, 1.8648, 0.0405, 2.13), Losses(1.5230, 1.4829, 0.0401, 2.63)),
    "4B": Rung(4, 0.61, Losses(1.7994, 1.7573, 0.0421, 2.34), Losses(1.4330, 1.3928, 0.0402, 2.81)),
    "7B": Rung(7, 0.91, Losses(1.7251, 1.6849, 0.0402, 2.33), Losses(1.3680, 1.3310, 0.0370, 2.70)),
    "14B": Rung(14, 1.74, Losses(1.6207, 1.5772, 0.0435, 2.69), Losses(1.2827, 1.2489, 0.0338, 2.63)),
    "30B": Rung(30, 3.23, Losses(1.5260, 1.4682, 0.0577, 3.78), Losses(1.2113, 1.1754, 0.0359, 2.97)),
}
RUNGS = list(TABLE)
TOKENS = np.array([preset(name).tokens / 1e9 for name in RUNGS])
ACTIVE = np.array([rung.active for rung in TABLE.values()])
TOTAL = np.array([rung.total for rung in TABLE.values()], dtype=float)
X = {
    "tokens (10⁹)": TOKENS,
    "active parameters (10⁹)": ACTIVE,
    "total parameters (10⁹)": TOTAL,
    "tokens × active (10¹⁸)": TOKENS * ACTIVE,
}
SPLITS = ["training", "validation"]


def losses(split: str) -> tuple[np.ndarray, np.ndarray]:
    """The columns of GPT and nGPT, for "training" or "validation"."""
    rows = [getattr(rung, split) for rung in TABLE.values()]
    return np.array([row.gpt for row in rows]), np.array([row.ngpt for row in rows])


# ---- fits --------------------------------------------------------------------------------------------------------------

EXPONENTS = np.arange(0.005, 2.0, 0.0005)  # the p that are tried
F_95 = 10.13  # 95% point of F(1, 3): one parameter fixed, 6 points - 3 parameters left


class Fit(NamedTuple):
    """loss = E + A x^(-p), and how well it fits."""

    E: float
    A: float
    p: float
    rms: float
    """The root mean square of the residuals."""

    def __call__(self, x):
        return self.E + self.A * np.asarray(x) ** -self.p


def fit(x: np.ndarray, loss: np.ndarray, E: float | None = None) -> Fit:
    """Least squares for loss = E + A x^-p: linear for a given p, so all are tried.

    With ``E`` given, only A and p are free. A free E stops at zero, as does a loss.
    """
    powers = x ** -EXPONENTS[:, None]  # [n_p, rungs]
    if E is None:
        centered = powers - powers.mean(1, keepdims=True)
        A = (centered @ (loss - loss.mean())) / (centered**2).sum(1)
        offset = loss.mean() - A * powers.mean(1)
    else:
        A = (powers @ (loss - E)) / (powers**2).sum(1)
        offset = np.full(len(EXPONENTS), E)
    residuals = loss - offset[:, None] - A[:, None] * powers
    rms = np.sqrt((residuals**2).mean(1))
    best = int(rms.argmin())
    if E is None and offset[best] < 0:
        return fit(x, loss, E=0.0)
    return Fit(*(float(each[best]) for each in (offset, A, EXPONENTS, rms)))


def profile(x: np.ndarray, loss: np.ndarray, E: np.ndarray) -> np.ndarray:
    """The residual (rms) of the best A and p at each E: how much the data mind."""
    return np.array([fit(x, loss, e).rms for e in E])


def interval(x: np.ndarray, loss: np.ndarray) -> tuple[float, float]:
    """All E >= 0 that the 95% F-test keeps, assuming independent residuals of equal size: only a rough scale."""
    E = np.linspace(0, loss.min() - 0.01, 400)
    kept = E[profile(x, loss, E) ** 2 <= fit(x, loss).rms ** 2 * (1 + F_95 / 3)]
    return float(kept.min()), float(kept.max())


# ---- positions on the ladder -------------------------------------------------------------------------------------------


def position(loss: float, ladder: np.ndarray) -> float:
    """The rung, from 0 and with a fraction, where falling losses reach ``loss``."""
    if not ladder[-1] <= loss <= ladder[0]:
        raise ValueError(f"{loss} is not between the losses of the ladder, {ladder}.")
    return float(np.interp(loss, ladder[::-1], np.arange(len(ladder))[::-1]))


def at(position: float, x: np.ndarray) -> float:
    """x at a fractional rung: linear in log x between two rungs."""
    return math.exp(np.interp(position, np.arange(len(x)), np.log(x)))


def reached(loss: float, x: np.ndarray, ladder: np.ndarray) -> float:
    """x where the losses of a ladder reach ``loss``."""
    return at(position(loss, ladder), x)


def slope(ladder: np.ndarray) -> np.ndarray:
    """What nGPT or GPT gains per doubling of tokens (and size) between two neighboring rungs."""
    return -np.diff(ladder) / np.diff(np.log2(TOKENS))


# ---- drawings ----------------------------------------------------------------------------------------------------------

GPT, NGPT = COLORS["red"], COLORS["blue"]


TICKS = {"tickvals": [m * 10**k for k in (-1, 0, 1, 2, 3) for m in (1, 2, 5)], "exponentformat": "none"}  # for logarithms


def _marks(color: str, symbol: str = "circle") -> dict:
    return {"color": color, "size": 9, "symbol": symbol}


def _thin(color: str, dash: str = "solid") -> dict:
    return {"color": color, "width": 2, "dash": dash}


def scaling(split: str, x: str, overhead: float) -> dict:
    """The table as a picture: both losses over x, each with its fit, and the gap in percent of GPT's loss."""
    gpt, ngpt = losses(split)
    moved = X[x] * (1 + overhead / 100)  # the same loss, paid for with more time
    fit_gpt, fit_ngpt = fit(X[x], gpt), fit(moved, ngpt)
    curve = np.geomspace(0.8 * X[x][0], 1.5 * X[x][-1], 60)
    return {
        "x_gpt": X[x], "x_ngpt": moved, "gpt": gpt, "ngpt": ngpt,
        "curve": curve, "fit_gpt": fit_gpt(curve), "fit_ngpt": fit_ngpt(curve),
        "gap": 100 * (gpt - ngpt) / gpt,
        "E_gpt": fit_gpt.E, "p_gpt": fit_gpt.p, "E_ngpt": fit_ngpt.E, "p_ngpt": fit_ngpt.p,
    }  # fmt: skip


def scaling_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.2, row_heights=[0.68, 0.32])
    for name, color, symbol in (("GPT", GPT, "square"), ("nGPT", NGPT, "circle")):
        key = name.lower()
        figure.add_scatter(
            x=v[f"x_{key}"], y=v[key], name=name, mode="markers", marker=_marks(color, symbol), text=RUNGS, row=1, col=1,
            hovertemplate=f"{name} %{{text}}: %{{y:.4f}}<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=v["curve"], y=v[f"fit_{key}"], mode="lines", line=_thin(color), showlegend=False, hoverinfo="skip", row=1, col=1
        )
    label = "%{x}: %{y:.2f}%<extra></extra>"
    figure.add_bar(x=RUNGS, y=v["gap"], marker_color=NGPT, showlegend=False, hovertemplate=label, row=2, col=1)
    figure.update_xaxes(type="log", **TICKS, title="{x}", row=1, col=1)
    figure.update_yaxes(title="{split} loss", row=1, col=1)
    figure.update_yaxes(title="gap, %", range=[0, 4.2], row=2, col=1)
    figure.update_layout(height=500)
    return figure


def rungs_figure() -> go.Figure:
    """The validation column of the table, with the gap of each rung in percent of GPT's loss."""
    figure, (gpt, ngpt) = go.Figure(), losses("validation")
    for name, loss, color, symbol in (("GPT", gpt, GPT, "square"), ("nGPT", ngpt, NGPT, "circle")):
        look = {"mode": "lines+markers", "line": _thin(color), "marker": _marks(color, symbol)}
        figure.add_scatter(x=RUNGS, y=loss, name=name, **look)
    for i, rung in enumerate(TABLE.values()):
        gap = {"text": f"−{rung.validation.percent:.1f}%", "font": {"color": NGPT, "size": 13}}
        figure.add_annotation(x=i, y=gpt[i], xshift=8, yshift=16, showarrow=False, **gap)
    figure.update_xaxes(title="total parameters", range=[-0.4, 5.6])
    figure.update_yaxes(title="validation loss", range=[1.08, 1.7])
    figure.update_layout(height=360)
    return figure


E_GRID, FAR = np.linspace(0, 1.15, 47), np.geomspace(80, 8000, 60)


@cache
def _profiles(split: str, left_out: str) -> tuple[np.ndarray, np.ndarray]:
    keep = np.array([name != left_out for name in RUNGS])
    gpt, ngpt = (1e3 * profile(TOKENS[keep], loss[keep], E_GRID) for loss in losses(split))
    return gpt, ngpt


def irreducible(split: str, left_out: str, E: float) -> dict:
    """Both ladders with E chosen by hand: log(L - E) over log tokens, and how much the residual depends on E."""
    keep = np.array([name != left_out for name in RUNGS])
    out = {"x": np.where(keep, TOKENS, np.nan), "E": E}
    for key, loss, residuals in zip(("gpt", "ngpt"), losses(split), _profiles(split, left_out)):
        law = fit(TOKENS[keep], loss[keep], E)
        out |= {
            key: np.where(keep, loss - E, np.nan),
            f"fit_{key}": law(FAR) - E,
            f"profile_{key}": residuals,
            f"here_{key}": np.array([E, 1e3 * law.rms]),
            f"p_{key}": law.p,
            f"far_{key}": law(4000),
            f"rms_{key}": 1e3 * law.rms,
        }
    return out


def irreducible_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.2, row_heights=[0.6, 0.4])
    for name, color, symbol in (("GPT", GPT, "square"), ("nGPT", NGPT, "circle")):
        key = name.lower()
        figure.add_scatter(
            x=v["x"], y=v[key], name=name, mode="markers", marker=_marks(color, symbol), text=RUNGS, row=1, col=1,
            hovertemplate=f"{name} %{{text}}: %{{y:.4f}} above E<extra></extra>",
        )  # fmt: skip
        still = {"showlegend": False, "hoverinfo": "skip"}
        figure.add_scatter(x=FAR, y=v[f"fit_{key}"], mode="lines", line=_thin(color), **still, row=1, col=1)
        figure.add_scatter(x=E_GRID, y=v[f"profile_{key}"], mode="lines", line=_thin(color), **still, row=2, col=1)
        here = v[f"here_{key}"]
        figure.add_scatter(x=here[:1], y=here[1:], mode="markers", marker=_marks(color, symbol), **still, row=2, col=1)
    figure.update_xaxes(type="log", **TICKS, title="tokens (10⁹)", row=1, col=1)
    figure.update_xaxes(title="irreducible loss E", range=[0, 1.17], row=2, col=1)
    figure.update_yaxes(type="log", **TICKS, title="L − E", row=1, col=1)
    figure.update_yaxes(title="residual × 10³", range=[0, 24], row=2, col=1)
    figure.update_layout(height=540)
    return figure


def matching(split: str, rung: str, overhead: float) -> dict:
    """Where along nGPT's ladder is the loss of a GPT rung reached?"""
    gpt, ngpt = losses(split)
    i = RUNGS.index(rung)
    tokens, active = (reached(gpt[i], x, ngpt) / x[i] for x in (TOKENS, ACTIVE))
    return {
        "gpt": gpt, "ngpt": ngpt,
        "bridge_x": np.array([TOKENS[i], TOKENS[i] * tokens]), "bridge_y": np.array([gpt[i], gpt[i]]),
        "tokens": tokens, "active": active, "compute": tokens * active * (1 + overhead / 100),
        "shifted": np.array([TOKENS[i] * tokens * (1 + overhead / 100)]), "level": np.array([gpt[i]]),
        "needed": TOKENS[i] * tokens, "size": ACTIVE[i] * active, "loss": gpt[i],
    }  # fmt: skip


def matching_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    for name, color, symbol in (("GPT", GPT, "square"), ("nGPT", NGPT, "circle")):
        figure.add_scatter(
            x=TOKENS, y=v[name.lower()], name=name, mode="lines+markers", line=_thin(color), marker=_marks(color, symbol),
            text=RUNGS, hovertemplate=f"{name} %{{text}}: %{{y:.4f}}<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=v["bridge_x"], y=v["bridge_y"], name="the same loss", mode="lines+markers", line=_thin(COLORS["gold"]),
        marker={"color": COLORS["gold"], "size": 12, "symbol": ["square-open", "circle-open"], "line": {"width": 3}},
    )  # fmt: skip
    figure.add_scatter(
        x=v["shifted"], y=v["level"], name="with the extra time", mode="markers",
        marker={"color": COLORS["magenta"], "size": 8, "symbol": "diamond"},
    )  # fmt: skip
    figure.update_xaxes(type="log", **TICKS, title="tokens (10⁹)")
    figure.update_yaxes(title="{split} loss")
    return figure


SHARES = np.linspace(0.2, 1.0, 41)


def fixed_size(split: str, share: float, overhead: float) -> dict:
    """The tokens that nGPT 30B would need for GPT 30B's loss, if more tokens alone brought ``share`` of the ladder's gain."""
    gpt, ngpt = losses(split)
    doublings = (gpt[-1] - ngpt[-1]) / slope(ngpt)[-1]  # of the ladder, tokens and size together
    more = 1 + overhead / 100
    return {
        "curve": 2 ** (-doublings / SHARES) * more,
        "here": np.array([share, 2 ** (-doublings / share) * more]),
        "ratio": 2 ** (-doublings / share),
        "time": 2 ** (-doublings / share) * more,
        "needed": doublings / (1 + math.log2(more)),
        "gap": gpt[-1] - ngpt[-1],
        "slope": slope(ngpt)[-1],
    }


def fixed_size_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    half = [0.5] * len(SHARES)
    label = "%{x:.2f}: %{y:.2f}<extra></extra>"
    figure.add_scatter(x=SHARES, y=half, name="half", mode="lines", line=_thin(COLORS["grey"], "dash"), hoverinfo="skip")
    figure.add_scatter(x=SHARES, y=v["curve"], name="nGPT over GPT", mode="lines", line=_thin(NGPT), hovertemplate=label)
    here = {"mode": "markers", "marker": _marks(NGPT), "showlegend": False, "hovertemplate": label}
    figure.add_scatter(x=v["here"][:1], y=v["here"][1:], **here)
    figure.update_xaxes(title="w, the share that tokens alone bring", range=[0.18, 1.02])
    figure.update_yaxes(title="nGPT's tokens (or time) / GPT's", range=[0, 1])
    figure.update_layout(height=360)
    return figure


GATED = RUNGS[:4]  # the sizes of the paper's figure a = 0.5 against a = 1


def gate_gain(saved: float, share: float) -> dict:
    """``saved`` percent fewer tokens as a difference in validation loss, next to the whole gap GPT - nGPT."""
    gpt, ngpt = losses("validation")
    gain = share * slope(ngpt)[:4] * -math.log2(1 - saved / 100)
    whole = (gpt - ngpt)[:4]
    return {"gain": gain, "whole": whole, "small": 100 * (gain / whole).min(), "large": 100 * (gain / whole).max()}


def gate_gain_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    label = "%{x}: %{y:.4f}<extra></extra>"
    figure.add_bar(x=GATED, y=v["whole"], name="GPT − nGPT (published)", marker_color=COLORS["grey"], hovertemplate=label)
    figure.add_bar(x=GATED, y=v["gain"], name="a = 0.5 against a = 1 (implied)", marker_color=NGPT, hovertemplate=label)
    figure.update_yaxes(title="difference in loss", range=[0, 0.085])
    figure.update_layout(height=340, barmode="group")
    return figure


def rates(width: int, rule: str) -> dict:
    """Peak learning rates: nGPT's C / sqrt(d_model) for a d_model of the 30B model, and GPT's."""
    configs = [preset(name) for name in RUNGS]
    d = np.array([*[c.d_model for c in configs[:-1]], width], dtype=float)
    C = np.array([c.C for c in configs]) if rule == "the paper's C" else np.full(len(d), 0.24)
    ngpt, gpt = C / np.sqrt(d), np.array([c.gpt_lr for c in configs])
    return {
        "d": d, "C": C, "ngpt": ngpt, "gpt": gpt,
        "last": 1e3 * ngpt[-1], "fell": ngpt[0] / ngpt[-1], "by_C": C[0] / C[-1], "by_d": math.sqrt(d[-1] / d[0]),
        "gpt_fell": gpt[0] / gpt[-1], "degrees": math.degrees(C[-1]),
    }  # fmt: skip


def rates_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.2, row_heights=[0.6, 0.4])
    for name, key, color, symbol in (("GPT", "gpt", GPT, "square"), ("nGPT, C/√d", "ngpt", NGPT, "circle")):
        figure.add_scatter(
            x=ACTIVE, y=v[key], name=name, mode="lines+markers", line=_thin(color), marker=_marks(color, symbol), text=RUNGS,
            hovertemplate=f"{name}, %{{text}}: %{{y:.2e}}<extra></extra>", row=1, col=1,
        )  # fmt: skip
    figure.add_scatter(
        x=v["d"], y=v["C"], name="C", mode="lines+markers+text", text=RUNGS, textposition="bottom left",
        line=_thin(COLORS["teal"]), marker=_marks(COLORS["teal"]), showlegend=False,
        hovertemplate="%{text}: C = %{y:.2f}<extra></extra>", row=2, col=1,
    )  # fmt: skip
    figure.update_xaxes(title="d<sub>model</sub>", range=[600, 2800], row=2, col=1)
    figure.update_xaxes(type="log", **TICKS, title="active parameters (10⁹)", row=1, col=1)
    figure.update_yaxes(title="C", range=[0, 0.29], row=2, col=1)
    figure.update_yaxes(type="log", title="peak learning rate", tickvals=[1e-3, 2e-3, 5e-3, 1e-2], row=1, col=1)
    figure.update_layout(height=540)
    return figure
