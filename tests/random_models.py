"""Random small targets of every family and drafters for them, and where the fixtures are."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from ddtree.config import Experts, Latent, ModelConfig, model_shapes
from ddtree.dflash import DraftConfig, Drafter, draft_shapes
from ddtree.engine import Engine
from ddtree.layers import Llama3, Rope, Yarn
from ddtree.models import Model
from ddtree.moe import Routing

FIXTURES = Path(__file__).parent.parent / "fixtures"
PAIR = FIXTURES / "pycode_qwen3"
PAIRS = ("qwen3", "deepseek_v3")
NANO = sorted(path.name for path in (FIXTURES / "models").iterdir())
FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2", "qwen2", "mistral")


def random_weights(shapes, rng, scale):
    return {
        name: rng.normal(1.0 if name.endswith("norm.weight") else 0.0, scale, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def random_rope(rng, dim, interleaved=False):
    scaling = (None, Llama3(8.0, 1.0, 4.0, 32), Yarn(16.0, 32))[rng.integers(3)]
    amplitude = 1.0 if scaling is None else float(rng.uniform(0.9, 1.5))
    return Rope(dim, 10_000.0, scaling, amplitude, interleaved)


def random_dense(rng, vocab_size, positions, qk_norm):
    """A Llama or Qwen3, with or without biases, windows, RoPE scaling and a tied head."""
    heads, layers, dim = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2 * int(rng.integers(2, 9))
    window = int(rng.integers(1, 90))
    return ModelConfig(
        vocab_size=vocab_size, hidden_size=int(rng.integers(8, 40)), intermediate_size=int(rng.integers(8, 60)),
        num_hidden_layers=layers, num_attention_heads=heads * int(rng.integers(1, 4)), num_key_value_heads=heads,
        head_dim=dim, rms_norm_eps=1e-6, rope=random_rope(rng, dim), softmax_scale=dim**-0.5,
        max_position_embeddings=positions, tie_word_embeddings=bool(rng.integers(2)), eos_token_ids=(),
        qk_norm=qk_norm, attention_bias=bool(rng.integers(2)), mlp_bias=bool(rng.integers(2)),
        windows=tuple(window if rng.integers(2) else None for _ in range(layers)) if rng.integers(2) else (),
    )  # fmt: skip


def random_latent(rng, config, q_lora_rank):
    """The same model with latent attention."""
    sizes = (
        int(rng.integers(4, 20)),
        2 * int(rng.integers(1, 6)),
        2 * int(rng.integers(1, 5)),
        int(rng.integers(3, 9)),
    )
    latent = Latent(q_lora_rank, *sizes)
    dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    return replace(
        config, latent=latent, head_dim=dim, num_key_value_heads=config.num_attention_heads, windows=(), mlp_bias=False,
        rope=random_rope(rng, latent.qk_rope_head_dim, interleaved=True), softmax_scale=dim**-0.5 * 1.3,
    )  # fmt: skip


def random_experts(rng, config, softmax):
    """The same model with experts in all layers but perhaps the first."""
    groups = 1 if softmax else int(rng.integers(1, 4))
    chosen = int(rng.integers(1, groups + 1))
    experts = groups * int(rng.integers(2, 6))
    top_k = int(rng.integers(1, experts // groups * chosen + 1))
    routing = Routing(experts, top_k, softmax, groups, chosen, bool(rng.integers(2)), float(rng.uniform(1, 3)))
    layers = tuple(range(int(rng.integers(2)), config.num_hidden_layers))
    shared = 0 if softmax else int(rng.integers(0, 3)) * 8
    return replace(config, mlp_bias=False, experts=Experts(routing, int(rng.integers(4, 20)), shared, layers))


def random_config(rng, vocab_size, positions, family):
    """A random config of one of FAMILIES; "kimi_k2" has a query latent, "deepseek_v3" none."""
    config = random_dense(rng, vocab_size, positions, qk_norm=family.startswith("qwen3"))
    if family in ("qwen2", "mistral"):
        windows = (None, *config.windows[1:]) if family == "qwen2" else config.windows[:1] * config.num_hidden_layers
        config = replace(config, attention_bias=False, qkv_bias=family == "qwen2", mlp_bias=False, windows=windows)
        return replace(config, windows=windows if len(windows) == config.num_hidden_layers else ())
    if family in ("deepseek_v3", "kimi_k2"):
        config = random_latent(rng, config, int(rng.integers(4, 20)) if family == "kimi_k2" else None)
    return config if family in ("llama", "qwen3") else random_experts(rng, config, softmax=family == "qwen3_moe")


def random_drafter(target, rng, scale=0.3):
    """A random drafter that fits a target."""
    config = target.config
    layers = replace(
        random_dense(rng, config.vocab_size, config.max_position_embeddings, qk_norm=True),
        hidden_size=config.hidden_size,
    )
    taps = tuple(int(i) for i in rng.integers(0, config.num_hidden_layers, size=2))
    causal = tuple(bool(rng.integers(2)) for _ in range(layers.num_hidden_layers))
    block, mask = int(rng.integers(2, 9)), config.vocab_size - 1
    draft_config = DraftConfig(layers, block, mask, taps, config.num_hidden_layers, causal)
    return Drafter(draft_config, random_weights(draft_shapes(draft_config), rng, scale), target)


def random_engine(seed, vocab_size=9, positions=512, family=None):
    """A random target with a random drafter; a small vocabulary, so that some drafts are accepted."""
    rng = np.random.default_rng(seed)
    config = random_config(rng, vocab_size, positions, family or FAMILIES[seed % len(FAMILIES)])
    target = Model(config, random_weights(model_shapes(config), rng, 0.3), absorb=bool(rng.integers(2)))
    return Engine(target, random_drafter(target, rng))
