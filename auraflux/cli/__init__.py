"""The command line, one file per command.

Commands import torch, numba and rich inside their functions: `auraflux --help` must not wait for them.
"""

import sys
from typing import Any

import click

import auraflux
from auraflux.cli.bench import bench
from auraflux.cli.chat import chat
from auraflux.cli.convert import convert
from auraflux.cli.diff import diff
from auraflux.cli.doctor import doctor
from auraflux.cli.eval import evaluate
from auraflux.cli.follow import follow
from auraflux.cli.generate import generate
from auraflux.cli.inspect import inspect
from auraflux.cli.models.ps import ps
from auraflux.cli.models.recommend import recommend
from auraflux.cli.models.rm import rm
from auraflux.cli.models.run import run
from auraflux.cli.models.show import show
from auraflux.cli.ops import ops
from auraflux.cli.options.command import Group
from auraflux.cli.options.environment import check_environment
from auraflux.cli.output.failure import Failure, describe_os_error, discard_output, escape_unencodable, open_output, print_error
from auraflux.cli.pack import pack
from auraflux.cli.plan import plan
from auraflux.cli.pull import list_models, pull
from auraflux.cli.serve import serve
from auraflux.cli.serving.batch import batch
from auraflux.errors import AurafluxError
from auraflux.interrupt import INTERRUPTED, is_interrupt, leave_when_interrupted, raise_when_interrupted
from auraflux.machine import is_out_of_memory


class Program(Group):
    """A group whose commands may raise this package's errors and be interrupted without a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        open_output()
        escape_unencodable()
        try:
            return super().main(*args, **options)
        except OSError as err:
            discard_output()
            print_error(f"error: {describe_os_error(err)}")
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            raise_when_interrupted()
            return self._invoke(ctx)
        except (KeyboardInterrupt, Exception) as err:
            leave_when_interrupted()
            if not is_interrupt(err):
                raise
            # an interrupt may say what it leaves behind
            said = str(err) if isinstance(err, KeyboardInterrupt) else ""
            # Ctrl-C of a terminal leaves "^C" in the line
            print_error(("\n" if sys.stderr.isatty() else "") + (said or "Interrupted."))
            ctx.exit(INTERRUPTED)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            check_environment()
            return super().invoke(ctx)
        except AurafluxError as err:
            raise Failure(str(err)) from err
        except (MemoryError, RuntimeError) as err:
            if not is_out_of_memory(err):
                raise
            raise Failure("there is not enough memory.") from err
        except OSError as err:
            if err.filename is None:
                raise
            raise Failure(f"{err.filename}: {err.strerror or err}.") from err


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(auraflux.__version__, message="auraflux %(version)s")
def main() -> None:
    """Very large mixture-of-experts language models on modest machines."""


COMMANDS = (
    run,
    generate,
    chat,
    serve,
    batch,
    follow,
    pull,
    list_models,
    rm,
    ps,
    show,
    inspect,
    recommend,
    convert,
    pack,
    plan,
    ops,
    doctor,
    evaluate,
    diff,
    bench,
)
for command in COMMANDS:
    main.add_command(command)
