"""What fits where when a model is divided among machines, and how fast a token would come, from sizes and speeds alone.

A token reads every weight it uses once, so that its time is the sum of what memory, disks and the network take for their
bytes. Nothing is computed for free here but arithmetic, which one token's weights keep waiting on any machine.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from auraflux.cache import AttentionShape, Cache, CacheSettings
from auraflux.errors import SettingsError
from auraflux.models.config import experts_per_token, has_experts
from auraflux.run.ranks.split import LAYER, Sizes
from auraflux.weights.expert_settings import parse_nbytes
from auraflux.weights.plan import KINDS
from auraflux.weights.stored import Checkpoint

USED = 0.8  # of a machine's memory, for weights; the rest is the system's and the cache's
MOST = 1 << 16  # ranks among which heads that share what they keep may be split
# bytes a second that nobody has measured: of an SSD, and of two channels of DDR4
USUAL_DISK = 2e9
USUAL_MEMORY = 20e9


@dataclass(frozen=True)
class Host:
    """A machine: its memory, and how many bytes a second its disk and its memory give."""

    memory_nbytes: int
    disk_rate: float = USUAL_DISK
    memory_rate: float = USUAL_MEMORY

    @property
    def room(self) -> int:
        return int(self.memory_nbytes * USED)


def is_figure(text: str) -> bool:
    """Whether a machine is described by its memory, and by its disk or not."""
    try:
        for each in text.split("/", 1):
            parse_nbytes(each)
    except SettingsError:
        return False
    return True


def parse_hosts(text: str) -> list[Host]:
    """Machines as users write them: "16GB,32GB/3GB" has a disk of 3 GB/s in the second."""
    hosts = []
    for each in text.split(","):
        memory, _, disk = each.strip().partition("/")
        try:
            hosts.append(Host(parse_nbytes(memory), float(parse_nbytes(disk)) if disk else USUAL_DISK))
        except SettingsError as err:
            raise SettingsError(
                f"{each.strip()!r:.80} is not a size, like 16GB or 16GB/3GB, nor an address, like 10.0.0.1."
            ) from err
        if hosts[-1].memory_nbytes <= 0 or hosts[-1].disk_rate <= 0:
            raise SettingsError(
                f"{each.strip()!r} is no machine. Write it like 16GB, or 16GB/3GB with what its disk reads a second."
            )
    return hosts


@dataclass(frozen=True)
class Kept:
    """What a layer keeps of a text so long, which every token reads: bytes.

    full     it sees everything, so that its pages can be dealt out
    by_head  each head has keys and values of its own
    sums     bytes of what a rank finds for a token in its pages, all heads of it
    """

    nbytes: int
    full: bool
    by_head: bool
    sums: int


@dataclass(frozen=True)
class Weights:
    """Bytes of a model.

    dense    of each layer, without its experts
    experts  of each layer, all of them
    ends     of the embedding and the head
    head     of the head alone
    active   the share of a layer's experts that a token uses; chosen  how many these are
    hidden   numbers of a row
    packed   experts may stay on disk
    heads    of keys in the layer that has fewest
    unsliced why heads cannot be split; None where they can
    kept     what layers keep of a text; none where no context was asked for
    """

    dense: list[int]
    experts: list[int]
    ends: int
    head: int
    active: float
    hidden: int
    packed: bool
    chosen: int = 1
    heads: int = 1
    unsliced: str | None = None
    kept: tuple[Kept, ...] = ()

    @property
    def sizes(self) -> Sizes:
        return Sizes([a + b for a, b in zip(self.dense, self.experts, strict=True)], self.ends)

    def with_cache(self) -> "Weights":
        """The same where each layer has what it keeps beside its weights: a token reads both."""
        kept = [each.nbytes for each in self.kept] + [0] * (len(self.dense) - len(self.kept))
        return replace(self, dense=[a + b for a, b in zip(self.dense, kept, strict=True)])

    def stage(self, held: range) -> "Weights":
        """Those of some layers; the first have the embedding and the head beside them."""
        some = slice(held.start, held.stop)
        ends = (self.ends, self.head) if held.start == 0 else (0, 0)
        return replace(
            self, dense=self.dense[some], experts=self.experts[some], ends=ends[0], head=ends[1], kept=self.kept[some]
        )


def weights_of(
    checkpoint: Checkpoint,
    module: Any,
    context: int | None = None,
    settings: CacheSettings = CacheSettings("none"),  # noqa: B008
) -> Weights:
    """Read a checkpoint's sizes, none of its weights; with what a text of `context` tokens takes if that is given."""
    config = module.Config.from_hf(checkpoint.config)
    dense, experts, ends, head = [0] * config.layers, [0] * config.layers, 0, 0
    expert = re.compile(KINDS["experts"])
    count = 1
    for name, nbytes in checkpoint.sizes().items():
        ours = module.rename(name)
        layer = LAYER.match(ours or "")
        if layer is None:
            ends += nbytes if ours else 0
            head += nbytes if ours and ("lm_head" in ours or (config.tied and "embed_tokens" in ours)) else 0
        elif int(layer[1]) < config.layers:
            chosen = experts if expert.search(ours) and "shared" not in ours else dense
            chosen[int(layer[1])] += nbytes
    if checkpoint.experts is not None:
        for file in checkpoint.experts.files:
            if file.layer is not None and file.layer < config.layers:
                experts[file.layer] += file.file_nbytes
    mixed = has_experts(checkpoint.config) and any(experts)
    if mixed:
        count = _experts_of(config)
    used = experts_per_token(checkpoint.config) if mixed else 1
    share = used / count
    shapes = module.make_caches(config)
    heads, reason = _least_heads(shapes), module.Model.unsliced(config)
    found = Weights(dense, experts, ends, head, share, config.hidden, checkpoint.experts is not None, used, heads, reason)
    return found if context is None else replace(found, kept=_kept(config, shapes, context, settings))


def _least_heads(shapes: list[Any]) -> int:
    """Heads of keys in the layer that has fewest; layers whose heads share all that is kept have no say."""
    found = [MOST]

    def all_of(count: int) -> range:
        found.append(count)
        return range(count)

    for shape in shapes:
        shape.sliced(all_of)
    return min(found)


def _kept(config: Any, shapes: list[Any], context: int, settings: CacheSettings) -> tuple[Kept, ...]:
    """What layers keep of a text of so many tokens."""
    # the meta device makes stores without their memory
    layers = Cache(shapes, settings, context=1, device="meta").layers
    found = []
    for number, (shape, layer) in enumerate(zip(shapes, layers, strict=True)):
        if not shape.attends:
            found.append(Kept(0, False, True, 0))
            continue
        seen = context if shape.span is None else min(context, shape.span)
        by_head = isinstance(shape, AttentionShape)
        width = (shape.value_width or shape.width) if by_head else shape.width
        found.append(Kept(layer.token_nbytes * seen, shape.span is None, by_head, 4 * _queries(config, number) * (width + 2)))
    return tuple(found)


def _queries(config: Any, layer: int) -> int:
    """Heads of queries in a layer, as families call it."""
    heads = config.heads[layer] if isinstance(config.heads, list | tuple) else config.heads
    return heads if isinstance(heads, int) else heads.count


def _experts_of(config: Any) -> int:
    """How many a layer has, as families call it."""
    mixture = getattr(config, "mixture", None)
    return mixture.count if mixture is not None else config.experts


@dataclass(frozen=True)
class Forecast:
    """How one way would do.

    parts   bytes that each machine holds or streams
    terms   seconds of a token by what takes them
    reason  why it cannot be; None if it can
    options that it takes beside --parallel
    """

    way: str
    parts: list[int]
    terms: dict[str, float]
    reason: str | None = None
    options: str = ""

    @property
    def rate(self) -> float:
        """Tokens a second of one text."""
        return 1 / sum(self.terms.values()) if self.reason is None else 0.0

    @property
    def bound(self) -> str:
        """What most of the time goes to."""
        return max(self.terms, key=lambda term: self.terms[term])
