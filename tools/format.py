"""Canonical form of a notebook: the same content is the same bytes.

Kept: cell ids, sources, tags, outputs. Set: execution counts 1..n, one kernelspec. Dropped: all other metadata.
`python -m tools.format --check [NOTEBOOK ...]` names what differs and exits 1; `--fix` rewrites those files.
"""

import argparse
import sys
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def merge_streams(outputs: list) -> list:
    """Join neighbouring pieces of one stream: where the kernel cut them is chance."""
    merged: list = []
    for output in outputs:
        if merged and output.output_type == "stream" == merged[-1].output_type and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def canonical(text: str) -> str:
    """The canonical text of the notebook `text`; raises nbformat.ValidationError if it is not a notebook."""
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat_minor = 5
    count = 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        cell.source = "\n".join(line.rstrip() for line in cell.source.rstrip().split("\n"))
        cell.pop("attachments", None)
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = merge_streams(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    notebook.cells = [cell for cell in notebook.cells if cell.source]
    return nbformat.writes(notebook) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="exit 1 if a notebook is not canonical")
    mode.add_argument("--fix", action="store_true", help="rewrite notebooks that are not canonical")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all in notebooks/")
    options = parser.parse_args()
    stale = []
    for path in options.notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        if (fixed := canonical(text)) != text:
            stale.append(path)
            if options.fix:
                path.write_text(fixed, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'rewritten' if options.fix else 'not canonical; run python -m tools.format --fix'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
