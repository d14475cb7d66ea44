"""`auraflux pack`: write a model so that its experts can stay on disk."""

from pathlib import Path

import click


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--quantize", "bits", type=int, metavar="BITS", help="Round weights to so many bits: 2, 3, 4, 5, 6 or 8.")
@click.option("--group", type=int, default=64, show_default=True, help="Weights that share a scale: 32, 64 or 128.")
@click.option(
    "--for",
    "device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Whose kernels will read the experts: this processor's, or a GPU's.",
)
@click.option("--force", is_flag=True, help="Replace a model folder that is already there, or a part of one.")
def pack(source: str, target: Path, bits: int | None, group: int, device: str, force: bool) -> None:
    """Write a mixture whose experts can be read from disk.

    SRC is a folder of safetensors, a GGUF file or a name; DST is the folder to write, which runs in less memory than its
    experts need: `auraflux generate DST --expert-memory 4GB`. Quantized weights stay as they are unless --quantize asks for
    fewer bits; experts that are not quantized need it.

    DST is written as DST.partial and gets its name when it is whole. What was interrupted is gone on with by the same command.
    """
    from auraflux.cli.convert import write_tokenizer
    from auraflux.models import family
    from auraflux.models.config import experts_per_token
    from auraflux.ops.simd.isa import ISA
    from auraflux.run import calibration
    from auraflux.run.progress import on_terminal
    from auraflux.weights.checkpoint import open_checkpoint
    from auraflux.weights.expert_files import open_experts
    from auraflux.weights.expert_settings import size
    from auraflux.weights.pack import PARTIAL
    from auraflux.weights.pack import pack as write
    from auraflux.weights.pull import locate

    def add(folder: Path) -> None:
        write_tokenizer(checkpoint, folder)
        if bits is None:
            calibration.carry(checkpoint.path, folder)

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
            )
    except KeyboardInterrupt:
        click.echo(f"note: what is done is kept in {target}{PARTIAL}; the same command goes on with it.", err=True)
        raise
    for note in checkpoint.notes:
        click.echo(f"note: {note}", err=True)
    found = open_experts(target)
    rest = sum(path.stat().st_size for path in target.iterdir() if path.is_file())
    click.echo(
        f"{target}: {found.count * len(found.files)} experts in {len(found.files)} layers, {found.nbytes / 2**20:.1f} MiB; "
        f"all else {rest / 2**20:.1f} MiB"
    )
    least = experts_per_token(checkpoint.config) * sum(file.stride for file in found.files)
    click.echo(f"runs with --expert-memory {size(least).replace(' ', '')} or more")
