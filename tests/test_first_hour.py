"""What a user meets in the first hour: choices in --help, the kernel's message, a sample's prompt, a readable report."""

import json
import os
import subprocess
import sys

import pytest
from runs import new_run, sentences

from ngpt_core.cli import main
from ngpt_core.data.corpus import open_corpus
from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer
from ngpt_core.presets import PRESETS
from ngpt_core.train.loop import train
from ngpt_core.train.trainer import PROMPT


def help_of(command, capsys) -> str:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return " ".join(capsys.readouterr().out.split()).replace("- ", "-")  # lines break after hyphens


def test_flags_with_names_list_them(capsys):
    text = help_of("train", capsys)
    for choices in (
        "--device {auto,cpu,cuda}", "--precision {auto,fp32,bf16}", "--activation {relu2,swiglu}", "--lgp-form {ratio,power}",
        "--activation-checkpointing {none,selective,full}",
    ):  # fmt: skip
        assert choices in text
    for command in ("train", "plan", "demo"):
        shown = help_of(command, capsys)
        assert all(name in shown for name in PRESETS), command
    for command in ("eval", "generate"):
        assert "--device {auto,cpu,cuda}" in help_of(command, capsys)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "corpus"
    pack(sentences(60), folder, ByteTokenizer(), val_fraction=0.1)
    return str(folder)


def test_a_sample_continues_the_start_of_a_held_out_document(corpus, tmp_path):
    run = new_run(corpus, tmp_path / "run", steps=1, sample_tokens=4)
    assert run.config.sample_prompt is None
    assert train(run) == 0
    (sample,) = [json.loads(line) for line in open(tmp_path / "run" / "samples.jsonl")]
    held_out = open_corpus(corpus).stream("val")
    start = bytes(held_out.read(0, PROMPT)[0].tolist()).split(b"\0")[0].decode()
    assert len(start) > 3 and sample["text"].startswith(start)
    assert train(new_run(corpus, tmp_path / "own", steps=1, sample_tokens=4, sample_prompt="zebra")) == 0
    assert json.loads(open(tmp_path / "own" / "samples.jsonl").readline())["text"].startswith("zebra")


@pytest.mark.slow  # it compiles
def test_the_first_run_says_that_it_compiles_and_the_second_does_not(corpus, tmp_path):
    from ngpt_core.native import compiler

    if compiler() is None:
        pytest.skip("no C++ compiler")
    env = {**os.environ, "NGPT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    flags = "--preset pico --steps 1 --batch-size 2 --seq-len 32 --sample-tokens 0 --no-tensorboard"
    command = [sys.executable, "-m", "ngpt_core", "train", "--data", corpus, *flags.split()]
    said = [
        subprocess.run([*command, "--out", str(tmp_path / name)], env=env, capture_output=True, text=True, check=True).stderr
        for name in ("a", "b")
    ]
    assert said[0].count("compiling the kernels for this CPU, once on this machine") == 1 and "compiling" not in said[1]


def test_the_legend_of_a_report_is_away_from_the_buttons(corpus, tmp_path):
    pytest.importorskip("plotly")
    assert train(new_run(corpus, tmp_path / "run", steps=3)) == 0
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count('"legend":{"y":-0.18,"yanchor":"top"}') >= 1  # plotly's buttons are above the plot
