"""Count generated tokens that are equal with trees and without: `python -m tools.lossless [--gguf SMOLLM2]`.

The trained pairs use their own drafters. The other models have none, so a drafter stands in that has read the plain
continuation and blurs it: then paths of every length are accepted, in every family. Speeds are noted on the way.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from ddtree.bench import write_measurement
from ddtree.check import assert_equal
from ddtree.engine import Engine, Sampling
from ddtree.kdtr import load
from ddtree.models import Model
from tests.random_models import FAMILIES, FIXTURES, NANO, PAIRS, random_engine

PROMPTS = sorted((FIXTURES / "prompts").iterdir())
SAMPLINGS = (Sampling(), Sampling(0.7, seed=1), Sampling(1.2, top_k=40, top_p=0.95, seed=2))


class Blurred:
    """Drafts the known continuation of a prompt, each token hidden in noise now and then."""

    config = SimpleNamespace(target_layer_ids=())

    def __init__(self, continuation, prompt, vocab_size, seed):
        self._text, self._vocabulary = [*np.zeros(prompt, np.int64), *continuation], vocab_size
        self._rng = np.random.default_rng(seed)

    def new_cache(self):
        return SimpleNamespace(length=0)

    def draft(self, bonus, features, cache):
        cache.length += len(features)
        logits = self._rng.standard_normal((7, self._vocabulary), dtype=np.float32)
        for row, token in zip(logits, self._text[cache.length + 1 :], strict=False):
            row[token] += (4.0 + np.log(self._vocabulary / 200)) * (self._rng.random() < 0.85)
        return logits


def compare(engine, prompt, tokens, budgets, sampling):
    """One plain text, and one with trees for each budget that equals it. Returns budget → result, plain under 0."""
    results = {0: engine.generate_autoregressive(prompt, tokens, sampling)}
    text = results[0].tokens
    for budget in budgets:
        drafter = engine.drafter or Blurred(text, len(prompt), engine.target.config.vocab_size, budget)
        results[budget] = Engine(engine.target, drafter).generate(prompt, tokens, budget, sampling)
        assert_equal(results[budget].tokens, text, name=f"budget {budget}, {sampling}")
    return results


def endless(model):
    """The model without end tokens."""
    return Model(replace(model.config, eos_token_ids=()), model.weights)


def engines(gguf=None):
    """Name, engine and prompts: the trained pairs, the recorded models, a random model of every family, SmolLM2."""
    texts = [list(path.read_bytes()) for path in PROMPTS]
    for pair in PAIRS:
        folder = FIXTURES / f"pycode_{pair}"
        yield folder.name, Engine.load(folder / "target", folder / "draft"), texts
    rng = np.random.default_rng(0)
    for name in NANO:
        model = endless(Model.load(FIXTURES / "models" / name))
        yield name, Engine(model), [rng.integers(0, 199, size=n) for n in (5, 90)]
    for seed, family in enumerate(FAMILIES):
        rng = np.random.default_rng(seed)  # its own: its prompts stay when a model is recorded
        yield f"random {family}", random_engine(seed, family=family), [rng.integers(0, 9, size=n) for n in (1, 60)]
    if gguf is not None:
        chats = load(FIXTURES / "smollm2.kdtr")
        yield "SmolLM2-135M-Instruct", Engine(endless(Model.load(gguf))), [chats[f"p{i}.prompt"] for i in range(2)]


def speed(results):
    """Tokens per second after prefill, over several results."""
    tokens = sum(len(result.tokens) - 1 for result in results)
    return round(tokens / sum(result.seconds - result.prefill_seconds for result in results), 1)


def row_of(name, engine, prompts, tokens, budgets, samplings):
    """One model's figures: tokens compared (all equal, or this raises), tokens a round and tokens per second."""
    runs = [compare(engine, prompt, tokens, budgets, sampling) for prompt in prompts for sampling in samplings]
    trees = [run[budget] for run in runs for budget in budgets]
    return {
        "model": name,
        "prompts": len(prompts),
        "tokens_per_text": tokens,
        "tokens": sum(len(result.tokens) for result in trees),
        "tokens_per_round": round(float(np.mean([result.tokens_per_round for result in trees])), 3),
        "tokens_per_second": {str(budget): speed([run[budget] for run in runs]) for budget in (0, *budgets)},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FIXTURES / "measurements" / "lossless.json")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct, from `make model`; left out if not given")
    options, budgets, rows = parser.parse_args(), (3, 16, 64), []
    for name, engine, prompts in engines(options.gguf):
        rows.append(row_of(name, engine, prompts, 40 if "SmolLM2" in name else 150, budgets, SAMPLINGS))
        print(rows[-1], flush=True)
    samplings = [vars(sampling) for sampling in SAMPLINGS]
    equal = sum(row["tokens"] for row in rows)
    busy = [round(value, 2) for value in os.getloadavg()]  # speeds of a busy machine say little
    results = {"budgets": budgets, "samplings": samplings, "equal_tokens": equal, "load_average": busy, "rows": rows}
    write_measurement(options.output, "python -m tools.lossless --gguf SmolLM2-135M-Instruct.Q4_1.gguf", results)
    print(f"{equal} tokens equal; written to {options.output}")


if __name__ == "__main__":
    main()
