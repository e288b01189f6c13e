"""Plain questions whose answers differ in length: some words, some sentences, a story."""

from __future__ import annotations

TOPICS = (
    "the tides", "bread", "the Roman army", "photosynthesis", "a bicycle", "honey bees", "the printing press",
    "volcanoes", "chess", "the human heart", "sailing ships", "glass", "the Sahara", "telescopes", "rice",
    "a thunderstorm",
)  # fmt: skip
_NOTE = (
    "Here is a note that I was given. {0} came up at dinner, and nobody at the table could say where it begins and "
    "where it ends. One guest held that people have known it for thousands of years; another had read that what most "
    "people believe about it is wrong. Someone's grandmother used to tell a story about it, which we all forgot. "
)
FORMS = (
    "Name three things that have to do with {0}.",
    "In one sentence: what is most surprising about {0}?",
    "Is it true that everybody likes {0}? Answer yes or no.",
    "Explain {0} to a child of six.",
    "Write a short story about {0}.",
    "List the main facts about {0} as bullet points, with a word of explanation for each of them.",
    _NOTE + "What would you have said?",
    _NOTE + "Somebody asked how one could learn more about it. " + "Write down a plan for a week, day by day.",
)


def questions(count: int) -> list[str]:
    """`count` of them, forms and topics mixed; the first 128 differ."""
    size = len(TOPICS)
    return [FORMS[i % len(FORMS)].format(TOPICS[(i + i // size) % size]) for i in range(count)]
