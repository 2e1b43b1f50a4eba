"""The training loop: one step is what the equations of the recipe say, and nothing around it disturbs it."""

import json
import math
import shutil
import time
from functools import partial

import pytest
import torch
from runs import TINY, losses, new_run

import ngpt_core as ng
from ngpt_core.data.corpus import Corpus
from ngpt_core.data.loader import Loader
from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer
from ngpt_core.gpus import peak_flops
from ngpt_core.train.config import TrainConfig, model_config, recipe_numbers, run_defaults, settled
from ngpt_core.train.evaluate import evaluate, evaluate_documents, evaluate_positions
from ngpt_core.train.loop import train
from ngpt_core.train.metrics import read_lines, read_metrics
from ngpt_core.train.parallel import initialize
from ngpt_core.train.run import open_blend, prepare
from ngpt_core.train.trainer import PROMPT, Trainer
from ngpt_core.train.world import World


@pytest.mark.parametrize("normalized", [True, False])
def test_a_run_is_the_plain_loop_written_out_by_hand(corpus, tmp_path, normalized):
    run = new_run(corpus, tmp_path / "run", {"normalized": normalized}, recipe=["clip_norm=0.05"])
    assert train(run) == 0

    model = ng.LanguageModel(run.model)
    initialize(model, 0, torch.device("cpu"))
    numbers = recipe_numbers(run.config, run.model, 6)
    optimizer, schedule = ng.recipe.build(model, 6, numbers)
    loader = Loader([(Corpus(corpus), 1.0)], 4, 32)
    for record in read_metrics(run.folder):
        batch = loader.next()
        model.loss(batch.tokens, batch.targets, batch.documents).backward()
        assert record["loss"] == pytest.approx(float(model.stats["cross_entropy"]), abs=1e-5)  # cross-entropy alone
        assert record["balance"] == pytest.approx(float(model.stats["balance"]), abs=1e-6) and record["balance"] > 0
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        model.update_router_bias(model.stats["load"])
    exported = ng.load(run.folder / "export")
    for (name, p), (_, q) in zip(model.state_dict().items(), exported.state_dict().items()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


def test_a_busy_machine_does_not_lower_the_measured_peak(monkeypatch):
    # ten products that others interrupted for 10 ms each, then one that was left alone
    clock = iter([0.01 * i for i in range(11)] + [0.102] + [1.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert peak_flops(torch.device("cpu")) == pytest.approx(2 * 512**3 / 0.002)


def test_metrics_report_what_the_run_did(corpus, tmp_path):
    run = new_run(corpus, tmp_path / "run", diagnostics_every=3, eval_every=2, sample_every=3, sample_tokens=5)
    train(run)
    records = read_metrics(run.folder)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["tokens"] for r in records] == [128 * t for t in range(1, 7)]
    assert [("val_loss" in r) for r in records] == [False, True, False, True, False, True]
    peak = run.model.C / math.sqrt(32)
    for r in records:
        assert r["lr"] == pytest.approx(peak * ng.log_decay(r["step"] / 6))
        assert r["tokens_per_s"] > 0 and 0 < r["mfu"] < 1 and len(r["dead_experts"]) == 2 and r["s_z"] > 0
    looked = records[2]
    assert [sum(layer) for layer in looked["load"]] == [4 * 32 * 2] * 2  # every token goes to two experts in both layers
    assert len(looked["alpha"]) == 4 and sum(g["coordinates"] for g in looked["diagnostics"]) == sum(
        p.numel() for p in ng.load(run.folder / "export").parameters()
    )
    assert {g["cap"] is None for g in looked["diagnostics"]} == {True, False}
    samples = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert [s["step"] for s in samples] == [3, 6] and len({s["text"][:PROMPT] for s in samples}) == 1
    config = json.loads((run.folder / "config.json").read_text())
    assert config["corpora"][0]["checksum"] == Corpus(corpus).checksum and config["versions"]["python"]


def test_tensorboard_gets_the_same_numbers(corpus, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(new_run(corpus, tmp_path / "run", steps=3, tensorboard=True))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses(tmp_path / "run"))


def test_runs_repeat_and_seeds_matter(corpus, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(new_run(corpus, tmp_path / name, seed=seed, steps=4))
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_diagnostics_evaluation_and_sampling_change_nothing(corpus, tmp_path):
    train(new_run(corpus, tmp_path / "plain"))
    train(new_run(corpus, tmp_path / "watched", eval_every=1, sample_every=1, sample_tokens=3, diagnostics_every=1))
    for a, b in zip(losses(tmp_path / "plain"), losses(tmp_path / "watched")):
        assert a == pytest.approx(b, abs=2e-6)  # the optimizer's fused and readable paths differ in the last digits


@pytest.mark.parametrize(
    "change", [{"micro_batch": 1}, {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"}]
)
def test_micro_batches_and_recomputation_change_nothing(corpus, tmp_path, change):
    train(new_run(corpus, tmp_path / "plain", diagnostics_every=2))
    train(new_run(corpus, tmp_path / "other", diagnostics_every=2, **change))
    plain, other = read_metrics(tmp_path / "plain"), read_metrics(tmp_path / "other")
    for a, b in zip(plain, other):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a.get("load") == b.get("load")  # a block that is run twice is still counted once


def test_recomputation_really_keeps_less(corpus, tmp_path):
    """What autograd holds between forward and backward, in numbers. (What "selective" keeps, it keeps elsewhere.)"""
    held = {}
    for how in ("none", "full"):
        run = new_run(corpus, tmp_path / how, activation_checkpointing=how)
        trainer = Trainer(run, World(torch.device("cpu")), open_blend((corpus,), 256))
        batch, size = trainer.loader.next(), 0

        def pack_hook(x):
            nonlocal size
            size += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
            trainer.model.loss(batch.tokens, batch.targets)
        held[how] = size
    assert held["none"] > 2 * held["full"]


@pytest.mark.parametrize("where", ["head.weight", "blocks.1.mixer.experts.up"])
def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_parameter(corpus, tmp_path, where):
    trainer = Trainer(new_run(corpus, tmp_path / "run"), World(torch.device("cpu")), open_blend((corpus,), 256))
    trainer.step()
    with torch.no_grad():
        trainer.model.get_parameter(where).view(-1)[5] = math.nan
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    moments = {p: s["exp_avg"].clone() for p, s in trainer.optimizer.state.items()}
    with pytest.raises(ValueError, match=rf"step 2: the loss is .* and {where} is not finite.*nothing was changed"):
        trainer.step()
    for k, v in trainer.model.state_dict().items():
        assert torch.equal(v, before[k]) or k == where
    assert all(torch.equal(s["exp_avg"], moments[p]) for p, s in trainer.optimizer.state.items())


def test_a_gradient_that_is_not_finite_is_named_too(corpus, tmp_path):
    trainer = Trainer(new_run(corpus, tmp_path / "run"), World(torch.device("cpu")), open_blend((corpus,), 256))
    trainer.model.embedding.weight.register_hook(lambda g: g * math.inf)
    with pytest.raises(ValueError, match=r"step 1: .* the gradient of embedding.weight is not finite"):
        trainer.step()


def test_the_first_weights_do_not_depend_on_what_else_was_drawn():
    config = model_config(TINY)
    models = []
    for junk in (0, 7):
        torch.manual_seed(junk)
        with torch.device("meta"):
            model = ng.LanguageModel(config)
        initialize(model, 3, torch.device("cpu"))
        models.append(model)
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters()))
    models[0].check()
    assert torch.get_rng_state().equal(torch.manual_seed(7).get_state())  # and drawing them leaves the global state alone


def test_the_held_out_loss_is_the_mean_over_the_held_out_targets(corpus):
    model = ng.LanguageModel(model_config(TINY)).eval()
    blend = open_blend((corpus,), 256)
    loader = Loader(blend, 1, 32, "val")
    total, count = 0.0, 0
    with torch.no_grad():
        for _ in range(5):
            batch = loader.next()
            total += float(model.loss(batch.tokens, batch.targets, batch.documents, denominator=1.0))
            count += int(batch.counted)
    for rows in (1, 2, 4):  # however they are put together
        result = evaluate(model, blend, 5, rows, 32, World(torch.device("cpu")))
        assert result.tokens == count and result.loss == pytest.approx(total / count, rel=1e-5)


def test_impossible_settings_are_refused_by_name(corpus, tmp_path):
    for settings, word in (
        ({"batch_size": 0}, "--batch-size"),
        ({"micro_batch": 3}, "--micro-batch"),
        ({"precision": "fp64"}, "--precision"),
        ({"recipe": ["rho"]}, "NAME=VALUE"),
        ({"recipe": ["rho=-1"]}, "rho"),
        ({"data": ["nowhere"]}, "not a packed corpus"),
        ({"data": [f"{corpus}=many"]}, "^--data .*=many: .* must be a positive number"),
        ({"val_data": [f"{corpus}=many"]}, "^--val-data .*=many: .* must be a positive number"),
        ({"val_data": [corpus, f"{corpus}=0"]}, "^--val-data .*=0: .* must be a positive number"),
        ({"data": [f"{corpus}=nan"]}, "^--data .*=nan: .* must be a positive number"),
        ({"expert_parallel": 2}, "do not divide"),
        ({"out": ""}, "--out"),
    ):
        with pytest.raises(ValueError, match=word):
            train(new_run(corpus, settings.pop("out", tmp_path / "run"), **settings))
        assert not (tmp_path / "run" / "config.json").exists()
    with pytest.raises(ValueError, match="vocabulary of 256 tokens, larger than the model's 100"):
        train(new_run(corpus, tmp_path / "run", {"vocab_size": 100}))
    with pytest.raises(ValueError, match="no setting 'stepz'"):
        TrainConfig.from_dict({"stepz": 1})


@pytest.mark.slow
def test_compiled_blocks_train_the_same(corpus, tmp_path):
    dense = {"pattern": "*-", "ff": 64}  # two small graphs: the compiler takes most of a minute as it is
    train(new_run(corpus, tmp_path / "plain", dense, steps=2))
    train(new_run(corpus, tmp_path / "compiled", dense, steps=2, compile=True))
    for a, b in zip(losses(tmp_path / "plain"), losses(tmp_path / "compiled")):
        assert a == pytest.approx(b, abs=1e-4)


def test_every_kind_of_block_is_compiled_for_training_and_for_evaluation(corpus, tmp_path, monkeypatch):
    """Dynamo gives up after 8 graphs of one forward by default, and goes on uncompiled with a warning."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    every_kind = {"pattern": "M*E-", "ff": 64}
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, cache_size_limit=8):
        train(new_run(corpus, tmp_path / "compiled", every_kind, steps=2, batch_size=2, eval_every=1, compile=True))
    assert len(losses(tmp_path / "compiled")) == 2


def test_a_dot_reaches_into_the_parts_of_the_recipe():
    config = TrainConfig(recipe=("smgc.R=2", "smgc.start=7", "pmen.profile=smooth", "pmen.tau=1e-3", "C=0.3"), seed=5)
    numbers = recipe_numbers(config, model_config({}))
    assert (numbers.smgc.R, numbers.smgc.start, numbers.pmen.profile, numbers.pmen.tau) == (2.0, 7, "smooth", 1e-3)
    assert numbers.pmen.seed == 5 and numbers.C == 0.3
    for recipe, rule in (
        ("smgc.Q=2", "the names are R, s_min, start"),
        ("smgc=2", "part by part"),
        ("smgc.R=0.5", ">= 1"),
        ("nothing=1", "unknown name 'nothing'; the names are C"),
        ("nonfinite=skip", "training itself checks every gradient"),
        ("C=abc", "expected a number; got 'abc'"),
        ("betas=0.9,x", "expected two numbers separated by a comma"),
        ("tangent=1", "expected true or false"),
        ("smgc.start=1.5", "expected a whole number"),
        ("rho.x=3", "rho has no parts: write rho=VALUE"),
        ("eps_gate.quantile=0.9", "eps_gate has no parts: write eps_gate=VALUE"),
        ("eps_gate=none", "eps_gate must be a number >= 1e-30, 'auto'.*got None"),
        ("lines=Head.s_z", "lines are objects: pass them to recipe.build in Python"),
        ("transport=riemann", "transport must be None, 'project' or 'parallel'; got 'riemann'"),
        ("pmen_embeddings=true,no", "expected true or false; got 'true,no'"),
    ):
        with pytest.raises(ValueError, match=rule):
            recipe_numbers(TrainConfig(recipe=(recipe,)), model_config({}))
    with pytest.raises(ValueError, match="pmen is none"):
        recipe_numbers(TrainConfig(recipe=("pmen=none", "pmen.tau=1")), model_config({}))


def test_the_switches_that_the_paper_leaves_open_are_set_from_text():
    def numbers(*items):
        return recipe_numbers(TrainConfig(recipe=items), model_config({}))

    found = numbers(
        "eps_gate=auto", "eps_gate.quantile=0.9", "eps_gate.every=7", "transport=parallel", "pmen_embeddings=false,true"
    )
    assert found.eps_gate == ng.AutoGate(0.9, 7) and found.transport == "parallel" and found.pmen_embeddings == (False, True)
    later = numbers("eps_gate=auto", "eps_gate=1e-7", "transport=none", "pmen_embeddings=false")  # the last one counts
    assert later.eps_gate == 1e-7 and later.transport is None and later.pmen_embeddings is False
    with pytest.raises(ValueError, match=r"--recipe eps_gate.quantile=1: AutoGate: quantile is a share.*in \(0, 1\); got 1.0"):
        numbers("eps_gate=auto", "eps_gate.quantile=1")


@pytest.mark.parametrize("name", ["1B", "30B", "8B-dense"])
@pytest.mark.parametrize("normalized", [True, False])
def test_full_size_presets_use_the_papers_numbers_in_a_short_run_too(tmp_path, name, normalized):
    settings, model = {"steps": 10, "out": str(tmp_path / "run")}, {"preset": name, "normalized": normalized}
    run = prepare(settings, model, resume=False)
    plain = recipe_numbers(TrainConfig.from_dict(run_defaults(run.model)), run.model)
    assert not run.scaled and recipe_numbers(run.config, run.model, 10) == plain
    assert prepare({**settings, "scaled": True}, model, resume=False).scaled


@pytest.mark.parametrize("model", [{}, {"preset": "pico-dense"}, {"normalized": False}, {"d_model": 768}])
@pytest.mark.parametrize("own", [(), ("betas=0.5,0.6",), ("C=0.3", "warmup=before", "rho=0.1"), ("C=none",)])
def test_settled_numbers_are_the_scaled_ones_to_the_last_digit_and_stay(model, own):
    model = model_config(model)
    own = own if model.normalized else tuple(item for item in own if item.startswith("betas"))
    for steps in (6, 750, 1234, 9999, 16_000, 20_000):
        config = TrainConfig(recipe=own, seed=3)
        found = settled(config, model, steps)
        assert recipe_numbers(found, model, steps) == recipe_numbers(config, model, steps)
        assert recipe_numbers(found, model, 10 * steps) == recipe_numbers(found, model, steps)  # whatever it is asked for later
        assert not found.scaled and settled(found, model, 7) == found and TrainConfig.from_dict(found.to_dict()) == found
        plain = TrainConfig(recipe=own, seed=3, scaled=False)
        assert settled(plain, model, steps) == plain


BAD = "schedule=foo schedule=none rho=0 rho=-1 decay=foo a=nan eps_gate=-1".split()


@pytest.mark.parametrize("item", BAD)
def test_numbers_that_no_optimizer_takes_are_named_before_a_run_is_made(corpus, tmp_path, item):
    with pytest.raises(ValueError, match=f"^--recipe {item}: "):
        new_run(corpus, tmp_path / "run", recipe=["s_z_lr=0.3", item, "C=0.2"])


def test_losses_by_document_and_by_position_are_parts_of_the_held_out_loss(corpus):
    model = ng.LanguageModel(ng.ModelConfig(**{"vocab_size": 256, "d_model": 16, "pattern": "*-", "n_heads": 2, "ff": 32}))
    corpora = [(Corpus(corpus), 1.0)]
    whole = evaluate(model, corpora, 7, 3, 32, World(torch.device("cpu")))
    positions = evaluate_positions(model, corpora, 7, 3, 32)
    loader, counted = Loader(corpora, 1, 32, "val"), torch.zeros(32)
    for _ in range(7):
        counted += (loader.next().targets[0] != -100).float()
    assert float((torch.tensor(positions) * counted).nansum() / counted.sum()) == pytest.approx(whole.loss, rel=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_every_held_out_document_has_its_own_loss(corpus, rows):
    model = ng.LanguageModel(ng.ModelConfig(**{"vocab_size": 256, "d_model": 16, "pattern": "*-", "n_heads": 2, "ff": 32}))
    corpus = Corpus(corpus)
    found = evaluate_documents(model, corpus, rows, 32)
    everything = evaluate(model, [(corpus, 1.0)], 10**6, 4, 32, World(torch.device("cpu")))
    assert sum(count for _, count in found) == everything.tokens and len(found) == corpus.stream("val").documents
    assert sum(total for total, _ in found) / everything.tokens == pytest.approx(everything.loss, rel=1e-5)
    tokens, number = corpus.stream("val").read(0, 10**9)
    lengths = [int((number == d).sum()) for d in range(number.max() + 1)]
    assert [count for _, count in found] == [n - 1 for n in lengths]  # the first token of a document is nobody's target
    second = torch.from_numpy(tokens[number == 1])  # a document's windows begin at multiples of 32 of the whole stream
    cut = 32 - lengths[0] % 32
    assert 0 < cut < len(second)
    with torch.no_grad():
        parts = [model(x[None])[0] for x in (second[:cut], *second[cut:].split(32))]
        loss = torch.nn.functional.cross_entropy(torch.cat(parts)[:-1], second[1:], reduction="sum")
    assert found[1][0] == pytest.approx(float(loss), rel=1e-5)


def test_a_sample_that_cannot_be_made_is_reported_before_the_first_step(corpus, tmp_path):
    for change, model, words in (
        ({"sample_tokens": 64}, {"max_seq_len": 32}, "at most 31"),
        ({"sample_tokens": 8, "sample_prompt": ""}, {}, "must not be empty"),
    ):
        with pytest.raises(ValueError, match=words):
            train(new_run(corpus, tmp_path / words, {**TINY, **model}, steps=2, **change))
        assert not (tmp_path / words).exists()


def test_what_fails_after_a_step_does_not_lose_it(corpus, tmp_path, monkeypatch):
    def broken(self, corpora):
        raise ValueError("no luck")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no luck"):
        patch.setattr(Trainer, "validate", broken)
        train(new_run(corpus, tmp_path / "run", steps=3))
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert train(prepare({"out": str(tmp_path / "run")}, {}, resume=True)) == 0  # the export alone was missing
    assert (tmp_path / "run" / "export" / "config.json").is_file()


def test_a_finished_run_without_checkpoints_stays_finished(corpus, tmp_path):
    out = tmp_path / "run"
    train(new_run(corpus, out, steps=2))
    shutil.rmtree(out / "checkpoints")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert train(prepare({"out": str(out)}, {}, resume=True)) == 0
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    with pytest.raises(ValueError, match="no checkpoint left"):
        prepare({"out": str(out), "steps": 4, "re_anchor": True}, {}, resume=True)


def test_a_line_that_a_full_disk_cut_is_left_out(corpus, tmp_path):
    out = tmp_path / "run"
    train(new_run(corpus, out, steps=2, sample_tokens=4, sample_every=1))
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = (out / name).read_bytes().splitlines(keepends=True)
        (out / name).write_bytes(b'{"step": 1, "te\\u00\n' + b"".join(lines) + b'{"step": 9, "text": "\\u1\xff')
        assert [line["step"] for line in read_lines(out / name)] == [1, 2]
    shutil.rmtree(out / "export")
    assert train(prepare({"out": str(out)}, {}, resume=True)) == 0
    assert [json.loads(line)["step"] for line in (out / "samples.jsonl").read_text().splitlines()] == [1, 2]


def test_an_empty_held_out_split_does_not_have_a_loss_of_zero(tmp_path):
    pack([b"x" * 40] * 40, tmp_path / "c", ByteTokenizer(), val_fraction=0.1)
    corpus = Corpus(tmp_path / "c")
    model = ng.LanguageModel(model_config(TINY))
    found = evaluate(model, [(corpus, 1.0)], 4, 2, 32, World(torch.device("cpu")))
    assert found.tokens > 0 and math.isfinite(found.loss)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngpt_core.data.loader.Batch.counted", property(lambda self: 0))
        assert math.isnan(evaluate(model, [(corpus, 1.0)], 4, 2, 32, World(torch.device("cpu"))).loss)


@pytest.mark.parametrize("weight", ["nan", "inf", "0", "-1", "x"])
def test_a_weight_of_a_blend_is_a_positive_number(corpus, weight):
    with pytest.raises(ValueError, match=f"--data {corpus}={weight}: the weight .*must be a positive number"):
        open_blend((f"{corpus}={weight}",), vocab_size=256)


MISTAKES = [{"scaled": "false"}, {"data": "embedded"}, {"data": (1,)}, {"seed": 2**70}, {"sample_prompt": 5}]


@pytest.mark.parametrize("change", MISTAKES)
def test_a_file_may_hold_anything_and_is_answered_by_the_rule(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        TrainConfig(**change)


# ---- read late: as on a GPU, where the host must not wait for the device -------------------------------------------------
@pytest.fixture
def late(monkeypatch):
    """Steps are read late, and skipped on the device, whatever the device is."""
    monkeypatch.setattr("ngpt_core.train.trainer.on_gpu", lambda x: True)


def clockless(folder):
    return [{k: v for k, v in r.items() if k not in ("time", "tokens_per_s", "mfu")} for r in read_metrics(folder)]


PLAIN = dict(eval_every=3, save_every=4, keep=9, diagnostics_every=1)  # diagnostics: by the readable path, masked or not


def test_a_run_that_is_read_late_is_the_same_run(corpus, tmp_path, late):
    train(new_run(corpus, tmp_path / "late", {"normalized": True}, **PLAIN))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngpt_core.train.trainer.on_gpu", lambda x: False)
        train(new_run(corpus, tmp_path / "plain", {"normalized": True}, **PLAIN))
    assert clockless(tmp_path / "late") == clockless(tmp_path / "plain")
    for step in (4, 6):
        files = [tmp_path / name / "checkpoints" / f"step-{step:08d}" / "model-00000.safetensors" for name in ("late", "plain")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_step_that_is_not_finite_changes_nothing_though_its_error_comes_one_step_later(corpus, tmp_path, late):
    run = new_run(corpus, tmp_path / "run", steps=9, save_every=2, keep=9)
    trainer = Trainer(run, World(torch.device("cpu")), open_blend((corpus,), 256))
    trainer.model.embedding.weight.register_hook(lambda g: g * math.inf if trainer.t == 2 else g)
    for _ in range(2):
        trainer.step()
    state = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    moments = [s[key].clone() for s in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    record = trainer.step()
    assert not record and trainer.t == 3
    with pytest.raises(ValueError, match=r"step 3: .* the gradient of embedding.weight is not finite.*nothing was changed"):
        trainer.step()  # its own gradient is finite, and is skipped as well
    now = [s[key] for s in trainer.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert all(torch.equal(a, b) for a, b in zip(now, moments, strict=True))
    assert all(torch.equal(v, state[k]) for k, v in trainer.model.state_dict().items())
    with pytest.raises(ValueError, match="step 3: "):
        trainer.save()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("save_every", [0, 1])
def test_no_checkpoint_is_written_of_a_step_that_was_not_finite(corpus, tmp_path, late, monkeypatch, save_every):
    real = Trainer.step

    def step(self, diagnose=False):
        if self.t == 2:
            self.model.head.weight.register_hook(lambda g: g * math.nan)
        return real(self, diagnose)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(ValueError, match=r"step 3: .* is not finite"):
        train(new_run(corpus, tmp_path / "run", save_every=save_every, keep=9))
    saved = [path.name for path in (tmp_path / "run").glob("checkpoints/*")]
    assert sorted(saved) == ["step-00000001", "step-00000002"][: 2 * save_every]
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_signal_is_handled_within_two_steps_that_have_their_lines(corpus, tmp_path, late, monkeypatch):
    real = Trainer.step

    def step(self, diagnose=False):
        self.stop_requested = self.t >= 3  # during step 4
        return real(self, diagnose)

    monkeypatch.setattr(Trainer, "step", step)
    assert train(new_run(corpus, tmp_path / "run", steps=20, save_every=0)) == 143
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    monkeypatch.setattr(Trainer, "step", real)
    assert train(prepare({"out": str(tmp_path / "run"), "steps": 7, "re_anchor": True}, {}, resume=True)) == 0
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7]


def test_what_fails_while_a_step_is_unread_loses_no_line(corpus, tmp_path, late, monkeypatch):
    import ngpt_core.train.metrics as metrics

    class Fails(metrics.Callback):
        def step(self, record):
            if record["step"] == 2:
                raise KeyError("mine")

    monkeypatch.setattr(metrics, "LiveLine", Fails)
    with pytest.raises(ValueError, match="the callback Fails failed at step 2"):
        train(new_run(corpus, tmp_path / "run"))
    assert [r["step"] for r in read_metrics(tmp_path / "run")] == [1, 2, 3]  # step 3 had begun
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]


def test_the_clock_of_steps_that_are_read_late_counts_each_second_once(corpus, tmp_path, late, monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr("ngpt_core.train.trainer.time.perf_counter", lambda: float(next(now)))
    trainer = Trainer(new_run(corpus, tmp_path / "run"), World(torch.device("cpu")), open_blend((corpus,), 256))
    records = [trainer.step() for _ in range(4)]
    trainer.finish()
    spent = [128 / r["tokens_per_s"] for r in records]
    assert records[-1]["time"] == sum(spent) == next(now) - 1 and min(spent) > 0
