"""Are the token files of other trainers read as they are? Files of each published layout, written here byte by byte."""

import json
import os
import shutil
import struct

import numpy as np
import pytest
from runs import SMALL, TINY, losses, new_run, sentences

from ngpt_core.cli import main
from ngpt_core.data.corpus import Corpus
from ngpt_core.data.foreign import is_foreign, open_foreign
from ngpt_core.data.loader import Loader
from ngpt_core.data.packing import pack
from ngpt_core.data.tokenizers import ByteTokenizer, load_tokenizer
from ngpt_core.train.loop import train
from ngpt_core.train.run import prepare

BYTES = ByteTokenizer()
DOCUMENTS = [np.append(ids, 0) for ids in BYTES.encode(sentences(120))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- the layouts, from their trainers' own writers -------------------------------------------------------------------
def nanogpt(path, documents=DOCUMENTS):
    np.concatenate(documents).astype("<u2").tofile(path)
    return path


def llm_c(path, documents=DOCUMENTS, magic=20240520, version=1, dtype="<u2", promised=None):
    """data_common.write_datafile, after its scripts' habit of an end-of-text id before each document."""
    ids = np.concatenate([np.roll(ids, 1) for ids in documents]).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if promised is None else promised
    path.write_bytes(header.tobytes() + ids.tobytes())
    return path


def megatron(path, documents=DOCUMENTS, code=4, dtype="<i4", magic=b"MMIDIDX\0\0", version=1, cut=0, modes=b""):
    """IndexedDatasetBuilder: two sequences per document."""
    pieces = [piece for ids in documents for piece in (ids[:3], ids[3:])]
    sizes = np.array([len(piece) for piece in pieces], "<i4")
    width = np.dtype(dtype).itemsize
    pointers = (np.concatenate([[0], np.cumsum(sizes.astype("<i8"))])[:-1] * width).astype("<i8")
    bounds = np.arange(0, len(pieces) + 1, 2, dtype="<i8")
    np.concatenate(pieces).astype(dtype).tofile(path)
    head = magic + struct.pack("<QBQQ", version, code, len(sizes), len(bounds))
    raw = head + sizes.tobytes() + pointers.tobytes() + bounds.tobytes() + modes
    path.with_suffix(".idx").write_bytes(raw[: len(raw) - cut])
    return path


LAYOUTS = {
    "nanogpt": nanogpt,
    "llm.c-16": llm_c,
    "llm.c-32": lambda path: llm_c(path, magic=20240801, version=7, dtype="<u4"),
    "megatron-i32": megatron,
    "megatron-u16": lambda path: megatron(path, code=8, dtype="<u2"),
    "megatron-i64": lambda path: megatron(path, code=5, dtype="<i8"),
}


# ---- reading ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ids_and_documents_are_those_that_were_written(layout, tmp_path, cache):
    path = LAYOUTS[layout](tmp_path / "some.bin")
    before = path.read_bytes()
    corpus = open_foreign(str(path), BYTES)
    tokens, document = corpus.stream("train").read(0, corpus.stream("train").tokens)
    written = np.concatenate([np.roll(ids, 1) for ids in DOCUMENTS] if "llm.c" in layout else DOCUMENTS)
    assert np.array_equal(tokens, written)
    lengths = [len(ids) for ids in DOCUMENTS]
    if "llm.c" in layout:  # the same stream with the end-of-text id of the last document at the front
        lengths = [1, *lengths[:-1], lengths[-1] - 1]
    assert np.array_equal(document, np.repeat(np.arange(len(lengths)), lengths))
    assert not corpus.has("val") and corpus.verify() > len(before)
    stored = sum(file.lstat().st_size for file in cache.rglob("*"))
    assert path.read_bytes() == before and stored < len(before) + 20_000  # no copy: links, offsets and a manifest
    assert all(file.is_symlink() for file in cache.rglob("*.tokens"))


def test_a_file_and_a_packed_corpus_of_the_same_ids_give_the_same_batches(tmp_path):
    pack(sentences(120), tmp_path / "packed", BYTES, val_fraction=0.0)
    packed = Corpus(tmp_path / "packed")
    theirs = open_foreign(str(megatron(tmp_path / "x.bin", code=1, dtype="u1")), BYTES)
    theirs.checksum = packed.checksum  # the order of the windows depends on it
    one, two = (Loader([(corpus, 1.0)], 4, 32, seed=3) for corpus in (packed, theirs))
    for _ in range(5):
        a, b = one.next(), two.next()
        assert a.tokens.equal(b.tokens) and a.targets.equal(b.targets) and a.documents.equal(b.documents)


def test_a_folder_is_split_by_the_names_of_its_files(tmp_path):
    folder = tmp_path / "fineweb"
    folder.mkdir()
    for number in range(3):
        llm_c(folder / f"fineweb_train_{number:06d}.bin", DOCUMENTS[number * 30 : number * 30 + 30])
    llm_c(folder / "fineweb_val_000000.bin", DOCUMENTS[90:])
    corpus = open_foreign(str(folder), BYTES)
    count = [sum(map(len, DOCUMENTS[start:stop])) for start, stop in ((0, 90), (90, 120))]
    assert [corpus.stream(name).tokens for name in ("train", "val")] == count
    assert corpus.stream("val").bytes == count[1] - 30  # the text, without 30 ends
    tokens, _ = corpus.stream("train").read(0, count[0])  # across two borders of files, each after a header
    assert np.array_equal(tokens, np.concatenate([np.roll(ids, 1) for ids in DOCUMENTS[:90]]))
    latin = nanogpt(tmp_path / "latin.bin", [np.array([228, 246, 252, 0])])  # not UTF-8
    assert open_foreign(str(latin), BYTES, "val").stream("val").bytes == 3
    nanogpt(folder / "notes.bin")
    with pytest.raises(ValueError, match="neither train nor val"):
        open_foreign(str(folder), BYTES)


def test_a_file_is_read_again_only_when_it_changes(tmp_path, monkeypatch):
    path = nanogpt(tmp_path / "a.bin")
    first = open_foreign(str(path), BYTES)
    with monkeypatch.context() as patch:
        patch.setattr("ngpt_core.data.foreign._offsets", lambda *_: pytest.fail("the file was read again"))
        assert open_foreign(str(path), BYTES).checksum == first.checksum
    path.rename(tmp_path / "b.bin")
    assert open_foreign(str(tmp_path / "b.bin"), BYTES).checksum == first.checksum  # the content counts
    nanogpt(tmp_path / "b.bin", DOCUMENTS[::-1])
    assert open_foreign(str(tmp_path / "b.bin"), BYTES).checksum != first.checksum


def test_a_changed_byte_is_found_although_size_and_time_are_the_same(tmp_path):
    path = nanogpt(tmp_path / "a.bin")
    open_foreign(str(path), BYTES)
    time, raw = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(time, time))
    with pytest.raises(ValueError, match=r"a\.bin has changed since.*sha256"):
        open_foreign(str(path), BYTES).verify()


# ---- refusing --------------------------------------------------------------------------------------------------------
def _cut(path, size):
    path.write_bytes(path.read_bytes()[:size])
    return path


def _without_index(path):
    path.with_suffix(".idx").unlink()
    return path


REFUSED = {
    "odd": (lambda p: _cut(nanogpt(p), 301), "odd number"),
    "header": (lambda p: _cut(llm_c(p), 500), "ends inside the header"),
    "version": (lambda p: llm_c(p, version=2), "version 2"),
    "magic": (lambda p: llm_c(p, magic=20240522), "magic number 20240522"),
    "short": (lambda p: llm_c(p, promised=10**6), "promises 1,000,000 tokens"),
    "vocabulary": (lambda p: nanogpt(p, [np.array([5, 300, 7])]), r"has the id 300, and the ids of 'bytes' lie in \[0, 256\)"),
    "negative": (lambda p: megatron(p, [np.array([5, 6, -1, 7])]), "has the id -1"),
    "narrow": (lambda p: megatron(p, [np.array([1, 2, 3, 4])], code=2, dtype="i1"), "too narrow"),
    "idx magic": (lambda p: megatron(p, magic=b"TNTIDX\0\0\0"), "not Megatron's index"),
    "idx version": (lambda p: megatron(p, version=2), "version 2"),
    "idx type": (lambda p: megatron(p, code=7), "type code 7"),
    "idx cut": (lambda p: megatron(p, cut=8), "cut short"),
    "idx modes": (lambda p: megatron(p, modes=b"\0" * 240), "multimodal"),
    "other bin": (lambda p: _cut(megatron(p), 400), "belongs to another corpus"),
    "no idx": (lambda p: _without_index(megatron(p)), "looks like 32-bit ids"),
    "empty": (lambda p: _cut(nanogpt(p), 0), "no tokens"),
    "none": (lambda p: p, "there is no token file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_or_unknown_file_is_refused_in_a_sentence(case, tmp_path, cache):
    write, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        open_foreign(str(write(tmp_path / "some.bin")), BYTES)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_prefix_needs_its_index_and_every_file_a_tokenizer(tmp_path):
    path = megatron(tmp_path / "text_document")
    path.rename(tmp_path / "text_document.bin")
    assert is_foreign(str(path)) and open_foreign(str(path), BYTES).stream("train").tokens
    with pytest.raises(ValueError, match="name it with --tokenizer"):
        open_foreign(str(path), None)
    path.with_suffix(".idx").unlink()
    with pytest.raises(ValueError, match="has no index"):
        open_foreign(str(path), BYTES)


# ---- training --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["nanogpt", "llm.c-32", "megatron-i32"])
def test_a_model_trains_evaluates_and_generates_on_each_layout(layout, tmp_path, capsys):
    path, held = LAYOUTS[layout](tmp_path / "a.bin"), LAYOUTS[layout](tmp_path / "b.bin")
    run, data = f"--out={tmp_path / 'run'}", [f"--data={path}=2", f"--val-data={held}"]
    settings = {**SMALL, **TINY, "steps": 2}
    argv = ["train", run, *data, *(f"--{k.replace('_', '-')}={v}" for k, v in settings.items() if k != "tensorboard")]
    argv.append("--no-tensorboard")
    assert main(argv) == 1 and "name it with --tokenizer" in capsys.readouterr().err
    assert main([*argv, "--tokenizer=bytes"]) == 0
    assert len(losses(tmp_path / "run")) == 2
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["corpora"][0]["sources"] == [str(path)] and record["tokenizer"]["spec"] == "bytes"
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--windows=4", "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main(["eval", str(tmp_path / "run"), f"--data={held}", "--windows=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == own and 0 < own["bits_per_byte"] < 20
    assert main(["data", "check", str(path), "--tokenizer=bytes"]) == 0 and str(path) in capsys.readouterr().out
    assert main(["check", str(path)]) == 1 and "without checksums" in capsys.readouterr().err


def test_a_run_resumes_on_the_same_ids_elsewhere_and_refuses_others(tmp_path):
    path, out = nanogpt(tmp_path / "train.bin"), tmp_path / "run"
    assert train(new_run(str(path), out, tokenizer="bytes", steps=4, save_every=2, keep=9)) == 0
    whole = losses(out)
    shutil.rmtree(out / "export")
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    moved = path.rename(tmp_path / "moved.bin")
    again = {"out": str(out), "data": [str(moved)]}
    with pytest.raises(ValueError, match="keeps its tokenizer"):
        prepare({**again, "tokenizer": "other.json"}, {}, resume=True)
    changed = nanogpt(tmp_path / "changed.bin", DOCUMENTS[::-1])
    with pytest.raises(ValueError, match="data"):
        train(prepare({**again, "data": [str(changed)]}, {}, resume=True))
    assert train(prepare(again, {}, resume=True)) == 0
    assert losses(out) == whole


def test_a_run_keeps_the_tokenizer_of_its_files(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator((s.decode() for s in sentences(50)), vocab_size=300, special_tokens=["<|endoftext|>"])
    made.save(str(tmp_path / "t.json"))
    words = load_tokenizer(str(tmp_path / "t.json"))
    folder, out = tmp_path / "shakespeare", tmp_path / "run"
    folder.mkdir()
    documents = [np.append(ids, words.end_of_text) for ids in words.encode(sentences(300))]
    nanogpt(folder / "train.bin", documents[:250])
    nanogpt(folder / "val.bin", documents[250:])
    text = sum(map(len, sentences(300)[250:]))
    assert open_foreign(str(folder), words).stream("val").bytes == text
    with pytest.raises(ValueError, match="larger than the model's 256"):
        train(new_run(str(folder), tmp_path / "small", tokenizer=str(tmp_path / "t.json")))
    model = {"vocab_size": words.vocab_size}
    run = new_run(str(folder), out, model, tokenizer=str(tmp_path / "t.json"), steps=2, eval_every=1)
    assert train(run) == 0
    (tmp_path / "t.json").unlink()  # the run has a copy
    shutil.rmtree(out / "export")
    assert train(prepare({"out": str(out), "steps": 2}, {}, resume=True)) == 0
    capsys.readouterr()
    assert main(["eval", str(out), f"--data={folder}", "--windows=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    count = sum(map(len, documents[250:]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / np.log(2) * count / text)


def test_a_tokenizer_for_packed_data_is_refused(tmp_path):
    pack(sentences(50), tmp_path / "packed", BYTES)
    with pytest.raises(ValueError, match="is for token files"):
        new_run(str(tmp_path / "packed"), tmp_path / "run", tokenizer="bytes")
