"""Models with one change: each is read, or is refused in a clear error before a weight is read."""

import pytest
from mutations import READERS, change_one, outcome

from deep import DEEP

CASES = 2000 if DEEP else 20 * len(READERS)


@pytest.mark.parametrize("seed", range(CASES))
def test_a_changed_model_is_read_or_refused_before_a_weight_is_read(tmp_path, seed):
    case = change_one(tmp_path, seed)
    result = outcome(case)  # any other error than CheckpointError escapes, and fails
    assert result.kind == "read" or not result.weights, f"{case.change}: weights were read in vain"
    if result.kind == "line":
        lines = result.text.splitlines()
        assert lines[0].strip() and len(lines) <= 21 and max(map(len, lines)) <= 400, case.change


@pytest.mark.parametrize("reader", READERS)
def test_the_same_seed_gives_the_same_case(tmp_path, reader):
    seed = READERS.index(reader) + 30
    first, second = change_one(tmp_path / "a", seed), change_one(tmp_path / "b", seed)
    assert first.reader == second.reader == reader and first.change == second.change


def test_every_reader_is_given_both_models_that_work_and_models_that_do_not(tmp_path):
    ends = {reader: set() for reader in READERS}
    for seed in range(12 * len(READERS)):
        case = change_one(tmp_path / str(seed), seed)
        ends[case.reader].add(outcome(case).kind)
    assert all("line" in kinds for kinds in ends.values())
    assert sum("read" in kinds for kinds in ends.values()) >= len(READERS) - 3
