"""Other people's models: which axis recipe.groups_for finds in a Llama, a GPT-2, a ViT, what it refuses, and that it trains."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ngpt_core as ng
from ngpt_core import recipe
from ngpt_core.hf.convert import _table as conversion

LLAMA = {
    "embed_tokens": -1, "q_proj": -1, "k_proj": -1, "v_proj": -1, "o_proj": 0, "gate_proj": -1, "up_proj": -1, "down_proj": 0,
    "input_layernorm": None, "post_attention_layernorm": None, "norm": None, "lm_head": -1, "q_norm": None, "k_norm": None,
}  # fmt: skip
GPT2 = {
    "wte": -1, "wpe": None, "ln_1": None, "ln_2": None, "ln_f": None, "lm_head": -1,
    "attn.c_attn": 0, "attn.c_proj": -1, "mlp.c_fc": 0, "mlp.c_proj": -1,
}  # fmt: skip
VIT = {
    "cls_token": None, "position_embeddings": None, "projection": 0, "q_proj": -1, "k_proj": -1, "v_proj": -1, "o_proj": 0,
    "fc1": -1, "fc2": 0, "layernorm_before": None, "layernorm_after": None, "layernorm": None, "classifier": -1,
}  # fmt: skip
MIXTRAL = {**LLAMA, "mlp.gate": -1, "gate_up_proj": -1, "experts.down_proj": -2}
TIMM = {
    "cls_token": None, "pos_embed": None, "patch_embed.proj": 0, "qkv": -1, "attn.proj": 0, "fc1": -1, "fc2": 0, "norm": None,
    "norm1": None, "norm2": None, "head": -1,
}  # fmt: skip
NEOX = {
    "embed_in": -1, "query_key_value": -1, "attention.dense": 0, "dense_h_to_4h": -1, "dense_4h_to_h": 0, "embed_out": -1,
    "lm_head": -1, "input_layernorm": None, "post_attention_layernorm": None, "final_layer_norm": None,
}  # fmt: skip


class TimmBlock(nn.Module):
    """timm's names of a ViT's block."""

    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)


class TimmViT(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.embed_dim = d
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, d)), nn.Parameter(torch.zeros(1, 5, d))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, d, 8, 8)
        self.blocks, self.norm, self.head = nn.Sequential(TimmBlock(d), TimmBlock(d)), nn.LayerNorm(d), nn.Linear(d, 10)


def made(name: str, **sizes) -> nn.Module:
    if name == "TimmViT":
        return TimmViT()
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    common = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    words = dict(vocab_size=40, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
    kinds = {
        "Llama": ("LlamaForCausalLM", common | words),
        "Mistral": ("MistralForCausalLM", common | words),
        "Qwen2": ("Qwen2ForCausalLM", common | words),
        "Qwen3": ("Qwen3ForCausalLM", common | words | {"head_dim": 8}),
        "Mixtral": ("MixtralForCausalLM", common | words | {"num_local_experts": 4}),
        "GPT2": ("GPT2LMHeadModel", dict(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0)),
        "Gemma3": ("Gemma3ForCausalLM", common | words | {"head_dim": 8}),
        "GPTNeoX": ("GPTNeoXForCausalLM", common | {"vocab_size": 40}),
        "Mamba2": (
            "Mamba2ForCausalLM",
            dict(hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=2, num_hidden_layers=1, vocab_size=40),
        ),
        "ViT": ("ViTForImageClassification", common | {"image_size": 16, "patch_size": 8}),
    }
    model, options = kinds[name]
    kind = getattr(transformers, model)
    return kind(kind.config_class(**(options | sizes)))


def expected(table: dict, name: str) -> int | None:
    """The axis in the table: of the longest of its keys that ends the parameter's name, without .weight; None for biases."""
    own = name.removesuffix(".weight")
    if own.endswith(".bias"):
        return None
    return table[max((key for key in table if f".{own}".endswith(f".{key}")), key=len)]


MODELS = {
    "Llama": LLAMA, "Mistral": LLAMA, "Qwen2": LLAMA, "Qwen3": LLAMA, "Mixtral": MIXTRAL, "GPT2": GPT2, "ViT": VIT,
    "TimmViT": TIMM, "GPTNeoX": NEOX,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_embedding_axis_of_every_matrix_is_found(name):
    model = made(name)
    groups = recipe.groups_for(model)
    found = {row.name: row.unit_dim for row in groups.rows}
    assert found == {n: expected(MODELS[name], n) for n, _ in model.named_parameters()}
    for row in groups.rows:
        assert row.unit_dim is None or row.shape[row.unit_dim] == 32
    held = [id(p) for group in groups for _, p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))


def test_a_unit_axis_is_the_one_that_meets_the_hidden_state():
    """By what the matrices do, not by names: scaling a vector along the axis scales one thing that is read or written."""
    model = made("Llama", num_attention_heads=4, head_dim=8)
    attention = model.model.layers[0].self_attn
    x = torch.randn(5, 32)
    with torch.no_grad():
        q, o = attention.q_proj(x), attention.o_proj(x)
        attention.q_proj.weight[3] *= 2  # a vector along -1
        attention.o_proj.weight[:, 3] *= 2  # a vector along 0
        assert torch.allclose(attention.q_proj(x)[:, 3], 2 * q[:, 3], atol=1e-6)
        written = attention.o_proj(x) - o
    column = attention.o_proj.weight[:, 3].detach() / 2
    assert torch.allclose(written, x[:, 3:4] * column, atol=1e-6)


def test_rates_warmups_caps_and_noise_are_the_recipes():
    rows = {row.name: row for row in recipe.groups_for(made("Mixtral", num_hidden_layers=1), C=0.12).rows}
    peak = 0.12 / math.sqrt(32)
    layer = "model.layers.0.mlp"
    rates = {f"{layer}.experts.down_proj": 1.5, f"{layer}.experts.gate_up_proj": 1.5, f"{layer}.gate.weight": 2.0}
    for name, row in rows.items():
        assert row.lr == pytest.approx(peak * rates.get(name, 1.0)) and row.warmup == 0
        unit = row.unit_dim is not None
        inside = unit and "embed_tokens" not in name and "lm_head" not in name
        assert (row.a, row.pmen, row.cap is not None) == (0.5 if unit else 1.0, unit, inside)
    nemotron = recipe.groups_for(ng.hf.to_nemotron_h(ng.LanguageModel(ng.preset("pico", normalized=False))))
    warm = {
        row.name.split(".")[-2] if row.name.endswith("weight") else row.name.split(".")[-1]: row.warmup for row in nemotron.rows
    }
    assert warm["in_proj"] == warm["A_log"] == warm["dt_bias"] == warm["conv1d"] == 0.1
    assert warm["out_proj"] == warm["embeddings"] == warm["up_proj"] == 0.0


def test_only_mambas_own_layer_is_warmed_up_and_any_kind_of_embedding_is_one():
    warm = {row.name.removeprefix("backbone."): row.warmup for row in recipe.groups_for(made("Mamba2")).rows}
    mixer = {name for name in warm if ".mixer." in name and "out_proj" not in name}
    assert {name for name, share in warm.items() if share} == mixer and "layers.0.mixer.A_log" in mixer
    (tied,) = [row for row in recipe.groups_for(made("Gemma3")).rows if "embed_tokens" in row.name]  # its own class
    assert tied.unit_dim == -1 and tied.cap is None


@pytest.mark.parametrize("options", [{}, dict(vector_s_moe=True, s_u_per_expert=True, C=0.12)], ids=["", "vectors"])
def test_an_ngpt_in_transformers_is_trained_like_the_same_model_here(options):
    model = ng.LanguageModel(dataclasses.replace(ng.preset("pico"), pattern="ME*-", ff=64, activation="swiglu", **options))
    pytest.importorskip("transformers")
    theirs = ng.hf.to_transformers(model)
    names = {mine: name for mine, name, *_ in conversion(model.config.pattern)}
    found = {row.name: row for row in recipe.groups_for(theirs).rows}
    ours = recipe.table(model)
    assert found.keys() == {names[row.name] for row in ours}
    for row in ours:
        other = found[names[row.name]]
        for field in ("lr", "warmup", "a", "cap", "pmen", "weight_decay"):
            assert getattr(other, field) == getattr(row, field), (row.name, field)
        assert (other.unit_dim is None) == (row.unit_dim is None), row.name


def test_it_prints_as_a_table_with_the_reasons():
    text = str(recipe.groups_for(made("GPT2")))
    lines = text.splitlines()
    assert lines[0].split() == "parameter x shape unit peak lr warmup a cap noise decay why".split()
    (row,) = [line for line in lines if "attn.c_proj.weight" in line]
    assert row.split()[:4] == ["transformer.h.*.attn.c_proj.weight", "2", "32x32", "-1"]
    assert row.endswith("writes (c_proj; square)")
    ours = recipe.format_table(recipe.table(ng.LanguageModel(ng.preset("pico"))))
    assert ours.splitlines()[0].endswith("decay")  # our own models need no reasons


class Puzzle(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.up_proj, self.twist = nn.Linear(8, 8), nn.Linear(8, 16), nn.Parameter(torch.randn(3, 8, 8))


def test_what_cannot_be_decided_is_refused_until_the_user_decides():
    model = Puzzle()
    with pytest.raises(ValueError, match=r"cannot tell.*twist \[3, 8, 8\], mixer.weight \[8, 8\]\. Say.*axes={'twist': -1}"):
        recipe.groups_for(model, 8)
    with pytest.raises(ValueError, match=r"in mixer.weight \[8, 8\]"):
        recipe.groups_for(model, 8, axes={"twist": -1})
    rows = {row.name: row for row in recipe.groups_for(model, 8, axes={"twist": -2, "mix*": None}).rows}
    assert (rows["twist"].unit_dim, rows["mixer.weight"].unit_dim, rows["up_proj.weight"].unit_dim) == (-2, None, -1)
    assert rows["mixer.weight"].why == "you decided"
    for call, message in {
        "no width": (lambda: recipe.groups_for(model), "Puzzle does not say its width"),
        "wrong width": (lambda: recipe.groups_for(nn.Linear(3, 4), 7), "no matrix of this model has an axis of length 7"),
        "no match": (lambda: recipe.groups_for(model, 8, axes={"twist": -1, "mixer.*": 0, "nothing": 0}), "matches 'nothing'"),
        "no axis": (lambda: recipe.groups_for(model, 8, axes={"twist": 5}), r"must be an axis of its shape \[3, 8, 8\]"),
        "no module": (lambda: recipe.groups_for([]), "takes a torch module"),
        "no count": (lambda: recipe.groups_for(model, 0), "integer >= 1; got 0"),
        "no number": (lambda: recipe.groups_for(model, 8, cat=1), "cat"),
    }.values():
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_frozen_parameters_tied_matrices_and_adapters():
    model = made("GPT2")  # lm_head is wte
    assert sum(row.name.endswith(("wte.weight", "lm_head.weight")) for row in recipe.groups_for(model).rows) == 1
    model.transformer.wte.weight.requires_grad_(False)
    assert not any("wte" in row.name for row in recipe.groups_for(model).rows)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(made("Llama"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="no matrix of this model has an axis"):  # LoRA's B starts at zero: no directions
        recipe.groups_for(adapted)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_foreign_model_trains_on_the_sphere(name):
    model = made(name)
    groups = recipe.groups_for(model, C=0.12, betas=(0.6, 0.975))
    optimizer = ng.GatedAdamW(groups)
    schedule = ng.Schedule(optimizer, 30)
    tokens = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(30):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for row, p in zip(groups.rows, dict(model.named_parameters()).values()):
        if row.unit_dim is not None:
            torch.testing.assert_close(p.norm(dim=row.unit_dim), torch.ones_like(p.norm(dim=row.unit_dim)), msg=row.name)


def test_lgp_in_one_line_is_the_plain_loss_with_a_gradient_divided_by_the_mean_row_norm():
    h = torch.randn(3, 7, 16, dtype=torch.float64, requires_grad=True)
    weight = (3 * torch.randn(50, 16, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, 50, (3, 7))
    targets[0, 0] = -100
    loss = ng.lgp_cross_entropy(h, weight, targets)
    plain = F.cross_entropy((h @ weight.T).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, plain)
    (ours,), (theirs,) = torch.autograd.grad(loss, [h]), torch.autograd.grad(plain, [h])
    torch.testing.assert_close(ours, theirs / weight.norm(dim=-1).mean())
