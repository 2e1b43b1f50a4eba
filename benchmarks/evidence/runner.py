"""How does a list of experiments become a table? With a queue of jobs and two cores; nothing runs twice.

    Job        what was trained: a model, a side (gpt or ngpt), a number of steps, a seed, the differences from the defaults
    Lab.run    the job's row of the table: read from results/runs.jsonl if it is there, otherwise trained (``ngpt train`` in a
               separate process, one thread, low priority) and appended. Threads may call it; at most ``workers`` train.

A stopped run continues from its checkpoint when the same job is requested again. A failed run (training stops before a loss
that is not finite) is a result too: its row has no val_loss and gives the reason.

Every job is trained on the whole library of CPython 3.11.7 (library.py); another text is refused before anything is trained.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import library

from ngpt_core.tools.report import read_run

HERE = Path(__file__).parent
TABLE = HERE / "results" / "runs.jsonl"
POINTS = 40  # of a stored training curve


def _dense(d_model: int, layers: int) -> dict:
    return {"preset": "pico-dense", "d_model": d_model, "pattern": "*-" * layers, "ff": 4 * d_model}


def _hybrid(d_model: int, pairs: str, expert_ff: int, mamba_heads: int) -> dict:
    sizes = {"expert_ff": expert_ff, "shared_ff": 2 * expert_ff, "mamba_heads": mamba_heads}
    return {"preset": "pico", "d_model": d_model, "pattern": pairs, **sizes}


MODELS = {  # name: (the model's fields, sequences of 128 bytes in a batch); the batch grows with the model, not the step count
    "dense-0.2M": (_dense(64, 4), 2),
    "dense-0.5M": (_dense(96, 4), 4),
    "dense-1M": (_dense(128, 5), 8),
    "dense-3M": (_dense(192, 6), 8),  # of the second round: a test of the rule of GPT's rate
    "hybrid-0.2M": (_hybrid(64, "MEMEM*E", 48, 4), 2),
    "hybrid-0.5M": (_hybrid(104, "MEMEM*E", 80, 6), 4),
    "hybrid-1M": (_hybrid(136, "MEMEM*EME", 96, 8), 8),
    "hybrid-3M": (_hybrid(256, "MEMEM*E", 176, 16), 8),  # for the rule alone, and wider than the others
}
LENGTH = 128
COMPILED = ("dense-1M", "hybrid-1M", "hybrid-3M")  # 1.3 times the tokens a second on the 1M hybrid; smaller ones: without


@dataclass(frozen=True)
class Job:
    model: str
    side: str
    steps: int
    seed: int = 0
    recipe: dict = field(default_factory=dict)
    """Numbers of recipe.Settings or recipe.Baseline that are not the defaults, as ``--recipe`` takes them."""
    fields: dict = field(default_factory=dict)
    """Fields of ModelConfig that are not the model's."""
    batch: int | None = None
    """Sequences in a batch. None: the model's default."""

    @property
    def name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.model}-{self.side}-{self.steps}-s{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    @property
    def sequences(self) -> int:
        return self.batch or MODELS[self.model][1]

    @property
    def tokens(self) -> int:
        return self.steps * self.sequences * LENGTH

    def flags(self, folder: Path, data: Path) -> list[str]:
        """The flags of ``ngpt train`` that repeat the run."""
        model, _ = MODELS[self.model]
        flags = ["--out", str(folder), "--data", str(data), "--seed", str(self.seed)]
        flags += ["--baseline" if self.side == "gpt" else "--normalized"]
        flags += ["--steps", str(self.steps), "--batch-size", str(self.sequences), "--seq-len", str(LENGTH)]
        for key, value in {**model, **self.fields}.items():
            flags += [f"--{key.replace('_', '-')}", str(value)]
        flags += ["--recipe", *(f"{key}={value}" for key, value in self.recipe.items())] if self.recipe else []
        flags += ["--eval-every", "0", "--eval-windows", "1000", "--save-every", "1000", "--keep", "1", "--no-scaled"]
        flags += ["--compile"] if self.model in COMPILED else []
        return [*flags, "--diagnostics-every", "0", "--sample-tokens", "0", "--no-tensorboard", "--no-verify-data"]


class Lab:
    """The table, and the workers that fill it."""

    def __init__(self, runs: Path, workers: int = 2):
        self.runs, self.workers = runs, workers
        self.free, self.lock = threading.Semaphore(workers), threading.Lock()
        self.rows = {row["name"]: row for row in map(json.loads, TABLE.read_text().splitlines())} if TABLE.exists() else {}
        self.running: dict[str, threading.Lock] = {}

    def run(self, job: Job) -> dict:
        with self.lock:
            mine = self.running.setdefault(job.name, threading.Lock())
        with mine:  # a job that two stages ask for at once is trained once
            if job.name not in self.rows:
                with self.free:
                    row = {"name": job.name, **asdict(job), "tokens": job.tokens, **self._train(job)}
                with self.lock:
                    self.rows[job.name] = row
                    TABLE.parent.mkdir(exist_ok=True)
                    with TABLE.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
                print(f"{job.name:<44} {row['val_loss']}  {job.recipe or ''} {job.fields or ''}", flush=True)
        return self.rows[job.name]

    def map(self, jobs: Iterable[Job]) -> list[dict]:
        """The rows of many jobs, in order."""
        with ThreadPoolExecutor(4 * self.workers) as pool:
            return list(pool.map(self.run, jobs))

    def _train(self, job: Job) -> dict:
        data = library.corpus().folder
        folder = self.runs / job.name
        self.runs.mkdir(parents=True, exist_ok=True)
        resumed = (folder / "config.json").exists()
        command = [sys.executable, "-m", "ngpt_core", "train", *job.flags(folder, data), *(["--resume"] if resumed else [])]
        with open(f"{folder}.log", "a", encoding="utf-8") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(["nice", "-n", "19", *command], stdout=log, stderr=log, env=env)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            cpu = None if resumed else round(usage.ru_utime + usage.ru_stime, 1)  # of a whole run or not at all
        if process.returncode < 0 or process.returncode == 143:
            raise KeyboardInterrupt(f"{job.name} was stopped; it will continue from its checkpoint")
        if process.returncode:
            text = Path(f"{folder}.log").read_text().strip().splitlines()[-1]
            if "not finite" not in text:
                raise RuntimeError(f"{job.name}: {text}")
            return {"val_loss": None, "curve": [], "cpu_seconds": cpu, "error": text}
        run = read_run(str(folder))
        losses = [record["loss"] for record in run.records]
        part = -(-len(losses) // POINTS)
        curve = [round(sum(x) / len(x), 4) for x in (losses[i : i + part] for i in range(0, len(losses), part))]
        return {"val_loss": round(run.series("val_loss")[1][-1], 5), "curve": curve, "cpu_seconds": cpu}
