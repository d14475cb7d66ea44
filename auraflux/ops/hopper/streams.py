"""Work on a second stream of a GPU, beside what the current one does."""

from functools import cache

import torch

from auraflux.ops.assumed import assumed


class Here:
    """No second stream: what is launched inside the block follows what was launched before it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def join(self) -> None:
        pass


class Beside(Here):
    """What is launched inside the block begins when all before it has ended, and runs beside what is launched after it."""

    def __init__(self, device: torch.device):
        self.main, self.side = torch.cuda.current_stream(device), _side(device)

    def __enter__(self) -> None:
        self.side.wait_stream(self.main)
        self.inside = torch.cuda.stream(self.side)
        self.inside.__enter__()

    def __exit__(self, *error: object) -> None:
        self.inside.__exit__(*error)

    def join(self) -> None:
        """Let what follows wait for all of it."""
        self.main.wait_stream(self.side)


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def beside(device: torch.device, wanted: bool) -> Here:
    """A second stream of a device, if one is wanted; a GPU that is only assumed has none."""
    return Beside(device) if wanted and assumed() is None else Here()
