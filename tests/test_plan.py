"""The plan: its FLOPs against torch's own counter, its counts against the model, its advice against itself.

(Its parameter and optimizer memory is compared with real FSDP2 shards in test_parallel.py.)
"""

import re
import shlex

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import ngpt_core as ng
from ngpt_core.cli import main
from ngpt_core.gpus import GPUS
from ngpt_core.nn import fused
from ngpt_core.tools.layout import memory, state_bytes
from ngpt_core.tools.plan import plan, plan_for
from ngpt_core.train.config import TrainConfig
from ngpt_core.train.flops import flops_per_token


@pytest.mark.parametrize("change", [{}, {"activation": "swiglu"}, {"n_kv_heads": 2}])
def test_flops_are_those_that_torch_counts(change):
    """Forward and backward of a dense model, counted by torch from the operators that ran. (It does not know ours.)"""
    config = ng.preset("pico-dense", **change)
    model, T = ng.LanguageModel(config), 64
    tokens = torch.randint(256, (2, T))
    with fused.plain(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).square().mean().backward()
    attention = config.n_heads * config.head_dim * T * config.pattern.count("*") * 6  # torch sees products with all T keys
    assert counter.get_total_flops() / (2 * T) == pytest.approx(flops_per_token(config, T) + attention, rel=0.03)


def test_flops_of_the_ladder_are_six_times_the_active_parameters_and_a_little_more():
    from ngpt_core.presets import count_parameters

    for name in ("1B", "7B", "30B"):
        config = ng.preset(name)
        assert 1.0 < flops_per_token(config, 4096) / (6 * count_parameters(config).active) < 1.3


def test_the_help_names_every_gpu(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = "".join(capsys.readouterr().out.split())  # argparse breaks lines at hyphens too
    assert [gpu for gpu in GPUS if gpu not in text] == []


def test_one_rank_holds_every_parameter_and_two_moments():
    config = ng.preset("pico")
    numel = sum(p.numel() for p in ng.LanguageModel(config).parameters())
    assert state_bytes(config, TrainConfig(), 1) == {"parameters": 4 * numel, "optimizer": 8 * numel}


def test_more_ranks_need_less_each_and_recomputation_less_still():
    config = ng.preset("7B")
    settings = TrainConfig(batch_size=64, seq_len=4096, micro_batch=1)
    totals = [memory(config, settings, ranks).total for ranks in (2, 8, 32)]
    assert totals == sorted(totals, reverse=True)
    kept = [
        memory(config, TrainConfig(batch_size=64, seq_len=4096, micro_batch=1, activation_checkpointing=how), 8).activations
        for how in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize("pattern", ["ME", "-"])
def test_a_model_without_attention_is_planned_too(pattern):
    _, fits = plan(ng.preset("pico", pattern=pattern, ff=256), TrainConfig(steps=5), 8, "h100-80gb")
    assert fits


def test_the_page_for_the_paper_s_largest_model(capsys):
    assert main(["plan", "--preset", "30B", "--gpus", "64", "--gpu", "h100-80gb"]) == 0
    page = capsys.readouterr().out
    for text in (
        "31.578B parameters, 3.228B active",
        "1,000.0B tokens",
        "memory per rank",
        "fits",
        "0.00231",
        "#SBATCH --nodes=8",
        "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100",
        "-m ngpt_core train --preset 30B",
    ):
        assert text in page, text
    rates = {line.split()[0] for line in page.splitlines() if line.startswith("  0.")}
    assert rates == {"0.5", "0.2", "0.00463", "0.00347", "0.00231"}  # s_z; alpha, s_qk; router x2; experts x1.5; C/sqrt(d)


def test_what_does_not_fit_says_what_would_and_that_does(capsys):
    assert main(["plan", "--preset", "30B", "--gpus", "4", "--gpu", "a100-40gb"]) == 1
    page = capsys.readouterr().out
    assert "DOES NOT FIT" in page
    advice = page.split("it would fit with: ")[1].splitlines()[0].split("; or ")[0]
    flags = dict(zip(advice.split()[::2], advice.split()[1::2]))
    again = {"micro_batch": int(flags["--micro-batch"]), "activation_checkpointing": flags["--activation-checkpointing"]}
    assert plan_for(again, {"preset": "30B"}, int(flags["--gpus"]), "a100-40gb", 0.35)[1]


def test_the_command_on_the_page_is_one_that_the_trainer_takes():
    from ngpt_core.cli import _parser

    page, _ = plan_for({"expert_parallel": 8, "replicas": 2}, {"preset": "14B"}, 64, "h100-80gb", 0.35)
    assert max(map(len, page.splitlines())) < 100
    command = page.split("-m ngpt_core ")[1].replace("\\\n", " ")
    args = _parser("train").parse_args(command.split())
    assert args.preset == "14B" and args.expert_parallel == 8 and args.replicas == 2 and args.resume


def test_invalid_arguments_are_named():
    config = ng.preset("1B")
    for settings, gpus, gpu, word in (
        ({}, 8, "h900", "unknown GPU 'h900'"),
        ({"replicas": 3}, 8, "h100-80gb", "do not divide"),
        ({"expert_parallel": 3}, 24, "h100-80gb", "128 experts per layer do not divide"),
        ({"batch_size": 12}, 8, "h100-80gb", "--batch-size"),
        ({}, 0, "h100-80gb", "--gpus must be at least 1"),
    ):
        with pytest.raises(ValueError, match=word):
            plan(config, TrainConfig(**{"batch_size": 48, "steps": 10, **settings}), gpus, gpu)
    with pytest.raises(ValueError, match="--steps"):
        plan(ng.preset("pico"), TrainConfig(), 1, next(iter(GPUS)))


def test_a_t4_is_planned_in_fp32_for_it_has_no_bf16_units():
    """Its 65 TFLOP/s are of fp16, in which the trainer does not compute: an eighth of that, and wider activations."""
    t4 = GPUS["t4-16gb"]
    assert (t4.precision, t4.peak) == ("fp32", 8.1e12) and GPUS["a100-40gb"].precision == "bf16"
    page, fits = plan_for({"steps": 2000, "batch_size": 32, "seq_len": 512}, {"preset": "mini"}, 1, "t4-16gb", 0.35)
    assert fits and "in fp32 (8.1 TFLOP/s each)" in page and "--precision" not in page.split("to start it")[1]
    with pytest.raises(ValueError, match="no bf16 units"):
        plan_for({"steps": 9, "precision": "bf16"}, {"preset": "mini"}, 1, "t4-16gb", 0.35)


def test_fp32_needs_wider_activations_and_says_so_in_the_command():
    config, settings = ng.preset("1B"), {"batch_size": 64, "seq_len": 4096, "micro_batch": 1}
    half, full = (memory(config, TrainConfig(precision=p, **settings), 8) for p in ("bf16", "fp32"))
    assert full.activations > 1.4 * half.activations and full.moments == half.moments
    page, _ = plan_for({"precision": "fp32"}, {"preset": "1B"}, 8, "a100-80gb", 0.35)
    assert "in fp32 (19.5 TFLOP/s each)" in page and "--precision fp32" in page.split("to start it")[1]


def test_auto_takes_bf16_where_there_are_units_for_it(monkeypatch):
    """torch says that a T4 supports bfloat16, for it can emulate it; asked for units, it says no."""
    from ngpt_core.train.world import uses_bf16

    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for units in (True, False):

        def answer(including_emulation=True, units=units):
            return including_emulation or units

        monkeypatch.setattr(torch.cuda, "is_bf16_supported", answer)
        assert uses_bf16(TrainConfig(), gpu) is units and not uses_bf16(TrainConfig(), cpu)
        assert uses_bf16(TrainConfig(precision="bf16"), gpu) and not uses_bf16(TrainConfig(precision="fp32"), gpu)


def test_the_command_carries_what_was_asked_for():
    text, _ = plan_for({"recipe": ("rho=0.1", "router_multiplier=7"), "reshard": False, "batch_size": 384},
                       {"preset": "1B", "d_model": 1024, "C": 0.1}, 12, "h100-80gb", 0.35)  # fmt: skip
    command = " ".join(text.partition("to start it")[2].split()).replace(" \\", "")
    for flag in ("--d-model 1024", "--C 0.1", "--recipe rho=0.1 router_multiplier=7", "--no-reshard", "--batch-size 384",
                 "--nnodes 2 --nproc-per-node 6"):  # fmt: skip
        assert flag in command, flag
    assert "--data DIR " in command
    text, _ = plan_for({"sample_prompt": "hello world", "data": ("my corpus=2", "b"), "steps": 5},
                       {"preset": "pico", "pattern": "M*E"}, 1, "h100-80gb", 0.35)  # fmt: skip
    words = shlex.split(text.partition("-m ngpt_core ")[2].replace("\\\n", " "))
    for flag, values in {"--sample-prompt": ["hello world"], "--pattern": ["M*E"], "--data": ["my corpus=2", "b"]}.items():
        assert words[words.index(flag) + 1 :][: len(values)] == values


def test_the_command_goes_where_it_was_asked_to():
    text, _ = plan_for({"out": "my run", "steps": 5}, {"preset": "pico"}, 1, "h100-80gb", 0.35)
    words = shlex.split(text.partition("-m ngpt_core ")[2].replace("\\\n", " "))
    assert words[words.index("--out") + 1] == "my run"


def test_small_numbers_are_shown_and_not_rounded_to_zero():
    page, _ = plan_for({"steps": 10}, {"preset": "pico"}, 1, "h100-80gb", 0.35)
    first = page.partition("memory per rank")[0]
    assert "= 20,480 tokens" in first and "MFLOPs per token" in first and not re.search(r"\b0(\.0+)?(M| [A-Zs])", first), first


def test_the_rates_on_the_page_are_those_of_the_recipe():
    text, _ = plan_for({"recipe": ("router_multiplier=7",), "batch_size": 384},
                       {"preset": "1B", "d_model": 1024, "C": 0.1}, 12, "h100-80gb", 0.35)  # fmt: skip
    rates = text.partition("(peak)")[2]
    assert f"{7 * 0.1 / 32:.3g} " in rates  # the router's


def test_a_plan_refuses_what_a_run_would_refuse():
    with pytest.raises(ValueError, match=r"--recipe schedule=foo: .*log, cosine"):
        plan_for({"recipe": ("schedule=foo",)}, {"preset": "1B"}, 8, "h100-80gb", 0.35)
    with pytest.raises(ValueError, match="--seq-len 8192 is longer than --max-seq-len 10"):
        plan_for({}, {"preset": "1B", "max_seq_len": 10}, 8, "h100-80gb", 0.35)


@pytest.mark.parametrize("change", [{"replicas": 4}, {"expert_parallel": 8}, {"micro_batch": 7}])
def test_a_run_that_could_not_be_started_is_not_planned(change):
    with pytest.raises(ValueError, match=r"do(es)? not divide"):
        plan_for(change, {"preset": "1B"}, 2, "h100-80gb", 0.35)
