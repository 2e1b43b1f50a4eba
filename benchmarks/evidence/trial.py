"""What happens in one run of the plan? The repository's trainer, step by step, with a point's changes; then a line of results.

    python benchmarks/evidence/trial.py NAME --runs FOLDER

Everything that a stopped run needs is in FOLDER/NAME.pt, written every two minutes and on a signal: the next call continues
from there. The losses are measured on both held-out texts: after every sixth of the run on a part, at its end on all of it.

``loss`` is that of the weights as they are; ``averaged`` that of their means over the last 5 and 20% of the steps, on the text
that a trial is judged on, or a result. Schedule-free training has its own average, and no other. ``positions``, of a result:
[n, loss] of the bytes of a window up to the nth, from the n of the entry before.
"""

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mechanisms
import peers
import torch
from plan import LIMIT, Point, plan, resolved
from runner import HERE, MODELS
from texts import Texts, texts

from ngpt_core import recipe
from ngpt_core.config import ModelConfig
from ngpt_core.data.corpus import Corpus
from ngpt_core.files import new_file
from ngpt_core.train.config import in_force
from ngpt_core.train.evaluate import evaluate, evaluate_positions
from ngpt_core.train.run import prepare
from ngpt_core.train.trainer import Trainer
from ngpt_core.train.world import World

TABLE = HERE / "results" / "second.jsonl"
PARTS = 6  # of a run: a measurement after each
GLANCE = 1 << 15  # bytes of each held-out text that such a measurement reads
SAVE = 120  # seconds between checkpoints
STOPPED = 128 + signal.SIGTERM


def read(table: Path = TABLE) -> dict[str, dict]:
    """The finished runs, by name."""
    rows = map(json.loads, table.read_text().splitlines()) if table.exists() else ()
    return {row["name"]: row for row in rows}


# ---- from a point to a trainer ---------------------------------------------------------------------------------------
def model_settings(point: Point) -> dict[str, Any]:
    settings = {**MODELS[point.model][0], **point.fields, "normalized": point.side == "ngpt"}
    if "initialized" in point.extra:
        config = recipe.initialized(point.config, point.extra["initialized"])
        settings |= {"alpha_init": config.alpha_init, "s_z_init": config.s_z_init}
    return settings


def items(point: Point, config: ModelConfig) -> list[str]:
    """What ``--recipe`` is given: the rates of another rule, and the point's own numbers."""
    found = {}
    if point.rule != "ours":
        ours, other = (vars(recipe.scaled(config, point.steps, rule=rule)) for rule in ("ours", point.rule))
        found = {name: value for name, value in other.items() if value != ours[name]}
    return [f"{name}={value}" for name, value in {**found, **point.recipe}.items()]


def trainer(point: Point, data: Texts, folder: Path) -> Trainer:
    """The trainer of a point that has its numbers."""
    settings = {
        "out": str(folder / point.name), "data": [str(data.train.folder)], "device": "cpu", "compile": False,
        "batch_size": point.sequences, "seq_len": point.context, "steps": point.steps, "seed": point.seed,
        "recipe": items(point, point.config),
    }  # fmt: skip
    made = Trainer(prepare(settings, model_settings(point), resume=False), World(torch.device("cpu")), [(data.train, 1.0)])
    if point.side in peers.SIDES:
        peers.prepare(made, point.side, dict(point.extra))
    return made


class Trial:
    """A run of a point: its trainer, what changes a step, and what was measured."""

    def __init__(self, point: Point, data: Texts, folder: Path):
        self.point, self.data, self.file = point, data, folder / f"{point.name}.pt"
        self.trainer = trainer(point, data, folder)
        shares = () if point.side == "free" else mechanisms.SHARES
        self.averages = {f"{share:g}": mechanisms.Average(self.trainer, share) for share in shares}
        self.changes = [*mechanisms.changes(self.trainer, dict(point.extra)), *self.averages.values()]
        self.curve: list[list[float]] = []  # tokens, the mean training loss since the last one, the two held-out losses
        self.losses: list[float] = []  # of the steps since then
        self.cpu, self.sessions, self.began = 0.0, 1, time.process_time()
        if self.file.exists():
            self._load()

    @property
    def seconds(self) -> float:
        """CPU seconds of all sessions, without steps that a kill has lost."""
        return self.cpu + time.process_time() - self.began

    def step(self) -> None:
        for change in self.changes:
            change.before(self.trainer)
        self.losses.append(self.trainer.step()["loss"])
        for change in self.changes:
            change.after(self.trainer)
        t, steps = self.trainer.t, self.trainer.run.steps
        if t * PARTS // steps > (t - 1) * PARTS // steps:
            windows = GLANCE // self.point.context
            measured = [self.loss(part, windows) for part in ("tuning", "result")]
            mean = sum(self.losses) / len(self.losses)
            self.curve.append([t * self.point.sequences * self.point.context, *(round(x, 4) for x in (mean, *measured))])
            self.losses = []

    def loss(self, part: str, windows: int | None = None) -> float:
        """The loss on a held-out text, or on so many windows of it."""
        corpus: Corpus = getattr(self.data, part)
        windows = windows or corpus.stream("val").windows(self.point.context)
        rows = max(1, 4096 // self.point.context)
        with self._at_average():
            return evaluate(self.trainer.model, [(corpus, 1.0)], windows, rows, self.point.context, self.trainer.world).loss

    def row(self) -> dict[str, Any]:
        """The line of the results."""
        found, averaged = {part: round(self.loss(part), 5) for part in ("tuning", "result")}, {}
        for share, average in self.averages.items():
            with average.in_place(self.trainer.model):
                averaged[share] = round(self.loss("tuning" if self.point.trial else "result"), 5)
        extra = {} if self.point.trial else {"positions": self.positions()}
        return {"loss": found, "averaged": averaged, "curve": self.curve, **extra}

    def positions(self) -> list[list[float]]:
        """The loss on a part of the results' text by the place in a window, in octaves: what more context brings."""
        context = self.point.context
        with self._at_average():
            places = [(self.data.result, 1.0)], 8 * GLANCE // context, max(1, 4096 // context), context
            losses = evaluate_positions(self.trainer.model, *places)
        self.trainer.model.train()
        ends = [1 << k for k in range(4, context.bit_length())]
        return [[end, round(sum(losses[start:end]) / (end - start), 4)] for start, end in zip([0, *ends], ends)]

    @contextlib.contextmanager
    def _at_average(self) -> Iterator[None]:
        """Schedule-free training is evaluated at its average; its steps are not taken there."""
        optimizer = self.trainer.optimizer
        free = isinstance(optimizer, peers.ScheduleFree)
        if free:
            optimizer.averaged(True)
        yield
        if free:
            optimizer.averaged(False)

    # ---- stopping and continuing -------------------------------------------------------------------------------------
    def save(self) -> None:
        made = self.trainer
        state = {
            "t": made.t, "model": made.model.state_dict(), "optimizer": made.optimizer.state_dict(),
            "schedule": made.schedule.state_dict(), "loader": made.loader.state_dict(), "curve": self.curve,
            "losses": self.losses, "changes": [c.state_dict() for c in self.changes], "cpu": self.seconds,
            "sessions": self.sessions, "numbers": self.point.recipe | {"extra": json.dumps(self.point.extra)},
        }  # fmt: skip
        with new_file(self.file) as temporary:
            torch.save(state, temporary)

    def _load(self) -> None:
        state, made = torch.load(self.file, weights_only=True), self.trainer
        if state["numbers"] != self.point.recipe | {"extra": json.dumps(self.point.extra)}:
            raise ValueError(f"{self.file} was begun with {state['numbers']}: remove it.")
        made.model.load_state_dict(state["model"])
        made.optimizer.load_state_dict(state["optimizer"])
        made.schedule.load_state_dict(state["schedule"])
        made.loader.load_state_dict(state["loader"])
        for change, saved in zip(self.changes, state["changes"], strict=True):
            change.load_state_dict(saved)
        made.t = made.saved = state["t"]
        self.curve, self.losses, self.cpu, self.sessions = (state[k] for k in ("curve", "losses", "cpu", "sessions"))
        self.sessions += 1


def run(point: Point, folder: Path, stop: list[bool]) -> dict[str, Any] | None:
    """The finished row of a point that has its numbers; None if it was stopped before its end."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    trial = Trial(point, texts(point.corpus), folder)
    saved, total = time.monotonic(), trial.trainer.run.steps
    fixed = {**asdict(point), "tokens": point.tokens, "recipe": dict(point.recipe), "extra": dict(point.extra)}
    fixed |= {"numbers": in_force(trial.trainer.run.config, trial.trainer.run.model, total, True), **origin()}
    found: dict[str, Any]
    try:
        while trial.trainer.t < total:
            trial.step()
            stopping = bool(stop)  # once: a signal that comes while it saves is for the next step
            if stopping or time.monotonic() - saved > SAVE:
                trial.save()
                saved = time.monotonic()
            if stopping:
                return None
            if trial.seconds > 60 * LIMIT:
                raise ValueError(f"the run took more than {LIMIT} minutes; it is at step {trial.trainer.t} of {total}.")
        trained = trial.seconds
        found = trial.row()
    except ValueError as error:  # a loss that is not finite is a result as well
        trained, found = trial.seconds, {"loss": None, "averaged": {}, "curve": trial.curve, "error": str(error)}
    found |= {"cpu_seconds": round(trained, 1), "evaluation_seconds": round(trial.seconds - trained, 1)}
    return fixed | found | {"sessions": trial.sessions}


def origin() -> dict[str, str]:
    """Where a result comes from: commit, machine, versions, date."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True).stdout.strip()

    dirty = "+changes" if git("status", "--porcelain", "--untracked-files=no", "--", "../../ngpt_core", "*.py") else ""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        machine = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    processor = locals().get("machine", platform.machine())
    return {"commit": git("rev-parse", "--short=12", "HEAD") + dirty, "machine": processor, "versions": versions, "date": now}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of a point of the plan")
    parser.add_argument("--runs", type=Path, default=Path("runs/second"), help="folder of unfinished runs")
    parser.add_argument("--table", type=Path, default=TABLE, help="the results that its numbers follow from")
    args = parser.parse_args()
    every, stop = plan(), []
    point = next((p for p in every if p.name == args.name), None)
    if point is None:
        parser.error(f"the plan has no point {args.name}; plan.py lists them.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(True))
    args.runs.mkdir(parents=True, exist_ok=True)
    lock = open(args.runs / f"{point.name}.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        parser.error(f"{point.name} is under way in {args.runs} already.")
    row = run(resolved(point, every, read(args.table)), args.runs, stop)
    if row is None:
        return STOPPED
    with new_file(args.runs / f"{point.name}.json") as temporary:
        temporary.write_text(json.dumps(row) + "\n")
    Path(lock.name).unlink()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
