"""What does a run need (memory per GPU, time), and which command starts it?

``ngpt plan --preset 30B --gpus 64 --gpu h100-80gb``. The layout (``layout.py``) is chosen for the shortest step that fits; what
the user sets is kept. Parameters, moments, gradients and messages are counted, FLOPs follow from the shapes, the rest of the
memory is read from simulated blocks, and the length of the run assumes an MFU. The output says which is which.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from shlex import quote
from textwrap import wrap
from typing import Any

import torch

from ..config import ModelConfig
from ..gpus import GIB, GPUS, Gpu
from ..nn.model import LanguageModel
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
from .layout import DOCUMENTS, LAYOUT, candidates, fastest, memory, messages, seconds

__all__ = ["alternatives", "as_flag", "plan", "plan_for"]

WIDTH = 84  # columns of the page


# ---- the page --------------------------------------------------------------------------------------------------------
def alternatives(model: ModelConfig, config: TrainConfig, ranks: int, gpu: str, document_length: int = DOCUMENTS) -> list[str]:
    """Changes that would make the run fit: single ones that suffice; if none does, a whole layout, on more GPUs if need be."""
    changes: list[tuple[str, Any]] = [
        ("micro_batch", 1),
        ("activation_checkpointing", "selective"),
        ("activation_checkpointing", "full"),
        ("expert_parallel", 8),
        ("replicas", 1),
    ]
    found: dict[str, str] = {}
    for name, value in changes:
        changed = replace(config, **{name: value})
        if changed != config and name not in found and _fits(model, changed, ranks, gpu, document_length):
            found[name] = as_flag(name, value)
    more = ranks
    while not found and more <= 65536:
        larger = replace(config, batch_size=max(config.batch_size, more))
        if larger.batch_size % more == 0 and (best := fastest(model, larger, more, gpu, set(), document_length)):
            flags = [f"--gpus {more}"] if more > ranks else []
            flags += [f"--batch-size {best.batch_size}"] if best.batch_size > config.batch_size else []
            found["layout"] = " ".join([*flags, *(as_flag(name, getattr(best, name)) for name in LAYOUT)])
        more *= 2
    return list(found.values())


def _fits(model: ModelConfig, config: TrainConfig, ranks: int, gpu: str, document_length: int) -> bool:
    """Whether the run can start, and has room."""
    from ..train.parallel import check_ranks

    try:
        check_ranks(config, model, ranks)
    except ValueError:
        return False
    return memory(model, config, ranks, document_length, gpu).total <= GPUS[gpu].room


def plan_for(
    settings: Mapping[str, object],
    model_settings: Mapping[str, object],
    gpus: int,
    gpu: str,
    mfu: float,
    document_length: int = DOCUMENTS,
) -> tuple[str, bool]:
    """``plan`` from a user's settings. Parts of the layout that are not given are chosen for the shortest step that fits."""
    model = model_config(model_settings)
    config = TrainConfig.from_dict({**run_defaults(model), **settings})
    _check(model, config, gpus, gpu, mfu)
    resolved, given = _with_precision(config, GPUS[gpu]), set(settings)
    best = fastest(model, resolved, gpus, gpu, given, document_length)
    if best is None:  # the tightest
        best = min(candidates(model, resolved, gpus, given), key=lambda c: memory(model, c, gpus, document_length, gpu).total)
    config = replace(config, **{name: getattr(best, name) for name in LAYOUT})
    return plan(model, config, gpus, gpu, mfu, document_length)


def _with_precision(config: TrainConfig, card: Gpu) -> TrainConfig:
    """The config with the precision that a run uses on this card."""
    if config.precision == "bf16" and not card.bf16:
        raise ValueError(
            "--precision bf16: this GPU has no bf16 units and would emulate them; leave the flag out, or use fp32."
        )
    return replace(config, precision=card.precision) if config.precision == "auto" else config


def _check(model: ModelConfig, config: TrainConfig, gpus: int, gpu: str, mfu: float) -> None:
    """Refuse a run that could not start."""
    from ..train.parallel import check_ranks

    if gpu not in GPUS:
        raise ValueError(f"unknown GPU {gpu!r}; --gpu must be one of {', '.join(GPUS)}.")
    if gpus < 1 or not 0 < mfu <= 1:
        raise ValueError(f"--gpus must be at least 1 and --mfu in (0, 1]; got {gpus} and {mfu}.")
    check_ranks(config, model, gpus)
    check_length(config, model)
    check_recipe(config, model, total_steps(config, model))


def plan(
    model: ModelConfig, config: TrainConfig, gpus: int, gpu: str, mfu: float = 0.35, document_length: int = DOCUMENTS
) -> tuple[str, bool]:
    """(the page that ``ngpt plan`` prints, whether the run fits)."""
    _check(model, config, gpus, gpu, mfu)
    card = GPUS[gpu]
    steps = total_steps(config, model)
    tokens = steps * config.batch_size * config.seq_len
    resolved = _with_precision(config, card)
    count, flops = count_parameters(model), flops_per_token(model, config.seq_len)
    need = memory(model, resolved, gpus, document_length, gpu)
    peak = card.peak if resolved.precision == "bf16" else card.fp32
    run_seconds = tokens * flops / (gpus * peak * mfu)
    fits = need.total <= card.room
    lines = [
        f"{model.name or 'model'} ({'nGPT' if model.normalized else 'GPT'}): {_big(count.total, 3)} parameters, "
        f"{_big(count.active, 3)} active per token (without the input embedding)",
        f"{steps:,} steps x {config.batch_size} sequences x {config.seq_len} tokens = {_big(tokens, 1)} tokens",
        f"{_flops(flops)} per token (forward and backward), {tokens * flops:.2e} in total",
        f"about {_time(run_seconds)} on {gpus} x {gpu} in {resolved.precision} ({peak / 1e12:,.4g} TFLOP/s each)",
        f"  at an assumed MFU of {mfu:.0%}: {gpus * peak * mfu / flops:,.0f} tokens/s (metrics.jsonl has the measured one)",
        "",
        f"memory per rank, GiB (room: {card.room / GIB:.1f} of {card.memory / GIB:.0f})",
    ]
    for kind, size in vars(need).items():
        lines.append(f"  {kind:<12}{size / GIB:8.2f}   {_NOTES.get(kind, 'from simulated blocks')}")
    lines += [f"  {'total':<12}{need.total / GIB:8.2f}   {'fits' if fits else 'DOES NOT FIT'}", ""]
    if not fits:
        ways = alternatives(model, resolved, gpus, gpu, document_length)
        lines += ["it would fit with: " + ("; or ".join(ways) if ways else "none of the changes this plan knows"), ""]
    lines += [
        *_step(model, resolved, gpus, gpu, document_length, peak, flops),
        "",
        in_force(config, model, steps, config.scaled),
        "learning rates (peak)",
        *_rates(model, config, steps),
        "",
        "to start it",
        *_commands(model, config, gpus, card, steps),
    ]
    return "\n".join(lines), fits


_NOTES = {"parameters": "fp32, exact", "moments": "two in fp32, exact", "gradients": "fp32, exact"}


def _step(
    model: ModelConfig, config: TrainConfig, gpus: int, gpu: str, document_length: int, peak: float, flops: float
) -> list[str]:
    """The layout, its messages, and the estimate of a step."""
    rows = config.micro_batch or config.batch_size // gpus
    spent = seconds(model, config, gpus, gpu, document_length)
    reached = config.batch_size * config.seq_len * flops / (gpus * peak * spent["total"])
    lines = [
        f"layout: micro-batch {rows}, checkpointing {config.activation_checkpointing}, expert parallelism "
        f"{config.expert_parallel}, replicas {config.replicas}",
        f"  about {spent['total']:.3g} s per step by the data sheet (MFU {reached:.0%}), {spent['communication']:.2g} s of it "
        "waiting for messages;",
        "  this is a model and not a measurement (ngpt simulate shows its parts)",
    ]
    if found := messages(model, config, gpus, GPUS[gpu]):
        lines.append("messages of a rank in a step     axis   ranks  nodes    count        GiB   seconds")
        for one in found:
            lines.append(
                f"  {one.op:<15}{one.phase:<12}{one.axis:>8}{one.ranks:>8}{one.nodes:>7}{one.count:>9,}"
                f"{one.bytes / GIB:>11,.2f}{one.seconds:>10.3f}"
            )
    return lines


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
                flags.append(as_flag(f.name, value))
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


def as_flag(name: str, value: object) -> str:
    """A setting as it is written on the command line."""
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
