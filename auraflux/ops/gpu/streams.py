"""A second CUDA stream that runs concurrently with the current one."""

from functools import cache

import torch

from auraflux.ops.fake_gpu import fake_capability


class CurrentStream:
    """No second stream: launches inside the block follow those before it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def mark(self) -> None:
        pass

    def join(self) -> None:
        pass


class SideStream(CurrentStream):
    """Launches inside the block start after all before it, and run concurrently with those after it."""

    def __init__(self, device: torch.device):
        self.main, self.side = torch.cuda.current_stream(device), _side(device)
        self.until: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        self.side.wait_stream(self.main)
        self.inside = torch.cuda.stream(self.side)
        self.inside.__enter__()

    def __exit__(self, *error: object) -> None:
        self.inside.__exit__(*error)

    def mark(self) -> None:
        """Let `join` wait for the launches so far, not for later ones of other blocks."""
        self.until = self.side.record_event()

    def join(self) -> None:
        """Make later launches wait for the side stream."""
        if self.until is None:
            self.main.wait_stream(self.side)
        else:
            self.main.wait_event(self.until)


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def side_stream(device: torch.device, wanted: bool) -> CurrentStream:
    """Return a second stream of a device if `wanted`; a fake GPU has none."""
    return SideStream(device) if wanted and fake_capability() is None else CurrentStream()
