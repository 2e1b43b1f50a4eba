"""N ranks do what one does: the optimizer on real processes (gloo), every layout of a DTensor, noise included.

Each group of processes is started once and runs all scenarios; the tests then check what its ranks returned.
"""

import math
import os
import sys
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import ngpt_core as ng
from ngpt_core.optim import Diagnostics, paths

STEPS = 15

# name -> (shape, unit_dim, placements on the mesh of 2)
LAYOUTS = {
    "rows, even": ((4, 6), -1, [Shard(0)]),
    "rows, uneven": ((5, 6), -1, [Shard(0)]),
    "one row, the other rank empty": ((1, 6), -1, [Shard(0)]),
    "replicated": ((3, 6), -1, [Replicate()]),
    "experts, by expert": ((3, 4, 6), -1, [Shard(0)]),
    "experts, by row": ((3, 5, 6), -1, [Shard(1)]),
    "rows split, even": ((4, 6), -1, [Shard(1)]),
    "rows split, uneven": ((4, 7), -1, [Shard(1)]),
    "rows split, the other rank empty": ((4, 1), -1, [Shard(1)]),
    "columns split": ((5, 4), 0, [Shard(0)]),
    "columns whole": ((5, 4), 0, [Shard(1)]),
    "experts split": ((3, 4, 5), -1, [Shard(2)]),
    "coordinates": ((7,), None, [Shard(0)]),
    "scalar, the other rank empty": ((1,), None, [Shard(0)]),
}
GRID = {  # the mesh of 2 x 2: HSDP replicates along its first axis; the last ones split twice
    "HSDP": ((5, 6), -1, [Replicate(), Shard(0)]),
    "HSDP, empty shards": ((1, 6), -1, [Replicate(), Shard(0)]),
    "HSDP, split": ((4, 7), -1, [Replicate(), Shard(1)]),
    "both axes cut rows": ((7, 6), -1, [Shard(0), Shard(0)]),
    "rows and columns": ((4, 6), -1, [Shard(0), Shard(1)]),
    "experts, by expert and row": ((2, 4, 6), -1, [Shard(0), Shard(1)]),
    "split twice": ((3, 9), -1, [Shard(1), Shard(1)]),
    "coordinates": ((7,), None, [Replicate(), Shard(0)]),
}


def start(name: str, shape, dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64).to(dtype)


def gradient(name: str, shape, t: int, dtype) -> torch.Tensor:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * t + len(name)), dtype=torch.float64)
    g[0], g[-1], g[..., 0] = 0, 0, 0  # vectors that never receive a gradient, whichever way they lie: PMEN's
    return (g * (50.0 if t == 12 else 1.0)).to(dtype)  # and a spike: SMGC's


def build(layouts, dtype, place, **kwargs):
    params = {name: nn.Parameter(place(start(name, shape, dtype), where)) for name, (shape, _, where) in layouts.items()}
    groups = [
        dict(params=[(name, p)], unit_dim=layouts[name][1], name=name) for name, p in params.items()
    ]  # one group each: what a group shares is tested elsewhere
    defaults = dict(lr=0.02, pmen=ng.PMEN(strength=2.0, tau=1e-9), smgc=ng.SMGC(R=4.0, start=5), cap=0.03)
    return params, ng.GatedAdamW(groups, **(defaults | kwargs))


def train(layouts, dtype, place, steps=STEPS, **kwargs):
    params, optimizer = build(layouts, dtype, place, **kwargs)
    for t in range(1, steps + 1):
        for name, p in params.items():
            p.grad = place(gradient(name, p.shape, t, dtype), layouts[name][2])
        optimizer.step()
    return {name: whole(p.detach()) for name, p in params.items()}, optimizer


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    error = (got - expected).abs().max()
    assert error <= tolerance, f"{name}: off by {error:.1e}"


def here(x: torch.Tensor, _) -> torch.Tensor:
    return x


# ---- what the ranks play ---------------------------------------------------------------------------------------------


def scene_layouts(mesh, layouts):
    def place(x, where):
        return distribute_tensor(x, mesh, where)

    result = {}
    for path, dtype, kwargs in PATHS if layouts is LAYOUTS else PATHS[:3]:
        result[path] = train(layouts, dtype, place, **kwargs)[0]
    usual = paths._LEAST
    paths._LEAST = 10  # coordinates: one vector or two at a time, and each rank must cut where the others do
    for path, dtype, kwargs in (PATHS[0], PATHS[3]):
        result[f"{path}, in pieces"] = train(layouts, dtype, place, **kwargs)[0]
    paths._LEAST = usual
    return result


PATHS = [
    ("float64", torch.float64, {}),
    ("float32", torch.float32, {}),
    ("float32, plain", torch.float32, dict(fused=False)),
    ("float32, stacked", torch.float32, dict(foreach=True)),
    ("float32, capturable", torch.float32, dict(capturable=True, fused=False)),
    ("no projection", torch.float64, dict(tangent=False, weight_decay=0.1)),
    ("smooth noise", torch.float64, dict(pmen=ng.PMEN(profile="smooth", tau=1e-2, strength=0.1), cap=None)),
    ("auto gate", torch.float64, dict(eps_gate=ng.AutoGate(quantile=0.3, every=4))),
    ("float32, auto gate", torch.float32, dict(eps_gate=ng.AutoGate(every=4))),
    ("200 steps, moment projected", torch.float64, dict(transport="project", eps_gate=lambda t, _: 1e-8 * t, steps=200)),
    ("200 steps, every switch", torch.float64, dict(transport="parallel", eps_gate="auto", steps=200)),
]


def scene_messages(mesh):
    """How many all-reduces does a step with many split tensors make?"""
    params = [nn.Parameter(distribute_tensor(start(str(i), (3, 5), torch.float32), mesh, [Shard(1)])) for i in range(6)]
    optimizer = ng.GatedAdamW(params, lr=0.1, unit_dim=-1, cap=0.1, nonfinite="off")
    for p in params:
        p.grad = distribute_tensor(torch.ones(3, 5), mesh, [Shard(1)])
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda x, *args, **kwargs: (calls.append(x.numel()), real(x, *args, **kwargs))
    try:
        optimizer.step()
    finally:
        dist.all_reduce = real
    return calls


def scene_partial(mesh):
    """A gradient that still is a sum over ranks is summed before it is used."""
    p = nn.Parameter(distribute_tensor(start("p", (4, 6), torch.float64), mesh, [Shard(0)]))
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
    half = gradient("p", (4, 6), 1, torch.float64) / 2
    p.grad = torch.distributed.tensor.DTensor.from_local(half, mesh, [Partial()], run_check=False)
    optimizer.step()
    return whole(p.detach())


def scene_nonfinite(mesh):
    """Only rank 1 holds the nan. Does every rank notice, and is nothing changed?"""
    layouts = {k: LAYOUTS[k] for k in ("rows, uneven", "rows split, uneven", "coordinates")}
    result = {}
    for policy in ("raise", "skip"):
        for defer in (None, True):
            params, optimizer = build(
                layouts, torch.float32, lambda x, where: distribute_tensor(x, mesh, where), nonfinite=policy
            )
            optimizer._watch.defer = defer
            before = {k: whole(p.detach()) for k, p in params.items()}
            for name, p in params.items():
                g = gradient(name, p.shape, 1, torch.float32)
                if name == "rows, uneven":
                    g[-1, 0] = math.nan
                p.grad = distribute_tensor(g, mesh, layouts[name][2])
            try:
                optimizer.step()
                optimizer.state_dict()
                error = None
            except ValueError as e:
                error = str(e)
            unchanged = all(torch.equal(whole(p.detach()), before[k]) for k, p in params.items())
            result[policy, defer] = (error, unchanged, optimizer.skipped)
    return result


def scene_zero_vector(mesh):
    """A vector that is zero as a whole is refused; one that is zero on one rank only is not."""
    x = torch.randn(3, 6)
    x[0, :3] = 0  # zero on rank 0, not on rank 1
    ng.GatedAdamW([nn.Parameter(distribute_tensor(x, mesh, [Shard(1)]))], lr=0.1, unit_dim=-1)
    x[1] = 0
    try:
        ng.GatedAdamW([("w", nn.Parameter(distribute_tensor(x, mesh, [Shard(1)])))], lr=0.1, unit_dim=-1)
    except ValueError as e:
        return str(e)


def scene_diagnostics(mesh):
    _, optimizer = build(LAYOUTS, torch.float64, lambda x, where: distribute_tensor(x, mesh, where))
    return watch(LAYOUTS, optimizer, lambda x, where: distribute_tensor(x, mesh, where))


def watch(layouts, optimizer, place):
    optimizer.diagnostics = Diagnostics()
    for t in (1, 2):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = place(gradient(group["name"], p.shape, t, torch.float64), layouts[group["name"]][2])
        optimizer.step()
    return optimizer.diagnostics.last


class Tiny(nn.Module):
    """Rows in odd numbers, a matrix of one row, a scalar: what FSDP2 shards unevenly or not at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 7, bias=False, dtype=torch.float64)
        self.down = nn.Linear(7, 5, bias=False, dtype=torch.float64)
        self.one = nn.Linear(5, 1, bias=False, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return self.one(torch.tanh(self.down(torch.tanh(self.up(x)) * self.scale)))


def fit(model, steps, optimizer=None, rank=0, world=1):
    """``steps`` on a batch of 8 that the ranks share."""
    if optimizer is None:
        optimizer = groups_of(model)
    for t in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        optimizer.zero_grad()
        model(x[rank * 8 // world : (rank + 1) * 8 // world]).square().mean().backward()
        optimizer.step()
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}, optimizer


def groups_of(model):
    rows = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    rest = [(n, p) for n, p in model.named_parameters() if p.ndim == 1]
    groups = [dict(params=rows, unit_dim=-1, pmen=ng.PMEN(tau=1e-3), cap=0.05), dict(params=rest, a=1.0)]
    return ng.GatedAdamW(groups, lr=0.03, smgc=ng.SMGC(start=3))


def scene_fsdp(rank, world, folder):
    """FSDP2 training; then the same with a distributed checkpoint in the middle."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def sharded():
        model = Tiny()
        return fully_shard(model)

    straight, _ = fit(sharded(), range(10), rank=rank, world=world)

    model = sharded()
    _, optimizer = fit(model, range(5), rank=rank, world=world)
    m, o = get_state_dict(model, optimizer)
    dcp.save({"model": m, "optimizer": o}, checkpoint_id=f"{folder}/dcp")

    model = sharded()
    optimizer = groups_of(model)
    m, o = get_state_dict(model, optimizer)  # creates the state by a step with lr = 0
    state = {"model": m, "optimizer": o}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    resumed, _ = fit(model, range(5, 10), optimizer, rank=rank, world=world)
    return straight, resumed, optimizer.param_groups[0]["pmen"]


def play(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    if world == 2:
        mesh = init_device_mesh("cpu", (2,))
        scenes = dict(
            layouts=lambda: scene_layouts(mesh, LAYOUTS),
            messages=lambda: scene_messages(mesh),
            partial=lambda: scene_partial(mesh),
            nonfinite=lambda: scene_nonfinite(mesh),
            zero=lambda: scene_zero_vector(mesh),
            diagnostics=lambda: scene_diagnostics(mesh),
            fsdp=lambda: scene_fsdp(rank, world, folder),
        )
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        scenes = dict(layouts=lambda: scene_layouts(mesh, GRID))
    results = {}
    for name, scene in scenes.items():
        try:
            results[name] = scene()
        except Exception:
            results[name] = traceback.format_exc()
            break  # the ranks may be out of step now
    torch.save(results, f"{folder}/{world}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def world_of(n: int, folder) -> list[dict]:
    os.environ["OMP_NUM_THREADS"] = "1"
    preload = [f"torch.distributed.{x}" for x in ("checkpoint", "fsdp", "tensor")]
    mp.set_forkserver_preload([*preload, "ngpt_core.optim"])
    mp.start_processes(play, args=(n, str(folder)), nprocs=n, start_method="forkserver")  # torch is imported once for all
    return [torch.load(f"{folder}/{n}-{rank}.pt", weights_only=False) for rank in range(n)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return world_of(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return world_of(4, tmp_path_factory.mktemp("four"))


def scene(results, name):
    for result in results:
        assert not isinstance(result.get(name), str) or name == "zero", result[name]
        assert name in result, "an earlier scene failed: " + str([v for v in result.values() if isinstance(v, str)])
    return [result[name] for result in results]


pytestmark = pytest.mark.skipif(sys.platform == "win32" or not dist.is_gloo_available(), reason="gloo is not in this torch")


# ---- what they brought back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path, dtype, kwargs", PATHS, ids=[p[0] for p in PATHS])
def test_two_ranks_train_as_one(two, path, dtype, kwargs):
    alone, _ = train(LAYOUTS, dtype, here, **kwargs)
    for rank in scene(two, "layouts"):
        for name, expected in alone.items():
            close(rank[path][name], expected, 1e-6 if dtype == torch.float32 else 1e-12, name)


@pytest.mark.parametrize("path, dtype, kwargs", PATHS[:3], ids=[p[0] for p in PATHS[:3]])
def test_hsdp_and_other_grids_of_four_ranks_train_as_one(four, path, dtype, kwargs):
    alone, _ = train(GRID, dtype, here, **kwargs)
    for rank in scene(four, "layouts"):
        for name, expected in alone.items():
            close(rank[path][name], expected, 1e-6 if dtype == torch.float32 else 1e-12, name)


@pytest.mark.parametrize("path, dtype, kwargs", [PATHS[0], PATHS[3]], ids=["float64", "float32, stacked"])
def test_ranks_that_go_piece_by_piece_train_as_one_that_does_not(two, four, path, dtype, kwargs):
    for ranks, layouts in ((two, LAYOUTS), (four, GRID)):
        alone, _ = train(layouts, dtype, here, **kwargs)
        for rank in scene(ranks, "layouts"):
            for name, expected in alone.items():
                close(rank[f"{path}, in pieces"][name], expected, 1e-6 if dtype == torch.float32 else 1e-12, name)


def test_the_noise_moved_something():
    """Two runs without noise would agree just as well."""
    with_noise, without = train(LAYOUTS, torch.float64, here)[0], train(LAYOUTS, torch.float64, here, pmen=None)[0]
    for name, (_, dim, _) in LAYOUTS.items():
        if dim is not None and with_noise[name].shape[dim] > 1:
            assert (with_noise[name] - without[name]).abs().max() > 1e-3, name


def test_sums_of_many_split_tensors_travel_in_one_message_per_stage(two):
    for calls in scene(two, "messages"):
        assert calls == [6 * 2 * 3, 6 * 3 * 3, 6 * 3]


def test_a_partial_gradient_is_summed_first(two):
    p = nn.Parameter(start("p", (4, 6), torch.float64))
    optimizer = ng.GatedAdamW([p], lr=0.1, unit_dim=-1)
    p.grad = gradient("p", (4, 6), 1, torch.float64)
    optimizer.step()
    for got in scene(two, "partial"):
        torch.testing.assert_close(got, p.detach())


def test_all_ranks_raise_or_skip_together_and_nothing_changes(two):
    for rank in scene(two, "nonfinite"):
        for (policy, _), (error, unchanged, skipped) in rank.items():
            assert unchanged
            if policy == "raise":
                assert "'rows, uneven'" in error and "step 1" in error
            else:
                assert error is None and skipped == 1


def test_a_vector_is_zero_only_if_it_is_zero_on_all_ranks(two):
    for error in scene(two, "zero"):
        assert "'w' has a zero vector (at [1] of" in error


def test_diagnostics_describe_the_full_tensors(two):
    _, optimizer = build(LAYOUTS, torch.float64, here)
    alone = watch(LAYOUTS, optimizer, here)
    for records in scene(two, "diagnostics"):
        for got, expected in zip(records, alone):
            assert got.pop("histogram") == expected["histogram"] and got.pop("name") == expected["name"]
            for key, value in got.items():
                assert value == (expected[key] if value is None else pytest.approx(expected[key], rel=1e-9)), (
                    expected["name"],
                    key,
                )


def test_fsdp2_trains_as_one_process_and_resumes_from_a_distributed_checkpoint(two):
    alone, _ = fit(Tiny(), range(10))
    for straight, resumed, pmen in scene(two, "fsdp"):
        for name, expected in alone.items():
            torch.testing.assert_close(straight[name], expected, rtol=0, atol=1e-12)
            assert torch.equal(resumed[name], straight[name]), name
        assert pmen == ng.PMEN(tau=1e-3)
