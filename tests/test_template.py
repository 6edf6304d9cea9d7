"""Chat templates with their context, filters and arguments, held against recorded texts of transformers."""

import json

import pytest

from ddtree.chat import load_chat
from ddtree.checkpoint import CheckpointError
from ddtree.template import Chat, read_argument, read_arguments, template_message
from random_models import FIXTURES

RECORD = json.loads((FIXTURES / "chat.json").read_text(encoding="utf-8"))
HI = [{"role": "user", "content": "Hi"}]
OFF = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
THINK = "{{ messages[0].content }}" + OFF


@pytest.mark.parametrize("case", RECORD["templates"], ids=range(len(RECORD["templates"])))
def test_a_template_gives_the_text_that_transformers_gives(case):
    assert Chat(case["template"], {}).render(RECORD["messages"], **case["given"]) == case["rendered"]


def test_the_callers_messages_stay_as_they_are():
    messages = [{"role": "assistant", "content": None, "thinking": "x"}]
    template_message(messages[0])
    Chat("{{ messages }}", {}).render(messages)
    assert messages == [{"role": "assistant", "content": None, "thinking": "x"}]


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("enable_thinking=False", False),
        ("enable_thinking=false", False),
        ("enable_thinking=True", True),
        ("x=None", None),
        ("x=null", None),
        ("x=3", 3),
        ("x=-2.5", -2.5),
        ("x=", ""),
        ("x=a=b", "a=b"),
        ("x=low effort", "low effort"),
        ('x="False"', "False"),
        ("x=NaN", "NaN"),
        ('x=["a", 1]', ["a", 1]),
        ('x={"a": null}', {"a": None}),
    ],
)
def test_a_value_is_json_or_a_word_of_python_or_a_text(text, value):
    found = read_argument(text)[1]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["", "x", "=3", "a b=3", "1x=3", "messages=[]", "x=[1", "x={'a': 1}", 'x="a', "x=" + "[" * 99999]
)
def test_what_is_no_argument_is_refused(text):
    with pytest.raises(ValueError, match=r"is no argument of a chat template|is no JSON"):
        read_argument(text)


def test_an_argument_that_is_given_twice_is_refused():
    assert read_arguments([]) == {} and read_arguments(["a=1", "b=2"]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="a is given twice"):
        read_arguments(["a=1", "b=2", "a=1"])


def test_arguments_reach_the_template_from_a_dict():
    chat = Chat(THINK, {})
    assert chat.render(HI) == chat.render(HI, enable_thinking=True) == "Hi"
    assert chat.render(HI, **{"enable_thinking": False}) == "Hi<think></think>"
    assert chat.render(HI, enable_thinking="False") == "Hi"  # a text is not false, which is why values are parsed


def test_an_argument_goes_before_a_special_token_of_its_name():
    assert Chat("{{ bos_token }}", {"bos_token": "<s>"}).render(HI, bos_token="<b>") == "<b>"


def test_the_names_that_a_template_looks_at_are_known():
    assert Chat(THINK, {}).names() == {"messages", "enable_thinking"}
    assert Chat("{% set x = 1 %}{{ x }}{{ strftime_now('%Y') }}{{ range(2) }}", {}).names() == set()
    assert Chat("a", {}, tool_use="{{ tools }}").names() == {"tools"}
    with pytest.raises(CheckpointError, match="the chat template says"):
        Chat("{% if %}", {}).names()


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0] | tojson(separators=3) }}",
        "{{ messages[0] | tojson(nothing=1) }}",
        "{{ {1: undefined_thing} | tojson }}",
        "{{ (messages[0].content | attr('x')) + 1 }}",
    ],
)
def test_a_template_that_fails_is_one_error(template):
    with pytest.raises(CheckpointError, match="the chat template"):
        Chat(template, {}).render(HI)


# ------------------------------------------------------------------ several templates


def folder_of(folder, templates=None, files=()):
    if templates is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates, "eos_token": "</s>"}))
    for name, text in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("templates", "files", "plain", "with_tools"),
    [
        ("c{{ eos_token }}", [], "c</s>", "c</s>"),
        ("c", [("chat_template.jinja", "j{{ eos_token }}")], "j</s>", "j</s>"),
        (None, [("chat_template.jinja", "j")], "j", "j"),
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}], [], "d", "t"),
        ({"default": "d", "tool_use": "t"}, [], "d", "t"),
        ("c", [("chat_template.jinja", "j"), ("additional_chat_templates/tool_use.jinja", "u")], "j", "u"),
        ([{"name": "tool_use", "template": "t"}], [("chat_template.jinja", "j")], "j", "j"),
    ],
)
def test_templates_are_read_from_where_they_count(tmp_path, templates, files, plain, with_tools):
    chat = load_chat(folder_of(tmp_path, templates, files))
    assert chat.render(HI) == plain
    assert chat.render(HI, tools=[{"name": "f"}]) == with_tools


@pytest.mark.parametrize(
    ("templates", "files"),
    [
        ([{"name": "rag", "template": "r"}, {"name": "tool_use", "template": "t"}], []),
        ({"rag": "r"}, []),
        ("c", [("additional_chat_templates/rag.jinja", "r")]),
    ],
)
def test_templates_of_which_none_is_the_default_are_refused_not_left_out(tmp_path, templates, files):
    with pytest.raises(CheckpointError, match=r"has chat templates rag.* and none is called default"):
        load_chat(folder_of(tmp_path, templates, files))
