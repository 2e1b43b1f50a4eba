"""What chapters 11 and 12 show but do not run: their Python listings, their launch scripts, their figures' numbers.

The notebooks' cells run in nbval; these are the lines in their prose.
"""

import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ngpt_core as ng
from ngpt_core.cli import main
from ngpt_core.gpus import GIB, GPUS
from ngpt_core.tools.plan import plan_for
from ngpt_core.train.metrics import read_metrics

pytest.importorskip("plotly", reason='the figures need plotly: pip install "ngpt-core[notebook]"')
from ngpt_book.figures import planning, swap, training

BOOK = Path(__file__).parent.parent / "book"


def listing(word: str) -> str:
    """The Python listing of chapter 12's prose that has this word."""
    cells = json.loads((BOOK / "12_your_own_trainer.ipynb").read_text())["cells"]
    text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in code]
    return found


# ---- chapter 12: other people's trainers -----------------------------------------------------------------------------
def test_the_lines_for_hugging_faces_trainer_run(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    monkeypatch.chdir(tmp_path)
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    tokens = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1))
    names = {
        "ng": ng,
        "torch": torch,
        "model": transformers.GPT2LMHeadModel(config),
        "total_steps": 3,
        "data": [{"input_ids": row, "labels": row} for row in tokens],
    }
    exec(listing("TrainingArguments"), names)
    assert names["trainer"].state.global_step == 3
    assert names["scheduler"].get_last_lr() == [0.0]  # the decay has reached its end
    assert [rate for t in range(1, 5) for rate, _ in names["scheduler"].at(t)] == [
        3e-4 * ng.log_decay(r) for r in (1 / 3, 2 / 3, 1.0, 1.0)
    ]
    assert int(names["optimizer"].state[names["model"].transformer.wte.weight]["step"]) == 3


def test_the_lines_for_lightning_run(tmp_path):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
    names = {"ng": ng, "torch": torch}
    exec(listing("LightningModule"), names)
    data = [(torch.randn(4, 8), torch.randint(0, 3, (4,))) for _ in range(5)]
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(tmp_path), enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(names["Module"](nn.Linear(8, 3)), torch.utils.data.DataLoader(data, batch_size=None))
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, ng.GatedAdamW) and trainer.global_step == 5 and optimizer.param_groups[0]["lr"] == 0.0
    (config,) = trainer.lr_scheduler_configs
    assert [rate for t in range(1, 6) for rate, _ in config.scheduler.at(t)] == [
        3e-4 * ng.log_decay(t / 5) for t in range(1, 6)
    ]


def test_the_lines_for_accelerate_run():
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState

    names = {"ng": ng, "torch": torch, "model": nn.Linear(4, 3), "total_steps": 3}
    try:
        exec(listing("Accelerator()"), names)
        for _ in range(3):
            names["accelerator"].backward(names["model"](torch.ones(1, 4)).sum())
            names["optimizer"].step()
            names["scheduler"].step()
        assert names["scheduler"].scheduler.t == 4 and names["scheduler"].get_last_lr() == [0.0]
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(True)


def on_two_ranks(script: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


TWINS = """
import torch
import ngpt_core as ng
total_steps = 3
torch.manual_seed(0)
sizes = dict(d_model=32, pattern="ME*E", n_heads=2, n_kv_heads=1, mamba_heads=2, mamba_head_dim=16, state=8, groups=2, chunk=16)
model = ng.LanguageModel(ng.preset("pico", **sizes)).double()
tokens = torch.randint(0, 256, (total_steps, 4, 33))
"""
STEPS = """
for step in range(total_steps):
    x = tokens[step, rows]
    model.loss(x[:, :-1], x[:, 1:]).backward()
    load = torch.stack(model.stats["load"])
    everywhere(load)
    optimizer.step()
    optimizer.zero_grad()
    model.update_router_bias(list(load))
    schedule.step()
"""


def test_the_lines_for_our_model_on_fsdp2_train_and_save_what_one_process_does(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(
        TWINS + "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "everywhere, rows = dist.all_reduce, slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)\n"
        + listing("register_fsdp_forward_method")
        + STEPS
        + listing("full_tensor")
        + "\ndist.destroy_process_group()\n"
    )
    on_two_ranks(script)
    names = {"everywhere": lambda load: None, "rows": slice(0, 4)}
    exec(TWINS + "optimizer, schedule = ng.recipe.build(model, total_steps)" + STEPS, names)
    found = ng.load(tmp_path / "model").state_dict()
    for name, x in names["model"].state_dict().items():
        torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-8, msg=name)
    fresh = {}
    exec(TWINS, fresh)
    assert max(float((found[name] - x).abs().max()) for name, x in fresh["model"].state_dict().items()) > 0.01


def test_the_lines_for_fsdp2_run_on_two_ranks(tmp_path):
    """Rows stay whole, and a step on two ranks is the step of one."""
    script = tmp_path / "two.py"
    script.write_text(
        "import torch, torch.distributed as dist\nimport ngpt_core as ng\nfrom torch import nn\n"
        "dist.init_process_group('gloo')\ntorch.manual_seed(0)\n"
        "model = nn.Module()\nmodel.layers = nn.ModuleDict({str(i): nn.Linear(6, 6) for i in range(2)})\n"
        "model.forward = lambda x: model.layers['1'](model.layers['0'](x).relu())\n"
        + listing("model.layers.values()")
        + "\nmodel.forward(torch.ones(3, 6)).square().mean().backward()\noptimizer.step()\n"
        "whole = {n: p.full_tensor().detach() for n, p in model.named_parameters()}\n"
        "if dist.get_rank() == 0: torch.save(whole, 'after.pt')\ndist.destroy_process_group()\n"
    )
    on_two_ranks(script)
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(i): nn.Linear(6, 6) for i in range(2)})
    layers["1"](layers["0"](torch.ones(3, 6)).relu()).square().mean().backward()
    ng.GatedAdamW(layers.named_parameters(), lr=3e-4).step()
    after = torch.load(tmp_path / "after.pt")
    for name, p in layers.named_parameters():
        torch.testing.assert_close(after[f"layers.{name}"], p.detach())


# ---- chapter 11: the launch scripts ----------------------------------------------------------------------------------
SMALL = "--preset pico --steps 3 --batch-size 4 --seq-len 64 --micro-batch 2 --eval-windows 2 --sample-tokens 4"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    (folder / "text.txt").write_text("the cat sat on the mat. the dog sat on the log.\n" * 400)
    assert main(["data", "pack", str(folder / "text.txt"), "--out", str(folder / "data")]) == 0
    return folder / "data"


@pytest.mark.parametrize("name, ranks", [("one_gpu.sh", 1), pytest.param("eight_gpus.sh", 2, marks=pytest.mark.slow)])
def test_a_launch_script_trains_a_small_model_and_runs_again_as_a_resume(name, ranks, packed, tmp_path):
    """Only the number of processes and some settings are changed; a second start finds the run finished."""
    script = tmp_path / name
    script.write_text((BOOK / "launch" / name).read_text().replace("--nproc-per-node 8", f"--nproc-per-node {ranks}"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "DATA": str(packed), "OUT": str(tmp_path / "run"), "OMP_NUM_THREADS": "1"}
    for message in ("", "is finished"):
        done = subprocess.run(["bash", str(script), *SMALL.split()], capture_output=True, text=True, env=env)
        assert done.returncode == 0 and message in done.stderr, done.stderr[-3000:]
    assert len(read_metrics(tmp_path / "run")) == 3


def test_the_slurm_script_is_a_script_and_asks_for_what_it_starts():
    path = BOOK / "launch" / "many_nodes.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    text = path.read_text()
    assert "--nodes=8" in text and "--nnodes 8" in text and "--gpus-per-node=8" in text and "--nproc-per-node 8" in text


# ---- chapter 11: the figures -----------------------------------------------------------------------------------------
FOR_30B = {"expert_parallel": 8, "replicas": 1, "micro_batch": 2, "activation_checkpointing": "selective"}


@pytest.fixture(scope="module")
def page():
    """The plan of 30B on 64 H100 in a layout that is stored."""
    return plan_for(FOR_30B, {"preset": "30B"}, 64, "h100-80gb", 0.35)[0]


def test_the_stored_layouts_are_those_of_the_planner(page):
    total, step = float(re.search(r"total\s+([\d.]+)", page)[1]), float(re.search(r"about ([\d.]+) s per step", page)[1])
    hand = planning.by_hand("30B", 8, "selective", 2)
    assert sum(hand[part][3] for part in training.PARTS) == pytest.approx(total, rel=0.02) == hand["at64"]
    assert hand["step64"] == pytest.approx(step, rel=0.05) and hand["here"] == 75.0
    assert sum(hand[part][3] for part in planning.SPENT) == pytest.approx(hand["step64"], rel=0.01)


def test_the_stored_scaling_is_that_of_the_benchmark():
    from ngpt_book.data import make_scaling, stored

    assert stored("scaling") == make_scaling.scaling()
    for name in ("1B", "14B", "30B"):
        found = planning.reach(name)
        assert [sum(found[cause][i] for cause in planning.CAUSES) for i in range(3)] == pytest.approx([100] * 3, abs=0.1)


@pytest.mark.parametrize("gpu", ["a100-40gb", "h100-80gb"])
def test_the_planned_bar_is_the_shortest_step_that_fits(gpu):
    room, planned = GPUS[gpu].room / GIB, training.planned("30B", gpu, 64)
    ways = [way for key, way in training.layouts()["30B"].items() if key.startswith("64 ")]
    fits = [way for way in ways if sum(way["memory"].values()) <= room]
    best = min(fits, key=lambda way: way["seconds"]["total"])
    assert planned["total"] == pytest.approx(sum(best["memory"].values())) and planned["left"] >= 0


def test_without_a_loss_the_scaled_out_days_are_the_pages(page):
    days = float(re.search(r"about ([\d.]+) days", page)[1])
    found = planning.scaling_out("30B", "h100-80gb", 0.35, 1.0)
    assert found["days"][3] == pytest.approx(days, abs=0.05) and found["ideal"] == pytest.approx(found["days"])


def test_the_lost_share_of_the_time_is_that_of_a_simulated_job():
    """Failures at random moments, work since the last save computed again: nothing of the formula is used."""
    draw, delta, M = random.Random(0), 60.0, 40000.0
    tau = planning.best_interval(delta, M)

    def simulated(tau: float, work: float = 4e7) -> float:
        clock, done, since = 0.0, 0.0, 0.0
        failure = draw.expovariate(1 / M)
        while done < work:
            length = tau - since + delta  # to the end of the next save
            if clock + length > failure:
                clock, since = failure, 0.0  # everything since the last save is lost
                failure += draw.expovariate(1 / M)
            else:
                clock, done, since = clock + length, done + tau, 0.0
        return clock / done - 1

    for t in (tau / 3, tau, 3 * tau):
        assert simulated(t) == pytest.approx(sum(planning.waste(t, delta, M)), rel=0.12)
    lost = {t: sum(planning.waste(t, delta, M)) for t in (0.9 * tau, tau, 1.1 * tau)}
    assert min(lost, key=lost.get) == tau


# ---- chapter 12: the figures -----------------------------------------------------------------------------------------
def test_at_a_1_the_gated_curve_is_adamws():
    for scale in swap.SCALES:
        v = swap.swapped(scale, 1.0, 1e-8)
        torch.testing.assert_close(v["gated"], v["adamw"], rtol=1e-3, atol=1e-3)
    v = swap.swapped(1e-9, 0.5, 1e-8)
    assert v["gated_end"] < v["adamw_end"] - 0.4


def test_stacked_runs_do_not_touch_each_other():
    """One run alone, on the same batches: the curve that it has among the others."""
    stacked = swap.on_the_sphere(0.3, 2, 10, "off")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "FACTORS", (10,))
        swap._sphere.cache_clear()
        alone = swap.on_the_sphere(0.3, 2, 10, "off")
    swap._sphere.cache_clear()
    torch.testing.assert_close(stacked["loss"], alone["loss"], rtol=1e-4, atol=1e-4)


def test_no_row_turns_further_than_the_cap():
    for cap in (5, 2, 1):
        assert swap.on_the_sphere(0.3, cap, 100, "off")["worst"] <= cap * (1 + 1e-4)
    assert swap.on_the_sphere(0.3, 180, 100, "off")["worst"] > 9
    assert math.isclose(swap.on_the_sphere(0.3, 1, 100, "off")["worst"], 1.0, rel_tol=1e-3)
