"""`ddtree bench tree`: what it notes, records and reports, with the PTX machine in the place of a GPU."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from ddtree import bench, measure
from ddtree.bench import bench_builder, bench_tree, count_pipeline, describe, draw_logits, draw_rows
from ddtree.check import assert_equal
from ddtree.cli import app
from ddtree.cuda import PtxDevice, _driver_version
from ddtree.tree import build_tree

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

FAST = PtxDevice(check=False, count=False)


@pytest.fixture
def replays(monkeypatch):
    """The graphs that would be timed, with their calls; each is replayed once."""
    seen = []

    def time_graph(graph, calls, repeats=21):
        graph.replay()
        seen.append((graph, calls))
        return {"median": 1.5, "q1": 1.0, "q3": 2.0, "n": repeats}

    monkeypatch.setattr(measure, "time_graph", time_graph)
    return seen


def test_each_kernel_of_the_pipeline_gets_a_row_and_its_own_inputs(replays):
    inputs = [draw_logits((3, 64), seed=seed) for seed in range(2)]
    rows = bench.time_pipeline(FAST, "[3, 64] float32", inputs, 4)
    assert [row["step"] for row in rows] == ["draft_tree", *dict.fromkeys(row["step"] for row in rows[1:])]
    assert {"build_trees", "layout_trees"} < {row["step"] for row in rows}
    assert all(row["floor_us"] == 3 * 64 * 4 / 4.28e6 and row["us"]["median"] == 1.5 for row in rows)
    whole, *parts = [len(graph._launches) for graph, _ in replays]
    assert whole == sum(parts) == 6 * len(parts) and {calls for _, calls in replays} == {6}


def test_the_builder_is_timed_on_the_same_rows_for_both_kernels(replays):
    found = []
    bench_builder(FAST, found.extend, budgets=(6,), batches=(1, 2))
    assert len(found) == 3 * 2 * 2 == len(replays)
    assert {row["step"] for row in found} == {"build_trees", "build_trees_one_warp"}
    assert {(row["rows"], row["requests"], row["budget"]) for row in found} == {
        (kind, requests, 6) for kind in ("normal", "peaked", "bfloat16") for requests in (1, 2)
    }


@pytest.mark.parametrize("kind", bench.ROW_KINDS)
def test_rows_of_each_kind_are_candidates_from_a_seed(kind):
    log_probs, ids = draw_rows(kind, 1, 12)
    again, _ = draw_rows(kind, 2, 12)
    assert_equal(again[:1], log_probs, "the first request")
    assert log_probs.shape == ids.shape == (1, 15, 12) and len(build_tree(log_probs[0], ids[0], 12)) == 13


def test_bfloat16_logits_are_bits_of_the_same_numbers():
    values = (draw_logits((2, 9), "bfloat16").astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(values, draw_logits((2, 9)), rtol=2**-7)  # 8 bits of a significand, the rest cut off


def test_without_a_gpu_it_counts_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("DDTREE_DEVICE", "ptx")
    path = tmp_path / "tree.json"
    result = CliRunner().invoke(app, ["bench", "tree", "--out", str(path)])
    assert result.exit_code == 0 and "no GPU: counts of the PTX machine" in result.stderr
    record = json.loads(path.read_text())
    assert record["device"] == "ptx" and {"date", "command", "environment", "note"} < set(record)
    assert len(result.stdout.splitlines()) == len(record["rows"]) >= 4
    for row in record["rows"]:
        assert set(row) == {"group", "logits", "budget", "step", "warp_instructions", "global_load_bytes",
                            "global_store_bytes"}  # fmt: skip
        assert describe(row) in result.stdout and row["warp_instructions"] > 0
    assert sum(row["global_load_bytes"] for row in record["rows"]) >= 3 * 512 * 4


def test_json_is_one_object_and_the_counts_are_exact(monkeypatch):
    monkeypatch.setenv("DDTREE_DEVICE", "ptx")
    result = CliRunner().invoke(app, ["bench", "tree", "--json"])
    printed = json.loads(result.stdout)
    assert result.exit_code == 0 and printed == json.loads(json.dumps(bench_tree()))
    assert printed["rows"] == count_pipeline(PtxDevice(), (3, 512), 8)


def test_a_missing_gpu_is_said_plainly(monkeypatch):
    if _driver_version() is not None:
        pytest.skip("there is an NVIDIA driver")
    monkeypatch.setenv("DDTREE_DEVICE", "gpu")
    result = CliRunner().invoke(app, ["bench", "tree"])
    assert result.exit_code == 1 and result.stderr.startswith("ddtree: ") and "Traceback" not in result.stderr


def test_a_file_that_cannot_be_written_is_said_plainly(monkeypatch, tmp_path):
    monkeypatch.setenv("DDTREE_DEVICE", "ptx")
    result = CliRunner().invoke(app, ["bench", "tree", "--out", str(tmp_path / "no" / "tree.json")])
    assert result.exit_code == 2 and "there is no folder" in result.stderr


def test_a_device_may_be_named():
    assert bench_tree(device=PtxDevice())["rows"] == count_pipeline(PtxDevice(), (3, 512), 8)


def test_names_that_moved_to_measure_are_still_there():
    for name in ("PACKAGES", "environment", "note_launches", "time_graph", "time_launches", "write_measurement"):
        assert getattr(bench, name) is getattr(measure, name)
    assert bench.spread is measure.quartiles
