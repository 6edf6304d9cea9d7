"""The smoke test in odd surroundings: warnings are errors, no asserts, no home, nothing writable, a C locale."""

import os
import shutil
import subprocess
import sys

import pytest

from random_models import FIXTURES

ROOT = FIXTURES.parent
SMOKE = ["-c", "from ddtree.cli import main; main()", "generate", "--model", "fixtures/pycode_qwen3", "--prompt-file",
         "fixtures/prompts/load_config.txt", "--max-new-tokens", "24", "--compare"]  # fmt: skip
SURROUNDINGS = {
    "as usual": ([], {}),
    "warnings are errors": (["-W", "error"], {}),
    "no asserts": (["-O"], {}),
    "no docstrings": (["-OO"], {}),
    "a C locale": ([], {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "no HOME": ([], {"HOME": None}),
    "a home that is not there": ([], {"HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere/cache"}),
    "isolated": (["-X", "dev", "-W", "error"], {}),
}


def smoke(folder, flags=(), **changes):
    kept = {key: value for key, value in os.environ.items() if key not in changes}
    environment = kept | {key: value for key, value in changes.items() if value is not None}
    environment |= {"PYTHONPATH": str(folder)}
    command = [sys.executable, *flags, *SMOKE]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=600)


def check(result):
    assert result.returncode == 0, result.stderr.decode(errors="replace")
    assert b"equal, token for token" in result.stderr and b"Warning" not in result.stderr


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_demo_runs(name):
    flags, changes = SURROUNDINGS[name]
    check(smoke(ROOT, flags, **changes))


def test_the_demo_runs_from_a_checkout_that_cannot_be_written(tmp_path):
    for name in ("ddtree", "fixtures/pycode_qwen3", "fixtures/prompts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    places = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for place in places:
        place.chmod(0o555)
    try:
        check(smoke(tmp_path, HOME=str(tmp_path)))
    finally:
        for place in places:
            place.chmod(0o755)
