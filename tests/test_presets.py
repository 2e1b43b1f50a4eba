"""Presets: the ladder has the published counts, and counting by arithmetic is counting the model's own parameters."""

import pytest
import torch

import ngpt_core as ng
from ngpt_core.presets import FULL_SIZE, NANO, PRESETS, count_parameters

LADDER = {  # d_model, M/E/*, total, active (billions), C, tokens (billions), GPT's peak lr: the design's table
    "1B": (768, (10, 10, 3), 1.029, 0.209, 0.24, 88, 2.2e-3),
    "2B": (960, (14, 14, 4), 1.964, 0.369, 0.24, 140, 2.0e-3),
    "4B": (1152, (20, 20, 5), 4.002, 0.613, 0.24, 215, 1.8e-3),
    "7B": (1280, (22, 22, 6), 7.020, 0.915, 0.22, 310, 1.6e-3),
    "14B": (1920, (23, 23, 6), 14.070, 1.750, 0.18, 560, 1.4e-3),
    "30B": (2688, (23, 23, 6), 31.578, 3.228, 0.12, 1000, 1.2e-3),
}
PAPER_ACTIVE = {"1B": 0.21, "2B": 0.37, "4B": 0.61, "7B": 0.91, "14B": 1.74, "30B": 3.23}  # section 4.1


def on_meta(config):
    with torch.device("meta"):
        return ng.LanguageModel(config)


@pytest.mark.parametrize("name", LADDER)
@pytest.mark.parametrize("normalized", [True, False])
def test_the_ladder_has_the_tables_counts_on_the_meta_device(name, normalized):
    d_model, layers, total, active, C, tokens, gpt_lr = LADDER[name]
    config = ng.preset(name, normalized)
    assert (config.d_model, config.C, config.tokens, config.gpt_lr) == (d_model, C, tokens * 10**9, gpt_lr)
    assert tuple(config.pattern.count(x) for x in "ME*") == layers
    model = on_meta(config)
    counted = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3)
    used = counted - model.embedding.weight.numel() - experts * (128 - 6) // 128
    assert count_parameters(config) == (counted, used)
    assert abs(counted / 1e9 - total) < 1e-3 and abs(used / 1e9 - active) < 1e-3
    assert abs(used / 1e9 - PAPER_ACTIVE[name]) / PAPER_ACTIVE[name] < 0.01


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in FULL_SIZE])
@pytest.mark.parametrize("normalized", [True, False])
def test_laptop_models_have_the_size_they_are_named_for(name, normalized):
    config = ng.preset(name, normalized)
    counted = sum(p.numel() for p in on_meta(config).parameters())
    assert count_parameters(config).total == counted
    wanted = {"pico": 0.3e6, "micro": 3e6, "mini": 15e6}[name.removesuffix("-dense")]
    assert 0.9 < counted / wanted < 1.1
    assert config.vocab_size == 256
    assert ("E" in config.pattern) != name.endswith("-dense")


@pytest.mark.parametrize(
    "change", [dict(vector_s_mamba=True), dict(vector_s_moe=True), dict(s_u_per_expert=True), dict(shared_ff=0)]
)
def test_counting_follows_every_option(change):
    for normalized in (True, False):
        config = ng.preset("pico", normalized, **change)
        assert count_parameters(config).total == sum(p.numel() for p in on_meta(config).parameters())


def test_counting_follows_swiglu():
    for normalized in (True, False):
        config = ng.preset("pico-dense", normalized, activation="swiglu")
        assert count_parameters(config).total == sum(p.numel() for p in on_meta(config).parameters())


def test_the_pattern_rule():
    assert ng.preset("1B").pattern == "MEMEM*EMEMEM*EMEMEM*EME"
    assert ng.preset("4B").pattern == "MEMEM*E" * 5 + "ME" * 5
    assert ng.preset("14B").pattern == ng.preset("30B").pattern == NANO
    assert len(NANO) == 52


def test_the_whole_ladder_shares_nemotrons_settings():
    for name in LADDER:
        c = ng.preset(name)
        assert (c.vocab_size, c.n_experts, c.top_k, c.state, c.groups, c.conv, c.chunk) == (131072, 128, 6, 128, 8, 4, 128)
        assert (c.head_dim, c.n_kv_heads, c.rope_theta, c.mamba_head_dim, c.routed_scaling) == (128, 2, None, 64, 2.5)
        assert (c.router_bias_rate, c.balance_loss, c.activation) == (1e-3, 1e-4, "relu2")


def test_overrides_and_unknown_names():
    assert ng.preset("30B", d_model=2048).d_model == 2048
    with pytest.raises(ValueError, match=r"no preset '3B'.*30B"):
        ng.preset("3B")
    with pytest.raises(ValueError, match=r"no preset \['pico'\]"):
        ng.preset(["pico"])
    with pytest.raises(ValueError, match="no field 'depth'"):
        ng.preset("pico", depth=3)
    with pytest.raises(ValueError, match="n_heads"):
        ng.preset("pico", d_model=65)
    with pytest.raises(ValueError, match="top_k"):
        ng.preset("pico", top_k=9)


def test_gpt_is_the_same_config_with_another_flag():
    a, b = ng.preset("pico").to_dict(), ng.preset("pico", normalized=False).to_dict()
    assert {k for k in a if a[k] != b[k]} == {"normalized"}


@pytest.mark.parametrize("normalized", [True, False])
def test_the_dense_8b_meets_what_is_published_of_it(normalized):
    """Section 2.1: dense, 8B, 4T tokens. The rest is ours."""
    config = ng.preset("8B-dense", normalized)
    total = sum(p.numel() for p in on_meta(config).parameters())
    assert count_parameters(config).total == total and abs(total / 8e9 - 1) < 0.02
    assert set(config.pattern) == {"*", "-"} and config.tokens == 4 * 10**12 and config.rope_theta is not None
