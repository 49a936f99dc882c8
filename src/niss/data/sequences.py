"""Texts as samples: runs of tokens with, at each place, the token that follows; and which of them are for the test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from niss.data.dataset import Arrays, Labels

TEST_SHARE = 0.2
"""The part of a client's samples that is kept for the test where its source does not say."""


def next_tokens(tokens: Labels, length: int) -> tuple[Labels, Labels]:
    """Inputs and labels of shape [N, length]: consecutive pieces, and the same pieces one token further on.

    The rest that does not make a whole piece is dropped.
    """
    count = max(0, (len(tokens) - 1) // length)
    whole = tokens[: count * length + 1]
    return whole[: count * length].reshape(count, length), whole[1:].reshape(count, length)


def character_numbers(text: str, vocabulary: Sequence[str]) -> Labels:
    """The characters of a text as their places in the vocabulary; those it lacks are left out."""
    places = {character: place for place, character in enumerate(vocabulary)}
    return np.array([places[character] for character in text if character in places], dtype=np.int64)


def held_out(count: int) -> int:
    """How many of a client's samples are kept for the test: about a fifth, one at least, but never all."""
    return min(max(1, round(TEST_SHARE * count)), count - 1)


def by_client(tokens: Sequence[Labels], length: int) -> Arrays:
    """The samples of each client's tokens, the last of them for the test; the clients are numbered as they come.

    A client whose tokens do not make two samples is left out.
    """
    train: list[tuple[Labels, Labels]] = []
    test: list[tuple[Labels, Labels]] = []
    for own in tokens:
        inputs, labels = next_tokens(own, length)
        if len(inputs) < 2:
            continue
        end = len(inputs) - held_out(len(inputs))
        train.append((inputs[:end], labels[:end]))
        test.append((inputs[end:], labels[end:]))
    return Arrays(*joined(train, length), *joined(test, length), owners_of([len(one) for one, _ in train]))


def joined(parts: Sequence[tuple[Labels, Labels]], length: int) -> tuple[Labels, Labels]:
    """All inputs and all labels, end to end; empty ones of the right shape where there are no parts."""
    none = np.empty((0, length), dtype=np.int64)
    return (
        np.concatenate([none, *(inputs for inputs, _ in parts)]),
        np.concatenate([none, *(labels for _, labels in parts)]),
    )


def owners_of(counts: Sequence[int]) -> Labels:
    """The owner of each sample where the clients in turn have so many each."""
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)
