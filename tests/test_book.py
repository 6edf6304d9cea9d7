"""Rules of the book that a tool cannot fix: the first cell, parameters, links, and paths of one machine."""

import re
from pathlib import Path

import nbformat
import pytest

from tools import book, links

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_starts_with_title_one_line_and_a_way_on(self, path):
        title, quote, *rest = cells(path, "markdown")[0].source.split("\n\n")
        assert title.startswith("# ") and "\n" not in title and not re.match(r"# \d", title)
        assert quote.startswith("> ") and "\n" not in quote
        assert "Next: [" in rest[-1]

    def test_other_headings_stand_alone(self, path):
        for cell in cells(path, "markdown")[1:]:
            lines = cell.source.splitlines()
            assert len(lines) == 1 or not lines[0].startswith("#"), cell.source

    def test_has_one_typed_and_commented_parameters_cell(self, path):
        tagged = [cell.source for cell in cells(path, "code") if "parameters" in cell.metadata.get("tags", [])]
        assert len(tagged) == 1
        assert all(re.match(r"\w+: \w+ = .+  # ", line) for line in tagged[0].splitlines()), tagged[0]
        assert tagged[0].startswith('profile: str = "small"')

    def test_links_lead_somewhere(self, path):
        for cell in cells(path, "markdown"):
            for target in re.findall(r"\]\(([^)#:]+)\)", cell.source):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"

    def test_stored_outputs_have_no_error_and_no_path_of_a_machine(self, path):
        for cell in cells(path, "code"):
            assert not [output for output in cell.outputs if output.output_type == "error"], cell.source
            text = "".join(str(output.get("text", output.get("data", {}).get("text/plain"))) for output in cell.outputs)
            assert not re.search(r"(?<!\w)/(home|root|tmp|usr|work)/", text), cell.source

    def test_sets_no_environment_and_installs_nothing(self, path):
        for cell in cells(path, "code"):
            assert not re.search(r"os\.environ\[.*\] *=|%%?writefile|^[!%]", cell.source, re.M), cell.source


ROOT = Path(__file__).parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("snippet", [snippet for snippet in SNIPPETS if "import torch" not in snippet])
def test_the_python_of_the_readme_runs(snippet, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    exec(snippet, {})
    assert capsys.readouterr().out


def test_one_snippet_of_the_readme_is_for_torch():
    """tests/gpu/test_readme.py runs it where there is a GPU."""
    assert len(SNIPPETS) >= 4 and sum("import torch" in snippet for snippet in SNIPPETS) == 1


def test_links_follow_the_order_of_reading(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["links", "--check"])
    assert links.main() == 0, capsys.readouterr().out


def test_the_tour_lists_every_notebook_in_the_order_of_reading():
    order = [path.name for path in links.read_order()][1:]
    start = "\n".join(cell.source for cell in cells(links.read_order()[0], "markdown")[1:])
    linked = [name for name in re.findall(r"\]\((\w+\.ipynb)\)", start) if name in order]
    assert list(dict.fromkeys(linked)) == order


@pytest.mark.parametrize("dies, message", [(2, None), (3, "Kernel died before replying"), (1, "another")])
def test_a_kernel_that_found_its_port_taken_is_started_again(monkeypatch, dies, message):
    calls = []

    def execute_notebook(*arguments):
        calls.append(arguments)
        if len(calls) <= dies:
            raise RuntimeError(message or "Kernel died before replying to kernel_info")

    monkeypatch.setattr(book.papermill, "execute_notebook", execute_notebook)
    if message is None:
        book.start_and_execute("a", "b")
        assert calls == [("a", "b")] * 3
    else:
        with pytest.raises(RuntimeError, match=message):
            book.start_and_execute("a", "b")
        assert len(calls) == (1 if message == "another" else 3)
