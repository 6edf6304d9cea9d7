"""Timers: what they note, repeat and write."""

import json

import pytest

from ddtree.bench import draw_logits
from ddtree.check import assert_equal
from ddtree.cuda import PtxDevice
from ddtree.draft import draft_tree, empty_draft
from ddtree.measure import environment, note_launches, quartiles, time_launches, write_measurement

FAST = PtxDevice(check=False, count=False)


def test_quartiles_are_those_of_the_sorted_values_and_one_value_has_none():
    assert quartiles([5, 1, 4, 2, 3]) == {"median": 3, "q1": 2, "q3": 4, "n": 5}
    with pytest.raises(ValueError, match="1 measurement has no spread"):
        quartiles([1.0])


def test_a_measurement_says_when_where_and_how(tmp_path):
    path = tmp_path / "m.json"
    written = write_measurement(path, "ddtree something", {"rows": [1]})
    assert json.loads(path.read_text()) == written
    assert (written["command"], written["rows"], written["environment"]) == ("ddtree something", [1], environment())


@pytest.mark.usefixtures("compiler")
def test_noted_launches_do_again_what_the_call_did_and_the_device_is_as_before():
    logits, out = draw_logits((3, 64)), empty_draft((3, 64), 5, FAST)
    with note_launches(FAST) as noted:
        draft_tree(logits, 4, out=out, device=FAST)
    assert "prepare" not in vars(FAST) and noted[-1].kernel.name == "layout_trees"
    expected = out.trees.tokens.copy()
    out.trees.tokens[:] = 7
    for launch in noted:
        launch()
    assert_equal(out.trees.tokens, expected, "tokens")


@pytest.mark.usefixtures("compiler")
def test_a_graph_holds_all_launches_of_the_calls_as_often_as_asked(monkeypatch):
    seen = []
    monkeypatch.setattr("ddtree.measure.time_graph", lambda graph, calls: seen.append((len(graph._launches), calls)))
    with note_launches(FAST) as noted:
        draft_tree(draw_logits((3, 64)), 4, device=FAST)
    time_launches(FAST, noted, calls=1, rounds=5)
    assert seen == [(5 * len(noted), 5)]


@pytest.fixture
def compiler():
    pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")
