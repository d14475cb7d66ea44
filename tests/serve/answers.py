"""Twenty questions for the built-in model, and what its answers must not look like."""

# question: a word of a right answer
QUESTIONS = {
    "What is the capital of Japan?": "Tokyo",
    "Name the capital of France.": "Paris",
    "How many days are in a week?": "7",
    "What is 2 + 2?": "4",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What do bees make?": "honey",
    "Name three primary colors.": "Red",
    "What is water made of?": "hydrogen",
    "Explain gravity in one sentence.": "force",
    "What is the largest planet in the solar system?": "Jupiter",
    "How do plants make food?": "photosynthesis",
    "Give me a tip for sleeping better.": "sleep",
    "What is a noun?": "person",
    "Write one sentence about the sea.": "sea",
    "What is the opposite of hot?": "cold",
    "How many legs does a spider have?": "8",
    "What is the moon?": "Earth",
    "Why do we brush our teeth?": "plaque",
    "Say hello in one short sentence.": "hello",
    "Why is the sky blue?": "scatter",
}


def check_sane(answer: str) -> None:
    """Fail if an answer is gibberish: foreign characters or loops; the built-in model writes English."""
    assert sum(map(str.isascii, answer)) > 0.97 * len(answer), answer
    words = answer.lower().split()
    assert words
    # loops repeat few words
    assert len(set(words)) > 0.4 * len(words), answer
