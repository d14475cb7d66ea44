"""The template subprocess: time and memory limits, and its end with the parent."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from auraflux.errors import TemplateError
from auraflux.tokenizer import template_process
from auraflux.tokenizer.chat_template import render
from auraflux.tokenizer.template_process import process

CHAT = [{"role": "user", "content": "Hi"}]
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
def test_the_time_limit(source, monkeypatch):
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.3)
    with pytest.raises(TemplateError, match=r"was stopped: it (ran longer than 0.3 seconds|computes with)"):
        render(source, CHAT)
    monkeypatch.undo()
    assert render("{{ messages[0].content }}", CHAT) == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x, range(90000) | list] %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, 'abcd' * 999999 ~ i] %}{% endfor %}",
    ],
    ids=["lists", "strings"],
)
def test_the_memory_limit(source, monkeypatch):
    monkeypatch.setattr(template_process, "MAX_NBYTES", 200 << 20)
    process.close()
    with pytest.raises(TemplateError, match="was stopped: it used more than 200 MiB of memory"):
        render(source, CHAT)
    monkeypatch.undo()
    assert render("still {{ 1 + 1 }}", []) == "still 2"


def test_the_memory_of_the_parent_does_not_count():
    child = started("""
        from auraflux.tokenizer import template_process
        template_process.MAX_NBYTES = 100 << 20
        much = bytearray(b"1") * (300 << 20)
        print(render("{% for i in range(99999) %}{% endfor %}fine", []))
    """)
    assert child.communicate(timeout=60) == ("fine\n", "")


def test_long_conversations_are_rendered():
    chat = [{"role": "user", "content": "é" * 1_000_000}, {"role": "user", "content": "\ud800 \x00 \u2028"}]
    assert render("{% for m in messages %}{{ m.content }}{% endfor %}", chat) == "".join(m["content"] for m in chat)


def test_messages_beyond_the_memory_limit_are_one_error(monkeypatch):
    monkeypatch.setattr(template_process, "MAX_NBYTES", 200 << 20)
    process.close()
    with pytest.raises(TemplateError, match="it used more than 200 MiB of memory"):
        render("{{ messages[0].content }}", [{"role": "user", "content": "x" * (250 << 20)}])
    process.close()


def test_long_errors_are_truncated():
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


def test_a_killed_process_is_replaced():
    render("", [])
    before = process.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    while process._process is not None and process._process.poll() is None:
        time.sleep(0.01)
    assert render("again", []) == "again"
    assert process.pid != before


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in (subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout or "Z")


def ends_soon(pid: int) -> bool:
    end = time.monotonic() + 60
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def started(code: str) -> subprocess.Popen[str]:
    program = (
        "import sys\nfrom auraflux.tokenizer.chat_template import render\n"
        "from auraflux.tokenizer.template_process import process\n"
    )
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
        # a shell makes background processes ignore it
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
    assert ends_soon(worker)


def test_the_subprocess_ends_with_the_parent():
    child = started("render('', [])\nprint(process.pid)")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    assert ends_soon(int(out))


def test_a_fork_has_its_own_process():
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


def test_a_process_that_cannot_start_is_one_error(monkeypatch):
    process.close()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    process.warm_up()
    with pytest.raises(TemplateError, match=r"cannot be started: .*No such file"):
        render("", [])
