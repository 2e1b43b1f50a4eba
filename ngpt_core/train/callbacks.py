"""Who is notified of what happens in a run, and when?

A callback is an object with some of the six methods of ``Callback``; the first rank calls them, in this order:

    start(run, after)      once, before the first step; ``after`` steps were trained before (0 for a new run)
    step(record)           after each optimizer step, with its line of metrics.jsonl
    eval(step, loss)       after step(), where the held-out loss was computed
    sample(step, text)     after step(), where a sample was written
    save(step)             when a checkpoint was written, or began to be written in the background
    end(step, finished)    once, after the last step; ``finished`` is False if a signal stopped the run

metrics.jsonl, TensorBoard, Weights & Biases and MLflow (``loggers.py``) are callbacks. To add your own, pass ``--callback
package.module:Name``, a class or function that takes no arguments. An error in a callback saves the step and ends the run.
"""

import contextlib
import io
import pkgutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from .config import in_force

if TYPE_CHECKING:
    from .run import Run

__all__ = ["Callback", "LiveLine", "find_callback", "load_callback"]


class Callback:
    """The methods that a run calls; here they do nothing. Inherit from this class and override those that you need."""

    def start(self, run: "Run", after: int) -> None: ...

    def step(self, record: dict[str, Any]) -> None: ...

    def eval(self, step: int, loss: float) -> None: ...

    def sample(self, step: int, text: str) -> None: ...

    def save(self, step: int) -> None: ...

    def end(self, step: int, finished: bool) -> None: ...


def find_callback(name: str) -> Callable[[], Callback]:
    """What ``--callback package.module:Name`` names. The current folder is searched too."""
    if sys.path[:1] != [""]:
        sys.path.insert(0, "")  # `ngpt` is a script: Python does not search the current folder by itself
    try:
        found = pkgutil.resolve_name(name) if ":" in name else None
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"--callback {name} cannot be imported: {error}.") from None
    if not callable(found):
        raise ValueError(f"--callback {name}: expected package.module:Name of a class or function that makes a callback.")
    return found


def load_callback(name: str) -> Callback:
    """A new callback from the class or function of that name."""
    callback = find_callback(name)()
    if missing := [method for method in vars(Callback) if not method.startswith("_") and not hasattr(callback, method)]:
        raise ValueError(f"--callback {name} lacks {', '.join(missing)}: inherit from ngpt_core.train.callbacks.Callback.")
    return callback


class LiveLine(Callback):
    """First the recipe's numbers. Then loss, tokens/s, MFU, lr and time left: rewritten in a terminal, elsewhere a plain line
    every ten seconds."""

    def start(self, run: "Run", after: int) -> None:
        self.after, self.total = after, run.steps
        self.out: TextIO = sys.stderr or io.StringIO()  # a closed stderr (2>&-) is None
        self.began, self.shown, self.live = time.monotonic(), 0.0, self.out.isatty()
        with contextlib.suppress(OSError):
            print(in_force(run.config, run.model, run.steps, run.scaled), file=self.out, flush=True)

    def step(self, record: dict[str, Any]) -> None:
        """In a terminal at most ten times a second."""
        now, last = time.monotonic(), record["step"] == self.total
        if record["step"] == self.after + 1:
            self.began = now  # the first step compiles and allocates: its time says nothing about the others
        if now - self.shown < (0.1 if self.live else 10.0) and not last and record["step"] > 1:
            return
        self.shown = now
        line = (
            f"step {record['step']}/{self.total}  loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"MFU {record['mfu']:.1%}  lr {record['lr']:.2e}"
        )
        if done := record["step"] - self.after - 1:
            seconds = int((self.total - record["step"]) * (now - self.began) / done)
            line += f"  {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"
        if "val_loss" in record:
            line += f"  val {record['val_loss']:.4f}"
        if self.live:
            line = f"\r\x1b[2K{line}"
        with contextlib.suppress(OSError):  # the reader may be gone, as with `2>&1 | head`
            print(line, end="" if self.live and not last else "\n", file=self.out, flush=True)
