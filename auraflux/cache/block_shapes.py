"""Shapes of block-sparse attention layers: a page holds a block, so that a selection of blocks is a page table."""

from dataclasses import dataclass, replace

from auraflux.cache.layer_shapes import RECENT_PAGE, LayerContext, Share, width_refusal
from auraflux.cache.layers.block_sparse import BlockSparseLayer
from auraflux.cache.layers.compressed import CompressedEntries
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.layers.head_blocks import HeadBlocksLayer
from auraflux.cache.layers.quantized import QuantizedLayer
from auraflux.cache.layers.sparse_latent import IndexKeys
from auraflux.cache.settings import Bits, CacheSettings
from auraflux.errors import SettingsError

NO_WINDOW = "block-sparse attention has no full-precision window: leave out --sink-tokens and --recent-window."


@dataclass(frozen=True)
class HeadBlocksShape:
    """Block-sparse attention with a selection for each group of KV heads: a token attends to the `top_k` best blocks.

    heads        number of KV heads
    block_size   tokens per block
    index_heads  of the queries that select blocks, each for as many KV heads
    index_width  of a token's index key
    local        blocks, the token's own included, that are always among the best
    """

    heads: int
    width: int
    block_size: int
    index_heads: int
    index_width: int
    top_k: int
    local: int
    attends = True
    span = None

    def sliced(self, share: Share) -> "HeadBlocksShape":
        """Return the same shape: tensor parallelism is refused."""
        return self

    @property
    def page(self) -> int:
        """Tokens of a page: one block, so that a selection of blocks is a page table."""
        return self.block_size

    @property
    def title(self) -> str:
        return f"block-sparse attention, top {self.top_k} blocks of {self.block_size} tokens per head"

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 4 * self.heads * self.width + 2 * self.index_width

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return width_refusal(self.width)

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> HeadBlocksLayer:
        group, settings, heads = cache.group(None, self.block_size), cache.settings, self.heads // self.index_heads
        if group.page_shard.is_sharded:
            raise SettingsError("block-sparse attention does not support context parallelism.")
        kv: list[DenseLayer | QuantizedLayer] = []
        for _ in range(self.index_heads):
            if bits is None:
                kv.append(DenseLayer(group, heads, self.width, self.width, cache.dtype))
            elif settings.sink_tokens or settings.recent_window:
                raise SettingsError(NO_WINDOW)
            else:
                kv.append(QuantizedLayer(group, heads, self.width, bits, settings.seed, settings.sparse_v))
        return HeadBlocksLayer(kv, IndexKeys(group, self.index_width, cache.dtype), self.top_k, self.local)


@dataclass(frozen=True)
class BlockSparseShape:
    """Block-sparse attention with keys and values per head: a token attends to `top_k` full blocks and the last, partial one.

    heads        number of KV heads
    block_size   tokens per block
    index_width  of the keys that select blocks
    """

    heads: int
    width: int
    block_size: int
    index_width: int
    top_k: int
    attends = True
    span = None

    def sliced(self, share: Share) -> "BlockSparseShape":
        """Return the shape with a rank's heads; every rank selects blocks."""
        return replace(self, heads=len(share(self.heads)))

    @property
    def page(self) -> int:
        """Tokens of a page: one block, so that a selection of blocks is a page table."""
        return self.block_size

    @property
    def title(self) -> str:
        return f"block-sparse attention, top {self.top_k} blocks of {self.block_size} tokens"

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 4 * self.heads * self.width + 2 * self.index_width // self.block_size

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return width_refusal(self.width)

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> BlockSparseLayer:
        group, settings = cache.group(None, self.block_size), cache.settings
        if group.page_shard.is_sharded:
            raise SettingsError("block-sparse attention does not support context parallelism.")
        pending = cache.group(self.block_size, RECENT_PAGE)
        keys = CompressedEntries(group, pending, self.index_width, self.block_size, False, cache.dtype)
        if bits is None:
            return BlockSparseLayer(DenseLayer(group, self.heads, self.width, self.width, cache.dtype), keys, self.top_k)
        if settings.sink_tokens or settings.recent_window:
            raise SettingsError(NO_WINDOW)
        quantized = QuantizedLayer(group, self.heads, self.width, bits, settings.seed, settings.sparse_v)
        return BlockSparseLayer(quantized, keys, self.top_k)
