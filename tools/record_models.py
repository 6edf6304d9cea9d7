"""Record small random models that `oracle` lacks, by transformers: `python -m tools.record_models [NAME …]`

Writes `fixtures/models/NAME_nano/{config.json,model.safetensors,expected.kdtr}` in the layout of the recordings that
`tools.convert_oracle` converts: logits and hidden states of 90 tokens, and the logits of a 24-node tree, each node
computed on its own path. Without names it records all. Then it writes, for every model in that folder, the 24 tokens
that greedy decoding gives after the 90, end tokens not heeded: `fixtures/generated.kdtr`. It needs torch, transformers,
accelerate and compressed-tensors 0.20 beside ddtree, in an environment of its own.
"""

import importlib.metadata
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from ddtree.kdtr import load, save

MODELS = Path(__file__).parent.parent / "fixtures" / "models"
COMMON = {"vocab_size": 199, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "qwen3_moe": COMMON | {
        "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_experts": 8,
        "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    },
    "qwen3_window": COMMON | {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "attention_bias": True,
        "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "tie_word_embeddings": True,
        "rope_parameters": YARN, "rms_norm_eps": 1e-6,
    },
    "llama_bias": COMMON | {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    },
    "deepseek_v3_bias": COMMON | {
        "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 6, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.7, "kv_lora_rank": 12, "q_lora_rank": 20,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "attention_bias": True, "rope_interleave": False,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "qwen2": COMMON | {
        "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "use_sliding_window": False, "sliding_window": 40,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    },
    "qwen2_window": COMMON | {
        "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 40,
        "max_window_layers": 2, "tie_word_embeddings": False, "rope_parameters": YARN, "rms_norm_eps": 1e-6,
    },
    "mistral": COMMON | {
        "model_type": "mistral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 40, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    },
    "mistral_nemo": COMMON | {
        "model_type": "mistral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "sliding_window": None,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3_moe_all": COMMON | {
        "model_type": "qwen3_moe", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_experts": 8,
        "num_experts_per_tok": 3, "norm_topk_prob": True, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip


def random_model(settings: dict, seed: int) -> torch.nn.Module:
    """A model whose weights are large enough for logits of several units; biases and norms are random too."""
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            scale = 0.1 if name.endswith("norm.weight") else 0.3 if "bias" in name else tensor.shape[-1] ** -0.5
            tensor.copy_(noise * scale + (1.0 if name.endswith("norm.weight") else 0.0))
    return model


@torch.no_grad()
def record(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Inputs and what the model says of them."""
    rng = np.random.default_rng(seed)
    ids, nodes = rng.integers(0, 199, size=90), rng.integers(0, 199, size=24)
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, 24)]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    whole = model(torch.tensor(ids)[None], output_hidden_states=True, use_cache=False)
    rows = [model(torch.tensor([[*ids, *nodes[path]]]), use_cache=False).logits[0, -1] for path in paths]
    return {
        "input_ids": ids.astype(np.int32), "logits": whole.logits[0].numpy(),
        "hidden_states": torch.cat(whole.hidden_states).numpy(), "tree_token_ids": nodes.astype(np.int32),
        "tree_parents": np.array(parents, dtype=np.int32), "tree_logits": torch.stack(rows).numpy(),
    }  # fmt: skip


@torch.no_grad()
def generate(folder: Path) -> np.ndarray:
    """The 24 most probable tokens, one after the other, after the recorded 90 of a model."""
    method = AutoConfig.from_pretrained(folder).to_dict().get("quantization_config", {}).get("quant_method")
    how = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if method == "fp8" else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32, **how
    ).eval()
    ids = load(folder / "expected.kdtr")["input_ids"].tolist()
    for _ in range(24):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return np.array(ids[-24:], dtype=np.int32)


def main() -> None:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch"))
    for seed, (name, settings) in enumerate(CONFIGS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = MODELS / f"{name}_nano"
        model = random_model(settings, seed)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        source = f"a random model and what Hugging Face transformers says of it ({versions}), float32 on a CPU"
        note = "hidden_states[t+1] is after layer t, the last after the final norm; each tree node on its own path"
        save(folder / "expected.kdtr", record(model, seed), {"source": source, "note": note})
        print(f"{folder.name}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.2f} MB")
    texts = {folder.name: generate(folder) for folder in sorted(MODELS.iterdir())}
    save(MODELS.parent / "generated.kdtr", texts, {"source": f"greedy decoding by transformers ({versions}), float32"})


if __name__ == "__main__":
    main()
