"""ModelConfig: every mistake is a ValueError that names the field, and a config survives a round trip through JSON."""

import json
import re
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import ngpt_core as ng
from ngpt_core import config as config_module

GOOD = dict(
    vocab_size=256, d_model=64, pattern="M*E-", n_heads=4, n_kv_heads=2, mamba_heads=8, ff=128,
    n_experts=8, top_k=2, expert_ff=32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("pattern", dict(pattern="MXE")),
        ("pattern", dict(pattern="")),
        ("pattern", dict(pattern="M E")),
        ("pattern", dict(pattern=None)),
        ("vocab_size", dict(vocab_size=0)),
        ("vocab_size", dict(vocab_size=256.0)),
        ("d_model", dict(d_model=-1)),
        ("d_model", dict(d_model=True)),
        ("n_heads", dict(n_heads=3)),
        ("n_heads", dict(n_heads=0)),
        ("n_heads", dict(n_kv_heads=3)),
        ("n_heads", dict(d_model=66)),
        ("head_dim", dict(head_dim=0)),
        ("rope_theta", dict(rope_theta=1e4, head_dim=15)),
        ("rope_theta", dict(rope_theta=-1.0)),
        ("mamba_heads", dict(mamba_heads=0)),
        ("mamba_heads", dict(mamba_heads=12)),
        ("conv", dict(conv=0)),
        ("chunk", dict(chunk=0)),
        ("A_range", dict(A_range=(0.0, 1.0))),
        ("dt_range", dict(dt_range=(0.1, 0.01))),
        ("ff", dict(ff=0)),
        ("activation", dict(activation="gelu")),
        ("n_experts", dict(n_experts=0)),
        ("top_k", dict(top_k=9)),
        ("top_k", dict(top_k=0)),
        ("expert_ff", dict(expert_ff=0)),
        ("shared_ff", dict(shared_ff=-1)),
        ("balance_loss", dict(balance_loss=-1e-4)),
        ("lgp_form", dict(lgp_form="mean")),
        ("alpha_scale", dict(alpha_scale=0.0)),
        ("s_z_init", dict(s_z_init=float("nan"))),
        *((f"{scale}_init", {f"{scale}_init": 0.0}) for scale in ("alpha", "s_qk", "s_u", "s_z", "s_mamba", "s_moe")),
        ("s_z_init", dict(s_z_init="1")),
        ("alpha_init", dict(alpha_init=None)),
        ("s_mamba_init", dict(s_mamba_init=float("inf"))),
        ("lgp_q", dict(lgp_q=-1.0)),
        ("normalized", dict(normalized="no")),
        ("C", dict(C="0.2")),
        ("C", dict(C=None)),
        ("C", dict(C=float("inf"))),
        ("tokens", dict(tokens=-5)),
        ("rope_theta", dict(rope_theta="1e4")),
        ("A_range", dict(A_range=1.0)),
        ("A_range", dict(A_range=(1.0, 2.0, 3.0))),
        ("A_range", dict(A_range=(1.0, float("inf")))),
        ("dt_min", dict(dt_min=-1.0)),
        ("routed_scaling", dict(routed_scaling=float("nan"))),
        ("routed_scaling", dict(routed_scaling="2.5")),
        ("router_bias_rate", dict(router_bias_rate=float("nan"))),
        ("norm_eps", dict(norm_eps=0.0)),
        ("max_seq_len", dict(max_seq_len=0)),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field_and_the_value(field, change):
    ng.ModelConfig(**GOOD)
    with pytest.raises(ValueError, match=rf"ModelConfig\.{field} .*got ") as error:
        ng.ModelConfig(**GOOD | change)
    (value,) = [v for v in change.values()][-1:]
    if field in change:
        assert repr(value) in str(error.value)


def test_sizes_are_asked_for_only_where_the_pattern_needs_them():
    dense = ng.ModelConfig(vocab_size=256, d_model=64, pattern="*-", n_heads=4, ff=128)
    assert (dense.head_dim, dense.n_kv_heads) == (16, 4)
    for letter in "M*E-":
        with pytest.raises(ValueError, match=re.escape(repr(letter))):
            ng.ModelConfig(vocab_size=256, d_model=64, pattern=letter)


def test_item_6_s_mamba_and_s_moe_start_at_half_sqrt_d_and_follow_d_model():
    c = ng.ModelConfig(**GOOD)
    assert c.scale_of("s_mamba") == c.scale_of("s_moe") == (0.5 * 64**0.5, 1.0)
    assert replace(c, d_model=256, head_dim=16).scale_of("s_moe")[0] == 0.5 * 256**0.5
    assert replace(c, s_moe_init=3.0).scale_of("s_moe") == (3.0, 1.0)


def test_items_3_4_5_7_8_11_defaults_are_the_papers():
    c = ng.ModelConfig(**GOOD)
    assert c.scale_of("s_qk") == c.scale_of("s_u") == c.scale_of("s_z") == (1.0, 1.0)
    assert c.scale_of("alpha") == (0.1, 1.0)
    assert c.lgp_q == 1.0 and c.lgp_form == "ratio"


def test_a_config_survives_json():
    c = ng.ModelConfig(**GOOD, normalized=False, A_range=(2.0, 3.0), tokens=10**12)
    assert ng.ModelConfig.from_dict(json.loads(json.dumps(c.to_dict()))) == c


@pytest.mark.parametrize(
    "change",
    [
        dict(C=np.float32(0.25)),
        dict(tokens=np.int64(5)),
        dict(alpha_init=torch.tensor(0.25)),
        dict(C=Fraction(1, 4)),
        dict(d_model=np.int32(64), top_k=torch.tensor(2)),
        dict(A_range=[1.0, 16.0]),
        dict(A_range=[np.float32(1), 16], dt_range=(torch.tensor(0.5), 1.0)),
    ],
    ids=str,
)
def test_numbers_of_any_kind_become_pythons_own_and_a_config_can_be_written_and_hashed(change):
    c = ng.ModelConfig(**GOOD | change)
    assert ng.ModelConfig.from_dict(json.loads(json.dumps(c.to_dict()))) == c
    assert hash(c) == hash(replace(c))
    for name, given in change.items():
        value = getattr(c, name)
        kinds = {type(x) for x in (value if isinstance(value, tuple) else (value,))}
        assert kinds <= {int, float} and value == (tuple(given) if isinstance(value, tuple) else given)


@pytest.mark.parametrize("data", [None, 5, [1], "pico"])
def test_a_config_must_be_a_dictionary(data):
    with pytest.raises(ValueError, match=r"A config must be a dictionary.*got"):
        ng.ModelConfig.from_dict(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format 1; got 2"),
        ({"format": None}, "format 1; got None"),
        ({"n_head": 4}, "no field 'n_head'"),
    ],
)
def test_what_from_dict_does_not_know_is_an_error(change, words):
    with pytest.raises(ValueError, match=words):
        ng.ModelConfig.from_dict(ng.ModelConfig(**GOOD).to_dict() | change)


def test_a_missing_field_is_named():
    data = ng.ModelConfig(**GOOD).to_dict()
    del data["d_model"]
    with pytest.raises(ValueError, match="'d_model'"):
        ng.ModelConfig.from_dict(data)


def test_every_field_has_a_docstring_under_it():
    source = Path(config_module.__file__).read_text()
    for field in fields(ng.ModelConfig):
        assert re.search(rf"^    {field.name}: [^\n]*\n    \"\"\"", source, re.M), field.name
