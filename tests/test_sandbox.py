"""Templates that run for ever or make too much are stopped; all others give what Jinja gives."""

import json
import time

import jinja2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ddtree.chat import Chat
from ddtree.checkpoint import CheckpointError
from ddtree.sandbox import MOST_CHARACTERS, Sandbox
from ddtree.template import LARGEST_TEMPLATE
from memory import numbers_from

STEPS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "calls that double": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a loop within a macro": "{% macro m() %}{% for i in range(9999) %}{% endfor %}{% endmacro %}"
    "{% for i in range(9999) %}{{ m() }}{% endfor %}",
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "filters in loops": "{% for i in range(9999) %}{% for j in range(9999) %}{{ j|int }}{% endfor %}{% endfor %}",
}
TEXT = {
    "a product": "{{ 'x' * 10 ** 10 }}",
    "a product from the left": "{{ 10 ** 10 * 'x' }}",
    "a list": "{{ [0] * 10 ** 10 }}",
    "a power": "{{ 10 ** 9999999999 }}",
    "a power of a large number": "{{ (10 ** 18) ** 9999 }}",
    "a remainder of powers": "{{ 3 ** 1600000 % 3 ** 800000 }}",
    "products of integers": "{% set n = namespace(a=3) %}{% for i in range(99) %}{% set n.a = n.a * n.a %}{% endfor %}",
    "integers from bytes": "{{ (1).from_bytes(('x' * 300000).encode(), 'big') // 7 }}",
    "sums that double": "{% set n = namespace(a='x') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "joins that double": "{% set n = namespace(a='x') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "blocks that double": "{% set n = namespace(a='x') %}{% for i in range(99) %}"
    "{% set b %}{{ n.a }}{{ n.a }}{% endset %}{% set n.a = b %}{% endfor %}",
    "lists that double": "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "lists of lists": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
    "{{ n.a }}",
    "a list of lists in a format": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% endfor %}{{ '{}'.format(n.a) }}",
    "a list of lists in a remainder": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% endfor %}{{ '%s' % n.a }}",
    "a list of lists in upper case": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% endfor %}{{ n.a|upper }}",
    "lists of lists as JSON": "{% set n = namespace(a=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% endfor %}{{ n.a|tojson }}",
    **{
        f"lists of lists {how}": "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
        "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}" + text
        for how, text in {
            "compared": "{{ n.a == n.b }}", "in a list": "{{ n.a in [n.b] }}", "sorted": "{{ [n.a, n.b]|sort }}",
            "unlike": "{{ 1 if n.a != n.b }}", "tested": "{{ n.a is eq n.b }}", "counted": "{{ [n.b].count(n.a) }}",
            "chosen": "{{ [n.b]|select('equalto', n.a)|list }}", "largest": "{{ [n.a, n.b]|max }}",
        }.items()
    },
    **{
        f"tuples of tuples {how}": "{% set n = namespace(a=(1,)) %}{% for i in range(60) %}{% set n.a = (n.a, n.a) %}"
        "{% endfor %}" + text
        for how, text in {"as a key": "{{ {n.a: 1} }}", "looked up": "{{ {}[n.a] }}", "got": "{{ {}.get(n.a) }}",
                          "unique": "{{ [n.a, n.a]|unique|list }}"}.items()
    },
    "a width": "{{ 'a'.center(10 ** 10) }}",
    "a filter's width": "{{ 'a'|center(10 ** 10) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a format's star": "{{ '%*d' % (9999999999, 1) }}",
    "a format filter": "{{ '%9999999999d'|format(1) }}",
    "a format method": "{{ '{:9999999999}'.format(1) }}",
    "a format's own width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "a replacement": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "a replacing filter": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "a join": "{{ (['a'] * 99999)|join('b' * 99999) }}",
    "a join method": "{{ ('b' * 99999).join(['a'] * 99999) }}",
    "an indent": "{{ ('\\n' * 99999)|indent(99999) }}",
    "an indent of JSON": "{{ ([0] * 99999)|tojson(indent=99999) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 10) }}",
    "words": "{{ lipsum(n=10 ** 9) }}",
    "text in loops": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "plain text in loops": "{% set b %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "a variable in loops": "{% set b = 'x' * 9999 %}{% for i in range(99999) %}{{ b }}{% endfor %}",
}  # fmt: skip
OTHER = {
    "endless macros": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
    "too deep": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "template"),
    "loops too deep": ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "nested blocks"),
    "too long": ("x" * (LARGEST_TEMPLATE + 1), f"at most {LARGEST_TEMPLATE}"),
    "an integer without end": ("{{ (1e999)|int }}", "the chat template says"),
    "brackets too deep": ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "template"),
}


def chat(source):
    return Chat(source, {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", STEPS)
def test_a_template_without_end_is_stopped_and_told_its_steps(name):
    with pytest.raises(CheckpointError, match=r"runs for more than (200000 steps|10 seconds)"):
        chat(STEPS[name])


@pytest.mark.parametrize("name", TEXT)
def test_a_template_that_makes_too_much_is_stopped_before_it_is_made(name):
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=f"more than {MOST_CHARACTERS} characters"):
        chat(TEXT[name])
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("name", OTHER)
def test_other_templates_that_cannot_run_are_one_error(name):
    source, message = OTHER[name]
    with pytest.raises(CheckpointError, match=message):
        chat(source)


def test_all_of_them_together_need_little_memory():
    code = """
import json
from ddtree.chat import Chat
from ddtree.checkpoint import CheckpointError
before = peak()
for source in json.loads(sys.argv[1]):
    try:
        Chat(source, {}).render([])
    except CheckpointError:
        pass
print(peak() - before)
"""
    (grown,) = numbers_from(code, json.dumps(list(TEXT.values())))
    assert grown < 1.5 * 2**30  # a character may take four bytes, a list's item eight


# ------------------------------------------------------------------ nothing else changes

ATOMS = st.sampled_from(["x", "m", "xs", "'ab'", "3", "-1", "0", "2.5", "none", "d", "d.k", "xs[0]", "nope", "9999"])
FILTERS = st.sampled_from(["|length", "|upper", "|join(', ')", "|list", "|first", "|tojson", "|replace('a', 'b')",
                           "|int", "|trim", "|default('z')", "|string", "|reverse|list", "|map('string')|join",
                           "|center(9)", "|sort", "|batch(2)|list", "|indent(2)", "|format(1)", "|sum"])  # fmt: skip
OPERATORS = st.sampled_from([" + ", " ~ ", " * ", " - ", " % ", " ** ", " == ", " in ", " and ", " // "])


def larger(inner):
    return st.one_of(
        st.builds("({}{}{})".format, inner, OPERATORS, inner),
        st.builds("({}){}".format, inner, FILTERS),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("range({})".format, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("'{{}}-%s'.format({})".format, inner),
        st.builds("f({})".format, inner),
    )


EXPRESSIONS = st.recursive(ATOMS, larger, max_leaves=6)


def bodies(inner):
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% for i in {} %}}{{{{ loop.index }}}}{}{{% else %}}e{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for k, v in d.items() %}}{{{{ loop.last }}}}{}{{% endfor %}}".format, inner),
        st.builds("{{% for i in {} if i %}}{{{{ loop.length }}}}{{% break %}}{{% endfor %}}".format, EXPRESSIONS),
        st.builds("{{% set x = {} %}}{}".format, EXPRESSIONS, inner),
        st.builds("{{% set x %}}{}{{% endset %}}{{{{ x }}}}".format, inner),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, inner),
        st.builds("{{% macro f(a) %}}{}{{{{ a }}}}{{% endmacro %}}{{{{ f({}) }}}}".format, inner, EXPRESSIONS),
        st.builds("{{% filter upper %}}{}{{% endfilter %}}".format, inner),
    )


TEMPLATES = st.recursive(st.builds("{{{{ {} }}}} t".format, EXPRESSIONS), bodies, max_leaves=5)
CONTEXT = {"x": 5, "m": {"content": "a b\nc"}, "xs": ["a", "b", "c"], "d": {"k": "ka", "l": [1, 2]}, "f": str}


def rendered(environment, source):
    try:
        return environment.from_string(source).render(CONTEXT)
    except jinja2.TemplateError as error:
        return type(error), str(error)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, SyntaxError) as error:
        return (type(error),)


@settings(max_examples=150)
@given(source=TEMPLATES)
@example(source="{{ 9999 ** 9999 }}")
@example(source="{% for i in xs recursive %}{{ i }}{{ loop(xs) if loop.depth < 3 }}{% endfor %}")
def test_a_template_within_the_limits_gives_what_jinja_gives(source):
    limited = Sandbox(most_steps=100_000, seconds=5, extensions=[loopcontrols])
    limited.limit_filters()
    ours = rendered(limited, source)
    if isinstance(ours, tuple) and issubclass(ours[0], jinja2.TemplateRuntimeError) and "it " in ours[-1]:
        return  # stopped, within the time and the memory of a test
    assert ours == rendered(ImmutableSandboxedEnvironment(extensions=[loopcontrols]), source)
