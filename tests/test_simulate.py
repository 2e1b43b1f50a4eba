"""The virtual cluster against real runs: the same memory, the same messages, the same step.

Real runs are two gloo ranks on the CPU. Their tensors are counted here by their storages, their peak by torch's profiler, and
their messages by torch's CommDebugMode.
"""

import json
import math
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import new_run
from test_parallel import on_ranks

import ngpt_core as ng
from ngpt_core.cli import main
from ngpt_core.nn.fused import plain
from ngpt_core.optim.sharding import local
from ngpt_core.tools.layout import LAYOUT, fastest
from ngpt_core.tools.simulate import simulate, simulate_for, step
from ngpt_core.tools.simulate.corpus import synthetic
from ngpt_core.tools.simulate.kernels import SHAPES
from ngpt_core.tools.simulate.machine import Machine
from ngpt_core.tools.simulate.meter import Meter
from ngpt_core.tools.simulate.values import chosen
from ngpt_core.train.config import TrainConfig
from ngpt_core.train.flops import flops_per_token
from ngpt_core.train.run import Run
from ngpt_core.train.trainer import Trainer
from ngpt_core.train.world import start

COMMON = {"steps": 10, "batch_size": 8, "seq_len": 128, "device": "cpu"}
LAYOUTS = [  # preset, settings, mean length of documents
    ("pico", {}, 0),
    ("pico", {"micro_batch": 2, "activation_checkpointing": "selective"}, 40),
    ("pico", {"expert_parallel": 2, "activation_checkpointing": "full", "precision": "bf16"}, 40),
    ("micro", {"replicas": 2, "micro_batch": 2}, 0),
]


# ---- a real run, measured --------------------------------------------------------------------------------------------
def held(tensors) -> int:
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def profiled_rise(step) -> int:
    """By how much the memory of the CPU's allocator rises above what it is before a step: the least of three.

    A buffer of gloo's threads lives until they are scheduled again, which on a busy machine can be after the peak.
    """
    return min(_profiled_rise(step) for _ in range(3))


def _profiled_rise(step) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = sorted((e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    total = highest = 0
    for _, change in events:
        total += change
        highest = max(highest, total)
    return highest


def counted_messages(step) -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode, _comm_mode

    with (
        pytest.MonkeyPatch.context() as patch
    ):  # its bookkeeping of modules fails where one is called outside of a forward pass
        patch.setattr(_comm_mode._CommModeModuleTracker, "_fw_set_module_hook", lambda *args: None)
        with CommDebugMode() as mode:
            step()
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}


def saved_bytes(trainer) -> int:
    """What autograd saves in a forward pass, without weights: the largest of the step's micro-batches."""
    from torch.distributed.fsdp import FSDPModule

    sizes, loss = [], trainer.model.loss

    def watched(*args):
        saved = {}

        def pack(x):
            saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found = loss(*args[:3], denominator=args[3])
        weights = [local(p.detach()) for p in trainer.model.parameters()]
        for module in trainer.model.modules():
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
                weights += [p._unsharded_param.detach() for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        for w in weights:
            saved.pop(w.untyped_storage()._cdata, None)
        sizes.append(sum(saved.values()))
        return found

    trainer.model.loss = lambda x, y, documents, denominator: watched(x, y, documents, denominator)
    trainer.step()
    trainer.model.loss = loss
    return max(sizes)


def measure(layouts, folder) -> None:
    """On each rank: a step of each layout, by torch's operators: the simulation does not know the C++ ones."""
    with plain():
        _measure(layouts, folder)


def _measure(layouts, folder) -> None:
    for number, (name, change, length) in enumerate(layouts):
        config, model = TrainConfig(**COMMON, **change), ng.preset(name)
        world = start(config)
        corpora = [(synthetic(config.seq_len, length, model.vocab_size), 1.0)]
        trainer = Trainer(Run(Path("nowhere"), config, model, 10, False), world, corpora)
        trainer.step()  # makes the moments
        parameters = list(trainer.model.parameters())
        found = {
            "parameters": held([*(local(p.detach()) for p in parameters), *trainer.model.buffers()]),
            "moments": held(local(s[key]) for s in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")),
        }

        def gradients(*_, parameters=parameters, found=found) -> None:
            found["gradients"] = held(local(p.grad) for p in parameters if p.grad is not None)

        trainer.optimizer.register_step_pre_hook(gradients)
        if "activation_checkpointing" not in change:
            found["saved"] = saved_bytes(trainer)
        found["messages"] = counted_messages(trainer.step)
        found["rise"] = profiled_rise(trainer.step)
        if world.main:
            (folder / f"{number}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    on_ranks(2, measure, LAYOUTS, folder)
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(len(LAYOUTS))]


@pytest.fixture(scope="module")
def simulated():
    return [
        simulate(ng.preset(name), TrainConfig(**COMMON, **change), 2, kernels="cpu", document_length=length)
        for name, change, length in LAYOUTS
    ]


def test_parameters_gradients_and_moments_take_exactly_the_bytes_of_a_real_run(real, simulated):
    for true, found in zip(real, simulated):
        assert found.highest["parameters"] == true["parameters"]
        assert found.highest["moments"] == true["moments"]
        assert found.at_update["gradients"] == true["gradients"]


def test_activations_are_what_autograd_saves_in_a_real_run(real, simulated):
    """The simulation also counts what is not saved but still there: a few temporaries of the last block."""
    for true, found in zip(real, simulated):
        if "saved" in true:
            assert found.highest["activations"] == pytest.approx(true["saved"], rel=0.1)


def test_the_peak_of_a_step_is_that_of_a_real_run(real, simulated):
    """What the simulation cannot see are buffers inside torch's kernels: a few percent of these small models (0.01 to 5.3)."""
    for true, found in zip(real, simulated):
        assert found.peak_bytes - found.memory["parameters"] - found.memory["moments"] == pytest.approx(true["rise"], rel=0.08)


def test_messages_are_those_of_a_real_run_to_the_last_one(real, simulated):
    names = {
        "all_reduce": ("allreduce_",), "all_gather": ("_allgather_base_",), "reduce_scatter": ("_reduce_scatter_base_",),
        "all_to_all": ("alltoall_base_", "all_to_all_single"),
    }  # fmt: skip
    for true, found in zip(real, simulated):
        counts = dict.fromkeys(names, 0)
        for one in found.collectives:
            counts[one.op] += one.count
        assert counts == {name: sum(true["messages"].get(op, 0) for op in ops) for name, ops in names.items()}


# ---- what is run -----------------------------------------------------------------------------------------------------
def tiny(gpus=2, routing="balanced", document_length=40, **settings):
    return simulate_for({**COMMON, **settings}, {"preset": "pico"}, gpus, "h100-80gb", routing, "cuda", document_length)


def test_it_is_the_trainers_own_step(monkeypatch):
    called, step = [], Trainer.step

    def replaced(self, diagnose=False):
        called.append(self.world.size)
        return step(self, diagnose)

    monkeypatch.setattr(Trainer, "step", replaced)
    assert tiny(64, batch_size=64).ranks == 64 and called == [64]


def test_no_socket_is_opened_and_no_gpu_is_touched(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a simulation reaches for the network or for a GPU")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    before = dict(os.environ)
    tiny(4, expert_parallel=2, replicas=2)
    assert dict(os.environ) == before and not torch.distributed.is_initialized()


def test_one_simulation_leaves_nothing_to_the_next():
    """torch's cache of layouts returned a mesh of an earlier simulation, whose process groups were gone."""
    same = {"batch_size": 8, "seq_len": 32, "expert_parallel": 2}
    assert tiny(8, **same, replicas=2).ranks == tiny(8, **same).ranks == 8


def test_the_figures_are_consistent():
    found = tiny(2, micro_batch=1)
    assert sum(found.memory.values()) == found.peak_bytes
    assert found.seconds["total"] == pytest.approx(sum(s for kind, s in found.seconds.items() if kind != "total"))
    assert all(0 <= one.exposed <= one.seconds for one in found.collectives)
    assert sum(one.exposed for one in found.collectives) == pytest.approx(found.seconds["communication"])
    assert found.bound == pytest.approx(sum(s for kind, s in found.bounds.items() if kind != "total"))
    assert found.bound < found.seconds["total"] and 0 < found.mfu() < found.mfu(found.bound) < 1
    assert all(found.bounds[kind] <= found.seconds[kind] for kind in ("mamba", "attention", "moe", "head", "optimizer"))
    needed = flops_per_token(found.model, 128) * 8 * 128 / 2
    assert 0.8 * needed < found.flops < 1.6 * needed  # with documents, attention and scan compute what a mask then hides
    assert found.operations["optimizer"] < 30  # a launch per shape and group, and a table of addresses per group
    assert list(found.host_waits.values()) == [1]  # the message of a step


def test_the_optimizer_reads_sixteen_bytes_of_each_parameter_and_writes_twelve():
    """Weight, gradient and two moments in, all but the gradient out."""
    found = simulate_for({**COMMON, "seq_len": 16}, {"preset": "1B", "pattern": "ME", "vocab_size": 256})
    moved = found.bounds["optimizer"] * found.card.bandwidth / (found.memory["parameters"] / 4)
    assert moved == pytest.approx(28, rel=0.01)


def test_a_full_size_model_has_the_layout_of_the_plan_unless_part_of_it_is_given(monkeypatch):
    monkeypatch.setattr(step, "simulate", lambda model, config, *_: config)
    config = {"pattern": "ME", "vocab_size": 256}
    free = simulate_for({}, {"preset": "1B", **config})
    run = TrainConfig(batch_size=512, seq_len=8192, precision="bf16", scaled=False)
    best = fastest(replace(ng.preset("1B"), **config), run, 8, "h100-80gb", set(), 2000)
    assert [getattr(free, name) for name in LAYOUT] == [getattr(best, name) for name in LAYOUT]
    given = simulate_for({"activation_checkpointing": "full"}, {"preset": "1B", **config})
    assert (given.micro_batch, given.expert_parallel) == (TrainConfig().micro_batch, 1) and given.batch_size == 512
    assert simulate_for({}, {"preset": "pico"}).micro_batch == TrainConfig().micro_batch


def test_micro_batches_that_are_not_simulated_are_counted():
    one, four = (tiny(2, batch_size=2 * n, micro_batch=1, document_length=0) for n in (1, 4))
    assert four.flops == pytest.approx(4 * one.flops, rel=0.05) and four.peak_bytes >= one.peak_bytes
    gathers = [next(c.count for c in found.collectives if c.op == "reduce_scatter") for found in (one, four)]
    assert gathers[1] == 4 * gathers[0]


@pytest.mark.parametrize(("checkpointing", "times"), [("none", 1), ("selective", 2), ("full", 2)])
def test_the_host_waits_once_per_step_and_for_the_splits_of_each_layer_and_pass(checkpointing, times):
    """With expert parallelism: one copy of the splits for each MoE layer (pico has 3), forward and where it is recomputed."""
    alone, shared = (tiny(2, expert_parallel=n, micro_batch=2, activation_checkpointing=checkpointing) for n in (1, 2))
    assert sum(alone.host_waits.values()) == 1
    places = {where.split(":")[0]: count for where, count in shared.host_waits.items()}
    assert places == {"ngpt_core/optim/arriving.py": 1, "ngpt_core/train/expert_parallel.py": 3 * 2 * times}
    assert {c.axis for c in shared.collectives if c.op == "all_to_all"} == {"expert"}


def test_while_the_host_waits_for_an_exchange_the_weights_behind_it_are_on_their_way(monkeypatch):
    """The layer's experts and the next block are gathered before the layer's wait, in the forward pass."""
    order, called, wait = [], Meter.__call__, Machine.wait

    def watched(self, call):
        order.append("gather" if "_allgather_base_" in str(call.func) else "")
        return called(self, call)

    def waits(self):
        order.append("wait")
        wait(self)

    monkeypatch.setattr(Meter, "__call__", watched)
    monkeypatch.setattr(Machine, "wait", waits)
    pattern = tiny(4, expert_parallel=2).model.pattern
    at = [i for i, what in enumerate(order) if what == "wait" and "gather" in order[:i]]  # in the step, not before it
    for layer, block in enumerate(i for i, letter in enumerate(pattern) if letter == "E"):
        embedding, experts, blocks = 1, layer + 1, min(block + 2, len(pattern))
        assert order[: at[layer]].count("gather") == embedding + experts + blocks


def test_embedding_and_head_are_gathered_once_and_one_replica_sums_nothing():
    """In a micro-batch each of pico's 6 blocks is gathered twice, for forward and backward, and embedding and head once."""
    one, two = (tiny(4, batch_size=4, micro_batch=1, replicas=n) for n in (1, 2))
    counts = {c.op: c.count for c in one.collectives}
    blocks = len(one.model.pattern)
    assert counts["all_gather"] == 2 * blocks + 2 and counts["reduce_scatter"] == blocks + 2
    assert "replica" not in {c.axis for c in one.collectives} and "replica" in {c.axis for c in two.collectives}


def test_skewed_routing_fills_the_rank_with_the_first_experts():
    balanced, skewed = (tiny(2, routing, expert_parallel=2) for routing in ("balanced", "skewed"))
    assert skewed.peak_bytes > 1.03 * balanced.peak_bytes
    loads = torch.bincount(chosen(512, 2, 8, "skewed").flatten(), minlength=8)
    assert loads.sum() == 1024 and loads[0] > 1.7 * 128 and loads[-1] < 0.3 * 128
    assert set(torch.bincount(chosen(512, 2, 8, "balanced").flatten()).tolist()) == {128}


def test_documents_take_no_tensor_of_all_pairs_of_tokens(monkeypatch):
    """Attention over packed documents reads their offsets. (A mask [T, T] would be most of this step's memory.)"""
    T, seen, called = 704, set(), Meter.__call__

    def watched(self, call):
        seen.update(tuple(x.shape) for x in (*call.taken, *call.returned))
        return called(self, call)

    monkeypatch.setattr(Meter, "__call__", watched)
    plain, packed = (tiny(2, document_length=length, seq_len=T, micro_batch=1) for length in (0, 100))
    assert any(T in shape for shape in seen)
    assert not [shape for shape in seen if shape.count(T) > 1 or math.prod(shape[-2:]) >= T * T]
    assert packed.peak_bytes < 1.02 * plain.peak_bytes


def test_every_kernel_is_called_in_a_step(monkeypatch):
    """CUDA's own kernels and ours. (What kernels.SHAPES knows and no step calls would be left over from something.)"""
    seen, called = set(), Meter.__call__

    def watched(self, call):
        seen.add(call.func)
        return called(self, call)

    monkeypatch.setattr(Meter, "__call__", watched)
    tiny(2)
    assert set(SHAPES) <= seen


def test_the_gpt_twin_and_plain_precision_run_too():
    found = simulate_for({**COMMON, "precision": "fp32"}, {"preset": "pico", "normalized": False}, 2, document_length=40)
    assert found.peak_bytes > 0 and found.config.precision == "fp32"


# ---- the command -----------------------------------------------------------------------------------------------------
def test_the_command_writes_json_with_the_documented_fields_and_a_page(tmp_path, capsys):
    out, page = tmp_path / "out.json", tmp_path / "out.html"
    words = "simulate --preset 1B --gpus 8 --batch-size 8 --seq-len 2048 --expert-parallel 4 --activation-checkpointing full"
    assert main([*words.split(), "--json", str(out), "--out", str(page)]) == 0
    text, found = capsys.readouterr().out, json.loads(out.read_text())
    assert "memory at the peak" in text and "not a measurement" in text and "uncompiled" in text
    assert set(found) == {
        "peak_bytes", "peak_where", "memory", "plan_bytes", "collectives", "host_waits", "operations", "flops", "seconds",
        "ranks",
    }  # fmt: skip
    assert sum(found["memory"].values()) == found["peak_bytes"] and found["ranks"] == 8
    assert {"parameters", "gradients", "moments", "gathered", "activations", "loss", "temporary"} == set(found["memory"])
    assert all(set(one) == {"op", "axis", "count", "bytes"} for one in found["collectives"])
    assert isinstance(found["flops"], int) and found["seconds"]["total"] > 0
    root = Path(ng.__file__).parent.parent
    for where in [found["peak_where"], *(wait["where"] for wait in found["host_waits"])]:
        path, _, line = where.partition(":")
        assert 0 < int(line) <= len((root / path).read_text().splitlines()), where
    assert "<svg" in page.read_text() and "polygon" in page.read_text()


def test_a_run_that_does_not_fit_says_what_would_writes_its_file_and_exits_with_1(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = "simulate --preset 1B --gpus 1 --gpu l4-24gb --batch-size 2 --seq-len 4096 --micro-batch 2 --document-length 0"
    assert main([*words.split(), "--json", str(out)]) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "it would fit with: --" in text
    assert json.loads(out.read_text())["peak_bytes"] > 19 * 2**30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu h900", "unknown GPU 'h900'"),
        ("--gpus 0", "--gpus must be at least 1"),
        ("--routing random", "--routing must be one of balanced, skewed"),
        ("--kernels rocm", "--kernels must be cuda or cpu"),
        ("--document-length -1", "--document-length"),
        ("--gpus 3", "does not divide into 3 ranks"),
        ("--gpus 4 --expert-parallel 3", "do not divide"),
        ("--gpus 2 --micro-batch 3", "does not divide"),
        ("--gpu v100-32gb --precision bf16", "no bf16 units"),
        ("--data nowhere", "not a packed corpus"),
        ("--float8", "--float8"),
    ],
)
def test_a_mistake_is_one_sentence(words, message, capsys):
    assert main(["simulate", "--preset", "pico", "--steps", "5", *words.split()]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("ngpt: ") and error.count("\n") == 1


def test_it_reads_a_real_corpus_too(corpus):
    found = simulate_for({**COMMON, "data": [corpus]}, {"preset": "pico"}, 2)
    assert found.peak_bytes > 0


def test_a_real_run_after_a_simulation_is_not_changed_by_it(corpus, tmp_path):
    from ngpt_core.train.loop import train

    tiny()
    assert train(new_run(corpus, tmp_path / "run", steps=2)) == 0


def test_the_largest_model_on_64_ranks(tmp_path):
    out = tmp_path / "out.json"
    words = (
        "simulate --preset 30B --gpus 64 --gpu h100-80gb --micro-batch 1 --activation-checkpointing full --document-length 0"
    )
    assert main([*words.split(), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    counts = {(c["op"], c["axis"]): c["count"] for c in found["collectives"]}
    assert counts["reduce_scatter", "fsdp"] == 8 * 54 and found["peak_bytes"] < 30 * 2**30
    assert found["operations"]["optimizer"] < 100 and [wait["count"] for wait in found["host_waits"]] == [1]
