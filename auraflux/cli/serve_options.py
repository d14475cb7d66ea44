"""The options of `auraflux serve`, and how its HTTP side shall behave by them."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options import HOSTS, LOADING, model_argument, options
from auraflux.errors import BackendError, InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.serve.front import FrontSettings

KEY_VARIABLE = "AURAFLUX_API_KEY"
MOST_TEXTS = 1024
LONGEST_S = 7 * 24 * 3600
LOOPBACK = ("127.0.0.1", "localhost", "::1")
RANDOM = [
    click.option("--random", "invented", is_flag=True, hidden=True, help="Serve random weights of --shape."),
    click.option("--shape", hidden=True, help="Of random weights: llama-8b, qwen3-30b-a3b, ..."),
    click.option("--layers", type=int, hidden=True, help="Of random weights."),
]


def texts_and_ranks(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> int | None:
    """Take what says how the model is divided out of --parallel; what is left is a number of texts."""
    context.params["divided"] = next((value for value in reversed(values) if "=" in value), None)
    texts: Any = click.IntRange(1, MOST_TEXTS)
    numbers = [texts.convert(value, option, context) for value in values if "=" not in value]
    return numbers[-1] if numbers else None


SERVING = [
    model_argument,
    click.option(
        "--host", default="127.0.0.1", show_default=True, help="Address to listen on. Another than loopback needs a key."
    ),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any that is free."),
    click.option("--name", metavar="TEXT", help="What clients call the model; by default its folder's or file's name."),
    click.option("--api-key", metavar="KEY", envvar=KEY_VARIABLE, help=f"That clients must show; also from ${KEY_VARIABLE}."),
    click.option("--api-key-file", type=click.Path(path_type=Path), help="A file with keys, one a line."),
    click.option("--no-auth", is_flag=True, help="Let everybody in, also from other machines."),
    click.option(
        "--cors", "origins", multiple=True, metavar="ORIGIN", help="A web page's origin that may use the server, or *."
    ),
    click.option(
        "--allow-host", "hosts", multiple=True, metavar="NAME", help="Another name the server is called by, behind a proxy."
    ),
    click.option(
        "--parallel",
        multiple=True,
        callback=lambda context, option, values: texts_and_ranks(context, option, values),
        metavar="N",
        help="Texts written at once; by default 8, on a GPU 64. Also MODE=N, such as pipeline=2: divide it among N ranks.",
    ),
    *HOSTS,
    click.option("--restart", is_flag=True, help="Bring ranks back when one is gone."),
    click.option(
        "--queue", type=click.IntRange(0), default=256, show_default=True, metavar="N", help="Requests that may wait."
    ),
    click.option(
        "--cache-memory", metavar="SIZE", help="For keys and values, kept prefixes too; by default half of what is free."
    ),
    click.option("--prefix-disk", metavar="SIZE", help="Disk space for prefixes that memory has no room for, such as 20GB."),
    click.option("--prefix-folder", type=click.Path(path_type=Path), help="Where they are; by default in the user's cache."),
    click.option("--grace", "grace_s", type=float, default=30.0, show_default=True, help="Seconds to finish in when stopped."),
    click.option("--deadline", "deadline_s", type=float, metavar="S", help="Most seconds that an answer may take."),
    click.option("--log-json", is_flag=True, help="Write the log as JSON, one object a line."),
    *LOADING,
    *RANDOM,
]


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """What words mean that stand after `auraflux serve`."""
    command = options(SERVING)(click.command("serve")(lambda **chosen: chosen))
    try:
        return command.main(list(words), standalone_mode=False)
    except click.ClickException as err:
        raise SettingsError(f"the server cannot take these options: {err.format_message()}") from err


def front_settings(host: str, log_json: bool, chosen: dict[str, Any]) -> "FrontSettings":
    """How the HTTP process shall behave; what is not safe is refused before anything is loaded."""
    try:
        from auraflux.serve.front import FrontSettings, set_up_log
    except ImportError as err:
        raise BackendError(f"{err.name} is not installed. The server needs: pip install 'auraflux[serve]'.") from err
    from auraflux.serve.guard import LOOPBACK as LOCAL
    from auraflux.serve.guard import Access
    from auraflux.serve.limits import Limits

    keys, local = _keys(chosen), host in LOOPBACK
    if not local and not keys and not chosen["no_auth"]:
        raise SettingsError(
            f"--host {host} lets other machines in. Give --api-key, for example {secrets.token_urlsafe(16)}, or --no-auth."
        )
    _check_seconds(grace=chosen["grace_s"], deadline=chosen["deadline_s"])
    set_up_log(log_json)
    access = Access(keys, (*LOCAL, *chosen["hosts"]) if local else chosen["hosts"], chosen["origins"])
    return FrontSettings(access, Limits(deadline_s=chosen["deadline_s"]), chosen["queue"], chosen["grace_s"], log_json)


def _check_seconds(**given: float | None) -> None:
    for name, seconds in given.items():
        if seconds is not None and not 0 <= seconds <= LONGEST_S:
            raise SettingsError(f"--{name} {seconds:g} must be from 0 to {LONGEST_S:,} seconds.")


def _keys(chosen: dict[str, Any]) -> tuple[str, ...]:
    keys = [chosen["api_key"]] if chosen["api_key"] else []
    path = chosen["api_key_file"]
    if path is not None:
        try:
            keys += [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as err:
            raise InputError(f"the keys in {path} cannot be read: {err}.") from err
        if not keys:
            raise InputError(f"{path} holds no key.")
    return tuple(keys)
