"""Files: a model comes back bit for bit, a crash leaves the old one, and everything else is a clear error."""

import json
import os
import struct
import weakref

import pytest
import torch
from safetensors.torch import save_file

import ngpt_core as ng
from ngpt_core.nn import io

BOTH = pytest.mark.parametrize("normalized", [True, False], ids=["nGPT", "GPT"])


@pytest.fixture
def model():
    return make()


def make(normalized=True, **change):
    return ng.LanguageModel(ng.preset("pico", normalized, **dict(pattern="ME*-", ff=64) | change))


@BOTH
def test_a_model_comes_back_bit_for_bit(normalized, tmp_path):
    model, x = make(normalized), torch.randint(0, 256, (2, 16))
    model.loss(x, x)
    model.update_router_bias(model.stats["load"])
    ng.save(model, tmp_path / "deep" / "run")
    again = ng.load(tmp_path / "deep" / "run")
    assert again.config == model.config and not again.training
    a, b = model.state_dict(), again.state_dict()
    assert a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a)
    assert (again(x) == model(x)).all()
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    again.check()
    again.train().loss(x, x).backward()


def test_the_folder_holds_three_files_and_none_is_a_pickle(model, tmp_path):
    ng.save(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "seal.json"]
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["format"] == 1 and data["pattern"] == "ME*-"
    (length,) = struct.unpack("<Q", (tmp_path / "model.safetensors").read_bytes()[:8])
    assert "embedding.weight" in json.loads((tmp_path / "model.safetensors").read_bytes()[8 : 8 + length])


def test_saving_again_replaces_and_a_crash_leaves_the_old_model_whole(model, tmp_path, monkeypatch):
    ng.save(model, tmp_path)
    other = make()
    with monkeypatch.context() as m:
        m.setattr(io.stream, "write", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            ng.save(other, tmp_path)
    assert (ng.load(tmp_path).embedding.weight == model.embedding.weight).all()
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "seal.json"]
    ng.save(other, tmp_path)
    assert (ng.load(tmp_path).embedding.weight == other.embedding.weight).all()


def test_gathered_tensors_can_be_given(model, tmp_path):
    state = {k: v + 1 for k, v in model.state_dict().items()}
    ng.save(model, tmp_path, state)
    assert (ng.load(tmp_path).embedding.weight == model.embedding.weight + 1).all()


def test_a_compiled_model_is_saved_under_its_own_names(model, tmp_path):
    ng.save(torch.compile(model), tmp_path)
    assert (ng.load(tmp_path).embedding.weight == model.embedding.weight).all()


@pytest.mark.parametrize("what", [5, None], ids=str)
def test_only_a_path_is_loaded(what):
    with pytest.raises(ValueError, match=r"ngpt_core\.load takes the path of a folder.*got"):
        ng.load(what)


@pytest.mark.parametrize("what", ["x", None, torch.nn.Linear(2, 2)], ids=str)
def test_only_a_model_is_saved(what, tmp_path):
    with pytest.raises(ValueError, match=r"ngpt_core\.save takes a LanguageModel.*got"):
        ng.save(what, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_has_one_floating_point_precision(model, tmp_path):
    ng.save(model.bfloat16(), tmp_path / "half")
    assert ng.load(tmp_path / "half").embedding.weight.dtype == torch.bfloat16
    model.float()
    for dtype in (torch.int64, torch.float16):
        state = model.state_dict()
        state["blocks.0.mixer.in_proj"] = state["blocks.0.mixer.in_proj"].to(dtype)
        words = rf"one floating-point precision; blocks\.0\.mixer\.in_proj is {dtype}"
        with pytest.raises(ValueError, match=words):
            ng.save(model, tmp_path, state)
        folder = ng.save(model, tmp_path / "run")
        with io.safe_open(folder / io.WEIGHTS, "pt") as file:
            metadata = file.metadata()
        save_file(state, folder / io.WEIGHTS, metadata=metadata)
        (folder / "seal.json").unlink()  # as an older version wrote it
        with pytest.raises(ValueError, match=words):
            ng.load(folder)


@pytest.mark.parametrize("text", ["null", "5", "[1]"])
def test_a_config_that_is_not_a_dictionary_is_an_error(model, tmp_path, text):
    ng.save(model, tmp_path)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "seal.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json must be a JSON object"):
        ng.load(tmp_path)


def change_config(folder, **change):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (folder / "seal.json").unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(d_model=32), r"a different config: .* should be \[.*32\] but is \[.*64\]"),
        (dict(pattern="ME*"), r"a different config: .*blocks\.3\..* should be absent"),
        (dict(normalized=False), "a different config"),
        (dict(routed_scaling=1.0), "saved with a different config than config.json"),
        (dict(format=7), "format 1; got 7"),
        (dict(width=3), r"config\.json: ModelConfig has no field 'width'"),
        (dict(top_k=99), r"config\.json: ModelConfig\.top_k"),
    ],
)
def test_another_config_is_an_error_that_says_what_differs(model, tmp_path, change, words):
    ng.save(model, tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(ValueError, match=words):
        ng.load(tmp_path)


@pytest.mark.parametrize("state", [{}, "renamed", "another shape"])
def test_a_state_that_is_not_the_models_leaves_the_files_as_they_were(model, tmp_path, state):
    ng.save(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    if state == "renamed":
        state = {f"module.{name}": x for name, x in model.state_dict().items()}
    elif state == "another shape":
        state = model.state_dict() | {"head.weight": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=r"This state belongs to a different config: .* should be"):
        ng.save(model, tmp_path, state=state)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def _refuse():
    raise PermissionError(13, "Permission denied")


def test_files_can_be_read_by_others_and_an_unreadable_file_is_explained(model, tmp_path, monkeypatch):
    ng.save(model, tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}

    def refused(*args, **kwargs):
        raise FileNotFoundError("No such file or directory: model.safetensors")  # safetensors' words for every reason

    monkeypatch.setattr(io, "safe_open", refused)
    (tmp_path / "seal.json").unlink()
    real = open
    monkeypatch.setattr("builtins.open", lambda *args: real(*args) if "safetensors" not in str(args[0]) else _refuse())
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: Permission denied"):
        ng.load(tmp_path)


def test_places_where_nothing_can_be_saved_or_read_are_named(model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", "/proc/run"):
        with pytest.raises(ValueError, match=r"Cannot write to the folder .*(file|run) \(.+\): choose another one"):
            ng.save(model, folder)
    with monkeypatch.context() as m, pytest.raises(ValueError, match=r"Cannot write .*\(Permission denied\)"):
        m.setattr(os, "access", lambda *args: False)  # root may write everywhere
        ng.save(model, tmp_path)
    with torch.device("meta"), pytest.raises(ValueError, match="on the meta device and has no values"):
        ng.save(make(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_file_is_that_of_safetensors_to_the_byte(tmp_path):
    model = make().bfloat16()
    state = {k: x.float() if k.endswith("router.bias") else x for k, x in model.state_dict().items()}
    ng.save(model, tmp_path, state)
    with io.safe_open(tmp_path / io.WEIGHTS, "pt") as file:
        save_file(state, tmp_path / "theirs", metadata=file.metadata())
    assert (tmp_path / io.WEIGHTS).read_bytes() == (tmp_path / "theirs").read_bytes()
    ng.seal.check_folder(tmp_path)  # its sha256 was computed while it was written


def test_of_a_model_that_is_gathered_one_tensor_is_in_memory_at_a_time(model, tmp_path):
    state, alive = model.state_dict(), []

    def whole():
        for name in io.stream.ordered(state):
            alive.append(weakref.ref(x := state[name].clone()))
            yield x
            del x
            assert sum(ref() is not None for ref in alive) <= 1

    ng.save(model, tmp_path / "a", state, whole())
    ng.save(model, tmp_path / "b")
    assert len(alive) == len(state)
    assert (tmp_path / "a" / io.WEIGHTS).read_bytes() == (tmp_path / "b" / io.WEIGHTS).read_bytes()


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_a_truncated_file_is_an_error(model, tmp_path, keep):
    path = ng.save(model, tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors was cut short .* Copy the folder again\."):
        ng.load(tmp_path)
    (tmp_path / "seal.json").unlink()
    with pytest.raises(ValueError, match="truncated"):
        ng.load(tmp_path)


def test_missing_or_broken_files_are_errors(model, tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        ng.load(tmp_path / "nowhere")
    ng.save(model, tmp_path)
    (tmp_path / "config.json").write_text('{"format": 1, ')
    (tmp_path / "seal.json").unlink()
    with pytest.raises(ValueError, match="must be a JSON object"):
        ng.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        ng.load(tmp_path)


def test_one_changed_byte_anywhere_is_found_and_an_unsealed_folder_loads_with_a_warning(model, tmp_path, caplog):
    ng.save(model, tmp_path)
    for name in ("config.json", "model.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for i in range(0, len(whole), len(whole) // 7):
            (tmp_path / name).write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
            with pytest.raises(ValueError, match=rf"{name} was damaged or changed: its sha256 is .*Copy the folder again"):
                ng.load(tmp_path)
        (tmp_path / name).write_bytes(whole)
    ng.load(tmp_path)
    assert not caplog.records
    (tmp_path / "seal.json").unlink()
    ng.load(tmp_path)
    assert "has no seal (an older version wrote it)" in caplog.text


def test_the_umask_decides_who_may_read(model, tmp_path):
    before = os.umask(0o077)
    try:
        ng.save(model, tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
