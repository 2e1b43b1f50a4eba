"""How is a simulated step reported? As text, as JSON, and as an HTML page with a picture of memory over the step."""

import json
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from ...config import ModelConfig
from ...files import new_file
from ...gpus import GIB, GPUS, Gpu
from ...train.config import TrainConfig
from .meter import HOST, REACHED, Collective
from .storage import KINDS

__all__ = ["Result"]

COLORS = dict(zip(KINDS, ("#4c78a8", "#54a24b", "#9ecae9", "#f2cf5b", "#e45756", "#b279a2", "#bab0ac")))


@dataclass(kw_only=True)
class Result:
    """One optimizer step on one rank, the fullest."""

    model: ModelConfig
    config: TrainConfig
    gpu: str
    kernels: str
    routing: str
    ranks: int
    peak_bytes: int
    peak_where: str
    """path:line."""
    peak_phase: str
    peak_module: str
    memory: dict[str, int]
    """Kind -> bytes at the peak; they sum to ``peak_bytes``."""
    highest: dict[str, int]
    """Kind -> its largest number of bytes at any time of the step."""
    at_update: dict[str, int]
    """Kind -> bytes when the optimizer begins."""
    document_length: int
    collectives: list[Collective]
    host_waits: dict[str, int]
    """path:line -> how often the host waits there."""
    operations: dict[str, int]
    """Phase -> dispatched operators that are not views; one of our custom operators counts its launches."""
    flops: int
    traffic: int
    """Bytes that operators read and write."""
    copied: int
    """Bytes from the host to the device."""
    seconds: dict[str, float]
    """The estimate by kind, and its ``total``."""
    bounds: dict[str, float]
    """The seconds that none of them can be shorter than."""
    useful: float
    """FLOPs of the model for the whole batch, as the MFU counts them."""
    timeline: list[tuple[float, tuple[int, ...]]]
    """(seconds, bytes of each kind) during the micro-batches that were simulated."""

    @cached_property
    def plan_bytes(self) -> int:
        """What ``ngpt plan`` expects, without its reserve."""
        from ..layout import memory  # imports the simulator

        return memory(self.model, self.config, self.ranks, self.document_length, self.gpu).total

    @property
    def card(self) -> Gpu:
        return GPUS[self.gpu]

    @property
    def room(self) -> int:
        """What a run may use of the card's memory."""
        return self.card.room

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.room

    @property
    def bound(self) -> float:
        """Seconds that no step can be shorter than."""
        return self.bounds["total"]

    def mfu(self, seconds: float | None = None) -> float:
        """Model FLOPs utilization of the estimate, or of another time."""
        peak = self.card.peak if self.config.precision == "bf16" else self.card.fp32
        return self.useful / (self.ranks * peak * (self.seconds["total"] if seconds is None else seconds))

    # ---- JSON --------------------------------------------------------------------------------------------------------
    def to_dict(self) -> dict:
        """The fields of ``--json``."""
        return {
            "peak_bytes": self.peak_bytes,
            "peak_where": self.peak_where,
            "memory": self.memory,
            "plan_bytes": self.plan_bytes,
            "collectives": [{"op": c.op, "axis": c.axis, "count": c.count, "bytes": c.bytes} for c in self.collectives],
            "host_waits": [{"where": where, "count": count} for where, count in sorted(self.host_waits.items())],
            "operations": self.operations,
            "flops": self.flops,
            "seconds": self.seconds,
            "ranks": self.ranks,
        }

    def write_json(self, path: Path | str) -> None:
        with new_file(Path(path)) as mine:
            mine.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    # ---- text --------------------------------------------------------------------------------------------------------
    def text(self, advice: list[str]) -> str:
        """The report. ``advice``: flags with which a run that does not fit would."""
        name, c = self.model.name or "model", self.config
        unit, symbol = (GIB, "GiB") if self.peak_bytes >= GIB else (GIB / 1024, "MiB")
        lines = [
            f"{name} ({'nGPT' if self.model.normalized else 'GPT'}) on rank 0 of {self.ranks} x {self.gpu}: one optimizer step "
            f"of {c.batch_size} x {c.seq_len} tokens",
            f"  {c.precision}, micro-batch {c.micro_batch or c.batch_size // self.ranks}, checkpointing "
            f"{c.activation_checkpointing}, replicas {c.replicas}, expert parallelism {c.expert_parallel}, "
            f"{self.routing} routing",
            f"  {self.kernels} kernels, blocks uncompiled; a simulation of shapes: nothing was computed or measured",
            "",
            f"memory at the peak: {self.peak_bytes / unit:.2f} {symbol} of {self.room / unit:,.1f}, "
            f"{'fits' if self.fits else 'DOES NOT FIT'} (plan: {self.plan_bytes / unit:.2f})",
            f"  at {self.peak_where}, {self.peak_phase}{f' of {self.peak_module}' if self.peak_module else ''}",
            *(f"  {kind:<12}{size / unit:8.2f}" for kind, size in self.memory.items()),
            "",
        ]
        if not self.fits:
            lines += ["it would fit with: " + ("; or ".join(advice) or "none of the changes that ngpt plan knows"), ""]
        lines.append(f"{'collectives':<18}{'axis':>13}   ranks{'':>15}count{symbol:>13}   seconds   exposed   beside")
        for one in sorted(self.collectives, key=lambda one: -one.bytes):
            place = "in a node" if one.nodes == 1 else f"{one.nodes} nodes"
            lines.append(
                f"  {one.op:<16} {one.axis:>12} {one.ranks:>7} {place:<10}{one.count:>9,} {one.bytes / unit:>12.3f} "
                f"{one.seconds:>9.3f} {one.exposed:>9.3f}   {' and '.join(one.beside) or '-'}"
            )
        lines += ["  exposed: the seconds that the computation of the phases beside it does not hide", ""]
        waits = sum(self.host_waits.values())
        often = "once" if waits == 1 else f"{waits:,} times" if waits else "at no time"
        lines.append(f"the host waits for the device {often}" + (":" if waits else ""))
        lines += [f"  {count:>6}  {where}" for where, count in sorted(self.host_waits.items(), key=lambda item: -item[1])]
        launched = ", ".join(f"{phase} {count:,}" for phase, count in self.operations.items())
        lines += [f"operators: {launched}", ""]
        lines += [
            f"seconds, a model and not a measurement: {self.seconds['total']:.3f}, MFU {self.mfu():.1%}; "
            f"not below {self.bound:.3f}, MFU {self.mfu(self.bound):.1%}",
            f"  {'':<14}{'estimate':>9}{'bound':>9}",
            *(
                f"  {kind:<14}{s:9.3f}{self.bounds.get(kind, 0.0):9.3f}"
                for kind, s in sorted(self.seconds.items(), key=lambda item: -item[1])
                if kind != "total"
            ),
            f"  {self.flops / 1e12:,.1f} TFLOPs, {self.traffic / 1e12:,.2f} TB of memory traffic on this rank",
            f"  {self.gpu}, NVIDIA's data sheet: {self.card.peak / 1e12:,.4g} TFLOP/s, {self.card.bandwidth / 1e12:.3g} TB/s, "
            f"{self.card.link / 1e9:,.0f} GB/s to its node, {self.card.network / 1e9:,.4g} GB/s to others",
            f"  assumed: {REACHED['products']:.0%} of the FLOP/s, {REACHED['memory']:.0%} of the bandwidths, "
            f"{HOST * 1e6:.0f} microseconds of the host per operator",
        ]
        return "\n".join(lines)

    # ---- HTML --------------------------------------------------------------------------------------------------------
    def write_html(self, path: Path | str, advice: list[str]) -> None:
        title = f"{self.model.name or 'model'} on {self.ranks} x {self.gpu}"
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
            "<style>body{font:16px system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}pre{overflow-x:auto}"
            "svg{width:100%;height:auto}pre{font-size:13px}</style>"
            f"<h1>{escape(title)}</h1><h2>Memory of a rank during the step</h2>{self.svg()}"
            f"<pre>{escape(self.text(advice))}</pre></html>"
        )
        with new_file(Path(path)) as mine:
            mine.write_text(page, encoding="utf-8")

    def outline(self, most: int) -> list[tuple[float, tuple[int, ...]]]:
        """The timeline in about ``most`` points or fewer; of each stretch the largest use is kept, and so is the peak."""
        step = -(-len(self.timeline) // most)
        return [max(self.timeline[i : i + step], key=lambda point: sum(point[1])) for i in range(0, len(self.timeline), step)]

    def svg(self, width: int = 900, height: int = 320) -> str:
        """Memory by kind over the step, stacked; x is the estimated time of the micro-batches that were simulated."""
        points = self.outline(600)
        end = points[-1][0] or 1.0
        top = max(self.peak_bytes, 1) * 1.05
        stacked = [[0.0] * len(points)]
        for i in range(len(KINDS)):
            stacked.append([low + sizes[i] for low, (_, sizes) in zip(stacked[-1], points)])

        def at(j: int, size: float) -> str:
            return f"{60 + points[j][0] / end * (width - 70):.1f},{height - 50 - size / top * (height - 60):.1f}"

        shapes = []
        for kind, low, high in zip(KINDS, stacked, stacked[1:]):
            # a use holds until the next one: steps, not slopes
            forth = [at(i, high[j]) for j in range(len(points)) for i in (j, min(j + 1, len(points) - 1))]
            back = [at(i, low[j]) for j in reversed(range(len(points))) for i in (min(j + 1, len(points) - 1), j)]
            shapes.append(f'<polygon fill="{COLORS[kind]}" points="{" ".join(forth + back)}"><title>{kind}</title></polygon>')
        for share in (0, 0.5, 1):
            y = height - 50 - share * self.peak_bytes / top * (height - 60)
            shapes.append(f'<text x="55" y="{y + 4:.0f}" text-anchor="end">{share * self.peak_bytes / GIB:.3g} GiB</text>')
        for i, kind in enumerate(KINDS):
            shapes.append(f'<rect x="{60 + 118 * i}" y="{height - 22}" width="12" height="12" fill="{COLORS[kind]}"/>')
            shapes.append(f'<text x="{76 + 118 * i}" y="{height - 12}">{kind}</text>')
        label = f"Memory by kind over the step; the peak is {self.peak_bytes / GIB:.3g} GiB"
        style = 'font-family="sans-serif" font-size="12" fill="#333"'
        return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}" {style}>{"".join(shapes)}</svg>'
