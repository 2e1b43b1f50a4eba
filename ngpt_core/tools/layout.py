"""How much memory and time does a layout need, and which layout trains fastest on these GPUs?

A layout is how a run is divided: replicas, expert parallelism, micro-batch, activation checkpointing. Parameters, moments,
gradients and messages are counted as ``parallel.py`` divides them. What blocks allocate and compute is read from a simulated
step of a short model (``simulate/blocks.py``) and added up over the pattern. ``ngpt simulate`` runs the whole step and agrees
within 10% (tests/test_layout.py, benchmarks/cluster.py).

Symbols: N ranks, R replicas, P ranks that share the experts of a layer, T seq_len, d d_model; "rows" are sequences.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..config import ModelConfig
from ..gpus import GPUS, Gpu
from ..nn.model import LanguageModel
from ..nn.moe import Experts
from ..nn.scale import Scale
from ..train.config import TrainConfig
from .simulate.blocks import Block, Costs, measured, triples
from .simulate.meter import message_seconds, not_hidden
from .simulate.step import KINDS_OF_BLOCKS

__all__ = ["DOCUMENTS", "LAYOUT", "Memory", "Message", "candidates", "fastest", "memory", "messages", "seconds", "state_bytes"]

LAYOUT = ("micro_batch", "activation_checkpointing", "expert_parallel", "replicas")
DOCUMENTS = 2000  # tokens per document, on average
MOST_EXPERT_PARALLEL = 64


# ---- exact: what is left on a rank -------------------------------------------------------------------------------------
@cache
def _shapes(model: ModelConfig) -> list[tuple[str, str, tuple[int, ...]]]:
    """(block, kind, shape) of every parameter. Its kind is how ``parallel.py`` treats it: whole, experts or rows."""
    from ..train.parallel import WHOLE  # slow to import: only when there is something to plan

    with torch.device("meta"):
        modules = list(LanguageModel(model).named_modules())
    return [
        (
            ".".join(where.split(".")[: 2 if where.startswith("blocks") else 1]),
            "whole" if isinstance(m, Scale) or name in WHOLE else "experts" if isinstance(m, Experts) else "rows",
            tuple(p.shape),
        )
        for where, m in modules
        for name, p in m.named_parameters(recurse=False)
    ]


def _kept(kind: str, shape: tuple[int, ...], replicas: int, expert_parallel: int, ranks: int) -> int:
    """How many numbers of a parameter the fullest rank keeps: the first one. FSDP pads the parts of the others to as many."""
    fsdp = ranks // replicas
    if ranks == 1 or kind == "whole":
        return math.prod(shape)
    if kind == "experts" and expert_parallel > 1:
        shard = fsdp // expert_parallel
        E, ff, d = shape
        E //= expert_parallel
        along_ff = E % shard and ff % shard == 0
        return E * (ff // shard) * d if along_ff else -(-E // shard) * ff * d
    return -(-shape[0] // fsdp) * math.prod(shape[1:])


@cache
def _local(model: ModelConfig, replicas: int, expert_parallel: int, ranks: int) -> dict[str, int]:
    """Block -> numbers on the fullest rank."""
    found: dict[str, int] = defaultdict(int)
    for block, kind, shape in _shapes(model):
        found[block] += _kept(kind, shape, replicas, expert_parallel, ranks)
    return found


def state_bytes(model: ModelConfig, config: TrainConfig, ranks: int) -> dict[str, int]:
    """Bytes of fp32 parameters and of the optimizer's two fp32 moments on the fullest rank, as ``parallel.py`` shards them."""
    numel = sum(_local(model, config.replicas, config.expert_parallel, ranks).values())
    return {"parameters": 4 * numel, "optimizer": 8 * numel}


# ---- memory ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank at the peak of a step, by the kinds of ``ngpt simulate``."""

    parameters: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    loss: int
    temporary: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def memory(
    model: ModelConfig, config: TrainConfig, ranks: int, document_length: int = DOCUMENTS, gpu: str = "h100-80gb"
) -> Memory:
    """What a rank needs at the peak of a step: the worst moment of the block where it is highest."""
    state, local = state_bytes(model, config, ranks), _local(model, config.replicas, config.expert_parallel, ranks)
    costs, shares = _costs(model, config, ranks, document_length, gpu, beside=1)
    rows, repeats = _rows(config, ranks)
    h = config.seq_len * model.d_model * _width(config)  # a block's input
    below, peaks = 0, []
    done = 4 * sum(local.values())  # gradients, in the order in which they are added up
    for name, block in _walk(model, costs):
        now = block.peak(rows, 0 if repeats == 1 else costs.pending)
        if name.startswith("blocks"):
            now["gathered"] = int(now["gathered"] * shares[name])
        now["activations"] += below * rows
        now["gradients"] = done if repeats == 1 else 4 * (sum(local.values()) + local[name])
        peaks.append(now)
        done -= 4 * local[name]
        kept = {"none": block.kept, "selective": h + block.products, "full": h}[config.activation_checkpointing]
        below += h if name == "embedding" else kept
    worst = max(peaks, key=lambda now: sum(now.values()))
    return Memory(parameters=state["parameters"], moments=state["optimizer"], **worst)


def _costs(
    model: ModelConfig, config: TrainConfig, ranks: int, document_length: int, gpu: str, beside: int = 0
) -> tuple[Costs, dict[str, float]]:
    """The costs of blocks, and the size of each block's gathered weights relative to the measured ones, taken together with
    ``beside`` neighbors on each side, which are gathered at the same time."""
    P = config.expert_parallel
    tried = 8 if P > 1 and model.n_experts % 8 == 0 else P
    precision = "fp32" if config.precision == "fp32" else "bf16"
    costs = measured(model, config.seq_len, precision, config.reshard, tried, document_length, gpu)
    here, there = _gathered(model, config.replicas, P, ranks), _gathered(model, 1, tried, 8 * tried)
    names = [name for name in here if name.startswith("blocks")]
    shares = {}
    for i, name in enumerate(names):
        near = names[max(0, i - beside) : i + beside + 1]
        shares[name] = sum(sum(here[x]) for x in near) / sum(sum(there[x]) for x in near)
    return costs, shares


def _walk(model: ModelConfig, costs: Costs) -> Iterator[tuple[str, Block]]:
    """(name, costs) of each part of the model, in the order of the forward pass."""
    yield "embedding", costs.blocks["embedding"]
    for i, triple in enumerate(triples(model.pattern)):
        yield f"blocks.{i}", costs.blocks[triple]
    yield "head", costs.blocks["head"]


def _rows(config: TrainConfig, ranks: int) -> tuple[int, int]:
    """(sequences per micro-batch, micro-batches per step) of a rank."""
    share = config.batch_size // ranks
    rows = config.micro_batch or share
    return rows, share // rows


def _width(config: TrainConfig) -> int:
    """Bytes of a number in the forward pass."""
    return 4 if config.precision == "fp32" else 2


# ---- messages ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Message:
    """All calls of one collective over one axis in a step."""

    op: str
    axis: str
    ranks: int
    nodes: int
    count: int
    bytes: int
    """What one rank holds of the larger side: what all-gathers receive, what reduce-scatters send."""
    phase: str
    beside: bool
    """Whether it runs beside the computation."""
    seconds: float


@cache
def _gathered(model: ModelConfig, replicas: int, expert_parallel: int, ranks: int) -> dict[str, tuple[int, int]]:
    """Block -> the numbers that a rank gathers, with FSDP's padding: (of rows and, without expert parallelism, experts; of its
    experts with it)."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    fsdp = ranks // replicas
    for block, kind, shape in _shapes(model):
        (rows, experts), kept = found[block], _kept(kind, shape, replicas, expert_parallel, ranks)
        if kind == "experts" and expert_parallel > 1:
            found[block] = (rows, experts + kept * (fsdp // expert_parallel))
        elif kind != "whole":
            found[block] = (rows + kept * fsdp, experts)
    return dict(found)


@cache
def _nodes(ranks: int, stride: int, per_node: int) -> int:
    """The number of nodes with these ranks, if one rank in ``stride`` takes part."""
    return len({rank * stride // per_node for rank in range(ranks)})


def messages(model: ModelConfig, config: TrainConfig, ranks: int, card: Gpu) -> list[Message]:
    """What a rank sends and receives in one optimizer step (the step's few sums over all ranks left out)."""
    R, P = config.replicas, config.expert_parallel
    inner, (rows, repeats) = ranks // R, _rows(config, ranks)
    width, again = _width(config), config.activation_checkpointing != "none"
    found: dict[tuple[str, str, str, int, int, bool], list[float]] = defaultdict(lambda: [0, 0, 0.0])

    def add(op: str, axis: str, phase: str, size: int, over: int, stride: int, count: int, beside: bool = True) -> None:
        if over > 1 and size:
            nodes = _nodes(over, stride, card.per_node)
            one = found[op, axis, phase, over, nodes, beside]
            one[0] += count
            one[1] += count * size
            one[2] += count * message_seconds(card, op, size, over, nodes)

    for name, parts in _gathered(model, R, P, ranks).items():
        for numbers, axis, over, stride in zip(parts, ("fsdp", "shard"), (inner, inner // P), (1, P)):
            add("all_gather", axis, "forward", numbers * width, over, stride, repeats)
            if config.reshard and name.startswith("blocks"):  # embedding and head are gathered once
                add("all_gather", axis, "backward", numbers * width, over, stride, repeats)
            add("reduce_scatter", axis, "backward", 4 * numbers, over, stride, repeats)
            add("all_reduce", "replica", "backward", 4 * numbers // over, R, inner, 1)
    routed = rows * config.seq_len * model.top_k * model.d_model * width
    layers = model.pattern.count("E") if P > 1 else 0
    add("all_to_all", "expert", "forward", routed, P, 1, 2 * layers * repeats, beside=False)
    add("all_to_all", "expert", "backward", routed, P, 1, (4 if again else 2) * layers * repeats, beside=False)
    return [
        Message(op, axis, over, nodes, int(count), int(size), phase, beside, spent)
        for (op, axis, phase, over, nodes, beside), (count, size, spent) in found.items()
    ]


# ---- time --------------------------------------------------------------------------------------------------------------
def seconds(
    model: ModelConfig, config: TrainConfig, ranks: int, gpu: str, document_length: int = DOCUMENTS
) -> dict[str, float]:
    """An estimate of a step by kind, as ``ngpt simulate`` makes it, and its ``total``."""
    costs, shares = _costs(model, config, ranks, document_length, gpu)
    rows, repeats = _rows(config, ranks)
    how = config.activation_checkpointing
    found: dict[str, float] = defaultdict(float)
    computing: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for name, block in _walk(model, costs):
        of_model = name in ("embedding", "head")
        forward, backward = block.seconds["forward"], block.seconds["backward"]
        again = {"none": 0.0, "selective": forward - block.seconds["products"], "full": forward}[how] if not of_model else 0.0
        kind = name if of_model else KINDS_OF_BLOCKS[model.pattern[int(name.partition(".")[2])]]
        for phase, spent in (("forward", forward), ("backward", backward + again)):
            spent = repeats * (rows * spent + block.per_micro_batch[phase] * shares.get(name, 1.0))
            found[kind] += spent
            computing[phase] += spent
            launches[phase] += block.launches[phase] * repeats
        launches["backward"] += block.launches["forward"] * repeats if again else 0
    for phase in ("forward", "backward"):
        talk = [m for m in messages(model, config, ranks, GPUS[gpu]) if m.phase == phase]
        beside, alone = (sum(m.seconds for m in talk if m.beside is hidden) for hidden in (True, False))
        exposed, host = not_hidden(computing[phase], beside, alone, launches[phase])
        found["communication"] += exposed
        found["host"] += host
    found["optimizer"] = costs.update * sum(_local(model, config.replicas, config.expert_parallel, ranks).values())
    found["host"] += not_hidden(found["optimizer"], 0.0, 0.0, costs.update_launches)[1]
    found["total"] = sum(found.values())
    return dict(found)


# ---- the choice --------------------------------------------------------------------------------------------------------
def candidates(model: ModelConfig, config: TrainConfig, ranks: int, given: set[str]) -> Iterator[TrainConfig]:
    """The layouts to choose from: all that divide, in powers of two for replicas and expert parallelism. ``given``: the
    settings that the user has chosen; they are kept."""
    experts = model.n_experts if "E" in model.pattern else 1
    replicas = [config.replicas] if "replicas" in given else _powers(ranks, ranks)
    sharing = [config.expert_parallel] if "expert_parallel" in given else _powers(experts, MOST_EXPERT_PARALLEL)
    share = config.batch_size // ranks
    rows = [config.micro_batch] if "micro_batch" in given else [n for n in range(1, share + 1) if share % n == 0]
    hows = [config.activation_checkpointing] if "activation_checkpointing" in given else ["none", "selective", "full"]
    for R in replicas:
        for P in sharing:
            if ranks % (R * P) == 0:
                for how in hows:
                    for n in rows:
                        yield replace(config, replicas=R, expert_parallel=P, activation_checkpointing=how, micro_batch=n)


def _powers(n: int, most: int) -> list[int]:
    """The powers of two that divide n, up to ``most``."""
    return [2**i for i in range(n.bit_length()) if n % 2**i == 0 and 2**i <= most]


def fastest(
    model: ModelConfig, config: TrainConfig, ranks: int, gpu: str, given: set[str], document_length: int = DOCUMENTS
) -> TrainConfig | None:
    """The layout with the shortest step of those that fit; None if none does."""
    fitting = (
        layout
        for layout in candidates(model, config, ranks, given)
        if memory(model, layout, ranks, document_length, gpu).total <= GPUS[gpu].room
    )
    return min(fitting, key=lambda layout: seconds(model, layout, ranks, gpu, document_length)["total"], default=None)
