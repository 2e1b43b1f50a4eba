"""What does one block of each kind cost, in memory and in time? A step of a short model is simulated, and its blocks are read.

The short model has the same width and vocabulary, and its blocks have the same neighbors: FSDP gathers the weights of the next
block, and scatters the gradients of the last one, while a block computes. It runs one sequence per rank without checkpointing.
What checkpointing changes follows from what a block makes in its forward pass (``train/recompute.py``):

                  kept until the backward pass           computed again
    none          everything that autograd saves         nothing
    selective     the input, the results of products     the rest
    full          the input                              everything

``layout.py`` adds up the blocks of the whole model.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from ...config import ModelConfig
from ...gpus import GPUS
from ...train.config import TrainConfig
from .corpus import synthetic
from .machine import Call, is_view
from .step import Watch
from .storage import SCATTER

__all__ = ["Block", "Costs", "measured", "shortened", "triples"]

MEASURED = ("gathered", "loss", "activations", "temporary")  # the other kinds are counted exactly
_WEIGHTS = {"parameters", "gathered", "gradients"}
_LARGE = 1 << 20  # bytes
_SCALED = ("activations", "temporary")  # they grow with the sequences of a micro-batch


@dataclass
class Block:
    """The costs of a block for one sequence, in bytes and in seconds."""

    kept: int = 0
    """Activations that stay from its forward to its backward pass."""
    products: int = 0
    """The results of its matrix products and of attention."""
    moments: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """Bytes of each kind in ``MEASURED`` above what earlier blocks keep, at the moments when they are largest, by phase."""
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Phase -> seconds of computation per sequence; "products": those of the products in the forward pass."""
    per_micro_batch: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Phase -> seconds that do not grow with the sequences: casts and copies of weights and of their gradients."""
    launches: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Phase -> operators."""

    def see(self, phase: str, now: tuple[int, ...]) -> None:
        """Remember a moment, if it is the largest in one respect."""
        for name, measure in _RESPECTS.items():
            if measure(now) > measure(self.moments.get((phase, name), (0,) * len(now))):
                self.moments[phase, name] = now

    def peak(self, rows: int, pending: int) -> dict[str, int]:
        """The memory of each kind at the worst moment, with this many sequences in a micro-batch. ``pending``: bytes of
        gathered memory that the micro-batch before has left; they are there until the first gradients are scattered."""
        scales = [rows if kind in _SCALED else 1 for kind in MEASURED]
        found = []
        for (phase, _), moment in self.moments.items():
            now = {kind: n * size for kind, n, size in zip(MEASURED, scales, moment)}
            now["gathered"] += pending if phase == "forward" else 0
            found.append(now)
        return max(found, key=lambda now: sum(now.values()))


_RESPECTS: dict[str, Callable[[tuple[int, ...]], int]] = {
    "all": sum,
    "whatever the micro-batch": lambda now: now[0] + now[1],
    "per sequence": lambda now: now[2] + now[3],
}


@dataclass
class Costs:
    """What a step of the short model shows."""

    blocks: dict[str, Block]
    """By the letters of a block and its neighbors; "embedding" and "head"."""
    pending: int
    """Bytes that a micro-batch leaves to the next: FSDP frees the input of its last reduce-scatter at the next one."""
    update: float
    """Seconds of the optimizer and of all else that is not a forward or backward pass, per parameter of a rank."""
    update_launches: int
    """Its operators."""


def triples(pattern: str) -> list[str]:
    """Every block with its neighbors; ^ and $ are the embedding and the head."""
    text = f"^{pattern}$"
    return [text[i : i + 3] for i in range(len(pattern))]


def shortened(pattern: str) -> str:
    """The shortest pattern that has the same triples."""
    wanted = set(triples(pattern))
    queue = deque([("^" + pattern[0], frozenset[str]())])
    seen = set(queue)
    while queue:
        text, found = queue.popleft()
        if found == wanted:
            return text[1:-1]
        for triple in sorted(wanted):
            if triple[:2] == text[-2:]:
                longer = (text + triple[2], found | {triple})
                if (longer[0][-2:], longer[1]) not in seen:
                    seen.add((longer[0][-2:], longer[1]))
                    queue.append(longer)
    raise AssertionError("a pattern has its own triples")


@cache
def measured(
    model: ModelConfig, seq_len: int, precision: str, reshard: bool, expert_parallel: int, document_length: int, gpu: str
) -> Costs:
    """The costs of the blocks of this model, read from a simulated step on 8 ranks or more."""
    short = replace(model, pattern=shortened(model.pattern))
    ranks = 8 * expert_parallel
    config = TrainConfig(
        steps=1, batch_size=ranks, micro_batch=1, seq_len=seq_len, precision=precision, reshard=reshard,
        expert_parallel=expert_parallel, compile=False, scaled=False,
    )  # fmt: skip
    watch = Watch(GPUS[gpu], "cuda", "balanced", 1)
    reader = _Reader(watch, short)
    watch.run(short, config, ranks, [(synthetic(seq_len, document_length, model.vocab_size), 1.0)], reader)
    return reader.costs()


class _Reader:
    """An observer of the operators of a step that reads memory and clock, block by block."""

    def __init__(self, watch: Watch, model: ModelConfig) -> None:
        self.watch, self.model = watch, model
        self.names = ["embedding", *(f"blocks.{i}" for i in range(len(model.pattern))), "head"]
        self.blocks = {name: Block() for name in self.names}
        self.before: dict[str, int] = {}  # activations when a block begins
        self.name, self.activations, self.clock, self.launched = "embedding", 0, 0.0, 0
        self.update, self.update_launches, self.pending = 0.0, 0, 0

    def __call__(self, call: Call) -> None:
        watch, used = self.watch, self.watch.memory.used
        phase, seconds, self.clock = watch.phase, watch.meter.clock - self.clock, watch.meter.clock
        total = sum(watch.meter.launches.values())
        launches, self.launched = total - self.launched, total
        before, self.activations = self.activations, used["activations"]
        if phase in ("forward", "backward"):
            name = ".".join(watch.module().split(".")[:2])
            self.name = name if name in self.blocks else "head" if name.startswith("head") else self.name
            block = self.blocks[self.name]
            self.before.setdefault(self.name, before)
            scaled = used["activations"] - self.before[self.name]
            block.see(phase, (used["gathered"], used["loss"], scaled, used["temporary"]))
            (block.per_micro_batch if self._of_weights(call) else block.seconds)[phase] += seconds
            block.launches[phase] += launches
            if phase == "forward" and watch.machine.in_product and not is_view(call.func):
                block.seconds["products"] += seconds
                block.products += sum(x.nbytes for x in call.returned)
            if call.func in SCATTER:
                self.pending = call.args[1].nbytes
        else:
            self.update += seconds
            self.update_launches += launches

    def _of_weights(self, call: Call) -> bool:
        """Does the operator only touch weights and their gradients? So do all that are left for the head's backward pass."""
        large = (x for x in (*call.taken, *call.returned) if x.nbytes > _LARGE)
        kinds = {self.watch.memory.kind_of(x) for x in large}
        return bool(kinds) and (kinds <= _WEIGHTS or (self.name == "head" and self.watch.phase == "backward"))

    def costs(self) -> Costs:
        for name, following in pairwise(self.names):
            self.blocks[name].kept = self.before[following] - self.before[name]
        names = dict(zip(self.names, ("embedding", *triples(self.model.pattern), "head")))
        numbers = self.watch.memory.highest["parameters"] / 4
        blocks = {names[name]: block for name, block in self.blocks.items()}
        return Costs(blocks, self.pending, self.update / numbers, self.update_launches)
