"""Which run of the plan is next? One after another, or two at a time, until none is left or someone stops it.

    nice -n 19 python benchmarks/evidence/campaign.py --runs FOLDER [--jobs 2] [--items 1 2]
    python benchmarks/evidence/campaign.py --only NAME --again     repeat any point, and compare it with the line that is stored

Stop it with Ctrl-C or SIGTERM: the runs under way write a checkpoint and end, and the next call continues with them. A kill
costs at most two minutes of each. A finished run is one line of results/second.jsonl; commit it.
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from plan import Point, needed, plan, resolved
from trial import STOPPED, TABLE, read

TRIAL = Path(__file__).parent / "trial.py"


def ready(every: list[Point], rows: dict[str, dict], running: set[str], wanted: list[Point]) -> Point | None:
    """The first of the wanted points that is neither finished nor under way, and whose numbers are known."""
    open_ones = (p for p in wanted if p.name not in rows and p.name not in running)
    return next((p for p in open_ones if all(q.name in rows for q in needed(p, every))), None)


def append(row: dict, table: Path) -> None:
    table.parent.mkdir(parents=True, exist_ok=True)
    with open(table, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


class Campaign:
    """The processes under way, and the table that they fill."""

    def __init__(self, runs: Path, table: Path, jobs: int):
        self.runs, self.table, self.jobs = runs, table, jobs
        self.processes: dict[str, subprocess.Popen] = {}
        self.stopping = False

    def go(self, every: list[Point], wanted: list[Point]) -> int:
        for path in self.runs.glob("*.json"):  # of runs that outlived a campaign that was killed
            self.record(path.stem)
        while True:
            self.collect()
            rows = read(self.table)
            while not self.stopping and len(self.processes) < self.jobs:
                point = ready(every, rows, set(self.processes), wanted)
                if point is None:
                    break
                self.begin(resolved(point, every, rows))
            if not self.processes:
                return STOPPED if self.stopping else 0
            time.sleep(0.5)

    def begin(self, point: Point) -> None:
        print(f"{time.strftime('%H:%M:%S')} {point.name}  {dict(point.recipe)} {dict(point.extra) or ''}", flush=True)
        command = [sys.executable, str(TRIAL), point.name, "--runs", str(self.runs), "--table", str(self.table)]
        with open(self.runs / f"{point.name}.log", "a", encoding="utf-8") as log:
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes[point.name] = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def collect(self) -> None:
        """Append the lines of the runs that have ended."""
        for name, process in list(self.processes.items()):
            if (status := process.poll()) is None:
                continue
            del self.processes[name]
            if status not in (0, STOPPED):
                self.stop()
                print(f"{name} failed with {status}: see {self.runs / name}.log", file=sys.stderr, flush=True)
            elif status == 0:
                self.record(name)

    def record(self, name: str) -> None:
        path = self.runs / f"{name}.json"
        row = json.loads(path.read_text())
        if name not in read(self.table):
            append(row, self.table)
        path.unlink()
        (self.runs / f"{name}.pt").unlink(missing_ok=True)
        print(f"{time.strftime('%H:%M:%S')} {name}  {row['loss']}  {row['cpu_seconds']} s", flush=True)

    def stop(self, *_: object) -> None:
        self.stopping = True
        for process in self.processes.values():
            process.terminate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/second"), help="folder of unfinished runs")
    parser.add_argument("--table", type=Path, default=TABLE, help="the results")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, one core each")
    parser.add_argument("--items", type=int, nargs="+", help="only these items of the list")
    parser.add_argument("--only", metavar="NAME", help="only this point, and those from which its numbers follow")
    parser.add_argument("--again", action="store_true", help="with --only: train it even if its line is stored, and compare")
    args = parser.parse_args()
    every, runs = plan(), args.runs.absolute()
    runs.mkdir(parents=True, exist_ok=True)
    lock = open(runs / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        parser.error(f"another campaign is under way in {runs}.")
    wanted = [p for p in every if args.items is None or p.item in args.items]
    table = args.table.absolute()
    if args.only:
        wanted = [p for p in every if p.name == args.only]
        if not wanted:
            parser.error(f"the plan has no point {args.only}; plan.py lists them.")
        wanted = [*needed(wanted[0], every), *wanted]
        if args.again:
            table = again(table, runs / "again.jsonl", args.only)
    campaign = Campaign(runs, table, args.jobs)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, campaign.stop)
    status = campaign.go(every, wanted)
    if args.again and status == 0:
        new, old = (read(path).get(args.only, {}).get("loss") for path in (table, args.table))
        print(f"{args.only}: now {new}, stored {old}")
    return status


def again(table: Path, copy: Path, name: str) -> Path:
    """A copy of the results without a point's line."""
    copy.write_text("".join(json.dumps(row) + "\n" for row in read(table).values() if row["name"] != name))
    return copy


if __name__ == "__main__":
    sys.exit(main())
