"""`auraflux pack`: write a model whose experts can stay on disk."""

from pathlib import Path

import click

from auraflux.cli.convert import group_size_option, write_tokenizer
from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import Bits, check_model

EXAMPLES = (
    "auraflux pack org/name packed-model --quantize 4",
    'auraflux generate packed-model -p "Hello" --expert-memory 4GB',
)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--quantize", "bits", type=Bits(), metavar="BITS", help="Quantize weights to 2, 3, 4, 5, 6 or 8 bits.")
@group_size_option
@click.option(
    "--for",
    "device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Device whose kernels the expert layout is for: this CPU, or a GPU.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing model folder, or a partial one.")
def pack(source: str, target: Path, bits: int | None, group: int, device: str, force: bool) -> None:
    """Write a mixture-of-experts model for expert offloading to disk.

    SRC is a folder of safetensors, a GGUF file or a name; DST is the folder to write, which runs in less memory than its
    experts need: `auraflux generate DST --expert-memory 4GB`. Quantized weights are copied unchanged unless --quantize sets
    fewer bits; unquantized experts need --quantize.

    DST is written as DST.partial and renamed when it is complete. Run the same command again to resume after an interruption.
    """
    check_model(source)
    from auraflux.engine import calibration
    from auraflux.models import family
    from auraflux.models.config import experts_per_token
    from auraflux.ops.simd.isa import ISA
    from auraflux.progress import on_terminal
    from auraflux.vision.families import notes_of_copy, tower_names
    from auraflux.weights.convert.pack import PARTIAL
    from auraflux.weights.convert.pack import pack as write
    from auraflux.weights.download.pull import locate
    from auraflux.weights.experts.packed_files import open_experts
    from auraflux.weights.experts.settings import format_nbytes
    from auraflux.weights.formats.checkpoint import open_checkpoint

    def add(folder: Path) -> None:
        write_tokenizer(checkpoint, folder)
        if bits is None:
            calibration.copy_into(checkpoint.path, folder)

    try:
        with on_terminal() as report:
            checkpoint = open_checkpoint(locate(source, report))
            kind, lanes = family(checkpoint.config), ISA.lanes if device == "cpu" else 1
            write(
                checkpoint,
                kind,
                target,
                lanes=lanes,
                bits=bits,
                group=group,
                force=force,
                report=report,
                add=add,
                tower=tower_names(checkpoint),
            )
    except KeyboardInterrupt as err:
        kept = f"Interrupted. Progress is saved in {target}{PARTIAL}; run the same command again to resume."
        raise KeyboardInterrupt(kept) from err
    for note in [*checkpoint.notes, *notes_of_copy(checkpoint)]:
        click.echo(f"note: {note}", err=True)
    found = open_experts(target)
    other = sum(path.stat().st_size for path in target.iterdir() if path.is_file())
    click.echo(
        f"{target}: {found.count * len(found.files)} experts in {len(found.files)} layers, {found.nbytes / 2**20:.1f} MiB; "
        f"other weights {other / 2**20:.1f} MiB"
    )
    minimum = experts_per_token(checkpoint.config) * sum(file.stride for file in found.files)
    click.echo(f"needs --expert-memory {format_nbytes(minimum).replace(' ', '')} or more")
