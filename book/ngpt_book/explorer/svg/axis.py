"""Where in the picture is a number, and which numbers label the axis?"""

from dataclasses import dataclass, field

import numpy as np

from ..binding import numeric


@dataclass
class Axis:
    """One axis of a 2-D figure: linear, logarithmic, or of categories."""

    spec: dict  # plotly's layout.xaxis
    start: float  # pixels
    stop: float
    seen: list[np.ndarray] = field(default_factory=list)  # the data that must fit
    names: list[str] = field(default_factory=list)  # of the categories, in the order in which they come
    tight: bool = False  # no room beside the data (heat maps)

    @property
    def log(self) -> bool:
        return self.spec.get("type") == "log"

    @property
    def title(self) -> str:
        title = self.spec.get("title") or {}
        return title if isinstance(title, str) else title.get("text") or ""

    def numbers(self, values) -> np.ndarray:
        found = numeric(values)
        if found is not None:
            return found
        self.names += [v for v in dict.fromkeys(map(str, values)) if v not in self.names]
        return np.array([self.names.index(str(v)) for v in values], dtype=float)

    def _scaled(self, values) -> np.ndarray:
        values = self.numbers(values)
        return np.log10(np.where(values > 0, values, np.nan)) if self.log else values

    def fit(self, *values: np.ndarray) -> None:
        self.seen += values

    @property
    def range(self) -> tuple[float, float]:
        """As plotly: in log10 on a logarithmic axis."""
        given = self.spec.get("range")
        if given is not None and None not in list(given):
            return float(given[0]), float(given[1])
        data = np.concatenate([self._scaled(s).reshape(-1) for s in self.seen]) if self.seen else np.zeros(0)
        data = data[np.isfinite(data)]
        lo, hi = (float(data.min()), float(data.max())) if data.size else (0.0, 1.0)
        if self.names:
            lo, hi = -0.5, len(self.names) - 0.5
        elif lo == hi:
            lo, hi = lo - 0.5, hi + 0.5
        elif not self.tight:
            room = 0.05 * (hi - lo)
            lo, hi = (lo if lo == 0 else lo - room), hi + room
        return (hi, lo) if self.spec.get("autorange") == "reversed" else (lo, hi)

    def at(self, values) -> np.ndarray:
        """Pixels."""
        lo, hi = self.range
        return self.start + (self._scaled(values) - lo) / (hi - lo) * (self.stop - self.start)

    def zero(self) -> float:
        """The baseline of bars and fills: 0, or the edge if 0 is not visible."""
        low, high = sorted((self.start, self.stop))
        return self.start if self.log else float(np.clip(self.at([0.0])[0], low, high))

    def ticks(self) -> list[tuple[float, str]]:
        """(pixel, label)."""
        values, labels = self._ticks()
        low, high = sorted((self.start, self.stop))
        return [(p, label) for p, label in zip(self.at(values), labels) if low - 0.5 <= p <= high + 0.5]

    def _ticks(self) -> tuple[np.ndarray, list[str]]:
        if self.spec.get("tickvals") is not None:
            values = np.asarray(self.spec["tickvals"], dtype=float)
            given = self.spec.get("ticktext")
            return values, [f"{v:g}" for v in values] if given is None else [str(t) for t in given]
        if self.names:
            return np.arange(len(self.names), dtype=float), self.names
        lo, hi = sorted(self.range)
        if self.log and hi - lo >= 1:
            powers = np.arange(np.ceil(lo - 1e-9), hi + 1e-9, max(1, np.ceil((hi - lo) / 8))).astype(int)
            return 10.0**powers, [f"{10.0**p:g}" if -3 < p < 4 else f"10<sup>{p}</sup>" for p in powers]
        rough = (hi - lo) / max(2, abs(self.stop - self.start) / 70)  # a label every 70 pixels or so
        base = 10.0 ** np.floor(np.log10(rough))
        step = base * next(m for m in (1, 2, 5, 10) if m * base >= rough * 0.999)
        places = np.arange(np.ceil(lo / step - 1e-9), hi / step + 1e-9) * step + 0.0
        values = 10.0**places if self.log else places
        return values, [f"{v:.{3 if self.log else 6}g}" for v in values]
