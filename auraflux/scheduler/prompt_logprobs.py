"""`score_prompt`: log probabilities of prompt tokens, from the hidden states of a prefill chunk."""

from torch import Tensor

from auraflux.engine.device import to_device
from auraflux.engine.engine import Engine
from auraflux.engine.request import Request, TokenLogprob

# tokens whose logits are in memory together: 79 MB for a vocabulary of 150,000
ROWS = 128


def score_prompt(engine: Engine, request: Request, start: int, hidden: Tensor) -> list[TokenLogprob]:
    """Return the log probabilities of the prompt tokens that follow those of a chunk.

    start   position of the chunk's first token
    hidden  [T, H]  final hidden states of the chunk
    """
    found: list[TokenLogprob] = []
    targets = list(request.prompt[start + 1 : start + 1 + len(hidden)])
    for at in range(0, len(targets), ROWS):
        part = targets[at : at + ROWS]
        logprobs = engine.compute_logits(hidden[at : at + len(part)]).float().log_softmax(-1)
        own = logprobs.gather(1, to_device(part, logprobs.device)[:, None])
        ranks = (logprobs > own).sum(-1) + 1
        top = logprobs.topk(min(request.prompt_logprobs or 0, logprobs.shape[1]), -1)
        columns = (part, own.squeeze(1).tolist(), top.indices.tolist(), top.values.tolist(), ranks.tolist())
        for token, value, ids, values, rank in zip(*columns, strict=True):
            found.append(TokenLogprob(token, value, tuple(zip(ids, values, strict=True)), rank))
    return found
