"""Everything that CI checks, on two cores: `make test`.

`python -m tools.run_tests` compiles the kernels that tests and notebooks share, with the static checks beside it, then
runs the tests, executes the book, and compares every notebook with its stored outputs. All steps run, whatever fails;
it ends with the seconds of each, and exit status 1 if one failed. `--deep` draws ten times as many generated cases, and
others on every run. `--jobs` says how many processes a step may have.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

from tools.format import NOTEBOOKS

ROOT = NOTEBOOKS.parent
STATIC = {
    "format": "-m tools.format --check",
    "export": "-m tools.export --check",
    "links": "-m tools.links --check",
    "measure": "-m tools.measure_book --check",
    "ruff": "-m ruff check --quiet .",
    "ruff format": "-m ruff format --check --quiet .",
    "mypy": "-m mypy",
}
NBVAL = (  # a notebook has one kernel, so it stays in one process
    "--dist loadfile -o filterwarnings= -p no:cacheprovider --nbval --nbval-kernel-name python3 "
    "--nbval-cell-timeout 2000 --nbval-kernel-startup-timeout 600"
)


@dataclass(frozen=True)
class Done:
    """A step that ran."""

    name: str
    seconds: float
    cpu_seconds: float  # of all its processes: what is left of the time on a busy machine
    failed: bool
    text: str = ""


def long_steps(jobs: int) -> dict[str, str]:
    """The steps that take minutes, one after the other; each uses `jobs` processes."""
    return {
        "kernels": "-m tools.warm",
        "tests": f"-m pytest -q -n {jobs} --dist loadgroup",
        "book": f"-m tools.book --jobs {jobs}",
        "stored outputs": f"-m pytest -q -n {jobs} {NBVAL} notebooks",
    }


def run(name: str, command: str, keep_text: bool = False) -> Done:
    """Run a step with this Python; its output is shown at once, or kept."""
    start = time.perf_counter()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if keep_text else {}
    process = subprocess.Popen([sys.executable, *command.split()], cwd=ROOT, text=True, **streams)
    with process.stdout or nullcontext() as output:
        text = output.read() if output else ""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    return Done(name, seconds, used.ru_utime + used.ru_stime, process.returncode != 0, text)


def run_all(static: dict[str, str], steps: dict[str, str]) -> list[Done]:
    """The long steps in turn, and beside them the static checks, whose texts are shown between two steps."""
    done: list[Done] = []
    with ThreadPoolExecutor(1) as beside:
        waiting = [beside.submit(run, name, command, keep_text=True) for name, command in static.items()]
        for name, command in steps.items():
            print(f"== {name}", flush=True)
            done.append(run(name, command))
            while waiting and (waiting[0].done() or name == list(steps)[-1]):
                done.append(waiting.pop(0).result())
                print(
                    f"== {done[-1].name}: {'FAILED' if done[-1].failed else 'ok'}\n{done[-1].text}", end="", flush=True
                )
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep", action="store_true", help="ten times as many generated cases, others every time")
    parser.add_argument("--jobs", type=int, default=2, help="processes of a step (default 2)")
    options = parser.parse_args()
    if options.deep:
        os.environ["DDTREE_DEEP"] = "1"
    os.environ["DDTREE_QUIET"] = "1"  # what is said of slow compilation would be in the outputs of notebooks
    start = time.perf_counter()
    done = run_all(STATIC, long_steps(options.jobs))
    width = max(len(step.name) for step in done)
    print(f"== {time.perf_counter() - start:.0f} s on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for step in done:
        times = f"{step.seconds:6.1f} s, {step.cpu_seconds:6.1f} s of one core"
        print(f"{step.name:{width}} {times}{'  FAILED' * step.failed}")
    failed = [step.name for step in done if step.failed]
    print(f"FAILED: {', '.join(failed)}" if failed else "everything passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
