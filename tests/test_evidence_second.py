"""Does the second round of the evidence hold? Its plan, its tests and intervals, its peers, and that a run is never lost."""

import hashlib
import importlib
import json
import lzma
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from ngpt_core import sphere
from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer

EVIDENCE = Path(__file__).parent.parent / "benchmarks" / "evidence"
NAMES = ("library", "runner", "texts", "plan", "mechanisms", "peers", "trial", "campaign", "verdict")


@pytest.fixture(scope="module")
def second():
    """The scripts of benchmarks/evidence, which is not a package, by name."""
    sys.path.insert(0, str(EVIDENCE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(EVIDENCE))
        for name in NAMES:
            sys.modules.pop(name, None)


def row(point, loss):
    found = {"name": point.name, "group": point.group, "seed": point.seed, "recipe": dict(point.recipe)}
    losses = None if loss is None else {"tuning": loss, "result": loss}
    return {**found, "extra": dict(point.extra), "loss": losses, "cpu_seconds": 1.0}


# ---- the plan --------------------------------------------------------------------------------------------------------
def test_the_plan_keeps_its_budget_and_its_seeds_apart(second):
    plan, every = second.plan, second.plan.plan()
    names = [p.name for p in every]
    assert len(set(names)) == len(names)
    assert sum(p.minutes for p in every if not p.added) <= plan.BUDGET
    assert max(p.minutes for p in every) <= plan.LIMIT
    assert [p.item for p in every] == sorted(p.item for p in every)  # in the order of the list
    first = {json.loads(line)["seed"] for line in (EVIDENCE / "results" / "runs.jsonl").read_text().splitlines()}
    assert {p.seed for p in every if p.trial} == {plan.TUNING}
    assert not set(plan.RESULT) & ({plan.TUNING} | first)


def test_both_sides_of_a_comparison_have_the_same_number_of_trials(second):
    every = second.plan.plan()
    trials = {p.group: sum(q.group == p.group for q in every if q.trial) for p in every if p.trial}
    for item in (1, 2):
        for label in {p.group.rpartition(".")[0] for p in every if p.item == item}:
            assert trials[f"{label}.gpt"] == trials[f"{label}.ngpt"] >= 3, label
    assert {trials[f"peers.{side}"] for side in second.peers.SIDES} == {trials["context-512.gpt"]}


def test_what_a_point_waits_for_stands_before_it(second):
    every = second.plan.plan()
    place = {p.name: i for i, p in enumerate(every)}
    for point in every:
        assert all(place[q.name] < place[point.name] for q in second.plan.needed(point, every)), point.name
        assert point.pick == "given" or second.plan.needed(point, every), point.name


def test_every_point_can_be_trained(second):
    from ngpt_core.train.config import TrainConfig, recipe_numbers

    for point in second.plan.plan():
        numbers = TrainConfig(recipe=tuple(second.trial.items(point, point.config)), batch_size=point.sequences)
        recipe_numbers(numbers, point.config, point.steps)
        assert point.sequences * point.context == second.plan.BATCH


def test_the_numbers_of_a_point_follow_from_the_trials(second):
    plan, every = second.plan, second.plan.plan()
    mine = [p for p in every if p.group == "context-512.ngpt"]
    rows = {}
    for point, loss in zip(mine, (1.5, 1.6, 1.4, 1.45, 1.3)):  # of the rates 1, 0.5, 2; the next; the other first moment
        found = plan.resolved(point, every, rows)
        rows[point.name] = row(found, loss)
    rates = [rows[p.name]["recipe"]["C"] for p in mine[:5]]
    assert rates[1:4] == pytest.approx([rates[0] / 2, 2 * rates[0], 4 * rates[0]], rel=1e-4)  # beyond the best, which is an end
    assert rates[4] == rates[2] and rows[mine[4].name]["recipe"]["betas"] == "0.8,0.975"
    result = plan.resolved(next(p for p in mine if ".s11." in p.name), every, rows)
    assert result.recipe == rows[mine[4].name]["recipe"]
    floor = plan.resolved(next(p for p in mine if p.name.endswith("with.held-1")), every, rows)
    assert floor.recipe == result.recipe and floor.extra == {"floor": 1.0, "held": True}
    rows[mine[4].name] = row(plan.resolved(mine[4], every, rows), None)  # it diverged
    assert "betas" not in plan.resolved(result, every, rows).recipe or result.pick == "best"
    again = plan.resolved(next(p for p in mine if ".s11." in p.name), every, rows)
    assert again.recipe == {"C": rates[2]}


def test_the_next_rate_lies_beyond_an_end_or_beside_the_best(second):
    following = second.plan.following
    assert following({1.0: 3.0, 0.5: 2.0, 2.0: 4.0}) == 0.25
    assert following({1.0: 3.0, 0.5: 4.0, 2.0: 2.0}) == 4.0
    assert following({1.0: 2.0, 0.5: 3.0, 2.0: 4.0}) == pytest.approx(math.sqrt(0.5), abs=1e-6)
    assert following({1.0: 2.0, 0.5: math.inf, 2.0: 4.0}) == pytest.approx(math.sqrt(2), abs=1e-6)


def test_the_power_of_the_plan(second):
    """What is resolvable at 80% is found by four of five simulated experiments."""
    gap, n, draws = second.plan.resolvable(1.0, 3), 3, np.random.default_rng(0).normal(size=(20_000, 2, 3))
    z = (draws[:, 0].mean(-1) + gap - draws[:, 1].mean(-1)) / math.sqrt(2 / n)
    assert (z > 1.96).mean() == pytest.approx(0.8, abs=0.01)


# ---- the tests -------------------------------------------------------------------------------------------------------
def test_one_setting_gives_students_test(second):
    values = [-0.03, -0.02, -0.035]
    spread = second.verdict.pooled([values])
    found, reference = second.verdict.difference(values, spread), stats.ttest_1samp(values, 0.0)
    interval = reference.confidence_interval()
    assert spread.sigma == pytest.approx(np.std(values, ddof=1)) and spread.freedom == 2
    assert (found.z, found.p) == pytest.approx((reference.statistic, reference.pvalue))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_a_pooled_spread_weighs_settings_by_their_freedom(second):
    spread = second.verdict.pooled([[0.0, 2.0], [5.0, 5.0, 8.0], [7.0]])  # one seed tells nothing
    assert spread.freedom == 3 and spread.sigma == pytest.approx(math.sqrt((2.0 + 6.0) / 3))


def law(share, advantage):
    """The difference from a GPT whose loss falls by 0.15 for each factor e of tokens."""
    return -0.15 * math.log(share * advantage)


def test_the_token_ratio_of_a_law_that_is_known(second):
    spread = second.verdict.Spread(0.006, 30)
    found = second.verdict.token_ratio({s: [law(s, 1.6)] * 3 for s in (0.5, 0.7, 1.0)}, spread)
    assert found.ratio == pytest.approx(1 / 1.6)
    half = float(stats.t.ppf(0.975, 30)) * 0.006 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((math.exp(-half / 0.15) / 1.6, math.exp(half / 0.15) / 1.6))


def test_a_token_ratio_is_never_extrapolated(second):
    spread, ratio = second.verdict.Spread(0.006, 30), second.verdict.token_ratio
    ahead = ratio({s: [law(s, 2.5)] * 3 for s in (0.5, 0.7, 1.0)}, spread)
    assert ahead.ratio is None and ahead.low is None and ahead.bound == "< 0.50"
    behind = ratio({s: [law(s, 0.9)] * 3 for s in (0.5, 0.7, 1.0)}, spread)
    assert behind.ratio is None and behind.high is None and behind.bound == "> 1.00"


def test_nineteen_intervals_of_twenty_contain_the_truth(second):
    """Ten settings of three seeds share their spread, as in the plan; the truth of each is known."""
    draws, held, ratios, count = np.random.default_rng(1), 0, 0, 0
    shares, sigma = (0.5, 0.7, 1.0), 0.008
    for _ in range(60):
        advantages = draws.uniform(1.2, 1.7, size=10)
        settings = [{s: law(s, a) + sigma * draws.normal(size=3) for s in shares} for a in advantages]
        spread = second.verdict.pooled([list(values) for by_share in settings for values in by_share.values()])
        for advantage, found in zip(advantages, settings):
            whole = second.verdict.difference(list(found[1.0]), spread)
            held += whole.low <= law(1.0, advantage) <= whole.high
            ratio = second.verdict.token_ratio(found, spread)
            ratios += (ratio.low or 0.0) <= 1 / advantage <= (ratio.high or math.inf)
            count += 1
    assert held / count == pytest.approx(0.95, abs=0.03)
    assert 0.93 < ratios / count < 0.995  # wider than it must be: between two lengths the means of both have a part in it


def test_a_comparison_is_read_from_the_table(second):
    plan, rows = second.plan, {}
    for point in plan.plan():
        if point.group in ("context-128.gpt", "context-128.ngpt") and not point.trial and point.seed in (11, 12):
            share = point.steps / plan.TEN
            loss = 2.0 + 0.001 * point.seed + (law(share, 1.5) if point.side == "ngpt" else 0.0)
            rows[point.name] = row(point, loss) | {"positions": [[16, loss + 1], [32, loss - 1]]}
    ((group, (whole, ratio)),) = second.verdict.comparisons(rows).items()
    assert second.verdict.freedom([{1.0: [0.1] * 3, 0.5: [0.1] * 3}, {1.0: [0.1] * 2}]) == 3
    assert group == "context-128.ngpt" and whole.mean == pytest.approx(law(1.0, 1.5)) and whole.n == 2
    assert ratio.ratio == pytest.approx(1 / 1.5, rel=1e-3)
    assert second.verdict.baseline("peers.muon") == "context-512.gpt"
    found = second.verdict.summary(rows, plan.plan())
    (shown,) = found["comparisons"]
    assert (found["finished"], found["planned"]) == (len(rows), len(plan.plan()))
    assert (shown["context"], shown["model"], shown["ratio"]) == (128, "hybrid-0.5M", ratio.ratio)
    assert (
        shown["tokens_per_parameter"] == pytest.approx(shown["tokens"] / shown["active"]) and shown["difference"] == whole.mean
    )
    gpt = 2.0 + 0.001 * 11.5
    assert shown["places"]["gpt"] == [[16, pytest.approx(gpt + 1)], [32, pytest.approx(gpt - 1)]]
    assert shown["places"]["ngpt"][1] == [32, pytest.approx(gpt + law(1.0, 1.5) - 1)]
    assert second.verdict.summary({}, plan.plan())["comparisons"] == []


# ---- peers -----------------------------------------------------------------------------------------------------------
def trained(make, shapes=((5, 8), (8, 5)), steps=30, seed=0, warmup=1):
    """Parameters after some steps on the same random gradients, in float64. The rate rises over the first ``warmup`` steps."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    optimizer = make(params)
    peak = optimizer.param_groups[0]["lr"]
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (t + 1) / warmup)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    return params, optimizer


def test_adamw_inside_muon_is_torchs(second):
    numbers = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    ours, _ = trained(lambda params: second.peers.Muon([{"params": params, **numbers}]))
    reference, _ = trained(lambda params: torch.optim.AdamW(params, **numbers))
    for a, b in zip(ours, reference):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_muon_is_torchs_up_to_its_bfloat16(second):
    group = {"lr": 0.01, "weight_decay": 0.1, "matrices": True}
    ours, _ = trained(lambda params: second.peers.Muon([{"params": params, **group}]))
    numbers = {"lr": 0.01, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    reference, _ = trained(lambda params: torch.optim.Muon(params, **numbers))
    start, _ = trained(lambda params: torch.optim.SGD(params, lr=0.0), steps=0)
    for a, b, w in zip(ours, reference, start):
        torch.testing.assert_close(a, b, rtol=0, atol=0.05 * float((b - w).detach().abs().max()))


def test_muon_treats_a_stack_matrix_by_matrix(second):
    g = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = second.peers.orthogonal(g)
    torch.testing.assert_close(whole, torch.stack([second.peers.orthogonal(x) for x in g]))
    values = torch.linalg.svdvals(whole)
    assert 0.6 < values.min() and values.max() < 1.3


def test_muon_on_the_sphere_keeps_norms_and_moves_by_its_rate(second):
    group = {"lr": 0.02, "matrices": True, "sphere": True}
    before, _ = trained(lambda params: second.peers.Muon([{"params": params, **group}]), steps=0)
    after, _ = trained(lambda params: second.peers.Muon([{"params": params, **group}]), steps=1)
    for a, b in zip(after, before):
        assert a.norm().item() == pytest.approx(b.norm().item())
        assert 0.9 * 0.02 < float(((a - b).norm() / b.norm()).detach()) < 1.02 * 0.02  # Norm takes the part along the matrix


class SlowScheduleFree:
    """Its three sequences, all stored, as the paper writes them."""

    def __init__(self, params, lr, beta1, beta2, eps, decay):
        self.params, self.numbers, self.t, self.total = params, (beta1, beta2, eps, decay), 0, 0.0
        self.param_groups = [{"lr": lr}]
        self.z = [p.detach().clone() for p in params]
        self.x, self.v = [z.clone() for z in self.z], [torch.zeros_like(z) for z in self.z]

    @torch.no_grad()
    def step(self):
        (beta1, beta2, eps, decay), lr = self.numbers, self.param_groups[0]["lr"]
        self.t, self.total = self.t + 1, self.total + lr**2
        for i, y in enumerate(self.params):
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * y.grad**2
            direction = y.grad / ((self.v[i] / (1 - beta2**self.t)).sqrt() + eps)
            self.z[i] = self.z[i] - lr * (direction + decay * y)
            self.x[i] = self.x[i] + lr**2 / self.total * (self.z[i] - self.x[i])
            y.copy_((1 - beta1) * self.z[i] + beta1 * self.x[i])


def test_schedule_free_is_its_paper(second):
    numbers = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    ours, optimizer = trained(lambda params: second.peers.ScheduleFree([{"params": params, **numbers}]), warmup=10)
    slow, reference = trained(lambda params: SlowScheduleFree(params, 0.01, 0.9, 0.99, 1e-8, 0.1), warmup=10)
    y = [p.detach().clone() for p in ours]
    for a, b in zip(ours, slow):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    optimizer.averaged(True)
    for a, b in zip(ours, reference.x):
        torch.testing.assert_close(a.detach(), b, rtol=1e-9, atol=1e-9)
    optimizer.averaged(False)
    for a, b in zip(ours, y):
        torch.testing.assert_close(a.detach(), b)


def test_schedule_free_is_the_package(second):
    package = pytest.importorskip("schedulefree")
    numbers = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}

    def theirs(params):
        optimizer = package.AdamWScheduleFree(params, **numbers)
        optimizer.train()
        return optimizer

    ours, _ = trained(lambda params: second.peers.ScheduleFree([{"params": params, **numbers}]), warmup=10)
    reference, _ = trained(theirs, warmup=10)
    for a, b in zip(ours, reference):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# ---- mechanisms ------------------------------------------------------------------------------------------------------
def test_a_floor_turns_rows_at_least_so_far_and_no_others(second):
    generator = torch.Generator().manual_seed(0)
    w = sphere.unit(torch.randn(6, 16, generator=generator))
    new = sphere.unit(w + torch.logspace(-5, -0.5, 6)[:, None] * torch.randn(6, 16, generator=generator))
    new[2] = w[2]  # it did not move
    angle = sphere.angle(w, new - w)
    for held in (False, True):
        found = second.mechanisms.turned(w, new, 0.01, held)
        wanted = torch.full_like(angle, 0.01) if held else angle.clamp(min=0.01)
        wanted[2] = 0.0
        torch.testing.assert_close(sphere.angle(w, found - w), wanted, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.norm(dim=-1), torch.ones(6))
        u, v = (sphere.tangent(x - w, w)[3] for x in (new, found))
        assert torch.cosine_similarity(u, v, dim=0) > 0.9999  # in the same direction
    mean = second.mechanisms.turned(w, new, 0.01, True, "matrix")
    assert sphere.angle(w, mean - w).square().mean().sqrt() == pytest.approx(0.01, rel=1e-3)


def test_the_floor_follows_the_schedule_and_leaves_embeddings_alone(second, tiny, tmp_path, small):
    trial = second.trial.Trial(tiny("ngpt", {"floor": 0.5, "held": True}), small, tmp_path)
    model = trial.trainer.model
    groups = {n: (g["peak_lr"], g["peak_cap"]) for g in trial.trainer.optimizer.param_groups for n in g["param_names"]}
    for _ in range(4):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        rates = {n: g["lr"] for g in trial.trainer.optimizer.param_groups for n in g["param_names"]}
        trial.step()
    for name, (peak, cap) in groups.items():
        if cap is not None:
            w = before[name]
            angle = sphere.angle(w, model.get_parameter(name) - w)
            wanted = math.radians(0.5) * rates[name] / peak
            torch.testing.assert_close(angle, torch.full_like(angle, wanted), rtol=1e-2, atol=1e-6)
    w = before["embedding.weight"]
    angles = sphere.angle(w, model.embedding.weight.detach() - w)
    assert angles.std() > 0.1 * angles.mean()  # not all the same


def fake_trainer(steps, *groups):
    model = torch.nn.Linear(2, 2)
    return SimpleNamespace(t=0, run=SimpleNamespace(steps=steps), model=model, optimizer=SimpleNamespace(param_groups=groups))


def test_the_memory_goes_from_one_multiple_to_the_other(second):
    group = {"betas": (0.8, 0.95)}
    trainer = fake_trainer(5, group)
    change, memories = second.mechanisms.Memory(trainer, 0.5, 4.0), []
    for trainer.t in range(5):
        change.before(trainer)
        memories.append(1 / (1 - group["betas"][0]))
    assert memories[0] == pytest.approx(2.5) and memories[-1] == pytest.approx(20.0) and group["betas"][1] == 0.95
    assert memories[2] == pytest.approx(math.sqrt(2.5 * 20.0))


def test_an_average_is_the_mean_of_the_last_steps_and_leaves_the_model_as_it_was(second):
    trainer = fake_trainer(10)
    average, kept = second.mechanisms.Average(trainer, 0.3), []
    for trainer.t in range(1, 11):
        with torch.no_grad():
            trainer.model.weight.fill_(float(trainer.t))
        average.after(trainer)
        kept.append(float(trainer.t))
    with average.in_place(trainer.model):
        assert trainer.model.weight.mean().item() == pytest.approx(sum(kept[-3:]) / 3)
    assert trainer.model.weight.mean().item() == 10.0


# ---- a run -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small(second, tmp_path_factory):
    """Three small corpora."""
    from ngpt_core.data.corpus import Corpus

    folder, sentence = tmp_path_factory.mktemp("texts"), b"the quick brown fox jumps over %d lazy dogs and %d cats. "
    parts = {}
    for i, part in enumerate(second.texts.Texts._fields):
        documents = [b"".join(sentence % (i + j, j * k) for k in range(40)) for j in range(12)]
        pack(documents, folder / part, ByteTokenizer(), 0.0 if part == "train" else 1.0)
        parts[part] = Corpus(folder / part)
    return second.texts.Texts(**parts)


TINY = {"preset": "pico", "d_model": 32, "pattern": "M*E", "expert_ff": 16, "shared_ff": 32, "mamba_heads": 2, "n_heads": 2,
        "n_experts": 4, "state": 8, "mamba_head_dim": 32}  # fmt: skip


@pytest.fixture
def tiny(second, small, monkeypatch):
    monkeypatch.setitem(second.runner.MODELS, "tiny", (TINY, 2))
    monkeypatch.setattr(second.trial, "texts", lambda name: small)
    monkeypatch.setattr(second.plan, "BATCH", 256)
    monkeypatch.setattr(second.trial, "GLANCE", 512)
    monkeypatch.setattr(second.mechanisms, "SHARES", (0.05, 0.75))  # the longer one is under way when a run is stopped

    def point(side, extra=()):
        rate = {"C": 0.1} if side == "ngpt" else {"lr": 0.01}
        return second.plan.Point("tiny.s11.1", 1, "tiny", "tiny", side, 64, 8, 11, recipe=rate, extra=dict(extra))

    return point


class After(list):
    """A stop that comes after so many questions."""

    def __init__(self, questions):
        super().__init__()
        self.questions = questions

    def __bool__(self):
        self.questions -= 1
        return self.questions < 0


@pytest.mark.parametrize(
    "side, extra",
    [("gpt", {}), ("ngpt", {"floor": 0.2, "memory": [0.5, 2.0]}), ("qk", {}), ("muonh", {"hidden": 2.0}), ("free", {})],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(second, tiny, tmp_path, side, extra):
    point = tiny(side, extra)
    whole = second.trial.run(point, tmp_path / "whole", [])
    assert second.trial.run(point, tmp_path / "parts", After(4)) is None
    found = second.trial.run(point, tmp_path / "parts", [])
    for key in ("loss", "averaged", "curve", "positions", "recipe", "numbers"):
        assert found[key] == whole[key], key
    sizes = {16: 16, 32: 16, 64: 32}
    assert [end for end, _ in whole["positions"]] == list(sizes)
    mean = sum(sizes[end] * loss for end, loss in whole["positions"]) / 64
    assert mean == pytest.approx(whole["loss"]["result"], abs=0.02)  # its windows are not padded; the other's last one is
    assert (whole["sessions"], found["sessions"]) == (1, 2)
    assert whole["loss"]["tuning"] < 6.0 and len(whole["curve"]) == second.trial.PARTS and whole["tokens"] == 8 * 256
    with pytest.raises(ValueError, match="was begun with"):  # its numbers may not change on the way
        (tmp_path / "parts" / f"{point.name}.pt").touch()
        second.trial.run(replace(point, recipe={**point.recipe, "betas": "0.5,0.9"}), tmp_path / "parts", [])


def test_a_loss_that_is_not_finite_is_a_result(second, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        second.trial.Trainer, "step", lambda self: (_ for _ in ()).throw(ValueError("step 1: nan is not finite"))
    )
    found = second.trial.run(tiny("gpt"), tmp_path, [])
    assert found["loss"] is None and "not finite" in found["error"]


def test_queries_and_keys_of_the_peer_are_normalized_and_their_scale_is_trained(second, tiny, tmp_path, small):
    trainer = second.trial.trainer(tiny("qk"), small, tmp_path)
    [name] = [n for n, _ in trainer.model.named_parameters() if "s_qk" in n]
    before = trainer.model.get_parameter(name).detach().clone()
    trainer.step()
    assert (trainer.model.get_parameter(name) != before).all() and not trainer.run.model.normalized


def test_head_and_embedding_have_a_rate_apart_from_the_rest(second, tiny, tmp_path, small):
    def rates(extra, **numbers):
        point = tiny("ngpt", extra)
        made = second.trial.Trial(replace(point, recipe={**point.recipe, **numbers}), small, tmp_path).trainer
        return {name: g["peak_lr"] for g in made.optimizer.param_groups for name in g["param_names"]}

    plain, apart = rates({}), rates({"head": "embedding"}, embedding_multiplier=0.5)
    for name, rate in plain.items():
        assert apart[name] == pytest.approx(rate * (0.5 if name in ("embedding.weight", "head.weight") else 1.0)), name


def test_what_was_added_says_when_and_why(second):
    for point in second.plan.plan():
        assert not point.added or re.match(r"20\d\d-\d\d-\d\d: \w+ \w+", point.added), point.name


def test_muon_has_all_matrices_of_the_blocks_and_no_others(second, tiny, tmp_path, small):
    trainer = second.trial.trainer(tiny("muon"), small, tmp_path)
    names = {n for g in trainer.optimizer.param_groups if g["matrices"] for n in g["param_names"]}
    wanted = {n for n, p in trainer.model.named_parameters() if p.ndim >= 2 and n.startswith("blocks")}
    assert names == {n for n in wanted if "router" not in n and "conv" not in n}
    assert sum(len(g["params"]) for g in trainer.optimizer.param_groups) == len(list(trainer.model.parameters()))


# ---- the campaign ----------------------------------------------------------------------------------------------------
FAKE = """
import json, sys
name, runs = sys.argv[1], sys.argv[3]
json.dump({"name": name, "loss": {"tuning": len(name), "result": 1.0}, "recipe": {"C": 0.1}, "extra": {},
           "cpu_seconds": 1.0}, open(f"{runs}/{name}.json", "w"))
sys.exit(1 if "rate-2" in name and "fail" in runs else 0)
"""


def test_a_campaign_runs_what_is_missing_once_and_in_order(second, tmp_path, monkeypatch, capfd):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(second.campaign, "TRIAL", tmp_path / "fake.py")
    every = second.plan.plan()
    mine = [p for p in every if p.group == "context-512.ngpt"][:6]
    second.campaign.append({**row(mine[1], 1.0), "cpu_seconds": 5.0}, table := tmp_path / "results" / "second.jsonl")
    (runs := tmp_path / "runs").mkdir()
    assert second.campaign.Campaign(runs, table, 2).go(every, mine) == 0
    names = [json.loads(line)["name"] for line in table.read_text().splitlines()]
    assert sorted(names) == sorted(p.name for p in mine) and names[-1] == mine[5].name and names[3] == mine[3].name
    assert not list(runs.glob("*.json"))
    assert second.campaign.Campaign(runs, table, 2).go(every, mine) == 0 and len(table.read_text().splitlines()) == 6
    # a run that fails stops the campaign, and its line is not written
    (failing := tmp_path / "fail").mkdir()
    status = second.campaign.Campaign(failing, tmp_path / "other.jsonl", 1).go(every, mine[:3])
    assert status == second.trial.STOPPED and "failed with 1" in capfd.readouterr().err


def test_a_point_is_repeated_without_its_line(second, tmp_path):
    points = second.plan.plan()[:3]
    for point in points:
        second.campaign.append(row(point, 1.0), tmp_path / "second.jsonl")
    copy = second.campaign.again(tmp_path / "second.jsonl", tmp_path / "again.jsonl", points[1].name)
    assert list(second.trial.read(copy)) == [points[0].name, points[2].name]


# ---- the text --------------------------------------------------------------------------------------------------------
def test_the_lists_of_the_text_are_complete(second):
    checksums = json.loads((second.texts.TEXTS / "corpora.json").read_text())
    assert set(checksums) == set(second.texts.HELD_OUT) and all(len(c) == 64 for x in checksums.values() for c in x.values())
    for name, suffixes in (("python", (".py",)), ("docs", (".rst", ".md", ".txt"))):
        listed = lzma.decompress((second.texts.TEXTS / f"{name}.xz").read_bytes()).decode().splitlines()
        digests, paths = zip(*(line.split("  ", 1) for line in listed))
        assert all(len(d) == second.texts.DIGITS for d in digests) and len(set(paths)) == len(paths) > 3000
        assert all(path.endswith(suffixes) and second.texts.belongs(name, path) for path in paths)
    named = [line.split("  ") for line in (second.texts.TEXTS / "sdists.sha256").read_text().splitlines()]
    assert len(named) == 16 and all(len(digest) == 64 and name.endswith(".tar.gz") for digest, name in named)


def test_an_archive_is_found_in_pips_index_by_its_checksum(second, tmp_path, monkeypatch):
    page = tmp_path / "some-package" / "index.html"
    page.parent.mkdir()
    page.write_text(
        f'<a href="../../files/some_package-1.0.tar.gz#sha256={"a" * 64}">1.0</a><a href="x#sha256={"b" * 64}">2</a>'
    )
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple/")
    monkeypatch.setattr(second.texts.urllib.request, "urlopen", lambda url, timeout: page.open("rb"))
    found = second.texts.address("some_package-1.0.tar.gz", "a" * 64)
    assert found == f"https://index.invalid/files/some_package-1.0.tar.gz#sha256={'a' * 64}"
    with pytest.raises(ValueError, match=r"no archive some_package-3\.0\.tar\.gz with the sha256 ccc"):
        second.texts.address("some_package-3.0.tar.gz", "c" * 64)


def test_a_document_is_in_one_part_whatever_its_place(second):
    parts = [second.texts.part(b"text %d" % i, 0.1) for i in range(3000)]
    assert {p: parts.count(p) for p in ("tuning", "result")} == pytest.approx({"tuning": 300, "result": 300}, rel=0.2)
    assert parts == [second.texts.part(b"text %d" % i, 0.1) for i in range(3000)]


def test_an_archive_that_is_not_the_lists_is_refused(second, tmp_path, monkeypatch):
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path))
    name = (second.texts.TEXTS / "sdists.sha256").read_text().splitlines()[0].split("  ")[1]
    path = second.texts._made(tmp_path / "sdists" / name)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not the archive of the list"):
        next(second.texts.archives())


def test_a_file_that_differs_is_named(second, tmp_path, monkeypatch):
    monkeypatch.setattr(second.texts, "TEXTS", tmp_path)
    monkeypatch.setattr(second.texts, "documents", lambda name: [("a/b.py", b"x = 1\n" * 50)])
    good = f"{hashlib.sha256(b'x = 1' * 50).hexdigest()[:16]}  a/b.py"
    (tmp_path / "python.xz").write_bytes(lzma.compress(good.encode()))
    with pytest.raises(ValueError, match=r"2 files of the corpus python .* a/b\.py"):
        second.texts.checked("python")
    (tmp_path / "python.xz").write_bytes(lzma.compress(second.texts.line("a/b.py", b"x = 1\n" * 50).encode()))
    assert second.texts.checked("python") == [("a/b.py", b"x = 1\n" * 50)]
    assert not second.texts.usable(b"\xff\xfe") and not second.texts.usable(b"a\0b") and second.texts.usable("ü".encode())
