"""How does an array become text of a few kilobytes? Sixteen bits per number, in base64, as in the Explorer's grids.

    {"shape": [87, 24], "lo": 0.0, "hi": 78.4, "u2": "..."}        value = lo + (hi - lo) * code / 65535

The error is at most half a step, (hi - lo) / 131070. motion.js decodes the same text.
"""

import base64
from typing import Any

import numpy as np

__all__ = ["LEVELS", "decode", "encode"]

LEVELS = 65535


def encode(values: Any, lo: float | None = None, hi: float | None = None) -> dict[str, Any]:
    """The array as text. ``lo`` and ``hi``: the range of the codes; what lies outside is cut off. None: the array's own."""
    x = np.asarray(values, dtype=np.float64)
    if not x.size or not np.isfinite(x).all():
        raise ValueError(f"encode takes an array of finite numbers; got one of shape {x.shape} with others, or an empty one.")
    lo, hi = float(x.min()) if lo is None else lo, float(x.max()) if hi is None else hi
    codes = np.rint((x.clip(lo, hi) - lo) / ((hi - lo) or 1.0) * LEVELS).astype("<u2")
    return {"shape": list(x.shape), "lo": lo, "hi": hi, "u2": base64.b64encode(codes.tobytes()).decode()}


def decode(stored: dict[str, Any]) -> np.ndarray:
    """The array again, in float64."""
    codes = np.frombuffer(base64.b64decode(stored["u2"]), dtype="<u2").reshape(stored["shape"])
    return stored["lo"] + (stored["hi"] - stored["lo"]) * codes.astype(np.float64) / LEVELS
