"""What is compiled for Hopper without a GPU of `_hopper_stream.py`, see `ops/_compile.py`."""

from auraflux.ops._triton import Build
from auraflux.ops.linear._hopper_stream import MOST_WEIGHTS, matvec


def _builds() -> list[Build]:
    """One weight, three, and two of an MLP; from a normalised stream, with and without something to add."""
    weight, names = "*i8 *i64 *i64", "wsby"
    options = {"num_warps": 4, "maxnreg": 128}

    def absent(first: int) -> dict[str, None]:
        return {f"{name}{number}": None for number in range(first, MOST_WEIGHTS) for name in names}

    none = {"end0": None, "end1": None, "end2": None}
    sizes = {"TILES": 1, "W": 4, "D": 3}
    one = {**absent(1), **none, "COUNT": 1, "GATED": False, "K": 8192, **sizes}
    three = {**absent(3), "end2": None, "COUNT": 3, "GATED": False, "K": 2048, **sizes}
    gated = {**absent(2), **none, "y1": None, "COUNT": 1, "GATED": True, "K": 4096, **sizes}
    several = " ".join([f"{weight} *bf16"] * 3)
    plain = {"delta": None, "norm": None, "total": None}
    added, alone = "*bf16 *bf16 *fp32 *bf16 fp32", "*bf16 *fp32 *bf16 fp32"
    return [
        Build(matvec, f"*bf16 fp32 {weight} *bf16", {**one, **plain}, hot=True, options=options),
        Build(matvec, f"*bf16 fp32 {several} i32 i32", {**three, **plain}, hot=True, options=options),
        Build(matvec, f"*bf16 fp32 {weight} *bf16 {weight}", {**gated, **plain}, hot=True, options=options),
        Build(matvec, f"{alone} {several} i32 i32", {**three, "delta": None}, hot=True, options=options),
        Build(matvec, f"{added} {several} i32 i32", {**three, "K": 4096}, hot=True, options=options),
        Build(matvec, f"{added} {weight} *bf16 {weight}", {**gated, "TILES": 2}, hot=True, options=options),
        Build(matvec, f"{added} {weight} *bf16 {weight}", {**gated, "K": 2048, "TILES": 4}, hot=True, options=options),
        Build(matvec, f"{added} {weight} *bf16 {weight}", {**gated, "K": 8192}, hot=True, options=options),
    ]


STREAM_BUILDS = _builds()
