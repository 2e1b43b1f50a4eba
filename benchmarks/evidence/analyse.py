"""What do the runs show? From results/runs.jsonl, and second.jsonl by verdict.py, to the numbers in chapter 9.

    python benchmarks/evidence/analyse.py          writes book/ngpt_book/data/evidence.json, prints the tables

    token ratio   tokens that nGPT needs to reach GPT's final loss, over GPT's tokens. nGPT's final loss as a function of the
                  length of its schedule comes from separate runs of several lengths; between two lengths it is interpolated
                  linearly in log(tokens). Each seed gives a ratio (the same data in the same order on both sides); the mean is
                  geometric, with Student's 95% interval over the seeds.
    difference    of an ablation: its final loss minus the recipe's, seed by seed, with Student's 95% interval
    sequences     of 128 bytes in a batch: 2 at the smallest size, 8 in the earlier study

A ratio outside the trained lengths is not extrapolated; it is a bound (None instead of a number).
"""

import json
import math
import platform
from collections.abc import Iterable
from statistics import mean, median, stdev

import library
import torch
from runner import HERE, MODELS, TABLE, Job
from scipy.stats import t as student
from study import (
    FIRST,
    HYBRID,
    QUARTER,
    RATES,
    SEEDS,
    SMALLEST,
    STEPS,
    TRIALS,
    ablation_jobs,
    apart_jobs,
    around_jobs,
    checked,
    decayed,
    largest_best,
    length_jobs,
    loss,
    parts_jobs,
    published_jobs,
    retuned,
    ruled_jobs,
    trials,
)

import ngpt_core as ng
from ngpt_book.figures.whole import tokens_to_reach

BLOCKS = HERE / "results" / "blocks.jsonl"
OUT = HERE.parents[1] / "book" / "ngpt_book" / "data" / "evidence.json"


def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, low, high): Student's 95% interval of the mean."""
    n = len(values)
    half = float(student.ppf(0.975, n - 1)) * stdev(values) / math.sqrt(n) if n > 1 else math.inf
    return mean(values), mean(values) - half, mean(values) + half


def token_ratio(gpt: dict[int, float], tokens: int, ngpt: dict[int, dict[int, float]]) -> dict:
    """``gpt``: final loss by seed, after ``tokens``. ``ngpt``: by seed, final loss by tokens of its schedule."""
    ratios, bounds = [], []
    for seed, target in gpt.items():
        reached = tokens_to_reach(target, *zip(*sorted(ngpt[seed].items())))
        ratios.append(None if reached is None else reached / tokens)
        if reached is not None:
            continue
        if min(ngpt[seed].values()) > target:
            bounds.append(f"> {max(ngpt[seed]) / tokens:.2f}")
        else:
            bounds.append(f"< {min(ngpt[seed]) / tokens:.2f}")
    if bounds:
        return {"ratio": None, "seeds": ratios, "bounds": bounds}
    middle, low, high = (math.exp(x) for x in interval([math.log(r) for r in ratios]))
    return {"ratio": middle, "low": low, "high": high, "seeds": ratios, "bounds": []}


def read() -> list[dict]:
    return [json.loads(line) for line in TABLE.read_text().splitlines()]


def own_trials(rows: list[dict]) -> dict[str, list[dict]]:
    """The smallest hybrid's trials by side: peak rates, first moments, a warmup."""
    mine = [r for r in rows if (r["model"], r["seed"], r["steps"]) == (HYBRID, 0, QUARTER) and not r["fields"]]
    mine = [r for r in mine if "schedule" not in r["recipe"]]
    return {side: [{"recipe": r["recipe"], "loss": r["val_loss"]} for r in mine if r["side"] == side] for side in TRIALS}


def log_decay(rows: list[dict]) -> dict:
    """The smallest hybrid GPT with nGPT's schedule: its trials, its final losses, and those minus WSD's, seed by seed."""
    stored = Stored(rows)
    log, wsd = decayed(stored), retuned(stored)["gpt"]
    tried = [r for r in rows if (r["model"], r["seed"], r["recipe"].get("schedule")) == (HYBRID, 0, "log")]
    ends = [[r["val_loss"] for r in stored.map(Job(HYBRID, "gpt", QUARTER, s, x) for s in SEEDS)] for x in (log, wsd)]
    middle, low, high = interval([a - b for a, b in zip(*ends)])
    trials = [{"lr": r["recipe"]["lr"], "loss": r["val_loss"]} for r in tried]
    return {"recipe": log, "trials": trials, "gpt": ends[0], "difference": middle, "low": low, "high": high}


class Stored:
    """A lab that does not train: it repeats the search from the table."""

    def __init__(self, rows: list[dict]):
        self.rows = {row["name"]: row for row in rows}

    def map(self, jobs: Iterable[Job]) -> list[dict]:
        return [self.rows[job.name] for job in jobs if job.name in self.rows]


def tuning(rows: list[dict]) -> dict[str, dict]:
    """The trials of both sides, in order, and the best."""
    found = {}
    for side in TRIALS:
        done = trials(Stored(rows), side)
        listed = [{"recipe": r["recipe"], "loss": r["val_loss"]} for r in done]
        found[side] = {"best": min(done, key=loss)["recipe"], "trials": listed}
    return found


def _recipes(rows: list[dict], steps: int, lengths: int) -> list[list[dict]]:
    """One side's runs of every length that has all seeds, by recipe, in the order of the table. Recipes with fewer than
    ``lengths`` lengths between half of ``steps`` and ``steps`` are left out, and so is GPT without ``steps``."""
    by_recipe, found = {}, []
    for r in rows:
        by_recipe.setdefault(json.dumps(r["recipe"], sort_keys=True), {}).setdefault(r["steps"], []).append(r)
    for by_steps in by_recipe.values():
        whole = {n: runs for n, runs in by_steps.items() if {r["seed"] for r in runs} == set(SEEDS)}
        if (rows[0]["side"] == "ngpt" or steps in whole) and sum(steps / 2 <= n <= steps for n in whole) >= lengths:
            found.append([r for runs in whole.values() for r in runs])
    return found


def second(row: dict, betas: dict[str, str]) -> bool:
    """Whether a run has numbers B, tuned on the hybrid: its betas differ from those tuned on the dense model (``betas``)."""
    return row["batch"] is None and row["recipe"]["betas"] != betas[row["side"]]


def comparisons(rows: list[dict], betas: dict[str, str]) -> list[dict]:
    """Every (model, batch, GPT's steps) that was trained on all seeds by both sides. "round" 1: with numbers B (``second``).

    If a round has several recipes, each side gets the one that was best on the tuning seed, or else the first. Rounds that one
    side has not finished are left out. Ablations, which have only one length, do not count as recipes. If nGPT has only shorter
    schedules, its loss after all tokens ("ngpt") is None.
    """
    found, rounds, finals = [], [], [r for r in rows if r["seed"] in SEEDS and not r["fields"]]
    groups = {(r["model"], r["batch"], r["steps"]) for r in finals if r["side"] == "gpt"}
    for model, batch, steps in sorted(groups, key=lambda g: (list(MODELS).index(g[0]), g[1] or 0, g[2])):
        mine = [r for r in finals if (r["model"], r["batch"]) == (model, batch)]
        setting = {"model": model, "batch": batch, "steps": steps}
        for number in (0, 1):
            sides = []
            for side, lengths in (("gpt", 1), ("ngpt", 2)):
                own = [r for r in mine if r["side"] == side and second(r, betas) == number]
                sides.append(_recipes(own, steps, lengths))
            if all(sides):
                best = (min(side, key=lambda runs: _tried(rows, setting, runs) or math.inf) for side in sides)
                rounds.append((setting, number, *best))
    for setting, number, gpt_runs, same in rounds:
        model, batch, steps = setting.values()
        gpt, full = ({r["seed"]: r for r in runs if r["steps"] == steps} for runs in (gpt_runs, same))
        recipes = {"gpt": gpt_runs[0]["recipe"], "ngpt": same[0]["recipe"]}
        by_seed = {s: {r["tokens"]: r["val_loss"] for r in same if r["seed"] == s} for s in SEEDS}
        tokens = gpt[SEEDS[0]]["tokens"]
        fields = dict(MODELS[model][0])
        active = ng.presets.count_parameters(ng.preset(fields.pop("preset"), **fields)).active
        chosen = [_tried(rows, setting, runs) for runs in (gpt_runs, same)]
        shared = sorted(set.intersection(*(set(x) for x in by_seed.values())))
        found.append({
            "model": model, "round": number, "active": active, "steps": steps, "tokens": tokens,
            "sequences": Job(model, "gpt", steps, batch=batch).sequences, "tokens_per_parameter": tokens / active,
            "recipes": recipes,
            "gpt": [gpt[s]["val_loss"] for s in SEEDS], "ngpt": [full[s]["val_loss"] for s in SEEDS] if full else None,
            "tuning_seed": chosen if all(chosen) else None,
            "shorter": {str(round(t / tokens, 3)): [by_seed[s][t] for s in SEEDS] for t in shared},
            **token_ratio({s: gpt[s]["val_loss"] for s in SEEDS}, tokens, by_seed),
            "cpu_ratio": _cpu(full.values()) / _cpu(gpt.values()) if full and _cpu(gpt.values()) else None,
            "curves": {"gpt": [gpt[s]["curve"] for s in SEEDS], "ngpt": [full[s]["curve"] for s in SEEDS if full]},
        })  # fmt: skip
    return found


def _tried(rows: list[dict], setting: dict, runs: list[dict]) -> float | None:
    """The final loss of these runs' recipe on the tuning seed, in that setting; None if it was not tried there."""
    same = {**setting, "side": runs[0]["side"], "recipe": runs[0]["recipe"], "seed": 0, "fields": {}}
    return next((r["val_loss"] for r in rows if same.items() <= r.items()), None)


def pooled(comparisons: list[dict]) -> dict:
    """The spread of the seeds pooled over several comparisons: the standard deviation of log(ratio), and the factor by which a
    mean of three may be off at 95% (assuming the same spread everywhere)."""
    logs = [[math.log(r) for r in f["seeds"]] for f in comparisons if f["ratio"]]
    freedom = sum(len(x) - 1 for x in logs)
    deviation = math.sqrt(sum((len(x) - 1) * stdev(x) ** 2 for x in logs) / freedom) if freedom else math.inf
    factor = math.exp(float(student.ppf(0.975, freedom)) * deviation / math.sqrt(len(SEEDS))) if freedom else math.inf
    return {"comparisons": len(logs), "deviation": deviation, "factor": factor}


def _cpu(rows: Iterable[dict]) -> float:
    """Median CPU seconds of the runs that were not interrupted."""
    seconds = [r["cpu_seconds"] for r in rows if r["cpu_seconds"]]
    return median(seconds) if seconds else 0.0


def published(rows: list[dict]) -> dict[str, dict]:
    """Final losses of the largest hybrid's nGPT: with untuned numbers, by seed, as far as they were trained; and with the tuned
    numbers, resetting one at a time. Also the results of both sides' peak rates there on the tuning seed."""
    known, found = {r["name"]: r["val_loss"] for r in rows}, {}
    for name, jobs in published_jobs().items():
        found[name] = {str(job.seed): known[job.name] for job in jobs if job.name in known}
    best = largest_best(Stored(rows))
    found["apart"] = {name: known[job.name] for name, job in apart_jobs(best["ngpt"]).items() if job.name in known}
    steps = STEPS["hybrid-1M"] // 2
    same = [r for r in rows if (r["model"], r["steps"], r["seed"]) == ("hybrid-1M", steps, 0) and not r["fields"]]
    for side, rate in RATES.items():
        mine = [r for r in same if r["side"] == side and {**r["recipe"], rate: 0} == {**best[side], rate: 0}]
        found[f"{side}_rates"] = {f"{r['recipe'][rate]:g}": r["val_loss"] for r in mine}
    return found


def listed(rows: list[dict], jobs: list[Job]) -> list[dict]:
    """The final losses of these jobs, as far as they were trained."""
    by_name, keys = {r["name"]: r for r in rows}, ("model", "side", "steps", "seed", "recipe", "val_loss")
    return [{k: by_name[job.name][k] for k in keys} for job in jobs if job.name in by_name]


def peaks(rows: list[dict]) -> list[dict]:
    """The losses of a side that was trained with three or more peak rates (GPT's lr, nGPT's C) and no other change, and the
    rate at the minimum of a parabola over log(rate) through the best and its neighbors (None: at the edge)."""
    groups: dict[tuple, dict[float, float]] = {}
    for r in rows:
        rate = RATES[r["side"]]
        if r["batch"] is None and not r["fields"] and rate in r["recipe"] and r["val_loss"]:
            others = json.dumps({k: v for k, v in r["recipe"].items() if k != rate}, sort_keys=True)
            groups.setdefault((r["side"], r["model"], r["steps"], r["seed"], others), {})[r["recipe"][rate]] = r["val_loss"]
    found = []
    for (*setting, others), losses in sorted(groups.items()):
        if len(losses) > 2:
            row = {**dict(zip(("side", "model", "steps", "seed"), setting)), "others": json.loads(others)}
            tried = sorted(losses)
            found.append({**row, "tried": tried, "losses": [losses[x] for x in tried], "best": lowest(losses)})
    return found


def lowest(losses: dict[float, float]) -> float | None:
    """The rate at the minimum of the parabola over log(rate) through the best of these and its two neighbors."""
    tried = sorted(losses)
    i = tried.index(min(losses, key=losses.get))
    if i in (0, len(tried) - 1):
        return None
    (x0, y0), (x1, y1), (x2, y2) = ((math.log(x), losses[x]) for x in tried[i - 1 : i + 2])
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)  # slopes at the middles of the two intervals
    middles = (x0 + x1) / 2, (x1 + x2) / 2
    return math.exp(middles[0] - left * (middles[1] - middles[0]) / (right - left))


def ablations(rows: list[dict], jobs: dict[str, list[Job]]) -> list[dict]:
    """Final loss of each changed recipe minus the recipe's, seed by seed. Unfinished ones are left out."""
    by_name = {r["name"]: r for r in rows}
    finished = {k: [by_name[j.name] for j in js] for k, js in jobs.items() if all(j.name in by_name for j in js)}
    base, found = finished.pop("recipe", None), []
    if base is None:
        return []
    for name, changed in finished.items():
        if any(r["val_loss"] is None for r in changed):
            found.append({"name": name, "diverged": sum(r["val_loss"] is None for r in changed)})
            continue
        middle, low, high = interval([r["val_loss"] - b["val_loss"] for r, b in zip(changed, base)])
        losses = [r["val_loss"] for r in changed]
        found.append({"name": name, "difference": middle, "low": low, "high": high, "losses": losses})
    return found


def lengths(rows: list[dict], jobs: list[Job], best: dict) -> list[dict]:
    """The smallest hybrid in runs of several lengths: what differs from its recipe, and the final loss."""
    by_name = {r["name"]: r for r in rows}
    return [
        {"steps": job.steps, "change": {k: v for k, v in job.recipe.items() if v != best.get(k)}, "loss": found["val_loss"]}
        for job in jobs
        if (found := by_name.get(job.name))
    ]


def blocks(rows: list[dict], betas: dict[str, str]) -> list[dict]:
    """What each block is worth in the dense models of the comparisons, and their round: see blocks.py."""
    known, by_name = {r["name"]: r for r in rows}, {}
    for found in map(json.loads, BLOCKS.read_text().splitlines()):
        by_name[found.pop("name")] = found
    keys = ("model", "side", "seed", "steps", "val_loss")
    rounds = {name: int(second(known[name], betas)) for name in by_name}
    return [{**{k: known[name][k] for k in keys}, "round": rounds[name], **found} for name, found in by_name.items()]


def second_round() -> dict:
    """The second round's comparisons."""
    import plan
    import trial
    import verdict

    return verdict.summary(trial.read(), plan.plan())


def main() -> None:
    rows = read()
    tuned, best = tuning(rows), checked(Stored(rows), HYBRID, QUARTER)["ngpt"]
    betas = {side: x["best"]["betas"] for side, x in tuned.items()}
    found = comparisons(rows, betas)
    pieces = {"hybrid": ablation_jobs(HYBRID, best, QUARTER), "dense": ablation_jobs(SMALLEST, FIRST["ngpt"], 1000, 8)}
    summary = {
        "about": {
            "corpus": library.CHECKSUM, "python": platform.python_version(), "torch": torch.__version__.split("+")[0],
            "runs": len(rows), "cpu_hours": round(sum(r["cpu_seconds"] or 0 for r in rows) / 3600, 1),
        },
        "tuning": tuned, "comparisons": found, "hybrid": best,
        "pooled": pooled([f for f in found if f["model"].startswith("hybrid")]),
        "lengths": lengths(rows, length_jobs(best), best), "own": own_trials(rows), "blocks": blocks(rows, betas),
        "log_decay": log_decay(rows), "published": published(rows),
        "around": listed(rows, around_jobs()), "ruled": listed(rows, ruled_jobs()), "peaks": peaks(rows),
        "parts": {name: [r["val_loss"] for r in listed(rows, jobs)] for name, jobs in parts_jobs().items()},
        "ablations": {kind: ablations(rows, jobs) for kind, jobs in pieces.items()},
        "second": second_round(),
    }  # fmt: skip
    OUT.write_text(json.dumps(_rounded(summary), indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{len(rows)} runs, {summary['about']['cpu_hours']} CPU hours -> {OUT.name}, {OUT.stat().st_size:,} bytes")
    for side, x in tuned.items():
        print(f"tuned {side}: {x['best']}  ({len(x['trials'])} trials)")
    for f in summary["comparisons"]:
        ratio = f"{f['ratio']:.2f} [{f['low']:.2f}, {f['high']:.2f}]" if f["ratio"] else ", ".join(f["bounds"])
        losses = f"GPT {mean(f['gpt']):.4f}  nGPT {mean(f['ngpt']) if f['ngpt'] else math.nan:.4f}"
        print(f"{f['model']:<12} x {f['sequences']} {f['tokens'] / 1e6:5.1f}M tokens  {losses}  ratio {ratio}  {f['recipes']}")
    for name, losses in summary["published"].items():
        print(f"hybrid-1M, {name}: {losses}")
    for kind, found in summary["ablations"].items():
        for a in sorted(found, key=lambda a: -a.get("difference", 9)):
            changed = f"{a['difference']:+.4f} [{a['low']:+.4f}, {a['high']:+.4f}]" if "difference" in a else a
            print(f"{kind:<7}{a['name']:<26}", changed)
    for r in summary["lengths"]:
        print(f"{r['steps']:5} steps  {r['loss']:.4f}  {r['change']}")


def _rounded(x: object) -> object:
    if isinstance(x, float):
        return float(f"{x:.5g}")
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    return [_rounded(v) for v in x] if isinstance(x, list | tuple) else x


if __name__ == "__main__":
    main()
