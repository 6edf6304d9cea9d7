"""Run the book: execute notebooks with papermill and render them to HTML.

`python -m tools.book` executes every notebook into `build/book/` and writes HTML beside it. `--store` puts the outputs
back into the notebooks, in canonical form. An unknown parameter, a failing cell and a cell over the time limit are
errors; a failing cell is printed with its source, and the other notebooks still run. `-p NAME VALUE` sets a parameter,
e.g. `-p profile full`; `--jobs 2` executes two notebooks at a time.
"""

import argparse
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import nbformat
import papermill
from nbconvert import HTMLExporter
from traitlets.config import Config

from tools.format import NOTEBOOKS, canonical

BUILD = NOTEBOOKS.parent / "build" / "book"


def check_parameters(notebook: Path, parameters: dict) -> None:
    """papermill only warns about a parameter the notebook does not have; here it is a SystemExit."""
    known = papermill.inspect_notebook(str(notebook))
    if unknown := sorted(set(parameters) - set(known)):
        raise SystemExit(f"{notebook}: unknown parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}")


def start_and_execute(*arguments, starts: int = 3, **options) -> None:
    """execute_notebook of papermill, again if the kernel did not start: two that start at once may choose one port."""
    for left in reversed(range(starts)):
        try:
            papermill.execute_notebook(*arguments, **options)
            return
        except RuntimeError as error:
            if not left or "Kernel died before replying" not in str(error):
                raise


def execute(notebook: Path, output: Path, parameters: dict, cell_seconds: int) -> None:
    """Execute one notebook into `output`; raises SystemExit that shows the failing cell."""
    check_parameters(notebook, parameters)
    try:
        start_and_execute(
            str(notebook), str(output), parameters, cwd=str(notebook.parent), kernel_name="python3",
            progress_bar=False, execution_timeout=cell_seconds, start_timeout=max(60, cell_seconds),
            config=Config(KernelManager={"transport_encryption": "auto"}),  # else the kernel warns of plain text
        )  # fmt: skip
    except papermill.PapermillExecutionError as error:
        raise SystemExit(f"{notebook}: cell {error.cell_index} failed\n{error.source}\n{error}") from None
    except TimeoutError as error:
        raise SystemExit(f"{notebook}: a cell ran longer than {cell_seconds} s\n{error}") from None


def store(executed: Path, notebook: Path) -> None:
    """Copy the outputs of `executed` into `notebook`, cell by cell id, in canonical form."""
    source = nbformat.read(notebook, as_version=4)
    outputs = {cell.id: cell.get("outputs", []) for cell in nbformat.read(executed, as_version=4).cells}
    for cell in source.cells:
        if cell.cell_type == "code":
            cell.outputs = outputs[cell.id]
    notebook.write_text(canonical(nbformat.writes(source)), encoding="utf-8")


def render(executed: Path) -> None:
    """Write `executed` as HTML beside it; links between notebooks become links between pages."""
    body, _ = HTMLExporter().from_filename(str(executed))
    executed.with_suffix(".html").write_text(body.replace(".ipynb", ".html"), encoding="utf-8")


def run(notebook: Path, parameters: dict, cell_seconds: int, keep: bool) -> float:
    """Execute one notebook, then store its outputs or render it; returns the seconds that took."""
    start, executed = time.perf_counter(), BUILD / notebook.name
    warnings.filterwarnings("ignore", module="papermill")
    execute(notebook, executed, parameters, cell_seconds)
    store(executed, notebook) if keep else render(executed)
    return time.perf_counter() - start


def run_all(notebooks: list[Path], jobs: int, *options) -> list[str]:
    """Execute notebooks, `jobs` at a time and the longest text first; returns what failed, a text each."""
    failures = []
    with ProcessPoolExecutor(jobs) as pool:
        longest_first = sorted(notebooks, key=lambda notebook: -notebook.stat().st_size)
        running = {pool.submit(run, notebook, *options): notebook for notebook in longest_first}
        for done in as_completed(running):
            error = done.exception()
            if isinstance(error, SystemExit):
                failures.append(str(error))
            elif error is not None:
                raise error
            print(f"{running[done].name}: {'FAILED' if error else f'{done.result():.1f} s'}", flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="a parameter")
    parser.add_argument("--cell-seconds", type=int, default=600, help="time limit of one cell (default 600)")
    parser.add_argument("--jobs", type=int, default=1, help="how many notebooks run at a time (default 1)")
    parser.add_argument("--store", action="store_true", help="keep the outputs in the notebooks; renders nothing")
    options = parser.parse_args()
    os.environ["DDTREE_QUIET"] = "1"  # what is said of slow compilation would be in the outputs
    BUILD.mkdir(parents=True, exist_ok=True)
    notebooks = options.notebooks or list(NOTEBOOKS.glob("*.ipynb"))
    failures = run_all(notebooks, options.jobs, dict(options.p), options.cell_seconds, options.store)
    if failures:
        raise SystemExit("\n\n".join(failures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
