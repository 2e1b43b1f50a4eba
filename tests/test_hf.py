"""The GPT baseline is transformers' NemotronH: the same logits, gradients and generated tokens, there and back."""

import sys
from dataclasses import replace

import pytest
import torch

import ngpt_core as ng

transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "ngpt-core[hf]"')
transformers.logging.set_verbosity_error()

SIZES = dict(
    vocab_size=40, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, mamba_heads=4, mamba_head_dim=8, state=8, groups=2,
    chunk=16, ff=48, n_experts=6, top_k=2, expert_ff=24, shared_ff=16,
)  # fmt: skip
HYBRID = "ME*-ME"


def fields(pattern, **options):
    """The sizes that the pattern needs, so that a config comes back equal."""
    letters = {"n_heads": "*", "n_kv_heads": "*", "head_dim": "*", "ff": "-", "n_experts": "E", "top_k": "E", "expert_ff": "E"}
    letters |= {"shared_ff": "E"} | dict.fromkeys(("mamba_heads", "mamba_head_dim", "state", "groups", "chunk"), "M")
    return {k: v for k, v in (SIZES | options).items() if letters.get(k, pattern[0]) in pattern}


def baseline(pattern=HYBRID, **options):
    """A model with every parameter moved from its initial value, so that no one or zero hides a mistake."""
    model = ng.LanguageModel(ng.ModelConfig(pattern=pattern, normalized=False, **fields(pattern, **options)))
    with torch.no_grad():
        for name, v in [*model.named_parameters(), *model.named_buffers()]:
            v.add_(0.1 * torch.randn_like(v), alpha=3 if name.endswith("router.bias") else 1)
    return model


def nemotron(pattern=HYBRID, **options):
    sizes = dict(
        vocab_size=40, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, mamba_num_heads=4,
        mamba_head_dim=8, ssm_state_size=8, n_groups=2, chunk_size=16, intermediate_size=48, n_routed_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=24, moe_shared_expert_intermediate_size=16, routed_scaling_factor=2.5,
    )  # fmt: skip
    config = transformers.NemotronHConfig(hybrid_override_pattern=pattern, **(sizes | options))
    return transformers.NemotronHForCausalLM(config).eval()


def tokens(T=37):
    return torch.randint(0, 40, (2, T))


@pytest.mark.parametrize("pattern", ["*", "M", "E", "-", HYBRID])
def test_logits_are_those_of_transformers(pattern):
    model, t = baseline(pattern), tokens()
    with torch.no_grad():
        torch.testing.assert_close(ng.hf.to_nemotron_h(model)(t).logits, model(t), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", ["*", "M", "E", "-", HYBRID])
def test_transformers_own_start_comes_to_us_with_its_logits(pattern):
    options = {} if "*" in pattern else {"use_cache": False}
    theirs, t = nemotron(pattern, **options), tokens()
    with torch.no_grad():
        torch.testing.assert_close(ng.hf.from_nemotron_h(theirs)(t), theirs(t).logits, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_transformers():
    model, t = baseline(), tokens()
    theirs = ng.hf.to_nemotron_h(model)
    model(t).square().mean().backward()
    theirs(t).logits.square().mean().backward()
    ours, theirs = model.blocks[0].mixer, theirs.model.layers[0].mixer
    torch.testing.assert_close(theirs.in_proj.weight.grad, ours.in_proj.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(theirs.A_log.grad, ours.A_log.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(theirs.conv1d.weight.grad, ours.conv_weight.grad.mT[:, None], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pattern", ["*", "M", "E", "-", HYBRID])
def test_a_round_trip_changes_no_bit(pattern):
    model = baseline(pattern)
    back = ng.hf.from_nemotron_h(ng.hf.to_nemotron_h(model))
    assert back.config == model.config
    for (name, a), (_, b) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    theirs = nemotron(pattern)
    again = ng.hf.to_nemotron_h(ng.hf.from_nemotron_h(theirs)).state_dict()
    assert again.keys() == theirs.state_dict().keys()
    for name, a in theirs.state_dict().items():
        assert torch.equal(a, again[name]), name


def test_a_model_without_a_shared_expert_survives_the_round_trip_too():
    model, t = baseline("E", shared_ff=0), tokens()
    theirs = ng.hf.to_nemotron_h(model)
    with torch.no_grad():
        torch.testing.assert_close(theirs(t).logits, model(t), rtol=1e-5, atol=1e-5)
        assert torch.equal(ng.hf.from_nemotron_h(theirs)(t), model(t))


def test_without_a_shared_expert_half_precision_stays_half_precision_too():
    theirs = ng.hf.to_nemotron_h(baseline("E", shared_ff=0).bfloat16())
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16} and theirs(tokens()).logits.isfinite().all()


def test_scores_that_underflow_give_transformers_logits():
    model, t = baseline("E"), tokens()
    with torch.no_grad():
        model.blocks[0].norm_weight.fill_(1.0)
        model.blocks[0].mixer.router.weight.zero_()[:, 0] = -200.0
        model.embedding.weight[:, 0] = 10.0  # every logit of the router is about -200 * sqrt(32)
        got, want = model(t), ng.hf.to_nemotron_h(model)(t).logits
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_compiled_model_is_converted_and_anything_else_is_an_error():
    model = baseline()
    theirs = ng.hf.to_nemotron_h(torch.compile(model)).state_dict()
    assert all(torch.equal(v, theirs[name]) for name, v in ng.hf.to_nemotron_h(model).state_dict().items())
    for what in ("x", torch.nn.Linear(2, 2), model.config):
        with pytest.raises(ValueError, match=r"to_nemotron_h takes a LanguageModel.*got"):
            ng.hf.to_nemotron_h(what)


@pytest.mark.parametrize("length", [None, 64, 2**18])
def test_max_seq_len_survives_the_round_trip(length, tmp_path):
    theirs = ng.hf.to_nemotron_h(baseline(max_seq_len=length))
    assert theirs.config.max_position_embeddings == (length or 2**18)
    theirs.save_pretrained(tmp_path)
    for back in (theirs, transformers.NemotronHForCausalLM.from_pretrained(tmp_path)):
        assert ng.hf.from_nemotron_h(back).config.max_seq_len == length
    assert ng.hf.from_nemotron_h(nemotron()).config.max_seq_len is None  # theirs is no limit


def test_what_is_saved_by_transformers_loads_there_again(tmp_path):
    model, t = baseline(), tokens()
    ng.hf.to_nemotron_h(model).save_pretrained(tmp_path)
    loaded = transformers.NemotronHForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(t).logits, model(t), rtol=1e-5, atol=1e-5)


def test_both_generate_the_same_tokens_with_their_caches():
    model, prompt = baseline(), tokens(9)
    ours = model.generate(prompt, 12, temperature=0.0)
    theirs = ng.hf.to_nemotron_h(model).generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert torch.equal(ours, theirs)


def test_the_copy_shares_no_memory():
    model = baseline()
    before = {name: v.clone() for name, v in model.state_dict().items()}
    theirs = ng.hf.to_nemotron_h(model)
    with torch.no_grad():
        for v in theirs.state_dict().values():
            v.zero_()
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())


def test_half_precision_stays_half_precision():
    theirs = ng.hf.to_nemotron_h(baseline().bfloat16())
    assert theirs.config.dtype == torch.bfloat16 and theirs.lm_head.weight.dtype == torch.bfloat16


def test_a_half_precision_model_of_transformers_can_be_saved_as_ours(tmp_path):
    nemotron().save_pretrained(tmp_path / "theirs")
    theirs = transformers.NemotronHForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    ours = ng.hf.from_nemotron_h(theirs)
    again = ng.load(ng.save(ours, tmp_path / "ours"))
    dtypes = {name: x.dtype for name, x in again.state_dict().items()}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}  # transformers keeps these in float32
    assert wide == {name for name in dtypes if name.endswith("router.bias")}
    t = torch.randint(0, 40, (2, 9))
    assert torch.equal(again(t), ours.eval()(t))
    ours.embedding.weight.data = ours.embedding.weight.data.float()
    with pytest.raises(ValueError, match="one floating-point precision"):
        ng.save(ours, tmp_path / "ours")


# ---- where transformers differs from itself ------------------------------------------------------------------------------


def low_dt(mixer):
    """dt far below transformers' default bound of 0.001, and only what passed through the state reaches the output."""
    mixer.dt_bias.fill_(-9.0)  # softplus(-9) = 1.2e-4
    mixer.D.zero_()


def nemotron_with_low_dt():
    """With transformers' default bound, and weights large enough that dt matters."""
    theirs = nemotron("M*")
    for p in theirs.parameters():
        p.add_(0.1 * torch.randn_like(p))
    low_dt(theirs.model.layers[0].mixer)
    return theirs


def token_by_token(theirs, t):
    cache, steps = None, []
    for i in range(t.shape[1]):
        out = theirs(t[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    return torch.cat(steps, 1)


@torch.no_grad()
def test_the_lower_bound_on_dt_is_imported_and_exported():
    """Where dt lies below time_step_min the logits still agree, and they would not without the bound."""
    theirs, t = nemotron_with_low_dt(), tokens(12)
    ours = ng.hf.from_nemotron_h(theirs)
    assert ours.config.dt_min == transformers.NemotronHConfig().time_step_min == 0.001
    torch.testing.assert_close(ours(t), theirs(t).logits, rtol=1e-5, atol=1e-5)
    back = ng.hf.to_nemotron_h(ours)
    assert back.config.time_step_min == 0.001 and torch.equal(back(t).logits, theirs(t).logits)
    free = ng.LanguageModel(replace(ours.config, dt_min=0.0))
    free.load_state_dict(ours.state_dict())
    assert (free(t) - ours(t)).abs().max() > 1e-3


@torch.no_grad()
def test_a_model_without_a_bound_has_none_in_transformers_either():
    model, t = baseline("M*"), tokens(12)
    low_dt(model.blocks[0].mixer)
    theirs = ng.hf.to_nemotron_h(model)
    torch.testing.assert_close(theirs(t).logits, model(t), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(token_by_token(theirs, t), model(t), rtol=1e-5, atol=1e-5)
    assert ng.hf.from_nemotron_h(theirs).config.dt_min == 0.0


@torch.no_grad()
def test_transformers_clamps_dt_when_it_reads_many_tokens_but_not_when_it_reads_one():
    """With the default time_step_min, its prefill and its decoding disagree by far more than rounding. Ours agree."""
    theirs, t = nemotron_with_low_dt(), tokens(12)
    assert (theirs(t).logits - token_by_token(theirs, t)).abs().max() > 1e-3
    ours = ng.hf.from_nemotron_h(theirs)
    cache = ours.new_cache(2, 12)
    steps = torch.cat([ours(t[:, i : i + 1], cache=cache) for i in range(12)], 1)
    torch.testing.assert_close(steps, ours(t), rtol=1e-5, atol=1e-5)


def test_transformers_cannot_count_the_tokens_of_a_model_without_attention():
    """Its cache asks an attention layer for the length; our export turns the cache off where there is none."""
    theirs = nemotron("M")
    with pytest.raises(ValueError, match="get_seq_length"):
        theirs(tokens())
    assert ng.hf.to_nemotron_h(ng.hf.from_nemotron_h(theirs)).config.use_cache is False


# ---- what cannot be translated ---------------------------------------------------------------------------------------------


def test_an_ngpt_is_an_error_with_the_reason():
    with pytest.raises(ValueError, match="no normalized hidden state"):
        ng.hf.to_nemotron_h(ng.LanguageModel(ng.ModelConfig(pattern="M", **fields("M"))))


@pytest.mark.parametrize(
    ("pattern", "options", "says"),
    [
        ("*", {"rope_theta": 1e4}, "rotary"),
        ("-", {"activation": "swiglu"}, "no gate"),
        ("E", {"n_experts": 1, "top_k": 1}, "n_experts >= 2"),
    ],
)
def test_what_nemotron_h_lacks_is_named_on_the_way_there(pattern, options, says):
    with pytest.raises(ValueError, match=says):
        ng.hf.to_nemotron_h(baseline(pattern, **options))


@pytest.mark.parametrize("field", [{"use_bias": True}, {"mlp_bias": True}, {"moe_latent_size": 8}, {"mlp_hidden_act": "silu"}])
def test_what_the_baseline_lacks_is_named_on_the_way_back(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        ng.hf.from_nemotron_h(nemotron(**field))


def test_another_kind_of_model_is_an_error():
    with pytest.raises(ValueError, match="NemotronHForCausalLM; got Linear"):
        ng.hf.from_nemotron_h(torch.nn.Linear(2, 2))


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    model = baseline("-")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "ngpt-core\[hf\]"'):
        ng.hf.to_nemotron_h(model)
