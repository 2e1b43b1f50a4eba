"""Checkpoints: what is resumed is the same run to the bit, and nothing that can go wrong while saving loses it."""

import contextlib
import dataclasses
import errno
import json
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import time
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from runs import SMALL, TINY, losses, new_run

import ngpt_core as ng
from ngpt_core.cli import main
from ngpt_core.seal import Damaged, entry, read_sealed, write_sealed
from ngpt_core.train import checkpoint, loop, storage, trainer
from ngpt_core.train.config import TrainConfig, recipe_numbers
from ngpt_core.train.folder import take
from ngpt_core.train.loop import train
from ngpt_core.train.metrics import Metrics as trainer_metrics
from ngpt_core.train.metrics import read_metrics
from ngpt_core.train.run import POLICIES, open_blend, prepare
from ngpt_core.train.world import World

CLOCK = ("time", "tokens_per_s", "mfu")


def numbers(folder) -> list[dict]:
    """Every line of the metrics, without what depends on the clock."""
    return [{k: v for k, v in r.items() if k not in CLOCK} for r in read_metrics(folder)]


def weights(folder) -> dict[str, torch.Tensor]:
    return dict(ng.load(folder / "export").state_dict())


def same_run(a, b) -> None:
    assert numbers(a) == numbers(b)
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def resume(folder, **settings) -> int:
    return train(prepare({"out": str(folder), **settings}, {}, resume=True))


def child(target, *args) -> multiprocessing.Process:
    """A real process that shares nothing but the disk; torch is imported once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ngpt_core.train.loop"])
    process = context.Process(target=target, args=args)
    process.start()
    return process


def snapshot(folder) -> dict[str, tuple]:
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def straight(corpus, tmp_path):
    """Six steps without interruption, checkpoints at 2, 4 and 6."""
    assert train(new_run(corpus, tmp_path / "straight", save_every=2, keep=9, eval_every=3, diagnostics_every=2)) == 0
    return tmp_path / "straight"


# ---- resuming --------------------------------------------------------------------------------------------------------
SWITCHES = ("eps_gate=auto", "eps_gate.every=4", "transport=parallel", "pmen_embeddings=true,false")


@pytest.mark.parametrize("normalized, recipe", [(True, ()), (True, SWITCHES), (False, ())], ids=["nGPT", "switches", "GPT"])
def test_a_resumed_run_is_the_same_to_the_bit(corpus, tmp_path, normalized, recipe):
    settings = dict(recipe=recipe, save_every=3, keep=9, sample_tokens=4, eval_every=2)
    train(new_run(corpus, tmp_path / "a", {"normalized": normalized}, **settings))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "b" / "export")
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "step-00000006")
    assert len(read_metrics(tmp_path / "b")) == 6  # written after the checkpoint: taken back, and written again
    assert resume(tmp_path / "b") == 0
    same_run(tmp_path / "a", tmp_path / "b")


def test_a_finished_run_is_left_alone(straight):
    before = snapshot(straight)
    assert resume(straight) == 0 and snapshot(straight) == before
    assert main(["train", "--preset", "pico", "--steps", "6", "--out", str(straight), "--resume", *_flags(TINY)]) == 0
    assert snapshot(straight) == before


def _flags(values: dict) -> list[str]:
    return [x for k, v in values.items() if k != "preset" for x in (f"--{k.replace('_', '-')}={v}",)]


def test_resume_starts_a_run_that_is_not_there_and_one_that_never_saved(corpus, tmp_path):
    settings = {**SMALL, "data": [corpus], "out": str(tmp_path / "run"), "steps": 3}
    assert train(prepare(settings, TINY, resume=True)) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.rmtree(tmp_path / "run" / "export")
    before = numbers(tmp_path / "run")
    assert train(prepare(settings, TINY, resume=True)) == 0
    assert numbers(tmp_path / "run") == before


def test_another_run_is_refused_and_nothing_changes(straight, corpus, tmp_path):
    before = snapshot(straight)
    for settings, model, word in (
        ({}, {"d_model": 64, "n_heads": 4}, "started with d_model=32, n_heads=2. A checkpoint continues only as"),
        ({}, {"normalized": False}, "started with normalized=True. A checkpoint continues only as the model"),
        ({}, {"preset": "mini"}, "started with preset=pico. A checkpoint continues only as the model"),
        ({"steps": 9}, {}, "--re-anchor"),
        ({"steps": 3, "re_anchor": True}, {}, "already trained 6 steps"),
        ({"seed": 5, "batch_size": 8}, {}, "was started with seed=0, batch_size=4. A resumed run cannot change this"),
        ({"scaled": False}, {}, "was started with scaled=True. A resumed run keeps its numbers"),
        ({"recipe": ("rho=0",)}, {}, "--recipe rho=0: .*rho must be > 0"),
        ({"recipe": "rho=1"}, {}, "recipe must be a list of strings"),
        ({}, {"C": 0.12}, "C=0.12 would have no effect .* its recipe has C=0.24, .*Use --recipe C=NUMBER"),
    ):
        with pytest.raises(ValueError, match=word):
            train(prepare({"out": str(straight), **settings}, model, resume=True))
    with pytest.raises(ValueError, match="continue it with --resume"):
        new_run(corpus, straight)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="other files but no run"):
        new_run(corpus, tmp_path / "other")
    assert snapshot(straight) == before


def test_every_field_of_both_configs_has_one_policy():
    fields = [field.name for config in (TrainConfig, ng.ModelConfig) for field in dataclasses.fields(config)]
    assert sorted(" ".join(POLICIES.values()).split()) == sorted(fields)


def test_a_resumed_run_treats_each_field_by_its_policy(straight, corpus, tmp_path):
    """Every field is given another value, one at a time."""
    (tmp_path / "link").symlink_to(corpus)
    run = prepare({"out": str(straight)}, {}, resume=True)
    now = {**vars(run.config), **vars(run.model), "scaled": True}
    other = {"recipe": ("rho=0.2",), "data": (str(tmp_path / "link"),), "val_data": (corpus,), "out": f"{straight}/"}
    other |= {"wandb": "x", "mlflow": "x", "callback": ("json:JSONDecoder",), "device": "cpu", "precision": "fp32"}
    other |= {"verify_data": True, "compile": True, "stream": "fp32"}
    other |= {"activation_checkpointing": "full", "tokens": 8 * 4 * 32, "sample_prompt": "x"}
    for policy, names in POLICIES.items():
        for name in names.split():
            new = other.get(name, not now[name] if isinstance(now[name], bool) else 2 * (now[name] or 1))
            given = {"preset" if name == "name" else name: new}
            settings = {"out": str(straight), "re_anchor": policy == "re-anchored"}
            asked = ({**settings, **given}, {}) if name in vars(run.config) else (settings, given)
            if policy in ("fixed", "architecture", "settled", "given") or name == "C":  # C: the recipe of a scaled run has it
                with pytest.raises(ValueError, match=f"was started with {next(iter(given))}=|^C=.* would have no effect"):
                    prepare(*asked, resume=True)
                continue
            again = prepare(*asked, resume=True)
            found = {**vars(again.config), **vars(again.model)}[name]
            assert found == ((*now[name], *new) if policy == "merged" else new), name
            assert again.steps == {"steps": 12, "tokens": 8}.get(name, 6)


def test_re_anchor_holds_for_one_command_only(straight):
    shutil.rmtree(straight / "checkpoints" / "step-00000006")
    assert resume(straight, steps=8, re_anchor=True) == 0
    assert json.loads((straight / "config.json").read_text())["train"]["re_anchor"]
    with pytest.raises(ValueError, match="planned for 8 steps, not for 9 steps"):
        resume(straight, steps=9)
    assert prepare({"out": str(straight), "steps": 9, "re_anchor": True}, {}, resume=True).steps == 9


def test_a_resumed_run_may_change_one_number_of_its_recipe_and_keeps_the_others(corpus, tmp_path):
    train(new_run(corpus, tmp_path / "run", save_every=2, keep=9, recipe=("rho=1.0", "s_z_lr=0.1")))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    before = [r["lr"] for r in read_metrics(tmp_path / "run")]
    assert train(prepare({"out": str(tmp_path / "run"), "recipe": ("s_z_lr=0.2",)}, {}, resume=True)) == 0
    assert [r["lr"] for r in read_metrics(tmp_path / "run")] == before  # rho is still 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["recipe"][-2:] == ["rho=1.0", "s_z_lr=0.2"]


def test_a_resumed_run_may_lower_its_learning_rate(straight):
    shutil.rmtree(straight / "checkpoints" / "step-00000006")
    before = [r["lr"] for r in read_metrics(straight)]
    assert resume(straight, recipe=("C=0.12",)) == 0
    assert [r["lr"] for r in read_metrics(straight)] == pytest.approx(before[:4] + [lr / 2 for lr in before[4:]])


def test_a_run_that_was_not_scaled_takes_another_C_and_is_not_scaled_later(corpus, tmp_path):
    train(new_run(corpus, tmp_path / "run", save_every=2, keep=9, scaled=False))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    before = [r["lr"] for r in read_metrics(tmp_path / "run")]
    with pytest.raises(ValueError, match=r"was started with scaled=False\. A resumed run keeps its numbers"):
        resume(tmp_path / "run", scaled=True)
    assert train(prepare({"out": str(tmp_path / "run"), "scaled": False}, {"C": 0.12}, resume=True)) == 0
    assert [r["lr"] for r in read_metrics(tmp_path / "run")] == pytest.approx(before[:4] + [lr / 2 for lr in before[4:]])


@pytest.mark.parametrize("record", ["new", "old"])
def test_more_steps_change_no_number_of_the_recipe(corpus, tmp_path, record):
    """A run of 4,000 steps has a lower C than one of 5: what was settled at the start holds."""
    run, start = tmp_path / "run", {"recipe": ("schedule=linear",), "steps": 5}
    train(new_run(corpus, run, save_every=4, keep=9, **start))
    shutil.rmtree(run / "checkpoints" / "step-00000005")
    if record == "old":  # as runs were written before
        text = json.loads((run / "config.json").read_text())
        text["train"] |= {"scaled": True, "recipe": ["schedule=linear"]}
        del text["scaled"], text["seal"], text["id"]
        (run / "config.json").write_text(json.dumps(text))
    again = prepare({"out": str(run), **start, "scaled": True, "steps": 4000, "re_anchor": True}, {}, resume=True)
    first = new_run(corpus, tmp_path / "x", **start)
    assert recipe_numbers(again.config, again.model, 4000) == recipe_numbers(first.config, again.model, 5)
    trainer_ = trainer.Trainer(again, World(torch.device("cpu")), open_blend((corpus,), 256))
    trainer_.resume(again.checkpoint)
    last = read_metrics(run)[3]["lr"]  # 1/5 of the peak is left
    assert trainer_.step()["lr"] == pytest.approx(last, rel=1e-3)


def test_tokens_asked_for_later_count_as_steps_do(straight):
    with pytest.raises(ValueError, match=r"planned for 6 steps.*8 steps.*--re-anchor"):
        prepare({"out": str(straight)}, {"tokens": 8 * 4 * 32}, resume=True)
    again = prepare({"out": str(straight), "re_anchor": True}, {"tokens": 8 * 4 * 32}, resume=True)
    assert (again.steps, again.config.steps, again.model.tokens) == (8, None, 1024)
    assert prepare({"out": str(straight), "steps": 6}, {"tokens": 1024}, resume=True).steps == 6  # as at the start of a run


def test_with_re_anchor_more_steps_spread_the_rest_of_the_schedule(straight):
    for step in ("step-00000006",):
        shutil.rmtree(straight / "checkpoints" / step)
    assert resume(straight, steps=8, re_anchor=True) == 0
    records = read_metrics(straight)
    peak = records[0]["lr"] / ng.log_decay(1 / 6)
    wanted = [ng.log_decay(t / 6) for t in (1, 2, 3, 4)] + [ng.log_decay(r) for r in (4.5 / 6, 5 / 6, 5.5 / 6, 1.0)]
    assert [r["lr"] for r in records] == pytest.approx([peak * w for w in wanted])
    assert json.loads((straight / "config.json").read_text())["steps"] == 8
    assert resume(straight) == 0  # and now 8 is what finished means
    shutil.rmtree(straight / "checkpoints" / "step-00000008")
    shutil.rmtree(straight / "export")
    assert resume(straight) == 0  # also for a checkpoint from before
    assert [r["lr"] for r in read_metrics(straight)] == pytest.approx([peak * w for w in wanted])


def test_the_newest_n_and_every_m_are_kept(corpus, tmp_path):
    train(new_run(corpus, tmp_path / "run", steps=9, save_every=1, keep=2, keep_every=3))
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{t:08d}" for t in (3, 6, 8, 9)]


def test_a_background_save_writes_the_same(straight, corpus, tmp_path):
    run = new_run(corpus, tmp_path / "run", save_every=2, keep=9, eval_every=3, diagnostics_every=2, async_save=True)
    process = child(_train, run)  # its process group ends with it
    process.join()
    assert process.exitcode == 0
    same_run(straight, tmp_path / "run")
    for name in ("a", "b"):
        shutil.copytree(straight if name == "a" else tmp_path / "run", tmp_path / name)
        shutil.rmtree(tmp_path / name / "export")
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000006")
        assert resume(tmp_path / name, async_save=False) == 0
    same_run(tmp_path / "a", tmp_path / "b")


# ---- crashes ---------------------------------------------------------------------------------------------------------
def _train(run) -> None:
    raise SystemExit(train(run))


def _die_while_saving(run, moment: str) -> None:
    """Train, and die without a chance to clean up in the middle of the second save."""
    saves = 0
    real_replace, real_write = os.replace, storage._write

    def write(path, items, planner):
        nonlocal saves
        saves += path.name.startswith("model-")
        if saves == 2 and moment == "half the tensors written":
            path.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return real_write(path, items, planner)

    def replace(source, target):
        if saves == 2 and str(target).endswith("step-00000004") and moment == "all written, not yet named":
            os.kill(os.getpid(), signal.SIGKILL)
        return real_replace(source, target)

    storage._write, checkpoint.os.replace = write, replace
    train(run)


@pytest.mark.parametrize("moment", ["half the tensors written", "all written, not yet named"])
def test_kill_9_in_the_middle_of_a_save_loses_the_interval_and_no_more(straight, corpus, tmp_path, moment):
    run = new_run(corpus, tmp_path / "run", save_every=2, keep=9, eval_every=3, diagnostics_every=2)
    process = child(_die_while_saving, run, moment)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [".step-00000004", "step-00000002"]
    assert resume(tmp_path / "run") == 0
    same_run(straight, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob(".*")] == []


def test_sigterm_saves_and_ends_and_the_run_goes_on(corpus, tmp_path):
    run = new_run(corpus, tmp_path / "run", steps=400)
    process = child(_train, run)
    while not (tmp_path / "run" / "metrics.jsonl").exists() or len(read_metrics(tmp_path / "run")) < 2:
        time.sleep(0.05)
        assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    done = len(read_metrics(tmp_path / "run"))
    assert process.exitcode == 143 and done < 400
    assert checkpoint.newest(tmp_path / "run").name == f"step-{done:08d}"
    assert resume(tmp_path / "run", steps=done + 2, re_anchor=True) == 0
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == list(range(1, done + 3))


def _full_disk(argv, log) -> None:
    """From the second checkpoint on no file may grow beyond a few bytes: the kernel says so, as it does for a full disk."""
    real = checkpoint.Checkpoints.save

    def save(self, step, *args):
        self.finish()  # the first one is whole before the disk fills up
        if step > 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return real(self, step, *args)

    checkpoint.Checkpoints.save = save
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    raise SystemExit(main(argv))


@pytest.mark.parametrize("background", [[], ["--async-save"]])
def test_a_full_disk_is_one_sentence_and_the_last_good_checkpoint_stays(corpus, tmp_path, background):
    settings = {k: v for k, v in SMALL.items() if k != "tensorboard"} | {"save_every": 2, "steps": 6, "out": tmp_path / "run"}
    argv = ["train", "--preset=pico", f"--data={corpus}", "--no-tensorboard", *_flags(TINY), *_flags(settings), *background]
    process = child(_full_disk, argv, str(tmp_path / "log"))
    process.join()
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert process.exitcode == 1 and last.startswith("ngpt: the checkpoint of step 4 could not be written"), last
    assert last.endswith("step-00000002.")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert resume(tmp_path / "run", async_save=False) == 0


def _full_disk_at_the_end(argv, log) -> None:
    real = trainer.save_model

    def save(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        return real(*args)

    trainer.save_model = save
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    raise SystemExit(main(argv))


def test_a_full_disk_while_exporting_loses_nothing(corpus, tmp_path):
    settings = {k: v for k, v in SMALL.items() if k != "tensorboard"} | {"steps": 2, "out": tmp_path / "run"}
    argv = ["train", "--preset=pico", f"--data={corpus}", "--no-tensorboard", *_flags(TINY), *_flags(settings)]
    process = child(_full_disk_at_the_end, argv, str(tmp_path / "log"))
    process.join()
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert process.exitcode == 1 and last.startswith("ngpt: the model could not be written"), last
    assert resume(tmp_path / "run") == 0 and len(read_metrics(tmp_path / "run")) == 2
    ng.load(tmp_path / "run" / "export")


def _little_memory(argv, log, after: int, room: int) -> None:
    """From step ``after`` on the kernel gives no more than ``room`` bytes more, as on a machine whose memory is full."""
    real = trainer.Trainer.step

    def step(self, diagnose=False):
        if self.t == after:
            pages = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room,) * 2)
        taken = []  # what the step before has freed
        with contextlib.suppress(RuntimeError):
            while self.t == after:
                taken.append(torch.empty(1 << 18))
        try:
            return real(self, diagnose)
        finally:
            taken.clear()

    trainer.Trainer.step = step
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    raise SystemExit(main(argv))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the limit is set as Linux counts")
@pytest.mark.parametrize("after", [0, 1])
def test_a_memory_that_runs_out_is_one_sentence_and_loses_nothing(corpus, tmp_path, after):
    out = tmp_path / "run"
    settings = {k: v for k, v in SMALL.items() if k != "tensorboard"} | {"steps": 2, "batch_size": 8, "seq_len": 1024}
    argv = ["train", "--preset=pico", f"--data={corpus}", "--no-tensorboard", *_flags(TINY), *_flags(settings), f"--out={out}"]
    process = child(_little_memory, argv, str(tmp_path / "log"), after, 24 << 20)
    process.join()
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert process.exitcode == 1 and last.startswith(f"ngpt: step {after + 1}: out of memory (can't allocate memory"), last
    assert "Use --micro-batch 4, --activation-checkpointing full" in last
    if after:  # the step before is saved: it goes on from there
        assert last.endswith("step-00000001 with --resume.") and checkpoint.newest(out).name == "step-00000001"
        assert resume(out, micro_batch=1) == 0 and [r["step"] for r in read_metrics(out)] == [1, 2]
    else:  # there is nothing to go on from: another length, and the same command, as if it had not been
        assert last.endswith("Then start again.")
        assert main([*argv, "--seq-len=32"]) == 0 and len(read_metrics(out)) == 2


def test_a_run_that_has_not_trained_a_step_may_start_again_and_one_that_has_may_not(corpus, tmp_path):
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="no luck"):
        patch.setattr(loop, "_step", lambda *args: (_ for _ in ()).throw(ValueError("no luck")))
        train(new_run(corpus, out))
    assert (out / "config.json").is_file()
    with pytest.raises(ValueError, match=r"was started with seq_len=32\. .*leave out --resume"):
        prepare({"out": str(out), "seq_len": 16}, {}, resume=True)
    assert resume(out) == 0  # as it was
    with pytest.raises(ValueError, match="continue it with --resume"):
        new_run(corpus, out)
    (tmp_path / "model").mkdir()
    ng.save(ng.LanguageModel(new_run(corpus, tmp_path / "x").model), tmp_path / "model")
    with pytest.raises(ValueError, match="--resume"):  # a folder with a config.json is not always a run
        new_run(corpus, tmp_path / "model")


def test_metrics_that_cannot_be_written_do_not_lose_the_step(corpus, tmp_path):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="metrics of step 1: No space left"):
        patch.setattr(loop, "Metrics", _metrics_on_a_full_disk)
        train(new_run(corpus, tmp_path / "run"))
    assert checkpoint.newest(tmp_path / "run").name == "step-00000001"
    assert resume(tmp_path / "run") == 0


def _metrics_on_a_full_disk(*args):
    metrics = trainer_metrics(*args)
    metrics.callbacks[0].file = open("/dev/full", "a")  # metrics.jsonl
    return metrics


def test_a_run_continues_without_stderr(corpus, tmp_path, monkeypatch):
    run = new_run(corpus, tmp_path / "run")
    monkeypatch.setattr("sys.stderr", None)  # as after 2>&-
    assert train(run) == 0 and len(read_metrics(tmp_path / "run")) == 6


def test_a_run_continues_when_nobody_reads_its_output(corpus, tmp_path, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", pipe)
        assert train(new_run(corpus, tmp_path / "run", steps=2)) == 0
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


# ---- two at once -----------------------------------------------------------------------------------------------------
def test_a_second_process_is_refused_while_the_first_lives_and_not_when_it_was_killed(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    process = child(_train, new_run(corpus, out, steps=2000))
    while not (out / "metrics.jsonl").exists() or not read_metrics(out):
        time.sleep(0.05)
        assert process.is_alive()
    capsys.readouterr()
    assert main(["train", f"--out={out}", "--resume"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ngpt: {out} is being trained by process {process.pid} on ") and error.count("\n") == 1
    assert len(read_metrics(out)) > 0 and process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (out / ".lock").exists()
    assert resume(out, steps=2, re_anchor=True) == 0 and not (out / ".lock").exists()


def _take_turns(folder, turns) -> None:
    for _ in range(turns):
        while True:
            try:
                lock = take(folder)
                break
            except ValueError as error:
                assert "is being trained by" in str(error)
        number = int((folder / "number").read_text())
        time.sleep(0.001)
        (folder / "number").write_text(str(number + 1))
        lock.close()


def test_the_lock_holds_while_its_file_comes_and_goes(tmp_path):
    (tmp_path / "number").write_text("0")
    processes = [child(_take_turns, tmp_path, 50) for _ in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0] and (tmp_path / "number").read_text() == "150"


def test_without_locks_a_run_is_trained_with_a_warning(corpus, tmp_path, capsys, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    assert train(new_run(corpus, tmp_path / "run", steps=1)) == 0
    assert "this file system has no locks" in capsys.readouterr().err


def test_a_run_that_went_on_between_reading_and_locking_is_not_taken_back(straight):
    shutil.rmtree(straight / "export")
    shutil.move(straight / "checkpoints" / "step-00000006", straight / "later")
    run = prepare({"out": str(straight)}, {}, resume=True)
    shutil.move(straight / "later", straight / "checkpoints" / "step-00000006")
    with pytest.raises(ValueError, match="another process has just trained"):
        train(run)


# ---- damage ----------------------------------------------------------------------------------------------------------
def _cut(path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])


FILES = ("index.json", "model-00000.safetensors", "optimizer-00000.safetensors", "random-00000.safetensors", "state.json")
DAMAGE = {"cut short": _cut, "one bit": _flip, "gone": os.unlink, "empty": lambda path: path.write_bytes(b"")}


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_set_aside_and_the_run_continues_from_an_older_one(straight, tmp_path, capsys, file):
    path = straight / "checkpoints" / "step-00000006"
    shutil.copytree(straight, tmp_path / "whole")
    shutil.rmtree(straight / "export")
    for kind, damage in DAMAGE.items():
        damage(path / file)
        for command in ("eval", "generate") if file.startswith(("model", "state", "index")) else ():
            assert main([command, str(straight)]) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"ngpt: the checkpoint {path} cannot be read: ") and error.count("\n") == 1, (kind, error)
            assert file in error and f"ngpt train --out {straight} --resume sets it aside" in error
        assert main(["train", f"--out={straight}", "--resume"]) == 0
        told = capsys.readouterr().err
        assert f"ngpt: the checkpoint {path} cannot be read: " in told and file in told, (kind, told)
        assert "It is set aside as damaged-step-00000006" in told and "continues from step 4; 2 steps are repeated." in told
        same_run(tmp_path / "whole", straight)
        shutil.rmtree(straight / "export")
    assert len(list((straight / "checkpoints").glob("damaged-*"))) == len(DAMAGE)


def test_without_a_checkpoint_that_verifies_nothing_is_renamed_and_nothing_starts_again(straight, capsys):
    shutil.rmtree(straight / "export")
    for path in (straight / "checkpoints").iterdir():
        _flip(path / "model-00000.safetensors")
    before = snapshot(straight)
    assert main(["train", f"--out={straight}", "--resume"]) == 1
    error = capsys.readouterr().err
    assert f"No older checkpoint of {straight} can be used" in error and error.count("\n") == 1
    assert snapshot(straight) == before


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_a_checkpoint_is_read_is_not_damage(straight, tmp_path, monkeypatch, capsys, request, number, status):
    shutil.copytree(straight, tmp_path / "whole")
    shutil.rmtree(straight / "export")
    before, read = snapshot(straight), storage.Reader.read_data

    def interrupted(self, plan, planner):
        os.kill(os.getpid(), number)
        return read(self, plan, planner)

    monkeypatch.setattr(storage.Reader, "read_data", interrupted)
    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ctrl_c))
    for command in (["train", f"--out={straight}", "--resume"], ["eval", str(straight)]):
        try:
            ended = main(command)
        except SystemExit as error:
            ended = error.code
        assert ended == status and "cannot be read" not in capsys.readouterr().err
        assert {k: v for k, v in snapshot(straight).items() if k != ".lock"} == before
    monkeypatch.undo()
    assert main(["train", f"--out={straight}", "--resume"]) == 0
    same_run(tmp_path / "whole", straight)


def test_a_run_without_any_checkpoint_says_that_it_starts_again(straight, tmp_path, capsys):
    shutil.copytree(straight, tmp_path / "whole")
    for name in ("export", "checkpoints"):
        shutil.rmtree(straight / name)
    assert main(["train", f"--out={straight}", "--resume"]) == 0
    assert "has no checkpoint: it starts again from its first step; 6 steps are repeated." in capsys.readouterr().err
    same_run(tmp_path / "whole", straight)


def test_missing_moments_are_an_error_and_not_a_fresh_start(straight, capsys):
    """The index and the seal are made to fit: only the rule that every parameter has its moments is left."""
    shutil.rmtree(straight / "export")
    for path in (straight / "checkpoints").iterdir():
        index = json.loads((path / "index.json").read_text())
        (path / "index.json").write_text(json.dumps({k: v for k, v in index.items() if not k.startswith("optimizer.exp_avg.")}))
        state, _ = read_sealed(path / "state.json")
        state["files"]["index.json"] = ng.seal.entry(path / "index.json")
        write_sealed(path / "state.json", state)
    assert main(["train", f"--out={straight}", "--resume"]) == 1
    assert "it has no optimizer.exp_avg." in capsys.readouterr().err


def _edit(path, file, change) -> None:
    """Change the numbers of one file of a checkpoint, and make its seal fit."""
    tensors = safetensors.torch.load_file(path / file)
    change(tensors)
    safetensors.torch.save_file(tensors, path / file)
    state, _ = read_sealed(path / "state.json")
    write_sealed(path / "state.json", state | {"files": state["files"] | {file: entry(path / file)}})


IMPOSSIBLE = {
    "exp_avg.head.weight@0,0": (math.nan, "finite numbers"),
    "exp_avg_sq.head.weight@0,0": (-1.0, "squares"),
    "step.head.weight@": (7.0, "it has 7 updates of head.weight, and the run made 6"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_optimizers_state_that_no_run_leaves_behind_is_damage(straight, capsys, name):
    value, why = IMPOSSIBLE[name]
    shutil.rmtree(straight / "export")
    path = straight / "checkpoints" / "step-00000006"
    _edit(path, "optimizer-00000.safetensors", lambda tensors: tensors[f"optimizer.{name}"].view(-1)[:1].fill_(value))
    assert main(["train", f"--out={straight}", "--resume"]) == 0
    told = capsys.readouterr().err
    assert why in told and "It is set aside as damaged-step-00000006" in told


@pytest.mark.parametrize(
    "parts, whole",
    [
        ([((0, 0), (4, 6))], True),
        ([((0, 0), (1, 2)), ((0, 2), (1, 4)), ((1, 0), (3, 2)), ((1, 2), (3, 4))], True),
        ([((0, 0), (4, 6)), ((4, 0), (0, 6))], True),  # the second rank has nothing
        ([((0, 0), (2, 6)), ((1, 0), (2, 6))], False),  # as many numbers as the tensor, and the last row is missing
        ([((0, 0), (2, 6)), ((2, 0), (1, 6))], False),
        ([((0, 0), (4, 6)), ((0, 0), (4, 6))], False),
        ([((0, 0), (5, 6))], False),
        ([((0,), (24,))], False),
        ([((0, 0), (1, 2)), ((0, 2), (1, 4)), ((1, 0), (3, 2))], False),
        ([], False),
    ],
)
def test_the_parts_of_a_tensor_fill_it_and_do_not_overlap(tmp_path, parts, whole):
    about = {"dtype": "F32", "shape": [4, 6], "parts": [["a.safetensors", *map(list, part)] for part in parts]}
    (tmp_path / "index.json").write_text(json.dumps({"w": about}))
    with contextlib.nullcontext() if whole else pytest.raises(ValueError, match="does not have all of w"):
        assert set(storage.read_index(tmp_path, {"a.safetensors": {"bytes": 1000, "sha256": ""}})) == {"w"}


def test_a_config_that_was_edited_is_not_blamed_on_the_checkpoint(straight):
    shutil.rmtree(straight / "export")
    record = json.loads((straight / "config.json").read_text())
    (straight / "config.json").write_text(json.dumps({**record, "steps": 8}))
    with pytest.raises(ValueError, match=r"config\.json was damaged or edited: its content does not match its seal"):
        resume(straight)
    del record["seal"]
    edited = {"model": {**record["model"], "d_model": 64}}
    write_sealed(straight / "config.json", {**record, **edited})
    with pytest.raises(ValueError, match=r"config.json does not belong to .*step-00000006: they differ in d_model\."):
        resume(straight)
    write_sealed(straight / "config.json", {**record, "train": {**record["train"], "batch_size": 8}})
    with pytest.raises(ValueError, match=r"config.json does not belong to .*step-00000006: they differ in batch_size\."):
        resume(straight)
    write_sealed(straight / "config.json", {**record, "id": "that of another run"})
    with pytest.raises(ValueError, match=r"config.json does not belong to .*step-00000006: they differ in id\."):
        resume(straight)
    for change, words in (
        ({"steps": "six"}, "'steps' is missing or has the wrong type"),
        ({"model": None}, "'model' is missing or has the wrong type"),
        ({"model": {}}, "config.json, model: "),
        ({"train": []}, "'train' is missing or has the wrong type"),
        ({"train": {"keep": "x"}}, "config.json, train: --keep"),
        ({"tokenizer": {}}, "does not describe its tokenizer"),
        ({"tokenizer": {"spec": 5, "vocab_size": 256, "end_of_text": 0}}, "does not describe its tokenizer"),
    ):
        (straight / "config.json").write_text(json.dumps(record | change))
        with pytest.raises(ValueError, match=words):
            resume(straight)


def test_an_export_that_was_damaged_can_be_written_again(straight, capsys):
    weights = straight / "export" / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, 1000)
    for command in ("eval", "generate"):
        assert main([command, str(straight)]) == 1
        assert f"Or remove {straight / 'export'}: ngpt train --out {straight} --resume" in capsys.readouterr().err
    weights.unlink()
    assert resume(straight) == 0 and weights.read_bytes() == whole


def test_a_damaged_checkpoint_and_an_unknown_format_say_so(straight, corpus, tmp_path):
    shutil.rmtree(straight / "export")
    path = straight / "checkpoints" / "step-00000006"
    state = json.loads((path / "state.json").read_text())
    del state["seal"]
    write_sealed(path / "state.json", {**state, "format": 99})
    with pytest.raises(ValueError, match="checkpoint format 99"):
        resume(straight)
    t, corpora, run = state["schedule"], open_blend((corpus,), 256), new_run(corpus, tmp_path / "x")
    run = dataclasses.replace(run, id=state["run"])
    for change in (
        {"data": {}}, {"data": None}, {"model": {}}, {"schedule": {}}, {"seconds": "x"}, {"step": "6"}, {"step": 5},
        {"config": None}, {"schedule": {**t, "t": 1}}, {"schedule": {**t, "anchor": None}},
        {"data": {**state["data"], "counts": [1, 2, 3]}},
    ):  # fmt: skip
        write_sealed(path / "state.json", {**state, **change})
        with pytest.raises(Damaged, match=r"(cannot be read: |state.json was damaged or edited)"):
            trainer.Trainer(run, World(torch.device("cpu")), corpora).resume(checkpoint.open_checkpoint(path))
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(Damaged, match=r"state\.json was edited: it has no seal"):
        checkpoint.open_checkpoint(path)
    shutil.rmtree(path)
    assert resume(straight) == 0  # from step 4
    assert losses(straight) and (straight / "export" / "config.json").exists()


def test_a_place_that_cannot_be_written_is_one_sentence(corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    argv = ["train", "--preset", "pico", "--steps", "2", "--data", corpus, "--out", str(tmp_path / "file" / "run")]
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("ngpt: ") and error.count("\n") == 1 and str(tmp_path / "file") in error


# ---- files from a stranger, and from an older version ----------------------------------------------------------------
class Payload:
    """What a malicious pickle does when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def as_format_1(run, state=None) -> None:
    """Rewrite the checkpoints of a run as an older version wrote them: by Distributed Checkpoint's own writer."""
    for path in (run / "checkpoints").iterdir():
        reader = checkpoint.open_checkpoint(path).reader()
        tensors = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in reader.tensors.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(tensors, storage_reader=reader, no_dist=True)
            record = json.loads((path / "state.json").read_text())
            shutil.rmtree(path)
            random = tensors.pop("random.00000.cpu")
            dcp.save({**tensors, **(state or {})}, checkpoint_id=path, no_dist=True)
        torch.save({"cpu": random}, path / "rng-00000.pt")
        for name in ("seal", "files", "run"):
            del record[name]
        (path / "state.json").write_text(json.dumps({**record, "format": 1}))


def test_a_checkpoint_of_format_1_is_read_with_a_note_and_converted(straight, tmp_path, caplog, monkeypatch):
    shutil.copytree(straight, tmp_path / "a")
    for name in ("export", "checkpoints/step-00000006"):
        shutil.rmtree(straight / name)
    as_format_1(straight)
    assert main(["eval", str(straight)]) == 0
    assert "has format 1, which an older version wrote" in caplog.text
    assert resume(straight) == 0
    same_run(tmp_path / "a", straight)
    assert checkpoint.open_checkpoint(checkpoint.newest(straight)).state["format"] == 2


@pytest.mark.parametrize("where", [".metadata", "rng-00000.pt", "__0_0.distcp", "an entry of the state"])
def test_a_malicious_checkpoint_does_not_run(straight, tmp_path, capsys, where):
    shutil.rmtree(straight / "export")
    planted = tmp_path / "the payload ran"
    as_format_1(straight, {"model.embedding.weight": Payload(planted)} if where.startswith("an entry") else None)
    for path in (straight / "checkpoints").iterdir():
        if where == "rng-00000.pt":
            torch.save({"cpu": Payload(planted)}, path / where)
        elif not where.startswith("an entry"):
            (path / where).write_bytes(pickle.dumps(Payload(planted)))
    for command in (
        f"eval {straight}",
        f"generate {straight}",
        f"export {straight} {straight}-hf",
        f"train --out={straight} --resume",
    ):
        status = main(command.split())
        assert status == 1 or where == "rng-00000.pt"  # a random state is read only when a run continues
        assert not planted.exists()
    error = capsys.readouterr().err
    assert "cannot be read" in error and "Traceback" not in error


def test_no_file_is_unpickled_when_a_run_is_saved_continued_and_used(straight, monkeypatch, tmp_path):
    """Format 2, on one rank: no call of any unpickler, and of torch.load neither."""

    def refused(*args, **kwargs):
        raise AssertionError("something was unpickled")

    shutil.rmtree(straight / "export")
    shutil.rmtree(straight / "checkpoints" / "step-00000006")
    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, refused)
    assert main(["eval", str(straight)]) == 0 and main(["generate", str(straight), "--max-new-tokens=2"]) == 0
    assert resume(straight) == 0
    assert main(["eval", str(straight)]) == 0 and main(["generate", str(straight), "--max-new-tokens=2"]) == 0


def test_a_resumed_run_calls_only_the_callbacks_that_the_command_names(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text("from ngpt_core.train.callbacks import Callback as It")
    train(new_run(corpus, tmp_path / "run", save_every=2, keep=9, callback=("theirs:It",)))
    shutil.rmtree(tmp_path / "run" / "export")
    (tmp_path / "theirs.py").write_text("raise SystemError('it ran')")
    sys.modules.pop("theirs")
    assert main(["train", f"--out={tmp_path / 'run'}", "--resume"]) == 1
    assert "--callback theirs:It, which is code" in capsys.readouterr().err
    assert main(["train", f"--out={tmp_path / 'run'}", "--resume", "--callback"]) == 0


# ---- rotation and leftovers ------------------------------------------------------------------------------------------
def test_a_deletion_that_fails_is_a_warning_and_what_it_leaves_is_removed_later(corpus, tmp_path, capsys):
    run, real = tmp_path / "run", shutil.rmtree

    def fails(path, **kwargs):
        if ".deleted-" in str(path):
            raise OSError(errno.EBUSY, "Device or resource busy")
        real(path, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", fails)
        assert train(new_run(corpus, run, save_every=2, keep=1)) == 0
    assert capsys.readouterr().err.count("could not be deleted (Device or resource busy); training continues.") >= 2
    names = sorted(path.name[:22] for path in (run / "checkpoints").iterdir())
    assert names == [".deleted-step-00000002", ".deleted-step-00000004", "step-00000006"]
    shutil.rmtree(run / "export")
    assert resume(run) == 0 and [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000006"]


def test_a_folder_that_died_while_its_config_was_written_can_be_used_again(corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for name in (".lock", ".config.json-0123abcd.json", ".tokenizer.json-0123abcd.json"):
        (run / name).write_text("half")
    assert train(new_run(corpus, run)) == 0
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_a_damaged_export_is_written_again_and_without_a_checkpoint_nothing_starts_again(straight, capsys):
    weights = straight / "export" / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, 1000)
    assert main(["train", f"--out={straight}", "--resume"]) == 0 and weights.read_bytes() == whole
    os.truncate(weights, 1000)
    shutil.rmtree(straight / "checkpoints")
    assert main(["train", f"--out={straight}", "--resume"]) == 1
    assert "export is damaged, and" in capsys.readouterr().err


def test_an_export_is_renamed_before_it_is_deleted(straight, monkeypatch):
    """A run that is killed while it removes an export leaves no half of one."""
    shutil.rmtree(straight / "checkpoints" / "step-00000006")
    (straight / "export" / "seal.json").unlink()
    (straight / "export" / "model.safetensors").unlink()  # so that the run goes on
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(checkpoint.shutil, "rmtree", lambda path, **kwargs: sys.exit(9))
        resume(straight)
    assert not (straight / "export").exists() and list(straight.glob(".deleted-export-*"))
    assert resume(straight) == 0 and not list(straight.glob(".deleted-*"))


def test_a_background_save_is_complete_before_the_next_step_is_counted(corpus, tmp_path):
    """A crash at any time loses at most one interval."""
    process = child(
        _train_and_look, new_run(corpus, tmp_path / "run", save_every=2, keep=9, async_save=True), tmp_path / "seen"
    )
    process.join()
    assert process.exitcode == 0
    assert json.loads((tmp_path / "seen").read_text()) == [[1, 0], [2, 0], [3, 2], [4, 2], [5, 4], [6, 4]]


def _train_and_look(run, log) -> None:
    real, seen = trainer.Trainer.step, []

    def step(self, diagnose=False):
        record = real(self, diagnose)
        seen.append((self.t, max(checkpoint.by_step(self.run.folder), default=0)))
        return record

    trainer.Trainer.step = step
    status = train(run)
    log.write_text(json.dumps(seen))
    raise SystemExit(status)
