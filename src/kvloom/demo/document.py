"""Two long documents that are on every machine with CPython (its own language reference), and questions about one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvloom.errors import InputError

MINIMUM_TOKENS = 3000
DOCUMENT = ("typesmapping", "dict", "comparisons")
"""Topics of the document that is asked about: dictionaries.  Later ones are added only while it is too short."""
OTHER_DOCUMENT = ("attribute-access", "customization")
"""Topics of the document that pushes the first one out."""
HELD_OUT = ("specialnames",)
"""Topics on which perplexity is measured; the layout was chosen on others."""

QUESTIONS = (
    "What does d.get(key) return if the key is not in the dictionary?",
    "Are dictionaries ordered?",
    "Name three methods of dict objects mentioned above.",
    "Give a one-sentence summary of this text.",
)
FORKED_QUESTION = "Is it an error to look up a missing key with d[key]?"
FORK_BEGINS = "In short,"
AFTER_EVICTION = ("How can a dictionary be created?", "Which views does a dictionary offer?")


def text_of(topics: tuple[str, ...], count_tokens: Callable[[str], int], minimum: int = MINIMUM_TOKENS) -> str:
    """As many of the topics as it takes to reach ``minimum`` tokens.

    Raises InputError when this Python carries none of them, or too little text.
    """
    try:
        known: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise InputError("this Python has no pydoc_data.topics, which the demo uses as its document") from None
    text = ""
    for topic in topics:
        text = f"{text}\n\n{known.get(topic, '')}".strip()
        if count_tokens(text) >= minimum:
            return text
    raise InputError(f"pydoc_data.topics of this Python has less than {minimum} tokens on {', '.join(topics)}")
