"""A swap without traps: AdamW's habits are refused with a sentence, other people's keys survive, and ng.Schedule is a scheduler
of torch to Hugging Face's Trainer, Accelerate, Lightning, timm, GradScaler, torch.compile and DDP, each saved and resumed."""

import copy
import io
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_optim_peers import batch, fit, groups, hugging_face, lightning_module, network, weights
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

import ngpt_core as ng

STEPS = 8


def built(model=None, **settings):
    """(model, optimizer, schedule): unit rows with cap and noise, coordinates, a schedule with a warmup."""
    model = network() if model is None else model
    optimizer = ng.GatedAdamW(
        [{**groups(model)[0], "peak_cap": 0.05}, {**groups(model)[1], "warmup": 0.5}],
        lr=0.1,
        smgc=ng.SMGC(start=2),
        **settings,
    )
    return model, optimizer, ng.Schedule(optimizer, STEPS)


def train(model, optimizer, schedule, steps):
    for t in steps:
        fit(model, optimizer, [t])
        schedule.step()


def whole():
    """The same by hand, without an interruption."""
    parts = built()
    train(*parts, range(STEPS))
    return weights(parts[0])


def stored(*parts):
    """The states as files: what torch.save writes and torch.load reads without running code."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(parts, states):
    for part, state in zip(parts, states):
        part.load_state_dict(state)


# ---- what AdamW's users type ------------------------------------------------------------------------------------------
def test_adamws_positional_order_is_refused():
    w = [nn.Parameter(torch.ones(3))]
    with pytest.raises(TypeError, match="positional arguments"):
        ng.GatedAdamW(w, 3e-3, (0.9, 0.95), 1e-8, 0.1)
    assert ng.GatedAdamW(w, 3e-3, (0.9, 0.95), weight_decay=0.1).param_groups[0]["betas"] == (0.9, 0.95)


def test_eps_gets_the_sentence_that_a_groups_key_gets():
    w = nn.Parameter(torch.ones(3))
    said = []
    for make in (lambda: ng.GatedAdamW([w], eps=1e-8), lambda: ng.GatedAdamW([{"params": [w], "eps": 1e-8}])):
        with pytest.raises(ValueError, match="AdamW's eps is two numbers here: eps_gate") as error:
            make()
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("name, meant", [("unit_dm", "unit_dim"), ("weightdecay", "weight_decay"), ("amsgrad", None)])
def test_an_argument_that_does_not_exist_is_a_type_error(name, meant):
    with pytest.raises(TypeError, match=f"no argument '{name}'" + (f": did you mean {meant}" if meant else r"\.$")):
        ng.GatedAdamW([nn.Parameter(torch.ones(3))], **{name: 1})


NEAR = {
    "unit_dm": "unit_dim", "unitdim": "unit_dim", "unit_dims": "unit_dim", "Unit-Dim": "unit_dim", "untangent": None,
    "tangnet": "tangent", "eps_gat": "eps_gate", "epsnum": "eps_num", "beta": "betas", "weight_deacy": "weight_decay",
    "peak_lrs": "peak_lr", "warm_up": "warmup", "pmem": "pmen", "caps": "cap",
}  # fmt: skip
FOREIGN = (
    "lr_scale", "initial_lr", "max_lr", "min_lr", "base_lr", "max_momentum", "base_momentum", "momentum", "name", "label", "wd",
    "layer_id", "lr_mult", "weight_decay_mult", "warmup_t", "lr_decay", "swa_lr", "map", "d", "decoupled_weight_decay", "fix",
)  # fmt: skip


def test_a_near_miss_of_our_keys_is_an_error_before_anything_changes():
    for key, meant in NEAR.items():
        w = nn.Parameter(torch.full((2, 3), 2.0))
        group = {"params": [w], "unit_dim": -1, key: 1}
        if meant is None:
            assert ng.GatedAdamW([group]).param_groups[0][key] == 1
            continue
        with pytest.raises(ValueError, match=f"{key!r} is not a key of a parameter group; {meant!r} is"):
            ng.GatedAdamW([group])
        assert w.eq(2).all()


def test_other_peoples_keys_are_kept_untouched_through_steps_and_states():
    def made():
        w = nn.Parameter(torch.ones(2, 3))
        group = {"params": [w], **{key: (key, i) for i, key in enumerate(FOREIGN)}, "initial_lr": 0.5, "lr_scale": 0.25}
        return w, ng.GatedAdamW([group], lr=0.1)

    w, optimizer = made()
    w.grad = torch.ones(2, 3)
    optimizer.step()
    fresh = made()[1]
    for key in FOREIGN:
        fresh.param_groups[0][key] = None
    fresh.load_state_dict(optimizer.state_dict())
    for group in (optimizer.param_groups[0], fresh.param_groups[0]):
        assert group["initial_lr"] == 0.5 and group["lr_scale"] == 0.25 and group["lr"] == 0.1
        assert all(group[key] == (key, i) for i, key in enumerate(FOREIGN) if key not in ("initial_lr", "lr_scale"))


def test_a_bias_on_the_sphere_is_an_error_unless_asked_for():
    def layer():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    refused = "'(bias|1)' has one dimension .3 numbers.*group with unit_dim=None"
    two = lambda m, **own: [{"params": [m.weight]}, {"params": [m.bias], **own}]  # noqa: E731
    for parameters in (layer().parameters(), layer().named_parameters(), two(layer())):
        with pytest.raises(ValueError, match=refused):
            ng.GatedAdamW(parameters, unit_dim=-1)
    with pytest.raises(ValueError, match=refused):
        ng.GatedAdamW([{"params": layer().named_parameters(), "unit_dim": 0}])
    later = layer()
    optimizer = ng.GatedAdamW([later.weight], unit_dim=-1)
    with pytest.raises(ValueError, match=refused):
        optimizer.add_param_group({"params": [later.bias]})
    assert len(optimizer.param_groups) == 1 and abs(later.bias.norm() - 1) > 0.1
    asked, free = layer(), layer()
    before = free.bias.clone()
    ng.GatedAdamW(two(asked, unit_dim=-1), unit_dim=-1)
    ng.GatedAdamW(two(free, unit_dim=None), unit_dim=-1)
    torch.testing.assert_close(asked.bias.norm(), torch.tensor(1.0))
    assert torch.equal(free.bias, before)
    lone = nn.Parameter(torch.ones(4))
    ng.GatedAdamW([lone], unit_dim=-1)  # nothing but vectors: what else could it mean
    torch.testing.assert_close(lone.norm(), torch.tensor(1.0))


# ---- the schedule as torch's ------------------------------------------------------------------------------------------
def test_it_is_a_scheduler_of_torch_with_torchs_names():
    _, optimizer, schedule = built()
    assert isinstance(schedule, LRScheduler) and schedule.optimizer is optimizer
    assert (schedule.last_epoch, schedule.t, schedule._step_count) == (0, 1, 1)
    assert schedule.base_lrs == [0.1, 0.1] == [group["initial_lr"] for group in optimizer.param_groups]
    assert schedule.get_lr() == schedule.get_last_lr()
    schedule.step(5)
    assert schedule.t == 6 and schedule.get_last_lr() == [lr for lr, _ in schedule.at(6)]


def test_it_follows_a_scheduler_of_torch_in_a_sequence():
    w = nn.Parameter(torch.ones(3))
    optimizer = ng.GatedAdamW([w], lr=0.1)
    sequence = SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 3), ng.Schedule(optimizer, 10)], milestones=[3])
    seen = []
    for _ in range(6):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        sequence.step()
    assert seen == pytest.approx([0.01, 0.04, 0.07] + [0.1 * ng.log_decay(t / 10) for t in (1, 2, 3)])


# ---- inside other people's trainers, interrupted and resumed ------------------------------------------------------------
def test_hugging_faces_trainer_saves_and_resumes_the_schedule(tmp_path):
    def trained(folder, **resume):
        made = {}

        def optimizer(model):
            _, made["optimizer"], made["schedule"] = built(model)
            return made["optimizer"]

        trainer, model = hugging_face(str(folder), STEPS, optimizer)
        trainer.lr_scheduler = made["schedule"]
        trainer.train(**resume)
        return model, made["schedule"]

    straight, schedule = trained(tmp_path / "a")
    resumed, again = trained(tmp_path / "b", resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert schedule.t == again.t == STEPS + 1 and again.get_last_lr() == [0.0, 0.0]
    assert all(map(torch.equal, weights(straight), weights(resumed)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate_wraps_saves_and_resumes_it(accumulate, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState, GradientState

    def prepared():
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        return accelerator, accelerator.prepare(*built())

    def run(accelerator, model, optimizer, schedule, steps):
        for t in steps:
            for _ in range(accumulate):  # the same batch again: the mean of equal gradients
                x, y = batch(t)
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.cross_entropy(model(x), y))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        return model

    try:
        accelerator, parts = prepared()
        assert isinstance(parts[2], AcceleratedScheduler) and isinstance(parts[2].scheduler, ng.Schedule)
        run(accelerator, *parts, range(4))
        accelerator.save_state(str(tmp_path / "state"))
        accelerator, parts = prepared()
        accelerator.load_state(str(tmp_path / "state"))
        assert parts[2].scheduler.t == 5
        model = run(accelerator, *parts, range(4, STEPS))
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(True)
    for p, q in zip(weights(model), whole()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_lightning_accepts_saves_and_resumes_it(tmp_path):
    lightning, Module = lightning_module(lambda net: built(net)[1:])

    def fitted(epochs, **resume):
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=str(tmp_path), enable_checkpointing=False,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader([batch(t) for t in range(4)], batch_size=None), **resume)
        return trainer, module

    straight = fitted(2)[1]
    half, _ = fitted(1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    trainer, resumed = fitted(2, ckpt_path=tmp_path / "half.ckpt")
    assert trainer.lr_scheduler_configs[0].scheduler.t == STEPS + 1
    assert all(map(torch.equal, weights(straight.net), weights(resumed.net)))


def layer_decay(model):
    """Groups as timm's param_groups_layer_decay makes them: a scale of the rate per depth, no decay for vectors."""
    return [
        {"lr_scale": 0.5 ** (1 - depth), "weight_decay": 0.05 if p.ndim > 1 else 0.0, "params": [p], "param_names": [name]}
        for depth, layer in enumerate((model[0], model[2]))
        for name, p in layer.named_parameters(prefix=str(depth))
    ]


class TimmsWay:
    """What timm's schedulers do to groups: initial_lr is the base, the written lr is value * lr_scale; step_update(number)."""

    def __init__(self, optimizer, total):
        self.optimizer, self.total = optimizer, total
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.step_update(0)

    def step_update(self, number):
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - number / self.total) * group.get("lr_scale", 1.0)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def real_timm(optimizer, total):
    scheduler = pytest.importorskip("timm.scheduler", reason="timm needs torchvision", exc_type=Exception)
    return scheduler.PolyLRScheduler(optimizer, t_initial=total, power=1.0, lr_min=0.0, t_in_epochs=False)


@pytest.mark.parametrize("way", [TimmsWay, real_timm], ids=["by timm's keys", "timm"])
def test_timms_groups_and_scheduler_scale_the_rates_and_resume(way):
    def made():
        model = network()
        optimizer = ng.GatedAdamW(layer_decay(model), lr=0.1)
        return model, optimizer, way(optimizer, STEPS)

    def run(model, optimizer, scheduler, steps):
        for t in steps:
            fit(model, optimizer, [t])
            scheduler.step_update(t + 1)

    straight = made()
    run(*straight, range(STEPS))
    half = made()
    run(*half, range(4))
    scales, rates = ([group[key] for group in half[1].param_groups] for key in ("lr_scale", "lr"))
    assert rates == pytest.approx([0.05 * s for s in scales]) and sorted(set(scales)) == [0.5, 1.0]
    again = made()
    load(again, stored(*half))
    run(*again, range(4, STEPS))
    assert all(map(torch.equal, weights(straight[0]), weights(again[0])))


def test_our_schedule_honors_timms_layer_decay():
    optimizer = ng.GatedAdamW(layer_decay(network()), lr=0.1)
    schedule = ng.Schedule(optimizer, 10, "linear")
    assert schedule.get_last_lr() == pytest.approx([0.09 * group["lr_scale"] for group in optimizer.param_groups])
    optimizer.param_groups[0]["lr_scale"] = "half"
    with pytest.raises(ValueError, match=r"lr_scale multiplies its rate.*got 'half'"):
        schedule.step()


def test_grad_scaler_saves_and_resumes():
    def run(model, optimizer, schedule, scaler, steps):
        for t in steps:
            x, y = batch(t)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if t == 5 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        return weights(model)

    def made():
        return *built(), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    straight, half, again = made(), made(), made()
    expected = run(*straight, range(STEPS))
    run(*half, range(4))
    load(again, stored(*half))
    assert all(map(torch.equal, run(*again, range(4, STEPS)), expected))
    assert again[3].get_scale() == straight[3].get_scale() and again[1].state_dict()["state"][0]["step"] == STEPS - 1


def test_a_compiled_model_saves_and_a_plain_one_resumes():
    _, optimizer, schedule = parts = built(torch.compile(network(), backend="aot_eager"))
    train(*parts, range(4))
    plain = built()
    load(plain, stored(parts[0]._orig_mod, optimizer, schedule))
    train(*plain, range(4, STEPS))
    for p, q in zip(weights(plain[0]), whole()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_copies_of_optimizer_and_schedule_go_on_alike():
    model, optimizer, schedule = built()
    train(model, optimizer, schedule, range(3))
    twin = copy.deepcopy((model, optimizer, schedule))
    for parts in ((model, optimizer, schedule), twin):
        train(*parts, range(3, STEPS))
    assert all(map(torch.equal, weights(model), weights(twin[0])))


def ddp(rank: int, world: int, folder: str) -> None:
    """DDP on two ranks: four steps, rank 0 saves, everyone resumes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)

    def made():
        model, optimizer, schedule = built(nn.parallel.DistributedDataParallel(network()))
        return model, optimizer, schedule

    def run(model, optimizer, schedule, steps):
        for t in steps:
            x, y = (part[rank * 4 : rank * 4 + 4] for part in batch(t))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()

    parts = made()
    run(*parts, range(4))
    if rank == 0:
        torch.save([part.state_dict() for part in parts], f"{folder}/state.pt")
    dist.barrier()
    again = made()
    load(again, torch.load(f"{folder}/state.pt", weights_only=True))
    run(*again, range(4, STEPS))
    torch.save(weights(again[0]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="gloo is not in this torch")
def test_ddp_saves_and_resumes_and_is_one_process(tmp_path):
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.start_processes(ddp, args=(2, str(tmp_path)), nprocs=2, start_method="spawn")
    for rank in range(2):
        for p, q in zip(torch.load(tmp_path / f"{rank}.pt"), whole()):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-5)
