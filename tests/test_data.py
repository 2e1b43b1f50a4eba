"""The data path: packing, the held-out split, the loader's promises, and what happens to damaged or missing files."""

import contextlib
import copy
import gzip
import hashlib
import http.server
import json
import os
import platform
import re
import resource
import runpy
import shutil
import socket
import struct
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ngpt_core import seal
from ngpt_core.data import corpus as corpus_module
from ngpt_core.data.corpus import Corpus, embedded, open_corpus, stdlib
from ngpt_core.data.loader import IGNORE, Loader, permute
from ngpt_core.data.packing import checksum, pack, pack_files, token_dtype
from ngpt_core.data.sources import documents, download, expand, stdlib_files
from ngpt_core.data.tokenizers import ByteTokenizer, from_description, load_tokenizer, stream_text
from ngpt_core.files import write_text
from ngpt_core.seal import Damaged, read_sealed, write_sealed
from ngpt_core.train.feed import Feed


def texts(count: int, seed: int = 0) -> list[bytes]:
    """Distinct documents of random lengths; document i begins with its own number."""
    generator = np.random.default_rng(seed)
    return [f"<{i}>".encode() + generator.bytes(int(generator.integers(1, 90))) + b"." for i in range(count)]


@pytest.fixture
def corpus(tmp_path):
    pack(texts(400), tmp_path / "corpus", ByteTokenizer(), val_fraction=0.1, shard_tokens=3000)
    return Corpus(tmp_path / "corpus")


def whole(corpus: Corpus, split: str) -> list[bytes]:
    """Every document of a split, read back through the stream; each ends with byte 0."""
    stream = corpus.stream(split)
    tokens, number = stream.read(0, stream.tokens)
    cuts = np.flatnonzero(np.diff(number)) + 1
    return [bytes(part.astype(np.uint8)).removesuffix(b"\0") for part in np.split(tokens, cuts)]


# ---- packing ---------------------------------------------------------------------------------------------------------


def test_every_document_comes_back_byte_for_byte_once(corpus):
    assert Counter(whole(corpus, "train") + whole(corpus, "val")) == Counter(texts(400))
    assert len(corpus.manifest["splits"]["train"]["shards"]) > 2  # the streams above crossed shards


def test_held_out_documents_never_train_even_when_repeated(tmp_path):
    pack(texts(300) + texts(300), tmp_path / "c", ByteTokenizer(), val_fraction=0.1)
    corpus = Corpus(tmp_path / "c")
    train, val = whole(corpus, "train"), whole(corpus, "val")
    assert corpus.manifest["held_out"]["rule"] == "documents" and val
    assert not set(train) & set(val)


def test_a_single_document_is_cut_and_the_parts_join(tmp_path):
    book = bytes(range(1, 256)) * 40
    manifest = pack([book], tmp_path / "c", ByteTokenizer(), val_fraction=0.05)
    corpus = Corpus(tmp_path / "c")
    (train,), (val,) = whole(corpus, "train"), whole(corpus, "val")
    assert manifest["held_out"]["rule"] == "tails" and train + val == book and len(val) == round(0.05 * (len(book) + 1)) - 1
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "manifest.json", "train-00000.docs", "train-00000.tokens", "val-00000.docs", "val-00000.tokens",
    ]  # fmt: skip


@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_a_single_document_leaves_something_to_train_on_whatever_the_fraction(tmp_path, fraction):
    for i, book in enumerate((b"one" * 100, b"two" * 100, b"four" * 100, b"five" * 100)):  # on either side by its hash
        manifest = pack([book], tmp_path / str(i), ByteTokenizer(), val_fraction=fraction)
        held_out = manifest["splits"]["val"]["tokens"] / manifest["tokens"]
        assert manifest["held_out"]["rule"] == "tails" and held_out == pytest.approx(fraction, abs=0.01)


def test_a_corpus_may_be_held_out_as_a_whole_or_not_at_all(tmp_path):
    for fraction, split in ((0.0, "train"), (1.0, "val")):
        pack(texts(30), tmp_path / split, ByteTokenizer(), val_fraction=fraction)
        corpus = Corpus(tmp_path / split)
        assert Counter(whole(corpus, split)) == Counter(texts(30))
        assert [corpus.has(name) for name in ("train", "val")] == [split == "train", split == "val"]
    with pytest.raises(ValueError, match=r"between 0 \(none\) and 1 \(all\)"):
        pack(texts(3), tmp_path / "c", ByteTokenizer(), val_fraction=1.5)


def test_packing_twice_gives_the_same_checksum_and_another_text_another(tmp_path):
    sums = [
        pack(source, tmp_path / str(i), ByteTokenizer())["checksum"]
        for i, source in enumerate([texts(50), texts(50), texts(50, seed=1)])
    ]
    assert sums[0] == sums[1] != sums[2]


def test_text_globs_jsonl_gzip_and_parquet_hold_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    stories = ["eins", "zwei\nzwei", "drei é"]
    for i, story in enumerate(stories):
        (tmp_path / f"story-{i}.txt").write_text(story, encoding="utf-8")
    lines = "".join(json.dumps({"text": s, "n": 1}) + "\n" for s in stories) + "\n"
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": [*stories, None]}), tmp_path / "c.parquet")
    (tmp_path / "one.txt").write_text("<end>".join(stories), encoding="utf-8")

    def read(source, **kwargs):
        return [d.decode() for path in expand([str(tmp_path / source)]) for d in documents(path, **kwargs)]

    for source in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        shutil.copy(tmp_path / source, tmp_path / source.upper())
    for source in ("story-*.txt", "a.jsonl", "b.jsonl.gz", "c.parquet", "A.JSONL", "B.JSONL.GZ", "C.PARQUET"):
        assert read(source) == stories, source
    assert read("one.txt", separator="<end>") == stories


def test_compressed_and_binary_files_are_not_packed_as_text(tmp_path):
    import bz2
    import lzma
    import zipfile

    import pyarrow
    import pyarrow.parquet

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("a.txt", "text")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "table")
    made = {"a.jsonl.bz2": bz2.compress(b"text"), "a.jsonl.xz": lzma.compress(b"text"), "packed": gzip.compress(b"text"),
            "a.jsonl.zst": b"\x28\xb5\x2f\xfd\x04\x00", "a.pdf": b"%PDF-1.7 ..."}  # fmt: skip
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    for name in (*made, "a.zip", "table"):
        with pytest.raises(ValueError, match=f"{name} is not text but .*packing it would store its raw bytes"):
            pack_files([str(tmp_path / name)], tmp_path / "c", ByteTokenizer())
    (tmp_path / "utf16.txt").write_bytes("text, and more of it; ".encode("utf-16"))
    for separator in (None, ";"):
        with pytest.raises(ValueError, match=r"utf16.txt is not text: it contains a zero byte"):
            pack_files([str(tmp_path / "utf16.txt")], tmp_path / "c", ByteTokenizer(), separator=separator)
    assert not (tmp_path / "c").exists()


def test_hugging_face_datasets_stream(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(documents(f"hf:{tmp_path / 'd'}")) == [b"one", b"two"]
    with pytest.raises(ValueError, match="field 'body'"):
        list(documents(f"hf:{tmp_path / 'd'}", field="body"))


def test_token_width_follows_the_vocabulary():
    assert [token_dtype(v).str for v in (256, 257, 65536, 65537)] == ["|u1", "<u2", "<u2", "<u4"]


# ---- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def wordpieces(tmp_path):
    """A small byte-level BPE trained here by the `tokenizers` package."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["the cat sat on the mat é"] * 30, vocab_size=300, special_tokens=["<|endoftext|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_hugging_face_tokenizer_packs_wide_tokens_ends_documents_and_travels_with_the_corpus(tmp_path, wordpieces):
    (tmp_path / "t.txt").write_text("the cat é", encoding="utf-8")
    tokenizer = load_tokenizer(str(wordpieces))
    manifest = pack_files([str(tmp_path / "t.txt")] * 3, tmp_path / "c", tokenizer, val_fraction=0)
    corpus = Corpus(tmp_path / "c")
    tokens, number = corpus.stream("train").read(0, 10**6)
    assert manifest["dtype"] == "<u2" and (tokens == tokenizer.end_of_text).sum() == 3 == number.max() + 1
    wordpieces.unlink()  # the corpus has its own copy
    assert corpus.tokenizer().decode(tokens[number == 0]) == "the cat é<|endoftext|>"
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not the tokenizer"):
        from_description(corpus.manifest["tokenizer"], corpus.folder)


def test_a_tokenizer_that_would_cut_documents_or_fill_them_up_does_neither(tmp_path, wordpieces):
    from tokenizers import Tokenizer

    (tmp_path / "t.txt").write_text("the cat sat on the mat " * 20)
    packed = {}
    for name in ("plain", "truncation", "padding"):
        tokenizer = Tokenizer.from_file(str(wordpieces))
        if name != "plain":
            getattr(tokenizer, f"enable_{name}")(**{"truncation": {"max_length": 5}, "padding": {"length": 500}}[name])
        tokenizer.save(str(tmp_path / f"{name}.json"))
        manifest = pack_files([str(tmp_path / "t.txt")], tmp_path / name, load_tokenizer(str(tmp_path / f"{name}.json")))
        packed[name] = (manifest["checksum"], manifest["tokenizer"]["sha256"])
    assert packed["truncation"] == packed["padding"] == packed["plain"]


def test_an_error_of_the_tokenizers_library_is_a_sentence(tmp_path):
    """It raises bare Exceptions, and where Rust panics not even those."""
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"the": 0}, unk_token="[UNK]")).save(str(path))
    with pytest.raises(ValueError, match=r"tokenizer.json' cannot encode this text: .*Missing \[UNK\] token"):
        load_tokenizer(str(path)).encode([b"cat"])


def test_ids_with_gaps_keep_their_values(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"the": 0, "cat": 300, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "gaps.json"))
    (tmp_path / "t.txt").write_text("the cat the dog " * 50)
    tokenizer = load_tokenizer(str(tmp_path / "gaps.json"))
    manifest = pack_files([str(tmp_path / "t.txt")], tmp_path / "c", tokenizer, val_fraction=0)
    tokens, _ = Corpus(tmp_path / "c").stream("train").read(0, 4)
    assert tokens.tolist() == [0, 300, 0, 2] and manifest["tokenizer"]["vocab_size"] == 301 and manifest["dtype"] == "<u2"
    tokenizer.vocab_size = 256
    with pytest.raises(ValueError, match="produced the id 300, but its ids must be below 256"):
        pack_files([str(tmp_path / "t.txt")], tmp_path / "d", tokenizer)


def test_a_continuation_keeps_the_space_that_its_tokenizer_drops_at_the_start():
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    class Words(ByteTokenizer):
        fast = Tokenizer(WordLevel({"\u2581the": 0, "\u2581sphere": 1, "\u2581point": 2, "s": 3}, unk_token="s"))
        fast.pre_tokenizer, fast.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()

        def decode(self, ids):
            return self.fast.decode(list(ids))

    assert Words().decode([2]) == "point"
    assert list(stream_text(Words(), [2, 3], before=[0, 1])) == [" point", "s"]
    assert "".join(stream_text(Words(), [2, 3])) == "points"


@given(st.text(max_size=30))
def test_streamed_bytes_join_to_the_text_and_never_show_half_a_character(text):
    pieces = list(stream_text(ByteTokenizer(), text.encode()))
    assert "".join(pieces) == text
    assert all(piece for piece in pieces)


def test_unknown_tokenizers_say_what_exists(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match="no tokenizer file"):
        load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"use `bytes`, the path of a tokenizer.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    if find_spec("tiktoken") is None:
        with pytest.raises(ValueError, match="pip install tiktoken"):
            load_tokenizer("tiktoken:gpt2")


def test_text_that_is_not_utf8_is_named_for_a_tokenizer_that_needs_it(tmp_path, wordpieces):
    (tmp_path / "bad.txt").write_bytes(b"abc \xff\xfe def")
    with pytest.raises(ValueError, match="not UTF-8"):
        pack_files([str(tmp_path / "bad.txt")], tmp_path / "c", load_tokenizer(str(wordpieces)))
    assert not (tmp_path / "c").exists()


# ---- the loader ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 700), st.binary(min_size=1, max_size=16))
def test_the_order_of_an_epoch_is_a_permutation(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_the_order_looks_shuffled():
    order = np.array([permute(i, 1000, b"key") for i in range(1000)])
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15 and (np.diff(order) == 1).sum() < 10


def rows(loader: Loader, batches: int) -> torch.Tensor:
    found = [loader.next() for _ in range(batches)]
    return torch.cat([torch.stack([b.tokens, b.targets, b.documents]) for b in found], dim=1)


def test_an_epoch_holds_every_window_once_and_targets_are_the_next_token_of_the_same_document(corpus):
    T, stream = 32, corpus.stream("train")
    loader = Loader([(corpus, 1.0)], batch_size=1, seq_len=T)
    tokens, number = stream.read(0, stream.tokens)
    seen = rows(loader, loader.windows)
    expected = {}
    for i in range(loader.windows):  # written out once more, token by token
        row = [[], [], []]
        for k in range(T):
            j = i * T + k
            inside = j < len(tokens) - 1
            row[0].append(tokens[j] if inside else 0)
            row[1].append(tokens[j + 1] if inside and number[j + 1] == number[j] else IGNORE)
            row[2].append(number[min(j, len(tokens) - 2)] - number[i * T])
        expected[i] = tuple(map(tuple, row))
    assert Counter(tuple(map(tuple, seen[:, r].tolist())) for r in range(seen.shape[1])) == Counter(expected.values())
    second = rows(loader, loader.windows)
    assert not torch.equal(seen, second) and torch.equal(seen[0].sort(0).values, second[0].sort(0).values)


@pytest.mark.parametrize("world", [2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(corpus, world):
    one = Loader([(corpus, 1.0)], batch_size=8, seq_len=16, seed=3)
    many = [Loader([(corpus, 1.0)], batch_size=8, seq_len=16, seed=3, rank=r, world=world) for r in range(world)]
    for _ in range(5):
        parts = [loader.next() for loader in many]
        alone = one.next()
        assert torch.equal(alone.tokens, torch.cat([p.tokens for p in parts]))
        assert torch.equal(alone.documents, torch.cat([p.documents for p in parts]))


def test_resuming_continues_at_the_very_token_on_another_batch_size_too(corpus):
    straight = Loader([(corpus, 1.0)], batch_size=4, seq_len=16)
    rows(straight, 3)
    state = json.loads(json.dumps(straight.state_dict()))
    wanted = rows(straight, 6)
    for batch_size in (4, 8, 3):
        again = Loader([(corpus, 1.0)], batch_size=batch_size, seq_len=16)
        again.load_state_dict(state)
        assert torch.equal(rows(again, 24 // batch_size), wanted)


def test_a_blend_keeps_its_weights_at_every_moment(tmp_path):
    for name, letter in (("a", b"a"), ("b", b"b"), ("c", b"c")):
        pack([letter * 500 + str(i).encode() for i in range(20)], tmp_path / name, ByteTokenizer(), val_fraction=0)
    corpora = [(Corpus(tmp_path / n), w) for n, w in (("a", 7.0), ("b", 2.0), ("c", 1.0))]
    loader = Loader(corpora, batch_size=1, seq_len=8)
    for s in range(1, 200):
        loader.next()
        assert all(abs(n - s * w) <= 1 for n, w in zip(loader.counts, (0.7, 0.2, 0.1)))


def test_a_position_of_another_corpus_length_or_seed_is_refused(corpus, tmp_path):
    state = Loader([(corpus, 1.0)], 4, 16).state_dict()
    pack(texts(30, seed=9), tmp_path / "other", ByteTokenizer())
    for loader, word in (
        (Loader([(Corpus(tmp_path / "other"), 1.0)], 4, 16), "--data"),
        (Loader([(corpus, 1.0)], 4, 32), "--seq-len"),
        (Loader([(corpus, 1.0)], 4, 16, seed=1), "--seed"),
    ):
        with pytest.raises(ValueError, match=word):
            loader.load_state_dict(state)


def test_a_blend_has_one_tokenizer_by_content_and_not_by_name(tmp_path, wordpieces):
    def packed(name):
        pack([b"the cat sat"] * 3, tmp_path / name, load_tokenizer(str(wordpieces)), val_fraction=0)
        return Corpus(tmp_path / name), 1.0

    first = packed("a")
    content = json.loads(wordpieces.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    wordpieces.write_text(json.dumps(content))  # at the same path, as large, and another
    other = packed("b")
    assert first[0].manifest["tokenizer"]["spec"] == other[0].manifest["tokenizer"]["spec"]
    with pytest.raises(ValueError, match=r"b was packed with the tokenizer .*sha256 .* and .*a with .*sha256"):
        Loader([first, other], 2, 8)
    wordpieces = tmp_path / "a" / "tokenizer.json"
    assert Loader([first, packed("c")], 2, 8).windows > 0  # another path, the same content
    for change in ({"vocab_size": 300 + 1}, {"end_of_text": 5}):
        changed = packed("-".join(change))
        changed[0].manifest["tokenizer"].update(change)
        with pytest.raises(ValueError, match="packed with the tokenizer"):
            Loader([first, changed], 2, 8)


def test_rows_beyond_the_limit_have_no_targets(corpus):
    batch = Loader([(corpus, 1.0)], batch_size=4, seq_len=16, split="val").next(limit=3)
    assert (batch.targets[:3] != IGNORE).any(1).all() and (batch.targets[3] == IGNORE).all()


# ---- what can go wrong on a disk -------------------------------------------------------------------------------------


def test_a_shard_cut_short_is_found_when_the_corpus_is_opened(corpus):
    path = corpus.folder / "train-00001.tokens"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=r"train-00001.tokens was cut short"):
        Corpus(corpus.folder)


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """A corpus large enough to be remembered, and a counter of the files that are read."""
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ngpt_core.data.verified.MIN_BYTES", 0)
    read, real = [], seal.sha256
    monkeypatch.setattr(seal, "sha256", lambda path: read.append(Path(path).name) or real(path))
    pack([b"some text " * 40] * 40, tmp_path / "corpus", ByteTokenizer(), val_fraction=0.1)
    return tmp_path / "corpus", read


def test_what_was_verified_is_read_again_only_if_it_has_changed(remembered, tmp_path):
    folder, read = remembered
    shard = folder / "train-00000.tokens"

    def verify(everything=False, where=folder):
        read.clear()
        return Corpus(where).verify(everything=everything), sorted(read)

    size, names = verify()
    assert size and len(names) == 4  # tokens and index of both splits
    assert verify() == (0, [])
    assert verify(everything=True) == (size, names)
    shard.touch()
    assert verify()[1] == [shard.name] and verify() == (0, [])
    shutil.copytree(folder, tmp_path / "copy")  # the same times, at another path
    assert verify(where=tmp_path / "copy")[1] == names
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"?")
    for _ in range(2):  # and what is damaged is not remembered
        with pytest.raises(Damaged, match=f"{shard.name} was damaged or changed"):
            verify()
    shard.write_bytes(whole[:-1])
    with pytest.raises(Damaged, match="cut short"):
        verify()


def test_a_disk_that_changes_a_bit_by_itself_is_found_when_everything_is_read(remembered):
    folder, _ = remembered
    shard = folder / "train-00000.tokens"
    Corpus(folder).verify(everything=False)
    times, whole = shard.stat(), shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"?")
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert Corpus(folder).verify(everything=False) == 0  # size and time say nothing
    with pytest.raises(Damaged, match=f"{shard.name} was damaged or changed"):
        Corpus(folder).verify()


def test_each_rank_records_its_files_and_reads_the_records_of_the_others(remembered):
    folder, read = remembered
    for rank in range(3):
        Corpus(folder).verify(rank, 3, everything=False)
    read.clear()
    assert sum(Corpus(folder).verify(rank, 2, everything=False) for rank in range(2)) == 0 and not read


def test_a_record_that_others_can_write_is_not_believed(remembered, tmp_path):
    folder, _ = remembered
    size = Corpus(folder).verify(everything=False)
    (record,) = (tmp_path / "cache" / "verified").iterdir()
    assert Corpus(folder).verify(everything=False) == 0
    record.chmod(0o666)
    assert Corpus(folder).verify(everything=False) == size


@pytest.mark.parametrize("content", ["", "[1]", "{}", '{"a": ', "[[1, 2]]"])
def test_a_damaged_record_counts_for_nothing(remembered, tmp_path, content):
    folder, _ = remembered
    size = Corpus(folder).verify(everything=False)
    for record in (tmp_path / "cache" / "verified").iterdir():
        record.write_text(content)
    assert Corpus(folder).verify(everything=False) == size
    (tmp_path / "file").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NGPT_CACHE", str(tmp_path / "file"))  # a cache that cannot be
        assert Corpus(folder).verify(everything=False) == size


def test_one_changed_byte_is_found_by_verify(corpus):
    corpus.verify()
    path = corpus.folder / "val-00000.tokens"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"val-00000.tokens was damaged or changed: its sha256 is"):
        Corpus(corpus.folder).verify()
    found = 0
    for rank in range(3):  # shared between ranks, exactly one of them meets it
        try:
            Corpus(corpus.folder).verify(rank, 3)
        except ValueError:
            found += 1
    assert found == 1


def test_missing_shards_manifests_and_formats_are_named(corpus, tmp_path):
    with pytest.raises(ValueError, match="is not a packed corpus"):
        Corpus(tmp_path / "nowhere")
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    (corpus.folder / "manifest.json").write_text(json.dumps({**manifest, "tokens": 5}))
    with pytest.raises(ValueError, match=r"manifest\.json was damaged or edited: its content does not match its seal"):
        Corpus(corpus.folder)
    del manifest["seal"]  # as an older version wrote it
    (corpus.folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        Corpus(corpus.folder)
    (corpus.folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="must be a JSON object"):
        Corpus(corpus.folder)
    (corpus.folder / "manifest.json").write_text(json.dumps(manifest))
    (corpus.folder / "val-00000.docs").unlink()
    with pytest.raises(ValueError, match=r"val-00000.docs is missing"):
        Corpus(corpus.folder)


def test_an_empty_corpus_and_missing_sources_leave_nothing_behind(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="corpus is empty"):
        pack_files([str(tmp_path / "empty.txt")], tmp_path / "c", ByteTokenizer())
    for source, word in (("none.txt", "no file"), ("*.zip", "no file matches"), ("", "is a folder")):
        with pytest.raises(ValueError, match=word):
            pack_files([str(tmp_path / source)], tmp_path / "c", ByteTokenizer())
    for source, word in (("", "no file ''"), ("hf:", "'hf:' names no dataset"), ("hf::train", "names no dataset")):
        with pytest.raises(ValueError, match=word):
            pack_files([source], tmp_path / "c", ByteTokenizer())
    for line in ('{"body": "no"}', "[" * 100_000, "null", '{"text": 5}'):
        (tmp_path / "bad.jsonl").write_text('{"text": "ok"}\n' + line + "\n")
        with pytest.raises(ValueError, match="line 2"):
            pack_files([str(tmp_path / "bad.jsonl")], tmp_path / "c", ByteTokenizer())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "empty.txt"]


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", "", "C:x", 5, None])
def test_a_manifest_names_only_files_of_its_folder(corpus, name):
    """Even one that is sealed, and consistent with its own checksum."""
    manifest, _ = read_sealed(corpus.folder / "manifest.json")
    manifest["splits"]["val"]["shards"][0]["file"] = name
    manifest["checksum"] = checksum(manifest["splits"])
    write_sealed(corpus.folder / "manifest.json", manifest)
    with pytest.raises(ValueError, match=r"manifest\.json (does not list its files|is inconsistent)"):
        Corpus(corpus.folder)


def test_a_name_from_a_manifest_never_reaches_the_network(corpus, monkeypatch, capsys):
    """A Hugging Face name would be downloaded; a manifest of ours has a copy of such a tokenizer instead."""
    monkeypatch.setattr(socket, "socket", lambda *args, **kwargs: pytest.fail("the network was used"))
    manifest, _ = read_sealed(corpus.folder / "manifest.json")
    write_sealed(corpus.folder / "manifest.json", manifest | {"tokenizer": {**manifest["tokenizer"], "spec": "their/name"}})
    with pytest.raises(ValueError, match=r"names the tokenizer 'their/name' but has no copy of it"):
        Corpus(corpus.folder).tokenizer()


def test_a_manifest_that_was_edited_is_found(corpus):
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    del manifest["seal"]
    for key in ("tokenizer", "dtype", "held_out", "checksum", "splits"):
        for value in (None, 5, "x", [], {}):
            (corpus.folder / "manifest.json").write_text(json.dumps(manifest | {key: value}))
            with pytest.raises(ValueError, match=r"manifest.json (is inconsistent|does not describe its tokenizer)"):
                Corpus(corpus.folder)
    for change in ({"tokens": 5}, {"bytes": "x"}, {"shards": {}}):  # of a split, and with its checksum as it was
        splits = manifest["splits"] | {"val": manifest["splits"]["val"] | change}
        (corpus.folder / "manifest.json").write_text(json.dumps(manifest | {"splits": splits}))
        with pytest.raises(ValueError, match="is inconsistent"):
            Corpus(corpus.folder)
    for key in ("file", "index"):  # of a shard, with a checksum that fits
        splits = copy.deepcopy(manifest["splits"])
        splits["val"]["shards"][0][key] = {}
        edited = manifest | {"splits": splits, "checksum": checksum(splits)}
        (corpus.folder / "manifest.json").write_text(json.dumps(edited))
        with pytest.raises(ValueError, match="is inconsistent"):
            Corpus(corpus.folder)
    (corpus.folder / "manifest.json").write_text(json.dumps(manifest | {"dtype": "|i1"}))  # as wide, and other numbers
    with pytest.raises(ValueError, match="is inconsistent"):
        Corpus(corpus.folder)


def test_a_disk_that_is_full_is_named_and_nothing_is_left(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "page.html").write_text("old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel refuses to go on, as it does on a full disk
    try:
        with pytest.raises(OSError) as packing:
            pack([b"x" * 9000], tmp_path / "c", ByteTokenizer())
        with pytest.raises(OSError) as writing:
            write_text(tmp_path / "page.html", "x" * 9000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert packing.value.filename == str(tmp_path / "c") and writing.value.filename == str(tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"] and (tmp_path / "page.html").read_text() == "old"


def test_nothing_is_overwritten(corpus):
    before = {p.name: p.read_bytes() for p in corpus.folder.iterdir()}
    with pytest.raises(ValueError, match="is not overwritten"):
        pack(texts(3), corpus.folder, ByteTokenizer())
    assert {p.name: p.read_bytes() for p in corpus.folder.iterdir()} == before


# ---- the corpora that have a name, and one by URL --------------------------------------------------------------------
EMBEDDED = Path(corpus_module.__file__).parent / "embedded"


def test_the_embedded_corpus_is_the_pinned_text_and_is_packed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path / "cache"))
    first = open_corpus("embedded")
    stamp = (first.folder / "manifest.json").stat().st_mtime_ns
    second = embedded()
    assert (second.folder / "manifest.json").stat().st_mtime_ns == stamp and len(list((tmp_path / "cache").iterdir())) == 1
    # a run, a result and a resumed run depend on it: another text needs another name
    assert first.checksum == "dc3f219a0d70bb585a4bf3f12028501873f996dcc73a942edd6c5f9df4e40fac"
    listed = json.loads((EMBEDDED / "manifest.json").read_text())
    train, val = whole(first, "train"), whole(first, "val")
    found = {hashlib.sha256(text).hexdigest(): len(text) for text in (*train, *val)}
    assert found == {file["sha256"]: file["bytes"] for file in listed["files"]}
    assert len(val) == 10 and len(train) == 97 and first.manifest["held_out"]["rule"] == "documents"
    assert listed["cpython"] == "3.11.7" and "PYTHON SOFTWARE FOUNDATION LICENSE" in (EMBEDDED / "LICENSE.txt").read_text()
    assert all(text.isascii() and not re.search(rb"(?i)copyright|license", text) for text in (*train, *val))
    assert (EMBEDDED / "text.jsonl.gz").stat().st_size < 400_000


def test_a_damaged_embedded_corpus_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(EMBEDDED, tmp_path / "data" / "embedded")
    monkeypatch.setattr(corpus_module, "__file__", str(tmp_path / "data" / "corpus.py"))
    text = tmp_path / "data" / "embedded" / "text.jsonl.gz"
    assert embedded().manifest["tokens"] == 1_167_193
    right = text.read_bytes()
    for wrong in (right[:-1], right[:1000] + bytes([right[1000] ^ 1]) + right[1001:], b""):
        text.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"text.jsonl.gz was damaged \(sha256 .*install the package again"):
            embedded()  # even when a packed copy is in the cache
    text.unlink()
    with pytest.raises(ValueError, match=r"cannot be read .*install the package again"):
        embedded()


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the embedded text is from CPython 3.11.7")
def test_the_embedded_text_is_what_its_rule_chooses():
    rule = runpy.run_path(str(EMBEDDED / "make_embedded.py"))
    listed = json.loads((EMBEDDED / "manifest.json").read_text())
    chosen = [(name, len(text), hashlib.sha256(text).hexdigest()) for name, text in rule["chosen"]()]
    assert chosen == [(file["name"], file["bytes"], file["sha256"]) for file in listed["files"]]


def test_stdlib_is_this_python_and_is_packed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path / "cache"))
    files = dict(stdlib_files())
    assert "abc.py" in files and "json/decoder.py" in files and not any("site-packages" in name for name in files)
    first = open_corpus("stdlib")
    stamp = (first.folder / "manifest.json").stat().st_mtime_ns
    second = stdlib()
    assert (second.folder / "manifest.json").stat().st_mtime_ns == stamp and len(list((tmp_path / "cache").iterdir())) == 1
    train, val = whole(first, "train"), whole(first, "val")
    tails = first.manifest["held_out"]["rule"] == "tails"  # which rule applies depends on the library's files
    everything = [a + b for a, b in zip(train, val, strict=True)] if tails else train + val
    assert Counter(everything) == Counter(text for path in files.values() if (text := path.read_bytes()))
    assert first.manifest["tokens"] == sum(path.stat().st_size + 1 for path in files.values() if path.stat().st_size)
    assert first.manifest["sources"]["sha256"] and first.manifest["python"]


def test_a_user_without_a_home_folder_learns_what_to_set(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    for name in ("NGPT_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(ValueError, match="set NGPT_CACHE"):
        embedded()
    from ngpt_core import native

    assert native.kernel_folder().is_dir()  # the kernel's goes to a temporary folder


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ValueError, match="NGPT_CACHE"):
        embedded()


@pytest.fixture
def server(tmp_path):
    """A real HTTP server on this machine, with a folder to put files in."""
    folder = tmp_path / "www"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


def test_a_download_is_recorded_at_first_and_verified_afterwards(tmp_path, monkeypatch, server):
    import hashlib

    folder, address = server
    monkeypatch.setenv("NGPT_CACHE", str(tmp_path / "cache"))
    (folder / "book.txt").write_text("it was a dark and stormy night")
    url = f"{address}/book.txt"
    path = download(url)
    ledger = json.loads((path.parent / "downloads.json").read_text())
    assert ledger[url]["sha256"] == hashlib.sha256(b"it was a dark and stormy night").hexdigest()
    (folder / "book.txt").unlink()
    assert list(documents(url)) == [b"it was a dark and stormy night"]  # from the cache
    path.write_text("it was a bright day")
    with pytest.raises(ValueError, match="wrong checksum"):
        download(url)
    path.unlink()
    (folder / "book.txt").write_text("another book")
    with pytest.raises(ValueError, match="has changed"):
        download(url)
    with pytest.raises(ValueError, match="could not download"):
        download(f"{address}/none.txt")
    assert sorted(p.name for p in path.parent.iterdir()) == ["downloads.json"]  # no parts left


BODY = b"it was a dark and stormy night"
ANSWERS = {
    "cut short": (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + BODY, "70 bytes are missing"),
    "a chunk cut short": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n" + BODY, "the connection ended early"),
    "reset": (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + BODY, "reset"),
    "no answer": (b"", "without response"),
    "an error": (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "503: Service Unavailable"),
    "not HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", "SSH-2.0"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_a_download_that_is_not_whole_is_refused_and_leaves_nothing(tmp_path, case):
    answer, words = ANSWERS[case]
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        connection.recv(1 << 16)
        connection.sendall(answer)
        if case == "reset":  # closing with nothing to linger for sends RST
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/book.txt"
    with listener, pytest.raises(ValueError, match=f"could not download {url}: .*{words}"):
        download(url, tmp_path)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_an_address_that_is_not_one_is_named(tmp_path):
    for url in ("http://127.0.0.1:port/x", "http://127.0.0.1/a b", "http://127.0.0.1/\u00fc"):
        with pytest.raises(ValueError, match="could not download http://127"):
            download(url, tmp_path)


def test_damaged_files_are_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    good = gzip.compress(b'{"text": "one"}\n' + os.urandom(4096))
    bad = bytearray(good)
    bad[2000:2100] = bytes(100)
    pyarrow.parquet.write_table(pyarrow.table({"text": [str(i) for i in range(5000)], "n": range(5000)}), tmp_path / "whole")
    table = bytearray((tmp_path / "whole").read_bytes())
    files = {
        "short.txt.gz": good[:-100],
        "short.jsonl.gz": good[:20],
        "plain.txt.gz": b"hello",
        "flipped.txt.gz": bad,
        "empty.parquet": b"",
        "short.parquet": table[:-100],
        "page.parquet": bytes(4) + bytes(2000) + table[2004:],
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read .*download or copy it again"):
            pack_files([str(tmp_path / name)], tmp_path / "c", ByteTokenizer())
    (tmp_path / "whole").rename(tmp_path / "whole.parquet")
    with pytest.raises(ValueError, match=r"whole.parquet has no text in the column 'n'"):
        pack_files([str(tmp_path / "whole.parquet")], tmp_path / "c", ByteTokenizer(), field="n")
    assert not (tmp_path / "c").exists()


def test_a_compressed_bomb_is_not_expanded(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    bomb = tmp_path / "bomb.txt.gz"
    bomb.write_bytes(gzip.compress(b"a" * 10_000_000))
    assert len(next(iter(documents(str(bomb))))) == 10_000_000  # a small one may expand to a gigabyte
    monkeypatch.setattr("ngpt_core.data.sources.ALWAYS_ALLOWED", 1000)
    shutil.copy(bomb, tmp_path / "bomb.jsonl.gz")
    many = pyarrow.table({"text": ["a" * 100_000] * 20})  # as a dictionary: the text is stored once
    few = pyarrow.table({"text": ["a" * 1_000_000]})
    for name, table, dictionary in (("many.parquet", many, True), ("few.parquet", few, False)):
        pyarrow.parquet.write_table(table, tmp_path / name, compression="zstd", use_dictionary=dictionary)
    for name in ("bomb.txt.gz", "bomb.jsonl.gz", "many.parquet", "few.parquet"):
        with pytest.raises(ValueError, match=r"expands to more than .* bytes, 100 times its size"):
            list(documents(str(tmp_path / name)))


def test_a_download_has_limits_in_size_and_time(tmp_path, monkeypatch):
    class Slow:
        length = 0

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def read1(self, size):
            clock[0] += 1.0
            return b"x"

    clock = [0.0]
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: Slow())
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with pytest.raises(ValueError, match="it is slower than 1024 bytes/s"):
        download("http://slow/x.txt", tmp_path)
    assert clock[0] < 200
    monkeypatch.setattr("ngpt_core.data.sources.MAX_BYTES", 10)
    with pytest.raises(ValueError, match="it has more than 10 bytes"):
        download("http://large/x.txt", tmp_path)
    monkeypatch.setattr("ngpt_core.data.sources.HEADER_TIMEOUT", 0.1)
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **kwargs: threading.Event().wait(10))
    with pytest.raises(ValueError, match=r"the server did not answer within 0\.1 seconds"):
        download("http://header/x.txt", tmp_path)


# ---- the feed: batches that are read ahead ---------------------------------------------------------------------------------
def seen(feed):
    fed = feed.next()
    return torch.cat([micro.tokens for micro in fed.micro_batches]), fed.counted


def test_batches_that_are_read_ahead_are_those_of_the_loader(corpus):
    """On the CPU; on a GPU the thread also copies them, on a stream of its own."""
    loaders = [Loader([(corpus, 1.0)], 4, 16) for _ in range(2)]
    plain, ahead = (Feed(loader, 2, torch.device("cpu"), ahead) for loader, ahead in zip(loaders, (False, True)))
    for _ in range(6):
        a, b = seen(plain), seen(ahead)
        assert torch.equal(a[0], b[0]) and a[1] == b[1]
        assert loaders[0].state_dict() == loaders[1].state_dict()  # the position of what was handed out
    for position in ([8], [0]):  # set back, as after a checkpoint was loaded
        for loader in loaders:
            loader.load_state_dict({**loader.state_dict(), "counts": list(position)})
        assert torch.equal(seen(plain)[0], seen(ahead)[0]) and loaders[1].counts == [position[0] + 4]


def test_documents_travel_with_their_offsets_and_only_where_there_are_some(corpus):
    loader = Loader([(corpus, 1.0)], 4, 16)
    batch, _ = loader.read([0])
    fed = Feed(loader, 1, torch.device("cpu"), False).next()
    for row, micro in zip(batch.documents, fed.micro_batches, strict=True):
        assert (micro.documents is None) == (not row.any())
        if micro.documents is not None:
            assert torch.equal(micro.documents.ids[0], row.int())
    assert {micro.documents is None for micro in fed.micro_batches} == {True, False} or batch.documents.any(1).all()


def test_an_error_in_the_thread_is_that_of_the_step(corpus):
    loader = Loader([(corpus, 1.0)], 4, 16)
    feed = Feed(loader, 4, torch.device("cpu"), True)
    feed.next()
    feed.coming[1].result()
    loader.read = lambda counts, limit=None: (_ for _ in ()).throw(OSError("the disk has gone"))
    feed.next()  # it was read before
    with pytest.raises(OSError, match="the disk has gone"):
        feed.next()


def test_what_a_gpu_s_stream_copies_is_waited_for_and_kept_until_it_was_used(corpus, monkeypatch):
    """The order of the calls that torch documents for a copy on a stream of its own; the device itself is the CPU."""
    log, kept = [], []

    class Stream:
        device = torch.device("cuda", 3)

        def record_event(self):
            log.append("copied")
            return "event"

        def wait_event(self, event):
            log.append(f"wait for {event}")

    @contextlib.contextmanager
    def within(stream):
        log.append("begin")
        yield

    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: kept.append(id(x)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: log.append("pinned") or x)
    devices = []  # of the thread: without this it would open a context on GPU 0
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((threading.current_thread().name, device)))
    feed = Feed(Loader([(corpus, 1.0)], 4, 16), 2, torch.device("cpu"), True)
    feed.stream = Stream()
    fed = feed.next()
    feed.coming[1].result()
    assert sorted(log) == sorted(2 * ["pinned", "pinned", "pinned", "begin", "copied"] + ["wait for event"])
    assert log.index("copied") < log.index("wait for event") and kept == [id(x) for x in fed.tensors()]
    assert devices == [("ngpt-feed_0", Stream.device)]
