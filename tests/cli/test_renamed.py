"""Old spellings of options and arguments: they work for one release, with a notice, and --help does not show them."""

import shlex
from typing import Any

import click
import pytest
from click.testing import CliRunner

import auraflux
from auraflux.cache import CacheSettings
from auraflux.cli import main
from auraflux.cli.options.renamed import Renamed
from auraflux.cli.options.serve import parsed
from auraflux.renamed import renamed_arguments
from auraflux.weights.experts.settings import ExpertSettings
from tests.engine.tiny import tiny

# command, its required arguments, old spelling, new spelling, a value, the parsed value
NEW_COMMANDS = ("batch", "run")
SPELLINGS = [
    *(
        (command, required, old, new, value, wanted)
        for command, required in (
            ("generate", "-p a"),
            ("chat", ""),
            ("serve", ""),
            ("bench model", ""),
            ("bench serve", ""),
            ("bench speculate", ""),
        )
        for old, new, value, wanted in (
            ("--first", "--sink-tokens", "3", 3),
            ("--newest", "--recent-window", "5", 5),
            ("--protect-first", "--kv-skip-first-layers", "1", 1),
            ("--protect-last", "--kv-skip-last-layers", "2", 2),
            ("--expert-main-memory", "--expert-host-memory", "4GB", "4GB"),
            ("--expert-guess", "--expert-prefetch", "", True),
        )
    ),
    *((command, "", "--expert-use", "--expert-counts", "a.json", "a.json") for command in ("generate", "chat", "serve")),
    ("serve", "", "--queue", "--max-queue", "7", 7),
    ("bench serve", "", "--parallel", "--max-sequences", "4", 4),
    ("bench ranks", "m", "--expert-guess", "--expert-prefetch", "", True),
    ("bench ranks", "m", "--expert-main-memory", "--expert-host-memory", "4GB", "4GB"),
    ("bench ranks", "m", "--way", "--parallel", "pipeline=2", ("pipeline=2", "pipeline=2")),
    ("bench ranks", "m", "--wire", "--network", "wifi", ("wifi", "wifi")),
    ("bench ranks", "m", "--texts", "--sequences", "2", 2),
    ("convert", "a b", "--group", "--group-size", "32", 32),
    ("pack", "a b", "--group", "--group-size", "32", 32),
    ("plan", "m --hosts 1GB", "--wire", "--network", "wifi", "wifi"),
    ("plan", "m --hosts 1GB", "--memory-speed", "--memory-bandwidth", "9GB", "9GB"),
]


def find(name: str) -> click.Command:
    command: Any = main
    for word in name.split():
        command = command.commands[word]
    return command


def parse(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Parse a command line without running it; return the options and stderr."""
    capsys.readouterr()
    # commands cache their help option, whose names come from the context
    context = find(name).make_context(name, shlex.split(words), help_option_names=["-h", "--help"])
    return context.params, capsys.readouterr().err


@pytest.mark.parametrize(("command", "required", "old", "new", "value", "wanted"), SPELLINGS)
def test_an_old_spelling_works_with_one_notice(
    command: str, required: str, old: str, new: str, value: str, wanted: Any, capsys: pytest.CaptureFixture[str]
):
    option = next(param for param in find(command).params if new in param.opts)
    known, said = parse(command, f"{required} {new} {value} {new} {value}", capsys)
    assert (known[str(option.name)], said) == (wanted, "")
    given, said = parse(command, f"{required} {old} {value} {old} {value}", capsys)
    assert given == known
    assert said == f"note: {old} is now {new}.\n"
    assert f" {old} " not in CliRunner().invoke(main, [*command.split(), "--help"]).output


def test_every_old_spelling_is_tested():
    def spellings(command: click.Command, name: str = "") -> set[tuple[str, str]]:
        if isinstance(command, click.Group):
            return set().union(*(spellings(child, f"{name} {word}".strip()) for word, child in command.commands.items()))
        return {(name, param.old) for param in command.params if isinstance(param, Renamed)}

    # commands that never had other spellings share these options
    found = {(command, old) for command, old in spellings(main) if command not in NEW_COMMANDS}
    assert found == {(command, old) for command, _, old, *_ in SPELLINGS}


def test_the_new_spelling_wins(capsys: pytest.CaptureFixture[str]):
    assert parse("serve", "--queue 1 --max-queue 2 --queue 3", capsys)[0]["max_queue"] == 2


def test_values_of_both_spellings_are_joined_where_an_option_repeats(capsys: pytest.CaptureFixture[str]):
    assert parse("bench ranks", "m --network wifi --wire 1gbe", capsys)[0]["networks"] == ("1gbe", "wifi")


@pytest.mark.parametrize(
    ("words", "sequences", "ranks"),
    [
        ("--parallel 4", 4, None),
        ("--parallel 4 --parallel pipeline=2", 4, "pipeline=2"),
        ("--parallel pipeline=2 --parallel 3 --parallel 4", 4, "pipeline=2"),
        ("--parallel 4 --max-sequences 5", 5, None),
    ],
)
def test_a_number_given_to_parallel_is_the_batch_size(
    words: str, sequences: int, ranks: str | None, capsys: pytest.CaptureFixture[str]
):
    given, said = parse("serve", words, capsys)
    assert (given["max_sequences"], given["ranks"]) == (sequences, ranks)
    assert said == "note: --parallel N is now --max-sequences N.\n"


def test_parallelism_needs_no_notice(capsys: pytest.CaptureFixture[str]):
    given, said = parse("serve", "--parallel pipeline=2 --max-sequences 4", capsys)
    assert (given["max_sequences"], given["ranks"], said) == (4, "pipeline=2", "")


@pytest.mark.parametrize("value", ["many", "0", "5000"])
def test_a_batch_size_that_cannot_be_is_refused(value: str):
    done = CliRunner().invoke(main, ["serve", "--parallel", value])
    assert done.exit_code == 2
    assert "Invalid value for '--max-sequences'" in done.stderr


def test_a_config_file_of_ray_serve_may_have_old_names(capsys: pytest.CaptureFixture[str]):
    given = parsed(["model", "--parallel", "4", "--queue", "9"])
    assert (given["max_sequences"], given["max_queue"]) == (4, 9)
    assert capsys.readouterr().err.count("note: ") == 2


def test_both_sides_of_diff_share_one_notice():
    old = "--context 64 --device cpu --calibrate off --first 0 --newest 0 --piece 2"
    done = CliRunner().invoke(main, ["diff", str(tiny()), "-p", "a b c", "--a", old, "--b", old])
    assert done.exit_code == 0
    assert "all logits are bit-identical" in done.stdout
    for notice in ("--first is now --sink-tokens.", "--newest is now --recent-window.", "--piece is now --prefill-chunk."):
        assert done.stderr.count(notice) == 1


def test_changes_of_eval_have_old_names_too():
    done = CliRunner().invoke(main, ["eval", str(tiny()), "--kv", "none,k4v4+newest=4,k4v4+first=2+newest=x"])
    assert done.stderr.splitlines() == [
        "note: +first= is now +sink_tokens=.",
        "note: +newest= is now +recent_window=.",
        "error: k4v4+sink_tokens=2+recent_window=x: recent_window needs a number, not 'x'.",
    ]


@pytest.mark.parametrize(
    ("call", "old", "new", "value"),
    [
        (CacheSettings, "first", "sink_tokens", 3),
        (CacheSettings, "newest", "recent_window", 5),
        (CacheSettings, "protect_first", "skip_first_layers", 1),
        (CacheSettings, "protect_last", "skip_last_layers", 1),
        (ExpertSettings, "main_memory", "host_memory", "4GB"),
        (ExpertSettings, "guess", "prefetch", True),
    ],
)
def test_an_old_field_works_with_a_warning(call: Any, old: str, new: str, value: Any):
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}.") as said:
        assert call(**{old: value}) == call(**{new: value})
    assert [warning.filename for warning in said] == [__file__]
    with pytest.raises(TypeError, match=f"give {new} alone"):
        call(**{old: value, new: value})


@pytest.mark.parametrize(("old", "new"), [("sequences", "max_sequences"), ("waiting", "max_queue")])
def test_load_takes_old_names_with_a_warning(old: str, new: str):
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}."):
        model = auraflux.load(tiny(), device="cpu", context=64, calibrate="off", **{old: 2})
    assert model.generate("a", max_tokens=1)


def test_positional_arguments_and_new_names_pass_unchanged():
    @renamed_arguments({"old": "new"})
    def call(first: int, new: int = 0) -> tuple[int, int]:
        return first, new

    assert (call(1), call(1, 2), call(1, new=3)) == ((1, 0), (1, 2), (1, 3))
