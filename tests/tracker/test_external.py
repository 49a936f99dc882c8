"""Two trackers, run by different people: one keeps the lists, the other holds the beacon."""

from __future__ import annotations

from pathlib import Path

import pytest

from niss.protocol.agreement import link_of, participants_hash, verify_beacon
from niss.protocol.keyfile import create_keyfile
from niss.tracker.client import TrackerClient, TrackerRefused
from tracker.harness import member, members, tracker_process

RUN = b"external"
SERVER = member(0, "server")
LISTS = member(0, "lists")


def test_links_come_from_the_other_tracker(tmp_path: Path) -> None:
    (tmp_path / "holder").mkdir()
    create_keyfile(tmp_path / "tracker.key", LISTS.identity)
    with (
        tracker_process(tmp_path / "holder", LISTS.public, "--holder-only") as holder,
        tracker_process(tmp_path, SERVER.public, "--external-beacon", holder.url) as lists,
        TrackerClient(lists.url, SERVER.identity, retries=0) as asking,
    ):
        anchor, about = asking.start_run(RUN, 3), asking.describe(RUN)
        assert about.holder.hex() == holder.ready["tracker"] != lists.ready["tracker"] == about.tracker.hex()
        for one in members(3):
            with TrackerClient(lists.url, one.identity) as line:
                line.register(one.batch(2))
        seated = asking.seat(RUN, 0, 0, count=3)
        commitment = participants_hash(seated) + bytes(32)
        beacon = asking.beacon(RUN, 0, 0, commitment, neighbours=2.0)
        verify_beacon(beacon, commitment, expected=link_of(0, 0), anchor=anchor, holder=about.holder, after=0)
        with TrackerClient(lists.url, members(1)[0].identity) as line:
            assert len(line.neighbours(RUN, 0, 0)) == 2
        # Behind the lists' back, their owner spends the next link; the holder stays with its first commitment.
        with TrackerClient(holder.url, LISTS.identity) as behind:
            behind.beacon(RUN, 0, 1, bytes(64))
        with pytest.raises(TrackerRefused, match="nobody is seated"):
            asking.beacon(RUN, 0, 1, b"b" * 64)
        again = participants_hash(asking.seat(RUN, 0, 1, count=3)) + bytes(32)
        with pytest.raises(TrackerRefused, match="another commitment"):
            asking.beacon(RUN, 0, 1, again)
        with (
            TrackerClient(holder.url, SERVER.identity) as stranger,
            pytest.raises(TrackerRefused, match="only the server"),
        ):
            stranger.beacon(RUN, 0, 2, bytes(64))
