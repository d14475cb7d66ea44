"""Where the codes of values lie within a page. Keys always lie in rows: a token's codes one after the other.

`PAIRS` is made for tensor cores that read values [D, tokens] and take two neighbouring tokens from one register. Each group of
eight tokens is transposed by blocks: stored row g holds coordinates g D/8 to (g + 1) D/8 of all eight, for tokens 0 and 1
first, then for 2 and 3 and so on, and of such a pair coordinate by coordinate the two codes side by side. In other words

    tokens (c, e) x coordinates (g, x)  ->  stored rows g of codes (c, x, e),   c < 4, e < 2, g < 8, x < D/8,

and every stored row is packed like any other. Bits, words and norms are the same as in `ROWS`; only their order differs.
"""

from enum import Enum

import torch
from torch import Tensor

from auraflux.ops.assumed import HOPPER, assumed

EIGHT = 8  # tokens that are turned together
BLOCK = 16  # tokens that a product takes: pages are made of whole ones
PAIR_BITS = (2, 4, 8)  # which fill bytes; 3 and 6 bits fill three words
PAIR_WIDTHS = (64, 128, 256)


class Arrangement(Enum):
    ROWS = "rows"
    PAIRS = "pairs"

    def stored(self, codes: Tensor) -> Tensor:
        """Put the codes of whole pages, [..., page, D], in the order in which they are packed."""
        if self is Arrangement.ROWS:
            return codes
        page, width = codes.shape[-2:]
        apart = codes.reshape(-1, page // EIGHT, 4, 2, EIGHT, width // EIGHT)  # c e g x
        return apart.permute(0, 1, 4, 2, 5, 3).reshape(codes.shape)

    def restored(self, stored: Tensor) -> Tensor:
        """Undo `stored`."""
        if self is Arrangement.ROWS:
            return stored
        page, width = stored.shape[-2:]
        apart = stored.reshape(-1, page // EIGHT, EIGHT, 4, width // EIGHT, 2)  # g c x e
        return apart.permute(0, 1, 3, 5, 2, 4).reshape(stored.shape)

    def refusal(self, page: int, width: int) -> str | None:
        """Say why pages cannot lie so, if they cannot."""
        if self is Arrangement.ROWS or (page % BLOCK == 0 and width in PAIR_WIDTHS):
            return None
        fits = f"whole blocks of {BLOCK} tokens of width {', '.join(map(str, PAIR_WIDTHS))} can"
        return f"pages of {page} tokens of width {width} cannot lie in pairs; {fits}."


def arrangement_for(device: torch.device | str, key_bits: int, value_bits: int, width: int, page: int) -> Arrangement:
    """Choose the order that the fastest kernel of a device reads."""
    fits = fills_words(key_bits, width) and fills_words(value_bits, width) and Arrangement.PAIRS.refusal(page, width) is None
    return Arrangement.PAIRS if fits and _hopper(torch.device(device)) else Arrangement.ROWS


def fills_words(bits: int, width: int) -> bool:
    """Whether a pair of tokens has whole words of a stored row, or whole threes of words where codes cross their edges."""
    return width * bits // 4 % (32 if bits in PAIR_BITS else 96) == 0


def _hopper(device: torch.device) -> bool:
    if gpu := assumed():
        return gpu == HOPPER
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) == HOPPER
