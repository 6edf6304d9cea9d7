"""Set the links between notebooks: `python -m tools.links` writes Previous and Next in the order of reading.

The order is `notebooks/order.txt`: a notebook per line, and a line `# Title` before each part, whatever the numbers
say. The tour in 00_start_here (the cell with the id `tour`) is written from it too. `--check` names what differs and
exits 1.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat

from tools.format import NOTEBOOKS, canonical

ORDER = NOTEBOOKS / "order.txt"


def read_parts() -> dict[str, list[Path]]:
    """The notebooks by the title of their part, in the order of reading; raises SystemExit if it is not the folder."""
    parts: dict[str, list[Path]] = {}
    for line in ORDER.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            parts[line[2:]] = []
        else:
            parts[list(parts)[-1]].append(NOTEBOOKS / f"{line}.ipynb")
    names = [path.stem for pages in parts.values() for path in pages]
    found = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    if wrong := sorted(found.symmetric_difference(names)) or sorted(name for name in names if names.count(name) > 1):
        raise SystemExit(f"{ORDER}: lists each notebook once; look at {', '.join(wrong)}")
    return parts


def read_order() -> list[Path]:
    """Every notebook in the order of reading."""
    return [path for pages in read_parts().values() for path in pages]


def title(page: Path) -> str:
    """The title of a notebook."""
    return nbformat.read(page, as_version=4).cells[0].source.split("\n")[0].removeprefix("# ")


def tour() -> str:
    """The table of parts and pages, as markdown."""
    lines = ["| part | pages |", "| --- | --- |"]
    for part, pages in list(read_parts().items())[1:]:
        lines.append(f"| {part} | {' · '.join(f'[{title(page)}]({page.name})' for page in pages)} |")
    return "\n".join(lines)


def link(label: str, page: Path) -> str:
    """A link to a neighbour."""
    return f"{label}: [{title(page)}]({page.name})"


def linked(order: list[Path], at: int) -> str:
    """The text of a notebook with the last line of its first cell linking to its neighbours."""
    notebook = nbformat.read(order[at], as_version=4)
    links = [link("Previous", order[at - 1])] if at else []
    links.append(link("Next", order[(at + 1) % len(order)]))
    first = notebook.cells[0]
    body = re.sub(r"\n+(Previous|Next): \[[^\n]*$", "", first.source.rstrip())
    first.source = f"{body}\n\n{' · '.join(links)}"
    for cell in notebook.cells:
        if cell.id == "tour":
            cell.source = tour()
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
