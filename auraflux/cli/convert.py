"""`auraflux convert`: write a quantized model as an MLX folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auraflux.cli.options.command import Command
from auraflux.cli.options.early_checks import Bits, check_model
from auraflux.cli.options.renamed import Renamed

if TYPE_CHECKING:
    from auraflux.weights.formats.checkpoint import Checkpoint


group_size_option = click.option(
    "--group-size",
    "group",
    cls=Renamed,
    old="--group",
    type=int,
    default=64,
    show_default=True,
    help="Weights that share a scale: 32, 64 or 128.",
)


EXAMPLES = (
    "auraflux convert org/name model-4bit --bits 4",
    "auraflux convert org/name tuned-8bit --bits 8 --merge adapter",
)


@click.command(cls=Command, examples=EXAMPLES)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST", type=click.Path(path_type=Path))
@click.option("--bits", type=Bits(), default=4, show_default=True, help="Bits per weight: 2, 3, 4, 5, 6 or 8.")
@group_size_option
@click.option("--merge", metavar="FOLDER", type=click.Path(path_type=Path), help="Add a LoRA adapter (PEFT) to the weights.")
@click.option("--force", is_flag=True, help="Overwrite an existing model folder.")
def convert(source: str, target: Path, bits: int, group: int, merge: Path | None, force: bool) -> None:
    """Quantize a model and write it as an MLX folder.

    SRC is a folder of safetensors, a GGUF file or a name; DST is the folder to write, which auraflux and mlx-lm load. Weights
    already quantized to --bits or fewer are copied unchanged, and so are quantized embeddings. DST appears when it is complete.
    """
    check_model(source)
    from functools import partial

    from auraflux.adapters.merge import MergingWriter
    from auraflux.adapters.peft_folder import read_adapter
    from auraflux.models import family
    from auraflux.progress import on_terminal
    from auraflux.vision.families import notes_of_copy, tower_names
    from auraflux.weights.convert.mlx_folder import FolderWriter
    from auraflux.weights.convert.mlx_folder import convert as write
    from auraflux.weights.download.pull import locate
    from auraflux.weights.formats.checkpoint import open_checkpoint

    writer = FolderWriter if merge is None else partial(MergingWriter, adapter=read_adapter(merge.name, merge))
    with on_terminal() as report:
        checkpoint = open_checkpoint(locate(source, report))
        total, done = sum(checkpoint.sizes().values()), 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            report("converting", done, total)

        def add(folder: Path) -> None:
            write_tokenizer(checkpoint, folder)

        kind = family(checkpoint.config)
        options: dict[str, Any] = {"bits": bits, "group": group, "writer": writer, "tower": tower_names(checkpoint)}
        write(checkpoint, kind, target, **options, force=force, advance=advance, add=add)
    for note in [*checkpoint.notes, *notes_of_copy(checkpoint)]:
        click.echo(f"note: {note}", err=True)
    click.echo(f"{target}: {sum(path.stat().st_size for path in target.iterdir()) / 2**20:.1f} MiB")


def write_tokenizer(checkpoint: "Checkpoint", folder: Path) -> None:
    """Write the vocabulary and chat template of a GGUF file as tokenizer files of a folder."""
    from auraflux.errors import FormatError
    from auraflux.tokenizer.tokenizer import Tokenizer
    from auraflux.tokenizer.vocabulary.gguf import adds_bos, read_vocabulary
    from auraflux.weights.formats.gguf import GGUFFile

    if not isinstance(checkpoint, GGUFFile):
        return
    try:
        words = read_vocabulary(checkpoint.metadata)
        found = Tokenizer.from_gguf(checkpoint.metadata)
    except FormatError as err:
        checkpoint.notes.append(f"the tokenizer was not converted. {err}")
        return
    words.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": adds_bos(checkpoint.metadata), **found.names}
    if "default" in found.templates:
        config["chat_template"] = found.templates["default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))
