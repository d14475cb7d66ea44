"""`ExpertStore`: the experts of a packed model within a budget of memory.

What the budget holds is shared out evenly: every layer gets slots for as many experts. Where all of them fit well, files are
mapped instead, and the system keeps them in memory.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from auraflux.errors import ExpertError, FormatError
from auraflux.ops import Activation, Experts
from auraflux.weights.bank import Bank, MainSlots
from auraflux.weights.expert_files import ExpertFile, ExpertFiles
from auraflux.weights.expert_settings import ExpertSettings, Share, share_out
from auraflux.weights.reader import Reader
from auraflux.weights.streamed import Overlap, Resident, Streamed
from auraflux.weights.traffic import ExpertTraffic, Meter


class ExpertStore:
    """Makes the experts of each layer, and knows what was read for them.

    share        how they are kept
    main_slots   experts of each layer kept in main memory below those of a GPU
    """

    def __init__(
        self,
        files: ExpertFiles,
        share: Share,
        settings: ExpertSettings = ExpertSettings(),  # noqa: B008
        *,
        device: torch.device | str = "cpu",
        main_slots: int | None = None,
    ):
        self.files, self.share, self.verify, self.device = files, share, settings.verify, torch.device(device)
        self.overlap, self.notes = Overlap(settings.hits_first, settings.ahead, settings.guess), [f"experts: {share.reason}."]
        self._main_slots = min(max(main_slots or 0, share.slots), files.count)
        self._meters: dict[str, Meter] = {}
        self._before: Streamed | None = None
        self._check_lanes()
        files.check()
        self.reader = None if share.mapped else Reader(verify=self.verify, rate=settings.disk_rate)
        if self.reader is not None:
            self.reader.probe(files.files)
            self.notes += self.reader.notes
        self._stream = torch.cuda.Stream(self.device) if self.reader is not None and self.device.type == "cuda" else None

    def _check_lanes(self) -> None:
        wanted = {1}
        if self.device.type == "cpu":
            from auraflux.ops.simd.isa import ISA

            wanted.add(ISA.lanes)
        if self.files.lanes not in wanted:
            raise FormatError(
                f"{self.files.folder} was packed with {self.files.lanes} rows side by side; here "
                f"{' or '.join(map(str, sorted(wanted)))} is needed. Pack the model again on this machine."
            )
        kinds = {matrix.kind for file in self.files.files for matrix in file.like.values() if matrix.super_block is not None}
        if kinds and self.device.type == "cuda":
            raise FormatError(
                f"{self.files.folder} holds experts in super-blocks ({', '.join(sorted(kinds))}), which a GPU does not read. "
                "Pack the model again on this machine."
            )

    def layer(
        self, module: str, count: int, hidden: int, inner: int, biases: Mapping[str, Tensor], activation: Activation | None
    ) -> Resident | Streamed:
        """The experts of one mixture. Layers must be asked for in the order in which they run."""
        file = self.files.under(module, count, hidden, inner)
        if self.reader is None:
            return Resident(replace(_mapped(file, self.verify, self.device), **biases, activation=activation))
        meter = self._meters[module] = Meter()
        bank = self._bank(file, self.reader, meter)
        made = Streamed(file, bank, self.reader, meter, self.overlap, biases, activation)
        if self._before is not None:
            self._before.following = made
        self._before = made
        return made

    def _bank(self, file: ExpertFile, reader: Reader, meter: Meter) -> Bank:
        if self._stream is None:
            return Bank(MainSlots(file, self.share.slots, reader, meter))
        from auraflux.weights.device_slots import DeviceSlots, pin

        main = MainSlots(file, self._main_slots, reader, meter)
        note = "main memory for experts could not be locked in place; copies to the GPU take longer."
        if not pin(main) and note not in self.notes:
            self.notes.append(note)
        return Bank(DeviceSlots(Bank(main), self.share.slots, self._stream))

    def traffic(self) -> ExpertTraffic:
        """What was read so far."""
        layers = {module: meter.traffic() for module, meter in self._meters.items()}
        if self.reader is None:
            return ExpertTraffic()
        found = self.reader.meter.traffic()
        counted = ("hits", "ahead", "misses", "guessed", "stall_s")
        summed = {name: sum(getattr(each, name) for each in layers.values()) for name in counted}
        return ExpertTraffic(type(found)(nbytes=found.nbytes, read_s=found.read_s, **summed), layers)


def map_experts(files: ExpertFiles, device: torch.device | str = "cpu") -> ExpertStore:
    """All experts, in mapped files."""
    return ExpertStore(files, share_out(files, 1, files.nbytes, "mapped"), device=device)


def _mapped(file: ExpertFile, verify: bool, device: torch.device) -> Experts:
    """All experts of a layer over its file."""
    whole = torch.from_file(str(file.path), shared=False, size=file.file_nbytes, dtype=torch.uint8).view(
        file.count, file.stride
    )
    if verify:
        for expert in range(file.count):
            if zlib.crc32(memoryview(whole[expert, : file.nbytes].numpy().data)) != file.checksum(expert):
                raise ExpertError(
                    f"expert {expert} of {file.module} cannot be used: {file.path} holds other bytes than were packed; "
                    f"pack the model again."
                )
    return Experts.from_blobs(whole.to(device), file.like)
