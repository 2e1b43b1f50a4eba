"""What does chapter 11 let the reader plan by hand? Memory over ranks, time and GPU hours over GPUs, how often to save.

Memory and the length of a step are those of stored layouts (``training.stored``), on the ladder's batch of 512 sequences of
8192 tokens. What no formula gives is a slider: the share of the peak that a run reaches, how much of it remains when GPUs
double, how often a GPU fails, and how long a save takes.

    N          GPUs = ranks
    tau        time between two saves             delta   seconds that a save stops training
    M          mean time between failures of the whole job: that of one GPU, over N
"""

import math

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ngpt_core.gpus import GIB, GPUS
from ngpt_core.presets import preset
from ngpt_core.tools.simulate import Result
from ngpt_core.tools.simulate.storage import KINDS
from ngpt_core.train.config import TrainConfig, run_defaults

from ..data import stored
from ..theme import COLORS, powers
from .training import PART_COLORS, PARTS, ROOM, ROOM_KEY, layout, work

RANKS = (8, 16, 32, 64, 128, 256, 512)
BATCH, SEQ_LEN = 512, 8192
TICKS = [str(n) for n in RANKS]


# ---- memory and time of a layout ---------------------------------------------------------------------------------------
SPENT = {  # what is drawn -> kinds of the estimate, color
    "Mamba": (("mamba",), "blue"),
    "attention": (("attention",), "red"),
    "experts": (("moe", "mlp"), "teal"),
    "head": (("head", "embedding"), "magenta"),
    "messages": (("communication",), "gold"),
    "optimizer, host": (("optimizer", "host", "other"), "grey"),
}


def by_hand(name: str, expert_parallel: int, how: str, micro_batch: int) -> dict:
    """GiB on the fullest rank and seconds of a step, part by part, for each number of GPUs."""
    found = [layout(name, ranks, expert_parallel, how, micro_batch) for ranks in RANKS]
    room = GPUS["h100-80gb"].room / GIB
    memory = {part: [math.nan if one is None else one["memory"][part] for one in found] for part in PARTS}
    spent = {
        part: [math.nan if one is None else sum(one["seconds"].get(kind, 0.0) for kind in kinds) for one in found]
        for part, (kinds, _) in SPENT.items()
    }
    at = found[RANKS.index(64)]
    assert at is not None
    tokens, flops = work(name)
    step = flops / tokens * BATCH * SEQ_LEN
    total = at["seconds"]["total"]
    return {
        **memory,
        **spent,
        "room": [room] * len(RANKS),
        "here": room,
        "at64": sum(at["memory"].values()),
        "step64": total,
        "mfu64": 100 * step / (64 * GPUS["h100-80gb"].peak * total),
    }


def by_hand_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.2)
    for part in PARTS:
        figure.add_bar(x=TICKS, y=v[part], name=part, marker_color=COLORS[PART_COLORS[part]], legend="legend", row=1, col=1)
    for look in ROOM:
        figure.add_scatter(x=TICKS, y=v["room"], mode="lines", legend="legend", **look, row=1, col=1)
    figure.add_scatter(**ROOM_KEY, legend="legend", row=1, col=1)
    for part, (_, color) in SPENT.items():
        figure.add_bar(x=TICKS, y=v[part], name=part, marker_color=COLORS[color], legend="legend2", row=2, col=1)
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="GPUs", row=2, col=1)
    figure.update_yaxes(title="GiB per rank", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="seconds per step", rangemode="tozero", row=2, col=1)
    between = {"orientation": "h", "x": 0, "y": 0.41, "yanchor": "bottom"}  # as the first one, above its plot
    return figure.update_layout(barmode="stack", height=640, legend2=between)


# ---- a simulated step --------------------------------------------------------------------------------------------------
def step_figure(step: Result) -> go.Figure:
    """Memory of one rank over a simulated step, by kind; the time is the estimate of the operators, without messages."""
    points = step.outline(250)
    milliseconds = [1000 * at for at, _ in points]
    sizes = {kind: [used[i] / GIB for _, used in points] for i, kind in enumerate(KINDS)}
    sizes["activations"] = [a + b for a, b in zip(sizes["activations"], sizes.pop("temporary"))]
    figure, top = go.Figure(), np.zeros(len(points))
    for part in PARTS:
        top, color = top + sizes[part], COLORS[PART_COLORS[part]]
        look = {"line": {"width": 0.5, "shape": "hv", "color": color}, "fillcolor": color, "mode": "lines", "showlegend": False}
        figure.add_scatter(x=milliseconds, y=top, name=part, fill="tonexty" if figure.data else "tozeroy", **look)
    for part in PARTS:  # areas are named in the legend, by squares
        look = {"mode": "markers", "marker": {"symbol": "square", "size": 10, "color": COLORS[PART_COLORS[part]]}}
        figure.add_scatter(x=[None], y=[None], name=part, showlegend=True, **look)
    figure.update_xaxes(title="milliseconds of operators")
    figure.update_yaxes(title="GiB on one rank", rangemode="tozero")
    return figure.update_layout(height=400)


# ---- time and GPU hours ----------------------------------------------------------------------------------------------
def scaling_out(name: str, gpu: str, mfu: float, kept: float) -> dict:
    """Days over the number of GPUs, and GPU hours over those of 8, when each doubling keeps that share of the MFU."""
    N = np.array(RANKS)
    reached = mfu * kept ** np.log2(N / RANKS[0])
    seconds = work(name)[1] / (N * GPUS[gpu].peak * reached)  # eq-train-time
    hours = seconds * N / 3600
    return {
        "days": seconds / 86400,
        "ideal": seconds[0] / 86400 * RANKS[0] / N,
        "bill": hours / hours[0],
        "hours": hours[-1],
        "last": seconds[-1] / 86400,
        "more": hours[-1] / hours[0],
    }


def scaling_out_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    dash = {"mode": "lines", "line": {"color": COLORS["grey"], "width": 2, "dash": "dash"}}
    line = {"mode": "lines+markers", "line": {"color": COLORS["blue"], "width": 2.5}}
    figure.add_scatter(x=TICKS, y=v["ideal"], name="if nothing were lost", **dash, row=1, col=1)
    figure.add_scatter(x=TICKS, y=v["days"], name="days", **line, row=1, col=1)
    figure.add_bar(x=TICKS, y=v["bill"], name="GPU hours", marker_color=COLORS["teal"], showlegend=False, row=2, col=1)
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="GPUs", row=2, col=1)
    ticks = [m * 10.0**k for k in range(-3, 4) for m in (1, 2, 5)]
    figure.update_yaxes(title="days", type="log", tickvals=ticks, row=1, col=1)  # each preset's own range: both lines are seen
    figure.update_yaxes(title="GPU hours, 8 GPUs = 1", range=[0, 4], row=2, col=1)
    return figure.update_layout(height=480)


# ---- where scaling stops ---------------------------------------------------------------------------------------------
CAUSES = {  # what is drawn -> kinds of the estimate, color
    "operators": (("mamba", "attention", "moe", "mlp", "head", "embedding", "other"), "blue"),
    "optimizer": (("optimizer",), "teal"),
    "messages": (("communication",), "gold"),
    "host": (("host",), "red"),
}


SIMULATED = (64, 512, 4096)


def scaling_table() -> list[str]:
    """The simulated steps of three rungs, as lines."""
    lines = [f"{'GPUs':>10}{'batch':>7}{'sends':>7}{'holds':>8}{'step':>8}{'MFU':>5}{'bound':>6}"]
    for name in ("1B", "14B", "30B"):
        for ranks in SIMULATED:
            row = stored("scaling")[f"{name} {ranks}"]
            lines.append(
                f"{name:>4}{ranks:>6,}{row['batch']:>7,}{row['total_messages']:>7.0f}{row['memory']:>8.0f}"
                f"{row['seconds']['total']:>8.2f}{row['mfu']:>5.0%}{row['mfu_bound']:>6.0%}"
            )
    return lines


def reach(name: str) -> dict:
    """Percent of a simulated step by what takes the time, and the MFU with its bound, over the number of GPUs."""
    rows = [stored("scaling")[f"{name} {ranks}"] for ranks in SIMULATED]
    share = {
        cause: [100 * sum(row["seconds"].get(kind, 0.0) for kind in kinds) / row["seconds"]["total"] for row in rows]
        for cause, (kinds, _) in CAUSES.items()
    }
    mfu, bound = ([100 * row[key] for row in rows] for key in ("mfu", "mfu_bound"))
    return {**share, "mfu": mfu, "bound": bound, "at64": mfu[0], "at512": mfu[1], "at4096": mfu[2]}


def reach_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    ticks = [f"{n:,}" for n in SIMULATED]
    for cause, (_, color) in CAUSES.items():
        figure.add_bar(x=ticks, y=v[cause], name=cause, marker_color=COLORS[color], row=1, col=1)
    for key, name, dash in (("mfu", "MFU", "solid"), ("bound", "its bound", "dash")):
        look = {"mode": "lines+markers", "line": {"color": COLORS["magenta"], "width": 2.5, "dash": dash}}
        figure.add_scatter(x=ticks, y=v[key], name=name, **look, row=2, col=1)
    figure.update_xaxes(type="category")
    figure.update_xaxes(title="GPUs", row=2, col=1)
    figure.update_yaxes(title="% of a step", range=[0, 100], row=1, col=1)
    figure.update_yaxes(title="MFU, %", rangemode="tozero", row=2, col=1)
    return figure.update_layout(barmode="stack", height=520)


# ---- how often to save -----------------------------------------------------------------------------------------------
MINUTES = np.geomspace(1, 4000, 61)


def waste(tau: np.ndarray | float, delta: float, M: float) -> tuple[np.ndarray | float, np.ndarray | float]:
    """Shares of the time spent on saving, and on repeating the work lost in a failure (half an interval on average)."""
    return delta / tau, tau / (2 * M)


def best_interval(delta: float, M: float) -> float:
    """Where the sum of the two is smallest: their derivatives cancel."""
    return math.sqrt(2 * delta * M)


def save_every(delta: float, mtbf_hours: float, gpus: int, step_seconds: float) -> float:
    """The best interval in steps, when one GPU fails once in ``mtbf_hours``."""
    return best_interval(delta, 3600 * mtbf_hours / gpus) / step_seconds


def saving(gpus: int, years: float, delta: float) -> dict:
    """Percent of the time lost, over the minutes between saves, for a GPU that fails once in the given number of years."""
    M = years * 365.25 * 86400 / gpus
    saves, again = waste(60 * MINUTES, delta, M)
    tau = best_interval(delta, M)
    step = work("30B")[1] / _steps("30B") / (gpus * GPUS["h100-80gb"].peak * 0.35)
    return {
        "saves": 100 * saves,
        "again": 100 * again,
        "sum": 100 * (saves + again),
        "best_x": [tau / 60],
        "best_y": [100 * sum(waste(tau, delta, M))],
        "M": M / 3600,
        "minutes": tau / 60,
        "percent": 100 * sum(waste(tau, delta, M)),
        "steps": save_every(delta, years * 365.25 * 24, gpus, step),
    }


def _steps(name: str) -> float:
    config = TrainConfig.from_dict(run_defaults(preset(name)))
    return work(name)[0] / (config.batch_size * config.seq_len)


def saving_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    for key, name, color, dash in (
        ("saves", "saving", "teal", "dot"),
        ("again", "computed again", "red", "dash"),
        ("sum", "together", "blue", "solid"),
    ):
        line = {"color": COLORS[color], "width": 2.5, "dash": dash}
        figure.add_scatter(x=MINUTES, y=v[key], name=name, mode="lines", line=line)
    marker = {"color": COLORS["blue"], "size": 11}
    figure.add_scatter(x=v["best_x"], y=v["best_y"], name="best", mode="markers", marker=marker)
    figure.update_xaxes(title="minutes between saves", type="log", range=[0, math.log10(4000)], **powers(*range(4)))
    figure.update_yaxes(title="% of the time", type="log", range=[-2.1, 2.1], **powers(*range(-2, 3)))
    return figure
