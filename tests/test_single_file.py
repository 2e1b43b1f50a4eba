"""The optimizer in one file: generated from the package, needing only torch, and the same step by step."""

import ast
import copy
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ngpt_core as ng
from ngpt_core.optim.single_file import make

FILE = Path(make.FILE)


@pytest.fixture(scope="module")
def alone():
    """The file as a module of its own, as one who copied it imports it."""
    spec = importlib.util.spec_from_file_location("copied", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["copied"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["copied"]


def test_the_file_is_what_the_package_generates():
    assert FILE.read_text() == make.source(), "write it again: python -m ngpt_core.optim.single_file.make"


def test_it_imports_only_torch_and_the_standard_library():
    nodes = list(ast.walk(ast.parse(FILE.read_text())))
    names = {alias.name.split(".")[0] for x in nodes if isinstance(x, ast.Import) for alias in x.names}
    names |= {x.module.split(".")[0] for x in nodes if isinstance(x, ast.ImportFrom)}
    assert not any(isinstance(x, ast.ImportFrom) and x.level for x in nodes)
    assert names - set(sys.stdlib_module_names) == {"torch"}


def test_it_runs_where_the_package_cannot_be_imported(tmp_path):
    (tmp_path / "gated_adamw.py").write_text(FILE.read_text())
    code = (
        "import sys\nfor name in ('ngpt_core', 'einops', 'numpy'): sys.modules[name] = None\n"
        "import torch\nfrom gated_adamw import GatedAdamW, PMEN, SMGC\nm = torch.nn.Linear(4, 3)\n"
        "rows, bias = dict(params=[m.weight], unit_dim=-1, cap=0.1, pmen=PMEN()), dict(params=[m.bias])\n"
        "o = GatedAdamW([rows, bias], smgc=SMGC(start=0))\n"
        "m(torch.ones(2, 4)).sum().backward()\no.step()\nprint(m.weight.norm(dim=-1).sub(1).abs().max() < 1e-6)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "tensor(True)", done.stderr


SETTINGS = {
    "coordinates": dict(weight_decay=0.1),
    "adam": dict(a=1.0, eps_num=0.0, weight_decay=0.1),
    "rows": dict(unit_dim=-1, cap=0.05, weight_decay=0.1),
    "columns": dict(unit_dim=0, tangent=False, transport="project"),
    "everything": dict(
        unit_dim=-1, cap=0.05, transport="parallel", smgc=dict(R=4.0, start=5), pmen=dict(strength=2.0, tau=1e-6)
    ),
}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_its_steps_are_the_packages(settings, dtype, tolerance, alone):
    def built(module, **path):
        torch.manual_seed(0)
        own = {k: getattr(module, k.upper())(**v) if k in ("smgc", "pmen") else v for k, v in settings.items()}
        params = [torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64).to(dtype)) for shape in ((5, 7), (2, 3, 4))]
        return params, module.GatedAdamW([("a", params[0]), ("b", params[1])], lr=0.05, **own, **path)

    (ours, package), (theirs, copied) = built(ng, fused=False), built(alone)
    for t in range(60):
        for p, q in zip(ours, theirs):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(t), dtype=torch.float64) * 10.0 ** -(t % 7)
            g[..., 0], g[0] = 0, 0  # never a gradient: the noise's
            p.grad, q.grad = g.to(dtype), g.to(dtype)
        package.step(), copied.step()
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(q, p, rtol=0, atol=tolerance)
        torch.testing.assert_close(copied.state[q]["exp_avg_sq"], package.state[p]["exp_avg_sq"], rtol=1e-5, atol=0)
    moved = [p - q for p, q in zip(ours, built(ng)[0])]
    assert all(x.abs().max() > 0.01 for x in moved)


def test_a_state_goes_from_one_to_the_other(alone):
    p, q = (torch.nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    first, second = ng.GatedAdamW([p], lr=0.1, a=1.0), alone.GatedAdamW([q], lr=0.1, a=1.0)
    for t in range(3):
        p.grad = q.grad = torch.full((3, 4), float(t + 1))
        first.step()
        if t == 0:
            q.data.copy_(p)
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        else:
            second.step()
    torch.testing.assert_close(p, q)
