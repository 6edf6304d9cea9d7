"""What a reader of a fresh clone sees in JupyterLab, started as `make lab` does, in a browser."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from browser import CHROMIUM, Tab, open_browser, wait_for

ROOT = Path(__file__).parent.parent
PARTS = ("ddtree", "fixtures", "kernels", "notebooks", "tools")
PAGE = """
    window.page = [...jupyterapp.shell.widgets('main')].find(widget => widget.context?.path == NAME);
    window.codes = () => page.content.widgets.filter(cell => cell.model.type == 'code');
    window.outputs = cell => Array.from({length: cell.model.outputs.length}, (_, i) => cell.model.outputs.get(i));
    window.drawn = () => codes().filter(cell => outputs(cell).some(output => 'image/svg+xml' in output.data));
    Boolean(page?.context.isReady && page.sessionContext.isReady && page.sessionContext.session?.kernel)
"""
VISIBLE = """
    (async () => {
        const found = [];
        for (const cell of drawn()) {
            await page.content.scrollToItem(page.content.widgets.indexOf(cell), 'start');
            const picture = cell.node.querySelector('.jp-RenderedSVG img, .jp-RenderedSVG svg');
            picture?.scrollIntoView();
            await new Promise(resolve => setTimeout(resolve, 200));
            const box = picture?.getBoundingClientRect();
            const text = decodeURIComponent(picture?.src ?? picture?.outerHTML ?? '');
            const seen = box && box.width > 50 && box.height > 50 && box.top < innerHeight && box.bottom > 0;
            found.push([Boolean(seen && picture.complete !== false && picture.naturalWidth !== 0), text]);
        }
        return found;
    })()
"""
WRONG = "codes().flatMap(outputs).filter(o => o.type == 'error' || o.streamType == 'stderr').map(o => o.toJSON())"

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: the book is not opened in a browser"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A fresh copy of the repository, and the environment of a user who has never started Jupyter."""
    folder = tmp_path_factory.mktemp("clone")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    homes = {f"JUPYTER_{kind}_DIR": str(folder / "jupyter" / kind.lower()) for kind in ("DATA", "CONFIG", "RUNTIME")}
    return folder, {**os.environ, **homes, "PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def lab(clone):
    """JupyterLab as `make lab` starts it; yields its address and token, and the file of what it says."""
    folder, environment = clone
    command = [sys.executable, "-m", "tools.lab", "--no-browser", "--allow-root", "--ServerApp.port=0"]
    command += ["--LabApp.expose_app_in_browser=True"]
    with open(folder / "lab.log", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        facts = Path(environment["JUPYTER_RUNTIME_DIR"], f"jpserver-{process.pid}.json")
        wait_for(lambda: facts.exists() or process.poll() is not None, "JupyterLab's server")
        assert process.poll() is None, (folder / "lab.log").read_text()
        yield json.loads(facts.read_text()), folder / "lab.log"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("browser") / "profile") as tools:
        yield tools


@pytest.mark.parametrize("name", ["00_start_here.ipynb", "13a_layout_masks.ipynb"])
def test_a_page_shows_its_trees_before_and_after_all_its_cells_run_without_an_error(lab, browser, name):
    server, log = lab
    with Tab(browser) as tab:
        tab.call("Page.navigate", url=f"{server['url']}lab/tree/{name}?token={server['token']}&reset")
        wait_for(lambda: is_open(tab, name), f"{name} in JupyterLab")
        stored = tab.run(VISIBLE)
        assert stored and all(seen and "Draft tree" in text for seen, text in stored), "stored trees are not shown"
        tab.run("jupyterapp.shell.activateById(page.id)")
        assert tab.run("jupyterapp.commands.execute('notebook:run-all-cells')") is True
        wait_for(lambda: tab.run("codes().every(cell => cell.model.executionCount)"), f"all cells of {name}", 600)
        assert tab.run(WRONG) == []
        trees = tab.run(VISIBLE)
    assert len(trees) == len(stored) and all(seen and "Draft tree" in text for seen, text in trees)
    assert "IPKernelApp" not in log.read_text(), "a kernel starts with a warning"


def is_open(tab, name):
    """Whether JupyterLab shows a notebook and its kernel is there."""
    try:
        return tab.run(PAGE.replace("NAME", repr(name)))
    except RuntimeError:  # JupyterLab itself is not there yet
        return False


def test_without_trust_jupyterlab_would_show_no_tree(clone):
    """Why `make lab` signs the notebooks: a new user's Jupyter does not trust them before."""
    folder, environment = clone
    notebook = folder / "notebooks" / "00_start_here.ipynb"
    code = f"""
import nbformat
from pathlib import Path
from nbformat.sign import NotebookNotary
from tools.lab import trust
page = nbformat.read({str(notebook)!r}, as_version=4)
before = NotebookNotary().check_signature(page)
trust([Path({str(notebook)!r})])
print(before, NotebookNotary().check_signature(page))
"""
    fresh = {**environment, "JUPYTER_DATA_DIR": str(folder / "nobody")}
    run = subprocess.run(
        [sys.executable, "-c", code], env=fresh, cwd=folder, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["False", "True"]
