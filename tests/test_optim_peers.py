"""GatedAdamW in other people's loops: Hugging Face's Trainer, Lightning, GradScaler, torch.compile, the README's five lines."""

import copy
import doctest
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ngpt_core as ng
from ngpt_core import optim


def network(seed: int = 0, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def batch(t: int, dtype=torch.float32):
    g = torch.Generator().manual_seed(t)
    x = torch.randn(8, 6, generator=g).to(dtype)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def groups(model: nn.Module) -> list[dict]:
    """Unit rows for the matrices, coordinates for the rest: what a recipe does, in two lines."""
    named = list(model.named_parameters())
    return [
        dict(params=[(n, p) for n, p in named if p.ndim > 1], unit_dim=-1, pmen=ng.PMEN(), cap=0.05),
        dict(params=[(n, p) for n, p in named if p.ndim == 1], a=1.0),
    ]


def fit(model, optimizer, steps=range(10)) -> list[float]:
    losses = []
    for t in steps:
        x, y = batch(t)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("module", [optim.algorithm, optim.gated_adamw, optim.smgc], ids=lambda m: m.__name__)
def test_the_examples_in_the_docstrings_run(module):
    done = doctest.testmod(module, extraglobs={"torch": torch})
    assert done.attempted > 0 and done.failed == 0


def test_the_readmes_swap_of_adamw_for_gated_adamw_runs():
    readme = Path(__file__).parents[1] / "README.md"
    blocks = [
        b
        for b in re.findall(r"```python\n(.*?)```", readme.read_text(), re.S)
        if "GatedAdamW" in b and "torch.optim.AdamW" in b
    ]
    if not blocks:
        pytest.skip("README.md shows no swap of torch.optim.AdamW for GatedAdamW")
    model = network()
    for block in blocks:
        loop = {"model": model, "torch": torch, "ng": ng, "batches": [batch(t) for t in range(3)]}
        exec(block, loop)
        assert any(isinstance(x, ng.GatedAdamW) for x in loop.values())


def test_a_model_learns_and_its_rows_stay_unit():
    model = network()
    losses = fit(model, ng.GatedAdamW(groups(model), lr=0.1), range(150))
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])  # 0.50 to 0.62 over twelve seeds
    for p in model.parameters():
        if p.ndim > 1:
            torch.testing.assert_close(p.detach().norm(dim=-1), torch.ones(p.shape[0]))


def test_accumulated_gradients_are_the_gradient_of_the_whole_batch():
    whole, parts = network(dtype=torch.float64), network(dtype=torch.float64)
    a, b = ng.GatedAdamW(groups(whole), lr=0.1), ng.GatedAdamW(groups(parts), lr=0.1)
    for t in range(5):
        x, y = batch(t, torch.float64)
        a.zero_grad(), b.zero_grad()
        nn.functional.cross_entropy(whole(x), y).backward()
        for half in (slice(0, 4), slice(4, 8)):
            (nn.functional.cross_entropy(parts(x[half]), y[half]) / 2).backward()
        a.step(), b.step()
    for p, q in zip(weights(whole), weights(parts)):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_a_compiled_model_trains_as_the_plain_one():
    plain = network()
    compiled = torch.compile(copy.deepcopy(plain), backend="aot_eager")
    fit(plain, ng.GatedAdamW(groups(plain), lr=0.1))
    fit(compiled, ng.GatedAdamW(groups(compiled), lr=0.1))  # its names begin with _orig_mod.: the noise is the same
    for p, q in zip(weights(plain), weights(compiled)):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_a_step_inside_a_compiled_function_is_the_plain_step():
    plain = network(dtype=torch.float64)
    traced = copy.deepcopy(plain)
    a, b = (ng.GatedAdamW(groups(m), lr=0.1, smgc=ng.SMGC(start=1)) for m in (plain, traced))
    step = torch.compile(lambda: b.step(), backend="eager")
    for t in range(4):
        x, y = batch(t, torch.float64)
        for model, optimizer, go in ((plain, a, a.step), (traced, b, step)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            go()
    for p, q in zip(weights(plain), weights(traced)):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_grad_scaler_unscales_and_leaves_out_steps_that_overflowed():
    scaled, plain = network(), network()
    a, b = ng.GatedAdamW(groups(scaled), lr=0.1), ng.GatedAdamW(groups(plain), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(6):
        x, y = batch(t)
        a.zero_grad(), b.zero_grad()
        loss = nn.functional.cross_entropy(scaled(x), y)
        if t == 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(a)
        scaler.update()
        if t != 3:
            nn.functional.cross_entropy(plain(x), y).backward()
            b.step()
    assert scaler.get_scale() == 2.0**9
    for p, q in zip(weights(scaled), weights(plain)):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_autocast_in_bfloat16_trains_float32_parameters():
    model = network()
    optimizer = ng.GatedAdamW(groups(model), lr=0.1)
    for t in range(3):
        x, y = batch(t)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.filterwarnings("ignore")  # torch's own, about a single process
def test_torchs_distributed_checkpoint_carries_state_and_settings_flat_or_nested(flat, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    def built():
        model = network()
        return model, ng.GatedAdamW(groups(model), lr=0.1, smgc=ng.SMGC(start=2))

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = built()
    fit(model, optimizer, range(3))
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer, options=options))), checkpoint_id=tmp_path)
    fit(model, optimizer, range(3, 6))

    resumed, other = built()
    state = dict(zip("mo", get_state_dict(resumed, other, options=options)))
    dcp.load(state, checkpoint_id=tmp_path)
    other.param_groups[0]["pmen"], other.param_groups[1]["smgc"] = None, None
    set_state_dict(resumed, other, model_state_dict=state["m"], optim_state_dict=state["o"], options=options)
    assert other.param_groups[0]["pmen"] == ng.PMEN() and other.param_groups[1]["smgc"] == ng.SMGC(start=2)
    fit(resumed, other, range(3, 6))
    assert all(map(torch.equal, weights(model), weights(resumed)))


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def hugging_face(folder, steps, optimizer=None, **kwargs):
    """The real Trainer on a tiny GPT-2, with its own clipping, scheduler and checkpoints."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
    )
    tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=4, learning_rate=0.02, use_cpu=True, report_to=[],
        disable_tqdm=True, save_steps=4, logging_steps=1, lr_scheduler_type="constant", gradient_accumulation_steps=2,
    )  # fmt: skip
    made = optimizer(model) if optimizer else None
    trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(made, None), **kwargs)
    return trainer, model


def unit_rows(model):
    return ng.GatedAdamW(groups(model), lr=0.02, smgc=ng.SMGC(start=2))


def test_hugging_faces_trainer_trains_and_resumes_with_it(tmp_path):
    trainer, model = hugging_face(str(tmp_path / "a"), 8, unit_rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    rows = model.transformer.wte.weight.detach()
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(len(rows)))
    again, resumed = hugging_face(str(tmp_path / "b"), 8, unit_rows)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    for p, q in zip(weights(model), weights(resumed)):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_hugging_faces_trainer_builds_it_from_the_class(tmp_path):
    trainer, _ = hugging_face(str(tmp_path), 3, optimizer_cls_and_kwargs=(ng.GatedAdamW, {"a": 1.0, "eps_num": 0.0}))
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, ng.GatedAdamW) and optimizer.param_groups[0]["a"] == 1.0


# ---- Lightning -------------------------------------------------------------------------------------------------------


def lightning_module(build):
    """(lightning, a LightningModule class around ``network``); ``build(net)``: the optimizer, and a scheduler of its steps."""
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, data, _):
            return nn.functional.cross_entropy(self.net(data[0]), data[1])

        def configure_optimizers(self):
            optimizer, scheduler = build(self.net)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return lightning, Module


def test_lightning_drives_it_through_its_closure(tmp_path):
    def build(net):
        optimizer = ng.GatedAdamW(groups(net), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 10)

    lightning, Module = lightning_module(build)

    def trainer(steps):
        return lightning.Trainer(
            max_steps=steps, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=str(tmp_path), enable_checkpointing=False,
        )  # fmt: skip

    data = torch.utils.data.DataLoader([batch(t) for t in range(10)], batch_size=None)
    module = Module()
    first = trainer(4)
    first.fit(module, data)
    first.save_checkpoint(tmp_path / "ckpt")
    assert first.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.8)
    # the same by hand
    model = network()
    optimizer, scheduler = build(model)
    for t in range(4):
        fit(model, optimizer, [t])
        scheduler.step()
    for p, q in zip(weights(module.net), weights(model)):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)
    second = trainer(6)
    second.fit(Module(), data, ckpt_path=tmp_path / "ckpt")
    assert int(second.optimizers[0].state_dict()["state"][0]["step"]) == 6
