from __future__ import annotations

import time

import pytest

from router.tokens.answers import Refused, Why
from router.tokens.question import ChatPrompt
from router.tokens.template import BadTemplate, ChatTemplate, OutOfBounds

PROMPT = ChatPrompt([{"role": "user", "content": "<b> & 'é'"}], None)


def render(source, prompt=PROMPT, **options):
    return ChatTemplate(source, {"bos_token": "<s>"}, **options).render(prompt)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s><b> & 'é'"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks and lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b> & \'é\'"}'),
        (
            "{{ {'b': 1, 'a': [1.50, none, true]} | tojson(indent=1) }}",
            '{\n "b": 1,\n "a": [\n  1.5,\n  null,\n  true\n ]\n}',
        ),
        ("{% generation %}x{% endgeneration %}{{ tools is none }}{{ documents is none }}", "xTrueTrue"),
        ("{{ 'a' ~ 1 ~ none ~ undefined_one }}{{ 'ab' * 2 }}{{ '%03d' % 7 }}{{ 2 ** 5 }}", "a1Noneabab00732"),
        ("{{ [1] + [2] }}{{ ['a', 'b'] | join }}{{ 'a-b' | replace('-', '+') }}{{ 'x' | indent }}", "[1, 2]aba+bx"),
        ("{{ '{}:{:>3}'.format('a', 5) }}{{ 'a,b'.split(',') }}{{ 'aXa'.replace('X', 'y') }}", "a:  5['a', 'b']aya"),
        ("{% set ns = namespace(n=0) %}{% for m in [1] * 3 %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro m(a, b='c') %}{{ a }}{{ b }}{% endmacro %}{{ m('x') }}{{ m(b='y', a=1) }}", "xc1y"),
        ("{{ messages | map(attribute='role') | list }}", "['user']"),
        ("{{ strftime_now('%Y-%m') }}", "2024-02"),
        ("{{ 'a\nb' | indent(2) }}{{ 'x' | upper }}{{ ' x ' | trim }}{{ [3, 1] | sort | first }}", "a\n  bXx1"),
    ],
)  # fmt: skip
def test_what_transformers_renders(source, text):
    today = time.struct_time((2024, 2, 3, 0, 0, 0, 5, 34, 0))
    assert render(source, today=lambda: today) == text


def test_add_generation_prompt_and_arguments_reach_the_template():
    source = "{{ add_generation_prompt }}{{ enable_thinking }}{{ bos_token }}"
    prompt = ChatPrompt(PROMPT.messages, None, {"enable_thinking": False, "bos_token": "mine"})
    assert render(source, prompt) == "TrueFalsemine"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}[{{ m.content }}]\n{% endfor %}", "[Hi]\n[Well, the "),
        ("{% for m in messages %}[{{ m.content | trim }}]\n{% endfor %}", "[Hi]\n[Well, the"),
        ("{% for m in messages %}{% for c in m.content %}[{{ c.text }}]{% endfor %}{% endfor %}", "[Hi][Well, the "),
    ],
)
def test_the_final_message_stays_open(source, text):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, the "}]
    prompt = ChatPrompt(messages, None, add_generation_prompt=False, continue_final_message=True)
    assert render(source, prompt) == text
    assert messages[1]["content"] == "Well, the "


def test_a_template_that_changes_the_final_message_cannot_continue_it():
    prompt = ChatPrompt(PROMPT.messages, None, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(Refused) as caught:
        render("{{ messages[0].content | upper }}", prompt)
    assert caught.value.why is Why.SHAPE


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate: ' ~ messages[0].content) }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ [].__init__.__globals__ }}",
        "{{ strftime_now.__globals__.x }}",
        "{% include 'x' %}",
    ],
)
def test_a_refusal_tells_nothing_of_the_request(source):
    with pytest.raises(Refused) as caught:
        render(source)
    assert caught.value.why is Why.TEMPLATE
    assert "é" not in caught.value.detail
    assert "alternate" not in caught.value.detail


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% nope %}", "{{ x | nope }}"])
def test_a_template_that_does_not_compile(source):
    with pytest.raises(BadTemplate):
        render(source)


def test_a_developer_message_needs_a_template_that_knows_it():
    prompt = ChatPrompt([{"role": "developer", "content": "x"}], None)
    with pytest.raises(Refused) as caught:
        render("{{ messages[0].content }}", prompt)
    assert caught.value.why is Why.UNCERTAIN
    assert render("{% if messages[0].role == 'developer' %}dev{% endif %}", prompt) == "dev"


# -- bounds


class Ticking:
    """A clock that moves a millisecond with every look at it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


LOOP = "{% set r = range(90000) %}{% for a in r %}{% for b in r %}"
ENDLOOP = "{% endfor %}{% endfor %}"
DOUBLE = "{% set ns = namespace(x='0123456789') %}{% for i in range(60) %}{% set ns.x = "
LIST = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP + ENDLOOP,
        LOOP + "{% set c = a * b %}" + ENDLOOP,
        LOOP + "{{ '' }}" + ENDLOOP,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_endless_work_ends_at_the_time_limit(source):
    with pytest.raises(OutOfBounds, match="too long"):
        render(source, cpu_time=Ticking(), time_limit_s=2.0)


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in range(9000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 12 * 'x' }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ 10 ** 10 ** 10 }}",
        DOUBLE + "ns.x ~ ns.x %}{% endfor %}",
        DOUBLE + "ns.x + ns.x %}{% endfor %}",
        DOUBLE + "ns.x.replace('0', ns.x) %}{% endfor %}",
        DOUBLE + "ns.x | replace('0', ns.x) %}{% endfor %}",
        DOUBLE + "ns.x.join([ns.x, ns.x]) %}{% endfor %}",
        DOUBLE + "[ns.x, ns.x] | join(ns.x) %}{% endfor %}",
        DOUBLE + "'%s%s' % (ns.x, ns.x) %}{% endfor %}",
        DOUBLE + "'{0}{0}'.format(ns.x) %}{% endfor %}",
        DOUBLE + "'%s%s' | format(ns.x, ns.x) %}{% endfor %}",
        LIST + "{{ ns.x }}",
        LIST + "{{ ns.x | string }}",
        LIST + "{{ ns.x | tojson }}",
        LIST + "{{ ns.x ~ '' }}",
        LIST + "{{ '%s' % ns.x }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ 'x'.center(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'x\ny' | indent(999999999) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '\t'.expandtabs(999999999) }}",
        "{{ [1] | batch(999999999, 'x') | list }}",
        "{{ 1.5 | round(999999999, 'ceil') }}",
        "{{ range(90000) | list | tojson(indent=99999) }}",
    ],
)
def test_what_grows_without_end_is_stopped_before_it_has_grown(source):
    with pytest.raises(OutOfBounds):
        render(source, max_chars=1_000_000)


def test_the_output_may_be_as_long_as_the_bound():
    source = "{{ 'x' * 500 }}{{ 'y' * 500 }}"
    assert len(render(source, max_chars=1000)) == 1000
    with pytest.raises(OutOfBounds):
        render(source, max_chars=999)
