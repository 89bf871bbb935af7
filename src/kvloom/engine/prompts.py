"""Prompts about one document: the same leading tokens for every question, whatever the tokenizer does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvloom.engine.files import read_text
from kvloom.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
_SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class DocumentPrompts:
    """Prompts that put a question after one document.

    The document and the question are tokenised apart, so the document's tokens never depend on the question.

    Attributes:
        document_ids: ids of the template's head, the document and the blank line after it.
    """

    tokenizer: PreTrainedTokenizerBase
    document_ids: tuple[int, ...]
    _tail: str

    @classmethod
    def make(cls, tokenizer: PreTrainedTokenizerBase, document: str) -> DocumentPrompts:
        """Tokenise ``document`` under the tokenizer's chat template (or bare, if it has none).

        Raises InputError when the document is empty.
        """
        text = document.strip()
        if not text:
            raise InputError("the document is empty; give a text file with some words in it")
        head, tail = _template(tokenizer)
        ids = _encode(tokenizer, head + text + _SEPARATOR)
        return cls(tokenizer, tuple(ids), tail)

    def ask(self, question: str) -> list[int]:
        """Ids of the whole prompt.  Raises InputError when the question is empty."""
        if not question.strip():
            raise InputError("a question is empty; write what you want to ask")
        return [*self.document_ids, *_encode(self.tokenizer, question.strip() + self._tail)]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False).input_ids]


def _template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template puts before and after the text of a first message."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.bos_token or "", "\n\nAnswer:"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    head, mark, tail = str(rendered).partition(_MARK)
    if not mark:
        raise InputError("the tokenizer's chat template does not show the user's message, so no prompt can be made")
    return head, tail


def read_document(path: Path) -> str:
    """The text of a UTF-8 file.  Raises InputError when it is missing, a directory, binary, empty, or above 64 MiB."""
    text = read_text(path, "document")
    if "\0" in text:
        raise InputError(f"document {path}: contains NUL bytes, so it is not a text file")
    if not text.strip():
        raise InputError(f"document {path}: it is empty")
    return text
