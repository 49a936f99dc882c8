"""Settings that do not go together, refused before any work starts: `ConfigError`, with the key and the fix."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from niss.data.catalog import find_spec
from niss.errors import ConfigError, PrivacyError
from niss.simulation.sections import MethodConfig, PrivacyConfig, TrainingConfig

if TYPE_CHECKING:
    from niss.simulation.config import Config


def check_consistency(config: Config) -> None:
    """Refuse the first fault that no single key shows."""
    _check_data(config)
    _check_training(config)
    _check_titles(config.methods)
    if config.exchange == "protocol":
        _check_protocol(config)
    if config.privacy.colluders > config.training.participants - 2:
        raise ConfigError(
            f"{config.privacy.colluders} of {config.training.participants} participants leave nobody to share noise "
            "with",
            field="privacy.colluders",
            hint="assume fewer, or let more take part",
        )
    for method in config.methods:
        _check_method(config, method)


def _check_data(config: Config) -> None:
    """Whether the samples of the dataset can be dealt out like that."""
    spec = find_spec(config.data.dataset)
    if spec is None:
        return
    if config.split == "natural" and spec.clients is None:
        raise ConfigError(
            f"the samples of {spec.name} belong to nobody",
            field="data.split",
            hint="use iid, shards or dirichlet",
        )
    if config.split == "natural" and spec.clients is not None and config.clients > spec.clients:
        raise ConfigError(
            f"{spec.name} has {spec.clients} clients, not {config.clients}",
            field="data.clients",
            hint="lower it, or leave it out for all of them",
        )
    if config.split != "natural" and spec.kind == "tokens":
        raise ConfigError(
            f"a sample of {spec.name} has no label of its own to deal it out by",
            field="data.split",
            hint="use natural",
        )


def _check_training(config: Config) -> None:
    """Numbers of clients, and the units and mechanisms that ask something of training."""
    clients, training, privacy = config.clients, config.training, config.privacy
    if training.participants > clients:
        spec = find_spec(config.data.dataset)
        everyone = config.split == "natural" and spec is not None and clients == spec.clients
        raise ConfigError(
            f"{training.participants} in a round, but there are only {clients} clients",
            field="training.participants",
            hint="lower it" if everyone else "lower it or raise data.clients",
        )
    if isinstance(privacy.epsilon, tuple) and len(privacy.epsilon) != clients:
        raise ConfigError(f"{len(privacy.epsilon)} values for {clients} clients", field="privacy.epsilon")
    if privacy.unit == "record" and training.epochs != 1:
        raise ConfigError(
            "the record unit takes one local step a round",
            field="training.epochs",
            hint="set it to 1 and raise rounds",
        )
    _check_sampling(config)
    _check_server(config.training)
    if privacy.mechanism == "classical" and not privacy.allow_invalid:
        largest = max(privacy.epsilon) if isinstance(privacy.epsilon, tuple) else privacy.epsilon
        if largest >= 1.0:
            raise ConfigError(
                f"classical is proved only for epsilon < 1, not {largest:g}",
                field="privacy.mechanism",
                hint="use analytic, or allow_invalid = true to reproduce the paper without a guarantee",
            )


def _check_sampling(config: Config) -> None:
    """Whether participants can be drawn like that, and rest as long as they should."""
    training, clients = config.training, config.clients
    for sampling in {training.sampling, *(config.sampling_of(method) for method in config.methods)}:
        if sampling == "cyclic" and clients % training.participants:
            raise ConfigError(
                f"{clients} clients do not make whole cohorts of {training.participants}, which take part in turn",
                field="training.participants",
                hint="choose a number that divides them, or data.clients = "
                f"{clients - clients % training.participants}",
            )
        if sampling == "poisson" and training.weights != "equal":
            raise ConfigError(
                "with poisson sampling a weight may not depend on who else takes part",
                field="training.weights",
                hint="use equal",
            )
    least = training.separation
    if least is None:
        return
    if training.sampling not in ("cyclic", "uniform"):
        raise ConfigError(
            f"{training.sampling} sampling may choose a client again in the next round",
            field="training.separation",
            hint="use sampling = 'cyclic' or 'uniform'",
        )
    if least * training.participants > clients:
        raise ConfigError(
            f"{least} cohorts of {training.participants} in a row are more than {clients} clients",
            field="training.separation",
            hint=f"ask for at most {clients // training.participants}",
        )


def _check_server(training: TrainingConfig) -> None:
    """Settings that the server's optimiser does not have."""
    chosen, unused = training.server_optimizer, set[str]()
    if chosen == "sgd":
        unused = {"server_momentum", "server_beta2", "server_epsilon"}
    elif chosen == "momentum":
        unused = {"server_beta2", "server_epsilon"}
    for name in sorted(unused):
        if getattr(training, name) is not None:
            raise ConfigError(
                f"server_optimizer = {chosen!r} has none",
                field=f"training.{name}",
                hint="leave it out, or choose another optimiser",
            )


def _check_titles(methods: tuple[MethodConfig, ...]) -> None:
    """Every method has a folder of its own, called by its title."""
    titles = [method.title for method in methods]
    for title in titles:
        if titles.count(title) > 1:
            raise ConfigError(f"two are called {title!r}", field="methods", hint="give each its own label")
        if not title or title in (".", "..") or any(sign in title for sign in "/\\\0"):
            raise ConfigError(
                f"{title!r} cannot be the name of a folder", field="methods", hint="give it another label"
            )


def _check_method(config: Config, method: MethodConfig) -> None:
    """Distortion, tau^2 and graph of one method."""
    if isinstance(method.tau2, tuple) and len(method.tau2) != config.clients:
        raise ConfigError(f"{len(method.tau2)} values for {config.clients} clients", field="methods.tau2")
    distortion = method.distorts
    repairing = config.protocol.dropout > 0.0 and config.protocol.mode == "repair"
    if repairing and distortion is not None and not distortion.repairable:
        raise ConfigError(
            f"shares that a client has multiplied ({method.distortion!r}) cannot be taken out of a sum again",
            field="methods.distortion",
            hint="use distortion = 'additive', or protocol.mode = 'tolerate'",
        )
    _check_whole_run(config, method)
    _check_quantile(config, method)
    try:
        config.adaptive_clip(method)
        plan = config.plan(method)
        if plan.participants is not None:
            plan.committed(plan.participants)
    except PrivacyError as error:
        raise ConfigError(error.message, hint=error.hint) from None
    except ConfigError as error:
        raise _located(error) from None
    _check_threshold(config, method)


def _located(error: ConfigError) -> ConfigError:
    """What a plan refuses, with the section in which its field stands."""
    for title, section in (("privacy", PrivacyConfig), ("methods", MethodConfig)):
        if error.field in {one.name for one in fields(section)}:
            message = error.message.removeprefix(f"{error.field}: ")
            return ConfigError(message, field=f"{title}.{error.field}", hint=error.hint)
    return error


def _check_whole_run(config: Config, method: MethodConfig) -> None:
    """Methods that plan their noise for all rounds promise nothing for one of them alone."""
    privacy = config.privacy
    if method.kind.whole_run and privacy.scope != "training":
        raise ConfigError(
            f"the claim of {method.name} is about the whole training",
            field="privacy.scope",
            hint="use scope = 'training'",
        )
    if method.kind.secret_draw and privacy.participations is not None:
        raise ConfigError(
            f"a cap would make the secret draw of {method.name} depend on the past",
            field="privacy.participations",
            hint="leave it out",
        )
    if method.kind.carries and config.training.weights != "equal":
        raise ConfigError(
            f"{method.name} takes out in a round what clients of the one before added, so that all have to weigh the "
            "same",
            field="training.weights",
            hint="use equal",
        )
    if method.kind.correlates and config.training.server_rate_schedule != "constant":
        raise ConfigError(
            f"{method.name} takes noise of one round out in another, which fails if the rate has changed in between",
            field="training.server_rate_schedule",
            hint="use constant, or a method whose rounds are independent",
        )
    least = config.training.separation
    if method.kind.whole_run and config.sampling_of(method) == "uniform" and least is None:
        raise ConfigError(
            f"{method.name} gains nothing from clients that may return at once",
            field="training.separation",
            hint="set it, or use sampling = 'cyclic'",
        )


def _check_quantile(config: Config, method: MethodConfig) -> None:
    """Whose clip can follow the norms of updates."""
    privacy = config.privacy
    if privacy.quantile is None:
        if privacy.first_clip is not None:
            raise ConfigError(
                "the clip stays as it is without a quantile",
                field="privacy.first_clip",
                hint="set clip instead",
            )
        return
    if privacy.unit != "client":
        raise ConfigError(
            f"it is one of the norms of whole updates, and with unit {privacy.unit!r} other things are clipped",
            field="privacy.quantile",
            hint="use unit = 'client'",
        )
    if method.kind.correlates:
        raise ConfigError(
            f"{method.name} takes noise of one round out in another, which fails if the clip, and the noise with it, "
            "has changed in between",
            field="privacy.quantile",
            hint="leave it out, or use a method whose rounds are independent",
        )


def _check_threshold(config: Config, method: MethodConfig) -> None:
    """A sum that is opened must hold the noise of someone honest."""
    threshold, colluders = config.plan(method).kind.own.get("threshold"), config.privacy.colluders
    if threshold is not None:
        if threshold > config.training.participants:
            raise ConfigError(
                f"{threshold} uploads of {config.training.participants} participants",
                field="methods.threshold",
                hint="lower it",
            )
        if threshold <= colluders:
            raise ConfigError(
                f"{colluders} colluders among {threshold} uploads leave nobody whose noise is unknown",
                field="methods.threshold",
                hint="assume fewer, or ask for more uploads",
            )


def _check_protocol(config: Config) -> None:
    """What the real protocol cannot do.

    It hides whole clients of equal weight behind one target for all, draws a balanced graph, and adds its residual
    noise instead of multiplying. A setting that asks for something else is never run as if it had not been made.
    """
    privacy, training, instead = config.privacy, config.training, "or exchange = 'simulated'"
    if privacy.unit != "client":
        raise ConfigError(
            f"the protocol hides whole clients, not {privacy.unit!r}",
            field="privacy.unit",
            hint=f"use unit = 'client', {instead}",
        )
    if training.weights != "equal":
        raise ConfigError(
            "in the protocol all clients weigh the same",
            field="training.weights",
            hint=f"use weights = 'equal', {instead}",
        )
    sharing = [method for method in config.methods if method.kind.has_protocol]
    if sharing and isinstance(privacy.epsilon, tuple):
        raise ConfigError(
            "the protocol has one target for all clients",
            field="privacy.epsilon",
            hint=f"give one number, {instead}",
        )
    for method in sharing:
        if method.graph not in ("regular", "complete"):
            raise ConfigError(
                f"the protocol draws regular or complete graphs, not {method.graph!r}",
                field="methods.graph",
                hint=f"use graph = 'regular', {instead}",
            )
        few = method.neighbours < training.participants - 1
        if method.graph == "complete" and few and not method.kind.carries:
            raise ConfigError(
                f"{method.neighbours:g} shares from each of {training.participants} clients do not make a complete "
                "graph in the protocol",
                field="methods.neighbours",
                hint=f"use neighbours = {training.participants - 1}, graph = 'regular', {instead}",
            )
        if isinstance(method.tau2, tuple):
            raise ConfigError(
                "the protocol has one tau2 for all clients",
                field="methods.tau2",
                hint=f"give one number, 'calibrated', {instead}",
            )
        if method.distorts is not None and method.distorts.multiplies:
            raise ConfigError(
                f"the protocol adds its residual noise, {method.distortion!r} would multiply",
                field="methods.distortion",
                hint=f"use distortion = 'additive', {instead}",
            )
