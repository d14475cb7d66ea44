"""Byte strings between ranks, and the serialization of key calibration."""

import torch
from safetensors.torch import load, save

from auraflux.cache.key_calibration import KeyCalibration, ModelCalibration
from auraflux.distributed.comm.group import Group

NAMES = ("scale", "along", "across", "frequencies")


def send_bytes(group: Group, data: bytes, to: int) -> None:
    """Send bytes to a rank, which calls `receive_bytes`."""
    group.send_message({"nbytes": len(data)}, to)
    if data:
        group.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)


def receive_bytes(group: Group, source: int) -> bytes:
    """Receive the bytes that a rank sends."""
    nbytes = group.receive_message(source)["nbytes"]
    return bytes(group.receive(nbytes, source=source, dtype=torch.uint8).numpy()) if nbytes else b""


def pack_calibration(calibration: ModelCalibration) -> bytes:
    """Serialize the key calibration of all layers."""
    tensors = {
        f"{number}.{int(layer.interleaved)}.{name}": getattr(layer, name).contiguous()
        for number, layer in calibration.layers.items()
        for name in NAMES
    }
    return save(tensors) if tensors else b""


def unpack_calibration(data: bytes) -> ModelCalibration:
    """Deserialize a key calibration."""
    tensors = load(data) if data else {}
    found = {}
    for number, interleaved in sorted({tuple(map(int, name.split(".")[:2])) for name in tensors}):
        fields = {name: tensors[f"{number}.{interleaved}.{name}"] for name in NAMES}
        found[number] = KeyCalibration(**fields, interleaved=bool(interleaved))
    return ModelCalibration(found)
