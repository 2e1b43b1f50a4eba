"""What do the runs of the second round decide? Differences and token ratios with intervals, and the test behind them.

python benchmarks/evidence/verdict.py          every group's trials, and every comparison that has results

spread        the standard deviation of what a seed adds, pooled: the squares of every setting's deviations from its mean
              over the seeds, summed, over the sum of (seeds - 1), the degrees of freedom. All settings share it
difference    one side's loss minus GPT's, on the same seeds: the same text in the same order. Its spread is that of these
              differences. Student's t with the pooled freedom: interval of 95%, two-sided p; z is the mean over its error
token ratio   the share of GPT's tokens with which the other side reaches GPT's loss: where the mean difference of its
              schedules of 0.5, 0.7 and 1 times GPT's length, a straight line over log(tokens) between two of them, is
              zero. The interval has every share at which a t test would not tell the difference from zero. Nothing is
              extrapolated: beyond the trained lengths there is a bound, or an open end
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from plan import Point, rate_of
from scipy.stats import t as student
from trial import TABLE, read

from ngpt_book.figures.whole import tokens_to_reach
from ngpt_core.presets import count_parameters

Losses = Mapping[int, float]  # by seed


class Spread(NamedTuple):
    """A pooled standard deviation and its degrees of freedom."""

    sigma: float
    freedom: int

    def half(self, n: int) -> float:
        """Half of the 95% interval of a mean of n."""
        return float(student.ppf(0.975, self.freedom)) * self.sigma / math.sqrt(n) if self.freedom else math.inf


class Difference(NamedTuple):
    """A mean difference with its 95% interval and its test against zero."""

    mean: float
    low: float
    high: float
    z: float
    p: float
    n: int


class Ratio(NamedTuple):
    """A share of the tokens, with its 95% interval; None: beyond what was trained."""

    ratio: float | None
    low: float | None
    high: float | None
    bound: str
    """"< 0.50" or "> 1.00" if there is no ratio."""


def pooled(settings: Iterable[Sequence[float]]) -> Spread:
    """The spread of several settings, each a list of numbers that differ only in the seed."""
    squares, freedom = 0.0, 0
    for values in settings:
        mean = sum(values) / len(values)
        squares, freedom = squares + sum((x - mean) ** 2 for x in values), freedom + len(values) - 1
    return Spread(math.sqrt(squares / freedom) if freedom else math.inf, freedom)


def paired(other: Losses, gpt: Losses) -> list[float]:
    """The differences on the seeds that both have."""
    return [other[seed] - gpt[seed] for seed in sorted(other.keys() & gpt.keys())]


def difference(values: Sequence[float], spread: Spread) -> Difference:
    """Of paired differences."""
    n, mean = len(values), sum(values) / len(values)
    half, error = spread.half(n), spread.sigma / math.sqrt(n)
    z = mean / error if error else math.copysign(math.inf, mean)
    p = 2 * float(student.sf(abs(z), spread.freedom)) if spread.freedom else 1.0
    return Difference(mean, mean - half, mean + half, z, p, n)


def token_ratio(by_share: Mapping[float, Sequence[float]], spread: Spread) -> Ratio:
    """``by_share``: the paired differences of each schedule, by its share of GPT's tokens."""
    shares = sorted(by_share)
    means = [sum(by_share[share]) / len(by_share[share]) for share in shares]
    half = spread.half(min(len(values) for values in by_share.values()))
    ratio = tokens_to_reach(0.0, shares, means)
    bound = "" if ratio is not None else f"< {shares[0]:.2f}" if means[0] < 0 else f"> {shares[-1]:.2f}"
    return Ratio(ratio, tokens_to_reach(half, shares, means), tokens_to_reach(-half, shares, means), bound)


# ---- from the table --------------------------------------------------------------------------------------------------
def by_share(rows: Mapping[str, Mapping], group: str) -> dict[float, dict[int, float]]:
    """The result losses of a group: share of the whole length -> seed -> loss."""
    found: dict[float, dict[int, float]] = defaultdict(dict)
    for name, row in rows.items():
        share = name.removeprefix(f"{group}.s{row['seed']}.")
        if row["group"] == group and share != name and row["loss"] is not None:
            found[float(share)][row["seed"]] = row["loss"]["result"]
    return dict(found)


def by_place(rows: Mapping[str, Mapping], group: str) -> list[list[float]]:
    """A group's loss by the place in the window, [end, mean over the seeds], of the schedules of the whole length."""
    whole = by_share(rows, group).get(1.0, {})
    runs = [rows[f"{group}.s{seed}.1"].get("positions") for seed in whole]
    return [[of[0][0], sum(loss for _, loss in of) / len(of)] for of in zip(*filter(None, runs))]


def baseline(group: str) -> str:
    """The group of the GPT that a group is compared with: the peers stand beside item 1's at their context."""
    label, _, _ = group.rpartition(".")
    return "context-512.gpt" if label == "peers" else f"{label}.gpt"


def comparisons(rows: Mapping[str, Mapping]) -> dict[str, tuple[Difference | None, Ratio | None]]:
    """Every group that has results beside its GPT's. One spread for all: that of the paired differences."""
    sides, found = {}, {}
    for group in dict.fromkeys(row["group"] for row in rows.values()):
        gpt = by_share(rows, baseline(group)).get(1.0, {})
        differences = {share: paired(losses, gpt) for share, losses in by_share(rows, group).items()}
        if group != baseline(group) and any(differences.values()):
            sides[group] = {share: values for share, values in differences.items() if values}
    spread = Spread(pooled(values for each in sides.values() for values in each.values()).sigma, freedom(sides.values()))
    for group, differences in sides.items():
        whole = difference(differences[1.0], spread) if 1.0 in differences else None
        found[group] = (whole, token_ratio(differences, spread) if len(differences) > 1 else None)
    return found


def freedom(comparisons: Iterable[Mapping[float, Sequence[float]]]) -> int:
    """The schedules of a comparison share GPT's runs, so all of them together count once: seeds - 1."""
    return sum(max(map(len, differences.values())) - 1 for differences in comparisons)


def summary(rows: Mapping[str, Mapping], every: Sequence[Point]) -> dict:
    """What the book draws: how far the round is, and nGPT's comparisons with their settings."""
    found = []
    mean = lambda group: sum(x := by_share(rows, group)[1.0].values()) / len(x)  # noqa: E731
    for group, (whole, ratio) in comparisons(rows).items():
        point = max((p for p in every if p.group == group), key=lambda p: p.tokens, default=None)
        if point is None or point.side != "ngpt" or ratio is None or whole is None:
            continue
        active = count_parameters(point.config).active
        found.append({
            "group": group, "model": point.model, "context": point.context, "active": active, "tokens": point.tokens,
            "tokens_per_parameter": point.tokens / active, "seeds": whole.n, "difference": whole.mean, **ratio._asdict(),
            "gpt": mean(baseline(group)), "ngpt": mean(group),
            "places": {"gpt": by_place(rows, baseline(group)), "ngpt": by_place(rows, group)},
        })  # fmt: skip
    singles = {name: rows[name]["loss"]["tuning"] for name in SINGLES if name in rows}
    return {"finished": sum(p.name in rows for p in every), "planned": len(every), "comparisons": found,
            "trials": tried(rows), "singles": singles}  # fmt: skip


SINGLES = ("size-0.5M-20.gpt.tune.rate-1", "peers.qk.tune.rate-1")  # single runs that the text mentions


def tried(rows: Mapping[str, Mapping]) -> dict[str, dict[str, float]]:
    """Of the finished contexts: a side's trials with nothing but another rate, rate -> loss on the text of the trials."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name, row in rows.items():
        if name.startswith("context-") and ".tune.rate-" in name and row["loss"] is not None:
            found[row["group"]][f"{row['recipe'][rate_of(row['side'])]:g}"] = row["loss"]["tuning"]
    return {group: losses for group, losses in found.items() if len(losses) == 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE)
    rows = read(parser.parse_args().table)
    hours = sum(row["cpu_seconds"] + (row["evaluation_seconds"] or 0) for row in rows.values()) / 3600  # None: not kept
    print(f"{len(rows)} runs, {hours:.1f} core-hours")
    for row in rows.values():
        loss = row["loss"] or {"tuning": math.nan, "result": math.nan}
        changes = {rate_of(row["side"]): row["recipe"].get(rate_of(row["side"])), **row["recipe"], **row["extra"]}
        print(f"{row['name']:<40} {loss['tuning']:.4f} {loss['result']:.4f}  {row['cpu_seconds']:6.0f} s  {changes}")
    for group, (whole, ratio) in comparisons(rows).items():
        told = ""
        if whole is not None:
            told = f"{whole.mean:+.4f} [{whole.low:+.4f}, {whole.high:+.4f}]  z {whole.z:+.1f}  p {whole.p:.3g}"
        if ratio is not None:
            low, high = ("..." if x is None else f"{x:.2f}" for x in (ratio.low, ratio.high))
            told += f"  ratio {ratio.bound or format(ratio.ratio, '.2f')} [{low}, {high}]"
        print(f"{group:<24} {told}")


if __name__ == "__main__":
    main()
