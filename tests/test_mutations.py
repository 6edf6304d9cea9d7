"""Model folders with a changed file each: keys dropped, null, renamed, nested elsewhere, of another type.

Each ends in a model that can be read or in one clear error, before a weight is read.
"""

import json
import random
import shutil

import pytest

from ddtree import checkpoint
from ddtree.chat import load_chat, load_tokenizer
from ddtree.checkpoint import CheckpointError
from ddtree.engine import check_engine
from deep import DEEP
from random_models import FIXTURES, NANO, PAIRS

VALUES = [None, True, False, 0, -1, 1, 2.5, 1e300, 10**30, "x", "", "3", [], [1], ["a"], [None], {}, {"a": 1}]
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}}
EXTRA = {
    "tokenizer_config.json": {"bos_token": "<|bos|>", "chat_template": "{{ messages }}"},
    "special_tokens_map.json": {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}},
    "added_tokens.json": {"<|bos|>": 256},
    "generation_config.json": {"eos_token_id": [1]},
}


def build(folder, rng):
    """A pair, or a nano model alone, with all files that may stand in a folder. Returns its places by name."""
    source, alone = FIXTURES / f"pycode_{rng.choice(PAIRS)}", rng.random() < 0.3
    found = {"target": FIXTURES / "models" / rng.choice(NANO)} if alone else {"target": source / "target"}
    found |= {} if alone else {"draft": source / "draft"}
    for name, place in found.items():
        (folder / name).mkdir(parents=True)
        shutil.copy(place / "config.json", folder / name)
        (folder / name / "model.safetensors").symlink_to(place / "model.safetensors")
    shutil.copy(source / "target" / "tokenizer.json", folder / "target")
    for name, content in EXTRA.items():
        (folder / "target" / name).write_text(json.dumps(content))
    return {name: folder / name for name in found}


def places(part):
    """Every object in a JSON document with one of its keys."""
    for key, value in part.items():
        yield part, key
        if isinstance(value, dict):
            yield from places(value)


def change(content, rng):
    """Change one key, if there is one."""
    if not content:
        return
    part, key = rng.choice(list(places(content)))
    match rng.randrange(5):
        case 0:
            del part[key]
        case 1:
            part[key] = None
        case 2:
            part[f"{key}x"] = part.pop(key)
        case 3:
            value, name = part.pop(key), rng.choice(["text_config", "dflash_config", "rope_parameters"])
            content[name] = {**(content[name] if isinstance(content.get(name), dict) else {}), key: value}
        case 4:
            part[key] = rng.choice(VALUES)


@pytest.mark.parametrize("seed", range(2000 if DEEP else 400))
def test_a_changed_folder_is_read_or_refused_before_a_weight_is_read(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(checkpoint, "read_tensors", lambda stored: pytest.fail("a weight was read"))
    rng = random.Random(seed)
    folders = build(tmp_path, rng)
    configs = [path / "config.json" for path in folders.values()]
    others = [folders["target"] / name for name in ("tokenizer.json", *EXTRA)]
    file = rng.choice([*configs * 4, *others])
    content = json.loads(file.read_text())
    if file.name == "config.json" and rng.random() < 0.2:
        content["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}}
    for _ in range(rng.choice([1, 1, 2])):
        change(content, rng)
    file.write_text(json.dumps(content))
    try:
        check_engine(folders["target"], folders.get("draft"))
        load_tokenizer(folders["target"])
        if chat := load_chat(folders["target"]):
            chat.render([{"role": "user", "content": "x"}])
    except CheckpointError as error:
        assert str(error).strip()
