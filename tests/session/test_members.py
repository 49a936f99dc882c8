"""Who is to blame when clients decline a round."""

from __future__ import annotations

import json

from niss.session.members import SPOILED, Declines


class TestDeclines:
    """The rule by itself, on complete graphs where nothing else is said."""

    def round(self, declines: Declines, nodes: set[int], declined: set[int]) -> dict[int, str]:
        return declines.judge(
            dict.fromkeys(declined, "no"), nodes - declined, lambda node: sorted(nodes - {node})
        )

    def test_two_that_spoil_rounds_together_are_both_found(self) -> None:
        declines, everyone, honest = Declines(), set(range(8)), set(range(2, 8))
        out: dict[int, str] = {}
        for _ in range(6):
            seated = everyone - declines.set_aside - set(out)
            out |= self.round(declines, seated, honest if seated - honest else set())
        assert out == {0: SPOILED, 1: SPOILED}
        assert not declines.set_aside

    def test_most_of_a_round_that_have_reasons_of_their_own_put_nobody_else_out(self) -> None:
        declines, everyone, spent = Declines(), set(range(8)), {3, 4, 5, 6, 7}
        out: dict[int, str] = {}
        for _ in range(6):
            seated = everyone - declines.set_aside - set(out)
            out |= self.round(declines, seated, spent & seated)
        assert out == dict.fromkeys(spent, "no")
        assert not declines.set_aside

    def test_a_minority_cannot_frame_a_neighbour(self) -> None:
        declines, everyone = Declines(), set(range(8))
        assert self.round(declines, everyone, {1, 2, 3}) == {}
        assert not declines.set_aside
        assert self.round(declines, everyone, set()) == {}

    def test_on_a_sparse_graph_the_common_neighbour_is_found(self) -> None:
        ring = {node: [(node + step) % 12 for step in (-2, -1, 1, 2)] for node in range(12)}
        declines = Declines()
        declined = dict.fromkeys(ring[5], "no")
        assert declines.judge(declined, set(range(12)) - set(declined), ring.__getitem__) == {}
        assert declines.set_aside == {5}
        without = set(range(12)) - {5}
        assert declines.judge({}, without, ring.__getitem__) == {5: SPOILED}


def test_what_is_known_of_declines_survives_and_follows_a_node():
    known = Declines()
    around = {1: [2, 3, 4], 2: [1, 3], 3: [1, 2], 4: [1]}
    known.judge({2: "no", 3: "no"}, [1, 4], around.__getitem__)
    again = Declines.from_json(json.loads(json.dumps(known.to_json())))
    assert again.set_aside == known.set_aside == {1}
    again.rename(1, 11)
    again.rename(2, 12)
    assert again.set_aside == {11}
    assert again.judge({}, [12, 3, 4], lambda _node: ()).keys() == {11}
