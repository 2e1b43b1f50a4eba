"""Does the evidence's arithmetic hold, and is a run never lost or repeated?"""

import importlib.util
import json
import math
import platform
import sys
from pathlib import Path

import pytest

from ngpt_core.data.corpus import embedded

EVIDENCE = Path(__file__).parent.parent / "benchmarks" / "evidence"


@pytest.fixture(scope="module")
def evidence():
    """(runner, study, analyse): scripts of benchmarks/evidence, which is not a package."""
    sys.path.insert(0, str(EVIDENCE))
    try:
        found = []
        for name in ("library", "runner", "study", "analyse"):
            spec = importlib.util.spec_from_file_location(name, EVIDENCE / f"{name}.py")
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found.append(module)
        yield tuple(found[1:])
    finally:
        sys.path.remove(str(EVIDENCE))
        for name in ("library", "runner", "study", "analyse"):
            sys.modules.pop(name, None)


def test_the_token_ratio_of_a_law_that_is_known(evidence):
    analyse = evidence[2]

    def law(tokens, advantage):
        return 3.0 - 0.2 * math.log(tokens * advantage)  # straight over log(tokens)

    gpt = {seed: law(1000, 1.0) for seed in (1, 2, 3)}
    ngpt = {seed: {t: law(t, advantage) for t in (350, 500, 700, 1000)} for seed, advantage in zip((1, 2, 3), (2.0, 2.2, 1.8))}
    found = analyse.token_ratio(gpt, 1000, ngpt)
    assert found["seeds"] == pytest.approx([1 / 2.0, 1 / 2.2, 1 / 1.8])
    assert found["ratio"] == pytest.approx((2.0 * 2.2 * 1.8) ** (-1 / 3))
    logs = [-math.log(a) for a in (2.0, 2.2, 1.8)]
    half = 4.302652729911275 * (sum((x - sum(logs) / 3) ** 2 for x in logs) / 2) ** 0.5 / 3**0.5
    assert math.log(found["high"] / found["ratio"]) == pytest.approx(half)


def test_a_ratio_is_never_extrapolated(evidence):
    analyse = evidence[2]
    behind = analyse.token_ratio({1: 1.0, 2: 1.0}, 100, {1: {50: 1.5, 100: 1.2}, 2: {50: 1.1, 100: 0.9}})
    assert behind["ratio"] is None and behind["bounds"] == ["> 1.00"] and behind["seeds"][0] is None and behind["seeds"][1] < 1
    ahead = analyse.token_ratio({1: 1.0}, 100, {1: {50: 0.9, 100: 0.8}})
    assert ahead["ratio"] is None and ahead["bounds"] == ["< 0.50"]


def test_an_ablation_of_the_same_length_does_not_take_the_place_of_the_recipe(evidence):
    def row(side, steps, seed, recipe, loss):
        same = {"model": "hybrid-0.2M", "batch": None, "fields": {}, "curve": [], "cpu_seconds": None}
        recipe = {"betas": "0.9,0.99", **recipe}
        return {**same, "side": side, "steps": steps, "seed": seed, "recipe": recipe, "val_loss": loss, "tokens": 256 * steps}

    rows = [row("gpt", 100, seed, {"lr": 1}, 2.0) for seed in (1, 2, 3)]
    rows += [row("ngpt", steps, seed, {"C": 1}, loss) for seed in (1, 2, 3) for steps, loss in ((50, 2.1), (100, 1.9))]
    rows += [row("ngpt", 100, seed, {"C": 1, "a": 1}, 1.5) for seed in (1, 2, 3)]  # in the table after the recipe
    rows += [row("ngpt", steps, 1, {"C": 2}, 1.0) for steps in (50, 100)]  # not on all seeds
    tuned = {"gpt": "0.9,0.99", "ngpt": "0.9,0.99"}
    (comparison,) = evidence[2].comparisons(rows, tuned)
    assert comparison["round"] == 0 and comparison["ngpt"] == [1.9] * 3 and 0.5 < comparison["ratio"] < 1
    assert comparison["recipes"]["ngpt"] == {"betas": "0.9,0.99", "C": 1}
    # a second round with other numbers is a separate comparison: neither side's runs are mixed
    own = {"C": 3, "betas": "0.6,0.99"}
    rows += [row("gpt", 100, seed, {"lr": 2, "betas": "0.8,0.99"}, 1.8) for seed in (1, 2, 3)]
    rows += [row("ngpt", steps, seed, own, loss) for seed in (1, 2, 3) for steps, loss in ((50, 1.9), (100, 1.7))]
    first, second = evidence[2].comparisons(rows, tuned)
    assert first == comparison and (second["round"], second["gpt"], second["ngpt"]) == (1, [1.8] * 3, [1.7] * 3)
    assert second["recipes"] == {"gpt": {"betas": "0.8,0.99", "lr": 2}, "ngpt": own}
    # a round does not count if one side is not finished or shorter schedules are missing
    assert [f["round"] for f in evidence[2].comparisons([r for r in rows if r["recipe"].get("lr") != 2], tuned)] == [0]
    assert [
        f["round"] for f in evidence[2].comparisons([r for r in rows if (r["steps"], r["recipe"]) != (50, own)], tuned)
    ] == [0]
    assert second["seeds"][0] == pytest.approx(2**-0.5)
    # schedules of half and 0.7 give a ratio without one of the whole length, and then there is no loss after all of the tokens
    shorter = [{**r, "steps": 70, "tokens": 70 * 256} if r["side"] == "ngpt" and r["steps"] == 100 else r for r in rows]
    part = evidence[2].comparisons(shorter, tuned)[1]
    assert part["ngpt"] is None and part["cpu_ratio"] is None and part["seeds"][0] == pytest.approx((0.5 * 0.7) ** 0.5)
    both = evidence[2].pooled([first, second])
    assert both == {"comparisons": 2, "deviation": pytest.approx(0.0), "factor": pytest.approx(1.0)}


def test_the_recipe_of_a_round_that_was_best_on_the_tuning_seed_is_compared(evidence):
    def row(side, steps, seed, recipe, loss):
        same = {"model": "dense-0.2M", "batch": None, "fields": {}, "curve": [], "cpu_seconds": None, "tokens": 256 * steps}
        return {**same, "side": side, "steps": steps, "seed": seed, "recipe": {"betas": "0.6,0.99", **recipe}, "val_loss": loss}

    rows = [row("gpt", 100, seed, {"lr": lr}, 2.0) for lr in (1, 2) for seed in (1, 2, 3)]  # neither on seed 0: the first
    for C, tried in ((1, 1.9), (2, 1.8), (3, None)):
        rows += [row("ngpt", steps, seed, {"C": C}, 2.2 - 0.1 * C) for seed in (1, 2, 3) for steps in (50, 100)]
        rows += [row("ngpt", 100, 0, {"C": C}, tried)] if tried else []
    (comparison,) = evidence[2].comparisons(rows, {"gpt": "0.9,0.99", "ngpt": "0.9,0.99"})
    assert comparison["round"] == 1 and comparison["tuning_seed"] is None
    assert (comparison["recipes"]["gpt"]["lr"], comparison["recipes"]["ngpt"]["C"]) == (1, 2)
    (comparison,) = evidence[2].comparisons(
        [*rows, row("gpt", 100, 0, {"lr": 2}, 1.9)], {"gpt": "0.9,0.99", "ngpt": "0.9,0.99"}
    )
    assert comparison["recipes"]["gpt"]["lr"] == 2 and comparison["tuning_seed"] == [1.9, 1.8]


def test_the_best_C_of_a_law_that_is_known(evidence):
    def law(C):
        return 1.5 + 0.01 * math.log(C / 0.1) ** 2

    lowest = evidence[2].lowest
    assert lowest({C: law(C) for C in (0.06, 0.12, 0.24)}) == pytest.approx(0.1)
    assert lowest({C: law(C) for C in (0.03, 0.07, 0.11, 0.5)}) == pytest.approx(0.1)  # uneven steps
    assert lowest({C: law(C) for C in (0.12, 0.24, 0.48)}) is None  # the best is at the edge


def test_the_rules_numbers_that_were_trained_are_the_rules(evidence):
    from ngpt_core import recipe
    from ngpt_core.train.config import model_config

    runner, study, _ = evidence
    ours = [job for job in study.ruled_jobs() if job.side == "ngpt"]
    assert {job.model for job in ours} == {"dense-0.2M", "hybrid-1M", "hybrid-3M"}
    for job in ours:
        numbers = recipe.scaled(model_config(runner.MODELS[job.model][0]), job.steps)
        C, betas = job.recipe["C"], [float(b) for b in job.recipe["betas"].split(",")]
        assert numbers.C == pytest.approx(C, rel=5e-3) and numbers.betas == pytest.approx(betas)
        assert numbers.warmup == job.recipe["warmup"]


def test_both_sides_have_equal_trials_and_every_job_can_be_trained(evidence):
    from ngpt_core.train.config import TrainConfig, model_config, recipe_numbers

    runner, study, _ = evidence
    assert len({sum(map(len, axes)) for axes in study.TRIALS.values()}) == 1
    best = {"C": 0.24, "betas": "0.9,0.95"}
    jobs = [job for name in ("dense-0.2M", "hybrid-0.2M") for js in study.ablation_jobs(name, best, 10).values() for job in js]
    assert len({job.name for job in jobs}) == len(jobs)  # every change is another run
    for job in jobs:
        fields = {k: None if v == "none" else v for k, v in job.fields.items()}
        config = model_config({**runner.MODELS[job.model][0], **fields, "normalized": job.side == "ngpt"})
        recipe_numbers(TrainConfig(recipe=tuple(f"{k}={v}" for k, v in job.recipe.items())), config)


def test_the_published_numbers_are_the_recipes_defaults(evidence):
    from ngpt_core.train.config import TrainConfig, model_config, recipe_numbers

    runner, study, _ = evidence
    jobs = study.published_jobs()
    assert all(sorted(job.seed for job in found) == [1, 2, 3] for found in jobs.values())
    config, job = model_config(runner.MODELS["hybrid-1M"][0]), jobs["published"][0]
    given = TrainConfig(scaled=False, recipe=tuple(f"{k}={v}" for k, v in job.recipe.items()))
    mine, plain = (recipe_numbers(c, config, job.steps) for c in (given, TrainConfig(scaled=False)))
    assert mine.C == config.C and vars(mine) == {**vars(plain), "C": config.C}
    assert jobs["β₁ alone"][0].recipe["betas"] == "0.9167,0.975"
    best = {"C": 0.12, "betas": "0.6,0.99", "warmup": "all"}
    for job in list(study.apart_jobs(best).values())[1:]:
        assert sum(job.recipe[key] != best[key] for key in best) == 1


def test_a_peak_rate_at_the_edge_of_those_tried_is_followed_beyond_it(evidence):
    tried = {"gpt": [], "ngpt": []}

    class Law:
        def map(self, jobs):
            rows = []
            for job in jobs:
                value = job.recipe.get("lr") or job.recipe["C"]
                tried[job.side].append(value)
                best = {"gpt": 0.0004, "ngpt": 0.5}[job.side]
                rows.append({"recipe": job.recipe, "val_loss": abs(math.log(value / best))})
            return rows

    found = evidence[1].checked(Law(), "dense-0.5M", 10, {"gpt": {"lr": 0.002, "betas": "0.9,0.99"}, "ngpt": {"C": 0.24}})
    assert found == {"gpt": {"lr": 0.0005, "betas": "0.9,0.99"}, "ngpt": {"C": 0.48}}
    assert tried == {"gpt": [0.001, 0.002, 0.004, 0.0005, 0.00025], "ngpt": [0.12, 0.24, 0.48, 0.96]}


def test_the_evidence_has_one_corpus_and_another_is_refused(evidence, tmp_path, monkeypatch):
    runner, library = evidence[0], evidence[0].library
    stored = json.loads((EVIDENCE.parents[1] / "book" / "ngpt_book" / "data" / "evidence.json").read_text())
    assert stored["about"]["corpus"] == library.CHECKSUM and stored["about"]["python"] == library.VERSION
    listed = [line.split("  ", 1) for line in (EVIDENCE / "library" / "files.sha256").read_text().splitlines()]
    assert len(listed) == 610 and [name for _, name in listed] == sorted(name for _, name in listed)

    monkeypatch.setenv("NGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(runner, "TABLE", tmp_path / "runs.jsonl")
    (tmp_path / "abc.py").write_text("another Python's")
    monkeypatch.setattr(library, "stdlib_files", lambda: [("abc.py", tmp_path / "abc.py")])
    with pytest.raises(ValueError, match=r"the library of CPython 3\.11\.7, .* 608 of its 610 files .*__future__.py"):
        runner.Lab(tmp_path / "runs").run(runner.Job("dense-0.2M", "ngpt", 3))
    assert not (tmp_path / "runs").exists()  # before anything is trained


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the text of the evidence is from CPython 3.11.7")
def test_this_python_has_the_corpus_of_the_evidence(evidence, tmp_path, monkeypatch):
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path))
    library = evidence[0].library
    found = library.corpus()
    assert found.checksum == library.CHECKSUM and found.manifest["splits"]["val"]["documents"] == 10


def test_a_finished_job_is_read_from_the_table_and_a_new_one_is_trained_once(evidence, tmp_path, monkeypatch):
    runner = evidence[0]
    monkeypatch.setattr(runner.library, "corpus", embedded)  # this test runs on every Python
    monkeypatch.setattr(runner, "TABLE", tmp_path / "runs.jsonl")
    monkeypatch.setitem(runner.MODELS, "tiny", ({"preset": "pico-dense", "d_model": 16, "pattern": "*-", "ff": 32}, 2))
    job = runner.Job("tiny", "ngpt", 3, seed=1, recipe={"C": 0.1})
    lab = runner.Lab(tmp_path / "runs", workers=2)
    one, two = lab.map([job, job])
    assert one == two and one["val_loss"] > 0 and len(one["curve"]) == 3 and one["tokens"] == 3 * 2 * 128
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0]) == one
    again = runner.Lab(tmp_path / "nowhere")
    assert again.run(job) == one and not (tmp_path / "nowhere").exists()
    # a run that was stopped is resumed: its folder is there, its row is not
    (tmp_path / "runs.jsonl").unlink()
    assert runner.Lab(tmp_path / "runs").run(job)["val_loss"] == one["val_loss"]
