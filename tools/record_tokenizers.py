"""Record what other people's code makes of `tiktoken.model` and `tokenizer.model`: `python -m tools.record_tokenizers`.

    python -m tools.record_tokenizers --kimi tokenization_kimi.py

Writes `fixtures/tokenizers/`: a small rank file and a small SentencePiece file, trained on the LICENSE and a few lines
in other scripts, their `tokenizer_config.json`, and `recorded.json`: texts and their ids. The ids of Kimi come from the
`tokenization_kimi.py` that Moonshot publishes beside the model (given by the caller, run here and nowhere else); those
of Llama from the `LlamaTokenizer` of transformers 4, which runs sentencepiece. It needs transformers<5, sentencepiece,
protobuf, tiktoken and regex, in an environment of its own; no torch.
"""

import argparse
import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import regex
import sentencepiece
from tokenizers import Tokenizer
from transformers import LlamaTokenizer, LlamaTokenizerFast

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "fixtures" / "tokenizers"
BASE = 640  # ranks
LISTED = {  # as in Kimi K2.6, by their distance from the last rank; the last number says special or not
    "[BOS]": (0, 1), "[EOS]": (1, 1), "<|im_end|>": (2, 1), "<|im_user|>": (3, 1), "<|im_assistant|>": (4, 1),
    "<|start_header_id|>": (6, 1), "<|end_header_id|>": (7, 1), "[EOT]": (9, 1), "<|im_system|>": (10, 1),
    "<|tool_calls_section_begin|>": (11, 0), "<|tool_calls_section_end|>": (12, 0), "<|tool_call_begin|>": (13, 0),
    "<|tool_call_argument_begin|>": (14, 0), "<|tool_call_end|>": (15, 0), "<|im_middle|>": (17, 1),
    "<think>": (22, 0), "</think>": (23, 0), "[UNK]": (254, 1), "[PAD]": (255, 1),
}  # fmt: skip
LLAMA = [
    {"legacy": True},
    {"legacy": False},
    {"legacy": False, "add_prefix_space": False, "add_bos_token": False, "add_eos_token": True},
]
MORE = """中文和English混合的文字。你好，世界！这是一个测试。日本語のテキスト、カタカナ。한국어 문장입니다.
Привет, мир! Ελληνικά. שלום עולם. مرحبا don't I'll we've THEY'RE she'd it's 1234567890 2026-12-01 3.14159
🙂🙃👩‍👩‍👧 café naïve straße ... === --- /* */ {} [] <a href="x">"""
SAMPLES = [
    "", " ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "\xa0", "\u3000", "a", " a", "a ", "  a", "a  b",
    "\na", "a\n", "hello", "Hello, world!", "hello world", " hello  world ", "HELLO", "HelloWorld",
    "helloWorldHTTPServer", "don't", "DON'T", "we've they're I'm she'll he'd it's", "DON'T WE'VE I'LL", "'s",
    "''s", "x's'", "O'Reilly's", "0", "12", "123", "1234", "12345678901234567890", "3.14159", "1,000,000",
    "0x1F", "2026-12-01T10:00", "²³", "Ⅷ", "٣٤٥", "中", "中文", "你好，世界", "中文English混合", "English中文",
    "汉字abc汉字", "北京 Pascal", "中1文2", "日本語テキスト", "カタカナ", "ひらがな漢字カナ", "한국어 문장",
    "漢字漢字漢字", "〇", "々", "龘", "𠮷野家", "Ａｂｃ", "русский текст", "Ελληνικά", "עברית", "العربية",
    "ไทย", "हिन\u094dदी", "ǅ", "ʰ", "ß", "ẞ", "é", "e\u0301", "naïve café", "ﬁ", "İ", "ı", "🙂",
    "👩\u200d👩\u200d👧", "🇩🇪", "a🙂b", "\U0010ffff", "�", "\x00", "a\x00b", "\x7f\x1b[0m", "\ufeff", "\u200b",
    "▁", "▁▁", "a▁b", "▁a", " ▁ a", "def f(x):\n    return x + 1\n", "for i in range(10):\n\tprint(i)\n\n\n",
    "int main() { return 0; }", "a==b!=c<=d", "x += 1;;", "https://example.org/a?b=c&d=1#e",
    "<a href=\"x\">y</a>", "{\"k\": [1, 2.5, null]}", "C:\\dir\\file.txt", "# Title\n\n- a\n- b\n", "====",
    "-----", "......", "!!!!!!!!", "________", "***", "~/.bashrc", "a/b/c", "@user #tag $5 50%",
    "“quoted” — dash…", "aaaaaaaaaaaaaaaaaaaa", "abababababab", "tttttt", "zzzzzzz", "                    x",
    "\n\n\n\n\nx", "x\n \n \n", "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>user<|im_middle|>Hi<|im_end|>",
    "<|im_end|", "<|im_end|>>", "<<|im_end|>", "a<|im_end|>b", "a <|im_end|> b", "<think>so</think>yes",
    "<think>", "[UNK][PAD]", "<|reserved_token_645|>", "<|reserved_token_1|>",
    "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "<|im_system|>system<|im_middle|>中文<|im_end|>", "<s>", "</s>", "<unk>", "<s>a", "<s> a", "a<s>", "a <s>",
    "a<s>b", "a<s> b", "<s><s>", "<s></s>", " <s>", "<s>[INST] Hi [/INST]", "[INST]", "a[INST]b", "<tool>",
    "a<tool>b", "a <tool> b", "<tool>[INST]", "<s> ▁a", "<0x0A>", "<0xE4>", "<pad>",
    "The quick brown fox jumps over the lazy dog.", "1 + 1 = 2", "I have 3 cats, 14 dogs and 159 fish.",
    "Speculative decoding with draft trees",
]  # fmt: skip
LONG = [["a", 30_000], [" ", 25_001], ["ab", 13_000], ["x \n", 9_000], ["中", 26_000], ["hello ", 70_000]]


def texts() -> list[str]:
    """The samples, and random joins of them."""
    rng, found = random.Random(0), [text for text in SAMPLES if len(text) < 30]
    return [
        *SAMPLES,
        *("".join(rng.choice(found) for _ in range(rng.randint(2, 4))) for _ in range(240 - len(SAMPLES))),
    ]


def train_ranks(corpus: str, pattern: str) -> list[bytes]:
    """Byte-pair encoding of a corpus: the bytes, then the pair seen most often, again and again."""
    words = Counter(word for word in regex.findall(f"(?V1){pattern}", corpus))
    split = {word: [bytes([byte]) for byte in word.encode()] for word in words}
    ranks = [bytes([byte]) for byte in range(256)]
    while len(ranks) < BASE:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.append(left + right)
        for parts in split.values():
            for i in reversed(range(len(parts) - 1)):
                if parts[i : i + 2] == [left, right]:
                    parts[i : i + 2] = [left + right]
    return ranks


def kimi_folder(folder: Path, corpus: str, pattern: str) -> None:
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(train_ranks(corpus, pattern)))
    (folder / "tiktoken.model").write_text("".join(lines))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "added_tokens_decoder": {
            str(BASE + place): {"content": text, **flags, "special": bool(special)}
            for text, (place, special) in LISTED.items()
        },
        "additional_special_tokens": [text for text, (_, special) in LISTED.items() if special and text[0] == "<"],
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def llama_folder(folder: Path, corpus: str) -> None:
    """A SentencePiece file with the settings of Llama 2's, and two pieces of each other kind."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.splitlines()), model_writer=written, model_type="bpe", vocab_size=700,
        character_coverage=0.98, byte_fallback=True, split_digits=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, max_sentence_length=20_000,
        control_symbols=["<tool>"], user_defined_symbols=["[INST]", "[/INST]"], num_threads=1, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(llama_config({"legacy": False}), indent=1) + "\n")


def llama_config(choice: dict[str, Any]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    listed = {"0": "<unk>", "1": "<s>", "2": "</s>", "3": "<tool>"}
    return {
        "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "additional_special_tokens": ["<tool>"],
        "added_tokens_decoder": {number: {"content": text, **flags} for number, text in listed.items()}, **choice,
    }  # fmt: skip


def kimi_class(source: Path) -> Any:
    """The tokenizer's class in the published file."""
    spec = importlib.util.spec_from_file_location("tokenization_kimi", source)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TikTokenTokenizer


def load_kimi(published: Any) -> Any:
    """Its tokenizer, from a copy: tiktoken keeps what it has read of a path, whatever stands there later."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(OUTPUT / "kimi", scratch, dirs_exist_ok=True)
        return published.from_pretrained(scratch)


def kimi_record(theirs: Any, all_texts: list[str], rng: random.Random) -> dict[str, Any]:
    random_ids = [[rng.randrange(BASE) for _ in range(8)] for _ in range(20)]
    long = [theirs.encode(text * count) for text, count in LONG]
    return {
        "pattern": theirs.pat_str,
        "special": theirs.special_tokens,
        "ids": [theirs.encode(text) for text in all_texts],
        "long": [[len(ids), hashlib.sha256(json.dumps(ids).encode()).hexdigest()] for ids in long],
        "random": [[ids, theirs.decode(ids)] for ids in random_ids],
        "shown": [theirs.decode(theirs.encode(text), skip_special_tokens=True, spaces_between_special_tokens=False)
                  for text in all_texts],
    }  # fmt: skip


def llama_record(folder: Path, choice: dict[str, Any], all_texts: list[str], rng: random.Random) -> dict[str, Any]:
    """Ids from sentencepiece itself; texts from the converted tokenizer, whose decoder `tokenizer.json` has."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
        (Path(scratch) / "tokenizer_config.json").write_text(json.dumps(llama_config(choice)))
        slow, fast = LlamaTokenizer.from_pretrained(scratch), LlamaTokenizerFast.from_pretrained(scratch, **choice)
    ids = [slow(text).input_ids for text in all_texts]
    random_ids = [[rng.randrange(slow.vocab_size) for _ in range(8)] for _ in range(20)]
    decoder: Tokenizer = fast.backend_tokenizer
    return {
        "config": llama_config(choice), "ids": ids, "random": [[some, decoder.decode(some)] for some in random_ids],
        "converted": [[i, other] for i, text in enumerate(all_texts) if (other := fast(text).input_ids) != ids[i]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kimi", type=Path, required=True, help="the published tokenization_kimi.py")
    source = parser.parse_args().kimi
    plain = [text for text in SAMPLES if text.isprintable() and "<" not in text and "[" not in text]
    corpus = "\n".join([(ROOT / "LICENSE").read_text(encoding="utf-8"), *plain, *[MORE] * 3])
    for name in ("kimi", "llama"):
        (OUTPUT / name).mkdir(parents=True, exist_ok=True)
    llama_folder(OUTPUT / "llama", corpus)
    published = kimi_class(source)
    kimi_folder(OUTPUT / "kimi", corpus, published.pat_str)
    rng, all_texts = random.Random(1), texts()
    packages = ("transformers", "sentencepiece", "tiktoken", "tokenizers")
    record = {
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "texts": all_texts, "long": LONG,
        "kimi": kimi_record(load_kimi(published), all_texts, rng),
        "llama": [llama_record(OUTPUT / "llama", choice, all_texts, rng) for choice in LLAMA],
    }  # fmt: skip
    text = json.dumps(record, ensure_ascii=True, separators=(",", ":"))
    (OUTPUT / "recorded.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
