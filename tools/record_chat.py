"""Record what transformers makes of tokenizers, special tokens and chat templates: `python -m tools.record_chat`.

Writes `fixtures/chat.json`: model folders with their files (random choices of who names which special token where, of
a stored truncation or padding, and templates with what they are given), and for each the token ids of a text, that
text decoded, and the rendered conversation. It needs transformers beside ddtree, in an environment of its own.
"""

import importlib.metadata
import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

OUTPUT = Path(__file__).parent.parent / "fixtures" / "chat.json"
LETTERS = "abcd<|>_enoswtlim"
SPECIAL = ["<bos>", "<eos>", "<im_end>"]
CHOICE = [*SPECIAL, "<new>", "<tool>", "b", "ab"]
TEXT = "a<im_end><new>b<eos>ab<tool>c<bos>d"
ROLES = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ pad_token }}"
TEMPLATE = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}"

MESSAGES = [
    {"role": "user", "content": "Hi <b>é</b>!"},
    {"role": "assistant", "content": None, "reasoning": "so", "tool_calls": [{"name": "f", "arguments": {"b": 1}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [2, None]}}}]
GIVEN = [{}, {"tools": TOOLS}, {"documents": [{"title": "t", "text": "x"}], "enable_thinking": False}]
TEMPLATES = [
    "{% if tools is not none %}TOOLS {{ tools | tojson }}{% endif %}{{ messages[0].content }}",
    "{% if documents is not none %}DOCUMENTS {{ documents | length }}{% endif %}",
    "{{ tools is defined }} {{ documents is defined }} {{ functions is defined }} {{ add_generation_prompt }}",
    "{% if tools %}{{ tools | tojson(indent=4, sort_keys=true) }}{% endif %}",
    "{{ messages | tojson(separators=(',', ':')) }}",
    "{{ messages | tojson(false, none, (',', ':')) }}",
    "{{ messages[1] | tojson(true) }}{{ messages[0] | tojson(ensure_ascii=true, indent=1) }}",
    "{{ messages[1].content is defined }} {{ messages[1].thinking }} {{ messages[1].reasoning_content }}",
    "{{ enable_thinking is defined }}{% if enable_thinking is false %}<think></think>{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% generation %}{{ messages[0]['role'] }}{% endgeneration %}{% for i in [1, 2] %}{% break %}{% endfor %}.",
]


def toy(count: int) -> Tokenizer:
    """A token for each letter, and the first `count` special ones."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(dict.fromkeys(LETTERS))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL[:count])
    return tokenizer


def listed(tokenizer: Tokenizer, texts: list[str], rng: random.Random | None) -> dict[str, Any]:
    """Those tokens with ids that are free or theirs, as `added_tokens.json` has them; with `rng` as the newer list."""
    found, free = {}, tokenizer.get_vocab_size()
    for text in texts:
        number = tokenizer.token_to_id(text)
        found[text], free = (free, free + 1) if number is None else (number, free)
    if rng is None:
        return found
    return {str(number): {"content": text, "special": rng.random() < 0.6} for text, number in found.items()}


def random_files(rng: random.Random) -> dict[str, Any]:
    """The files of a folder, name → content."""
    tokenizer = toy(rng.choice([0, 2, 3]))
    if rng.random() < 0.4:
        tokenizer.enable_truncation(max_length=rng.choice([1, 3]), direction=rng.choice(["left", "right"]))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    config |= {
        role: rng.choice(CHOICE) for role in rng.sample(["bos_token", "eos_token", "pad_token", "image_token"], 2)
    }
    files = {"tokenizer_config.json": config}
    if rng.random() < 0.4:
        kinds = [None, rng.choice(CHOICE), {"content": rng.choice(CHOICE), "lstrip": False, "normalized": False}]
        roles = rng.sample(["bos_token", "eos_token", "pad_token"], 2)
        files["special_tokens_map.json"] = {role: rng.choice(kinds) for role in roles}
    if rng.random() < 0.3:
        config[rng.choice(["additional_special_tokens", "extra_special_tokens"])] = rng.sample(CHOICE, 2)
    if rng.random() < 0.5:
        files["added_tokens.json"] = listed(tokenizer, rng.sample(CHOICE, 2), None)
    elif rng.random() < 0.6:
        config["added_tokens_decoder"] = listed(tokenizer, rng.sample(CHOICE, 2), rng)
    return {**files, "tokenizer.json": json.loads(tokenizer.to_str())}


def load(files: dict[str, Any]) -> Any:
    """transformers' tokenizer of a folder with these files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {"config.json": {"model_type": "qwen3"}, **files}.items():
            Path(folder, name).write_text(json.dumps(content))
        return AutoTokenizer.from_pretrained(folder)


def folder_case(rng: random.Random) -> dict[str, Any]:
    files = random_files(rng)
    theirs = load(files)
    ids = theirs(TEXT).input_ids
    rendered = theirs.apply_chat_template(MESSAGES[:1], tokenize=False)
    return {"files": files, "ids": ids, "text": theirs.decode(ids, skip_special_tokens=True), "rendered": rendered}


def padding_case(options: dict[str, Any]) -> dict[str, Any]:
    tokenizer = toy(3)
    tokenizer.enable_padding(pad_id=2, pad_token="c", **options)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    files = {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": config}
    theirs = load(files)
    ids = theirs(TEXT).input_ids
    rendered = theirs.apply_chat_template(MESSAGES[:1], tokenize=False)
    return {"files": files, "ids": ids, "text": theirs.decode(ids, skip_special_tokens=True), "rendered": rendered}


def pieces(count: int) -> Tokenizer:
    """A toy as Llama 2's: no bytes, and a space in front."""
    names = ["<unk>", "<s>", "</s>", "▁", *LETTERS[:4]]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(names[:count])
    return tokenizer


def default_cases() -> dict[str, Any]:
    """What a template sees of roles that only the class of the tokenizer, the type of the model or a stored padding
    names."""
    tokenizers = {"pieces": pieces(3), "bytes": toy(3), "padded pieces": pieces(3), "padded bytes": toy(3)}
    for name in ("padded pieces", "padded bytes"):
        tokenizers[name].enable_padding(pad_id=5, pad_token="b")
    kinds = ["LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"]
    named = [{}, {"bos_token": "<im_end>", "unk_token": None}, {"eos_token": None, "pad_token": "a"}]
    cases = []
    for kind in (*kinds, "PreTrainedTokenizerFast", None):
        for model in ("llama", "qwen3_moe"):
            for roles, name in itertools.product(named, tokenizers):
                config = {**roles} | ({"tokenizer_class": kind} if kind else {})
                stored = json.loads(tokenizers[name].to_str())
                files = {
                    "tokenizer.json": stored,
                    "config.json": {"model_type": model},
                    "tokenizer_config.json": {**config, "chat_template": ROLES},
                }
                text = load(files).apply_chat_template(MESSAGES[:1], tokenize=False)
                cases.append({"tokenizer": name, "config": config, "model": model, "rendered": text})
    return {
        "template": ROLES,
        "tokenizers": {name: json.loads(own.to_str()) for name, own in tokenizers.items()},
        "cases": cases,
    }


def template_cases() -> list[dict[str, Any]]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    cases = []
    for source in TEMPLATES:
        theirs = load(
            {"tokenizer.json": json.loads(toy(3).to_str()), "tokenizer_config.json": config | {"chat_template": source}}
        )
        for given in GIVEN:
            text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, **given)
            cases.append({"template": source, "given": given, "rendered": text})
    return cases


def main() -> None:
    rng = random.Random(0)
    record = {
        "transformers": importlib.metadata.version("transformers"),
        "text": TEXT,
        "messages": MESSAGES,
        "folders": [folder_case(rng) for _ in range(40)],
        "padding": [
            padding_case(options)
            for options in ({"length": 64}, {"pad_to_multiple_of": 16}, {"direction": "left", "length": 30})
        ],
        "defaults": default_cases(),
        "templates": template_cases(),
    }
    OUTPUT.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
