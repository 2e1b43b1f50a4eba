"""How do the faults end when all of them are tried? ``make soak`` runs this, for an hour at most, and stores the counts.

    crashes     every state in which a crash may leave a run, at every call to the file system (disk.py), for three runs
    kills       real processes (processes.py): SIGKILL before every call to the file system, with and without what was not
                forced to the disk; SIGKILL and SIGTERM at random times, twice in a row
    ranks       two real ranks, of which one is killed, stopped, slow, or asked to end (../test_watchdog.py)
    disks       full, slow, and one on which each call fails once
    payloads    a pickle in every file of a checkpoint, through every command that reads it
    flips       one bit in every kind of file, through the command that reads it
    fuzz        files, flags and public names with inputs drawn by hypothesis, and by atheris if it is installed
    leaks       memory over many steps

Prints one line per kind and writes results.json beside this file. The exit status is 1 if any case failed.
"""

import argparse
import datetime
import errno
import importlib.util
import itertools
import json
import logging
import platform
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
sys.path[:0] = [str(HERE), str(HERE.parent)]

import cases  # noqa: E402
import planted  # noqa: E402
import processes  # noqa: E402
import ranks as rank_cases  # noqa: E402
import torch  # noqa: E402
from fuzz import CASES, fuzz  # noqa: E402

from ngpt_core.files import write_json  # noqa: E402

RUNS = {  # the runs whose file-system calls are recorded
    "plain": {},
    "samples": {"sample_tokens": 4, "sample_every": 2, "eval_every": 2, "keep": 1},
    "every step": {"save_every": 1, "keep": 1, "keep_every": 3},
}


def crashes(deadline: float, args: argparse.Namespace) -> dict[str, Counter]:
    found = {}
    for name, settings in RUNS.items():
        place = cases.Place(Path(tempfile.mkdtemp()), **settings)
        outcomes: Counter = Counter()
        for what, tree in cases.record(place):
            if time.monotonic() > deadline:
                break
            outcome = cases.crash(place, tree)
            outcomes[outcome] += 1
            if outcome in cases.BAD:
                print(f"  {outcome}: {what}", flush=True)
        found[f"crashes, {name}"] = outcomes
    return found


def counted(deadline: float, found: Iterable[tuple[str, str]]) -> Counter:
    """The outcomes of cases, as far as there is time; what fails is printed."""
    outcomes: Counter = Counter()
    for what, outcome in found:
        outcomes[outcome] += 1
        if outcome in cases.BAD:
            print(f"  {outcome}: {what}", flush=True)
        if time.monotonic() > deadline:
            break
    return outcomes


def kills(deadline: float, args: argparse.Namespace) -> dict[str, Counter]:
    place, begin = cases.Place(Path(tempfile.mkdtemp())), time.monotonic()
    at_random = counted(begin + (deadline - begin) / 4, processes.at_random(place, args.kills))
    # every fifth call, then those between: if the time ends early, the whole run has been sampled
    strides = itertools.chain.from_iterable(processes.kills(place, 5, first) for first in (1, 3, 5, 2, 4))
    return {"kills, at random times": at_random, "kills, at each call": counted(deadline, strides)}


def ranks(deadline: float, args: argparse.Namespace) -> dict[str, Counter]:
    return {"ranks": counted(deadline, rank_cases.ranks(Path(tempfile.mkdtemp())))}


def disks(deadline: float, args: argparse.Namespace) -> dict[str, Counter]:
    place = cases.Place(Path(tempfile.mkdtemp()))
    found = {"disks, full": counted(deadline, processes.full(place)), "disks, slow": counted(deadline, processes.slow(place))}
    strides = itertools.chain.from_iterable(
        processes.failing(place, code, 10, first) for first in range(1, 11) for code in (errno.ENOSPC, errno.EIO)
    )
    return found | {"disks, failing": counted(deadline, strides)}


def payloads(deadline: float, args: argparse.Namespace) -> dict[str, Counter]:
    return {"payloads": counted(deadline, planted.planted(cases.Place(Path(tempfile.mkdtemp()))))}


def flips(deadline: float, args: argparse.Namespace) -> dict[str, Counter]:
    place, outcomes = cases.Place(Path(tempfile.mkdtemp())), Counter()
    for seed in range(args.flips):
        for kind, outcome in cases.flips(place, 1, seed):
            outcomes[outcome] += 1
            if outcome in cases.BAD:
                print(f"  {outcome}: a flip in {kind}, seed {seed}", flush=True)
        if time.monotonic() > deadline:
            break
    return {"flips": outcomes}


def fuzzed(deadline: float, args: argparse.Namespace) -> dict[str, Counter]:
    place, found = cases.Place(Path(tempfile.mkdtemp())), {}
    slow = {"sealed files": 10, "flags": 20}  # these run a command: fewer of them
    for kind in sorted(CASES, key=lambda kind: slow.get(kind, 1)):  # if the time ends early, the cheap ones have been tried
        outcomes: Counter = Counter()
        wanted = args.fuzz // slow.get(kind, 1)
        for start in range(0, wanted, 100):
            if time.monotonic() > deadline:
                break
            counted, examples = fuzz(place, kind, min(100, wanted - start), start)
            outcomes += counted
            for example in examples:
                print(f"  {kind}: {example!r:.300}", flush=True)
        found[f"fuzz, {kind}"] = outcomes
    if importlib.util.find_spec("atheris") is not None:
        import coverage_guided

        for name in coverage_guided.TARGETS:
            found[f"fuzz, atheris, {name}"] = coverage_guided.run(name, args.fuzz)
    return found


def leaks(deadline: float, args: argparse.Namespace) -> dict[str, dict]:
    """Growth of the process per step, after the first fifth of the steps."""
    place = cases.Place(Path(tempfile.mkdtemp()))
    sizes = []
    for part in (args.steps // 5, args.steps):
        settings = {"steps": part, "save_every": 100}
        status, text = cases.command(*place.train(place.folder / f"run-{part}", **settings))
        assert status == 0, text
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return {"leaks": {"steps": args.steps, "kB per step": round((sizes[1] - sizes[0]) / args.steps, 3)}}


PARTS: dict[str, Callable] = {
    "crashes": crashes, "kills": kills, "ranks": ranks, "disks": disks, "payloads": payloads, "flips": flips,
    "fuzz": fuzzed, "leaks": leaks,
}  # fmt: skip
SHARES = {"crashes": 10, "kills": 10, "ranks": 10, "disks": 8, "payloads": 1, "flips": 8, "fuzz": 12, "leaks": 2}  # of the time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--flips", type=int, default=25, help="per kind of file")
    parser.add_argument("--kills", type=int, default=60, help="at random times")
    parser.add_argument("--fuzz", type=int, default=5000, help="per kind of input; fewer where a case runs a command")
    parser.add_argument("--steps", type=int, default=5000, help="of the run that looks for leaks")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="the others keep their counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("ngpt_core").setLevel(logging.ERROR)  # warnings about folders without a seal
    begin = time.monotonic()
    left, total, bad = sum(SHARES[part] for part in args.only), 0, 0
    for part in args.only:
        rest = begin + 60 * args.minutes - time.monotonic()
        outcomes = PARTS[part](time.monotonic() + rest * SHARES[part] / left, args)
        left -= SHARES[part]
        for name, counts in outcomes.items():
            print(f"{name}: {counts}", flush=True)
        total, bad = store(part, outcomes)  # after each part: a run that is interrupted keeps what it has counted
    print(f"{total:,} cases, {bad} failures")
    return 1 if bad else 0


def store(part: str, outcomes: Mapping[str, Mapping]) -> tuple[int, int]:
    """Write the counts of a part to results.json, in place of its earlier ones. Returns (cases, failures) of all parts."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    dates = kept.get("dates", {}) | {part: f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}"}
    found = {k: v for k, v in kept.items() if k.split(",")[0] in PARTS and k.split(",")[0] != part}
    found |= {name: dict(sorted(counts.items())) for name, counts in outcomes.items() if counts}  # else there was no time
    found = {k: found[k] for k in sorted(found, key=lambda k: list(PARTS).index(k.split(",")[0]))}
    counts_of = [counts for name, counts in found.items() if name != "leaks"]
    bad = sum(count for counts in counts_of for name, count in counts.items() if name in cases.BAD)
    total = sum(sum(counts.values()) for counts in counts_of)
    about = {"dates": dates, "torch": torch.__version__, "python": platform.python_version(), "cases": total, "failures": bad}
    write_json(RESULTS, about | found)
    return total, bad


if __name__ == "__main__":
    sys.exit(main())
