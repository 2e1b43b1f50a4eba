"""What happens when a checkpoint is damaged? The run continues from the newest one that verifies, and says so.

The damaged one is set aside (renamed to ``damaged-step-...``, not deleted) and the steps after the older one are repeated. If
none verifies, nothing is renamed and the run does not continue: it never starts again from the beginning by itself.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ..files import printable
from ..seal import Damaged
from .checkpoint import Checkpoint, by_step, open_checkpoint
from .metrics import read_lines
from .world import World

__all__ = ["Candidates", "load_newest", "set_aside"]


@dataclass
class Candidates:
    """The checkpoints of a run, newest first, as far as they can be opened. Nothing is renamed here."""

    run: Path
    paths: list[Path] = field(init=False)
    damaged: list[tuple[Path, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths = list(by_step(self.run).values())

    def next(self) -> Checkpoint:
        """The newest checkpoint that has not been tried and can be opened. ``Damaged`` if there is none."""
        while self.paths:
            try:
                return open_checkpoint(path := self.paths.pop())
            except Damaged as error:
                self.damaged.append((path, str(error)))
        path, reason = self.damaged[0]
        raise Damaged(f"{_cause(reason)}. No older checkpoint of {self.run} can be used: restore one, or choose another --out.")


def _cause(reason: str) -> str:
    """The first sentence of an error about a checkpoint: the advice after it is followed here."""
    return reason.partition(". ngpt train --out")[0]


def load_newest(run: Path, world: World, load: Callable[[Checkpoint], None]) -> Checkpoint:
    """Verify the newest checkpoint and ``load`` it; if it is damaged, an older one. All ranks call this together.

    What is newer than the loaded one is damaged: it is set aside. ``Damaged`` if none is left; then nothing is renamed.
    """
    candidates = Candidates(run)
    while True:
        checkpoint = candidates.next()
        verify = partial(checkpoint.verify, "", world.rank, world.size)
        problem = _agreed(world, verify) or _agreed(world, partial(load, checkpoint))
        if problem is None:
            break
        candidates.damaged.append((checkpoint.path, problem))
    if candidates.damaged:
        world.first(lambda: set_aside(run, candidates.damaged, checkpoint.state["step"]))
    return checkpoint


def set_aside(run: Path, damaged: list[tuple[Path, str]], step: int) -> None:
    """Rename the damaged checkpoints, and say that the run continues from ``step``. One process calls this."""
    trained = max(int(path.name.removeprefix("step-")) for path, _ in damaged)
    if (metrics := run / "metrics.jsonl").is_file():
        trained = max([trained, *(line["step"] for line in read_lines(metrics))])
    for path, reason in damaged:
        aside, number = path.with_name(f"damaged-{path.name}"), 2
        while aside.exists():
            aside, number = path.with_name(f"damaged-{path.name}-{number}"), number + 1
        os.replace(path, aside)
        print(f"ngpt: {printable(_cause(reason))}. It is set aside as {aside.name}.", file=sys.stderr)
    print(printable(f"ngpt: {run} continues from step {step}; {trained - step} steps are repeated."), file=sys.stderr)


def _agreed(world: World, action: Callable[[], object]) -> str | None:
    """Run ``action`` on every rank; the damage that any rank found, the same on all of them."""
    problems: list[str | None] = [None] * world.size
    try:
        action()
        mine = None
    except Damaged as error:
        mine = str(error)
    if world.size == 1:
        return mine
    dist.all_gather_object(problems, mine)
    return next((problem for problem in problems if problem is not None), None)
