"""A model of ours inside transformers: the same logits, cached, padded, exported, adapted, and without our package."""

import json
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from runs import new_run, sentences

import ngpt_core as ng
from ngpt_core.cli import main
from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer
from ngpt_core.hf.convert import NAMES, model_config, transformers_config
from ngpt_core.hf.single_file import modeling_source, rearrange
from ngpt_core.nn.unit import normalize_
from ngpt_core.train.loop import train

transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "ngpt-core[hf]"')

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
ROOT = Path(__file__).parent.parent
SIZES = dict(
    vocab_size=40, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, mamba_heads=4, mamba_head_dim=8, state=8, groups=2,
    chunk=16, ff=48, n_experts=6, top_k=2, expert_ff=24, shared_ff=16,
)  # fmt: skip
EVERYTHING = dict(
    rope_theta=1e4, activation="swiglu", s_u_per_expert=True, vector_s_moe=True, vector_s_mamba=True, scale_dt=False, lgp_q=0.5
)  # fmt: skip
KINDS = {
    "nGPT": dict(normalized=True),
    "nGPT with every option": dict(normalized=True, **EVERYTHING),
    "nGPT with a positive s_z": dict(normalized=True, positive_s_z=True),
    "GPT": dict(normalized=False),
    "GPT with every option": dict(normalized=False, **EVERYTHING),
}


def moved(pattern="ME*-ME*", **options):
    """A model with every parameter moved from its initial value, in eval() mode."""
    torch.manual_seed(0)
    model = ng.LanguageModel(ng.ModelConfig(pattern=pattern, **(SIZES | options))).eval()
    with torch.no_grad():
        for v in [*model.parameters(), *model.buffers()]:
            v.add_(0.1 * torch.randn_like(v))
    return model


def tokens(B=2, T=37, V=40):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))


def padded(t, left=5):
    mask = F.pad(torch.ones_like(t), (left, 0))
    return F.pad(t, (left, 0)), mask


def read(model, t, mask=None, cuts=(0, 9, 10, 11, 20, 37)):
    """The logits of t read in pieces through the cache."""
    cache, found = None, []
    for a, b in zip(cuts, [*cuts[1:-1], t.shape[1]]):
        part = None if mask is None else mask[:, :b]
        out = model(t[:, a:b], attention_mask=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        found.append(out.logits)
    return torch.cat(found, 1)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- the same model --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_logits_are_ours_plain_cached_and_padded(options):
    model, t = moved(**options), tokens()
    theirs, want = ng.hf.to_transformers(model), model(t)
    close(theirs(t).logits, want)
    close(read(theirs, t), want)
    p, mask = padded(t)
    close(theirs(p, attention_mask=mask).logits[:, 5:], want)
    close(read(theirs, p, mask)[:, 5:], want)
    close(read(theirs, p, mask, (0, 1, 2, 3, 4, 5, 6, 37))[:, 5:], want)  # a padded token that is read by itself
    close(theirs(F.pad(t, (0, 4)), attention_mask=F.pad(torch.ones_like(t), (0, 4))).logits[:, :37], want)
    theirs.set_attn_implementation("eager")
    out = theirs(t, output_attentions=True, output_hidden_states=True, output_router_logits=True)
    close(out.logits, want)
    assert [len(x) for x in (out.attentions, out.hidden_states, out.router_logits)] == [2, 8, 2]
    half = ng.hf.to_transformers(moved(**options).bfloat16())
    assert half(t).logits.dtype == torch.float32 and half.model.layers[0].mixer.in_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_loss_and_gradients_are_ours_padded_and_checkpointed_too(options):
    model, t = moved(**options).train(), tokens()
    theirs = ng.hf.to_transformers(model).train()
    want = model.loss(t[:, :-1], t[:, 1:])
    want.backward()
    p, mask = padded(t)
    for checkpointing, given in ((False, (t, None)), (True, (t, None)), (False, (p, mask))):
        if checkpointing:
            theirs.gradient_checkpointing_enable()
        theirs.zero_grad()
        out = theirs(given[0], attention_mask=given[1], labels=given[0], use_cache=False)
        out.loss.backward()
        assert out.logits is None  # never [tokens, V]
        # the balance loss counts T tokens and not T - 1
        close(out.loss, want, 1e-4)
        close(theirs.model.embeddings.weight.grad, model.embedding.weight.grad, 1e-4)
        close(theirs.lm_head.weight.grad, model.head.weight.grad, 1e-4)
        close(theirs.model.layers[0].mixer.out_proj.weight.grad.mT, model.blocks[0].mixer.out_proj.grad, 1e-4)
    half = theirs(t, labels=t, num_items_in_batch=2 * 36 * 2).loss  # a batch twice as large, of which this is one half
    close(half, out.loss / 2, 1e-5)
    evaluated = theirs.eval()(t, labels=t)
    close(evaluated.loss, F.cross_entropy(evaluated.logits[:, :-1].flatten(0, 1), t[:, 1:].flatten()))


def test_packed_sequences_do_not_see_each_other():
    model, t = moved(), tokens(1)
    documents = (torch.arange(37) >= 15).long()[None]
    positions = torch.cat([torch.arange(15), torch.arange(22)])[None]
    theirs = ng.hf.to_transformers(model)
    with torch.no_grad():
        close(theirs(t, position_ids=positions, use_cache=False).logits, model(t, documents))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_round_trip_changes_no_bit(options):
    model = moved(**options, max_seq_len=64, name="x", tokens=100)
    theirs = ng.hf.to_transformers(model)
    back = ng.hf.from_transformers(theirs)
    assert back.config == model.config and theirs.num_parameters() == sum(p.numel() for p in model.parameters())
    for (name, a), (_, b) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_every_field_of_a_config_has_the_same_default_in_transformers():
    ours = ng.ModelConfig(vocab_size=256, d_model=128, pattern="E", n_experts=2, top_k=1, expert_ff=8)
    theirs = ng.hf.NGPTConfig()
    for f in fields(ours):
        if f.name not in ("pattern", "n_experts", "top_k", "expert_ff"):
            have = getattr(theirs, NAMES.get(f.name, f.name))
            assert have == getattr(ours, f.name) and type(have) is type(getattr(ours, f.name)), f.name
    assert model_config(transformers_config(ours)) == ours
    with pytest.raises(Exception, match="layer_types must be a list of"):  # transformers wraps it in an error of its own
        ng.hf.NGPTConfig(layer_types=["attention", "recurrent"])
    with pytest.raises(ValueError, match="LanguageModel has no value_residual"):
        model_config(ng.hf.NGPTConfig(layer_types=["mlp"], value_residual=True))


# ---- transformers' habits --------------------------------------------------------------------------------------------
def test_generation_with_a_padded_batch_and_beams():
    model, t = moved(), tokens(T=9)
    theirs, want = ng.hf.to_transformers(model), model.generate(t, 8, temperature=0.0)
    p, mask = padded(t)
    options = dict(max_new_tokens=8, do_sample=False)
    assert torch.equal(theirs.generate(t, **options), want)
    assert torch.equal(theirs.generate(p, attention_mask=mask, **options)[:, 5:], want)
    assert torch.equal(theirs.generate(t, use_cache=False, **options), want)
    beams = theirs.generate(t, num_beams=3, **options)
    assert torch.equal(beams, theirs.generate(t, num_beams=3, use_cache=False, **options))


@pytest.mark.parametrize("pattern", ["M", "E-", "*"])
def test_models_without_attention_or_with_nothing_else_generate_too(pattern):
    model, t = moved(pattern), tokens(T=6)
    assert torch.equal(ng.hf.to_transformers(model).generate(t, max_new_tokens=5, do_sample=False), model.generate(t, 5, 0.0))


@pytest.mark.parametrize("normalized", [True, False])
def test_a_new_model_starts_as_ours_does_and_loading_overwrites_nothing(normalized, tmp_path):
    config = transformers_config(moved(normalized=normalized).config)
    model = ng.hf.NGPTForCausalLM(config)
    ours = ng.hf.from_transformers(model)
    if normalized:
        ours.check()
        model.lm_head.weight.data.mul_(2)
        model.model.layers[0].mixer.out_proj.weight.data.mul_(2)
        normalize_(model)  # it knows the axes of this layout too
        ng.hf.from_transformers(model).check()
    assert ours.blocks[0].mixer.D.eq(1).all() and ours.blocks[1].mixer.router.bias.eq(0).all()
    reference = ng.LanguageModel(ours.config)
    for (name, a), (_, b) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        assert abs(float(a.std() - b.std())) < 0.25 * float(b.std()) + 1e-6 or a.numel() < 64, name
    theirs = ng.hf.to_transformers(moved(normalized=normalized))
    theirs.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is ng.hf.NGPTForCausalLM
    for (name, a), (_, b) in zip(theirs.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    again.apply(again._init_weights)  # a second pass, as transformers makes one after loading
    assert all(torch.equal(a, again.state_dict()[name]) for name, a in theirs.state_dict().items())


def test_new_tokens_get_unit_rows_and_a_scale():
    theirs = ng.hf.to_transformers(moved())
    old = theirs.s_z.weight.detach().clone()
    theirs.resize_token_embeddings(44)
    assert theirs.config.vocab_size == 44 and theirs(tokens(V=44)).logits.shape[-1] == 44
    assert torch.equal(theirs.s_z.weight[:40], old)
    close(torch.linalg.vector_norm(theirs.lm_head.weight[40:], dim=-1), torch.ones(4))


def test_lora_finds_its_modules_and_trains_nothing_else(tmp_path):
    peft = pytest.importorskip("peft", reason="a development dependency")
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"]
    config = peft.LoraConfig(r=4, target_modules=modules, target_parameters=["experts.up_proj", "experts.down_proj"])
    base, t = ng.hf.to_transformers(moved()), tokens()
    before = {name: v.clone() for name, v in base.state_dict().items()}
    model = peft.get_peft_model(base, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=t, labels=t).loss
        loss.backward()
        assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name), "an adapter has no gradient"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert all(any(f".{m}." in name for name in adapted) for m in modules) and any(".experts." in name for name in adapted)
    model.eval()
    want = model(input_ids=t).logits
    model.save_pretrained(tmp_path)
    fresh = ng.hf.to_transformers(moved())
    assert all(torch.equal(v, fresh.state_dict()[name]) for name, v in before.items())
    close(peft.PeftModel.from_pretrained(fresh, tmp_path)(input_ids=t).logits, want, 1e-5)
    merged = model.merge_and_unload()
    close(merged(t).logits, want, 1e-4)
    close(ng.hf.from_transformers(merged).eval()(t), want, 1e-4)


# ---- an exported folder ----------------------------------------------------------------------------------------------
ALONE = """
import json, sys
for name in ("ngpt_core", "einops"):
    sys.modules[name] = None  # importing it is an error
import torch, transformers
transformers.utils.logging.disable_progress_bar()
logits = []
for folder in sys.argv[1:3]:  # two models with the same code, side by side
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    t = torch.arange(60).view(2, 30) * 3
    logits.append(model(t).logits.flatten()[:50].tolist())
    model.train()(t, labels=t).loss.backward()
writer = transformers.pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
text = writer("def ", max_new_tokens=5, do_sample=False)[0]["generated_text"]
model.save_pretrained(sys.argv[3])
print(json.dumps({"logits": logits, "text": text}))
"""


def test_an_exported_folder_runs_without_our_package(tmp_path):
    models = [moved(vocab_size=256, normalized=normalized) for normalized in (True, False)]
    folders = [str(ng.hf.export(m, tmp_path / f"model {i}".replace(" ", ""))) for i, m in enumerate(models)]
    env = {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ALONE, *folders, str(tmp_path / "again")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    t = torch.arange(60).view(2, 30) * 3
    for model, logits in zip(models, found["logits"], strict=True):
        close(torch.tensor(logits), model(t).detach().flatten()[:50])
    assert found["text"].startswith("def ")
    config = json.loads((tmp_path / "model0" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_ngpt.NGPTForCausalLM" and config["model_type"] == "ngpt"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")  # saved there, loaded here by our class
    assert type(again) is ng.hf.NGPTForCausalLM
    close(again(t).logits, models[1](t))
    again.save_pretrained(tmp_path / "third")
    assert (tmp_path / "third" / "modeling_ngpt.py").read_text() == modeling_source()
    card = (tmp_path / "model0" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers") and "trust_remote_code=True" in card


def test_push_to_hub_sends_everything_that_a_stranger_needs(tmp_path, monkeypatch):
    """Against a Hub that only writes down what it is sent."""
    import transformers.utils.hub as hub

    sent: dict[str, bytes] = {}

    class Hub:
        def create_repo(self, name, **kwargs):
            return SimpleNamespace(repo_id=name)

        def create_commit(self, operations, **kwargs):
            sent.update({operation.path_in_repo: Path(operation.path_or_fileobj).read_bytes() for operation in operations})

    monkeypatch.setattr(hub, "hf_api", lambda *args, **kwargs: Hub())
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: SimpleNamespace(save=lambda path: None))
    ng.hf.export(ng.LanguageModel(ng.preset("pico")), tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path).push_to_hub("someone/ngpt")
    transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True).push_to_hub("someone/ngpt")
    assert sent.keys() >= {"config.json", "generation_config.json", "model.safetensors", "modeling_ngpt.py", "tokenizer.json"}
    assert json.loads(sent["config.json"])["auto_map"]["AutoModelForCausalLM"] == "modeling_ngpt.NGPTForCausalLM"
    assert sent["modeling_ngpt.py"] == (tmp_path / "modeling_ngpt.py").read_bytes()


def test_the_single_file_imports_only_torch_and_transformers():
    import ast

    tree = ast.parse(modeling_source())
    imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level}
    assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}
    assert "ngpt_core::" not in modeling_source()


@pytest.mark.parametrize(
    "pattern, sizes",
    [
        ("b (c q) (g r) p -> b c g q r p", dict(q=2, g=3)),
        ("... (g w) -> ... g w", dict(g=2)),
        ("b c g r -> b c g 1 r 1", {}),
        ("b t h p -> b t (h p)", {}),
    ],
)
def test_our_small_rearrange_is_that_of_einops(pattern, sizes):
    import einops

    x = torch.randn(2, 4, 6, 8)
    assert torch.equal(rearrange(x, pattern, **sizes), einops.rearrange(x, pattern, **sizes))


def test_the_byte_tokenizer_is_bytes_and_loads_anywhere(tmp_path):
    ours, theirs = ByteTokenizer(), ng.hf.NGPTByteTokenizer()
    theirs.save_pretrained(tmp_path)
    for words in (theirs, transformers.AutoTokenizer.from_pretrained(tmp_path)):
        for text in ("né\tĀ\u0100  x\n", "def f():\r\n    return '☃'", "".join(map(chr, range(1, 600)))):
            assert words(text).input_ids == ours.encode([text.encode()])[0].tolist()
            assert words.decode(words(text).input_ids) == text
        assert len(words) == 256 and words.eos_token_id == words.pad_token_id == 0 and words.padding_side == "left"
        assert words.decode([104, 105, 0], skip_special_tokens=True) == "hi"
        assert words.decode([255]) == ours.decode([255]) == "\ufffd"


def test_a_model_whose_tokenizer_is_not_known_needs_one(tmp_path):
    with pytest.raises(ValueError, match="vocabulary of 40 tokens needs its tokenizer"):
        ng.hf.export(moved(), tmp_path / "a")
    with pytest.raises(ValueError, match="256 tokens, more than the model's vocabulary of 40"):
        ng.hf.export(moved(), tmp_path / "a", tokenizer="bytes")
    assert not (tmp_path / "a").exists()
    folder = ng.hf.export(moved(vocab_size=300), tmp_path / "b", tokenizer=ng.hf.NGPTByteTokenizer())
    with pytest.raises(ValueError, match="not an empty folder"):
        ng.hf.export(moved(vocab_size=256), folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on generated text."""
    folder = tmp_path_factory.mktemp("hf")
    pack(sentences(60), folder / "corpus", ByteTokenizer(), val_fraction=0.1)
    assert train(new_run(str(folder / "corpus"), folder / "run", steps=3)) == 0
    return folder / "run"


def test_a_run_is_exported_from_the_shell_with_its_figures(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    theirs, t = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tokens(V=256)
    close(theirs(t).logits, ng.load(run / "export")(t))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| steps | 3 of 3 |" in card and "held-out loss" in card and "GatedAdamW" in card and "recipe" in card
    assert theirs.generation_config.eos_token_id == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 1
    assert "not an empty folder" in capsys.readouterr().err


def test_a_copied_export_knows_its_tokenizer_and_without_one_nothing_is_guessed(run, tmp_path, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run / "export", copy)
    write = ["generate", str(copy), "--prompt", "the ", "--max-new-tokens", "3"]
    assert main(write) == 0
    expected = capsys.readouterr().out
    assert main(["eval", str(copy), "--data", str(run.parent / "corpus"), "--windows", "2", "--json"]) == 0
    for name in ("ngpt_tokenizer.json", "seal.json"):  # sealed, it would be a file that is missing
        (copy / name).unlink()
    capsys.readouterr()
    for command in (write, ["eval", str(copy)], ["export", str(copy), str(tmp_path / "out")]):
        assert main(command) == 1
        assert "holds a model but no tokenizer" in capsys.readouterr().err
    assert main([*write, "--tokenizer", "bytes"]) == 0
    assert capsys.readouterr().out == expected


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: [" yes", " no"]
doc_to_target: a
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


@pytest.mark.slow
def test_tasks_of_the_evaluation_harness(run, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason='needs lm-eval: pip install "ngpt-core[eval]"')
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "tiny.json").write_text("\n".join(json.dumps({"q": f"is {i} red?", "a": i % 2}) for i in range(4)))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("FILE", str(tmp_path / "tiny.json")))
    command = ["eval", str(run), "--task-folder", str(tmp_path), "--device", "cpu", "--json", "--tasks"]
    assert main([*command, "tiny"]) == 0
    scores = json.loads(capsys.readouterr().out.splitlines()[-1])
    model, right = ng.load(run / "export"), 0
    for i in range(4):  # by hand: the sum of the log-probabilities of each answer
        sums = []
        for answer in (" yes", " no"):
            t = torch.tensor([list(f"is {i} red?{answer}".encode())])
            p = model(t)[0, :-1].log_softmax(-1).gather(1, t[0, 1:, None])[:, 0]
            sums.append(float(p[-len(answer) :].sum()))
        right += sums.index(max(sums)) == i % 2
    assert scores["tiny"]["acc,none"] == right / 4
    assert main([*command, "no_such_task"]) == 1
    assert "there is no task no_such_task" in capsys.readouterr().err


# ---- other people's nGPT ---------------------------------------------------------------------------------------------
def nvidia_logits(state, args, t):
    """The original nGPT's forward pass from its weights, in its layout."""
    H, d, L, normalized = args["n_head"], args["n_embd"], args["n_layer"], args["use_nGPT"]
    k_dim, base = d // H, args["base_scale"]
    angle = torch.arange(t.shape[1])[:, None] * torch.exp(torch.arange(0, k_dim, 2) * (-math.log(10000.0) / k_dim))
    table = torch.zeros(t.shape[1], k_dim)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
    first, second = table[:, : k_dim // 2], table[:, k_dim // 2 :]

    def rms(x, w):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    def turned(x):
        out = torch.empty_like(x)
        out[..., 0::2], out[..., 1::2] = -x[..., 1::2] * second, x[..., 0::2] * first
        return out

    def moved_by(h, out, alpha):
        out = F.normalize(out, dim=-1)
        return F.normalize(h + (alpha * (0.05 / base)).abs() * (out - h), dim=-1) if normalized else None

    h = state["transformer.wte.weight"][t]
    for i in range(L):
        w = {name.removeprefix(f"transformer.h.{i}."): x for name, x in state.items() if name.startswith(f"transformer.h.{i}.")}
        x = h if normalized else rms(h, w["rmsnorm_att.weight"])
        q, k, v = ((x @ w[f"{n}.weight"].T).view(*t.shape, H, k_dim).transpose(1, 2) for n in ("query", "key", "value"))
        q, k, scale = turned(q), turned(k), k_dim**-0.5
        if normalized:
            s = (w["sqk"] / base).view(H, 1, k_dim)
            q, k, scale = F.normalize(q, dim=-1) * s, F.normalize(k, dim=-1) * s, k_dim**0.5
        weights = (q @ k.mT * scale).masked_fill(~torch.ones(t.shape[1], t.shape[1]).tril().bool(), -torch.inf).softmax(-1)
        out = (weights @ v).transpose(1, 2).flatten(2) @ w["att_c_proj.weight"].T
        h = moved_by(h, out, w["attn_alpha"]) if normalized else h + out
        x = h if normalized else rms(h, w["rmsnorm_mlp.weight"])
        uv = x @ w["c_fc.weight"].T
        u, v = (uv * w["suv"] * d**0.5 if normalized else uv).chunk(2, -1)
        out = (u * F.silu(v)) @ w["mlp_c_proj.weight"].T
        h = moved_by(h, out, w["mlp_alpha"]) if normalized else h + out
    if not normalized:
        h = rms(h, state["rmsnorm_f.weight"])
    logits = h @ state["lm_head.weight"].T
    return logits * (state["sz"] / base) if normalized else logits


@pytest.mark.parametrize("normalized", [1, 0])
@torch.no_grad()
def test_nvidias_checkpoints_have_their_logits(normalized, tmp_path):
    args = dict(use_nGPT=normalized, n_layer=2, n_head=2, n_embd=16, block_size=64, base_scale=0.25, bias=False, vocab_size=30)
    d, generator = 16, torch.Generator().manual_seed(0)
    shapes = {"transformer.wte.weight": (30, d), "lm_head.weight": (30, d)}
    shapes |= {"sz": (30,)} if normalized else {"rmsnorm_f.weight": (d,)}
    for i in range(2):
        names = {"query.weight": (d, d), "key.weight": (d, d), "value.weight": (d, d), "att_c_proj.weight": (d, d)}
        names |= {"c_fc.weight": (8 * d, d), "mlp_c_proj.weight": (d, 4 * d)}
        scales = {"attn_alpha": (d,), "mlp_alpha": (d,), "sqk": (d,), "suv": (8 * d,)}
        names |= scales if normalized else {"rmsnorm_att.weight": (d,), "rmsnorm_mlp.weight": (d,)}
        shapes |= {f"transformer.h.{i}.{name}": shape for name, shape in names.items()}
    state = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    if normalized:
        for name, x in state.items():
            if x.ndim == 2:
                state[name] = F.normalize(x, dim=0 if "c_proj" in name else -1)
    checkpoint = {"model": {f"_orig_mod.{name}": x for name, x in state.items()}, "model_args": args, "iter_num": 3}
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    model, t = ng.hf.from_nvidia(tmp_path / "ckpt.pt"), tokens(T=20, V=30)
    want = nvidia_logits(state, args, t)
    close(model(t).logits, want)
    close(read(model, t, cuts=(0, 7, 8, 9, 20)), want)
    p, mask = padded(t)
    close(model(p, attention_mask=mask).logits[:, 5:], want)  # its embedding is not relative: positions must not count padding
    with pytest.raises(ValueError, match="biases"):
        ng.hf.from_nvidia({**checkpoint, "model_args": {**args, "bias": True}})
    with pytest.raises(ValueError, match="with model and model_args"):
        ng.hf.from_nvidia({"state_dict": {}})


@pytest.mark.parametrize("options", [{}, {"add_value_residual": False, "tied_embedding": True}, {"manual_norm_weights": True}])
@torch.no_grad()
def test_lucidrains_models_have_their_logits(options):
    pytest.importorskip("nGPT_pytorch", reason="a development dependency")
    module = sys.modules["nGPT_pytorch.nGPT"]
    for name in ("nGPT", "Scale", "NormLinear", "Attention", "FeedForward"):
        getattr(module, name).__hash__ = object.__hash__  # 0.2.16 defines __eq__ only, so torch cannot list its parameters
    torch.manual_seed(0)
    theirs, t = module.nGPT(num_tokens=30, dim=16, depth=3, dim_head=8, heads=2, **options), tokens(T=20, V=30)
    for name, p in theirs.named_parameters():
        if name.endswith("scale.scale"):
            p.mul_(1 + 0.3 * torch.randn_like(p))
    model = ng.hf.from_lucidrains(theirs)
    close(model(t).logits, theirs(t))
    close(read(model, t, cuts=(0, 7, 8, 9, 20)), theirs(t))
    with pytest.raises(ValueError, match="norm_eps"):
        ng.hf.from_lucidrains(module.nGPT(num_tokens=30, dim=16, depth=1, dim_head=8, heads=2, norm_eps=0.1))
    with pytest.raises(ValueError, match="takes an nGPT of nGPT-pytorch; got Linear"):
        ng.hf.from_lucidrains(torch.nn.Linear(2, 2))
