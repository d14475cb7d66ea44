"""Training rows: prose, copies over a distance, facts with questions, repeated random tokens, chats.

A row has its tokens and a loss weight per token; tokens that cannot be predicted have weight 0.
"""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np

from bench.train.shapes import VOCABULARY

Row = tuple[np.ndarray, np.ndarray]
ANSWER = 4.0  # loss weight of a token of an answer
SHORT = {"plain": 0.42, "copied": 0.2, "random": 0.08, "facts": 0.2, "chats": 0.1}
LONG = {"plain": 0.3, "copied": 0.3, "random": 0.05, "facts": 0.3, "chats": 0.05}


class Documents:
    """Sample rows at random; every row starts with the begin token."""

    def __init__(self, folder: Path, seed: int):
        stored = np.load(folder / "tokens.npz")
        self.text, self.talk, self.held = (stored[name].astype(np.int64) for name in ("text", "chats", "held"))
        self.pieces: dict[str, Any] = json.loads((folder / "pieces.json").read_text())
        self.begin = self.pieces["begin"]
        self.chat_starts = np.flatnonzero(self.talk == self.begin)
        self.chance = np.random.default_rng(seed)

    def batch(self, rows: int, length: int) -> Row:
        """Return tokens [rows, length + 1] and their loss weights."""
        shares = SHORT if length <= 1024 else LONG
        kinds = self.chance.choice(list(shares), rows, p=list(shares.values()))
        ids, counts = (np.stack(each) for each in zip(*(getattr(self, str(kind))(length + 1) for kind in kinds), strict=True))
        ids[:, 0] = self.begin
        return ids, counts.astype(np.float32)

    def piece(self, length: int, source: np.ndarray | None = None) -> np.ndarray:
        source = self.text if source is None else source
        start = self.chance.integers(len(source) - length)
        return source[start : start + length]

    def between(self, low: int, high: int) -> int:
        """Sample an integer, uniform in its logarithm."""
        return round(float(np.exp(self.chance.uniform(np.log(low), np.log(max(high, low + 1))))))

    def plain(self, length: int) -> Row:
        return self.piece(length).copy(), np.ones(length)

    def copied(self, length: int) -> Row:
        """Return prose in which passages repeat after random distances."""
        ids = self.piece(length).copy()
        at = self.between(64, length - 32)
        while at < length:
            size = min(self.between(16, 256), length - at)
            if size <= at:
                start = self.chance.integers(1, at - size + 1) if at > size + 1 else 0
                ids[at : at + size] = ids[start : start + size]
            at += size + self.between(4, 64)
        return ids, np.ones(length)

    def random(self, length: int) -> Row:
        """Return a repeated sequence of random tokens; only repetitions have weight."""
        size = self.between(8, length // 2)
        some = self.chance.integers(5, VOCABULARY, size)
        ids, counts = np.resize(some, length), np.ones(length)
        counts[: size + 1] = 0.0
        return ids, counts

    def facts(self, length: int, asked: int | None = None) -> Row:
        """Return prose with facts, then questions about them in random order."""
        number = asked or int(self.chance.integers(2, 13))
        known = [self.fact() for _ in range(number)]
        # questions follow at the end, each fact once or more
        order = [known[i] for i in self.chance.permutation(np.repeat(np.arange(number), self.chance.integers(1, 4)))]
        questions = [self.statement(fact) for fact in order]
        asked_for = np.concatenate(questions)[: length // 2]
        answers = np.concatenate([self.loss_weights(fact) for fact in order])[: length // 2]
        statements = [self.statement(fact) for fact in known]
        room = max(length - len(asked_for) - sum(map(len, statements)), 1)
        # sometimes all facts are near the end: short distances are learnt first
        first = 0 if self.chance.random() < 0.7 else room - self.between(1, room)
        cuts = np.sort(self.chance.integers(first, room + 1, number))
        text, parts, at = self.piece(room), [], 0
        for cut, fact in zip(cuts, statements, strict=True):
            parts += [text[at:cut], fact]
            at = cut
        parts.append(text[at:])
        before = np.concatenate(parts)[: length - len(asked_for)]
        ids = np.concatenate([before, asked_for])
        counts = np.concatenate([np.ones(len(before)), answers])
        return ids[:length], counts[:length]

    def fact(self) -> tuple[list[list[int]], list[int], list[int]]:
        form, place, word = (self.pieces[kind] for kind in ("facts", "places", "words"))
        # half of the facts have the form that the evaluator uses
        which = 0 if self.chance.random() < 0.5 else int(self.chance.integers(len(form)))
        return form[which], place[self.chance.integers(len(place))], word[self.chance.integers(len(word))]

    @staticmethod
    def statement(fact: tuple[list[list[int]], list[int], list[int]]) -> np.ndarray:
        (first, middle, last), place, word = fact
        return np.array([*first, *place, *middle, *word, *last], np.int64)

    @staticmethod
    def loss_weights(fact: tuple[list[list[int]], list[int], list[int]]) -> np.ndarray:
        """Return loss weights of a question: the place cannot be predicted, the word can."""
        (first, middle, last), place, word = fact
        known = [1.0] * len(first) + [0.0] * len(place) + [1.0] * len(middle)
        return np.array([*known, *[ANSWER] * len(word), *[1.0] * len(last)])

    def chats(self, length: int) -> Row:
        room = np.searchsorted(self.chat_starts, len(self.talk) - length)
        start = self.chat_starts[self.chance.integers(room)]
        return self.talk[start : start + length].copy(), np.ones(length)


class Producers:
    """Worker processes that prepare batches ahead of the training."""

    def __init__(self, folder: Path, seed: int, count: int):
        context = multiprocessing.get_context("fork")
        self.asked, self.ready = context.Queue(), context.Queue()
        places = [(folder, 1000 * seed + i, self.asked, self.ready) for i in range(count)]
        self.workers = [context.Process(target=_produce, args=each, daemon=True) for each in places]
        for worker in self.workers:
            worker.start()

    def ask(self, rows: int, length: int) -> None:
        self.asked.put((rows, length))

    def take(self) -> Row:
        return self.ready.get()

    def stop(self) -> None:
        for worker in self.workers:
            worker.terminate()


def _produce(folder: Path, seed: int, asked: Any, ready: Any) -> None:
    documents = Documents(folder, seed)
    while True:
        ids, counts = documents.batch(*asked.get())
        ready.put((ids.astype(np.int32), counts))
