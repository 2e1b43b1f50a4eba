"""What does a run need (memory per GPU, time), and which command starts it?

``ngpt plan --preset 30B --gpus 64 --gpu h100-80gb``. Parameters and optimizer state are counted exactly, as ``parallel.py``
shards them (a test compares with real FSDP2 shards); FLOPs follow from the shapes; activations are estimated from what each
block keeps for its backward pass, and the time assumes an MFU. The output marks both as estimates.

Symbols: N ranks, T seq_len, b sequences that a rank processes at once (micro-batch), d d_model, V vocabulary, L blocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from shlex import quote
from textwrap import wrap

import torch

from ..config import ModelConfig
from ..gpus import GIB, GPUS, Gpu
from ..nn.model import LanguageModel
from ..nn.moe import Experts
from ..nn.scale import Scale
from ..presets import PRESETS, count_parameters, preset
from ..train.config import (
    TrainConfig,
    check_length,
    check_recipe,
    in_force,
    model_config,
    recipe_numbers,
    run_defaults,
    total_steps,
)
from ..train.flops import flops_per_token

__all__ = ["Memory", "memory", "plan", "plan_for", "state_bytes"]

WIDTH = 84  # columns of the page
RESERVE = 5 * GIB  # CUDA context, NCCL buffers, fragmentation: memory that a run cannot use


# ---- exact: what FSDP leaves on a rank -------------------------------------------------------------------------------
@cache
def _shapes(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """(kind, shape) of every parameter. Its kind is how ``parallel.py`` treats it: whole, experts or rows."""
    from ..train.parallel import WHOLE  # slow to import: only when there is something to plan

    with torch.device("meta"):
        modules = list(LanguageModel(model).modules())
    return [
        ("whole" if isinstance(m, Scale) or name in WHOLE else "experts" if isinstance(m, Experts) else "rows", tuple(p.shape))
        for m in modules
        for name, p in m.named_parameters(recurse=False)
    ]


def state_bytes(model: ModelConfig, config: TrainConfig, ranks: int) -> dict[str, int]:
    """Bytes of fp32 parameters and of the optimizer's two fp32 moments on the fullest rank, as ``parallel.py`` shards them."""
    fsdp = ranks // config.replicas
    shard = fsdp // config.expert_parallel
    numel = 0
    for kind, shape in _shapes(model):
        if ranks == 1 or kind == "whole":
            numel += math.prod(shape)
        elif kind == "experts" and config.expert_parallel > 1:
            E, ff, d = shape
            E //= config.expert_parallel
            along_ff = E % shard and ff % shard == 0
            numel += E * (ff // shard) * d if along_ff else -(-E // shard) * ff * d
        else:
            numel += -(-shape[0] // fsdp) * math.prod(shape[1:])
    return {"parameters": 4 * numel, "optimizer": 8 * numel}


# ---- from the shapes -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank."""

    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def _kept(c: ModelConfig, letter: str, how: str) -> float:
    """How many numbers a block keeps per token until its backward pass (estimate): its step, and what its mixer needs."""
    d = c.d_model
    if how == "full":
        return d
    if letter == "M":
        products = 2 * c.d_inner + 2 * c.groups * c.state + c.mamba_heads + d
        others = 3 * c.d_inner + 4 * c.groups * c.state + c.d_inner * c.state / max(c.chunk, 1)
    elif letter == "*":
        others = (2 * c.n_heads + 2 * (c.n_kv_heads or 0)) * (c.head_dim or 0)
        products = others + d
    elif letter == "E":
        products = c.top_k * (c.expert_ff + d) + c.shared_ff + d
        others = c.top_k * (c.expert_ff + 2 * d) + c.shared_ff + 4 * c.n_experts
    else:
        products, others = 2 * c.ff + d, 2 * c.ff
    step = 4 * d
    return d + products + (others + step if how == "none" else 0)


def memory(model: ModelConfig, config: TrainConfig, ranks: int) -> Memory:
    """What a rank needs at the peak of a step. ``parameters``, ``optimizer`` and ``gradients`` are exact, the rest estimates.

    Activations and gathered weights take two bytes per number, or four with ``--precision fp32``.
    """
    state = state_bytes(model, config, ranks)
    tokens = (config.micro_batch or config.batch_size // ranks) * config.seq_len
    d, counts = model.d_model, {letter: model.pattern.count(letter) for letter in "M*-E"}
    how = config.activation_checkpointing
    kept = sum(n * _kept(model, letter, how) for letter, n in counts.items())
    of_block = [_kept(model, letter, "none") for letter, n in counts.items() if n]
    recomputed = 0 if how == "none" else max(of_block)  # one block at a time
    total, _ = count_parameters(model)
    biggest = max(_block_parameters(model).values()) / config.expert_parallel
    chunk = min(max(256, d), tokens)
    width = 4 if config.precision == "fp32" else 2
    whole = 2 * biggest if config.reshard else total
    return Memory(
        parameters=state["parameters"],
        optimizer=state["optimizer"],
        gradients=state["parameters"],
        # this block and the next one (or all blocks), and a block's gradients before and, in fp32, after they are scattered
        gathered=int(whole * width + biggest * (width + 4)),
        activations=int(width * tokens * (kept + recomputed)),
        # a chunk of logits; W and its gradient; h and its gradient
        logits=4 * chunk * model.vocab_size + (width + 4) * (model.vocab_size + tokens) * d,
    )


def _block_parameters(model: ModelConfig) -> dict[str, int]:
    """The number of parameters of one block of each kind in the pattern, by difference."""
    base = count_parameters(model).total
    return {
        letter: count_parameters(replace(model, pattern=model.pattern + letter)).total - base for letter in set(model.pattern)
    }


# ---- the page --------------------------------------------------------------------------------------------------------
def alternatives(model: ModelConfig, config: TrainConfig, ranks: int, room: int) -> list[str]:
    """Changes that would make the run fit: each one that suffices by itself; if none does, all of them on more GPUs."""
    found = []
    changes: dict[str, dict] = {
        "--activation-checkpointing full": {"activation_checkpointing": "full"},
        "--micro-batch 1": {"micro_batch": 1},
        "--micro-batch 1 --activation-checkpointing full": {"micro_batch": 1, "activation_checkpointing": "full"},
    }
    if config.replicas > 1:
        changes["--replicas 1"] = {"replicas": 1}
    for text, change in changes.items():
        if memory(model, replace(config, **change), ranks).total <= room:
            found.append(text)
    tight = replace(config, micro_batch=1, activation_checkpointing="full", replicas=1)
    more = ranks
    while not found and more < 65536:
        more *= 2
        if config.batch_size % more == 0 or config.batch_size < more:
            if memory(model, replace(tight, batch_size=max(config.batch_size, more)), more).total <= room:
                found.append(f"--gpus {more} --micro-batch 1 --activation-checkpointing full")
    return found


def plan_for(
    settings: Mapping[str, object], model_settings: Mapping[str, object], gpus: int, gpu: str, mfu: float
) -> tuple[str, bool]:
    """``plan`` from a user's settings. If neither micro-batch nor activation checkpointing is given, both are chosen so that
    the run fits: with the least recomputation, then the largest micro-batch."""
    model = model_config(model_settings)
    config = TrainConfig.from_dict({**run_defaults(model), **settings})
    _check(model, config, gpus, gpu, mfu)
    choices = [config]
    if not settings.keys() & {"micro_batch", "activation_checkpointing"}:
        share = config.batch_size // gpus
        rows = [n for n in range(share, 0, -1) if share % n == 0]
        kinds = ("none", "selective", "full")
        choices = [replace(config, activation_checkpointing=how, micro_batch=n) for how in kinds for n in rows]
    fitting = (choice for choice in choices if memory(model, _with_precision(choice, GPUS[gpu]), gpus).total <= _room(gpu))
    return plan(model, next(fitting, choices[-1]) if len(choices) > 1 else config, gpus, gpu, mfu)


def _with_precision(config: TrainConfig, card: Gpu) -> TrainConfig:
    """The config with the precision that a run uses on this card."""
    if config.precision == "bf16" and not card.bf16:
        raise ValueError(
            "--precision bf16: this GPU has no bf16 units and would emulate them; leave the flag out, or use fp32."
        )
    return replace(config, precision=card.precision) if config.precision == "auto" else config


def _room(gpu: str) -> int:
    return GPUS[gpu].memory - RESERVE


def _check(model: ModelConfig, config: TrainConfig, gpus: int, gpu: str, mfu: float) -> None:
    """Refuse a run that could not start."""
    from ..train.parallel import check_ranks

    if gpu not in GPUS:
        raise ValueError(f"unknown GPU {gpu!r}; --gpu must be one of {', '.join(GPUS)}.")
    if gpus < 1 or not 0 < mfu <= 1:
        raise ValueError(f"--gpus must be at least 1 and --mfu in (0, 1]; got {gpus} and {mfu}.")
    check_ranks(config, model, gpus)
    check_length(config, model)


def plan(model: ModelConfig, config: TrainConfig, gpus: int, gpu: str, mfu: float = 0.35) -> tuple[str, bool]:
    """(the page that ``ngpt plan`` prints, whether the run fits)."""
    _check(model, config, gpus, gpu, mfu)
    card = GPUS[gpu]
    steps = total_steps(config, model)
    check_recipe(config, model, steps)
    tokens = steps * config.batch_size * config.seq_len
    resolved = _with_precision(config, card)
    count, flops, need = count_parameters(model), flops_per_token(model, config.seq_len), memory(model, resolved, gpus)
    peak = card.peak if resolved.precision == "bf16" else card.fp32
    seconds = tokens * flops / (gpus * peak * mfu)
    room = _room(gpu)
    fits = need.total <= room
    lines = [
        f"{model.name or 'model'} ({'nGPT' if model.normalized else 'GPT'}): {_big(count.total, 3)} parameters, "
        f"{_big(count.active, 3)} active per token (without the input embedding)",
        f"{steps:,} steps x {config.batch_size} sequences x {config.seq_len} tokens = {_big(tokens, 1)} tokens",
        f"{_flops(flops)} per token (forward and backward), {tokens * flops:.2e} in total",
        f"about {_time(seconds)} on {gpus} x {gpu} in {resolved.precision} ({peak / 1e12:,.4g} TFLOP/s each)",
        f"  at an assumed MFU of {mfu:.0%}: {gpus * peak * mfu / flops:,.0f} tokens/s (metrics.jsonl has the measured one)",
        "",
        f"memory per rank, GiB (room: {room / GIB:.1f} of {card.memory / GIB:.0f})",
    ]
    notes = {"parameters": "fp32, exact", "optimizer": "two fp32 moments, exact", "gradients": "fp32, exact"}
    for name, size in vars(need).items():
        lines.append(f"  {name:<12}{size / GIB:8.2f}   {notes.get(name, 'estimate')}")
    lines += [f"  {'total':<12}{need.total / GIB:8.2f}   {'fits' if fits else 'DOES NOT FIT'}", ""]
    if not fits:
        ways = alternatives(model, resolved, gpus, room)
        lines += ["it would fit with: " + ("; or ".join(ways) if ways else "none of the changes this plan knows"), ""]
    lines += [
        in_force(config, model, steps, config.scaled),
        "learning rates (peak)",
        *_rates(model, config, steps),
        "",
        "to start it",
        *_commands(model, config, gpus, card, steps),
    ]
    return "\n".join(lines), fits


def _flops(n: float) -> str:
    return f"{n / 1e9:,.2f} GFLOPs" if n >= 1e8 else f"{n / 1e6:,.2f} MFLOPs"


def _big(n: float, digits: int) -> str:
    if n < 1e6:
        return f"{n:,.0f}"
    return f"{n / 1e9:,.{digits}f}B" if n >= 1e8 else f"{n / 1e6:,.{digits}f}M"


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} seconds" if seconds >= 1 else "a second or less"


def _rates(model: ModelConfig, config: TrainConfig, steps: int) -> list[str]:
    """The distinct rows of the recipe's table, each with its parameters."""
    from .. import recipe

    with torch.device("meta"):
        net = LanguageModel(model)
    kinds: dict[tuple, set[str]] = {}
    for row in recipe.table(net, steps, recipe_numbers(config, model, steps)):
        kinds.setdefault((row.lr, row.warmup), set()).add(".".join(row.name.split(".")[-2:]).removesuffix(".weight"))
    lines = []
    for (lr, warmup), names in sorted(kinds.items(), key=lambda item: -item[0][0]):
        start = f"  {lr:<10.3g}{f'warmup {warmup:.0%}' if warmup else '':<13}"
        lines += wrap(", ".join(sorted(names)), WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
    return lines


def _commands(model: ModelConfig, config: TrainConfig, gpus: int, card: Gpu, steps: int) -> list[str]:
    local = max(n for n in range(1, card.per_node + 1) if gpus % n == 0)  # the same number of ranks on every node
    nodes = gpus // local
    flags = ["" if model.normalized else "--baseline", f"--steps {steps}"]
    flags += [f"--batch-size {config.batch_size}", f"--seq-len {config.seq_len}"]
    not_flags = {"steps", "batch_size", "seq_len", "data", "out", "name", "normalized"}  # written out separately
    base = preset(model.name, model.normalized) if model.name in PRESETS else model
    for chosen, default in ((model, base), (config, TrainConfig())):
        for f in fields(chosen):
            value = getattr(chosen, f.name)
            if f.name not in not_flags and value != getattr(default, f.name):
                flags.append(_as_flag(f.name, value))
    data = "DIR" if config.data == TrainConfig().data else " ".join(map(quote, config.data))
    where = f"--data {data} --out {quote(config.out or 'RUN')} --resume"
    train = [f"-m ngpt_core train --preset {model.name or 'pico'}", *filter(None, flags), where]
    if nodes == 1:
        return _shell(["torchrun --standalone", f"--nproc-per-node {local}", *train])
    rendezvous = ["--rdzv-backend c10d", "--rdzv-id $SLURM_JOB_ID", "--rdzv-endpoint $head:29500"]
    return [
        "  #!/bin/bash",
        f"  #SBATCH --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={local} --signal=TERM@120 --requeue",
        "  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100",  # seconds that torchrun waits after SIGTERM (30 by default)
        '  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        *_shell([f"srun torchrun --nnodes {nodes} --nproc-per-node {local}", *rendezvous, *train]),
    ]


def _as_flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return " ".join([f"--{flag}", *(quote(str(x)) for x in (value if isinstance(value, tuple) else (value,)))])


def _shell(words: list[str]) -> list[str]:
    """A command, wrapped into lines that a shell reads as one; a flag stays with its value."""
    lines = ["  " + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) + 2 > WIDTH:
            lines[-1] += " \\"
            lines.append("    " + word)
        else:
            lines[-1] += " " + word
    return lines
