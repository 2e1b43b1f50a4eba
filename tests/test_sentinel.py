"""The sentinel: a number that changes by itself is found and named, training repeats a few steps, and nothing else changes."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import TINY, losses, new_run
from test_parallel import on_ranks

import ngpt_core as ng
from ngpt_core.train.loop import train
from ngpt_core.train.run import open_blend
from ngpt_core.train.seals import SMALL, Sealed, Seals
from ngpt_core.train.sentinel import RETURNS, Corrupted, Sentinel
from ngpt_core.train.trainer import Trainer
from ngpt_core.train.world import World

STEPS = 8
WIDE = {**TINY, "d_model": 64, "expert_ff": 32}  # its experts have more than SMALL numbers, so their rows are summed


def flip(x, index=0, bit=20) -> None:
    """Flip a bit in memory, where torch does not notice it."""
    x.detach().view(-1).numpy().view("uint32")[index] ^= 1 << bit


@pytest.fixture
def at_step(monkeypatch):
    """at_step(t, action): once, in place of training's step t, do the action and then the step."""
    real = Trainer.step

    def arrange(t, action, times=1):
        left = [times]

        def step(self, diagnose=False):
            if self.t + 1 == t and left[0]:
                left[0] -= 1
                action(self)
            return real(self, diagnose)

        monkeypatch.setattr(Trainer, "step", step)

    return arrange


def find(trainer, kind, name):
    return next(x.here.detach() for x in trainer.sentinel.seals.tensors if (x.kind, x.name) == (kind, name))


def weights(folder):
    return ng.load(folder / "export").state_dict()


def assert_same_bits(a, b) -> None:
    assert losses(a) == losses(b)
    for (name, x), y in zip(weights(a).items(), weights(b).values(), strict=True):
        assert torch.equal(x, y), name


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    """A run without a sentinel."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(new_run(corpus, folder, WIDE, steps=STEPS, diagnostics_every=3))
    return folder


# ---- seals -----------------------------------------------------------------------------------------------------------
SHAPES = [(), (5,), (3, 4), (2, 50, 64), (80, 64)]


@given(st.sampled_from(SHAPES), st.sampled_from([torch.float32, torch.bfloat16]), st.randoms(use_true_random=False))
def test_every_flipped_bit_breaks_the_seal_and_is_named(shape, dtype, pick):
    x = torch.randn(shape).to(dtype)
    seals, size = Seals([Sealed("parameter", "w", x)]), x.element_size()
    seals.compare()
    assert not seals.broken
    index = pick.randrange(x.numel())
    x.view(-1).view(torch.uint8).numpy()[index * size + pick.randrange(size)] ^= 1 << pick.randrange(8)
    seals.compare()
    assert seals.broken
    row = [str(int(i)) for i in torch.unravel_index(torch.tensor(index), shape)][:-1] if shape else []
    assert seals.found() == [f"w{', row ' if row else ''}{', '.join(row)}, changed while training was not writing it"]


def test_a_row_that_leaves_the_sphere_is_named():
    x = ng.sphere.random(100, 64)
    x[7] *= 1 + 1e-4
    seals = Seals([Sealed("parameter", "w", x, unit=True)])
    seals.compare()
    assert seals.found() == ["w, row 7, has left the sphere"]


def test_the_update_itself_finds_a_row_that_has_left_the_sphere(corpus, tmp_path):
    """Where the optimizer's kernel keeps the seals, nothing else looks at the row."""
    run = new_run(corpus, tmp_path / "run", WIDE, sentinel=100)
    trainer = Trainer(run, World(torch.device("cpu")), open_blend(run.config.data, run.model.vocab_size))
    for _ in range(2):
        trainer.step()
    watch, name = trainer.sentinel, "blocks.1.mixer.experts.up"
    with torch.no_grad():
        find(trainer, "parameter", name)[1, 3] *= 1 + 1e-4
    watch.reset()  # as if the update had written it
    for seal in watch.seals.kept.values():
        seal.taken = True
    assert watch.seals.kept
    watch.seals.compare(kernel=True)
    assert not watch.seals.broken
    trainer.step()
    assert watch.seals.found() == [f"{name}, row 1, 3, has left the sphere"]


def test_the_fused_step_notes_how_far_h_is_from_the_sphere():
    from ngpt_core.nn import rows_cpu

    h, f, alpha, off = ng.sphere.random(130, 48), torch.randn(130, 48), torch.rand(48), torch.full((1,), -1.0)
    if not rows_cpu.takes(h):
        pytest.skip("no compiler")
    rows_cpu.step(h, f, alpha, off)
    assert 0 <= float(off) < 1e-6
    h[77] *= 1.25
    assert torch.equal(rows_cpu.step(h, f, alpha, off), rows_cpu.step(h, f, alpha))
    assert float(off) == pytest.approx(0.25, abs=1e-6)
    h[77] /= 1.25
    rows_cpu.step(h, f, alpha, off)
    assert float(off) == pytest.approx(0.25, abs=1e-6)  # the largest of all calls


# ---- in training -----------------------------------------------------------------------------------------------------
def test_the_sentinel_changes_no_bit_of_training(straight, corpus, tmp_path):
    train(new_run(corpus, tmp_path / "run", WIDE, steps=STEPS, diagnostics_every=3, save_every=3, sentinel=2))
    assert_same_bits(tmp_path / "run", straight)


PLACES = {  # (kind, name): what the message calls it
    ("parameter", "blocks.1.mixer.experts.up"): "blocks.1.mixer.experts.up, row 1, 3,",
    ("parameter", "head.s_z.weight"): "head.s_z.weight",
    ("exp_avg", "blocks.1.mixer.experts.up"): "the first moment of blocks.1.mixer.experts.up, row 1, 3,",
    ("exp_avg_sq", "blocks.1.mixer.experts.up"): "the second moment of blocks.1.mixer.experts.up, row 1, 3,",
    ("step", "blocks.2.mixer.q_proj"): "the step counter of blocks.2.mixer.q_proj",
    ("buffer", "blocks.1.mixer.router.bias"): "blocks.1.mixer.router.bias",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_bit_that_flips_between_steps_is_named_and_the_run_ends_as_if_it_had_not(
    straight, corpus, tmp_path, at_step, capsys, place
):
    at_step(6, lambda trainer: flip(x := find(trainer, *place), 35 * 64 if x.numel() > SMALL else 0))
    run = new_run(corpus, tmp_path / "run", WIDE, steps=STEPS, diagnostics_every=3, save_every=4, sentinel=100)
    assert train(run) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"found damaged numbers: rank 0: {PLACES[place]}" in said
    assert re.search(r"goes back to \S*step-00000004 and repeats 2 steps", said)
    assert_same_bits(tmp_path / "run", straight)


def test_a_bit_that_flips_before_a_checkpoint_does_not_enter_it(straight, corpus, tmp_path, monkeypatch, capsys):
    real, left = Trainer.save, [True]

    def save(self):
        if self.t == 4 and left:
            flip(find(self, "exp_avg_sq", "blocks.1.mixer.experts.down"), left.pop())
        real(self)

    monkeypatch.setattr(Trainer, "save", save)
    train(new_run(corpus, tmp_path / "run", WIDE, steps=STEPS, diagnostics_every=3, save_every=2, sentinel=100))
    assert "step-00000002 and repeats 2 steps" in capsys.readouterr().err
    assert_same_bits(tmp_path / "run", straight)


def test_damage_is_found_where_steps_are_read_late(corpus, tmp_path, at_step, monkeypatch, capsys):
    monkeypatch.setattr("ngpt_core.train.trainer.on_gpu", lambda x: True)
    settings = dict(steps=STEPS, save_every=4, sentinel=3, diagnostics_every=1)  # diagnostics: by the readable path
    train(new_run(corpus, tmp_path / "straight", WIDE, **settings))
    at_step(6, lambda trainer: flip(find(trainer, "exp_avg", "blocks.1.mixer.experts.up"), 35 * 64))
    assert train(new_run(corpus, tmp_path / "run", WIDE, **settings)) == 0
    assert "goes back to" in capsys.readouterr().err
    assert_same_bits(tmp_path / "run", tmp_path / "straight")


def test_a_gradient_that_was_miscomputed_is_found_in_a_step_that_is_computed_twice(straight, corpus, tmp_path, at_step, capsys):
    def spoil(trainer):
        p = dict(trainer.model.named_parameters())["blocks.2.mixer.o_proj"]

        def hook(p):
            handle.remove()
            flip(p.grad, 3, 27)

        handle = p.register_post_accumulate_grad_hook(hook)

    for every, found in ((3, True), (5, False)):  # step 6 is computed twice if N is 3
        at_step(6, spoil)
        train(new_run(corpus, tmp_path / str(every), WIDE, steps=STEPS, diagnostics_every=3, save_every=4, sentinel=every))
        assert ("blocks.2.mixer.o_proj, row 0, was computed twice with different results" in capsys.readouterr().err) == found
    assert_same_bits(tmp_path / "3", straight)
    assert not torch.equal(weights(tmp_path / "5")["head.weight"], weights(straight)["head.weight"])


def test_a_hidden_state_that_leaves_the_sphere_is_found(straight, corpus, tmp_path, at_step, capsys):
    def spoil(trainer):
        def hook(block, args, output):
            handle.remove()
            return output[0] * (1 + 3e-5), output[1]

        handle = trainer.model.blocks[3].register_forward_hook(hook, prepend=True)

    at_step(6, spoil)
    train(new_run(corpus, tmp_path / "run", WIDE, steps=STEPS, diagnostics_every=3, save_every=4, sentinel=100))
    assert "rank 0: h after block 3 had a norm that differs from 1 by 3.0e-05" in capsys.readouterr().err
    assert_same_bits(tmp_path / "run", straight)


def test_a_row_that_turns_by_more_than_its_cap_is_found(corpus, tmp_path, monkeypatch):
    """A fault that repeats itself to the bit passes every comparison, and breaks the theorem of the cap."""
    run = new_run(corpus, tmp_path / "run", WIDE, sentinel=1)
    trainer = Trainer(run, World(torch.device("cpu")), open_blend(run.config.data, run.model.vocab_size))
    w, real = find(trainer, "parameter", "blocks.1.mixer.experts.up"), trainer.optimizer.step

    def too_far():
        real()
        w[2, 5] = ng.sphere.unit(w[2, 5] + 0.05 * w[2, 6])

    monkeypatch.setattr(trainer.optimizer, "step", too_far)
    with pytest.raises(Corrupted, match=r"blocks.1.mixer.experts.up, row 2, 5, turned by .* rad, and its cap is "):
        trainer.sentinel.step(False)


def test_damage_explains_a_loss_that_is_not_finite(corpus, tmp_path, at_step):
    at_step(3, lambda trainer: find(trainer, "parameter", "head.weight")[5].fill_(torch.nan))
    with pytest.raises(ValueError, match=r"rank 0: head.weight, row 5, changed .* There is no checkpoint to go back to: start"):
        train(new_run(corpus, tmp_path / "run", WIDE, sentinel=100))


def test_a_loss_that_diverges_is_not_called_damage(corpus, tmp_path, at_step):
    def explode(trainer):
        find(trainer, "parameter", "head.s_z.weight").fill_(torch.inf)
        trainer.sentinel.seal()  # as if the update had written it

    at_step(3, explode)
    with pytest.raises(ValueError, match=r"is not finite; training stops before the update"):
        train(new_run(corpus, tmp_path / "run", WIDE, sentinel=100))


def test_damage_that_returns_every_time_ends_the_run(corpus, tmp_path, at_step, capsys):
    at_step(4, lambda trainer: flip(find(trainer, "exp_avg", "head.weight")), times=RETURNS + 1)
    with pytest.raises(ValueError, match=rf"step-00000003 {RETURNS} times, and it happened again: replace the machine"):
        train(new_run(corpus, tmp_path / "run", WIDE, save_every=3, sentinel=100))
    assert capsys.readouterr().err.count("repeats 1 steps") == RETURNS


def test_the_baseline_is_watched_too(corpus, tmp_path, at_step, capsys):
    gpt = {**WIDE, "normalized": False}
    train(new_run(corpus, tmp_path / "straight", gpt))
    at_step(4, lambda trainer: flip(find(trainer, "exp_avg_sq", "head.weight"), 70))
    train(new_run(corpus, tmp_path / "run", gpt, save_every=2, sentinel=2))
    assert "rank 0: the second moment of head.weight, row 1, changed" in capsys.readouterr().err
    assert_same_bits(tmp_path / "run", tmp_path / "straight")


def test_the_stored_rates_and_overheads_meet_the_target():
    stored = json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / "sentinel.json").read_text())
    of_moments, (at_rest,) = stored["moments"], stored["at rest"].values()
    assert min(row["that matter"] for row in of_moments.values()) >= 300 and at_rest["parameter"]["flips"] >= 300
    for row in (*of_moments.values(), *at_rest.values()):
        assert row["found of those"] is None or row["found of those"] >= 0.99
    assert all(cost["--sentinel 100"] <= 0.02 for cost in stored["overhead"].values())


# ---- two ranks -------------------------------------------------------------------------------------------------------
def _train_damaged(run, t, kind, name, where) -> None:
    """Train on this rank; rank 1's piece of a tensor is damaged once, at rest or while it is written."""
    real, left = Trainer.step if where == "at rest" else Sentinel.seal, [True]

    def step(self, *args):
        trainer = self if where == "at rest" else self.trainer
        if trainer.world.rank == 1 and trainer.t + (where == "at rest") == t and left:
            flip(find(trainer, kind, name), left.pop())
        return real(self, *args)

    setattr(*((Trainer, "step") if where == "at rest" else (Sentinel, "seal")), step)
    try:
        assert train(run) == 0
    finally:
        setattr(*((Trainer, "step") if where == "at rest" else (Sentinel, "seal")), real)


def _two_runs(log, sharded, copied) -> None:
    with open(log, "a", buffering=1) as file, contextlib.redirect_stderr(file):  # both ranks append to it
        _train_damaged(sharded, 6, "exp_avg", "blocks.1.mixer.experts.up", "at rest")
        _train_damaged(copied, 6, "exp_avg", "blocks.2.mixer.o_proj", "while it is written")


def test_on_two_ranks_the_damaged_rank_is_named_and_copies_are_compared(corpus, tmp_path):
    settings = {"steps": STEPS, "save_every": 4, "sentinel": 100}
    runs = [new_run(corpus, tmp_path / name, WIDE, **settings, replicas=n) for n, name in ((1, "sharded"), (2, "copied"))]
    on_ranks(2, _two_runs, tmp_path / "log", *runs)
    said = " ".join((tmp_path / "log").read_text().split())
    assert "numbers: rank 1: the first moment of blocks.1.mixer.experts.up, row 2, 0, changed while" in said
    assert re.search(
        r"first moment of blocks.2.mixer.o_proj differs between ranks that hold the same part .*\(rank 0, 1\)", said
    )
    assert said.count("training goes back to") == 2
    plain = new_run(corpus, tmp_path / "plain", WIDE, steps=STEPS)
    on_ranks(2, _plain, plain)
    for run in runs:
        assert losses(run.folder) == losses(plain.folder)


def _plain(run) -> None:
    assert train(run) == 0
