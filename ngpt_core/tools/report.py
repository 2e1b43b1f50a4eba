"""How did the runs go, and which one was better?

``ngpt report RUN... --out report.html``: one self-contained HTML file (plotly is inside) with the runs' losses over tokens and
time, the tokens that each run needs to reach the other's final loss (how the paper compares GPT and nGPT), and the paper's own
figures drawn from these runs (``figures.py``). This file computes the numbers and writes the page.
"""

import html
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..checks import is_number
from ..config import ModelConfig
from ..data.tokenizers import content
from ..files import write_text
from ..presets import count_parameters
from ..train.folder import RunFolder
from ..train.metrics import read_lines, read_metrics

__all__ = ["LoggedRun", "comparison", "log_fit", "read_run", "tokens_to_reach", "write_report"]


# ---- numbers ---------------------------------------------------------------------------------------------------------
@dataclass
class LoggedRun:
    """A run's metrics and config.json."""

    name: str
    records: list[dict]
    config: dict

    def series(self, y: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of the lines that have both."""
        lines = [r for r in self.records if is_number(r.get(x)) and is_number(r.get(y))]
        return np.array([r[x] for r in lines], float), np.array([r[y] for r in lines], float)

    @property
    def judged_by(self) -> str:
        """The loss used for comparisons: held-out if it was evaluated at least twice, otherwise the smoothed training loss."""
        return "val_loss" if len(self.series("val_loss")[0]) > 1 else "loss"

    @property
    def kind(self) -> str:
        return "nGPT" if self.config["model"]["normalized"] else "GPT"


def read_run(folder: str) -> LoggedRun:
    """The run in the folder, finished or not."""
    records = read_metrics(folder)
    if not records and (Path(folder) / "metrics.jsonl").stat().st_size:
        raise ValueError(f"{Path(folder) / 'metrics.jsonl'} has no complete line: it was damaged; restore it.")
    if not records:
        raise ValueError(f"{folder} has not trained a step yet: there is nothing to report.")
    run = RunFolder(folder)
    return LoggedRun(Path(folder).resolve().name, records, run.record | {"model": run.model.to_dict()})


def smooth(y: np.ndarray, window: int | None = None) -> np.ndarray:
    """A running mean over the last ``window`` values (a fiftieth of them by default): training losses are noisy."""
    window = window or max(1, len(y) // 50)
    sums = np.cumsum(np.concatenate([[0.0], y]))
    first = np.maximum(0, np.arange(1, len(y) + 1) - window)
    return (sums[1:] - sums[first]) / (np.arange(1, len(y) + 1) - first)


def _curve(run: LoggedRun, by: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and loss. A training loss is averaged over a tenth of the run: a single lucky batch must not decide."""
    tokens, loss = run.series(by)
    return tokens, smooth(loss, max(1, len(loss) // 10)) if by == "loss" else loss


def tokens_to_reach(tokens: np.ndarray, loss: np.ndarray, target: float) -> float | None:
    """Tokens at which the curve first falls to ``target``, interpolated linearly; None if it never does."""
    below = np.flatnonzero(loss <= target)
    if len(below) == 0:
        return None
    i = below[0]
    if i == 0:
        return float(tokens[0])
    share = (loss[i - 1] - target) / (loss[i - 1] - loss[i])
    return float(tokens[i - 1] + share * (tokens[i] - tokens[i - 1]))


def comparison(runs: list[LoggedRun]) -> list[dict]:
    """For each ordered pair: the tokens that ``run`` needs for the final loss of ``other``, and their share of its tokens."""
    rows = []
    by = "val_loss" if all(run.judged_by == "val_loss" for run in runs) else "loss"
    for run in runs:
        for other in runs:
            if other is run:
                continue
            other_tokens, other_loss = _curve(other, by)
            needed = tokens_to_reach(*_curve(run, by), float(other_loss[-1]))
            rows.append(
                {
                    "run": run.name,
                    "other": other.name,
                    "by": by,
                    "target": float(other_loss[-1]),
                    "tokens": needed,
                    "of": float(other_tokens[-1]),
                    "share": None if needed is None else needed / float(other_tokens[-1]),
                }
            )
    return rows


def log_fit(t: np.ndarray, y: np.ndarray, start: float) -> tuple[float, float]:
    """(a, b) of the least-squares fit y = a + b ln t over t >= start (figure 2 of the paper)."""
    keep = t >= start
    b, a = np.polyfit(np.log(t[keep]), y[keep], 1)
    return float(a), float(b)


# ---- the page --------------------------------------------------------------------------------------------------------
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2230 }
table { border-collapse: collapse } td, th { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #d9dbe0 }
td:first-child, th:first-child { text-align: left } figure { margin: 1.5rem 0 }
pre { white-space: pre-wrap; background: #7f879422; padding: .6rem }
@media (prefers-color-scheme: dark) { body { color: #dfe3ea; background: #14171d } }
"""
_COLUMNS = ("run", "model", "parameters", "steps", "tokens", "loss", "held-out loss", "tokens/s")


def _summary(runs: list[LoggedRun]) -> str:
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in _COLUMNS) + "</tr>"]
    for run in runs:
        held_out = run.series("val_loss")[1]
        size = count_parameters(ModelConfig.from_dict(run.config["model"])).total
        last = run.records[-1]
        speed = np.median(run.series("tokens_per_s")[1])
        values = [
            run.name,
            f"{run.config['model']['name']} ({run.kind})",
            f"{size:,}",
            f"{last['step']:,}" + (f" of {run.config['steps']:,}" if last["step"] < run.config["steps"] else ""),
            f"{last['tokens']:,}",
        ]
        values += [f"{smooth(run.series('loss')[1])[-1]:.4f}", f"{held_out[-1]:.4f}" if len(held_out) else "-", f"{speed:,.0f}"]
        rows.append("<tr>" + "".join(f"<td>{html.escape(v)}</td>" for v in values) + "</tr>")
    return "<table>" + "".join(rows) + "</table>"


def _measured_on(run: LoggedRun, by: str) -> tuple:
    """What a run's loss was measured on: tokenizer and corpora; for the held-out loss also the windows."""
    corpora = ((c.get("checksum"), c.get("weight")) for c in run.config.get("corpora") or ())
    names = ("val_data", "eval_windows", "seq_len") if by == "val_loss" else ()
    return content(run.config["tokenizer"]), *corpora, *(str(run.config["train"].get(name)) for name in names)


def sentence(row: dict) -> str:
    """One row of the comparison, in words."""
    loss = "held-out loss" if row["by"] == "val_loss" else "training loss (smoothed)"
    if row["tokens"] is None:
        return f"{row['run']} does not reach the final {loss} of {row['other']} ({row['target']:.4f})."
    return (
        f"{row['run']} reaches the final {loss} of {row['other']} ({row['target']:.4f}) after {row['tokens']:,.0f} tokens, "
        f"{row['share']:.0%} of the {row['of']:,.0f} that {row['other']} took."
    )


def _samples(runs: list[LoggedRun], folders: list[str]) -> str:
    parts = []
    for run, folder in zip(runs, folders):
        path = Path(folder) / "samples.jsonl"
        samples = [line for line in read_lines(path) if isinstance(line.get("text"), str)] if path.is_file() else []
        if samples:
            last = samples[-1]
            title = f"{run.name}, step {last['step']}"
            parts.append(f"<h3>{html.escape(title)}</h3><pre>{html.escape(last['text'])}</pre>")
    return "<h2>Samples</h2>" + "\n".join(parts) if parts else ""


def write_report(folders: list[str], out: str) -> str:
    """Write the page; return a line with its path."""
    try:
        import plotly.io
        from plotly.offline import get_plotlyjs

        from .figures import SECTIONS
    except ImportError:
        raise ValueError('ngpt report needs plotly: pip install "ngpt-core[notebook]".') from None
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a run is given twice: {' '.join(folders)}. Give each only once.")
    path = Path(out)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a page in it, --out {path / 'report.html'}.")
    if file := next((parent for parent in path.parents if parent.is_file()), None):
        raise ValueError(f"{file} is a file: choose another folder for --out {path}.")
    runs = [read_run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        for run, folder in zip(runs, folders):
            run.name = folder.rstrip("/")
    parts = [f"<h1>{html.escape(' and '.join(run.name for run in runs))}</h1>", _summary(runs)]
    pairs = comparison(runs)
    if pairs and len({_measured_on(run, pairs[0]["by"]) for run in runs}) > 1:
        parts.append("<p>These runs read different text or use different tokenizers: their losses are not compared.</p>")
    elif pairs:
        parts.append("<ul>" + "".join(f"<li>{html.escape(sentence(row))}</li>" for row in pairs) + "</ul>")
        parts.append("<p>These are points in the middle of a schedule: a run planned to end there would have a lower loss.</p>")
        if any(run.records[-1]["step"] < run.config["steps"] for run in runs):
            parts.append('<p>Not all runs are finished: "final" means the last step so far.</p>')
    shown = [replace(run, name=html.escape(run.name, quote=False)) for run in runs]  # plotly reads names as HTML
    for title, draw, text in SECTIONS:
        try:
            figure = draw(shown)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{title!r} cannot be drawn ({type(error).__name__}: {error}): a line of metrics.jsonl in "
                f"{' or '.join(folders)} was damaged or edited; restore or remove it."
            ) from error
        if figure.data and any(len(trace.x) for trace in figure.data if trace.x is not None):
            # below the plot: above it, the buttons that plotly shows on hover would cover its end
            figure.update_layout(legend={"y": -0.18, "yanchor": "top"})
            body = plotly.io.to_html(
                figure, include_plotlyjs=False, full_html=False, config={"responsive": True, "displaylogo": False}
            )
            parts.append(f"<h2>{title}</h2><p>{text}</p><figure>{body}</figure>")
    parts.append(_samples(runs, folders))
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ngpt report</title><style>{_STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(parts)}</body></html>"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return f"report: {path.resolve()}"
