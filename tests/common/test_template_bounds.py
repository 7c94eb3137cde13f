"""Chat templates that would take the server down with them."""

import time

import pytest

from services.common.errors import InvalidRequest
from services.common.text import template_bounds
from services.common.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}]


def render(source: str, messages=MESSAGES) -> str:
    return ChatTemplate(source, {}).render(messages, True)


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% set r = range(100000) %}{% for i in r if i < 0 %}x{% endfor %}{% for i in r %}{% for j in r %}{% endfor %}"
        "{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
        "{% for i in range(100000) %}{{ range(100000) | list | sort | join }}{% endfor %}",
        "{% set r = range(100000) %}{% for i in r recursive %}{{ loop(r) }}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_long_is_stopped(monkeypatch, source):
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.2)
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.2 s|recursion") as caught:
        render(source)
    assert caught.value.field == "messages"
    assert time.thread_time() - began < 10


def test_a_template_that_writes_too_much_is_stopped(monkeypatch):
    monkeypatch.setattr(template_bounds, "MAX_CHARACTERS", 1000)
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        render("{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}")
    assert len(render("{% for i in range(500) %}{{ messages[0].content }}{% endfor %}")) == 1000


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 9999999999 }}",
        "{{ 9999999999 * 'x' }}",
        "{{ [1] * 9999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ '{:{w}}'.format(1, w=9999999999) }}",
        "{{ '{:{w}}'.format_map({'w': 9999999999}) }}",
        "{% set f = 'x{:9999999999}' | attr('format') %}{{ f(1) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{{ 'x'.center(9999999999) }}",
        "{{ 'x' | center(9999999999) }}",
        "{{ 'x\\nx' | indent(9999999999) }}",
        "{{ 'x' | indent(width=9999999999) }}",
        "{{ lipsum(9999) }}",
        "{{ range(9999999999) | list }}",
    ],
)
def test_nothing_is_made_large_at_a_stroke(source):
    with pytest.raises(InvalidRequest):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ _toka_tick.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('x' | attr('format'))('{0.__class__}') }}{{ ''.__class__.x() }}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(source):
    try:
        told = render(source)
    except InvalidRequest:
        return
    assert "class" not in told
    assert "root" not in told


def test_what_templates_do_every_day_goes_on():
    source = (
        "{%- for m in messages %}{% if loop.index0 % 2 == 0 %}{{ '-' * 3 }}{{ m.content | indent(2) }}"
        "{{ '{} {}'.format(m.role, 2 ** 3) }}{{ 5 % 3 }}{{ m | tojson }}{{ 3 * 4 }}{% endif %}{% endfor %}"
    )
    assert render(source) == '---Hiuser 82{"role": "user", "content": "Hi"}12'


def test_the_longest_conversations_have_time():
    messages = [{"role": "user", "content": "x" * 400}] * 65_536
    source = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}"
    assert len(render(source, messages)) > 26_000_000
