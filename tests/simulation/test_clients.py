"""Who has which examples: one array for all clients, with the same views as a list of arrays would give.

And what a user gives to the README's snippet in place of its own: taken as meant, or refused by client and reason.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.snippets import blocks
from docs.test_snippets import own_model_and_data
from niss.errors import ConfigError, RunFolderError
from niss.simulation import inputs as inputs_module
from niss.simulation.inputs import own_clients
from niss.simulation.training import Clients

sizes = st.lists(st.integers(1, 5), min_size=2, max_size=30)


@settings(deadline=None, max_examples=60)
@given(sizes=sizes, seed=st.integers(0, 1000))
def test_rows_are_those_of_each_client(sizes: list[int], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(sum(sizes))
    rows = np.split(order, np.cumsum(sizes)[:-1])
    clients = Clients(sizes, None, torch.from_numpy(order))
    assert len(clients) == len(sizes)
    assert clients.sizes.tolist() == sizes
    for client, wanted in enumerate(rows):
        assert clients.samples(client).dtype == torch.int64
        assert clients.samples(client).tolist() == wanted.tolist()


@settings(deadline=None, max_examples=60)
@given(sizes=sizes, together=st.integers(1, 8), mixed=st.booleans())
def test_datasets_end_to_end_are_what_cat_makes_of_them(sizes: list[int], together: int, mixed: bool) -> None:
    draw = np.random.default_rng(sum(sizes))
    kinds = [np.float64 if mixed and number % 3 == 2 else np.float32 for number in range(len(sizes))]
    pairs = [
        (draw.standard_normal((size, 2)).astype(kind), draw.integers(0, 3, size))
        for size, kind in zip(sizes, kinds, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs_module, "_TENSORS_OF_A_PART", together)
        clients = own_clients(pairs, torch.float32)
    assert clients.sizes.tolist() == sizes
    inputs, labels = clients.hand_over()
    wanted = torch.cat([torch.from_numpy(one).float() for one, _ in pairs])
    assert inputs.dtype == torch.float32
    assert torch.equal(inputs, wanted)
    for client, (its_inputs, its_labels) in enumerate(pairs):
        rows = clients.samples(client)
        assert np.array_equal(inputs[rows].numpy(), its_inputs.astype(np.float32))
        assert np.array_equal(labels[rows].numpy(), its_labels)


class Many(Sequence[Any]):
    """A hundred thousand datasets, each made when it is asked for."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, place: Any) -> Any:
        if place >= len(self):
            raise IndexError
        return np.zeros((1, 2), dtype=np.float32), np.zeros(1, dtype=np.int64)

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))


def test_a_client_takes_no_more_memory_than_its_numbers() -> None:
    """Python's part alone: torch keeps its numbers out of sight."""
    tracemalloc.start()
    try:
        clients = own_clients(Many(), torch.float32)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(clients) == 100_000
    assert held < 100_000 * 40  # Two arrays of eight bytes, and what is left of the list they came from.


README = Path(__file__).parents[2] / "README.md"
[SNIPPET] = [
    block.text for block in blocks(README) if block.language == "python" and "niss.run(config" in block.text
]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A reader's own things, as the README calls them."""
    monkeypatch.chdir(tmp_path)
    return own_model_and_data()


def run_snippet(mine: dict[str, Any], *changed: str) -> None:
    exec(SNIPPET.replace(*changed) if changed else SNIPPET, mine)  # noqa: S102


def spoilt(client: int, value: float, column: int = 4) -> Callable[[dict[str, Any]], None]:
    def spoil(mine: dict[str, Any]) -> None:
        mine["my_clients"][client][0][2, column] = value

    return spoil


def shaped(name: str, *shape: int) -> Callable[[dict[str, Any]], None]:
    def put(mine: dict[str, Any]) -> None:
        pair = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.int64)
        mine[name] = pair if name == "my_test" else [pair] * 100

    return put


def replaced(client: int, inputs: Any, labels: Any) -> Callable[[dict[str, Any]], None]:
    return lambda mine: mine["my_clients"].__setitem__(client, (inputs, labels))


def labelled(client: int, label: int) -> Callable[[dict[str, Any]], None]:
    return lambda mine: mine["my_clients"][client][1].__setitem__(2, label)


def without_examples(mine: dict[str, Any]) -> None:
    for client in (3, 7):
        mine["my_clients"][client] = tuple(part[:0] for part in mine["my_clients"][client])


def by_name(mine: dict[str, Any]) -> None:
    mine["my_clients"] = {f"ward {number}": pair for number, pair in enumerate(mine["my_clients"])}
    mine["my_clients"]["ward 5"][0][0, 0] = np.nan


def as_bytes(mine: dict[str, Any]) -> None:
    mine["my_clients"] = [(inputs.to(torch.uint8), labels) for inputs, labels in mine["my_clients"]]


def as_dictionaries(mine: dict[str, Any]) -> None:
    mine["my_clients"] = [{"inputs": inputs, "labels": labels} for inputs, labels in mine["my_clients"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoilt(3, np.nan), r"^clients\[3\]: example 2, column 4 of the inputs is nan\nhint: fill in"),
        (spoilt(19, np.inf, 0), r"^clients\[19\]: example 2, column 0 of the inputs is inf"),
        (lambda mine: mine["my_test"][0].__setitem__((0, 5), -np.inf), "^test: example 0, column 5 .* is -inf"),
        (by_name, r"^clients\['ward 5'\]: example 0, column 0 of the inputs is nan"),
        (without_examples, r"^clients: no examples in clients\[3\], clients\[7\]\nhint: leave"),
        (shaped("my_clients", 8, 5), r"^model: it fails on clients\[0\], of which 8 .* shape \(8, 5\): RuntimeError"),
        (shaped("my_test", 9, 4), r"^model: it fails on test, .* \(8, 4\)"),
        (shaped("my_test", 0, 6), "^test: no examples"),
        (as_bytes, "^model: it fails on .* torch.uint8 .*\nhint: whole numbers are passed on as they are"),
        (as_dictionaries, r"^clients\[0\]: expected a pair of arrays: a dict of inputs, labels\nhint: give"),
        (replaced(2, np.zeros((3, 6), np.float32), np.zeros(2, int)), r"^clients\[2\]: inputs .* do not match"),
        (replaced(2, np.zeros((3, 6), np.float32), np.zeros(3)), r"^clients\[2\]: labels are .*\nhint: give whole"),
        (replaced(2, np.zeros((3, 7), np.float32), np.zeros(3, int)), "^clients: inputs of different shapes"),
        (lambda mine: mine["my_clients"].__delitem__(slice(1, None)), "^clients: got 1 datasets\n.*at least two"),
        (lambda mine: mine.update(my_test=None), "^test: is missing"),
        (lambda mine: mine.update(my_module=None), "^model: is missing"),
        (labelled(11, 2), r"^clients\[11\]: example 2 has a label beyond the 2 classes of the model"),
        (labelled(11, -1), r"^clients\[11\]: example 2 has a negative label"),
        (lambda mine: mine["my_clients"].__delitem__(slice(12, None)), "^training.participants: 50 in a round, but "
         "there are only 12 clients\nhint: lower it, or give more clients"),
        (lambda mine: mine.update(my_module=torch.nn.Linear(6, 2).half()), "^model: is torch.float16"),
        (lambda mine: mine.update(my_module=torch.nn.Flatten(0)), "^model: "),
    ],
)  # fmt: skip
def test_what_a_reader_gives_is_refused_by_client_and_reason(
    mine: dict[str, Any], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    change(mine)
    with pytest.raises(ConfigError, match=message) as refused:
        run_snippet(mine)
    assert refused.value.__cause__ is None
    assert not Path("runs").exists()


def test_numbers_of_another_precision_and_clients_by_name_are_taken(mine: dict[str, Any]) -> None:
    run_snippet(mine)
    accuracy, pairs = mine["result"].accuracy, mine["my_clients"]
    mine["my_clients"] = {
        f"ward {number}": (inputs.double().numpy(), labels) for number, (inputs, labels) in enumerate(pairs)
    }
    mine["my_test"] = mine["my_test"][0].half().double(), mine["my_test"][1]
    with pytest.raises(RunFolderError, match=r"niss\.resume\('runs/.*'\), or replace it with overwrite=True"):
        run_snippet(mine)
    run_snippet(mine, 'out="', 'overwrite=True, out="')
    assert mine["result"].accuracy == pytest.approx(accuracy, abs=0.05)


def test_the_snippet_says_when_noise_leaves_little_to_learn(mine: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="^niss: noise .* times the signal") as told:
        run_snippet(mine, '"epsilon": 8.0', '"epsilon": 0.1')
    assert len(told) == 1
    judged = mine["result"].outlook
    assert judged.verdict != "good"
    assert judged.words in str(told[0].message)
    assert mine["niss"].resume(mine["result"].folder, **arguments(mine)).outlook == judged


def arguments(mine: dict[str, Any]) -> dict[str, Any]:
    return {"model": mine["my_module"], "clients": mine["my_clients"], "test": mine["my_test"]}


@pytest.mark.parametrize(
    ("neighbours", "message"), [("3.5", "methods.0.neighbours: .*integer"), ("60", "only 49 others")]
)
def test_a_client_has_a_whole_number_of_neighbours_who_are_there(
    mine: dict[str, Any], neighbours: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_snippet(mine, '"rounds": ', f'"methods": [{{"neighbours": {neighbours}}}], "rounds": ')
