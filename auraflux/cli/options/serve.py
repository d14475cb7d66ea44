"""The options of `auraflux serve`, and the settings of its HTTP process."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.model import DEFAULT_SAMPLING, HOSTS, LOADING, model_argument, options, parallel_help
from auraflux.cli.options.renamed import Renamed, notice
from auraflux.errors import BackendError, InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.serve.transport.http_process import HttpSettings

KEY_VARIABLE = "AURAFLUX_API_KEY"
MAX_SEQUENCES = 1024
MAX_S = 7 * 24 * 3600
PORT, OLLAMA_PORT = 8000, 11434
LOOPBACK = ("127.0.0.1", "localhost", "::1")
RANDOM = [
    click.option("--random", "invented", is_flag=True, hidden=True, help="Serve random weights of --shape."),
    click.option("--shape", hidden=True, help="With --random: the shape of a known model, such as llama-8b."),
    click.option("--layers", type=int, hidden=True, help="With --random: this many layers instead of all."),
]


class MaxSequences(click.Option):
    """--max-sequences, whose old spelling was --parallel with a number."""

    def handle_parse_result(self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]) -> tuple[Any, list[str]]:
        numbers = [value for value in opts.get("ranks") or () if "=" not in value]
        if numbers:
            notice(ctx, "--parallel N", "--max-sequences N")
            opts = {str(self.name): numbers[-1], **opts}
        return super().handle_parse_result(ctx, opts, args)


def last_mode(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the last MODE=N of --parallel; `MaxSequences` takes the numbers."""
    return next((value for value in reversed(values) if "=" in value), None)


def listening_port(context: click.Context, option: click.Parameter, port: int | None) -> int:
    """Return the port to listen on; --ollama, which is eager, is known by now."""
    if port is not None:
        return port
    return OLLAMA_PORT if context.params.get("ollama") else PORT


SERVING = [
    model_argument,
    click.option(
        "--host", default="127.0.0.1", show_default=True, help="Address to listen on; any but loopback needs an API key."
    ),
    click.option(
        "--port",
        type=click.IntRange(0, 65535),
        callback=listening_port,
        help="Port; 0 for any free one; by default 8000, with --ollama 11434.",
    ),
    click.option("--ollama", is_flag=True, is_eager=True, help="Listen on Ollama's port, where its clients look."),
    click.option("--manage-models", is_flag=True, help="Let clients download and delete models through Ollama's API."),
    click.option(
        "--full-warm-up",
        is_flag=True,
        help="On a GPU, be ready only once all usual steps run as CUDA graphs; by default most of that goes on while idle.",
    ),
    click.option("--name", metavar="TEXT", help="Model name in the API; by default the name of its folder or file."),
    click.option(
        "--api-key", metavar="KEY", envvar=KEY_VARIABLE, help=f"API key that clients must send; also from ${KEY_VARIABLE}."
    ),
    click.option("--api-key-file", type=click.Path(path_type=Path), help="File with API keys, one per line."),
    click.option("--no-auth", is_flag=True, help="Accept clients of other machines without an API key."),
    click.option(
        "--cors",
        "origins",
        multiple=True,
        metavar="ORIGIN",
        help="Allowed CORS origin, or * for all; may be given several times.",
    ),
    click.option(
        "--allow-host",
        "hosts",
        multiple=True,
        metavar="NAME",
        help="Another allowed Host header, for a server behind a proxy; may be given several times.",
    ),
    click.option(
        "--max-sequences",
        cls=MaxSequences,
        type=click.IntRange(1, MAX_SEQUENCES),
        metavar="N",
        help="Maximum sequences of a batch; by default 8, on a GPU 64.",
    ),
    click.option("--parallel", "ranks", multiple=True, callback=last_mode, metavar="MODE=N", help=parallel_help),
    *HOSTS,
    click.option("--restart", is_flag=True, help="Restart the ranks when one is lost."),
    click.option(
        "--max-queue",
        cls=Renamed,
        old="--queue",
        type=click.IntRange(0),
        default=256,
        show_default=True,
        metavar="N",
        help="Maximum requests in the queue; more are answered with 429.",
    ),
    click.option(
        "--target-itl",
        metavar="TIME",
        help="Prefill no more per step than keeps this inter-token latency, such as 50ms, for running requests; "
        "without it prefill is spread over steps.",
    ),
    click.option(
        "--cache-memory",
        metavar="SIZE",
        help="Memory for the KV cache, prefix cache included; by default half of the free memory.",
    ),
    click.option(
        "--prefix-disk", metavar="SIZE", help="Disk space for prefix cache entries evicted from memory, such as 20GB."
    ),
    click.option(
        "--prefix-folder",
        type=click.Path(path_type=Path),
        help="Folder of the prefix cache on disk; by default in the user's cache folder.",
    ),
    click.option(
        "--grace",
        "grace_s",
        type=float,
        default=30.0,
        show_default=True,
        metavar="S",
        help="Seconds that running requests get to finish at shutdown.",
    ),
    click.option("--deadline", "deadline_s", type=float, metavar="S", help="Maximum seconds of a request."),
    click.option(
        "--files",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Folder for clients' files and batches (/v1/files, /v1/batches); without it there are none.",
    ),
    click.option(
        "--allow-image-urls",
        is_flag=True,
        help="Fetch the images of http and https URLs in requests, from public addresses only.",
    ),
    click.option("--log-json", is_flag=True, help="Write the log as JSON, one object per line."),
    *DEFAULT_SAMPLING,
    *LOADING,
    *RANDOM,
]


def parsed(words: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments of `auraflux serve`."""
    command = options(SERVING)(click.command("serve")(lambda **chosen: chosen))
    try:
        return command.main(list(words), standalone_mode=False)
    except click.ClickException as err:
        raise SettingsError(f"these options are not valid: {err.format_message()}") from err


def front_settings(host: str, log_json: bool, chosen: dict[str, Any]) -> "HttpSettings":
    """Return the settings of the HTTP process; refuse unsafe ones before anything is loaded."""
    try:
        from auraflux.serve.transport.http_process import HttpSettings, set_up_log
    except ImportError as err:
        raise BackendError(
            f"{err.name} is not installed. Install what the server needs with pip install '.[serve]' in a clone of auraflux, "
            "or with the extra of its wheel, pip install 'WHEEL[serve]'."
        ) from err
    from auraflux.serve.auth import LOOPBACK as LOCAL
    from auraflux.serve.auth import Access
    from auraflux.serve.limits import Limits

    keys, local = _keys(chosen), host in LOOPBACK
    if not local and not keys and not chosen["no_auth"]:
        raise SettingsError(
            f"--host {host} accepts clients of other machines. Give --api-key, for example "
            f"{secrets.token_urlsafe(16)}, or --no-auth."
        )
    if chosen["name"] is not None and not chosen["name"].strip():
        raise InputError("--name is empty. Leave it out to take the name of the model's folder or file.")
    _check_seconds(grace=chosen["grace_s"], deadline=chosen["deadline_s"])
    set_up_log(log_json)
    hosts = (*LOCAL, *chosen["hosts"]) if local else chosen["hosts"]
    access = Access(keys, hosts, chosen["origins"], chosen["manage_models"])
    limits, files = Limits(deadline_s=chosen["deadline_s"], image_urls=chosen["allow_image_urls"]), chosen["files"]
    if files is not None:
        from auraflux.serve.batch.file_store import FileStore

        # a folder that cannot be made is refused before anything is loaded
        FileStore(files)
    return HttpSettings(access, limits, chosen["max_queue"], chosen["grace_s"], log_json, files)


def _check_seconds(**given: float | None) -> None:
    for name, seconds in given.items():
        if seconds is not None and not 0 <= seconds <= MAX_S:
            raise SettingsError(f"--{name} {seconds:g} must be from 0 to {MAX_S:,} seconds.")


def _keys(chosen: dict[str, Any]) -> tuple[str, ...]:
    # an empty environment variable would leave the server open
    if chosen["api_key"] is not None and not chosen["api_key"].strip():
        raise InputError("--api-key is empty. Leave it out for a server without a key.")
    keys = [chosen["api_key"]] if chosen["api_key"] else []
    path = chosen["api_key_file"]
    if path is not None:
        try:
            keys += [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as err:
            raise InputError(f"the API keys in {path} cannot be read: {getattr(err, 'strerror', None) or err}.") from err
        if not keys:
            raise InputError(f"{path} holds no API key.")
    return tuple(keys)
