"""The page of measurements and the README's figures are what the records say."""

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


@pytest.mark.parametrize("name", [path.stem for path in sorted(measurements.RECORDS.glob("*.json"))])
def test_every_record_says_its_command(name):
    assert measurements.read(name)["command"]
