"""The report: its numbers on curves whose answers are known, and a page that needs nothing but a browser."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from runs import new_run

from ngpt_core.cli import main
from ngpt_core.seal import read_sealed, write_sealed
from ngpt_core.tools.report import LoggedRun, comparison, log_fit, sentence, smooth, tokens_to_reach
from ngpt_core.train.loop import train


def logged(name: str, val: list[float], normalized: bool = True) -> LoggedRun:
    records = [{"step": i + 1, "tokens": 100 * (i + 1), "loss": v, "val_loss": v, "time": float(i)} for i, v in enumerate(val)]
    return LoggedRun(name, records, {"model": {"normalized": normalized}})


def figures(body: str) -> list[list[dict]]:
    """Each figure's traces."""
    starts = [match.end() for match in re.finditer(r'Plotly\.newPlot\(\s*"[^"]+",\s*', body)]
    return [json.JSONDecoder().raw_decode(body, start)[0] for start in starts]


def test_tokens_to_reach_interpolates_and_may_be_none():
    tokens, loss = np.array([100.0, 200.0, 300.0]), np.array([4.0, 2.0, 1.0])
    assert tokens_to_reach(tokens, loss, 3.0) == 150.0
    assert tokens_to_reach(tokens, loss, 1.25) == 275.0
    assert tokens_to_reach(tokens, loss, 5.0) == 100.0
    assert tokens_to_reach(tokens, loss, 0.5) is None


def test_each_run_is_measured_by_the_other_s_final_loss():
    fast, slow = logged("fast", [4.0, 2.0, 1.0, 0.5]), logged("slow", [5.0, 4.0, 3.0, 2.0])
    rows = {row["run"]: row for row in comparison([fast, slow])}
    assert rows["fast"]["tokens"] == 200.0 and rows["fast"]["share"] == 0.5  # half of the tokens, as the paper says it
    assert rows["slow"]["tokens"] is None and "does not reach" in sentence(rows["slow"])
    assert "50% of the 400" in sentence(rows["fast"])


def test_a_noisy_training_loss_is_not_judged_by_one_lucky_batch():
    noise = np.random.default_rng(0).normal(0, 0.15, (2, 400))
    a, b = ([3.0 - 0.3 * math.log(i + 10) + x for i, x in enumerate(row)] for row in noise)  # the same run except for the noise
    first, second = logged("first", a), logged("second", b)
    for run in (first, second):
        for record in run.records:
            del record["val_loss"]
    shares = [row["share"] for row in comparison([first, second]) if row["share"]]
    assert shares and min(shares) > 0.75 and "training loss (smoothed)" in sentence(comparison([first, second])[0])


def test_losses_of_other_texts_are_not_compared_and_an_unfinished_run_says_so(runs, tmp_path, capsys):
    for name in ("gpt", "ngpt"):
        shutil.copytree(runs / name, tmp_path / name)
    path = tmp_path / "gpt" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    out = ["--out", str(tmp_path / "r.html")]
    assert main(["report", str(tmp_path / "gpt"), str(tmp_path / "ngpt"), *out]) == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<td>8 of 12</td>" in text and "Not all runs are finished" in text and "held-out loss of gpt" in text
    record, _ = read_sealed(tmp_path / "ngpt" / "config.json")
    record["corpora"][0]["checksum"] = "another"
    write_sealed(tmp_path / "ngpt" / "config.json", record)
    assert main(["report", str(tmp_path / "gpt"), str(tmp_path / "ngpt"), *out]) == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "their losses are not compared" in text and "held-out loss of gpt" not in text
    assert main(["report", str(tmp_path / "gpt"), f"{tmp_path / 'gpt'}/", *out]) == 1
    assert "given twice" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"val_data": ["/another"]}, {"eval_windows": 5}, {"seq_len": 64}])
def test_losses_of_other_held_out_text_are_not_compared(runs, tmp_path, change):
    for name in ("gpt", "ngpt"):
        shutil.copytree(runs / name, tmp_path / name)
    record, _ = read_sealed(tmp_path / "ngpt" / "config.json")
    record["train"] |= change
    write_sealed(tmp_path / "ngpt" / "config.json", record)
    assert main(["report", str(tmp_path / "gpt"), str(tmp_path / "ngpt"), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "their losses are not compared" in text and "held-out loss of gpt" not in text


def test_runs_are_distinguished_by_their_names_as_they_are(runs, tmp_path):
    for name in ("one/<b>", "two/<b>"):
        shutil.copytree(runs / "gpt", tmp_path / name)
    folders = [str(tmp_path / name) for name in ("one/<b>", "two/<b>")]
    assert main(["report", *folders, "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    body = text[text.index("</script></head>") :]
    assert "one/&lt;b&gt;, step 12</h3>" in body and "two/&lt;b&gt;, step 12</h3>" in body
    names = [trace["name"] for figure in figures(body) for trace in figure]
    assert f"{tmp_path}/one/&lt;b&gt;, training" in names and not any("<b>" in name for name in names)
    assert "Second moments and the gate" not in body  # GPT's optimizer has no diagnostics


def test_the_logarithmic_fit_finds_its_own_law():
    t = np.arange(1.0, 5000.0)
    y = np.where(t < 1000, 7.0, 2.0 + 0.3 * np.log(t))  # a transient that must not count
    assert log_fit(t, y, 1000) == pytest.approx((2.0, 0.3))


def test_smoothing_is_a_mean_over_the_past():
    assert smooth(np.array([4.0, 2.0, 0.0, 2.0]), 2).tolist() == [4.0, 3.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for name, normalized in (("gpt", False), ("ngpt", True)):
        train(
            new_run(
                corpus, folder / name, {"normalized": normalized}, steps=12, eval_every=4, diagnostics_every=4, sample_tokens=4
            )
        )
    return folder


@pytest.fixture(scope="module")
def page(runs):
    assert main(["report", str(runs / "gpt"), str(runs / "ngpt"), "--out", str(runs / "report.html")]) == 0
    return (runs / "report.html").read_text(encoding="utf-8")


def test_the_page_is_one_file_that_asks_no_other_host(page):
    body = page[page.index("</script></head>") :]
    library = page[page.index("<script>") : page.index("</script></head>")]
    assert len(library) > 10**6 and page.count(library[:5000]) == 1  # plotly, once
    assert not re.search(r"""(src|href)\s*=\s*["'](https?:)?//""", body)


def test_the_page_holds_the_paper_s_figures_with_these_runs_numbers(page):
    body = page[page.index("</script></head>") :]
    titles = re.findall(r"<h2>(.*?)</h2>", body)
    assert titles == [
        "Loss over tokens", "Loss over time", "The logit scale s_z", "Second moments and the gate",
        "Coordinates without a gradient", "Angle of a step", "Eigen learning rates", "Routers", "Gradient norm", "Samples",
    ]  # fmt: skip
    assert body.count("final held-out loss") == 2 and "Plotly.newPlot" in body
    drawn = figures(body)
    assert len(drawn) == 9 and all(len(figure) > 0 for figure in drawn)
    angle = {trace["name"]: trace for trace in drawn[5]}
    assert {"ngpt, mean angle", "ngpt, largest angle", "ngpt, cap"} == set(angle)


def test_the_angles_stay_under_the_cap(corpus, tmp_path):
    from ngpt_core.train.metrics import read_metrics

    train(new_run(corpus, tmp_path / "run", steps=10, diagnostics_every=1))
    for record in read_metrics(tmp_path / "run"):
        for group in record["diagnostics"]:
            if group["cap"] is not None:
                assert group["cap"] <= math.radians(1.0) * (1 + 1e-6)
                assert group["angle_max"] <= group["cap"] * (1 + 1e-4) + 1e-7


def test_a_folder_that_is_not_a_run_is_named(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 1
    assert "is not a run" in capsys.readouterr().err and not (tmp_path / "r.html").exists()


def test_incomplete_lines_are_skipped_and_edited_ones_are_reported(runs, tmp_path, capsys):
    shutil.copytree(runs / "ngpt", tmp_path / "run")
    path, argv = tmp_path / "run" / "metrics.jsonl", ["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])

    def report(*more: str) -> str:
        path.write_text("\n".join([*lines[:-1], *more]) + "\n")
        status, error = main(argv), capsys.readouterr().err
        assert (status, error) == (0, "") or (status == 1 and error.startswith("ngpt: ") and error.count("\n") == 1), error
        return error

    assert report("null", "5", "{}", '{"step": 1}', json.dumps(last | {"tokens": "x"}), json.dumps(last)[:50]) == ""
    for change in ({"s_z": "x"}, {"val_loss": []}, {"grad_norm": {}}):
        assert report(json.dumps(last | change)) == "", change
    for change in ({"load_max": 5}, {"dead_experts": None}, {"diagnostics": [{}]}, {"alpha": 5}):
        assert "was damaged or edited; restore or remove it" in report(json.dumps(last | change)), change
    path.write_bytes(bytes(range(256)))
    assert main(argv) == 1 and "metrics.jsonl has no complete line" in capsys.readouterr().err
    path.write_text("\n".join(lines))
    (tmp_path / "run" / "samples.jsonl").write_text('{"step": 1}\n{"step": 2, "text": 5}\n')
    assert main(argv) == 0
