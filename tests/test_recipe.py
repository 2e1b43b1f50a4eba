"""The eleven items of the summary (section 3.3), each by its number, and the experimental setup (section 4.1)."""

import io
import json
import math
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ngpt_core as ng
from ngpt_core import recipe, sphere
from ngpt_core.nn import attention
from ngpt_core.nn.scale import Scale
from ngpt_core.nn.unit import unit_axes
from ngpt_core.optim.schedule import cosine

D = 64  # pico's d_model
GLOBAL = 0.24 / math.sqrt(D)
DEGREE = math.pi / 180


@pytest.fixture(scope="module")
def ngpt():
    torch.manual_seed(0)
    return ng.LanguageModel(ng.preset("pico"))


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    return ng.LanguageModel(ng.preset("pico", normalized=False))


def rows(model, part="", **kw):
    return [row for row in recipe.table(model, **kw) if part in row.name]


def is_unit(row):
    return row.unit_dim is not None


def scales(model, name):
    found = [m for n, m in model.named_modules() if isinstance(m, Scale) and n.rpartition(".")[2] == name]
    assert found
    return found


def train(model, optimizer, schedule, steps):
    for _ in range(steps):
        tokens = torch.randint(0, 256, (2, 16))
        optimizer.zero_grad()
        model.loss(tokens, tokens).backward()
        optimizer.step()
        schedule.step()


# ---- the summary -------------------------------------------------------------------------------------------------------
def test_item_1_no_normalization_layers_and_no_weight_decay(ngpt, gpt):
    names = [type(m).__name__.lower() for m in ngpt.modules()]
    assert not [n for n in names if "norm" in n] and not [n for n, _ in ngpt.named_parameters() if "norm" in n]
    assert [n for n, _ in gpt.named_parameters() if "norm" in n]  # the baseline has them
    assert all(row.weight_decay == 0 for row in rows(ngpt))


def test_item_2_gated_adam_with_projection_and_half_a_gate_on_unit_rows_adam_elsewhere(ngpt):
    optimizer, _ = recipe.build(ngpt, 100)
    assert type(optimizer) is ng.GatedAdamW
    units = unit_axes(ngpt)
    for group in optimizer.param_groups:
        unit = {name in units for name in group["param_names"]}
        assert len(unit) == 1
        if unit.pop():
            assert (group["unit_dim"], group["a"], group["tangent"]) == (-1, 0.5, True)
        else:
            assert (group["unit_dim"], group["a"], group["tangent"], group["cap"]) == (None, 1.0, False, None)
    # input and output embedding, attention, MoE, router and Mamba projections: every matrix but the convolution
    matrices = {name for name, p in ngpt.named_parameters() if p.ndim > 1 and "conv" not in name}
    assert matrices == set(units)


def test_item_2_the_cap_holds_for_unit_vectors_that_are_not_embeddings(ngpt):
    for row in rows(ngpt):
        embedding = row.name in ("embedding.weight", "head.weight")
        expected = DEGREE if is_unit(row) and not embedding else None
        assert row.cap == (None if expected is None else pytest.approx(expected)), row.name


def test_item_2_every_selected_row_is_normalized_after_a_step_and_none_turned_beyond_the_cap():
    torch.manual_seed(1)
    model = ng.LanguageModel(ng.preset("pico"))
    optimizer, schedule = recipe.build(model, 40)
    caps = {row.name: row.cap for row in recipe.table(model)}
    for t in range(1, 7):
        before = {name: model.get_parameter(name).detach().clone() for name in unit_axes(model)}
        train(model, optimizer, schedule, 1)
        for name, w in before.items():
            after = model.get_parameter(name).detach()
            assert (torch.linalg.vector_norm(after.double(), dim=-1) - 1).abs().max() < 1e-6, name
            turned = sphere.angle(w.double(), (after.double() - w.double())).max().item()
            if caps[name] is not None:
                assert turned <= DEGREE * min(1.0, t / 4) + 1e-6, (name, t)  # 0.1 * 40 steps of warmup


def test_item_3_softmax_scale_is_sqrt_d_k_and_queries_and_keys_are_normalized_and_scaled(ngpt, gpt, monkeypatch):
    seen = {}

    def spy(q, k, v, scale, ids):
        seen.update(q=q, k=k, scale=scale)
        return causal(q, k, v, scale, ids)

    causal = attention.causal
    monkeypatch.setattr(attention, "causal", spy)
    tokens = torch.randint(0, 256, (1, 8))
    ngpt(tokens)
    d_k = ngpt.config.head_dim
    assert seen["scale"] == pytest.approx(math.sqrt(d_k))
    for x in (seen["q"], seen["k"]):  # s_qk = 1: unit vectors
        torch.testing.assert_close(torch.linalg.vector_norm(x, dim=-1), torch.ones(x.shape[:-1]))
    gpt(tokens)
    assert seen["scale"] == pytest.approx(1 / math.sqrt(d_k))
    for s in scales(ngpt, "s_qk"):
        assert (s.init, s.scale) == (1.0, 1.0) and torch.equal(s(), torch.ones(d_k))


def test_item_4_s_u_scales_the_intermediate_state_and_starts_at_one(ngpt):
    found = scales(ngpt, "s_u")
    assert len(found) == 2 * ngpt.config.pattern.count("E")  # one for the routed experts, one for the shared expert
    for s in found:
        assert (s.init, s.scale) == (1.0, 1.0) and torch.equal(s(), torch.ones(s.weight.shape))


def test_item_5_every_recombination_is_a_normalized_step_with_alpha_of_a_tenth(ngpt):
    found = scales(ngpt, "alpha")
    assert len(found) == len(ngpt.config.pattern)
    for s in found:
        assert (s.init, s.scale) == (0.1, 1.0)
        torch.testing.assert_close(s(), torch.full((D,), 0.1))
    h = sphere.random(2, 5, D)
    for block in ngpt.blocks:
        out = block.mixer(h, None, None)
        f = F.normalize(out[0] if isinstance(out, tuple) else out, dim=-1)
        torch.testing.assert_close(block(h)[0], F.normalize(h + 0.1 * (f - h), dim=-1))


def test_item_6_s_mamba_and_s_moe_start_at_half_the_root_of_d_model(ngpt):
    for name, letter in (("s_mamba", "M"), ("s_moe", "E")):
        found = scales(ngpt, name)
        assert len(found) == ngpt.config.pattern.count(letter)
        for s in found:
            assert s.scale == 1.0 and s().tolist() == [0.5 * math.sqrt(D)]


def test_item_7_logits_are_scaled_by_s_z_which_starts_at_one(ngpt):
    (s,) = scales(ngpt, "s_z")
    assert (s.init, s.scale) == (1.0, 1.0) and torch.equal(s(), torch.ones(256))
    h = sphere.random(3, D)
    torch.testing.assert_close(ngpt.head(h), F.linear(h, ngpt.head.weight))


def test_item_8_lgp_with_q_1_takes_the_mean_of_s_z_out_of_the_gradient():
    model = ng.LanguageModel(ng.preset("pico"))
    assert (model.head.q, model.head.form) == (1.0, "ratio")
    with torch.no_grad():
        model.head.s_z.weight.uniform_(5, 15)
    s_z = model.head.s_z.weight
    h, targets = sphere.random(4, D).requires_grad_(), torch.randint(0, 256, (4,))
    plain = F.cross_entropy(s_z * F.linear(h, model.head.weight), targets)
    inputs = (h, model.head.weight, s_z)
    lgp, ordinary = (torch.autograd.grad(x, inputs) for x in (model.head.loss(h, targets), plain))
    mean = s_z.detach().mean()
    for got, want in zip(lgp, (ordinary[0] / mean, ordinary[1] / mean, ordinary[2])):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


def test_item_9_exploration_noise_at_every_step_from_the_first_on_every_unit_row(ngpt):
    optimizer, _ = recipe.build(ngpt, 100)
    for group in optimizer.param_groups:
        pmen = group["pmen"]
        assert (pmen is not None) == (group["unit_dim"] is not None)
        if pmen is not None:
            assert (pmen.profile, pmen.start, pmen.every, pmen.tau, pmen.reference) == ("step", 1, 1, 1e-10, "row")
            assert pmen.strength == 10.0
    assert all(row.pmen == is_unit(row) for row in rows(ngpt))
    off = {row.name for row in rows(ngpt, pmen_embeddings=False) if is_unit(row) and not row.pmen}
    assert off == {"embedding.weight", "head.weight"}


def test_item_10_growth_clipping_after_500_steps_on_every_parameter(ngpt):
    optimizer, _ = recipe.build(ngpt, 100)
    for group in optimizer.param_groups:
        assert (group["smgc"].R, group["smgc"].s_min, group["smgc"].start) == (100.0, 1e-10, 500)


def test_item_11_scales_in_units_of_one_with_their_own_peak_rates(ngpt):
    for name, lr in (("s_z", 0.5), ("alpha", 0.2), ("s_qk", 0.2)):
        assert {s.scale for s in scales(ngpt, name)} == {1.0}
        assert {row.lr for row in rows(ngpt, f"{name}.weight")} == {lr}
    for name in ("s_u", "s_mamba", "s_moe"):  # of which the paper says nothing
        assert {row.lr for row in rows(ngpt, f"{name}.weight")} == {GLOBAL}
    wide = ng.preset("pico", d_model=128)
    assert rows(ng.LanguageModel(wide), "s_z")[0].lr == 0.5  # it does not follow the width


# ---- the experimental setup --------------------------------------------------------------------------------------------
def test_the_global_rate_is_C_over_the_root_of_the_width():
    for name, C in {"1B": 0.24, "2B": 0.24, "4B": 0.24, "7B": 0.22, "14B": 0.18, "30B": 0.12}.items():
        with torch.device("meta"):
            model = ng.LanguageModel(ng.preset(name))
        (row,) = [row for row in recipe.table(model) if row.name == "embedding.weight"]
        assert row.lr == pytest.approx(C / math.sqrt(model.config.d_model))


def test_expert_rows_learn_half_again_as_fast_and_router_rows_twice(ngpt):
    factor = {"experts.up": 1.5, "experts.down": 1.5, "shared.up": 1.5, "shared.down": 1.5, "router.weight": 2.0}
    for row in rows(ngpt):
        if is_unit(row):
            times = next((f for part, f in factor.items() if row.name.endswith(part)), 1.0)
            assert row.lr == pytest.approx(times * GLOBAL), row.name


def test_a_dense_mlp_is_not_an_expert():
    model = ng.LanguageModel(ng.preset("pico-dense"))
    assert {row.lr for row in rows(model, "mixer.up") + rows(model, "mixer.down")} == {0.24 / 8}


def test_s_z_and_all_of_mamba_except_out_proj_are_warmed_up(ngpt):
    warm = {row.name for row in rows(ngpt) if row.warmup}
    assert {row.warmup for row in rows(ngpt)} == {0.0, 0.1}
    mamba = {
        f"blocks.{i}.mixer.{name}"
        for i, letter in enumerate(ngpt.config.pattern)
        if letter == "M"
        for name in ("in_proj", "conv_weight", "conv_bias", "A_log", "D", "dt_bias", "s_mamba.weight")
    }
    assert warm == mamba | {"head.s_z.weight"}


def test_rates_decay_logarithmically_to_zero_and_the_cap_does_not(ngpt):
    T = 200
    optimizer, schedule = recipe.build(ngpt, T)
    groups = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    order = {id(group): i for i, group in enumerate(optimizer.param_groups)}
    for t in (1, 7, 20, 100, 200):
        now = schedule.at(t)
        for name, lr, warm in (("blocks.1.mixer.router.weight", 2 * GLOBAL, False), ("head.s_z.weight", 0.5, True)):
            eta = 1 - math.log(1 + (t / T) / 0.05) / math.log(1 + 1 / 0.05)
            expected = lr * eta * (min(1, t / 20) if warm else 1)
            assert now[order[id(groups[name])]][0] == pytest.approx(expected, abs=1e-12)
        cap = now[order[id(groups["blocks.1.mixer.router.weight"])]][1]
        assert cap == pytest.approx(DEGREE * min(1, t / 20))
    # the constructor wrote the values of step 1
    assert groups["head.s_z.weight"]["lr"] == pytest.approx(schedule.at(1)[order[id(groups["head.s_z.weight"])]][0])
    assert groups["head.s_z.weight"]["alpha"] == 0.5  # and GatedAdamW keeps the peak for decay="eta"


def test_moments_and_epsilons(ngpt):
    for group in recipe.param_groups(ngpt):
        assert (group["betas"], group["eps_gate"], group["eps_num"]) == ((0.975, 0.975), 1e-8, 1e-14)


# ---- the baseline ------------------------------------------------------------------------------------------------------
def test_the_baseline_is_adamw_with_decay_on_matrices_and_embeddings(gpt):
    optimizer, schedule = recipe.build(gpt, 1000)
    assert type(optimizer) is torch.optim.AdamW
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"], group["peak_lr"]) == ((0.9, 0.95), 1e-8, 2.2e-3) and "cap" not in group
    for row in rows(gpt):
        p = gpt.get_parameter(row.name)
        assert row.weight_decay == (0.1 if p.ndim > 1 and "conv" not in row.name else 0.0), row.name
        assert (row.unit_dim, row.cap, row.pmen, row.a, row.lr) == (None, None, False, 1.0, 2.2e-3)
    rate = [schedule.at(t)[0][0] / 2.2e-3 for t in (1, 50, 100, 800, 900, 1000)]
    assert rate == pytest.approx([0.01, 0.5, 1, 1, 0.505, 0.01])  # warmup, stable, linear decay to 1%
    lr = {"1B": 2.2e-3, "2B": 2.0e-3, "4B": 1.8e-3, "7B": 1.6e-3, "14B": 1.4e-3, "30B": 1.2e-3}
    for name, peak in lr.items():
        with torch.device("meta"):
            model = ng.LanguageModel(ng.preset(name, normalized=False))
        assert {row.lr for row in recipe.table(model)} == {peak}


def test_the_baselines_warmup_is_a_billion_tokens_but_at_most_a_tenth_of_the_run(gpt):
    def share(total_steps, **kw):
        return {row.warmup for row in rows(gpt, total_steps=total_steps, **kw)}

    assert share(50_000, tokens_per_step=4e6) == {250 / 50_000}
    assert share(1000, tokens_per_step=4e6) == {0.1}  # 250 steps would be a quarter
    assert share(1000) == share(None) == {0.1}
    _, schedule = recipe.build(gpt, 50_000, tokens_per_step=4e6)
    assert schedule.at(125)[0][0] == pytest.approx(1.1e-3) and schedule.at(250)[0][0] == pytest.approx(2.2e-3)


@pytest.mark.parametrize("name", ["1B", "30B"])
def test_on_the_ladder_the_runs_tokens_are_known_without_those_of_a_step(name):
    with torch.device("meta"):
        model = ng.LanguageModel(ng.preset(name, normalized=False))
    share = 1e9 / model.config.tokens
    for kw, warmup in (({}, share), ({"warmup_tokens": 1e12}, 0.1), ({"warmup_share": 1e-4}, 1e-4)):
        assert {row.warmup for row in recipe.table(model, **kw)} == {warmup}
    assert {row.warmup for row in recipe.table(model, 1000, tokens_per_step=4e7)} == {1e9 / 4e7 / 1000}
    assert {row.warmup for row in recipe.table(model, tokens_per_step=4e7)} == {0.1}  # of how many steps?
    T = 10**6
    for kind in ("group", "before"):
        _, schedule = recipe.build(model, T, warmup=kind)
        half, whole = (schedule.at(int(T * share * part))[0][0] / model.config.gpt_lr for part in (0.5, 1))
        assert (half, whole) == pytest.approx((0.5, 1.0), rel=1e-3)


@pytest.mark.parametrize("warmup", ["group", "before", "all"])
def test_the_table_says_the_warmups_that_the_schedule_does(ngpt, gpt, warmup):
    for model in (ngpt,) if warmup == "all" else (ngpt, gpt):
        optimizer, schedule = recipe.build(model, 1000, schedule=lambda r: 1.0, warmup=warmup)
        lr = {n: rate for group, (rate, _) in zip(optimizer.param_groups, schedule.at(50)) for n in group["param_names"]}
        for row in rows(model, warmup=warmup):
            assert lr[row.name] == pytest.approx(row.lr * (0.5 if row.warmup else 1.0)), row.name


def test_clipping_is_for_the_loop_and_only_the_baseline_has_it(ngpt, gpt):
    assert recipe.numbers_for(ngpt).clip_norm is None and recipe.numbers_for(gpt).clip_norm == 1.0


# ---- groups ------------------------------------------------------------------------------------------------------------
PRESETS = ["pico", "pico-dense"]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("name", PRESETS)
def test_groups_are_a_partition_of_the_parameters(name, normalized):
    model = ng.LanguageModel(ng.preset(name, normalized=normalized, activation="swiglu"))
    groups = recipe.param_groups(model)
    held = [p for group in groups for _, p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    named = dict(model.named_parameters())
    assert all(named[n] is p for group in groups for n, p in group["params"])
    assert [row.name for row in recipe.table(model)] == list(named)
    assert {row.name: row.shape for row in recipe.table(model)} == {n: tuple(p.shape) for n, p in named.items()}


@pytest.mark.parametrize("option", [{"vector_s_mamba": True, "vector_s_moe": True}, {"s_u_per_expert": True}, {"lgp_q": 0.5}])
def test_options_of_the_model_do_not_change_the_recipe(ngpt, option):
    model = ng.LanguageModel(ng.preset("pico", **option))
    for a, b in zip(recipe.table(ngpt), recipe.table(model)):
        assert {**dict(a), "shape": None} == {**dict(b), "shape": None}


def test_groups_work_with_the_optimizer_by_hand(ngpt):
    by_hand, (built, _) = ng.GatedAdamW(recipe.param_groups(ngpt)), recipe.build(ngpt, 10)
    ignore = ("params", "lr", "cap", "initial_lr")  # the schedule has written those of step 1
    for a, b in zip(by_hand.param_groups, built.param_groups):
        assert {k: v for k, v in a.items() if k not in ignore} == {k: v for k, v in b.items() if k not in ignore}


def test_wrapped_and_sharded_models_are_recognized(ngpt, tmp_path):
    expected = [(g["label"], g["lr"], len(g["params"])) for g in recipe.param_groups(ngpt)]

    def groups(model):
        return [(g["label"], g["lr"], len(g["params"])) for g in recipe.param_groups(model)]

    assert groups(torch.compile(ngpt)) == expected
    holder = nn.Module()
    holder.module = ngpt
    assert groups(holder) == expected

    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = ng.LanguageModel(ng.preset("pico"))
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for block in model.blocks:
            for module in (*block.mixer.children(), block.mixer, block):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert groups(model) == expected
    finally:
        destroy_process_group()


def test_overrides_reach_their_place(ngpt, gpt):
    one = {row.name: row for row in rows(ngpt, C=0.48, s_z_lr=1.0, alpha_lr=0.3, s_qk_lr=0.4, expert_multiplier=1.0,
                                         router_multiplier=1.0, cap_degrees=2.0, a=1.0, weight_decay=0.01)}  # fmt: skip
    assert one["embedding.weight"].lr == one["blocks.1.mixer.experts.up"].lr == pytest.approx(2 * GLOBAL)
    assert one["blocks.1.mixer.router.weight"].lr == pytest.approx(2 * GLOBAL)
    assert (one["head.s_z.weight"].lr, one["blocks.0.alpha.weight"].lr, one["blocks.5.mixer.s_qk.weight"].lr) == (1.0, 0.3, 0.4)
    assert one["blocks.0.mixer.in_proj"].cap == pytest.approx(2 * DEGREE) and {row.a for row in one.values()} == {1.0}
    assert one["blocks.0.mixer.in_proj"].weight_decay == 0.01 and one["blocks.0.mixer.D"].weight_decay == 0
    off = recipe.param_groups(ngpt, cap_degrees=None, pmen=None, smgc=None, tangent=False, betas=(0.9, 0.95), decay="eta")
    for group in off:
        assert (group["cap"], group["pmen"], group["smgc"], group["tangent"]) == (None, None, None, False)
        assert (group["betas"], group["decay"]) == ((0.9, 0.95), "eta")
    _, schedule = recipe.build(ngpt, 10, rho=math.inf)
    assert schedule.at(5)[0][0] == pytest.approx(GLOBAL / 2)
    for choice in ("cosine", cosine, partial(cosine, eta_min=0.0)):
        assert recipe.build(ngpt, 10, schedule=choice)[1].at(5)[0][0] == pytest.approx(GLOBAL / 2)
    assert recipe.build(ngpt, 100, warmup="before")[1].at(5)[0][0] == pytest.approx(GLOBAL / 2)
    assert {row.warmup for row in rows(ngpt, warmup="all")} == {0.1}
    eta = [recipe.build(ngpt, 100, warmup=warmup)[1].at(5)[0][0] for warmup in ("group", "all")]
    assert eta[1] == pytest.approx(eta[0] / 2)  # a factor on the decayed rate
    assert recipe.build(gpt, 10, lr=1e-3, weight_decay=0.2)[0].param_groups[1]["weight_decay"] == 0.2
    base = recipe.numbers_for(ngpt, C=0.1)
    assert recipe.numbers_for(ngpt, base, rho=0.2) == recipe.Settings(C=0.1, rho=0.2)
    assert rows(ngpt, base=base)[0].lr == pytest.approx(0.1 / 8)


@pytest.mark.parametrize("normalized", [True, False])
def test_the_recipe_learns_and_a_resumed_run_goes_on_the_same(normalized):
    def make():
        torch.manual_seed(3)
        model = ng.LanguageModel(ng.preset("pico-dense", normalized=normalized, pattern="*-"))
        return model, *recipe.build(model, 12)

    def run(model, optimizer, schedule, steps, seed):
        torch.manual_seed(seed)
        train(model, optimizer, schedule, steps)

    whole = make()
    start = whole[0].loss(tokens := torch.arange(64).reshape(2, 32), tokens).item()
    run(*whole, 6, seed=1)
    torch.save([x.state_dict() for x in whole], file := io.BytesIO())
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    run(*whole, 6, seed=2)
    again = make()
    for x, state in zip(again, saved):
        x.load_state_dict(state)
    run(*again, 6, seed=2)
    for a, b in zip(whole[0].parameters(), again[0].parameters()):
        assert torch.equal(a, b)
    assert whole[2].t == 13 and [g["lr"] for g in whole[1].param_groups] == [g["lr"] for g in again[1].param_groups]
    assert whole[0].loss(tokens, tokens).item() < start


# ---- to be read --------------------------------------------------------------------------------------------------------
def test_a_row_is_read_by_attribute_or_by_column_and_the_text_merges_equal_layers(ngpt):
    row = recipe.table(ngpt)[0]
    assert row["lr"] == row.lr and dict(row)["name"] == "embedding.weight"
    assert row.keys() == ["name", "shape", "unit_dim", "lr", "warmup", "a", "cap", "pmen", "weight_decay"]
    text = recipe.format_table(recipe.table(ngpt)).splitlines()
    assert len(text) == 26 and text[0].split()[:3] == ["parameter", "x", "shape"]
    (line,) = [line for line in text if line.startswith("blocks.*.mixer.router.weight")]
    assert line.split() == ["blocks.*.mixer.router.weight", "3", "8x64", "-1", "0.06", "-", "0.5", "1°", "yes", "-"]
    counted = sum(int(line.split()[1]) for line in text[1:])
    assert counted == len(list(ngpt.parameters()))


# ---- bad input ---------------------------------------------------------------------------------------------------------
def test_errors_state_the_rule(ngpt, gpt, monkeypatch):
    with pytest.raises(ValueError, match=r"no 'learning_rate'\. It has: C, "):
        recipe.build(ngpt, 10, learning_rate=1)
    with pytest.raises(ValueError, match="Baseline has no 'C'"):
        recipe.build(gpt, 10, C=0.24)
    with pytest.raises(ValueError, match="this model needs Baseline"):
        recipe.build(gpt, 10, recipe.Settings())
    with pytest.raises(ValueError, match=r"C must be a positive number.*got -1"):
        recipe.table(ngpt, C=-1)
    for change, rule in (
        (dict(C="0.2"), r"C must be a positive number or None; got '0\.2'"),
        (dict(expert_multiplier=None), "expert_multiplier must be a positive number; got None"),
        (dict(betas=(0.9, 1.0)), r"betas must be two numbers in \[0, 1\)"),
        (dict(warmup_share="0.1"), "warmup_share must be a share of training"),
        (dict(pmen={"tau": 1e-3}), r"pmen must be PMEN\(\.\.\.\) or None"),
    ):
        with pytest.raises(ValueError, match=rule):
            recipe.build(ngpt, 10, **change)
    for change, rule in (
        (dict(weight_decay=-1.0), r"weight_decay must be a number >= 0; got -1\.0"),
        (dict(weight_decay="0.1"), "weight_decay must be a number >= 0; got '0.1'"),
        (dict(eps=-1e-3), r"eps must be a number >= 0; got -0\.001"),
        (dict(eps="1e-8"), "eps must be a number >= 0; got '1e-8'"),
        (dict(eta_min=-0.1), "eta_min must be a number >= 0"),
        (dict(eta_min=1.5), "eta_min and wsd_decay must be at most 1; got 1.5"),
        (dict(wsd_decay=0.0), "wsd_decay must be a positive number"),
        (dict(wsd_decay=2), "wsd_decay must be at most 1"),
        (dict(warmup="all"), "GPT's warmup must be 'group' .*got 'all'"),
    ):
        with pytest.raises(ValueError, match=rule):
            recipe.table(gpt, **change)
    for change in (dict(tangent="no"), dict(tangent=1)):
        with pytest.raises(ValueError, match=f"{next(iter(change))} must be True or False; got"):
            recipe.table(ngpt, **change)
    with pytest.raises(ValueError, match="weight_decay must be a number >= 0"):
        recipe.table(ngpt, weight_decay=-1)
    of_a_config = [lambda m: recipe.scaled(m, 10), recipe.numbers_for]  # the numbers need no model
    for what in (gpt.config, "pico", None):
        for call in (recipe.table, lambda m: recipe.build(m, 10), *(of_a_config if what is not gpt.config else ())):
            with pytest.raises(ValueError, match=r"recipe: expected a model.*got"):
                call(what)
    for steps in (0, "100", 2.5, None):
        with pytest.raises(ValueError, match="total_steps must be a number of optimizer steps"):
            recipe.build(gpt, steps, tokens_per_step=1e6)
    with pytest.raises(ValueError, match="total_steps must be a number of optimizer steps"):
        recipe.table(gpt, 0, tokens_per_step=1e6)
    assert recipe.numbers_for(ngpt, betas=[0.9, 0.95]).betas == (0.9, 0.95)  # a list, as JSON has it
    with pytest.raises(ValueError, match=r"total_steps.*got '10'"):
        recipe.scaled(ngpt, "10")
    with pytest.raises(ValueError, match="total_steps"):
        recipe.build(ngpt, 0)
    with pytest.raises(ValueError, match=r"warmup must be 'group' .*got 'first'"):
        recipe.build(ngpt, 10, warmup="first")
    with pytest.raises(ValueError, match="Linear needs a ModelConfig"):
        recipe.table(nn.Linear(2, 2))
    monkeypatch.delitem(recipe.TABLE, "Attention.q_proj")
    with pytest.raises(ValueError, match=r"covers blocks.5.mixer.q_proj. Add one: recipe.TABLE\['Attention.q_proj'\]"):
        recipe.table(ngpt)
    monkeypatch.setitem(recipe.TABLE, "Attention.q_proj", recipe.Line())
    with pytest.raises(ValueError, match=r"TABLE has unit=False for Attention\.q_proj"):
        recipe.table(ngpt)


def test_a_parameter_in_two_modules_is_named():
    model = ng.LanguageModel(ng.preset("pico"))
    model.head.weight = model.embedding.weight
    with pytest.raises(ValueError, match=r"shared by two modules: \['embedding.weight'\]"):
        recipe.table(model)


# ---- small runs ------------------------------------------------------------------------------------------------------
NORMALIZED = pytest.mark.parametrize("normalized", [True, False])


@NORMALIZED
@pytest.mark.parametrize("name", ["1B", "30B"])
def test_from_the_ladders_width_on_a_long_run_has_the_published_numbers_to_the_bit(name, normalized):
    config = ng.preset(name, normalized=normalized)
    published = recipe.Settings() if normalized else recipe.Baseline()
    assert all(recipe.scaled(config, steps) == published for steps in (16_000, 21_000, 10**6))  # 1B has 21,000
    short = recipe.scaled(config, 2000)
    assert short.betas == (0.8, published.betas[1])
    assert replace(short, betas=published.betas) == published  # of a wide model nothing else changes


@NORMALIZED
def test_the_memory_and_C_move_one_way_with_length_and_width(normalized):
    def numbers(d_model, steps):
        return recipe.scaled(ng.preset("pico", normalized=normalized, d_model=d_model), steps)

    widths, lengths = (16, 64, 128, 320, 640, 768, 1024), (1, 100, 750, 2000, 8000, 16_000, 10**6)
    table = [[numbers(d, T) for T in lengths] for d in widths]
    beta1 = [[x.betas[0] for x in row] for row in table]
    assert all(row == sorted(row) for row in beta1) and all(list(c) == sorted(c) for c in zip(*beta1))
    published = recipe.numbers_for(ng.preset("pico", normalized=normalized)).betas
    assert max(map(max, beta1)) == published[0] and min(map(min, beta1)) == (0.6 if normalized else 0.8)
    assert {x.betas[1] for row in table for x in row} == {published[1]}
    if normalized:
        C = [[0.24 if x.C is None else x.C for x in row] for row in table]
        assert all(row == sorted(row, reverse=True) for row in C) and all(list(c) == sorted(c) for c in zip(*C))
        assert max(map(max, C)) == 0.24 and min(map(min, C)) > 0.05
        assert [row[0].warmup for row in table] == ["all"] * 5 + ["group"] * 2


def test_the_rule_in_figures():
    numbers = recipe.scaled(ng.preset("pico", d_model=192), 12_000)  # w = 1/4
    assert numbers.betas == pytest.approx((1 - 1 / 7.5, 0.975))
    assert numbers.C == pytest.approx(0.24 * (750 / 12_000) ** (3 / 8)) and numbers.warmup == "all"
    same = {"betas": (0.975, 0.975), "C": None, "warmup": "group"}
    assert replace(numbers, **same) == recipe.Settings()  # nothing else changes
    gpt = recipe.scaled(ng.preset("pico", normalized=False, d_model=192), 12_000)
    assert gpt.betas == pytest.approx((1 - 1 / 7.5, 0.95)) and replace(gpt, betas=(0.9, 0.95)) == recipe.Baseline()


def test_a_model_and_its_config_have_the_same_numbers_and_what_was_given_is_where_they_start():
    config = ng.preset("pico-dense")
    assert recipe.scaled(ng.LanguageModel(config), 100) == recipe.scaled(config, 100)
    base = recipe.Settings(C=0.1, betas=(0.5, 0.999), warmup="before", rho=0.2)
    assert recipe.scaled(config, 700, base) == base  # already shorter, and warmed up
    assert recipe.scaled(config, 8000, base).C == pytest.approx(0.1 / 0.24 * recipe.scaled(config, 8000).C)
    with pytest.raises(ValueError, match="this model needs Settings, got Baseline"):
        recipe.scaled(config, 100, recipe.Baseline())


def test_what_is_overridden_is_not_scaled():
    model = ng.LanguageModel(ng.preset("pico-dense"))
    numbers = ng.recipe.scaled(model, 10_000, betas=(0.5, 0.6), C=0.3, warmup="group")
    assert numbers.betas == (0.5, 0.6) and numbers.C == 0.3 and numbers.warmup == "group"
    with pytest.raises(ValueError, match="has no 'nothing'"):
        ng.recipe.scaled(model, 100, nothing=1)
    with pytest.raises(ValueError, match="steps >= 1; got 0"):
        ng.recipe.scaled(model, 0)


# ---- switches that the paper leaves open --------------------------------------------------------------------------------
def test_the_default_table_is_unchanged_number_by_number():
    """recipe_table.json was written before there were switches; a key that came later must be at its neutral value."""
    expected = json.loads(Path(__file__).with_name("recipe_table.json").read_text())
    seen = set()
    for name, normalized in product(("pico", "30B"), (True, False)):
        with torch.device("meta"):
            model = ng.LanguageModel(ng.preset(name, normalized=normalized))
        for group in recipe.param_groups(model):
            for label in group["label"].split(", "):
                key = f"{name}{'' if normalized else ' GPT'} {label}"
                plain = {k: asdict(v) if is_dataclass(v) else v for k, v in group.items() if k not in ("params", "label")}
                plain = json.loads(json.dumps(plain))
                assert {k: plain.pop(k) for k in expected[key]} == expected[key], key
                assert plain in ({"transport": None}, {}), key
                seen.add(key)
    assert seen == expected.keys()


def test_noise_of_the_two_embeddings_is_set_for_each(ngpt):
    own = ng.PMEN(tau=0.0, strength=3.0)
    for given, want in (
        (True, (ng.PMEN(), ng.PMEN())), (False, (None, None)), (own, (own, own)), ((False, True), (None, ng.PMEN())),
        ((own, False), (own, None)), ((True, own), (ng.PMEN(), own)),
    ):  # fmt: skip
        noise = {n: g["pmen"] for g in recipe.param_groups(ngpt, pmen_embeddings=given) for n, _ in g["params"]}
        assert (noise["embedding.weight"], noise["head.weight"]) == want
        assert noise["blocks.0.mixer.in_proj"] == ng.PMEN()
    with pytest.raises(ValueError, match=r"smooth profile.*needs tau >= .*For tau = 0 use profile='step'"):
        ng.PMEN(tau=0.0, profile="smooth")
    for bad in ("no", (True,), (True, "yes"), None, 1):
        with pytest.raises(ValueError, match="pmen_embeddings must be True or False, or PMEN"):
            recipe.Settings(pmen_embeddings=bad)


def test_the_alpha_of_a_mamba_block_can_be_warmed_up_with_it(ngpt):
    warm = {
        row.name
        for row in rows(ngpt, ".alpha", lines={"Residual[Mamba2].alpha": recipe.Line("alpha", warmup=True)})
        if row.warmup
    }
    assert warm == {f"blocks.{i}.alpha.weight" for i, x in enumerate(ngpt.config.pattern) if x == "M"}
    all_of_them = rows(ngpt, ".alpha", lines={"Residual.alpha": recipe.Line("alpha", warmup=True)})
    assert all(row.warmup == 0.1 for row in all_of_them) and len(all_of_them) == len(ngpt.config.pattern)
    for bad in (
        {"Residual[Mamba2].beta": recipe.Line()},
        {"Head.s_z": 3},
        {"Head.s_z": recipe.Line("fast")},
        {3: recipe.Line()},
        7,
    ):
        with pytest.raises(ValueError, match="recipe: lines"):
            recipe.Settings(lines=bad)
    for wrong in ("Residual[mamba2].alpha", "Residual[Mamba].alpha", "Mamba2[Residual].alpha", "Residuals.alpha"):
        with pytest.raises(ValueError, match=r"names no parameter of this model. A key is a class and an attribute"):
            recipe.table(ngpt, lines={wrong: recipe.Line("alpha")})
    dense = ng.LanguageModel(ng.preset("pico-dense"))  # without a Mamba block, its line has no effect and is no mistake
    assert recipe.table(dense, lines={"Residual[Mamba2].alpha": recipe.Line("alpha", warmup=True)}) == recipe.table(dense)


def test_gate_and_transport_reach_every_group_they_concern(ngpt):
    for group in recipe.build(ngpt, 10, eps_gate="auto", transport="parallel")[0].param_groups:
        assert group["eps_gate"] == ng.AutoGate() and group["transport"] == ("parallel" if group["unit_dim"] == -1 else None)
    for bad in (dict(eps_gate=0.0), dict(eps_gate="automatic"), dict(eps_gate=math.nan), dict(transport="yes")):
        with pytest.raises(ValueError, match=f"recipe: {next(iter(bad))} must be"):
            recipe.Settings(**bad)


def test_the_rules_of_others_agree_with_the_paper_at_its_own_size():
    config = ng.preset("1B")
    for rule in recipe.RULES:
        found = recipe.scaled(config, 16_000, rule=rule)
        rates, paper = found.rates(config), recipe.Settings().rates(config)
        assert all(rates[name] == pytest.approx(paper[name]) for name in paper), rule
    with pytest.raises(ValueError, match="rule must be one of ours, paper, nugpt, hyperp; got 'mup'"):
        recipe.scaled(config, 100, rule="mup")
    assert recipe.scaled(ng.preset("pico"), 100, rule="paper") == recipe.Settings()
    assert recipe.scaled(ng.preset("pico"), 100, rule="ours") == recipe.scaled(ng.preset("pico"), 100)


@pytest.mark.parametrize("rule, hidden, embedding, length", [("nugpt", -0.75, -0.5, -1 / 3), ("hyperp", -0.5, -0.5, -0.32)])
def test_the_rules_of_others_have_their_published_exponents(rule, hidden, embedding, length):
    def rates(d, T):
        config = ng.preset("1B", d_model=d)
        return recipe.scaled(config, T, rule=rule).rates(config)

    for d, T in ((96, 1000), (3072, 64_000)):
        one, wide, long = rates(d, T), rates(4 * d, T), rates(d, 8 * T)
        for name, power in (("global", hidden), ("expert", hidden), ("router", hidden), ("embedding", embedding)):
            assert wide[name] / one[name] == pytest.approx(4**power) and long[name] / one[name] == pytest.approx(8**length)
        assert wide["s_z"] == one["s_z"] == 0.5
    assert recipe.scaled(ng.preset("pico", normalized=False), 300, rule=rule) == recipe.scaled(
        ng.preset("pico", normalized=False), 300
    )


def test_nugpts_initialization_follows_depth_and_width():
    config = ng.preset("1B", d_model=3072, pattern="M*E" * 23)
    got = recipe.initialized(config)
    assert (got.alpha_init, got.s_z_init) == (pytest.approx(0.05 / 3), 2.0)
    assert recipe.initialized(config, "hyperp") is config
    with pytest.raises(ValueError, match="ModelConfig of an nGPT"):
        recipe.initialized(ng.preset("pico", normalized=False))


@pytest.mark.parametrize("form", ["ratio", "power"])
def test_a_positive_s_z_carries_a_fractional_q_through_model_recipe_and_file(form, tmp_path):
    """A rate so high that a plain s_z would cross zero: the positive one does not, and saves, loads and trains on."""
    torch.manual_seed(3)
    model = ng.LanguageModel(ng.preset("pico", lgp_q=0.5, lgp_form=form))
    optimizer, schedule = recipe.build(model, 60, s_z_lr=20.0, warmup_share=0.0, cap_degrees=None)
    train(model, optimizer, schedule, 8)
    assert model.head.s_z.weight.min() < 0 < model.head.s_z().min()
    assert [row.lr for row in recipe.table(model) if row.name == "head.s_z.weight"] == [0.5]
    again = ng.load(ng.save(model, tmp_path / "model"))
    tokens = torch.randint(0, 256, (1, 9))
    torch.testing.assert_close(again(tokens), model(tokens))
    assert again.config.lgp_q == 0.5 and torch.equal(again.head.s_z(), model.head.s_z())
    plain = ng.LanguageModel(ng.preset("pico", positive_s_z=True))
    assert type(plain.head.s_z).__name__ == "PositiveScale" and plain.head.q == 1.0
    with pytest.raises(ValueError, match="positive_s_z must not be False for the non-integer"):
        ng.preset("pico", lgp_q=0.5, positive_s_z=False)


def test_dt_can_be_left_unscaled():
    torch.manual_seed(4)
    for options in ({}, {"vector_s_mamba": True}):
        scaled, plain = (ng.LanguageModel(ng.preset("pico", scale_dt=x, **options)).blocks[0].mixer for x in (True, False))
        with torch.no_grad():
            plain.load_state_dict(scaled.state_dict())
            h, H = sphere.random(2, 7, D), scaled.widths[2]
            assert not torch.allclose(scaled(h), plain(h))
            scaled.in_proj[-H:] /= scaled.s_mamba().mean()  # a scalar's effect on dt taken back by hand
            torch.testing.assert_close(scaled(h), plain(h))
