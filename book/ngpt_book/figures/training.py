"""What does chapter 11 draw? The planner's results for the ladder on given GPUs: memory per rank, days, GPU hours, cost.

Nothing here is measured. The memory of layouts is stored (data/make_layouts.py writes what ``tools/layout.py`` says), and time
rests on an assumed MFU.
"""

from functools import cache

import plotly.graph_objects as go

from ngpt_core.gpus import GIB, GPUS
from ngpt_core.presets import LADDER, preset
from ngpt_core.train.config import TrainConfig, run_defaults, total_steps
from ngpt_core.train.flops import flops_per_token

from ..data import stored
from ..theme import COLORS, powers

PART_COLORS = {
    "parameters": "blue", "moments": "red", "gradients": "teal",
    "gathered": "magenta", "activations": "gold", "loss": "grey",
}  # fmt: skip
PARTS = tuple(PART_COLORS)
ROOM = (  # white dashes on a dark line: one of the two is seen on any page and on bars of any color
    {"line": {"color": "#24282f", "width": 3}, "showlegend": False, "hoverinfo": "skip"},
    {"line": {"color": "#ffffff", "width": 4, "dash": "dash"}, "name": "room", "showlegend": False},  # wider: no seam
)
ROOM_KEY = {  # its line in the legend
    "x": [None], "y": [None], "mode": "lines", "name": "room", "line": {"color": COLORS["grey"], "width": 3, "dash": "dash"},
}  # fmt: skip


@cache
def layouts() -> dict[str, dict[str, dict]]:
    """Preset -> "GPUs, expert parallelism, checkpointing, micro-batch" -> memory in GiB and seconds, by kind."""
    return stored("layouts")


def layout(name: str, gpus: int, expert_parallel: int, how: str, rows: int) -> dict | None:
    """A stored layout: ``memory`` and ``seconds`` by kind; None if its share of the batch is less than a micro-batch."""
    found = layouts()[name].get(f"{gpus} {expert_parallel} {how} {rows}")
    return found and {"memory": parts(found["memory"]), "seconds": found["seconds"]}


def parts(memory: dict[str, float]) -> dict[str, float]:
    """The memory by the parts that are drawn: temporary memory is drawn with the activations."""
    return {part: memory[part] + (memory["temporary"] if part == "activations" else 0.0) for part in PARTS}


@cache
def work(name: str) -> tuple[float, float]:
    """(tokens, FLOPs) of training a rung of the ladder with the planner's defaults."""
    model = preset(name)
    config = TrainConfig.from_dict(run_defaults(model))
    tokens = total_steps(config, model) * config.batch_size * config.seq_len
    return tokens, tokens * flops_per_token(model, config.seq_len)


def fitting(name: str, gpu: str, gpus: int) -> dict[str, float]:
    """The memory in GiB of the layout with the shortest step of those that fit, or of the smallest if none does."""
    ways = [way for key, way in layouts()[name].items() if key.startswith(f"{gpus} ")]
    fits = [way for way in ways if sum(way["memory"].values()) * GIB <= GPUS[gpu].room]
    if fits:
        return parts(min(fits, key=lambda way: way["seconds"]["total"])["memory"])
    return parts(min(ways, key=lambda way: sum(way["memory"].values()))["memory"])


def days(tokens: float, flops_per_token: float, gpus: int, peak: float, mfu: float) -> float:
    """How long a run takes."""
    return tokens * flops_per_token / (gpus * peak * mfu) / 86400  # eq-train-time


def planned(name: str, gpu: str, gpus: int) -> dict:
    """Memory of a rank in GiB, part by part, the GPU's memory, and the days at an assumed MFU of 35%."""
    need = fitting(name, gpu, gpus)
    room, total = GPUS[gpu].room / GIB, sum(need.values())
    tokens, flops = work(name)
    return {
        "parts": list(need.values()),
        "room": [room] * 2,
        "total": total,
        "left": room - total,
        "days": days(tokens, flops / tokens, gpus, GPUS[gpu].peak, 0.35),
    }


def planned_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    for i, (part, color) in enumerate(PART_COLORS.items()):
        figure.add_bar(y=["one rank"], x=[v["parts"][i]], name=part, orientation="h", marker_color=COLORS[color])
    for look in ROOM:
        figure.add_scatter(x=v["room"], y=[-0.6, 0.6], mode="lines", **look, yaxis="y2")
    figure.add_scatter(**ROOM_KEY)
    figure.update_xaxes(title="GiB on the fullest rank", range=[0, 190])
    hidden = {"overlaying": "y", "range": [-0.6, 0.6], "visible": False}
    figure.update_layout(barmode="stack", height=280, legend_traceorder="normal")
    return figure.update_layout(yaxis={"showticklabels": False, "ticks": ""}, yaxis2=hidden)


def cost(gpu: str, mfu: float, price: float) -> dict:
    """GPU hours of each rung, and what they cost at a price per GPU hour."""
    hours = [work(name)[1] / (GPUS[gpu].peak * mfu) / 3600 for name in LADDER]
    return {"cost": [price * h for h in hours], "first": price * hours[0], "last": price * hours[-1], "hours": hours[-1]}


def cost_figure(v: dict) -> go.Figure:
    figure = go.Figure()
    figure.add_bar(x=list(LADDER), y=v["cost"], name="cost", marker_color=COLORS["blue"])
    figure.update_xaxes(title="rung of the ladder", type="category")
    figure.update_yaxes(title="cost, in your currency", type="log", range=[0.9, 7.1], **powers(*range(1, 8)))
    return figure.update_layout(height=370, margin={"t": 16})
