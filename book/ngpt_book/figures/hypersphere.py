"""What does chapter 1 draw? Points that walk on the 3-D sphere, and dot products of unit vectors in d dimensions.

Each Explorer uses a pair of functions: one computes arrays with ngpt_core's geometry, the other draws them.
"""

import math
from functools import cache

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from ngpt_core import sphere

from ..theme import COLORS


def globe() -> go.Figure:
    """An empty unit sphere: a faint surface with its parallels and meridians, no axes."""
    lat, lon = np.linspace(-np.pi / 2, np.pi / 2, 19), np.linspace(0, 2 * np.pi, 37)
    xyz = np.stack(
        [np.outer(np.cos(lat), np.cos(lon)), np.outer(np.cos(lat), np.sin(lon)), np.outer(np.sin(lat), np.ones_like(lon))]
    )
    lines = [xyz[:, i] for i in range(3, 18, 3)] + [xyz[:, :, j] for j in range(0, 36, 4)]
    wires = np.concatenate([np.append(line, np.full((3, 1), np.nan), axis=1) for line in lines], axis=1)
    still = {"hoverinfo": "skip", "showlegend": False}
    flat = {"ambient": 1.0, "diffuse": 0.0, "specular": 0.0}
    grey = [[0, COLORS["grey"]], [1, COLORS["grey"]]]
    hidden = {"visible": False, "range": [-1.05, 1.05]}
    figure = go.Figure()
    figure.add_surface(x=xyz[0], y=xyz[1], z=xyz[2], opacity=0.18, showscale=False, colorscale=grey, lighting=flat, **still)
    figure.add_scatter3d(
        x=wires[0], y=wires[1], z=wires[2], mode="lines", line={"color": COLORS["grey"], "width": 1}, opacity=0.5, **still
    )
    figure.update_layout(
        scene={f"{axis}axis": hidden for axis in "xyz"}
        | {"aspectmode": "cube", "camera": {"eye": {"x": 1.2, "y": 0.8, "z": 0.6}}},
        height=440,
        margin={"l": 0, "r": 0, "t": 36, "b": 0},
    )
    return figure


def add_points(
    figure: go.Figure, points, name: str, color: str, *, mode="markers", size=7, width=5, dash="solid", **more
) -> None:
    """Points [n, 3] on the globe, as markers or as a line."""
    figure.add_scatter3d(
        x=points[:, 0],
        y=points[:, 1],
        z=points[:, 2],
        name=name,
        mode=mode,
        marker={"size": size, "color": COLORS[color]},
        line={"color": COLORS[color], "width": width, "dash": dash},
        hovertemplate=name + "<extra></extra>",
        **more,
    )


# ---- a step towards a suggestion: LERP then Norm, and SLERP ----------------------------------------------------------


def one_step(alpha: float, angle: float) -> dict:
    """From h toward a suggestion ``angle`` degrees away: the chord, the arc, and where alpha lands on each."""
    h = place(-25, 33)
    side = sphere.unit(sphere.tangent(place(60, 50), h))
    suggestion = math.cos(math.radians(angle)) * h + math.sin(math.radians(angle)) * side
    t = torch.linspace(0, 1, 33, dtype=torch.float64)[:, None]
    lerp = h + alpha * (suggestion - h)
    stepped = sphere.step(h, suggestion, alpha)  # eq. ATTNnew2, with a scalar alpha
    exact = sphere.slerp(h, suggestion, alpha)
    return {
        "chord": torch.stack([h, suggestion]),
        "arc": sphere.slerp(h.expand(33, 3), suggestion.expand(33, 3), t),
        "norm": torch.stack([lerp, stepped]),
        "h": h[None],
        "suggestion": suggestion[None],
        "step": stepped[None],
        "slerp": exact[None],
        "turned_step": torch.rad2deg(sphere.angle(h, stepped - h)),
        "turned_slerp": torch.rad2deg(sphere.angle(h, exact - h)),
        "length": lerp.norm(),
    }


def one_step_figure(v: dict) -> go.Figure:
    figure = globe()
    add_points(figure, v["arc"], "arc", "grey", mode="lines", width=6)
    add_points(figure, v["chord"], "chord", "grey", mode="lines", width=2)  # in 3-D a dashed line is hardly seen
    add_points(figure, v["norm"], "Norm", "gold", mode="lines", width=4, showlegend=False)
    add_points(figure, v["h"], "hidden state", "blue")
    add_points(figure, v["suggestion"], "suggestion", "teal")
    add_points(figure, v["step"], "Norm(LERP)", "gold", size=8)
    add_points(figure, v["slerp"], "SLERP", "magenta", size=6)
    return figure


# ---- a whole forward pass in three dimensions ------------------------------------------------------------------------


def place(longitude: float, latitude: float) -> Tensor:
    """A point on the sphere, from its longitude and latitude in degrees."""
    lon, lat = math.radians(longitude), math.radians(latitude)
    return torch.tensor([math.cos(lat) * math.cos(lon), math.cos(lat) * math.sin(lon), math.sin(lat)], dtype=torch.float64)


WORDS = {"Life": place(-10, 20), "is": place(35, -25), "beautiful": place(65, 48)}


def attention(h: Tensor, keys: Tensor, values: Tensor, sharpness: float = 3.0) -> Tensor:
    """A one-head attention in R^3: Norm(softmax(sharpness * K h) V)."""
    return sphere.unit(torch.softmax(sharpness * keys @ h, 0) @ values)


def mlp(h: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A squared-ReLU MLP in R^3 with points as rows: Norm(relu(U h)^2 W). Similar anchors respond most."""
    return sphere.unit(torch.relu(up @ h).square() @ down)


def forward_pass(alpha_a: float, alpha_m: float, layers: int) -> dict:
    """The hidden state of "is" moves from block to block; each block sees its position and suggests a point."""
    keys = torch.stack([WORDS["Life"], WORDS["is"]])
    values = torch.stack([place(20, 62), place(50, 8)])  # what "Life" and "is" have to say
    up, down = torch.stack([place(30, 10), place(40, 60)]), torch.stack([place(95, 30), place(62, 52)])
    h, path, suggestions = WORDS["is"], [WORDS["is"]], ([], [])
    for _ in range(layers):
        for alpha, seen in ((alpha_a, suggestions[0]), (alpha_m, suggestions[1])):
            suggestion = attention(h, keys, values) if seen is suggestions[0] else mlp(h, up, down)
            path += [sphere.step(h, suggestion, alpha * quarter / 4) for quarter in range(1, 5)]  # the last is the step itself
            h = path[-1]
            seen.append(suggestion)

    def padded(points: list[Tensor], n: int) -> Tensor:
        """A fixed number of points, whatever the number of layers: the last one is repeated."""
        return torch.stack([*points, *[points[-1]] * (n - len(points))])

    return {
        "path": padded(path, 49),
        "attention": padded(suggestions[0], 6),
        "mlp": padded(suggestions[1], 6),
        "end": h[None],
        "before": WORDS["is"] @ WORDS["beautiful"],
        "after": h @ WORDS["beautiful"],
    }


def forward_pass_figure(v: dict) -> go.Figure:
    figure = globe()
    words = torch.stack(list(WORDS.values())).numpy()
    add_points(figure, v["path"], "hidden state", "gold", mode="lines", width=7)
    add_points(figure, v["attention"], "attention suggests", "teal", size=5)
    add_points(figure, v["mlp"], "MLP suggests", "red", size=5)
    add_points(figure, v["end"], "end", "gold", showlegend=False)
    add_points(
        figure, words, "words", "blue", mode="markers+text", text=list(WORDS), textposition="top center", showlegend=False,
        textfont={"size": 15},
    )  # fmt: skip
    return figure


# ---- a trained model's walk, block by block ----------------------------------------------------------------------------


def stops_figure(pattern: str, before: tuple, after: tuple) -> go.Figure:
    """After 0, 1, ... blocks: degrees from the start, and the loss if the walk ended there; each pair is (degrees, losses)."""
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.12, shared_xaxes=True)
    places = ["start", *(f"{i} {letter}" for i, letter in enumerate(pattern, 1))]
    for values, name, color in ((before, "before training", "grey"), (after, "after training", "blue")):
        drawn = {"mode": "lines+markers", "line": {"color": COLORS[color], "width": 2.5}}
        for row, y in enumerate(values, 1):
            figure.add_scatter(x=places, y=y, name=name, showlegend=row == 1, **drawn, row=row, col=1)
    figure.update_xaxes(title="stopped after block", row=2, col=1)
    figure.update_yaxes(title="degrees away", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="loss", row=2, col=1)
    figure.update_layout(height=470)
    return figure


# ---- dot products in d dimensions ------------------------------------------------------------------------------------


def dot_density(c: np.ndarray, d: int) -> np.ndarray:
    """p(c) of c = <a, b> for unit vectors drawn uniformly in R^d: proportional to (1 - c^2)^((d-3)/2)."""
    log_norm = math.lgamma(d / 2) - math.lgamma((d - 1) / 2) - 0.5 * math.log(math.pi)
    return np.exp(log_norm + (d - 3) / 2 * np.log1p(-np.square(c)))


COSINES, MATCH, BINS = np.linspace(-0.999, 0.999, 401), np.linspace(0, 1, 201), 40


@cache
def dot_histogram(d: int) -> tuple[np.ndarray, np.ndarray]:
    """The same density from 8000 random unit vectors and a fixed one, computed once per d.

    Returns the centers of the bars, which lie within five standard deviations, and their heights.
    """
    drawn = sphere.random(8000, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64)[:, 0]
    edges = min(1.0, 5 / math.sqrt(d)) * np.linspace(-1, 1, BINS + 1)
    return (edges[1:] + edges[:-1]) / 2, np.histogram(drawn.numpy(), bins=edges, density=True)[0]


def dot_products(d: int, s: float, vocabulary: int = 131_072) -> dict:
    """Random anchors seen from one hidden state in R^d, and how sure a softmax over them can be at the logit scale s."""
    density, (middle, heights) = dot_density(COSINES, d), dot_histogram(d)
    fine = np.sin(np.linspace(-np.pi / 2, np.pi / 2, 4001)[1:-1])  # dense at both ends, where small d has its mass
    weight = np.gradient(fine) * dot_density(fine, d)
    others = (vocabulary - 1) * np.sum(np.exp(s * (fine - 1)) * weight) / np.sum(weight)
    own = np.exp(s * (MATCH - 1))
    return {
        "density": density / density.max(),
        "middle": middle,
        "histogram": heights / density.max(),
        "probability": own / (own + others),
        "spread": 1 / math.sqrt(d),
        "best": 1 / (1 + others),
    }


def dot_products_figure(v: dict) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.22)
    line = {"mode": "lines", "showlegend": False}
    figure.add_bar(x=v["middle"], y=v["histogram"], marker_color=COLORS["grey"], opacity=0.5, showlegend=False, row=1, col=1)
    figure.add_scatter(x=COSINES, y=v["density"], line={"color": COLORS["blue"], "width": 2.5}, **line, row=1, col=1)
    figure.add_scatter(x=MATCH, y=v["probability"], line={"color": COLORS["red"], "width": 2.5}, **line, row=2, col=1)
    figure.update_xaxes(title="cosine of two random unit vectors", range=[-1, 1], row=1, col=1)
    figure.update_xaxes(title="cosine between h and the right token", range=[0, 1], row=2, col=1)
    figure.update_yaxes(title="density / peak", range=[0, 1.3], row=1, col=1)
    figure.update_yaxes(title="its probability", range=[0, 1.03], row=2, col=1)
    figure.update_layout(height=500, bargap=0, margin={"t": 12})
    return figure
