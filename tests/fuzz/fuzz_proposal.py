"""Proposals of a hostile server's making: a node declines them, or joins within its own limits.

An input is a proposal, whole at first, in which numbers, names and the shape of the JSON are changed; most are signed
again by their server. Findings: an exception other than a refusal, a policy or budget beyond what the node's owner set,
an answer of the mod that is neither an enrolment nor a refusal, and an app that is called.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

from flwr.app import Context, Message, RecordDict

import niss.flower.mod
import niss.tracker.coordinator
from fuzz.driver import Feed, Target
from fuzz.fuzz_flower import NASTY_FLOATS, NASTY_NUMBERS, NASTY_TEXTS, NODE
from niss.accounting import Plan, make_schedule, scheduled_run
from niss.errors import NissError, RemoteProtocolError
from niss.flower.given import carrying, for_nodes, for_rounds
from niss.flower.mod import NissMod
from niss.flower.transport import read_reply, to_record
from niss.mechanism import gdp_mu
from niss.protocol.keys import Identity
from niss.protocol.messages import Refusal, decode
from niss.session.limits import FIRST_USE, Limits
from niss.session.ports import Request, Stage
from niss.session.proposal import ENROLMENT_TAG, Proposal, read_proposal

LIMITS = [
    Limits(),
    Limits(uncalibrated=True),
    Limits(epsilon=2.0, delta=1e-6),
    Limits(clip=0.3, collusion=0.4, participants=5, relation="replace-one", modes=("tolerate",)),
]
SERVER = Identity.generate(random.Random("server").randbytes)


class NoTracker:
    """In place of the tracker's client: no test opens connections to addresses that a fuzzer makes up."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RemoteProtocolError("the tracker does not answer")


def originals() -> list[dict[str, Any]]:
    """The values of proposals as an honest server makes them."""
    found = []
    for changes in (
        {},
        {"mode": "repair", "dropout": 0.1},
        {"collusion": 0.6, "relation": "replace-one"},
        {"tau2": 1.0},
    ):
        plan = Plan(
            **{"clip": 0.3, "epsilon": 2.0, "delta": 1e-6, "participations": 4, "neighbours": 3, **changes}
        )
        proposal = Proposal(
            bytes(16), SERVER.public, SERVER.public, bytes(32), plan, participants=5, prekeys=2
        )
        found.append(json.loads(proposal.signed(SERVER)[64:]))
    return [*found, carried()]


def carried() -> dict[str, Any]:
    """A proposal that carries noise from round to round."""
    plan = for_nodes(for_rounds(carrying(Plan(clip=0.3, epsilon=2.0, delta=1e-6, separation=3)), 6), 5, 15)
    proposal = Proposal(
        *(bytes(16), SERVER.public, SERVER.public, bytes(32), plan),
        participants=5,
        prekeys=2,
        schedule=make_schedule(plan, participants=5, coordinates=100),
    )
    return dict(json.loads(proposal.signed(SERVER)[64:]))


def odd_value(rng: random.Random, value: Any) -> Any:
    """Another value, of the same kind or not."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice([*NASTY_NUMBERS, *(-number for number in NASTY_NUMBERS)])
    if kind == 1:
        return rng.choice(NASTY_FLOATS)
    if kind == 2:
        return rng.choice([*NASTY_TEXTS, "1", "nan", "regular", "complete", "repair", "http://127.0.0.1:1"])
    if kind == 3:
        return rng.choice([None, True, False, [], {}, [value], {"value": value}])
    if isinstance(value, str):
        return rng.choice([value[:-1], value + "0", value.upper(), value * 2, value[::-1]])
    if isinstance(value, int | float) and abs(value) < 1e300:
        return rng.choice([value + 1, value - 1, -value, value * math.exp(rng.gauss(0.0, 3.0)), float(value)])
    return value


def change(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Some entries changed, left out, or added, on the top or in the plan."""
    values = json.loads(json.dumps(values))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        part = rng.choice(["plan", "schedule"] if "schedule" in values else ["plan"])
        into = values[part] if rng.random() < 0.6 and isinstance(values.get(part), dict) else values
        into = into["noise"] if rng.random() < 0.6 and isinstance(into.get("noise"), dict) else into
        name = rng.choice(sorted(into)) if into else "more"
        action = rng.random()
        if action < 0.85:
            into[name] = odd_value(rng, into.get(name))
        elif action < 0.95:
            into.pop(name, None)
        else:
            into[rng.choice(["more", *NASTY_TEXTS])] = 1
    return values


def encoded(rng: random.Random, values: dict[str, Any]) -> bytes:
    """The proposal as it travels; now and then with other bytes, signed or not."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        nested = rng.choice([b"[", b'{"plan":']) * rng.choice([10, 2_000, 200_000])
        text = rng.choice([text[: rng.randrange(len(text))], nested, text + b" 1", b"\xff" + text, b""])
    signature = SERVER.sign("flower proposal", text)
    return rng.choice([signature] * 19 + [bytes(64)]) + text


def beyond(limits: Limits, proposal: Proposal) -> str:
    """What the policy or the budget allows beyond the limits; empty where nothing."""
    policy, budget, ceiling = (
        limits.policy(proposal),
        limits.budget(proposal),
        limits.ceiling_for(proposal.plan),
    )
    if not policy.clip > 0.0 or policy.clip > (limits.clip or math.inf):
        return "clip"
    if policy.collusion < (limits.collusion or 0.0) or policy.participants < (limits.participants or 2):
        return "colluders or participants"
    mode = proposal.plan.settled_mode
    if policy.modes != (mode,) or (limits.modes and mode not in limits.modes):
        return "mode"
    if not (policy.mu > 0.0 and (proposal.schedule is not None or (policy.strength or 0.0) > 0.0)):
        return "mu or strength"
    if policy.schedule != proposal.schedule:
        return "another schedule"
    if (schedule := proposal.schedule) is not None:
        if schedule.clip > policy.clip or schedule.participants < policy.participants:
            return "a schedule beyond the policy"
        if ceiling is not None:
            colluders = policy.colluders(schedule.participants)
            worth = scheduled_run(schedule, relation=proposal.plan.relation, colluders=colluders)
            if not worth.private or worth.mu > gdp_mu(proposal.plan.epsilon, proposal.plan.delta):
                return "a schedule that does not keep the promise"
    if ceiling is None:
        return "" if limits.uncalibrated and limits.epsilon is None else "no ceiling"
    if ceiling.epsilon > (limits.epsilon or FIRST_USE.epsilon) or ceiling.delta > (
        limits.delta or FIRST_USE.delta
    ):
        return "ceiling"
    if not 0.0 <= budget.delta_failure < budget.delta <= ceiling.delta:
        return "delta"
    if not 0.0 < budget.most <= gdp_mu(ceiling.epsilon, ceiling.delta) * (1.0 + 1e-6):
        return "budget"
    return (
        ""
        if policy.mu <= budget.most * (1.0 + 1e-6) or limits.epsilon is not None
        else "one round over the budget"
    )


def never(_message: Message, _context: Context) -> Message:
    raise AssertionError("the app was called")


def join(body: bytes, run: bytes) -> str:
    """What a node with nothing pinned answers: joined, declined, or what went wrong."""
    content = RecordDict({"niss": to_record(Request(Stage.ENROL, body, 0, run))})
    message = Message(content, dst_node_id=NODE, message_type="train")
    message.metadata.__dict__["_message_id"] = "1"
    reply = NissMod()(message, Context(1, NODE, {}, RecordDict(), {}), never)
    if reply.has_error():
        known = reply.error.reason.startswith("niss: ") and reply.error.reason.isprintable()
        return "declined" if known else "an error that cannot be printed"
    answer = read_reply(reply).body
    if answer.startswith(ENROLMENT_TAG):
        return "joined"
    return "declined" if isinstance(decode(answer), Refusal) else "another answer"


@contextmanager
def start(_label: str) -> Iterator[Feed]:
    """Without a tracker's client: proposals name addresses."""
    known, logged = originals(), niss.flower.mod.LOG.disabled
    real, niss.tracker.coordinator.TrackerClient = niss.tracker.coordinator.TrackerClient, NoTracker  # type: ignore[misc,assignment]
    niss.flower.mod.LOG.disabled = True

    def one_input(rng: random.Random) -> tuple[str, str]:
        body = encoded(rng, change(rng, rng.choice(known)))
        shown = body[64:1000]
        limits = rng.choice(LIMITS)
        try:
            proposal = read_proposal(body)
        except RemoteProtocolError:
            outcome = "unreadable"
        else:
            try:
                wrong = beyond(limits, proposal)
            except NissError:
                outcome = "beyond the limits"
            else:
                outcome = "within the limits"
                if wrong:
                    return outcome, f"{wrong}: {limits} {shown!r}"
        if outcome == "unreadable" and rng.random() < 0.9:
            return outcome, ""
        answer = join(body, bytes(16))
        right = answer == "declined" or (answer == "joined" and outcome != "unreadable")
        return f"{outcome}, {answer}", "" if right else f"{answer}: {shown!r}"

    try:
        yield one_input
    finally:
        niss.tracker.coordinator.TrackerClient = real  # type: ignore[misc]
        niss.flower.mod.LOG.disabled = logged


TARGET = Target("proposal", 1_000, start)
