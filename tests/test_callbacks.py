"""Does every callback of a run receive every event exactly once, even if the run is resumed?"""

import json
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
from runs import new_run, sentences

from ngpt_core.cli import main
from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer
from ngpt_core.train.loggers import flat
from ngpt_core.train.loop import train
from ngpt_core.train.run import prepare

MINE = """
from ngpt_core.train.callbacks import Callback
heard = []
class Mine(Callback):
    def start(self, run, after): heard.append(("start", after))
    def step(self, record): heard.append(("step", record["step"]))
    def eval(self, step, loss): heard.append(("eval", step))
    def sample(self, step, text): heard.append(("sample", step))
    def save(self, step): heard.append(("save", step))
    def end(self, step, finished): heard.append(("end", step, finished))
class Fails(Callback):
    def step(self, record):
        if record["step"] == 2: raise KeyError("mine")
class Lacks:
    pass
number = 3
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("callbacks") / "corpus"
    pack(sentences(60), folder, ByteTokenizer(), val_fraction=0.1)
    return str(folder)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_callbacks.py").write_text(MINE)
    yield "my_callbacks"
    sys.modules.pop("my_callbacks", None)


def resumed(folder, **settings):
    return prepare({"out": str(folder), **settings}, {}, resume=True)


def interrupted(corpus, folder, **settings):
    """A run of 4 steps that ends after 2 with an error of its callback; the step was saved."""
    with pytest.raises(ValueError, match=r"the callback Fails failed at step 2: KeyError"):
        train(new_run(corpus, folder, steps=4, callback=["my_callbacks:Fails"], **settings))


def test_a_users_callback_receives_every_event_in_order(corpus, mine, tmp_path):
    run = new_run(corpus, tmp_path / "run", steps=2, save_every=1, sample_tokens=2, callback=["my_callbacks:Mine"])
    assert train(run) == 0
    heard = sys.modules[mine].heard
    assert heard == [
        ("start", 0), ("step", 1), ("save", 1), ("step", 2), ("eval", 2), ("sample", 2), ("save", 2), ("end", 2, True),
    ]  # fmt: skip


def test_an_error_in_a_callback_saves_the_step_and_the_run_continues(corpus, mine, tmp_path):
    interrupted(corpus, tmp_path / "run")
    assert train(resumed(tmp_path / "run", callback=["my_callbacks:Mine"])) == 0
    assert [x for x in sys.modules[mine].heard if x[0] != "eval"][:2] == [("start", 2), ("step", 3)]
    assert [json.loads(line)["step"] for line in open(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_callback_that_cannot_be_used_is_refused_before_anything_is_written(corpus, mine, tmp_path, capsys):
    command = ["train", "--preset=pico", "--steps=1", f"--data={corpus}", f"--out={tmp_path / 'run'}", "--callback"]
    for name, says in {
        "no_such:X": "cannot be imported",
        "my_callbacks:number": "expected package.module:Name",
        "x": "expected",
    }.items():
        assert main([*command, name]) == 1
        assert says in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main(["train", "--preset=pico", "--steps=1", f"--data={corpus}", f"--out={tmp_path / 'run'}", "--mlflow=x"]) == 1
    assert "pip install mlflow" in capsys.readouterr().err or "mlflow" in sys.modules


def test_a_resumed_run_purges_the_events_that_it_repeats(corpus, mine, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted(corpus, tmp_path / "run", tensorboard=True, diagnostics_every=1)
    last = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert last.is_dir() or len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert train(resumed(tmp_path / "run", callback=[])) == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4]
    assert any(tag.startswith("diagnostics/") for tag in events.Tags()["scalars"])


def fake(name, monkeypatch, **functions):
    module = types.ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_weights_and_biases_continues_the_same_run(corpus, mine, tmp_path, monkeypatch):
    begun, logged = [], []

    class Service:
        id = "abc"

        def log(self, values, step):
            logged.append((step, sorted(values)))

        def finish(self, exit_code):
            logged.append(("finish", exit_code))

    fake("wandb", monkeypatch, init=lambda **options: begun.append(options) or Service(), Html=str)
    interrupted(corpus, tmp_path / "run", wandb="project", sample_tokens=2, diagnostics_every=1)
    assert train(resumed(tmp_path / "run", callback=[])) == 0
    assert [b["id"] for b in begun] == [None, "abc"] and begun[0]["config"]["model.d_model"] == 32
    assert [step for step, values in logged if values != ["sample"]] == [1, 2, 3, 4, "finish"]
    assert any("diagnostics/" in key for _, values in logged[:1] for key in values) and (4, ["sample"]) in logged


def test_mlflow_continues_the_same_run(corpus, mine, tmp_path, monkeypatch):
    calls = []

    def record(name, result=None):
        return lambda *args, **options: calls.append((name, args, options)) or result

    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    names = ("set_experiment", "log_params", "log_metrics", "log_text", "end_run")
    fake("mlflow", monkeypatch, start_run=record("start_run", run), **{name: record(name) for name in names})
    interrupted(corpus, tmp_path / "run", mlflow="experiment")
    assert train(resumed(tmp_path / "run", callback=[])) == 0
    assert [options["run_id"] for name, _, options in calls if name == "start_run"] == [None, "r1"]
    assert [options["step"] for name, _, options in calls if name == "log_metrics"] == [1, 2, 3, 4]
    assert sum(name == "log_params" for name, *_ in calls) == 1 and calls[-1][:2] == ("end_run", ("FINISHED",))


def test_the_numbers_of_a_step_are_named_once():
    record = {
        "step": 3,
        "load_max": [1.5, 2.0],
        "load": [[1, 2]],
        "diagnostics": [{"group": 0, "name": "in", "angle": 0.1, "cap": None}],
    }
    assert flat(record) == {"step": 3.0, "load_max/0": 1.5, "load_max/1": 2.0, "diagnostics/in/angle": 0.1}
