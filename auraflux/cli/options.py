"""Options that several commands share: which model, how it is kept, how tokens are chosen."""

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from auraflux.cli.importing import importing
from auraflux.defaults import AUTO, CALIBRATE, FIRST, KV, KV_OF, NEWEST
from auraflux.errors import SettingsError

if TYPE_CHECKING:
    from auraflux.cache import CacheSettings
    from auraflux.run.language import LanguageModel
    from auraflux.run.ranks.parallel import Parallel
    from auraflux.weights.expert_settings import ExpertSettings

Command = TypeVar("Command", bound=Callable[..., Any])


def _others() -> str:
    """The families whose caches are kept otherwise, by how they are kept."""
    kept = {kv: [family for family, own in KV_OF.items() if own == kv] for kv in dict.fromkeys(KV_OF.values())}
    return ", ".join(f"{kv} for {', '.join(families)}" for kv, families in kept.items())


model_argument = click.argument("model", required=False)

EXPERTS = [
    click.option(
        "--expert-memory", metavar="SIZE", help="Memory for the experts of a packed model, such as 4GB; others stay on disk."
    ),
    click.option(
        "--expert-io",
        type=click.Choice(["auto", "mapped", "direct"]),
        default="auto",
        help="Map expert files, or read experts.",
    ),
    click.option("--expert-main-memory", metavar="SIZE", help="For a GPU: main memory for experts on their way there."),
    click.option("--expert-guess", is_flag=True, help="Read ahead what the next layer's router chooses when it is run early."),
    click.option(
        "--expert-balance",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        help="With experts=N: have all disks read as much as each other; auto does where experts are read from disk.",
    ),
    click.option("--verify/--no-verify", default=True, help="Hold experts against their checksums when they are first read."),
]
calibrate_option = click.option(
    "--calibrate",
    default=CALIBRATE,
    show_default=True,
    metavar="WHAT",
    help="What codes leave out of keys: auto finds out when a model is first loaded; off for nothing; or a file.",
)
LOADING = [
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option(
        "--kv",
        default=AUTO,
        show_default=True,
        metavar="KXVY",
        help=f"Bits of keys and values in the cache, or none; auto is {KV}, {_others()}.",
    ),
    click.option("--protect-first", type=int, default=0, metavar="N", help="Leave the first N attention layers uncompressed."),
    click.option("--protect-last", type=int, default=0, metavar="N", help="Leave the last N attention layers uncompressed."),
    click.option(
        "--first", type=int, metavar="N", help=f"Read the first N positions uncompressed; {FIRST} where keys are coded."
    ),
    click.option(
        "--newest", type=int, metavar="N", help=f"Read the newest N positions uncompressed; {NEWEST} where keys are coded."
    ),
    calibrate_option,
    click.option("--sparse-v", type=float, default=0.0, metavar="W", help="Pass over values whose weight is below W."),
    click.option("--context", type=int, metavar="N", help="Most tokens of a text; by default what model and memory allow."),
    click.option("--quantize", type=int, metavar="BITS", help="Round dense weights to so many bits while loading."),
    click.option(
        "--graph/--no-graph",
        "graphs",
        default=True,
        help="Replay steps of decoding; on a GPU as CUDA graphs, and pieces of long prompts too.",
    ),
    click.option("--exact", is_flag=True, help="Multiply float32 activations, not int8 ones."),
    click.option(
        "--invariant",
        is_flag=True,
        help="Have a GPU give the same bits whatever is read or written beside a text; a CPU always does.",
    ),
    click.option(
        "--speculate",
        metavar="WHAT",
        help="Guess tokens and check several at once: ngram guesses from the text so far, mtp with the model's own further "
        "layer; or a smaller MODEL does.",
    ),
    *EXPERTS,
]
timeout_option = click.option(
    "--rank-timeout",
    type=float,
    default=15.0,
    show_default=True,
    metavar="S",
    help="Seconds after which a rank that does not answer is given up.",
)
HOSTS = [
    click.option(
        "--hosts",
        "rank_hosts",
        metavar="A,B",
        help="Addresses or names of the machines in the order of their ranks, this one first: 10.0.0.1,10.0.0.2; by default "
        "all are started here.",
    ),
    click.option(
        "--expert-use",
        default="auto",
        show_default=True,
        metavar="FILE",
        help="How often experts are chosen, by which ranks get theirs: auto for what was counted here before, or off.",
    ),
    timeout_option,
]
RANKS = [
    click.option(
        "--parallel",
        "divided",
        metavar="MODE=N",
        help="Divide the model among N ranks: pipeline=2, or pipeline=2,experts=2 among four. See docs/distributed.md.",
    ),
    *HOSTS,
]
SAMPLING = [
    click.option("--max-tokens", "-n", type=int, metavar="N", help="Most tokens to write; by default until the text ends."),
    click.option("--temperature", "-t", type=float, help="0 always takes the likeliest token."),
    click.option("--top-k", type=int, help="Draw from the K likeliest tokens."),
    click.option("--top-p", type=float, help="Draw from the likeliest tokens that together have this probability."),
    click.option("--min-p", type=float, help="Draw from tokens with at least this share of the likeliest one's probability."),
    click.option("--repetition-penalty", type=float, help="Divide scores of tokens that were there; 1 is off."),
    click.option("--presence-penalty", type=float, help="Lower scores of tokens that were written; 0 is off."),
    click.option("--frequency-penalty", type=float, help="Lower them once for each time; 0 is off."),
    click.option("--seed", type=int, help="The same seed gives the same text."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
]
CACHE_NAMES = ("protect_first", "protect_last", "first", "newest", "sparse_v")
LOADING_NAMES = ("device", "quantize", "exact", "invariant", "context", "graphs", "calibrate", "speculate")


def options(group: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """Give a command all options of a group."""

    def add(command: Command) -> Command:
        for option in reversed(group):
            command = option(command)
        return command

    return add


def cache_settings(chosen: dict[str, Any]) -> "CacheSettings":
    """How the options want keys and values kept."""
    from auraflux.cache import CacheSettings

    return CacheSettings(chosen["kv"], **{name: chosen[name] for name in CACHE_NAMES})


def expert_settings(chosen: dict[str, Any]) -> "ExpertSettings":
    """How the options want experts kept."""
    from auraflux.weights.expert_settings import ExpertSettings

    memory, io, main_memory = (chosen[f"expert_{name}"] for name in ("memory", "io", "main_memory"))
    return ExpertSettings(
        memory, io, main_memory, guess=chosen["expert_guess"], verify=chosen["verify"], balance=chosen["expert_balance"]
    )


def load_model(model: str | None, chosen: dict[str, Any], *, chat: bool = False, **more: Any) -> "LanguageModel":
    """Load what the options ask for, with progress, and say what should be known about it; `chat` if templates are rendered."""
    if chosen.get("divided"):
        hush_torch()
    if chat:
        from auraflux.run.template_process import process

        # it starts beside what is imported here
        process.warm_up()
    with importing():
        settings = _begin_compiling(chosen)
        from auraflux.run.begin import end_compiling
        from auraflux.run.load import load
    try:
        given = {name: chosen[name] for name in LOADING_NAMES} | {"parallel": _parallel(model, chosen)}
        loaded = load(model, kv=settings, expert_memory=expert_settings(chosen), **given, **more)
    finally:
        end_compiling()
    for note in loaded.notes:
        click.echo(f"note: {note}", err=True)
    return loaded


def _begin_compiling(chosen: dict[str, Any]) -> "CacheSettings":
    """Begin to compile kernels where the options ask for a CPU, before the rest is imported; give how they want keys kept."""
    from auraflux.ops.simd.folder import nothing_compiled
    from auraflux.run.begin import begin_compiling
    from auraflux.run.device import find_device

    settings = cache_settings(chosen)
    if find_device(chosen["device"]).type == "cpu":
        if not sys.stderr.isatty() and nothing_compiled():
            click.echo("note: kernels are compiled for this processor on first use, which takes some seconds.", err=True)
        if not chosen.get("divided"):
            begin_compiling(settings, chosen["exact"])
    return settings


def hush_torch() -> None:
    """Keep torch from writing traces of its own when a rank is gone, which is told in a sentence; before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _parallel(model: str | None, chosen: dict[str, Any]) -> "Parallel | None":
    """How the options want the model divided; a process that torchrun started as another rank follows, and ends here."""
    text = chosen.get("divided")
    if not text:
        if chosen.get("rank_hosts"):
            raise SettingsError("--hosts names machines, but nothing is divided among them. Give --parallel, too: pipeline=2.")
        return None
    from auraflux.run.ranks.devices import launched
    from auraflux.run.ranks.parallel import parse_parallel

    ranks = chosen["rank_hosts"], chosen["rank_timeout"], chosen.get("restart", False), chosen["expert_use"]
    wanted = parse_parallel(text, *ranks)
    if launched():
        _follow_launched(model, wanted)
    return wanted


def _follow_launched(model: str | None, wanted: "Parallel") -> None:
    from auraflux.run.ranks.follow import follow

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != wanted.mesh.size:
        raise SettingsError(f"torchrun started {size} processes, and --parallel asks for {wanted.mesh.size}.")
    if wanted.restart or wanted.hosts:
        raise SettingsError("torchrun knows the hosts and restarts ranks (--max-restarts): leave --hosts and --restart out.")
    if rank == 0:
        return
    if model is None:
        raise SettingsError("name the model: ranks do not agree on a default.")
    follow(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), model, rank=rank, timeout_s=wanted.timeout_s)
    # connections that are waited on would keep the process
    os._exit(0)


def sampling(chosen: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The sampling settings that were given, over the command's own. Wrong ones are refused before a model is loaded."""
    from auraflux.run.sampling import Sampling

    names = [field.name for field in fields(Sampling)]
    found = {**defaults, **{name: chosen[name] for name in names if chosen.get(name) not in (None, ())}}
    Sampling(**found)
    return found
