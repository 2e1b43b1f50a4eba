"""Which runs does the second round make, in which order, and what does each cost?

    python benchmarks/evidence/plan.py             the runs in order: name, cost, budget used so far
    python benchmarks/evidence/plan.py --power     which differences N seeds can detect

The list was committed before the first run. A point that was added later says when and why (``added``); none is removed.

    group     what is tuned together: a model, a side, a context, a length. "tune" in a name: one of its trials, on TUNING's
              seed, judged on the held-out text of the tuning. Both sides of a comparison have the same number of them:
                  rate-1, rate-0.5, rate-2   the rate of ``recipe.scaled`` times that
                  rate-next                  beyond the best if it is at an end, else between it and its better neighbor
                  other                      the best so far with one more number changed (OTHER)
    result    the group's best numbers on RESULT's seeds, which no trial of either round has used, judged on the held-out text
              of the results. "0.7" and "0.5" in a name: shorter schedules, with the numbers of the whole one
    cost      core-minutes, from the speeds that were measured (SPEED; one thread of a machine with two cores, 2026-11-19)

Power. sigma of a run, pooled over the hybrids of the first round (58 settings of three seeds), is 0.0052; of the dense models
(43) 0.026. With n seeds a side, a difference of (1.96 + 0.84) sigma sqrt(2/n) is found four times in five at 5%: in a hybrid
0.0146 with two seeds, 0.0119 with three, 0.0092 with five. Halving the tokens costs a hybrid about 0.1 nats, so three seeds
resolve about 8% of the tokens. One seed, as the first trial of a mechanism has, shows only what is worth 0.02 or more: smaller
gains may be missed, and none counts before it stands on three seeds.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from runner import MODELS

from ngpt_core import recipe
from ngpt_core.config import ModelConfig
from ngpt_core.train.config import model_config

TUNING, RESULT = 10, (11, 12, 13)
BATCH = 2048  # tokens in a batch, at every context
SHARES = (1.0, 0.7, 0.5)  # of the whole length, for the side that is ahead
BUDGET = 41 * 60  # core-minutes: about 40 hours
LIMIT = 100  # core-minutes of one run
SPEED = {  # tokens a second on one core at a context of 512; the sides differ by less than a tenth
    "hybrid-0.2M": 27_000, "hybrid-0.5M": 15_000, "hybrid-1M": 8_700, "hybrid-3M": 4_700,
    "dense-0.2M": 38_000, "dense-1M": 14_000, "dense-3M": 6_700,
}  # fmt: skip
SLOWER = {128: 0.95, 512: 1.0, 1024: 1.25, 2048: 1.3}  # by context, and by side:
DEARER = {"gpt": 1.0, "ngpt": 1.0, "qk": 1.05, "muon": 1.2, "muonh": 1.2, "free": 1.05}
HELD_OUT = 700_000  # tokens of training that cost as much as the measurements of a run, at a third of the price per token

RATE = {"ngpt": "C"}  # the number that sets the peak rate; the others have "lr"
OTHER: dict[str, dict[str, Any]] = {  # the fifth trial: the first moment of the other length; Muon: its share of the rate
    "gpt": {"recipe": {"betas": "0.9,0.95"}}, "ngpt": {"recipe": {"betas": "0.8,0.975"}},
    "qk": {"recipe": {"betas": "0.9,0.95"}}, "free": {"recipe": {"betas": "0.9,0.95"}},
    "muon": {"extra": {"hidden": 3.0}}, "muonh": {"extra": {"hidden": 3.0}},
}  # fmt: skip
START = {"muonh": 0.01}  # peak rates that recipe.scaled does not know: the share of its norm by which a matrix moves


@dataclass(frozen=True)
class Point:
    """One run. ``recipe``, ``fields`` and ``extra`` are the changes from ``recipe.scaled``, the model, the plain trainer."""

    name: str
    item: int
    """Of the issue's list; 6 is the last test, 7 the rule of GPT's rate."""
    group: str
    model: str
    side: str
    context: int
    steps: int
    seed: int = TUNING
    recipe: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What mechanisms.py and peers.py add."""
    pick: str = "given"
    """"given": these numbers. "next": the rate that follows from the group's first trials. "best": those of the group's best
    trial, with the changes given here."""
    rule: str = "ours"
    """Of recipe.scaled."""
    corpus: str = "python"
    added: str = ""
    """A date and a reason, if the point was not in the first list."""

    @property
    def trial(self) -> bool:
        return ".tune." in self.name

    @property
    def sequences(self) -> int:
        return BATCH // self.context

    @property
    def tokens(self) -> int:
        return self.steps * BATCH

    @property
    def config(self) -> ModelConfig:
        return model_config({**MODELS[self.model][0], **self.fields, "normalized": self.side == "ngpt"})

    @property
    def minutes(self) -> float:
        """The estimated cost, in core-minutes."""
        speed = SPEED[self.model] / SLOWER[self.context] / DEARER[self.side]
        return (self.tokens + HELD_OUT) / speed / 60


# ---- from the plan to a run ------------------------------------------------------------------------------------------
def needed(point: Point, plan: Iterable[Point]) -> list[Point]:
    """The points whose results a point waits for: its group's trials, or those before it."""
    mine = [p for p in plan if p.group == point.group and p.trial]
    return [] if point.pick == "given" else mine[: mine.index(point)] if point in mine else mine


def resolved(point: Point, plan: Iterable[Point], rows: Mapping[str, Mapping]) -> Point:
    """The point with its numbers, from the results of those that it waits for."""
    done = [rows[p.name] for p in needed(point, plan)]
    if point.pick == "given" or not done:
        return point
    best = min(done, key=lambda row: math.inf if row["loss"] is None else row["loss"]["tuning"])
    merged = {k: {**best[k], **getattr(point, k)} for k in ("recipe", "extra")}
    if point.pick == "next":
        rate = rate_of(point.side)
        losses = {row["recipe"][rate]: math.inf if row["loss"] is None else row["loss"]["tuning"] for row in done}
        merged["recipe"][rate] = following(losses)
    return replace(point, **merged)


def following(losses: Mapping[float, float]) -> float:
    """The rate to try next: beyond the best if that is the lowest or the highest, else between it and its better neighbor."""
    tried = sorted(losses)
    at = tried.index(min(losses, key=losses.__getitem__))
    if at in (0, len(tried) - 1):
        return round(tried[at] * (0.5 if at == 0 else 2.0), 6)
    neighbor = min(tried[at - 1], tried[at + 1], key=losses.__getitem__)
    return round(math.sqrt(tried[at] * neighbor), 6)


def rate_of(side: str) -> str:
    return RATE.get(side, "lr")


# ---- what the groups are made of -------------------------------------------------------------------------------------
def steps_for(model: str, per_parameter: float) -> int:
    """The steps of a run with ``per_parameter`` tokens for each active parameter."""
    from ngpt_core.presets import count_parameters

    config = model_config(MODELS[model][0])
    return round(per_parameter * count_parameters(config).active / BATCH)


def start(model: str, side: str, steps: int) -> float:
    """The rate of recipe.scaled, around which a group is tuned."""
    config = model_config({**MODELS[model][0], "normalized": side == "ngpt"})
    numbers = recipe.scaled(config, steps)
    if side == "ngpt":
        return round(numbers.C, 4)
    return START.get(side, config.gpt_lr if numbers.lr is None else numbers.lr)


def trials(base: Point, count: int = 5) -> list[Point]:
    """The trials of the group of ``base``, in order."""
    rate, middle = rate_of(base.side), start(base.model, base.side, base.steps)
    listed = [(f"rate-{x:g}", {"recipe": {rate: round(x * middle, 6)}}) for x in (1.0, 0.5, 2.0)]
    listed += [("rate-next", {"pick": "next"}), ("other", {"pick": "best", **OTHER[base.side]})]
    return [_changed(base, f"tune.{name}", change) for name, change in listed[:count]]


def _changed(base: Point, name: str, change: Mapping[str, Any]) -> Point:
    merged = {k: {**getattr(base, k), **v} if isinstance(v, dict) else v for k, v in change.items()}
    return replace(base, name=f"{base.group}.{name}", **merged)


def results(base: Point, seeds: Iterable[int] = RESULT, shares: Iterable[float] = SHARES) -> list[Point]:
    """The group's best numbers on the seeds of the result, as whole and shorter schedules."""
    return [
        replace(base, name=f"{base.group}.s{seed}.{share:g}", seed=seed, steps=round(share * base.steps), pick="best")
        for seed in seeds
        for share in shares
    ]


def base(item: int, label: str, model: str, side: str, context: int, steps: int, **more: Any) -> Point:
    return Point("", item, f"{label}.{side}", model, side, context, steps, **more)


def pair(item: int, label: str, model: str, context: int, per_parameter: float, **more: Any) -> list[Point]:
    """Both sides of a comparison."""
    steps = steps_for(model, per_parameter)
    return [base(item, label, model, side, context, steps, **more) for side in ("gpt", "ngpt")]


def alternating(lists: Iterable[list[Point]]) -> list[Point]:
    """One of each in turn, so that no side is ahead of the other."""
    return [p for row in zip(*lists, strict=True) for p in row]


def compared(pairs: list[list[Point]], count: int = 5, seeds: Iterable[int] = RESULT, shares=SHARES) -> list[Point]:
    """All trials of these comparisons, then one seed of the results after another."""
    found = [p for both in pairs for p in alternating(trials(side, count) for side in both)]
    for seed in seeds:
        for gpt, other in pairs:
            found += [*results(gpt, [seed], SHARES[:1]), *results(other, [seed], shares)]
    return found


# ---- the plan --------------------------------------------------------------------------------------------------------
MIDDLE, CONTEXT = "hybrid-0.5M", 512  # of items 3 to 5
TEN = steps_for(MIDDLE, 10)


def contexts() -> list[Point]:
    """Item 1: 128, 512 and 2048 bytes at equal tokens, ten for each parameter."""
    return compared([pair(1, f"context-{context}", MIDDLE, context, 10) for context in (128, 512, 2048)])


def sizes() -> list[Point]:
    """Item 2: size with tokens. The largest is tuned at a quarter of its length, on both sides, and nGPT has no schedule of the
    whole length there; its first moments, which no trial changes, are those of recipe.scaled at each length."""
    found = compared([pair(2, "size-0.2M-40", "hybrid-0.2M", CONTEXT, 40)])
    found += compared([pair(2, "size-1M-10", "hybrid-1M", CONTEXT, 10), pair(2, "size-0.5M-20", MIDDLE, CONTEXT, 20)], count=4)
    gpt, ngpt = pair(2, "size-3M-10", "hybrid-3M", CONTEXT, 10)
    found += alternating(trials(replace(side, steps=side.steps // 4), 3) for side in (gpt, ngpt))
    for seed in RESULT[:2]:
        found += [*results(gpt, [seed], (1.0,)), *results(ngpt, [seed], (0.7, 0.5))]
    return found


def exponents() -> list[Point]:
    """Item 3: nGPT with the rates of others, where nothing was tuned for them, beside ours."""
    found = []
    for model in ("hybrid-0.2M", MIDDLE, "hybrid-1M"):
        steps = steps_for(model, 10)
        for seed in RESULT[:2]:
            for name, change in EXPONENTS.items():
                mine = base(3, f"exponents-{model[7:]}", model, "ngpt", CONTEXT, steps, seed=seed)
                found.append(_changed(mine, f"{name}.s{seed}", change))
    apart = base(3, f"exponents-{MIDDLE[7:]}", MIDDLE, "ngpt", CONTEXT, TEN, added=APART_ADDED)
    for seed in RESULT[:2]:
        found += [_changed(replace(apart, seed=seed), f"{name}.s{seed}", change) for name, change in APART.items()]
    return found


EXPONENTS: dict[str, dict[str, Any]] = {
    "ours": {}, "nugpt": {"rule": "nugpt"}, "nugpt-init": {"rule": "nugpt", "extra": {"initialized": "nugpt"}},
    "hyperp": {"rule": "hyperp"},
}  # fmt: skip

APART_ADDED = "2026-11-19: the issue asks for rates of head and embedding apart from the rest, and the list had only nuGPT's"
APART: dict[str, dict[str, Any]] = {
    "embedding-0.5": {"recipe": {"embedding_multiplier": 0.5}}, "embedding-2": {"recipe": {"embedding_multiplier": 2.0}},
    "both-0.5": {"recipe": {"embedding_multiplier": 0.5}, "extra": {"head": "embedding"}},
    "both-2": {"recipe": {"embedding_multiplier": 2.0}, "extra": {"head": "embedding"}},
}  # fmt: skip

MECHANISMS: dict[str, list[tuple[str, dict[str, Any]]]] = {  # item 4: side -> what is tried on the tuning's seed
    "ngpt": [
        ("floor-0.1", {"extra": {"floor": 0.1}}), ("floor-0.3", {"extra": {"floor": 0.3}}),
        ("held-0.3", {"extra": {"floor": 0.3, "held": True}}), ("held-1", {"extra": {"floor": 1.0, "held": True}}),
        ("matrix-0.3", {"extra": {"floor": 0.3, "held": True, "over": "matrix"}}),
        ("beta1-rises", {"extra": {"memory": [0.5, 4.0]}}), ("beta1-falls", {"extra": {"memory": [4.0, 0.5]}}),
        ("flat-then-averaged", {"recipe": {"rho": 1.0}}),
    ],
    "gpt": [
        ("beta1-rises", {"extra": {"memory": [0.5, 4.0]}}), ("beta1-falls", {"extra": {"memory": [4.0, 0.5]}}),
        ("flat-then-averaged", {"recipe": {"eta_min": 0.3}}),
    ],
}  # fmt: skip


def mechanisms() -> list[Point]:
    """Item 4, on top of the numbers that item 1 found at its middle context. Every run of the plan also has the losses of its
    averaged weights. What leads by 0.01 or more is trained on three seeds: points that are added then."""
    found = []
    for side, changes in MECHANISMS.items():
        mine = base(4, f"context-{CONTEXT}", MIDDLE, side, CONTEXT, TEN, pick="best")
        found += [_changed(mine, f"with.{name}", change) for name, change in changes]
    return found


def peers() -> list[Point]:
    """Item 5: four that a reader will ask about, with as many trials as GPT and nGPT had."""
    sides = [base(5, "peers", MIDDLE, side, CONTEXT, TEN) for side in ("qk", "muon", "muonh", "free")]
    found = alternating(trials(side) for side in sides)
    return found + [p for seed in RESULT for side in sides for p in results(side, [seed])]


def last_test() -> list[Point]:
    """The rule where nothing was tuned: other text, and a context between those of item 1. GPT has the best of three rates."""
    found = []
    for label, context, corpus in (("docs", CONTEXT, "docs"), ("between", 1024, "python")):
        gpt, ngpt = pair(6, f"test-{label}", MIDDLE, context, 10, corpus=corpus)
        found += trials(gpt, 3)
        for seed in RESULT:
            found += [*results(gpt, [seed], (1.0,)), *(replace(p, pick="given") for p in results(ngpt, [seed]))]
    return found


RATES_ADDED = "2026-11-19: the issue asks for a rule of GPT's rate, and the list had no dense model"
RATES = {("dense-0.2M", 1000): 3, ("dense-0.2M", 4000): 3, ("dense-1M", 2000): 3, ("dense-3M", 1000): 4}  # rates of each
HIGHEST = 0.0022  # GPT's peak rate without a rule


def rates() -> list[Point]:
    """GPT's rate in dense models: half as much from trial to trial, then the next as everywhere. The widest is the test of the
    rule that follows from the others. nGPT, with the numbers of recipe.scaled, stands beside the two largest."""
    found = []
    for (model, steps), count in RATES.items():
        gpt, ngpt = (base(7, f"rate-{model[6:]}-{steps}", model, s, CONTEXT, steps, added=RATES_ADDED) for s in ("gpt", "ngpt"))
        for share in (0.5**i for i in range(count)):
            found.append(_changed(gpt, f"tune.rate-{share:g}", {"recipe": {"lr": round(share * HIGHEST, 6)}}))
        if count == 3:
            found.append(_changed(gpt, "tune.rate-next", {"pick": "next"}))
        if model != "dense-0.2M":
            found.append(_changed(ngpt, "tune.rule", {}))
    return found


LISTS: tuple[Callable[[], list[Point]], ...] = (contexts, sizes, exponents, mechanisms, peers, last_test, rates)


def plan() -> list[Point]:
    """Every run, in order."""
    return [point for listed in LISTS for point in listed()]


def resolvable(sigma: float, seeds: int, power_z: float = 0.84) -> float:
    """The difference of two means over this many seeds that is found four times in five at 5%, by a z test."""
    return (1.96 + power_z) * sigma * math.sqrt(2 / seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--power", action="store_true")
    parser.add_argument("--json", action="store_true", help="the points as lines of JSON")
    args = parser.parse_args()
    if args.power:
        for sigma in (0.003, 0.0052, 0.01, 0.026):
            told = "  ".join(f"{n} seeds {resolvable(sigma, n):.4f}" for n in (1, 2, 3, 5, 8))
            print(f"sigma {sigma:.4f}:  {told}")
        return
    used = 0.0
    for point in plan():
        used += point.minutes
        if args.json:
            print(json.dumps(asdict(point)))
        else:
            mark = f"  added {point.added}" if point.added else ""
            print(f"{point.item}  {point.name:<40}{point.tokens / 1e6:6.1f}M{point.minutes:7.1f} min{used / 60:7.2f} h{mark}")


if __name__ == "__main__":
    main()
