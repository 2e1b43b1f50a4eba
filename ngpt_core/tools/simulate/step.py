"""How do we run and watch one training step on a cluster that does not exist?

It is the real ``Trainer.step``, on tensors that have shapes but no memory and on ranks that do not exist; this process is rank
0, the fullest. No network connection is opened, and a real GPU is not touched. ``Watch`` names the phase and the
block of every operator; ``Memory`` and ``Meter`` add them up.

What this cannot see: the allocator's fragments, NCCL's buffers, the workspaces of library kernels. ``ngpt plan`` keeps a
reserve for them. Blocks run uncompiled.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...config import ModelConfig
from ...gpus import GPUS, Gpu
from ...optim.sharding import is_dtensor, local
from ...presets import FULL_SIZE
from ...rehearsal import rehearse
from ...train.config import TrainConfig, check_length, check_recipe, model_config, run_defaults, total_steps
from ...train.flops import flops_per_token
from ...train.parallel import check_ranks
from ...train.run import Run, named_tokenizer, open_blend
from ...train.trainer import Trainer
from .corpus import synthetic
from .machine import NOTE, Machine, here
from .meter import Meter
from .ranks import Axes, fake_world
from .result import Result
from .storage import Memory
from .values import ROUTING, Values

__all__ = ["KINDS_OF_BLOCKS", "Watch", "simulate", "simulate_for"]

KINDS_OF_BLOCKS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


def simulate_for(
    settings: Mapping[str, object],
    model_settings: Mapping[str, object],
    gpus: int = 8,
    gpu: str = "h100-80gb",
    routing: str = "balanced",
    kernels: str = "cuda",
    document_length: int = 2000,
) -> Result:
    """``simulate`` from a user's settings, those of ``ngpt train``. A full-size model without any layout setting gets the
    layout that ``ngpt plan`` chooses."""
    from ..layout import LAYOUT, fastest  # imports the simulator

    model = model_config(model_settings)
    config = TrainConfig.from_dict({**run_defaults(model), **settings})
    if model.name in FULL_SIZE and not set(LAYOUT) & set(settings):
        resolved = _checked(model, config, gpus, gpu, routing, kernels, document_length)
        best = fastest(model, resolved, gpus, gpu, set(), document_length)
        config = replace(config, **{name: getattr(best, name) for name in LAYOUT}) if best else config
    corpora = open_blend(config.data, model.vocab_size, reader=partial(named_tokenizer, config)) if "data" in settings else None
    return simulate(model, config, gpus, gpu, routing, kernels, document_length, corpora)


def simulate(
    model: ModelConfig,
    config: TrainConfig,
    gpus: int = 8,
    gpu: str = "h100-80gb",
    routing: str = "balanced",
    kernels: str = "cuda",
    document_length: int = 2000,
    corpora: list | None = None,
) -> Result:
    """One optimizer step of this run on rank 0 of ``gpus`` ranks.

    gpu: the card, a key of ``ngpt_core.gpus.GPUS``.
    routing: "balanced", every expert receives the same number of tokens, or "skewed" (values.py).
    kernels: "cuda" takes CUDA's branches and kernels, "cpu" those of a CPU.
    document_length: tokens per document, on average, of the synthetic corpus; 0: every window is one document.
    corpora: corpora with weights, read instead of the synthetic one.
    """
    config = _checked(model, config, gpus, gpu, routing, kernels, document_length)
    rows = config.micro_batch or config.batch_size // gpus
    repeats = config.batch_size // gpus // rows
    # The first micro-batch, one that counts for all between, and the last, if replicas make it different from them.
    passes = min(repeats, 2 if config.replicas == 1 else 3)
    short = replace(config, batch_size=gpus * rows * passes, micro_batch=rows)
    corpora = corpora or [(synthetic(config.seq_len, document_length, model.vocab_size, config.seed), 1.0)]
    watch = Watch(GPUS[gpu], kernels, routing, repeats - passes + 1)
    watch.run(model, short, gpus, corpora)
    useful = config.batch_size * config.seq_len * flops_per_token(model, config.seq_len)
    memory, peak, meter, machine = watch.memory, watch.memory.peak, watch.meter, watch.machine
    return Result(
        model=model, config=config, gpu=gpu, kernels=kernels, routing=routing, document_length=document_length, ranks=gpus,
        peak_bytes=peak.bytes, peak_where=peak.where, peak_phase=peak.phase, peak_module=peak.module, memory=peak.memory,
        highest=memory.highest, at_update=watch.at_update, timeline=memory.timeline,
        collectives=meter.overlapped(), host_waits=dict(machine.waits), copied=machine.copied,
        operations=dict(meter.operations), flops=meter.flops, traffic=meter.traffic, seconds=meter.seconds(),
        bounds=meter.bounds(), useful=useful,
    )  # fmt: skip


def _checked(
    model: ModelConfig, config: TrainConfig, gpus: int, gpu: str, routing: str, kernels: str, document_length: int
) -> TrainConfig:
    """The config with the precision of the card. ValueError for a run that could not start."""
    if gpu not in GPUS:
        raise ValueError(f"unknown GPU {gpu!r}; --gpu must be one of {', '.join(GPUS)}.")
    if gpus < 1:
        raise ValueError(f"--gpus must be at least 1; got {gpus}.")
    if routing not in ROUTING:
        raise ValueError(f"--routing must be one of {', '.join(ROUTING)}; got {routing!r}.")
    if kernels not in ("cuda", "cpu"):
        raise ValueError(f"--kernels must be cuda or cpu; got {kernels!r}.")
    if document_length < 0:
        raise ValueError(f"--document-length must be at least 0 tokens; got {document_length}.")
    if config.float8:
        raise ValueError("--float8: a simulation does not know torchao's kernels; leave the flag out.")
    check_ranks(config, model, gpus)
    check_length(config, model)
    check_recipe(config, model, config.steps or (total_steps(config, model) if model.tokens else 1))
    card = GPUS[gpu]
    if config.precision == "bf16" and not card.bf16 and kernels == "cuda":
        raise ValueError(f"--precision bf16: {gpu} has no bf16 units; leave the flag out, or use fp32.")
    if config.precision == "auto":
        config = replace(config, precision=card.precision if kernels == "cuda" else "fp32")
    return replace(config, compile=False, steps=config.steps or (total_steps(config, model) if model.tokens else 1))


class Watch:
    """What happens, where and when: it names the phase and the block of every operator for the memory and the meter."""

    def __init__(self, card: Gpu, kernels: str, routing: str, second: int) -> None:
        self.card, self.kernels, self.second = card, kernels, second
        self.outside = "rest"  # the phase outside of backward passes
        self.noted = ("", "")
        self.at_update: dict[str, int] = {}
        self.stack: list[str] = []  # names of the modules whose forward pass is running
        self.kinds: dict[str, str] = {}  # block -> kind
        self.machine = Machine(kernels, Values(routing))
        self.machine.module = self.module
        self.axes = Axes(card.per_node)
        self.meter = Meter(card, self.axes, self)
        self.memory = Memory(512 if kernels == "cuda" else 1, self)

    # ---- what is going on now, for the observers -----------------------------------------------------------------------
    @property
    def phase(self) -> str:
        """forward, backward (with what it computes again), optimizer, or rest: data, messages, metrics."""
        return "backward" if torch._C._current_graph_task_id() != -1 else self.outside

    def module(self) -> str:
        """The name of the innermost module in its forward pass, or whose gradients are being computed."""
        if self.machine.inside == "loss":
            return "head"
        if self.stack:
            return self.stack[-1]
        return self._forward()[1]

    def module_kind(self) -> str:
        """The kind of block of that module: mamba, attention, moe, mlp, head, embedding, other."""
        if self.phase == "optimizer":
            return "optimizer"
        name = self.module()
        block = ".".join(name.split(".")[:2])
        return self.kinds.get(block) or (name.partition(".")[0] if name.startswith(("head", "embedding")) else "other")

    def kind(self) -> str:
        """The kind of the memory that is allocated now."""
        if self.machine.inside:
            return self.machine.inside
        running = self.phase == "forward" or (self.phase == "backward" and self.stack)  # recomputed
        return "activations" if running else "temporary"

    def place(self) -> tuple[str, str, str]:
        """(path:line, phase, module); in the backward pass the line is that of the forward pass."""
        where = self._forward()[0] if not self.stack and self.phase == "backward" else ""
        return where or here(), self.phase, self.module()

    def _forward(self) -> tuple[str, str]:
        """(path:line, module) in the forward pass of what the backward pass is computing."""
        node = torch._C._current_autograd_node()
        if node is not None:  # operators inside torch's functions have no note: the last one holds
            self.noted = node.metadata.get(NOTE, self.noted)  # type: ignore[attr-defined]  # torch types a method
        return self.noted

    def seconds(self) -> float:
        return self.meter.clock

    # ---- the run -------------------------------------------------------------------------------------------------------
    def run(self, model: ModelConfig, config: TrainConfig, ranks: int, corpora: list, *observers: Any) -> None:
        """One step of this run on the first of ``ranks`` ranks. ``observers`` are called after the memory and the meter."""
        steps = config.steps or total_steps(config, model)
        with contextlib.ExitStack() as stack:
            world = stack.enter_context(fake_world(ranks, self.kernels == "cuda" or config.precision == "bf16"))
            stack.enter_context(rehearse(self.kernels))
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(self.machine.running())
            warnings.simplefilter("ignore")  # of torch, about fake tensors and a process group without a device
            trainer = Trainer(Run(Path("simulated"), config, model, steps, False), world, corpora)
            self._own(trainer)
            with self._hooks(trainer):
                self.machine.observers[:] = [self.memory, self.meter, *observers]
                self.machine.waits.clear()
                trainer.step()
                trainer.finish()  # which the next step would do
                self.machine.observers.clear()

    def _own(self, trainer: Trainer) -> None:
        """What is in memory before a step: parameters, buffers and the moments of the steps before."""
        model = trainer.model
        self.kinds = {f"blocks.{i}": KINDS_OF_BLOCKS[letter] for i, letter in enumerate(model.config.pattern)}
        for x in (*model.parameters(), *model.buffers()):
            self.memory.add(local(x.detach()), "parameters")
        for group in trainer.optimizer.param_groups:
            for p in group["params"]:
                state = {"step": torch.zeros((), device="cpu")} | {
                    name: torch.zeros_like(p.detach()) for name in ("exp_avg", "exp_avg_sq")
                }
                trainer.optimizer.state[p] = state
                for name in ("exp_avg", "exp_avg_sq"):
                    self.memory.add(local(state[name]), "moments")
        for mesh in dict.fromkeys(p.device_mesh for p in model.parameters() if is_dtensor(p)):
            self.axes.learn(mesh)

    @contextlib.contextmanager
    def _hooks(self, trainer: Trainer) -> Iterator[None]:
        names = {id(module): name for name, module in trainer.model.named_modules()}
        parallel, memory = trainer.parallel, self.memory

        def enter(module: nn.Module, args: object) -> None:
            self.stack.append(names.get(id(module), ""))

        def leave(module: nn.Module, args: object, out: object) -> None:
            self.stack.pop()

        def gradient(p: Tensor) -> None:
            if p.grad is not None:
                memory.move([local(p.grad)], "gathered" if id(p) in gathered else "gradients")

        def sort_gradients() -> None:
            memory.move([local(p.grad) for p in trainer.model.parameters() if p.grad is not None], "gradients")

        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        gathered: set[int] = set()
        count, init_unsharded = 0, FSDPParam.init_unsharded_param

        def init_unsharded_param(param: Any) -> None:
            """A block's whole weight: so is its gradient, until it is scattered."""
            init_unsharded(param)
            whole = param._unsharded_param
            if id(whole) not in gathered:
                gathered.add(id(whole))
                whole.register_post_accumulate_grad_hook(gradient)

        def micro_batch(last: bool) -> None:
            nonlocal count
            count += 1
            self.noted = ("", "")
            sort_gradients()
            self.outside = "forward"
            self.meter.weight = self.machine.weight = self.second if count == 2 else 1
            type(parallel).micro_batch(parallel, last)

        def finish_gradients() -> None:
            self.outside, self.meter.weight, self.machine.weight = "rest", 1, 1
            sort_gradients()
            self.at_update = dict(memory.used)
            type(parallel).finish_gradients(parallel)

        def phase(name: str) -> Any:
            return lambda *_: setattr(self, "outside", name)

        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            memory.resized(storage)
            return storage

        with contextlib.ExitStack() as stack:
            stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
            torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]  # dispatch does not see it
            stack.callback(setattr, FSDPParam, "init_unsharded_param", init_unsharded)
            FSDPParam.init_unsharded_param = init_unsharded_param  # type: ignore[method-assign]  # for the time of the step
            stack.enter_context(register_module_forward_pre_hook(enter))
            stack.enter_context(register_module_forward_hook(leave, always_call=True))
            stack.enter_context(trainer.optimizer.register_step_pre_hook(phase("optimizer")))
            stack.enter_context(trainer.optimizer.register_step_post_hook(phase("rest")))
            for p in trainer.model.parameters():
                stack.enter_context(p.register_post_accumulate_grad_hook(gradient))
            parallel.micro_batch = micro_batch  # type: ignore[method-assign]  # for the time of the step
            parallel.finish_gradients = finish_gradients  # type: ignore[method-assign]  # for the time of the step
            yield
