"""Whether engines would give this template strings or parts: their rule, with its blind spots."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from router.tokens.content_format import wants_parts


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{% for c in m.content | list %}{{ c }}{% endfor %}{% endfor %}",
        "{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{{ c }}{% endfor %}{% endfor %}",
        "{% set a = messages %}{% set b = a %}{% for m in b %}{% for c in m.content %}{% endfor %}{% endfor %}",
        "{% macro show(it) %}{% for c in it %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "{% macro show(it) %}{% for c in it %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(it=m.content) }}{% endfor %}",
        "{% set content = messages[0].content %}{% for c in content %}{{ c }}{% endfor %}",
    ],
)
def test_a_loop_over_the_content_means_parts(template):
    assert wants_parts(Environment().parse(template))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m.content.split() %}{{ c }}{% endfor %}{% endfor %}",
        "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ show(tools) }}",
        "{% macro show(it) %}{% for c in it %}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}",
        "{{ messages[0].content }}",
        "",
    ],
)
def test_anything_else_means_strings(template):
    assert not wants_parts(Environment().parse(template))


def test_where_engines_give_up_they_take_strings():
    template = "{% set a, b = messages %}{% for k, v in messages %}{% for c in v.content %}{% endfor %}{% endfor %}"
    assert not wants_parts(Environment().parse(template))
