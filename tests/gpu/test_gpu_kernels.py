"""Small kernels: the PTX machine's bits are the GPU's, and both see what is wrong with the wrong ones."""

import shutil
import threading

import numpy as np
import pytest

from tools.gpu_check import check_case as compare_case
from tools.gpu_check import (
    check_example,
    check_interop,
    check_sanitizer,
    check_torch,
    conforming,
    misjudged,
    names_of,
)

needs_sanitizer = pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not installed")


@pytest.mark.parametrize("name", conforming())
def test_a_kernel_has_the_same_bits_on_the_gpu_and_on_the_machine(gpu, name):
    assert "FAILED" not in compare_case(gpu, name)


@needs_sanitizer
def test_compute_sanitizer_and_the_machine_see_each_wrong_kernel_and_pass_its_repaired_twin(gpu):
    reports = check_sanitizer(gpu.arch)
    assert len(reports) == len(names_of("_wrong", "_racy", "_fixed")) and misjudged(reports) == []


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
def test_the_cpp_example_builds_the_recorded_trees(gpu):
    assert "FAILED" not in check_example(gpu.arch, None)["built here"]


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_arrays_of_other_libraries_go_in_and_out_without_a_copy(gpu, library):
    pytest.importorskip(library)
    assert check_interop(gpu)[library] == "equal, of its kind, no copy of ours"


def test_torch_streams_graphs_and_bfloat16_work_and_a_cpu_tensor_is_refused(gpu):
    pytest.importorskip("torch")
    results = check_torch(gpu)
    assert results.pop("CPU tensor").startswith("refused")
    assert set(results.values()) == {"equal"}


def test_threads_share_the_gpu_and_each_gets_its_own_numbers(gpu):
    """Launches, and graphs that each thread records and replays while the others launch."""
    from tools.ptx_faults import plus_kernel

    wrong = []

    def work(i):
        x, out, recorded = gpu.array(np.full(32, 1000 * i, np.int32)), gpu.empty(32, np.int32), gpu.empty(32, np.int32)
        with gpu.graph() as graph:
            plus_kernel(x, 7, recorded, stream=graph, device=gpu)
        for k in range(200):
            plus_kernel(x, k, out, device=gpu)
            graph.replay()
            if (gpu.numpy(out) != 1000 * i + k).any() or (gpu.numpy(recorded) != 1000 * i + 7).any():
                wrong.append((i, k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
