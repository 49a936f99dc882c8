"""Settings that do not go together, refused before any work starts: `ConfigError`, with the key and the fix.

What one section shows is refused by that section, and what a plan or a method cannot keep by those.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from niss.data.catalog import find_spec
from niss.errors import ConfigError, PrivacyError
from niss.mechanism.noise import colluders_among
from niss.methods.base import Needs, require_needs
from niss.simulation.sections import MethodConfig, PrivacyConfig, TrainingConfig

if TYPE_CHECKING:
    from niss.simulation import Config

# The real protocol hides clients, or records, of equal weight behind one target for all. A setting that asks for
# something else is never run as if it had not been made.
_PROTOCOL: Needs = {
    "training.weights": ("equal", "in it all clients weigh the same"),
}
_NOT_RECORDS: Needs = {"privacy.unit": ("client", "it hides whole clients, or single records")}
_SHARED_IN_PROTOCOL: Needs = {
    "privacy.epsilon": (float, "it has one target for all clients"),
    "methods.tau2": (float, "it has one tau2 for all clients"),
}
# Where records are hidden, a silo takes one step a round, on a batch that it draws in secret, and the server scales it.
_ONE_STEP = "a silo sums the clipped gradients of one secret batch a round, and the server steps"
_RECORD: Needs = {
    f"training.{one.name}": (one.default, _ONE_STEP)
    for one in fields(TrainingConfig)
    if one.name in ("epochs", "batch_size", "learning_rate", "momentum", "weight_decay")
} | {
    "training.weights": ("equal", "every record counts the same, whoever has it"),
    "privacy.participations": ("planned", "silos take part in every round"),
}
_OR_SIMULATE = ", or exchange = 'simulated'"


def check_consistency(config: Config) -> None:
    """Refuse the first fault that no single section shows."""
    _check_data(config)
    _check_training(config)
    titles = [method.title for method in config.methods]
    for title in titles:
        if titles.count(title) > 1:
            raise ConfigError(f"two are called {title!r}", field="methods", hint="give each its own label")
    for method in config.methods:
        _check_method(config, method)


def check_split(split: str, dataset: str, *, owned: bool, labelled: bool) -> None:
    """Refuse a split of a dataset whose samples have no owners, or no labels, to deal them out by."""
    if split == "natural" and not owned:
        raise ConfigError(
            f"the samples of {dataset} belong to nobody",
            field="data.split",
            hint="use iid, shards or dirichlet",
        )
    if split != "natural" and not labelled:
        raise ConfigError(
            f"a sample of {dataset} has no label of its own to deal it out by",
            field="data.split",
            hint="use natural",
        )


def _check_data(config: Config) -> None:
    """Whether the dataset has so many clients, and they have so many to choose from."""
    spec, clients = find_spec(config.data.dataset), config.clients
    hint = "lower it or raise data.clients"
    if spec is not None:
        check_split(config.split, spec.name, owned=spec.clients is not None, labelled=spec.kind != "tokens")
        if config.split == "natural" and spec.clients is not None:
            if clients > spec.clients:
                raise ConfigError(
                    f"{spec.name} has {spec.clients} clients, not {clients}",
                    field="data.clients",
                    hint="lower it, or leave it out for all of them",
                )
            hint = "lower it" if clients == spec.clients else hint
    if config.split == "natural" and config.data.size_ratio != 1.0:
        raise ConfigError(
            "samples that belong to clients settle how many each has",
            field="data.size_ratio",
            hint="use another split",
        )
    if config.data.silos is not None and config.participants != clients:
        raise ConfigError(
            f"all {clients} silos take part in every round",
            field="training.participants",
            hint="leave it out",
        )
    if config.participants > clients:
        raise ConfigError(
            f"{config.participants} in a round, but there are only {clients} clients",
            field="training.participants",
            hint=hint,
        )
    for field, values in [("privacy.epsilon", config.privacy.epsilon)] + [
        ("methods.tau2", method.tau2) for method in config.methods
    ]:
        if isinstance(values, tuple) and len(values) != clients:
            raise ConfigError(f"{len(values)} values for {clients} clients", field=field)


def _check_training(config: Config) -> None:
    """Whether clients can train and be drawn like that, and rest as long as they should."""
    training, clients, participants = config.training, config.clients, config.participants
    if config.privacy.unit == "record" and config.data.silos is None:
        raise ConfigError(
            "records are hidden among those of silos, which take part in every round",
            field="data.silos",
            hint="set it to the number of organisations, for example 10, in place of data.clients",
        )
    samplings = {training.sampling, *map(config.sampling_of, config.methods)}
    if "cyclic" in samplings and (left := clients % participants):
        raise ConfigError(
            f"{clients} clients do not make whole cohorts of {participants}, which take part in turn",
            field="training.participants",
            hint=f"choose a number that divides them, or data.clients = {clients - left}",
        )
    if "poisson" in samplings and training.weights != "equal":
        raise ConfigError(
            "with poisson sampling a weight may not depend on who else takes part",
            field="training.weights",
            hint="use equal",
        )
    if training.separation is not None and training.separation * participants > clients:
        raise ConfigError(
            f"{training.separation} cohorts of {participants} in a row are more than {clients} clients",
            field="training.separation",
            hint=f"ask for at most {clients // participants}",
        )


def _check_method(config: Config, method: MethodConfig) -> None:
    """What a method, its shares and the plan that it makes of the settings refuse."""
    kind, distortion = method.kind, method.distorts
    given = {
        f"{title}.{name}": value
        for title, section in (
            ("privacy", config.privacy),
            ("training", config.training),
            ("methods", method),
        )
        for name, value in vars(section).items()
    }
    if config.privacy.unit == "record":
        require_needs(
            _RECORD, given, who="unit 'record'", otherwise=", and set server_rate and privacy.batch"
        )
    if config.exchange == "protocol":
        needs = _PROTOCOL if config.privacy.unit == "record" else {**_NOT_RECORDS, **_PROTOCOL}
        require_needs(needs, given, who="the protocol", otherwise=_OR_SIMULATE)
        if kind.has_protocol:
            require_needs(_SHARED_IN_PROTOCOL, given, who="the protocol", otherwise=_OR_SIMULATE)
            _check_shares_in_protocol(method, config.participants)
    # The default gives way in smaller rounds.
    most = config.participants - 1
    if kind.uses("neighbours") and method.neighbours > max(most, MethodConfig().neighbours):
        raise ConfigError(
            f"a round of {most + 1} has only {most} others to send shares to, not {method.neighbours}",
            field="methods.neighbours",
            hint=f"at most {most}, which is everyone",
        )
    repairing = kind.shares_noise and config.mode == "repair"
    if repairing and distortion is not None and not distortion.additive:
        raise ConfigError(
            f"shares that a client has multiplied ({method.distortion!r}) cannot be taken out of a sum again",
            field="methods.distortion",
            hint="use distortion = 'additive', or privacy.mode = 'tolerate'",
        )
    kind.require(given)
    may_return = config.training.separation is None and config.sampling_of(method) == "uniform"
    if kind.whole_run and may_return:
        raise ConfigError(
            f"{method.name} gains nothing from clients that may return at once",
            field="training.separation",
            hint="set it, or use sampling = 'cyclic'",
        )
    try:
        config.adaptive_clip(method)
        plan = config.plan(method)
        plan.assumed(config.participants)
        if plan.participants is not None:
            plan.committed(plan.participants)
    except PrivacyError as error:
        raise ConfigError(error.message, hint=error.hint) from None
    except ConfigError as error:
        raise _located(error) from None
    _check_threshold(plan.kind.own.get("threshold"), config)


def _located(error: ConfigError) -> ConfigError:
    """What a plan refuses, with the section in which its field stands."""
    for title, section in (("privacy", PrivacyConfig), ("methods", MethodConfig)):
        if error.field in {one.name for one in fields(section)}:
            message = error.message.removeprefix(f"{error.field}: ")
            return ConfigError(message, field=f"{title}.{error.field}", hint=error.hint)
    return error


def _check_threshold(threshold: int | None, config: Config) -> None:
    """A sum that is opened must hold the noise of someone honest."""
    participants = config.participants
    colluders = colluders_among(config.privacy.collusion, participants)
    if threshold is not None and not colluders < threshold <= participants:
        why = f"{threshold} uploads of {participants} participants"
        if threshold <= colluders:
            why = f"{colluders} colluders among {threshold} uploads leave nobody whose noise is unknown"
        raise ConfigError(
            why, field="methods.threshold", hint="take one above the colluders, up to the participants"
        )


def _check_shares_in_protocol(method: MethodConfig, participants: int) -> None:
    """It draws a balanced graph, and adds its residual noise instead of multiplying."""
    if method.graph not in ("regular", "complete"):
        raise ConfigError(
            f"the protocol draws regular or complete graphs, not {method.graph!r}",
            field="methods.graph",
            hint="use graph = 'regular'" + _OR_SIMULATE,
        )
    if method.graph == "complete" and method.neighbours < participants - 1 and not method.kind.carries:
        raise ConfigError(
            f"{method.neighbours} shares from each of {participants} clients do not make a complete graph in the "
            "protocol",
            field="methods.neighbours",
            hint=f"use neighbours = {participants - 1}, graph = 'regular'" + _OR_SIMULATE,
        )
    if method.distorts is not None and method.distorts.multiplies:
        raise ConfigError(
            f"the protocol adds its residual noise, {method.distortion!r} would multiply",
            field="methods.distortion",
            hint="use distortion = 'additive'" + _OR_SIMULATE,
        )
