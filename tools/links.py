"""Set the links between notebooks: `python -m tools.links` writes Previous and Next in the order of reading.

The order is `notebooks/order.txt`, a notebook a line, whatever the numbers say. `--check` names what differs and exits
1.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat

from tools.format import NOTEBOOKS, canonical

ORDER = NOTEBOOKS / "order.txt"


def read_order() -> list[Path]:
    """Every notebook in the order of reading; raises SystemExit if the list and the folder disagree."""
    names = ORDER.read_text(encoding="utf-8").split()
    found = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    if wrong := sorted(found.symmetric_difference(names)) or len(names) != len(set(names)):
        raise SystemExit(f"{ORDER}: lists each notebook once; look at {wrong}")
    return [NOTEBOOKS / f"{name}.ipynb" for name in names]


def link(label: str, page: Path) -> str:
    title = nbformat.read(page, as_version=4).cells[0].source.split("\n")[0].removeprefix("# ")
    return f"{label}: [{title}]({page.name})"


def linked(order: list[Path], at: int) -> str:
    """The text of a notebook with the last line of its first cell linking to its neighbours."""
    notebook = nbformat.read(order[at], as_version=4)
    links = [link("Previous", order[at - 1])] if at else []
    links.append(link("Next", order[(at + 1) % len(order)]))
    first = notebook.cells[0]
    body = re.sub(r"\n+(Previous|Next): \[[^\n]*$", "", first.source.rstrip())
    first.source = f"{body}\n\n{' · '.join(links)}"
    return canonical(nbformat.writes(notebook))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    order = read_order()
    wrong = [(path, text) for at, path in enumerate(order) if (text := linked(order, at)) != path.read_text("utf-8")]
    for path, text in wrong:
        print(f"{path.name}: {'links differ; run: python -m tools.links' if check else 'rewritten'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
