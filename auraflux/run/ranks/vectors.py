"""Bytes of any number between ranks, and what is known of a model's keys as bytes."""

import torch
from safetensors.torch import load, save

from auraflux.cache.calibration import LayerVectors, ModelVectors
from auraflux.run.ranks.group import Group

NAMES = ("scale", "along", "across", "frequencies")


def send_bytes(group: Group, data: bytes, to: int) -> None:
    """Send bytes; `collected` takes them in."""
    group.say({"nbytes": len(data)}, to)
    if data:
        group.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)


def collected(group: Group, source: int) -> bytes:
    """Bytes that another rank sends."""
    nbytes = group.hear(source)["nbytes"]
    return bytes(group.receive(nbytes, source=source, dtype=torch.uint8).numpy()) if nbytes else b""


def pack_vectors(vectors: ModelVectors) -> bytes:
    """The vectors of all layers."""
    tensors = {
        f"{number}.{int(layer.interleaved)}.{name}": getattr(layer, name).contiguous()
        for number, layer in vectors.layers.items()
        for name in NAMES
    }
    return save(tensors) if tensors else b""


def unpack_vectors(data: bytes) -> ModelVectors:
    """What was packed."""
    tensors = load(data) if data else {}
    found = {}
    for number, interleaved in sorted({tuple(map(int, name.split(".")[:2])) for name in tensors}):
        parts = {name: tensors[f"{number}.{interleaved}.{name}"] for name in NAMES}
        found[number] = LayerVectors(**parts, interleaved=bool(interleaved))
    return ModelVectors(found)
