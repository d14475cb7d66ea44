"""Order of the codes of values within a page. Keys are always in rows: a token's codes are contiguous.

`PAIRS` is made for tensor cores that read values [D, tokens] and take two neighbouring tokens from one register. Each group of
eight tokens is transposed by blocks: stored row g holds coordinates g D/8 to (g + 1) D/8 of all eight, for tokens 0 and 1
first, then for 2 and 3 and so on; within a pair, the two codes of each coordinate are adjacent:

    tokens (c, e) x coordinates (g, x)  ->  stored rows g of codes (c, x, e),   c < 4, e < 2, g < 8, x < D/8,

and every stored row is packed normally. Bits, words and norms are the same as in `ROWS`; only their order differs.
"""

from enum import Enum

import torch
from torch import Tensor

from auraflux.ops.fake_gpu import AMPERE, fake_capability

EIGHT = 8  # tokens that are transposed together
BLOCK = 16  # tokens of a tensor-core product: a page is a multiple
PAIR_BITS = (2, 4, 8)  # which divide a byte; 3 and 6 bits fill three words
PAIR_WIDTHS = (64, 128, 256)


class Arrangement(Enum):
    ROWS = "rows"
    PAIRS = "pairs"

    def stored(self, codes: Tensor) -> Tensor:
        """Permute the codes of complete pages, [..., page, D], to the order in which they are packed."""
        if self is Arrangement.ROWS:
            return codes
        page, width = codes.shape[-2:]
        split = codes.reshape(-1, page // EIGHT, 4, 2, EIGHT, width // EIGHT)  # c e g x
        return split.permute(0, 1, 4, 2, 5, 3).reshape(codes.shape)

    def restored(self, stored: Tensor) -> Tensor:
        """Undo `stored`."""
        if self is Arrangement.ROWS:
            return stored
        page, width = stored.shape[-2:]
        split = stored.reshape(-1, page // EIGHT, EIGHT, 4, width // EIGHT, 2)  # g c x e
        return split.permute(0, 1, 3, 5, 2, 4).reshape(stored.shape)

    def refusal(self, page: int, width: int) -> str | None:
        """Return why pages of this shape cannot have this arrangement; None if they can."""
        if self is Arrangement.ROWS or (page % BLOCK == 0 and width in PAIR_WIDTHS):
            return None
        fits = f"a multiple of {BLOCK} tokens and a width of {', '.join(map(str, PAIR_WIDTHS))} are needed"
        return f"pages of {page} tokens of width {width} cannot be arranged in pairs; {fits}."


def arrangement_for(device: torch.device | str, key_bits: int, value_bits: int, width: int, page: int) -> Arrangement:
    """Return the arrangement that the fastest kernel of a device reads."""
    fits = fills_words(key_bits, width) and fills_words(value_bits, width) and Arrangement.PAIRS.refusal(page, width) is None
    return Arrangement.PAIRS if fits and _has_tensor_cores(torch.device(device)) else Arrangement.ROWS


def fills_words(bits: int, width: int) -> bool:
    """Return whether a pair of tokens fills complete words of a stored row, or multiples of three where codes cross words."""
    return width * bits // 4 % (32 if bits in PAIR_BITS else 96) == 0


def _has_tensor_cores(device: torch.device) -> bool:
    """Return whether a device runs the kernels that read pairs."""
    if gpu := fake_capability():
        return gpu >= AMPERE
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= AMPERE
