import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from typer.testing import CliRunner

from ddtree import checkpoint, cli
from ddtree.chat import load_tokenizer
from ddtree.cli import app, encode_prompt, missing_parts, run_round
from ddtree.engine import Engine
from ddtree.kdtr import load
from gguf_writer import llama_as_gguf
from random_models import FIXTURES, PAIR, random_engine
from tools import cli_mistakes

SMOLLM2 = FIXTURES.parent / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GENERATE = ["generate", "--model", str(PAIR), "--prompt-file", str(FIXTURES / "prompts" / "load_config.txt")]


def run(*arguments, code=0, stdin=None):
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    assert result.exit_code == code, result.output
    return result


def recorded_text():
    return bytes(load(FIXTURES / "e2e_qwen3.kdtr")["p0.ar_tokens"].astype("uint8")).decode()


def test_generate_streams_the_recorded_text_and_reports_beside_it():
    result = run(*GENERATE, "--compare", "--budget", "64")
    assert result.stdout.rstrip("\n") == recorded_text().rstrip("\n")
    for part in (
        "96 tokens: prefill and 20 rounds",
        "4.75 tokens a round (plain decoding: 1), mean acceptance length 4.80",
        "plain decoding: 95 rounds",
        "equal, token for token",
    ):
        assert part in result.stderr


def test_generate_json_is_one_object_with_the_figures():
    figures = json.loads(run(*GENERATE, "--compare", "--json", "--budget", "15").stdout)
    assert figures["text"] == recorded_text()
    assert (figures["tokens"], figures["rounds"], figures["plain"]["equal"]) == (96, 23, True)
    assert sum(figures["acceptance_lengths"]) == 96 and len(figures["token_ids"]) == 96


def test_prompt_comes_from_standard_input_too():
    prompt = (FIXTURES / "prompts" / "load_config.txt").read_text()
    result = run("generate", "--model", str(PAIR), "--prompt-file", "-", "--max-new-tokens", "12", stdin=prompt)
    assert result.stdout.rstrip("\n") == recorded_text()[:12].rstrip("\n")


def test_stop_text_ends_the_output():
    result = run(*GENERATE, "--stop", "return", "--json")
    assert json.loads(result.stdout)["text"] == recorded_text().partition("return")[0] + "return"


def test_target_alone_decodes_plainly():
    result = run(
        "generate", "--target", str(PAIR / "target"), "--prompt", "import ", "--budget", "0", "--max-new-tokens", "5"
    )
    assert len(result.stdout.rstrip("\n")) == 5


def test_without_a_drafter_it_decodes_plainly_and_says_so():
    arguments = ["generate", "--target", str(PAIR / "target"), "--prompt", "import ", "--max-new-tokens", "5"]
    result = run(*arguments)
    assert len(result.stdout.rstrip("\n")) == 5
    assert "no DFlash drafter is given (--draft), so this is plain decoding" in result.stderr


@pytest.fixture
def asked(tmp_path):
    """A random Llama as a GGUF file whose chat template puts a prompt into angle brackets."""
    facts = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(ByteLevel.alphabet())[:199],
        "tokenizer.ggml.token_type": [1] * 199,
        "tokenizer.ggml.merges": [],
        "tokenizer.chat_template": "{% for m in messages %}<{{ m.role }}:{{ m.content }}>{% endfor %}",
    }
    llama_as_gguf(FIXTURES / "models" / "llama_nano", tmp_path / "x.gguf", facts)
    return str(tmp_path / "x.gguf")


@pytest.mark.parametrize("option", ["--model", "--target"])
def test_a_gguf_file_is_a_model_and_its_template_frames_the_prompt(asked, option):
    def tokens(*arguments):
        return json.loads(run("generate", option, asked, "--max-new-tokens", "3", "--json", *arguments).stdout)

    asking, raw, framed = (
        tokens("--prompt", "hi"),
        tokens("--prompt", "hi", "--raw"),
        tokens("--prompt", "<user:hi>", "--raw"),
    )
    assert (asking["prompt_tokens"], raw["prompt_tokens"]) == (9, 2)
    assert asking["token_ids"] == framed["token_ids"] != raw["token_ids"]


ENDS = ("<|eot_id|>", "<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("end", ENDS)
def test_a_text_ends_at_a_token_that_is_called_an_end_in_a_gguf_file(tmp_path, end):
    # a token that plain decoding gives is called an end, while the key names another one
    def generate(ending=None):
        tokens = sorted(ByteLevel.alphabet())[:199]
        if ending is not None:
            tokens[ending] = end
        facts = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if token in ENDS else 1 for token in tokens],
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.eos_token_id": 198,
        }
        llama_as_gguf(FIXTURES / "models" / "llama_nano", tmp_path / "x.gguf", facts)
        options = ["--prompt", "hi", "--max-new-tokens", "6", "--temperature", "9", "--seed", "1", "--json"]
        return json.loads(run("generate", "--model", str(tmp_path / "x.gguf"), *options).stdout)

    endless = generate()["token_ids"]
    third = next(i for i, token in enumerate(endless) if token not in endless[:i] and i >= 2)
    ended = generate(endless[third])
    assert ended["token_ids"] == endless[: third + 1] and ended["stopped"]


def test_bench_measures_a_model_without_a_drafter(asked, tmp_path):
    (tmp_path / "prompt.txt").write_text("hi")
    arguments = ["--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "4", "--repeats", "2"]
    result = run("bench", "engine", "--model", asked, *arguments, "-o", str(tmp_path / "out.json"))
    assert result.stdout.startswith("plain ") and len(result.stdout.splitlines()) == 1
    record = json.loads((tmp_path / "out.json").read_text())
    assert [row["budget"] for row in record["rows"]] == [0]
    assert 0 < record["resident"]["after_loading_mib"] <= record["resident"]["peak_mib"]


@pytest.mark.skipif(not SMOLLM2.exists(), reason="SmolLM2 is not here: `make model` was not run or could not fetch it")
def test_smollm2_answers_by_its_name():
    recorded = load(FIXTURES / "smollm2.kdtr")
    prompt, ids = recorded.metadata["prompts"][5], recorded["p5.tokens"].tolist()
    figures = json.loads(run("generate", "--model", "smollm2", "--prompt", prompt, "--json").stdout)
    assert figures["token_ids"] == ids[: ids.index(2) + 1] and figures["stopped"]
    assert figures["text"] == "The house is old, but the garden is beautiful."


def test_seed_decides_sampled_text():
    def text(seed):
        return json.loads(run(*GENERATE, "--temperature", "1", "--seed", seed, "--json", "--compare").stdout)

    assert text("1")["text"] == text("1")["text"] != text("2")["text"]
    assert text("1")["plain"]["equal"]


@pytest.mark.parametrize(
    ("status", "arguments", "message"),
    [
        (2, ["generate", "--prompt", "x"], "give either --model"),
        (1, ["generate", "--model", "nowhere", "--prompt", "x"], "a model is a folder with config.json"),
        (2, ["generate", "--model", str(PAIR), "--draft", "x", "--prompt", "x"], "--draft goes with --target"),
        (1, ["generate", "--model", "nowhere.gguf", "--prompt", "x"], "nowhere.gguf does not exist"),
        (2, ["generate", "--model", str(PAIR)], "give the prompt with --prompt TEXT or --prompt-file FILE"),
        (1, ["generate", "--model", str(PAIR), "--prompt", ""], "the prompt has no tokens"),
        (2, ["generate", "--model", str(PAIR), "--prompt", "x", "--stop", ""], "--stop needs a text"),
        (2, ["generate", "--model", str(PAIR), "--prompt", "x", "--top-p", "-1"], "top_p is -1.0"),
        (1, ["generate", "--model", str(PAIR), "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (1, ["generate", "--target", str(PAIR / "target"), "--prompt", "x", "--budget", "4"], "no drafter was loaded"),
        (2, ["generate", "--model", str(PAIR), "--prompt", "x", "--device", "cuda"], "runs on 'cpu'"),
        (2, ["tree", "--model", str(PAIR), "--prompt", "x", "--json", "-o", "x.svg"], "not both"),
    ],
)
def test_bad_input_is_one_line_with_its_exit_status(status, arguments, message):
    error = " ".join(run(*arguments, code=status).stderr.split())
    assert error.startswith("ddtree: ") and message in error


def test_the_likely_mistakes_end_as_recorded():
    text = cli_mistakes.transcript()
    typers = [re.search(r"Typer \d[\w.]*", one)[0] for one in (text, cli_mistakes.RECORD.read_text("utf-8"))]
    same = typers[0] == typers[1]  # its own lines are Typer's; ours are compared in any case
    mine, recorded = (one if same else re.sub(r"Usage: .*\n|Typer .*\n|Try .*\n\n|Error: .*\n", "", one)
                      for one in (text, cli_mistakes.RECORD.read_text("utf-8")))  # fmt: skip
    assert mine == recorded
    statuses = re.findall(r"\[exit (\d+)\]\n(ddtree: .+|Usage: .+)", text)
    assert len(statuses) == len(cli_mistakes.COMMANDS.splitlines()) >= 16 and {status for status, _ in statuses} == {
        "1",
        "2",
    }
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "arguments", [["--budget", "-1"], ["--max-new-tokens", "0"], ["--budget", "x"], ["--unknown"], ["--top-p", "2"]]
)
def test_numbers_out_of_range_are_refused(arguments):
    run(*GENERATE, *arguments, code=2)


def test_tree_draws_in_the_terminal_and_as_svg_and_json(tmp_path):
    arguments = [
        "tree",
        "--model",
        str(PAIR),
        "--prompt-file",
        str(FIXTURES / "prompts" / "load_config.txt"),
        "--budget",
        "12",
    ]
    assert len(run(*arguments).stdout.strip().splitlines()) >= 13
    run(*arguments, "--output", str(tmp_path / "tree.svg"))
    assert (tmp_path / "tree.svg").read_text().startswith("<svg")
    figures = json.loads(run(*arguments, "--json", "--round", "3").stdout)
    assert len(figures["tokens"]) == 13 and figures["parents"][0] == -1 and figures["accepted"][0] == 0


def test_a_round_after_the_end_of_the_text_is_refused():
    engine = random_engine(0)
    assert len(run_round(engine, [1, 2], 4, 3).accepted) >= 1
    with pytest.raises(ValueError, match=r"the text ended after \d+ rounds; --round 600 does not exist"):
        run_round(engine, [1, 2], 4, 600)


def test_a_prompt_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "prompt").write_bytes(b"d\xff")
    for arguments, stdin in ((["--prompt-file", str(tmp_path / "prompt")], None), (["--prompt-file", "-"], b"d\xff")):
        error = run("generate", "--model", str(PAIR), *arguments, code=2, stdin=stdin).stderr
        assert "is not UTF-8 text" in error and "Traceback" not in error


def test_a_path_with_brackets_is_written_and_named_as_it_is(tmp_path):
    folder = tmp_path / "q["
    folder.mkdir()
    arguments = ["tree", "--model", str(PAIR), "--prompt", "import ", "--budget", "3", "-o", str(folder / "b].svg")]
    assert f"wrote {folder / 'b].svg'}: 4 nodes" in run(*arguments).stderr
    run(*arguments, "--json", code=2)


def test_a_reader_that_goes_away_is_no_error_message():
    command = f"{sys.executable} -c 'from ddtree.cli import main; main()' {' '.join(GENERATE)} --max-new-tokens 400"
    result = subprocess.run(["bash", "-c", f"{command} | head -c 3"], capture_output=True, text=True, timeout=600)
    assert len(result.stdout) == 3 and "Traceback" not in result.stderr and "Broken" not in result.stderr


def shell(command, **environment):
    """Run a line of bash in which `ddtree` is this program."""
    program = f"ddtree() {{ {shlex.quote(sys.executable)} -c 'from ddtree.cli import main; main()' \"$@\"; }}; "
    environment = {**os.environ, "PYTHONPATH": str(FIXTURES.parent), **environment}
    return subprocess.run(["bash", "-c", program + command], capture_output=True, timeout=600, env=environment)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_an_output_that_is_full_is_one_line():
    result = shell(f"ddtree {shlex.join(GENERATE)} --max-new-tokens 4 > /dev/full")
    assert result.returncode == 1 and result.stderr == b"ddtree: standard output: No space left on device\n"


def test_closed_outputs_stop_nothing(tmp_path):
    short = f"ddtree {shlex.join(GENERATE)} --max-new-tokens 4"
    for closed in (">&-", "2>&-", ">&- 2>&-", "<&-"):
        result = shell(f"{short} {closed}")
        assert result.returncode == 0 and b"Traceback" not in result.stderr
    assert shell(f"ddtree tree --model {PAIR} --prompt 'import ' -o {tmp_path}/x.svg >&- 2>&-").returncode == 0
    assert (tmp_path / "x.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252", "utf-8"])
def test_a_terminal_without_the_letters_of_a_tree_gets_plain_ones(encoding):
    command = f"ddtree tree --model {PAIR} --prompt 'for name in sorted(' --budget 6"
    result = shell(command, PYTHONIOENCODING=encoding)
    lines = result.stdout.decode(encoding).splitlines()
    assert result.returncode == 0 and len(lines) >= 7
    assert lines[0][0] == ("●" if encoding == "utf-8" else "@")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_text_with_letters_that_a_terminal_lacks_is_written(encoding):
    script = "from ddtree.cli import prepare_outputs; prepare_outputs(); print('é漢')"
    result = shell(f'{shlex.quote(sys.executable)} -c "{script}"', PYTHONIOENCODING=encoding)
    assert result.stdout.decode(encoding) == ("é?\n" if encoding == "latin-1" else "??\n")


def test_a_prompt_from_a_source_without_end_is_refused():
    error = run("generate", "--model", str(PAIR), "--prompt-file", "/dev/zero", code=2).stderr
    assert "has more than 16777216 bytes" in error


def test_a_prompt_may_come_from_a_pipe(tmp_path):
    result = shell(f"ddtree generate --model {PAIR} --prompt-file <(echo -n 'import ') --max-new-tokens 3")
    assert result.returncode == 0 and len(result.stdout.rstrip(b"\n")) == 3


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja", "x.gguf"]
)
def test_a_pipe_in_a_models_place_is_not_waited_for(pair, name):
    place = pair / "target" / name
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    folder = place if name == "x.gguf" else pair / "target"
    result = run("generate", "--target", str(folder), "--prompt", "import ", "--max-new-tokens", "2", code=1)
    assert str(folder) in result.stderr


def test_a_difference_is_said_and_exits_with_1(monkeypatch):
    plain = Engine.generate_autoregressive

    def differing(self, *arguments):
        result = plain(self, *arguments)
        return dataclasses.replace(result, tokens=result.tokens + 1)

    monkeypatch.setattr(Engine, "generate_autoregressive", differing)
    short = (*GENERATE, "--compare", "--max-new-tokens", "4")
    assert "DIFFERENT" in run(*short, code=1).stderr
    assert json.loads(run(*short, "--json", code=1).stdout)["plain"]["equal"] is False


def test_each_of_two_stop_texts_ends_the_output():
    whole = json.loads(run(*GENERATE, "--json").stdout)["text"]
    text = json.loads(run(*GENERATE, "--json", "--stop", "no such text", "--stop", "return").stdout)["text"]
    assert text == whole.partition("return")[0] + "return"


def test_version():
    assert run("--version").stdout.startswith("ddtree ")


def test_env_names_versions_and_what_works():
    assert "numpy" in run("env").stdout
    facts = json.loads(run("env", "--json").stdout)
    assert facts["works"]["numpy engine"] is True and facts["packages"]["numpy"]


def test_env_says_why_something_does_not_work(monkeypatch):
    monkeypatch.setattr(cli, "gpu_problems", lambda: ["the driver is missing", "the wheels are missing"])
    lines = run("env").stdout.splitlines()
    at = lines.index("kernels on a GPU not here:")
    assert lines[at + 1 : at + 3] == ["  - the driver is missing", "  - the wheels are missing"]
    facts = json.loads(run("env", "--json").stdout)
    assert facts["works"]["kernels on a GPU"] is False and len(facts["missing"]["kernels on a GPU"]) == 2
    assert missing_parts({})["kernel compiler"][0].startswith("numba, numba-cuda, cuda-core not installed; ")
    monkeypatch.setattr(cli, "gpu_problems", lambda: [])
    assert missing_parts(dict.fromkeys(("numba", "numba-cuda", "cuda-core"), "1")) == {
        "kernels on a GPU": [], "kernel compiler": []
    }  # fmt: skip


def test_kernels_check_outside_a_checkout_names_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, folder in ((("--folder", "mine"), "mine"), ((), tmp_path / "kernels")):
        result = CliRunner().invoke(app, ["kernels", "check", *arguments])
        assert result.exit_code == 1 and f"ddtree: {folder} has no manifest.json; " in result.output.replace("\n", "")


def test_help_without_a_command_lists_the_commands():
    text = CliRunner().invoke(app, []).output
    assert all(name in text for name in ("generate", "tree", "env"))


def test_interrupt_leaves_a_clean_line():
    command = [sys.executable, "-c", "from ddtree.cli import main; main()", *GENERATE, "--max-new-tokens", "1900"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job inherits it as ignored
    )
    try:
        assert process.stdout.read(20)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out.endswith(b"\n") and err.strip().endswith(b"interrupted") and b"Traceback" not in err


# ------------------------------------------------------------------ all that can be said before a weight is read


@pytest.fixture
def pair(tmp_path):
    """A copy of the trained pair, to be damaged."""
    return shutil.copytree(PAIR, tmp_path / "pair")


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without_tokenizer(pair):
    (pair / "target" / "tokenizer.json").unlink()
    (pair / "target" / "tekken.json").write_text("{}")


def with_a_damaged(name):
    def change(pair):
        (pair / "target" / "tokenizer.json").unlink()
        (pair / "target" / name).write_text("AA== 0\nAA== 1\n")

    return change


def without_a_tensor_of_the_drafter(pair):
    tensors = load_file(pair / "draft" / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if "fc" not in name}, pair / "draft" / "model.safetensors"
    )


DAMAGES = {
    "tokenizer": (without_tokenizer, "(it has tekken.json, which is not read)"),
    "tiktoken.model": (with_a_damaged("tiktoken.model"), "line 2: its token stands in line 1 too"),
    "tokenizer.model": (with_a_damaged("tokenizer.model"), "holds ranks of tiktoken"),
    "target config": (lambda pair: edit(pair / "target" / "config.json", hidden_act="gelu"), "hidden_act = 'gelu'"),
    "drafter config": (lambda pair: edit(pair / "draft" / "config.json", block_size=1), "block_size is 1"),
    "another pair": (lambda pair: edit(pair / "draft" / "config.json", vocab_size=300), "the drafter is made for"),
    "drafter tensors": (without_a_tensor_of_the_drafter, "missing fc.weight"),
    "drafter shapes": (lambda pair: edit(pair / "draft" / "config.json", head_dim=32), "has shape"),
    "drafter file": (lambda pair: (pair / "draft" / "model.safetensors").unlink(), "has no model.safetensors"),
    "template": (lambda pair: (pair / "target" / "chat_template.jinja").write_text("{% if %}"), "template says"),
}


@pytest.mark.parametrize("command", ["generate", "tree", "bench engine"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_is_said_before_a_weight_is_read(pair, monkeypatch, damage, command):
    monkeypatch.setattr(checkpoint, "read_tensors", lambda stored: pytest.fail("a weight was read"))
    change, message = DAMAGES[damage]
    change(pair)
    prompt = str(FIXTURES / "prompts" / "load_config.txt")
    result = run(*command.split(), "--model", str(pair), "--prompt-file", prompt, code=1)
    error = " ".join(result.stderr.split())
    assert error.startswith("ddtree: ") and message in error
    assert damage == "template" or str(pair) in error


@pytest.mark.parametrize(
    ("status", "arguments", "message"),
    [
        (1, ["--prompt", "x" * 3000], "exceed the model's 2048 positions"),
        (1, ["--prompt", "x", "--max-new-tokens", "2048"], "1 prompt tokens + 2048 new ones exceed"),
        (1, ["--prompt", ""], "the prompt has no tokens"),
        (2, ["--prompt", "x", "--stop", ""], "--stop needs a text"),
        (2, ["--prompt", "x", "--template-arg", "thinking"], "is no argument of a chat template"),
        (1, ["--prompt", "x", "--template-arg", "a=1"], "--template-arg a would change nothing"),
        (1, ["--prompt", "x", "--raw", "--template-arg", "a=1"], "--raw leaves the chat template out"),
    ],
)
def test_a_request_that_cannot_work_is_refused_before_a_weight_is_read(monkeypatch, status, arguments, message):
    monkeypatch.setattr(checkpoint, "read_tensors", lambda stored: pytest.fail("a weight was read"))
    error = " ".join(run("generate", "--model", str(PAIR), *arguments, code=status).stderr.split())
    assert error.startswith("ddtree: ") and message in error


def test_a_budget_that_is_too_large_is_told_the_largest():
    assert "16384" in run("generate", "--model", str(PAIR), "--prompt", "x", "--budget", "99999", code=2).stderr


@pytest.mark.parametrize("arguments", [[], ["--max-new-tokens", "9999"], ["--raw"]])
def test_a_wrong_folder_is_named_before_anything_is_said_about_decoding(arguments):
    error = run("generate", "--target", "nowhere", "--prompt", "x", *arguments, code=1).stderr
    assert error.startswith("ddtree: nowhere does not exist; a model is a folder") and "plain decoding" not in error


@pytest.mark.parametrize("option", ["--model", "--target"])
def test_a_folder_of_one_model_is_a_target_alone(option):
    short = [option, str(PAIR / "target"), "--prompt", "import ", "--max-new-tokens", "5"]
    assert len(run("generate", *short).stdout.rstrip("\n")) == 5


# ------------------------------------------------------------------ templates, stop texts and tokenizers

TEMPLATE = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}#{% endif %}"


@pytest.fixture
def thinking(pair):
    (pair / "target" / "chat_template.jinja").write_text(TEMPLATE)
    return pair


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ([], 2),
        (["--template-arg", "enable_thinking=False"], 3),
        (["--template-arg", "enable_thinking=false"], 3),
        (["--template-arg", "enable_thinking=true"], 2),
        (["--template-arg", "enable_thinking=0"], 3),
    ],
)
def test_an_argument_of_the_template_changes_the_prompt(thinking, arguments, tokens):
    short = ["generate", "--model", str(thinking), "--prompt", "hi", "--max-new-tokens", "2", "--json"]
    assert json.loads(run(*short, *arguments).stdout)["prompt_tokens"] == tokens


def test_an_argument_that_the_template_does_not_look_at_is_said(thinking):
    short = ["generate", "--model", str(thinking), "--prompt", "hi", "--max-new-tokens", "2", "--json"]
    error = " ".join(run(*short, "--template-arg", "enable_thinkng=false").stderr.split())
    assert "the chat template does not look at enable_thinkng; it knows" in error and "enable_thinking" in error


def test_arguments_of_the_template_are_a_dict_in_python(thinking):
    target = thinking / "target"
    tokenizer = load_tokenizer(target)
    assert encode_prompt(target, tokenizer, "hi") == list(b"hi")
    assert encode_prompt(target, tokenizer, "hi", arguments={"enable_thinking": False}) == list(b"hi#")


def nano_with(folder, tokenizer):
    """A random model of 199 tokens with a tokenizer."""
    shutil.copytree(FIXTURES / "models" / "llama_nano", folder)
    edit(folder / "config.json", eos_token_id=None)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def word_tokens(special):
    """199 tokens, each a word, and those in `special` are special tokens."""
    names = [special.get(i, f"w{i}") for i in range(199)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(special.values()))
    return tokenizer


@pytest.mark.parametrize("text", ["<|im_end|>", "<|eot_id|>", "</s>"])
def test_the_text_of_a_special_token_stops(tmp_path, text):
    plain = ["--prompt", "w5 w6", "--max-new-tokens", "12", "--json", "--temperature", "9"]
    ids = json.loads(run("generate", "--target", nano_with(tmp_path / "a", word_tokens({})), *plain).stdout)[
        "token_ids"
    ]
    at = next(i for i in range(3, 12) if ids[i] not in ids[:i])
    marked = nano_with(tmp_path / "b", word_tokens({ids[at]: text}))
    whole = json.loads(run("generate", "--target", marked, *plain).stdout)
    assert whole["token_ids"] == ids and text not in whole["text"] and not whole["stopped"]
    result = json.loads(run("generate", "--target", marked, *plain, "--stop", text).stdout)
    assert result["token_ids"] == ids[: at + 1] and result["stopped"]


def piece_tokens():
    """199 tokens: seven pieces, and single bytes from 0x40 on, so that most texts are no UTF-8."""
    names = ["<unk>", "▁", "a", "b", "ab", "é", "\n", *(f"<0x{byte:02X}>" for byte in range(64, 256))]
    words = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_bytes_that_are_no_text_are_streamed_as_replacement_characters(tmp_path, seed):
    folder = nano_with(tmp_path / "m", piece_tokens())
    arguments = ["--target", folder, "--prompt", "ab", "--temperature", "9", "--seed", seed, "--max-new-tokens", "64"]
    text = json.loads(run("generate", *arguments, "--json").stdout)["text"]
    assert "�" in text
    assert run("generate", *arguments).stdout == (text if text.endswith("\n") else text + "\n")


def nano_of_896(folder, name):
    """A random model of 896 tokens with one of the small tokenizers of other formats, and a template."""
    shutil.copytree(FIXTURES / "models" / "llama_nano", folder)
    shutil.copytree(FIXTURES / "tokenizers" / name, folder, dirs_exist_ok=True)
    edit(folder / "config.json", eos_token_id=None, vocab_size=896)
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(0)
    for key in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        tensors[key] = rng.normal(0, 1, (896, tensors[key].shape[1])).astype(tensors[key].dtype)
    save_file(tensors, folder / "model.safetensors")
    begin = "<|im_user|>user<|im_middle|>" if name == "kimi" else "{{ bos_token }}[INST] "
    (folder / "chat_template.jinja").write_text(begin + "{{ messages[0].content }}")
    return str(folder)


@pytest.mark.parametrize(("name", "first"), [("kimi", [643, 117, 115]), ("llama", [1, 4])])
def test_generate_streams_and_stops_with_tokenizers_of_other_formats(tmp_path, name, first):
    folder = nano_of_896(tmp_path / "m", name)
    assert encode_prompt(Path(folder), load_tokenizer(folder), "中 a🙂")[: len(first)] == first
    arguments = [
        "--target",
        folder,
        "--prompt",
        "中 a🙂",
        "--temperature",
        "9",
        "--seed",
        "3",
        "--max-new-tokens",
        "40",
    ]
    result = json.loads(run("generate", *arguments, "--json").stdout)
    ids, text, tokenizer = result["token_ids"], result["text"], load_tokenizer(folder)
    assert text == tokenizer.decode(ids) and "�" in text
    assert run("generate", *arguments).stdout == (text if text.endswith("\n") else text + "\n")
    at, stop = next((i, special) for i in range(5, 40) if (special := tokenizer.decode([ids[i]])) and len(special) > 2)
    stopped = json.loads(run("generate", *arguments, "--stop", stop.strip(), "--json").stdout)
    assert (
        stopped["stopped"]
        and stopped["token_ids"] == ids[: len(stopped["token_ids"])]
        and stop.strip() in stopped["text"]
    )
    assert len(stopped["token_ids"]) <= at + 1


def no_unknown():
    """A tokenizer that raises a bare Exception for a word it does not know."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(199)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


@pytest.mark.parametrize("command", ["generate", "tree", "bench engine"])
def test_what_the_tokenizer_cannot_do_is_one_line(tmp_path, command):
    (tmp_path / "prompt.txt").write_text("hello")
    folder = nano_with(tmp_path / "m", no_unknown())
    result = run(*command.split(), "--target", folder, "--prompt-file", str(tmp_path / "prompt.txt"), code=1)
    assert result.stderr.startswith("ddtree: the tokenizer says: ") and len(result.stderr.strip().splitlines()) == 1


def test_too_little_memory_is_one_line(monkeypatch):
    def all_used(*arguments):
        raise MemoryError("Unable to allocate 8 TiB")

    monkeypatch.setattr(checkpoint, "read_tensors", all_used)
    result = run("generate", "--model", str(PAIR), "--prompt", "x", code=1)
    assert result.stderr.strip() == "ddtree: not enough memory for this: Unable to allocate 8 TiB"
