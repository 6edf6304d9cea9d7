"""Compile the kernels that tests and notebooks share, two at a time, into the folder that DDTREE_CACHE names.

`python -m tools.warm` takes those in `kernels/`, and every other kernel that a module of the package has by name and
that does not come with the package. Later processes find them there; without this, several that start together would
compile the same kernel at the same time.
"""

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pkgutil import walk_packages

import ddtree
from ddtree.aot import EXPORTED
from ddtree.cuda import Kernel
from ddtree.cuda.kept import cache_folder


@cache
def find_kernels() -> list[Kernel]:
    """Every kernel that a module has by name, alone or in a tuple; each once, in the order of their names."""
    modules = [import_module(module.name) for module in walk_packages(ddtree.__path__, "ddtree.")]
    values = [value for module in modules for value in vars(module).values()]
    values += [part for value in values if isinstance(value, tuple) for part in value]
    kernels = {id(value): value for value in values if isinstance(value, Kernel)}
    return sorted(kernels.values(), key=lambda kernel: kernel.name)


def compile_kernel(at: int) -> tuple[str, float]:
    """Compile one kernel for sm_120, unless it comes with the package; returns its name and the seconds that took."""
    start, kernel = time.perf_counter(), find_kernels()[at]
    if kernel in EXPORTED:
        kernel.ptx()
    else:
        kernel.ptx_to_run("sm_120")
    return kernel.name, time.perf_counter() - start


def main() -> int:
    if cache_folder() is None or "DDTREE_CACHE" not in os.environ:
        raise SystemExit("tools.warm keeps compiled kernels in the folder that DDTREE_CACHE names; make test sets it")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for name, seconds in pool.map(compile_kernel, range(len(find_kernels()))):
            print(f"{name}: {seconds:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
