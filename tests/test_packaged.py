"""The texts that come with the package: up to date, never given to another kernel, and enough without a compiler."""

import datetime
import json
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Annotated, Any

import pytest

import ddtree
from ddtree.aot import SHIPPED, check_packaged, describe_compiler, package_kernels, without_lines, write_archive
from ddtree.cuda import Kernel, PtxDevice, cuda, kernel, packaged, source
from ddtree.cuda.packaged import PACKAGED, archive_path, hash_source, open_archive, packaged_text, source_of
from ddtree.layout import layout_trees_kernel
from ddtree.ptx import load_ptx
from ddtree.topk import merge_top_k_kernel

ROOT = Path(__file__).parent.parent


def run_python(code: str, *arguments: str, cwd: Path = ROOT) -> str:
    """What a program prints; under -W error, so that a warning ends it."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


def test_the_packaged_texts_are_those_of_the_kernels_by_their_hashes():
    assert check_packaged() == []


def test_a_few_kernels_others_every_day_are_compiled_again_to_the_same_bytes():
    """In a week all of them were; with another compiler or Python the hashes are all there is to compare."""
    pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")
    today = datetime.date.today().toordinal()
    for arch in PACKAGED:
        made_with = open_archive(archive_path(arch)).manifest["compiler"]
        here = describe_compiler(SHIPPED[0].ptx(arch))
        if here != made_with:
            pytest.skip(f"made with {made_with}, and here is {here}")
        for each in SHIPPED[today % 7 :: 7]:
            assert without_lines(each.ptx(arch)) == packaged_text(each, arch), (arch, each.name)


@pytest.mark.parametrize("arch", PACKAGED)
def test_the_texts_have_no_path_no_line_numbers_and_the_parameters_of_the_manifest(arch):
    archive = open_archive(archive_path(arch))
    for name, entry in archive.manifest["kernels"].items():
        text = archive.read(name)
        assert not re.search(r"/(?:home|tmp|usr|work)/|^\s*\.(file|loc)\b", text, re.M), name
        assert f".target {arch}\n" in text and ("griddepcontrol.wait" in text) == (arch == "sm_90")
        params = load_ptx(text).entries[entry["entry"]].params
        words = [word for parameter in entry["parameters"] for word in parameter["words"]]
        assert [(w["type"], w["offset"], w["bytes"]) for w in words] == [(p.type, p.offset, p.size) for p in params]
        assert entry["spill_bytes"] == 0 and entry["static_shared_bytes"] <= 49_152


def test_what_did_not_change_is_taken_over_and_what_did_is_not(monkeypatch):
    pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")
    if describe_compiler(merge_top_k_kernel.ptx("sm_90")) != open_archive(archive_path("sm_90")).manifest["compiler"]:
        pytest.skip("made with another compiler")
    with zipfile.ZipFile(archive_path("sm_90")) as file:
        there = {name: file.read(name) for name in file.namelist()}
    monkeypatch.setenv("DDTREE_CACHE", "off")  # what follows must not be kept
    compiled: list[str] = []
    monkeypatch.setattr(source.KernelSource, "_compile", lambda each, arch: compiled.append(each.name) or "text")
    assert package_kernels("sm_90") == there and compiled == []


# Never to another kernel


@kernel("E0", block=32, grid="1")
def layout_trees_of_mine_kernel(x: Annotated[Any, "int32[N]"]) -> None:
    x[cuda.threadIdx.x] = 7


def test_a_kernel_of_the_same_name_elsewhere_is_compiled():
    layout_trees_of_mine_kernel.function.__name__ = "layout_trees_kernel"
    assert layout_trees_of_mine_kernel.name == "layout_trees"
    with pytest.raises(LookupError, match="its source is not the one that the packaged text was made of"):
        packaged_text(layout_trees_of_mine_kernel, "sm_90")


EDITED = """
from ddtree.cuda.packaged import packaged_text
from ddtree.layout import layout_trees_kernel
from ddtree.topk import merge_top_k_kernel
import ddtree
assert ddtree.__file__.startswith({folder!r}), ddtree.__file__
packaged_text(merge_top_k_kernel, "sm_90")
try:
    packaged_text(layout_trees_kernel, "sm_90")
    print("found")
except LookupError as error:
    print(error)
"""


@pytest.mark.parametrize(("file", "before", "after"), [
    ("layout/links.py", "        number = np.int32(0)\n", "        number = np.int32(0)  # edited\n"),
    ("layout/trees.py", 'shared="768 * W", early=True', 'shared="768 * W", early=False'),
    ("layout/masks.py", None, None),
])  # fmt: skip
def test_a_package_whose_source_was_edited_is_not_given_the_old_text(tmp_path, file, before, after):
    """The kernel, its options, or a function that it reaches in another module."""
    shutil.copytree(Path(ddtree.__file__).parent, tmp_path / "ddtree", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "ddtree" / file
    text = path.read_text()
    if before is None or before not in text:  # any device function: a line of its body
        before = re.search(r"@device_function\ndef [^\n]*\n", text)[0]
        after = before + "    # edited\n"
    path.write_text(text.replace(before, after, 1))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + EDITED.format(folder=str(tmp_path))
    said = run_python(code, cwd=tmp_path)
    assert said == "its source is not the one that the packaged text was made of\n"


def test_a_constant_or_a_contract_that_changed_is_another_hash():
    def make(number: int, dtype: str, early: bool) -> Kernel:
        @kernel("E0", block=32, grid="1", early=early)
        def add_kernel(x: Annotated[Any, f"{dtype}[N]"]) -> None:
            x[cuda.threadIdx.x] += number

        return add_kernel

    wanted = [(1, "int32", False), (2, "int32", False), (1, "int64", False), (1, "int32", True)]
    assert hash_source(make(*wanted[0])) == hash_source(make(*wanted[0]))
    assert len({hash_source(make(*each)) for each in wanted}) == 4


def test_without_a_source_the_kernel_is_compiled_not_guessed():
    scope: dict[str, Any] = {}
    exec("def layout_trees_kernel(x):\n    x[0] = 1", scope)
    with pytest.raises(OSError, match="the source of layout_trees_kernel is not at line 1"):
        source_of(scope["layout_trees_kernel"])
    bare = {"name": "layout_trees", "function": scope["layout_trees_kernel"], "parameters": [], "early": True}
    with pytest.raises(LookupError, match="the source of layout_trees_kernel"):
        packaged_text(types.SimpleNamespace(**bare), "sm_90")


# Damage


def test_a_damaged_archive_is_named_not_taken_for_a_missing_one(tmp_path, monkeypatch):
    whole = archive_path("sm_90").read_bytes()
    path = tmp_path / "sm_90.zip"
    monkeypatch.setattr(packaged, "archive_path", lambda arch: path)
    with pytest.raises(LookupError, match="the package has no text of it"):
        packaged_text(layout_trees_kernel, "sm_90")
    for data in (b"", whole[:1000], whole[:-1000], b"no archive"):
        path.write_bytes(data)
        open_archive.cache_clear()
        with pytest.raises(RuntimeError, match=r"sm_90\.zip is damaged .*; install ddtree again"):
            packaged_text(layout_trees_kernel, "sm_90")
    manifest = json.loads(zipfile.ZipFile(archive_path("sm_90")).read("manifest.json"))
    for files in ({"layout_trees.ptx": b"another text"}, {}):
        write_archive(path, {"manifest.json": json.dumps(manifest).encode(), **files})
        open_archive.cache_clear()
        with pytest.raises(RuntimeError, match=r"is damaged"):
            packaged_text(layout_trees_kernel, "sm_90")
    write_archive(path, {"one.ptx": b""})
    open_archive.cache_clear()
    with pytest.raises(RuntimeError, match=r"is damaged"):
        packaged_text(layout_trees_kernel, "sm_90")
    open_archive.cache_clear()


# Without a compiler

REFUSE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "numba_cuda", "llvmlite", "cuda", "nvidia"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Refuse())
import numpy as np
np.seterr(all="raise")
"""

TREES = (
    REFUSE
    + """
import itertools
import ddtree
from ddtree.cuda import PtxDevice
from ddtree.draft import draft_tree_ref
from ddtree.layout import attention_mask, attention_mask_ref, eagle_tensors, eagle_tensors_ref

device, rng = PtxDevice(check=False, count=False), np.random.default_rng(0)
for dtype, size, adjusted in itertools.product(("float32", "float16", "bfloat16"), (256, 100), (False, True)):
    x = 4 * rng.standard_normal((2, 2, size), dtype=np.float32)
    x = {"float32": x, "float16": x.astype(np.float16), "bfloat16": (x.view(np.uint32) >> 16).astype(np.uint16)}[dtype]
    options = {"temperature": 0.5} if adjusted else {}
    given = ddtree.draft_tree(x, 7, [3, 4], lengths=[5, 0], device=device, **options)
    wanted = draft_tree_ref(x, 7, [3, 4], lengths=[5, 0], **options)
    for part in ("trees", "layout"):
        for name, value in vars(getattr(wanted, part)).items():
            np.testing.assert_array_equal(getattr(getattr(given, part), name), value)
layout, lengths = wanted.layout, np.array([5, 0])
for dtype, finite in itertools.product(("bool", "float32", "float16", "bfloat16"), (False, True)):
    mask = attention_mask(layout, lengths, dtype=dtype, finite=finite, device=device)
    seen = mask if dtype == "bool" else mask == 0
    np.testing.assert_array_equal(seen, attention_mask_ref(layout, lengths, 5))
for mode in ("full", "qlen", "bits"):
    given = eagle_tensors(wanted.trees, layout, lengths, mode, device=device)
    for name, value in vars(eagle_tensors_ref(wanted.trees, layout, lengths, mode)).items():
        np.testing.assert_array_equal(getattr(given, name), value)
heavy = {"numba", "llvmlite", "cuda", "matplotlib", "tokenizers", "jinja2", "safetensors", "rich", "typer", "ml_dtypes"}
print(sorted(heavy & set(sys.modules)))
"""
)


def test_without_numba_and_a_gpu_all_dtypes_masks_and_tensors_are_the_references():
    """Under -W error and numpy.seterr(all="raise"); nothing heavy is imported on the way."""
    assert run_python(TREES) == "[]\n"


def test_a_kernel_that_must_be_compiled_says_why_and_what_to_install(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from typing import Annotated, Any\nimport numpy as np\nfrom ddtree.cuda import PtxDevice, cuda, kernel\n\n\n"
        '@kernel("E0", block=32, grid="1")\ndef seven_kernel(x: Annotated[Any, "int32[N]"]) -> None:\n'
        "    x[cuda.threadIdx.x] = 7\n"
    )
    code = REFUSE + f"sys.path.insert(0, {str(tmp_path)!r})\nfrom own import *\n"
    code += "try:\n    seven_kernel(np.zeros(32, np.int32), device=PtxDevice())\nexcept ImportError as error:\n"
    code += "    print(error)\n"
    said = run_python(code)
    assert said.startswith("seven must be compiled for sm_120, as the package has no text of it: numba")
    assert "python -m pip install 'ddtree[dev]'" in said


def test_importing_the_package_imports_nothing_but_the_package():
    code = "import sys; before = set(sys.modules); import ddtree; print(sorted(set(sys.modules) - before))"
    assert run_python(code) == "['ddtree']\n"


def test_what_a_device_runs_is_the_packaged_text(monkeypatch):
    monkeypatch.setattr(source.KernelSource, "ptx", lambda each, arch="sm_120": pytest.fail("compiled"))
    for each in SHIPPED:
        for arch, nearest in (("sm_80", "sm_80"), ("sm_89", "sm_80"), ("sm_90", "sm_90"), ("sm_120", "sm_90")):
            fresh = Kernel(each.function, each.exactness, each.rule, each.early)
            assert fresh.ptx_to_run(arch) == open_archive(archive_path(nearest)).read(each.name)
    assert PtxDevice().arch == "sm_120"


def test_the_command_line_checks_the_package_and_says_what_is_out_of_date(monkeypatch):
    from typer.testing import CliRunner

    from ddtree import aot, cli

    fine = CliRunner().invoke(cli.app, ["kernels", "check", "--packaged"])
    assert (fine.exit_code, fine.stdout) == (0, "the package: as the notebooks say\n")
    monkeypatch.setattr(aot, "hash_calls", lambda: "another")
    monkeypatch.setattr(aot, "SHIPPED", SHIPPED[1:])
    stale = CliRunner().invoke(cli.app, ["kernels", "check", "--packaged"])
    name, build = SHIPPED[0].name, "run: ddtree kernels build --packaged"
    assert stale.exit_code == 1 and stale.stdout.splitlines() == [
        line
        for arch in PACKAGED
        for line in (
            f"{arch}: ddtree.cuda.compile or ddtree.cuda.text has changed; {build}",
            f"{arch}: {name} belongs to no kernel; {build}",
        )
    ]
