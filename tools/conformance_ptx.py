"""Run every launch of tests/test_ptx_arith.py on an NVIDIA GPU too, and compare the bits.

`python -m tools.conformance_ptx record build/cases.pkl` runs the tests on the PTX machine and keeps text, operands and
results. `python -m tools.conformance_ptx compare build/cases.pkl OUT.json` needs only numpy and an NVIDIA driver, which
compiles the same text for its GPU; it counts launches with equal bits and names the others.
"""

import ctypes
import datetime
import json
import pickle
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent


class Recorder:
    """Stands in for a program: launches it and keeps what went in and came out."""

    def __init__(self, program, text, label, cases):
        self.program, self.text, self.label, self.cases = program, text, label, cases

    def launch(self, name, grid, block, addresses, memory):
        regions = [memory.find(address) for address in addresses]
        before = [region.data.copy() for region in regions]
        self.program.launch(name, grid, block, addresses, memory=memory)
        text = re.sub(r"\.version \S+\n\.target \S+", ".version 8.5\n.target sm_90", self.text)
        self.cases.append((self.label[0], text, grid, block, before, regions[-1].data.copy()))


def combinations(test):
    """The keyword arguments of all cases of a parametrised test."""
    cases = [{}]
    for mark in getattr(test, "pytestmark", []):
        names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
        values = [value if len(names) > 1 else (value,) for value in mark.args[1]]
        cases = [case | dict(zip(names, value, strict=True)) for case in cases for value in values]
    return cases


def record(path):
    """Run the tests and keep their launches."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import test_ptx_arith as tests

    cases, label, load, check = [], [""], tests.load_ptx, tests.check

    def labelled(opcode, *args, **options):
        label[0] = opcode
        check(opcode, *args, **options)

    tests.load_ptx = lambda text: Recorder(load(text), text, label, cases)
    tests.check = labelled
    for name, test in list(vars(tests).items()):
        if name.startswith("test_") and "refused" not in name and not hasattr(test, "hypothesis"):
            for arguments in combinations(test):
                label[0] = " ".join([name, *map(str, arguments.values())])
                test(**arguments)
    Path(path).write_bytes(pickle.dumps(cases))
    print(f"{len(cases)} launches")


class Driver:
    """The few calls of the CUDA driver that a launch needs."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()

    def call(self, name, *args):
        status = getattr(self.library, name)(*args)
        if status:
            raise RuntimeError(f"{name} gave {status}")

    def run(self, text, grid, block, before, size):
        """Launch kernel `k` on copies of the arrays; the bytes of the last, or None if the text does not compile."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        if self.library.cuModuleLoadData(ctypes.byref(module), text.encode()):
            return None
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
        arrays = [ctypes.c_void_p() for _ in before]
        for array, data in zip(arrays, before, strict=True):
            self.call("cuMemAlloc_v2", ctypes.byref(array), ctypes.c_size_t(data.nbytes))
            self.call("cuMemcpyHtoD_v2", array, data.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(data.nbytes))
        words = [ctypes.c_uint64(array.value) for array in arrays]
        pointers = (ctypes.c_void_p * len(words))(*[ctypes.addressof(word) for word in words])
        self.call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, None, pointers, None)
        out = np.zeros(size, "u1")
        self.call("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), arrays[-1], ctypes.c_size_t(size))
        for array in arrays:
            self.call("cuMemFree_v2", array)
        self.call("cuModuleUnload", module)
        return out


def difference(text, before, machine, gpu):
    """Where the bits differ, for people: how many lanes, and the first of them; lanes with NaN in both do not count."""
    size = int(re.findall(r"st\.global\.b(\d+)", text)[-1]) // 8
    ours, theirs = machine.view(f"u{size}"), gpu.view(f"u{size}")
    both_nan = np.zeros(ours.size, bool)
    if size == 8:
        both_nan = np.isnan(ours.view("f8")) & np.isnan(theirs.view("f8"))
    at = np.flatnonzero((ours != theirs) & ~both_nan)
    if not at.size:
        return None
    operands = [hex(int(data.view(f"u{data.nbytes // ours.size}")[at[0]])) for data in before[:-1]]
    return {
        "lanes": int(at.size),
        "operands": operands,
        "machine": hex(int(ours[at[0]])),
        "gpu": hex(int(theirs[at[0]])),
    }


def compare(path, out):
    """Run the launches on the GPU and write what came of it."""
    driver, cases = Driver(), pickle.loads(Path(path).read_bytes())
    equal, nan_only, not_compiled, different = 0, [], [], []
    for label, text, grid, block, before, machine in cases:
        gpu = driver.run(text, grid, block, before, machine.size)
        if gpu is None:
            not_compiled.append(label)
        elif (gpu == machine).all():
            equal += 1
        elif (found := difference(text, before, machine, gpu)) is None:
            nan_only.append(label)
        else:
            different.append({"instruction": label} | found)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    environment = {"gpus": [driver.name], "packages": {"numpy": np.__version__}}
    record = {
        "date": when, "command": "python -m tools.conformance_ptx compare", "environment": environment,
        "launches": len(cases), "lanes": sum(case[2] * case[3] for case in cases), "equal": equal,
        "other_float64_nan_payload": nan_only, "not_on_this_gpu": not_compiled, "different": different,
    }  # fmt: skip
    Path(out).write_text(json.dumps(record, indent=1) + "\n")
    print({name: value if isinstance(value, int | str) else len(value) for name, value in record.items()})


if __name__ == "__main__":
    {"record": record, "compare": compare}[sys.argv[1]](*sys.argv[2:])
