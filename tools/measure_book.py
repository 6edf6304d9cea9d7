"""What of the book a reader cannot run, page by page: `python -m tools.measure_book` prints a table.

It is also a ratchet. Every page keeps to `LIMITS`; a page that does not yet is listed in `tools/measure_book.json` with
its values, which may only go down. `--check` exits 1 for a page beyond its limits, and for a list that could be
tighter; `--update` tightens the list and refuses to loosen it. Without the file it starts one.

A line is one that is not empty. Cells that only import, the cell `#| default_exp` and the parameters count nowhere. A
lesson cell is a code cell that exports nothing.
"""

import argparse
import ast
import io
import json
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from tools.format import NOTEBOOKS

BEHIND = Path(__file__).with_suffix(".json")
LIMITS = {
    "to_comparison": 40,  # lines from where a kernel is defined to the first cell that compares
    "export_run": 60,  # lines of exported code without a lesson cell between
    "not_run": 0,  # exported device functions that no lesson cell names
    "function_lines": 60,  # the longest function
    "unexplained": 0,  # functions of more than 40 lines with no reason in a comment or the docstring
    "first_output": 25,  # lines to the end of the first cell that shows something
}
NEVER = 9999  # lines to a comparison that does not come
COMPARES = re.compile(r"assert_equal|assert_close|assert |check\w*\(")
CATCHES = re.compile(r"^except \w", re.M)
REASON = re.compile(r"\b(long|because|so that|in one piece|together)\b", re.I)
PICTURES = ("image/png", "image/svg+xml")


@dataclass
class Page:
    """A notebook's figures; the first six are those with limits."""

    to_comparison: int = 0
    export_run: int = 0
    not_run: int = 0
    function_lines: int = 0
    unexplained: int = 0
    first_output: int = 0
    kernels: int = 0
    device_functions: int = 0
    functions_over_40: int = 0
    functions_over_60: int = 0
    cell_median: float = 0
    long_lessons: float = 0  # the share of lesson cells over 6 lines
    prose_per_code: float = 0  # lines of prose for each line of code
    figures: int = 0
    where: dict[str, str] = field(default_factory=dict)  # for a measure with a limit: the names it is about


@dataclass
class Cell:
    """A code cell as it is counted."""

    source: str
    tree: ast.Module
    exported: bool
    lines: int
    imports_only: bool
    shows: bool
    figures: int


def count_lines(source: str) -> int:
    """Lines that are not empty."""
    return sum(1 for line in source.splitlines() if line.strip())


def code_cells(notebook: Any) -> Iterator[Cell]:
    """The code cells that count."""
    for cell in notebook.cells:
        source = cell.source
        directive = source.lstrip().startswith("#| default_exp")
        if cell.cell_type != "code" or directive or "parameters" in cell.metadata.get("tags", []):
            continue
        tree = ast.parse(source)
        pictures = sum(any(kind in output.get("data", {}) for kind in PICTURES) for output in cell.outputs)
        yield Cell(
            source, tree, exported=re.match(r"\s*#\|\s*exporti?\b", source) is not None, lines=count_lines(source),
            imports_only=all(isinstance(part, ast.Import | ast.ImportFrom) for part in tree.body),
            shows=bool(cell.outputs), figures=pictures,
        )  # fmt: skip


def functions_in(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """All functions, those within others too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def length(function: ast.FunctionDef) -> int:
    """Lines from `def` to the last."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def remarks(function: ast.FunctionDef, source: str) -> str:
    """The docstring and the comments of a function in a cell."""
    lines = source.splitlines()[function.lineno - 1 : function.end_lineno]
    return "\n".join([ast.get_docstring(function) or "", *(line.partition("# ")[2] for line in lines)])


def decorated(function: ast.FunctionDef, pattern: str) -> bool:
    """Whether a decorator of a function begins so."""
    return any(re.match(pattern, ast.unparse(decorator)) for decorator in function.decorator_list)


def words(source: str) -> set[str]:
    """The names in a cell's code and in its strings, without its comments."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {word for token in tokens if token.type != tokenize.COMMENT for word in re.findall(r"\w+", token.string)}


def measure_runs(cells: list[Cell]) -> tuple[int, int]:
    """The longest run of exported lines without a lesson cell, and the lines to the first output."""
    longest = run = seen = 0
    first = None
    for cell in cells:
        if not cell.imports_only:
            run = run + cell.lines if cell.exported else 0
            seen += cell.lines
        longest = max(longest, run)
        if cell.shows and first is None:
            first = seen
    return longest, seen if first is None else first


def measure_kernels(cells: list[Cell]) -> dict[str, int]:
    """Each kernel's lines from its cell to the first cell that compares.

    For a kernel of a lesson cell an error that is caught will do: it may be wrong on purpose.
    """
    waiting: dict[str, int] = {}
    found: dict[str, int] = {}
    shown: set[str] = set()  # kernels of lesson cells
    for cell in cells:
        compares = not cell.exported and COMPARES.search(cell.source)
        catches = not cell.exported and CATCHES.search(cell.source)
        judged = {name for name in waiting if compares or (catches and name in shown)}
        found |= {name: waiting[name] for name in judged}
        waiting = {name: lines + cell.lines for name, lines in waiting.items() if name not in judged}
        for function in functions_in(cell.tree):
            if decorated(function, r"kernel\b"):
                (found if compares or catches else waiting)[function.name] = 0
                shown |= set() if cell.exported else {function.name}
    return found | dict.fromkeys(waiting, NEVER)


def measure(notebook: Any, run_anywhere: set[str]) -> Page:
    """The figures of a notebook; `run_anywhere`: the names in the lesson cells of the whole book."""
    cells, page = list(code_cells(notebook)), Page()
    written = [(function, cell.source) for cell in cells if cell.exported for function in functions_in(cell.tree)]
    functions = [function for function, _ in written]
    device = sorted({function.name for function in functions if decorated(function, ".*device_function")})
    lengths = {function.name: length(function) for function in functions}
    over = {function.name: remarks(function, source) for function, source in written if length(function) > 40}
    kernels = measure_kernels(cells)
    page.export_run, page.first_output = measure_runs(cells)
    page.kernels, page.to_comparison = len(kernels), max(kernels.values(), default=0)
    page.device_functions, not_run = len(device), [name for name in device if name not in run_anywhere]
    page.function_lines, page.functions_over_40 = max(lengths.values(), default=0), len(over)
    page.functions_over_60 = sum(lines > 60 for lines in lengths.values())
    unexplained = [name for name, text in over.items() if not REASON.search(text)]
    page.not_run, page.unexplained = len(not_run), len(unexplained)
    lessons = [cell for cell in cells if not cell.exported]
    page.cell_median = statistics.median([cell.lines for cell in cells] or [0])
    page.long_lessons = sum(cell.lines > 6 for cell in lessons) / max(1, len(lessons))
    prose = sum(count_lines(cell.source) for cell in notebook.cells if cell.cell_type == "markdown")
    page.prose_per_code = prose / max(1, sum(cell.lines for cell in cells))
    page.figures = sum(cell.figures for cell in cells)
    page.where = {
        "to_comparison": ", ".join(name for name, lines in kernels.items() if lines > LIMITS["to_comparison"]),
        "not_run": ", ".join(not_run),
        "function_lines": ", ".join(name for name, lines in lengths.items() if lines > LIMITS["function_lines"]),
        "unexplained": ", ".join(unexplained),
    }
    return page


def measure_book(folder: Path) -> dict[str, Page]:
    """Each notebook of a folder, by its name."""
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in sorted(folder.glob("*.ipynb"))}
    lessons = (cell for notebook in notebooks.values() for cell in code_cells(notebook) if not cell.exported)
    run_anywhere = {word for cell in lessons for word in words(cell.source)}
    return {name: measure(notebook, run_anywhere) for name, notebook in notebooks.items()}


def beyond(page: Page) -> dict[str, int]:
    """The measures of a page that are over their limits."""
    return {name: getattr(page, name) for name, limit in LIMITS.items() if getattr(page, name) > limit}


def compare(pages: dict[str, Page], listed: dict[str, dict[str, int]]) -> tuple[list[str], list[str]]:
    """What became worse than the list allows, and what became better than it says, a line each."""
    worse, better = [], []
    for name in sorted(pages.keys() | listed.keys()):
        now, was = beyond(pages[name]) if name in pages else {}, listed.get(name, {})
        for measure_name in LIMITS:
            value, allowed = now.get(measure_name, 0), was.get(measure_name, 0)
            if value > allowed:
                where = pages[name].where.get(measure_name, "")
                limit = f"{allowed} are listed" if allowed else f"the limit is {LIMITS[measure_name]}"
                worse.append(f"{name}: {measure_name} is {value}, {limit}" + f" ({where})" * bool(where))
            elif value < allowed:
                better.append(f"{name}: {measure_name} is {value or 'within its limit'}, {allowed} is listed")
    return worse, better


def read_listed() -> dict[str, dict[str, int]]:
    """The pages that do not keep to the limits yet, with the values they may have."""
    return dict(json.loads(BEHIND.read_text(encoding="utf-8")))


def write_listed(pages: dict[str, Page]) -> None:
    """List the pages as they are, a line each."""
    lines = [f"  {json.dumps(name)}: {json.dumps(values)}" for name, page in pages.items() if (values := beyond(page))]
    BEHIND.write_text("{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n", encoding="utf-8")


COLUMNS = {
    "to_comparison": "kernel to comparison", "export_run": "export run", "not_run": "device run",
    "function_lines": "longest", "functions_over_40": ">40", "functions_over_60": ">60", "unexplained": "no reason",
    "cell_median": "cell", "long_lessons": ">6 lines", "prose_per_code": "prose/code", "figures": "figures",
    "first_output": "first output",
}  # fmt: skip


def table(pages: dict[str, Page]) -> str:
    """The figures of all pages; a star marks those over their limit."""
    rows = [["", *COLUMNS.values()]]
    rows += [[name, *(spell(page, measure_name) for measure_name in COLUMNS)] for name, page in pages.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def spell(page: Page, name: str) -> str:
    """A figure as the table shows it."""
    value = getattr(page, name)
    if (name == "to_comparison" and not page.kernels) or (name == "not_run" and not page.device_functions):
        return "-"
    text = {
        "to_comparison": "never" if value == NEVER else f"{value}",
        "not_run": f"{page.device_functions - page.not_run}/{page.device_functions}",
        "long_lessons": f"{value:.0%}",
        "prose_per_code": f"{value:.2f}",
    }.get(name, f"{value:g}")
    return text + "*" * (name in LIMITS and value > LIMITS[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 if a page is beyond what the list allows")
    mode.add_argument("--update", action="store_true", help="tighten the list; refuses to loosen it")
    options = parser.parse_args()
    pages = measure_book(NOTEBOOKS)
    if not (options.check or options.update):
        print(table(pages))
        return 0
    if options.update and not BEHIND.exists():
        write_listed(pages)
    worse, better = compare(pages, read_listed())
    if options.update and not worse:
        write_listed(pages)
        better = []
    for line in worse:
        print(f"worse: {line}")
    for line in better:
        print(f"better: {line}; run: python -m tools.measure_book --update")
    return 1 if worse or better else 0


if __name__ == "__main__":
    sys.exit(main())
