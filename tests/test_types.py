"""Does a user's type checker know what our functions accept and return, and does ours check every file?"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import ngpt_core as ng

ROOT = Path(__file__).parent.parent

# A user's script, which is never run: mypy must find each assert_type true, and an error where an ignore expects one.
SCRIPT = """
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_type

import ngpt_core as ng
from ngpt_core.nn.scale import Scale
from ngpt_core.optim.schedule import Scaled

config = assert_type(ng.preset("pico", d_model=96), ng.ModelConfig)
model = assert_type(ng.LanguageModel(config), ng.LanguageModel)
tokens = torch.zeros(1, 8, dtype=torch.long)
assert_type(model.config.d_model, int)
assert_type(model.loss(tokens, tokens), Tensor)
assert_type(model.generate(tokens, max_new_tokens=4), Tensor)
assert_type(model.head.s_z, Scale | None)
model.update_router_bias(model.stats["load"])
assert_type(ng.load(ng.save(model, "folder")), ng.LanguageModel)

optimizer, schedule = assert_type(ng.recipe.build(model, 10), tuple[torch.optim.Optimizer, ng.Schedule])
assert_type(schedule.get_last_lr(), list[float])
assert_type(ng.recipe.scaled(model, 10), ng.recipe.Settings | ng.recipe.Baseline)
assert_type(ng.recipe.table(model)[0].lr, float)
gated = assert_type(ng.GatedAdamW(model.parameters(), smgc=ng.SMGC(R=2.0), pmen=ng.PMEN()), ng.GatedAdamW)
assert_type(gated.step(), None)
assert_type(gated.step(lambda: model.loss(tokens, tokens)), Tensor)
assert_type(ng.PMEN().due(3), bool)
assert_type(ng.PMEN().due(tokens), Tensor)
gated.diagnostics = ng.Diagnostics(every=100)

x = assert_type(ng.sphere.unit(ng.sphere.random(3, 4)), Tensor)
assert_type(ng.sphere.cap_angle(x, x, 0.1), Tensor)
assert_type(ng.gate(x), Tensor)
assert_type(ng.growth_clip(x, x, 5, 0.9), Tensor)
assert_type(ng.linear_cross_entropy(x, x, tokens, s_z=None), Tensor)
assert_type(ng.logit_scale(x, x[0]), Tensor)
assert_type(ng.row_norms(x), tuple[Tensor, Tensor])

assert_type(ng.log_decay(0, rho=0.1), float)  # what is asked is what is answered
assert_type(ng.cosine(np.linspace(0, 1, 5)).ndim, int)  # an array
assert_type(ng.linear(x), Tensor)
assert_type(ng.warmup_before("wsd", 0.2)(0.5), float)
assert_type(ng.match_auc(ng.wsd, ng.cosine), Scaled)
eta: Callable[[float], float] = partial(ng.log_decay, rho=0.1)
ng.Schedule(optimizer, 10, eta)
ng.Schedule(optimizer, 10, lambda r: 1 - r)

ng.prest("pico")  # type: ignore[attr-defined]
ng.log_decay(0.5, rho="0.1")  # type: ignore[arg-type]
ng.GatedAdamW(model.parameters(), smgc=100.0)  # type: ignore[arg-type]
ng.sphere.unit([3.0, 4.0])  # type: ignore[arg-type]
"""


CONFIG = f"""
[mypy]
strict = true
mypy_path = {ROOT}
[mypy-transformers.*,torch._dynamo.*,torch._inductor.*]
follow_imports = skip
"""  # what is skipped is most of the time without a cache, and says nothing about our types


def test_a_users_script_sees_types(tmp_path):
    api = pytest.importorskip("mypy.api")
    script, config = tmp_path / "users_script.py", tmp_path / "mypy.ini"
    script.write_text(SCRIPT)
    config.write_text(CONFIG)
    cache = ROOT / ".mypy_cache" / "users_script"
    found, trouble, _ = api.run(["--config-file", str(config), "--cache-dir", str(cache), str(script)])
    assert not trouble
    assert [line for line in found.splitlines() if script.name in line] == []


def test_checkers_and_the_lazy_import_know_the_same_names():
    tree = ast.parse((ROOT / "ngpt_core" / "__init__.py").read_text())
    guarded = next(x for x in tree.body if isinstance(x, ast.If) and ast.unparse(x.test) == "TYPE_CHECKING")
    imported = {alias.name: line.module or alias.name for line in guarded.body for alias in line.names}
    assert imported == ng._WHERE
    assert sorted(ng.__all__) == sorted([*ng._WHERE, "__version__"])


def test_every_ignore_has_a_code_and_a_reason():
    comments = [
        (str(path.relative_to(ROOT)), token.start[0], token.string)
        for path in sorted((ROOT / "ngpt_core").rglob("*.py"))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and "type: ignore" in token.string
    ]
    assert comments
    assert [c for c in comments if not re.match(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]  # \S", c[2])] == []
