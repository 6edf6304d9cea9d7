"""The first tree of a process on a GPU: without a compiler, with kept machine code of every condition, in threads."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import ddtree
from ddtree.build import build_trees_one_warp_kernel
from ddtree.cuda import driver
from ddtree.draft import draft_tree_ref
from ddtree.layout import layout_trees_kernel

ROOT = Path(__file__).parent.parent.parent
TREE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "numba_cuda", "llvmlite"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
import numpy as np
np.seterr(all="raise")
import ddtree
from ddtree.cuda import GpuDevice
from ddtree.draft import draft_tree_ref

def compare(device):
    logits = 4 * np.random.default_rng(0).standard_normal((2, 5, 1024), dtype=np.float32)
    given = ddtree.draft_tree(logits, 32, [3, 4], lengths=[5, 0], device=device)
    wanted = draft_tree_ref(logits, 32, [3, 4], lengths=[5, 0])
    for part in ("trees", "layout"):
        for name, value in vars(getattr(wanted, part)).items():
            np.testing.assert_array_equal(getattr(getattr(given, part), name), value)
    return "equal"
"""
FIRST = TREE + "print(compare(GpuDevice()))\n"


def start(code: str, cache: Path | str) -> subprocess.Popen[str]:
    environment = {**os.environ, "DDTREE_CACHE": str(cache), "CUDA_CACHE_DISABLE": "1"}
    environment.pop("DDTREE_QUIET", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=environment, **pipes)


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process printed and said; it must have ended well."""
    out, err = process.communicate()
    assert process.returncode == 0, err[-3000:]
    return out, err


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_first_tree_needs_no_compiler_and_its_machine_code_is_kept(tmp_path):
    assert finish(start(FIRST, "off")) == ("equal\n", "")
    assert finish(start(FIRST, tmp_path)) == ("equal\n", "")
    kept = read_all(tmp_path)
    assert len(kept) == 4 and all(name.endswith(".cubin") for name in kept)
    assert finish(start(FIRST, tmp_path)) == ("equal\n", "") and read_all(tmp_path) == kept


def test_damaged_truncated_and_exchanged_machine_code_is_made_again(tmp_path):
    finish(start(FIRST, tmp_path))
    kept = read_all(tmp_path)
    names = sorted(kept)
    for damage in (
        lambda data: data[:-100], lambda data: data[:50], lambda data: b"", lambda data: b"\x7fELF",
        lambda data: data[:200] + bytes([data[200] ^ 255]) + data[201:], lambda data: kept[names[0]][:-1],
    ):  # fmt: skip
        for name, data in kept.items():
            (tmp_path / name).write_bytes(damage(data))
        assert finish(start(FIRST, tmp_path)) == ("equal\n", "")
        assert read_all(tmp_path) == kept
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        (tmp_path / name).write_bytes(kept[other])
    assert finish(start(FIRST, tmp_path)) == ("equal\n", "") and read_all(tmp_path) == kept


def test_a_folder_that_cannot_be_written_is_said_and_the_tree_is_right(tmp_path):
    (tmp_path / "file").write_text("")
    out, err = finish(start(FIRST, tmp_path / "file"))
    assert out == "equal\n" and "compiled kernels are not kept in" in err and "DDTREE_CACHE" in err
    if os.geteuid():  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        out, err = finish(start(FIRST, tmp_path / "locked"))
        assert out == "equal\n" and err.count("not kept") == 1 and not list((tmp_path / "locked").iterdir())


FULL = """
import errno, os
from pathlib import Path
write = Path.write_bytes

def fail(path, data):
    write(path, data[:100])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

Path.write_bytes = fail
"""


def test_on_a_full_disk_nothing_is_left_and_the_tree_is_right(tmp_path):
    out, err = finish(start(FULL + FIRST, tmp_path))
    assert out == "equal\n" and err.count("No space left on device") == 1 and list(tmp_path.iterdir()) == []


def test_without_a_home_the_tree_is_right(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    code = "import os, pwd\nos.environ.pop('DDTREE_CACHE')\n\ndef unknown(uid):\n    raise KeyError(uid)\n\n"
    assert finish(start(code + "pwd.getpwuid = unknown\n" + FIRST, "off")) == ("equal\n", "")


def test_processes_that_start_at_once_on_an_empty_folder_are_all_right(tmp_path):
    running = [start(FIRST, tmp_path) for _ in range(3)]
    assert [finish(process)[0] for process in running] == ["equal\n"] * 3
    assert len(read_all(tmp_path)) == 4
    assert finish(start(FIRST, tmp_path))[0] == "equal\n"


def test_another_driver_and_another_text_are_linked_anew(gpu, tmp_path, monkeypatch):
    text, linked = layout_trees_kernel.ptx_to_run(gpu.arch), []
    link = driver.link_on_gpu
    monkeypatch.setattr(driver, "link_on_gpu", lambda *all: linked.append(all[2]) or link(*all))
    arguments = gpu._driver, text, layout_trees_kernel.entry, gpu.arch, tmp_path
    assert driver.machine_code(*arguments) == driver.machine_code(*arguments) and len(linked) == 1
    monkeypatch.setattr(driver, "driver_release", lambda driver: "13990 another")
    driver.machine_code(*arguments)
    driver.machine_code(gpu._driver, text + "\n", *arguments[2:])
    assert len(linked) == 3 and len(list(tmp_path.iterdir())) == 3


def test_a_text_that_cannot_be_linked_comes_back_with_the_linkers_words(gpu):
    text = build_trees_one_warp_kernel.ptx_to_run(gpu.arch)
    broken = text.replace("ret;", "return;", 1)
    with pytest.raises(
        RuntimeError, match=r"ddtree_build_trees_one_warp: the driver cannot link its PTX: cuLink.*line"
    ):
        driver.link_on_gpu(gpu._driver, broken, build_trees_one_warp_kernel.entry)


def test_another_thread_builds_the_same_trees(gpu):
    logits = 4 * np.random.default_rng(1).standard_normal((3, 500), dtype=np.float32)
    with ThreadPoolExecutor(4) as pool:
        drafts = list(pool.map(lambda _: ddtree.draft_tree(logits, 20, 7, device=gpu), range(12)))
    wanted = draft_tree_ref(logits, 20, 7)
    for draft in drafts:
        for name, value in vars(wanted.trees).items():
            np.testing.assert_array_equal(getattr(draft.trees, name), value)


FORK = (
    TREE
    + """
import os
from ddtree.cuda import current_device
device = current_device()
print(compare(device), flush=True)
child = os.fork()
if child == 0:
    said = []
    for use in (lambda: compare(device), lambda: compare(current_device()), GpuDevice):
        try:
            use()
        except RuntimeError as error:
            said.append("was forked from one that used the GPU" in str(error) and "spawn" in str(error))
    os._exit(7 if said == [True] * 3 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), compare(device))
"""
)


def test_a_fork_is_refused_by_name_and_its_parent_goes_on():
    assert finish(start("import warnings\n" + FORK, "off"))[0] == "equal\n7 equal\n"
