import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from typer.testing import CliRunner

from ddtree.cli import app, run_round
from ddtree.engine import Engine
from ddtree.kdtr import load
from gguf_writer import llama_as_gguf
from random_models import FIXTURES, PAIR, random_engine

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
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x"], "give either --model"),
        (["generate", "--model", "nowhere", "--prompt", "x"], "has no config.json"),
        (["generate", "--model", str(PAIR), "--draft", "x", "--prompt", "x"], "--draft goes with --target"),
        (["generate", "--model", "nowhere.gguf", "--prompt", "x"], "nowhere.gguf does not exist"),
        (["generate", "--model", str(PAIR)], "give the prompt with --prompt TEXT or --prompt-file FILE"),
        (["generate", "--model", str(PAIR), "--prompt", ""], "the prompt has no tokens"),
        (["generate", "--model", str(PAIR), "--prompt", "x", "--stop", ""], "--stop needs a text"),
        (["generate", "--model", str(PAIR), "--prompt", "x", "--top-p", "2"], "top_p is 2.0"),
        (["generate", "--model", str(PAIR), "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["generate", "--target", str(PAIR / "target"), "--prompt", "x", "--budget", "4"], "no drafter was loaded"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    error = " ".join(run(*arguments, code=2).stderr.split())
    assert error.startswith("ddtree: ") and message in error


@pytest.mark.parametrize("arguments", [["--budget", "-1"], ["--max-new-tokens", "0"], ["--budget", "x"], ["--unknown"]])
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
