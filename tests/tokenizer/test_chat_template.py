"""Chat templates: equal to transformers, one-line errors, and a sandbox for untrusted code."""

import time
from collections import UserDict

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from auraflux.errors import InputError, TemplateError
from auraflux.tokenizer.chat_template import render

CHATML = """{%- if tools %}
<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif -%}
{% for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + (message['content'] | trim) ~ '<|im_end|>' ~ '\n' -}}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='', count=0) %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " }}{{ date_string if date_string is defined else '?' }}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{% endif %}
{{- ns.system + "<|eot_id|>" }}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}{{ ns.count }}"""
TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"""
CHANNELS = """{%- macro parts(message) -%}
  {%- for key, value in message.items() if key != 'role' -%}
  {{ key }}={{ value if value is string else value|tojson }};{%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
  {%- if loop.index > 3 -%}{%- break -%}{%- endif -%}
  {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
  {%- generation -%}<|start|>{{ message.role }}<|channel|>{{ parts(message) }}{%- endgeneration -%}
  {{- "<|end|>" if not loop.last else "<|return|>" -}}
{%- endfor -%}
{{ messages | map(attribute='role') | unique | join(', ') }} {{ '%05.1f' | format(3.14159) }} {{ '{}-{}'.format(1, 'x') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ "Reply: **%s**" % "bold" }}
{{ 'x'.center(9, '*') }}{{ 'a,b'.split(',')[::-1] }}{{ [1] + [2] * 3 }}{{ 2 ** 10 }}{{ 1700000000000 * 1000 }}{{ dict(a=1) }}"""
CHATS = {
    "long": [
        {"role": "system", "content": "Be <brief> & 'kind'."},
        {"role": "user", "content": "  Grüße 🦙\n"},
        {"role": "assistant", "content": "Hello", "reasoning": "They said hello.", "calls": [{"id": 1.5, "ok": True}]},
        {"role": "user", "content": "Again"},
    ],
    "short": [{"role": "user", "content": "Hi"}],
    "odd": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}
TOOLS = [{"type": "function", "function": {"name": "grüßen", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("source", [CHATML, HEADERS, TURNS, CHANNELS], ids=["chatml", "headers", "turns", "channels"])
def test_rendering_equals_transformers(source, tools, chat):
    values = {"tools": tools, "bos_token": "<s>", "add_generation_prompt": True, "date_string": "26 Jul 2024"}
    try:
        want = render_jinja_template(conversations=[CHATS[chat]], chat_template=source, **values)[0][0]
    except Exception as err:
        with pytest.raises(TemplateError, match=f"refuses the messages: {err}"):
            render(source, CHATS[chat], **values)
    else:
        assert render(source, CHATS[chat], **values) == want


def test_today():
    assert render("{{ strftime_now('%Y') }}", []) == time.strftime("%Y")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for m in messages %}", "has an error in line 1: Unexpected end of template"),
        ("ok\n{{ 'a' } }}", "has an error in line 2: unexpected '}'"),
        ("{{ 'a' | shout }}", "No filter named 'shout'"),
        ("{{ nothing.at.all }}", "failed: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{{ 'a' + 1 }}", "failed: can only concatenate str"),
        ("{{ raise_exception('No\n  system!') }}", "refuses the messages: No system!$"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "cannot be compiled: maximum recursion"),
    ],
)
def test_errors_are_one_line(source, said):
    with pytest.raises(TemplateError, match=said) as caught:
        render(source, CHATS["short"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ dict.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ ''.encode().__class__ }}",
        "{{ {}.__getitem__ }}",
    ],
)
def test_python_internals_are_inaccessible(source):
    assert render(source, CHATS["short"]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace.__init__.__globals__['sys'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends '/etc/passwd' %}",
        "{{ open('/etc/passwd').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages.__init__([]) }}",
    ],
)
def test_the_sandbox_cannot_be_left(source):
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(TemplateError):
        render(source, chat)
    assert chat == [{"role": "user", "content": "Hi"}]


GROWING = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = GROW %}{% endfor %}{{ ns.x }}"
GROWTHS = [
    "ns.x ~ ns.x",
    "ns.x + ns.x",
    "ns.x * 2",
    "ns.x.replace('a', 'aa')",
    "ns.x | replace('a', 'aa')",
    "[ns.x, ns.x] | join",
    "''.join([ns.x, ns.x])",
    "'{0}{0}'.format(ns.x)",
    "'{a}{a}'.format_map({'a': ns.x})",
    "'%s%s' % (ns.x, ns.x)",
    "'%s%s' | format(ns.x, ns.x)",
    "ns.x.translate({97: 'aa'})",
]


@pytest.mark.parametrize(
    "source",
    [
        *(GROWING.replace("GROW", grow) for grow in GROWTHS),
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% macro m(x, n) %}{% if n %}{{ m(x ~ x, n - 1) }}{% endif %}{% endmacro %}{{ m('aaaa', 60) }}",
        "{% set x = 'a' * 9999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "{{ range(99999) | map('replace', '1', 'x' * 9999) | join }}",
        "{{ ''.join(range(99999) | map('replace', '1', 'x' * 9999)) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ (10 ** 900) ** 10 ** 9 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ 'a\n' | indent(10 ** 10) }}",
        "{{ '\t'.expandtabs(10 ** 10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%.99999f' | format(1.0) }}",
        "{{ '{:99999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 10) }}",
        "{{ (5).to_bytes(10 ** 10, 'big') }}",
        "{{ 1.5 | round(10 ** 9, 'ceil') }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ strftime_now('%99999999d') }}",
    ],
)
def test_gigantic_strings_are_refused(source):
    with pytest.raises(TemplateError, match=r"was stopped: it (builds|pads|computes)"):
        render(source, CHATS["short"])


def test_any_variable_name_is_allowed():
    assert render("{{ source }}{{ values }}{{ self is defined }}", [], source=1, values=2) == "12True"


@pytest.mark.parametrize("source", ["{{ range(10 ** 9) }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_runaway_loops_are_stopped(source):
    with pytest.raises(TemplateError, match=r"Range too big|recursion"):
        render(source, CHATS["short"])


def test_only_json_values_are_accepted():
    class Name(str):
        pass

    assert render("{{ messages[0].content }}", [UserDict(role="user", content=Name("x"))]) == "x"
    with pytest.raises(InputError, match="strings, numbers, lists and dicts, not object"):
        render("", [{"role": "user", "content": object()}])
    with pytest.raises(InputError, match="A message must be a dict with 'role'"):
        render("", ["hi"])
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="nested deeper"):
        render("", [{"role": "user", "content": deep}])
    with pytest.raises(TemplateError, match="is list, not a string"):
        render([], [])
