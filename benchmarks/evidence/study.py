"""Does the recipe work at the sizes that a CPU can train? The experiments, stage by stage; each is useful by itself.

    python benchmarks/evidence/study.py tuned finals ablations ...     (without arguments: all of them)

    tuned       both sides at the smallest size, with the same number of trials on seed 0, at a quarter of the length: one axis
                after another, keeping the best value so far. Every trial is in the table.
    finals      the smallest size: the tuned settings on three other seeds, at a quarter of the length, and at the whole length
                with the best of three peak rates (seed 0). nGPT also with shorter schedules, which give the token ratio: the
                loss of a shorter run cannot be read off in the middle of a longer one
    hybrids, halves, ones
                the other sizes at a quarter of the length, with the best of three peak rates, or of more if the best is the
                lowest or highest (seed 0); the largest hybrid starts from what "moments" found
    moments     the hybrids again at a quarter of the length, with first moments and warmups tuned for them (seed 0, the same
                number of trials on both sides)
    ablations   the smallest hybrid with one thing changed, a quarter of the length, three seeds
    length      the smallest hybrid in runs of other lengths, one number changed at a time, on one seed (hybrids' seeds agree)
    decays      the smallest hybrid GPT with nGPT's logarithmic schedule, at peak rates tuned for it
    budgets     a second budget: the smallest hybrid at the whole length, the other sizes at half of it, each with the best
                peak rates at that length (longer runs prefer lower ones); the hybrids also with what "moments" found. The
                largest keep the peak rates of their first budget, and nGPT has one shorter schedule
    published   the largest hybrid's nGPT at half of the length with the published numbers, and with those of the first version
                of recipe.scaled, which changed only beta1; and, at a quarter of the length, the effect of each tuned number
                (seed 1)
    longest     the largest hybrid at the whole length, with the peak rates of its first budget; then other peak rates of both
                sides at half of the length, to see what they would have changed (seed 0)
    denses      the dense models at a quarter of the length with what "moments" found on the hybrid, and peak rates tuned again
    around      the runs from which, with "length", the rule of recipe.scaled is drawn: one tuned number changed in longer runs
                and in a wider model
    ruled       the rule's own numbers, compared with a tuned GPT

Stop it at any time; the next call continues. ``--workers 1`` leaves a core free. analyse.py makes the tables and the figures.
The rows with "batch": 8 are an earlier study of the smallest size, with 1,024 tokens in a batch (FIRST are its tuned numbers).
"""

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from runner import Job, Lab

from ngpt_core.optim.schedule import SCHEDULES, area

STEPS = {"dense-0.2M": 8000, "hybrid-0.2M": 8000, "dense-0.5M": 9200, "hybrid-0.5M": 9200, "dense-1M": 9800, "hybrid-1M": 9600}
SEEDS = (1, 2, 3)
RATES = {"gpt": "lr", "ngpt": "C"}  # what sets a side's peak rate
SHARES = (0.5, 0.7)  # of GPT's steps, for nGPT's shorter schedules
SMALLEST, HYBRID = "dense-0.2M", "hybrid-0.2M"
QUARTER = STEPS[SMALLEST] // 4
LENGTHS = (250, 500, 1000, 2000)
LENGTH_BETAS = ("0.6", "0.8", "0.95"), ("0.95", "0.975")
SHORT_BETA = "0.6"
BUDGETS = {"hybrid-0.5M": 0.5, HYBRID: 1.0, "dense-0.5M": 0.5, "hybrid-1M": 0.5, "dense-1M": 0.5}  # share of STEPS
LARGEST = ("hybrid-1M", "dense-1M")
MOMENTS = ("0.4,0.99", "0.6,0.99", "0.8,0.99", "0.95,0.99")  # 0.9 is the dense model's
FIRST = {"gpt": {"lr": 0.001, "betas": "0.8,0.99", "clip_norm": "none"}, "ngpt": {"C": 0.12, "betas": "0.8,0.99", "rho": 0.2}}

# One axis after another. A value may depend on the best so far. Both sides have the same number of trials.
TRIALS = {
    "gpt": [
        [{"lr": 0.0005}, {"lr": 0.001}, {"lr": 0.002}, {"lr": 0.004}, {"lr": 0.008}],
        [{"betas": "0.8,0.99"}, {"betas": "0.9,0.99"}, {"betas": "0.9,0.999"}, {"betas": "0.95,0.99"}],
        [{"schedule": "cosine"}, lambda best: {"schedule": "cosine", "lr": 2 * best["lr"]}, {"wsd_decay": 0.5}],
        [lambda best: {"schedule": "linear", "lr": 2 * best["lr"]}],
        [{"weight_decay": 0.0}, {"weight_decay": 0.3}, {"clip_norm": "none"}, {"warmup_share": 0.02}],
        [lambda best: {"lr": round(best["lr"] / 1.4, 6)}, lambda best: {"lr": round(best["lr"] * 1.4, 6)}],
    ],
    "ngpt": [
        [{"C": 0.24}, {"C": 0.24, "betas": "0.9,0.95"}, {"C": 0.24, "betas": "0.9,0.99"}, {"C": 0.24, "betas": "0.8,0.99"}],
        [{"C": 0.06}, {"C": 0.12}, {"C": 0.48}],
        [{"betas": "0.95,0.99"}, {"betas": "0.9,0.999"}, {"rho": 0.2}, {"rho": 1.0}],
        [{"cap_degrees": 0.5}, {"cap_degrees": 2.0}, {"cap_degrees": 4.0}, {"warmup_share": 0.02}],
        [{"s_z_lr": 1.0, "alpha_lr": 0.4, "s_qk_lr": 0.4}, {"s_z_lr": 0.25, "alpha_lr": 0.1, "s_qk_lr": 0.1}],
        [lambda best: {"C": round(best["C"] / 1.4, 6)}, lambda best: {"C": round(best["C"] * 1.4, 6)}],
    ],
}
assert len({sum(map(len, axes)) for axes in TRIALS.values()}) == 1, "equal budgets"


def loss(row: dict) -> float:
    return math.inf if row["val_loss"] is None else row["val_loss"]


def trials(lab: Lab, side: str) -> list[dict]:
    """The rows of a side's trials, in order."""
    best, done = {}, []
    for axis in TRIALS[side]:
        candidates = [{**best, **(trial(best) if callable(trial) else trial)} for trial in axis]
        done += lab.map(Job(SMALLEST, side, QUARTER, 0, recipe) for recipe in candidates)
        best = min(done, key=loss)["recipe"]
    return done


def tuned(lab: Lab) -> dict[str, dict]:
    """The best recipe numbers of each side."""
    with ThreadPoolExecutor() as pool:
        return {side: min(rows, key=loss)["recipe"] for side, rows in zip(TRIALS, pool.map(partial(trials, lab), TRIALS))}


def comparison(model: str, steps: int, best: dict[str, dict], shares=SHARES, seeds=SEEDS) -> list[Job]:
    """GPT and nGPT on the same batches, and nGPT with shorter schedules."""
    jobs = []
    for seed in seeds:
        jobs += [Job(model, "gpt", steps, seed, best["gpt"])]
        jobs += [Job(model, "ngpt", round(share * steps), seed, best["ngpt"]) for share in (1.0, *shares)]
    return jobs


def checked(lab: Lab, model: str, steps: int, best: dict[str, dict] | None = None) -> dict[str, dict]:
    """``best`` (the tuned settings) with the best of three peak rates, on seed 0 and at this length. If that is the lowest or
    the highest of them, the next one beyond is tried too, until the best has a neighbor on each side."""
    best = best or tuned(lab)

    def peak(side: str) -> dict:
        rate, rows = RATES[side], []
        ahead = [round(best[side][rate] * factor, 6) for factor in (0.5, 1.0, 2.0)]
        while ahead and (new := lab.map(Job(model, side, steps, 0, {**best[side], rate: value}) for value in ahead)):
            rows += new
            tried, found = sorted(row["recipe"][rate] for row in rows), min(rows, key=loss)["recipe"]
            ahead = [round(found[rate] * factor, 6) for end, factor in ((0, 0.5), (-1, 2.0)) if found[rate] == tried[end]]
        return found

    with ThreadPoolExecutor() as pool:
        return dict(zip(best, pool.map(peak, best)))


def finals(lab: Lab) -> None:
    whole = STEPS[SMALLEST]
    lab.map([*comparison(SMALLEST, QUARTER, tuned(lab)), *comparison(SMALLEST, whole, checked(lab, SMALLEST, whole))])


def _comparisons(lab: Lab, *models: str) -> None:
    for model in models:
        quarter = STEPS[model] // 4
        lab.map(comparison(model, quarter, checked(lab, model, quarter)))


def hybrids(lab: Lab) -> None:
    _comparisons(lab, HYBRID)


def retuned(lab: Lab) -> dict[str, dict]:
    """The hybrids' numbers after separate trials: from the dense model's, four first moments and one warmup per side."""
    best, found = checked(lab, HYBRID, QUARTER), {}
    for side, warmup in (("gpt", {"warmup_share": 0.02}), ("ngpt", {"warmup": "all"})):
        rows = lab.map(Job(HYBRID, side, QUARTER, 0, {**best[side], "betas": b}) for b in (best[side]["betas"], *MOMENTS))
        first = min(rows, key=loss)["recipe"]
        rows += lab.map([Job(HYBRID, side, QUARTER, 0, {**first, **warmup})])
        found[side] = min(rows, key=loss)["recipe"]
    return found


def moments(lab: Lab) -> None:
    """The hybrids again, at a quarter of the length, with their own numbers."""
    best = retuned(lab)
    for model in (HYBRID, "hybrid-0.5M"):
        lab.map(comparison(model, STEPS[model] // 4, best))


def halves(lab: Lab) -> None:
    _comparisons(lab, "hybrid-0.5M", "dense-0.5M")


def ones(lab: Lab) -> None:
    for model in ("hybrid-1M", "dense-1M"):
        quarter = STEPS[model] // 4
        best = retuned(lab) if model.startswith("hybrid") else tuned(lab)
        lab.map(comparison(model, quarter, checked(lab, model, quarter, best)))


def budgets(lab: Lab) -> None:
    lab.map(comparison(HYBRID, STEPS[HYBRID], checked(lab, HYBRID, QUARTER)))
    for model in BUDGETS:
        lab.map(second(lab, model))


def second(lab: Lab, model: str) -> list[Job]:
    """The second budget of a model."""
    quarter, steps = STEPS[model] // 4, round(BUDGETS[model] * STEPS[model])
    hybrid = model.startswith("hybrid")
    start = retuned(lab) if hybrid else tuned(lab)
    if model in LARGEST or not hybrid:
        start = checked(lab, model, quarter, start)  # the first budget's
    if model in LARGEST:
        return comparison(model, steps, start, SHARES[-1:])
    return comparison(model, steps, checked(lab, model, steps, start))


def longest(lab: Lab) -> None:
    model, whole, best = "hybrid-1M", STEPS["hybrid-1M"], largest_best(lab)
    lab.map(comparison(model, whole, best))
    checked(lab, model, whole // 2, best)


def published_jobs() -> dict[str, list[Job]]:
    """The largest hybrid's nGPT at half of the length: the published numbers, and those of the first form of recipe.scaled, a
    memory of a step for 400 at every width, and nothing else."""
    model, steps = "hybrid-1M", STEPS["hybrid-1M"] // 2
    betas = {"published": "0.975,0.975", "β₁ alone": f"{1 - 400 / steps:.4g},0.975"}
    return {name: [Job(model, "ngpt", steps, seed, {"C": 0.24, "betas": b}) for seed in SEEDS] for name, b in betas.items()}


def apart_jobs(best: dict) -> dict[str, Job]:
    """The largest hybrid's tuned nGPT at a quarter of the length, resetting one number at a time."""
    beta1, beta2 = best["betas"].split(",")
    changes = {
        "tuned": {}, "β₁ = 0.917": {"betas": f"0.9167,{beta2}"}, "β₂ = 0.975": {"betas": f"{beta1},0.975"},
        "the paper's warmups": {"warmup": "group"}, "C = 0.24": {"C": 0.24},
    }  # fmt: skip
    return {name: Job("hybrid-1M", "ngpt", STEPS["hybrid-1M"] // 4, 1, {**best, **change}) for name, change in changes.items()}


def largest_best(lab: Lab) -> dict[str, dict]:
    """The largest hybrid's numbers at its first budget."""
    return checked(lab, "hybrid-1M", STEPS["hybrid-1M"] // 4, retuned(lab))


def published(lab: Lab) -> None:
    lab.map(job for jobs in published_jobs().values() for job in jobs)
    lab.map(apart_jobs(largest_best(lab)["ngpt"]).values())


def denses(lab: Lab) -> None:
    """The dense models with the hybrids' numbers: both sides' betas, and nGPT's warmup of all rates."""
    best = retuned(lab)
    for model in (SMALLEST, "dense-0.5M", "dense-1M"):
        quarter, start = STEPS[model] // 4, best
        if model in LARGEST:  # GPT's search goes on from where it was
            start = {**best, "gpt": {**best["gpt"], "lr": checked(lab, model, quarter)["gpt"]["lr"]}}
        lab.map(comparison(model, quarter, checked(lab, model, quarter, start)))
    lab.map(job for jobs in parts_jobs().values() for job in jobs)


def parts_jobs() -> dict[str, list[Job]]:
    """The smallest dense nGPT with only one of the hybrids' two numbers, and with both."""
    changes = {f"β₁ = {b}, warmup {w}": {"betas": f"{b},0.99", "warmup": w} for b in (0.9, 0.6) for w in ("group", "all")}
    return {
        name: [Job(SMALLEST, "ngpt", QUARTER, seed, {"C": 0.12, **_not_default(change)}) for seed in (0, *SEEDS)]
        for name, change in changes.items()
    }


def _not_default(recipe: dict) -> dict:
    """Without the paper's warmup, the default: a job's name has only what differs."""
    return {k: v for k, v in recipe.items() if (k, v) != ("warmup", "group")}


def around_jobs() -> list[Job]:
    """The hybrids' nGPT with one number changed, in longer runs and a wider model; and the second moment of both sides."""
    tuned, gpt = {"C": 0.12, "betas": "0.6,0.99", "warmup": "all"}, {"lr": 0.002, "betas": "0.8,0.95"}
    first, second = {"betas": "0.9,0.99"}, {"betas": "0.6,0.975"}
    jobs = [Job(HYBRID, "ngpt", 8000, 1, {**tuned, **change}) for change in ({}, first, second)]
    jobs += [Job("hybrid-1M", "ngpt", 4800, 3, {**tuned, **change}) for change in ({}, first)]
    jobs += [Job("hybrid-3M", "ngpt", 1200, 1, {**tuned, **change}) for change in ({}, {"C": 0.24})]
    jobs += [Job(SMALLEST, "ngpt", QUARTER, seed, {**tuned, **second}) for seed in SEEDS]
    return jobs + [Job(model, "gpt", QUARTER, seed, gpt) for model in (SMALLEST, HYBRID) for seed in SEEDS]


def around(lab: Lab) -> None:
    lab.map(around_jobs())


# recipe.scaled's numbers, written out so that the runs keep their names when the rule changes: (model, steps, seeds, C, beta1)
RULED = (
    (SMALLEST, QUARTER, SEEDS, 0.153, 0.6),
    ("hybrid-1M", 4800, (1, 3), 0.112, 0.6),
    ("hybrid-3M", 2400, (1,), 0.163, 0.6),
)


def ruled_jobs() -> list[Job]:
    """nGPT with the rule's numbers; at the width that was never tuned, also GPT at two peak rates."""
    numbers = [(model, steps, seeds, {"C": C, "betas": f"{b},0.975", "warmup": "all"}) for model, steps, seeds, C, b in RULED]
    jobs = [Job(model, "ngpt", steps, seed, recipe) for model, steps, seeds, recipe in numbers for seed in seeds]
    return jobs + [Job("hybrid-3M", "gpt", 2400, 1, {"lr": lr, "betas": "0.8,0.99"}) for lr in (0.001, 0.002)]


def ruled(lab: Lab) -> None:
    lab.map(ruled_jobs())


def decayed(lab: Lab) -> dict:
    """The smallest hybrid GPT's numbers with logarithmic decay. Its mean rate is a third of WSD's, so peaks start at twice."""
    gpt = retuned(lab)["gpt"]
    return checked(lab, HYBRID, QUARTER, {"gpt": {**gpt, "schedule": "log", "lr": 2 * gpt["lr"]}})["gpt"]


def decays(lab: Lab) -> None:
    best = decayed(lab)
    lab.map(Job(HYBRID, "gpt", QUARTER, seed, best) for seed in SEEDS)


def length_jobs(best: dict) -> list[Job]:
    """The smallest hybrid in runs of several lengths, one number changed at a time."""
    beta1, beta2 = best["betas"].split(",")
    changes = [{}, *({"betas": f"{b},{beta2}"} for b in LENGTH_BETAS[0]), *({"betas": f"{beta1},{b}"} for b in LENGTH_BETAS[1])]
    changes += [*({"C": round(best["C"] * factor, 6)} for factor in (0.5, 2.0)), {"cap_degrees": 2.0}, {"warmup": "all"}]
    jobs = [Job(HYBRID, "ngpt", steps, SEEDS[0], {**best, **change}) for steps in LENGTHS for change in changes]
    short = {**best, "betas": f"{SHORT_BETA},{beta2}"}  # the short runs' first moment, and on top of it
    changes = [{"warmup": "all"}, {"C": round(2 * best["C"], 6)}, {"betas": f"{SHORT_BETA},0.975"}, {"betas": f"0.4,{beta2}"}]
    return jobs + [Job(HYBRID, "ngpt", steps, SEEDS[0], {**short, **change}) for steps in LENGTHS[:3] for change in changes]


def length(lab: Lab) -> None:
    lab.map(length_jobs(checked(lab, HYBRID, QUARTER)["ngpt"]))


def ablation_jobs(model: str, best: dict, steps: int, batch: int | None = None) -> dict[str, list[Job]]:
    """Name -> the jobs of one change, one per seed. "recipe" is the recipe itself."""
    C, matched = best["C"], {}
    log_area = area(partial(SCHEDULES["log"], rho=best.get("rho", 0.05)))
    for name in ("cosine", "wsd", "linear"):
        matched[f"{name} decay, same area"] = ({"schedule": name, "C": round(C * log_area / area(SCHEDULES[name]), 6)}, {})
    changes = {
        "recipe": ({}, {}),
        "all rates warmed up": ({"warmup": "all"}, {}),
        "a = 1 (Adam's gate)": ({"a": 1.0}, {}),
        "no LGP": ({}, {"lgp_q": "none"}),
        "LGP with q = 0": ({}, {"lgp_q": 0.0}),
        **matched,
        "no tangent projection": ({"tangent": "false"}, {}),
        "cap 0.5 degrees": ({"cap_degrees": 0.5}, {}),
        "cap 1 degree": ({"cap_degrees": 1.0}, {}),
        "cap 2 degrees": ({"cap_degrees": 2.0}, {}),
        "no cap": ({"cap_degrees": "none"}, {}),
        "SMGC with R = 2": ({"smgc.R": 2.0}, {}),
        "no SMGC": ({"smgc": "none"}, {}),
        "no PMEN": ({"pmen": "none"}, {}),
        "alpha starts at 0.05": ({}, {"alpha_init": 0.05}),
        "alpha starts at 0.25": ({}, {"alpha_init": 0.25}),
        "betas of the paper": ({"betas": "0.975,0.975"}, {}),
        "betas 0.9, 0.95": ({"betas": "0.9,0.95"}, {}),
        "betas 0.9, 0.99": ({"betas": "0.9,0.99"}, {}),
    }
    if model.startswith("hybrid"):
        changes |= {"s_mamba starts at 1": ({}, {"s_mamba_init": 1.0}), "s_moe starts at 1": ({}, {"s_moe_init": 1.0})}
    is_it = {"cap_degrees": 1.0, "betas": "0.975,0.975", **best}  # a change that changes nothing is not trained again
    return {
        name: [Job(model, "ngpt", steps, seed, {**best, **recipe}, fields, batch) for seed in SEEDS]
        for name, (recipe, fields) in changes.items()
        if name == "recipe" or fields or any(is_it.get(k) != v for k, v in recipe.items())
    }


def ablations(lab: Lab) -> None:
    best = checked(lab, HYBRID, QUARTER)["ngpt"]
    lab.map(job for jobs in ablation_jobs(HYBRID, best, QUARTER).values() for job in jobs)


ORDER = (tuned, finals, hybrids, moments, ablations, length, halves, ones, decays, budgets, published, longest, denses, around,
         ruled)  # fmt: skip
STAGES = {stage.__name__: stage for stage in ORDER}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", default=list(STAGES), metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--workers", type=int, default=2, help="runs at the same time (default: 2)")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"), help="folder of the runs (default: runs/evidence)")
    args = parser.parse_args()
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"there is no stage {', '.join(unknown)}; there are: {', '.join(STAGES)}")
    lab = Lab(args.runs, args.workers)
    for stage in args.stages:
        STAGES[stage](lab)


if __name__ == "__main__":
    main()
