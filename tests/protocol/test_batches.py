"""Rounds that hide single records: what an upload shows of its batch, and what a client refuses of such a round."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from niss.errors import RemoteProtocolError
from niss.protocol import client as client_module
from niss.protocol.messages import RecordTerms, encode
from support.protocol_round import Federation, resigned

SIZE, COORDINATES = 5, 12
RECORDS = RecordTerms(batch=0.25, divisor=40.0)
RNG = np.random.default_rng(5)
ALL = RNG.normal(size=(60, COORDINATES))
ALL *= (0.5 / np.linalg.norm(ALL, axis=1))[:, None]
BATCHES = {
    "empty": [],
    "one": [ALL[:1]],
    "all": [ALL],
    "in pieces, one of them empty": [ALL[:7], ALL[:0], ALL[7:30]],
    "longer than the clip": [1e3 * ALL],
    "not finite": [np.full((3, COORDINATES), np.nan), ALL[:2]],
    "aligned": [np.tile(ALL[:1], (3000, 1))],
}


def whole(*matrices: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """All of their rows count."""
    return [(matrix, len(matrix)) for matrix in matrices]


def federation(label: str = "batches", **policy: Any) -> Federation:
    return Federation(SIZE, label, prekeys=2, **({"batch": 0.25} | policy))


def terms(made: Federation, **changes: Any) -> Any:
    return made.terms(coordinates=COORDINATES, clip=0.5, **({"records": RECORDS} | changes))


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_the_sum_of_a_round_is_that_of_all_batches_over_what_was_planned(mode: str) -> None:
    made = federation()
    opened = made.open(terms(made, mode=mode))
    rows = [ALL[12 * seat : 12 * seat + 12] for seat in range(SIZE)]
    for client, own in zip(made.clients, rows, strict=True):
        made.server.take_upload(client.upload(opened, whole(own[:5], own[5:]), made.entropy))
    if mode == "repair":
        made.repair()
    outcome = made.server.finish()
    assert outcome.exact
    # Each of 60 records is rounded to a step.
    np.testing.assert_allclose(outcome.total, ALL.sum(axis=0) / 40.0, atol=60 * 2.0**-20)


@pytest.mark.parametrize("mode", ["tolerate", "repair"])
def test_an_upload_has_one_form_whatever_the_batch(mode: str) -> None:
    """Byte for byte: the same length, the same fields, each of the same length; an empty batch too."""
    shapes = set()
    for batch in BATCHES.values():
        made = federation()
        upload = made.clients[0].upload(made.open(terms(made, mode=mode)), whole(*batch), made.entropy)
        parts = tuple(len(value) if isinstance(value, bytes) else value for value in vars(upload).values())
        shapes.add((len(encode(upload)), parts[0], parts[2], len(upload.fresh_prekeys), *parts[4:]))
    assert len(shapes) == 1


@pytest.mark.parametrize("batch", BATCHES)
def test_every_record_is_within_the_clip_and_every_entry_within_the_bound(
    batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[np.ndarray] = []
    masked = client_module.masked_upload

    def noted(keys: Any, steps: np.ndarray, *rest: Any) -> Any:
        sent.append(steps.copy())
        return masked(keys, steps, *rest)

    monkeypatch.setattr(client_module, "masked_upload", noted)
    made = federation()
    opened = made.open(terms(made, grid_bits=12))
    made.clients[0].upload(opened, whole(*BATCHES[batch]), made.entropy)
    count = sum(int(np.isfinite(rows).all(axis=1).sum()) for rows in BATCHES[batch])
    assert math.sqrt(float(np.sum(sent[0].astype(float) ** 2))) <= count * 0.5 / 40.0 * 2**12
    assert np.abs(sent[0]).max() <= opened.terms.bound / 40.0 * 2**12
    assert opened.terms.bound == 0.5 * RECORDS.most


def test_more_records_than_the_bound_has_room_for_are_hardly_ever_drawn() -> None:
    """`most` is exceeded with e^-30; the exact tail of the coins of 160 and of 160,000 records is below that."""
    from scipy import stats

    for batch, records in ((0.25, 160), (0.5, 160_000), (1e-3, 1_000)):
        most = RecordTerms(batch, batch * records).most
        assert stats.binom.logsf(math.floor(most), records, batch) < -30.0
    assert RecordTerms(0.05, 3000.0).most < 1.2 * 3000.0


def test_noise_and_range_follow_the_divisor_and_not_the_participants() -> None:
    made = federation()
    whole = terms(made, records=None)
    assert (whole.divisor(SIZE), whole.bound) == (float(SIZE), 0.5)
    assert terms(made).divisor(SIZE) == 40.0


REFUSED = {
    "a larger batch": ({}, {"records": replace(RECORDS, batch=0.3)}, "allows 0.25"),
    "no batch": ({}, {"records": None}, "hides whole clients"),
    "a batch that was not agreed to": ({"batch": None}, {}, "hides single records"),
    "a batch of nobody": ({}, {"records": replace(RECORDS, batch=0.0)}, "probability above 0"),
    "a divisor of nothing": ({}, {"records": replace(RECORDS, divisor=0.0)}, "divided by more than 0"),
    "records longer than 2^32 steps": ({}, {"records": replace(RECORDS, divisor=1e-5)}, "grid steps long"),
    "a sum beyond the modulus": ({}, {"modulus_bits": 32, "grid_bits": 29}, "would not fit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_client_refuses_rounds_that_it_did_not_agree_to(name: str) -> None:
    policy, changes, match = REFUSED[name]
    made = federation(**policy)
    honest = made.open(terms(made))
    changed = terms(made, **changes)
    opened = replace(honest, terms=changed, beacon=made.beacon(honest.participants, changed))

    with pytest.raises(RemoteProtocolError, match=match):
        made.clients[0].upload(resigned(made.server, opened, "open"), whole(ALL[:2]), made.entropy)
    assert made.seats[0].charges == []
