"""Many ranks: the same losses on one process and on real gloo ranks, however the model is cut, saved and resumed."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from runs import TINY, losses, new_run

from ngpt_core.tools.layout import state_bytes
from ngpt_core.train.config import TrainConfig
from ngpt_core.train.folder import take
from ngpt_core.train.loop import train
from ngpt_core.train.metrics import read_metrics
from ngpt_core.train.parallel import parallelize
from ngpt_core.train.run import open_blend, prepare
from ngpt_core.train.trainer import Trainer
from ngpt_core.train.world import World, start

STEPS = 20


def _rank(rank: int, size: int, port: int, function, args) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")  # once for all runs of this process
    function(*args)
    torch.distributed.destroy_process_group()


def on_ranks(size: int, function, *args) -> None:
    """Run ``function`` in real processes, as torchrun would; torch is imported once for all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "ngpt_core.train.loop"])
    mp.start_processes(_rank, args=(size, port, function, args), nprocs=size, start_method="forkserver")


def _train(*runs) -> None:
    for run in runs:
        assert train(run) == 0


def _train_settings(settings, resume=True) -> None:
    assert train(prepare(settings, {}, resume)) == 0


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """Twenty steps in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(new_run(corpus, folder, steps=STEPS, eval_every=5, diagnostics_every=10))
    return folder


def assert_same(folder, alone) -> None:
    for a, b in zip(read_metrics(alone), read_metrics(folder), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5), a["step"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a.get("val_loss") == pytest.approx(b.get("val_loss"), abs=1e-5)
        assert a.get("load") == b.get("load") and a["s_z"] == pytest.approx(b["s_z"], abs=1e-5)
        for x, y in zip(a.get("diagnostics", ()), b.get("diagnostics", ())):
            assert x["coordinates"] == y["coordinates"] and x["angle_mean"] == pytest.approx(y["angle_mean"], rel=1e-3)


def test_two_ranks_sharded_replicated_and_with_divided_experts_train_as_one(corpus, alone, tmp_path):
    layouts = {
        "fsdp": {},
        "hsdp": {"replicas": 2},
        "experts": {"expert_parallel": 2},
        "experts, recomputed": {"expert_parallel": 2, "activation_checkpointing": "selective"},
        "keep gathered, micro-batches, recomputed": {
            "reshard": False,
            "micro_batch": 1,
            "activation_checkpointing": "selective",
        },
    }
    runs = [
        new_run(corpus, tmp_path / name, steps=STEPS, eval_every=5, diagnostics_every=10, **change)
        for name, change in layouts.items()
    ]
    on_ranks(2, _train, *runs)
    for name in layouts:
        assert_same(tmp_path / name, alone)


def _train_as_on_a_gpu(*runs) -> None:
    """Steps are read one step later and skipped on the device, and blocks are compiled (here without generating code). In the
    second run rank 1 has a gradient of nan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngpt_core.train.trainer.on_gpu", lambda x: True)
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        _train(runs[0])
        # Mamba-2 and attention are one graph each, in training and in evaluation, with documents and without: 8 at most. The
        # exchange of tokens cuts an MoE into five. (A checkpoint inside of compiled code would have left it without any.)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2 * (1 + 1 + 5)
        real = Trainer.step

        def step(self, diagnose=False):
            if self.t == 2 and self.world.rank == 1:
                self.model.head.s_z.weight.register_hook(lambda g: g * torch.nan)
            return real(self, diagnose)

        patch.setattr(Trainer, "step", step)
        with pytest.raises(ValueError, match=r"step 3: .* the gradient of head.s_z.weight is not finite"):
            _train(runs[1])


def test_two_ranks_that_work_as_on_a_gpu_train_as_one_and_fail_together(corpus, alone, tmp_path):
    settings = dict(steps=STEPS, eval_every=5, diagnostics_every=10, save_every=2)
    compiled = dict(expert_parallel=2, activation_checkpointing="selective", compile=True)
    runs = [new_run(corpus, tmp_path / "late", **compiled, **settings), new_run(corpus, tmp_path / "bad", **settings)]
    on_ranks(2, _train_as_on_a_gpu, *runs)
    assert_same(tmp_path / "late", alone)
    assert [r["step"] for r in read_metrics(tmp_path / "bad")] == [1, 2]


@pytest.mark.slow
def test_four_ranks_with_every_axis_at_once_train_as_one(corpus, alone, tmp_path):
    layouts = {
        "shard x experts": {"expert_parallel": 2, "activation_checkpointing": "full"},
        "replicas x experts": {"replicas": 2, "expert_parallel": 2},
        "replicas x shard": {"replicas": 2},
        "all experts apart": {"expert_parallel": 4, "micro_batch": 1},
    }
    runs = [
        new_run(corpus, tmp_path / name, steps=STEPS, eval_every=5, diagnostics_every=10, **change)
        for name, change in layouts.items()
    ]
    on_ranks(4, _train, *runs)
    for name in layouts:
        assert_same(tmp_path / name, alone)


def test_a_run_moves_from_two_ranks_to_one_and_back(corpus, alone, tmp_path):
    """Saved on two ranks with divided experts, resumed on one, resumed on two with FSDP: the losses of the run alone."""
    run = new_run(
        corpus, tmp_path / "two", steps=STEPS, save_every=5, keep=9, eval_every=5, diagnostics_every=10, expert_parallel=2
    )
    on_ranks(2, _train, run)
    assert_same(tmp_path / "two", alone)
    for name, cut in (("one", 5), ("back", 10)):
        shutil.copytree(tmp_path / "two", tmp_path / name)
        shutil.rmtree(tmp_path / name / "export")
        for step in range(cut + 5, STEPS + 1, 5):
            shutil.rmtree(tmp_path / name / "checkpoints" / f"step-{step:08d}")
    assert train(prepare({"out": str(tmp_path / "one"), "expert_parallel": 1}, {}, resume=True)) == 0
    assert_same(tmp_path / "one", alone)
    shutil.rmtree(tmp_path / "back" / "checkpoints")
    shutil.copytree(tmp_path / "one" / "checkpoints", tmp_path / "back" / "checkpoints")
    for step in (15, 20):
        shutil.rmtree(tmp_path / "back" / "checkpoints" / f"step-{step:08d}")
    on_ranks(2, _train_settings, {"out": str(tmp_path / "back"), "expert_parallel": 1})
    assert_same(tmp_path / "back", alone)


def test_resuming_on_the_same_ranks_is_exact_to_the_bit(corpus, tmp_path):
    run = new_run(corpus, tmp_path / "whole", steps=6, save_every=3, keep=9, eval_every=2)
    on_ranks(2, _train, run)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "export")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000006")
    on_ranks(2, _train_settings, {"out": str(tmp_path / "cut")})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    files = [tmp_path / name / "export" / "model.safetensors" for name in ("cut", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def _stale_weights(run, corpus_folder, out) -> None:
    """FSDP keeps gathered weights after a forward pass without a backward. An update that follows moves the shards: an
    evaluation after it must not see the gathered ones."""
    world = start(run.config)
    trainer = Trainer(run, world, open_blend((corpus_folder,), 256))
    blend = open_blend((corpus_folder,), 256)
    trainer.step()
    before = trainer.validate(blend)
    for group in trainer.optimizer.param_groups:
        for p in group["params"]:  # what the optimizer holds, whatever the model holds at this moment
            p.grad = torch.ones_like(p)
    trainer.optimizer.step()
    seen = trainer.validate(blend)
    assert seen != before
    for name, p in trainer.model.named_parameters():
        if hasattr(p, "full_tensor"):
            norm = torch.linalg.vector_norm(p.full_tensor(), dim=-1)
            if name.endswith(("weight", "proj", "up", "down")) and "conv" not in name:
                assert bool((norm - 1).abs().max() < 1e-5), name  # what the optimizer holds is on the sphere
    trainer.export()
    if world.main:
        Path(out).write_text(repr(seen))
    world.close()


def test_an_evaluation_sees_the_weights_after_the_update(corpus, tmp_path):
    """The bug that the paper warns of: the model evaluates one copy of the parameters and the optimizer moves another."""
    import ngpt_core as ng
    from ngpt_core.train.evaluate import evaluate

    run = new_run(corpus, tmp_path / "run", reshard=False)
    on_ranks(2, _stale_weights, run, corpus, str(tmp_path / "seen"))
    model = ng.load(tmp_path / "run" / "export")
    model.check()
    truth = evaluate(model, open_blend((corpus,), 256), run.config.eval_windows, 2, 32, World(torch.device("cpu"))).loss
    assert float((tmp_path / "seen").read_text()) == pytest.approx(truth, abs=1e-5)


def _samples(runs, corpus_folder, out) -> None:
    found = []
    for run in runs:
        trainer, counts = Trainer(run, start(run.config), open_blend((corpus_folder,), 256)), []
        trainer.step()
        trainer.model.embedding.register_forward_hook(lambda m, args, h, counts=counts: counts.append(args[0].shape[1]))
        found.append([trainer.sample(), list(counts)])
        trainer.step()
    if trainer.world.main:
        Path(out).write_text(json.dumps(found))


def test_samples_of_a_sharded_model_use_the_cache(corpus, tmp_path):
    settings = dict(sample_tokens=6, sample_prompt="the dog")
    names = {"fp32": {}, "bf16": {"precision": "bf16"}, "experts": {"expert_parallel": 2}}
    runs = [new_run(corpus, tmp_path / name, **settings, **change) for name, change in names.items()]
    on_ranks(2, _samples, runs, corpus, str(tmp_path / "seen"))
    trainer = Trainer(new_run(corpus, tmp_path / "one", **settings), World(torch.device("cpu")), open_blend((corpus,), 256))
    trainer.step()
    text = trainer.sample()
    for name, (found, lengths) in zip(names, json.loads((tmp_path / "seen").read_text()), strict=True):
        assert lengths[0] == 7 and set(lengths[1:]) <= {1} and len(lengths) > 1  # the prompt, then one token at a time
        assert found == text or name == "bf16"


def test_bfloat16_products_with_float32_masters_stay_close(corpus, tmp_path):
    train(new_run(corpus, tmp_path / "fp32", steps=8))
    runs = [
        new_run(corpus, tmp_path / f"bf16-{kind}", {"normalized": kind == "ngpt"}, steps=8, precision="bf16")
        for kind in ("ngpt", "gpt")
    ]
    wide = {"precision": "bf16", "stream": "fp32", "activation_checkpointing": "full", "expert_parallel": 2}
    runs.append(new_run(corpus, tmp_path / "stream-ngpt", steps=8, **wide))
    runs.append(new_run(corpus, tmp_path / "stream-gpt", {"normalized": False}, steps=8, **wide))
    on_ranks(2, _train, *runs)
    found = {name: losses(tmp_path / name) for name in ("bf16-ngpt", "bf16-gpt", "stream-ngpt", "stream-gpt")}
    assert found["stream-ngpt"] != found["bf16-ngpt"]
    for name in ("bf16-ngpt", "stream-ngpt"):
        for a, b in zip(losses(tmp_path / "fp32"), found[name]):
            assert a != b and a == pytest.approx(b, abs=0.05)
    assert all(found[name][-1] < found[name][0] for name in ("bf16-gpt", "stream-gpt"))


def _shards(run, corpus_folder, layout, folder) -> None:
    world = start(run.config)
    trainer = Trainer(run, world, open_blend((corpus_folder,), 256))
    trainer.step()
    found = {"parameters": 0, "optimizer": 0}
    for p in trainer.model.parameters():
        local = p.to_local() if hasattr(p, "to_local") else p
        found["parameters"] += local.numel() * local.element_size()
        for key in ("exp_avg", "exp_avg_sq"):
            moment = trainer.optimizer.state[p][key]
            moment = moment.to_local() if hasattr(moment, "to_local") else moment
            found["optimizer"] += moment.numel() * moment.element_size()
    Path(folder, f"{layout}-{world.rank}").write_text(f"{found['parameters']} {found['optimizer']}")
    world.close()


def _all_shards(runs, corpus_folder, folder) -> None:
    for layout, run in runs.items():
        _shards(run, corpus_folder, layout, folder)


def test_the_plan_counts_the_bytes_that_real_shards_have(corpus, tmp_path):
    layouts = {"fsdp": {}, "hsdp": {"replicas": 2}, "experts": {"expert_parallel": 2}}
    runs = {name: new_run(corpus, tmp_path / name, **change) for name, change in layouts.items()}
    on_ranks(2, _all_shards, runs, corpus, str(tmp_path))
    for name, change in layouts.items():
        found = [tuple(map(int, (tmp_path / f"{name}-{rank}").read_text().split())) for rank in range(2)]
        planned = state_bytes(runs[name].model, TrainConfig(**change), 2)
        assert max(found) == (planned["parameters"], planned["optimizer"]), name


def test_impossible_layouts_are_errors():
    import ngpt_core as ng
    from ngpt_core.train.config import model_config

    with torch.device("meta"):
        model, dense = ng.LanguageModel(model_config(TINY)), ng.LanguageModel(ng.preset("pico-dense"))
    for net, size, change, word in (
        (model, 3, {"replicas": 2}, "3 ranks do not divide"),
        (model, 8, {"expert_parallel": 8}, "4 experts per layer do not divide"),
        (model, 3, {"expert_parallel": 3}, "divisor of 4"),
        (dense, 2, {"expert_parallel": 2}, "0 experts"),
        (dense, 3, {"batch_size": 8}, "global batch of 8 sequences does not divide into 3 ranks"),
        (dense, 2, {"batch_size": 8, "micro_batch": 3}, "share of 4 sequences does not divide into micro-batches of 3"),
    ):
        with pytest.raises(ValueError, match=word):
            parallelize(net, TrainConfig(**change), World(torch.device("cpu"), size=size))


def test_a_torch_that_keeps_everything_in_compiled_blocks_is_reported(monkeypatch):
    import ngpt_core as ng
    from ngpt_core.train.config import model_config

    model, config = ng.LanguageModel(model_config(TINY)), TrainConfig(compile=True, activation_checkpointing="selective")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.12.1"))
    with pytest.warns(UserWarning, match=r"torch 2\.12\.1 keeps.* Install torch 2\.13"):
        parallelize(model, config, World(torch.device("cpu")))


def test_torchrun_runs_the_same_command(corpus, alone, tmp_path):
    run = new_run(corpus, tmp_path / "run", steps=STEPS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "ngpt_core",
        "train",
    ]
    command += ["--preset=pico", *(f"--{k.replace('_', '-')}={v}" for k, v in TINY.items() if k != "preset")]
    command += [f"--data={corpus}", f"--out={run.folder}", "--steps=20", "--batch-size=4", "--seq-len=32", "--eval-windows=4"]
    command += ["--eval-every=5", "--diagnostics-every=10", "--save-every=0", "--sample-tokens=4", "--no-tensorboard"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert_same(tmp_path / "run", alone)


def _float8_products(run, corpus_folder, out) -> None:
    from ngpt_core.train.float8 import Float8Products

    products, real = [], Float8Products._product
    Float8Products._product = lambda self, x, w: (products.append(tuple(w.shape)), real(self, x, w))[1]
    trainer = Trainer(run, start(run.config), open_blend((corpus_folder,), 256))
    seen = [trainer.step()["loss"] for _ in range(6)]
    if trainer.world.main:
        Path(out).write_text(json.dumps([seen, products]))


def test_a_torchao_that_is_missing_or_does_not_fit_torch_is_named(monkeypatch):
    from ngpt_core.train.float8 import Float8Products

    for name in ("torchao", "torchao.float8.config"):  # the second may have been imported by another test
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="needs the package torchao: pip install torchao"):
        Float8Products()
    monkeypatch.undo()
    pytest.importorskip("torchao")
    name = "torchao.float8.config"  # of a torchao without what we import
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(ValueError, match=r"does not fit torch 2.*Float8LinearConfig.*Install one that does"):
        Float8Products()


def test_float8_products_are_torchao_s_and_stay_close(corpus, tmp_path):
    """Emulated on the CPU: the casts are real, the hardware is not."""
    pytest.importorskip("torchao")
    run = new_run(corpus, tmp_path / "f8", precision="bf16", float8=True)
    on_ranks(2, _float8_products, run, corpus, str(tmp_path / "seen"))
    found, products = json.loads((tmp_path / "seen").read_text())
    train(new_run(corpus, tmp_path / "fp32"))
    assert found == pytest.approx(losses(tmp_path / "fp32"), abs=0.02) and found != losses(tmp_path / "fp32")
    assert [32, 32] in products and [32, 4] not in products  # q_proj, and not the router
    with pytest.raises(ValueError, match="--precision bf16"):
        train(new_run(corpus, tmp_path / "other", float8=True))


def _refused(settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        train(prepare(settings, {}, resume=True))


def test_of_many_ranks_the_first_takes_the_lock_and_all_are_refused_while_another_has_it(corpus, alone, tmp_path):
    shutil.copytree(alone, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    settings = {"out": str(tmp_path / "run"), "eval_windows": 2}
    with contextlib.closing(take(tmp_path / "run")):
        on_ranks(2, _refused, settings, f"is being trained by process {os.getpid()} on")
    on_ranks(2, _train_settings, settings)
    assert (tmp_path / "run" / "export" / "config.json").is_file()


def _left_alone(run) -> None:
    real = Trainer.step

    def step(self, diagnose=False):
        if self.t == 1 and self.world.main:
            os._exit(0)  # without a word
        return real(self, diagnose)

    Trainer.step = step
    with pytest.raises(ValueError, match="rank 1 ends because another rank has ended"):
        train(run)
    os._exit(0)


def test_a_rank_reports_in_a_sentence_that_its_peer_died(corpus, tmp_path):
    on_ranks(2, _left_alone, new_run(corpus, tmp_path / "run", steps=3))
    assert len(read_metrics(tmp_path / "run")) == 1


def test_more_ranks_than_gpus_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="local rank 2 needs its own GPU, but this machine has 2: lower --nproc-per-node"):
        start(TrainConfig())
