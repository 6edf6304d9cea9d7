"""Record quantised weights and what other people's code says of them: `python -m tools.record_quant`.

Writes `fixtures/quant_formats.kdtr` (matrices in the formats of compressed-tensors and of DeepSeek's fp8, with their
values), `fixtures/quant_targets.json` (random lists of targets, and the group that each module of a small Llama gets by
them) and small quantised models in `fixtures/models`, in the layout of `tools.record_models`. It needs torch,
transformers, accelerate and compressed-tensors 0.20 beside ddtree, in an environment of its own.
`python -m tools.record_quant --ordered` writes `fixtures/quant_ordered.kdtr`, columns in the order of their
activations, and needs compressed-tensors 0.9.4: later releases refuse them.

A scale in bfloat16 or float16 is stored as uint16, codes of float8 as uint8. `values` are the package's for the scale
in float32, as in a model that is loaded in float32; `rounded` are its values for the scale as stored.
"""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ddtree.kdtr import save
from tools.record_models import COMMON, random_model, record

FIXTURES = Path(__file__).parent.parent / "fixtures"
GROUP = {"strategy": "group", "num_bits": 4}
PACKED = {
    "group_32": ((11, 128), GROUP | {"group_size": 32}, torch.bfloat16),
    "group_128": ((11, 256), GROUP | {"group_size": 128}, torch.bfloat16),
    "group_128_asymmetric": ((13, 256), GROUP | {"group_size": 128, "symmetric": False}, torch.bfloat16),
    "group_128_half": ((10, 256), GROUP | {"group_size": 128, "symmetric": False}, torch.float16),
    "channel": ((9, 100), {"strategy": "channel", "num_bits": 4}, torch.bfloat16),
    "channel_asymmetric": ((17, 70), {"strategy": "channel", "num_bits": 4, "symmetric": False}, torch.float32),
    "bits_8_group_128": ((6, 256), {"strategy": "group", "num_bits": 8, "group_size": 128}, torch.bfloat16),
    "bits_8_channel_asymmetric": ((7, 37), {"strategy": "channel", "num_bits": 8, "symmetric": False}, torch.bfloat16),
}
FLOAT8, INT8 = {"type": "float", "num_bits": 8}, {"type": "int", "num_bits": 8}
BYTES = {
    "float8_channel": ((12, 50), FLOAT8 | {"strategy": "channel"}, torch.bfloat16),
    "float8_tensor": ((12, 50), FLOAT8 | {"strategy": "tensor"}, torch.float32),
    "float8_block": ((40, 70), FLOAT8 | {"strategy": "block", "block_structure": [16, 32]}, torch.float32),
    "int8_channel": ((12, 50), INT8 | {"strategy": "channel"}, torch.bfloat16),
    "int8_channel_asymmetric": ((12, 50), INT8 | {"strategy": "channel", "symmetric": False}, torch.bfloat16),
    "int8_group": ((9, 96), INT8 | {"strategy": "group", "group_size": 32}, torch.float16),
}
FP8 = {"square": ((128, 256), (128, 128)), "rest": ((130, 260), (128, 128)), "small": ((33, 50), (16, 32))}
NANO = COMMON | {"hidden_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-6}
MODELS = {
    "qwen3_fp8": NANO | {
        "model_type": "qwen3", "intermediate_size": 96, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "head_dim": 16, "tie_word_embeddings": False,
    },
    "deepseek_v3_fp8": NANO | {
        "model_type": "deepseek_v3", "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 16, "tie_word_embeddings": False,
    },
    "llama_w4a16": NANO | {
        "model_type": "llama", "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "head_dim": 16, "tie_word_embeddings": False,
    },
}  # fmt: skip
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
FOUR, EIGHT = GROUP | {"group_size": 64, "type": "int"}, {"strategy": "channel", "num_bits": 8, "type": "int"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*layers.1.self_attn.o_proj"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": FOUR},
        "group_1": {"targets": ["re:.*self_attn"], "weights": EIGHT},
    },
}  # fmt: skip


def stored(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as KDTR keeps it: two-byte floats as uint16, float8 as uint8."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return tensor.view(torch.uint16).numpy()
    return tensor.view(torch.uint8).numpy() if tensor.dtype == torch.float8_e4m3fn else tensor.numpy()


def drawn_scheme(shape: tuple[int, int], arguments: dict, dtype: torch.dtype, form: str) -> tuple:
    """A random matrix, its scheme, and random scales and zero points of the shapes that compressed-tensors gives."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.initialize import initialize_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=form)
    module, weight = torch.nn.Module(), torch.randn(shape)
    initialize_qparams(module, "weight", scheme.weights, shape, dtype, force_zero_point=False)
    largest = {"int": 2 ** (scheme.weights.num_bits - 1) - 1, "float": 448}[scheme.weights.type]
    scale = (torch.rand(module.weight_scale.shape) + 2.0) / largest
    found = {"weight": weight, "weight_scale": scale.to(dtype)}
    if hasattr(module, "weight_zero_point"):
        half = 2 ** (scheme.weights.num_bits - 1)
        found["weight_zero_point"] = torch.randint(-half, half, module.weight_zero_point.shape, dtype=torch.int8)
    return scheme, found


def compressed(name: str, case: tuple, form: str) -> dict[str, np.ndarray]:
    """One matrix as compressed-tensors packs it, and what it says of the words."""
    from compressed_tensors.compressors import BaseCompressor

    package = BaseCompressor.get_value_from_registry(form)
    scheme, found = drawn_scheme(*case, form)
    parts = package.compress(found, scheme)
    exact = package.decompress(parts | {"weight_scale": parts["weight_scale"].float()}, scheme)["weight"]
    out = {f"{name}.{part}": stored(value) for part, value in parts.items()}
    return out | {
        f"{name}.values": stored(exact.float()), f"{name}.rounded": stored(package.decompress(parts, scheme)["weight"])
    }  # fmt: skip


def deepseek(name: str, shape: tuple[int, int], block: tuple[int, int]) -> dict[str, np.ndarray]:
    """One matrix of every finite float8, with scales that differ by orders of magnitude, and its values."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = torch.randint(0, 255, shape, dtype=torch.uint8)
    codes[codes == 127] = 255 - 127  # both NaNs are left out
    weight = codes.view(torch.float8_e4m3fn)
    scale = torch.exp(torch.randn([-(-size // by) for size, by in zip(shape, block, strict=True)]) * 3)
    reader = FP8BlockDequantizer(weight_block_size=block, dtype=torch.float32)
    values = reader._create_dequantized_weight(weight, scale)
    if all(size % by == 0 for size, by in zip(shape, block, strict=True)):
        theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.float32)
        assert torch.equal(values, theirs), "two codes of other people differ"
    return {
        f"{name}.weight": codes.numpy(),
        f"{name}.weight_scale_inv": scale.numpy(),
        f"{name}.values": values.numpy(),
    }


def awq(name: str, rows: int = 16, columns: int = 256, group: int = 128) -> dict[str, np.ndarray]:
    """A matrix as AutoAWQ packs it, converted to packed words by compressed-tensors, and AWQ's own (q − z) · s."""
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    levels, zeros = torch.randint(0, 16, (columns, rows)), torch.randint(0, 16, (columns // group, rows))
    scale = (torch.rand(columns // group, rows) + 0.5).half()
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # of the eight numbers in a word, from its low bits up

    def words(numbers: torch.Tensor) -> torch.Tensor:
        eights = numbers.numpy().astype(np.uint32).reshape(len(numbers), -1, 8)[:, :, order]
        return torch.tensor((eights << (4 * np.arange(8, dtype=np.uint32))).sum(2, dtype=np.uint32).view(np.int32))

    stored_as = {"weight.qweight": words(levels), "weight.qzeros": words(zeros), "weight.scales": scale}
    parts = AutoAWQConverter(group_size=group).process(stored_as)
    exact = (levels - zeros.repeat_interleave(group, 0)).float() * scale.float().repeat_interleave(group, 0)
    out = {f"{name}.{part.removeprefix('weight.')}": stored(value) for part, value in parts.items()}
    return out | {f"{name}.values": stored(exact.T), f"{name}.rounded": stored(exact.T.half())}


def quantised(name: str, tensor: torch.Tensor, config: dict) -> dict[str, torch.Tensor]:
    """A matrix of a model as its format stores it: fp8 by the largest of each block, or packed integers."""
    if config is DEEPSEEK:
        padded = torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % 16, 0, -tensor.shape[0] % 16))
        largest = padded.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).abs().amax((1, 3))
        spread = largest.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
        return {name: (tensor / spread * 448).to(torch.float8_e4m3fn), f"{name}_scale_inv": largest / 448}
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = EIGHT if "self_attn" in name else FOUR
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format="pack-quantized")
    groups = tensor.unflatten(1, (-1, arguments.get("group_size", tensor.shape[1])))
    scale = groups.abs().amax(2).div(2 ** (arguments["num_bits"] - 1) - 1).bfloat16()
    found = {"weight": tensor, "weight_scale": scale}
    parts = BaseCompressor.get_value_from_registry("pack-quantized").compress(found, scheme)
    return {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}


def record_quantised_model(name: str, settings: dict, seed: int) -> None:
    """Write a random model with quantised matrices, and what transformers says of the folder."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    folder, config = FIXTURES / "models" / f"{name}_nano", DEEPSEEK if name.endswith("fp8") else COMPRESSED
    random_model(settings, seed).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tensors = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        chosen = "_proj" in key and not (config is COMPRESSED and "layers.1.self_attn.o_proj" in key)
        tensors |= quantised(key, tensor, config) if chosen else {key: tensor}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    facts = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
    how = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if config is DEEPSEEK else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", **how
    ).eval()
    source = f"a random quantised model and what Hugging Face transformers says of it ({versions()}), float32 on a CPU"
    note = "hidden_states[t+1] is after layer t, the last after the final norm; each tree node on its own path"
    save(folder / "expected.kdtr", record(model, seed), {"source": source, "note": note})


def ordered(name: str, groups: int, group: int, symmetric: bool) -> dict[str, np.ndarray]:
    """A packed matrix whose columns are grouped by `g_idx`."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    shape = (16, groups * group)  # that release packs zero points of whole words only
    levels = torch.randint(-8, 8, shape, dtype=torch.int8)
    scale = torch.rand(16, groups) + 0.5
    zero = torch.randint(-8, 8, (16, groups), dtype=torch.int8)
    index = torch.arange(groups).repeat_interleave(group)[torch.randperm(shape[1])].to(torch.int32)
    values = dequantize(levels, scale, None if symmetric else zero, g_idx=index)
    arrays = {"packed": pack_to_int32(levels, 4), "scale": scale, "g_idx": index, "values": values}
    arrays |= {} if symmetric else {"zero_point": pack_to_int32(zero, 4, packed_dim=0)}
    return {f"{name}.{part}": stored(value) for part, value in arrays.items()}


TARGETS = (
    "Linear", "Embedding", "Module", "LlamaAttention", "lm_head", "model.embed_tokens", "model.layers.1.mlp.up_proj",
    "up_proj", "re:.*", "re:.*self_attn.*", "re:.*mlp", "re:mlp", "re:model.layers.0.*_proj$", "re:.*[qk]_proj",
    "re:.*head",
)  # fmt: skip


def record_targets(cases: int = 80) -> list[dict]:
    """Random groups of targets and ignored ones; by them, each module's group, -1 for none."""
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import AutoConfig, AutoModelForCausalLM

    rng, settings = np.random.default_rng(22), MODELS["llama_w4a16"]
    found = []
    for _ in range(cases):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        groups = [rng.choice(TARGETS, rng.integers(1, 4), replace=False).tolist() for _ in range(rng.integers(1, 4))]
        ignore = rng.choice(TARGETS, rng.integers(0, 3), replace=False).tolist()
        schemes = {
            f"group_{i}": {"targets": targets, "weights": GROUP | {"group_size": 8 << i}}
            for i, targets in enumerate(groups)
        }
        config = QuantizationConfig(config_groups=schemes, ignore=ignore, format="pack-quantized")
        apply_quantization_config(model, config, show_progress=False)
        sizes = {
            name: module.quantization_scheme.weights.group_size if hasattr(module, "quantization_scheme") else 4
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        }
        modules = {name: [4, 8, 16, 32].index(size) - 1 for name, size in sizes.items()}
        found.append({"groups": groups, "ignore": ignore, "modules": modules})
    return found


def versions() -> str:
    names = ("transformers", "compressed-tensors", "torch")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ordered", action="store_true", help="columns in the order of their activations")
    arguments = parser.parse_args()
    torch.manual_seed(22)
    arrays: dict[str, np.ndarray] = {}
    if arguments.ordered:
        for name, case in {"symmetric": (4, 16, True), "asymmetric": (3, 32, False), "one": (1, 40, False)}.items():
            arrays |= ordered(name, *case)
        save(FIXTURES / "quant_ordered.kdtr", arrays, {"source": f"random words, dequantised by {versions()}"})
        return 0
    for name, case in PACKED.items():
        arrays |= compressed(name, case, "pack-quantized")
    for name, case in BYTES.items():
        arrays |= compressed(name, case, "float-quantized" if name.startswith("float8") else "int-quantized")
    for name, (shape, block) in FP8.items():
        arrays |= deepseek(f"fp8_{name}", shape, block)
    arrays |= awq("awq")
    save(
        FIXTURES / "quant_formats.kdtr", arrays, {"source": f"random matrices, packed and dequantised by {versions()}"}
    )
    targets = {"source": versions(), "cases": record_targets()}
    (FIXTURES / "quant_targets.json").write_text(json.dumps(targets, separators=(",", ":")) + "\n")
    for seed, (name, settings) in enumerate(MODELS.items()):
        record_quantised_model(name, settings, 30 + seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
