"""The text: messages to a shop, made up by a small grammar. Nobody wrote them, and no number here is about real text.

A message is about a delivery, a payment, an account or a product, and has to go to the right desk. It has four words of
its own subject, one of another, and words that say nothing. The public text is made by the same grammar, without desks.
"""

from __future__ import annotations

import torch
from torch import Tensor

LENGTH = 10
"""Words of a message, the first of which stands for the whole."""
_SUBJECTS = {
    "delivery": "parcel courier box address late tracking arrived street van shipped lost doorstep",
    "payment": "card invoice refund charged bank price twice receipt discount coupon euros balance",
    "account": "password login email profile locked username reset signed settings verify phone name",
    "product": "screen battery broken size colour charger button cable manual noise fits cracked",
}
_OTHERS = "hello please my the is was i you have a today since it help thanks still again can not and"
DESKS = tuple(_SUBJECTS)
_OWN = [words.split() for words in _SUBJECTS.values()]
WORDS = ["<start>", *_OTHERS.split(), *(word for words in _OWN for word in words)]
_NUMBER = {word: number for number, word in enumerate(WORDS)}
_SUBJECT = torch.tensor([[_NUMBER[word] for word in words] for words in _OWN])
_OTHER = torch.tensor([_NUMBER[word] for word in _OTHERS.split()])


def messages(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Numbers of words, [count, LENGTH], and the desk of each message."""

    def draw(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=source)

    desks = draw(len(DESKS), count)
    strange = (desks + 1 + draw(len(DESKS) - 1, count)) % len(DESKS)
    text = _OTHER[draw(len(_OTHER), count, LENGTH)]
    places = torch.rand(count, LENGTH - 1, generator=source).argsort(dim=1)[:, :5] + 1
    for column, subjects in enumerate((desks, desks, desks, desks, strange)):
        words = _SUBJECT[subjects, draw(_SUBJECT.shape[1], count)]
        text.scatter_(1, places[:, column : column + 1], words[:, None])
    text[:, 0] = _NUMBER["<start>"]
    return text, desks


def in_words(text: Tensor) -> str:
    """A message as one reads it."""
    return " ".join(WORDS[number] for number in text[1:].tolist())
