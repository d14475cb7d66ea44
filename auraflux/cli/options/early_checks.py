"""Checks of a command line before torch is imported, which takes seconds: a typing error is refused at once."""

from pathlib import Path
from typing import Any

import click

from auraflux.adapters.names import check_names, parse_adapters
from auraflux.cli.options.settings import cache_settings, expert_settings
from auraflux.defaults import CALIBRATIONS, WEIGHT_BITS
from auraflux.durations import parse_latency
from auraflux.errors import FormatError, InputError, SettingsError

DEVICES = ("auto", "cpu", "cuda")
DRAFTERS = ("ngram", "mtp")  # --speculate without a draft model
MAX_CONTEXT = 1 << 40
SIZES = ("gpu_memory", "expert_memory", "expert_host_memory", "cache_memory", "prefix_disk")


class Bits(click.ParamType):
    """Bits per weight."""

    name = "bits"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        known = ", ".join(map(str, WEIGHT_BITS))
        if not str(value).isdecimal() or int(value) not in WEIGHT_BITS:
            self.fail(f"{str(value)[:80]!r} is not one of {known} bits per weight.", param, ctx)
        return int(value)


def check_model(name: str | None) -> None:
    """Refuse a name that cannot be a model, a path without one, and a model type that is not supported."""
    from auraflux.models import family_name
    from auraflux.weights.download.pull import find_local
    from auraflux.weights.formats.model_files import check_files, read_config

    if name is None:
        return
    try:
        path = find_local(name)
    except FormatError as err:
        if " " in name.strip():
            raise FormatError(f"{err} A prompt is given with -p.") from err
        raise
    if path is None:
        return
    if path.is_dir():
        # before the weights: a model that is not supported is the better reason
        family_name(read_config(path))
    check_files(path)


def check_loading(model: str | None, chosen: dict[str, Any]) -> None:
    """Refuse options of loading that no model supports, and a path that is no model."""
    from auraflux.distributed.parallel import parse_parallel

    check_device(chosen["device"])
    check_sizes(chosen)
    check_latency(chosen.get("target_itl"))
    cache_settings(chosen)
    expert_settings(chosen)
    check_context(chosen["context"])
    check_calibration(chosen["calibrate"])
    check_names(parse_adapters(chosen.get("adapters", ())))
    if chosen.get("ranks"):
        parse_parallel(chosen["ranks"], chosen["rank_hosts"], chosen["rank_timeout"], expert_counts=chosen["expert_counts"])
    elif chosen.get("rank_hosts"):
        raise SettingsError("--hosts needs --parallel, such as --parallel pipeline=2; without it there is one rank.")
    for name in (model, None if chosen["speculate"] in DRAFTERS else chosen["speculate"]):
        check_model(name)


def check_device(name: str) -> None:
    """Refuse a device that is none of torch's names."""
    kind, colon, number = name.partition(":")
    if kind not in DEVICES or (colon and not (kind == "cuda" and number.isdecimal())):
        raise InputError(f"there is no device {name!r:.80}; use auto, cpu, cuda, or cuda:1 for the second GPU.")


def check_sizes(chosen: dict[str, Any]) -> None:
    """Refuse what is not a size in bytes."""
    from auraflux.weights.experts.settings import parse_nbytes

    for name in SIZES:
        if (given := chosen.get(name)) is not None and (name, given) != ("cache_memory", "half"):
            try:
                parse_nbytes(given)
            except SettingsError as err:
                raise SettingsError(f"--{name.replace('_', '-')}: {err}") from err


def check_latency(target_itl: str | None) -> None:
    """Refuse what is not a latency."""
    if target_itl is not None:
        try:
            parse_latency(target_itl)
        except SettingsError as err:
            raise SettingsError(f"--target-itl: {err}") from err


def check_context(context: int | None) -> None:
    if context is not None and not 1 <= context <= MAX_CONTEXT:
        raise SettingsError(f"context={context!r:.80} must be an integer from 1 to {MAX_CONTEXT:,}.")


def check_calibration(calibrate: str) -> None:
    """Refuse a file of a key calibration that cannot be read."""
    from auraflux.weights.formats.untrusted import regular_file

    if calibrate not in CALIBRATIONS:
        regular_file(Path(calibrate))
