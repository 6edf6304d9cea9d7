"""The page of measurements and the README's figures are what the records say."""

import re

import pytest

from tools import measurements


def test_the_page_the_chart_and_the_readme_are_what_the_records_say(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["measurements", "--check"])
    assert measurements.main() == 0, capsys.readouterr().out


def test_a_row_that_is_missing_or_twice_is_named():
    with pytest.raises(SystemExit, match="found 0 rows"):
        measurements.median([])
    with pytest.raises(SystemExit, match="found 2 rows"):
        measurements.median([{"us": {"median": 1.0}}] * 2)


NAMES = [path.stem for path in sorted(measurements.RECORDS.glob("*.json"))]
UNSAID = {"ptx_conformance_h200": ["date", "versions"], "topk_variants_h200": ["versions"]}  # may only become fewer


@pytest.mark.parametrize("name", NAMES)
def test_every_record_says_its_command_its_date_and_its_versions(name):
    record = measurements.read(name)
    assert record["command"] and measurements.unsaid(record) == UNSAID.get(name, [])


@pytest.mark.parametrize("name", NAMES)
def test_what_a_record_was_made_with_can_be_run_today(name):
    command = measurements.today_command(measurements.read(name)["command"])
    module = re.match(r"python -m tools\.(\w+)|(ddtree) bench", command)
    if module is None:
        assert "was not kept" in measurements.read(name)["note"]
    else:
        assert module[2] or (measurements.ROOT / "tools" / f"{module[1]}.py").exists()
    assert measurements.today_command("python tests/lossless.py --gguf X") == "python -m tools.lossless --gguf X"
    assert measurements.today_command("python tests/no_such_tool.py") == "python tests/no_such_tool.py"


@pytest.mark.parametrize("budget", [64, 128])
def test_the_plan_rounds_the_builders_times_as_the_records_do(budget):
    record, text = measurements.read("tree_h200"), (measurements.ROOT / "plans" / "phase_1.md").read_text("utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| builder alone, {budget} nodes")]
    for kind in ("normal", "bfloat16", "peaked"):
        one, many = (
            measurements.median(measurements.rows(
                record, group="builder", rows=kind, budget=budget, requests=requests, step="build_trees"
            ))
            for requests in (1, 64)
        )  # fmt: skip
        assert f"{kind} {one:.1f} / {many:.1f}" in line
