"""Chat templates: the text transformers gives, one sentence for what is wrong, and strangers' programs kept in."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import UserDict

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from auraflux.errors import InputError, TemplateError
from auraflux.run import template_process
from auraflux.run.template import render
from auraflux.run.template_process import process

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
def test_the_text_is_that_of_transformers(source, tools, chat):
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
def test_errors_are_one_sentence(source, said):
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
def test_python_s_internals_are_not_to_be_had(source):
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
def test_nothing_outside_is_reached_or_changed(source):
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
def test_gigantic_texts_are_not_built(source):
    with pytest.raises(TemplateError, match=r"was stopped: it (builds|pads|computes)"):
        render(source, CHATS["short"])


DOUBLED = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
NESTED = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}" + DOUBLED + "{% endfor %}"
TUPLES = NESTED.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("[ns.y, ns.y]", "(ns.y, ns.y)").replace("=[1]", "=(1,)")
HUGE = "{% set x = ('f' * 4000000) | int(base=16) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{% set x = m(n-1) %}{% set y = m(n-1) %}{% endif %}{% endmacro %}{{ m(60) }}",
        NESTED + "{{ ns.x == ns.y }}",
        NESTED + "{{ ns.x < ns.y }}",
        NESTED + "{{ ns.x in [ns.y] }}",
        NESTED + "{{ [ns.x, ns.y] | sort | length }}",
        NESTED + "{{ [ns.x, ns.y] | max | length }}",
        NESTED + "{{ [ns.y].index(ns.x) }}",
        TUPLES + "{{ {ns.x: 1} | length }}",
        HUGE + "{{ (x // 3 ** 900 // 7 % 10) }}{% for i in range(9999) %}{% set y = x % (x // 5) %}{% endfor %}",
        "{% set ns = namespace(x=3) %}{% for i in range(40) %}{% set ns.x = ns.x | int * ns.x | int %}{% endfor %}" + HUGE * 99,
    ],
)
def test_what_does_not_end_is_ended(source, monkeypatch):
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.3)
    with pytest.raises(TemplateError, match=r"was stopped: it (did not end within 0.3 seconds|computes with)"):
        render(source, CHATS["short"])
    monkeypatch.undo()
    assert render("{{ messages[0].content }}", CHATS["short"]) == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x, range(90000) | list] %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, 'abcd' * 999999 ~ i] %}{% endfor %}",
    ],
    ids=["lists", "texts"],
)
def test_memory_is_not_eaten(source, monkeypatch):
    monkeypatch.setattr(template_process, "MAX_NBYTES", 200 << 20)
    process.close()
    with pytest.raises(TemplateError, match="was stopped: it took more than 200 MiB of memory"):
        render(source, CHATS["short"])
    monkeypatch.undo()
    assert render("still {{ 1 + 1 }}", []) == "still 2"


def test_the_memory_of_the_process_that_asks_does_not_count():
    child = started("""
        from auraflux.run import template_process
        template_process.MAX_NBYTES = 100 << 20
        much = bytearray(b"1") * (300 << 20)
        print(render("{% for i in range(99999) %}{% endfor %}fine", []))
    """)
    assert child.communicate(timeout=60) == ("fine\n", "")


def test_long_conversations_are_taken():
    chat = [{"role": "user", "content": "é" * 1_000_000}, {"role": "user", "content": "\ud800 \x00 \u2028"}]
    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", chat) == "".join(m["content"] for m in chat)


def test_messages_without_room_are_one_sentence(monkeypatch):
    monkeypatch.setattr(template_process, "MAX_NBYTES", 200 << 20)
    process.close()
    with pytest.raises(TemplateError, match="it took more than 200 MiB of memory"):
        render("{{ messages[0].content }}", [{"role": "user", "content": "x" * (250 << 20)}])
    process.close()


def test_what_a_template_says_is_cut():
    with pytest.raises(TemplateError) as caught:
        render("{{ raise_exception('long ' * 99999) }}", [])
    assert len(str(caught.value)) < 600


def test_threads_share_the_process():
    answers: list[str] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(render("{{ n }}", [], n=n))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(int, answers)) == list(range(20))


def test_a_process_that_was_ended_is_replaced():
    render("", [])
    before = process.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    while process._process is not None and process._process.poll() is None:
        time.sleep(0.01)
    assert render("again", []) == "again"
    assert process.pid != before


def test_any_name_may_be_a_value():
    assert render("{{ source }}{{ values }}{{ self is defined }}", [], source=1, values=2) == "12True"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in (subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout or "Z")


def gone_soon(pid: int) -> bool:
    end = time.monotonic() + 60
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def started(code: str) -> subprocess.Popen[str]:
    program = "import sys\nfrom auraflux.run.template import render\nfrom auraflux.run.template_process import process\n"
    command = [sys.executable, "-c", program + textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


HANGING = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
@pytest.mark.parametrize("source", ["done", HANGING], ids=["idle", "rendering"])
def test_signals_end_both_processes(number: int, status: int, source: str):
    child = started(f"""
        import signal, time
        # a shell lets what it starts in the background ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        render("", [])
        try:
            print(process.pid, flush=True)
            print(render({source!r}, []), flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            sys.exit(130)
    """)
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    if source == "done":
        assert child.stdout.readline() == "done\n"
    else:
        time.sleep(0.2)
    child.send_signal(number)
    try:
        child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == status
    assert gone_soon(worker)


def test_a_process_that_ends_leaves_none_behind():
    child = started("render('', [])\nprint(process.pid)")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    assert gone_soon(int(out))


def test_a_fork_has_a_process_of_its_own():
    child = started("""
        import os
        render("", [])
        mine = process.pid
        if (pid := os.fork()) == 0:
            fine = process.pid is None and render("{{ 1 }}", []) == "1" and process.pid != mine
            process.close()
            os._exit(0 if fine else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert render("{{ 2 }}", []) == "2" and process.pid == mine
        print("fine")
    """)
    assert child.communicate(timeout=60) == ("fine\n", "")


def test_nothing_is_imported_from_the_working_folder(tmp_path, monkeypatch):
    for name in ("json", "jinja2", "marshal", "select"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    process.close()
    assert render("{{ 1 }}", []) == "1"


def test_a_process_that_cannot_start_is_one_sentence(monkeypatch):
    process.close()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    process.warm_up()
    with pytest.raises(TemplateError, match=r"cannot be started: .*No such file"):
        render("", [])


@pytest.mark.parametrize("source", ["{{ range(10 ** 9) }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_other_ways_to_run_away(source):
    with pytest.raises(TemplateError, match=r"Range too big|recursion"):
        render(source, CHATS["short"])


def test_only_plain_data_goes_in():
    class Name(str):
        pass

    assert render("{{ messages[0].content }}", [UserDict(role="user", content=Name("x"))]) == "x"
    with pytest.raises(InputError, match="text, numbers, lists and dicts, not object"):
        render("", [{"role": "user", "content": object()}])
    with pytest.raises(InputError, match="A message is a dict with a 'role'"):
        render("", ["hi"])
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="too deep"):
        render("", [{"role": "user", "content": deep}])
    with pytest.raises(TemplateError, match="is list, not text"):
        render([], [])
