"""Tables of `auraflux bench model`."""

from typing import TYPE_CHECKING, Any

from auraflux.cli.output.units import size

if TYPE_CHECKING:
    from auraflux.bench.model import Speed


def show(document: dict[str, Any], found: "list[Speed]") -> None:
    """Print all tables of a document."""
    from rich.table import Table

    from auraflux.cli.output.screen import stdout

    console, gpu = stdout(), document["device"]
    where = f"{document['machine']['cpu']}, {document['machine']['cores']} cores" if gpu == "cpu" else gpu
    console.print(f"{document['model']} on {where}")
    weights, peak = size(document["weights_nbytes"]), size(document["peak_nbytes"])
    console.print(f"weights {weights}, peak memory of the process {peak}, load {document['load']}")
    if document["not_replayed_because"] is not None:
        console.print(f"steps were not replayed: {document['not_replayed_because']}")
    table = Table("prompt", "sequences", "", *("prefill tokens/s", "ratio", "decode tokens/s", "ratio", "cache"))
    ours = {speed.context: speed for speed in found if speed.who.startswith("auraflux")}
    for speed in found:
        mine = ours[speed.context]
        ratios = [mine.prefill_rate / speed.prefill_rate, mine.decode_rate / speed.decode_rate]
        shown = ["" if speed is mine else f"{ratio:.2f}x" for ratio in ratios]
        held = size(speed.cache_nbytes) if speed.cache_nbytes is not None else ""
        rates = f"{speed.prefill_rate:.1f}", f"{speed.decode_rate:.1f}"
        table.add_row(str(speed.context), str(speed.batch), speed.who, rates[0], shown[0], rates[1], shown[1], held)
    console.print(table)
    if "expert_slots" in document:
        console.print(_expert_table(document, found))
    if "whole_model" in document:
        console.print(whole_table(document["whole_model"], found))
    if "ops_of_a_step" in document:
        console.print(_cost_table(document))


def whole_table(whole: "list[dict[str, Any]] | str", found: "list[Speed]") -> Any:
    """Return the table of predictions for a whole model, one for each speed; or a sentence that says why there are none."""
    from rich.table import Table

    if isinstance(whole, str):
        return f"the whole model cannot be predicted: {whole}"
    title = "the whole model, predicted from these layers"
    table = Table(
        "prompt", "layers", "experts on the GPU", "misses/token", "decode tokens/s", title=title, title_justify="left"
    )
    for speed, each in zip(found, whole, strict=True):
        cells = (
            str(each["layers"]),
            f"{each['slot_share']:.1%}",
            f"{each['misses_per_token']:.1f}",
            f"{each['decode_rate']:.1f}",
        )
        table.add_row(str(speed.context), *cells)
    return table


def _expert_table(document: dict[str, Any], found: "list[Speed]") -> Any:
    from rich.table import Table

    rate = document["copy_nbytes_per_s"]
    title = f"decode with {document['expert_slots']:,} of {document['experts']:,} experts on the GPU"
    title += "" if rate is None else f"; copies to it reach {rate / 1e9:.1f} GB/s"
    table = Table(
        "prompt",
        "hit rate",
        "misses/token",
        "prefetched",
        "on the CPU",
        "MB copied/token",
        "GB/s",
        "of measured peak",
        title=title,
        title_justify="left",
    )
    for speed in found:
        if (each := speed.experts) is None:
            continue
        copied = each.nbytes_per_token * speed.decode_rate
        cells = (
            f"{each.hit_rate:.1%}",
            f"{each.misses_per_token:.1f}",
            f"{each.prefetched_per_token:.1f}",
            f"{each.on_cpu_per_token:.1f}",
            f"{each.nbytes_per_token / 1e6:.1f}",
            f"{copied / 1e9:.2f}",
        )
        table.add_row(str(speed.context), *cells, "" if rate is None else f"{copied / rate:.0%}")
    return table


def _cost_table(document: dict[str, Any]) -> Any:
    from rich.table import Table

    title = "one step, without replay"
    if "kernels_per_layer" in document:
        title += f": {document['kernels_per_layer']} kernels per layer"
    table = Table("op", "calls", "kernels", "us", "share", title=title)
    costs = document["ops_of_a_step"]
    whole = sum(cost["seconds"] for cost in costs.values()) or 1.0
    for name, cost in costs.items():
        kernels = "" if cost["kernels"] is None else str(cost["kernels"])
        share = cost["seconds"] / whole
        bar = "█" * round(20 * share)
        table.add_row(name, str(cost["calls"] or ""), kernels, f"{cost['seconds'] * 1e6:.0f}", f"{share:4.0%} {bar}")
    return table
