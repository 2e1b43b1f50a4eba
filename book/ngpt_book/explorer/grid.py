"""How does a whole grid of results fit on a page?

An Explorer evaluates its function at every combination of its sliders' values. This file packs the resulting arrays small
enough for an HTML page, and decodes them.

    values  [n_1, ..., n_k, *shape]   one array of the function, over k sliders
    dims    (n_1 or 1, ..., n_k or 1) 1 where the array does not depend on that slider: it is stored once along it
    kind    "u2": 16-bit codes, value = lo + code * step with step = range / 65535, so the error is at most step / 2
            "f4": float32, for what is drawn on a logarithmic axis over more than two decades
            "f8": unchanged, for single numbers (they are also printed, and take little space) and beyond float32's range
"""

import base64
from dataclasses import dataclass

import numpy as np

LEVELS = 65535  # in arrays with NaN, code 65535 means NaN, and the range has 65534 steps
_DTYPE = {"u2": "<u2", "f4": "<f4", "f8": "<f8"}


@dataclass(frozen=True)
class Packed:
    """One array over the grid, as the page stores it."""

    codes: np.ndarray  # [*dims, *shape]
    dims: tuple[int, ...]
    kind: str
    lo: float
    step: float
    nan: bool

    @property
    def nbytes(self) -> int:
        """Characters on the page: base64 writes 3 bytes as 4."""
        return -(-self.codes.nbytes // 3) * 4

    def decode(self) -> np.ndarray:
        """[*dims, *shape] in float64: what the page will draw."""
        values = self.codes.astype(np.float64)
        if self.kind == "u2":
            values = self.lo + values * self.step
            if self.nan:
                values[self.codes == LEVELS] = np.nan
        return values

    def arithmetic(self) -> str:
        shape = " × ".join(str(n) for n in self.codes.shape) or "1"
        return f"{shape} values × {self.codes.itemsize} bytes × 4/3 = {self.nbytes / 1e3:.0f} kB"

    def spec(self) -> dict:
        """The array for explorer.js, as JSON data."""
        data = base64.b64encode(self.codes.astype(_DTYPE[self.kind]).tobytes()).decode()
        return {
            "dims": list(self.dims),
            "size": int(np.prod(self.codes.shape[len(self.dims) :], dtype=int)),
            "kind": self.kind,
            "lo": self.lo,
            "step": self.step,
            "nan": self.nan,
            "data": data,
        }


def pack(values: np.ndarray, sliders: int, log: bool = False) -> Packed:
    """Store ``values`` [n_1, ..., n_k, *shape] over k = ``sliders`` sliders as compactly as its use allows."""
    for axis in range(sliders):
        first = values.take([0], axis)
        if np.array_equal(np.broadcast_to(first, values.shape), values, equal_nan=True):
            values = first
    dims = values.shape[:sliders]
    if values[(0,) * sliders].size == 1:
        return Packed(values.astype(np.float64), dims, "f8", 0.0, 1.0, False)
    finite = values[~np.isnan(values)]
    lo, hi = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if log and hi > 100 * max(lo, 0.0):
        fits = 1e-30 < hi < 1e38  # numbers far below the largest may become 0
        return Packed(values.astype(np.float32 if fits else np.float64), dims, "f4" if fits else "f8", 0.0, 1.0, False)
    nan = finite.size < values.size
    step = (hi - lo) / (LEVELS - nan)
    codes = np.rint((np.where(np.isnan(values), lo, values) - lo) / (step or 1.0)).astype(np.uint16)
    if nan:
        codes[np.isnan(values)] = LEVELS
    return Packed(codes, dims, "u2", lo, step, nan)
