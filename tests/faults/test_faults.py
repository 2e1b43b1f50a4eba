"""The fast part of the faults: a sample of every kind. ``make soak`` runs all of them and stores the counts."""

import random
import shutil
from collections import Counter

import cases
import pytest
from fuzz import CASES, fuzz


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return cases.Place(tmp_path_factory.mktemp("faults"))


def test_a_crash_at_any_call_to_the_file_system_loses_nothing(place):
    states = cases.record(place)
    assert len(states) > 100
    for what, tree in random.Random(0).sample(states, 12):
        assert cases.crash(place, tree) == "equal", what


def test_the_recorder_sees_what_fsync_is_for(tmp_path):
    """Without fsync, a renamed file is there and empty after a power failure: the simulation can fail."""
    import os

    from disk import Recorder

    (tmp_path / "run").mkdir()
    recorder = Recorder(tmp_path / "run", tmp_path / "graveyard")
    with recorder.active():
        (tmp_path / "run" / "a.tmp").write_text("content")
        os.replace(tmp_path / "run" / "a.tmp", tmp_path / "run" / "a")
        handle = os.open(tmp_path / "run", os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        (tmp_path / "run" / "b").write_text("")
    states = [tree for what, tree in recorder.states() if what.startswith("power")]
    assert {"a": b""} in states and {"a": b"content"} not in states


def test_a_run_that_lost_more_than_an_interval_is_noticed(place, tmp_path):
    shutil.copytree(place.run, tmp_path / "crashed" / "run")
    for step in (4, 6):
        shutil.rmtree(tmp_path / "crashed" / "run" / "checkpoints" / f"step-{step:08d}")
    assert cases.restarted(place, tmp_path / "crashed") == "lost"


def test_no_flipped_bit_is_silent(place):
    outcomes = Counter(cases.flips(place, 1))
    assert not [key for key in outcomes if key[1] in cases.BAD], outcomes
    assert sum(n for (_, outcome), n in outcomes.items() if outcome == "detected") > 10


@pytest.mark.parametrize("kind", CASES)
def test_bad_input_is_only_ever_refused(place, kind):
    outcomes, examples = fuzz(place, kind, 60)
    assert not examples, examples
    assert sum(outcomes.values()) >= 50 and outcomes["refused"], outcomes
