"""The README's snippet for torch runs where there is a GPU."""

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the snippet is for torch")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_torch_snippet_of_the_readme_runs(capsys):
    text = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
    (snippet,) = [one for one in re.findall(r"```python\n(.*?)```", text, re.S) if "import torch" in one]
    exec(snippet, {})
    assert "torch.Size([2, 65])\ntorch.Size([2, 65])" in capsys.readouterr().out
