"""Open the book in JupyterLab: `make lab`, or `python -m tools.lab [OPTIONS OF JUPYTER LAB]`.

JupyterLab shows a stored drawing (SVG) only in a notebook that it trusts, and trusts only what ran on this machine. So
the book's own notebooks are signed first, as `jupyter trust` does. What their kernels send is encrypted: without that,
each kernel begins with a warning.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

from tools.format import NOTEBOOKS


def trust(notebooks: list[Path]) -> None:
    """Sign notebooks as they are now, for this user of this machine."""
    notary = NotebookNotary()
    for path in notebooks:
        notary.sign(nbformat.read(path, as_version=4))


def main() -> int:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return 0
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    trust(notebooks)
    print(f"trusted {len(notebooks)} notebooks, so that their stored drawings are shown", flush=True)
    options = ["--MappingKernelManager.transport_encryption=auto", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *options, str(NOTEBOOKS / "00_start_here.ipynb")])


if __name__ == "__main__":
    sys.exit(main())
