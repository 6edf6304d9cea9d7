"""The folder kernels/: up to date, the same bytes everywhere, true to the PTX, and usable from C and C++."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

from ddtree import aot
from ddtree.aot import EXPORTED, build_kernels, check_kernels, check_limits, hash_source
from ddtree.build import build_trees_one_warp_kernel
from ddtree.cuda import (
    Assembly,
    Instruction,
    LaunchRule,
    WideLoad,
    _driver_version,
    device_function,
    flatten,
    global_address,
    kernel,
    parse_parameter,
    shared_address,
)
from ddtree.ptx import load_ptx

pytest.importorskip("numba_cuda", reason="compiling kernels needs the extra: pip install -e '.[dev]'")

FOLDER = Path("kernels")
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernels") / "new" / "folder"
    assert [path.name for path in build_kernels("sm_120", folder)][-2:] == ["manifest.json", "ddtree_kernels.h"]
    return folder


def compile_and_run(source: str, folder: Path, compiler: str, standard: str, *arguments: str) -> str:
    """Compile a program with every warning an error, and return what it prints."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    path = folder / f"program.{'c' if compiler == 'gcc' else 'cpp'}"
    path.write_text(source)
    flags = [f"-std={standard}", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I", str(FOLDER.resolve())]
    subprocess.run([compiler, *flags, str(path), "-o", str(folder / "program"), "-ldl"], check=True)
    run = subprocess.run([str(folder / "program"), *arguments], capture_output=True, text=True, check=True)
    return run.stdout


def test_the_committed_kernels_are_what_the_notebooks_make():
    """Byte for byte with the Python of the manifest; another Python orders some instructions differently."""
    found = check_kernels(FOLDER)
    if found and found[0].startswith("toolchain: python is "):
        files = {f"kernels/{kernel.name}.ptx" for kernel in EXPORTED} | {"kernels/manifest.json"}
        assert {line.split(" is ")[0] for line in found[1:]} <= files
        pytest.skip(found[0])
    assert found == []


def test_another_process_builds_the_same_bytes(built, tmp_path):
    """Compiled anew, after another kernel and in another order."""
    code = "import sys; sys.path.insert(0, 'tests'); import test_cuda; test_cuda.reverse_kernel.ptx(); "
    code += "from ddtree import aot; few = ('build_trees', 'layout_trees', 'merge_top_k'); "
    code += "aot.EXPORTED = tuple(kernel for kernel in aot.EXPORTED[::-1] if kernel.name in few); "
    code += f"aot.build_kernels('sm_120', {str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DDTREE_CACHE": ""})
    names = {path.name for path in tmp_path.glob("*.ptx")}
    assert len(names) == 3
    for name in names:
        assert (tmp_path / name).read_bytes() == (built / name).read_bytes(), name


def test_no_path_of_a_machine_is_in_a_file(built):
    for path in built.iterdir():
        text = path.read_text()
        assert str(Path.cwd()) not in text and not re.search(r"/(?:home|tmp|usr)/|\.file|\.loc\b", text), path.name


def test_the_file_is_the_code_that_the_machine_runs(built):
    """The PTX of the folder is Kernel.ptx() without its line numbers, nothing else."""
    for each in EXPORTED:
        lines = [line for line in each.ptx().splitlines() if not line.strip().startswith((".loc", ".file"))]
        assert (built / f"{each.name}.ptx").read_text().splitlines() == lines


@pytest.mark.parametrize("kernel", EXPORTED, ids=lambda kernel: kernel.name)
def test_the_manifest_is_true_to_the_ptx(kernel):
    entry = MANIFEST["kernels"][kernel.name]
    params = load_ptx((FOLDER / entry["file"]).read_text()).entries[entry["entry"]].params
    words = [word for parameter in entry["parameters"] for word in parameter["words"]]
    assert [(w["type"], w["offset"], w["bytes"]) for w in words] == [(p.type, p.offset, p.size) for p in params]
    assert entry["spill_bytes"] == 0 and 0 < entry["registers"] <= 255 and entry["static_shared_bytes"] <= 49_152
    assert entry["source_sha256"] == hash_source(kernel) and entry["exactness"] in ("E0", "E1", "E2")


STEP = """from ddtree.cuda import device_function

AMOUNT = {amount}


@device_function
def step(x):
    return x {operator} AMOUNT
"""

STEPS = """from typing import Annotated, Any

import {first}
import {second}
from ddtree.cuda import kernel

one, two = {first}.step, {second}.step


@kernel("E0", block=1, grid="1")
def steps_kernel(x: Annotated[Any, "int32[N]"]):
    x[0] = two(one(x[0]))
"""


@pytest.fixture
def hash_of(tmp_path, monkeypatch):
    """The hash of a kernel that reaches two modules' functions of one name, each with a constant of one name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    edition = iter(range(100))

    def make(first: tuple[int, str], second: tuple[int, str]) -> str:
        folder = f"edition{next(edition)}"  # another file, so that nothing remembers the one before
        (tmp_path / folder).mkdir()
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        for name in ("first_steps", "second_steps", "all_steps"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name, (amount, operator) in (("first_steps", first), ("second_steps", second)):
            (tmp_path / folder / f"{name}.py").write_text(STEP.format(amount=amount, operator=operator))
        (tmp_path / folder / "all_steps.py").write_text(STEPS.format(first="first_steps", second="second_steps"))
        return hash_source(import_module("all_steps").steps_kernel)

    return make


def test_two_functions_of_one_name_do_not_hide_each_other(hash_of):
    """Keyed by the qualified name alone, the text of one of the two was left out: editing it changed nothing."""
    before = hash_of((1, "+"), (1, "+"))
    assert hash_of((1, "+"), (1, "+")) == before
    assert len({before, hash_of((1, "-"), (1, "+")), hash_of((1, "+"), (1, "-")), hash_of((1, "-"), (1, "-"))}) == 4


def test_two_constants_of_one_name_do_not_hide_each_other(hash_of):
    before = hash_of((1, "+"), (1, "+"))
    assert len({before, hash_of((2, "+"), (1, "+")), hash_of((1, "+"), (2, "+")), hash_of((2, "+"), (2, "+"))}) == 4


def test_what_a_wide_load_or_an_instruction_is_belongs_to_the_source():
    def make(load: Any, instruction: Instruction, table: tuple[int, ...]) -> str:
        @kernel("E0", block=1, grid="1")
        def parts_kernel(x: Annotated[Any, "uint32[N]"]) -> None:
            x[0] = instruction(load(x, 0)[0]) + table[0]

        return hash_source(parts_kernel)

    clz, popc = (Instruction(f"{name}.b32 $0, $1;", "uint32", ("uint32",)) for name in ("clz", "popc"))
    hashes = [make(WideLoad(4), clz, (1, 2)), make(WideLoad(2), clz, (1, 2)), make(WideLoad(4), popc, (1, 2)),
              make(WideLoad(4), clz, (1, 3))]  # fmt: skip
    assert len(set(hashes)) == 4 and make(WideLoad(4), clz, (1, 2)) == hashes[0]


def test_what_an_assembly_or_an_address_is_belongs_to_the_source():
    def make(assembly: Assembly, address: Any) -> str:
        @kernel("E0", block=1, grid="1")
        def parts_kernel(x: Annotated[Any, "uint64[N]"]) -> None:
            x[0] = assembly(np.uint64(address(x, 0)))

        return hash_source(parts_kernel)

    def move(memory: bool) -> Assembly:
        return Assembly("mov.b64 $0, $1;", "uint64", ("uint64",), memory)

    hashes = {make(move(m), address) for m in (False, True) for address in (global_address, shared_address)}
    assert len(hashes) == 4 and make(move(True), global_address) in hashes


def test_functions_that_change_places_are_another_source():
    def make(swapped: bool) -> str:
        @device_function
        def add(x: Any) -> Any:
            return x + 1

        @device_function
        def double(x: Any) -> Any:
            return x * 2

        one, two = (double, add) if swapped else (add, double)

        @kernel("E0", block=1, grid="1")
        def both_kernel(x: Annotated[Any, "int32[N]"]) -> None:
            x[0] = two(one(x[0]))

        return hash_source(both_kernel)

    assert make(True) != make(False) == make(False)


def test_a_program_needs_no_python_to_read_the_manifest():
    """Every key the header's comment and this folder's readers rely on."""
    assert MANIFEST["arch"] == "sm_120"
    assert {"numba", "numba-cuda", "nvvm", "nvidia-nvjitlink"} <= set(MANIFEST["toolchain"])
    for entry in MANIFEST["kernels"].values():
        assert {"file", "entry", "block", "grid", "dynamic_shared_bytes", "registers", "ptx_sha256"} <= set(entry)


@pytest.mark.parametrize(("resources", "message"), [
    ({"spill_bytes": 8, "static_shared_bytes": 0}, r"\w+ spills 8 bytes a thread"),
    ({"spill_bytes": 0, "static_shared_bytes": 49_153}, "has 49153 bytes of static shared memory; beyond 49152"),
])  # fmt: skip
def test_a_kernel_over_a_limit_is_not_built(resources, message):
    with pytest.raises(ValueError, match=message):
        check_limits(EXPORTED[0], resources)


def test_a_spill_is_measured():
    """The number that the limit goes by: 40 live registers where 24 are allowed must spill."""
    values = "\n".join(f"ld.volatile.global.f64 %fd{i}, [%rd1+{8 * i}];" for i in range(40))
    stores = "\n".join(f"st.volatile.global.f64 [%rd1+{8 * i}], %fd{i};" for i in reversed(range(40)))
    text = ".version 8.7\n.target sm_120\n.address_size 64\n.visible .entry hungry(.param .u64 p)\n.maxnreg 24\n{\n"
    text += ".reg .f64 %fd<40>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\n" + values + "\n" + stores + "\nret;\n}\n"
    resources = aot.measure_resources(text, "sm_120")
    assert resources["spill_bytes"] > 0 and resources["registers"] <= 24


def test_drift_is_found_and_named(built, tmp_path):
    for path in built.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "old.ptx").write_text("")
    (tmp_path / "ddtree_kernels.h").unlink()
    ptx = tmp_path / "build_trees.ptx"
    ptx.write_text(ptx.read_text().replace("add.f64", "sub.f64", 1))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["toolchain"]["nvvm"] = "13.0.88"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    found = "\n".join(check_kernels(tmp_path)).replace(f"{tmp_path}/", "")
    here = MANIFEST["toolchain"]["nvvm"]
    assert found.splitlines() == [
        f"toolchain: nvvm is {here} here and 13.0.88 in the manifest",
        "build_trees.ptx is out of date; run: ddtree kernels build",
        "manifest.json is out of date; run: ddtree kernels build",
        "ddtree_kernels.h is missing; run: ddtree kernels build",
        "old.ptx belongs to no kernel; delete it",
    ]


def test_line_ends_are_part_of_a_file(built, tmp_path):
    for path in built.iterdir():
        shutil.copy(path, tmp_path)
        assert b"\r" not in path.read_bytes()
    ptx = tmp_path / "build_trees.ptx"
    ptx.write_bytes(ptx.read_bytes().replace(b"\n", b"\r\n"))
    assert check_kernels(tmp_path) == [f"{ptx} is out of date; run: ddtree kernels build"]


@pytest.mark.parametrize(("content", "message"), [
    (b"{", r"is not JSON \(Expecting"),
    (b"\xff\xfe", "is not JSON"),
    (b"[]", "is no manifest: it lacks 'arch'"),
    (b'{"arch": 120}', "is no manifest: it lacks 'arch'"),
    (b'{"arch": "sm_120", "toolchain": [], "kernels": {}}', "is no manifest: it lacks 'toolchain'"),
    (b'{"arch": "banana", "toolchain": {}, "kernels": {}}', "the architecture is 'banana'; the compiler knows"),
])  # fmt: skip
def test_a_broken_manifest_is_named(content, message, tmp_path):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        check_kernels(tmp_path)


@pytest.mark.parametrize("arch", ["banana", "sm_200"])
def test_an_unknown_architecture_is_refused_before_a_folder_is_made(arch, tmp_path):
    with pytest.raises(ValueError, match=f"the architecture is '{arch}'; the compiler knows .*sm_120"):
        build_kernels(arch, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_formula_is_c_in_the_header():
    rule = LaunchRule((32,), ("(N + row) // 0x20 * cdiv(N, 1_000)",), "0")
    x, row = parse_parameter("x", "float32[R, N]"), parse_parameter("row", "int32")
    kernel = types.SimpleNamespace(parameters=(x, row))
    expected = "(a->x.shape[1] + (int64_t)a->row) / 32 * ddtree_cdiv(a->x.shape[1], 1000)"
    assert aot._c_formula(kernel, rule.grid[0]) == expected


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_other_architectures_by_name(arch, tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "EXPORTED", (build_trees_one_warp_kernel,))
    build_kernels(arch, tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["arch"] == arch
    assert f".target {arch}" in (tmp_path / "build_trees_one_warp.ptx").read_text()
    assert check_kernels(tmp_path) == []


PROGRAM = """
#include <stdio.h>
#include "ddtree_kernels.h"
int main(void) {
    ddtree_build_trees_args a;
    unsigned grid[3], i;
    a.top_log_probs = ddtree_make_array3(0x1000, 4, 7, 15, 64);
    a.top_token_ids = ddtree_make_array3(0x2000, 8, 7, 15, 64);
    a.budgets = ddtree_make_array1(0x3000, 4, 7);
    a.root_tokens = ddtree_make_array1(0x4000, 8, 7);
    a.max_depths = a.chain_lengths = ddtree_make_array1(0, 4, 0);
    a.min_log_probs = a.costs = ddtree_make_array1(0, 8, 0);
    a.tokens = ddtree_make_array2(0x5000, 8, 7, 65);
    a.parents = a.depths = a.ranks = ddtree_make_array2(0x6000, 4, 7, 65);
    a.scores = ddtree_make_array2(0x7000, 8, 7, 65);
    a.counts = ddtree_make_array1(0x8000, 4, 7);
    ddtree_build_trees_grid(&a, grid);
    printf("%u %u %u %u ", grid[0], grid[1], grid[2], ddtree_build_trees_shared(&a));
    for (i = 0; i < DDTREE_BUILD_TREES_BYTES; i++) printf("%02x", ((unsigned char *)&a)[i]);
    return 0;
}
"""


@pytest.mark.parametrize(("compiler", "standard"), [("gcc", "c11"), ("g++", "c++11"), ("g++", "c++20")])
def test_a_struct_in_c_is_the_parameter_buffer(compiler, standard, tmp_path):
    *launch, buffer = compile_and_run(PROGRAM, tmp_path, compiler, standard).split()
    assert launch == ["7", "1", "1", str(56 * 65 + 15520)]
    cube, table, row = (7, 15, 64), (7, 65), (7,)
    arrays = [(0x1000, cube, 4), (0x2000, cube, 8), (0x3000, row, 4), (0x4000, row, 8)]
    arrays += [(0, (0,), 4), (0, (0,), 8), (0, (0,), 4), (0, (0,), 8), (0x5000, table, 8)]
    arrays += [(0x6000, table, 4), (0x6000, table, 4), (0x7000, table, 8), (0x6000, table, 4), (0x8000, row, 4)]
    words = [word for array in arrays for word in flatten(*array)]
    assert bytes.fromhex(buffer) == struct.pack(f"<{len(words)}q", *words)


def test_the_example_compiles_without_cuda_and_says_what_is_missing(tmp_path):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    program = tmp_path / "example"
    flags = ["-std=c++11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run(["g++", *flags, "kernels/example.cpp", "-o", str(program), "-ldl"], check=True)
    assert subprocess.run([str(program)], capture_output=True, check=False).returncode == 2
    missing = subprocess.run([str(program), "kernels", "nothing.kdtr"], capture_output=True, text=True, check=False)
    assert missing.returncode == 1 and "nothing.kdtr: path: No such file" in missing.stderr
    if _driver_version() is None:  # where there is a GPU, tools/gpu_check.py runs it
        command = [str(program), "kernels", "fixtures/tree_vectors.kdtr"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 77 and "NVIDIA driver" in run.stderr
