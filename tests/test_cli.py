"""The command line: every command does its work, and every mistake is one sentence and an exit status that is not 0."""

import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys

import pytest
from runs import TINY

from ngpt_book.data import stored
from ngpt_core.cli import main
from ngpt_core.tools.demo import SEED_SPREAD, half_verdict, paired, verdict
from ngpt_core.train.metrics import read_metrics
from ngpt_core.train.trainer import Trainer

SIZES = ["--batch-size=2", "--seq-len=32", "--eval-windows=4", "--sample-tokens=4", "--no-tensorboard"]
MODEL = ["--preset=pico", *(f"--{k.replace('_', '-')}={v}" for k, v in TINY.items() if k != "preset")]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", *MODEL, *SIZES, "--steps=4", f"--data={corpus}", f"--out={folder}", "--save-every=2"]) == 0
    return folder


def sentence(capsys, argv) -> str:
    """What a command that must fail says: one line on stderr."""
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("ngpt: ") and captured.err.count("\n") == 1 and captured.out == "", captured
    return captured.err


def test_pack_train_eval_generate_report(tmp_path, capsys, monkeypatch):
    """A user's afternoon, from a text file to a page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("the cat sat on the mat. the dog sat on the log.\n" * 200)
    assert main(["data", "pack", "book.txt", "--out", "packed", "--tokenizer", "bytes"]) == 0
    assert "held out (by tails)" in capsys.readouterr().out
    assert main(["data", "check", "packed"]) == 0
    assert main(["train", *MODEL, *SIZES, "--steps", "12", "--data", "packed", "--out", "run", "--eval-every", "4"]) == 0
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoints", "config.json", "export", "metrics.jsonl", "samples.jsonl",
    ]  # fmt: skip
    records = read_metrics("run")
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    capsys.readouterr()
    assert main(["eval", "run", "--json", "--windows", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["loss"] == pytest.approx(records[-1]["val_loss"], abs=1e-4)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / 0.6931, rel=0.01) and len(result["loss_by_position"]) == 32
    assert main(["eval", "run", "--windows", "4"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(["generate", "run", "--prompt", "the ", "--max-new-tokens", "10", "--temperature", "0"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the ")
    main(["generate", "run", "--prompt", "the ", "--max-new-tokens", "10", "--temperature", "0"])
    assert capsys.readouterr().out == first
    assert main(["report", "run"]) == 0
    assert (tmp_path / "report.html").stat().st_size > 10**6


def test_generation_streams_piece_by_piece(run):
    """The text arrives while it is written: the first piece is there before the last is drawn."""
    from ngpt_core.tools.generate import generate

    pieces = generate(str(run), "the cat", 20, 0, "cpu", temperature=1.0)
    assert next(pieces) == "the cat"
    assert len("".join(pieces)) >= 1
    whole = "".join(generate(str(run), "the cat", 20, 0, "cpu", temperature=1.0))
    assert whole == "".join(generate(str(run), "the cat", 20, 0, "cpu", temperature=1.0))
    assert whole != "".join(generate(str(run), "the cat", 20, 1, "cpu", temperature=1.0))


def test_an_unfinished_run_generates_from_its_newest_checkpoint(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "export")
    argv = ["--prompt", "the ", "--max-new-tokens", "8", "--temperature", "0"]
    main(["generate", str(run), *argv])
    finished = capsys.readouterr().out
    main(["generate", str(tmp_path / "run"), *argv])
    assert capsys.readouterr().out == finished
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "no model yet" in sentence(capsys, ["generate", str(tmp_path / "run")])


def test_tokens_in_place_of_steps_count_in_the_batches_of_the_preset(tmp_path, capsys):
    for argv, steps, tokens in (
        (["--preset=pico", "--tokens=100000"], 49, 49 * 8 * 256),
        (["--preset=1B", "--tokens=100000"], 1, 512 * 8192),
    ):
        assert main(["train", *argv, "--dry-run"]) == 0
        assert f"{steps} steps, {tokens:,} tokens" in capsys.readouterr().out


def test_a_run_that_goes_on_is_no_longer_the_model_that_it_exported(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    argv = ["train", *MODEL, "--baseline", *SIZES, f"--data={corpus}", f"--out={out}", "--recipe", "eta_min=1.0", "lr=0.01"]
    assert main([*argv, "--steps=4"]) == 0
    shutil.copytree(out / "export", tmp_path / "four")
    longer = [*argv, "--steps=8", "--re-anchor", "--resume", "--save-every=2"]
    real = Trainer.step
    try:
        Trainer.step = lambda self, look: real(self, look) if self.t < 6 else (_ for _ in ()).throw(KeyboardInterrupt)
        assert main(longer) == 130
    finally:
        Trainer.step = real
    assert f"{out / 'export'} is removed" in capsys.readouterr().err

    def loss(folder):
        assert main(["eval", str(folder), "--json", "--windows=4", f"--data={corpus}", "--seq-len=32"]) == 0
        return json.loads(capsys.readouterr().out)["loss"]

    four, six = loss(tmp_path / "four"), loss(out)
    assert main(longer) == 0
    capsys.readouterr()
    assert loss(out) < six < four


def test_a_prompt_that_the_tokenizer_drops_and_a_terminal_without_unicode(run, tmp_path, monkeypatch, capsys):
    from ngpt_core.data.tokenizers import ByteTokenizer
    from ngpt_core.train import trained

    class Dropping(ByteTokenizer):
        def encode(self, documents):
            return [super(Dropping, self).encode([document.strip()])[0] for document in documents]

    monkeypatch.setattr(trained.RunFolder, "tokenizer", lambda folder: Dropping())
    assert "has no tokens" in sentence(capsys, ["generate", str(run), "--prompt= "])
    monkeypatch.undo()
    command = [sys.executable, "-m", "ngpt_core", "generate", str(run), "--prompt=é", "--max-new-tokens=2"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, env=env)
    assert done.returncode == 0 and done.stdout.startswith(rb"\xe9"), done


def test_a_separator_may_be_a_new_line_as_a_shell_writes_it(tmp_path, capsys):
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree\n" * 10)
    argv = ["data", "pack", str(tmp_path / "lines.txt"), f"--out={tmp_path / 'c'}", "--val-fraction=0"]
    assert main([*argv, r"--separator=\n"]) == 0
    assert "in 30 documents" in capsys.readouterr().out


def test_dry_run_prints_the_recipe_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--preset", "30B", "--dry-run"]) == 0
    page = capsys.readouterr().out
    for text in ("parameter", "peak lr", "warmup", "cap", "noise", "embedding.weight", "router", "1°"):
        assert text in page, text
    assert page.splitlines()[-1].endswith("238,419 steps, 1,000,001,765,376 tokens")  # the preset's, as in a real run
    assert main(["train", "--preset", "pico", "--baseline", "--steps", "7", "--dry-run"]) == 0
    page = capsys.readouterr().out
    assert "0.0022" in page and page.splitlines()[-1].endswith("7 steps, 14,336 tokens")
    assert "--steps N" in sentence(capsys, ["train", "--preset", "pico", "--dry-run"])  # a real run would not know either
    assert list(tmp_path.iterdir()) == []


def test_settings_come_from_a_file_and_flags_override_them(corpus, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(
        f'steps = 2\nbatch-size = 2\nseq_len = 32\ndata = ["{corpus}"]\nseed = 5\nsample_tokens = 0\n'
    )
    argv = [
        "train",
        *MODEL,
        "--config",
        str(tmp_path / "run.toml"),
        "--seed",
        "7",
        "--out",
        str(tmp_path / "run"),
        "--eval-windows=2",
    ]
    if sys.version_info < (3, 11):
        assert main(argv) == 1 and "TOML needs Python 3.11 or newer; write the settings as JSON" in capsys.readouterr().err
        return
    assert main(argv) == 0
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
    assert (recorded["seq_len"], recorded["batch_size"], recorded["seed"]) == (32, 2, 7)


def test_a_path_in_a_file_may_start_with_the_home_folder(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus").symlink_to(corpus)
    settings = {"out": "~/run", "data": ["~/corpus=2"], "steps": 1, "seq_len": 32, "batch_size": 2, "sample_tokens": 0}
    (tmp_path / "run.json").write_text(json.dumps(settings))
    assert main(["train", *MODEL, "--config", str(tmp_path / "run.json")]) == 0
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["train"]["data"] == [f"{tmp_path / 'corpus'}=2"]


def test_every_setting_of_run_and_model_is_a_flag_with_its_help():
    from dataclasses import fields

    from ngpt_core.config import ModelConfig
    from ngpt_core.train.config import TrainConfig, field_help

    text = subprocess.run(
        [sys.executable, "-m", "ngpt_core", "train", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for cls, but in ((TrainConfig, ()), (ModelConfig, ("name", "normalized"))):
        for f in fields(cls):
            if f.name not in but:
                assert f"--{f.name.replace('_', '-')} " in text or f"--{f.name.replace('_', '-')}," in text, f.name
                assert field_help(cls)[f.name]


def test_mistakes_are_one_sentence(corpus, run, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.toml").write_text("seq_len = \n")
    (tmp_path / "typo.json").write_text('{"seq_lenn": 3}')
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "wandb.json").write_text('{"wandb": 5}')
    (tmp_path / "twin.json").write_text('{"baseline": true}')
    (tmp_path / "again.json").write_text('{"resume": true}')
    (tmp_path / "twice.json").write_text('{"seq_len": 32, "seq-len": 64}')
    out = f"--out={tmp_path / 'new'}"
    for argv, word in (
        (["train", "--preset", "huge", out, "--steps=1"], "There is no preset 'huge'"),
        (["train", "--steps=1"], "--out"),
        (["train", out], "--steps"),
        (["train", out, "--steps=1", "--max-seq-len=16"], "--seq-len 256 is longer than --max-seq-len 16"),
        (["train", out, "--steps=1", "--n-experts=4", "--top-k=9"], "top_k"),
        (["train", f"--out={run}", "--steps=4"], "--resume"),
        (["train", out, "--steps=1", f"--config={tmp_path / 'bad.toml'}"], "cannot be read as settings"),
        (["train", out, "--steps=1", f"--config={tmp_path / 'typo.json'}"], "no setting 'seq_lenn'"),
        (["train", out, "--steps=1", f"--config={tmp_path / 'none.toml'}"], "No such file"),
        (["train", out, "--steps=1", f"--config={tmp_path / 'twin.json'}"], "'baseline'; write normalized = false"),
        (["train", out, "--steps=1", f"--config={tmp_path / 'again.json'}"], "'resume'; give it as a flag"),
        (["train", out, "--steps=1", f"--config={tmp_path / 'twice.json'}"], "gives seq_len twice"),
        (["train", "--steps=1", "--dry-run", "--recipe", "schedule=foo"], "--recipe schedule=foo: "),
        (["data", "pack", "hf:", out], "'hf:' names no dataset"),
        (["report", str(run), f"--out={tmp_path / 'empty.txt' / 'x.html'}"], "empty.txt is a file"),
        (["report", str(run), f"--out={tmp_path / 'empty.txt' / 'a' / 'x.html'}"], "empty.txt is a file"),
        (["report", str(run), f"--out={tmp_path}"], "is a folder"),
        (["train", out, "--steps=1", f"--config={tmp_path / 'binary.toml'}"], "binary.toml cannot be read as settings"),
        (["train", out, "--steps=1", f"--config={tmp_path / 'wandb.json'}"], "wandb must be the name"),
        (["train", f"--out={tmp_path / 'empty.txt'}", "--steps=1"], "empty.txt is a file"),
        (["train", out, "--steps=1", "--data=/nowhere"], "not a packed corpus"),
        (["train", out, "--steps=1", "--vocab-size=64", f"--data={corpus}"], "larger than the model's 64"),
        (["train", out, "--steps=1", "--wandb=project", f"--data={corpus}"], "pip install wandb"),
        (["data", "pack", str(tmp_path / "empty.txt"), out], "corpus is empty"),
        (["data", "pack", str(tmp_path / "none.txt"), out], "no file"),
        (["data", "check", str(tmp_path)], "not a packed corpus"),
        (["data", "pack", str(tmp_path / "empty.txt"), out, "--separator="], "--separator must not be empty"),
        (["data", "pack", str(tmp_path / "empty.txt"), out, "--shard-tokens=0"], "at least 1"),
        (["data", "pack", str(tmp_path / "empty.txt"), out, "--end-of-text=x"], "leave out --end-of-text"),
        (["eval", str(tmp_path)], "is not a run"),
        (["eval", str(run), "--windows=0"], "--windows"),
        (["generate", str(tmp_path)], "is not a run"),
        (["generate", str(run), "--prompt="], "--prompt"),
        (["generate", str(run), "--prompt=\udcff"], "--prompt '\\udcff' is not text"),
        (["generate", str(run), f"--seed={2**64}"], "--seed must be"),
        (["generate", str(run), "--temperature=-1"], "temperature"),
        (["generate", str(run), "--device=tpu"], "--device"),
        (["demo", f"--out={run}"], "not empty"),
        (["demo", f"--out={tmp_path / 'empty.txt'}"], "not empty"),
        (["demo", out, "--minutes=nan"], "--minutes"),
        (["demo", out, "--minutes=0"], "--minutes"),
    ):
        assert word in sentence(capsys, argv), argv
    assert not (tmp_path / "new").exists()


@pytest.fixture
def words(tmp_path):
    """A corpus of another tokenizer, with a vocabulary that fits into the model below."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 30, vocab_size=270, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "t.json"))
    (tmp_path / "book.txt").write_text("the cat sat on the mat. the dog sat on the log.\n" * 100)
    argv = ["data", "pack", str(tmp_path / "book.txt"), f"--out={tmp_path / 'words'}", f"--tokenizer={tmp_path / 't.json'}"]
    assert main([*argv, "--val-fraction=0.2"]) == 0
    return str(tmp_path / "words")


def test_a_corpus_of_another_tokenizer_is_refused_everywhere(corpus, words, tmp_path, capsys):
    out = tmp_path / "run"
    argv = ["train", *MODEL, "--vocab-size=300", *SIZES, "--steps=2", f"--data={corpus}", f"--out={out}"]
    assert "packed with the tokenizer" in sentence(capsys, [*argv, f"--val-data={words}"])
    assert not out.exists()
    assert main(argv) == 0
    capsys.readouterr()
    assert "packed with the tokenizer" in sentence(capsys, ["eval", str(out), f"--data={words}"])
    assert "packed with the tokenizer" in sentence(capsys, ["eval", str(out / "export"), f"--data={words}"])
    shutil.rmtree(out / "export")
    (out / "checkpoints").rename(tmp_path / "checkpoints")
    assert "packed with the tokenizer" in sentence(capsys, ["train", f"--out={out}", f"--data={words}", "--resume"])


def test_the_export_of_a_run_writes_with_the_run_s_tokenizer_and_is_evaluated_on_its_data(words, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *MODEL, "--vocab-size=300", *SIZES, "--steps=2", f"--data={words}", f"--out={out}"]) == 0
    capsys.readouterr()
    for argv in (["generate", "--max-new-tokens=8"], ["eval", "--windows=2"]):
        assert main([argv[0], str(out), *argv[1:]]) == 0
        whole = capsys.readouterr().out
        assert main([argv[0], str(out / "export"), *argv[1:]]) == 0
        assert capsys.readouterr().out == whole


def test_a_run_is_found_and_finds_its_data_from_any_folder(corpus, tmp_path, capsys, monkeypatch):
    shutil.copytree(corpus, tmp_path / "here" / "packed")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    argv = ["train", *MODEL, *SIZES, "--steps=2", "--data", "packed=0.7", "stdlib=0.3", "--val-data", "packed", "--out", "run"]
    assert main(argv) == 0
    recorded = json.loads((tmp_path / "here" / "run" / "config.json").read_text())
    assert recorded["train"]["data"] == [f"{tmp_path / 'here' / 'packed'}=0.7", "stdlib=0.3"]
    assert recorded["train"]["val_data"] == [str(tmp_path / "here" / "packed")]
    (tmp_path / "here" / "run" / "export" / "config.json").unlink()
    monkeypatch.chdir(tmp_path / "there")
    assert main(["train", "--out=../here/run", "--resume"]) == 0
    assert main(["eval", "../here/run", "--windows=2"]) == 0
    recorded["train"] |= {"data": ["packed"], "val_data": []}  # as runs were recorded before
    del recorded["seal"]
    (tmp_path / "here" / "run" / "config.json").write_text(json.dumps(recorded))
    monkeypatch.chdir(tmp_path / "here")
    assert main(["eval", "run", "--windows=2"]) == 0
    monkeypatch.chdir(tmp_path / "there")
    capsys.readouterr()
    assert f"{tmp_path / 'there' / 'packed'} is not a packed corpus" in sentence(capsys, ["eval", "../here/run"])


def test_unknown_commands_and_flags_end_with_status_2(capsys):
    for argv in ([], ["fly"], ["train", "--stepz", "3"], ["train", "--step", "3", "--out", "x"], ["data"]):
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 2
    capsys.readouterr()


def test_help_answers_without_importing_torch():
    code = "import sys, ngpt_core.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert answer.splitlines()[-1] == "False"


def test_a_reader_that_leaves_early_is_not_an_error(run):
    command = f"{sys.executable} -m ngpt_core generate {run} --max-new-tokens 400 --temperature 2 | head -c 3"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


# A command that waits: two children of the demo that would never end, or a corpus whose last document never comes.
DEMO = """
import subprocess, sys, time, types
from ngpt_core.cli import main
from ngpt_core.tools import demo
demo.embedded = lambda: types.SimpleNamespace(manifest={"tokens": 0}, checksum="")
children = []
def start(*args):
    children.append(subprocess.Popen(["sleep", "1000"]))
    return children[-1]
def sleep(seconds):  # both are started, and known to the demo
    print(*(child.pid for child in children), sep="\\n", flush=True)
    time.sleep(seconds)
demo._start, demo.time = start, types.SimpleNamespace(sleep=sleep)
sys.exit(main(["demo", "--out", sys.argv[1]]))
"""
PACK = """
import sys, time
from ngpt_core.cli import main
from ngpt_core.data import packing
packing.documents = lambda *args: (time.sleep(1000 * i) or print("waiting", flush=True) or b"text" for i in range(2))
sys.exit(main(["data", "pack", sys.argv[1] + "/book.txt", "--out", sys.argv[1] + "/packed"]))
"""


def asked_to_stop(code: str, folder, lines: int) -> list[str]:
    """What a command had printed when it was asked to stop, which it did."""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    printed = [next(line for line in process.stdout if not line.startswith("corpus")).strip() for _ in range(lines)]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    process.stdout.close()
    return printed


def test_the_demo_does_not_leave_its_children_behind(tmp_path):
    children = asked_to_stop(DEMO, tmp_path / "demo", 2)
    for pid in map(int, children):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_packing_that_is_asked_to_stop_leaves_nothing_half_written(tmp_path):
    (tmp_path / "book.txt").write_text("text")
    asked_to_stop(PACK, tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


def test_a_demo_whose_training_fails_ends_the_other_and_says_why(tmp_path, capsys, monkeypatch):
    started = []

    def start(folder, part, *args):
        (folder.parent / f"{part.name}.log").write_text("ngpt: step 1: no luck.\n")
        command = "exit 1" if part.name == "gpt" else "exec sleep 1000"
        started.append(subprocess.Popen(["sh", "-c", command]))
        return started[-1]

    monkeypatch.setattr("ngpt_core.tools.demo._start", start)
    argv = ["demo", f"--out={tmp_path / 'demo'}"]
    assert main(argv) == 1
    assert capsys.readouterr().err == "ngpt: training gpt failed: step 1: no luck.\n"
    assert [process.poll() for process in started] == [1, -signal.SIGTERM]
    assert "no preset 'huge'" in sentence(capsys, ["demo", f"--out={tmp_path / 'other'}", "--preset=huge"])
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_the_demo_compares_both_and_says_where_the_report_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["demo", "--out", str(tmp_path / "demo"), "--minutes", "0.05"]) == 0
    page = capsys.readouterr().out
    assert "After the same tokens" in page and "With half of the tokens nGPT" in page and "95% interval" in page
    assert all(f"{title} writes" in page for title in ("GPT", "nGPT", "nGPT, half the tokens"))
    assert (tmp_path / "demo" / "report.html").exists()


def test_the_demo_reports_its_uncertainty():
    gpt, ngpt = [(20.0, 10), (10.0, 10), (30.0, 10), (20.0, 10)], [(19.0, 10), (8.0, 10), (29.0, 10), (18.0, 10)]
    difference, half = paired(gpt, ngpt)  # files of one length: the mean of four differences
    assert difference == pytest.approx(-0.15) and half == pytest.approx(3.182 * 0.0577350 / 2, rel=1e-2)
    assert paired(gpt[:1], ngpt[:1]) == (pytest.approx(-0.1), math.inf)
    assert "ends below" in half_verdict(-0.03, 0.02) and "does not reach" in half_verdict(0.03, 0.02)
    assert "within the uncertainty" in half_verdict(0.01, 0.02) and "within the uncertainty" in half_verdict(0.01, math.inf)
    assert "nGPT is ahead by 0.1500" in verdict(difference, half)
    assert "GPT is ahead by 0.1500" in verdict(-difference, half) and "nGPT" not in verdict(-difference, half)
    assert "no clear difference" in verdict(0.01, 0.02)


def test_the_demos_spread_over_seeds_is_that_of_the_evidence():
    for kind, spread in SEED_SPREAD.items():
        pairs = [(f["gpt"], f["ngpt"]) for f in stored("evidence")["comparisons"] if f["model"].startswith(kind) and f["ngpt"]]
        variances = [statistics.variance(n - g for g, n in zip(gpt, ngpt)) for gpt, ngpt in pairs]
        assert spread == pytest.approx(2 * math.sqrt(statistics.mean(variances)), abs=5e-4)


def test_the_demos_interval_covers_the_truth_where_files_differ():
    """Files of unequal lengths, each with a difference of its own: the true difference lies inside about 19 times of 20."""
    draw, inside = random.Random(0), 0
    for _ in range(1000):
        counts = [draw.choice((1000, 5000, 20_000)) for _ in range(10)]
        gpt = [(2.0 * t, t) for t in counts]
        ngpt = [((2.0 - 0.05 + draw.gauss(0, 0.02)) * t, t) for t in counts]
        difference, half = paired(gpt, ngpt)
        inside += abs(difference + 0.05) <= half
    assert 920 < inside < 970


def test_a_run_prints_which_numbers_are_in_force(capsys, corpus, tmp_path):
    """The ladder trains with the paper's numbers at any batch, a laptop model with scaled ones; either can be asked for."""
    for words, line in (
        ("--preset 1B --batch-size 1024", "recipe: the paper's numbers\n"),
        ("--preset 1B --scaled --steps 100", "recipe: scaled to this run, with betas="),
        ("--preset pico --steps 100", "recipe: scaled to this run, with "),
        ("--preset pico --steps 100 --no-scaled", "recipe: the paper's numbers\n"),
        ("--preset 1B --recipe rho=0.1", "recipe: the paper's numbers, with rho=0.1\n"),
    ):
        assert main(["train", "--dry-run", *words.split()]) == 0
        assert capsys.readouterr().out.startswith(line), words
        assert main(["plan", "--gpus", "8", *words.split()]) == 0
        assert f"\n{line}" in capsys.readouterr().out, words
    words = f"train --preset pico --pattern M --steps 1 --batch-size 2 --seq-len 16 --data {corpus} --out {tmp_path / 'run'}"
    assert main([*words.split(), "--sample-tokens", "0", "--no-tensorboard"]) == 0
    assert capsys.readouterr().err.startswith("recipe: scaled to this run, with ")
