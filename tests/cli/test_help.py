"""Grouped help, --help-all, examples, and the flags and command names of other engines."""

import shlex

import click
import pytest
from click.testing import CliRunner, Result

from auraflux.cli import main
from auraflux.cli.options.command import PEER_COMMANDS, Command
from auraflux.cli.options.peer_flags import INSTEAD, PEER_FLAGS, SAME, peer_flags
from auraflux.cli.options.sections import SECTIONS
from tests.engine.tiny import tiny


def call(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)), terminal_width=100, prog_name="auraflux")


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    found: dict[tuple[str, ...], click.Command] = {}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found |= commands(command, (*path, name))
        else:
            found[(*path, name)] = command
    return found


COMMANDS = commands()
LONG = {path: command for path, command in COMMANDS.items() if isinstance(command, Command) and command.everyday}


def flags(command: click.Command) -> set[str]:
    return {param.opts[0] for param in command.params if isinstance(param, click.Option) and not param.hidden}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_short_and_help_all_complete(path: tuple[str, ...]):
    command = COMMANDS[path]
    short = call(*path, "--help").stdout
    if path in LONG:
        assert len(short.splitlines()) < 70
        everything = call(*path, "--help-all").stdout
        assert len(everything) > len(short)
    else:
        assert len(flags(command)) <= 20, "name its everyday options"
        everything = short
    for flag in flags(command):
        assert f"{flag} " in everything or f"{flag}\n" in everything or f"{flag}," in everything


def test_commands_that_load_a_model_have_everyday_options():
    assert {("generate",), ("chat",), ("serve",)} <= set(LONG)
    for path, command in LONG.items():
        assert set(command.everyday) <= {flag for param in command.params for flag in param.opts}, path


def test_examples_come_last_and_are_command_lines():
    for path, command in COMMANDS.items():
        examples = getattr(command, "examples", ())
        if examples:
            assert call(*path, "--help").stdout.rstrip().endswith(examples[-1])
        for line in examples:
            words = shlex.split(line.removeprefix("auraflux "))
            assert main.get_command(click.Context(main), words[0]) is not None
            known = {
                flag for each in COMMANDS.values() for param in each.params for flag in (*param.opts, *param.secondary_opts)
            }
            assert {word for word in words if word.startswith("--") and " " not in word} <= known, line


def test_sections_name_options_that_exist():
    known = {flag for command in COMMANDS.values() for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    assert set().union(*SECTIONS.values()) <= known


@pytest.mark.parametrize("words", [["--ctx-size", "64"], ["--max-model-len=64"], ["-c", "64"]])
def test_flags_of_other_engines_are_accepted(words: list[str]):
    done = call("generate", "-m", tiny(), *words, "-p", "The quick", "--n-predict", 2, "--temp", 0, "--json")
    assert done.exit_code == 0, done.stderr
    flag = words[0].partition("=")[0]
    assert f"note: {flag} means --context.\n" in done.stderr
    assert "note: -m means MODEL.\n" in done.stderr
    assert '"tokens": 2' in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-ngl", "99"], "There is no -ngl here. A GPU is used where there is one"),
        (["--n-gpu-layers=99"], "--gpu-memory 8GB limits it"),
        (["--gpu-memory-utilization", "0.9"], "Give a size: --gpu-memory 8GB"),
        (["--gpu-memory-utilization=0.9"], "Give a size: --gpu-memory 8GB"),
        (["--threads", "4"], "NUMBA_NUM_THREADS"),
        (["--tensor-parallel-size", "2"], "Give --parallel tensor=2"),
        (["--cache-type-k", "q8_0"], "--kv k8v8"),
        (["-fa"], "leave the flag out"),
        (["--enable-prefix-caching"], "It is always on"),
        (["--trust-remote-code"], "No code of a model is run"),
        (["--lora", "x"], "merge the adapter"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_flags_of_other_engines_are_answered(command: str, words: list[str], said: str):
    done = call(command, *words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert "Did you mean" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "--max-token", "4"], "No such option: --max-token. Did you mean --max-tokens?"),
        (["generate", "--zzz"], "No such option: --zzz. 'auraflux generate --help-all' lists all options."),
        (["generate", "-t", "8"], "-t 8 would be the temperature. For threads set the environment variable NUMBA_NUM_THREADS"),
        (["chat", "-p", "hello"], "'auraflux generate -p TEXT' answers one prompt"),
        (["chat", "-t16"], "for this temperature give --temperature 16"),
        (["pull", "--zzz"], "No such option: --zzz. 'auraflux pull --help' lists all options."),
        (["pull", "--ctx-size", "4"], "No such option: --ctx-size."),
        (["repl"], "No such command: repl. Did you mean auraflux chat?"),
        (["genrate"], "No such command: genrate. Did you mean auraflux generate?"),
        (["bench", "models"], "No such command: models. Did you mean auraflux bench model?"),
        (
            ["generate", "m.gguf", "Once upon a time"],
            "unexpected extra argument (Once upon a time). A prompt is given with -p.",
        ),
        (["xyzzy"], "No such command: xyzzy. The commands are: batch, bench, chat"),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(words: list[str], said: str):
    done = call(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_a_value_that_looks_like_a_flag_stays_a_value():
    done = call("generate", tiny(), "-p", "--ctx-size", "-n", 1, "--context", 64)
    assert done.exit_code == 0, done.stderr
    assert "note:" not in done.stderr


def test_the_table_of_peers_is_consistent():
    names = {param.name for command in COMMANDS.values() for param in command.params}
    assert set(SAME) <= names
    assert sum(len(words.split()) for words in (*SAME.values(), *INSTEAD.values())) == len(PEER_FLAGS)
    assert {value for value in PEER_COMMANDS.values() if not value.startswith("--")} <= set(main.commands)
    for command in COMMANDS.values():
        made = [flag.opts[0] for flag in peer_flags(command.params)]
        assert len(set(made)) == len(made)
