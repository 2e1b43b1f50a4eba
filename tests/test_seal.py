"""Seals: every file of an artifact is verified, by ``ngpt check`` too, and what a file says cannot reach the terminal raw."""

import json
import os
import shutil

import pytest
from runs import new_run

from ngpt_core import seal
from ngpt_core.cli import main
from ngpt_core.train.loop import train


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seal") / "run"
    assert train(new_run(corpus, folder, steps=2, save_every=1)) == 0
    return folder


def test_check_verifies_a_run_a_checkpoint_an_export_and_a_corpus(run, corpus, tmp_path, capsys):
    assert main(["check", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["whole"] * 4  # config.json, two checkpoints, the export
    for path in (run / "checkpoints" / "step-00000002", run / "export", corpus):
        assert main(["check", str(path)]) == 0 and capsys.readouterr().out.startswith("whole")
    assert main(["check", str(tmp_path)]) == 1 and "holds nothing to check" in capsys.readouterr().err


def test_check_names_every_artifact_that_is_damaged(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    damaged = ["config.json", "checkpoints/step-00000001/optimizer-00000.safetensors", "export/model.safetensors"]
    for name in damaged:
        whole = bytearray((tmp_path / "run" / name).read_bytes())
        whole[len(whole) // 2] ^= 16
        (tmp_path / "run" / name).write_bytes(whole)
    assert main(["check", str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["damaged", "damaged", "whole", "damaged"]
    for name, line in zip(damaged, (lines[0], lines[1], lines[3])):
        assert name in line


def test_check_compares_the_tokenizer_that_a_run_or_a_corpus_has_a_copy_of(run, corpus, tmp_path, capsys):
    for name, folder, file in (("run", run, "config.json"), ("corpus", corpus, "manifest.json")):
        shutil.copytree(folder, copy := tmp_path / name)
        (copy / "tokenizer.json").write_text("{}")
        record, _ = seal.read_sealed(copy / file)
        record["tokenizer"]["sha256"] = seal.sha256(copy / "tokenizer.json")
        seal.write_sealed(copy / file, record)
        assert main(["check", str(copy)]) == 0
        (copy / "tokenizer.json").write_text("{ }")
        assert main(["check", str(copy)]) == 1
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("damaged")]
        assert str(copy / "tokenizer.json") in line
    assert main(["data", "check", str(tmp_path / "corpus")]) == 1 and "tokenizer.json" in capsys.readouterr().err


def test_check_compares_the_names_of_the_tensors_with_the_model(run, tmp_path, capsys):
    shutil.copytree(run / "checkpoints" / "step-00000002", path := tmp_path / "step-00000002")
    index = json.loads((path / "index.json").read_text())
    del index["optimizer.exp_avg.head.weight"]
    (path / "index.json").write_text(json.dumps(index))
    state, _ = seal.read_sealed(path / "state.json")
    seal.write_sealed(path / "state.json", state | {"files": state["files"] | {"index.json": seal.entry(path / "index.json")}})
    assert main(["check", str(path)]) == 1
    assert "it has no optimizer.exp_avg.head.weight" in capsys.readouterr().out


def test_a_seal_covers_the_whole_list_and_any_change_of_it_is_found(tmp_path):
    (tmp_path / "a").write_text("content")
    seal.seal_folder(tmp_path, {"a": seal.entry(tmp_path / "a")})
    assert set(seal.check_folder(tmp_path)) == {"a"}
    record = json.loads((tmp_path / "seal.json").read_text())
    for change in ({"files": {}}, {"format": 2}, {"more": 1}, {"seal": "0" * 64}, {"seal": None}, {"files": None}):
        (tmp_path / "seal.json").write_text(json.dumps(record | change))
        with pytest.raises(seal.Damaged, match=r"seal\.json"):
            seal.check_folder(tmp_path)


@pytest.mark.parametrize("name", ["../a", "/a", "a/b", "a\\b", "", ".", "..", "a\0b", "C:a", None, 5])
def test_a_list_names_only_files_of_its_own_folder(name, tmp_path):
    assert not seal.is_plain(name) and seal.is_plain("a-0.b")
    seal.write_sealed(tmp_path / "seal.json", {"format": 1, "files": {str(name): {"bytes": 0, "sha256": ""}, "x": name}})
    with pytest.raises(seal.Damaged):
        seal.check_folder(tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_not_read_forever(run, tmp_path, capsys):
    for name in ("config.json", "checkpoints/step-00000002/state.json", "export/seal.json", "export/model.safetensors"):
        shutil.copytree(run, tmp_path / "run")
        (tmp_path / "run" / name).unlink()
        os.mkfifo(tmp_path / "run" / name)
        assert main(["check", str(tmp_path / "run")]) == 1 or name == "export/seal.json"  # without it: no seal
        shutil.rmtree(tmp_path / "run")


def test_control_characters_from_a_file_are_written_out(run, corpus, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    record = json.loads((run / "config.json").read_text())
    del record["seal"]
    seal.write_sealed(tmp_path / "run" / "config.json", record | {"format": "\x1b[2J\u202e"})
    assert main(["eval", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "\\x1b[2J\\u202e" in error and "\x1b" not in error
    shutil.copytree(run, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "export")
    newest = tmp_path / "resumed" / "checkpoints" / "step-00000002"
    index = json.loads((newest / "index.json").read_text())
    (newest / "index.json").write_text(json.dumps(index | {"a\x1b[2J": next(iter(index.values()))}))
    state, _ = seal.read_sealed(newest / "state.json")
    state["files"]["index.json"] = seal.entry(newest / "index.json")
    seal.write_sealed(newest / "state.json", state)
    assert main(["train", f"--out={tmp_path / 'resumed'}", "--resume"]) == 0
    error = capsys.readouterr().err
    assert "\\x1b[2J" in error and "set aside" in error and "\x1b" not in error


def test_control_characters_in_the_name_of_a_folder_are_written_out(run, tmp_path, capsys):
    shutil.copytree(run, folder := tmp_path / "run\x1b[2J")
    for name in ("export/model.safetensors", "checkpoints/step-00000002/model-00000.safetensors"):
        (folder / name).write_bytes(b"")
    for command in (["check", str(folder)], ["eval", str(folder)], ["train", f"--out={folder}", "--resume"]):
        main(command)
        said = "".join(capsys.readouterr())
        assert "\\x1b[2J" in said and "\x1b" not in said, command
