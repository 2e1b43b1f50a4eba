"""What did our own runs find? The data and the drawings of chapter 9.

``evidence.json`` is made by benchmarks/evidence/analyse.py from the tables of all runs (benchmarks/evidence/results). This file
only draws.

    comparison   of GPT and nGPT with the same blocks, data, batches and tokens, each with its tuned numbers, on three seeds
    round        which numbers: 0 is A, tuned on the smallest dense model; 1 is B, with betas and warmup of the smallest hybrid
    share        the length of one of nGPT's schedules, in units of GPT's
    batch        tokens in a batch: 256 at the smallest size, 1,024 in the earlier study
"""

import numpy as np
import plotly.graph_objects as go

from ngpt_core.presets import preset
from ngpt_core.recipe import scaled

from ..data import stored
from ..theme import COLORS

DATA = stored("evidence")
GPT, NGPT = COLORS["red"], COLORS["blue"]
SEQUENCE = 128  # tokens
OLD = 8  # sequences in a batch of the first study
DENSE, HYBRID = "dense-0.2M", "hybrid-0.2M"


def _title(f: dict) -> str:
    return f"{f['model'].replace('-', ' ')}, {f['tokens'] / 1e6:.1f}M tokens, {'AB'[f['round']]}"


COMPARISONS = {_title(f): f for f in DATA["comparisons"] if (f["model"], f["sequences"]) != (DENSE, OLD)}
assert len(COMPARISONS) == sum((f["model"], f["sequences"]) != (DENSE, OLD) for f in DATA["comparisons"]), (
    "two comparisons of one name"
)
SEEDS = ["1", "2", "3", "mean"]
_LENGTHS = max((len(f["shorter"]) for f in COMPARISONS.values()), default=0)


def _pick(values: list[float], seed: str) -> float:
    return float(np.mean(values)) if seed == "mean" else values[int(seed) - 1]


# ---- the ratio of tokens ---------------------------------------------------------------------------------------------
def ratio(comparison: str, seed: str) -> dict:
    """nGPT's final losses by the length of their schedules, GPT's final loss, and where the two meet."""
    f = COMPARISONS[comparison]
    shares = sorted((float(share), _pick(losses, seed)) for share, losses in f["shorter"].items())
    shares += [(np.nan, np.nan)] * (_LENGTHS - len(shares))
    x, y = (np.array(column) * scale for column, scale in zip(zip(*shares), (f["tokens"] / 1e6, 1.0)))
    gpt = _pick(f["gpt"], seed)
    value = f["ratio"] if seed == "mean" else f["seeds"][int(seed) - 1]
    found = np.nan if value is None else value  # not reached
    meet = found * f["tokens"] / 1e6
    return {
        "x": x, "y": y, "gpt_x": np.array([f["tokens"] / 1e6]), "gpt_y": np.array([gpt]),
        "line_x": np.array([np.nanmin(x) * 0.9, f["tokens"] * 1.1 / 1e6]), "line_y": np.array([gpt, gpt]),
        "meet_x": np.array([meet, meet]), "meet_y": np.array([gpt, np.nanmin(y)]),
        "gpt": gpt, "ngpt": _pick(f["ngpt"], seed) if f["ngpt"] else np.nan, "ratio": found,
    }  # fmt: skip


def ratio_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    grey = {"color": COLORS["grey"], "width": 1.5, "dash": "dot"}
    figure.add_scatter(x=v["line_x"], y=v["line_y"], mode="lines", line=grey, showlegend=False, hoverinfo="skip")
    figure.add_scatter(x=v["meet_x"], y=v["meet_y"], mode="lines", line=grey, showlegend=False, hoverinfo="skip")
    figure.add_scatter(
        x=v["x"], y=v["y"], mode="lines+markers", name="nGPT, by length of schedule",
        line={"color": NGPT, "width": 2}, marker={"size": 9, "color": NGPT},
    )  # fmt: skip
    figure.add_scatter(
        x=v["gpt_x"], y=v["gpt_y"], mode="markers", name="GPT", marker={"size": 11, "color": GPT, "symbol": "square"}
    )
    ticks = "0.1 0.2 0.25 0.3 0.4 0.5 0.6 0.8 1 1.2 1.4 1.7 2 2.5 3 3.5 4 5 7 10".split()
    figure.update_xaxes(title="tokens of the schedule, millions", type="log", tickvals=[*map(float, ticks)], ticktext=ticks)
    figure.update_yaxes(title="final held-out loss, nats per byte")
    return figure


def short(name: str) -> str:
    """A short name of a comparison."""
    return name.replace(" tokens", "")


def ratios_figure() -> go.Figure:
    """The token ratio of every comparison with its 95% interval; if a seed does not reach GPT, only the seeds."""
    names, figure = list(COMPARISONS)[::-1], go.Figure()
    decided = [name for name in names if COMPARISONS[name]["ratio"]]
    seeds = [(ratio, name) for name in names for ratio in COMPARISONS[name]["seeds"] if ratio]
    behind = [name for name in names for ratio in COMPARISONS[name]["seeds"] if not ratio]
    figure.add_scatter(
        x=[r for r, _ in seeds], y=[short(n) for _, n in seeds], mode="markers", name="a seed",
        marker={"symbol": "line-ns-open", "size": 10, "color": COLORS["grey"]},
    )  # fmt: skip
    figure.add_scatter(
        x=[COMPARISONS[n]["ratio"] for n in decided], y=[short(n) for n in decided], mode="markers", name="mean, 95%",
        marker={"size": 10, "color": NGPT}, error_x=_bars([COMPARISONS[n] for n in decided], "ratio"),
    )  # fmt: skip
    figure.add_scatter(
        x=[1.4] * len(behind), y=[short(n) for n in behind], mode="markers", name="a seed that does not reach GPT",
        marker={"symbol": "triangle-right", "size": 10, "color": COLORS["grey"]},
        hovertemplate="does not reach GPT<extra></extra>",
    )  # fmt: skip
    for x, color, words in ((1.0, GPT, "as many as GPT"), (0.5, COLORS["grey"], "half")):
        line = {"color": color, "width": 1, "dash": "dot"}
        figure.add_vline(x=x, line=line, annotation_text=words, annotation_position="top")
    figure.update_xaxes(title="← better &nbsp; token ratio", range=[0.4, 1.45], tickvals=[0.4, 0.6, 0.8, 1.0, 1.2, 1.4])
    figure.update_yaxes(categoryorder="array", categoryarray=[short(n) for n in names])
    figure.update_layout(height=180 + 30 * len(names), margin={"l": 150, "t": 28})
    return figure


# ---- the map ---------------------------------------------------------------------------------------------------------
OVER = {"tokens per parameter": "tokens_per_parameter", "parameters": "active", "context": "context"}
_COLORS = {"0.2M": COLORS["teal"], "0.5M": COLORS["gold"], "1M": NGPT, "3M": COLORS["magenta"]}
_TICKS = {2.5: "2.5", 5: "5", 10: "10", 20: "20", 40: "40", 128: "128", 512: "512", 1024: "1,024", 2048: "2,048",
          2e5: "0.2M", 5e5: "0.5M", 1e6: "1M", 3e6: "3M"}  # fmt: skip


def _points() -> list[dict]:
    """Every comparison that has a ratio: of the first round with A or B, and of the second round."""
    first = [{**f, "numbers": "AB"[f["round"]], "context": SEQUENCE} for f in COMPARISONS.values()]
    second = [{**f, "numbers": "second round"} for f in DATA["second"]["comparisons"]]
    return [f for f in (*first, *second) if f["ratio"] or _below(f)]


def _below(f: dict) -> float | None:
    """The shortest schedule of a comparison, as a share, if nGPT is ahead with that already."""
    bound = f.get("bound") or ""
    return float(bound[2:]) if bound.startswith("< ") else None


NUMBERS = tuple(dict.fromkeys(f["numbers"] for f in sorted(_points(), key=lambda f: len(f["numbers"]))))
CONTEXTS = sorted({f["context"] for f in _points()})
SIZES = {size: color for size, color in _COLORS.items() if any(f["model"].endswith(f"-{size}") for f in _points())}
_MOST = 6  # comparisons of one size


def mapped(over: str, kind: str, numbers: str) -> dict:
    """The ratios of one kind of model, with their intervals (nan: open), for each size over one field of the comparisons."""
    found, v = [f for f in _points() if f["model"].startswith(kind) and f["numbers"] == numbers], {}
    for size in SIZES:
        mine = sorted((f for f in found if f["model"].endswith(f"-{size}")), key=lambda f: (f[OVER[over]], f["tokens"]))
        assert len(mine) <= _MOST, "more comparisons of a size than the map has places for"
        x, y, below = (np.full(_MOST, np.nan) for _ in range(3))
        ends, at = (np.full(3 * _MOST, np.nan) for _ in range(2))
        for i, f in enumerate(mine):
            beside = sum(f[OVER[over]] == g[OVER[over]] for g in mine[:i])  # comparisons at one place stand side by side
            x[i], y[i] = f[OVER[over]] * 1.05**beside, f["ratio"] or _below(f)
            below[i] = np.nan if f["ratio"] else y[i] - 0.03
            at[3 * i : 3 * i + 2] = x[i]
            ends[3 * i : 3 * i + 2] = [y[i] if e is None else e for e in (f["low"], f["high"])]
        v |= {f"x{size}": x, f"y{size}": y, f"below{size}": below, f"at{size}": at, f"ends{size}": ends}
    least = min((f["ratio"] or _below(f) for f in found), default=np.nan)
    return {**v, "n": len(found), "least": least}


def map_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    for size, color in SIZES.items():
        interval = {"color": color, "width": 1.5}
        figure.add_scatter(
            x=v[f"at{size}"], y=v[f"ends{size}"], mode="lines", line=interval, showlegend=False, hoverinfo="skip"
        )
        figure.add_scatter(
            x=v[f"x{size}"], y=v[f"y{size}"], mode="lines+markers", name=f"{size} parameters",
            line={"color": color, "width": 1, "dash": "dot"}, marker={"size": 10, "color": color},
        )  # fmt: skip
        figure.add_scatter(
            x=v[f"x{size}"], y=v[f"below{size}"], mode="markers", showlegend=False, hoverinfo="skip",
            marker={"size": 10, "color": color, "symbol": "triangle-down"},
        )  # fmt: skip
    for y, words in ((1.0, "as many tokens as GPT"), (0.5, "half: the paper's figure for 30B")):
        line = {"color": COLORS["grey"], "width": 1, "dash": "dot"}
        figure.add_hline(y=y, line=line, annotation_text=words, annotation_position="top right")
    figure.update_xaxes(title="{over}", type="log", tickvals=list(_TICKS), ticktext=list(_TICKS.values()))
    figure.update_yaxes(title="token ratio (lower is better)", range=[0.4, 1.15])
    return figure


def second_table() -> list[str]:
    """The comparisons of the second round, as lines."""
    lines = [f"{'':22s}   GPT  nGPT  token ratio"]
    for f in DATA["second"]["comparisons"]:
        low, high = ("..." if x is None else f"{x:.2f}" for x in (f["low"], f["high"]))
        name = f"{f['model']} {f['tokens'] / 1e6:.1f}M, {f['context']}"
        lines.append(f"{name:22s} {f['gpt']:.3f} {f['ngpt']:.3f} {f['bound'] or format(f['ratio'], '.2f')} ({low}-{high})")
    return lines


# ---- what more context brings ----------------------------------------------------------------------------------------
LONGER = {str(f["context"]): f for f in DATA["second"]["comparisons"] if f["group"].startswith("context-")}
"""Context -> its comparison in the second round: one model, one number of tokens."""
_OCTAVES = 8  # of a window of 2,048


def places(context: str) -> dict:
    """The loss of both sides by the place in the window: how much is gained from what lies further back."""
    found = LONGER[context]["places"]
    ends = [end for end, _ in found["gpt"]]
    pad = [np.nan] * (_OCTAVES - len(ends))
    gpt, ngpt = ([loss for _, loss in found[side]] for side in ("gpt", "ngpt"))
    x = [(start * end) ** 0.5 if start else end / 2 for start, end in zip([0, *ends], ends)]
    last = {"first": gpt[0] - ngpt[0], "lead": gpt[-1] - ngpt[-1]}
    return {"x": np.array(x + pad), "gpt": np.array(gpt + pad), "ngpt": np.array(ngpt + pad), **last}


def places_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    for key, name, color, symbol in (("gpt", "GPT", GPT, "square"), ("ngpt", "nGPT", NGPT, "circle")):
        figure.add_scatter(
            x=v["x"], y=v[key], mode="lines+markers", name=name, line={"color": color, "width": 2.5},
            marker={"size": 8, "color": color, "symbol": symbol},
        )  # fmt: skip
    ticks = [2**k for k in range(4, 12)]
    figure.update_xaxes(title="place in the window, bytes", type="log", tickvals=ticks, ticktext=[f"{t:,}" for t in ticks])
    figure.update_yaxes(title="held-out loss, nats per byte")
    return figure.update_layout(height=360)


# ---- curves ----------------------------------------------------------------------------------------------------------
def curves_figure(comparison: str) -> go.Figure:
    """Training loss over tokens, three seeds per side; each point is the mean of one fortieth of the run."""
    f, figure = COMPARISONS[comparison], go.Figure()
    for name, color in (("GPT", GPT), ("nGPT", NGPT)):
        for i, curve in enumerate(f["curves"][name.lower()]):
            x = (np.arange(len(curve)) + 0.5) / len(curve) * f["tokens"] / 1e6
            line = {"color": color, "width": 1.5}
            figure.add_scatter(x=x, y=curve, mode="lines", line=line, name=name, showlegend=i == 0, legendgroup=name)
    least = min(min(curve) for curves in f["curves"].values() for curve in curves)
    figure.update_xaxes(title="tokens, millions")
    figure.update_yaxes(title="training loss, nats per byte", range=[min(1.2, 0.95 * least), 2.6])
    return figure


# ---- tuning ----------------------------------------------------------------------------------------------------------
def _words(recipe: dict) -> str:
    return ", ".join(f"{key} = {value}" for key, value in recipe.items())


def tuning_figure() -> go.Figure:
    """Every trial of both sides in order, and the best so far."""
    figure = go.Figure()
    for name, color, symbol in (("GPT", GPT, "square"), ("nGPT", NGPT, "circle")):
        trials = DATA["tuning"][name.lower()]["trials"]
        losses = np.array([np.nan if t["loss"] is None else t["loss"] for t in trials])
        x, best = np.arange(1, len(trials) + 1), np.fmin.accumulate(losses)
        figure.add_scatter(
            x=x, y=losses, mode="markers", name=f"{name}, a trial", marker={"color": color, "symbol": symbol, "size": 8},
            text=[_words(t["recipe"]) for t in trials], hovertemplate="%{text}: %{y:.3f}<extra></extra>",
        )  # fmt: skip
        line = {"color": color, "width": 2, "shape": "hv"}
        figure.add_scatter(x=x, y=best, mode="lines", name=f"{name}, the best so far", line=line)
    figure.update_xaxes(title="trial")
    figure.update_yaxes(title="final held-out loss, nats per byte")
    return figure


# ---- ablations -------------------------------------------------------------------------------------------------------
KINDS = {"hybrid": ("hybrid", "circle", 9), "dense": ("dense (click)", "diamond-open", 8)}  # name, symbol, size


def _verdict(a: dict) -> str:
    """The color of a change: significantly worse than the recipe, significantly better, or undecided."""
    return COLORS["red"] if a["low"] > 0 else NGPT if a["high"] < 0 else COLORS["grey"]


def _bars(rows: list[dict], middle: str) -> dict:
    """Plotly's error bars from ``low`` and ``high``."""
    return {
        "type": "data", "symmetric": False, "thickness": 1.5, "color": COLORS["grey"],
        "array": [a["high"] - a[middle] for a in rows], "arrayminus": [a[middle] - a["low"] for a in rows],
    }  # fmt: skip


def ablations_figure() -> go.Figure:
    """What each change costs (right of zero) or gains (left), with its 95% interval over three seeds."""
    found = {kind: {a["name"]: a for a in DATA["ablations"][kind] if "difference" in a} for kind in KINDS}
    names = sorted(found["hybrid"], key=lambda name: found["hybrid"][name]["difference"])
    figure = go.Figure()
    for kind, (label, symbol, size) in KINDS.items():
        rows = [found[kind][name] for name in names if name in found[kind]]
        figure.add_scatter(
            x=[a["difference"] for a in rows], y=[a["name"] for a in rows], mode="markers", error_x=_bars(rows, "difference"),
            marker={"size": size, "symbol": symbol, "color": [_verdict(a) for a in rows]}, name=label,
        )  # fmt: skip
    figure.data[1].visible = "legendonly"  # the dense model's intervals are wide
    figure.add_vline(x=0, line={"color": COLORS["grey"], "width": 1, "dash": "dot"})
    figure.update_xaxes(title="change of the loss (right: worse)")
    figure.update_yaxes(categoryorder="array", categoryarray=names)
    figure.update_layout(height=130 + 24 * len(names), margin={"l": 150, "t": 12})
    return figure


# ---- blocks ----------------------------------------------------------------------------------------------------------
BLOCKS = {number: [b for b in DATA["blocks"] if b["round"] == number] for number in (0, 1)}


def blocks(seed: str, tokens: str) -> dict:
    """What each block is worth: how much the held-out loss rises without it."""
    steps = {f"{f['tokens'] / 1e6:.1f}M": f["steps"] for f in COMPARISONS.values() if f["model"] == DENSE}[tokens]
    found = {b["side"]: b for b in BLOCKS[0] if (b["model"], b["seed"], b["steps"]) == (DENSE, int(seed), steps)}
    return {
        "gpt": np.array(found["gpt"]["costs"]), "ngpt": np.array(found["ngpt"]["costs"]),
        "gpt_loss": found["gpt"]["val_loss"], "ngpt_loss": found["ngpt"]["val_loss"],
    }  # fmt: skip


def blocks_figure(v: dict) -> go.Figure:
    names = [f"{kind} {i + 1}" for i in range(len(v["gpt"]) // 2) for kind in ("attention", "MLP")]
    figure = go.Figure()
    figure.add_bar(x=names, y=v["gpt"], name="GPT", marker={"color": GPT})
    figure.add_bar(x=names, y=v["ngpt"], name="nGPT", marker={"color": NGPT})
    figure.update_yaxes(title="rise of the loss without it", range=[0, 3])
    figure.update_layout(height=380, margin={"t": 12}, barmode="group")
    return figure


# ---- the length of the run -------------------------------------------------------------------------------------------
KNOBS = ("β₁", "β₂", "C", "cap")


def _knobs(recipe: dict) -> dict[str, float]:
    """The four numbers of a run: the hybrid's recipe with this change."""
    numbers = {"cap_degrees": 1.0, **DATA["hybrid"], **recipe}
    beta1, beta2 = map(float, numbers["betas"].split(","))
    return {"β₁": beta1, "β₂": beta2, "C": numbers["C"], "cap": numbers["cap_degrees"]}


def length_table(steps: int, knob: str) -> dict[float, float]:
    """Value of a knob -> final loss of the runs of this length with no other change."""
    own, found = _knobs({}), {}
    for r in DATA["lengths"]:
        mine = _knobs(r["change"])
        same = all(mine[k] == own[k] for k in KNOBS if k != knob) and "warmup" not in r["change"]
        if r["steps"] == steps and same and r["loss"] is not None:
            found[mine[knob]] = r["loss"]
    return dict(sorted(found.items()))


LENGTHS = [n for n in sorted({r["steps"] for r in DATA["lengths"]}) if all(len(length_table(n, k)) > 1 for k in KNOBS)]


def length(knob: str, steps: int) -> dict:
    """Final loss as one knob changes, with the recipe's values for the others."""
    found = length_table(int(steps), knob)
    pad = [np.nan] * (6 - len(found))
    losses = np.array([*found.values(), *pad])
    return {"x": np.array([*found, *pad]), "y": losses, "best": min(found, key=found.get), "least": float(np.nanmin(losses))}


def length_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(
        x=v["x"], y=v["y"], mode="lines+markers", line={"color": NGPT, "width": 2}, marker={"size": 9, "color": NGPT}
    )
    figure.update_xaxes(title="{knob}")
    figure.update_yaxes(title="final held-out loss, nats per byte")
    figure.update_layout(height=340, margin={"t": 12})
    return figure


# ---- the rule --------------------------------------------------------------------------------------------------------
WIDTHS = {"dense-0.2M": 64, "dense-0.5M": 96, "dense-1M": 128, "hybrid-0.2M": 64, "hybrid-0.5M": 104, "hybrid-1M": 136}


def rule(width: int, steps: np.ndarray) -> list[float]:
    """recipe.scaled's C for a width, over the length of the run."""
    config = preset("pico", d_model=width)
    return [scaled(config, round(T)).C for T in steps]


def peaks_figure() -> go.Figure:
    """The best C over the length of the run, and recipe.scaled's. A triangle: the best is the largest one tried."""
    figure, steps = go.Figure(), np.geomspace(200, 20_000, 60)
    for width, dash in ((64, "solid"), (136, "dash")):
        figure.add_scatter(
            x=steps, y=rule(width, steps), mode="lines", name=f"the rule, d = {width}",
            line={"color": COLORS["grey"], "width": 1.5, "dash": dash},
        )  # fmt: skip
    for kind, color in (("hybrid", NGPT), ("dense", COLORS["gold"])):
        mine = [p for p in DATA["peaks"] if p["side"] == "ngpt" and p["model"].startswith(kind)]
        mine.sort(key=lambda p: p["best"] is None)  # a circle first: the legend shows the first
        betas = [p["others"]["betas"] for p in mine]
        words = [f"{p['model']} (d = {WIDTHS[p['model']]}), β {b}, seed {p['seed']}" for p, b in zip(mine, betas)]
        figure.add_scatter(
            x=[p["steps"] for p in mine], y=[p["best"] or max(p["tried"]) for p in mine], mode="markers", name=kind,
            marker={"size": 10, "color": color, "symbol": ["circle" if p["best"] else "triangle-up" for p in mine]},
            text=words, hovertemplate="%{text}: %{y:.3f}<extra></extra>",
        )  # fmt: skip
    axes = ("x", "steps", "250 500 1000 2000 4000 8000 16000"), ("y", "best C", "0.06 0.08 0.12 0.16 0.24")
    for axis, title, ticks in axes:
        marks = {"tickvals": [*map(float, ticks.split())], "ticktext": ticks.split()}
        figure.update_layout({f"{axis}axis": {"title": title, "type": "log", **marks}})
    return figure
