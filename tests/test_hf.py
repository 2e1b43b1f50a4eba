"""Is our GPT baseline transformers' NemotronH, weight for weight and logit for logit?"""

import pytest
import torch

import ngpt_core as ng

pytest.importorskip("transformers", reason='transformers is not installed: pip install "ngpt-core[hf]"')

SIZES = dict(
    vocab_size=97,
    d_model=32,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    mamba_heads=4,
    mamba_head_dim=16,
    state=16,
    groups=2,
    chunk=8,
    ff=48,
    n_experts=8,
    top_k=3,
    expert_ff=24,
    shared_ff=40,
)
UNUSED = {
    "*": ("n_heads", "n_kv_heads", "head_dim"),
    "M": ("mamba_heads",),
    "-": ("ff",),
    "E": ("n_experts", "top_k", "expert_ff", "shared_ff"),
}


def baseline(pattern: str, **changes) -> ng.LanguageModel:
    sizes = {k: v for k, v in SIZES.items() if not any(k in names for letter, names in UNUSED.items() if letter not in pattern)}
    torch.manual_seed(0)
    model = ng.LanguageModel(ng.ModelConfig(pattern=pattern, normalized=False, **(sizes | changes))).eval()
    with torch.no_grad():
        for p in model.parameters():  # norms and biases that are not at their neutral values
            p.add_(0.1 * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    return model


@pytest.mark.parametrize("pattern", ["*", "M", "-", "E", "MEM*E-"], ids=["attention", "mamba2", "mlp", "moe", "hybrid"])
def test_the_logits_are_those_of_nemotron_h(pattern):
    model = baseline(pattern)
    tokens = torch.randint(0, 97, (2, 29))  # not a multiple of the chunk
    with torch.no_grad():
        theirs = ng.hf.to_nemotron_h(model)(tokens, use_cache=False).logits
        torch.testing.assert_close(model(tokens), theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("pattern", ["*", "M", "-", "E", "MEM*E-"], ids=["attention", "mamba2", "mlp", "moe", "hybrid"])
def test_there_and_back_is_the_same_model(pattern):
    model = baseline(pattern)
    again = ng.hf.from_nemotron_h(ng.hf.to_nemotron_h(model))
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    tokens = torch.randint(0, 97, (1, 11))
    assert torch.equal(again(tokens), model(tokens))


def test_a_foreign_nemotron_h_is_read():
    from transformers import NemotronHConfig, NemotronHForCausalLM

    sizes = dict(
        vocab_size=50, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48,
        ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=16, n_groups=2, chunk_size=8, n_routed_experts=8,
        moe_intermediate_size=24, moe_shared_expert_intermediate_size=40, num_experts_per_tok=3, routed_scaling_factor=2.5,
    )  # fmt: skip
    theirs = NemotronHForCausalLM(NemotronHConfig(hybrid_override_pattern="M*-E", **sizes)).eval()
    model = ng.hf.from_nemotron_h(theirs)
    assert model.config.pattern == "M*-E"
    tokens = torch.randint(0, 50, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_transformers_clamps_dt_from_below_and_we_follow_only_when_told():
    model = baseline("M")
    with torch.no_grad():
        model.blocks[0].mixer.dt_bias.fill_(-9.0)  # dt about 1e-4, below transformers' default bound of 1e-3
    tokens = torch.randint(0, 97, (1, 19))
    theirs = ng.hf.to_nemotron_h(model)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens, use_cache=False).logits, rtol=1e-4, atol=2e-5)
        theirs.model.layers[0].mixer.time_step_limit = (1e-3, float("inf"))
        clamped = theirs(tokens, use_cache=False).logits
        assert (clamped - model(tokens)).abs().max() > 1e-3
        theirs.config.time_step_min = 1e-3
        torch.testing.assert_close(ng.hf.from_nemotron_h(theirs)(tokens), clamped, rtol=1e-4, atol=2e-5)


def test_what_has_no_counterpart_is_refused():
    with pytest.raises(ValueError, match="normalized=False"):
        ng.hf.to_nemotron_h(ng.LanguageModel(ng.preset("pico")))
    with pytest.raises(ValueError, match="squared ReLU"):
        ng.hf.to_nemotron_h(baseline("*-", activation="swiglu"))
    theirs = ng.hf.to_nemotron_h(baseline("*-"))
    theirs.config.mlp_bias = True
    with pytest.raises(ValueError, match="mlp_bias"):
        ng.hf.from_nemotron_h(theirs)
    with pytest.raises(ValueError, match="NemotronHForCausalLM"):
        theirs.config.model_type = "llama"
        ng.hf.from_nemotron_h(theirs)
