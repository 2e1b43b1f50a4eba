"""The layout against the simulation: the same memory, the same messages, the same choice.

The grid of the whole ladder is in benchmarks/results/cluster.json (benchmarks/cluster.py); here are short models of its width.
"""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ngpt_core as ng
from ngpt_core.gpus import GPUS
from ngpt_core.tools.layout import candidates, fastest, memory, messages, seconds
from ngpt_core.tools.simulate import simulate
from ngpt_core.tools.simulate.blocks import shortened, triples
from ngpt_core.train.config import TrainConfig

COMMON = {"steps": 10, "precision": "bf16", "seq_len": 2048, "scaled": False}
SHORT = ng.preset("1B", pattern="MEMEM*EMEME")  # every block of the ladder with every neighbor, and two more
LAYOUTS = [  # ranks, document length, settings
    (8, 0, {"batch_size": 8, "micro_batch": 1, "activation_checkpointing": "none", "expert_parallel": 8}),
    (256, 300, {"batch_size": 1024, "micro_batch": 2, "activation_checkpointing": "selective"}),  # more ranks than experts
    (32, 0, {"batch_size": 64, "micro_batch": 2, "activation_checkpointing": "full", "expert_parallel": 4, "replicas": 2}),
]
CASES = pytest.mark.parametrize("case", range(len(LAYOUTS)))


@cache
def simulated(case):
    ranks, length, settings = LAYOUTS[case]
    config = TrainConfig(**COMMON, **settings)
    return ranks, length, config, simulate(SHORT, config, ranks, document_length=length)


@CASES
def test_memory_is_that_of_the_simulation_within_a_tenth(case):
    ranks, length, config, found = simulated(case)
    assert memory(SHORT, config, ranks, length).total == pytest.approx(found.peak_bytes, rel=0.1)
    assert found.plan_bytes == memory(SHORT, config, ranks, length).total


@CASES
def test_messages_are_those_of_the_simulation(case):
    """Sums over all ranks are left out: they are small. FSDP pads what does not divide, and between two micro-batches it
    gathers the embedding once more."""
    ranks, _, config, found = simulated(case)
    counted: dict[tuple[str, str], list[float]] = {}
    for one in messages(SHORT, config, ranks, GPUS["h100-80gb"]):
        size = one.bytes / one.ranks if one.op == "all_gather" else one.bytes  # what a rank puts in
        total = counted.setdefault((one.op, one.axis), [0, 0.0])
        total[0], total[1] = total[0] + one.count, total[1] + size
    true = {(c.op, c.axis): c for c in found.collectives if c.axis != "world" and c.ranks > 1 and c.bytes > 1e6}
    assert set(counted) == set(true)
    for key, (count, size) in counted.items():
        assert size == pytest.approx(true[key].bytes, rel=0.05), key
        if key[0] in ("all_gather", "reduce_scatter"):
            assert 0 <= true[key].count - count <= (key == ("all_gather", "fsdp")) * (config.batch_size // ranks // 2), key


@CASES
def test_a_step_takes_as_long_as_in_the_simulation(case):
    ranks, length, config, found = simulated(case)
    told = seconds(SHORT, config, ranks, "h100-80gb", length)
    assert told["total"] == pytest.approx(found.seconds["total"], rel=0.1)
    assert told["total"] == pytest.approx(sum(s for kind, s in told.items() if kind != "total"))
    for kind in ("mamba", "attention", "moe"):
        assert told[kind] == pytest.approx(found.seconds[kind], rel=0.25), kind


def test_the_stored_grid_is_whole_and_within_a_tenth():
    """Of the ladder's models, simulated by benchmarks/cluster.py: memory and time."""
    stored = json.loads((Path(ng.__file__).parents[1] / "benchmarks" / "results" / "cluster.json").read_text())["agreement"]
    cases = [key.split() for key in stored]  # preset, ranks, expert parallelism, replicas, checkpointing, micro-batch
    for column, values in ((0, {"1B", "7B", "30B"}), (4, {"none", "selective", "full"}), (5, {"1", "2"})):
        assert {case[column] for case in cases} == values
    assert len(cases) >= 24 and 0 < sum(case[2] == "EP1" for case in cases) < len(cases)
    for key, row in stored.items():
        assert row["planned"] == pytest.approx(row["simulated"], rel=0.1), key
        assert row["planned_seconds"] == pytest.approx(row["simulated_seconds"], rel=0.1), key


@given(st.text("ME*-", min_size=1, max_size=12))
def test_a_shortened_pattern_has_the_same_neighbors(pattern):
    assert set(triples(shortened(pattern))) == set(triples(pattern)) and len(shortened(pattern)) <= len(pattern)


def test_the_ladder_is_shortened_to_seven_blocks():
    assert {shortened(ng.preset(name).pattern) for name in ("1B", "7B", "30B")} == {"MEM*EME"}


def test_the_choice_is_the_shortest_step_that_fits_and_keeps_what_is_given():
    config = TrainConfig(**COMMON, batch_size=64, micro_batch=2)
    chosen = fastest(SHORT, config, 16, "h100-80gb", {"micro_batch"}, 0)
    assert chosen is not None and chosen.micro_batch == 2
    ways = list(candidates(SHORT, config, 16, {"micro_batch"}))
    assert chosen in ways and all(way.micro_batch == 2 and 16 % (way.replicas * way.expert_parallel) == 0 for way in ways)
    fitting = [way for way in ways if memory(SHORT, way, 16, 0).total <= GPUS["h100-80gb"].room]
    times = [seconds(SHORT, way, 16, "h100-80gb", 0)["total"] for way in fitting]
    assert seconds(SHORT, chosen, 16, "h100-80gb", 0)["total"] == min(times)


def test_less_memory_is_paid_for_with_recomputation():
    config = TrainConfig(**{**COMMON, "seq_len": 8192}, batch_size=64)
    given = {"expert_parallel", "replicas"}
    chosen = {gpu: fastest(SHORT, config, 8, gpu, given, 0) for gpu in ("h100-80gb", "l4-24gb")}
    hows = {gpu: way.activation_checkpointing for gpu, way in chosen.items()}
    rows = {gpu: way.micro_batch for gpu, way in chosen.items()}
    assert hows["h100-80gb"] == "none" and (hows["l4-24gb"] != "none" or rows["l4-24gb"] < rows["h100-80gb"])
    assert memory(SHORT, chosen["l4-24gb"], 8, 0).total <= GPUS["l4-24gb"].room
