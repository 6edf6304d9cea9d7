"""Names that users import stay where they are."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

NAMES = {
    "ddtree.bench": (
        "BYTES_PER_US COPY_SPEED LENGTH NOTE ROW_KINDS Report VOCABULARY bench_batch bench_builder "
        "bench_engine bench_request bench_row bench_tree count_pipeline describe draw_logits draw_rows spread "
        "stack_round time_builder time_pipeline time_stack time_torch_steps "
    ),
    "ddtree.build": ("build_trees choose_kernel place_at spread "),
    "ddtree.chat": (
        "Chat MODELS PRE_TOKENIZERS chat_environment find_model gguf_tokenizer load_chat load_tokenizer pre_tokenizer "
    ),
    "ddtree.check": ("assert_close assert_equal ulp_distance "),
    "ddtree.checkpoint": (
        "CheckpointError DENSE F32 FLOATS GGUF_FAMILIES Stored catalogue check_names check_quantization "
        "expected_form gguf_config gguf_name is_gguf load_config load_weights missing_names open_gguf "
        "plain_name read_tensors rope_divisors take take_size tensor_files unpermute "
    ),
    "ddtree.cli": (
        "DraftOption FileOption FolderOption JsonOption ModelOption PromptOption TargetOption TextStream app "
        "bench_app bench_engine_command bench_tree_command choose_budget compare_plain encode_prompt env "
        "generate kernels_app kernels_build kernels_check load_engine main model_folders notes peak_memory "
        "progress_bar read_prompt report run_round said_plainly say stop_at summary token_label tree "
        "tree_figures version "
    ),
    "ddtree.config": (
        "Experts FAMILIES Latent ModelConfig Shapes attention_shapes feed_forward_shapes layer_shapes "
        "make_routing model_shapes optional read_common read_config read_deepseek read_dense read_end_tokens "
        "read_kimi_k25 read_latent read_qwen3_moe read_rope read_shared_experts read_windows refuse rope_keys "
        "with_biases yarn_mscale DEFAULTS MOST_LAYERS NEUTRAL grouped_shapes latent_shapes read_mistral read_qwen2 "
        "read_window refuse_others rope_block with_defaults "
    ),
    "ddtree.cuda": (
        "Device DeviceFunction GpuArray GpuDevice GpuGraph Instruction Kernel Launch LaunchRule Launched "
        "Parameter PtxDevice PtxGraph View WideLoad cdiv check_arch check_formula cuda current_device "
        "device_function flatten flatten_names kernel link load_four max_or_nan parse_contract "
        "parse_parameter watch_launches "
    ),
    "ddtree.dflash": (
        "DraftConfig Drafter F32 block_mask default_layer_ids draft_layer draft_shapes read_draft_config "
    ),
    "ddtree.draft": ("draft_tree empty_draft "),
    "ddtree.draw": ("TreeView plot_acceptance plot_budgets plot_ranks tree_svg tree_text visible_text "),
    "ddtree.engine": ("Engine F32 I64 LARGEST_BUDGET Result Round Stop Text check_request decode root_only "),
    "ddtree.gguf": ("BLOCK_TYPES BlockType F32 Gguf GgufTensor U8 decode_blocks read_gguf "),
    "ddtree.kdtr": (
        "DTYPES KdtrError KdtrFile Tensor bf16_to_float32 float32_to_bf16 load pack_int4 parse save unpack_int4 "
    ),
    "ddtree.keys": ("CheckpointError LARGEST check_keys take take_size "),
    "ddtree.layers": (
        "F32 I64 KEY_BLOCK Llama3 Packed Rope TILE_BYTES Weight Yarn absorb_query ancestor_table apply_rope "
        "attention dense expand_rows gather_tail latent_values linear llama3_ramp project rms_norm "
        "rope_frequencies rope_tables silu sum_blocks swiglu tree_attention visible_slots yarn_ramp "
    ),
    "ddtree.layout": (""),
    "ddtree.llamacpp": ("GGUF_FAMILIES find_sources gguf_name read_metadata read_named rope_divisors unpermute "),
    "ddtree.models": (
        "F32 Forward I64 KVCache LATENT_EPS Layer Model feed_forward head_rows key_value_rows "
        "latent_attention latent_queries latent_rows layer_weights norm prefill target_layer "
    ),
    "ddtree.moe": ("F32 I64 Routing best choose_experts moe route router_scores run_experts "),
    "ddtree.numerics": (
        "Function LN2_HIGH LN2_LOW LOG2_E Operation SHIFTER add add64 add_exp bits_of bits_of64 div div64 exp "
        "exp2_near_zero exp_near_zero exp_parts exponent_of float_of float_of64 fma larger log log64 mul "
        "mul64 operation power_of_two rsqrt select sigmoid silu sqrt "
    ),
    "ddtree.ptx": (
        "BarrierRelease BarrierUnit BlockCode BlockCoder Counters Flow GlobalMemory InstructionCoder Launch "
        "MAX_STEPS Machine MemoryCoder OperandCoder PtxError PtxProgram Scheduler Shape Step SyncUnit Tally "
        "Value ValueCoder Waiting WarpExchange counters launch load_ptx pack_parameters reuse_names "
    ),
    "ddtree.quant": (
        "F32 FLOATS GROUP PARTS PLAIN PackedInt4 PackedInts Quantisation ScaledBytes Scheme foreign_tensors "
        "join_parts pack_weight read_quantisation unpack_levels "
    ),
    "ddtree.topk": (
        "TopK comes_before empty_top_k make_choose_kernel make_group_kernel merge_top_k merge_top_k_kernel "
        "rank_among redux_add redux_least redux_max redux_most top_k top_k_ref "
    ),
    "ddtree.tree": ("DraftTree build_tree follow_tree plan_compaction top_log_probs "),
}


@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_they_were(module: str) -> None:
    """A name leaves this list only on purpose."""
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_what_is_missing_is_installed_one_way_by_the_name_of_an_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    hints = []
    for path in sorted((ROOT / "ddtree").rglob("*.py")):
        text = re.sub(r"\s*\"\n\s*f?\"", " ", path.read_text("utf-8"))  # a message over two lines is one
        hints += re.findall(r"pip install.{0,60}", text)
    assert len(hints) >= 4
    for hint in hints:
        found = re.match(r"pip install 'ddtree\[(\w+)\]'", hint)
        assert found and found[1] in extras, hint


def test_no_help_text_speaks_of_its_own_code():
    """Why a function is long is a comment; a kernel's docstring is part of its hash and not what `help` shows."""
    for path in sorted((ROOT / "ddtree").rglob("*.py")):
        module = ast.parse(path.read_text("utf-8"))
        classes = [part for part in module.body if isinstance(part, ast.ClassDef)]
        for node in (part for owner in (module, *classes) for part in owner.body):
            if isinstance(node, ast.FunctionDef) and not any("kernel" in ast.unparse(d) for d in node.decorator_list):
                text = ast.get_docstring(node) or ""
                assert not re.search(r"\b[Ll]ong(er)?,? (for|because|than \d+ lines)", text), f"{path}: {node.name}"
