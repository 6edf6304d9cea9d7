"""What people do by mistake, and what `ddtree` says: `python -m tools.cli_mistakes` writes fixtures/cli_mistakes.txt.

Every command is run in a folder with a few models in it, some of them broken, and its exit status and standard error
are written down. `--check` compares instead of writing.
"""

import argparse
import contextlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from typer.testing import CliRunner

from ddtree.cli import app

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "fixtures" / "cli_mistakes.txt"
HEAD = """\
# Written by `python -m tools.cli_mistakes`, which runs every command. Exit status: 0 fine, 1 an error of the files or
# the machine, 2 a command that could never work. `pair` is a model with its drafter, `nano` another model without one.
# Lines from "Usage" to "Error" are those of Typer {version}.
"""
COMMANDS = """\
generate --prompt x
generate --model nowhere --prompt x
generate --model Qwen/Qwen3-8B --prompt x
generate --model pytorch_model.bin --prompt x
generate --model downloads --prompt x
generate --model lora --prompt x
generate --model no_config --prompt x
generate --model awq --prompt x
generate --model half_copied --prompt x
generate --target pair/draft --prompt x
generate --target pair/target --draft pair/target --prompt x
generate --target nano --draft pair/draft --prompt x
generate --model pair --prompt x --budget 1000000
generate --model pair --prompt-file prompts.txt
generate --model pair --prompt x --device cuda
generate --model pair --prompt x --max-tokens 9
generate --target pair/target --draft z-lab/Qwen3-8B-DFlash-b16 --prompt x
generate --model pair/target/model.safetensors --prompt x
generate --model missing.gguf --prompt x
generate --model cut.gguf --prompt x
generate --model torch_weights --prompt x
generate --target pair/target --prompt x --budget 16
generate --model pair --draft pair/draft --prompt x
generate --model pair --prompt x --budget -1
generate --model pair --prompt x --budget auto
generate --model pair --prompt x --max-new-tokens 5000
generate --model pair --prompt x --temperature -1
generate --model pair --prompt x --temperature nan
generate --model pair --prompt x --top-p 0
generate --model pair --prompt ''
generate --model pair
generate --model pair --prompt x --prompt-file prompt.txt
generate --model pair --prompt-file .
generate --model pair --prompt-file latin1.txt
generate --model pair --prompt x --stop ''
generate --model pair --prompt x --template-arg enable_thinking
generate --model pair --prompt x --template-arg enable_thinking=false
genrate --model pair
tree --model nano --prompt x
tree --model pair --prompt x --budget 0
tree --model pair --prompt x -o nowhere/tree.svg
bench engine --model pair
"""


def build(folder: Path) -> None:
    """The models that the commands name, some of them broken."""
    for name, source in {"pair": "pycode_qwen3", "nano": "models/llama_nano"}.items():
        (folder / name).symlink_to(ROOT / "fixtures" / source)
    target = ROOT / "fixtures" / "pycode_qwen3" / "target"
    for name in ("lora", "no_config", "torch_weights", "awq", "half_copied", "downloads"):
        (folder / name).mkdir()
        if name not in ("lora", "no_config", "downloads"):
            shutil.copy(target / "config.json", folder / name)
    (folder / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B", "r": 16}')
    (folder / "lora" / "adapter_model.safetensors").write_bytes(b"")
    shutil.copy(target / "tokenizer.json", folder / "no_config")
    (folder / "torch_weights" / "pytorch_model.bin").write_bytes(b"PK")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    config = json.loads((target / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    (folder / "awq" / "config.json").write_text(json.dumps(config))
    weights = (target / "model.safetensors").read_bytes()
    (folder / "half_copied" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "downloads" / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    (folder / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" + bytes(7) + b"\x01")
    (folder / "prompt.txt").write_text("import os")
    (folder / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))


def answer(command: str) -> tuple[int, str]:
    """Exit status and standard error of a command of `ddtree`, run in this process."""
    result = CliRunner().invoke(app, shlex.split(command), prog_name="ddtree")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder with the models in it, as working directory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        build(Path(folder))
        yield Path(folder)


def transcript() -> str:
    """All commands with what they end in."""
    parts = [HEAD.format(version=version("typer"))]
    with scratch():
        for command in COMMANDS.splitlines():
            status, said = answer(command)
            parts.append(f"$ ddtree {command}\n[exit {status}]\n{said}")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    text = transcript()
    if parser.parse_args().check:
        same = RECORD.read_text("utf-8") == text
        print("as recorded" if same else f"{os.path.relpath(RECORD)} is not what the commands say")
        return 0 if same else 1
    RECORD.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
