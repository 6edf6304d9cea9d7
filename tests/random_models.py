"""Random small targets and drafters, and where the trained pair is."""

from pathlib import Path

import numpy as np

from ddtree.dflash import DraftConfig, Drafter, draft_shapes
from ddtree.engine import Engine
from ddtree.models import Model, ModelConfig, model_shapes

FIXTURES = Path(__file__).parent.parent / "fixtures"
PAIR = FIXTURES / "pycode_qwen3"


def random_weights(shapes, rng, scale):
    return {
        name: rng.normal(1.0 if name.endswith("norm.weight") else 0.0, scale, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def random_config(rng, vocab_size, positions):
    heads = int(rng.integers(1, 4))
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=int(rng.integers(8, 40)), intermediate_size=int(rng.integers(8, 60)),
        num_hidden_layers=int(rng.integers(1, 4)), num_attention_heads=heads * int(rng.integers(1, 4)),
        num_key_value_heads=heads, head_dim=2 * int(rng.integers(2, 9)), rms_norm_eps=1e-6, rope_theta=10_000.0,
        max_position_embeddings=positions, tie_word_embeddings=bool(rng.integers(2)), eos_token_ids=(),
    )  # fmt: skip


def random_engine(seed, vocab_size=9, positions=512):
    """A random target with a random drafter; a small vocabulary, so that some drafts are accepted."""
    rng = np.random.default_rng(seed)
    config = random_config(rng, vocab_size, positions)
    target = Model(config, random_weights(model_shapes(config), rng, 0.3))
    taps = tuple(int(i) for i in rng.integers(0, config.num_hidden_layers, size=2))
    draft_config = DraftConfig(config, int(rng.integers(2, 9)), vocab_size - 1, taps, config.num_hidden_layers)
    return Engine(target, Drafter(draft_config, random_weights(draft_shapes(draft_config), rng, 0.3), target))
