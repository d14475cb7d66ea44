"""`auraflux serve` with several models: its options, and the process of each model."""

import logging
import os
import signal
import socket
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from auraflux.cli.options.early_checks import check_sizes
from auraflux.cli.options.model import load_options, options
from auraflux.cli.options.serve import SERVING
from auraflux.cli.options.served_model import load_sequences, open_model_process
from auraflux.cli.options.settings import cache_settings
from auraflux.errors import AurafluxError, InputError, SettingsError

if TYPE_CHECKING:
    from auraflux.serve.several.catalog import Catalog, Entry
    from auraflux.serve.transport.http_process import HttpSettings

log = logging.getLogger("auraflux")
MEMORY_SHARE = 0.8  # of the free memory, for models
# options of the server, which a model cannot have for itself
OF_THE_SERVER = (
    *("host", "port", "ollama", "manage_models", "name", "api_key", "api_key_file", "no_auth", "origins", "hosts"),
    *(
        "max_queue",
        "grace_s",
        "deadline_s",
        "log_json",
        "files",
        "ranks",
        "rank_hosts",
        "rank_timeout",
        "restart",
        "expert_counts",
    ),
    *("invented", "shape", "layers", "model"),
)
SEVERAL = [
    click.option(
        "--models",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="Serve several models: a folder of models, or a TOML file that lists them, see docs/several-models.md.",
    ),
    click.option(
        "--models-memory",
        metavar="SIZE",
        help="With several models: memory for all that are loaded, such as 12GB; by default 80% of the free memory.",
    ),
    click.option(
        "--keep-alive",
        metavar="TIME",
        help="With several models: how long one stays loaded without requests, such as 30m, 0, or -1 for ever; by default 5m.",
    ),
    click.option(
        "--load-timeout",
        type=click.FloatRange(0, 1e6, min_open=True),
        metavar="S",
        help="With several models: seconds that a request waits for its model; by default 120.",
    ),
]


def catalog_of(model: str | None, chosen: Mapping[str, Any]) -> "Catalog | None":
    """Return the catalog that the options name, with their settings over its own; None for one model."""
    from dataclasses import replace

    from auraflux.serve.keep_alive import parse_keep_alive
    from auraflux.serve.several.catalog import is_models_folder, read_catalog

    named = chosen["models"]
    if named is None and model is not None and is_models_folder(Path(model).expanduser()):
        named, model = Path(model).expanduser(), None
    given = {name: chosen[name] for name in ("models_memory", "keep_alive", "load_timeout") if chosen[name] is not None}
    if named is None:
        if given:
            option = next(iter(given)).replace("_", "-")
            raise SettingsError(f"--{option} is for several models: give --models, or a folder of models.")
        return None
    if model is not None:
        raise SettingsError(f"give either the model {model!r:.80} or --models.")
    for option in ("name", "ranks", "prefix_disk"):
        if chosen[option] is not None:
            raise SettingsError(
                f"--{option.replace('_', '-').replace('ranks', 'parallel')} is not supported with several models."
            )
    catalog = read_catalog(named)
    return replace(
        catalog,
        memory=given.get("models_memory", catalog.memory),
        keep_alive_s=parse_keep_alive(given["keep_alive"]) if "keep_alive" in given else catalog.keep_alive_s,
        load_timeout_s=given.get("load_timeout", catalog.load_timeout_s),
    )


def settings_of(entry: "Entry", chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one model: its own settings over those of the command line."""
    words: list[str] = []
    command = options(SERVING)(click.command("serve")(lambda **_: None))
    repeated = {word for param in command.params if isinstance(param, click.Option) and param.multiple for word in param.opts}
    for name, value in entry.settings.items():
        option = f"--{name.replace('_', '-')}"
        if value is True or value is False:
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, int | float | str):
            words += [option, str(value)]
        elif option in repeated and isinstance(value, list) and all(isinstance(each, str) for each in value):
            words += [word for each in value for word in (option, each)]
        else:
            raise SettingsError(f"models.{entry.name}: {name} is {value!r:.80}; give a number, a text, true or false.")
    try:
        context = command.make_context("serve", words)
    except click.ClickException as err:
        raise SettingsError(f"models.{entry.name}: {err.format_message()}") from err
    own = {
        name: value
        for name, value in context.params.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    refused = sorted(set(own) & set(OF_THE_SERVER))
    if refused:
        raise SettingsError(
            f"models.{entry.name} has {', '.join(refused)}, which the whole server has: give it to auraflux serve."
        )
    return {**chosen, **own, "name": entry.name}


def serve_models(
    catalog: "Catalog", listening: socket.socket, where: str, settings: "HttpSettings", chosen: Mapping[str, Any]
) -> None:
    """Serve several models in this process until a signal arrives; each model has a process of its own."""
    from auraflux.serve.several.serving import run
    from auraflux.weights.experts.settings import format_nbytes

    every = {entry.name: settings_of(entry, chosen) for entry in catalog.entries}
    for name, own in every.items():
        try:
            check_sizes(own)
            cache_settings(own)
        except AurafluxError as err:
            raise InputError(f"models.{name}: {err}") from err
    memory = _memory(catalog)
    names = ", ".join(entry.name + (" (pinned)" if entry.pinned else "") for entry in catalog.entries)
    log.info("listening on %s (process %d); models are loaded on demand: %s", where, os.getpid(), names)
    log.info("memory for models: %s; chat page %s/, OpenAI's clients %s/v1", format_nbytes(memory), where, where)
    run(catalog, partial(run_model, every, settings.log_json), memory, listening, settings)


def _memory(catalog: "Catalog") -> int:
    """Return the bytes for all loaded models."""
    from auraflux.machine import free_nbytes
    from auraflux.weights.experts.settings import parse_nbytes

    if catalog.memory is None:
        return int(free_nbytes() * MEMORY_SHARE)
    try:
        return parse_nbytes(catalog.memory)
    except SettingsError as err:
        raise SettingsError(f"the memory for models (memory of the file, --models-memory): {err}") from err


def run_model(
    every: Mapping[str, Mapping[str, Any]], log_json: bool, entry: "Entry", memory_nbytes: int, connection: Connection
) -> None:
    """Plan and load a model in its own process, and run it until the pipe closes."""
    from auraflux.serve.transport.http_process import set_up_log
    from auraflux.serve.transport.link import ModelPlan

    set_up_log(log_json)
    # closing the pipe ends this process
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        planned, chosen = _plan(entry.model, dict(every[entry.name]), memory_nbytes)
        connection.send(ModelPlan(*planned))
        connection.recv()
        open_model_process(entry.model, connection, chosen).run()
    except EOFError:
        # the server does not want the model any more
        return
    except (AurafluxError, MemoryError) as err:
        _report(connection, str(err) or "there is not enough memory.")
    except Exception:
        log.exception("the model %s failed", entry.name)
        _report(connection, "an unexpected error; the server's log has it.")


def _plan(model: str, chosen: dict[str, Any], memory_nbytes: int) -> tuple[Any, dict[str, Any]]:
    """Return the memory of a model, and options with which it takes no more."""
    from dataclasses import replace

    from auraflux.loading.model_plan import plan_model

    wanted = replace(load_options(chosen, cache_settings(chosen), None, None), max_sequences=load_sequences(chosen))
    planned, limited = plan_model(model, wanted, memory_nbytes)
    if planned.device != "cpu":
        return planned, chosen
    experts = limited.expert_settings.memory
    sizes = {"context": limited.context, "cache_memory": limited.cache_memory, "expert_memory": experts}
    return planned, {
        **chosen,
        **{name: str(size) if name != "context" else size for name, size in sizes.items() if size is not None},
    }


def _report(connection: Connection, reason: str) -> None:
    """Tell the server why the model is not loaded: in place of its plan, or later over the link."""
    from auraflux.serve.transport.pipe import UNAVAILABLE

    try:
        connection.send((UNAVAILABLE, reason))
    except OSError:
        log.error("%s", reason)
